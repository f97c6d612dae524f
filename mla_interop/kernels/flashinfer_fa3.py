"""FlashInfer's generation-3 kernel (Hopper), compiled from FlashInfer's headers with our own softmax, end of a tile and launch.

Nothing of FlashInfer or torch is imported for it, and nothing but nvcc is needed: `csrc/flashinfer_fa3.cu` includes the headers that lie
in FlashInfer's wheel, one of them in a corrected copy (:mod:`mla_interop.kernels.flashinfer_corrections`).
"""

import tempfile
from pathlib import Path
from typing import Any

from mla_interop.errors import MLABuildError
from mla_interop.kernels.build import compile_cuda, is_cuda_built, package_root, package_version
from mla_interop.kernels.flashinfer_corrections import MAIN_LOOP_3

# Those of 64 use another tile than the work list.
HEAD_DIMS = ((128, 128), (192, 128), (256, 256))
# The least normal float32: the kernel multiplies -inf by the scale.
MIN_SCALE = 2.0**-126
_SOURCE = "flashinfer_fa3.cu"
_CORRECTED = "mla_interop_corrected.cuh"  # the name that the source includes
_ELEMENTS = {"float16": "cutlass::half_t", "bfloat16": "cutlass::bfloat16_t"}


def _arguments(dtype: str, head_dim_qk: int, head_dim_v: int) -> dict[str, Any]:
    flags = ["--expt-relaxed-constexpr", "-use_fast_math", "-DNDEBUG", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"]
    flags += [f"-DMLA_ELEMENT={_ELEMENTS[dtype]}", f"-DMLA_HEAD_DIM_QK={head_dim_qk}", f"-DMLA_HEAD_DIM_V={head_dim_v}"]
    depends = {"flashinfer": package_version("flashinfer-python"), "corrections": MAIN_LOOP_3.revision}
    return {"name": f"flashinfer_fa3_{dtype}_{head_dim_qk}_{head_dim_v}", "sources": [_SOURCE], "arch": "90a", "flags": flags, "depends": depends}


def is_built(dtype: str, head_dim_qk: int, head_dim_v: int) -> bool:
    """Whether the cache holds the library, so that no compiler is needed."""
    return is_cuda_built(**_arguments(dtype, head_dim_qk, head_dim_v))


def library(dtype: str, head_dim_qk: int, head_dim_v: int) -> Path:
    """The path of the library for both masks, built first if the cache does not hold it; that takes nvcc about a minute, and no GPU.

    Args:
        dtype: Of q, k, v and out: ``"float16"`` or ``"bfloat16"``.
        head_dim_qk, head_dim_v: One of :data:`HEAD_DIMS`.

    Raises:
        MLABuildError: There is no nvcc, it failed, or FlashInfer's headers are not those that the correction was written for.
    """
    arguments = _arguments(dtype, head_dim_qk, head_dim_v)
    if is_cuda_built(**arguments):
        return compile_cuda(**arguments)
    data = _package_data()
    upstream = data / "include"
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, _CORRECTED).write_text(MAIN_LOOP_3.corrected((upstream / MAIN_LOOP_3.header).read_text()))
            # The third: the copy includes its neighbours by paths relative to where it was.
            include = [folder, upstream, (upstream / MAIN_LOOP_3.header).parent, data / "cutlass" / "include"]
            return compile_cuda(**arguments, include=[str(path) for path in include])
    except (OSError, ValueError) as error:
        raise MLABuildError(f"cannot build FlashInfer's fa3 kernel: {error}") from error


def _package_data() -> Path:
    root = package_root("flashinfer")
    if root is None:
        raise MLABuildError("cannot build FlashInfer's fa3 kernel: flashinfer-python is not installed (pip install 'mla-interop[flashinfer]').")
    return root / "data"
