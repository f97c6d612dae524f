"""The log-sum-exp contract: float32, natural logarithm, ``[N, T]``, -inf for rows without a key; and merging by it.

Written against the array namespace of the operands (NumPy, torch, JAX), so there is one version for every framework.
"""

import math
from typing import Any, Literal

import array_api_compat

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


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """One attention result from two over disjoint sets of keys.

    With ``m = max(lse_a, lse_b)`` the weights are ``exp(lse - m) / sum`` (online softmax, arXiv:1805.02867). Rows without a key on
    one side take the other side bit for bit, by selection: what such a row's ``out`` holds, NaN too, does not matter (flashinfer#4975).

    Args:
        out_a, out_b: ``[T, N, V]``.
        lse_a, lse_b: float32 ``[N, T]``, natural log.

    Returns:
        ``out [T, N, V]`` in ``out_a``'s dtype and ``lse [N, T]``; rows empty on both sides get 0 and -inf.
    """
    xp = array_api_compat.array_namespace(out_a, lse_a, out_b, lse_b)
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
    zero = xp.zeros_like(out_a)
    # Selected before the product too: what an empty row holds must not even raise a floating-point warning.
    wide_a, wide_b = (xp.astype(xp.where(none, zero, out), xp.float32) for none, out in ((none_a, out_a), (none_b, out_b)))
    mixed = xp.astype(wide_a * share_a + wide_b * share_b, out_a.dtype)
    out = xp.where(none_a, xp.where(none_b, zero, xp.astype(out_b, out_a.dtype, copy=False)), xp.where(none_b, out_a, mixed))
    return out, lse


def _per_row(xp: Any, values: Any) -> Any:
    """``[N, T]`` to ``[T, N, 1]``, to go with out."""
    return xp.expand_dims(values.T, axis=-1)
