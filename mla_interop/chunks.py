"""How contexts are cut into chunks of a bounded number of rows, and which part of them a rank of a context-parallel group holds."""

from typing import Any, NamedTuple

import numpy as np

from mla_interop.errors import input_error


class Chunk(NamedTuple):
    """Rows of consecutive context: of requests ``first`` to ``stop - 1``, from token ``start`` of the first to token ``end`` of the last."""

    first: int
    stop: int
    start: int
    end: int

    def lengths(self, context_lens: np.ndarray) -> np.ndarray:
        """Rows of each of its requests."""
        lengths = context_lens[self.first : self.stop].copy()
        lengths[-1] = self.end
        lengths[0] -= self.start
        return lengths


class ContextShard(NamedTuple):
    """One rank's part of every context under context parallelism: token i lives on rank ``(i // interleave) % world_size``."""

    rank: int
    world_size: int
    interleave: int = 1

    def lengths(self, context_lens: np.ndarray) -> np.ndarray:
        """Tokens of each context that live on this rank."""
        whole, rest = np.divmod(context_lens, self.world_size * self.interleave)
        return whole * self.interleave + np.clip(rest - self.rank * self.interleave, 0, self.interleave)


def plan_chunks(context_lens: Any, max_rows: int, alignment: int = 1, end_at_gaps: bool = True) -> list[Chunk]:
    """Pack contexts greedily, in request order, into chunks of at most ``max_rows`` rows.

    A context is split only at multiples of ``alignment``, so only a chunk's first request can be a continuation. Requests without a
    context are in no chunk.

    Args:
        context_lens: Tokens of context of each request, on the host.
        max_rows: W, at least ``alignment``.
        alignment: In tokens.
        end_at_gaps: Whether a request without a context ends the chunk before it, so that a chunk's requests are consecutive.
            If not, ``Chunk.lengths`` is 0 for such requests.

    Returns:
        The chunks; every row of every context is in exactly one, in order.

    Raises:
        MLAInputError: A chunk cannot hold one aligned piece.
    """
    if max_rows < alignment or alignment < 1:
        raise input_error("workspace_rows, alignment", f"{max_rows}, {alignment}", "workspace_rows >= alignment >= 1")
    chunks: list[Chunk] = []
    first = start = stop = end = -1
    room = max_rows
    for request, length in enumerate(np.asarray(context_lens).tolist()):
        done = 0
        while done < length:
            if first < 0:
                first, start, room = request, done, max_rows
            left = length - done
            take = left if left <= room else room // alignment * alignment
            if take:
                done += take
                room -= take
                stop, end = request + 1, done
            if done < length:
                chunks.append(Chunk(first, stop, start, end))
                first = -1
        if not length and end_at_gaps and first >= 0:
            chunks.append(Chunk(first, stop, start, end))
            first = -1
    if first >= 0:
        chunks.append(Chunk(first, stop, start, end))
    return chunks


def context_bucket(total: int, block_size: int = 1) -> int:
    """A bucket for ``num_context_rows``: ``total`` rounded up to one of eight steps an octave, each a multiple of the block size.

    Args:
        total: Tokens of context of all requests.
        block_size: Tokens of one cache block.
    """
    if total <= 0:
        return 0
    step = max(1 << max(total.bit_length() - 4, 0), block_size)
    step = -(-step // block_size) * block_size
    return -(-total // step) * step


def even_chunks(bucket: int, total: int, width: int, alignment: int) -> tuple[int, int]:
    """Rows and number of the padded layout's chunks: equal, as few as fit the workspace. A chunk may stay ``alignment - 1`` rows short of full.

    Raises:
        MLAInputError: The bucket does not hold the context, or a chunk not one aligned piece.
    """
    if bucket < total:
        raise input_error("num_context_rows", str(bucket), f"at least the rows of context, {total}")
    if width < alignment:
        raise input_error("workspace_rows, alignment", f"{width}, {alignment}", "workspace_rows >= alignment >= 1")
    if bucket <= width:  # nothing is split
        return bucket, min(bucket, 1)
    count = -(-bucket // (width - alignment + 1))
    return min(width, -(-bucket // count) + alignment - 1), count
