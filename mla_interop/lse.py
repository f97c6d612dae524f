"""The log-sum-exp contract: float32, natural logarithm, ``[N, T]``, -inf for rows without a key; and merging by it.

Written against the array namespace of the operands (NumPy, torch, JAX), so there is one version for every framework.
"""

import math
import sys
from typing import Any, Literal

import array_api_compat

from mla_interop.errors import input_error
from mla_interop.exchange import check_floats

LSEBase = Literal["e", "2"]
LSELayout = Literal["NT", "TN"]

LN2 = math.log(2.0)


def normalize(lse: Any, base: LSEBase = "e", layout: LSELayout = "NT") -> Any:
    """A kernel's native LSE in the package's convention. The one place where bases and layouts are converted.

    Args:
        lse: float32 ``[N, T]`` or, with ``layout="TN"``, ``[T, N]``.
        base: Base of the kernel's logarithm. Declared by the kernel's adapter, never guessed (flashinfer#2113, vllm#52796).
        layout: Declared too: N == T hides a missing transpose (sglang#9363).

    Returns:
        float32 ``[N, T]``, natural log; +inf, which FlashAttention-2 gives to rows without a key (vllm#15492), becomes -inf.
    """
    xp = array_api_compat.array_namespace(lse)
    if layout == "TN":
        lse = lse.T
    lse = xp.astype(lse, xp.float32, copy=False)
    if base == "2":
        lse = lse * LN2
    return xp.where(lse == math.inf, xp.full_like(lse, -math.inf), lse)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None) -> tuple[Any, Any]:
    """One attention result from two over disjoint sets of keys.

    With ``m = max(lse_a, lse_b)`` the weights are ``exp(lse - m) / sum`` (online softmax, arXiv:1805.02867). Rows without a key on
    one side take the other side bit for bit, by selection: what such a row's ``out`` holds, NaN too, does not matter (flashinfer#4975).
    Associative and commutative within rounding. Torch tensors on CUDA are merged in one pass by a Triton kernel
    (float64, which it would cut to float32, is not, nor is what needs a gradient, which it does not have).

    Args:
        out_a, out_b: ``[T, N, V]``, each with strides of its own; a range of rows is a slice.
        lse_a, lse_b: float32 ``[N, T]``, natural log; +inf counts as -inf. Also with strides of their own.
        out, lse: Where to write, for arrays that can be written: an operand itself (in place), or memory that no operand shares.
            None: a new array, and no operand is written.

    Returns:
        ``out [T, N, V]`` in ``out_a``'s dtype (or that of the ``out`` given) and float32 ``lse [N, T]``; rows empty on both sides get 0 and -inf.

    Raises:
        MLAInputError: Shapes, dtypes or devices that do not belong together, or an array to write to that cannot be written.
    """
    _check(out_a, lse_a, out_b, lse_b, out, lse)
    if array_api_compat.is_torch_array(out_a) and out_a.is_cuda and out_a.element_size() < 8 and not _wants_gradient(out_a, lse_a, out_b, lse_b):
        from mla_interop.kernels import triton_merge

        return triton_merge.merge(out_a, lse_a, out_b, lse_b, out, lse)
    merged, merged_lse = _merge(out_a, lse_a, out_b, lse_b, out_a.dtype if out is None else out.dtype)
    return written(out, merged), written(lse, merged_lse)


def _wants_gradient(*tensors: Any) -> bool:
    return any(x.requires_grad for x in tensors) and sys.modules["torch"].is_grad_enabled()


def written(target: Any, value: Any) -> Any:
    """``value`` itself, or ``target`` with it."""
    if target is None:
        return value
    target[...] = value
    return target


def check_target(name: str, target: Any, shape: tuple[int, ...]) -> None:
    """Refuse a ``target`` that is not of ``shape`` or cannot be written.

    Raises:
        MLAInputError: See above.
    """
    if target is None:
        return
    if array_api_compat.is_jax_array(target):
        raise input_error(name, "a JAX array, which cannot be written", "None", "Take the result, and donate the operands to the jitted function.")
    if tuple(target.shape) != shape:
        raise input_error(name, f"shape {tuple(target.shape)}", f"{shape}")


def _check(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> None:
    for name, value in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        _check_array(name, value, out_a)
    shape = tuple(out_a.shape)
    if len(shape) != 3:
        raise input_error("out_a", f"shape {shape}", "[T, N, V]")
    if tuple(out_b.shape) != shape:
        raise input_error("out_b", f"shape {tuple(out_b.shape)}", f"out_a's, {shape}")
    lse_shape = (shape[1], shape[0])
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(value.shape) != lse_shape:
            raise input_error(name, f"shape {tuple(value.shape)}", f"[N, T] of out_a, {lse_shape}", "normalize(lse, layout='TN') transposes.")
    for name, value, expected in (("out", out, shape), ("lse", lse, lse_shape)):
        if value is not None:
            _check_array(name, value, out_a)
        check_target(name, value, expected)


def _check_array(name: str, value: Any, like: Any) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise input_error(name, type(value).__name__, "an array")
    check_floats(name, value)
    if not array_api_compat.is_torch_array(value):
        return
    if value.layout != sys.modules["torch"].strided:
        raise input_error(name, f"layout {value.layout}", "a strided tensor", "to_dense() makes one.")
    if array_api_compat.is_torch_array(like) and value.device != like.device:
        raise input_error(name, f"device {value.device}", f"out_a's device, {like.device}")


def _merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, dtype: Any) -> tuple[Any, Any]:
    try:
        xp = array_api_compat.array_namespace(out_a, lse_a, out_b, lse_b)
    except TypeError as error:
        kinds = ", ".join(type(x).__name__ for x in (out_a, lse_a, out_b, lse_b))
        raise input_error("out_a, lse_a, out_b, lse_b", kinds, "arrays of one framework") from error
    lse_a, lse_b = normalize(lse_a), normalize(lse_b)
    empty_a, empty_b = lse_a == -math.inf, lse_b == -math.inf
    top = xp.maximum(lse_a, lse_b)
    top = xp.where(empty_a & empty_b, xp.zeros_like(top), top)
    weight_a, weight_b = xp.exp(lse_a - top), xp.exp(lse_b - top)
    total = weight_a + weight_b
    total = xp.where(empty_a & empty_b, xp.ones_like(total), total)
    lse = xp.where(empty_a & empty_b, xp.full_like(top, -math.inf), xp.log(total) + top)
    share_a, share_b = (_per_row(xp, weight / total) for weight in (weight_a, weight_b))
    none_a, none_b = _per_row(xp, empty_a), _per_row(xp, empty_b)
    wide = xp.result_type(out_a.dtype, out_b.dtype, xp.float32)
    # Selected before the product too: what an empty row holds must not even raise a floating-point warning.
    wide_a, wide_b = (xp.where(none, xp.zeros_like(out, dtype=wide), xp.astype(out, wide)) for none, out in ((none_a, out_a), (none_b, out_b)))
    mixed = wide_a * share_a + wide_b * share_b
    return xp.astype(xp.where(none_a, wide_b, xp.where(none_b, wide_a, mixed)), dtype), lse


def _per_row(xp: Any, values: Any) -> Any:
    """``[N, T]`` to ``[T, N, 1]``, to go with out."""
    return xp.expand_dims(values.T, axis=-1)
