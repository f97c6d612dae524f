"""What a call refuses before anything is launched, in the same words from every frontend."""

import enum
import math
from typing import Any

import numpy as np
import pytest

import mla_interop
from mla_interop import MLAInputError, MLAUnsupportedError
from mla_interop.backends import registry
from mla_interop.backends.registry import names
from mla_interop.exchange import TensorSpec
from mla_interop.prefill import Options, resolve


class Foreign(enum.Enum):
    FLASH_ATTN = 1
    REFERENCE = "REFERENCE"


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


Q, K, V = array(7, 3, 192), array(9, 3, 192), array(9, 3, 128)
LENGTHS = {"cu_seqlens_q": [0, 7], "cu_seqlens_k": [0, 9]}
METADATA = mla_interop.prepare_metadata([0, 7], [0, 9])
DENSE = array(1, 7, 3, 192), array(1, 9, 3, 192), array(1, 9, 3, 128)

TENSORS = {
    "heads of k": ((Q, array(9, 1, 192), V), "k: got 1 heads; allowed: q's number of heads, 3. K and V must be expanded to all heads."),
    "heads of v": ((Q, K, array(9, 2, 128)), "v: got 2 heads; allowed: q's number of heads, 3."),
    "dtype of k": ((Q, array(9, 3, 192, dtype=np.float16), V), "k: got dtype float16; allowed: q's dtype, float32."),
    "dtype of v": ((Q, K, array(9, 3, 128, dtype=np.float64)), "v: got dtype float64; allowed: q's dtype, float32."),
    "last dim of k": ((Q, array(9, 3, 128), V), "k: got last dim 128; allowed: q's last dim, 192."),
    "rows of v": ((Q, K, array(8, 3, 128)), "v: got 8 rows; allowed: k's number of rows, 9."),
    "no column in q": ((array(7, 3, 0), array(9, 3, 0), V), "q: got last dim 0; allowed: a positive head dimension."),
    "no column in v": ((Q, K, array(9, 3, 0)), "v: got last dim 0; allowed: a positive head dimension."),
    "two dimensions": ((array(7, 192), K, V), "q: got shape (7, 192); allowed: packed [tokens, heads, dim] or dense"),
    "no dimension": ((array(), K, V), "q: got shape (); allowed: packed"),
    "no dimension in k": ((Q, array(), V), "k: got shape (); allowed: packed"),
    "no dimension in v": ((Q, K, array()), "v: got shape (); allowed: packed"),
    "five dimensions": ((array(1, 1, 7, 3, 192), K, V), "q: got shape (1, 1, 7, 3, 192)"),
    "packed q, dense k": ((Q, DENSE[1], V), "k: got shape (1, 9, 3, 192); allowed: packed [tokens, heads, dim]"),
    "packed q, dense v": ((Q, K, DENSE[2]), "v: got shape (1, 9, 3, 128)"),
    "dense q, packed k": ((DENSE[0], K, V), "k, v: got shapes (9, 3, 192), (9, 3, 128); allowed: dense like q"),
    "batches differ": ((array(2, 7, 3, 192), DENSE[1], DENSE[2]), "k, v: got shapes"),
    "dense lengths differ": ((DENSE[0], DENSE[1], array(1, 8, 3, 128)), "k, v: got shapes"),
}
OPTIONS = {
    "scale NaN": ({"scale": math.nan}, "scale: got nan; allowed: a finite number, or None for D ** -0.5."),
    "scale inf": ({"scale": math.inf}, "scale: got inf; allowed: a finite number"),
    "scale beyond float32": ({"scale": -1e39}, "scale: got -1e+39; allowed: a number of float32, at most 3.403e+38"),
    "scale beyond float64": ({"scale": 10**400}, "scale: got a int beyond float64; allowed: a finite number"),
    "scale True": ({"scale": True}, "scale: got True; allowed: a finite number"),
    "scale text": ({"scale": "1.0"}, "scale: got '1.0'; allowed: a finite number"),
    "scale complex": ({"scale": 1j}, "scale: got 1j; allowed: a finite number"),
    "is_causal 1": ({"is_causal": 1}, "is_causal: got 1; allowed: True or False."),
    "is_causal None": ({"is_causal": None}, "is_causal: got None; allowed: True or False."),
    "return_lse text": ({"return_lse": "no"}, "return_lse: got 'no'; allowed: True or False."),
    "fallback text": ({"fallback": "REFERENCE"}, "fallback: got 'REFERENCE'; allowed: True or False."),
    "padding a list": ({"padding": ["any"]}, "padding: got ['any']; allowed: 'finite' or 'any'."),
    "check 1": ({"check": 1}, "check: got 1; allowed: True or False."),
    "padding unknown": ({"padding": "zeros"}, "padding: got 'zeros'; allowed: 'finite' or 'any'."),
    "metadata and lengths": ({"metadata": METADATA}, "metadata: given together with cu_seqlens or max_seqlen"),
    "lengths past q": ({"cu_seqlens_q": [0, 8]}, "num_tokens_q: got 7 tokens; allowed: at least the last cumulative length, 8."),
    "lengths past k": ({"cu_seqlens_k": [0, 10]}, "num_tokens_k: got 9 tokens; allowed: at least the last cumulative length, 10."),
    "keys' lengths alone": ({"cu_seqlens_q": None}, "cu_seqlens_q: got None with cu_seqlens_k given; allowed: both, or cu_seqlens_q alone."),
}
# vllm#22217: wrong names fell back silently.
UNKNOWN_BACKENDS = [
    "FLASHATTN",
    "flash-attn ",
    "",
    "None",
    0,
    1.5,
    True,
    Foreign.FLASH_ATTN,
    Foreign.REFERENCE,
    (),
    ("REFERENCE", "nope"),
    b"REFERENCE",
    object,
]


