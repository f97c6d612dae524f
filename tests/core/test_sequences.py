"""The one metadata path: what it refuses and in which words, what it converts, and what it promises not to change or read."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from mla_interop import MLADimensions, MLAInputError, MLAPrefillSelectorConfig, MLAUnsupportedError, prepare_metadata
from mla_interop.sequences import clear_tail, dense_metadata


class OnDevice:
    """An array in the memory of a GPU, as far as the host can tell; whoever looks at its values fails."""

    def __init__(self, values: Any, dtype: str = "int32") -> None:
        self._values = np.asarray(values, dtype)
        self.shape, self.dtype = self._values.shape, self._values.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("device lengths were read")

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("device lengths were read")

    item = tolist = __iter__ = __array__


class Readable(OnDevice):
    """The same, with the way back that ``check=True`` takes; torch's names."""

    def detach(self) -> "Readable":
        return self

    def cpu(self) -> np.ndarray:
        return self._values


REFUSALS = {
    "does not start at 0": ({"cu_seqlens_q": [1, 5]}, "cu_seqlens_q: got a first value of 1; allowed: 0."),
    "decreases": ({"cu_seqlens_q": [0, 5, 3, 9]}, "cu_seqlens_q: got 5 followed by 3 at index 2; allowed: values that never decrease."),
    "keys decrease": ({"cu_seqlens_q": [0, 5, 9], "cu_seqlens_k": [0, 5, 3]}, "cu_seqlens_k: got 5 followed by 3 at index 2"),
    "negative": ({"cu_seqlens_q": np.array([0, -3, 4], np.int32)}, "cu_seqlens_q: got 0 followed by -3 at index 1"),
    "past int32": ({"cu_seqlens_q": [0, 2**31]}, "cu_seqlens_q: got values from 0 to 2147483648; allowed: 0 to 2147483647: offsets are int32."),
    "past int32, unsigned": ({"cu_seqlens_q": np.array([0, 2**63], np.uint64)}, "cu_seqlens_q: got values from 0 to 9223372036854775808"),
    "wraps to a valid int32": ({"cu_seqlens_q": [0, 2**32 + 5]}, "cu_seqlens_q: got values from 0 to 4294967301"),
    "floats": ({"cu_seqlens_q": [0.0, 5.0]}, "cu_seqlens_q: got dtype float64; allowed: int32"),
    "booleans": ({"cu_seqlens_q": [False, True]}, "cu_seqlens_q: got dtype bool; allowed: int32"),
    "two dimensions": ({"cu_seqlens_q": [[0, 5]]}, "cu_seqlens_q: got shape (1, 2); allowed: one dimension, [B + 1], starting with 0."),
    "no element": ({"cu_seqlens_q": np.zeros(0, np.int32)}, "cu_seqlens_q: got shape (0,); allowed: one dimension"),
    "a scalar": ({"cu_seqlens_q": np.int32(5)}, "cu_seqlens_q: got shape ()"),
    "a Python integer": ({"cu_seqlens_q": 5}, "cu_seqlens_q: got int; allowed: an int32 array of shape [B + 1]."),
    "None": ({"cu_seqlens_q": None}, "cu_seqlens_q: got NoneType; allowed: an int32 array of shape [B + 1]."),
    "lists in a list": ({"cu_seqlens_q": [0, [1, 2]]}, "cu_seqlens_q: got a list that cannot be read ("),
    "memory without a dtype": ({"cu_seqlens_q": memoryview(b"ab")}, "cu_seqlens_q: got memoryview; allowed: an int32 array of shape [B + 1]."),
    "tokens as a text": ({"cu_seqlens_q": [0, 5], "num_tokens_q": "7"}, "num_tokens_q: got str; allowed: a Python integer on the host"),
    "tokens as a float": ({"cu_seqlens_q": [0, 5], "num_tokens_q": 7.0}, "num_tokens_q: got float; allowed: a Python integer on the host"),
    "tokens as a bool": ({"cu_seqlens_q": [0, 1], "cu_seqlens_k": [0, 1], "num_tokens_k": True}, "num_tokens_k: got bool; allowed: a Python integer"),
    "negative tokens": ({"cu_seqlens_q": OnDevice([0, 5]), "num_tokens_q": -1}, "num_tokens_q: got -1 tokens; allowed: 0 or more."),
    "check is no bool": ({"cu_seqlens_q": [0, 5], "check": 1}, "check: got 1; allowed: True or False."),
    "other number of sequences": (
        {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 5, 9]},
        "cu_seqlens_k: got shape (3,); allowed: the shape of cu_seqlens_q, (2,).",
    ),
    "too few tokens": ({"cu_seqlens_q": [0, 5], "num_tokens_q": 4}, "num_tokens_q: got 4 tokens; allowed: at least the last cumulative length, 5."),
    "too few keys": ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 9], "num_tokens_k": 8}, "num_tokens_k: got 8 tokens; allowed: at least"),
    "maximum too small": ({"cu_seqlens_q": [0, 5, 7], "max_seqlen_q": 4}, "max_seqlen_q: got 4; allowed: at least the longest sequence, 5."),
    "key maximum too small": (
        {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 9], "max_seqlen_k": 8},
        "max_seqlen_k: got 8; allowed: at least the longest sequence, 9.",
    ),
    "negative maximum": ({"cu_seqlens_q": OnDevice([0, 5]), "max_seqlen_q": -1}, "max_seqlen_q: got -1; allowed: a non-negative upper bound."),
    "a maximum that is an array": ({"cu_seqlens_q": [0, 5], "max_seqlen_q": np.array(5)}, "max_seqlen_q: got ndarray; allowed: a Python integer on the host"),
    "a maximum that is a float": ({"cu_seqlens_q": [0, 5], "max_seqlen_q": 5.0}, "max_seqlen_q: got float; allowed: a Python integer on the host"),
    "a maximum that is a bool": ({"cu_seqlens_q": [0, 1], "max_seqlen_q": True}, "max_seqlen_q: got bool; allowed: a Python integer on the host"),
    "int64 on a device": ({"cu_seqlens_q": OnDevice([0, 5], "int64")}, "cu_seqlens_q: got dtype int64 on a device; allowed: int32. Convert it before the call"),
    "two dimensions on a device": ({"cu_seqlens_q": OnDevice([[0, 5]])}, "cu_seqlens_q: got shape (1, 2); allowed: an int32 array of shape [B + 1]."),
    "device lengths that check=True finds wrong": ({"cu_seqlens_q": Readable([0, 5, 3]), "check": True}, "cu_seqlens_q: got 5 followed by 3 at index 2"),
    "device lengths past the tokens, check=True": ({"cu_seqlens_q": Readable([0, 5]), "num_tokens_q": 4, "check": True}, "num_tokens_q: got 4 tokens"),
    "device lengths above the maximum, check=True": (
        {"cu_seqlens_q": Readable([0, 5]), "max_seqlen_q": 4, "check": True},
        "max_seqlen_q: got 4; allowed: at least",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument_what_came_and_what_is_allowed(name: str) -> None:
    arguments, text = REFUSALS[name]
    with pytest.raises(MLAInputError) as refusal:
        prepare_metadata(**arguments)
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_host_integers_of_any_kind_become_int32(dtype: str) -> None:
    metadata = prepare_metadata(np.array([0, 5, 5, 100], dtype))
    assert metadata.cu_seqlens_q.dtype == np.int32 and metadata.cu_seqlens_q.tolist() == [0, 5, 5, 100]
    assert metadata.cu_seqlens_k is metadata.cu_seqlens_q


@pytest.mark.parametrize("give", [list, tuple, np.asarray, lambda x: np.asarray(x)[::1], lambda x: np.repeat(x, 2)[::2]])
def test_every_host_form_gives_the_same(give: Any) -> None:
    metadata = prepare_metadata(give([0, 3, 3, 10]))
    assert metadata.cu_seqlens_q.tolist() == [0, 3, 3, 10] and metadata.cu_seqlens_q.flags.c_contiguous


def test_a_range_is_a_batch_of_equal_lengths() -> None:
    assert prepare_metadata(range(0, 30, 10)).host.lengths_q.tolist() == [10, 10]


def test_the_largest_length_is_taken() -> None:
    assert prepare_metadata([0, 2**31 - 1]).host.total_q == 2**31 - 1


def test_metadata_does_not_change_when_the_callers_array_does() -> None:
    given = np.array([0, 5, 9], np.int32)
    metadata = prepare_metadata(given)
    given[:] = [0, 1, 2]
    assert metadata.cu_seqlens_q.tolist() == [0, 5, 9]
    with pytest.raises(ValueError, match="read-only"):
        metadata.cu_seqlens_q[1] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        metadata.bounds = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        metadata.bounds.num_seqs = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_what_follows_from_host_lengths() -> None:
    host = prepare_metadata([0, 0, 5, 12], [0, 3, 3, 20]).host
    assert host is not None
    assert (host.total_q, host.total_k, host.max_seqlen_q, host.max_seqlen_k) == (12, 20, 7, 17)
    assert (host.lengths_q.tolist(), host.lengths_k.tolist()) == ([0, 5, 7], [3, 0, 17])


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "causal", "full"),
    [
        ([3, 2], [3, 2], False, False),
        ([3, 2], [4, 2], False, False),
        ([3, 2], [2, 4], True, False),
        ([3, 2], [0, 9], True, True),
        ([0, 2], [0, 2], False, False),
        ([0, 2], [5, 2], False, False),
    ],
)
def test_which_batches_have_rows_without_a_key(lengths_q: list[int], lengths_k: list[int], causal: bool, full: bool) -> None:
    host = prepare_metadata(np.cumsum([0, *lengths_q]), np.cumsum([0, *lengths_k])).host
    assert host is not None and (host.has_empty_rows(True), host.has_empty_rows(False)) == (causal, full)


