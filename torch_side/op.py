"""The operators that ``torch.compile``, ``torch.export`` and ``make_fx`` see in place of a call: one node, its lengths tensors, nothing baked in.

``mla_interop::prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, plan, <bounds>, scale, options) -> out``; ``prefill_lse`` gives ``(out, lse)``. With ``out=``
they are ``prefill_out``, which writes into it and returns nothing, and ``prefill_lse_out``, which returns lse. Calls outside of any tracing do not come
here: they launch directly.

Each has two implementations. The one here, in Python, serves any call; the one in C++ (``kernels/torch_op.py``) is registered by the first call, and serves
whatever is like a call that was served before, without Python: what a program calls ten times a layer must not cost more than the kernel takes.

Lengths that the host knows do not enter a compiled program; what does are the bounds of the metadata (``sequences.Bounds``), so that new
lengths inside the same bounds do not recompile. When the program runs, the kernel is selected for the shapes that arrive, and kept.

Each argument of an operator is converted from Python and back in every call. So what cannot change between the calls of a program is one of them, a
text (:class:`Fixed`), and equal lengths are passed once.
"""

import contextlib
import functools
import itertools
import json
import secrets
import weakref
from typing import Any, NamedTuple

import torch
import tvm_ffi
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from mla_interop.call_forms import check_tensors, dense_call
from mla_interop.errors import input_error
from mla_interop.exchange import TensorSpec
from mla_interop.kernels import torch_op
from mla_interop.lengths import check_device_lengths, check_maximum
from mla_interop.prefill import Options
from mla_interop.sequences import Bounds, PrefillMetadata, dense_metadata
from torch_side.launch import (
    DTYPE_NAMES,
    Arrays,
    Prepared,
    call_key,
    check_out,
    find_shared,
    launch,
    no_memory,
    on_device,
    prepared_call,
    prepared_for,
    refuse_bit,
)

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? plan, SymInt? num_tokens_q, SymInt? num_tokens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, str options"
)
_NAMES = [part.split()[-1] for part in f"{_ARGUMENTS}, Tensor out".split(", ")]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_NO_BOUNDS = Bounds(0, None, None, True, True, None, None)
_library = torch.library.Library("mla_interop", "DEF")


