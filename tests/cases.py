"""Named problems for the contract tests: small, ragged, lopsided, and with as many heads as tokens only where that is the point.

A :class:`Case` is a description; :meth:`Case.problem` makes its arrays, the same every time, and the oracle's answer.
"""

import functools
import zlib
from dataclasses import dataclass, replace

import numpy as np
import oracle
import pytest

DTYPES = ("bfloat16", "float16", "float32")
MLA, GLM, MINICPM, MISTRAL = (192, 128), (256, 256), (96, 64), (128, 128)
YARN_SCALE = 192**-0.5 * 1.8738542  # DeepSeek-V3: factor 40, mscale_all_dim 1.0; a kernel may lose it in LSE only (TensorRT-LLM#19112)


@dataclass(frozen=True, eq=False)
class Problem:
    """The arrays of a case, and what is right. ``v`` is a strided view unless the case says otherwise; tails are NaN."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cu_q: np.ndarray
    cu_k: np.ndarray
    out: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        name: What it is about.
        lengths_q, lengths_k: Tokens of each sequence.
        heads: N.
        dims: (D, V).
        dtype: Of q, k and v.
        scale: As in ``mla_prefill``.
        magnitude: q and k are normal numbers times this.
        tail: Rows past the last sequence in q, k and v, filled with NaN.
        strided: Whether v is the right part of a ``[S, N, 128 + V]`` up-projection, as in a model.
        is_causal: The mask.
    """

    name: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int = 3
    dims: tuple[int, int] = MLA
    dtype: str = "bfloat16"
    scale: float | None = None
    magnitude: float = 1.0
    tail: int = 0
    strided: bool = True
    is_causal: bool = True

    def __str__(self) -> str:
        return f"{self.name}-{'causal' if self.is_causal else 'full'}-{self.dtype}"

    @functools.lru_cache(maxsize=512)  # noqa: B019  cases live as long as the process
    def problem(self) -> Problem:
        """The arrays and the oracle's answer; read-only, so that nothing can change them between tests."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        qk_dim, v_dim = self.dims
        cu_q, cu_k = offsets(self.lengths_q), offsets(self.lengths_k)
        dtype, tokens, keys = numpy_dtype(self.dtype), cu_q[-1] + self.tail, cu_k[-1] + self.tail
        q = (random.standard_normal((tokens, self.heads, qk_dim)) * self.magnitude).astype(dtype)
        k = (random.standard_normal((keys, self.heads, qk_dim)) * self.magnitude).astype(dtype)
        projection = random.standard_normal((keys, self.heads, 128 + v_dim)).astype(dtype)
        v = projection[..., 128:] if self.strided else np.ascontiguousarray(projection[..., 128:])
        out, lse = oracle.attention(q, k, v, cu_q, cu_k, self.scale, self.is_causal)
        q[cu_q[-1] :], k[cu_k[-1] :], projection[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan, np.nan, np.nan
        for array in (q, k, v, cu_q, cu_k, out, lse):
            array.flags.writeable = False
        return Problem(q, k, v, cu_q, cu_k, out, lse)


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of that name; without ml_dtypes, which JAX brings, a test that needs one of its dtypes is skipped."""
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name) if name.startswith(("bfloat", "float8")) else name)


