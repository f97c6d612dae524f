"""The chunk planner: every row of context exactly once, in order, within the budget."""

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mla_interop import ContextShard, MLAInputError, context_bucket, prepare_context_metadata
from mla_interop.chunks import plan_chunks

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 200)), max_size=16)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 400), st.sampled_from([1, 2, 16, 64]), st.booleans())
@example([0, 1, 5000, 0, 0, 3], 37, 16, True)
@example([1, 5000], 1, 1, False)
def test_every_row_once_and_in_order(context_lens: list[int], extra: int, alignment: int, end_at_gaps: bool) -> None:
    lens, max_rows = np.array(context_lens, np.int64), alignment - 1 + extra
    done, rows = np.zeros(len(lens), np.int64), []
    chunks = plan_chunks(lens, max_rows, alignment, end_at_gaps)
    for chunk in chunks:
        lengths = chunk.lengths(lens)
        assert 0 < lengths.sum() <= max_rows and lengths[0] > 0 and lengths[-1] > 0
        assert ((lengths > 0) == (lens[chunk.first : chunk.stop] > 0)).all(), "a request without a context has no rows"
        assert not end_at_gaps or lengths.all()
        starts = done[chunk.first : chunk.stop].copy()
        assert starts[0] == chunk.start and not starts[1:].any(), "only the first request can be a continuation"
        done[chunk.first : chunk.stop] += lengths
        assert (done[chunk.first : chunk.stop - 1] == lens[chunk.first : chunk.stop - 1]).all(), "only the last request can go on"
        assert done[chunk.stop - 1] == chunk.end and (chunk.end == lens[chunk.stop - 1] or chunk.end % alignment == 0)
        rows += [(chunk.first + i, start + j) for i, (start, n) in enumerate(zip(starts, lengths)) for j in range(n)]
    assert rows == [(request, position) for request, n in enumerate(context_lens) for position in range(n)]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 400), st.sampled_from([1, 16]))
def test_it_is_greedy(context_lens: list[int], extra: int, alignment: int) -> None:
    """Nothing more would have fitted into a chunk that another one follows without a gap."""
    lens, max_rows = np.array(context_lens, np.int64), alignment - 1 + extra
    chunks = plan_chunks(lens, max_rows, alignment)
    for chunk, following in zip(chunks, chunks[1:]):
        if following.first <= chunk.stop:
            left = lens[following.first] - following.start
            assert max_rows - chunk.lengths(lens).sum() < min(alignment, left)


@pytest.mark.parametrize("gaps", [False, True])
def test_a_thousand_requests_take_less_than_a_millisecond(gaps: bool) -> None:
    lens = np.random.default_rng(0).integers(1, 9000, 1000)
    if gaps:
        lens[::2] = 0
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        plan_chunks(lens, 65536, 64)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3


@pytest.mark.parametrize("total", [0, 1, 7, 63, 64, 65, 1000, 65536, 65537, 143_999])
@pytest.mark.parametrize("block", [1, 16, 128])
def test_buckets_are_few_and_waste_little(total: int, block: int) -> None:
    bucket = context_bucket(total, block)
    assert total <= bucket < total * 1.125 + block and bucket % block == 0
    assert context_bucket(bucket, block) == bucket
    octave = {context_bucket(n, block) for n in range(2048 + 1, 4096 + 1)}
    assert len(octave) <= 8 + (block > 256)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 5))
