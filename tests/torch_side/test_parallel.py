"""Several processes on the CPU: heads as DTensors, keys spread over ranks; and the arithmetic of both without any process."""

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch")

from ranks import run_ranks  # noqa: E402

import torch_side  # noqa: E402
from mla_interop import MLAInputError  # noqa: E402
from mla_interop.context_parallel import contribution, share_of  # noqa: E402


@pytest.mark.parametrize("world", [2, 3])
def test_context_parallel_over_gloo(world: int, tmp_path: Path) -> None:
    run_ranks("context_parallel", world, "cpu", tmp_path)


def test_heads_as_dtensors_over_gloo(tmp_path: Path) -> None:
    run_ranks("sharded_heads", 2, "cpu", tmp_path)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_shares_add_up_to_the_whole(kind: str, is_causal: bool, rng: Any) -> None:
    """Every cut of the keys into runs: each key of each visible pair is counted once, in every namespace."""
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in ((5, 0, 7, 3, 6), (9, 4, 7, 0, 2)))
    q, k, v = (rng.standard_normal((n, 2, d)) for n, d in ((21, 8), (22, 8), (22, 4)))
    expected, expected_lse = oracle.attention(q, k, v, cu_q, cu_k, is_causal=is_causal)
    give = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": lambda x: pytest.importorskip("jax.numpy").asarray(x)}[kind]
    for cuts in ([0, 22], [0, 1, 22], [0, 9, 13, 20, 22], [0, 0, 11, 11, 30], [0, *range(1, 23)]):
        parts = []
        for first, last in zip(cuts, cuts[1:]):
            share = share_of(give(cu_q), give(cu_k), first, last - first, is_causal)
            cu, partly, full = map(np.asarray, share)
            assert cu.dtype == np.int32 and cu[-1] == 21 and (np.diff(cu) >= 0).all()
            rows = slice(first, last)
            causal = oracle.attention(q, k[rows], v[rows], cu, partly)
            rest = oracle.attention(q, k[rows], v[rows], cu, full, is_causal=False)
            assert not (np.isfinite(causal[1]) & np.isfinite(rest[1])).any(), "a query has keys in one of the two problems"
            parts.append((causal[0] + rest[0], np.maximum(causal[1], rest[1]).astype(np.float32)))
        everything = give(np.stack([lse for _, lse in parts]))
        made = [contribution(give(out), give(lse), everything) for out, lse in parts]
        total = sum(np.asarray(part) for part, _ in made)
        np.testing.assert_allclose(total, expected, atol=1e-5)
        np.testing.assert_allclose(np.asarray(made[0][1]), expected_lse, atol=1e-5)


def test_what_a_row_without_keys_holds_does_not_count() -> None:
    lse = np.array([[-np.inf, np.inf, 0.5]], np.float32)
    out = np.array([np.nan, np.inf, 2.0], np.float32)[:, None, None]
    part, whole = contribution(out, lse, np.stack([lse, np.full_like(lse, -np.inf)]))
    assert (
        part[:2].tolist() == [[[0.0]], [[0.0]]] and part[2, 0, 0] == pytest.approx(2.0) and np.isneginf(whole[0, :2]).all() and whole[0, 2] == np.float32(0.5)
    )


def test_without_a_process_group() -> None:
    x = torch.zeros(3, 2, 192)
    with pytest.raises(MLAInputError, match="group: got no process group.*init_process_group"):
        torch_side.context_parallel_mla_prefill(x, x, x, cu_seqlens_q=[0, 3])
