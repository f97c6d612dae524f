"""What is checked of cumulative lengths, of sizes and of bounds: once, on the host where it knows them; of the rest what needs no values."""

from typing import Any

import numpy as np

from mla_interop.errors import MLAInputError, input_error
from mla_interop.exchange import host_values, is_tracer, read_back

INT32_MAX = 2**31 - 1
# Sizes inside torch.compile and jax.export, which are integers of a later time.
_SYMBOLIC = ("SymInt", "_DimExpr")


def readable(name: str, values: Any) -> np.ndarray | None:
    """``host_values`` of an argument.

    Raises:
        MLAInputError: Its framework cannot give them: nested lists; sparse, meta or deleted arrays.
    """
    try:
        return host_values(values)
    except Exception as error:
        got = f"a {type(values).__name__} that cannot be read ({str(error).splitlines()[0]})"
        raise input_error(name, got, "a list of integers, or an array with memory of its own") from error


def checked_lengths(name: str, values: Any, check: bool) -> tuple[Any, np.ndarray | None]:
    """The array to compute with, and the checked host copy of it where the host may know it; with ``check`` it is read back.

    Raises:
        MLAInputError: They are no cumulative lengths.
    """
    host = readable(name, values)
    if host is not None:
        checked = _checked(name, host)
        return checked, checked
    array = _device_lengths(name, values)
    return array, _checked(name, read_back(array)) if check and not is_tracer(array) else None


def _checked(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 1 or array.size == 0:
        raise input_error(name, f"shape {array.shape}", "one dimension, [B + 1], starting with 0")
    if array.dtype.kind not in "iu":
        raise input_error(name, f"dtype {array.dtype}", "int32 (host values of other integer types are converted)")
    if array.dtype != np.int32 and (array.max() > INT32_MAX or array.min() < 0):
        raise input_error(name, f"values from {array.min()} to {array.max()}", f"0 to {INT32_MAX}: offsets are int32")
    array = array.astype(np.int32)  # always a copy: metadata must not change when the caller's array does
    if array[0] != 0:
        raise input_error(name, f"a first value of {array[0]}", "0", "Lengths are cumulative: [0, len_0, len_0 + len_1, ...].")
    falls = np.flatnonzero(array[1:] < array[:-1])
    if falls.size:
        raise input_error(name, f"{array[falls[0]]} followed by {array[falls[0] + 1]} at index {falls[0] + 1}", "values that never decrease")
    array.flags.writeable = False
    return array


def check_device_lengths(cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    """What can be checked of lengths without reading them: arrays on a device, without data, or traced.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``; the second is None where it equals the first.

    Raises:
        MLAInputError: Another dtype or shape.
    """
    _device_lengths("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is not None:
        check_same_shape(cu_seqlens_q, _device_lengths("cu_seqlens_k", cu_seqlens_k))


def _device_lengths(name: str, array: Any) -> Any:
    shape, dtype = getattr(array, "shape", None), str(getattr(array, "dtype", "")).rpartition(".")[2]
    shape = shape if dtype else None
    if shape is None or len(shape) != 1 or shape[0] == 0:
        raise input_error(name, type(array).__name__ if shape is None else f"shape {tuple(shape)}", "an int32 array of shape [B + 1]")
    if dtype != "int32":
        raise input_error(name, f"dtype {dtype} on a device", "int32", "Convert it before the call; only host values are converted here.")
    return array


def check_same_shape(array_q: Any, array_k: Any) -> None:
    """Refuse lengths of keys for another number of sequences.

    Raises:
        MLAInputError: See above.
    """
    if array_q.shape != array_k.shape:
        raise input_error("cu_seqlens_k", f"shape {tuple(array_k.shape)}", f"the shape of cu_seqlens_q, {tuple(array_q.shape)}")


def checked_tokens(name: str, stated: int | None, cu_seqlens: np.ndarray | None) -> tuple[int | None, bool]:
    """The rows of a buffer, stated or where the host knows the lengths their sum, and whether there may be rows past the last sequence.

    Raises:
        MLAInputError: Stated are fewer rows than the lengths have tokens, or no number of them.
    """
    total = None if cu_seqlens is None else int(cu_seqlens[-1])
    if stated is None:
        return total, total is None
    if type(stated) is not int and type(stated).__name__ not in _SYMBOLIC:
        check_integer(name, stated)
    if (total is None and isinstance(stated, int) and stated < 0) or (total is not None and stated < total):
        allowed = "0 or more" if total is None else f"at least the last cumulative length, {total}"
        raise input_error(name, f"{stated} tokens", allowed)
    return stated, True


def check_maximum(name: str, stated: int | None, cu_seqlens: np.ndarray | None = None) -> None:
    """Refuse what is no upper bound of one sequence's length, as far as the host knows the lengths.

    Raises:
        MLAInputError: It is no integer of the host, or negative, or less than the longest sequence.
    """
    if stated is None:
        return
    check_integer(name, stated)
    truth = None if cu_seqlens is None else int(np.diff(cu_seqlens).max(initial=0))
    if stated < 0 or (truth is not None and stated < truth):
        raise input_error(name, str(stated), "a non-negative upper bound" if truth is None else f"at least the longest sequence, {truth}")


def check_integer(name: str, stated: object) -> None:
    """Refuse what is no integer of the host.

    Raises:
        MLAInputError: See above.
    """
    if not isinstance(stated, (int, np.integer)) or isinstance(stated, bool):
        raise MLAInputError(f"{name}: got {type(stated).__name__}; allowed: a Python integer on the host, or None. A device scalar would need a sync.")