def test_bounds_are_exact_unless_a_bucket_is_stated() -> None:
    exact, bucket = prepare_metadata([0, 5, 9]).bounds, prepare_metadata([0, 5, 9], num_tokens_q=16).bounds
    assert (exact.num_seqs, exact.num_tokens_q, exact.num_tokens_k, exact.padded_q, exact.padded_k) == (2, 9, 9, False, False)
    assert (bucket.num_tokens_q, bucket.num_tokens_k, bucket.padded_q, bucket.padded_k) == (16, 16, True, True)
    unknown = prepare_metadata(OnDevice([0, 5])).bounds
    assert (unknown.num_tokens_q, unknown.padded_q, unknown.max_seqlen_q) == (None, True, None)


def test_bounds_do_not_change_with_the_lengths_inside_a_bucket() -> None:
    """They are the static part of a jitted program: were they to change, it would be compiled again."""
    stated = {"num_tokens_q": 64, "num_tokens_k": 128, "max_seqlen_q": 32, "max_seqlen_k": 64}
    made = {prepare_metadata(np.cumsum([0, *q]), np.cumsum([0, *k]), **stated).bounds for q, k in (([3, 9], [5, 9]), ([0, 32], [64, 0]), ([0, 0], [0, 0]))}
    assert len(made) == 1


