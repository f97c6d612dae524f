"""FlashInfer's ragged prefill kernels (generation 2 for Ampere and later, 3 for Hopper) as compiled functions of the kernel ABI.

Generation 3 is compiled from FlashInfer's headers (:mod:`mla_interop.kernels.flashinfer_fa3`). For generation 2 FlashInfer generates and
compiles a module for each dtype and head size, whose ``ragged_run`` needs constants and absent tensors, which a native closure adds; that
happens in a process of its own. Both follow work lists that the planner here makes on the host. What is built is kept in this package's
cache under a key without machine paths: it can be built where there is no GPU, and neither FlashInfer nor torch is imported to run it.
"""

import ctypes
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mla_interop.errors import MLABuildError
from mla_interop.installed import missing
from mla_interop.kernels import flashinfer_fa3
from mla_interop.kernels.build import (
    cached,
    cached_path,
    compile_cpp,
    compile_cuda,
    find_nvcc,
    open_library,
    package_root,
    package_version,
    run_tool,
    wheel_folders,
)
from mla_interop.kernels.flashinfer_corrections import PREFILL_2

# Whose headers and, of generation 2, whose raw argument order were read and found to fit, first and last; only the first was run.
PROVEN_VERSIONS = ((0, 6, 14), (0, 7, 4))
DTYPES = ("float16", "bfloat16")
# In generation 2 masked scores are -5e4 before scaling (flashinfer-ai/flashinfer#4451): a smaller scale would give them weight.
MIN_SCALE = {2: 2e-3, 3: flashinfer_fa3.MIN_SCALE}
# A row's maximum is taken off by a fused product: from about 1e6 on, what its rounding leaves is not small any more.
MAX_SCALE = 1e4


def unsupported_reasons(capability: tuple[int, int], dtype: str, head_dim_qk: int, head_dim_v: int, generation: int) -> list[str]:
    """Why this kernel cannot be had here; empty when it can. Cheap: imports neither FlashInfer nor torch, and never raises.

    Args:
        capability: Of the device, as in ``(9, 0)``.
        dtype: Of q, k, v and out, as in ``"bfloat16"``.
        head_dim_qk: Width of a head of q and k.
        head_dim_v: Width of a head of v and out.
        generation: 2 or 3.
    """
    if generation not in (2, 3):
        return [f"generation: got {generation}; allowed: 2 or 3"]
    reasons = []
    if capability != (9, 0) if generation == 3 else capability < (8, 0):
        reasons.append(f"compute capability: got {capability}; allowed: {'(9, 0)' if generation == 3 else '(8, 0) and later'}")
    if dtype not in DTYPES:
        reasons.append(f"dtype: got {dtype}; allowed: {' or '.join(DTYPES)}")
    if generation == 3 and (head_dim_qk, head_dim_v) not in flashinfer_fa3.HEAD_DIMS:
        reasons.append(f"head dims of q/k and v: got {(head_dim_qk, head_dim_v)}; allowed: one of {flashinfer_fa3.HEAD_DIMS}")
    # Others compile, and then fault or compute nonsense (flashinfer-ai/flashinfer#4299).
    if generation == 2 and (head_dim_qk not in (64, 128, 192, 256) or head_dim_v not in (64, 128, 192)):
        reasons.append(f"head dims of q/k and v: got {(head_dim_qk, head_dim_v)}; allowed: multiples of 64, up to 256 and 192")
    return reasons + missing(lambda: _installation_reasons(capability, dtype, head_dim_qk, head_dim_v, generation))


def _installation_reasons(capability: tuple[int, int], dtype: str, head_dim_qk: int, head_dim_v: int, generation: int) -> list[str]:
    version = _flashinfer_version()
    if version == "none":
        return [f"flashinfer-python: not installed; allowed: {_proven()} (pip install 'mla-interop[flashinfer]')"]
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None or not PROVEN_VERSIONS[0] <= tuple(map(int, numbers.groups())) <= PROVEN_VERSIONS[1]:
        return [f"flashinfer-python: got {version}; allowed: {_proven()}, whose headers and internal call are known"]
    if generation == 3:
        built = dtype in DTYPES and flashinfer_fa3.is_built(dtype, head_dim_qk, head_dim_v)
    else:
        built = cached_path(*_artefact(dtype, head_dim_qk, head_dim_v, capability)).exists()
    return [] if built else _missing_build_tools(generation)


