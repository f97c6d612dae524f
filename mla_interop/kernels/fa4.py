"""FlashAttention-4 compiled ahead of time into the package's kernel ABI (docs/architecture.md), on any machine.

The compiler (CuTe DSL and flash-attn-4) runs in a process of its own, ``fa4_compiler``, so a caller's process gets
neither its imports nor its state, and needs no GPU.  What comes out is a small shared library that needs only TVM FFI
and CuTe DSL's runtime library; ``build.cached`` keeps it.
"""

import ctypes
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mla_interop.errors import MLABuildError
from mla_interop.installed import missing
from mla_interop.kernels.build import SOURCES, cached, cached_path, package_version, run_tool

# fa4_kernels and fa4_compiler use internals of these packages: other versions are refused until someone has proven them.
PROVEN_VERSIONS = {"flash-attn-4": ("4.0.0b36",), "nvidia-cutlass-dsl": ("4.8.1",), "quack-kernels": ("0.6.5",)}
COMPILER_IMPORTS = ("flash_attn", "cutlass", "quack")
DTYPES = ("bfloat16", "float16")
# Every pair below has been compiled for its architecture.
_COMMON_DIMS = ((192, 128), (128, 128), (96, 64), (64, 64))
DIMENSIONS = {
    "sm_80": (*_COMMON_DIMS, (256, 256)),
    "sm_90a": (*_COMMON_DIMS, (256, 256)),
    "sm_100a": (*_COMMON_DIMS, (256, 256)),
    "sm_103a": (*_COMMON_DIMS, (256, 256)),
    "sm_120a": _COMMON_DIMS,
}
# Objects for an "a" architecture run on exactly that one; sm_80 objects run on every 8.x.
_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}
# Smaller scales, zero and negative ones need a kernel that multiplies every score before it masks: a library of its own, since few need it.
# Below this a scale, or its product with log2(e), would be flushed to zero in the fast kernel, and a mask of -inf times zero is NaN.
SMALLEST_SCALE = 2.0**-126
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9))  # 99 KB a block, where 8.0 and 8.7 have 163 KB
_COMPILE_TIMEOUT_S = 900
_AROUND = (SOURCES / "fa4_launch.cc", SOURCES / "driver_launch.h")
_AROUND_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wl,--wrap=_cudaLaunchKernelEx,--wrap=_cudaGetDevice")
# These change what the compiler makes, or make it leave files: a build depends on its key alone.
_DROPPED_ENVIRONMENT = re.compile(r"CUTE_DSL_|FLASH_ATTENTION_|FA_|QUACK_")


def arch_for(capability: tuple[int, int]) -> str | None:
    """The architecture to build for, or None where there is no kernel for a device of that compute capability."""
    return "sm_80" if capability[0] == 8 else _ARCHS.get((capability[0], capability[1]))


def unsupported_reasons(
    capability: tuple[int, int], dtype: str, head_dim_qk: int, head_dim_v: int, is_causal: bool = True, with_lse: bool = True, any_scale: bool = False
) -> list[str]:
    """Why the kernel cannot serve a problem on this machine; empty if it can.  Builds nothing, never raises."""
    reasons = []
    arch = arch_for(capability)
    if arch is None:
        allowed = ", ".join(["8.x", *(f"{major}.{minor}" for major, minor in _ARCHS)])
        reasons.append(f"compute capability: got {'.'.join(map(str, capability))}; allowed: {allowed}")
    else:
        dims = [pair for pair in DIMENSIONS[arch] if not (pair == (256, 256) and tuple(capability) in _SMALL_SHARED_MEMORY)]
        if (head_dim_qk, head_dim_v) not in dims:
            reasons.append(f"head dims (qk, v): got {(head_dim_qk, head_dim_v)}; allowed for {arch}: {', '.join(map(str, dims))}")
    if dtype not in DTYPES:
        reasons.append(f"dtype: got {dtype}; allowed: {', '.join(DTYPES)}")
    if reasons or arch is None:
        return reasons + missing(_installation_reasons)
    variant = arch, dtype, head_dim_qk, head_dim_v, is_causal, with_lse, any_scale
    return missing(lambda: _installation_reasons() + _compiler_reasons(*variant))


def _compiler_reasons(*variant: Any) -> list[str]:
    if shutil.which(_linker()) is not None:
        return []
    try:
        there = cached_path(*_artefact(*variant)).exists()
    except MLABuildError:
        there = False
    return [] if there else [f"C++ compiler: got {_linker()!r}, not on PATH, and nothing in the cache; allowed: g++, or what CXX names"]


def _installation_reasons() -> list[str]:
    reasons = []
    for distribution, proven in PROVEN_VERSIONS.items():
        installed = package_version(distribution)
        if installed not in proven:
            reasons.append(f"{distribution}: got version {installed}; allowed: {', '.join(proven)}")
    for module in COMPILER_IMPORTS:
        if not _importable(module):
            reasons.append(f"python package {module}: got none; allowed: any version (the compiler imports it)")
    return reasons


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module without a spec, put into sys.modules by hand
        return True


def _linker() -> str:
    return os.environ.get("CXX", "g++")


