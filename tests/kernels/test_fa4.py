"""The ahead-of-time FlashAttention-4 build, as far as a machine without a GPU can show it."""

import ctypes
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import driver_fakes
import pytest

from mla_interop.errors import MLABuildError
from mla_interop.kernels import build, fa4

ROOT = Path(__file__).parents[2]
MISSING = fa4.unsupported_reasons((9, 0), "bfloat16", 192, 128)
needs_compiler = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))
VARIANT = ("sm_90a", "bfloat16", 192, 128, True, True)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if everything that the build needs were installed in its proven version."""
    monkeypatch.setattr(fa4, "package_version", lambda distribution: fa4.PROVEN_VERSIONS.get(distribution, ("1",))[0])
    monkeypatch.setattr(fa4, "_importable", lambda module: True)
    monkeypatch.setenv("CXX", sys.executable)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((11, 0), None),
        ((12, 0), "sm_120a"),
        ((12, 1), None),
    ],
)
def test_arch_for(capability: tuple[int, int], arch: str | None) -> None:
    assert fa4.arch_for(capability) == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("installed")
def test_deepseek_shape_is_supported(capability: tuple[int, int], dtype: str) -> None:
    assert fa4.unsupported_reasons(capability, dtype, 192, 128) == []


@pytest.mark.parametrize(
    ("problem", "reasons"),
    [
        (((7, 5), "bfloat16", 192, 128), [("compute capability", "7.5", "9.0")]),
        (((9, 0), "float32", 192, 128), [("dtype", "float32", "bfloat16, float16")]),
        (((9, 0), "bfloat16", 192, 192), [("head dims", "(192, 192)", "(192, 128)")]),
        (((8, 6), "bfloat16", 256, 256), [("head dims", "(256, 256)", "(192, 128)")]),
        (((12, 0), "bfloat16", 256, 256), [("head dims", "(256, 256)", "(192, 128)")]),
        (((6, 0), "float8_e4m3fn", 1, 2), [("compute capability", "6.0", "9.0"), ("dtype", "float8_e4m3fn", "float16")]),
    ],
)
@pytest.mark.usefixtures("installed")
def test_each_reason_has_what_came_and_what_is_allowed(problem: tuple, reasons: list[tuple[str, str, str]]) -> None:
    found = fa4.unsupported_reasons(*problem)
    assert len(found) == len(reasons)
    for text, (subject, got, allowed) in zip(found, reasons, strict=True):
        assert text.startswith(subject) and f"got {got}" in text
        assert allowed in text.partition("; allowed")[2]


@pytest.mark.parametrize("distribution", sorted(fa4.PROVEN_VERSIONS))
@pytest.mark.usefixtures("installed")
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, distribution: str) -> None:
    monkeypatch.setattr(fa4, "package_version", lambda each: "99.0" if each == distribution else fa4.PROVEN_VERSIONS[each][0])
    (reason,) = fa4.unsupported_reasons((9, 0), "bfloat16", 192, 128)
    assert reason == f"{distribution}: got version 99.0; allowed: {', '.join(fa4.PROVEN_VERSIONS[distribution])}"


@pytest.mark.usefixtures("installed")
def test_missing_tools_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "_importable", lambda module: module != "quack")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(fa4, "_runtime_libraries", list)
    package, compiler = fa4.unsupported_reasons((9, 0), "bfloat16", 192, 128)
    assert "quack" in package and "no-such-compiler" in compiler


@pytest.mark.usefixtures("installed")
def test_a_library_in_the_cache_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the variant that is asked for, and no other."""
    monkeypatch.setattr(fa4, "_runtime_libraries", list)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    variants = [(causal, lse, any_scale) for causal in (True, False) for lse in (True, False) for any_scale in (True, False)]
    for number, variant in enumerate(variants):
        problem = (9, 0), "bfloat16", 192, 128, *variant
        (reason,) = fa4.unsupported_reasons(*problem)
        assert "no-such-compiler" in reason and "nothing in the cache" in reason
        build.cached_path(*fa4._artefact("sm_90a", *problem[1:])).write_bytes(b"")
        assert fa4.unsupported_reasons(*problem) == [] and len(list(tmp_path.iterdir())) == number + 1


