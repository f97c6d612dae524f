"""A layer's problem from latents: requests with a context in a paged cache and new tokens, and the one pass over both in float64."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
from cases import numpy_dtype, offsets

from mla_interop.dimensions import MLADimensions

DIMS = MLADimensions(qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
FP8 = numpy_dtype("float8_e4m3fn")


@dataclass(frozen=True, eq=False)
class LatentCase:
    """Lengths and what else a layer call depends on; arrays are the same for equal cases.

    Attributes:
        query_lens, context_lens: Of each request.
        block_size: Of the cache, whose blocks are scattered; blocks and places that hold nothing are NaN.
        heads, rank, dims: N, L and P, R, V.
        cache_scale: Makes the cache float8_e4m3fn; the reference then uses what such a cache holds.
        tail: Rows of q, kv_c and k_pe past the last request, NaN.
        scale: Softmax scale.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_size: int = 16
    heads: int = 3
    rank: int = 40
    dims: MLADimensions = DIMS
    dtype: str = "float32"
    cache_scale: float | None = None
    tail: int = 0
    scale: float = 0.21
    arrays: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(zlib.crc32(repr((self.query_lens, self.context_lens, self.block_size, self.heads)).encode()))
        dtype, width, dims = numpy_dtype(self.dtype), self.rank + self.dims.qk_rope_head_dim, self.dims
        tokens = sum(self.query_lens) + self.tail
        latents = [random.standard_normal((c + n, width)).astype(dtype) for c, n in zip(self.context_lens, self.query_lens)]
        q = random.standard_normal((tokens, self.heads, dims.qk_head_dim)).astype(dtype)
        weight = (random.standard_normal((self.rank, self.heads * (dims.qk_nope_head_dim + dims.v_head_dim))) * self.rank**-0.5).astype(dtype)
        table, cache = self._cache(random, latents, width, dtype)
        fresh = np.concatenate([x[c:] for x, c in zip(latents, self.context_lens)] + [np.full((self.tail, width), np.nan, dtype)])
        q[sum(self.query_lens) :] = np.nan
        made = {"q": q, "kv_c": fresh[:, : self.rank], "k_pe": fresh[:, self.rank :], "weight": weight, "cache": cache, "table": table, "latents": latents}
        self.arrays.update(made)

    def _cache(self, random: Any, latents: list[np.ndarray], width: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        counts = [-(-c // self.block_size) for c in self.context_lens]
        order = random.permutation(sum(counts) + 3)
        table = np.full((len(counts), max([*counts, 1])), -7, np.int32)
        stored = dtype if self.cache_scale is None else FP8
        cache = np.full((len(order), self.block_size, width), np.nan, stored)
        used = 0
        for request, (count, context) in enumerate(zip(counts, self.context_lens)):
            table[request, :count] = order[used : used + count]
            used += count
            for position in range(context):
                row = latents[request][position]
                if self.cache_scale is not None:
                    row = (row.astype(np.float32) / self.cache_scale).astype(FP8)
                    latents[request][position] = (row.astype(np.float32) * self.cache_scale).astype(dtype)
                cache[table[request, position // self.block_size], position % self.block_size] = row
        return table, cache

    def expected(self, which: str = "all") -> tuple[np.ndarray, np.ndarray]:
        """float64 out and lse of one pass over ``"all"`` keys, or over the ``"context"``, or the ``"new"`` ones alone."""
        weight = self.arrays["weight"].astype(np.float64)
        keys, values, lengths = [], [], []
        for latents, context in zip(self.arrays["latents"], self.context_lens):
            part = latents[{"all": slice(None), "context": slice(context), "new": slice(context, None)}[which]].astype(np.float64)
            kv = (part[:, : self.rank] @ weight).reshape(len(part), self.heads, self.dims.qk_nope_head_dim + self.dims.v_head_dim)
            pe = np.broadcast_to(part[:, None, self.rank :], (len(part), self.heads, self.dims.qk_rope_head_dim))
            keys.append(np.concatenate([kv[..., : self.dims.qk_nope_head_dim], pe], axis=-1))
            values.append(kv[..., self.dims.qk_nope_head_dim :])
            lengths.append(len(part))
        cu_q, cu_k = offsets(self.query_lens), offsets(lengths)
        return oracle.attention(self.arrays["q"], np.concatenate(keys), np.concatenate(values), cu_q, cu_k, self.scale, is_causal=which != "context")


def assert_near(made: tuple[Any, Any], expected: tuple[np.ndarray, np.ndarray], out_error: float = 2e-6, lse_error: float = 2e-5) -> float:
    """Compare (out, lse) with float64; rows without a key must be exact. Returns the relative Frobenius error of out."""
    from frontends import to_numpy

    out, lse = (to_numpy(x) for x in made)
    assert out.shape == expected[0].shape and lse.shape == expected[1].shape
    no_key = np.isneginf(expected[1])
    assert not out[no_key.T].any() and np.isneginf(lse[no_key]).all(), "rows without a key must be 0 and -inf"
    found = float(np.linalg.norm(out - expected[0]) / max(np.linalg.norm(expected[0]), 1e-30))
    assert found <= out_error, f"out: relative error {found:.2e}"
    assert np.abs(lse[~no_key] - expected[1][~no_key]).max(initial=0.0) <= lse_error
    return found
