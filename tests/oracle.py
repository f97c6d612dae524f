"""The oracle: dense softmax attention per sequence and head, in NumPy float64.

It is deliberately slow and simple, and takes nothing from the package: what it says is right by reading it.
"""

import numpy as np


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_q: np.ndarray, cu_k: np.ndarray, scale: float | None = None, is_causal: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Ragged attention.

    Args:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]``, of any dtype.
        cu_q, cu_k: ``[B + 1]`` cumulative lengths; rows at or past their last values are padding.
        scale: Factor of the raw scores; None: ``D ** -0.5``.
        is_causal: Query i of a sequence sees key j when ``j <= i + len_k - len_q`` (bottom-right); False: every key.

    Returns:
        float64 ``out [T, N, V]`` and natural-log ``lse [N, T]``; 0 and -inf in rows without a key and in padding.
    """
    tokens, heads, qk_dim = q.shape
    scale = qk_dim**-0.5 if scale is None else scale
    out, lse = np.zeros((tokens, heads, v.shape[2])), np.full((heads, tokens), -np.inf)
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        for head in range(heads):
            queries, keys, values = (x.astype(np.float64) for x in (q[q0:q1, head], k[k0:k1, head], v[k0:k1, head]))
            out[q0:q1, head], lse[head, q0:q1] = _one_head(queries, keys, values, scale, is_causal)
    return out, lse


def _one_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, is_causal: bool) -> tuple[np.ndarray, np.ndarray]:
    scores = scale * (q @ k.T)
    if is_causal:
        query, key = np.arange(len(q))[:, None], np.arange(len(k))[None, :]
        scores[key > query + len(k) - len(q)] = -np.inf
    top = scores.max(axis=1, initial=-np.inf)
    has_key = top > -np.inf
    weights = np.exp(scores - np.where(has_key, top, 0.0)[:, None])
    total = np.where(has_key, weights.sum(axis=1), 1.0)
    return weights @ v / total[:, None], np.where(has_key, top + np.log(total), -np.inf)