@pytest.mark.parametrize("name", TENSORS)
def test_arrays_that_do_not_fit(name: str) -> None:
    arrays, text = TENSORS[name]
    with pytest.raises(MLAInputError) as refusal:
        mla_interop.mla_prefill(*arrays)
    assert str(refusal.value).startswith(text)


def test_the_form_is_judged_before_the_lengths() -> None:
    """A wrong number of dimensions is said as such, not as a wrong number of tokens."""
    for arrays, text in (((Q[0], K, V), "q: got shape (3, 192)"), ((Q, K[None], V), "k: got shape (1, 9, 3, 192)"), ((Q, K, V[0]), "v: got shape (3, 128)")):
        with pytest.raises(MLAInputError) as refusal:
            mla_interop.mla_prefill(*arrays, **LENGTHS)
        assert str(refusal.value).startswith(text)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_not_allowed(name: str) -> None:
    changed, text = OPTIONS[name]
    with pytest.raises(MLAInputError) as refusal:
        mla_interop.mla_prefill(Q, K, V, **{**LENGTHS, **changed})
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize("backend", UNKNOWN_BACKENDS, ids=repr)
def test_unknown_backends_are_an_error_that_lists_the_known(backend: Any) -> None:
    for call in (lambda: mla_interop.mla_prefill(Q, K, V, backend=backend), lambda: mla_interop.mla_prefill(Q, K, V, backend=backend, fallback=True)):
        with pytest.raises(MLAInputError, match=f"backend: got .*; allowed: {', '.join(names())}"):
            call()


@pytest.mark.parametrize("backend", ["reference", "Reference", ("REFERENCE",), ["reference"], mla_interop.MLAPrefillBackendEnum.REFERENCE])
def test_names_in_any_case_members_and_sequences_are_taken(backend: Any) -> None:
    assert mla_interop.mla_prefill(Q, K, V, backend=backend).shape == (7, 3, 128)


@pytest.mark.parametrize("given", [{"cu_seqlens_q": [0, 7]}, {"metadata": METADATA}, {"max_seqlen_q": 7}, {"max_seqlen_k": 9}])
def test_lengths_with_a_dense_batch(given: dict[str, Any]) -> None:
    with pytest.raises(MLAInputError, match=r"given with a dense \[B, T, N, D\] batch"):
        mla_interop.mla_prefill(*DENSE, **given)


@pytest.mark.parametrize("maximum", ["max_seqlen_q", "max_seqlen_k"])
def test_a_maximum_without_lengths_is_checked_too(maximum: str) -> None:
    """One sequence is the default; a bound that is smaller than it is as wrong as with cu_seqlens."""
    with pytest.raises(MLAInputError, match=maximum):
        mla_interop.mla_prefill(Q, K, V, **{maximum: 3})


@pytest.mark.parametrize("metadata", [[0, 7], np.array([0, 7]), {"cu_seqlens_q": [0, 7]}])
def test_metadata_of_another_type(metadata: Any) -> None:
    with pytest.raises(MLAInputError, match="metadata: got .*; allowed: what prepare_metadata returns"):
        mla_interop.mla_prefill(Q, K, V, metadata=metadata)


def test_metadata_of_another_batch() -> None:
    with pytest.raises(MLAInputError, match="q: got 7 rows; allowed: 6, since the metadata was prepared for exactly 6"):
        mla_interop.mla_prefill(Q, K, V, metadata=mla_interop.prepare_metadata([0, 6], [0, 9]))
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got a last value of 8|q: got 7 rows"):
        mla_interop.mla_prefill(Q, K, V, metadata=mla_interop.prepare_metadata([0, 8], [0, 9]))
    with pytest.raises(MLAInputError, match="q: got 7 rows; allowed: 16, since the metadata was prepared for a buffer of 16"):
        mla_interop.mla_prefill(Q, K, V, metadata=mla_interop.prepare_metadata([0, 6], [0, 9], num_tokens_q=16))