@pytest.mark.parametrize("bound", [5, 105, np.int64(5)])
def test_an_upper_bound_may_be_the_truth_or_above(bound: Any) -> None:
    """flash-attention#1664."""
    assert prepare_metadata([0, 5], max_seqlen_q=bound).bounds.max_seqlen_q == bound


def test_no_sequence_at_all() -> None:
    metadata = prepare_metadata([0])
    assert metadata.host is not None and metadata.bounds.num_seqs == 0
    assert (metadata.host.total_q, metadata.host.max_seqlen_q, metadata.host.has_empty_rows(True)) == (0, 0, False)


def test_device_lengths_are_not_read_and_not_copied() -> None:
    """flash-attention#1664, flashinfer#4609: nothing of a call waits for a device."""
    given_q, given_k = OnDevice([0, 5]), OnDevice([0, 7])
    metadata = prepare_metadata(given_q, given_k, max_seqlen_q=8)
    assert metadata.cu_seqlens_q is given_q and metadata.cu_seqlens_k is given_k
    assert metadata.host is None and not metadata.has_lengths


def test_one_side_on_the_device_is_not_known() -> None:
    metadata = prepare_metadata([0, 5], OnDevice([0, 7]))
    assert metadata.host is None and metadata.bounds.num_tokens_q == 5 and metadata.bounds.num_tokens_k is None


