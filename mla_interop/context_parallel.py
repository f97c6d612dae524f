"""Attention over keys that are spread over ranks: what each rank's share of the problem is, and how the shares add up. For any array namespace.

The packed k and v, ``[S, N, ...]``, are cut into contiguous runs of rows, one a rank; queries are on every rank. A run holds a contiguous part
of each sequence's keys (or none), so a rank's share under the bottom-right causal mask is two plain ragged problems: with ``end`` keys of a
sequence up to the run's last, the queries that see no further than that key are its first ``end - (len_k - len_q)``; over the run those are
causal, bottom-right again, and the queries behind them see the whole run. Splitting each sequence's queries in two sequences says so in
cumulative lengths alone; nothing is gathered.
"""

import math
from typing import Any, NamedTuple

import array_api_compat

from mla_interop.lse import normalize


class Share(NamedTuple):
    """One rank's lengths, int32.

    Attributes:
        cu_seqlens_q: ``[2 B + 1]``: every sequence's queries, those that see a part of the rank's keys (or none) before those that see all of them.
        cu_seqlens_k: ``[2 B + 1]`` for the causal problem: keys of the former; the latter have none.
        cu_seqlens_k_full: ``[2 B + 1]`` for the problem without a mask: keys of the latter; the former have none.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    cu_seqlens_k_full: Any


def share_of(cu_seqlens_q: Any, cu_seqlens_k: Any, first_row: Any, rows: int, is_causal: bool) -> Share:
    """The lengths of the rank that holds rows ``first_row`` to ``first_row + rows - 1`` of k and v.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` of the whole problem, of one namespace (NumPy, torch, JAX, traced).
        first_row: An integer, or an integer scalar of that namespace (the rank may be traced).
        rows: Rows that the rank holds; those past the last sequence are padding.
        is_causal: Without the mask every query sees all keys of the run.
    """
    xp = array_api_compat.array_namespace(cu_seqlens_q, cu_seqlens_k)
    lengths_q, lengths_k = cu_seqlens_q[1:] - cu_seqlens_q[:-1], cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    zero = xp.zeros_like(lengths_k)
    begin = xp.minimum(xp.maximum(first_row - cu_seqlens_k[:-1], zero), lengths_k)
    end = xp.minimum(xp.maximum(first_row + rows - cu_seqlens_k[:-1], zero), lengths_k)
    keys = xp.astype(end - begin, xp.int32)
    # Rows of the run before the first sequence's part do not exist: runs and sequences are both contiguous.
    partly = xp.minimum(xp.maximum(end - (lengths_k - lengths_q), zero), lengths_q) if is_causal else zero
    start = xp.zeros_like(cu_seqlens_q[:1])  # also of no sequences
    return Share(_interleaved(xp, start, partly, lengths_q - partly), _interleaved(xp, start, keys, zero), _interleaved(xp, start, zero, keys))


def _interleaved(xp: Any, start: Any, first: Any, second: Any) -> Any:
    """Cumulative lengths of sequences that are each two; ``start`` is what they begin with, 0."""
    lengths = xp.reshape(xp.stack([first, second], axis=1), (-1,))
    sums = xp.cumulative_sum(lengths, axis=0, dtype=xp.int32) if hasattr(xp, "cumulative_sum") else xp.cumsum(lengths, axis=0, dtype=xp.int32)
    return xp.concat([start, sums])


def contribution(out: Any, lse: Any, all_lse: Any) -> tuple[Any, Any]:
    """What a rank adds to the result: the sum of all ranks' contributions is ``out`` of the whole problem.

    Args:
        out: ``[T, N, V]``, this rank's.
        lse: float32 ``[N, T]``, this rank's, natural log.
        all_lse: ``[ranks, N, T]``, every rank's.

    Returns:
        float32 (float64 of float64) ``[T, N, V]``, and the whole problem's float32 lse ``[N, T]``. Rows that see no key of this rank add exactly 0,
        whatever ``out`` holds there; rows that see none at all have lse -inf.
    """
    xp = array_api_compat.array_namespace(out, lse, all_lse)
    lse, all_lse = normalize(lse), normalize(all_lse)
    top = xp.max(all_lse, axis=0)
    nothing = top == -math.inf
    top = xp.where(nothing, xp.zeros_like(top), top)
    total = xp.sum(xp.exp(all_lse - top), axis=0)
    whole = xp.where(nothing, xp.full_like(top, -math.inf), top + xp.log(xp.where(nothing, xp.ones_like(total), total)))
    weight = xp.exp(lse - xp.where(nothing, xp.zeros_like(whole), whole))
    wide = xp.float64 if out.dtype == xp.float64 else xp.float32
    empty = xp.expand_dims((lse == -math.inf).T, axis=-1)
    kept = xp.where(empty, xp.zeros_like(out, dtype=wide), xp.astype(out, wide))  # selected first: 0 times NaN is NaN
    return kept * xp.expand_dims(weight.T, axis=-1), whole