def build(arch: str, dtype: str, head_dim_qk: int, head_dim_v: int, is_causal: bool, with_lse: bool, any_scale: bool = False) -> Path:
    """The path of the shared library for one variant, compiled if the cache does not hold it.

    Args:
        arch: A key of ``DIMENSIONS``.
        dtype: Of q, k, v and out; one of ``DTYPES``.
        head_dim_qk: D.
        head_dim_v: V.
        is_causal: Causal, aligned bottom-right; else no mask.
        with_lse: Whether ``launch`` takes a buffer for lse; else it takes None.
        any_scale: Whether it serves every scale, more slowly; else those of at least ``SMALLEST_SCALE``.

    Raises:
        MLABuildError: The compiler or the linker failed, or CuTe DSL's runtime library is not installed.
    """
    from tvm_ffi import libinfo

    name, key = _artefact(arch, dtype, head_dim_qk, head_dim_v, is_causal, with_lse, any_scale)
    variant, libraries = key["variant"], key["libraries"]

    def make(made: Path) -> None:
        compiled = made.with_suffix(".o")
        _compile(variant, compiled, name)
        found_at = [f"-Wl,-rpath,{Path(library).parent}" for library in libraries]
        include = [f"-I{path}" for path in libinfo.include_paths()]
        run_tool([_linker(), "-shared", "-o", str(made), *key["flags"], *include, str(_AROUND[0]), str(compiled), *libraries, *found_at, "-ldl"], name)

    return cached(name, key, make)


def _artefact(arch: str, dtype: str, head_dim_qk: int, head_dim_v: int, is_causal: bool, with_lse: bool, any_scale: bool) -> tuple[str, dict[str, Any]]:
    """Name and key of a variant's library in the cache."""
    flags = {"is_causal": bool(is_causal), "with_lse": bool(with_lse), "any_scale": bool(any_scale)}
    name = f"fa4-{arch}-{dtype}-{head_dim_qk}x{head_dim_v}-{'causal' if is_causal else 'full'}{'-lse' * flags['with_lse']}{'-anyscale' * flags['any_scale']}"
    return name, {
        "variant": {"arch": arch, "dtype": dtype, "head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v, **flags},
        "source": [path.read_text() for path in (*(Path(__file__).parent / name for name in ("fa4_kernels.py", "fa4_compiler.py")), *_AROUND)],
        "flags": [*_AROUND_FLAGS, *([] if any_scale else [f"-DSMALLEST_SCALE={SMALLEST_SCALE!r}"])],
        "versions": {each: package_version(each) for each in ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")},
        # The library finds these by their paths: a moved environment must not find it.
        "libraries": _runtime_libraries(),
    }


def _compile(variant: dict[str, Any], made: Path, name: str) -> None:
    environment = {each: value for each, value in os.environ.items() if not _DROPPED_ENVIRONMENT.match(each)}
    # The same imports as here, from any working folder; and no GPU, so that a busy or exclusive one does not matter.
    imports = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    environment |= {"CUTE_DSL_ARCH": variant["arch"], "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": imports, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mla_interop.kernels.fa4_compiler", json.dumps(variant), str(made)]
    try:
        done = subprocess.run(command, env=environment, cwd=made.parent, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MLABuildError(f"cannot build {name}: the compiler's process {sys.executable!r} did not finish: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-25:])
        raise MLABuildError(f"cannot build {name}: flash-attn-4's compiler exited with {done.returncode}.\n{tail}")


def _runtime_libraries() -> list[str]:
    """Paths of CuTe DSL's runtime library and of TVM FFI's, which every built library needs."""
    from tvm_ffi import libinfo

    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    flavours = {int(path.parts[-3][2:]): path for root in roots for path in root.glob("cu[0-9]*/lib/libcute_dsl_runtime.so")}
    # The DSL's own rule: the newest flavour that the driver can run; with no driver here, the newest.
    driver = _driver_cuda_major()
    usable = [major for major in flavours if driver is None or major <= driver]
    if not usable:
        raise MLABuildError(
            f"CuTe DSL's runtime library: got CUDA {sorted(flavours) or 'none'}; allowed: at most the driver's CUDA {driver}. "
            "Install nvidia-cutlass-dsl for that CUDA, or update the driver."
        )
    return [str(flavours[max(usable)]), str(libinfo.find_libtvm_ffi())]


def _driver_cuda_major() -> int | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    answer = ctypes.c_int(0)
    # This call needs no initialised driver, and initialises none.
    return answer.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(answer)) == 0 else None


@functools.cache
def load(arch: str, dtype: str, head_dim_qk: int, head_dim_v: int, is_causal: bool, with_lse: bool, any_scale: bool = False) -> Any:
    """The kernel as a ``tvm_ffi.Function`` with the package's ABI, built if need be; arguments as in :func:`build`.

    Its ``plan`` and ``scratch`` are None.  It raises ValueError or TypeError, before it launches anything, for
    arguments of the wrong kind, dtype, shape or stride, and for a scale that it does not serve.  The first launch on a device also loads the code there, so
    make one before a CUDA graph is captured.

    Raises:
        MLABuildError: It cannot be built, or the built library cannot be loaded.
    """
    import tvm_ffi

    path = build(arch, dtype, head_dim_qk, head_dim_v, is_causal, with_lse, any_scale)
    try:
        return tvm_ffi.load_module(str(path))["launch"]
    except Exception as error:
        raise MLABuildError(f"cannot load {path}: {error}. If the file is damaged, delete it: it will be built again.") from error
