"""A whole layer from latents against the sum of its unavoidable parts, and against the same walk composed from plain torch operations.

    python -m mla_interop.bench.layer --out FILE [--device cuda|cpu] [--frameworks torch,jax] [--backends NAME,...]

Unavoidable are the up-projections' products and the attention kernels on compact inputs in buffers that exist. They are timed one after
the other, as in the layer, and also each alone, which says less: a GPU at its power limit runs nothing but products slower than a mixture.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mla_interop.bench.timing import side_by_side
from mla_interop.dimensions import MODELS, MLADimensions
from mla_interop.selector import explain
from mla_interop.selector_config import MLAPrefillSelectorConfig
from mla_interop.workspace import workspace_bytes

# Long enough for clocks to settle at what this work alone leads to.
ROUNDS, LOOP_S = 9, 0.3


@dataclass(frozen=True)
class Layer:
    """What is measured: requests with new tokens and a context in a paged cache, DeepSeek-V3's dimensions, bfloat16."""

    heads: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_size: int
    workspace_rows: int
    kv_lora_rank: int = 512
    dimensions: MLADimensions = MODELS["deepseek-v3"].dimensions

    @property
    def tokens(self) -> int:
        """T, new tokens of all requests."""
        return sum(self.query_lens)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache that hold a context."""
        return sum(-(-n // self.block_size) for n in self.context_lens)

    @property
    def block_table(self) -> np.ndarray:
        """Blocks scattered over the cache, as a server's are after a while."""
        counts = [-(-n // self.block_size) for n in self.context_lens]
        table, order = np.zeros((len(counts), max(counts)), np.int32), np.random.default_rng(0).permutation(self.num_blocks)
        for request, (count, end) in enumerate(zip(counts, np.cumsum(counts))):
            table[request, :count] = order[end - count : end]
        return table

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """q ``[T, N, D]``, latents ``[T, L]`` and ``[T, R]``, the up-projection ``[L, N * (P + V)]``, and the cache ``[blocks, block, L + R]``."""
        d, rank = self.dimensions, self.kv_lora_rank
        return {
            "q": (self.tokens, self.heads, d.qk_head_dim),
            "kv_c": (self.tokens, rank),
            "k_pe": (self.tokens, d.qk_rope_head_dim),
            "weight": (rank, self.heads * (d.qk_nope_head_dim + d.v_head_dim)),
            "cache": (self.num_blocks, self.block_size, rank + d.qk_rope_head_dim),
        }

    def metadata_options(self) -> dict[str, Any]:
        """Keyword arguments of ``prepare_context_metadata``."""
        options = {"query_lens": self.query_lens, "context_lens": self.context_lens, "block_table": self.block_table}
        return {**options, "block_size": self.block_size, "workspace_rows": self.workspace_rows}

    def config(self, device: str) -> MLAPrefillSelectorConfig:
        """The selector's view of the layer's attention on ``"cuda"`` or ``"cpu"``."""
        return MLAPrefillSelectorConfig(dimensions=self.dimensions, num_heads=self.heads, device_type=device)


GPU = Layer(128, (512,) * 8, (4096, 7000, 11000, 16000, 20000, 24000, 28000, 32768), 64, 65536)
CPU = Layer(4, (16,) * 4, (100, 170, 300, 512), 64, 512)


def backends(layer: Layer, device: str, wanted: str) -> list[str]:
    """The backends to measure: those named, or all that can serve but REFERENCE."""
    if wanted:
        return wanted.split(",")
    return [row.backend for row in explain(layer.config(device)).rows if row.valid and row.backend != "REFERENCE"]


def torch_rows(layer: Layer, device: str, backend: str) -> Iterator[dict[str, Any]]:
    """The module, the walk by plain operations, and the parts, in torch."""
    import torch

    import torch_side
    from mla_interop.bench.torch_contenders import looped

    generator = torch.Generator(device).manual_seed(1)
    given = {name: torch.randn(shape, generator=generator, device=device).to(torch.bfloat16) for name, shape in layer.shapes.items()}
    given["weight"] *= layer.kv_lora_rank**-0.5
    metadata = torch_side.prepare_context_metadata(**layer.metadata_options(), device=device)
    planned = workspace_bytes(metadata, layer.tokens, layer.dimensions, layer.heads, layer.kv_lora_rank)
    plain = _Composed(layer, given, metadata, backend)

    def whole(kv_b: Any = None) -> Any:
        inputs = given["q"], given["kv_c"], given["k_pe"], given["weight"] if kv_b is None else kv_b
        return torch_side.mla_attention(*inputs, metadata=metadata, cache=given["cache"], backend=backend, dimensions=layer.dimensions)

    calls: dict[str, Callable[[], Any]] = {
        "layer": whole,
        "layer, kv_b a function": lambda: whole(lambda x: x @ given["weight"]),
        "composed of plain operations": plain,
        **_torch_parts(layer, given, metadata, backend),
    }
    expected = plain().float()
    times = side_by_side({name: (looped(call, given["q"].device), 1) for name, call in calls.items()}, ROUNDS, LOOP_S)
    for name, call in calls.items():
        made = call()
        row = {"framework": "torch", "backend": backend, "name": name, "chunks": metadata.bounds.num_chunks, "workspace_bytes": planned}
        if name.startswith("layer"):
            row["difference"] = float((made.float() - expected).norm() / expected.norm())
        del made
        if device == "cuda":
            row["peak_extra_bytes"] = _peak(call)
        yield {**row, **times[name]}


def _peak(call: Callable[[], Any]) -> int:
    """Bytes at the peak of a call beyond what was there before it and what it returns."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = call()
    torch.cuda.synchronize()
    returned = torch.cuda.memory_allocated() - before
    del made
    return torch.cuda.max_memory_allocated() - before - returned


def _torch_parts(layer: Layer, given: dict[str, Any], metadata: Any, backend: str) -> dict[str, Callable[[], Any]]:
    """The products of all up-projections, and the attention kernels, alone."""
    import torch

    import torch_side

    d, bounds, weight, q = layer.dimensions, metadata.bounds, given["weight"], given["q"]
    rows = max(bounds.chunk_rows, layer.tokens)
    latents = torch.randn(rows, layer.kv_lora_rank, device=q.device).to(q.dtype)
    projected = torch.empty(rows, weight.shape[1], dtype=q.dtype, device=q.device)
    k = torch.randn(rows, layer.heads, d.qk_head_dim, device=q.device, dtype=q.dtype)
    v = projected.view(rows, layer.heads, -1)[..., d.qk_nope_head_dim :]
    sizes = [layer.tokens, *(chunk.stop_row - chunk.first_row for chunk in bounds.chunks)]
    partial = torch.empty(layer.tokens, layer.heads, d.v_head_dim, dtype=q.dtype, device=q.device)

    def products() -> None:
        for size in sizes:
            torch.mm(latents[:size], weight, out=projected[:size])

    def attention() -> None:
        options = {"return_lse": True, "backend": backend}
        torch_side.mla_prefill(q, k[: layer.tokens], v[: layer.tokens], metadata=metadata.new, out=partial, **options)
        for chunk, here, size in zip(metadata.chunks, bounds.chunks, sizes[1:], strict=True):
            tokens = q[here.first_token : here.stop_token]
            torch_side.mla_prefill(tokens, k[:size], v[:size], metadata=chunk, is_causal=False, out=partial[: len(tokens)], **options)

    products()  # v holds numbers from here on
    return {"part: products": products, "part: attention": attention, "parts": lambda: (products(), attention())}


class _Composed:
    """The same walk as one would write it in plain torch, around the same attention kernel."""

    def __init__(self, layer: Layer, given: dict[str, Any], metadata: Any, backend: str) -> None:
        self.layer, self.given, self.metadata, self.backend = layer, given, metadata, backend

    def __call__(self) -> Any:
        import torch

        given, rank = self.given, self.layer.kv_lora_rank
        flat = given["cache"].view(-1, given["cache"].shape[2])
        out, lse = self._attend(given["q"], given["kv_c"], given["k_pe"], self.metadata.new, True)
        context = torch.zeros_like(out, dtype=torch.float32)
        context_lse = torch.full_like(lse, float("-inf"))
        for chunk, here in zip(self.metadata.chunks, self.metadata.bounds.chunks, strict=True):
            latents = torch.index_select(flat, 0, self.metadata.rows[here.first_row : here.stop_row])
            tokens = slice(here.first_token, here.stop_token)
            part, part_lse = self._attend(given["q"][tokens], latents[:, :rank], latents[:, rank:], chunk, False)
            context[tokens], context_lse[:, tokens] = self._merge(context[tokens], context_lse[:, tokens], part, part_lse)
        return self._merge(context, context_lse, out, lse)[0].to(out.dtype)

    def _attend(self, q: Any, kv_c: Any, k_pe: Any, lengths: Any, is_causal: bool) -> Any:
        import torch

        import torch_side

        nope = self.layer.dimensions.qk_nope_head_dim
        kv = torch.matmul(kv_c, self.given["weight"]).view(len(kv_c), self.layer.heads, -1)
        k = torch.cat([kv[..., :nope], k_pe[:, None, :].expand(-1, self.layer.heads, -1)], dim=-1)
        return torch_side.mla_prefill(q, k, kv[..., nope:], metadata=lengths, is_causal=is_causal, return_lse=True, backend=self.backend)

    @staticmethod
    def _merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
        import torch

        lse = torch.logaddexp(lse_a, lse_b)
        share_a, share_b = ((x - lse).exp().nan_to_num(0.0).t()[..., None] for x in (lse_a, lse_b))
        return out_a.float() * share_a + out_b.float() * share_b, lse


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per framework and backend: the layer's time over that of its parts, the composed walk's over the layer's, and peak memory over what was planned."""
    made = []
    for framework, backend in dict.fromkeys((row["framework"], row["backend"]) for row in rows):
        mine = {row["name"]: row for row in rows if (row["framework"], row["backend"]) == (framework, backend) and "us" in row}
        if "layer" not in mine or "parts" not in mine:
            continue
        layer, parts = mine["layer"], mine["parts"]["us"]
        found = {"framework": framework, "backend": backend, "parts_us": parts, "layer_over_parts": layer["us"] / parts}
        if "composed of plain operations" in mine:
            found["composed_over_layer"] = mine["composed of plain operations"]["us"] / layer["us"]
        if "peak_extra_bytes" in layer:
            found["peak_over_planned"] = layer["peak_extra_bytes"] / layer["workspace_bytes"]
        made.append(found)
    return made


def main() -> None:
    """Command line."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same GPU
    from mla_interop.bench.run import environment, save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--frameworks", default="torch,jax")
    parser.add_argument("--backends", default="")
    given = parser.parse_args()
    layer = GPU if given.device == "cuda" else CPU
    rows: list[dict[str, Any]] = []
    for framework in given.frameworks.split(","):
        for backend in backends(layer, given.device, given.backends):
            try:
                if framework == "torch":
                    source = torch_rows(layer, given.device, backend)
                else:
                    from mla_interop.bench.layer_jax import jax_rows

                    source = jax_rows(layer, given.device, backend)
                for row in source:
                    rows.append(row)
                    print(row, flush=True)
            except Exception as error:  # another backend may still run: the file says which did not, and why
                rows.append({"framework": framework, "backend": backend, "name": "failed", "failed": f"{type(error).__name__}: {str(error)[:500]}"})
                print(rows[-1], flush=True)
    found = ratios(rows)
    print(*found, sep="\n")
    save({"environment": environment(given.device), "layer": str(layer), "ratios": found, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
