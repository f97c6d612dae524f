"""``mla_prefill`` on torch tensors: launched directly, or as one operator where a call is traced or watched."""

import functools
from typing import Any

import torch

from mla_interop.call_forms import dense_call, metadata_for
from mla_interop.errors import input_error
from mla_interop.prefill import make_options
from mla_interop.sequences import PrefillMetadata
from torch_side.eager import call
from torch_side.launch import check_out
from torch_side.metadata import prepare_metadata as prepare_metadata
from torch_side.sharding import distributed_call, is_distributed
from torch_side.tracing import check_grad, traced_call

_TENSOR = torch.Tensor
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
# Not is_compiling(), which is true of every thread while one of them compiles.
_is_compiling = torch.compiler.is_dynamo_compiling
_count_modes = torch._C._len_torch_dispatch_stack
_in_transform = torch._C._are_functorch_transforms_active
_forward_ad = torch.autograd.forward_ad
_is_grad_enabled = torch.is_grad_enabled


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    metadata: PrefillMetadata | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    return_lse: bool = False,
    backend: Any = None,
    fallback: bool = False,
    padding: str = "finite",
    check: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """MLA prefill attention over a ragged batch.

    Args:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]`` packed, or ``[B, T, N, D]``, ``[B, S, N, D]``, ``[B, S, N, V]`` dense, of one
            dtype on one device. The number of dimensions says which. Strided views are fine: V is usually one. Never written.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` cumulative lengths of packed input: a list, NumPy array or CPU tensor (checked)
            or a device tensor (not read). ``cu_seqlens_k=None`` means equal to q's; both None means one sequence.
        max_seqlen_q, max_seqlen_k: Upper bounds of one sequence's length, as Python integers; None: derived.
        metadata: What ``prepare_metadata`` returned, instead of the lengths: prepared once, used for every layer.
        scale: Multiplied with the raw scores; None: ``D ** -0.5``. YaRN's factor is yours (``mla_interop.softmax_scale``).
        is_causal: Bottom-right aligned causal mask: query i sees key j when ``j <= i + len_k - len_q``. False: no mask.
        return_lse: Also return LSE.
        backend: A backend's name, or several in order; None: what ``use_config``, ``set_config`` or ``MLA_INTEROP_BACKEND`` say, else the fastest by
            measured times, where a table covers the call, else the first of the device's order that can serve.
        fallback: If the named backend cannot serve this, warn and choose automatically instead of raising.
        padding: ``"finite"``: rows of v past ``cu_seqlens_k[-1]`` are finite (where the host knows the lengths they are not read at all).
            ``"any"``: they may hold anything; they are cleared by a select first where the lengths are on the device only.
        check: Read device lengths back and check them: a host sync, for debugging.
        out: Where to write the output: like the result, contiguous.

    Returns:
        ``out``, shaped like q with V as its last dimension, in q's dtype (bfloat16 for 8-bit q), contiguous; with ``return_lse`` also float32 ``lse``, the
        natural log of the softmax denominator of the scaled scores, ``[N, T]`` packed or ``[B, N, T]`` dense. Rows without a key, and rows at or
        past ``cu_seqlens_q[-1]``, get 0 and -inf.

    Raises:
        MLAInputError: An argument is wrong; nothing was launched.
        MLAUnsupportedError: No backend, or not the one asked for, can serve it; with every reason.
    """
    # A dispatch mode (make_fx, FakeTensorMode, a counter of operations) and a transformation of torch.func must see the call, and see operators only.
    if _is_compiling() or _count_modes() or _in_transform() or type(q) is not _TENSOR or type(k) is not _TENSOR or type(v) is not _TENSOR:
        way = _other_way(q, k, v)
        if way is not None:
            lengths = (metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return way(q, k, v, lengths, check, (scale, is_causal, return_lse, backend, fallback, padding), out)
    if _is_grad_enabled() or _forward_ad._current_level >= 0:
        check_grad(q, k, v)
    options = make_options(scale, is_causal, return_lse, backend, fallback, padding)
    if q.dim() == 4:
        if out is not None:
            check_out(out, (*q.shape[:3], v.shape[-1]), q, None)
            out = out.flatten(0, 1)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, metadata)
        return dense_call(q, k, v, lengths, lambda q, k, v, metadata: call(q, k, v, options, metadata, out))
    own = metadata is None and (cu_seqlens_q is not None or max_seqlen_q is not None or max_seqlen_k is not None)
    metadata = metadata_for(q.shape, k.shape, metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, check)
    return call(q, k, v, options, metadata, out, own)


def _other_way(q: Any, k: Any, v: Any) -> Any:
    """Who serves a call that is not simply launched; None for plain tensors after all (parameters) outside of any mode."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise input_error(name, type(x).__name__, "a torch.Tensor", "mla_interop.mla_prefill takes arrays of any framework.")
        if x.is_nested:
            raise input_error(name, "a nested tensor", "its values(), packed", "Its offsets(), as int32, are cu_seqlens.")
    if is_distributed(q) or is_distributed(k) or is_distributed(v):
        return functools.partial(distributed_call, mla_prefill)
    if not (_is_compiling() or _count_modes() or _in_transform()) and all(type(x).__torch_dispatch__ is _NO_DISPATCH for x in (q, k, v)):
        return None
    check_grad(q, k, v)
    return traced_call
