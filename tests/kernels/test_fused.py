"""The Triton kernels against the array code that says what they compute: in Triton's interpreter here, compiled on a GPU."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from frontends import waiting_refused

from mla_interop import latents, lse
from mla_interop.errors import MLAInputError

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# Triton 3.9 says on every first compilation that 3.10 will not fuse multiplication and addition by default; either is right here.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``fused(module)``: the kernels' module, and the device they run on. Interpreted ones are a copy: the choice is made on import."""
    if request.param == "cuda":
        yield lambda name: (importlib.import_module(f"mla_interop.kernels.{name}"), "cuda")
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made: list[str] = []

    def load(name: str) -> tuple[ModuleType, str]:
        spec = importlib.util.find_spec(f"mla_interop.kernels.{name}")
        assert spec is not None and spec.origin is not None and spec.loader is not None
        copy = importlib.util.spec_from_file_location(f"interpreted_{name}", spec.origin)
        assert copy is not None and copy.loader is not None
        module = importlib.util.module_from_spec(copy)
        sys.modules[copy.name] = module
        made.append(copy.name)
        copy.loader.exec_module(module)
        return module, "cpu"

    yield load
    for name in made:
        del sys.modules[name]


def states(dtype: Any, tokens: int, heads: int, v_dim: int, device: str) -> list[Any]:
    """Two partial results with rows without a key on one side (marked either way) and on both; their out is NaN."""
    make = torch.Generator().manual_seed(tokens * 1000 + v_dim)
    result = []
    for side in range(2):
        out = torch.randn(tokens, heads, v_dim, generator=make).to(dtype)
        value = 3 * torch.randn(heads, tokens, generator=make)
        for row, mark in ((side, -INF), (side + 3, INF), (5, -INF)):
            if row < tokens:
                out[row], value[:, row] = NAN, mark
        if tokens > 7:
            value[0, 7] = (500.0, -500.0)[side]
        result += [out.to(device), value.to(device)]
    return result


def strided(out: Any, value: Any, width: int) -> tuple[Any, Any]:
    """The same values as views of wider, poisoned memory; out of unit stride in its last dimension, lse token-major."""
    wide = torch.full((*out.shape[:2], width), NAN, dtype=out.dtype, device=out.device)
    wide[..., width - out.shape[2] :] = out
    return wide[..., width - out.shape[2] :], value.t().contiguous().t()


def same(got: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}[got[0].dtype]
    assert got[0].dtype == expected[0].dtype and got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].cpu(), expected[0].cpu(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1].cpu(), expected[1].cpu(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 3, 128), (5, 2, 64), (1, 5, 4), (18, 1, 300)], ids=str)
def test_merge(fused: Any, dtype: Any, shape: tuple[int, int, int]) -> None:
    module, device = fused("triton_merge")
    a, lse_a, b, lse_b = states(dtype, *shape, device)
    copies = [x.clone() for x in (a, lse_a, b, lse_b)]
    got = module.merge(a, lse_a, b, lse_b, None, None)
    same(got, lse.merge(*(x.cpu() for x in (a, lse_a, b, lse_b))))
    for row, other in ((0, b), (3, b), (1, a), (4, a)):
        if row < shape[0]:
            assert torch.equal(got[0][row], other[row]), "bit for bit"
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip((a, lse_a, b, lse_b), copies)), "operands are not written"


@pytest.mark.parametrize("sides", ["a", "b", "both"])
def test_merge_reads_unequal_strides(fused: Any, sides: str) -> None:
    """local-inference-lab/vllm#17."""
    module, device = fused("triton_merge")
    a, lse_a, b, lse_b = states(torch.bfloat16, 21, 3, 128, device)
    expected = module.merge(a, lse_a, b, lse_b, None, None)
    if sides != "b":
        a, lse_a = strided(a, lse_a, 192)
    if sides != "a":
        b, lse_b = strided(b, lse_b, 320)
    got = module.merge(a, lse_a, b, lse_b, None, None)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    last_strided = a.transpose(0, 2).contiguous().transpose(0, 2)
    got = module.merge(last_strided, lse_a, b, lse_b, None, None)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("shape", [(37, 3, 128), (40, 2, 4), (18, 1, 300)], ids=str)
def test_merge_in_place_over_a_range_of_rows(fused: Any, side: str, shape: tuple[int, int, int]) -> None:
    """local-inference-lab/vllm#468: lse aliases an operand, while several threads read it."""
    module, device = fused("triton_merge")
    operands = states(torch.float16, *shape, device)
    rows = slice(2, shape[0] - 1)
    parts = [operands[0][rows], operands[1][:, rows], operands[2][rows], operands[3][:, rows]]
    expected = module.merge(*(x.clone() for x in parts), None, None)
    whole = [x.clone() for x in operands]
    target, target_lse = parts[:2] if side == "a" else parts[2:]
    got = module.merge(*parts, target, target_lse)
    assert got[0] is target and torch.equal(target, expected[0]) and torch.equal(target_lse, expected[1])
    outside = [row for row in range(shape[0]) if not 2 <= row < shape[0] - 1]
    for written, before in zip(operands, whole):
        axis = 0 if written.dim() == 3 else 1
        index = torch.tensor(outside, device=device)
        assert torch.equal(written.index_select(axis, index).nan_to_num(), before.index_select(axis, index).nan_to_num())


