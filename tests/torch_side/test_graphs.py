"""Lengths that change in place, and what a CUDA graph must not contain. Captures are pretended here; tests/gpu has real ones."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import frontends  # noqa: E402
from cases import BY_NAME  # noqa: E402

import torch_side  # noqa: E402
from mla_interop import MLAInputError, MLAUnsupportedError  # noqa: E402
from torch_side import launch  # noqa: E402

T, S = 12, 17


def arrays(seed: int = 0) -> tuple[Any, Any, Any]:
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, 3, d, generator=make) for n, d in ((T, 192), (S, 192), (S, 128)))


def changing(cu_q: Any, cu_k: Any = None, **options: Any) -> Any:
    return torch_side.prepare_metadata(cu_q, cu_k, **{"num_tokens_q": T, "num_tokens_k": S, "device": "cpu", "changing": True, **options})


BATCHES = [([0, 3, 9], [0, 8, 17]), ([0, 0, 12], [0, 0, 3]), ([0, 5, 5], [0, 0, 9]), ([0, 12], [0, 17])]


def test_new_lengths_in_place_are_used_by_the_calls_that_were_prepared_before() -> None:
    metadata = changing(*BATCHES[0])
    pointers = metadata.cu_seqlens_q.data_ptr(), metadata.cu_seqlens_k.data_ptr()
    entries = 0
    for seed, lengths in enumerate([BATCHES[0], *BATCHES]):
        assert torch_side.update_metadata(metadata, *lengths) is metadata
        q, k, v = arrays(seed)
        made = torch_side.mla_prefill(q, k, v, metadata=metadata, return_lse=True)
        expected = torch_side.mla_prefill(q, k, v, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
        assert entries in (0, len(metadata._memo)), "a call with other lengths was prepared anew"
        entries = len(metadata._memo)
    assert pointers == (metadata.cu_seqlens_q.data_ptr(), metadata.cu_seqlens_k.data_ptr()) and metadata.host is None


def test_every_kind_of_sequence_after_an_update_is_the_oracles() -> None:
    case = BY_NAME["tail-of-every-kind"]
    problem = case.problem()
    q, k, v = (frontends.to_torch(x, "cpu") for x in (problem.q, problem.k, problem.v))
    full = np.minimum(np.arange(len(problem.cu_q)) * 5, len(q)).astype(np.int32)
    metadata = torch_side.prepare_metadata(full, full, num_tokens_q=len(q), num_tokens_k=len(k), device="cpu", changing=True)
    torch_side.mla_prefill(q, k, v, metadata=metadata, padding="any")
    torch_side.update_metadata(metadata, torch.from_numpy(problem.cu_q.copy()), problem.cu_k)
    frontends.assert_right(case, *torch_side.mla_prefill(q, k, v, metadata=metadata, padding="any", return_lse=True))


def test_the_callers_tensors_are_not_written() -> None:
    given = torch.tensor([0, 3, 9], dtype=torch.int32)
    metadata = changing(given, num_tokens_k=T)
    torch_side.update_metadata(metadata, [0, 1, 2])
    assert given.tolist() == [0, 3, 9] and metadata.cu_seqlens_k is metadata.cu_seqlens_q and metadata.cu_seqlens_q.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": None}, "device: got None with changing=True"),
        ({"num_tokens_q": None}, "num_tokens_q: got None with changing=True"),
        ({"num_tokens_k": None}, "num_tokens_k: got None with changing=True"),
    ],
)
def test_changing_needs_a_bucket_and_a_device(options: Any, words: str) -> None:
    with pytest.raises(MLAInputError, match=words):
        changing([0, 3, 9], [0, 8, 17], **options)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (([0, 3, 13], [0, 8, 17]), "num_tokens_q: got 12 tokens; allowed: at least the last cumulative length, 13"),
        (([0, 3, 9], [0, 8, 18]), "num_tokens_k: got 17 tokens"),
        (([0, 3, 2], [0, 8, 17]), "cu_seqlens_q: got 3 followed by 2"),
        (([0, 1, 2, 3], [0, 8, 17]), r"cu_seqlens_q: got shape \(4,\); allowed: at most \[3\]"),
        (([0, 3, 9], None), "cu_seqlens_k: got None; allowed: lengths"),
        (([0, 9, 9], [0, 8, 17]), "max_seqlen_q: got 8; allowed: at least the longest sequence, 9"),
    ],
)
def test_lengths_that_do_not_fit_change_nothing(lengths: Any, words: str) -> None:
    metadata = changing([0, 3, 9], [0, 8, 17], max_seqlen_q=8)
    with pytest.raises(MLAInputError, match=words):
        torch_side.update_metadata(metadata, *lengths)
    assert metadata.cu_seqlens_q.tolist() == [0, 3, 9] and metadata.cu_seqlens_k.tolist() == [0, 8, 17]


def test_only_metadata_that_was_made_for_it_is_updated() -> None:
    for metadata in (torch_side.prepare_metadata([0, 3]), torch_side.prepare_metadata([0, 3], num_tokens_q=T, device="cpu")):
        with pytest.raises(MLAInputError, match="metadata: got lengths that calls may depend on"):
            torch_side.update_metadata(metadata, [0, 2])
    with pytest.raises(MLAInputError, match="cu_seqlens_k: got lengths of their own; allowed: None"):
        torch_side.update_metadata(changing([0, 3], num_tokens_k=T), [0, 2], [0, 3])


def test_a_captured_stream_gets_no_first_call_and_no_kernel_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between a call and a launch during a capture, with the stream's state pretended."""
    monkeypatch.setattr("mla_interop.kernels.torch_op.at_hand", lambda: False)
    q, k, v = arrays()
    metadata = changing(*BATCHES[0])
    torch_side.mla_prefill(q, k, v, metadata=metadata)
    (key, (prepared, lengths)), *_ = [item for item in metadata._memo.items() if isinstance(item[1], tuple) and isinstance(item[1][0], launch.Prepared)]
    launched = []
    fake = prepared._replace(launch=lambda *arguments: launched.append(arguments), no_capture="CUDNN.graph.sm_90")
    metadata._memo[key] = fake, lengths
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch_side.mla_prefill(q, k, v, metadata=metadata)
    assert len(launched) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MLAUnsupportedError, match="CUDA graph: kernel CUDNN.graph.sm_90 cannot be captured; allowed: .*FLASH_ATTN"):
        torch_side.mla_prefill(q, k, v, metadata=metadata)
    assert len(launched) == 1, "nothing may be launched"
    metadata._memo[key] = fake._replace(no_capture=""), lengths
    torch_side.mla_prefill(q, k, v, metadata=metadata)
    assert len(launched) == 2

    class OnGPU:
        is_cuda = True

    with pytest.raises(MLAUnsupportedError, match="the first call with this metadata.*Call it once outside of the capture"):
        launch.refuse_first_in_capture(OnGPU())  # pyright: ignore[reportArgumentType]