def test_shards_divide_every_context(context_lens: list[int], world: int, interleave: int) -> None:
    lens = np.array(context_lens, np.int64)
    parts = [ContextShard(rank, world, interleave).lengths(lens) for rank in range(world)]
    for rank, part in enumerate(parts):
        assert part.tolist() == [sum((i // interleave) % world == rank for i in range(n)) for n in context_lens]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 300), st.sampled_from([1, 16, 64]), st.booleans())
def test_rows_are_where_the_block_table_says(context_lens: list[int], width: int, block: int, padded: bool) -> None:
    """In both layouts, with the padding of the second marked, and lengths that say which rows belong to whom."""
    needed = max([-(-n // block) for n in context_lens], default=0)
    table = np.random.default_rng(1).permutation(len(context_lens) * max(needed, 1)).reshape(len(context_lens), max(needed, 1))
    bucket = {"num_context_rows": context_bucket(sum(context_lens)) + 5} if padded else {}
    metadata = prepare_context_metadata([2] * len(context_lens), context_lens, table, block_size=block, workspace_rows=width, **bucket)
    rows = metadata.rows
    assert rows.dtype == np.int32
    found: list[list[int]] = [[] for _ in context_lens]
    for index, chunk in enumerate(metadata.chunks):
        assert chunk.host is not None
        if padded:
            mine = rows[index, : chunk.host.total_k]
            first, members = 0, range(len(context_lens))
            assert (rows[index, chunk.host.total_k :] == -1).all()
        else:
            bounds = metadata.bounds.chunks[index]
            mine, first = rows[bounds.first_row : bounds.stop_row], bounds.first_token // 2
            members = range(len(chunk.host.lengths_k))
        assert len(mine) <= width and (not padded or rows.shape[1] <= width)
        for member in members:
            found[first + member] += mine[chunk.host.cu_seqlens_k[member] : chunk.host.cu_seqlens_k[member + 1]].tolist()
    assert found == [[int(table[r, p // block] * block + p % block) for p in range(n)] for r, n in enumerate(context_lens)]


def test_the_padded_layout_does_not_depend_on_the_lengths_in_a_bucket() -> None:
    table = np.arange(24).reshape(4, 6)
    make = lambda lens: prepare_context_metadata([3, 1, 4, 2], lens, table, block_size=16, workspace_rows=40, num_context_rows=160)  # noqa: E731
    first, second = make([90, 0, 5, 60]), make([0, 0, 0, 1])
    assert first.bounds == second.bounds and hash(first.bounds) == hash(second.bounds) and first.rows.shape == second.rows.shape == (4, 40)
    assert [m.bounds for m in first.chunks] == [m.bounds for m in second.chunks]


def test_without_new_tokens_or_context_there_is_no_chunk() -> None:
    assert prepare_context_metadata([3, 2], block_size=16).bounds.num_chunks == 0
    metadata = prepare_context_metadata([3, 0, 2], [0, 90, 0], np.zeros((3, 6), int), block_size=16)
    assert metadata.bounds.num_chunks == 0, "nobody asks for the context of a request without new tokens"


def test_no_workspace_is_one_chunk() -> None:
    """vllm#14069."""
    assert prepare_context_metadata([3, 2], [90, 5000], np.zeros((2, 400), int), block_size=16).bounds.num_chunks == 1


@pytest.mark.parametrize("bucket", [None, 0, 7, 16, 50])
@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("width", [None, 64])
def test_an_alignment_larger_than_the_context_is_no_reason_to_refuse(width: int | None, context: int, bucket: int | None) -> None:
    """A batch without a context came with the workspace and the alignment of all others, and was refused."""
    bucket = None if bucket is None else max(bucket, context)
    options = {"block_size": 16, "workspace_rows": width, "alignment": 64, "num_context_rows": bucket}
    bounds = prepare_context_metadata([3, 2], [context, 0], np.zeros((2, 1), int), **options).bounds
    rows = context if bucket is None else bucket
    assert (bounds.num_chunks, bounds.chunk_rows) == (min(rows, 1), rows), "what fits into the workspace is one chunk, without spare rows"


GOOD = {"query_lens": [3, 2], "context_lens": [20, 5], "block_table": np.arange(4).reshape(2, 2), "block_size": 16}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query_lens": None}, "query_lens, cu_seqlens_q: got both or neither"),
        ({"cu_seqlens_q": [0, 3, 5]}, "query_lens, cu_seqlens_q: got both or neither"),
        ({"query_lens": [3, -2]}, "query_lens: got -2"),
        ({"query_lens": [3.0, 2.0]}, "query_lens: got float64 of shape (2,)"),
        ({"query_lens": [2**62] * 4}, "query_lens: got 4611686018427387904; allowed: lengths of at least 0 and at most 2147483647"),
        ({"context_lens": [2**62] * 2}, "context_lens: got 4611686018427387904; allowed: lengths of at least 0 and at most 2147483647"),
        ({"context_lens": np.array([2**63, 1], np.uint64)}, "context_lens: got 9223372036854775808; allowed: lengths of at least 0"),
        ({"context_lens": [[1], 2]}, "context_lens: got a list that cannot be read ("),
        ({"query_lens": [[1], 2]}, "query_lens: got a list that cannot be read ("),
        ({"block_table": [[1], 2]}, "block_table: got a list that cannot be read ("),
        ({"block_size": None}, "block_size: got None; allowed: a positive integer."),
        ({"block_size": True}, "block_size: got True; allowed: a positive integer."),
        ({"num_context_rows": "32"}, "num_context_rows: got '32'; allowed: an integer from 0 to 2147483647, or None."),
        ({"num_context_rows": 2**40}, "num_context_rows: got 1099511627776; allowed: an integer from 0"),
        ({"num_tokens": 7.0}, "num_tokens_q: got float; allowed: a Python integer"),
        ({"shard": (0, 2, 1)}, "shard: got (0, 2, 1); allowed: a ContextShard of integers, or None."),
        ({"shard": ContextShard(0.5, 2)}, "shard: got ContextShard(rank=0.5"),
        ({"context_lens": [20]}, "context_lens: got int64 of shape (1,); allowed: 2 integers, one a request."),
        ({"context_lens": [20, -1]}, "context_lens: got -1"),
        ({"block_table": None}, "block_table: got None; allowed: integers of shape [2, max_blocks]."),
        ({"block_table": np.zeros((3, 2), int)}, "block_table: got shape (3, 2)"),
        ({"block_table": np.zeros((2, 2))}, "block_table: got dtype float64"),
        ({"block_table": np.zeros((2, 1), int)}, "block_table: got 1 blocks a request; allowed: at least 2"),
        ({"block_table": np.full((2, 2), -1)}, "block_table: got blocks from -1 to"),
        ({"block_size": 0}, "block_size: got 0; allowed: a positive integer."),
        ({"workspace_rows": 0}, "workspace_rows: got 0; allowed: a positive integer."),
        ({"workspace_rows": 8, "alignment": 16}, "workspace_rows, alignment: got 8, 16"),
        ({"num_context_rows": 24}, "num_context_rows: got 24; allowed: at least the rows of context, 25."),
        ({"num_tokens": 4}, "num_tokens_q: got 4 tokens"),
        ({"shard": ContextShard(2, 2)}, "shard: got (2, 2, 1)"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(MLAInputError) as refusal:
        prepare_context_metadata(**{**GOOD, **change})  # pyright: ignore[reportArgumentType]
    assert str(refusal.value).startswith(text)
