"""The operators that ``torch.compile``, ``torch.export`` and ``make_fx`` see in place of a call: one node, its lengths tensors, nothing baked in.

``mla_interop::prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, plan, <bounds>, scale, options) -> out``; ``prefill_lse`` gives ``(out, lse)``. With ``out=``
they are ``prefill_out``, which writes into it and returns nothing, and ``prefill_lse_out``, which returns lse. Calls outside of any tracing do not come
here: they launch directly.

Lengths that the host knows do not enter a compiled program; what does are the bounds of the metadata (``sequences.Bounds``), so that new
lengths inside the same bounds do not recompile. When the program runs, the kernel is selected for the shapes that arrive, and kept.

Each argument of an operator is converted from Python and back in every call. So what cannot change between the calls of a program is one of them, a
text (:class:`Fixed`), and equal lengths are passed once.
"""

import contextlib
import functools
import hashlib
import json
from typing import Any, NamedTuple

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mla_interop.backends.registry import parse_names
from mla_interop.call_forms import check_tensors, dense_call, metadata_for, refuse_lengths
from mla_interop.config import environment_key
from mla_interop.errors import MLAInputError, input_error
from mla_interop.exchange import TensorSpec
from mla_interop.prefill import Options, make_options, number_of_scale
from mla_interop.sequences import Bounds, PrefillMetadata, check_device_lengths, check_maximum, dense_metadata
from torch_side.launch import DTYPE_NAMES, call, call_key, check_out, find_shared, launch, no_memory, on_device, prepared_for

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? plan, SymInt? num_tokens_q, SymInt? num_tokens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, str options"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_NO_BOUNDS = Bounds(0, None, None, True, True, None, None)
_library = torch.library.Library("mla_interop", "DEF")
_forward_ad = torch.autograd.forward_ad
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL


class Fixed(NamedTuple):
    """What of a call is a part of the program. As text, the operator's ``options``, it is a JSON object of whatever is not as here.

    Attributes:
        padded_q, padded_k, same_lengths, plan_for: As in ``sequences.Bounds``. With ``same_lengths``, ``cu_seqlens_k`` is None.
        is_causal, fallback, padding: As in ``prefill.Options``.
        backend: Names with commas between.
        environment: Sets programs that were traced under different settings apart: a call does not read the environment.
    """

    padded_q: bool = False
    padded_k: bool = False
    same_lengths: bool = False
    plan_for: str | None = None
    is_causal: bool = True
    backend: str | None = None
    fallback: bool = False
    padding: str = "finite"
    environment: str = ""


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
    """The arguments of the operator from ``cu_seqlens_q`` to ``max_seqlen_k``, and the first fields of :class:`Fixed`."""
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
    cu_q, cu_k, plan = metadata.cu_seqlens_q, None if b.same_lengths else metadata.cu_seqlens_k, metadata.plan
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
    return json.dumps({name: value for name, value in fixed._asdict().items() if value != Fixed._field_defaults[name]})


@functools.lru_cache
def _parsed(text: str) -> Fixed:
    return Fixed(**json.loads(text))


def _run(
    return_lse: bool,
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    plan: Any,
    num_q: Any,
    num_k: Any,
    max_q: Any,
    max_k: Any,
    scale: Any,
    text: str,
    out: Any = None,
) -> Any:
    """An operator: what an eager call does, but that nothing is known of the lengths except bounds. With ``out`` it returns lse, or None."""
    if cu_q is None:
        made = _run_equal(q, k, v, _options(text, scale, return_lse), out)
    else:
        rest = return_lse, num_q, num_k, max_q, max_k, scale, text
        key = call_key(q, k, v, rest), cu_q.shape, cu_q.dtype, None if cu_k is None else (cu_k.shape, cu_k.dtype), plan is None
        prepared = find_shared(key)
        if prepared is None:
            check_device_lengths(cu_q, cu_k)
            check_maximum("max_seqlen_q", max_q)
            check_maximum("max_seqlen_k", max_k)
            fixed = _parsed(text)
            bounds = Bounds(cu_q.shape[0] - 1, num_q, num_k, fixed.padded_q, fixed.padded_k, max_q, max_k, fixed.same_lengths, fixed.plan_for)
            prepared = prepared_for(q, k, v, _options(text, scale, return_lse), bounds, plan is not None, key)
        if cu_k is None:
            cu_k = cu_q
        if cu_q.device != q.device or cu_k.device != q.device or not (cu_q.is_contiguous() and cu_k.is_contiguous()):
            cu_q, cu_k, plan = on_device(PrefillMetadata(cu_q, cu_k, plan, _NO_BOUNDS), q.device)  # refuses the one, copies the other
        made = launch(prepared, (cu_q, cu_k, plan), q, k, v, out)
    if out is None:
        return made
    return made[1] if return_lse else None


