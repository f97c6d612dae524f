"""``mla_interop.latents`` in one pass over memory each, for torch tensors on CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl

from mla_interop.errors import input_error
from mla_interop.kernels.triton_merge import on_device

_GATHER_ROWS, _EXPAND_HEADS = 4, 16


@triton.jit
def _e4m3(byte):
    """float8_e4m3fn to float32 by its bits: not every architecture's compiler has the type (8.0 has not)."""
    magnitude = (byte & 0x7F).to(tl.int32)
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)  # the exponent's bias goes from 7 to 127
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # subnormal: a multiple of 2 ** -9
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(byte >= 0x80, -value, value)


@triton.jit(do_not_specialize=["num_rows"])
def _gather(
    cache, rows, block_table, requests, scale, out,
    num_rows, block_size, width, cache_block, cache_row, table_row, table_column,
    has_table: tl.constexpr, is_float8: tl.constexpr, scale_kind: tl.constexpr, row_tile: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * row_tile + tl.arange(0, row_tile)
    inside = index < num_rows
    row = tl.load(rows + index, mask=inside, other=-1).to(tl.int64)
    present = row >= 0
    row = tl.where(present, row, 0)
    block = row // block_size
    if has_table:
        request = tl.load(requests + index, mask=inside, other=0).to(tl.int64)
        block = tl.load(block_table + request * table_row + block * table_column, mask=present, other=0).to(tl.int64)
    source = block * cache_block + (row % block_size) * cache_row
    column = tl.arange(0, columns)[None, :]
    value = tl.load(cache + source[:, None] + column, mask=present[:, None] & (column < width), other=0)
    if is_float8:
        value = _e4m3(value)
    if scale_kind == 1:
        value = value.to(tl.float32) * scale
    if scale_kind == 2:
        value = value.to(tl.float32) * tl.load(scale).to(tl.float32)
    # A scale that is not finite must not turn the zeros of absent rows into NaN.
    value = tl.where(present[:, None], value.to(out.dtype.element_ty), 0.0)
    tl.store(out + index[:, None] * width + column, value.to(out.dtype.element_ty), mask=inside[:, None] & (column < width))


@triton.jit
def _expand_k(
    kv_up, k_pe, out, heads, nope, rope, up_row, up_head, up_column, pe_row, pe_column,
    head_tile: tl.constexpr, nope_tile: tl.constexpr, rope_tile: tl.constexpr,
):  # fmt: skip
    tiles = (heads + head_tile - 1) // head_tile
    row = (tl.program_id(0) // tiles).to(tl.int64)
    head = ((tl.program_id(0) % tiles) * head_tile + tl.arange(0, head_tile)).to(tl.int64)[:, None]
    target = out + (row * heads + head) * (nope + rope)
    own = tl.arange(0, nope_tile)[None, :]
    mask = (head < heads) & (own < nope)
    tl.store(target + own, tl.load(kv_up + row * up_row + head * up_head + own.to(tl.int64) * up_column, mask=mask), mask=mask)
    if rope_tile > 0:
        shared = tl.arange(0, rope_tile)[None, :]
        value = tl.load(k_pe + row * pe_row + shared.to(tl.int64) * pe_column, mask=shared < rope)
        value = tl.broadcast_to(value, (head_tile, rope_tile)).to(out.dtype.element_ty)
        tl.store(target + nope + shared, value, mask=(head < heads) & (shared < rope))


def check_cache(cache: Any) -> None:
    """Refuse a cache that :func:`gather` cannot read.

    Raises:
        MLAInputError: Another dtype, or a last dimension without unit stride.
    """
    if cache.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        raise input_error("cache", str(cache.dtype), "bfloat16, float16, float32 or float8_e4m3fn")
    if cache.stride(2) != 1:
        raise input_error("cache", f"strides {cache.stride()}", "a last dimension of unit stride")


def gather(cache: Any, rows: Any, block_table: Any, requests: Any, scale: Any, dtype: Any, out: Any) -> Any:
    """``mla_interop.latents.gather`` with shapes already checked.

    Raises:
        MLAInputError: A cache of another dtype or without unit stride, or an ``out`` that is not contiguous.
    """
    check_cache(cache)
    width = cache.shape[2]
    out = _target(out, (rows.shape[0], width), cache, dtype)
    if not out.numel():
        return out
    is_float8 = cache.dtype == torch.float8_e4m3fn
    table = rows if block_table is None else block_table
    table_strides = (0, 0) if block_table is None else block_table.stride()
    requests = rows if requests is None else requests.contiguous()
    scale_kind = 0 if scale is None else 2 if isinstance(scale, torch.Tensor) else 1
    scale = float(scale) if scale_kind == 1 else rows if scale is None else scale
    with on_device(cache):
        _gather[(triton.cdiv(rows.shape[0], _GATHER_ROWS),)](
            cache.view(torch.uint8) if is_float8 else cache, rows.contiguous(), table, requests,
            scale, out, rows.shape[0], cache.shape[1], width, *cache.stride()[:2], *table_strides,
            has_table=block_table is not None, is_float8=is_float8, scale_kind=scale_kind,
            row_tile=_GATHER_ROWS, columns=triton.next_power_of_2(width),
        )  # fmt: skip
    return out


def expand_k(kv_up: Any, k_pe: Any, qk_nope_head_dim: int, out: Any) -> Any:
    """``mla_interop.latents.expand_k`` with shapes already checked.

    Raises:
        MLAInputError: ``out`` is not contiguous.
    """
    rows, heads, _ = kv_up.shape
    rope = k_pe.shape[1]
    out = _target(out, (rows, heads, qk_nope_head_dim + rope), kv_up, kv_up.dtype)
    if not out.numel():
        return out
    with on_device(kv_up):
        _expand_k[(rows * triton.cdiv(heads, _EXPAND_HEADS),)](
            kv_up, k_pe, out, heads, qk_nope_head_dim, rope, *kv_up.stride(), *k_pe.stride(),
            head_tile=_EXPAND_HEADS, nope_tile=triton.next_power_of_2(qk_nope_head_dim), rope_tile=triton.next_power_of_2(rope) if rope else 0,
        )  # fmt: skip
    return out


def _target(out: Any, shape: tuple[int, ...], like: Any, dtype: Any) -> Any:
    if out is None:
        return like.new_empty(shape, dtype=dtype)
    if not out.is_contiguous():
        raise input_error("out", f"strides {out.stride()}", "a contiguous tensor")
    return out