def _missing_build_tools(generation: int) -> list[str]:
    missing = [] if find_nvcc() else ["nvcc: not found; needed to build FlashInfer's kernel (install the CUDA toolkit, or set CUDA_HOME)"]
    if generation == 3:
        return missing
    if package_root("torch") is None:
        missing.append("torch: not installed; needed to build FlashInfer's kernel, though not to run it")
    if shutil.which("ninja", path=_build_path()) is None:
        missing.append("ninja: not found; needed to build FlashInfer's kernel (pip install ninja)")
    return missing


@cache
def _flashinfer_version() -> str:
    return package_version("flashinfer-python")


def _proven() -> str:
    first, last = (".".join(map(str, version)) for version in PROVEN_VERSIONS)
    return f"{first} to {last}"


@cache
def load(generation: int, dtype: str, head_dim_qk: int, head_dim_v: int, is_causal: bool, capability: tuple[int, int] = (9, 0)) -> Any:
    """The kernel as a ``tvm_ffi.Function`` of the ABI; the first call on a machine builds it, for a minute or more.

    ``scale`` must be from the generation's :data:`MIN_SCALE` to :data:`MAX_SCALE`; ``plan`` comes from :func:`plan`, for the rows of q; where lse is
    wanted, ``scratch`` has the :func:`scratch_floats` of q. A launch that breaks these raises, before anything runs on the device.

    Args:
        generation: 2 or 3.
        dtype: ``"float16"`` or ``"bfloat16"``.
        head_dim_qk: Width of a head of q and k.
        head_dim_v: Width of a head of v and out.
        is_causal: Bottom-right causal mask, or none.
        capability: Of the device that it will run on.

    Raises:
        MLABuildError: A part could not be built or loaded.
    """
    built = [build() for build in parts(generation, dtype, head_dim_qk, head_dim_v, capability)]
    finish, upstream, closure = map(_open, built[:3])  # the planner opens its own
    if generation == 3:
        return closure.fa3(upstream.run, finish.finish_natural, finish.num_sms, is_causal, MIN_SCALE[3], MAX_SCALE)
    return closure.fa2(upstream.ragged_run, finish.finish, is_causal, MIN_SCALE[2], MAX_SCALE)


def parts(generation: int, dtype: str, head_dim_qk: int, head_dim_v: int, capability: tuple[int, int]) -> tuple[Callable[[], Path], ...]:
    """What builds, or finds in the cache, all that a kernel is made of: the finish, FlashInfer's kernel, the closure, the planner."""
    return (
        lambda: compile_cuda("mla_finish", ["finish.cu"], f"{capability[0]}{capability[1]}"),
        lambda: flashinfer_fa3.library(dtype, head_dim_qk, head_dim_v) if generation == 3 else upstream_module(dtype, head_dim_qk, head_dim_v, capability),
        lambda: compile_cpp("flashinfer_closure", ["flashinfer_closure.cc"]),
        _planner_library,
    )


def upstream_module(dtype: str, head_dim_qk: int, head_dim_v: int, capability: tuple[int, int]) -> Path:
    """The path of FlashInfer's module of generation 2 in this package's cache, built first if it is not there (no GPU is needed for that)."""

    def build(out: Path) -> None:
        folders = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        arch = f"{capability[0]}.{capability[1]}"
        env = {**os.environ, "PATH": _build_path(), "PYTHONPATH": folders, "FLASHINFER_CUDA_ARCH_LIST": arch}
        if home := _cuda_home():
            env["CUDA_HOME"] = home
        arguments = [dtype, str(head_dim_qk), str(head_dim_v), str(out)]
        run_tool([sys.executable, "-m", "mla_interop.kernels.flashinfer_module", *arguments], "FlashInfer's fa2 kernel", env)

    name, key = _artefact(dtype, head_dim_qk, head_dim_v, capability)
    return cached(name, key, build)


def _artefact(dtype: str, head_dim_qk: int, head_dim_v: int, capability: tuple[int, int]) -> tuple[str, dict[str, object]]:
    key: dict[str, object] = {"flashinfer": _flashinfer_version(), "tvm_ffi": package_version("apache-tvm-ffi"), "generation": 2}
    key |= {"dtype": dtype, "head_dims": [head_dim_qk, head_dim_v], "capability": list(capability)}
    key["corrections"] = PREFILL_2.revision
    return f"flashinfer_fa2_{dtype}_{head_dim_qk}_{head_dim_v}", key


def _build_path() -> str:
    # FlashInfer calls ninja by name; a virtual environment that is not activated has it beside its Python.
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _cuda_home() -> str | None:
    # The nvcc on PATH may be a script far from the toolkit, which FlashInfer would take for the toolkit's own.
    nvcc = find_nvcc()
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and str(Path(nvcc).parent.parent), "/usr/local/cuda"]
    return next((root for root in roots if root and (Path(root) / "include" / "cuda_runtime.h").exists()), None)


