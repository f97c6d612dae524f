"""What an array is, in words that every framework shares: shape, strides, dtype, device; and whether its values are on the host.

No framework is imported here: an array can only be a torch tensor or a JAX array if its module is loaded already.
"""

import sys
from typing import Any, NamedTuple

import numpy as np

from mla_interop.errors import input_error

# DLPack's device types (dlpack.h): the ones that kernels run on.
DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}
FLOATS = ("bfloat16", "float16", "float32", "float64")


class TensorSpec(NamedTuple):
    """One array without its data; hashable.

    Attributes:
        shape: Extents.
        strides: Strides in elements, or None for compact row-major.
        dtype: NumPy-style name: ``"bfloat16"``, ``"float16"``, ``"float32"``, ``"int32"``.
        device_type: ``"cpu"`` or ``"cuda"``.
        device_index: Ordinal of the device.
        aligned: Whether the data starts at a multiple of 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device_type: str
    device_index: int = 0
    aligned: bool = True

    @property
    def device(self) -> str:
        """``"cpu"`` or, for example, ``"cuda:1"``."""
        return self.device_type if self.device_type == "cpu" else f"{self.device_type}:{self.device_index}"


def dtype_name(dtype: Any) -> str:
    """NumPy-style name of a dtype of any framework."""
    return getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]


def check_floats(name: str, array: Any) -> None:
    """Refuse what is computed with and is no float of 16 bits or more: a cast would make numbers of anything.

    Raises:
        MLAInputError: See above.
    """
    if dtype_name(array.dtype) not in FLOATS:
        raise input_error(name, f"dtype {array.dtype}", "bfloat16, float16, float32 or float64")


def is_tracer(array: object) -> bool:
    """Whether ``array`` is a JAX tracer: it has a shape and a dtype, but no values yet."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def framework_of(array: object) -> str:
    """``"torch"``, ``"jax"``, ``"numpy"``, ``"cupy"``, or ``"dlpack"`` for any other object that exports DLPack, or ``""``."""
    if isinstance(array, np.ndarray):
        return "numpy"
    root = type(array).__module__.partition(".")[0]
    if root in ("torch", "cupy"):
        return root
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        return "jax"
    return "dlpack" if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") else ""


def host_values(array: Any) -> np.ndarray | None:
    """The values of a list, a NumPy array, or another framework's array in CPU memory; None when they are on a device or traced.

    Nothing is ever copied from a device here.
    """
    if isinstance(array, (np.ndarray, list, tuple, range)):
        return np.asarray(array)
    if is_tracer(array) or not hasattr(array, "__dlpack_device__"):
        return None
    try:
        # A tensor's own word: DLPack tells pinned memory from the CPU's, and Dynamo cannot trace it. Those on "meta" have no values, which NumPy says.
        on_host = array.device.type in ("cpu", "meta") if framework_of(array) == "torch" else int(array.__dlpack_device__()[0]) == 1
    except BufferError:  # a JAX array of several devices has no one device
        return None
    if not on_host:
        return None
    # torch refuses to export what requires grad, and JAX exports read-only memory that older NumPy rejects: __array__ serves both.
    return np.asarray(array.detach() if hasattr(array, "detach") else array)


def read_back(array: Any) -> np.ndarray:
    """The values of any array, copied from its device if need be: a host sync, for ``check=True`` only."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    elif hasattr(array, "get") and framework_of(array) == "cupy":
        array = array.get()
    return np.asarray(array)
