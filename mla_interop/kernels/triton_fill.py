"""The fill of rows that kernels leave undefined, for python kernels on CUDA: one small launch that writes only those rows."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _fill(out, lse, cu_q, cu_k, num_seqs, rows, heads, v_dim, causal: tl.constexpr, has_lse: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low = 0
    high = num_seqs
    while low < high:  # the first sequence that ends past this row
        middle = (low + high) // 2
        if tl.load(cu_q + middle + 1) <= row:
            low = middle + 1
        else:
            high = middle
    empty = low == num_seqs
    if low < num_seqs:
        len_q = tl.load(cu_q + low + 1) - tl.load(cu_q + low)
        len_k = tl.load(cu_k + low + 1) - tl.load(cu_k + low)
        local = row - tl.load(cu_q + low)
        empty = (len_k == 0) | (causal & (local + len_k - len_q < 0))
    if empty:
        columns = heads * v_dim
        for start in range(0, columns, block):
            offset = start + tl.arange(0, block)
            tl.store(out + row * columns + offset, tl.zeros([block], dtype=out.dtype.element_ty), mask=offset < columns)
        if has_lse:
            for start in range(0, heads, block):
                head = start + tl.arange(0, block)
                tl.store(lse + head.to(tl.int64) * rows + row, tl.full([block], float("-inf"), dtype=tl.float32), mask=head < heads)


def fill_rows(out: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, is_causal: bool) -> None:
    """out 0 and lse -inf in rows without a visible key and in rows past the last sequence.

    Args:
        out: ``[T, N, V]``, contiguous, on CUDA.
        lse: float32 ``[N, T]``, contiguous, or None.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` on the same device.
        is_causal: Bottom-right causal mask, or none.
    """
    rows, heads, v_dim = out.shape
    has_lse = lse is not None
    _fill[(rows,)](out, lse if has_lse else out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q.shape[0] - 1, rows, heads, v_dim, is_causal, has_lse, 1024)
