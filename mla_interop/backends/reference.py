"""REFERENCE: plain blockwise attention in the array namespace of its inputs.

Inside ``jax.jit`` it is ordinary XLA and differentiable; on torch it is ordinary torch; it runs on any device and needs no
package.  It is slow, last in every order, and not the oracle of the tests, which is separate and simpler.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import array_api_compat

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.sequences import clear_tail

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig

BLOCK = 1024  # keys per step: bounds the float32 scores to N * T * BLOCK * 4 bytes


class ReferenceBackend(MLAPrefillBackend):
    """Online softmax over blocks of keys, with the ragged structure as a mask computed from cu_seqlens."""

    name = "REFERENCE"
    device_types = ("cpu", "cuda")
    supported_dtypes = ("bfloat16", "float16", "float32", "float64")

    @classmethod
    def supports_compute_capability(cls, capability: object) -> bool:
        """Always: array code runs wherever its framework does."""
        return True

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        """None: there is nothing to be missing."""
        return []

    @classmethod
    def validate_configuration(cls, config: "MLAPrefillSelectorConfig") -> list[str]:
        """Only the dtype can be wrong; an unknown GPU is no obstacle."""
        return [] if cls.supports_dtype(config.dtype) else [f"dtype {config.dtype} (allowed: {', '.join(cls.supported_dtypes)})"]

    @classmethod
    def kernels(cls, config: "MLAPrefillSelectorConfig") -> tuple[Sequence[Kernel], list[str]]:
        """The one array program."""
        return [Kernel(name=config.kernel_name("REFERENCE", "xp"), kind="array", make=lambda: attention, strided=frozenset("qkv"))], []


def attention(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, scale: float, is_causal: bool) -> tuple[Any, Any]:
    """Ragged attention as array code.

    Args:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]`` of one namespace, strides and tails arbitrary.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` in the same namespace.
        scale: Multiplied with the raw scores.
        is_causal: Bottom-right aligned causal mask, else none.

    Returns:
        ``out [T, N, V]`` in q's dtype and float32 (float64 for float64 inputs) ``lse [N, T]``; 0 and -inf for rows without a key.
    """
    xp = array_api_compat.array_namespace(q, k, v)
    wide = xp.float64 if q.dtype == xp.float64 else xp.float32
    reach, first = visible_keys(xp, q.shape[0], cu_seqlens_q, cu_seqlens_k, is_causal)
    queries = xp.permute_dims(xp.astype(q, wide), (1, 0, 2)) * scale
    # Keys past the last sequence may hold anything: select them away, never multiply by a zero weight.
    keys, values = clear_tail(k, cu_seqlens_k), clear_tail(v, cu_seqlens_k)
    top = xp.full_like(queries[..., 0], -math.inf)
    total, out = xp.zeros_like(top), xp.zeros_like(queries[..., :1] * xp.astype(values[:1, 0, :], wide))
    for start in range(0, k.shape[0], BLOCK):
        key_block = xp.permute_dims(xp.astype(keys[start : start + BLOCK], wide), (1, 2, 0))
        value_block = xp.permute_dims(xp.astype(values[start : start + BLOCK], wide), (1, 0, 2))
        index = start + xp.arange(key_block.shape[-1], dtype=xp.int32, device=array_api_compat.device(cu_seqlens_k))
        seen = ((index >= first[:, None]) & (index < reach[:, None]))[None]
        scores = xp.where(seen, queries @ key_block, -math.inf)
        new_top = xp.maximum(top, xp.max(scores, axis=-1))
        base = xp.where(new_top == -math.inf, xp.zeros_like(new_top), new_top)
        weights, decay = xp.exp(scores - base[..., None]), xp.exp(top - base)
        total = total * decay + xp.sum(weights, axis=-1)
        out = out * decay[..., None] + weights @ value_block
        top = new_top
    empty = total == 0
    safe = xp.where(empty, xp.ones_like(total), total)
    lse = xp.where(empty, xp.full_like(total, -math.inf), top + xp.log(safe))
    return xp.astype(xp.permute_dims(out / safe[..., None], (1, 0, 2)), q.dtype), lse


def visible_keys(xp: Any, rows: int, cu_seqlens_q: Any, cu_seqlens_k: Any, is_causal: bool) -> tuple[Any, Any]:
    """Per query row, the half-open range [first, reach) of the keys it sees; empty for rows past the last sequence."""
    row = xp.arange(rows, dtype=xp.int32, device=array_api_compat.device(cu_seqlens_q))
    # The sequence of a row: how many sequences end at or before it. Rows past the end belong to none.
    sequence = xp.sum(xp.astype(row[:, None] >= cu_seqlens_q[None, 1:], xp.int32), axis=1)
    clipped = xp.minimum(sequence, xp.full_like(sequence, cu_seqlens_q.shape[0] - 2))
    first, end = xp.take(cu_seqlens_k, clipped), xp.take(cu_seqlens_k, clipped + 1)
    reach = end
    if is_causal:
        reach = end - (xp.take(cu_seqlens_q, clipped + 1) - row) + 1
    return xp.where(row < cu_seqlens_q[-1], reach, first), first
