"""What only ``torch_side`` has: modules, projections of every kind, workspaces, and a cache that is written in place."""

import importlib
import math
from typing import Any

import numpy as np
import pytest
from frontends import to_numpy, to_torch
from latents_case import DIMS, FP8, LatentCase, assert_near

import mla_interop
from mla_interop import MLAInputError, walk

torch = pytest.importorskip("torch")
torch_side = pytest.importorskip("torch_side")

from torch_side import projection  # noqa: E402

CASE = LatentCase((5, 3, 9), (70, 0, 131))
NAMES = ("q", "kv_c", "k_pe", "cache", "weight")


def side_of(frontend: str) -> Any:
    """The package of a frontend; what a process lacks is skipped."""
    pytest.importorskip(frontend)
    return importlib.import_module(f"{frontend}_side")


def arguments(case: LatentCase = CASE, workspace_rows: int = 48, **settings: Any) -> tuple[dict[str, Any], Any]:
    metadata = torch_side.prepare_context_metadata(
        case.query_lens, case.context_lens, case.arrays["table"], block_size=case.block_size, workspace_rows=workspace_rows, **settings
    )
    return {name: to_torch(case.arrays[name]) for name in NAMES}, metadata


def call(given: dict[str, Any], metadata: Any, kv_b: Any = None, **options: Any) -> Any:
    kv_b = given["weight"] if kv_b is None else kv_b
    settings = {"scale": CASE.scale, "return_lse": True, "cache": given["cache"], **options}
    return torch_side.mla_attention(given["q"], given["kv_c"], given["k_pe"], kv_b, metadata=metadata, **settings)


def linear(weight: Any, bias: bool = False) -> Any:
    made = torch.nn.Linear(weight.shape[0], weight.shape[1], bias=bias)
    made.weight.data = weight.t().contiguous()
    if bias:
        made.bias.data.zero_()
    return made


@pytest.mark.parametrize("kind", ["linear", "linear with a bias", "linear with a hook", "function", "function that returns a tuple", "strided weight"])
def test_every_kind_of_up_projection(kind: str) -> None:
    given, metadata = arguments()
    weight, seen = given["weight"], []
    kinds: dict[str, Any] = {
        "linear": linear(weight),
        "linear with a bias": linear(weight, bias=True),
        "linear with a hook": linear(weight),
        "function": lambda x: x @ weight,
        "function that returns a tuple": lambda x: (x @ weight, None),
        "strided weight": weight.t().contiguous().t(),
    }
    if "hook" in kind:
        kinds[kind].register_forward_hook(lambda *_: seen.append(kind))
    with torch.no_grad():
        assert_near(call(given, metadata, kinds[kind], dimensions=DIMS), CASE.expected())
    assert len(seen) == (metadata.bounds.num_chunks + 1 if "hook" in kind else 0), "a layer with a hook must be called"


