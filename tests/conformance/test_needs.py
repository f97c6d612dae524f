"""What kernels may declare that they need (``mla_interop.kernels.needs``), served by ``torch_call.adapt``; on the CPU, in the kernel ABI."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import oracle  # noqa: E402
from cases import BY_NAME, CASES, Case  # noqa: E402
from frontends import assert_right, to_torch  # noqa: E402

from mla_interop import DeviceCapability, MLADimensions, MLAPrefillSelectorConfig, MLAUnsupportedError  # noqa: E402
from mla_interop.backends.trtllm_ragged import TRTLLMRaggedBackend  # noqa: E402
from mla_interop.kernels import needs, torch_call  # noqa: E402
from mla_interop.kernels.blackwell_packages import TRTLLM_RAGGED  # noqa: E402
from mla_interop.sequences import prepare_metadata  # noqa: E402

SMALL = [case for case in CASES if case.dtype == "bfloat16" and case.heads <= 16 and case.scale is None and len(case.lengths_q) < 13]
EMPTIES = frozenset({needs.NO_EMPTY_SEQUENCES})


@pytest.fixture(autouse=True)
def no_workspaces() -> Any:
    needs._workspaces.clear()
    yield
    needs._workspaces.clear()


def strict(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool, **given: Any) -> tuple[Any, Any]:
    """A kernel that fails on an empty sequence, and leaves NaN in every row that no sequence has."""
    assert cu_q.is_contiguous() and cu_k.is_contiguous() and cu_q.data_ptr() % 16 == cu_k.data_ptr() % 16 == 0
    assert bool((cu_q.diff() > 0).all()) and bool((cu_k.diff() > 0).all())
    out, lse = oracle.attention(*(x.float().numpy() for x in (q, k, v)), cu_q.numpy(), cu_k.numpy(), scale, is_causal)
    out[int(cu_q[-1]) :], lse[:, int(cu_q[-1]) :] = math.nan, math.nan
    made = torch.from_numpy(out).to(q.dtype)
    return (given["out"].copy_(made) if "out" in given else made), torch.from_numpy(lse.astype(np.float32))


def run(case: Case, attention: Any = strict, plan: Any = "made", finish: int = 3, **declared: Any) -> tuple[Any, Any]:
    problem = case.problem()
    launch = torch_call.adapt(attention, is_causal=case.is_causal, pad_v=False, **{"needs": EMPTIES, **declared})
    q, k, v, cu_q, cu_k = (to_torch(x) for x in (problem.q, problem.k, problem.v, problem.cu_q, problem.cu_k))
    if isinstance(plan, str):
        host = prepare_metadata(problem.cu_q, problem.cu_k).host
        assert host is not None
        plan = torch.from_numpy(needs.active_sequences(host, q.shape[0], q.shape[1]))
    out, lse = torch.full(problem.out.shape, math.nan, dtype=q.dtype), torch.full(problem.lse.shape, math.nan)
    launch(q, k[: problem.cu_k[-1]], v[: problem.cu_k[-1]], cu_q, cu_k, plan, None, out, lse, case.dims[0] ** -0.5, 300, 600, finish)
    return out, lse


@pytest.mark.parametrize("declared", [{}, {"needs": EMPTIES | {needs.OUT_BUFFER}}], ids=["allocates", "out-buffer"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_kernel_never_sees_an_empty_sequence(case: Case, declared: Any) -> None:
    """flashinfer#3047, vllm#42426: first, in the middle, last, of either kind, all of them; rows scattered back, K rows without queries skipped."""
    assert_right(case, *run(case, **declared))


@pytest.mark.parametrize("name", ["q-empty-first", "k-empty-middle", "both-empty-middle", "every-kind"])
def test_without_the_need_the_kernel_fails(name: str) -> None:
    """The kernel of these tests does see what it is given."""
    with pytest.raises(AssertionError):
        run(BY_NAME[name], needs=frozenset())


def test_no_kernel_runs_where_every_sequence_is_empty() -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError

    assert_right(BY_NAME["all-k-empty"], *run(BY_NAME["all-k-empty"], never))


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "packed"),
    [
        ((5, 6), (7, 8), ""),
        ((5, 0, 6, 0), (7, 0, 8, 0), ""),  # a batch padded with empty sequences costs no copy
        ((5, 6, 3), (7, 8, 0), ""),
        ((5, 6, 0), (7, 8, 3), ""),
        ((5, 3, 6), (7, 0, 8), "q"),
        ((5, 0, 6), (7, 3, 8), "kv"),
        ((3, 5, 0, 6), (0, 7, 3, 8), "qkv"),
    ],
)
def test_rows_are_moved_only_where_there_are_gaps(lengths_q: Any, lengths_k: Any, packed: str) -> None:
    case = Case("gaps", lengths_q, lengths_k)
    given = []

    def recording(*arguments: Any) -> Any:
        given.extend(x.data_ptr() for x in arguments[:3])
        return strict(*arguments)

    problem = case.problem()
    launch = torch_call.adapt(recording, is_causal=True, pad_v=False, needs=EMPTIES)
    q, k, v, cu_q, cu_k = (to_torch(x) for x in (problem.q, problem.k, problem.v, problem.cu_q, problem.cu_k))
    host = prepare_metadata(problem.cu_q, problem.cu_k).host
    assert host is not None
    plan = torch.from_numpy(needs.active_sequences(host, 0, 0))
    out, lse = torch.full(problem.out.shape, math.nan, dtype=q.dtype), torch.full(problem.lse.shape, math.nan)
    launch(q, k, v, cu_q, cu_k, plan, None, out, lse, 192**-0.5, 300, 600, 3)
    assert_right(case, out, lse)
    assert "".join(name for name, x, pointer in zip("qkv", (q, k, v), given, strict=True) if x.data_ptr() != pointer) == packed


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 8, 29])
def test_the_size_of_a_work_list_says_what_a_launch_must_know(batch: int) -> None:
    """Every number of empty sequences and every kind of gap; nothing is read back from the device for it."""
    random = np.random.default_rng(batch)
    for _ in range(60):
        lengths = [random.integers(0, 3, batch) * random.integers(0, 2, batch) for _ in "qk"]
        metadata = prepare_metadata(*(np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in lengths))
        assert metadata.host is not None
        plan = torch.from_numpy(needs.active_sequences(metadata.host, 0, 0))
        active = needs.ActiveSequences.read(plan, torch.zeros(batch + 1, dtype=torch.int32))
        kept = [(int(length_q), int(length_k)) for length_q, length_k in zip(*lengths, strict=True) if length_q and length_k]
        assert list(zip(active.cu_q.diff().tolist(), active.cu_k.diff().tolist(), strict=True)) == kept
        assert len(active) == len(kept) and active.cu_q[0] == active.cu_k[0] == 0
        assert active.gaps == tuple(first.tolist() != cu[:-1].tolist() for first, cu in ((active.first_q, active.cu_q), (active.first_k, active.cu_k)))


