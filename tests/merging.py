"""A prompt in two parts, context and new tokens, and the check that their results merge to that of one pass over both."""

from typing import Any

import numpy as np
import oracle
from cases import YARN_SCALE, offsets
from frontends import LSE_TOLERANCE, TOLERANCE, to_numpy

import mla_interop


def one_pass(context: tuple[int, ...], new: tuple[int, ...], heads: int, dtype: np.dtype, scale: float = YARN_SCALE) -> dict[str, Any]:
    """q, and per sequence its context's and its new tokens' keys; with what is right."""
    random = np.random.default_rng(3)
    q, k_new = (random.standard_normal((sum(new), heads, 192)).astype(dtype) for _ in range(2))
    v_new, v_old = (random.standard_normal((sum(lengths), heads, 128)).astype(dtype) for lengths in (new, context))
    k_old = random.standard_normal((sum(context), heads, 192)).astype(dtype)
    cu_new, cu_old = offsets(new), offsets(context)

    def interleave(old: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        return np.concatenate([part for b in range(len(new)) for part in (old[cu_old[b] : cu_old[b + 1]], fresh[cu_new[b] : cu_new[b + 1]])])

    k, v = interleave(k_old, k_new), interleave(v_old, v_new)
    expected = oracle.attention(q, k, v, cu_new, cu_new + cu_old, scale)
    return {"q": q, "old": (k_old, v_old), "new": (k_new, v_new), "cu_new": cu_new, "cu_old": cu_old, "scale": scale, "expected": expected}


def check(case: dict[str, Any], backend: str, call: Any, give: Any, dtype: str) -> tuple[float, float]:
    """Merge what ``call`` gives for both parts; compare with the one pass."""
    q = give(case["q"])
    options = {"cu_seqlens_q": case["cu_new"], "scale": case["scale"], "return_lse": True, "backend": backend}
    context = call(q, *map(give, case["old"]), cu_seqlens_k=case["cu_old"], is_causal=False, **options)
    new = call(q, *map(give, case["new"]), is_causal=True, **options)
    out, lse = mla_interop.merge(*context, *new)
    expected, expected_lse = case["expected"]
    out_error = float(np.linalg.norm(to_numpy(out) - expected) / np.linalg.norm(expected))
    lse_error = float(np.abs(to_numpy(lse) - expected_lse).max())
    # Two roundings of out to its dtype, one for each part, and one of the merge.
    assert out_error <= TOLERANCE[dtype] * 1.5 and lse_error <= LSE_TOLERANCE, (out_error, lse_error)
    untouched = np.repeat(np.diff(case["cu_old"]) == 0, np.diff(case["cu_new"]))
    assert np.array_equal(to_numpy(out)[untouched], to_numpy(new[0])[untouched]), "without a context the new tokens' result is kept bit for bit"
    return out_error, lse_error
