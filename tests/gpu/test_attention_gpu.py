"""A whole layer on a GPU: 128 heads, contexts of up to 32k in a paged cache in any chunking, against one pass and against float64."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frontends import waiting_refused

import mla_interop
from mla_interop import ContextShard, MLADimensions, MLAPrefillSelectorConfig
from mla_interop.backends.registry import backend_class

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DIMS, RANK, BLOCK, SCALE = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), 512, 64, 192**-0.5 * 1.87385
QUERY_LENS = (512, 512, 300, 512, 17, 512, 1, 512)
CONTEXT_LENS = (32768, 0, 4096, 20000, 1, 11111, 7000, 0)
HEADS, CHECKED_HEADS, NEW_ROWS = 128, (0, 77, 127), sum(QUERY_LENS)
BACKENDS = ["FLASH_ATTN", "FLASHINFER", "CUDNN"]
BUDGETS = (65536, 16384, 4096, 1024)


@functools.cache
def case() -> dict[str, Any]:
    """bf16 inputs on the GPU, and float64 out and lse of some heads by the dense formula."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(torch.bfloat16)

    latents = [draw(c + n, RANK + 64) for c, n in zip(CONTEXT_LENS, QUERY_LENS)]
    counts = [-(-c // BLOCK) for c in CONTEXT_LENS]
    order = np.random.default_rng(0).permutation(sum(counts) + 5)
    cache, table, used = torch.full((len(order), BLOCK, RANK + 64), float("nan"), device="cuda", dtype=torch.bfloat16), np.zeros((8, max(counts)), np.int32), 0
    for request, (count, context) in enumerate(zip(counts, CONTEXT_LENS)):
        blocks = order[used : used + count]
        table[request, :count], used = blocks, used + count
        padded = torch.full((count * BLOCK, RANK + 64), float("nan"), device="cuda", dtype=torch.bfloat16)
        padded[:context] = latents[request][:context]
        cache[torch.from_numpy(blocks).cuda()] = padded.view(count, BLOCK, RANK + 64)
    fresh = torch.cat([x[c:] for x, c in zip(latents, CONTEXT_LENS)])
    weight = (draw(RANK, HEADS * 256).float() * RANK**-0.5).to(torch.bfloat16)
    made = {"q": draw(NEW_ROWS, HEADS, 192), "kv_c": fresh[:, :RANK], "k_pe": fresh[:, RANK:], "weight": weight, "cache": cache, "table": table}
    return {**made, "latents": latents, "expected": reference(made["q"], latents, weight)}


def keys_and_values(latents: Any, weight: Any) -> tuple[Any, Any]:
    kv = (latents[:, :RANK] @ weight).view(len(latents), -1, 256)
    return torch.cat([kv[..., :128], latents[:, None, RANK:].expand(-1, kv.shape[1], -1)], dim=-1), kv[..., 128:]


def reference(q: Any, latents: list[Any], weight: Any) -> tuple[Any, Any]:
    """float64, for the checked heads; k and v are rounded to bf16, as every kernel takes them."""
    outs, lses, start = [], [], 0
    columns = weight.view(RANK, HEADS, 256)[:, list(CHECKED_HEADS)].reshape(RANK, -1)
    for part, length, context in zip(latents, QUERY_LENS, CONTEXT_LENS):
        k, v = (x.transpose(0, 1).double() for x in keys_and_values(part, columns))
        scores = q[start : start + length, list(CHECKED_HEADS)].transpose(0, 1).double() @ k.transpose(1, 2) * SCALE
        query, key = torch.arange(length, device="cuda")[:, None], torch.arange(len(part), device="cuda")
        scores.masked_fill_(key > query + context, float("-inf"))
        lses.append(torch.logsumexp(scores, -1))
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outs), torch.cat(lses, dim=1)


def errors(out: Any, lse: Any) -> tuple[float, float]:
    """Relative Frobenius error of out, and the largest of lse, over the checked heads; every head must be finite."""
    expected, expected_lse = case()["expected"]
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    heads = list(CHECKED_HEADS)
    return float((out[:, heads].double() - expected).norm() / expected.norm()), float((lse[heads].double() - expected_lse).abs().max())


def skip_unless_served(backend: str, traced: bool = False) -> MLAPrefillSelectorConfig:
    config = MLAPrefillSelectorConfig(dimensions=DIMS, num_heads=HEADS, scale=SCALE)
    reasons = backend_class(backend).validate_configuration(replace(config, traced=traced))
    if reasons:
        pytest.skip("; ".join(reasons))
    return config


def torch_layer(backend: str, budget: int | None, cache: Any = None, cache_scale: Any = None, new: bool = True, **settings: Any) -> Any:
    import torch_side

    given = case()
    options = {"context_lens": CONTEXT_LENS, "block_table": given["table"], "block_size": BLOCK, "workspace_rows": budget, **settings}
    metadata = torch_side.prepare_context_metadata(QUERY_LENS, device="cuda", **options)
    latents = (given["kv_c"], given["k_pe"]) if new else (None, None)
    shared = {"scale": SCALE, "return_lse": True, "backend": backend, "cache": given["cache"] if cache is None else cache, "cache_scale": cache_scale}
    return torch_side.mla_attention(given["q"], *latents, given["weight"], metadata=metadata, **shared)


def jax_layer(backend: str, budget: int, config: Any) -> Any:
    import jax

    import jax_side

    given = case()
    arrays = [jax.dlpack.from_dlpack(given[name].contiguous()) for name in ("q", "kv_c", "k_pe", "weight", "cache")]
    options = {"block_size": BLOCK, "workspace_rows": budget, "config": config, "backend": backend}
    metadata = jax_side.prepare_context_metadata(QUERY_LENS, CONTEXT_LENS, given["table"], **options)

    @jax.jit
    def call(q: Any, kv_c: Any, k_pe: Any, weight: Any, cache: Any, metadata: Any) -> Any:
        return jax_side.mla_attention(q, kv_c, k_pe, weight, metadata=metadata, cache=cache, scale=SCALE, return_lse=True, backend=backend)

    return tuple(torch.from_dlpack(jax.block_until_ready(x)) for x in call(*arrays, metadata))


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_in_chunks_and_new_tokens_are_the_one_pass(backend: str) -> None:
    """vllm#26042: the error must not grow with the number of chunks."""
    import torch_side

    skip_unless_served(backend)
    given = case()
    k, v = keys_and_values(torch.cat(given["latents"]), given["weight"])
    cu_k = np.concatenate([[0], np.cumsum(np.add(CONTEXT_LENS, QUERY_LENS))]).astype(np.int32)
    lengths = {"cu_seqlens_q": np.concatenate([[0], np.cumsum(QUERY_LENS)]).astype(np.int32), "cu_seqlens_k": cu_k}
    one_pass = errors(*torch_side.mla_prefill(given["q"], k, v, **lengths, scale=SCALE, return_lse=True, backend=backend))
    del k, v
    found = [errors(*torch_layer(backend, budget)) for budget in BUDGETS]
    assert one_pass[0] < 5e-3 and one_pass[1] < 1e-3
    assert all(out <= 1.5 * one_pass[0] and lse <= 1e-3 for out, lse in found), (one_pass, found)
    assert found[-1][0] <= 1.15 * found[0][0], found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_budget_of_one_row(backend: str) -> None:
    """Thousands of chunks for a short context."""
    skip_unless_served(backend)
    context = (300, 0, 129, 1, 0, 64, 65, 0)
    few, many = (torch_layer(backend, budget, context_lens=context) for budget in (65536, 1))
    assert float((few[0].float() - many[0].float()).norm() / few[0].float().norm()) < 5e-3
    assert float((few[1] - many[1]).abs().max()) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_jax_too(backend: str) -> None:
    pytest.importorskip("jax")
    config = skip_unless_served(backend, traced=backend != "FLASHINFER")  # whose work lists come with the metadata
    found = [errors(*jax_layer(backend, budget, config)) for budget in BUDGETS[:3]]
    assert all(out <= 7.5e-3 and lse <= 1e-3 for out, lse in found) and found[-1][0] <= 1.15 * found[0][0], found


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_fp8_cache_is_its_dequantized_copy(backend: str) -> None:
    skip_unless_served(backend)
    scale = 0.0123
    stored = (case()["cache"].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    copy = (stored.float() * scale).to(torch.bfloat16)
    for device_scale in (scale, torch.tensor(scale, device="cuda")):
        quantized, plain = torch_layer(backend, 16384, stored, device_scale), torch_layer(backend, 16384, copy)
        assert torch.equal(quantized[0], plain[0]) and torch.equal(quantized[1], plain[1])


def test_partial_results_of_two_ranks_merge_to_the_dense_answer() -> None:
    skip_unless_served("FLASH_ATTN")
    given, total = case(), torch_layer("FLASH_ATTN", 16384, context_lens=(0,) * 8)
    for rank in range(2):
        parts = [x[:c][rank::2] for x, c in zip(given["latents"], CONTEXT_LENS)]
        counts = [-(-len(part) // BLOCK) for part in parts]
        cache, table = torch.zeros(sum(counts), BLOCK, RANK + 64, device="cuda", dtype=torch.bfloat16), np.zeros((8, max(counts)), np.int32)
        for request, (part, count, end) in enumerate(zip(parts, counts, np.cumsum(counts))):
            table[request, :count] = np.arange(end - count, end)
            cache[int(end) - count : int(end)].view(-1, RANK + 64)[: len(part)] = part
        partial = torch_layer("FLASH_ATTN", 16384, cache, new=False, block_table=table, shard=ContextShard(rank, 2))
        total = mla_interop.merge(*total, *partial)
    out, lse = errors(*total)
    assert out < 7.5e-3 and lse < 1e-3


def test_nothing_reads_the_device_back() -> None:
    """A walk in a program that forbids host syncs; the first call prepares kernels."""
    torch_layer("FLASH_ATTN", 16384)
    import torch_side

    given = case()
    metadata = torch_side.prepare_context_metadata(QUERY_LENS, CONTEXT_LENS, given["table"], block_size=BLOCK, workspace_rows=16384, device="cuda")
    size = mla_interop.workspace_bytes(metadata, NEW_ROWS, DIMS, HEADS, RANK)
    workspace = torch.full((size // 2 + 1,), float("nan"), device="cuda", dtype=torch.bfloat16).view(torch.uint8)
    slots = torch.arange(NEW_ROWS, device="cuda") - 1
    scratch = given["cache"].clone()

    def layer() -> Any:
        torch_side.write_latent_cache(scratch, given["kv_c"], given["k_pe"], slots)
        options = {"metadata": metadata, "cache": given["cache"], "scale": SCALE, "return_lse": True, "workspace": workspace}
        return torch_side.mla_attention(given["q"], given["kv_c"], given["k_pe"], given["weight"], **options)

    first = layer()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with waiting_refused():
        second = layer()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    results = second[0].numel() * 2 + second[1].numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= results + 0.1 * size, "beside the workspace little is allocated"
    assert torch.equal(scratch.view(-1, RANK + 64)[: NEW_ROWS - 1, :RANK], given["kv_c"][1:])


@pytest.mark.parametrize(
    ("spoil", "words"), [("dtype", "cache: got torch.float64"), ("stride", "cache: got strides .*; allowed: a last dimension of unit stride")]
)
def test_a_cache_that_cannot_be_gathered_is_refused_before_anything_is_launched(spoil: str, words: str) -> None:
    import torch_side

    given = case()
    metadata = torch_side.prepare_context_metadata(QUERY_LENS, CONTEXT_LENS, given["table"], block_size=BLOCK, workspace_rows=16384, device="cuda")
    cache = given["cache"].double() if spoil == "dtype" else given["cache"].transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((NEW_ROWS, HEADS, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    with pytest.raises(mla_interop.MLAInputError, match=words):
        torch_side.mla_attention(given["q"], given["kv_c"], given["k_pe"], given["weight"], metadata=metadata, cache=cache, scale=SCALE, out=out)
    assert torch.isnan(out).all()