def offsets(lengths: tuple[int, ...] | list[int]) -> np.ndarray:
    """Cumulative lengths, int32 ``[B + 1]``."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


EDGES = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257)
# One sequence of each kind: empty queries, empty keys, both, queries longer than keys, keys longer than queries.
MIXED_Q, MIXED_K = (0, 4, 0, 17, 6, 33), (3, 0, 0, 40, 2, 33)

RAGGED = [
    Case("q-empty-first", (0, 5, 70), (9, 5, 81)),
    Case("k-empty-first", (4, 5, 70), (0, 5, 70)),
    Case("both-empty-middle", (5, 0, 70), (33, 0, 70)),
    Case("k-empty-middle", (5, 7, 70), (5, 0, 92)),
    Case("q-empty-last", (5, 70, 0), (5, 70, 11)),
    Case("k-empty-last", (5, 70, 3), (9, 70, 0)),
    Case("both-empty-last", (5, 70, 0, 0), (9, 70, 0, 0)),
    Case("every-kind", MIXED_Q, MIXED_K),
    Case("all-k-empty", (3, 4, 1), (0, 0, 0)),  # flash-attention#2470: a kernel stops the process on this
    Case("all-q-empty", (0, 0, 0), (3, 4, 1)),
    Case("q-longer-k-longer", (8, 3, 130), (3, 8, 66)),  # flash-attention#1778
    Case("tiles-without-keys", (300, 5, 700), (5, 300, 150)),  # FlashInfer's FA3: such a tile's LSE lands on rows of the next one
    Case("two-against-five", (2, 1, 3), (5, 4, 7)),  # pytorch#108108: row 0 sees 4 keys, not 1
    Case("tile-edges", EDGES, EDGES[3:] + EDGES[:3], heads=1),
    Case("tile-edges-square", EDGES, EDGES, heads=1),
    Case("one-token-queries", (1,) * 12, (1, 513, 64, 65, 127, 3, 256, 2, 129, 31, 200, 77)),  # flashinfer#1663, flash-attention#2233
    Case("many-sequences", (256, *range(12, 29), *range(28, 11, -1)), (256, *range(28, 11, -1), *range(12, 29))),  # FlashMLA#85
]
HEADS = [
    Case("1-head", (6, 67, 2), (6, 70, 2), heads=1),
    Case("16-heads", (6, 67, 2), (6, 70, 2), heads=16),
    Case("40-heads", (6, 67, 2), (6, 70, 2), heads=40),
    Case("128-heads", (6, 67, 2), (6, 70, 2), heads=128),
    Case("heads-equal-tokens", (3, 9, 4), (3, 11, 4), heads=16),  # sglang#9363: hides a missing transpose of LSE
    Case("three-heads-three-tokens", (1, 1, 1), (1, 1, 1), heads=3),  # TransformerEngine#1182: layouts guessed from sizes
    Case("contiguous-v", (6, 67, 2), (6, 70, 2), strided=False),
]
TAILS = [
    Case("tail-1", (6, 67, 2), (6, 70, 2), tail=1),
    Case("tail-133", (6, 67, 2), (6, 70, 2), tail=133),
    Case("tail-of-every-kind", MIXED_Q, MIXED_K, tail=37),
    Case("tail-only", (0, 0, 0), (0, 0, 0), tail=5),
]
SCALES = [
    Case("scale-0", (6, 67, 2), (6, 70, 2), scale=0.0),
    Case("scale-negative", (6, 67, 2), (6, 70, 2), scale=-0.07),
    Case("scale-1", (6, 67, 2), (6, 70, 2), scale=1.0),
    Case("scale-yarn", (6, 67, 2), (6, 70, 2), scale=YARN_SCALE, magnitude=2.0),
    Case("scale-tiny", (6, 67, 2), (6, 70, 2), scale=1e-4),
    Case("large-logits", (6, 67, 2), (6, 70, 2), magnitude=30.0),
]
DIMS = [Case(f"dims-{d}-{v}", (6, 67, 0, 2), (6, 130, 3, 2), dims=(d, v)) for d, v in (GLM, MINICPM, MISTRAL)]


def _variants(case: Case) -> list[Case]:
    return [replace(case, is_causal=is_causal) for is_causal in (True, False)]


BY_NAME = {case.name: case for case in (*RAGGED, *HEADS, *TAILS, *SCALES, *DIMS)}
CASES = [
    *(variant for case in BY_NAME.values() for variant in _variants(case)),
    *(
        variant
        for name in ("every-kind", "tail-of-every-kind", "scale-yarn", "dims-256-256")
        for dtype in ("float16", "float32")
        for variant in _variants(replace(BY_NAME[name], dtype=dtype))
    ),
]
# One of each trouble: what is tried where every case would take too long (a JAX program is compiled for each).
ESSENTIAL = [
    case
    for case in CASES
    if case.name in ("every-kind", "all-k-empty", "q-longer-k-longer", "tail-of-every-kind", "scale-negative", "heads-equal-tokens", "dims-96-64")
    and (case.dtype == "bfloat16" or case.name == "every-kind")
]
