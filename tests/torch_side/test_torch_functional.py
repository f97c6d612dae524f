"""The PyTorch frontend: gradients, out=, layouts, copies, the module, and what it shares between calls."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import frontends  # noqa: E402
import oracle  # noqa: E402
from cases import BY_NAME, offsets  # noqa: E402
from hypothesis import HealthCheck, given, settings, strategies  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop import MLAInputError  # noqa: E402

R1 = mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def arrays(tokens: int = 7, keys: int = 7, heads: int = 3, **options: Any) -> tuple[Any, Any, Any]:
    make = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(n, heads, d, generator=make).requires_grad_(options.get("grad", False)) for n, d in ((tokens, 192), (keys, 192), (keys, 128)))


@pytest.mark.parametrize("index", range(3))
def test_inputs_that_require_grad_are_refused_in_grad_mode(index: int) -> None:
    """flash-attention#1487: refuse at once, not late and with a misleading shape."""
    q, k, v = arrays()
    given_arrays = [x.requires_grad_(i == index) for i, x in enumerate((q, k, v))]
    with pytest.raises(MLAInputError, match=f"{'qkv'[index]}: got a tensor that requires grad in grad mode.*torch.no_grad"):
        torch_side.mla_prefill(*given_arrays)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
def test_they_are_served_where_no_gradient_is_wanted(mode: Any, backend: str) -> None:
    plain = torch_side.mla_prefill(*arrays(), backend=backend)
    with mode():
        made = torch_side.mla_prefill(*arrays(grad=True), backend=backend)
    assert not made.requires_grad and torch.equal(made, plain)


@pytest.mark.parametrize(("return_lse", "backend"), [(False, "CPU_SDPA"), (True, "CPU_SDPA"), (True, "REFERENCE")])
def test_a_dense_batch_is_the_packed_one(return_lse: bool, backend: str) -> None:
    q, k, v = (torch.randn(2, n, 3, d) for n, d in ((5, 192), (9, 192), (9, 128)))
    dense = torch_side.mla_prefill(q, k, v, return_lse=return_lse, backend=backend)
    packed = torch_side.mla_prefill(
        *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=[0, 5, 10], cu_seqlens_k=[0, 9, 18], return_lse=return_lse, backend=backend
    )
    if not return_lse:
        dense, packed = (dense, None), (packed, None)
    assert torch.equal(dense[0].flatten(0, 1), packed[0]) and dense[0].is_contiguous() and dense[0].shape == (2, 5, 3, 128)
    if return_lse:
        assert dense[1].shape == (2, 3, 5) and torch.equal(dense[1].transpose(0, 1).reshape(3, 10), packed[1])


def test_a_dense_transposed_batch_has_the_value_of_its_copy() -> None:
    """jax#17784, flash-attention: [B, N, T, D] from other code, seen as [B, T, N, D]."""
    q, k, v = (torch.randn(2, 3, n, d).transpose(1, 2) for n, d in ((5, 192), (9, 192), (9, 128)))
    assert torch.equal(torch_side.mla_prefill(q, k, v), torch_side.mla_prefill(*(x.contiguous() for x in (q, k, v))))


def test_strided_and_broadcast_inputs_have_the_value_of_their_copies() -> None:
    """flashinfer#311 (slices of one projection), sglang#20598 (a stride of 0 must not reach a kernel), cutlass#3453 (padded rows)."""
    fused = torch.randn(9, 3, 192 + 192 + 128)
    parts = fused.split((192, 192, 128), dim=-1)
    rows = tuple(torch.randn(18, 3, d)[::2] for d in (192, 192, 128))
    one_head = (torch.randn(9, 3, 192), torch.randn(9, 1, 192).expand(9, 3, 192), torch.randn(9, 1, 128).expand(9, 3, 128))
    odd = tuple(torch.randn(9 * 3 * d + 1)[1:].view(9, 3, d) for d in (192, 192, 128))
    columns = tuple(torch.randn(9, d, 3).transpose(1, 2) for d in (192, 192, 128))
    backwards = tuple(torch.randn(9, 3, 2 * d)[..., ::2] for d in (192, 192, 128))
    for given_arrays in (parts, rows, one_head, odd, columns, backwards):
        for backend in ("CPU_SDPA", "REFERENCE"):
            made = torch_side.mla_prefill(*given_arrays, backend=backend)
            expected = torch_side.mla_prefill(*(x.contiguous() for x in given_arrays), backend=backend)
            torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


