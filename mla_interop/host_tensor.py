"""NumPy arrays as TVM FFI tensors over the same memory, with the dtypes and the read-only arrays that NumPy's own export refuses."""

import ctypes
from typing import Any

import numpy as np


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


# DLPack's type codes of the dtypes that NumPy cannot export because they come from ml_dtypes (dlpack.h).
DLPACK_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
# Offset of dl_tensor.dtype in DLManagedTensorVersioned: a header of 32 bytes, then data (8), device (8) and ndim (4).
_DTYPE_OFFSET = 32 + 20
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def as_tensor(array: np.ndarray) -> Any:
    """``array`` as a tvm_ffi.Tensor over the same memory; read-only arrays and ml_dtypes' dtypes are taken too."""
    import tvm_ffi  # imports torch where it is installed, so not before it is needed

    name = array.dtype.name
    if name not in DLPACK_CODES:
        return tvm_ffi.from_dlpack(array.__dlpack__(max_version=(1, 0)))
    # The bits go out as unsigned integers, and the capsule, which nobody has seen yet, is told their true type.
    capsule = array.view(f"u{array.itemsize}").__dlpack__(max_version=(1, 0))
    dtype = _DLDataType.from_address(_capsule_pointer(capsule, b"dltensor_versioned") + _DTYPE_OFFSET)
    dtype.code = DLPACK_CODES[name]
    return tvm_ffi.from_dlpack(capsule)
