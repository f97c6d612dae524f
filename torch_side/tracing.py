"""From a call under tracing to the operators of ``torch_side.op``: what becomes part of the program, what is refused, and metadata as an input."""

import hashlib
import json
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mla_interop.backends.registry import parse_names
from mla_interop.call_forms import metadata_for, refuse_lengths
from mla_interop.config import environment_key
from mla_interop.errors import MLAInputError, input_error
from mla_interop.lengths import check_maximum
from mla_interop.prefill import make_options, number_of_scale
from mla_interop.sequences import Bounds, PrefillMetadata
from torch_side.launch import check_out, on_device
from torch_side.op import Fixed, prefill_lse_op, prefill_lse_out_op, prefill_op, prefill_out_op

_forward_ad = torch.autograd.forward_ad
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL


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
    is_causal, return_lse, fallback = _flag(is_causal), _flag(return_lse), _flag(fallback)
    if scale is not None and type(scale) is not float:
        scale = number_of_scale(scale)
    if check:
        raise input_error("check", "True inside compiled code", "False", "Reading lengths back would be a host sync in every call.")
    if q.dim() == 4:
        refuse_lengths(lengths)
    if out is not None:
        check_out(out, (*q.shape[:-1], v.shape[-1]), q, None)
    arrays, bounds = _lengths(q, k, *lengths)
    arguments = (*arrays, scale, _text(bounds, is_causal, return_lse, backend, fallback, padding))
    if out is None:
        return prefill_lse_op(q, k, v, *arguments) if return_lse else prefill_op(q, k, v, *arguments)
    if return_lse:
        return out, prefill_lse_out_op(q, k, v, *arguments, out)
    prefill_out_op(q, k, v, *arguments, out)
    return out


