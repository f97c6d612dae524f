"""Builds, loads and feeds the C++ side of ``torch_side``'s operators (``csrc/torch_op.cc``), which launches native kernels without any Python.

It is built against the installed torch, some ten seconds once, when a program first calls an operator; ``mla-interop warmup`` builds it beforehand.
Eager calls do without it until it is there.
"""

import functools
import logging
import threading
from pathlib import Path
from typing import Any

from mla_interop.errors import MLABuildError
from mla_interop.kernels.build import compile_cpp, is_cpp_built, open_library, package_root, package_version

_log = logging.getLogger("mla_interop")
_lock = threading.Lock()


def build() -> Path:
    """The path of the library, compiled if the cache does not hold it.

    Raises:
        MLABuildError: There is no compiler, or no torch to build against, or the build failed.
    """
    return compile_cpp(*_LIBRARY, **_options())


_LIBRARY = "torch_op", ["torch_op.cc"]


def _options() -> dict[str, Any]:
    root = package_root("torch")
    if root is None:
        raise MLABuildError("cannot build torch_op: python package torch: got none. Install mla-interop[torch].")
    return {
        "flags": ["-isystem", str(root / "include")],
        "library_dirs": [str(root / "lib")],
        "libraries": ["c10", "torch_cpu"],
        "depends": {"torch": package_version("torch")},
    }


def at_hand() -> bool:
    """Whether C++ can serve calls without anybody waiting for a build: the library is loaded, or in the cache."""
    with _lock:
        return (_library.cache_info().currsize > 0 or _is_built()) and _library() is not None


@functools.cache
def _is_built() -> bool:
    return is_cpp_built(*_LIBRARY, **_options())


@functools.cache
def _library() -> Any:
    """The loaded library, its functions registered as operators; None where it cannot be built: then Python serves every call."""
    try:
        library = open_library(build())
    except MLABuildError as error:
        _log.warning("Compiled programs call mla_interop's operators through Python, some ten microseconds slower: %s", error)
        return None
    register = library["register_operators"]
    register.release_gil = False  # torch's table of functions is not locked: no other thread shall begin a call of an operator now
    register()
    return library


def remember(launch: Any, out_dtype: Any, scratch_floats: int, scalars: tuple[float, int, int, int], arrays: tuple[Any, Any, Any]) -> None:
    """Have C++ serve calls like the one that Python serves now.

    Args:
        launch: The kernel's launch function, a native one.
        out_dtype: The torch dtype of out.
        scratch_floats, scalars: What the launch takes besides arrays.
        arrays: Those of cu_seqlens_q, cu_seqlens_k and the work list that the operator's arguments do not have, as tensors; else None.
    """
    from tvm_ffi import dtype

    with _lock:  # registered once, by whichever thread is first
        library = _library()
    if library is not None:
        library.remember(launch, dtype(str(out_dtype).removeprefix("torch.")), scratch_floats, *scalars, *arrays)
