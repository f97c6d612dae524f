"""What the frontends' ``write_latent_cache`` share: the checks, and a token's latents as the cache stores them."""

import math
import numbers
from typing import Any

import array_api_compat
import numpy as np

from mla_interop.errors import input_error
from mla_interop.exchange import FLOATS, check_floats, dtype_name, is_tracer

FLOAT8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def float8_max(dtype: Any) -> float | None:
    """The largest number of an FP8 dtype of any framework; None for other dtypes."""
    return FLOAT8_MAX.get(dtype_name(dtype))


def host_scale(scale: Any) -> Any:
    """A NumPy array of one element as the number that it holds; anything else as it is."""
    return scale.reshape(-1)[0].item() if isinstance(scale, np.ndarray) and scale.size == 1 else scale


def _is_finite_positive(number: numbers.Real) -> bool:
    try:
        return not isinstance(number, bool) and 0 < float(number) < math.inf
    except OverflowError:
        return False


def check_scale(name: str, scale: Any, dtype: Any) -> None:
    """A quantized cache needs a scale, any other must have none (vllm#37054): it would be applied to one side only.

    Raises:
        MLAInputError: Also for a scale that is not finite and positive, where the host knows it, and for a cache that holds no floats.
    """
    if dtype_name(dtype) not in (*FLOATS, *FLOAT8_MAX):  # FP8 is often kept as bytes, which would be read as integers without a word
        allowed = f"{', '.join(FLOATS)}, {' or '.join(FLOAT8_MAX)}"
        raise input_error("cache", f"dtype {dtype}", allowed, "Bytes that hold FP8 are a view away: cache.view(torch.float8_e4m3fn).")
    if float8_max(dtype) is None:
        if scale is not None:
            raise input_error(name, repr(scale), f"None, since the cache is {dtype}, not FP8")
        return
    if scale is None:
        raise input_error(name, "None", f"the per-tensor scale of the {dtype} cache", "Pass 1.0 if its values were stored as they are.")
    if isinstance(scale, numbers.Real) and not _is_finite_positive(scale):
        raise input_error(name, repr(scale), "a finite positive number")
    if not isinstance(scale, numbers.Real) and not is_tracer(scale) and math.prod(getattr(scale, "shape", (0,))) != 1:
        raise input_error(name, f"a {type(scale).__name__} of shape {tuple(getattr(scale, 'shape', ()))}", "one number")


def rows_to_store(cache: Any, kv_c: Any, k_pe: Any, slot_mapping: Any, scale: Any) -> Any:
    """``[T, L + R]`` in the cache's dtype.

    Raises:
        MLAInputError: The arguments do not fit each other.
    """
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        if x is not None and len(x.shape) != 2:
            raise input_error(name, f"shape {tuple(x.shape)}", "[T, L]" if name == "kv_c" else "[T, R]")
        if x is not None:
            check_floats(name, x)
    rows, pe = kv_c.shape[0], 0 if k_pe is None else k_pe.shape[1]
    if len(cache.shape) != 3 or cache.shape[2] != kv_c.shape[1] + pe:
        raise input_error("cache", f"shape {tuple(cache.shape)}", f"[blocks, block, L + R] with L + R = {kv_c.shape[1] + pe}")
    if k_pe is not None and k_pe.shape[0] != rows:
        raise input_error("k_pe", f"{k_pe.shape[0]} rows", f"kv_c's, {rows}")
    if tuple(slot_mapping.shape) != (rows,):
        raise input_error("slot_mapping", f"shape {tuple(slot_mapping.shape)}", f"one slot a token, [{rows}]")
    if "int" not in str(slot_mapping.dtype):
        raise input_error("slot_mapping", f"dtype {slot_mapping.dtype}", "integers", "A negative one writes nothing.")
    if rows and not cache.shape[0] * cache.shape[1]:
        raise input_error("cache", f"shape {tuple(cache.shape)}", f"a cache with places for the {rows} tokens")
    check_scale("scale", scale, cache.dtype)
    xp = array_api_compat.array_namespace(kv_c)
    values = kv_c if k_pe is None or not pe else xp.concat([kv_c, k_pe], axis=1)
    largest = float8_max(cache.dtype)
    if largest is not None:  # clipped: what is out of range would become NaN
        values = xp.clip(xp.astype(values, xp.float32) / scale, -largest, largest)
    return xp.astype(values, cache.dtype)
