"""The FlashAttention-4 kernel on a GPU, called through the kernel ABI, against a float64 reference."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_interop.kernels import fa4  # noqa: E402

HAS_CUDA = torch.cuda.is_available()
MISSING = fa4.unsupported_reasons(torch.cuda.get_device_capability(), "bfloat16", 192, 128) if HAS_CUDA else ["no CUDA device"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))]
TAIL, NO_KEY = 1, 2
KINDS = [((192, 128), "bfloat16"), ((192, 128), "float16"), *((dims, "bfloat16") for dims in ((128, 128), (96, 64), (64, 64), (256, 256)))]
MAX_ERROR = {"bfloat16": 5e-3, "float16": 1e-3}  # of out, relative to its norm


@dataclass(frozen=True)
class Case:
    """One ragged problem; ``tail`` rows lie behind the last sequence in q and out, and in k and v."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    causal: bool = True
    heads: int = 3
    dims: tuple[int, int] = (192, 128)
    dtype: str = "bfloat16"
    tail: int = 0
    scale: float | None = None
    strided: bool = True
    finish: int | None = None  # None: what a host that knows the lengths would pass

    @property
    def rows_without_key(self) -> bool:
        return any(q and (k == 0 or (self.causal and q > k)) for q, k in zip(self.lengths_q, self.lengths_k, strict=True))

    @property
    def bits(self) -> int:
        return self.finish if self.finish is not None else (TAIL if self.tail else 0) | (NO_KEY if self.rows_without_key else 0)

    @property
    def softmax_scale(self) -> float:
        return self.dims[0] ** -0.5 if self.scale is None else self.scale


@pytest.fixture(scope="module", autouse=True)
def built_at_once() -> None:
    """Compile all that is needed below side by side: each takes seconds of one core."""
    capability = torch.cuda.get_device_capability()
    kinds = [(dims, dtype, True) for dims, dtype in KINDS if not fa4.unsupported_reasons(capability, dtype, *dims)] + [((192, 128), "bfloat16", False)]
    variants = [(fa4.arch_for(capability), dtype, *dims, causal, with_lse) for dims, dtype, with_lse in kinds for causal in (True, False)]
    variants += [(fa4.arch_for(capability), "bfloat16", 192, 128, causal, True, True) for causal in (True, False)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda variant: fa4.build(*variant), variants))


