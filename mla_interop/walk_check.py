"""What a call from latents is refused for, before anything is launched; and the dimensions that follow from its arrays."""

from typing import Any

from mla_interop.context import ContextMetadata
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import input_error
from mla_interop.exchange import check_floats
from mla_interop.latent_cache import check_scale


def check(
    q: Any, kv_c: Any, k_pe: Any, weight: tuple[int, int] | None, weight_dtype: Any, cache: Any, cache_scale: Any, metadata: Any, dimensions: Any
) -> tuple[MLADimensions, int]:
    """Check a call from latents, before anything is launched.

    Args:
        q, kv_c, k_pe, cache, cache_scale, metadata: As in :func:`mla_interop.walk.walk`.
        weight: ``(L, N * (P + V))``; None where kv_b is a function.
        weight_dtype: Its dtype, likewise.
        dimensions: Stated dimensions, or None.

    Returns:
        The dimensions, and L.

    Raises:
        MLAInputError: The arguments do not fit each other.
    """
    if not isinstance(metadata, ContextMetadata):
        raise input_error("metadata", type(metadata).__name__, "what prepare_context_metadata returns")
    if len(q.shape) != 3:
        raise input_error("q", f"shape {tuple(q.shape)}", "packed, [T, N, P + R]")
    check_floats("q", q)
    if dimensions is not None and not isinstance(dimensions, MLADimensions):
        raise input_error("dimensions", repr(dimensions), "MLADimensions")
    if weight is not None and len(weight) != 2:
        raise input_error("kv_b", f"a weight of {weight}", f"[L, N * (P + V)] with q's {q.shape[1]} heads")
    if q.shape[0] != metadata.new.bounds.num_tokens_q:
        raise input_error("q", f"{q.shape[0]} rows", f"{metadata.new.bounds.num_tokens_q}, since the metadata was prepared for them", "See num_tokens.")
    has_context = metadata.bounds.num_chunks > 0
    if has_context and (cache is None or len(cache.shape) != 3 or cache.shape[1] != metadata.bounds.block_size):
        got = "None" if cache is None else f"shape {tuple(cache.shape)}"
        raise input_error("cache", got, f"[blocks, {metadata.bounds.block_size}, L + R], since the metadata has a context in such blocks")
    if kv_c is None and k_pe is not None:
        raise input_error("k_pe", f"shape {tuple(k_pe.shape)} without kv_c", "None for the context alone, or both")
    if kv_c is not None:
        _check_latents(q, kv_c, k_pe)
    found, rank = _dimensions(q, kv_c, k_pe, weight, cache, dimensions)
    if has_context:
        _check_cache(cache, cache_scale, metadata, rank + found.qk_rope_head_dim)
    if weight is not None and weight_dtype != q.dtype:
        raise input_error("kv_b", f"a weight of {weight_dtype}", f"q's dtype, {q.dtype}")
    return found, rank


def _check_latents(q: Any, kv_c: Any, k_pe: Any) -> None:
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        if x is None:
            continue
        if len(x.shape) != 2 or x.shape[0] != q.shape[0]:
            raise input_error(name, f"shape {tuple(x.shape)}", f"one row for each of q's, [{q.shape[0]}, {'L' if name == 'kv_c' else 'R'}]")
        if x.dtype != q.dtype:
            raise input_error(name, f"dtype {x.dtype}", f"q's dtype, {q.dtype}")


def _check_cache(cache: Any, cache_scale: Any, metadata: ContextMetadata, width: int) -> None:
    if cache.shape[2] != width:
        raise input_error("cache", f"rows of {cache.shape[2]}", f"L + R = {width}")
    if metadata.num_cache_rows is not None and metadata.num_cache_rows > cache.shape[0] * cache.shape[1]:
        last = (metadata.num_cache_rows - 1) // cache.shape[1]
        raise input_error("cache", f"{cache.shape[0]} blocks", f"more than {last}, the largest block number in the block table that is used")
    check_scale("cache_scale", cache_scale, cache.dtype)


def _dimensions(q: Any, kv_c: Any, k_pe: Any, weight: tuple[int, int] | None, cache: Any, stated: Any) -> tuple[MLADimensions, int]:
    heads, width = q.shape[1], q.shape[2]
    if stated is None:
        if weight is None:
            raise input_error("dimensions", "None", "MLADimensions, since kv_b is a function", "A function's output does not say where k ends and v begins.")
        if kv_c is None and cache is None:
            raise input_error("dimensions", "None", "MLADimensions, since there are neither new tokens nor a cache to tell R")
        row = weight[0] if kv_c is None else kv_c.shape[1]
        if kv_c is not None:
            rope = 0 if k_pe is None else k_pe.shape[1]
        else:
            rope = cache.shape[2] - row
        nope = width - rope
        stated = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=weight[1] // max(heads, 1) - nope)
    if width != stated.qk_head_dim:
        raise input_error("q", f"last dim {width}", f"P + R = {stated.qk_head_dim}")
    if kv_c is not None and (0 if k_pe is None else k_pe.shape[1]) != stated.qk_rope_head_dim:
        raise input_error("k_pe", "None" if k_pe is None else f"last dim {k_pe.shape[1]}", f"R = {stated.qk_rope_head_dim}")
    if kv_c is not None:
        rank = kv_c.shape[1]
    else:
        rank = weight[0] if weight is not None else cache.shape[2] - stated.qk_rope_head_dim if cache is not None else 0
    outputs = heads * (stated.qk_nope_head_dim + stated.v_head_dim)
    if weight is not None and weight != (rank, outputs) or stated.v_head_dim < 1 or stated.qk_nope_head_dim < 1:
        raise input_error("kv_b", f"a projection of {weight}", f"(L, N * (P + V)) with L = {rank}, N = {heads}, P = {stated.qk_nope_head_dim}")
    return stated, rank
