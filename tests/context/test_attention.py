"""Context in any chunking, and new tokens, are the one pass over full keys and values: for both frameworks and plain arrays."""

from typing import Any

import numpy as np
import pytest
from cases import DTYPES
from frontends import needs, to_jax, to_numpy, to_torch
from latents_case import DIMS, LatentCase, assert_near

import mla_interop
from mla_interop import ContextShard, walk
from mla_interop.dimensions import MLADimensions

MIXED = LatentCase((5, 3, 0, 9, 4), (70, 0, 33, 131, 1), tail=2)
FRONTENDS = ["torch", "jax", "jit", "numpy"]
LAYOUTS = ["exact", "padded"]


def layer(case: LatentCase, frontend: str, layout: str = "exact", new: bool = True, backend: Any = None, **settings: Any) -> tuple[Any, Any]:
    """(out, lse) of one layer call; keyword arguments are those of ``prepare_context_metadata``."""
    a = case.arrays
    prepared = {"query_lens": case.query_lens, "context_lens": case.context_lens, "block_table": a["table"]}
    prepared |= {"block_size": case.block_size, "num_tokens": len(a["q"]), **settings}
    if layout == "padded":
        prepared.setdefault("num_context_rows", mla_interop.context_bucket(sum(case.context_lens)))
    names = ("q", "kv_c", "k_pe", "cache", "weight")
    options = {"scale": case.scale, "return_lse": True, "backend": backend, "cache_scale": case.cache_scale}
    if frontend == "torch":
        pytest.importorskip("torch")
        import torch_side

        q, kv_c, k_pe, cache, weight = (to_torch(a[name]) for name in names)
        metadata = torch_side.prepare_context_metadata(**prepared)
        return torch_side.mla_attention(q, kv_c if new else None, k_pe if new else None, weight, metadata=metadata, cache=cache, **options)
    if frontend == "numpy":
        return by_walk(case, mla_interop.prepare_context_metadata(**prepared), new)
    jax = pytest.importorskip("jax")
    import jax_side

    metadata = jax_side.prepare_context_metadata(**{"num_context_rows": None, **prepared})
    q, kv_c, k_pe, cache, weight = (to_jax(a[name]) for name in names)

    def call(q: Any, kv_c: Any, k_pe: Any, weight: Any, cache: Any, metadata: Any) -> Any:
        return jax_side.mla_attention(q, kv_c if new else None, k_pe if new else None, weight, metadata=metadata, cache=cache, **options)

    return (jax.jit(call) if frontend == "jit" else call)(q, kv_c, k_pe, weight, cache, metadata)


def by_walk(case: LatentCase, metadata: Any, new: bool) -> tuple[Any, Any]:
    """The walk on NumPy arrays, by its plain array code."""
    a = case.arrays

    def attend(q: Any, k: Any, v: Any, lengths: Any, is_causal: bool) -> Any:
        return mla_interop.mla_prefill(q, k, v, metadata=lengths, is_causal=is_causal, scale=case.scale, return_lse=True)

    ops = walk.array_ops(a["weight"], case.dims, attend)
    latents = (a["kv_c"], a["k_pe"]) if new else (None, None)
    return walk.walk(a["q"], *latents, a["cache"], metadata, ops, case.rank, case.dims.v_head_dim, case.cache_scale)


