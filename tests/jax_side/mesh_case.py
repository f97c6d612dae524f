"""Meshes of simulated CPU devices, a ragged problem whose heads four devices divide, and what to look for in a compiled program."""

import re
from typing import Any

import jax
import numpy as np
import oracle
from cases import offsets
from jax.sharding import AxisType, Mesh

CU_Q, CU_K = offsets([5, 0, 3, 4]), offsets([7, 2, 3, 9])
ROWS_Q, ROWS_K, HEADS = 14, 24, 8  # two rows of q and three of k and v are padding
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "dynamic-slice")


def mesh(axis_type: str, **axes: int) -> Mesh:
    """A mesh of CPU devices."""
    count = int(np.prod(list(axes.values())))
    kinds = (getattr(AxisType, axis_type),) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices("cpu")[:count])


def problem(seed: int = 0, rows_q: int = ROWS_Q, rows_k: int = ROWS_K, heads: int = HEADS, dtype: Any = np.float32) -> tuple[Any, ...]:
    """q, k, v as NumPy arrays; padding rows are finite garbage."""
    random = np.random.default_rng(seed)
    shapes = (rows_q, heads, 192), (rows_k, heads, 192), (rows_k, heads, 128)
    return tuple(random.standard_normal(shape).astype(dtype) for shape in shapes)


def assert_right(made: Any, q: Any, k: Any, v: Any, cu_q: Any = CU_Q, cu_k: Any = CU_K, is_causal: bool = True, scale: float | None = None) -> None:
    """(out, lse) are the oracle's."""
    out, lse = oracle.attention(q, k, v, cu_q, cu_k, scale, is_causal)
    np.testing.assert_allclose(np.asarray(made[0], np.float64), out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(made[1], np.float64), lse, rtol=1e-5, atol=1e-5)


def calls(text: str) -> list[str]:
    """The shapes of out in the custom calls of a compiled program's text."""
    found = []
    for line in text.splitlines():
        if "custom-call(" in line and 'custom_call_target="mla_interop' in line:
            found.append(re.search(r"= \(?(\w+\[[\d,]*\])", line).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    return found


def collectives(text: str) -> list[str]:
    """The collectives of a compiled program's text."""
    return [word for word in COLLECTIVES if re.search(rf"\b{word}(-start)?\(", text)]
