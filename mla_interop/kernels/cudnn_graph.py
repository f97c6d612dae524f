"""cuDNN's attention graph as a compiled function of the kernel ABI: plans built in C++ against cuDNN's frontend headers, no Python in a call.

The headers come with ``nvidia-cudnn-frontend``, libcudnn and its own with ``nvidia-cudnn-cu13`` (or ``-cu12``), as torch and JAX install
it. Offsets and lengths are derived from cu_seqlens on the device, by one small launch, so nothing has to be known to the host. A plan is
made for lengths and numbers of sequences rounded up (``csrc/cudnn_layout.h``), and kept for the life of the process.
"""

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mla_interop.backends.base import CallShape
from mla_interop.errors import MLAUnavailableError
from mla_interop.installed import missing
from mla_interop.kernels.build import compile_cpp, compile_cuda, find_nvcc, is_cuda_built, open_library, package_version, wheel_folders

# Whose C++ interface this was compiled against.
PROVEN_FRONTENDS = ((1, 32, 0),)
LIBRARY_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
DTYPES = ("float16", "bfloat16")
# Oldest cuDNN by major compute capability: ragged tensors on Ampere came with 9.18.1; below 9.10.2, D != V or these head dims fail somewhere.
OLDEST = {8: (9, 18, 1), 9: (9, 10, 2), 10: (9, 10, 2)}
# The frontend refuses these two as well.
FAULTY: dict[tuple[int, ...], str] = {(9, 10, 0): "wrong results in 16-bit attention", (9, 10, 1): "wrong results in 16-bit attention"}
_SOURCES = ("cudnn_graph.cc", "cudnn_lengths.cu")
# The headers take two minutes to compile at -O3; what they do in a call takes microseconds either way.
_FLAGS = ("-DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING", "-Xcompiler=-O1")
_SONAME = "libcudnn.so.9"


def unsupported_reasons(capability: tuple[int, int], dtype: str, head_dim_qk: int, head_dim_v: int) -> list[str]:
    """Why this kernel cannot be had here; empty when it can. Cheap: imports neither cuDNN nor a framework, and never raises.

    Args:
        capability: Of the device, as in ``(9, 0)``.
        dtype: Of q, k, v and out, as in ``"bfloat16"``.
        head_dim_qk: Width of a head of q and k.
        head_dim_v: Width of a head of v and out.
    """
    reasons = []
    if capability[0] not in OLDEST:
        reasons.append(f"compute capability: got {capability[0]}.{capability[1]}; allowed: {', '.join(f'{major}.x' for major in OLDEST)}")
    if dtype not in DTYPES:
        reasons.append(f"dtype: got {dtype}; allowed: {' or '.join(DTYPES)}")
    dims = (head_dim_qk, head_dim_v)
    if capability[0] == 10 and max(dims) > 128 and dims != (192, 128):
        reasons.append(f"head dims (qk, v): got {dims}; allowed on 10.x: up to 128, and (192, 128)")
    elif min(dims) < 8 or max(dims) > 256 or head_dim_qk % 8 or head_dim_v % 8:
        reasons.append(f"head dims (qk, v): got {dims}; allowed: multiples of 8 up to 256")
    return reasons + missing(lambda: _installation_reasons(capability))


def library_reasons(library: tuple[int, ...], major: int) -> list[str]:
    """Why a version of cuDNN, as in ``(9, 19, 0)``, cannot serve devices of a major compute capability."""
    shown = ".".join(map(str, library))
    if library[:3] in FAULTY:
        return [f"cuDNN {shown}: {FAULTY[library[:3]]}; allowed: 9.10.2 and later"]
    oldest = OLDEST.get(major, (9, 10, 2))
    if library[:3] < oldest:
        return [f"cuDNN {shown}; allowed on {major}.x: {'.'.join(map(str, oldest))} and later"]
    return [] if library[0] == 9 else [f"cuDNN {shown}; allowed: 9.x, whose interface this was compiled for"]