def test_the_same_tensor_twice() -> None:
    """jax#4636: an exported capsule is single use."""
    x = torch.randn(5, 3, 192)
    first = torch_side.mla_prefill(x, x, x)
    assert torch.equal(first, torch_side.mla_prefill(x, x, x)) and torch.equal(first, torch_side.mla_prefill(x, x.clone(), x.clone()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(7, 3, 192),
        lambda: torch.empty(7, 3, 128, dtype=torch.float16),
        lambda: torch.empty(3, 7, 128).transpose(0, 1),
        lambda: torch.empty(7, 3, 256)[..., :128],
        lambda: np.empty((7, 3, 128), np.float32),
        lambda: torch.empty(7, 3, 128, device="meta"),
    ],
    ids=["last dim of q", "dtype", "transposed", "view", "numpy", "device"],
)
def test_out_that_does_not_fit(make: Any) -> None:
    with pytest.raises(MLAInputError, match=r"out: got .*; allowed: a contiguous tensor of shape \(7, 3, 128\), torch.float32, on cpu"):
        torch_side.mla_prefill(*arrays(), out=make())


def test_out_is_written_and_returned() -> None:
    out = torch.full((7, 3, 128), torch.nan)
    assert torch_side.mla_prefill(*arrays(), out=out) is out and torch.equal(out, torch_side.mla_prefill(*arrays()))
    dense = torch.full((1, 7, 3, 128), torch.nan)
    torch_side.mla_prefill(*(x[None] for x in arrays()), out=dense)
    assert torch.equal(dense[0], out)


@pytest.mark.parametrize("value", [np.zeros((7, 3, 192), np.float32), [1.0], None])
def test_only_tensors(value: Any) -> None:
    with pytest.raises(MLAInputError, match="q: got .*; allowed: a torch.Tensor. mla_interop.mla_prefill takes arrays of any framework"):
        torch_side.mla_prefill(value, *arrays()[1:])


def test_other_devices_are_refused() -> None:
    with pytest.raises(MLAInputError, match="q, k, v: got device meta; allowed: cpu or cuda"):
        torch_side.mla_prefill(*(x.to("meta") for x in arrays()))


def test_metadata_is_used_for_any_number_of_layers_and_both_masks() -> None:
    metadata = torch_side.prepare_metadata([0, 3, 7], device="cpu")
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(7, 3, d) for d in (192, 192, 128))
        for is_causal in (True, False):
            made = torch_side.mla_prefill(q, k, v, metadata=metadata, is_causal=is_causal)
            assert torch.equal(made, torch_side.mla_prefill(q, k, v, cu_seqlens_q=[0, 3, 7], is_causal=is_causal))


def test_other_shapes_with_the_same_metadata_are_not_confused() -> None:
    """vllm#29985: what is kept is kept under all that it depends on."""
    metadata = torch_side.prepare_metadata([0, 3, 7], device="cpu")
    for heads in (2, 3, 2):
        for dtype in (torch.float32, torch.bfloat16):
            for lse in (True, False):
                made = torch_side.mla_prefill(*(x.to(dtype) for x in arrays(heads=heads)), metadata=metadata, return_lse=lse)
                out = made[0] if lse else made
                assert isinstance(made, tuple) == lse and out.shape == (7, heads, 128) and out.dtype == dtype


def test_a_setting_takes_effect_in_the_next_call_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention#881, vllm#29985: what is kept for one sequence, or a dense batch, is kept under the environment too."""
    for inputs in (arrays(), tuple(x[None] for x in arrays())):
        monkeypatch.delenv("MLA_INTEROP_BACKEND", raising=False)
        torch_side.mla_prefill(*inputs)
        monkeypatch.setenv("MLA_INTEROP_BACKEND", "FLASHATTN")
        with pytest.raises(MLAInputError, match="backend: got 'FLASHATTN'"):
            torch_side.mla_prefill(*inputs)


@pytest.mark.parametrize("wrong", [{"is_causal": 1}, {"return_lse": 0}, {"scale": True}, {"scale": np.array(1.0)}, {"backend": {"REFERENCE"}}], ids=str)
def test_an_option_of_the_wrong_type_is_refused_after_the_right_one_was_kept(wrong: dict[str, Any]) -> None:
    """1 == True: a cache that was asked for the one answers for the other; and what cannot be looked up must not be a TypeError."""
    metadata = torch_side.prepare_metadata([0, 3, 7])
    torch_side.mla_prefill(*arrays(), metadata=metadata, is_causal=True, return_lse=False, scale=1.0)
    with pytest.raises(MLAInputError, match=f"{next(iter(wrong))}: got"):
        torch_side.mla_prefill(*arrays(), metadata=metadata, **{"is_causal": True, "return_lse": False, "scale": 1.0, **wrong})


