"""cuDNN's kernel on a GPU: through the kernel ABI, and through both frontends, against float64 references."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import BY_NAME, Case
from frontends import assert_right, to_jax, to_torch

torch = pytest.importorskip("torch")

import torch_side  # noqa: E402
from mla_interop.backends.base import CallShape  # noqa: E402
from mla_interop.capability import DeviceCapability  # noqa: E402
from mla_interop.dimensions import MLADimensions  # noqa: E402
from mla_interop.kernels import cudnn_graph  # noqa: E402
from mla_interop.selector_config import MLAPrefillSelectorConfig  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]  # the first launch on a machine builds the native code
TAIL, BLIND = 1, 2
WIDTH, WIDTH_V, NOPE = 192, 128, 128
MAX_ERROR = {"bfloat16": 5e-3, "float16": 1e-3}  # of out, relative to its norm

RAGGED = ((130, 130), (5, 300), (128, 1024), (700, 701), (1, 1))  # 964 rows
EMPTY_FIRST = ((0, 40), (64, 0), (130, 257), (200, 200))
EMPTY_MIDDLE = ((130, 257), (0, 3), (9, 0), (0, 0), (200, 200))
EMPTY_LAST = ((130, 257), (200, 200), (0, 40), (9, 0), (0, 0))
FEWER_KEYS = ((300, 5), (5, 300), (200, 199), (257, 129), (1000, 1), (129, 64))
ALL = {"ragged": RAGGED, "empty first": EMPTY_FIRST, "empty middle": EMPTY_MIDDLE, "empty last": EMPTY_LAST, "fewer keys": FEWER_KEYS}


@dataclass(frozen=True)
class Call:
    """One ragged problem: lengths of q and k, rows of q behind the last sequence, mask, heads and dtype."""

    lengths: tuple[tuple[int, int], ...]
    causal: bool = True
    heads: int = 3
    tail: int = 0
    dtype: str = "bfloat16"
    lse: bool = True

    @property
    def finish(self) -> int:
        blind = any(q_len and (k_len == 0 or (self.causal and q_len > k_len)) for q_len, k_len in self.lengths)
        return (TAIL if self.tail else 0) | (BLIND if blind else 0)


def to_rounded(rows: int) -> int:
    """A tail with which T is a rounded length, so that lse is written in place."""
    return cudnn_graph.closure().round_length(rows) - rows


def kernel(call: Call) -> Any:
    capability = torch.cuda.get_device_capability()
    reasons = cudnn_graph.unsupported_reasons(capability, call.dtype, WIDTH, WIDTH_V)
    if reasons:
        pytest.skip("; ".join(reasons))
    return cudnn_graph.load(call.causal, capability)


def inputs(call: Call, seed: int = 0) -> dict[str, Any]:
    """The ABI's arguments, with a prepared plan. What is written holds NaN before, and so does q's tail; V is a view; K and V end with their data."""
    kernel(call)  # skips where there is none
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, call.dtype)
    cu_q, cu_k = (np.array([0, *np.cumsum(column)], np.int32) for column in zip(*call.lengths))
    rows, keys = int(cu_q[-1]) + call.tail, int(cu_k[-1])

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    def unwritten(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.full(shape, float("nan"), device="cuda", dtype=dtype)

    q, k, v = normal(rows, call.heads, WIDTH), normal(keys, call.heads, WIDTH), normal(keys, call.heads, NOPE + WIDTH_V)[..., NOPE:]
    q[int(cu_q[-1]) :] = float("nan")
    max_q, max_k = max(q_len for q_len, _ in call.lengths), max(k_len for _, k_len in call.lengths)
    strides = tuple((x.stride(0), x.stride(1)) for x in (q, k, v))
    shape = CallShape(rows, keys, len(call.lengths), max_q, max_k, call.lse, torch.cuda.current_device(), strides)
    capability = torch.cuda.get_device_capability()
    floats = cudnn_graph.prepare(shape, call.dtype, call.heads, (WIDTH, WIDTH_V), call.causal, capability)
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor(cu_q, device="cuda"),
        "cu_seqlens_k": torch.tensor(cu_k, device="cuda"),
        "plan": None,
        "scratch": unwritten(floats),
        "out": unwritten(rows, call.heads, WIDTH_V, dtype=dtype),
        "lse": unwritten(call.heads, rows) if call.lse else None,
        "scale": WIDTH**-0.5,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
        "finish": call.finish,
    }


def check(call: Call, given: dict[str, Any]) -> None:
    """Against float64 attention; rows without a key, and those of the tail, are exact."""
    want = torch.zeros(given["out"].shape, dtype=torch.float64, device="cuda")
    want_lse = torch.full((call.heads, len(want)), -torch.inf, dtype=torch.float64, device="cuda")
    row = key = 0
    for q_len, k_len in call.lengths:
        q, k, v = (given[name][at : at + count].double() for name, at, count in (("q", row, q_len), ("k", key, k_len), ("v", key, k_len)))
        scores = torch.einsum("qnd,knd->nqk", q, k) * given["scale"]
        if call.causal:
            seen = torch.arange(k_len, device="cuda") <= torch.arange(q_len, device="cuda")[:, None] + (k_len - q_len)
            scores = scores.masked_fill(~seen, -torch.inf)
        if q_len and k_len:
            want_lse[:, row : row + q_len] = torch.logsumexp(scores, -1)
            want[row : row + q_len] = torch.einsum("nqk,knv->qnv", torch.softmax(scores, -1).nan_to_num(0.0), v)
        row, key = row + q_len, key + k_len
    got = given["out"].double()
    assert torch.isfinite(got).all()
    assert (got[torch.isinf(want_lse).T] == 0).all()
    assert (got - want).norm() <= MAX_ERROR[call.dtype] * want.norm()
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)
    if given["lse"] is not None:
        torch.testing.assert_close(given["lse"].double(), want_lse, rtol=1e-4, atol=1e-3)  # infinities must be equal


def run(call: Call, **changes: Any) -> dict[str, Any]:
    given = inputs(call) | changes
    kernel(call)(*given.values())
    check(call, given)
    return given


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("lengths", ALL.values(), ids=ALL)
@pytest.mark.parametrize("tail", ["none", "some", "to a rounded T"])
def test_out_and_lse(causal: bool, heads: int, lengths: tuple[tuple[int, int], ...], tail: str) -> None:
    rows = sum(q_len for q_len, _ in lengths)
    run(Call(lengths, causal, heads, {"none": 0, "some": 33}.get(tail, to_rounded(rows))))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", ALL.values(), ids=ALL)
def test_without_lse(causal: bool, lengths: tuple[tuple[int, int], ...]) -> None:
    run(Call(lengths, causal, tail=7, lse=False))


def test_float16() -> None:
    run(Call(RAGGED, dtype="float16"))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.3])
def test_a_plan_serves_every_scale(scale: float) -> None:
    run(Call(RAGGED))
    native = cudnn_graph._graph(torch.cuda.get_device_capability())
    plans = native.num_plans()
    run(Call(RAGGED), scale=scale)
    assert native.num_plans() == plans


@pytest.mark.parametrize("causal", [True, False])
def test_bits_for_rows_that_do_not_exist_change_nothing(causal: bool) -> None:
    plain, asked = run(Call(RAGGED, causal)), run(Call(RAGGED, causal), finish=TAIL | BLIND)
    assert torch.equal(plain["out"], asked["out"]) and torch.equal(plain["lse"], asked["lse"])


def test_a_long_sequence_and_a_crowd_of_short_ones() -> None:
    run(Call(((5000, 5000), *[(3, 3)] * 200, (77, 4000)), heads=16, tail=50))


@pytest.mark.parametrize("lengths", [((3, 3),) * 40, ((1, 0), (1, 1), (0, 0)), ((20, 33),), ((17, 300), (40, 0))], ids=str)
def test_few_rows(lengths: tuple[tuple[int, int], ...]) -> None:
    run(Call(lengths))


def test_lengths_within_one_rounding_share_a_plan_and_others_do_not() -> None:
    run(Call(((200, 200), (3, 3), (4, 4))))
    native = cudnn_graph._graph(torch.cuda.get_device_capability())
    plans = native.num_plans()
    run(Call(((222, 222), (30, 30), (0, 0), (1, 1))))
    assert native.num_plans() == plans
    run(Call(((257, 257),)))
    assert native.num_plans() == plans + 1


def test_a_launch_can_be_captured_follows_new_lengths_and_repeats_bit_for_bit() -> None:
    """Capture fails on anything that allocates, waits, or runs on another stream; a replay must follow the device's numbers and lengths."""
    call = Call(EMPTY_MIDDLE, tail=5)
    launch, given = kernel(call), inputs(call)
    launch(*given.values())
    first = [given["out"].clone(), given["lse"].clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*given.values())
    graph.replay()
    assert torch.equal(given["out"], first[0]) and torch.equal(given["lse"], first[1])
    other = Call(((100, 200), (30, 3), (9, 0), (0, 57), (200, 200)), tail=5)
    for name, column in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
        given[name].copy_(torch.tensor(np.cumsum([0, *(pair[column] for pair in other.lengths)]), device="cuda"))
    for name in ("out", "lse"):
        given[name].fill_(float("nan"))
    given["v"].mul_(2)
    graph.replay()
    check(other, given)