class DeviceTensor:
    """A DLPack tensor that claims to lie on a CUDA device; good for what is refused before anything reads it."""

    class _Tensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("device", ctypes.c_int * 2),
            ("ndim", ctypes.c_int),
            ("dtype", ctypes.c_uint32),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
            ("context_and_deleter", ctypes.c_void_p * 2),
        ]

    CODES = {"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "int32": (0, 32), "int64": (0, 64)}

    def __init__(self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, offset: int = 0) -> None:
        packed = [1]
        for extent in reversed(shape[1:]):
            packed.insert(0, extent * packed[0])
        code, bits = self.CODES[dtype]
        self.extents, self.steps = ((ctypes.c_int64 * len(shape))(*each) for each in (shape, strides or packed))
        self.tensor = self._Tensor(
            4096 + offset, (2, 0), len(shape), code | bits << 8 | 1 << 16, ctypes.cast(self.extents, ctypes.POINTER(ctypes.c_int64)), None
        )
        self.tensor.strides = ctypes.cast(self.steps, ctypes.POINTER(ctypes.c_int64))

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def good_arguments() -> dict[str, object]:
    """Arguments of ``launch`` that pass all checks: T = 4, S = 6, N = 2, B = 1."""
    rows = {name: DeviceTensor((extent, 2, width), "bfloat16") for name, extent, width in [("q", 4, 192), ("k", 6, 192), ("v", 6, 128), ("out", 4, 128)]}
    bounds = {name: DeviceTensor((2,), "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    named = rows | bounds | {"plan": None, "scratch": None, "lse": DeviceTensor((2, 4), "float32")}
    named |= {"scale": 0.1, "max_seqlen_q": 4, "max_seqlen_k": 6, "finish": 0}
    order = "q k v cu_seqlens_q cu_seqlens_k plan scratch out lse scale max_seqlen_q max_seqlen_k finish"
    return {name: named[name] for name in order.split()}


WRONG = {
    "q is None": {"q": None},
    "q is a number": {"q": 3.0},
    "q has another dtype": {"q": DeviceTensor((4, 2, 192), "float16")},
    "v starts unaligned": {"v": DeviceTensor((6, 2, 128), "bfloat16", offset=8)},
    "v has a stride that TMA cannot have": {"v": DeviceTensor((6, 2, 128), "bfloat16", strides=(516, 258, 1))},
    "k has other rows than v": {"k": DeviceTensor((7, 2, 192), "bfloat16")},
    "out has other rows than q": {"out": DeviceTensor((5, 2, 128), "bfloat16")},
    "out has strided heads": {"out": DeviceTensor((4, 2, 128), "bfloat16", strides=(384, 192, 1))},
    "lse is transposed": {"lse": DeviceTensor((4, 2), "float32")},
    "lse is missing": {"lse": None},
    "bounds are int64": {"cu_seqlens_q": DeviceTensor((2,), "int64")},
    "bounds differ in number": {"cu_seqlens_q": DeviceTensor((3,), "int32")},
    "a plan came": {"plan": DeviceTensor((2,), "int32")},
    "scale is text": {"scale": "1"},
    "finish is a fraction": {"finish": 0.5},
    "scale is zero": {"scale": 0.0},
    "scale is an integer zero": {"scale": 0},
    "scale is False": {"scale": False},
    "scale is negative": {"scale": -0.07},
    "scale is below the smallest": {"scale": math.nextafter(fa4.SMALLEST_SCALE - 2.0**-150, 0.0)},  # what float32 rounds down
    "scale is not a number": {"scale": math.nan},
}

FRESH_PROCESS = """
import json, os, sys
from mla_interop.kernels import build, fa4
environment, variant = dict(os.environ), json.loads(sys.argv[1])
path = fa4.build(*variant)
fa4.load(*variant)
imported = sorted({"cutlass", "flash_attn", "quack", "triton", "jax"} & set(sys.modules))
print(json.dumps({"path": str(path), "same": dict(os.environ) == environment, "imported": imported}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """What a fresh process says that built and loaded ``VARIANT`` in an empty cache, which is the cache here from now on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_INTEROP_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        done = subprocess.run([sys.executable, "-c", FRESH_PROCESS, json.dumps(VARIANT)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout.splitlines()[-1])


@needs_compiler
def test_building_leaves_the_process_alone(built: dict) -> None:
    # torch is not in this list because TVM FFI itself imports it wherever it is installed.
    assert built["same"] and built["imported"] == []


@needs_compiler
def test_second_build_is_a_cache_hit(built: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "_compile", lambda *_: pytest.fail("compiled again"))
    assert str(fa4.build(*VARIANT)) == built["path"]
    assert os.listdir(Path(built["path"]).parent).count(Path(built["path"]).name) == 1


@needs_compiler
@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_wrong_arguments_are_refused_before_a_launch(built: dict, wrong: str) -> None:
    launch = fa4.load(*VARIANT)
    with pytest.raises((TypeError, ValueError), match="launch"):
        launch(*(good_arguments() | WRONG[wrong]).values())
    with pytest.raises(TypeError, match="13 parameters"):
        launch(*list(good_arguments().values())[:-1])


@needs_compiler
@pytest.mark.parametrize("scale", [fa4.SMALLEST_SCALE, 1e-30, 0.07, 1, 3e38])
def test_a_scale_that_the_fast_library_serves_passes(built: dict, scale: float) -> None:
    """What is refused then is the other argument that is wrong: nothing may be launched on these tensors."""
    launch = fa4.load(*VARIANT)
    with pytest.raises(TypeError, match="#0"):
        launch(*(good_arguments() | {"scale": scale, "q": 3.0}).values())


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, -0.07, 1e-42, 0.07])
def test_the_library_for_any_scale_passes_all(built: dict, scale: float) -> None:
    launch = fa4.load(*VARIANT, True)
    with pytest.raises(TypeError, match="#0"):
        launch(*(good_arguments() | {"scale": scale, "q": 3.0}).values())
    with pytest.raises((TypeError, ValueError), match="launch"):
        launch(*(good_arguments() | {"scale": "1"}).values())


def launches(path: str, runtime: str) -> None:
    """A call of a built library, in a process whose driver and runtime are fakes: with a current context, on device 0, and without one."""
    import tvm_ffi

    launch, driver, counted = tvm_ffi.load_module(path)["launch"], ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(runtime)
    for finish, launched in ((0, 1), (1, 2)):
        for context, expected in ((500, (launched, 0, 0)), (0, (0, launched, 1))):
            driver.enter(ctypes.c_void_p(context))
            before = driver.count_launches(), counted.runtime_launches(), counted.runtime_devices()
            launch(*(good_arguments() | {"finish": finish}).values())
            after = driver.count_launches(), counted.runtime_launches(), counted.runtime_devices()
            assert tuple(b - a for a, b in zip(before, after)) == expected, (finish, context)


@needs_compiler
def test_the_driver_launches_where_a_context_is_current(built: dict, tmp_path: Path) -> None:
    """What CuTe DSL made of the kernel calls the runtime; the linker has led these calls elsewhere."""
    driver_fakes.make(tmp_path)
    runtime = str(tmp_path / "runtime.so")
    driver_fakes.run(f"test_fa4.launches({built['path']!r}, {runtime!r})", tmp_path, LD_PRELOAD=runtime)


@needs_compiler
def test_a_failed_build_tells_what_the_compiler_said(built: dict) -> None:
    with pytest.raises(MLABuildError, match=r"(?s)fa4-sm_90a-int7-.*KeyError: 'int7'"):
        fa4.build("sm_90a", "int7", 192, 128, True, True)
    assert not list(Path(built["path"]).parent.glob("*int7*.so"))


# As with every package's own imports: torch's, and those of the packages' `__init__`.
COMPILE_WITH_ALL_IMPORTS = """
import json, sys
import torch, triton, quack, flash_attn.cute.interface
from mla_interop.kernels import fa4_compiler, fa4_kernels
fa4_compiler.import_less()
assert sys.modules["torch"] is torch and sys.modules["quack"] is quack
for dims in json.loads(sys.argv[3]):
    for causal in (True, False):
        theirs, ours = flash_attn.cute.interface._tile_size_fwd_sm90(*dims, causal, False), fa4_kernels.sm90_tile(dims[0], causal)
        assert (theirs.m_block_size, theirs.n_block_size) == (ours["tile_m"], ours["tile_n"]), (dims, causal)
        assert (theirs.mma_pv_is_rs, theirs.intra_wg_overlap) == (ours["mma_pv_is_rs"], ours["intra_wg_overlap"]), (dims, causal)
fa4_kernels.compile_to(sys.argv[2], **json.loads(sys.argv[1]))
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(fa4.DIMENSIONS))
def test_imports_that_are_left_out_change_no_byte(arch: str, tmp_path: Path) -> None:
    """What ``fa4_compiler`` does to imports, and the tiles that are written down here and not imported, are those of the whole packages."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    spec = {"arch": arch, "dtype": "bfloat16", "head_dim_qk": 192, "head_dim_v": 128, "is_causal": True, "with_lse": True, "any_scale": False}
    environment = os.environ | {"CUTE_DSL_ARCH": arch, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ways = {"less": ["-m", "mla_interop.kernels.fa4_compiler"], "all": ["-c", COMPILE_WITH_ALL_IMPORTS]}
    for name, way in ways.items():
        command = [sys.executable, *way, json.dumps(spec), str(tmp_path / name), json.dumps(fa4.DIMENSIONS["sm_90a"])]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "less").read_bytes() == (tmp_path / "all").read_bytes()


# Every architecture in both dtypes and with both masks; a build takes about 5 seconds of one core, so that all of them are slow.
VARIANTS = [(arch, dtype, 192, 128, causal, True) for arch in fa4.DIMENSIONS for dtype in fa4.DTYPES for causal in (True, False)]
VARIANTS += [("sm_90a", dtype, 192, 128, causal, False) for dtype in fa4.DTYPES for causal in (True, False)]
VARIANTS += [(arch, "bfloat16", *dims, True, True) for arch, pairs in fa4.DIMENSIONS.items() for dims in pairs if dims != (192, 128)]
# For any scale: every architecture and size, since another kernel is compiled; and without the mask.
VARIANTS += [(arch, "bfloat16", *dims, True, True, True) for arch, pairs in fa4.DIMENSIONS.items() for dims in pairs]
VARIANTS += [(arch, "float16", 192, 128, False, False, True) for arch in fa4.DIMENSIONS]


def test_the_sweep_has_every_architecture_dtype_and_mask() -> None:
    wanted = {
        (arch, dtype, causal) for arch in ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a") for dtype in ("bfloat16", "float16") for causal in (True, False)
    }
    assert wanted <= {(arch, dtype, causal) for arch, dtype, *dims, causal, _ in (each for each in VARIANTS if len(each) == 6) if dims == [192, 128]}
    assert {(arch, causal) for arch, _, causal in wanted} <= {(each[0], each[4]) for each in VARIANTS if each[6:] == (True,)}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_every_variant_builds_and_loads(built: dict, variant: tuple) -> None:
    assert callable(fa4.load(*variant))