def _open(path: Path) -> Any:
    """Load a library with TVM FFI, once; where the CUDA runtime that FlashInfer links is not on the search path, load that first."""
    try:
        return open_library(path)
    except MLABuildError as error:
        missing = re.search(r"libcudart\.so\.\d+", str(error))
        if missing is None or not _load_cuda_runtime(missing.group()):
            raise
    return open_library(path)


def _load_cuda_runtime(name: str) -> bool:
    home = _cuda_home()
    folders = [*([Path(home) / "lib64"] if home else []), *wheel_folders("lib")]
    for folder in folders:
        if (folder / name).exists():
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def _planner_library() -> Path:
    return compile_cpp("flashinfer_plan", ["flashinfer_plan.cc"])


@cache
def _planner() -> Any:
    return _open(_planner_library())


def plan_bytes(generation: int, padded_rows: int, batch: int, num_heads: int, num_sms: int) -> int:
    """Size of the work list; it depends on nothing but these numbers, so it is static under ``jax.jit``."""
    return _planner().plan_bytes(generation, padded_rows, batch, num_heads, num_sms)


def plan(generation: int, cu_q: np.ndarray, cu_k: np.ndarray, padded_rows: int, num_heads: int, is_causal: bool, num_sms: int) -> np.ndarray:
    """The work list for these lengths, uint8 ``[plan_bytes]``, on the host. Equal lengths give equal bytes.

    Args:
        generation: 2 or 3.
        cu_q: int32 ``[B + 1]``, where the sequences of q start; ends at or before ``padded_rows``.
        cu_k: int32 ``[B + 1]``, the same for k and v.
        padded_rows: Rows of the q that the kernel will get, with those past ``cu_q[B]``.
        num_heads: Of q.
        is_causal: The mask. A list of generation 3 leaves out the tiles whose rows see no key, so it serves this mask alone; one of
            generation 2 serves both.
        num_sms: Multiprocessors of the device.

    Raises:
        ValueError: Lengths that fall, do not start at 0, or exceed the rows.
    """
    # Copies: DLPack does not lend read-only arrays, which is what JAX gives.
    starts_q, starts_k = np.array(cu_q, np.int32), np.array(cu_k, np.int32)
    out = np.empty(plan_bytes(generation, padded_rows, len(starts_q) - 1, num_heads, num_sms), np.uint8)
    if generation == 3:
        _planner().fa3_plan(starts_q, starts_k, padded_rows, num_heads, is_causal, num_sms, out)
    else:
        _planner().fa2_plan(starts_q, starts_k, padded_rows, out)
    return out


def scratch_floats(generation: int, rows: int, num_heads: int, with_lse: bool) -> int:
    """How many floats of scratch a launch needs: in generation 2 room for the log-sum-exp as the kernel writes it, ``[T, N]``."""
    return rows * num_heads if with_lse and generation == 2 else 0


def _build_upstream(dtype: str, head_dim_qk: str, head_dim_v: str, out: str) -> None:
    # With CuTe DSL installed, importing FlashInfer 0.6.14 asks for the properties of device 0; without, it does not need a GPU.
    sys.modules["cutlass"] = None  # type: ignore[assignment]
    import torch
    from flashinfer.jit import gen_batch_prefill_module

    element = getattr(torch, dtype)
    dtypes = (element, element, element, torch.int32)
    no_rotary, no_window, no_soft_cap, no_fp16_sums = 0, False, False, False
    spec = gen_batch_prefill_module("fa2", *dtypes, int(head_dim_qk), int(head_dim_v), no_rotary, no_window, no_soft_cap, no_fp16_sums)
    spec = _with_corrections(spec)
    spec.build(verbose=False)
    shutil.copyfile(spec.get_library_path(), out)


def _with_corrections(spec: Any) -> Any:
    from flashinfer.jit.env import FLASHINFER_INCLUDE_DIR

    # A name of its own: what FlashInfer itself built, or builds later, is neither taken nor replaced.
    spec = dataclasses.replace(spec, name=f"mla_interop_{PREFILL_2.revision}_{spec.name}")
    flags = PREFILL_2.write_corrected(Path(FLASHINFER_INCLUDE_DIR), spec.build_dir / "corrected")
    return dataclasses.replace(spec, extra_cuda_cflags=[*flags, *(spec.extra_cuda_cflags or ())])


if __name__ == "__main__":
    _build_upstream(*sys.argv[1:])