def test_merge_into_another_dtype_and_of_one_array_with_itself(fused: Any) -> None:
    module, device = fused("triton_merge")
    a, lse_a, b, lse_b = states(torch.bfloat16, 9, 2, 32, device)
    out = torch.full(a.shape, NAN, dtype=torch.float32, device=device)
    got = module.merge(a, lse_a, b, lse_b, out, None)
    same(got, lse.merge(*(x.cpu() for x in (a, lse_a, b, lse_b)), out=torch.empty(a.shape)))
    same(module.merge(a, lse_a, a, lse_a, a, lse_a), lse.merge(*(x.cpu() for x in states(torch.bfloat16, 9, 2, 32, "cpu")[:2] * 2)))


def test_a_nan_of_lse_shows(fused: Any) -> None:
    module, device = fused("triton_merge")
    for side in (1, 3):
        operands = states(torch.float32, 12, 2, 8, device)
        operands[side][1, 9] = NAN
        out, merged = module.merge(*operands, None, None)
        assert merged[1, 9].isnan() and out[9, 1].isnan().all() and not out[9, 0].isnan().any()


def paged(dtype: Any, device: str, width: int = 40, block: int = 4) -> Any:
    """A cache of 11 blocks with strides of its own: inside a wider, poisoned one, every second block."""
    make = torch.Generator().manual_seed(7)
    values = (2 * torch.randn(22, block, width + 8, generator=make)).to(dtype)
    values[..., width:] = NAN
    return values.to(device)[::2, :, :width]


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("scale", [None, 0.37, "tensor"], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, E4M3], ids=str)
@pytest.mark.parametrize("tables", [False, True], ids=["slots", "tables"])
def test_gather(fused: Any, dtype: Any, scale: Any, tables: bool) -> None:
    module, device = fused("triton_latents")
    cache = paged(dtype, device)
    scale = torch.tensor([0.37], device=device) if scale == "tensor" else scale
    options: dict[str, Any] = {"block_table": None, "requests": None}
    rows = torch.tensor([0, 43, 5, -1, 17, 17, 30, 2, -1], dtype=torch.int64, device=device)
    if tables:
        table = torch.tensor([[3, 9, -7], [10, 0, 1], [2, -7, -7]], dtype=torch.int32, device=device)
        rows = torch.tensor([7, 0, 3, -1, 11, 4, 2, 0, 1], dtype=torch.int32, device=device)
        options = {"block_table": table, "requests": torch.tensor([0, 0, 2, 0, 1, 1, 1, 2, 0], dtype=torch.int32, device=device)}
    result = torch.bfloat16 if dtype == E4M3 else dtype
    got = module.gather(cache, rows, options["block_table"], options["requests"], scale, result, None)
    there = {name: None if value is None else value.cpu() for name, value in options.items()}
    on_cpu = scale.cpu() if isinstance(scale, torch.Tensor) else scale
    expected = [latents.gather(cache.cpu(), rows.cpu(), scale=on_cpu, dtype=kind, **there) for kind in (result, torch.float32)]
    # Triton's interpreter cuts float32 to bfloat16 off; a GPU rounds.
    tolerance = 2**-7 if device == "cpu" and result == torch.bfloat16 else 0.0
    torch.testing.assert_close(got.cpu(), expected[0], rtol=tolerance, atol=0)
    assert got.is_contiguous() and not got[3].any()
    out = torch.full((len(rows) + 3, cache.shape[2]), NAN, dtype=torch.float32, device=device)
    module.gather(cache, rows, options["block_table"], options["requests"], scale, torch.float32, out[2:-1])
    assert out[[0, 1, -1]].isnan().all() and torch.equal(out[2:-1].cpu(), expected[1])


def test_every_value_of_e4m3(fused: Any) -> None:
    module, device = fused("triton_latents")
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3).reshape(2, 4, 32)
    got = module.gather(codes, torch.arange(8, device=device), None, None, None, torch.float32, None)
    torch.testing.assert_close(got, codes.float().reshape(8, 32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(5, 3, 128, 64, 128), (3, 20, 192, 64, 256), (4, 2, 24, 0, 8), (2, 33, 16, 6, 16)], ids=str)
