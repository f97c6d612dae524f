"""The layer benchmark's JAX side: each thing measured is one jitted program."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_side
from mla_interop.bench.layer import LOOP_S, ROUNDS, Layer
from mla_interop.bench.timing import side_by_side
from mla_interop.workspace import workspace_bytes


def jax_rows(layer: Layer, device: str, backend: str) -> Iterator[dict[str, Any]]:
    """The layer with its chunks in a scan, and the parts."""
    keys = jax.random.split(jax.random.key(1), len(layer.shapes))
    given = {name: jax.random.normal(key, shape, jnp.bfloat16) for key, (name, shape) in zip(keys, layer.shapes.items())}
    given["weight"] = given["weight"] * jnp.bfloat16(layer.kv_lora_rank**-0.5)
    options = {**layer.metadata_options(), "config": layer.config(device), "backend": backend}
    metadata = jax_side.prepare_context_metadata(**options, num_context_rows=sum(layer.context_lens))
    planned = workspace_bytes(metadata, layer.tokens, layer.dimensions, layer.heads, layer.kv_lora_rank)

    def whole(q: Any, kv_c: Any, k_pe: Any, weight: Any, cache: Any, metadata: Any) -> Any:
        return jax_side.mla_attention(q, kv_c, k_pe, weight, metadata=metadata, cache=cache, backend=backend)

    programs = {"layer": (whole, (*(given[name] for name in ("q", "kv_c", "k_pe", "weight", "cache")), metadata))}
    programs |= _parts(layer, given, jax_side.prepare_context_metadata(**options, num_context_rows=None), backend)
    compiled = {name: jax.jit(function).lower(*arguments).compile() for name, (function, arguments) in programs.items()}
    times = side_by_side({name: (_looped(program, programs[name][1]), 1) for name, program in compiled.items()}, ROUNDS, LOOP_S)
    for name, program in compiled.items():
        analysis = program.memory_analysis()
        row = {"framework": "jax", "backend": backend, "name": name, "chunks": metadata.bounds.num_chunks, "workspace_bytes": planned}
        if analysis is not None and device == "cuda":
            row["peak_extra_bytes"] = int(analysis.temp_size_in_bytes)
        yield {**row, **times[name]}


def _looped(program: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[int], None]:
    def run(n: int) -> None:
        made = None
        for _ in range(n):
            made = program(*arguments)
        jax.block_until_ready(made)

    return run


def _parts(layer: Layer, given: dict[str, Any], metadata: Any, backend: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The products and the attention calls of the exact layout, alone: what no way of computing the layer can leave out."""
    d, bounds, weight, q = layer.dimensions, metadata.bounds, given["weight"], given["q"]
    sizes = [layer.tokens, *(chunk.stop_row - chunk.first_row for chunk in bounds.chunks)]
    latents = jax.random.normal(jax.random.key(2), (max(sizes), layer.kv_lora_rank), jnp.bfloat16)
    k = jax.random.normal(jax.random.key(3), (max(sizes), layer.heads, d.qk_head_dim), jnp.bfloat16)
    v = jax.random.normal(jax.random.key(4), (max(sizes), layer.heads, d.v_head_dim), jnp.bfloat16)

    def products(inputs: Any, weight: Any) -> Any:
        return [x @ weight for x in inputs]

    def attention(q: Any, keys: Any, values: Any, metadata: Any) -> Any:
        made = [jax_side.mla_prefill(q, keys[0], values[0], metadata=metadata.new, return_lse=True, backend=backend)]
        for here, chunk, k, v in zip(bounds.chunks, metadata.chunks, keys[1:], values[1:], strict=True):
            tokens = q[here.first_token : here.stop_token]
            made.append(jax_side.mla_prefill(tokens, k, v, metadata=chunk, is_causal=False, return_lse=True, backend=backend))
        return made

    cut = {name: [x[:size] for size in sizes] for name, x in (("latents", latents), ("k", k), ("v", v))}
    parts = {"part: products": (products, (cut["latents"], weight)), "part: attention": (attention, (q, cut["k"], cut["v"], metadata))}
    return {**parts, "parts": (lambda a, b: (products(*a), attention(*b)), (parts["part: products"][1], parts["part: attention"][1]))}