def test_arrays_on_two_devices() -> None:
    """FlashMLA#158: mixed devices are refused, not guessed."""
    q = TensorSpec((7, 3, 192), None, "bfloat16", "cuda", 0)
    for k in (q._replace(device_index=1), q._replace(device_type="cpu")):
        with pytest.raises(MLAInputError, match=f"k: got device {k.device}; allowed: q's device, cuda:0"):
            resolve(q, k, q, Options(), 1, True)


def test_a_dtype_that_nothing_serves_says_what_each_backend_takes() -> None:
    with pytest.raises(MLAInputError, match="dtype: got 'int32'; allowed: bfloat16"):
        mla_interop.mla_prefill(*(x.astype(np.int32) for x in (Q, K, V)))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(MLAUnsupportedError) as refusal:
        mla_interop.mla_prefill(*(x.astype(ml_dtypes.float8_e4m3fn) for x in (Q, K, V)))
    text = str(refusal.value)
    assert "float8_e4m3fn" in text and all(f"  {name}: " in text for name in ("FLASH_ATTN", "FLASHINFER", "CPU_SDPA", "REFERENCE"))


@pytest.mark.parametrize("value", [3, None, "q", [[0.0]], object()])
def test_things_that_are_no_arrays(value: Any) -> None:
    for arrays, name in (((value, K, V), "q"), ((Q, value, V), "k"), ((Q, K, value), "v")):
        with pytest.raises(MLAInputError, match=f"{name}: got {type(value).__name__}; allowed: an array with __dlpack__"):
            mla_interop.mla_prefill(*arrays)


def test_the_neutral_doors_out() -> None:
    good = np.full((7, 3, 128), np.nan, np.float32)
    assert mla_interop.mla_prefill(Q, K, V, out=good) is good and not good.any()
    readonly = array(7, 3, 128)
    readonly.flags.writeable = False
    for out in (array(7, 3, 192), array(7, 3, 128, dtype=np.float16), array(7, 128, 3).swapaxes(1, 2), readonly, [1.0]):
        with pytest.raises(MLAInputError, match="out: got"):
            mla_interop.mla_prefill(Q, K, V, out=out)


def test_a_backend_object_answers_by_itself_only() -> None:
    dimensions = mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = mla_interop.MLAPrefillSelectorConfig(dimensions=dimensions, num_heads=3, device_type="cpu", dtype="float32")
    backend = mla_interop.select(config, "REFERENCE")
    metadata = backend.prepare_metadata(METADATA)
    out, lse = backend.run_prefill_context_chunk(Q, K, V, metadata)
    assert out.shape == (7, 3, 128) and lse.shape == (3, 7) and backend.run_prefill_new_tokens(Q, K, V, metadata).shape == (7, 3, 128)
    with pytest.raises(MLAInputError, match="this object is REFERENCE already"):
        backend.run_prefill_new_tokens(Q, K, V, metadata, backend="CPU_SDPA")


def test_a_large_scale_is_used_where_float64_holds_it() -> None:
    q, k, v = (np.full((1, 3, 8), 1e-20) for _ in range(3))
    _, lse = mla_interop.mla_prefill(q, k, v, scale=1e39, return_lse=True)
    np.testing.assert_allclose(lse, np.float32(8 * 1e-40 * 1e39), rtol=1e-6)


def test_numpy_arrays_that_only_numpy_can_describe() -> None:
    """A field of a packed structure has strides that are no multiples of its size, and bytes may be in the other order."""
    random = np.random.default_rng(3)
    plain = tuple(random.standard_normal(x.shape).astype(np.float32) for x in (Q, K, V))
    fields = tuple(np.zeros(x.shape, [("flag", "i1"), ("value", "f4")])["value"] for x in plain)
    for field, x in zip(fields, plain, strict=True):
        field[...] = x
    for backend in [name for name in ("CPU_SDPA", "REFERENCE") if not registry.backend_class(name).unavailable_reasons()]:
        expected = mla_interop.mla_prefill(*plain, backend=backend, return_lse=True)
        for made, right in zip(mla_interop.mla_prefill(*fields, backend=backend, return_lse=True), expected, strict=True):
            np.testing.assert_array_equal(made, right)
        with pytest.raises(MLAInputError, match="dtype: got '>f4'; allowed: bfloat16, float16, float32"):
            mla_interop.mla_prefill(*(x.astype(">f4") for x in plain), backend=backend)


def test_a_dense_batch_without_heads_into_out() -> None:
    out = array(1, 7, 0, 128)
    assert mla_interop.mla_prefill(*(x[:, :, :0] for x in DENSE), out=out) is not None
