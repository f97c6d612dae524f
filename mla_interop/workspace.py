"""The memory that a walk needs besides its result: known when the metadata is, before anything is allocated (vllm#42112)."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from mla_interop.context import ContextMetadata
from mla_interop.dimensions import MLADimensions


class Workspace(NamedTuple):
    """Shapes of what a walk writes besides its result. Keys and values of the new tokens and of every chunk use the same memory in turn.

    Attributes:
        latents: Gathered rows, ``(S, L + R)``.
        projected: What a ``kv_b`` that is a function returns, ``(S, N, P + V)``; of 0 rows where it is a weight.
        kv: Keys and values of a weight, ``(S, N, P + R + V)``; keys of a function, ``(S, N, P + R)``.
        partial: A chunk's result, ``(tokens, N, V)``.
        carry: float32 result of a context that lies in several chunks, ``(tokens, N, V)``.
    """

    latents: tuple[int, int]
    projected: tuple[int, int, int]
    kv: tuple[int, int, int]
    partial: tuple[int, int, int]
    carry: tuple[int, int, int]

    def sizes(self, itemsize: int) -> Iterator[int]:
        """Bytes of each, in order, rounded up so that each starts at a multiple of 256."""
        for name, shape in self._asdict().items():
            yield -(-math.prod(shape) * (max(4, itemsize) if name == "carry" else itemsize) // 256) * 256


def workspace_shapes(metadata: ContextMetadata, tokens: int, dimensions: MLADimensions, num_heads: int, kv_lora_rank: int, function: bool = False) -> Workspace:
    """What a walk with this metadata over ``tokens`` query tokens needs; ``function``: kv_b is one, not a weight."""
    bounds, d = metadata.bounds, dimensions
    rows = max(bounds.chunk_rows, tokens)
    carried = tokens if bounds.padded and bounds.num_chunks > 1 else bounds.carried_tokens
    return Workspace(
        (bounds.chunk_rows, kv_lora_rank + d.qk_rope_head_dim),
        (rows if function else 0, num_heads, d.qk_nope_head_dim + d.v_head_dim),
        (rows, num_heads, d.qk_head_dim + (0 if function else d.v_head_dim)),
        (bounds.chunk_tokens, num_heads, d.v_head_dim),
        (carried, num_heads, d.v_head_dim),
    )


def workspace_bytes(
    metadata: ContextMetadata, tokens: int, dimensions: MLADimensions, num_heads: int, kv_lora_rank: int, itemsize: int = 2, function: bool = False
) -> int:
    """Bytes of memory that ``mla_attention`` needs besides its result: known when the metadata is, before anything is allocated (vllm#42112).

    Args:
        metadata: What ``prepare_context_metadata`` returned.
        tokens: T, rows of q.
        dimensions: P, R, V.
        num_heads: N.
        kv_lora_rank: L, the width of a latent without its rotary part.
        itemsize: Bytes of one element of q.
        function: Whether ``kv_b`` is a function (a quantized layer), and not a weight.
    """
    return sum(workspace_shapes(metadata, tokens, dimensions, num_heads, kv_lora_rank, function).sizes(itemsize))