def _options(text: str, scale: float | None, return_lse: bool) -> Options:
    fixed, names = _parsed(text), (_parsed(text).backend or "").split(",")
    return Options(scale, fixed.is_causal, return_lse, fixed.backend if len(names) == 1 else tuple(names), fixed.fallback, fixed.padding)


def _run_equal(q: Any, k: Any, v: Any, options: Options, out: Any) -> Any:
    if q.dim() != 4:
        return call(q, k, v, options, dense_metadata(1, q.shape[0], k.shape[0]), out)
    if out is not None:
        check_out(out, (*q.shape[:3], v.shape[-1]), q, None)
        out = out.flatten(0, 1)
    return dense_call(q, k, v, (), lambda q, k, v, metadata: call(q, k, v, options, metadata, out))


def _fake(return_lse: bool, has_out: bool, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any) -> Any:
    """The checks that need no values, and results without data."""
    if not q.dim() == k.dim() == v.dim() or q.dim() not in (3, 4):
        raise input_error("q, k, v", f"{q.dim()}, {k.dim()}, {v.dim()} dimensions", "all packed [tokens, heads, dim] or all dense [batch, tokens, heads, dim]")
    specs = [TensorSpec(tuple(x.shape[-3:]), None, DTYPE_NAMES.get(x.dtype, str(x.dtype)), x.device.type, x.device.index or 0) for x in (q, k, v)]
    check_tensors(*specs)
    if cu_q is not None:
        if cu_q.device != q.device:
            raise input_error("cu_seqlens_q", f"device {cu_q.device}", f"q's device, {q.device}")
        with contextlib.suppress(GuardOnDataDependentSymNode):  # of sizes that only data decide, the call itself says it
            check_device_lengths(cu_q, cu_k)
    lse = None
    if return_lse:
        batch = q.shape[:-3]  # none for packed tensors
        lse = q.new_empty((q.shape[-2], *batch, q.shape[-3]), dtype=torch.float32)
        lse = lse.transpose(0, 1) if batch else lse
    if has_out:
        return lse
    # Kernels for 8-bit inputs write 16 bits (Kernel.out_dtype).
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
    return (out, lse) if return_lse else out


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


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise no_memory(f"torch.func.vmap over {info.batch_size}")


def _operator(name: str, returns: str, return_lse: bool, out: str = "") -> Any:
    """Define one operator, and what it is on a device, on tensors without data, and under ``vmap``."""
    _library.define(f"{name}({_ARGUMENTS}{out}) -> {returns}", tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _library.impl(name, functools.partial(_run, return_lse), key)
    torch.library.register_fake(f"mla_interop::{name}", functools.partial(_fake, return_lse, bool(out)), lib=_library)
    torch.library.register_vmap(f"mla_interop::{name}", _vmap, lib=_library)
    return getattr(torch.ops.mla_interop, name).default


prefill_op = _operator("prefill", "Tensor", False)
prefill_lse_op = _operator("prefill_lse", "(Tensor, Tensor)", True)
prefill_out_op = _operator("prefill_out", "()", False, ", Tensor(a!) out")
prefill_lse_out_op = _operator("prefill_lse_out", "Tensor", True, ", Tensor(a!) out")


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