def _installation_reasons(capability: tuple[int, int]) -> list[str]:
    frontend, (name, library) = package_version("nvidia-cudnn-frontend"), library_package()
    allowed = ", ".join(".".join(map(str, version)) for version in PROVEN_FRONTENDS)
    reasons = []
    if frontend == "none" or _numbers(frontend)[:3] not in PROVEN_FRONTENDS:
        found = "not installed" if frontend == "none" else f"got {frontend}"
        reasons.append(f"nvidia-cudnn-frontend: {found}; allowed: {allowed} (pip install nvidia-cudnn-frontend=={allowed.split(', ')[-1]})")
    if library == "none":
        reasons.append(f"{name}: not installed; allowed: 9.10.2 and later, for the CUDA that this machine has")
    else:
        reasons += library_reasons(_numbers(library)[:3], capability[0])
    if not reasons and not _is_built(capability):
        reasons += _build_reasons()
    return reasons


def _build_reasons() -> list[str]:
    reasons = [] if find_nvcc() else ["nvcc: not found; needed to build cuDNN's launcher (install the CUDA toolkit, or set CUDA_HOME)"]
    folders = _include_folders()
    for header, package in (("cudnn_frontend.h", "nvidia-cudnn-frontend"), ("cudnn.h", "nvidia-cudnn-cu13"), ("nvrtc.h", "nvidia-cuda-nvrtc")):
        if not any((Path(folder) / header).exists() for folder in folders):
            reasons.append(f"{header}: not found; needed to build cuDNN's launcher (it comes with {package})")
    return reasons


def library_package() -> tuple[str, str]:
    """The installed package that brings libcudnn, and its version; ``"none"`` as the version where there is none."""
    return next(((name, found) for name in LIBRARY_PACKAGES if (found := package_version(name)) != "none"), (LIBRARY_PACKAGES[0], "none"))


def versions() -> tuple[str, ...]:
    """What a kernel is made of, for people."""
    return " ".join(library_package()), f"nvidia-cudnn-frontend {package_version('nvidia-cudnn-frontend')}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:4])


def _include_folders() -> list[str]:
    """Folders of cuDNN's headers: those of the frontend lie beside its Python package."""
    frontend = importlib.util.find_spec("cudnn")
    folders = [Path(frontend.origin).parent.parent / "include"] if frontend and frontend.origin else []
    nvcc = find_nvcc()
    folders += [*wheel_folders("include"), *([Path(nvcc).resolve().parent.parent / "include"] if nvcc else []), Path("/usr/local/cuda/include")]
    return [str(folder) for folder in folders if folder.exists()]


def _depends() -> dict[str, str]:
    return {"frontend": package_version("nvidia-cudnn-frontend"), "cudnn": library_package()[1]}


