"""What is measured: shapes, seeded inputs, and the float64 answer that every contender is compared with."""

from dataclasses import dataclass
from typing import Any

import numpy as np

QK_HEAD_DIM, V_HEAD_DIM = 192, 128


@dataclass(frozen=True)
class Problem:
    """A ragged batch of new tokens under the causal mask.

    Attributes:
        name: Heads x length x sequences, or heads x a word for the lengths.
        heads: N.
        lengths: Tokens of each sequence.
    """

    name: str
    heads: int
    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> np.ndarray:
        """int32 ``[B + 1]``, of queries and of keys."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def tokens(self) -> int:
        """T, which is S too."""
        return sum(self.lengths)

    @property
    def flops(self) -> float:
        """Floating-point operations of the causal attention: half of 2 * (D + V) * len^2 a head and sequence."""
        return sum(float(n) * n for n in self.lengths) * self.heads * (QK_HEAD_DIM + V_HEAD_DIM)


def equal(heads: int, length: int, batch: int) -> Problem:
    """``batch`` sequences of one length."""
    return Problem(f"{heads}x{length}x{batch}", heads, (length,) * batch)


def ragged(heads: int, batch: int, longest: int) -> Problem:
    """``batch`` sequences of seeded random lengths from 1 to ``longest``."""
    lengths = np.random.default_rng(0).integers(1, longest + 1, batch)
    return Problem(f"{heads}xrandom{longest}x{batch}", heads, tuple(map(int, lengths)))


GPU_PROBLEMS = (equal(16, 512, 1), equal(16, 2048, 1), equal(128, 512, 1), equal(128, 4096, 1), equal(128, 1024, 8), ragged(128, 32, 4096))
CPU_PROBLEMS = (equal(16, 1024, 1),)


def inputs(problem: Problem, device: str, dtype: str) -> tuple[Any, Any, Any]:
    """Standard normal q, k, v as torch tensors; v is a view of a ``[S, N, 256]`` up-projection, as in a model."""
    import torch

    generator = torch.Generator(device=device).manual_seed(1)
    kind = getattr(torch, dtype)

    def draw(width: int) -> Any:
        return torch.randn(problem.tokens, problem.heads, width, generator=generator, device=device, dtype=torch.float32).to(kind)

    return draw(QK_HEAD_DIM), draw(QK_HEAD_DIM), draw(2 * V_HEAD_DIM)[..., V_HEAD_DIM:]


def expected(problem: Problem, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """out ``[T, N, V]`` and lse ``[N, T]`` in float64, by the dense formula, one sequence and a few heads at a time."""
    import torch

    out = torch.empty(problem.tokens, problem.heads, V_HEAD_DIM, dtype=torch.float64, device=q.device)
    lse = torch.empty(problem.heads, problem.tokens, dtype=torch.float64, device=q.device)
    starts = problem.cu_seqlens.tolist()
    for start, length in zip(starts, problem.lengths):
        rows = slice(start, start + length)
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        step = max(1, int(2**28 // (length * length)))
        for head in range(0, problem.heads, step):
            heads = slice(head, head + step)
            queries, keys, values = (x[rows, heads].transpose(0, 1).double() for x in (q, k, v))
            scores = (queries @ keys.transpose(1, 2) * QK_HEAD_DIM**-0.5).masked_fill_(hidden, float("-inf"))
            lse[heads, rows] = torch.logsumexp(scores, -1)
            out[rows, heads] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out, lse


def errors(made: tuple[Any, Any] | None, truth: tuple[Any, Any]) -> dict[str, float]:
    """Relative Frobenius error of out, and largest absolute error of lse."""
    if made is None:
        return {}
    out, lse = made
    found = {"err_out": float((out.double() - truth[0]).norm() / truth[0].norm())}
    if lse is not None:
        found["err_lse"] = float((lse.double() - truth[1]).abs().max())
    return found
