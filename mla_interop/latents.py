"""Latents and what becomes of them on the way to attention: gathered from a paged cache, and K put together from its two parts.

Written against the array namespace (NumPy, torch, JAX; XLA fuses the steps); torch tensors on CUDA go to fused Triton kernels.
"""

from typing import Any

import array_api_compat

from mla_interop.errors import input_error
from mla_interop.lse import check_target, written


def gather(cache: Any, rows: Any, *, block_table: Any = None, requests: Any = None, scale: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Rows of a paged latent cache, one after the other, in the dtype to compute with.

    Args:
        cache: ``[blocks, block, L + R]``, bfloat16, float16, float32 or float8_e4m3fn; the last dimension of unit stride.
        rows: Integers ``[rows]``. Without a block table: slots, ``block * block_size + offset``. With one: positions in the request's
            context. A negative row gives zeros. Not checked against the cache's size: they may be on a device.
        block_table: Integers ``[requests, blocks_per_request]``; together with ``requests``.
        requests: Integers ``[rows]``: the block table's row of each row.
        scale: Factor of the stored values, a number or one float32 on the cache's device, which is not read back. None: 1.
        dtype: Of the result; None: the cache's.
        out: ``[rows, L + R]`` contiguous, to write into; its dtype is then the result's.

    Returns:
        ``[rows, L + R]``: ``cache * scale``, multiplied in float32 and rounded once.

    Raises:
        MLAInputError: Shapes or options that do not belong together; a float8 result, which nothing here computes with.
    """
    _check_gather(cache, rows, block_table, requests, out)
    dtype = out.dtype if out is not None else cache.dtype if dtype is None else dtype
    if "float8" in str(dtype):
        raise input_error("dtype", str(dtype), "bfloat16, float16 or float32", "A float8 cache has to be told what it becomes.")
    if array_api_compat.is_torch_array(cache) and cache.is_cuda:
        from mla_interop.kernels import triton_latents

        return triton_latents.gather(cache, rows, block_table, requests, scale, dtype, out)
    xp = array_api_compat.array_namespace(cache, rows)
    present = xp.where(rows >= 0, rows, xp.zeros_like(rows))
    block, offset = present // cache.shape[1], present % cache.shape[1]
    if block_table is not None:
        block = block_table[requests, block]
    values = _take(xp, cache, block, offset)
    if scale is not None:
        values = xp.astype(values, xp.float32) * scale
    values = xp.astype(values, dtype, copy=False)
    return written(out, xp.where(xp.expand_dims(rows >= 0, axis=-1), values, xp.zeros_like(values)))


def expand_k(kv_up: Any, k_pe: Any, qk_nope_head_dim: int, *, out: Any = None) -> Any:
    """K of all heads: each head's own part, and behind it the rotary part that all heads share.

    Args:
        kv_up: ``[S, N, P + V]``, what ``kv_b_proj`` gives, k_nope first; any strides. Its V part needs no copy: it is the view
            ``kv_up[..., P:]``.
        k_pe: ``[S, R]``, any strides; R may be 0.
        qk_nope_head_dim: P.
        out: ``[S, N, P + R]`` contiguous, to write into.

    Returns:
        ``[S, N, P + R]`` in kv_up's dtype.

    Raises:
        MLAInputError: Shapes that do not belong together.
    """
    if len(kv_up.shape) != 3 or not 0 < qk_nope_head_dim <= kv_up.shape[2]:
        raise input_error("kv_up", f"shape {tuple(kv_up.shape)}", f"[S, N, P + V] with P = {qk_nope_head_dim}")
    rows, heads, _ = kv_up.shape
    if len(k_pe.shape) != 2 or k_pe.shape[0] != rows:
        raise input_error("k_pe", f"shape {tuple(k_pe.shape)}", f"[S, R] with kv_up's S = {rows}")
    check_target("out", out, (rows, heads, qk_nope_head_dim + k_pe.shape[1]))
    if array_api_compat.is_torch_array(kv_up) and kv_up.is_cuda:
        from mla_interop.kernels import triton_latents

        return triton_latents.expand_k(kv_up, k_pe, qk_nope_head_dim, out)
    xp = array_api_compat.array_namespace(kv_up, k_pe)
    shared = xp.astype(xp.expand_dims(k_pe, axis=1), kv_up.dtype, copy=False)
    return written(out, xp.concat([kv_up[..., :qk_nope_head_dim], xp.broadcast_to(shared, (rows, heads, k_pe.shape[1]))], axis=-1))


def _check_gather(cache: Any, rows: Any, block_table: Any, requests: Any, out: Any) -> None:
    if len(cache.shape) != 3:
        raise input_error("cache", f"shape {tuple(cache.shape)}", "[blocks, block, L + R]")
    if len(rows.shape) != 1:
        raise input_error("rows", f"shape {tuple(rows.shape)}", "[rows]")
    if (block_table is None) != (requests is None):
        raise input_error("block_table, requests", "one without the other", "both, or neither with rows that are slots")
    if requests is not None and tuple(requests.shape) != tuple(rows.shape):
        raise input_error("requests", f"shape {tuple(requests.shape)}", f"the shape of rows, {tuple(rows.shape)}")
    if block_table is not None and len(block_table.shape) != 2:
        raise input_error("block_table", f"shape {tuple(block_table.shape)}", "[requests, blocks_per_request]")
    check_target("out", out, (rows.shape[0], cache.shape[2]))


def _take(xp: Any, cache: Any, block: Any, offset: Any) -> Any:
    if array_api_compat.is_torch_array(cache) and cache.element_size() == 1:
        # torch indexes no float8; as bytes it does.
        return cache.view(xp.uint8)[block, offset].view(cache.dtype)
    return cache[block, offset]