def _arch(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"


def _is_built(capability: tuple[int, int]) -> bool:
    return is_cuda_built("mla_cudnn", _SOURCES, _arch(capability), flags=_FLAGS, depends=_depends())


@cache
def load(is_causal: bool, capability: tuple[int, int]) -> Any:
    """The kernel as a ``tvm_ffi.Function`` of the ABI; the first call on a machine builds it, for a minute or more.

    ``scale`` must be above 0; ``scratch`` is what :func:`prepare` says. dtype, dimensions and strides are read from the tensors. A launch
    whose plan was not prepared builds it, for a tenth of a second or more, also while its stream is captured.

    Args:
        is_causal: Bottom-right causal mask, or none.
        capability: Of the device that it will run on.

    Raises:
        MLABuildError: A part could not be built or loaded.
        MLAUnavailableError: The libcudnn of this process is one that is refused.
    """
    graph = _graph(capability)
    finish = open_library(_finish_library(capability))
    return closure().make(graph.run, finish.finish_natural, is_causal)


@cache
def closure() -> Any:
    """The native part that needs no GPU: ``make``, ``scratch_bytes``, ``round_length``, ``round_sequences``, ``visible_rows``."""
    return open_library(_closure_library())


def parts(capability: tuple[int, int]) -> tuple[Callable[[], Path], ...]:
    """What builds, or finds in the cache, all that a kernel is made of; its plans are made on the device, in each process."""
    return lambda: _graph_library(capability), lambda: _finish_library(capability), _closure_library


def _graph_library(capability: tuple[int, int]) -> Path:
    return compile_cuda("mla_cudnn", _SOURCES, _arch(capability), flags=_FLAGS, include=_include_folders(), depends=_depends())


def _finish_library(capability: tuple[int, int]) -> Path:
    return compile_cuda("mla_finish", ["finish.cu"], _arch(capability))


def _closure_library() -> Path:
    return compile_cpp("cudnn_closure", ["cudnn_closure.cc"])


def prepare(shape: CallShape, dtype: str, heads: int, head_dims: tuple[int, int], is_causal: bool, capability: tuple[int, int]) -> int:
    """float32 elements of scratch of a call; builds its plan on the device, if this process has not yet.

    Raises:
        MLAUnavailableError: There is no such device here, or cuDNN does not support the call.
    """
    words = key(shape, dtype, heads, head_dims, is_causal)
    try:
        workspace = _graph(capability).prepare(words)
    except RuntimeError as error:
        raise MLAUnavailableError(f"CUDNN makes its plan on the device, when a call is prepared or traced, and could not: {error}") from error
    return -(-closure().scratch_bytes(shape.num_seqs, shape.num_tokens_q, heads, shape.needs_lse, workspace) // 4)


def key(shape: CallShape, dtype: str, heads: int, head_dims: tuple[int, int], is_causal: bool) -> list[int]:
    """The words that name a plan, in the order of ``csrc/cudnn_layout.h``: all that is built into it."""
    none, head_major, token_major = 0, 1, 2
    native = closure()
    rows = shape.num_tokens_q
    stats = none if not shape.needs_lse else head_major if native.round_length(rows) == rows else token_major
    words = [shape.device_index, int(dtype == "bfloat16"), int(is_causal), stats, rows if stats == head_major else 0]
    words += [native.round_sequences(shape.num_seqs), native.round_length(shape.max_seqlen_q), native.round_length(shape.max_seqlen_k), heads, *head_dims]
    counts, widths = (rows, shape.num_tokens_k, shape.num_tokens_k), (head_dims[0], head_dims[0], head_dims[1])
    for (row, head), count, width in zip(shape.strides, counts, widths, strict=True):
        words += [row if count > 1 else heads * width, head if heads > 1 else width]
    return words


@cache
def _graph(capability: tuple[int, int]) -> Any:
    graph = open_library(_graph_library(capability))
    _load_cuda_runtime()
    version = graph.open(_library())
    loaded = (version // 10000, version // 100 % 100, version % 100)
    reasons = library_reasons(loaded, capability[0])
    if reasons:
        raise MLAUnavailableError(f"{'; '.join(reasons)}. This process has loaded it; the installed package is {' '.join(library_package())}.")
    return graph


def _library() -> str:
    """libcudnn as this process has it already, whoever loaded it: two of them do not get along (IsaacLab#4980). Else the wheel's."""
    try:
        ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD)
        return _SONAME
    except OSError:
        return next((str(folder / _SONAME) for folder in wheel_folders("lib") if (folder / _SONAME).exists()), _SONAME)


def _load_cuda_runtime() -> None:
    """The frontend finds the CUDA runtime by its name alone: a process that has none yet gets the wheel's."""
    names = ("libcudart.so.13", "libcudart.so.12")
    for name in names:
        try:
            ctypes.CDLL(name)
            return
        except OSError:
            continue
    found = next((folder / name for name in names for folder in wheel_folders("lib") if (folder / name).exists()), None)
    if found is not None:
        ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