def test_int32_lengths_as_cpu_tensors_are_host_lengths() -> None:
    q, k, v = arrays()
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got 5 followed by 3"):
        torch_side.mla_prefill(q, k, v, cu_seqlens_q=torch.tensor([0, 5, 3], dtype=torch.int32))
    assert torch.equal(torch_side.mla_prefill(q, k, v, cu_seqlens_q=torch.tensor([0, 5, 7])), torch_side.mla_prefill(q, k, v, cu_seqlens_q=[0, 5, 7]))


def test_the_module() -> None:
    q, k, v = arrays()
    module = torch_side.MLAPrefill(R1, scale=0.2, backend="reference")
    assert torch.equal(module(q, k, v), torch_side.mla_prefill(q, k, v, scale=0.2, backend="REFERENCE"))
    assert module(q, k, v, return_lse=True, is_causal=False)[1].shape == (3, 7)
    assert not list(module.parameters()) and not module.state_dict() and "scale=0.2" in repr(module)
    assert torch_side.MLAPrefill(R1).scale == 192**-0.5 and torch_side.MLAPrefill(R1, scale=0.0).scale == 0.0


def test_the_module_refuses_at_construction_and_other_dimensions_in_a_call() -> None:
    """radixark/miles#2047: dimensions were refused at the first request only, by the kernel."""
    with pytest.raises(MLAInputError, match="backend: got 'FLASHATTN'; allowed: FLASH_ATTN"):
        torch_side.MLAPrefill(R1, backend="FLASHATTN")
    with pytest.raises(MLAInputError, match="dimensions: got tuple; allowed: MLADimensions"):
        torch_side.MLAPrefill((128, 64, 128))  # pyright: ignore[reportArgumentType]
    with pytest.raises(MLAInputError, match="q, v: got last dims 96, 128; allowed: this module's 192, 128"):
        torch_side.MLAPrefill(R1)(torch.zeros(2, 3, 96), torch.zeros(2, 3, 96), torch.zeros(2, 3, 128))


def test_the_last_dimension_of_out_is_vs() -> None:
    """pytorch#133674: inferred from q's."""
    assert torch_side.mla_prefill(*arrays()).reshape(7, 3 * 128).shape == (7, 384)


@pytest.mark.parametrize("other", ["numpy", "jax"])
def test_the_neutral_door_takes_mixed_frameworks(other: str) -> None:
    """The type of q decides; values are those of the frontend."""
    q, k, v = arrays()
    give = np.asarray if other == "numpy" else pytest.importorskip("jax.numpy").asarray
    mixed = mla_interop.mla_prefill(q, give(k.numpy()), give(v.numpy()))
    assert isinstance(mixed, torch.Tensor) and torch.equal(mixed, torch_side.mla_prefill(q, k, v))
    turned = mla_interop.mla_prefill(give(q.numpy()), k, v)
    assert type(turned) is type(give(q.numpy())) and np.array_equal(np.asarray(turned), mixed.numpy())


