"""Keys and values from latents: the up-projection writes k where the kernel reads it, so that K is never put together by a copy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mla_interop import latents
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import MLAInputError, input_error

# Rows that one batched product takes: every head reads the same latents, which stay in a GPU's cache this way (8 MiB in bf16 at L = 512).
ROWS_AT_A_TIME = 8192


def weight_of(kv_b: Any, num_heads: int) -> torch.Tensor | None:
    """The up-projection's weight as ``[N, L, P + V]``, a view; None where it is a function that only it can compute.

    A layer counts as its weight only if nothing else happens in it: no bias, no hook, no class of its own.

    Raises:
        MLAInputError: It is neither, or has another number of heads.
    """
    linear = type(kv_b) is torch.nn.Linear
    if not linear and not isinstance(kv_b, torch.Tensor):
        if not callable(kv_b):
            raise input_error("kv_b", type(kv_b).__name__, "an nn.Linear, a tensor [L, N * (P + V)] or a function")
        return None
    if linear and (kv_b.bias is not None or kv_b._forward_hooks or kv_b._forward_pre_hooks or not kv_b.weight.is_floating_point()):
        return None
    weight: torch.Tensor = kv_b.weight.t() if linear else kv_b  # pyright: ignore[reportCallIssue, reportAssignmentType]
    if weight.dim() != 2 or not num_heads or weight.shape[1] % num_heads:
        raise input_error("kv_b", f"a weight of {tuple(weight.shape)}", f"[L, N * (P + V)] with q's {num_heads} heads")
    return weight.detach().unflatten(1, (num_heads, -1)).transpose(0, 1)


def check_layout(name: str, x: Any) -> None:
    """Refuse tensors without strides: sparse and nested ones.

    Raises:
        MLAInputError: See above.
    """
    if isinstance(x, torch.Tensor) and x.layout != torch.strided:
        raise input_error(name, f"layout {x.layout}", "a strided tensor", "to_dense() makes one.")


def check_grad(**tensors: Any) -> None:
    """Refuse what grad mode would need a backward pass for.

    Raises:
        MLAInputError: See above.
    """
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise MLAInputError(
                f"{name}: got a tensor that requires grad in grad mode; allowed: inference only. "
                "Call under torch.no_grad() or torch.inference_mode(), or detach it."
            )


def project_weight(weight: torch.Tensor, dimensions: MLADimensions, buffer: torch.Tensor) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A walk's ``project`` by a weight.

    Per head, a row of the buffer is k_nope, k_pe, v. On a GPU, one product a head and part writes k_nope and v at their places; a CPU's
    batched product would copy there, so one product makes both, in memory of its own, and v stays where it is.

    Args:
        weight: ``[N, L, P + V]``.
        dimensions: P, R, V.
        buffer: ``[rows, N, P + R + V]``.
    """
    return partial(_in_place if buffer.is_cuda else _copied, weight, dimensions, buffer)


def _in_place(weight: torch.Tensor, dimensions: MLADimensions, buffer: torch.Tensor, kv_c: torch.Tensor, k_pe: Any) -> tuple[Any, Any]:
    nope, width = dimensions.qk_nope_head_dim, dimensions.qk_head_dim
    kv = buffer[: kv_c.shape[0]]
    for latent, made in zip(kv_c.split(ROWS_AT_A_TIME), kv.split(ROWS_AT_A_TIME), strict=True):
        heads_first, shared = made.transpose(0, 1), latent.expand(weight.shape[0], -1, -1)
        torch.bmm(shared, weight[..., :nope], out=heads_first[..., :nope])
        torch.bmm(shared, weight[..., nope:], out=heads_first[..., width:])
    if width > nope:
        target, source = _widest(kv[..., nope:width], k_pe[:, None, :])
        target.copy_(source)
    return kv[..., :width], kv[..., width:]


def _copied(weight: torch.Tensor, dimensions: MLADimensions, buffer: torch.Tensor, kv_c: torch.Tensor, k_pe: Any) -> tuple[Any, Any]:
    nope, width = dimensions.qk_nope_head_dim, dimensions.qk_head_dim
    kv = (kv_c @ weight.transpose(0, 1).flatten(1)).unflatten(1, (weight.shape[0], -1))
    if width == nope:
        return kv[..., :nope], kv[..., nope:]
    k = buffer[: kv_c.shape[0], :, :width]
    k[..., :nope] = kv[..., :nope]
    k[..., nope:] = k_pe[:, None, :]
    return k, kv[..., nope:]


def project_function(function: Callable[[Any], Any], dimensions: MLADimensions, buffer: torch.Tensor) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A walk's ``project`` by any function of ``[S, L]``; ``buffer`` is ``[rows, N, P + R]``. A tuple's first element counts: some layers return a bias too.

    Raises:
        MLAInputError: From what is returned: the function gives no tensor of that shape, dtype and device.
    """
    nope = dimensions.qk_nope_head_dim

    def project(kv_c: torch.Tensor, k_pe: Any) -> tuple[Any, Any]:
        made = function(kv_c)
        kv: Any = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(kv, torch.Tensor):
            raise input_error("kv_b", f"a function that returns {type(kv).__name__}", "a torch.Tensor, [S, N * (P + V)]")
        kv = kv.detach()
        expected = kv_c.shape[0], buffer.shape[1] * (nope + dimensions.v_head_dim)
        if tuple(kv.shape) != expected or kv.dtype != buffer.dtype or kv.device != buffer.device:
            got = f"a function that returns {tuple(kv.shape)}, {kv.dtype}, {kv.device}"
            raise input_error("kv_b", got, f"[S, N * (P + V)] = {expected}, {buffer.dtype}, {buffer.device}")
        kv = kv.view(kv_c.shape[0], buffer.shape[1], nope + dimensions.v_head_dim)
        k = latents.expand_k(kv, k_pe, nope, out=buffer[: kv.shape[0]]) if dimensions.qk_rope_head_dim else kv[..., :nope]
        return k, kv[..., nope:]

    return project


def _widest(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in elements of 16 bytes, where they allow it: torch copies a broadcast element by element, at a quarter of the speed or less."""
    size = target.element_size()
    for x in (target, source):
        places = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
        if x.stride(-1) != 1 or any(place * size % 16 for place in places) or x.data_ptr() % 16:
            return target, source
    return target.view(torch.complex128), source.view(torch.complex128)