class Fixed(NamedTuple):
    """What of a call is a part of the program. As text, the operator's ``options``, it is a JSON object, with single quotes, of whatever is not as here.

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


@functools.lru_cache
def _parsed(text: str) -> Fixed:
    return Fixed(**json.loads(text.replace("'", '"')))  # no value has either


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
    if text[0] == Offer.MARK:
        made = _run_offered(text, q, k, v, out)
    elif cu_q is None:
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
        given = cu_q.device == q.device and cu_k.device == q.device and cu_q.is_contiguous() and cu_k.is_contiguous()
        arrays = (cu_q, cu_k, plan) if given else on_device(PrefillMetadata(cu_q, cu_k, plan, _NO_BOUNDS), q.device)  # refuses the one, copies the other
        made = launch(prepared, arrays, q, k, v, out)
        if given:
            _remember(prepared)
    if out is None:
        return made
    return made[1] if return_lse else None


def _options(text: str, scale: float | None, return_lse: bool) -> Options:
    fixed, names = _parsed(text), (_parsed(text).backend or "").split(",")
    return Options(scale, fixed.is_causal, return_lse, fixed.backend if len(names) == 1 else tuple(names), fixed.fallback, fixed.padding)


def _run_equal(q: Any, k: Any, v: Any, options: Options, out: Any) -> Any:
    """Sequences of equal lengths: a dense batch, or one packed sequence."""

    def run(q: Any, k: Any, v: Any, metadata: PrefillMetadata) -> Any:
        prepared, arrays = prepared_call(q, k, v, options, metadata)
        made = launch(prepared, arrays, q, k, v, out)
        _remember(prepared, arrays)
        return made

    if q.dim() != 4:
        return run(q, k, v, dense_metadata(1, q.shape[0], k.shape[0]))
    if out is not None:
        check_out(out, (*q.shape[:3], v.shape[-1]), q, None)
        out = out.flatten(0, 1)
    return dense_call(q, k, v, (), run)


class Offer:
    """An eager call through the operators: what it does is known of its metadata, and its text only names it.

    Attributes:
        arguments: The operators', from ``cu_seqlens_q`` to ``options``.
    """

    MARK = "#"
    __slots__ = ("__weakref__", "_metadata", "arguments", "options")

    def __init__(self, options: Options, metadata: PrefillMetadata, arrays: Arrays) -> None:
        cu_q, cu_k, plan = arrays
        text = f"{self.MARK}{next(_numbers)}"
        self.options, self._metadata = options, weakref.ref(metadata)  # which holds this
        self.arguments = (cu_q, None if cu_k is cu_q else cu_k, plan, None, None, None, None, None, text)
        _offers[text] = self

    @property
    def metadata(self) -> PrefillMetadata:
        """Whoever calls has it."""
        metadata = self._metadata()
        assert metadata is not None
        return metadata


_numbers = itertools.count(secrets.randbits(48))  # what another process saved in a program names nothing here
_offers: weakref.WeakValueDictionary[str, Offer] = weakref.WeakValueDictionary()


def _run_offered(text: str, q: Any, k: Any, v: Any, out: Any) -> Any:
    offer = _offers.get(text)
    if offer is None:  # torch.jit.trace records eager calls, text and all
        raise input_error(
            "options", f"{text!r}, an eager call of metadata that is gone", "calls of living metadata", "torch.export makes lengths a program's input."
        )
    prepared, arrays = prepared_call(q, k, v, offer.options, offer.metadata)
    made = launch(prepared, arrays, q, k, v, out)
    # Another T may have another work list, which is not among the arguments.
    if arrays[0] is offer.arguments[0] and arrays[2] is offer.arguments[2]:
        _remember(prepared)
    return made


def _remember(prepared: Prepared, arrays: Arrays | tuple[None, None, None] = (None, None, None)) -> None:
    """Let C++ serve calls like this one, where all that is left to do is the launch of a native kernel.

    ``arrays``: Lengths and work list that are not among the operator's arguments.
    """
    if can_be_remembered(prepared):
        torch_op.remember(prepared.launch, prepared.out_dtype, prepared.scratch_floats, prepared.scalars, arrays)


def can_be_remembered(prepared: Prepared) -> bool:
    """Whether all that is left to do is the launch of a native kernel."""
    return prepared.runs == "kernel" and prepared.adjust is None and not prepared.no_capture and isinstance(prepared.launch, tvm_ffi.Function)


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


def _refuse_wrapped(*arguments: Any) -> Any:
    """What torch dispatches the tensors of ``torch.func.vmap`` to, and those of a transformation that is over."""
    raise no_memory("they belong to a transformation of torch.func")


def _refuse_bit(*arguments: Any) -> Any:
    """What torch dispatches views to whose values are others. It would call again with copies, and put that of ``out`` in the place of a result that is
    none: it crashes. Inductor drops the bit."""
    refuse_bit(**dict(zip(_NAMES, arguments)))


def _operator(name: str, returns: str, return_lse: bool, out: str = "") -> Any:
    """Define one operator, and what it is on a device, on tensors without data, and under ``vmap``."""
    _library.define(f"{name}({_ARGUMENTS}{out}) -> {returns}", tags=_TAGS)
    _library.impl(name, functools.partial(_run, return_lse), "CompositeExplicitAutograd")  # below what torch_op registers
    torch.library.register_fake(f"mla_interop::{name}", functools.partial(_fake, return_lse, bool(out)), lib=_library)
    for wrapper in ("FuncTorchBatched", "FuncTorchGradWrapper"):
        _library.impl(name, _refuse_wrapped, wrapper)
    for bit in ("Negative", "Conjugate"):
        _library.impl(name, _refuse_bit, bit)
    return getattr(torch.ops.mla_interop, name).default


prefill_op = _operator("prefill", "Tensor", False)
prefill_lse_op = _operator("prefill_lse", "(Tensor, Tensor)", True)
prefill_out_op = _operator("prefill_out", "()", False, ", Tensor(a!) out")
prefill_lse_out_op = _operator("prefill_lse_out", "Tensor", True, ", Tensor(a!) out")
