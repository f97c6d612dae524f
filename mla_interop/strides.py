"""Which strides of q, k and v a kernel reads as they are, and where a copy is needed."""

import numpy as np

from mla_interop.backends.base import Kernel
from mla_interop.exchange import TensorSpec

_WIDTHS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32, "float64": np.uint64}


def needs_copy(name: str, spec: TensorSpec, kernel: Kernel) -> bool:
    """Whether the frontend has to make an array contiguous (or aligned) for a kernel.

    Args:
        name: ``"q"``, ``"k"`` or ``"v"``, as in ``Kernel.strided``.
        spec: The array, packed.
        kernel: The kernel.
    """
    if spec.strides is None or 0 in spec.shape:
        return False
    multiple = max(1, 16 // np.dtype(np.uint8 if spec.dtype.startswith("float8") else _WIDTHS.get(spec.dtype, np.float32)).itemsize)
    expected, compact = 1, True
    for extent, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        compact &= extent == 1 or stride == expected
        expected *= extent
    if compact:
        return not spec.aligned and kernel.kind == "compiled" and spec.device_type == "cuda"
    if name not in kernel.strided or spec.strides[2] != 1 and spec.shape[2] != 1:
        return True
    outer = [stride for extent, stride in zip(spec.shape[:2], spec.strides[:2], strict=True) if extent > 1]
    # A stride of 0 (a broadcast head) never reaches a kernel (sglang#20598); vector loads need 16-byte multiples.
    return any(stride <= 0 or (spec.device_type == "cuda" and stride % multiple) for stride in outer) or not spec.aligned


def outer_strides(spec: TensorSpec, copied: bool) -> tuple[int, int]:
    """Row and head strides with which an array reaches the kernel, in elements; those of a compact array where it was copied."""
    if spec.strides is None or copied:
        return spec.shape[1] * spec.shape[2], spec.shape[2]
    return spec.strides[0], spec.strides[1]