@pytest.mark.parametrize("workspace_rows", [None, 1, 16, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frontend", ["torch", "jit", "numpy"])
def test_any_chunking_is_the_one_pass(frontend: str, layout: str, workspace_rows: int | None) -> None:
    """Budgets from one row on; a workspace smaller than a request; no context, one token of it, and no new tokens."""
    if frontend == "jit" and layout == "exact" and workspace_rows in (1, 16):
        pytest.skip("many chunks in one unrolled program: the padded layout is for that")
    assert_near(layer(MIXED, frontend, layout, workspace_rows=workspace_rows), MIXED.expected())


@pytest.mark.parametrize("query_lens", [(0,), (0, 0)])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_batch_without_a_new_token(frontend: str, query_lens: tuple[int, ...]) -> None:
    """Zero rows of everything: no product, by a weight or by a function, may have to guess a dimension."""
    case = LatentCase(query_lens, (5, 40)[: len(query_lens)])
    assert_near(layer(case, frontend), case.expected())
    if frontend == "torch":
        pytest.importorskip("torch")
        import torch_side

        a = {name: to_torch(x) for name, x in case.arrays.items() if name != "latents"}
        metadata = torch_side.prepare_context_metadata(query_lens, case.context_lens, a["table"], block_size=case.block_size)
        made = torch_side.mla_attention(a["q"], a["kv_c"], a["k_pe"], lambda x: x @ a["weight"], metadata=metadata, cache=a["cache"], dimensions=DIMS)
        assert made.shape == (0, case.heads, DIMS.v_head_dim)


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
@pytest.mark.parametrize("frontend", ["torch", "jit"])
def test_block_sizes(frontend: str, block_size: int) -> None:
    case = LatentCase((4, 6, 2), (129, 64, 3), block_size=block_size)
    assert_near(layer(case, frontend, "padded" if frontend == "jit" else "exact", workspace_rows=130), case.expected())


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
@pytest.mark.parametrize("frontend", ["torch", "jit"])
def test_every_backend_of_this_machine(frontend: str, backend: str) -> None:
    needs(backend)
    assert_near(layer(MIXED, frontend, "padded", backend=backend, workspace_rows=64), MIXED.expected())


@pytest.mark.parametrize("frontend", ["torch", "jit"])
def test_contexts_of_none_one_and_five_thousand_tokens(frontend: str) -> None:
    case = LatentCase((3, 2, 4), (0, 1, 5000), block_size=64, heads=2)
    assert_near(layer(case, frontend, "padded" if frontend == "jit" else "exact", workspace_rows=640), case.expected(), 4e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("frontend", ["torch", "jit"])
def test_sixteen_bits(frontend: str, dtype: str) -> None:
    """Also where JAX puts k_pe into K by a product: exact, or the scores would show it."""
    case = LatentCase((5, 3, 9), (70, 0, 131), dtype=dtype)
    assert_near(layer(case, frontend, "padded", workspace_rows=64), case.expected(), 6e-3, 1e-2)


def test_jax_makes_k_exactly_in_sixteen_bits() -> None:
    jnp = pytest.importorskip("jax.numpy")
    from jax_side.attention import _projection

    a = LatentCase((9,), (0,), dtype="bfloat16").arrays
    k, v = _projection(jnp.asarray(a["weight"]), DIMS, 3)(jnp.asarray(a["kv_c"]), jnp.asarray(a["k_pe"]))
    plain_k, plain_v = walk.project(jnp.asarray(a["weight"]), DIMS, jnp.asarray(a["kv_c"]), jnp.asarray(a["k_pe"]))
    np.testing.assert_array_equal(k[..., 32:], plain_k[..., 32:])
    np.testing.assert_allclose(to_numpy(k), to_numpy(plain_k), rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(to_numpy(v), to_numpy(plain_v), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("frontend", ["torch", "jax", "jit", "numpy"])
@pytest.mark.parametrize("cache_scale", [1.0, 0.037])
def test_an_fp8_cache_with_a_scale(frontend: str, cache_scale: float) -> None:
    """vllm#37054, sglang#34765: applied once, to k and v alike. The reference uses what such a cache holds."""
    case = LatentCase((5, 3, 9), (70, 0, 131), cache_scale=cache_scale)
    assert_near(layer(case, frontend, "padded" if frontend == "jit" else "exact", workspace_rows=64), case.expected())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frontend", ["torch", "jit", "numpy"])
def test_the_error_does_not_grow_with_the_number_of_chunks(frontend: str, layout: str) -> None:
    """vllm#26042: gsm8k fell from 0.93 to 0.65 with smaller chunks. In bfloat16, where folding into a bfloat16 result would show."""
    if (frontend, layout) == ("jit", "exact"):
        pytest.skip("many chunks in one unrolled program: the padded layout is for that")
    case = LatentCase((6, 2, 3), (1024, 0, 300), heads=2, dtype="bfloat16")
    errors = [assert_near(layer(case, frontend, layout, workspace_rows=rows), case.expected(), 6e-3, 1e-2) for rows in (4096, 512, 128, 16, 4)]
    assert max(errors) <= 1.15 * errors[0], errors


def test_an_accumulator_of_the_results_dtype_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: this is what it is there for."""
    monkeypatch.setattr(walk, "widen", lambda out: out.copy())
    case = LatentCase((6, 2, 3), (1024, 0, 300), heads=2, dtype="bfloat16")
    errors = [assert_near(layer(case, "numpy", workspace_rows=rows), case.expected(), 1, 1) for rows in (4096, 4)]
    assert errors[1] > 1.5 * errors[0], errors


@pytest.mark.parametrize("workspace_rows", [None, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frontend", ["torch", "jit"])
@pytest.mark.parametrize("lengths", [((5, 3, 9), (70, 0, 131)), ((5, 3), (70, 20)), ((5,), (0,))], ids=str)
def test_a_context_alone_is_a_partial_result(frontend: str, layout: str, workspace_rows: int | None, lengths: Any) -> None:
    case = LatentCase(*lengths)
    assert_near(layer(case, frontend, layout, new=False, workspace_rows=workspace_rows), case.expected("context"))


@pytest.mark.parametrize("interleave", [1, 3])
@pytest.mark.parametrize("frontend", ["torch", "jit"])
def test_partial_results_of_ranks_merge_to_the_dense_answer(frontend: str, interleave: int) -> None:
    case, world = LatentCase((5, 3, 4, 9), (70, 0, 2, 131)), 3
    total = layer(LatentCase(case.query_lens, case.context_lens, arrays={}), frontend, context_lens=(0, 0, 0, 0))
    for rank in range(world):
        mine = [x[:c][(np.arange(c) // interleave) % world == rank] for x, c in zip(case.arrays["latents"], case.context_lens)]
        local = LatentCase(case.query_lens, case.context_lens)
        cache, table = np.full_like(case.arrays["cache"], np.nan), np.full_like(case.arrays["table"], -7)
        block = 0
        for request, rows in enumerate(mine):
            for start in range(0, len(rows), case.block_size):
                part = rows[start : start + case.block_size]
                cache[block, : len(part)], table[request, start // case.block_size] = part, block
                block += 1
        local.arrays.update(cache=cache, table=table)
        layout = "padded" if frontend == "jit" else "exact"
        part = layer(
            local,
            frontend,
            layout,
            new=False,
            workspace_rows=32,
            shard=ContextShard(rank, world, interleave),
            num_context_rows=96 if layout == "padded" else None,
        )
        total = mla_interop.merge(*total, *part)
    assert_near(total, case.expected(), 1e-6)


@pytest.mark.parametrize("frontend", ["torch", "jit", "numpy"])
def test_requests_without_a_context_keep_the_new_tokens_result_bit_for_bit(frontend: str) -> None:
    layout = "exact" if frontend != "jit" else "padded"
    made, new = (
        layer(MIXED, frontend, layout, workspace_rows=16),
        layer(MIXED, frontend, layout, context_lens=[0] * 5, num_context_rows=0 if layout == "padded" else None),
    )
    assert np.array_equal(to_numpy(made[0])[5:8], to_numpy(new[0])[5:8]) and np.array_equal(to_numpy(made[1])[:, 5:8], to_numpy(new[1])[:, 5:8])


@pytest.mark.parametrize("frontend", ["torch", "jit"])
def test_a_batch_is_each_of_its_requests(frontend: str) -> None:
    """fla#1080: wrapped reads were finite; the last request shows them."""
    whole = to_numpy(layer(MIXED, frontend, "padded", workspace_rows=30)[0])
    alone = LatentCase(MIXED.query_lens[3:4], MIXED.context_lens[3:4])
    first = sum(MIXED.query_lens[:3])
    rows = slice(first, first + MIXED.query_lens[3])
    a = MIXED.arrays
    alone.arrays.update(q=a["q"][rows], kv_c=a["kv_c"][rows], k_pe=a["k_pe"][rows], weight=a["weight"], cache=a["cache"], table=a["table"][3:4])
    np.testing.assert_allclose(whole[rows], to_numpy(layer(alone, frontend, "padded", workspace_rows=30)[0]), atol=2e-6)


@pytest.mark.parametrize("frontend", ["torch", "jit", "numpy"])
def test_a_model_without_rotary_keys(frontend: str) -> None:
    case = LatentCase((5, 3), (40, 21), dims=MLADimensions(qk_nope_head_dim=32, qk_rope_head_dim=0, v_head_dim=32))
    assert_near(layer(case, frontend, "padded", workspace_rows=32), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_of_one_request(dtype: str) -> None:
    case = LatentCase((1,), (1,), heads=1, dtype=dtype)
    assert_near(layer(case, "torch"), case.expected(), 1e-2, 1e-2)
