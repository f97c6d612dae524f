"""Keys spread over ranks: the merged result is the dense answer, under both masks; on four simulated CPU devices."""

from typing import Any

import numpy as np
import pytest
from cases import offsets

jax = pytest.importorskip("jax")
pytest.importorskip("torch", reason="CPU_SDPA's kernel is torch's")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from mesh_case import assert_right, calls, collectives, mesh, problem  # noqa: E402

import jax_side  # noqa: E402
from mla_interop import MLAInputError, MLAUnsupportedError  # noqa: E402

if len(jax.devices("cpu")) < 4:
    pytest.skip("JAX was started with fewer than 4 CPU devices", allow_module_level=True)

# name: lengths of queries and of keys, rows of q and of k (a multiple of the ranks)
BATCHES = {
    "new tokens": ([5, 9, 6], [5, 9, 6], 20, 20),
    "new tokens after context": ([3, 1, 6], [9, 17, 6], 10, 32),
    "one sequence over all ranks": ([13], [40], 13, 40),
    "a sequence inside one rank": ([2, 2, 2], [3, 30, 3], 6, 36),
    "rows without a key": ([7, 4, 0, 3], [2, 0, 5, 3], 14, 12),
    "padding, and a rank without keys": ([4, 3], [6, 4], 9, 24),
    "no keys at all": ([3, 4], [0, 0], 7, 8),
}


def run(on: Any, heads: str | None = None, **options: Any) -> Any:
    call = jax_side.context_parallel_mla_prefill(on, "c", head_axis=heads)
    return jax.jit(lambda q, k, v, cu_q, cu_k: call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_equals_the_dense_answer(name: str, is_causal: bool) -> None:
    lengths_q, lengths_k, rows_q, rows_k = BATCHES[name]
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    q, k, v = problem(3, rows_q, rows_k, heads=3)
    made = run(mesh("Auto", c=4), is_causal=is_causal, backend="CPU_SDPA", scale=0.09)(q, k, v, cu_q, cu_k)
    assert_right(made, q, k, v, cu_q, cu_k, is_causal, 0.09)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
def test_with_heads_split_over_another_axis(axis_type: str, backend: str) -> None:
    """Nothing but LSE and the partial outputs travels: keys stay where they are."""
    lengths_q, lengths_k, rows_q, rows_k = BATCHES["new tokens after context"]
    on, cu_q, cu_k = mesh(axis_type, c=2, h=2), offsets(lengths_q), offsets(lengths_k)
    arrays = problem(4, rows_q, rows_k, heads=4)
    specs = [PartitionSpec(None, "h", None), *[PartitionSpec("c", "h", None)] * 2, PartitionSpec(), PartitionSpec()]
    operands = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip((*arrays, cu_q, cu_k), specs)]
    call = run(on, "h", backend=backend)
    made = call(*operands)
    assert_right(made, *arrays, cu_q, cu_k)
    assert made[0].sharding.shard_shape(made[0].shape) == (rows_q, 2, 128)
    if backend == "CPU_SDPA":
        text = call.lower(*operands).compile().as_text()
        assert calls(text) == [f"f32[{rows_q},2,128]"] * 2 and "all-gather" not in collectives(text) and "all-reduce" in collectives(text)


def test_bfloat16_is_summed_in_float32_and_every_rank_has_the_same_bits() -> None:
    lengths_q, lengths_k, rows_q, rows_k = BATCHES["new tokens"]
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in problem(5, rows_q, rows_k, heads=2)]
    out, lse = run(mesh("Auto", c=4), backend="CPU_SDPA")(*arrays, cu_q, cu_k)
    assert out.dtype == jnp.bfloat16 and lse.dtype == np.float32
    whole = jax_side.mla_prefill(*arrays, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="CPU_SDPA", return_lse=True)
    error = np.linalg.norm(np.asarray(out, np.float64) - np.asarray(whole[0], np.float64)) / np.linalg.norm(np.asarray(whole[0], np.float64))
    assert error < 5e-3 and np.abs(np.asarray(lse - whole[1])).max() < 1e-3
    for x in (out, lse):
        shards = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(shards) == 4 and all(np.array_equal(shards[0], other) for other in shards[1:])


def test_lengths_are_data() -> None:
    traces, on = [], mesh("Auto", c=4)
    call = jax_side.context_parallel_mla_prefill(on, "c")
    q, k, v = problem(6, 12, 16, heads=2)

    @jax.jit
    def run(cu_q: Any, cu_k: Any) -> Any:
        traces.append(1)
        return call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, backend="CPU_SDPA")

    for lengths_q, lengths_k in (([5, 7], [9, 7]), ([12, 0], [12, 4]), ([1, 1], [1, 15])):
        assert_right(run(offsets(lengths_q), offsets(lengths_k)), q, k, v, offsets(lengths_q), offsets(lengths_k))
    assert len(traces) == 1


def test_refusals() -> None:
    on, (q, k, v) = mesh("Auto", c=4), problem(0, 12, 16, heads=2)
    call = jax_side.context_parallel_mla_prefill(on, "c")
    cu = {"cu_seqlens_q": [0, 12], "cu_seqlens_k": [0, 16]}
    with pytest.raises(MLAInputError, match="axis: got 'x'; allowed: axes of the mesh: c"):
        jax_side.context_parallel_mla_prefill(on, "x")
    with pytest.raises(MLAInputError, match="rows of k: got 15; allowed: a multiple of the 4 shards of 'c'. Pad it."):
        call(q, k[:15], v[:15], **cu)
    with pytest.raises(MLAInputError, match=r"q, k, v: got 4, 4, 4 dimensions; allowed: packed"):
        call(q[None], k[None], v[None])
    with pytest.raises(MLAInputError, match="cu_seqlens_k: got shape"):
        call(q, k, v, cu_seqlens_q=[0, 12], cu_seqlens_k=[0, 3, 16])
    with pytest.raises(MLAInputError, match="num_tokens_k: got 16 tokens; allowed: at least the last cumulative length, 17"):
        call(q, k, v, cu_seqlens_q=[0, 12], cu_seqlens_k=[0, 17])
    with pytest.raises(TypeError, match="unexpected keyword arguments metadata"):
        call(q, k, v, metadata=None)
    with pytest.raises(MLAUnsupportedError, match="is forward only"):
        jax.grad(lambda q: call(q, k, v, backend="CPU_SDPA", **cu).sum())(q)
