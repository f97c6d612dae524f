"""CPU_SDPA's kernel: torch's CPU flash attention, called from C++ through torch's stable C shim (``csrc/cpu_sdpa.cc``).

A launch runs no Python and takes no GIL.  The library finds ``libtorch_cpu`` beside the installed torch by its run path:
torch is not imported for it, and a later ``import torch`` gets the very same library.
"""

import functools
import os
import re
import shutil
from pathlib import Path
from typing import Any

from mla_interop.errors import MLABuildError, MLAUnavailableError
from mla_interop.installed import missing
from mla_interop.kernels.build import compile_cpp, package_root, package_version

DTYPES = ("float32", "bfloat16", "float16")
# The oldest torch whose headers compile this and whose library has every function used.
MIN_TORCH = (2, 7)
_SHIM_HEADER = "include/torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h"
_SHIM_FUNCTION = "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu"


def unsupported_reasons(dtype: str, head_dim_qk: int, head_dim_v: int) -> list[str]:
    """Why the kernel cannot serve a problem on this machine; empty if it can.  Imports nothing heavy, builds nothing, never raises.

    Args:
        dtype: NumPy-style name of the dtype of q, k, v and out.
        head_dim_qk: Columns of q and k, in elements.
        head_dim_v: Columns of v and out, in elements.
    """
    reasons = []
    if dtype not in DTYPES:
        reasons.append(f"dtype: got {dtype}; allowed: {', '.join(DTYPES)}")
    if not 0 < head_dim_v <= head_dim_qk:
        reasons.append(f"head dims (qk, v): got {(head_dim_qk, head_dim_v)}; allowed: 0 < v <= qk")
    return reasons + missing(lambda: _torch_reasons() + _compiler_reasons())


def _torch_reasons() -> list[str]:
    allowed = f">= {'.'.join(map(str, MIN_TORCH))}"
    root = package_root("torch")
    if root is None:
        return [f"python package torch: got none; allowed: {allowed} (pip install 'mla-interop[torch]')"]
    found = package_version("torch")
    parts = re.match(r"(\d+)\.(\d+)", found)
    if parts is None or (int(parts[1]), int(parts[2])) < MIN_TORCH:
        return [f"torch: got version {found}; allowed: {allowed}"]
    try:
        has_shim = _SHIM_FUNCTION in (root / _SHIM_HEADER).read_text()
    except OSError:
        has_shim = False
    return [] if has_shim else [f"torch {found}: got no {_SHIM_FUNCTION} in its headers; allowed: a torch that ships its C shim for CPU"]


def _compiler_reasons() -> list[str]:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is not None:
        return []
    try:
        library()  # without a compiler this finds the library in the cache or fails, and builds nothing
    except Exception:
        return [f"C++ compiler: got {compiler!r}, not on PATH, and nothing in the cache; allowed: g++, or what CXX names"]
    return []


def library() -> Path:
    """The path of the kernel's library, compiled if the cache does not hold it.

    Raises:
        MLAUnavailableError: There is no torch.
        MLABuildError: It cannot be compiled.
    """
    root = package_root("torch")
    if root is None:
        raise MLAUnavailableError("python package torch: got none; allowed: a torch with CPU kernels. Install mla-interop[torch].")
    return compile_cpp(
        "cpu_sdpa",
        ["cpu_sdpa.cc"],
        include=[str(root / "include")],
        library_dirs=[str(root / "lib")],
        libraries=["torch_cpu"],
        depends={"torch": package_version("torch")},
    )


@functools.cache
def _module() -> Any:
    import tvm_ffi

    path = library()
    try:
        return tvm_ffi.load_module(str(path))
    except Exception as error:
        raise MLABuildError(f"cannot load {path}: {error}. Remove the file to have it built again.") from error


@functools.cache
def load(is_causal: bool) -> Any:
    """The kernel as a ``tvm_ffi.Function`` with the signature of docs/architecture.md; compiled on first use, then kept.

    All arrays are on the host.  ``plan``, ``scratch``, ``max_seqlen_q``, ``max_seqlen_k`` and ``finish`` are not looked at:
    the offsets themselves are read, and rows that see no key always get out 0 and lse -inf.

    Args:
        is_causal: Whether query i of a sequence sees only the keys j <= i + len_k - len_q (bottom-right), or all keys.

    Returns:
        The function.  It raises ValueError where cu_seqlens do not rise from 0 within the arrays or V has more columns than
        q, TypeError for another dtype, RuntimeError where torch fails.  Any number of threads may call it at once.

    Raises:
        MLAUnavailableError: There is no torch.
        MLABuildError: The library cannot be compiled or loaded.
    """
    return _module()["launch_causal" if is_causal else "launch_full"]