class Exporter:
    """An array of a library that nobody here knows: DLPack, and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_framework_beside_every_other(dtype: str) -> None:
    """NumPy exports no bfloat16, torch makes no NumPy array of it, and an exporter of DLPack need have no shape."""
    ml_dtypes, jnp = pytest.importorskip("ml_dtypes"), pytest.importorskip("jax.numpy")
    tensors = [x.to(getattr(torch, dtype)) for x in arrays()]
    expected = torch_side.mla_prefill(*tensors).float().numpy()
    give = {
        "torch": lambda x: x,
        "numpy": lambda x: x.float().numpy().astype(np.dtype(getattr(ml_dtypes, dtype, dtype))),
        "jax": lambda x: jnp.asarray(x.float().numpy()).astype(dtype),
        "exporter": Exporter,
    }
    for first in give:
        for second in give:
            if dtype == "bfloat16" and (first, second) == ("numpy", "exporter"):
                continue  # NumPy knows no bfloat16 to import it as
            q, k, v = tensors
            made = mla_interop.mla_prefill(give[first](q), give[second](k), give["torch"](v))
            made = made.float().numpy() if isinstance(made, torch.Tensor) else np.asarray(made).astype(np.float32)
            np.testing.assert_allclose(made, expected, atol=1e-5 if dtype == "float32" else 2e-2, err_msg=f"{first} {second}")


def test_what_cannot_be_exchanged_is_said() -> None:
    q, k, v = arrays()
    with pytest.raises(MLAInputError, match="a ndarray cannot enter torch without a copy"):
        mla_interop.mla_prefill(q, k.numpy().astype(">f4"), v)
    bf16 = np.zeros((7, 3, 192), pytest.importorskip("ml_dtypes").bfloat16)
    with pytest.raises(MLAInputError, match="k: got a Exporter that cannot become a NumPy array"):
        mla_interop.mla_prefill(bf16, Exporter(k.bfloat16()), v)
    kept = []
    jax = pytest.importorskip("jax")
    jax.jit(lambda x: kept.append(mla_interop.prepare_metadata(x)) or x)(np.array([0, 7], np.int32))
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got a .*Tracer that is traced or on a device; allowed: values in CPU memory"):
        mla_interop.mla_prefill(q.numpy(), k.numpy(), v.numpy(), metadata=kept[0])


LENGTHS = strategies.lists(strategies.tuples(strategies.integers(0, 40), strategies.integers(0, 40)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(lengths=LENGTHS, is_causal=strategies.booleans(), tail=strategies.integers(0, 3), heads=strategies.integers(1, 4))
def test_any_ragged_batch_is_the_oracles(lengths: list[tuple[int, int]], is_causal: bool, tail: int, heads: int) -> None:
    cu_q, cu_k = (offsets([pair[i] for pair in lengths]) for i in range(2))
    random = np.random.default_rng(len(lengths))
    q, k, v = (random.standard_normal((cu[-1] + tail, heads, d)).astype(np.float32) for cu, d in ((cu_q, 24), (cu_k, 24), (cu_k, 16)))
    expected, expected_lse = oracle.attention(q, k, v, cu_q, cu_k, is_causal=is_causal)
    k[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan
    for backend in ("CPU_SDPA", "REFERENCE"):
        out, lse = torch_side.mla_prefill(
            *map(torch.from_numpy, (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=is_causal, return_lse=True, backend=backend
        )
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-5, atol=1e-5)


def test_the_essential_case_with_an_upper_bound_above_the_truth() -> None:
    """flash-attention#1664: an upper bound is allowed."""
    case = BY_NAME["every-kind"]
    frontends.assert_right(case, *frontends.run_torch(case.problem(), "cpu", max_seqlen_q=1000, max_seqlen_k=1000, return_lse=True))


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
def test_out_in_the_memory_of_an_input_is_refused(backend: str) -> None:
    """Whether it was right would depend on the order in which a kernel reads and writes its rows."""
    buffer = torch.randn(2, 7, 3, 128)
    q, k, v = torch.randn(7, 3, 192), torch.randn(7, 3, 192), buffer[0]
    shifted = buffer.view(-1)[384 : 384 + v.numel()].view(v.shape)
    for arrays, out, name in (((q, k, v), v, "v"), ((q, k, v), shifted, "v"), ((v, v.clone(), v.clone()), v, "q"), ((q[..., :128], v, k[..., :128]), v, "k")):
        with pytest.raises(MLAInputError, match=f"out: got memory that {name} lies in too; allowed: memory of its own"):
            torch_side.mla_prefill(*arrays, out=out, backend=backend)
        with pytest.raises(MLAInputError, match=f"out: got memory that {name} lies in too; allowed: memory of its own"):
            mla_interop.mla_prefill(*(x.numpy() for x in arrays), out=out.numpy(), backend=backend)
    expected = torch_side.mla_prefill(q, k, v, backend=backend)
    assert torch.equal(torch_side.mla_prefill(q, k, v, out=buffer[1], backend=backend), expected)  # beside v is not in it


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
def test_out_that_cannot_simply_be_written(backend: str) -> None:
    """A leaf that requires grad, which torch refuses to write or would write unseen; a view whose values have the other sign than its memory."""
    q, k, v = torch.randn(7, 3, 192), torch.randn(9, 3, 192), torch.randn(9, 3, 128)
    leaf = torch.zeros(7, 3, 128, requires_grad=True)
    with pytest.raises(MLAInputError, match="out: got a tensor that requires grad in grad mode; allowed: one that does not"):
        torch_side.mla_prefill(q, k, v, out=leaf, backend=backend)
    with torch.no_grad():
        assert torch_side.mla_prefill(q, k, v, out=leaf, backend=backend) is leaf
    with pytest.raises(MLAInputError, match="out: got a view with the negative bit; allowed: a tensor that holds its values"):
        torch_side.mla_prefill(q, k, v, out=torch._neg_view(torch.zeros(7, 3, 128)), backend=backend)
    with pytest.raises(MLAInputError, match=r"out: got .*strides \(768, 256, 2\); allowed: a contiguous tensor"):
        torch_side.mla_prefill(q, k, v, out=torch.zeros(7, 3, 256)[..., ::2], backend=backend)


def test_lengths_that_have_no_memory_any_more() -> None:
    jax = pytest.importorskip("jax")
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(np.array([0, 7], np.int32))
    q, k, v = torch.randn(7, 3, 24), torch.randn(7, 3, 24), torch.randn(7, 3, 16)
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got a .*Tracer that cannot enter torch"):
        torch_side.mla_prefill(q, k, v, cu_seqlens_q=kept[0])
