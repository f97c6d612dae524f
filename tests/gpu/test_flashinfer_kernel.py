"""FlashInfer's kernels of both generations on a GPU, called through the kernel ABI, against a float64 reference."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mla_interop.kernels import flashinfer_module  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]  # the first launch on a machine may build a module
TAIL, BLIND = 1, 2
NOPE = 128
MAX_ERROR = {"bfloat16": 5e-3, "float16": 1e-3}  # of out, relative to its norm

RAGGED = ((130, 130), (5, 300), (128, 1024), (700, 701), (1, 1))
EMPTY = ((0, 40), (64, 0), (130, 257), (0, 0), (0, 3), (200, 200), (9, 0), (0, 0))
FEWER_KEYS = ((300, 5), (5, 300), (200, 199), (257, 129), (1000, 1), (129, 64))


@dataclass(frozen=True)
class Case:
    """One ragged problem: lengths of q and k, and how many rows of q and k lie behind the last sequence."""

    lengths: tuple[tuple[int, int], ...]
    generation: int = 3
    causal: bool = True
    heads: int = 3
    tail: int = 0
    dtype: str = "bfloat16"
    dims: tuple[int, int] = (192, 128)

    @property
    def finish(self) -> int:
        blind = any(q_len and (k_len == 0 or (self.causal and q_len > k_len)) for q_len, k_len in self.lengths)
        return (TAIL if self.tail else 0) | (BLIND if blind else 0)


def kernel(case: Case) -> Any:
    capability = torch.cuda.get_device_capability()
    reasons = flashinfer_module.unsupported_reasons(capability, case.dtype, *case.dims, case.generation)
    if reasons:
        pytest.skip("; ".join(reasons))
    return flashinfer_module.load(case.generation, case.dtype, *case.dims, case.causal, capability)


def inputs(case: Case, seed: int = 0, with_lse: bool = True) -> dict[str, Any]:
    """The ABI's arguments. All that is written holds NaN before, so whatever a launch leaves out shows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    cu_q, cu_k = (np.array([0, *np.cumsum(column)], np.int32) for column in zip(*case.lengths))
    rows, keys = int(cu_q[-1]) + case.tail, int(cu_k[-1]) + case.tail + 1

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    def unwritten(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.full(shape, float("nan"), device="cuda", dtype=dtype)

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = flashinfer_module.plan(case.generation, cu_q, cu_k, rows, case.heads, case.causal, num_sms)
    width, width_v = case.dims
    q = normal(rows, case.heads, width)
    q[int(cu_q[-1]) :] = float("nan")
    return {
        "q": q,
        "k": normal(keys, case.heads, width),
        "v": normal(keys, case.heads, NOPE + width_v)[..., NOPE:],
        "cu_seqlens_q": torch.tensor(cu_q, device="cuda"),
        "cu_seqlens_k": torch.tensor(cu_k, device="cuda"),
        "plan": torch.tensor(plan, device="cuda"),
        "scratch": unwritten(flashinfer_module.scratch_floats(case.generation, rows, case.heads, True)) if with_lse else None,
        "out": unwritten(rows, case.heads, width_v, dtype=dtype),
        "lse": unwritten(case.heads, rows) if with_lse else None,
        "scale": width**-0.5,
        "max_seqlen_q": max(q_len for q_len, _ in case.lengths),
        "max_seqlen_k": max(k_len for _, k_len in case.lengths),
        "finish": case.finish,
    }


def reference(case: Case, given: dict[str, Any]) -> tuple[Any, Any]:
    """Out ``[T, N, V]`` and lse ``[N, T]`` in float64; rows without a key, and those of the tail, keep 0 and -inf."""
    out = torch.zeros(given["out"].shape, dtype=torch.float64, device="cuda")
    lse = torch.full((case.heads, len(out)), -torch.inf, dtype=torch.float64, device="cuda")
    row = key = 0
    for q_len, k_len in case.lengths:
        q, k, v = given["q"][row : row + q_len].double(), given["k"][key : key + k_len].double(), given["v"][key : key + k_len].double()
        scores = torch.einsum("qnd,knd->nqk", q, k) * given["scale"]
        if case.causal:
            visible = torch.arange(k_len, device="cuda") <= torch.arange(q_len, device="cuda")[:, None] + (k_len - q_len)
            scores = scores.masked_fill(~visible, -torch.inf)
        if q_len and k_len:
            lse[:, row : row + q_len] = torch.logsumexp(scores, -1)
            out[row : row + q_len] = torch.einsum("nqk,knv->qnv", torch.softmax(scores, -1).nan_to_num(0.0), v)
        row, key = row + q_len, key + k_len
    return out, lse


def check(case: Case, given: dict[str, Any]) -> None:
    out, lse = reference(case, given)
    filled = torch.isinf(lse).T[..., None].expand_as(out)
    got = given["out"].double()
    assert torch.isfinite(got).all()
    assert (got[filled] == 0).all()
    assert (got - out).norm() <= MAX_ERROR[case.dtype] * out.norm()
    torch.testing.assert_close(got, out, rtol=0.03, atol=0.03)
    if given["lse"] is not None:
        torch.testing.assert_close(given["lse"].double(), lse, rtol=1e-4, atol=1e-3)  # infinities must be equal


@pytest.mark.parametrize("generation", [3, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("lengths", [RAGGED, EMPTY, FEWER_KEYS], ids=["ragged", "empty", "fewer keys"])
@pytest.mark.parametrize("tail", [0, 333])
def test_out_and_lse(generation: int, causal: bool, heads: int, lengths: tuple[tuple[int, int], ...], tail: int) -> None:
    case = Case(lengths, generation, causal, heads, tail)
    given = inputs(case)
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("generation", [3, 2])
def test_rows_after_tiles_without_keys(generation: int) -> None:
    """A tile that sees no key stored its LSE over the next tile's rows, or was overtaken by them: wrong in one run of dozens."""
    case = Case(((300, 5), (700, 150), (1000, 1), (5, 300)), generation, heads=16)
    run, given = kernel(case), inputs(case)
    out, lse = reference(case, given)
    for _ in range(200):
        given["lse"].fill_(float("nan"))
        run(*given.values())
        torch.testing.assert_close(given["lse"].double(), lse, rtol=1e-4, atol=1e-3)
    check(case, given)


@pytest.mark.parametrize("generation", [3, 2])
def test_float16(generation: int) -> None:
    case = Case(RAGGED, generation, dtype="float16")
    given = inputs(case)
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [2.0**-126, 1e-5, 0.01, 1.0, 30.0])
def test_generation_3_at_small_and_large_scales(dtype: str, scale: float) -> None:
    """Maxima that stay, that creep up by less than what makes it rescale, and that jump from tile to tile."""
    case = Case((*FEWER_KEYS, (300, 1500)), dtype=dtype, heads=5)
    given = inputs(case) | {"scale": scale}
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("generation", [3, 2])
@pytest.mark.parametrize("lengths", [RAGGED, EMPTY], ids=["ragged", "empty"])
@pytest.mark.parametrize("tail", [0, 77])
def test_without_lse(generation: int, lengths: tuple[tuple[int, int], ...], tail: int) -> None:
    case = Case(lengths, generation, tail=tail)
    given = inputs(case, with_lse=False)
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("generation", [3, 2])
def test_bits_for_rows_that_do_not_exist_change_nothing(generation: int) -> None:
    case = Case(RAGGED, generation)
    plain, asked = inputs(case), inputs(case) | {"finish": TAIL | BLIND}
    kernel(case)(*plain.values())
    kernel(case)(*asked.values())
    assert torch.equal(plain["out"], asked["out"]) and torch.equal(plain["lse"], asked["lse"])


def test_one_plan_of_generation_2_serves_both_masks() -> None:
    causal, full = Case(RAGGED, 2, True), Case(RAGGED, 2, False)
    given = inputs(full) | {"plan": inputs(causal)["plan"]}
    kernel(full)(*given.values())
    check(full, given)


@pytest.mark.parametrize("generation", [3, 2])
def test_a_sequence_of_many_tiles_and_a_crowd_of_short_ones(generation: int) -> None:
    case = Case(((5000, 5000), *[(3, 3)] * 200, (77, 4000)), generation, heads=16, tail=50)
    given = inputs(case)
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [RAGGED, EMPTY, ((1500, 1500), *[(3, 3)] * 200, (77, 4000))], ids=["ragged", "empty", "many tiles"])
def test_generation_3_with_other_heads(dims: tuple[int, int], causal: bool, lengths: tuple[tuple[int, int], ...]) -> None:
    """They have other tiles of keys, and those of 256 other turns of the warp groups."""
    case = Case(lengths, causal=causal, heads=16, tail=50, dims=dims)
    given = inputs(case)
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("lengths", [((1, 300), (0, 5)), ((1, 1),)], ids=str)
def test_strides_of_extents_of_1_say_nothing(lengths: tuple[tuple[int, int], ...]) -> None:
    """torch calls such a tensor contiguous; TMA refuses strides that are not of whole 16 bytes."""
    case = Case(lengths, heads=1)
    given = inputs(case)
    q, out = given["q"], given["out"]
    given["q"] = torch.as_strided(q, q.shape, (1 if len(q) == 1 else q.stride(0), 1, 1))
    given["out"] = torch.as_strided(out, out.shape, (out.stride(0), 1, 1))
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("generation", [3, 2])
@pytest.mark.parametrize("lengths", [((3, 3),) * 40, ((1, 0), (1, 1), (0, 0)), ((20, 33),), ((17, 300), (40, 0))], ids=str)
def test_few_rows_take_small_tiles(generation: int, lengths: tuple[tuple[int, int], ...]) -> None:
    case = Case(lengths, generation)
    given = inputs(case)
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("generation", [3, 2])
def test_a_launch_can_be_captured_and_repeats_bit_for_bit(generation: int) -> None:
    """Capture fails on anything that allocates, waits, or runs on another stream; a replay with other numbers must follow them."""
    case = Case(EMPTY, generation, tail=5)
    launch, given = kernel(case), inputs(case)
    launch(*given.values())
    first = [given["out"].clone(), given["lse"].clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*given.values())
    graph.replay()
    assert torch.equal(given["out"], first[0]) and torch.equal(given["lse"], first[1])
    given["v"].mul_(2)
    graph.replay()
    check(case, given)


def test_heads_share_one_schedule_when_there_are_many_tiles() -> None:
    case = Case(((1, 1),) * 4200, 3, heads=16)
    given = inputs(case)
    kernel(case)(*given.values())
    torch.testing.assert_close(given["out"], given["v"][: len(given["out"])], rtol=0, atol=0)  # one key each: out is its value
    case = Case((*((1, 1),) * 4200, (300, 700)), 3, heads=5)
    given = inputs(case)
    kernel(case)(*given.values())
    check(case, given)


@pytest.mark.parametrize("generation", [3, 2])
def test_wrong_plan_and_wrong_scale_are_refused(generation: int) -> None:
    case = Case(RAGGED, generation)
    launch, given = kernel(case), inputs(case)
    with pytest.raises(RuntimeError, match="plan: got"):
        launch(*(given | {"plan": given["plan"][:-4]}).values())
    with pytest.raises(ValueError, match="scale: got"):
        launch(*(given | {"scale": 0.0}).values())
    assert torch.isnan(given["out"]).all()