def test_expand_k(fused: Any, dtype: Any, dims: tuple[int, ...]) -> None:
    module, device = fused("triton_latents")
    rows, heads, nope, rope, v_dim = dims
    make = torch.Generator().manual_seed(nope)
    kv_up = torch.randn(rows, heads, nope + v_dim, generator=make).to(dtype).to(device)
    latent = torch.randn(rows, 32 + rope, generator=make).to(dtype).to(device)
    expected = latents.expand_k(kv_up.cpu(), latent[:, 32:].cpu(), nope)
    for given in (kv_up, kv_up.transpose(0, 1).contiguous().transpose(0, 1), kv_up.transpose(0, 2).contiguous().transpose(0, 2)):
        out = torch.full((rows + 2, heads, nope + rope), NAN, dtype=dtype, device=device)
        got = module.expand_k(given, latent[:, 32:], nope, out[1:-1])
        assert torch.equal(got.cpu(), expected) and out[[0, -1]].isnan().all()
        assert torch.equal(module.expand_k(given, latent[:, 32:], nope, None), got)


def test_nothing_is_launched_for_nothing(fused: Any) -> None:
    merging, device = fused("triton_merge")
    empty = torch.empty(0, 3, 8, device=device), torch.empty(3, 0, device=device)
    assert merging.merge(*empty, *empty, None, None)[0].shape == (0, 3, 8)
    module, _ = fused("triton_latents")
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert module.gather(paged(torch.float16, device), none, None, None, None, torch.float16, None).shape == (0, 40)
    assert module.expand_k(torch.empty(0, 3, 8, device=device), torch.empty(0, 2, device=device), 4, None).shape == (0, 3, 6)


def test_what_the_kernels_cannot_read_or_write_is_refused(fused: Any) -> None:
    module, device = fused("triton_latents")
    cache, rows = paged(torch.float16, device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(MLAInputError, match="cache.*float64"):
        module.gather(cache.double(), rows, None, None, None, torch.float32, None)
    with pytest.raises(MLAInputError, match="cache.*unit stride"):
        module.gather(cache.transpose(1, 2), rows, None, None, None, torch.float32, None)
    with pytest.raises(MLAInputError, match="out.*contiguous"):
        module.gather(cache, rows, None, None, None, torch.float16, torch.empty(40, 2, dtype=torch.float16, device=device).t())


@pytest.mark.gpu
def test_the_public_functions_launch_them_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """One door for every array: on CUDA it leads to the kernels, and nothing is read back."""
    from mla_interop.kernels import triton_latents, triton_merge

    calls = []
    for module, name in ((triton_merge, "merge"), (triton_latents, "gather"), (triton_latents, "expand_k")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    a = states(torch.bfloat16, 9, 2, 32, "cuda")
    cache, rows, scale = paged(E4M3, "cuda"), torch.arange(4, device="cuda"), torch.tensor(0.5, device="cuda")
    kv_up, k_pe = torch.randn(4, 2, 24, device="cuda"), torch.randn(4, 6, device="cuda")
    with waiting_refused():
        lse.merge(*a, out=a[0], lse=a[1])
        latents.gather(cache, rows, scale=scale, dtype=torch.bfloat16)
        latents.expand_k(kv_up, k_pe, 16)
    assert calls == ["merge", "gather", "expand_k"]


@pytest.mark.gpu
def test_offsets_past_2_to_the_31() -> None:
    """int64 offsets: 2.2e9 elements, of which the last rows are right."""
    from mla_interop.kernels import triton_latents, triton_merge

    if torch.cuda.get_device_properties(0).total_memory < 30e9:
        pytest.skip("needs 30 GB of device memory")
    heads, v_dim = 128, 128
    tokens = 2**31 // (heads * v_dim) + 40
    a, b = (torch.empty(tokens, heads, v_dim, dtype=torch.float16, device="cuda") for _ in range(2))
    lse_a, lse_b = (torch.zeros(heads, tokens, device="cuda") for _ in range(2))
    a[-20:], b[-20:] = 1.0, 3.0
    triton_merge.merge(a, lse_a, b, lse_b, a, lse_a)
    assert (a[-20:] == 2).all() and torch.allclose(lse_a[:, -20:], torch.tensor(2.0, device="cuda").log())
    k = triton_latents.expand_k(a[:, :, :64], torch.full((tokens, 64), 5.0, dtype=torch.float16, device="cuda"), 64, b)
    assert (k[-20:, :, :64] == 2).all() and (k[-20:, :, 64:] == 5).all()
    cache = a.view(-1, 1, v_dim)
    assert (triton_latents.gather(cache, torch.arange(len(cache) - 9, len(cache), device="cuda"), None, None, None, torch.float16, None) == 2).all()


def test_they_compile_for_every_architecture_without_a_gpu() -> None:
    """What the interpreter lets pass, a compiler may not. In a process of its own: what triton imported for the interpreter cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("compile_triton.py"))], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["80", "90", "100", "120"]