def test_a_plan_that_is_not_there_is_built_during_capture() -> None:
    call = Call(((411, 411), (7, 1300)), heads=5)
    launch, given = kernel(call), inputs(Call(((411, 411), (7, 7)), heads=5))
    more = inputs(call)
    torch.cuda.synchronize()
    unseen = more | {"max_seqlen_k": 60000, "scratch": torch.empty(len(more["scratch"]) + (1 << 22), device="cuda")}
    launch(*given.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*unseen.values())
    graph.replay()
    check(call, unseen)


def test_a_scratch_that_is_too_small_is_refused_before_anything_runs() -> None:
    call = Call(RAGGED)
    launch, given = kernel(call), inputs(call)
    with pytest.raises(RuntimeError, match="scratch: got .* bytes; allowed: at least"):
        launch(*(given | {"scratch": given["scratch"][:64]}).values())
    torch.cuda.synchronize()
    assert torch.isnan(given["out"]).all()


def test_it_runs_on_the_current_stream() -> None:
    call, stream = Call(RAGGED), torch.cuda.Stream()
    launch, given = kernel(call), inputs(call)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        given["v"].mul_(3)
        launch(*given.values())
    stream.synchronize()
    check(call, given)


FRONTEND_CASES = [BY_NAME[name] for name in ("every-kind", "k-empty-first", "q-empty-last", "q-longer-k-longer", "tail-of-every-kind")]


