"""The walk of one layer: new tokens attend to themselves, and to a context that lies as latents in a paged cache, chunk by chunk.

Written once for every array namespace. What a framework does in its own way, because it has buffers to write into or a compiler to
please, comes in as :class:`Ops`; :func:`array_ops` has plain array code for all of it.

Each context row is gathered, expanded to keys and values, and attended once. Results are merged by LSE where the tokens have more than
one: into the new tokens' result, which is the accumulator and is not copied; in float32 first, where one request's context lies in
several chunks, so that rounding does not grow with their number (vllm#26042).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat

from mla_interop import latents
from mla_interop import lse as lse_module
from mla_interop.context import ContextMetadata
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import input_error
from mla_interop.sequences import PrefillMetadata

State = tuple[Any, Any]  # out [tokens, N, V] and lse [N, tokens]


class Ops(NamedTuple):
    """The steps of a walk.

    Attributes:
        gather: (cache ``[blocks, block, L + R]``, rows int32 ``[S]``, scale or None, dtype) -> latents ``[S, L + R]``, dequantized.
        project: (kv_c ``[S, L]``, k_pe ``[S, R]``) -> k ``[S, N, P + R]``, v ``[S, N, V]``.
        attend: (q, k, v, metadata, is_causal) -> :data:`State`.
        merge: (out_a, lse_a, out_b, lse_b) -> State, in out_a's dtype; it may write into a, which is not used again.
        widen: (out) -> a copy in float32 (float64 of float64), which loses nothing in many merges.
        fold: (state, first token, out_b, lse_b) -> state with b merged into its tokens from the first on; may write into state.
        scan: (step, start, metadata) -> the last of ``carry = step(carry, rows, chunk)`` over the padded layout's chunks.
    """

    gather: Callable[..., Any]
    project: Callable[..., State]
    attend: Callable[..., State]
    merge: Callable[..., State]
    widen: Callable[[Any], Any]
    fold: Callable[..., State]
    scan: Callable[[Callable[[Any, Any, PrefillMetadata], Any], Any, ContextMetadata], Any]


def walk(q: Any, kv_c: Any, k_pe: Any, cache: Any, metadata: ContextMetadata, ops: Ops, kv_lora_rank: int, v_head_dim: int, cache_scale: Any) -> State:
    """One layer's attention.

    Args:
        q: ``[T, N, P + R]``.
        kv_c, k_pe: Latents of the new tokens, ``[T, L]`` and ``[T, R]``; kv_c None: context alone, a partial result.
        cache: Latents of the context, ``[blocks, block, L + R]``; read only if there is a context.
        metadata: What ``prepare_context_metadata`` returned.
        ops: The steps.
        kv_lora_rank, v_head_dim: L, V.
        cache_scale: What a quantized cache's values are multiplied with; None for others.

    Returns:
        ``out [T, N, V]`` in q's dtype and ``lse [N, T]``; 0 and -inf for tokens that see nothing.
    """
    new = None if kv_c is None else ops.attend(q, *ops.project(kv_c, k_pe), metadata.new, True)
    if not metadata.bounds.num_chunks:
        return _nothing(q, v_head_dim, q.dtype) if new is None else new

    def attend_chunk(queries: Any, rows: Any, chunk: PrefillMetadata) -> State:
        latents = ops.gather(cache, rows, cache_scale, q.dtype)
        k, v = ops.project(latents[:, :kv_lora_rank], latents[:, kv_lora_rank:])
        return ops.attend(queries, k, v, chunk, False)

    walk_chunks = _walk_padded if metadata.bounds.padded else _walk_exact
    return walk_chunks(q, new, metadata, ops, v_head_dim, attend_chunk)


def _walk_exact(q: Any, state: State | None, metadata: ContextMetadata, ops: Ops, v_head_dim: int, attend_chunk: Callable[..., State]) -> State:
    carry: Any = None
    bounds = metadata.bounds.chunks
    if state is None:
        covered = len(bounds) == 1 and (bounds[0].first_token, bounds[0].stop_token) == (0, q.shape[0])
        if covered:
            return attend_chunk(q, metadata.rows, metadata.chunks[0])
        state = _nothing(q, v_head_dim, q.dtype)
    for chunk, here in zip(metadata.chunks, bounds, strict=True):
        out, lse = attend_chunk(q[here.first_token : here.stop_token], metadata.rows[here.first_row : here.stop_row], chunk)
        begin, end = 0, here.stop_token - here.first_token
        if here.continued:
            begin = here.continued
            carry = ops.merge(*carry, out[:begin, ...], lse[:, :begin])
            if here.continues and here.one_request:
                continue
            state = ops.fold(state, here.first_token, *carry)
        if here.continues:
            end -= here.continues
            carry = ops.widen(out[end:, ...]), lse[:, end:]
        if begin < end:
            state = ops.fold(state, here.first_token + begin, out[begin:end, ...], lse[:, begin:end])
    return state


def _walk_padded(q: Any, new: State | None, metadata: ContextMetadata, ops: Ops, v_head_dim: int, attend_chunk: Callable[..., State]) -> State:
    if metadata.bounds.num_chunks == 1:
        only = attend_chunk(q, metadata.rows[0, ...], metadata.chunks[0])
        return only if new is None else ops.merge(*new, *only)
    xp = array_api_compat.array_namespace(q)
    start = _nothing(q, v_head_dim, xp.float32 if q.dtype != xp.float64 else q.dtype) if new is None else (ops.widen(new[0]), new[1])
    out, lse = ops.scan(lambda state, rows, chunk: ops.merge(*state, *attend_chunk(q, rows, chunk)), start, metadata)
    return xp.astype(out, q.dtype), lse


def widen(out: Any) -> Any:
    """A copy of ``out`` in the dtype of an accumulator."""
    xp = array_api_compat.array_namespace(out)
    return xp.astype(out, xp.float64 if out.dtype == xp.float64 else xp.float32)


def _nothing(q: Any, v_head_dim: int, dtype: Any) -> State:
    xp, device = array_api_compat.array_namespace(q), array_api_compat.device(q)
    tokens, heads, _ = q.shape
    return xp.zeros((tokens, heads, v_head_dim), dtype=dtype, device=device), xp.full((heads, tokens), -math.inf, dtype=xp.float32, device=device)


def array_ops(kv_b: Any, dimensions: MLADimensions, attend: Callable[..., State]) -> Ops:
    """Plain array code for every step.

    Args:
        kv_b: ``[L, N * (P + V)]``, or a function of ``[S, L]`` that gives ``[S, N * (P + V)]``.
        dimensions: P, R, V.
        attend: As in :class:`Ops`.
    """
    return Ops(gather, functools.partial(project, kv_b, dimensions), attend, lse_module.merge, widen, fold, scan)


def gather(cache: Any, rows: Any, scale: Any, dtype: Any) -> Any:
    """Rows of a paged cache, dequantized."""
    return latents.gather(cache, rows, scale=scale, dtype=dtype)


def project(kv_b: Any, dimensions: MLADimensions, kv_c: Any, k_pe: Any) -> State:
    """Keys ``[S, N, P + R]`` and values ``[S, N, V]`` of latents ``[S, L]`` and ``[S, R]``; v is a view of the projection where the namespace has views.

    Raises:
        MLAInputError: ``kv_b`` is a function that returns something else than ``[S, N * (P + V)]``.
    """
    xp, nope = array_api_compat.array_namespace(kv_c), dimensions.qk_nope_head_dim
    kv: Any = kv_b(kv_c) if callable(kv_b) else xp.astype(kv_c @ kv_b, kv_c.dtype, copy=False)  # NumPy multiplies bfloat16 to float32
    width = nope + dimensions.v_head_dim
    shape = tuple(getattr(kv, "shape", ()))
    if shape[:1] != kv_c.shape[:1] or math.prod(shape[1:]) % width:
        got = f"a function that returns {shape or type(kv).__name__}"
        raise input_error("kv_b", got, f"[S, N * (P + V)] with S = {kv_c.shape[0]} and P + V = {width}")
    kv = kv.reshape(kv_c.shape[0], math.prod(kv.shape[1:]) // width, width)  # -1 is no answer where there are no rows
    k = latents.expand_k(kv, k_pe, nope) if dimensions.qk_rope_head_dim else kv[..., :nope]
    return k, kv[..., nope:]


def fold(state: State, first: int, out: Any, lse: Any) -> State:
    """A new state in which ``out`` and ``lse`` are merged into the tokens from ``first`` on; the others keep their bits."""
    xp, stop = array_api_compat.array_namespace(out), first + out.shape[0]
    made, made_lse = lse_module.merge(state[0][first:stop, ...], state[1][:, first:stop], out, lse)
    whole = xp.concat([state[0][:first, ...], made, state[0][stop:, ...]], axis=0)
    return whole, xp.concat([state[1][:, :first], made_lse, state[1][:, stop:]], axis=1)


def scan(step: Callable[[Any, Any, PrefillMetadata], Any], carry: Any, metadata: ContextMetadata) -> Any:
    """A loop over the padded layout's chunks, in Python."""
    for index in range(metadata.bounds.num_chunks):
        carry = step(carry, metadata.rows[index, ...], metadata.chunks[index])
    return carry