def _lengths(q: Any, k: Any, metadata: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[Any, Any]:
    """The arguments of the operator from ``cu_seqlens_q`` to ``max_seqlen_k``, and the first fields of :class:`torch_side.op.Fixed`."""
    none_given = cu_seqlens_q is None and cu_seqlens_k is None and max_seqlen_q is None and max_seqlen_k is None
    if metadata is None and none_given:
        return (None,) * 7, (False, False, False, None)
    recorded = _recorded()
    both = isinstance(cu_seqlens_q, torch.Tensor) and (cu_seqlens_k is None or isinstance(cu_seqlens_k, torch.Tensor))
    # Where a mode only watches, tensors of the CPU are lengths that the host knows, as they are without it.
    if metadata is None and both and (recorded or isinstance(cu_seqlens_q, FakeTensor)):
        for name, given in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if not isinstance(given, torch.SymInt):
                check_maximum(name, given)
        return (cu_seqlens_q, cu_seqlens_k, None, None, None, max_seqlen_q, max_seqlen_k), (True, True, cu_seqlens_k is None, None)
    if metadata is None and recorded:
        got = "None" if cu_seqlens_q is None else type(cu_seqlens_q).__name__
        raise input_error("cu_seqlens_q", f"{got} inside compiled code", "int32 tensors, or metadata", "Values of the host would become part of the program.")
    if not none_given or not isinstance(metadata, PrefillMetadata):
        metadata = metadata_for(tuple(q.shape), tuple(k.shape), metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, False)
    b = metadata.bounds
    cu_q, cu_k, plan = metadata.cu_seqlens_q, metadata.own_cu_seqlens_k, metadata.plan
    for array in (cu_q, cu_k, plan):
        if array is not None and not isinstance(array, torch.Tensor):
            cu_q, cu_k, plan = _moved(metadata, q)
            break
    return (cu_q, cu_k, plan, b.num_tokens_q, b.num_tokens_k, b.max_seqlen_q, b.max_seqlen_k), (b.padded_q, b.padded_k, b.same_lengths, b.plan_for)


def _recorded() -> bool:
    """Whether calls become part of a program: that of Dynamo, which traces this function, or of a tracer that runs it. Each is one thread's own,
    which ``torch.compiler.is_compiling()`` is not: an eager call beside a thread that compiles would be taken for a compiled one."""
    return torch.compiler.is_dynamo_compiling() or get_proxy_mode() is not None or torch._C._get_dispatch_mode(_FUNCTIONAL) is not None


def _flag(value: Any) -> Any:
    """A flag that depends on sizes is decided when a program is traced, and guarded."""
    if isinstance(value, (bool, torch.SymBool)):
        return True if value else False  # noqa: SIM210  of bool(), Dynamo makes another symbol
    return value


def _moved(metadata: PrefillMetadata, q: Any) -> Any:
    """Lengths from the host under a mode that only watches; where calls are recorded, they would be recorded too."""
    if _recorded():
        raise input_error(
            "metadata", "lengths in host memory inside compiled code", "prepare_metadata(..., device=q.device)", "Its tensors are inputs of the program."
        )
    if isinstance(q, FakeTensor):  # its device need not exist
        arrays = (metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.plan)
        cu_q, cu_k, plan = (x if x is None else q.new_empty(x.shape, dtype=getattr(torch, x.dtype.name)) for x in arrays)
    else:
        with _disable_current_modes(), temporarily_clear_interpreter_stack():  # they are kept, and outlive modes and transformations
            cu_q, cu_k, plan = on_device(metadata, q.device)
    return cu_q, None if metadata.bounds.same_lengths else cu_k, plan


@torch.compiler.assume_constant_result
def _text(bounds: tuple[Any, Any, Any, Any], is_causal: Any, return_lse: Any, backend: Any, fallback: Any, padding: Any) -> str:
    """:class:`Fixed` as text, of checked options; when a program is traced, this is called and not traced."""
    made = make_options(None, is_causal, return_lse, None, fallback, padding)
    names = None if backend is None else ",".join(parse_names("backend", backend))
    environment = hashlib.sha1(repr(environment_key()).encode(), usedforsecurity=False).hexdigest()[:8]
    padded_q, padded_k, same_lengths, plan_for = bounds
    fixed = Fixed(padded_q, padded_k, same_lengths, plan_for, made.is_causal, names, made.fallback, made.padding, environment)
    text = json.dumps({name: value for name, value in fixed._asdict().items() if value != Fixed._field_defaults[name]})
    return text.replace('"', "'")  # as it is, Inductor writes it between quotes into a C++ wrapper


def check_grad(q: Any, k: Any, v: Any) -> None:
    """Refuse what would need a backward pass, before anything is launched.

    Raises:
        MLAInputError: A tensor requires grad in grad mode, or carries a tangent.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if torch.compiler.is_dynamo_compiling() and _transforming():
            x = x.view_as(x)  # Dynamo does not know that the argument of torch.func.grad itself requires grad
        if x.requires_grad and torch.is_grad_enabled():
            what = "a tensor that requires grad in grad mode"
        elif _forward_ad._current_level >= 0 and _forward_ad.unpack_dual(x).tangent is not None:
            what = "a tensor with a tangent of forward-mode differentiation"
        else:
            continue
        raise MLAInputError(
            f"{name}: got {what}; allowed: inference only, for now. "
            "Call under torch.no_grad() or torch.inference_mode(), or detach it; backend='REFERENCE' code in JAX is differentiable."
        )


@torch.compiler.assume_constant_result
def _transforming() -> bool:
    return torch._C._are_functorch_transforms_active()


def _flatten(metadata: PrefillMetadata) -> tuple[list[Any], Bounds]:
    return [metadata.cu_seqlens_q, metadata.own_cu_seqlens_k, metadata.plan], metadata.bounds


def _flatten_with_keys(metadata: PrefillMetadata) -> tuple[list[Any], Bounds]:
    children, bounds = _flatten(metadata)
    return [(pytree.GetAttrKey(name), child) for name, child in zip(("cu_seqlens_q", "own_cu_seqlens_k", "plan"), children)], bounds


def _unflatten(children: Any, bounds: Bounds) -> PrefillMetadata:
    cu_seqlens_q, own_cu_seqlens_k, plan = children
    return PrefillMetadata(cu_seqlens_q, own_cu_seqlens_k, plan, bounds)  # without what the host knows: it is no part of a program


# torch.export takes metadata as an input: its arrays are data, its bounds are part of the program.
pytree.register_pytree_node(
    PrefillMetadata,
    _flatten,
    _unflatten,
    serialized_type_name="mla_interop.PrefillMetadata",
    to_dumpable_context=lambda bounds: bounds._asdict(),
    from_dumpable_context=lambda values: Bounds(**values),
    flatten_with_keys_fn=_flatten_with_keys,
)