def configuration(case: Case) -> MLAPrefillSelectorConfig:
    capability = DeviceCapability(*torch.cuda.get_device_capability())
    reasons = cudnn_graph.unsupported_reasons(capability, case.dtype, *case.dims)
    if reasons:
        pytest.skip("; ".join(reasons))
    dimensions = MLADimensions.from_head_dims(*case.dims)
    return MLAPrefillSelectorConfig(dtype=case.dtype, dimensions=dimensions, num_heads=case.heads, capability=capability, is_causal=case.is_causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", FRONTEND_CASES, ids=str)
@pytest.mark.parametrize("where", ["host lengths", "device lengths"])
def test_torch_side(case: Case, causal: bool, where: str) -> None:
    case = replace(case, is_causal=causal)
    configuration(case)
    problem = case.problem()
    q, k, v = (to_torch(x, "cuda") for x in (problem.q, problem.k, problem.v))
    lengths = [problem.cu_q, problem.cu_k] if where == "host lengths" else [torch.tensor(x, device="cuda") for x in (problem.cu_q, problem.cu_k)]
    buffer = torch.full(problem.out.shape, math.nan, dtype=q.dtype, device="cuda")
    out, lse = torch_side.mla_prefill(
        q, k, v, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], is_causal=causal, return_lse=True, backend="CUDNN", padding="any", out=buffer
    )
    assert out.data_ptr() == buffer.data_ptr()
    assert_right(case, out, lse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", FRONTEND_CASES, ids=str)
def test_jax_side_inside_jit(case: Case, causal: bool) -> None:
    jax = pytest.importorskip("jax")
    import jax_side

    case = replace(case, is_causal=causal)
    problem, config = case.problem(), configuration(case)
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    q, k, v = (to_jax(x, "gpu") for x in (problem.q, problem.k, problem.v))
    metadata = jax_side.prepare_metadata(
        problem.cu_q, problem.cu_k, num_tokens_q=len(problem.q), num_tokens_k=len(problem.k), max_seqlen_q=160, max_seqlen_k=160, config=config, backend="CUDNN"
    )

    @jax.jit
    def attend(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        return jax_side.mla_prefill(q, k, v, metadata=metadata, is_causal=causal, return_lse=True, backend="CUDNN", padding="any")

    for _ in range(3):  # XLA may capture from the second run on
        out, lse = attend(q, k, v, metadata)
        assert_right(case, out, lse)
