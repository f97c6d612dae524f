"""The operator that ``torch.compile``, ``torch.export`` and ``make_fx`` see in place of a call: one node, its lengths tensors, nothing baked in.

``mla_interop::prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, plan, <bounds>, <options>) -> (out, lse)``; lse is empty where it is not wanted. With
``out=`` it is ``prefill_out``, which writes into it. Calls outside of any tracing do not come here: they launch directly.

Lengths that the host knows do not enter a compiled program; what does are the bounds of the metadata (``sequences.Bounds``), so that new
lengths inside the same bounds do not recompile. When the program runs, the kernel is selected for the shapes that arrive, and kept.
"""

import hashlib
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mla_interop.backends.registry import parse_names
from mla_interop.call_forms import check_tensors, dense_call, metadata_for, refuse_lengths
from mla_interop.config import environment_key
from mla_interop.errors import MLAInputError, input_error
from mla_interop.exchange import TensorSpec
from mla_interop.prefill import Options, make_options
from mla_interop.sequences import Bounds, PrefillMetadata, dense_metadata
from torch_side.launch import DTYPE_NAMES, call, call_key, check_out, find_shared, launch, no_memory, on_device, prepared_for

_ARGUMENTS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? plan, SymInt? num_tokens_q, SymInt? num_tokens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "bool padded_q, bool padded_k, bool same_lengths, str? plan_for, float? scale, bool is_causal, bool return_lse, str? backend, bool fallback, "
    "str padding, str environment"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_library = torch.library.Library("mla_interop", "DEF")
_library.define(f"prefill(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(f"prefill_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_ARGUMENTS}) -> Tensor", tags=_TAGS)
prefill_op = torch.ops.mla_interop.prefill.default
_NO_BOUNDS = Bounds(0, None, None, True, True, None, None)
prefill_out_op = torch.ops.mla_interop.prefill_out.default


def traced_call(q: Any, k: Any, v: Any, lengths: tuple[Any, ...], check: bool, options: tuple[Any, ...], out: Any) -> Any:
    """``mla_prefill`` as one node of whatever is being traced or watched.

    Args:
        q, k, v: Packed or dense tensors of any kind: fake, functional, proxied.
        lengths: metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
        check: Must be False: nothing can be read back.
        options: scale, is_causal, return_lse, backend, fallback, padding.
        out: Where to write, or None.

    Raises:
        MLAInputError: An argument is wrong, or would become part of the program (``check``, lengths of the host).
    """
    scale, is_causal, return_lse, backend, fallback, padding = options
    made = make_options(scale, is_causal, return_lse, None, fallback, padding)
    if check:
        raise input_error("check", "True inside compiled code", "False", "Reading lengths back would be a host sync in every call.")
    if q.dim() == 4:
        refuse_lengths(lengths)
    arguments = (*_lengths(q, k, *lengths), made.scale, is_causal, return_lse, _text(backend), fallback, padding, _environment())
    if out is None:
        result, lse = prefill_op(q, k, v, *arguments)
    else:
        result, lse = out, prefill_out_op(q, k, v, out, *arguments)
    return (result, lse) if return_lse else result