def test_check_reads_device_lengths_back() -> None:
    given = Readable([0, 5, 9])
    metadata = prepare_metadata(given, check=True)
    assert metadata.cu_seqlens_q is given and metadata.host is not None and metadata.host.total_q == 9


def test_a_work_list_cannot_be_made_of_device_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer#4609: our own clear error before any launch, naming what to give instead."""
    monkeypatch.delenv("MLA_INTEROP_BACKEND", raising=False)
    dimensions = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = MLAPrefillSelectorConfig(dimensions=dimensions, num_heads=16, capability="9.0", traced=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MLAUnsupportedError, match="FLASHINFER.*|no backend"):
        prepare_metadata(OnDevice([0, 5]), config=config, backend="FLASHINFER")


def test_config_of_a_backend_without_work_list_changes_nothing() -> None:
    dimensions = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = MLAPrefillSelectorConfig(dimensions=dimensions, num_heads=3, device_type="cpu", dtype="float32")
    metadata = prepare_metadata([0, 5], config=config, backend="REFERENCE")
    assert metadata.plan is None and metadata.bounds.backend is None


def test_dense_metadata_is_kept_and_refuses_more_tokens_than_int32_counts() -> None:
    assert dense_metadata(3, 5, 7) is dense_metadata(3, 5, 7)
    assert dense_metadata(3, 5, 7).cu_seqlens_k.tolist() == [0, 7, 14, 21]
    with pytest.raises(MLAInputError, match="q, k: got 4096 x 1048576 tokens"):
        dense_metadata(4096, 2**20, 1)


def test_clear_tail_selects() -> None:
    values = np.full((5, 2, 3), np.nan, np.float32)
    values[:3] = 1
    cleared = clear_tail(values, np.array([0, 1, 3], np.int32))
    assert cleared[:3].tolist() == values[:3].tolist() and not cleared[3:].any() and np.isnan(values[3:]).all()


def test_arrays_whose_values_cannot_be_had() -> None:
    """Whatever a framework raises for them (sparse, meta and deleted arrays), the text is ours and names the argument."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    deleted = jax.numpy.arange(3, dtype="int32")
    deleted.delete()
    lengths = torch.arange(3, dtype=torch.int32)
    for array in (lengths.to_sparse(), lengths.to("meta"), deleted):
        with pytest.raises(MLAInputError, match=r"cu_seqlens_k: got a \w+ that cannot be read \(.*\); allowed: a list of integers"):
            prepare_metadata([0, 1, 2], array)


def test_metadata_that_was_used_can_be_copied_and_sent() -> None:
    """Calls keep kernels and device copies with it, which no pickle holds."""
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((rows, 3, dim)).astype(np.float32) for rows, dim in ((7, 24), (9, 24), (9, 16)))
    torch_side = pytest.importorskip("torch_side")
    import torch

    metadata = prepare_metadata([0, 5, 7], [0, 3, 9])
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    expected = torch_side.mla_prefill(*tensors, metadata=metadata)
    for again in (copy.deepcopy(metadata), copy.copy(metadata), pickle.loads(pickle.dumps(metadata))):
        assert again.bounds == metadata.bounds and again.host is not None
        assert torch.equal(torch_side.mla_prefill(*tensors, metadata=again), expected)


@pytest.mark.parametrize("value", [1, 0, "full", np.True_])
def test_the_mask_of_a_work_list_is_a_bool(value: Any) -> None:
    """1 == True would pass, and a text would be ignored where there is no list to make."""
    with pytest.raises(MLAInputError, match="is_causal: got .*; allowed: True, False or None"):
        prepare_metadata([0, 3], is_causal=value)
