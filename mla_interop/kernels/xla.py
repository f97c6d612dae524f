"""Builds and loads the XLA FFI handler (``csrc/xla_call.cc``) that calls any kernel of this package inside an XLA program.

The handler is native: a call of a compiled kernel runs no Python and takes no GIL.  Python is asked once for each kernel
name, the first time a process runs it, and what it answers is kept: a name stands for one function for the life of a process.
"""

import ctypes
import functools
import gc
from pathlib import Path

from mla_interop.errors import MLABuildError
from mla_interop.kernels.build import compile_cpp, package_version

LOAD_KERNEL = "mla_interop.load_kernel"
"""Name of the TVM FFI global function ``(name: str) -> None`` that registers the kernel ``name`` if this machine can have it.

It makes programs that were compiled in another process (``jax.export``, the compilation cache) find their kernels.
"""

HANDLERS = {
    ("cpu", "compiled"): "mla_interop_xla_call_cpu",
    ("cpu", "python"): "mla_interop_xla_call_cpu_python",
    ("CUDA", "compiled"): "mla_interop_xla_call_gpu",
    ("CUDA", "python"): "mla_interop_xla_call_gpu_python",
}
"""(XLA platform, kernel kind) -> symbol of the handler.  Only the compiled CUDA one lets XLA capture it into a CUDA graph."""

# importlib.reload runs this file again in the same namespace; XLA's registry is not reloaded, so neither is our note of it.
REGISTERED: set[tuple[str, str]] = globals().get("REGISTERED", set())
"""(target name, XLA platform) of what this process has registered with XLA."""


def _resolve(name: str) -> object:
    """The TVM FFI function of that name, or None; called by the handler under the GIL, on a thread of XLA."""
    import tvm_ffi

    function = tvm_ffi.get_global_func(name, allow_missing=True)
    if function is None:
        load = tvm_ffi.get_global_func(LOAD_KERNEL, allow_missing=True)
        if load is not None:
            load(name)
            function = tvm_ffi.get_global_func(name, allow_missing=True)
    return function


def _load_kernel(name: str) -> None:
    from mla_interop.backends.base import KERNEL_PREFIX
    from mla_interop.selector import kernel_named

    kernel_named(name.removeprefix(KERNEL_PREFIX)).register()


def _collect_garbage() -> None:
    gc.collect()


def build() -> Path:
    """The path of the handler library, compiled if the cache does not hold it (some seconds, once per jaxlib and TVM FFI version).

    Raises:
        MLABuildError: There is no compiler, or the build failed.
    """
    import jax

    return compile_cpp("xla_call", ["xla_call.cc"], flags=["-isystem", jax.ffi.include_dir()], depends={"jaxlib": package_version("jaxlib")})


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded handler library; built on first use.

    Raises:
        MLABuildError: There is no compiler, the build failed, or the library does not load.
    """
    import tvm_ffi

    path = build()
    try:
        tvm_ffi.load_module(str(path)).set_python(_resolve, _collect_garbage)
        tvm_ffi.register_global_func(LOAD_KERNEL, _load_kernel, override=True)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise MLABuildError(f"cannot load the XLA handler {path}: {error}") from error


@functools.cache
def capsules() -> dict[tuple[str, str], object]:
    """(XLA platform, kernel kind) -> the capsule that ``jax.ffi.register_ffi_target`` takes; builds the library if need be."""
    import jax

    return {key: jax.ffi.pycapsule(getattr(library(), symbol)) for key, symbol in HANDLERS.items()}
