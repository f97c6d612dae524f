"""Attention in float64 on the host, block by block: what answers are measured against. Also the weights themselves."""

from collections.abc import Iterator

import numpy as np

from mla_interop.errors import input_error
from mla_interop.explore.batch import Batch, values

_BLOCK_SCORES = 1 << 22  # scores held at a time: 32 MiB of float64
MAX_FLOPS = 1e12  # about a minute of float64 on a few CPU cores


def attention(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """float64 ``out [T, N, V]`` and natural-log ``lse [N, T]``; 0 and -inf in rows without a key and in padding.

    Raises:
        MLAInputError: It would take too long; with what to do instead.
    """
    if batch.flops > MAX_FLOPS:
        advice = "Compare with a backend (baseline='REFERENCE'), or fewer heads or sequences."
        raise input_error("baseline", f"'float64' for {batch.flops:.1e} floating-point operations", f"at most {MAX_FLOPS:.0e}, on the host", advice)
    tokens, heads, _ = batch.q.shape
    out, lse = np.zeros((tokens, heads, batch.v.shape[2])), np.full((heads, tokens), -np.inf)
    cu_q, cu_k = (x.tolist() for x in (batch.lengths.cu_seqlens_q, batch.lengths.cu_seqlens_k))
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        if q1 == q0 or k1 == k0:
            continue
        for head in range(heads):
            q, k, v = (values(x[rows, head]) for x, rows in ((batch.q, slice(q0, q1)), (batch.k, slice(k0, k1)), (batch.v, slice(k0, k1))))
            for start, weights, row_lse in weight_blocks(q, k, batch.factor, batch.is_causal):
                rows = slice(q0 + start, q0 + start + len(weights))
                out[rows, head], lse[head, rows] = weights @ v, row_lse
    return out, lse


def weight_blocks(q: np.ndarray, k: np.ndarray, scale: float, is_causal: bool) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Softmax weights of one head and sequence, some query rows at a time.

    Args:
        q, k: ``[len_q, D]``, ``[len_k, D]``.
        scale: Factor of the raw scores.
        is_causal: Query i sees key j when ``j <= i + len_k - len_q``.

    Yields:
        The first row of the block, weights ``[rows, len_k]`` (0 in a row that sees no key), and their lse ``[rows]`` (-inf there).
    """
    step = max(1, _BLOCK_SCORES // max(1, len(k)))
    for start in range(0, len(q), step):
        scores = scale * (q[start : start + step] @ k.T)
        if is_causal:
            last = np.arange(start, start + len(scores))[:, None] + len(k) - len(q)
            scores[np.arange(len(k))[None, :] > last] = -np.inf
        top = scores.max(axis=1, initial=-np.inf)
        has_key = top > -np.inf
        weights = np.exp(scores - np.where(has_key, top, 0.0)[:, None])
        total = np.where(has_key, weights.sum(axis=1), 1.0)
        yield start, weights / total[:, None], np.where(has_key, top + np.log(total), -np.inf)
