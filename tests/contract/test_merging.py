"""Context and new tokens, computed apart and merged by LSE, are the one pass over both: for every backend of this machine."""

import numpy as np
import pytest
from cases import YARN_SCALE, numpy_dtype, offsets
from frontends import needs, to_jax, to_torch
from merging import check, one_pass

import mla_interop

BACKENDS = ("CPU_SDPA", "REFERENCE")
# (context, new tokens) of each sequence. Equal halves hide a wrong base of LSE (sglang#40903); these do not.
SPLITS = {"256+16": ((256, 0, 40), (16, 5, 1)), "16+256": ((16, 3, 0), (256, 1, 9)), "no-context": ((0, 0, 0), (7, 64, 3))}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("frontend", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_context_and_new_tokens_merge_to_one_pass(backend: str, frontend: str, split: str) -> None:
    needs(backend)
    if frontend == "torch":
        pytest.importorskip("torch")
        import torch_side

        call, give = torch_side.mla_prefill, to_torch
    elif frontend == "jax":
        pytest.importorskip("jax")
        import jax_side

        call, give = jax_side.mla_prefill, to_jax
    else:
        call, give = mla_interop.mla_prefill, np.asarray
    check(one_pass(*SPLITS[split], heads=2, dtype=numpy_dtype("bfloat16")), backend, call, give, "bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_context_in_float32(backend: str) -> None:
    """4096 + 16: the split of the report."""
    needs(backend)
    check(one_pass((4096,), (16,), heads=1, dtype=np.dtype(np.float32)), backend, mla_interop.mla_prefill, np.asarray, "float32")


@pytest.mark.parametrize("chunk", [512, 100, 16])
def test_the_error_does_not_grow_with_the_number_of_chunks(chunk: int) -> None:
    """vllm#26042, sglang#22688: chunks run out for the shorter prefixes first; a batch is each of its sequences."""
    context, new = np.array([530, 290, 120, 0]), (9, 5, 3, 2)
    case = one_pass(tuple(context), new, heads=2, dtype=np.dtype(np.float32))
    call = lambda k, v, cu, causal: mla_interop.mla_prefill(  # noqa: E731
        case["q"], k, v, cu_seqlens_q=case["cu_new"], cu_seqlens_k=cu, scale=YARN_SCALE, is_causal=causal, return_lse=True
    )
    state = call(*case["new"], case["cu_new"], True)
    for start in range(0, context.max(), chunk):
        lengths = np.clip(context - start, 0, chunk)
        rows = np.concatenate([case["cu_old"][b] + start + np.arange(lengths[b]) for b in range(len(new))])
        state = mla_interop.merge(*state, *call(case["old"][0][rows], case["old"][1][rows], offsets(list(lengths)), False))
    np.testing.assert_allclose(state[0], case["expected"][0], rtol=0, atol=3e-6)
    np.testing.assert_allclose(state[1], case["expected"][1], rtol=0, atol=2e-5)
