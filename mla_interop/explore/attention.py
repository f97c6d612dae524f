"""``attention_map``: where the queries of one sequence look, for some heads; computed in blocks, and pooled to the size of a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_interop.errors import input_error
from mla_interop.explore.batch import make_batch, values
from mla_interop.explore.exact import weight_blocks
from mla_interop.explore.table import Explored, Row, needed

MAX_SCORES = 1 << 31  # about a minute on a few CPU cores


def attention_map(
    q: Any,
    k: Any,
    *,
    heads: int | Sequence[int] | None = None,
    sequence: int = 0,
    size: int = 256,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    scale: float | None = None,
    is_causal: bool = True,
) -> "AttentionMap":
    """The softmax weights of one sequence, in float64 on the host, never all of them at a time.

    Args:
        q, k: ``[T, N, D]``, ``[S, N, D]`` packed, or dense with a batch in front; of any framework.
        heads: A head or several; None: the first four.
        sequence: Its index in the batch.
        size: Queries and keys beyond this many are pooled: a cell is the mean over its queries of the weight that its keys get together, so
            that a row of the map adds up to 1 as a row of weights does.
        cu_seqlens_q, cu_seqlens_k, scale, is_causal: As in ``mla_interop.mla_prefill``.

    Raises:
        MLAInputError: Wrong arguments, or a sequence so long that it would take minutes; with what to do instead.
    """
    batch = make_batch(q, k, k, cu_seqlens_q, cu_seqlens_k, scale, is_causal)
    chosen = list(range(min(4, q.shape[-2]))) if heads is None else [heads] if isinstance(heads, int) else list(heads)
    if not chosen or not all(isinstance(head, int | np.integer) and 0 <= head < batch.q.shape[1] for head in chosen):
        raise input_error("heads", repr(heads), f"indices from 0 to {batch.q.shape[1] - 1}")
    count = len(batch.lengths.lengths_q)
    if not 0 <= sequence < count:
        raise input_error("sequence", repr(sequence), f"an index from 0 to {count - 1}")
    if not isinstance(size, int) or size < 1:
        raise input_error("size", repr(size), "a positive integer")
    q0, q1, k0, k1 = (int(x[sequence + i]) for x in (batch.lengths.cu_seqlens_q, batch.lengths.cu_seqlens_k) for i in (0, 1))
    scores = (q1 - q0) * (k1 - k0) * len(chosen)
    if not scores:
        raise input_error("sequence", f"{sequence}, of {q1 - q0} queries and {k1 - k0} keys", "one with both")
    if scores > MAX_SCORES:
        raise input_error(
            "q, k",
            f"{q1 - q0} queries x {k1 - k0} keys x {len(chosen)} heads = {scores:.1e} weights",
            f"at most {MAX_SCORES:.1e}",
            "Give fewer heads, or the last queries only: q[-1024:] with all of k keeps the causal mask's alignment.",
        )
    arrays = [[values(x[start:end, head]) for x, start, end in ((batch.q, q0, q1), (batch.k, k0, k1))] for head in chosen]
    found = [_one_head(queries, keys, batch.factor, is_causal, size) for queries, keys in arrays]
    title = f"sequence {sequence} of {count}: {q1 - q0} queries, {k1 - k0} keys, {'causal' if is_causal else 'full'}, scale {batch.factor:.4g}"
    rows = [{"head": int(head), **row} for head, (_, row) in zip(chosen, found)]
    edges = _edges(q1 - q0, size), _edges(k1 - k0, size)
    return AttentionMap(title, rows, np.stack([weights for weights, _ in found]), *edges, is_causal)


@dataclass(eq=False)
class AttentionMap(Explored):
    """The weights of some heads, pooled.

    Attributes:
        title: Which sequence.
        rows: One for each head, means over the queries that see a key: ``keys in use`` is the exponential of the weights' entropy, ``distance`` the
            mean number of tokens between a query and where it looks, ``on itself`` the weight of its own position, ``on the first key`` that of key 0.
        weights: float64 ``[heads, rows, columns]``.
        query_edges, key_edges: First query (key) of each row (column), and the number of queries (keys).
        is_causal: The mask.
    """

    title: str
    rows: list[Row]
    weights: np.ndarray
    query_edges: np.ndarray
    key_edges: np.ndarray
    is_causal: bool

    def plot(self) -> Any:
        """A map for each head, queries down and keys to the right."""
        return needed("mla_interop.explore.pictures").attention(self)


def _edges(length: int, size: int) -> np.ndarray:
    cells = min(length, size)
    return np.arange(cells + 1) * length // cells


def _one_head(q: np.ndarray, k: np.ndarray, scale: float, is_causal: bool, size: int) -> tuple[np.ndarray, Row]:
    query_edges, key_edges = _edges(len(q), size), _edges(len(k), size)
    pooled = np.zeros((len(query_edges) - 1, len(key_edges) - 1))
    cell_of = np.repeat(np.arange(len(pooled)), np.diff(query_edges))
    sums, seeing = np.zeros(4), 0
    keys = np.arange(len(k))
    for start, weights, lse in weight_blocks(q, k, scale, is_causal):
        np.add.at(pooled, cell_of[start : start + len(weights)], np.add.reduceat(weights, key_edges[:-1], axis=1))
        own = np.arange(start, start + len(weights)) + len(k) - len(q)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(weights > 0, weights * np.log(weights), 0.0).sum(1)
        itself = np.where((own >= 0) & (own < len(k)), weights[np.arange(len(weights)), np.clip(own, 0, len(k) - 1)], 0.0)
        has_key = lse > -np.inf
        distance = (weights * np.abs(own[:, None] - keys)).sum(1)
        sums += [x[has_key].sum() for x in (np.exp(entropy), distance, itself, weights[:, 0])]
        seeing += int(has_key.sum())
    means = map(float, sums / max(1, seeing))
    return pooled / np.diff(query_edges)[:, None], dict(zip(("keys in use", "distance", "on itself", "on the first key"), means))