@pytest.mark.parametrize("plan", [None, torch.zeros(16, dtype=torch.uint8)], ids=["none", "of-another-batch"])
def test_a_launch_without_its_work_list_is_refused(plan: Any) -> None:
    with pytest.raises(MLAUnsupportedError, match="empty sequences"):
        run(BY_NAME["every-kind"], plan=plan)


def test_traced_lengths_are_refused_with_what_to_do() -> None:
    (reason,) = needs.reasons(EMPTIES, traced=True)
    assert "device only" in reason and "config=" in reason
    assert not needs.reasons(EMPTIES, traced=False) and not needs.reasons(frozenset({needs.ZEROED_OUT}), traced=True)


def test_a_need_that_nobody_serves_is_an_error() -> None:
    with pytest.raises(ValueError, match="got packed_q; allowed: no_empty_sequences"):
        torch_call.adapt(strict, is_causal=True, pad_v=False, needs=frozenset({"packed_q"}))


def test_out_is_zeroed_where_that_was_declared_and_nowhere_else() -> None:
    """flashinfer#2409: rows that the kernel leaves alone hold 0, not what was there."""
    seen = []

    def looks(q: Any, *arguments: Any, out: Any) -> Any:
        seen.append((bool((out == 0).all()), bool(out.isnan().all())))
        return strict(q, *arguments, out=out)

    for declared in ({needs.OUT_BUFFER}, {needs.OUT_BUFFER, needs.ZEROED_OUT}):
        assert_right(BY_NAME["16-heads"], *run(BY_NAME["16-heads"], looks, plan=None, needs=frozenset(declared)))
    assert seen == [(False, True), (True, False)]


def test_a_workspace_is_filled_when_it_is_made_or_grows_and_never_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#31607: zeroing it in every call was a performance regression. vllm#48428: a fixed size overflows."""
    fills, zeros, sizes, pointers = [], torch.zeros, [], []
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: fills.append(shape) or zeros(*shape, **options))

    def counts(*arguments: Any, workspace: Any) -> Any:
        assert workspace.dtype == torch.uint8 and not workspace[: 1 << 20].any()
        sizes.append(workspace.numel())
        pointers.append(workspace.data_ptr())
        return strict(*arguments)

    declared = frozenset({needs.ZEROED_WORKSPACE})
    for size in (1 << 20, 1 << 20, 5 << 20, 33 << 20, 33 << 20, 1 << 20):
        run(BY_NAME["16-heads"], counts, plan=None, needs=declared, workspace_bytes=lambda num_seqs, heads, max_q, size=size: size)
    assert len(fills) == 2 and sizes == [32 << 20] * 3 + [64 << 20] * 3 and len(set(pointers)) == 2


def test_a_workspace_is_sized_by_what_the_kernel_sees() -> None:
    asked = []
    case = BY_NAME["every-kind"]  # six sequences, three of them empty
    declared = EMPTIES | {needs.ZEROED_WORKSPACE}
    run(case, lambda *arguments, workspace: strict(*arguments), needs=declared, workspace_bytes=lambda *sizes: asked.append(sizes) or 1)
    assert asked == [(3, case.heads, 300)]


@pytest.mark.parametrize("in_use", [True, False])
def test_preparing_metadata_makes_room_where_torch_uses_a_gpu(monkeypatch: pytest.MonkeyPatch, in_use: bool) -> None:
    """vllm#42112: allocated by the first request, after the memory was given away. A process without a GPU context gets none by it."""
    made = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(needs, "zeroed_workspace", lambda device, size: made.append((device, size)))
    config = MLAPrefillSelectorConfig(dimensions=MLADimensions.from_head_dims(192, 128), num_heads=16, capability=DeviceCapability(10, 0))
    backend = TRTLLMRaggedBackend(config, TRTLLM_RAGGED.kernel("TRTLLM_RAGGED", config))
    prepared = backend.prepare_metadata(prepare_metadata([0, 700, 700, 1000], [0, 700, 900, 1200]))
    assert prepared.bounds.backend == "TRTLLM_RAGGED"
    assert made == ([(torch.device("cuda", 3), TRTLLM_RAGGED.workspace_bytes(3, 16, 700))] if in_use else [])
