"""Context in a paged latent cache: how it is cut into chunks, and the metadata that a walk over them needs, made once per batch.

Everything here happens on the host, from lengths that the host knows; a walk (``walk.py``) reads nothing back. There are two layouts:

- *exact* (default): every chunk has its own number of rows and covers a contiguous run of requests, whose tokens are a slice of q. Right
  for eager frameworks; a compiled program depends on the lengths.
- *padded* (``num_context_rows`` given): the total is a bucket, all chunks have one size, and every chunk is attended by all of q, requests
  without rows in it having no keys there. A compiled program depends on the bucket, T, B and the workspace only; new lengths do not recompile.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from mla_interop.chunks import Chunk as Chunk
from mla_interop.chunks import ContextShard as ContextShard
from mla_interop.chunks import context_bucket as context_bucket
from mla_interop.chunks import even_chunks, plan_chunks
from mla_interop.errors import MLAInputError, input_error
from mla_interop.lengths import INT32_MAX, readable
from mla_interop.selector_config import MLAPrefillSelectorConfig
from mla_interop.sequences import PrefillMetadata, prepare_metadata


class ChunkBounds(NamedTuple):
    """Where a chunk of the exact layout lies; static.

    Attributes:
        first_token, stop_token: The query tokens of its requests.
        first_row, stop_row: Its part of ``ContextMetadata.rows``.
        continued: Query tokens of its first request, if an earlier chunk holds the beginning of that context; else 0.
        continues: Query tokens of its last request, if the next chunk holds more of that context; else 0.
        one_request: Whether first and last request are the same.
    """

    first_token: int
    stop_token: int
    first_row: int
    stop_row: int
    continued: int
    continues: int
    one_request: bool


class ContextBounds(NamedTuple):
    """The static part of context metadata: what a compiled program may depend on.

    Attributes:
        block_size: Tokens of one cache block.
        num_chunks, chunk_rows: How many chunks there are, and the rows of the largest.
        chunk_tokens: Query tokens of the chunk that has most.
        carried_tokens: Query tokens of the longest request whose context lies in more than one chunk (exact layout).
        chunks: One entry a chunk; empty in the padded layout.
        padded: Whether the layout is the padded one.
    """

    block_size: int
    num_chunks: int
    chunk_rows: int
    chunk_tokens: int
    carried_tokens: int
    chunks: tuple[ChunkBounds, ...]
    padded: bool


@dataclass(frozen=True)
class ContextMetadata:
    """What one batch's layers share. Made by :func:`prepare_context_metadata`; immutable.

    Attributes:
        new: Lengths of the new tokens.
        rows: int32 indices into the cache seen as ``[blocks * block, L + R]``: ``[total]``, or ``[chunks, chunk_rows]`` in the padded layout,
            where -1 is padding.
        chunks: Metadata of each chunk's attention. ``jax_side`` puts those of the padded layout into one, whose arrays have the chunks as
            their leading dimension.
        bounds: The static part.
        num_cache_rows: Rows that the cache must have at least, where the host knows the block table; does not enter a compiled program.
    """

    new: PrefillMetadata
    rows: Any
    chunks: tuple[PrefillMetadata, ...]
    bounds: ContextBounds
    num_cache_rows: int | None = None


def prepare_context_metadata(
    query_lens: Any = None,
    context_lens: Any = None,
    block_table: Any = None,
    *,
    cu_seqlens_q: Any = None,
    block_size: int,
    workspace_rows: int | None = None,
    alignment: int | None = None,
    num_tokens: int | None = None,
    num_context_rows: int | None = None,
    shard: ContextShard | None = None,
    config: MLAPrefillSelectorConfig | None = None,
    backend: Any = None,
) -> ContextMetadata:
    """Plan the chunks of a batch and make every array that a walk over them needs.

    Args:
        query_lens, cu_seqlens_q: New tokens of each request, ``[B]``, or their cumulative lengths, ``[B + 1]``; one of the two, on the host.
        context_lens: Earlier tokens of each request, ``[B]``, on the host; None: no context.
        block_table: Integers ``[B, max_blocks]``: where each request's blocks lie in the cache; on the host, or an array on the device of the
            cache, which is not read back. Entries past a request's context may hold anything.
        block_size: Tokens of one cache block.
        workspace_rows: W, the most rows of context that are expanded at a time; None: no limit (vllm#14069), so that only a request
            without a context in between ends a chunk of the exact layout.
        alignment: Contexts are split at its multiples only. None: the block size if W allows it (1 in the padded layout).
        num_tokens: T of a padded q, as ``num_tokens_q`` of ``prepare_metadata``.
        num_context_rows: The bucket of the total, for the padded layout; see :func:`context_bucket`. None: the exact layout.
        shard: This rank's part of the contexts. ``context_lens`` are still whole; ``block_table`` and cache are the rank's own, where its j-th
            token of a request has position j.
        config, backend: As in ``prepare_metadata``: makes the work lists of the backend selected for this configuration.

    Returns:
        Immutable metadata with NumPy arrays (``rows`` is on the block table's device); the frontends' functions of this name place them.

    Raises:
        MLAInputError: Lengths are not on the host or do not fit each other, the bucket or the block table.
        MLAUnsupportedError: With ``config``: no backend can serve it.
    """
    cu_q = _cumulative(query_lens, cu_seqlens_q)
    num_seqs = len(cu_q) - 1
    lens = _host_lengths("context_lens", np.zeros(num_seqs, np.int64) if context_lens is None else context_lens, num_seqs)
    sizes = {"block_size": block_size, "workspace_rows": workspace_rows, "alignment": alignment, "num_context_rows": num_context_rows}
    for name, value in sizes.items():
        least = 0 if name == "num_context_rows" else 1
        good = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and least <= value <= INT32_MAX
        if not good and (value is not None or name == "block_size"):
            raise input_error(name, repr(value), "a positive integer" if least else f"an integer from 0 to {INT32_MAX}, or None")
    if shard is not None:
        _check_shard(shard)
        lens = shard.lengths(lens)
    lens = np.where(np.diff(cu_q) > 0, lens, 0)  # nobody asks for the context of a request without new tokens
    total = int(lens.sum())
    if total > INT32_MAX:
        raise input_error("context_lens", f"{total} rows in all", f"at most {INT32_MAX} (int32 offsets)")
    options: dict[str, Any] = {"num_tokens_q": num_tokens, "config": config, "backend": backend}
    new = prepare_metadata(cu_q, is_causal=True, **options)
    options["is_causal"] = False
    if config is not None:
        options["config"] = replace(config, is_causal=False, needs_lse=True)
    width = workspace_rows or max(total, num_context_rows or 0, alignment or 1)
    if num_context_rows is None:
        plan = plan_chunks(lens, width, alignment or (block_size if width >= block_size else 1))
        rows, known = _cache_rows(plan, lens, block_table, block_size, None)
        bounds, chunks = _exact(plan, lens, cu_q, block_size, options)
    else:
        size, count = even_chunks(num_context_rows, total, width, alignment or 1)
        plan = plan_chunks(lens, max(size, alignment or 1), alignment or 1, end_at_gaps=False)
        rows, known = _cache_rows(plan, lens, block_table, block_size, (count, size))
        bounds, chunks = _padded(plan, lens, cu_q, block_size, (count, size), num_tokens, options)
    return ContextMetadata(new, rows, chunks, bounds, known)


def _exact(
    plan: list[Chunk], lens: np.ndarray, cu_q: np.ndarray, block_size: int, options: dict[str, Any]
) -> tuple[ContextBounds, tuple[PrefillMetadata, ...]]:
    bounds, chunks, row = [], [], 0
    options = {**options, "num_tokens_q": None}  # a chunk's queries are a slice of q, without q's tail
    for chunk in plan:
        cu_k = _offsets(chunk.lengths(lens))
        tokens = cu_q[chunk.first : chunk.stop + 1]
        continued = int(tokens[1] - tokens[0]) if chunk.start else 0
        continues = int(tokens[-1] - tokens[-2]) if chunk.end < lens[chunk.stop - 1] else 0
        place = int(tokens[0]), int(tokens[-1]), row, row + int(cu_k[-1])
        bounds.append(ChunkBounds(*place, continued, continues, chunk.stop - chunk.first == 1))
        chunks.append(prepare_metadata(tokens - tokens[0], cu_k, **options))
        row = place[3]
    largest = max((b.stop_row - b.first_row for b in bounds), default=0)
    most = max((b.stop_token - b.first_token for b in bounds), default=0)
    carried = max((b.continues for b in bounds), default=0)
    return ContextBounds(block_size, len(plan), largest, most, carried, tuple(bounds), False), tuple(chunks)


def _padded(
    plan: list[Chunk], lens: np.ndarray, cu_q: np.ndarray, block_size: int, shape: tuple[int, int], num_tokens: int | None, options: dict[str, Any]
) -> tuple[ContextBounds, tuple[PrefillMetadata, ...]]:
    count, size = shape
    made = []
    for index in range(count):
        lengths = np.zeros(len(lens), np.int64)
        if index < len(plan):
            lengths[plan[index].first : plan[index].stop] = plan[index].lengths(lens)
        made.append(prepare_metadata(cu_q, _offsets(lengths), num_tokens_k=size, **options))
    tokens = int(cu_q[-1]) if num_tokens is None else num_tokens
    bounds = ContextBounds(block_size, count, size, tokens if count else 0, 0, (), True)
    return bounds, tuple(made)


def _cache_rows(plan: list[Chunk], lens: np.ndarray, block_table: Any, block_size: int, shape: tuple[int, int] | None) -> tuple[Any, int | None]:
    """The cache row of every row of every chunk, chunk after chunk, and how many rows the cache must have, where that is known.

    Padding is -1, which ``latents.gather`` turns into zeros: it has no weight, but 0 times what it holds must be 0.
    """
    total = int(lens.sum())
    if not total:
        return np.full(shape or 0, -1, np.int32), 0
    table = readable("block_table", block_table) if block_table is not None else None
    _check_table(block_table if table is None else table, lens, block_size)
    request = np.repeat(np.arange(len(lens)), lens)
    block, offset = np.divmod(np.arange(total) - np.repeat(np.cumsum(lens) - lens, lens), block_size)
    inside = np.ones(total, bool)
    if shape is not None:
        inside = np.arange(shape[1]) < np.array([chunk.lengths(lens).sum() for chunk in plan] + [0] * (shape[0] - len(plan)))[:, None]
        source = np.cumsum(inside.reshape(-1)) - 1
        request, block, offset = (x[source] for x in (request, block, offset))
    if table is None:
        assert block_table is not None
        xp, device = array_api_compat.array_namespace(block_table), array_api_compat.device(block_table)
        flat, offset = (xp.asarray(x.astype(np.int32), device=device) for x in (request * block_table.shape[1] + block, offset))
        rows = xp.astype(xp.take(xp.reshape(block_table, (-1,)), flat) * block_size + offset, xp.int32)
        if shape is None:
            return rows, None
        return xp.where(xp.asarray(inside, device=device), xp.reshape(rows, shape), -1), None
    rows = table.astype(np.int64)[request, block] * block_size + offset
    if rows.min() < 0 or rows.max() > INT32_MAX:
        raise input_error("block_table", f"blocks from {rows.min() // block_size} to {rows.max() // block_size}", "the numbers of blocks, from 0 on")
    rows = np.where(inside.reshape(-1), rows, -1).astype(np.int32)
    return rows.reshape(shape or -1), int(rows.max()) + 1


def _check_table(table: Any, lens: np.ndarray, block_size: int) -> None:
    shape = tuple(getattr(table, "shape", ()))
    if len(shape) != 2 or shape[0] != len(lens):
        raise input_error("block_table", "None" if table is None else f"shape {shape}", f"integers of shape [{len(lens)}, max_blocks]")
    if "int" not in str(table.dtype):
        raise input_error("block_table", f"dtype {table.dtype}", "integers")
    needed = -(-int(lens.max()) // block_size)
    if shape[1] < needed:
        raise input_error("block_table", f"{shape[1]} blocks a request", f"at least {needed}, for a context of {int(lens.max())} in blocks of {block_size}")


def _check_shard(shard: ContextShard) -> None:
    if not isinstance(shard, ContextShard) or not all(isinstance(part, (int, np.integer)) for part in shard):
        raise input_error("shard", repr(shard), "a ContextShard of integers, or None")
    if not (shard.world_size >= 1 and shard.interleave >= 1 and 0 <= shard.rank < shard.world_size):
        raise input_error("shard", str(tuple(shard)), "(rank, world_size, interleave) with 0 <= rank < world_size and interleave >= 1")


def _cumulative(query_lens: Any, cu_seqlens_q: Any) -> np.ndarray:
    if (query_lens is None) == (cu_seqlens_q is None):
        raise MLAInputError("query_lens, cu_seqlens_q: got both or neither; allowed: one of the two.")
    if query_lens is not None:
        return _offsets(_host_lengths("query_lens", query_lens, None))
    host = readable("cu_seqlens_q", cu_seqlens_q)
    if host is None:
        raise input_error(
            "cu_seqlens_q", f"a {type(cu_seqlens_q).__name__} on a device", "values on the host", "Chunks are planned on the host, without a sync."
        )
    checked = prepare_metadata(host).host
    assert checked is not None
    return checked.cu_seqlens_q


def _host_lengths(name: str, values: Any, count: int | None) -> np.ndarray:
    host = readable(name, values)
    if host is None:
        raise input_error(name, f"a {type(values).__name__} on a device", "values on the host", "Chunks are planned on the host, without a sync.")
    if host.ndim != 1 or (host.dtype.kind not in "iu" and host.size) or (count is not None and len(host) != count):
        allowed = "integers of shape [B]" if count is None else f"{count} integers, one a request"
        raise input_error(name, f"{host.dtype} of shape {host.shape}", allowed)
    # Before any sum, which could wrap around to what looks right.
    if host.size and (host.min() < 0 or host.max() > INT32_MAX):
        wrong = host.min() if host.min() < 0 else host.max()
        raise input_error(name, str(wrong), f"lengths of at least 0 and at most {INT32_MAX} (int32 offsets)")
    return host.astype(np.int64)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > INT32_MAX:
        raise input_error("query_lens", f"{offsets[-1]} tokens in all", f"at most {INT32_MAX} (int32 offsets)")
    return offsets.astype(np.int32)
