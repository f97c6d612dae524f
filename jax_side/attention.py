"""One layer's attention from latents, as pure functions for use inside and outside ``jax.jit``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_side import pytrees
from jax_side.functional import mla_prefill
from mla_interop import context, walk
from mla_interop.chunks import context_bucket
from mla_interop.context import ContextMetadata
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import input_error
from mla_interop.exchange import is_tracer
from mla_interop.latent_cache import host_scale, rows_to_store
from mla_interop.prefill import make_options
from mla_interop.sequences import PrefillMetadata
from mla_interop.walk_check import check

WRITTEN_OUT = 4  # chunks of the padded layout, above which they are a loop


def mla_attention(
    q: Any,
    kv_c: Any,
    k_pe: Any,
    kv_b: Any,
    *,
    metadata: ContextMetadata,
    cache: Any = None,
    cache_scale: Any = None,
    dimensions: MLADimensions | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Any = None,
    fallback: bool = False,
    route: str = "ffi",
) -> Any:
    """Prefill attention of one layer: causal over the new tokens, and over the context that the paged cache holds.

    Args:
        q: ``[T, N, P + R]``, the rotary part behind.
        kv_c: ``[T, L]``, the new tokens' latents after their norm. None: the context alone, a partial result to be merged by LSE.
        k_pe: ``[T, R]``, their rotary keys; None where R is 0.
        kv_b: The up-projection: ``[L, N * (P + V)]``, per head k before v, or a function of ``[S, L]`` that gives ``[S, N * (P + V)]``.
        metadata: What :func:`prepare_context_metadata` returned. It is a pytree: pass it as an argument of the jitted function.
        cache: ``[blocks, block, L + R]``, of a dtype that converts to q's.
        cache_scale: What an FP8 cache's values are multiplied with: a number or an array of one element.
        dimensions: P, R, V; needed where ``kv_b`` is a function.
        scale: Multiplied with the raw scores; None: ``(P + R) ** -0.5``. YaRN's factor is yours (``mla_interop.softmax_scale``).
        return_lse: Also return the LSE over context and new tokens.
        backend, fallback, route: As in ``mla_prefill``.

    Returns:
        ``out [T, N, V]`` in q's dtype; with ``return_lse`` also float32 ``lse [N, T]``.

    Raises:
        MLAInputError: An argument is wrong.
        MLAUnsupportedError: No backend, or not the one asked for, can serve it.
    """
    arrays = {"q": q, "kv_c": kv_c, "k_pe": k_pe, "cache": cache, **({} if callable(kv_b) else {"kv_b": kv_b})}
    _check_arrays(arrays, ("kv_c", "k_pe", "cache"))
    q, kv_c, k_pe, cache = (None if x is None else jnp.asarray(x) for x in (q, kv_c, k_pe, cache))
    weight = (None, None) if callable(kv_b) else (tuple(kv_b.shape), kv_b.dtype)
    dimensions, rank = check(q, kv_c, k_pe, *weight, cache, cache_scale, metadata, dimensions)
    make_options(scale, True, return_lse, backend, fallback, "finite")
    cache_scale = host_scale(cache_scale)
    with_lse = return_lse or metadata.bounds.num_chunks > 0
    options = {"scale": scale, "backend": backend, "fallback": fallback, "route": route}

    def attend(q: Any, k: Any, v: Any, lengths: PrefillMetadata, is_causal: bool) -> tuple[Any, Any]:
        made = mla_prefill(q, k, v, metadata=lengths, is_causal=is_causal, return_lse=with_lse, **options)
        return made if with_lse else (made, None)

    ops = walk.array_ops(kv_b, dimensions, attend)
    if not callable(kv_b):
        ops = ops._replace(project=_projection(jnp.asarray(kv_b), dimensions, q.shape[1]))
    metadata = replace(metadata, rows=jnp.asarray(metadata.rows))
    if any(is_tracer(x) for x in jax.tree.leaves((q, cache, metadata))):
        ops = ops._replace(scan=_scan)
    else:
        metadata = _unstacked(metadata)
    out, lse = walk.walk(q, kv_c, k_pe, cache, metadata, ops, rank, dimensions.v_head_dim, cache_scale)
    return (out, lse) if return_lse else out


def prepare_context_metadata(
    query_lens: Any = None, context_lens: Any = None, block_table: Any = None, *, device: Any = None, **options: Any
) -> ContextMetadata:
    """``mla_interop.prepare_context_metadata``, with its arrays on a device already: a pytree to pass through ``jax.jit``.

    The layout is the padded one: new lengths compile nothing while T, B, the workspace and ``num_context_rows`` stay the same. That bucket
    is :func:`mla_interop.context_bucket` of the total where it is not stated. With ``num_context_rows=None`` the layout is the exact one.

    Args:
        query_lens, context_lens, block_table: As there.
        device: A ``jax.Device`` or sharding; None: JAX's default device.
        **options: As there.

    Raises:
        MLAInputError, MLAUnsupportedError: As there.
    """
    if "num_context_rows" not in options and context_lens is not None:
        options["num_context_rows"] = context_bucket(int(np.sum(np.asarray(context_lens), dtype=np.int64)), options.get("block_size", 1))
    metadata = context.prepare_context_metadata(query_lens, context_lens, block_table, **options)
    chunks = metadata.chunks
    if metadata.bounds.padded and len(chunks) > 1:
        chunks = (_stacked(chunks),)
    placed = [m.with_arrays(*jax.device_put(_arrays(m), device)) for m in (metadata.new, *chunks)]
    return replace(metadata, new=placed[0], rows=jax.device_put(metadata.rows, device), chunks=tuple(placed[1:]))


def write_latent_cache(cache: Any, kv_c: Any, k_pe: Any, slot_mapping: Any, scale: Any = None) -> Any:
    """A paged cache with new tokens' latents in it. Donate ``cache`` to the jitted function, and it is written in place.

    Args:
        cache: ``[blocks, block, L + R]``.
        kv_c, k_pe: ``[T, L]``, ``[T, R]``; k_pe may be None where R is 0.
        slot_mapping: Integers ``[T]``: ``block * block_size + offset`` of each token; a negative one writes nothing.
        scale: FP8 caches hold latents divided by it, clipped to their dtype's range.

    Raises:
        MLAInputError: The arguments do not fit each other.
    """
    _check_arrays({"cache": cache, "kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slot_mapping}, ("k_pe",))
    cache, kv_c, slot_mapping = (jnp.asarray(x) for x in (cache, kv_c, slot_mapping))
    rows = rows_to_store(cache, kv_c, None if k_pe is None else jnp.asarray(k_pe), slot_mapping, host_scale(scale))
    block, offset = jnp.divmod(jnp.where(slot_mapping < 0, cache.shape[0] * cache.shape[1], slot_mapping), cache.shape[1])
    return cache.at[block, offset].set(rows, mode="drop")


def _check_arrays(arrays: dict[str, Any], optional: tuple[str, ...]) -> None:
    for name, x in arrays.items():
        if not isinstance(x, (jax.Array, np.ndarray)) and not (x is None and name in optional):
            raise input_error(name, type(x).__name__, "a jax.Array or a NumPy array")


def _projection(weight: Any, dimensions: MLADimensions, num_heads: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A walk's ``project``: one product for k and one for v, each written once and compact, as custom calls take them.

    In 16 bits the product that makes k has k_pe among its inputs and an identity among its weights, which is exact (every sum has one
    term): a tenth more arithmetic in all costs less than a pass over K that puts k_pe beside k_nope.
    """
    nope, rope = dimensions.qk_nope_head_dim, dimensions.qk_rope_head_dim
    per_head = weight.reshape(weight.shape[0], num_heads, nope + dimensions.v_head_dim)
    weight_k, weight_v = per_head[..., :nope], per_head[..., nope:].reshape(weight.shape[0], -1)
    fused = rope > 0 and weight.dtype.itemsize == 2
    if fused:
        identity = jnp.broadcast_to(jnp.eye(rope, dtype=weight.dtype)[:, None, :], (rope, num_heads, rope))
        weight_k = jnp.pad(weight_k, ((0, rope), (0, 0), (0, rope))).at[weight.shape[0] :, :, nope:].set(identity)
    weight_k = weight_k.reshape(weight_k.shape[0], -1)

    def project(kv_c: Any, k_pe: Any) -> tuple[Any, Any]:
        rows = kv_c.shape[0]
        v = (kv_c @ weight_v).reshape(rows, num_heads, dimensions.v_head_dim)  # -1 is no answer where there are no rows
        k = ((jnp.concatenate([kv_c, k_pe], axis=1) if fused else kv_c) @ weight_k).reshape(rows, num_heads, weight_k.shape[1] // num_heads)
        if rope and not fused:
            k = jnp.concatenate([k, jnp.broadcast_to(k_pe[:, None, :], (rows, num_heads, rope))], axis=-1)
        return k, v

    return project


def _scan(step: Callable[[Any, Any, PrefillMetadata], Any], carry: Any, metadata: ContextMetadata) -> Any:
    """A loop over the padded layout's chunks inside the program: memory for one chunk however many there are, and one body where they are many.

    A few are written out, so that XLA fuses the accumulator's conversions into the first merge and the last. There a chunk's rows are
    known only when the chunk before is attended: else its keys could be made, and need memory, at the same time.
    """
    if metadata.bounds.num_chunks <= WRITTEN_OUT:
        for rows, chunk in zip(metadata.rows, _unstacked(metadata).chunks, strict=True):
            lse, rows = jax.lax.optimization_barrier((carry[1], rows))
            carry = step((carry[0], lse), rows, chunk)
        return carry
    stack = metadata.chunks[0] if len(metadata.chunks) == 1 else _stacked(metadata.chunks)
    return jax.lax.scan(lambda carry, chunk: (step(carry, *chunk), None), carry, (metadata.rows, stack))[0]


def _stacked(chunks: tuple[PrefillMetadata, ...]) -> PrefillMetadata:
    def stack(*parts: Any) -> Any:
        return (np if all(isinstance(part, np.ndarray) for part in parts) else jnp).stack(parts)

    cu_seqlens_q, cu_seqlens_k, plan = jax.tree.map(stack, *map(_arrays, chunks))
    return PrefillMetadata(cu_seqlens_q, cu_seqlens_k, plan, chunks[0].bounds)


def _arrays(metadata: PrefillMetadata) -> tuple[Any, Any, Any]:
    return metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.plan


def _unstacked(metadata: ContextMetadata) -> ContextMetadata:
    if not metadata.bounds.padded or len(metadata.chunks) == metadata.bounds.num_chunks:
        return metadata
    (stack,) = metadata.chunks
    plans = [None] * metadata.bounds.num_chunks if stack.plan is None else stack.plan
    arrays = zip(stack.cu_seqlens_q, stack.cu_seqlens_k, plans, strict=True)
    return replace(metadata, chunks=tuple(stack.with_arrays(*parts) for parts in arrays))


pytrees.register(ContextMetadata, ["new", "rows", "chunks"], ["bounds"], ["num_cache_rows"])