def _lengths(q: Any, k: Any, metadata: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[Any, ...]:
    """The arguments of the operator from ``cu_seqlens_q`` to ``plan_for``."""
    if metadata is None and cu_seqlens_q is None and cu_seqlens_k is None and max_seqlen_q is None and max_seqlen_k is None:
        return None, None, None, None, None, None, None, False, False, False, None
    if metadata is None and isinstance(cu_seqlens_q, torch.Tensor) and (cu_seqlens_k is None or isinstance(cu_seqlens_k, torch.Tensor)):
        same = cu_seqlens_k is None
        return cu_seqlens_q, cu_seqlens_q if same else cu_seqlens_k, None, q.shape[0], k.shape[0], max_seqlen_q, max_seqlen_k, True, True, same, None
    if metadata is None and torch.compiler.is_compiling():
        got = "None" if cu_seqlens_q is None else type(cu_seqlens_q).__name__
        raise input_error("cu_seqlens_q", f"{got} inside compiled code", "int32 tensors, or metadata", "Values of the host would become part of the program.")
    if not isinstance(metadata, PrefillMetadata) or cu_seqlens_q is not None:
        metadata = metadata_for(tuple(q.shape), tuple(k.shape), metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, False)
    arrays = metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.plan
    if not (isinstance(arrays[0], torch.Tensor) and isinstance(arrays[1], torch.Tensor) and (arrays[2] is None or isinstance(arrays[2], torch.Tensor))):
        arrays = _moved(metadata, q.device)
    b = metadata.bounds
    return *arrays, b.num_tokens_q, b.num_tokens_k, b.max_seqlen_q, b.max_seqlen_k, b.padded_q, b.padded_k, b.same_lengths, b.plan_for


def _moved(metadata: PrefillMetadata, device: torch.device) -> Any:
    """Lengths from the host under a mode that only watches; where calls are recorded, they would be recorded too."""
    if torch.compiler.is_compiling() or get_proxy_mode() is not None:
        raise input_error(
            "metadata", "lengths in host memory inside compiled code", "prepare_metadata(..., device=q.device)", "Its tensors are inputs of the program."
        )
    with _disable_current_modes():
        return on_device(metadata, device)


@torch.compiler.assume_constant_result
def _text(backend: Any) -> str | None:
    """Names of backends as one string, which an operator can take."""
    return None if backend is None else ",".join(parse_names("backend", backend))


@torch.compiler.assume_constant_result
def _environment() -> str:
    """Sets programs that were traced under different settings apart: the operator's cache does not read the environment in a call."""
    return hashlib.sha1(repr(environment_key()).encode(), usedforsecurity=False).hexdigest()[:8]


def _run(q: Any, k: Any, v: Any, out: Any, cu_q: Any, cu_k: Any, plan: Any, *rest: Any) -> Any:
    """The operator: what an eager call does, but that nothing is known of the lengths except bounds."""
    if cu_q is None:
        return _run_equal(q, k, v, out, _options(rest))
    key = call_key(q, k, v, rest), cu_q.shape, plan is None
    prepared = find_shared(key)
    if prepared is None:
        tokens_q, tokens_k, max_q, max_k, padded_q, padded_k, same, plan_for = rest[:8]
        bounds = Bounds(cu_q.shape[0] - 1, tokens_q, tokens_k, padded_q, padded_k, max_q, max_k, same, plan_for)
        prepared = prepared_for(q, k, v, _options(rest), bounds, plan is not None, key)
    if cu_q.device != q.device or cu_k.device != q.device or not (cu_q.is_contiguous() and cu_k.is_contiguous()):
        cu_q, cu_k, plan = on_device(PrefillMetadata(cu_q, cu_k, plan, _NO_BOUNDS), q.device)  # refuses the one, copies the other
    return launch(prepared, (cu_q, cu_k, plan), q, k, v, out)


def _options(rest: tuple[Any, ...]) -> Options:
    scale, is_causal, return_lse, backend, fallback, padding, _ = rest[8:]
    if backend is not None and "," in backend:
        backend = tuple(backend.split(","))
    return Options(scale, is_causal, return_lse, backend, fallback, padding)


def _run_equal(q: Any, k: Any, v: Any, out: Any, options: Options) -> Any:
    if q.dim() != 4:
        return call(q, k, v, options, dense_metadata(1, q.shape[0], k.shape[0]), out)
    flat = None if out is None else out.flatten(0, 1)
    return dense_call(q, k, v, (), lambda q, k, v, metadata: call(q, k, v, options, metadata, flat))


def _prefill(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    made = _run(q, k, v, None, *rest)
    return made if isinstance(made, tuple) else (made, q.new_empty(0, dtype=torch.float32))


def _prefill_out(q: Any, k: Any, v: Any, out: Any, *rest: Any) -> Any:
    if q.dim() == 4:
        check_out(out, (*q.shape[:3], v.shape[-1]), q, None)
    made = _run(q, k, v, out, *rest)
    return made[1] if isinstance(made, tuple) else q.new_empty(0, dtype=torch.float32)


def _fake_lse(q: Any, k: Any, v: Any, cu_q: Any, return_lse: bool) -> Any:
    """The checks that need no values, and lse without data."""
    if not q.dim() == k.dim() == v.dim() or q.dim() not in (3, 4):
        raise input_error("q, k, v", f"{q.dim()}, {k.dim()}, {v.dim()} dimensions", "all packed [tokens, heads, dim] or all dense [batch, tokens, heads, dim]")
    packed = [x if x.dim() == 3 else x[0] for x in (q, k, v)]
    device = q.device
    specs = [TensorSpec(tuple(x.shape), None, DTYPE_NAMES.get(x.dtype, str(x.dtype)), x.device.type, x.device.index or 0) for x in packed]
    check_tensors(*specs)
    if cu_q is not None and cu_q.device != device:
        raise input_error("cu_seqlens_q", f"device {cu_q.device}", f"q's device, {device}")
    if not return_lse:
        return q.new_empty(0, dtype=torch.float32)
    if q.dim() == 4:
        return q.new_empty((q.shape[2], q.shape[0], q.shape[1]), dtype=torch.float32).transpose(0, 1)
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_prefill(q: Any, k: Any, v: Any, cu_q: Any, *rest: Any) -> tuple[Any, Any]:
    # Kernels for 8-bit inputs write 16 bits (Kernel.out_dtype).
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    lse = _fake_lse(q, k, v, cu_q, rest[12])
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), lse


def _fake_prefill_out(q: Any, k: Any, v: Any, out: Any, cu_q: Any, *rest: Any) -> Any:
    return _fake_lse(q, k, v, cu_q, rest[12])


def check_grad(q: Any, k: Any, v: Any) -> None:
    """Refuse what would need a backward pass, before anything is launched.

    Raises:
        MLAInputError: A tensor requires grad in grad mode, or carries a tangent.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.requires_grad and torch.is_grad_enabled():
            what = "a tensor that requires grad in grad mode"
        elif torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            what = "a tensor with a tangent of forward-mode differentiation"
        else:
            continue
        raise MLAInputError(
            f"{name}: got {what}; allowed: inference only, for now. "
            "Call under torch.no_grad() or torch.inference_mode(), or detach it; backend='REFERENCE' code in JAX is differentiable."
        )


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise no_memory(f"torch.func.vmap over {info.batch_size}")


for _operator, _real, _fake in ((prefill_op, _prefill, _fake_prefill), (prefill_out_op, _prefill_out, _fake_prefill_out)):
    _name = _operator.name()
    for _key in ("CPU", "CUDA"):
        _library.impl(_operator, _real, _key)
    torch.library.register_fake(_name, _fake, lib=_library)
    torch.library.register_vmap(_name, _vmap, lib=_library)


def _flatten(metadata: PrefillMetadata) -> tuple[list[Any], Bounds]:
    return [metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.plan], metadata.bounds


def _flatten_with_keys(metadata: PrefillMetadata) -> tuple[list[Any], Bounds]:
    children, bounds = _flatten(metadata)
    return [(pytree.GetAttrKey(name), child) for name, child in zip(("cu_seqlens_q", "cu_seqlens_k", "plan"), children)], bounds


def _unflatten(children: Any, bounds: Bounds) -> PrefillMetadata:
    cu_seqlens_q, cu_seqlens_k, plan = children
    return PrefillMetadata(cu_seqlens_q, cu_seqlens_k, plan, bounds)  # without what the host knows: it is no part of a program


# torch.export takes metadata as an input: its arrays are data, its bounds are part of the program.
pytree.register_pytree_node(
    PrefillMetadata,
    _flatten,
    _unflatten,
    serialized_type_name="mla_interop.PrefillMetadata",
    to_dumpable_context=lambda bounds: vars(bounds),
    from_dumpable_context=lambda values: Bounds(**values),
    flatten_with_keys_fn=_flatten_with_keys,
)