def bounds(lengths: tuple[int, ...]) -> Any:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """The ABI's arguments; out and lse hold NaN, so whatever the launch leaves out shows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype, (width, width_v) = getattr(torch, case.dtype), case.dims
    rows_q, rows_k = sum(case.lengths_q) + case.tail, max(1, sum(case.lengths_k) + case.tail)

    def rows(count: int, wanted: int, before: int, after: int) -> Any:
        extra = (before, after) if case.strided else (0, 0)
        wide = torch.randn(count, case.heads, extra[0] + wanted + extra[1], generator=generator, device="cuda", dtype=torch.float32).to(dtype)
        return wide[..., extra[0] : extra[0] + wanted]

    q, k, v = rows(rows_q, width, 0, 64), rows(rows_k, width, 8, 0), rows(rows_k, width_v, 128, 0)  # v: a slice of [S, N, P + V]
    out = torch.full((rows_q, case.heads, width_v), float("nan"), device="cuda", dtype=dtype)
    lse = torch.full((case.heads, rows_q), float("nan"), device="cuda", dtype=torch.float32)
    q[sum(case.lengths_q) :] = float("nan")
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds(case.lengths_q), "cu_seqlens_k": bounds(case.lengths_k), "plan": None, "scratch": None}
    named |= {"out": out, "lse": lse, "scale": case.softmax_scale}
    return named | {"max_seqlen_q": max(case.lengths_q), "max_seqlen_k": max(case.lengths_k), "finish": case.bits}


def kernel(case: Case, with_lse: bool = True, any_scale: bool | None = None) -> Any:
    arch = fa4.arch_for(torch.cuda.get_device_capability())
    reasons = fa4.unsupported_reasons(torch.cuda.get_device_capability(), case.dtype, *case.dims)
    if reasons:
        pytest.skip("; ".join(reasons))
    return fa4.load(arch, case.dtype, *case.dims, case.causal, with_lse, case.softmax_scale < fa4.SMALLEST_SCALE if any_scale is None else any_scale)


def reference(case: Case, given: dict[str, Any]) -> tuple[Any, Any]:
    """out and lse in float64; 0 and -inf for rows without a key and for the tail."""
    q, k, v = (given[name].double() for name in "qkv")
    out = torch.zeros(*given["out"].shape, dtype=torch.float64, device="cuda")
    lse = torch.full(given["lse"].shape, -torch.inf, dtype=torch.float64, device="cuda")
    start_q = start_k = 0
    for length_q, length_k in zip(case.lengths_q, case.lengths_k, strict=True):
        at_q, at_k = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
        start_q, start_k = at_q.stop, at_k.stop
        scores = torch.einsum("tnd,snd->nts", q[at_q], k[at_k]) * case.softmax_scale
        if case.causal:
            row, column = torch.arange(length_q, device="cuda")[:, None], torch.arange(length_k, device="cuda")
            scores = scores.masked_fill(column > row + (length_k - length_q), -torch.inf)
        sums = torch.logsumexp(scores, -1)
        weights = torch.where(sums[..., None] == -torch.inf, 0.0, torch.exp(scores - sums[..., None]))
        out[at_q], lse[:, at_q] = torch.einsum("nts,snv->tnv", weights, v[at_k]), sums
    return out, lse


def check(case: Case, given: dict[str, Any], expected: tuple[Any, Any] | None = None) -> None:
    out, lse = expected or reference(case, given)
    dead = (lse == -torch.inf).transpose(0, 1)
    assert bool((given["out"][dead] == 0).all()), "a row without a key, or of the tail, is not 0"
    assert bool(torch.isfinite(given["out"]).all())
    error = torch.linalg.vector_norm(given["out"].double() - out) / torch.linalg.vector_norm(out).clamp_min(1e-30)
    assert float(error) < MAX_ERROR[case.dtype]
    if given["lse"] is not None:
        torch.testing.assert_close(given["lse"].double(), lse, rtol=1e-5, atol=3e-4)


def run_and_check(case: Case) -> None:
    given = inputs(case)
    kernel(case)(*given.values())
    check(case, given)


RAGGED = {
    "one sequence": ((300,), (300,)),
    "one token": ((1,), (1,)),
    "many": ((1, 127, 128, 129, 513, 7), (1, 127, 128, 129, 513, 7)),
    "context": ((5, 64, 200), (700, 64, 1025)),
    "q longer than k": ((200, 700, 130), (150, 100, 1)),
    "empty k first": ((130, 64, 40), (0, 64, 300)),
    "empty k in the middle": ((130, 300, 40), (140, 0, 300)),
    "empty k last": ((130, 64, 260), (140, 64, 0)),
    "empty q": ((0, 100, 0, 50, 0), (64, 100, 300, 50, 10)),
    "both empty": ((0, 100, 0, 0, 50), (0, 120, 0, 0, 60)),
    "all k empty": ((130, 5), (0, 0)),
    "more sequences than one warp scans": ((3, 0, 130, 17) * 20, (3, 5, 200, 0) * 20),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("tail", [0, 77], ids=["exact", "tail"])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged(name: str, causal: bool, tail: int) -> None:
    run_and_check(Case(*RAGGED[name], causal=causal, tail=tail))


def test_finish_bits_that_a_host_could_not_rule_out_change_nothing() -> None:
    case = Case((130, 64, 260), (140, 64, 300), tail=50)
    exact, unsure = inputs(case), inputs(replace(case, finish=TAIL | NO_KEY))
    for given in (exact, unsure):
        kernel(case)(*given.values())
    assert torch.equal(exact["out"], unsure["out"]) and torch.equal(exact["lse"], unsure["lse"])


def test_tail_is_only_touched_when_asked_for() -> None:
    case = Case((130, 64), (130, 64), tail=50, finish=0)
    given = inputs(case)
    kernel(case)(*given.values())
    assert bool(given["out"][194:].isnan().all()) and bool(given["lse"][:, 194:].isnan().all())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_rows_without_key_are_selected_not_multiplied(causal: bool) -> None:
    case = Case((40, 64), (0, 64), causal=causal)
    given = inputs(case)
    given["v"][:] = float("nan")  # the empty sequence's tile reads its neighbour's values, under weight zero
    kernel(case)(*given.values())
    assert bool((given["out"][:40] == 0).all()) and bool((given["lse"][:, :40] == -torch.inf).all())


@pytest.mark.parametrize(("dims", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_dims_and_dtypes(dims: tuple[int, int], dtype: str, causal: bool) -> None:
    run_and_check(Case((200, 0, 333, 90), (200, 50, 500, 0), causal=causal, dims=dims, dtype=dtype, tail=9))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scale", [1.0, 0.0, -0.07, 1e-3, 1e-30, 1e-42, -1.0])
def test_any_scale_is_used_as_given(scale: float, causal: bool) -> None:
    run_and_check(Case((200, 64, 300, 90), (260, 64, 100, 0), causal=causal, scale=scale, tail=5))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_library_for_any_scale_serves_ordinary_ones_too(causal: bool) -> None:
    case = Case((200, 64, 300, 90), (260, 64, 100, 0), causal=causal, tail=5)
    given = inputs(case)
    kernel(case, any_scale=True)(*given.values())
    check(case, given)


@pytest.mark.parametrize("scale", [0.0, -0.07, 1e-42])
def test_the_fast_library_refuses_a_small_scale_before_a_launch(scale: float) -> None:
    given = inputs(Case((200, 64, 300), (260, 64, 100), scale=scale, tail=5, finish=TAIL | NO_KEY))
    with pytest.raises(ValueError, match="launch: scale: got"):
        kernel(Case((1,), (1,)), any_scale=False)(*given.values())
    torch.cuda.synchronize()
    assert bool(given["out"].isnan().all()) and bool(given["lse"].isnan().all())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_without_lse(causal: bool) -> None:
    case = Case((130, 64, 260), (140, 0, 300), causal=causal, tail=50)
    given, expected = inputs(case), reference(case, inputs(case))
    given["lse"] = None
    kernel(case, with_lse=False)(*given.values())
    check(case, given, expected)


@pytest.mark.parametrize(("heads", "lengths"), [(1, (5,)), (2, (1,)), (1, (1,))])
def test_strides_along_extents_of_one_do_not_matter(heads: int, lengths: tuple[int, ...]) -> None:
    case = Case(lengths, lengths, heads=heads, strided=False)
    given = inputs(case)
    expected = reference(case, given)
    for name in ("q", "k", "v", "out"):
        array = given[name]
        odd = tuple(step if extent > 1 else 1 for extent, step in zip(array.shape, array.stride(), strict=True))
        given[name] = array.as_strided(array.shape, odd)
    kernel(case)(*given.values())
    check(case, given, expected)


def test_same_inputs_same_bits() -> None:
    case = Case((700, 64, 1500), (700, 640, 1500), heads=16)
    first, second = inputs(case), inputs(case)
    for given in (first, second):
        kernel(case)(*given.values())
    assert torch.equal(first["out"], second["out"]) and torch.equal(first["lse"], second["lse"])


def test_inputs_are_not_written() -> None:
    case = Case((130, 64, 260), (140, 0, 300), tail=50)
    given, fresh = inputs(case), inputs(case)
    kernel(case)(*given.values())
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        torch.testing.assert_close(given[name], fresh[name], rtol=0, atol=0, equal_nan=True)


def test_captured_graph_follows_lengths_on_the_device() -> None:
    """A launch can be captured, so it neither allocates nor syncs; the replay reads the lengths of then."""
    case = Case((130, 64, 260), (140, 64, 300), tail=50, finish=TAIL | NO_KEY)
    given = inputs(case)
    given["max_seqlen_q"], given["max_seqlen_k"] = len(given["q"]), len(given["k"])
    kernel(case)(*given.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(case)(*given.values())
    other = replace(case, lengths_q=(0, 400, 20), lengths_k=(140, 300, 0), tail=84)
    given["q"].copy_(inputs(replace(case, tail=50), seed=1)["q"].nan_to_num(0.5))
    given["cu_seqlens_q"].copy_(bounds(other.lengths_q))
    given["cu_seqlens_k"].copy_(bounds(other.lengths_k))
    given["out"].fill_(float("nan")), given["lse"].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check(other, given)


def test_current_stream_is_followed() -> None:
    case = Case((2000,), (2000,), heads=16)
    given, expected = inputs(case), reference(case, inputs(case))
    v, given["v"] = given["v"], torch.zeros_like(given["v"])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # were the launch on another stream, it would read the zeros
        given["v"].copy_(v)
        kernel(case)(*given.values())
        torch.cuda.current_stream().synchronize()
    check(case, given, expected)


def test_offsets_past_two_to_the_31() -> None:
    """T * N * V is above 2 ** 31 elements: the last sequence lies there, and so does the tail."""
    if HAS_CUDA and torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GB of device memory")
    far, last, tail, heads = 132_000, 100, 3_000, 128
    case = Case((far, last), (32, 100), causal=False, heads=heads, tail=tail, finish=TAIL | NO_KEY)
    generator = torch.Generator("cuda").manual_seed(0)
    dtype = torch.bfloat16
    q = torch.randn(far + last + tail, heads, 192, generator=generator, device="cuda", dtype=dtype)
    k, v = (torch.randn(132, heads, width, generator=generator, device="cuda", dtype=dtype) for width in (192, 128))
    out = torch.full((len(q), heads, 128), float("nan"), device="cuda", dtype=dtype)
    lse = torch.full((heads, len(q)), float("nan"), device="cuda")
    kernel(case)(q, k, v, bounds(case.lengths_q), bounds(case.lengths_k), None, None, out, lse, case.softmax_scale, far, 100, case.bits)
    assert bool((out[far + last :] == 0).all()) and bool((lse[:, far + last :] == -torch.inf).all())
    near = Case((last,), (100,), causal=False, heads=heads)
    for at in (slice(0, last), slice(far - last, far), slice(far, far + last)):
        keys = slice(32, 132) if at.start == far else slice(0, 32)
        part = replace(near, lengths_k=(keys.stop - keys.start,))
        check(part, {"q": q[at], "k": k[keys], "v": v[keys], "out": out[at], "lse": lse[:, at]})