def test_the_module_holds_or_is_given_its_projection() -> None:
    given, metadata = arguments()
    config = {
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.5, "mscale_all_dim": 1.0},
    }
    held, given_later = torch_side.MLAAttention.from_config(config, linear(given["weight"])), torch_side.MLAAttention.from_config(config)
    assert held.scale == pytest.approx(48**-0.5 * 1.87385, rel=1e-5) and len(list(held.parameters())) == 1 and "scale" in repr(held)
    with torch.inference_mode():
        first = held(given["q"], given["kv_c"], given["k_pe"], metadata=metadata, cache=given["cache"])
        second = given_later(given["q"], given["kv_c"], given["k_pe"], metadata=metadata, cache=given["cache"], kv_b_proj=given["weight"])
    assert torch.equal(first, second)
    assert_near(call(given, metadata, scale=held.scale), LatentCase(CASE.query_lens, CASE.context_lens, scale=held.scale).expected())
    with pytest.raises(MLAInputError, match="kv_b_proj: got None"):
        given_later(given["q"], given["kv_c"], given["k_pe"], metadata=metadata)


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_poisoned_workspace_of_the_size_told_beforehand(padded: bool, function: bool) -> None:
    """vllm#42112, TensorRT-LLM#13677; stale rows of an earlier chunk, sglang#22688."""
    given, metadata = arguments(num_context_rows=208 if padded else None)
    size = mla_interop.workspace_bytes(metadata, len(given["q"]), DIMS, CASE.heads, CASE.rank, itemsize=4, function=function)
    workspace = torch.full((size // 4 + 64,), math.nan).view(torch.uint8)
    out = torch.full((17, 3, 24), math.nan)
    kv_b = (lambda x: x @ given["weight"]) if function else None
    for _ in range(2):
        made = call(given, metadata, kv_b, workspace=workspace[:size], out=out, dimensions=DIMS)
        assert made[0] is out
        assert_near(made, CASE.expected())
    assert torch.isnan(workspace[size // 256 * 256 + 256 :].view(torch.float32)[-32:]).all(), "nothing past the end is written"
    with pytest.raises(MLAInputError, match=f"workspace: got .*at least {size} bytes"):
        call(given, metadata, kv_b, workspace=workspace[: size - 1], dimensions=DIMS)
    with pytest.raises(MLAInputError, match="workspace: got"):
        call(given, metadata, kv_b, workspace=workspace.view(torch.float32), dimensions=DIMS)


def test_inputs_keep_their_bits_and_results_repeat() -> None:
    given, metadata = arguments()
    before = {name: x.clone() for name, x in given.items()}
    first, second = call(given, metadata), call(given, metadata)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(torch.equal(x.nan_to_num(), before[name].nan_to_num()) for name, x in given.items())


def test_strided_inputs() -> None:
    """sglang#20598: k_pe was read with q's strides. A cache of several layers is strided too."""
    given, metadata = arguments()
    wide = torch.cat([given["kv_c"], given["k_pe"], torch.full((17, 8), math.nan)], dim=1)
    layers = torch.stack([torch.full_like(given["cache"], math.nan), given["cache"]], dim=1)
    q = torch.cat([torch.full((17, 3, 4), math.nan), given["q"]], dim=2)[..., 4:]
    strided = {**given, "kv_c": wide[:, :40], "k_pe": wide[:, 40:56], "cache": layers[:, 1], "q": q}
    assert_near(call(strided, metadata), CASE.expected())


def test_lse_is_made_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LatentCase((5, 3), (0, 0))
    given, metadata = arguments(case)
    out = call(given, metadata, return_lse=False)
    assert isinstance(out, torch.Tensor)
    assert_near((out, call(given, metadata)[1]), case.expected())


@pytest.mark.parametrize("cache_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("frontend", ["torch", "jax"])
def test_a_whole_prefill_chunk_after_chunk(frontend: str, cache_dtype: str) -> None:
    """Each step's tokens are written to the cache, and are the context of the next: the result is that of one prefill."""
    steps, block, random = ((7, 20), (16, 0), (1, 5)), 8, np.random.default_rng(5)
    lengths = [sum(step[r] for step in steps) for r in range(2)]
    scale = None if cache_dtype == "float32" else 0.02
    latents = [random.standard_normal((n, 56)).astype(np.float32) for n in lengths]
    if scale is not None:  # numbers that the cache holds exactly: new tokens attend to what they were before the cache
        latents = [((x / scale).astype(FP8).astype(np.float32) * np.float32(scale)) for x in latents]
    whole = LatentCase(tuple(lengths), (0, 0))
    whole.arrays.update(latents=latents, q=random.standard_normal(whole.arrays["q"].shape).astype(np.float32))
    expected, table = whole.expected(), np.array([[5, 1, 0, 6], [2, 7, 4, 3]])
    q, done, outs = whole.arrays["q"], [0, 0], [[], []]
    side = side_of(frontend)
    give = to_torch if frontend == "torch" else np.asarray
    cache = torch.full((9, block, 56), math.nan).to(getattr(torch, cache_dtype))
    cache = cache if frontend == "torch" else np.full((9, block, 56), math.nan, np.float32 if scale is None else FP8)
    for step in steps:
        rows = [slice(done[r], done[r] + step[r]) for r in range(2)]
        fresh = np.concatenate([latents[r][rows[r]] for r in range(2)])
        queries = np.concatenate([q[: lengths[0]][rows[0]], q[lengths[0] :][rows[1]]])
        metadata = side.prepare_context_metadata(step, done, table, block_size=block, workspace_rows=12)
        weight = give(whole.arrays["weight"])
        made = side.mla_attention(
            give(queries), give(fresh[:, :40]), give(fresh[:, 40:]), weight, metadata=metadata, cache=cache, cache_scale=scale, scale=whole.scale
        )
        for r, part in enumerate(np.split(to_numpy(made), [step[0]])):
            outs[r].append(part)
        slots = np.array([table[r, p // block] * block + p % block for r in range(2) for p in range(*rows[r].indices(99))] + [-1])
        padded = np.concatenate([fresh, np.full((1, 56), math.nan, np.float32)])
        written = side.write_latent_cache(cache, give(padded[:, :40]), give(padded[:, 40:]), give(slots), scale)
        cache = cache if frontend == "torch" else written
        done = [done[r] + step[r] for r in range(2)]
    found = np.concatenate([part for r in range(2) for part in outs[r]])
    np.testing.assert_allclose(found, expected[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("frontend", ["torch", "jax"])
def test_writing_touches_its_slots_alone(frontend: str) -> None:
    side = side_of(frontend)
    give = (lambda x: torch.from_numpy(x.copy())) if frontend == "torch" else np.asarray
    cache, rows = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5), -np.ones((4, 5), np.float32)
    for slots in ([-1, 7, -1, 2], [-1] * 4, [0, 11, 5, 6], [3, -1, -1, -1]):
        target = give(cache)
        made = side.write_latent_cache(target, give(rows[:, :3]), give(rows[:, 3:]), give(np.array(slots)))
        expected = cache.reshape(12, 5).copy()
        expected[[slot for slot in slots if slot >= 0]] = -1
        np.testing.assert_array_equal(np.asarray(target if frontend == "torch" else made).reshape(12, 5), expected)


@pytest.mark.parametrize("frontend", ["torch", "jax"])
def test_fp8_values_are_clipped(frontend: str) -> None:
    """What is out of range would be NaN."""
    side = side_of(frontend)
    give = torch.from_numpy if frontend == "torch" else np.asarray
    cache = torch.zeros(1, 2, 3).to(torch.float8_e4m3fn) if frontend == "torch" else np.zeros((1, 2, 3), FP8)
    made = side.write_latent_cache(cache, give(np.array([[1e6, -1e6, 3.0]], np.float32)), None, give(np.array([1])), 0.5)
    np.testing.assert_array_equal(to_numpy(cache if frontend == "torch" else made)[0], [[0, 0, 0], [448, -448, 6]])


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, math.nan, math.inf, True])
def test_bad_scales_are_refused(scale: Any) -> None:
    """sglang#34765."""
    given, metadata = arguments()
    with pytest.raises(MLAInputError, match="cache_scale: got"):
        call({**given, "cache": given["cache"].to(torch.float8_e4m3fn)}, metadata, cache_scale=scale)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cache": None}, "cache: got None; allowed: [blocks, 16, L + R]"),
        ({"cache": torch.zeros(30, 8, 56)}, "cache: got shape (30, 8, 56)"),
        ({"cache": torch.zeros(30, 16, 57)}, "cache: got rows of 57; allowed: L + R = 56."),
        ({"cache": torch.zeros(1, 16, 56)}, "cache: got 1 blocks; allowed: more than"),
        ({"cache_scale": 0.5}, "cache_scale: got 0.5; allowed: None, since the cache is torch.float32"),
        ({"q": torch.zeros(16, 3, 48)}, "q: got 16 rows; allowed: 17"),
        ({"q": torch.zeros(17, 3, 49), "dimensions": DIMS}, "q: got last dim 49; allowed: P + R = 48."),
        ({"q": torch.zeros(17, 3, 80)}, "kv_b: got a projection of (40, 168)"),
        ({"q": torch.zeros(1, 17, 3, 48)}, "q: got shape (1, 17, 3, 48)"),
        ({"kv_c": torch.zeros(16, 40)}, "kv_c: got shape (16, 40)"),
        ({"kv_c": torch.zeros(17, 40, dtype=torch.bfloat16)}, "kv_c: got dtype torch.bfloat16"),
        ({"k_pe": torch.zeros(17, 1, 16)}, "k_pe: got shape (17, 1, 16)"),
        ({"k_pe": None}, "cache: got rows of 56; allowed: L + R = 40."),
        ({"weight": torch.zeros(40, 167)}, "kv_b: got a weight of (40, 167)"),
        ({"weight": torch.zeros(40, 168, dtype=torch.bfloat16)}, "kv_b: got a weight of torch.bfloat16"),
        ({"weight": 7}, "kv_b: got int"),
        ({"weight": lambda x: x}, "dimensions: got None"),
        ({"q": torch.zeros(17, 3, 48, requires_grad=True)}, "q: got a tensor that requires grad in grad mode"),
        ({"q": np.zeros((17, 3, 48))}, "q: got ndarray; allowed: a torch.Tensor."),
        ({"metadata": 3}, "metadata: got int"),
        ({"dimensions": (32, 16, 24)}, "dimensions: got (32, 16, 24); allowed: MLADimensions."),
        ({"cache": torch.zeros(30, 16, 56, dtype=torch.uint8)}, "cache: got dtype torch.uint8; allowed: bfloat16, float16, float32, float64, float8_e4m3fn or"),
        ({"cache": torch.zeros(30, 16, 56, dtype=torch.complex64)}, "cache: got dtype torch.complex64; allowed: bfloat16"),
        ({"cache": torch.zeros(30, 16, 56).to_sparse()}, "cache: got layout torch.sparse_coo; allowed: a strided tensor. to_dense() makes one."),
        ({"cache": torch.zeros(30, 16, 56, requires_grad=True)}, "cache: got a tensor that requires grad"),
        ({"cache": torch.zeros(30, 16, 56).to(torch.float8_e4m3fn), "cache_scale": 10**400}, "cache_scale: got 1000"),
        (
            {"cache": torch.zeros(30, 16, 56).to(torch.float8_e4m3fn), "cache_scale": np.array([-1.0])},
            "cache_scale: got -1.0; allowed: a finite positive number.",
        ),
        ({"cache": torch.zeros(30, 16, 56).to(torch.float8_e4m3fn), "cache_scale": torch.ones(1, device="meta")}, "cache_scale: got device meta"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    given, metadata = arguments()
    given = {**given, **{name: x for name, x in change.items() if name in given}}
    options = {name: x for name, x in change.items() if name not in given and name != "metadata"}
    with pytest.raises(MLAInputError) as refusal:
        call(given, change.get("metadata", metadata), **options)
    assert str(refusal.value).startswith(text)


def test_a_function_of_the_wrong_width_is_refused() -> None:
    given, metadata = arguments()
    with pytest.raises(MLAInputError, match="kv_b: got a function that returns"):
        call(given, metadata, lambda x: x, dimensions=DIMS)


def test_what_is_on_another_device_or_no_tensor_is_refused() -> None:
    """An up-projection on another device gave a result of uninitialized memory where torch did not notice."""
    case = LatentCase((4, 2), (20, 5))
    a = {name: to_torch(x) for name, x in case.arrays.items() if name != "latents"}
    metadata = torch_side.prepare_context_metadata(case.query_lens, case.context_lens, a["table"], block_size=case.block_size)

    def run(**changed: Any) -> Any:
        b = {**a, **changed}
        return torch_side.mla_attention(b["q"], b["kv_c"], b["k_pe"], b["weight"], metadata=metadata, cache=b["cache"], dimensions=case.dims)

    for name in ("kv_c", "k_pe", "cache", "weight"):
        with pytest.raises(MLAInputError, match=f"{'kv_b' if name == 'weight' else name}: got device meta; allowed: q's device, cpu"):
            run(**{name: a[name].to("meta")})
    for function, got in ((lambda x: None, "NoneType"), (lambda x: (x @ a["weight"]).numpy(), "ndarray"), (lambda x: (), "tuple")):
        with pytest.raises(MLAInputError, match=f"kv_b: got a function that returns {got}; allowed: a torch.Tensor"):
            run(weight=function)
    with pytest.raises(MLAInputError, match="k_pe: got shape .* without kv_c; allowed: None for the context alone, or both"):
        run(kv_c=None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slot_mapping": torch.zeros(2)}, "slot_mapping: got dtype torch.float32; allowed: integers."),
        ({"slot_mapping": torch.zeros(2, dtype=torch.bool)}, "slot_mapping: got dtype torch.bool; allowed: integers."),
        ({"slot_mapping": [0, 1]}, "slot_mapping: got list; allowed: a torch.Tensor."),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32, device="meta")}, "slot_mapping: got device meta; allowed: the cache's device, cpu."),
        ({"cache": np.zeros((3, 4, 6), np.float32)}, "cache: got ndarray; allowed: a torch.Tensor."),
        ({"cache": torch.zeros(0, 4, 6)}, "cache: got shape (0, 4, 6); allowed: a cache with places for the 2 tokens."),
        ({"cache": torch.zeros(3, 4, 6, dtype=torch.uint8)}, "cache: got dtype torch.uint8; allowed: bfloat16"),
        ({"kv_c": torch.ones(2)}, "kv_c: got shape (2,); allowed: [T, L]."),
        ({"k_pe": torch.ones(2, 1, 2)}, "k_pe: got shape (2, 1, 2); allowed: [T, R]."),
        ({"kv_c": torch.ones(2, 4).to(torch.float8_e4m3fn)}, "kv_c: got dtype torch.float8_e4m3fn; allowed: bfloat16, float16, float32 or float64."),
        ({"k_pe": torch.ones(2, 2, dtype=torch.int64)}, "k_pe: got dtype torch.int64; allowed: bfloat16, float16, float32 or float64."),
        ({"k_pe": torch.ones(2, 2).to_sparse()}, "k_pe: got layout torch.sparse_coo; allowed: a strided tensor."),
        ({"slot_mapping": torch.tensor([0, 12])}, "slot_mapping: got slot 12; allowed: slots of the cache, up to 11."),
    ],
)
def test_writes_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    good = {"cache": torch.zeros(3, 4, 6), "kv_c": torch.ones(2, 4), "k_pe": torch.ones(2, 2), "slot_mapping": torch.tensor([0, 5])}
    with pytest.raises(MLAInputError) as refusal:
        torch_side.write_latent_cache(**{**good, **change})
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale": "x"}, "scale: got 'x'"),
        ({"return_lse": 1}, "return_lse: got 1; allowed: True or False."),
        ({"return_lse": None}, "return_lse: got None; allowed: True or False."),
        ({"fallback": "no"}, "fallback: got 'no'; allowed: True or False."),
        ({"backend": 3}, "backend: got 3; allowed: FLASH_ATTN"),
    ],
)
@pytest.mark.parametrize("frontend", ["torch_side", "jax_side"])
def test_options_are_refused_before_anything_is_projected(frontend: str, change: dict[str, Any], text: str) -> None:
    """The kernel's own check came after the up-projection was launched."""
    side = pytest.importorskip(frontend)
    case, projected = LatentCase((4, 2), (20, 5)), []
    give = to_torch if frontend == "torch_side" else np.asarray
    a = {name: give(x) for name, x in case.arrays.items() if name != "latents"}
    metadata = side.prepare_context_metadata(case.query_lens, case.context_lens, a["table"], block_size=case.block_size)
    options = {"metadata": metadata, "cache": a["cache"], "dimensions": case.dims, **change}
    with pytest.raises(MLAInputError) as refusal:
        side.mla_attention(a["q"], a["kv_c"], a["k_pe"], lambda x: projected.append(1), **options)
    assert str(refusal.value).startswith(text) and not projected


def test_one_chunk_pays_for_no_accumulator(monkeypatch: pytest.MonkeyPatch) -> None:
    given, metadata = arguments(LatentCase((5, 9), (70, 131)), workspace_rows=4096)
    shapes = mla_interop.workspace.workspace_shapes(metadata, 14, DIMS, 3, 40)
    assert metadata.bounds.num_chunks == 1 and math.prod(shapes.carry) == 0
    monkeypatch.setattr(walk, "_nothing", None)
    call(given, metadata)


def test_metadata_of_the_core_is_moved_once() -> None:
    given, _ = arguments()
    metadata = mla_interop.prepare_context_metadata(CASE.query_lens, CASE.context_lens, CASE.arrays["table"], block_size=16, workspace_rows=48)
    assert_near(call(given, metadata), CASE.expected())
    assert_near(call(given, metadata), CASE.expected())
    assert len([key for key in metadata.new._memo if key[0] == "context rows"]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [0, 8, 3])
def test_products_in_place_are_the_projection(dtype: Any, rope: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, done here: k_nope and v go to their places in a poisoned buffer, a few rows at a time."""
    monkeypatch.setattr(projection, "ROWS_AT_A_TIME", 4)
    dims = mla_interop.MLADimensions(qk_nope_head_dim=16, qk_rope_head_dim=rope, v_head_dim=8)
    make = torch.Generator().manual_seed(rope)
    latents, weight = torch.randn(11, 24 + rope, generator=make).to(dtype), torch.randn(24, 3 * 24, generator=make).to(dtype)
    buffer = torch.full((13, 3, 24 + rope), math.nan, dtype=dtype)
    k, v = projection._in_place(projection.weight_of(weight, 3), dims, buffer, latents[:, :24], latents[:, 24:])
    plain_k, plain_v = walk.project(weight, dims, latents[:, :24], latents[:, 24:])
    assert k.data_ptr() == buffer.data_ptr() and torch.isnan(buffer[11:]).all()
    torch.testing.assert_close(k, plain_k)
    torch.testing.assert_close(v, plain_v)


@pytest.mark.gpu
def test_products_in_place_copy_nothing_on_a_gpu() -> None:
    """torch.bmm makes a contiguous copy of an out that cuBLAS cannot write; the layout must be one it can."""
    dims = mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    latents = torch.randn(4096, 576, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, 16 * 256, device="cuda", dtype=torch.bfloat16)
    for kv_b in (weight, linear(weight).to("cuda", torch.bfloat16)):
        buffer = torch.empty(4096, 16, 320, device="cuda", dtype=torch.bfloat16)
        project = projection.project_weight(projection.weight_of(kv_b, 16), dims, buffer)
        project(latents[:, :512], latents[:, 512:])  # cuBLAS allocates its workspace on first use
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        k, v = project(latents[:, :512], latents[:, 512:])
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
        plain_k, plain_v = walk.project(weight, dims, latents[:, :512], latents[:, 512:])
        torch.testing.assert_close(k, plain_k, rtol=2e-2, atol=0.2)
        torch.testing.assert_close(v, plain_v, rtol=2e-2, atol=0.2)


def test_nothing_to_attend_to_needs_stated_dimensions() -> None:
    given, metadata = arguments(LatentCase((5, 3), (0, 0)))
    with pytest.raises(MLAInputError, match="dimensions: got None"):
        call({**given, "kv_c": None, "k_pe": None}, metadata, cache=None)
    out, lse = call({**given, "kv_c": None, "k_pe": None}, metadata, cache=None, dimensions=DIMS)
    assert out.shape == (8, 3, 24) and not out.any() and torch.isneginf(lse).all()
