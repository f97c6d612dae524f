"""Merging of two partial results in one pass over memory, for torch tensors on CUDA. What it means is said in ``mla_interop.lse.merge``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 16, 256


@triton.jit(do_not_specialize=["tokens"])
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse,
    tokens, heads, v_dim,
    a_token, a_head, b_token, b_head, out_token, out_head,
    lse_a_head, lse_a_token, lse_b_head, lse_b_token, lse_head, lse_token,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = (tl.program_id(0) // heads).to(tl.int64) * rows + tl.arange(0, rows)
    inside = token < tokens
    a = tl.load(lse_a + head * lse_a_head + token * lse_a_token, mask=inside, other=float("-inf")).to(tl.float32)
    b = tl.load(lse_b + head * lse_b_head + token * lse_b_token, mask=inside, other=float("-inf")).to(tl.float32)
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    empty_a = a == float("-inf")
    empty_b = b == float("-inf")
    # A NaN on either side must show in the result: a plain maximum drops it.
    top = tl.where((a > b) | (a != a), a, b)
    top = tl.where(empty_a & empty_b, 0.0, top)
    weight_a = tl.exp(a - top)
    weight_b = tl.exp(b - top)
    total = tl.where(empty_a & empty_b, 1.0, weight_a + weight_b)
    merged_lse = tl.where(empty_a & empty_b, float("-inf"), tl.log(total) + top)
    share_a = (weight_a / total)[:, None]
    share_b = (weight_b / total)[:, None]
    none_a = empty_a[:, None]
    none_b = empty_b[:, None]
    for start in range(0, v_dim, columns):
        column = start + tl.arange(0, columns)[None, :]
        mask = inside[:, None] & (column < v_dim)
        # Sides without a key are not even read, so nothing has to be selected away; 0 is what both of them give.
        x = tl.load(out_a + token[:, None] * a_token + head * a_head + column, mask=mask & ~none_a, other=0.0).to(tl.float32)
        y = tl.load(out_b + token[:, None] * b_token + head * b_head + column, mask=mask & ~none_b, other=0.0).to(tl.float32)
        # The result may be an operand. Elements that several threads hold are read by each of them: none may write before all have
        # read, neither out nor, after the loop, lse (local-inference-lab/vllm#468).
        tl.debug_barrier()
        mixed = tl.where(none_a, y, tl.where(none_b, x, x * share_a + y * share_b))
        tl.store(out + token[:, None] * out_token + head * out_head + column, mixed.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head * lse_head + token * lse_token, merged_lse, mask=inside)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> tuple[Any, Any]:
    """``mla_interop.lse.merge`` with shapes already checked. One program owns all columns of its rows, so writing into an operand is safe.

    Args:
        out_a, out_b, out: ``[T, N, V]``; any strides of T and N. A last dimension without unit stride is copied; ``out`` must have it.
        lse_a, lse_b, lse: ``[N, T]``, any strides.
    """
    out = out_a.new_empty(out_a.shape) if out is None else out
    lse = lse_a.new_empty(lse_a.shape, dtype=torch.float32) if lse is None else lse
    tokens, heads, v_dim = out.shape
    if not out.numel():  # V is never 0 where there are rows
        return out, lse
    target = out if out.stride(2) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    out_a, out_b = (x if x.stride(2) == 1 else x.contiguous() for x in (out_a, out_b))
    grid = (heads * triton.cdiv(tokens, _ROWS),)
    columns = min(_COLUMNS, triton.next_power_of_2(v_dim))
    with on_device(out):
        _merge[grid](
            out_a, lse_a, out_b, lse_b, target, lse, tokens, heads, v_dim,
            *out_a.stride()[:2], *out_b.stride()[:2], *target.stride()[:2],
            *lse_a.stride(), *lse_b.stride(), *lse.stride(), rows=_ROWS, columns=columns,
        )  # fmt: skip
    if target is not out:
        out.copy_(target)
    return out, lse


def on_device(x: Any) -> AbstractContextManager[Any]:
    """Triton launches on the current device; this makes it ``x``'s, where it is not."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else nullcontext()