def test_lengths_on_the_device_share_what_was_prepared_whichever_metadata_brings_them() -> None:
    """So a capture may be the first call of a metadata object, if another one with the same bounds was used before."""
    q, k, v = arrays()
    torch_side.mla_prefill(q, k, v, metadata=changing(*BATCHES[0]))
    known = len(launch._shared)
    made = torch_side.mla_prefill(q, k, v, metadata=changing(*BATCHES[2]))
    assert len(launch._shared) == known
    assert torch.equal(made, torch_side.mla_prefill(q, k, v, cu_seqlens_q=BATCHES[2][0], cu_seqlens_k=BATCHES[2][1]))


def test_a_work_list_is_copied_and_must_keep_its_size() -> None:
    """FlashInfer's: same bytes as a plan made for the new lengths."""

    class Planner:
        def prepare_metadata(self, metadata: Any) -> Any:
            return metadata.with_arrays(metadata.cu_seqlens_q, metadata.cu_seqlens_k, np.full(size, metadata.host.total_q, np.uint8))

    size = 4
    metadata = changing(*BATCHES[0])
    metadata = metadata.with_arrays(metadata.cu_seqlens_q, metadata.cu_seqlens_k, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(MLAUnsupportedError, match="this work list was not made by prepare_metadata"):
        torch_side.update_metadata(metadata, *BATCHES[1])
    metadata.remember("backend that plans", Planner)
    torch_side.update_metadata(metadata, *BATCHES[1])
    assert metadata.plan.tolist() == [12] * 4 and metadata.cu_seqlens_q.tolist() == BATCHES[1][0]
    size = 5
    with pytest.raises(MLAUnsupportedError, match="new work list has 5 bytes and the old one 4; capture the graph anew"):
        torch_side.update_metadata(metadata, *BATCHES[2])
    assert metadata.cu_seqlens_q.tolist() == BATCHES[1][0]


def test_the_list_is_made_by_the_backends_own_method() -> None:
    """A third party's backend may have one of its own in place of ``Kernel.plan``: prepare_metadata asks that, so update_metadata must."""
    asked = []

    class Own:
        def prepare_metadata(self, metadata: Any) -> Any:
            asked.append(metadata.host.total_q)
            return metadata.with_arrays(metadata.cu_seqlens_q, metadata.cu_seqlens_k, np.full(3, metadata.host.total_q, np.uint8))

        def with_plan(self, metadata: Any) -> Any:
            return metadata

    metadata = changing(*BATCHES[0])
    metadata = metadata.with_arrays(metadata.cu_seqlens_q, metadata.cu_seqlens_k, torch.zeros(3, dtype=torch.uint8))
    metadata.remember("backend that plans", Own)
    torch_side.update_metadata(metadata, *BATCHES[1])
    assert asked == [12] and metadata.plan.tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    "given", [5, "a", {0, 3}, [[0, 3], [1]], torch._neg_view(torch.tensor([0, -3, -9], dtype=torch.int32)), changing([0, 3], [0, 8])], ids=type
)
def test_what_is_no_lengths_is_refused_in_words(given: Any) -> None:
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got"):
        torch_side.update_metadata(changing(*BATCHES[0]), given, BATCHES[0][1])
    with pytest.raises(MLAInputError, match="metadata: got int; allowed: what prepare_metadata"):
        torch_side.update_metadata(5, *BATCHES[0])  # pyright: ignore[reportArgumentType]


def test_lengths_that_were_prepared_in_inference_mode_change_outside_of_it() -> None:
    with torch.inference_mode():
        metadata = changing(*BATCHES[0])
    torch_side.update_metadata(metadata, *BATCHES[1])
    assert metadata.cu_seqlens_q.tolist() == BATCHES[1][0]
