"""From a described call to a launch on torch tensors: what calls share is prepared once; what is left is to allocate and to launch."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from mla_interop import sequences
from mla_interop.config import config_in_use, environment_key
from mla_interop.errors import MLAUnsupportedError, input_error
from mla_interop.exchange import TensorSpec
from mla_interop.prefill import Options, bind, resolve
from mla_interop.sequences import Bounds, PrefillMetadata

DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SHARED_ENTRIES = 8192

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Prepared(NamedTuple):
    """All that calls with the same bounds, shapes, strides and options share.

    Attributes:
        launch: The kernel's launch function.
        scalars: The last arguments of the launch.
        adjust: What has to be done to q, k and v first, given cu_seqlens_k; None, as a rule, for nothing.
        no_capture: Why it cannot be part of a CUDA graph; "" if it can.
        spans: Bytes from the first to the last element of q, k and v.
    """

    launch: Callable[..., Any]
    out_shape: tuple[int, int, int]
    out_dtype: torch.dtype
    lse_shape: tuple[int, int] | None
    scratch_floats: int
    scalars: tuple[float, int, int, int]
    adjust: Callable[..., tuple[Any, Any, Any]] | None
    runs: Literal["kernel", "array code", "nothing"]
    is_causal: bool
    no_capture: str
    spans: tuple[int, int, int]


# Calls whose lengths only the device knows: what they share does not depend on the metadata object, and outlives it.
_shared: dict[Any, Prepared] = {}
find_shared = _shared.get


def prepared_call(q: Any, k: Any, v: Any, options: Options, metadata: PrefillMetadata, own: bool = False) -> tuple[Prepared, Arrays]:
    """What a call on packed tensors launches; found where a call like it was prepared before. ``own``: no other call knows this metadata.

    Raises:
        MLAInputError: A tensor is a view with the negative bit, or has no memory.
    """
    if q.is_neg() or k.is_neg() or v.is_neg():
        refuse_bit(q=q, k=k, v=v)
    key = call_key(q, k, v, options)
    # A choice is kept by the metadata: preparing new metadata is how a change of the environment takes effect.
    found = metadata._memo.get(key)
    return found or metadata.remember(key, lambda: _prepare_eager(q, k, v, options, metadata, key, own))


def call_key(q: Any, k: Any, v: Any, options: Any) -> Any:
    """What of a call decides what runs, but for its lengths.

    Raises:
        MLAInputError: Tensors without memory: inside ``torch.func`` transformations they are shells.
    """
    try:
        places = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError as error:
        raise no_memory(error) from None
    layouts = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), places[0] & 15, places[1] & 15, places[2] & 15, 0 in places)
    return (layouts, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options, config_in_use())


def no_memory(why: object, names: str = "q, k, v") -> Exception:
    """The refusal of tensors that a transformation has wrapped, or whose storage was freed."""
    return input_error(
        names,
        f"tensors without memory of their own ({str(why).splitlines()[0]})",
        "plain tensors",
        "Under torch.func.vmap, give the mapped dimension as the batch of a dense [B, T, N, D] call, or as sequences of a packed one. "
        "Under torch.func.grad and jvp there is no derivative: jax_side with backend='REFERENCE' is differentiable.",
    )


def refuse_bit(**tensors: Any) -> None:
    """Refuse the first that is a view with the negative (or, of complex numbers, conjugate) bit: no kernel knows that its values are others.

    Raises:
        MLAInputError: There is one.
    """
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and (x.is_neg() or x.is_conj()):
            bit = "negative" if x.is_neg() else "conjugate"
            raise input_error(name, f"a view with the {bit} bit", "a tensor that holds its values", "resolve_neg() or resolve_conj() makes one.")


def prepared_for(q: Any, k: Any, v: Any, options: Options, bounds: Bounds, has_plan: bool, key: Any) -> Prepared:
    """What a call with lengths on the device shares with every other one with the same ``key``, across metadata objects."""
    found = _shared.get(key)
    if found is None:
        refuse_first_in_capture(q)
        if len(_shared) >= _SHARED_ENTRIES:
            _shared.clear()
        plan: Any = True if has_plan else None  # that there is one is all that matters here
        found = _shared[key] = _prepare(q, k, v, options, PrefillMetadata(None, None, plan, bounds))[0]
    return found


@torch.compiler.disable(reason="an eager call beside a program")  # it would be traced in pieces, anew for new lengths
def _prepare_eager(q: Any, k: Any, v: Any, options: Options, metadata: PrefillMetadata, key: Any, own: bool) -> tuple[Prepared, Arrays]:
    if metadata.host is None:
        has_plan = metadata.plan is not None
        found = prepared_for(q, k, v, options, metadata.bounds, has_plan, (key, metadata.bounds, has_plan, environment_key()))
        return found, on_device(metadata, q.device, own)
    refuse_first_in_capture(q)
    found, planned = _prepare(q, k, v, options, metadata)
    return found, on_device(planned, q.device, own)


def _prepare(q: Any, k: Any, v: Any, options: Options, metadata: PrefillMetadata) -> tuple[Prepared, PrefillMetadata]:
    if options.backend is None and metadata.bounds.backend is not None:
        options = options._replace(backend=metadata.bounds.backend)
    refuse_bit(q=q, k=k, v=v)
    found = resolve(spec(q), spec(k), spec(v), options, metadata.bounds.num_seqs, metadata.has_lengths)
    if any(x.numel() and not x.data_ptr() for x in (q, k, v)):  # FSDP frees the storage of parameters between their uses
        raise no_memory("no data behind them")
    rows = k.shape[0]
    bound = bind(found, metadata, rows, exact=True)
    cut = bound.num_tokens_k if bound.num_tokens_k < rows else None
    clear = options.padding == "any" and metadata.host is None and metadata.bounds.padded_k
    runs = "nothing" if bound.empty else "array code" if found.kernel.kind == "array" else "kernel"
    return Prepared(
        launch=found.kernel.launch,
        out_shape=found.out_shape,
        out_dtype=_DTYPES[found.out_dtype],
        lse_shape=found.lse_shape if options.return_lse else None,
        scratch_floats=bound.scratch_floats,
        scalars=(found.scale, bound.max_seqlen_q, bound.max_seqlen_k, bound.finish),
        adjust=None if cut is None and not clear and not any(found.copies) else _adjustment(cut, clear, found.copies),
        runs=runs,
        is_causal=options.is_causal,
        no_capture="" if found.kernel.cuda_graph or runs == "nothing" or q.device.type != "cuda" else found.kernel.name,
        spans=(_span(q), _span(k), _span(v)),
    ), bound.metadata


def _adjustment(cut: int | None, clear: bool, copies: tuple[bool, bool, bool]) -> Callable[..., tuple[Any, Any, Any]]:
    """Cuts k and v to the rows that hold keys, clears v's tail, and makes contiguous what the kernel cannot read through its strides."""

    def adjust(q: Any, k: Any, v: Any, cu_seqlens_k: Any) -> tuple[Any, Any, Any]:
        if cut is not None:
            k, v = k[:cut], v[:cut]
        if clear:
            v = sequences.clear_tail(v, cu_seqlens_k)
        packed = [x.clone(memory_format=torch.contiguous_format) if copy else x for x, copy in zip((q, k, v), copies)]
        return packed[0], packed[1], packed[2]

    return adjust


def launch(prepared: Prepared, arrays: Arrays, q: Any, k: Any, v: Any, out: Any) -> Any:
    """Allocate what the caller did not give, and launch, on q's device and its current stream."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return _launch(prepared, arrays, q, k, v, out)
    return _launch(prepared, arrays, q, k, v, out)


def _launch(prepared: Prepared, arrays: Arrays, q: Any, k: Any, v: Any, out: Any) -> Any:
    if prepared.no_capture and torch.cuda.is_current_stream_capturing():
        raise MLAUnsupportedError(
            f"CUDA graph: kernel {prepared.no_capture} cannot be captured; allowed: kernels that explain() calls compiled, for example "
            "backend='FLASH_ATTN' where FlashAttention-4 is compiled ahead of time. Nothing was launched."
        )
    if out is None:
        out = q.new_empty(prepared.out_shape, dtype=prepared.out_dtype)
    else:
        check_out(out, prepared.out_shape, q, prepared.out_dtype)
        _refuse_overlap(prepared.spans, q, k, v, out)
    lse = None if prepared.lse_shape is None else q.new_empty(prepared.lse_shape, dtype=torch.float32)
    if prepared.runs != "kernel":
        return _without_kernel(prepared, arrays, q, k, v, out, lse)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        q, k, v = q.detach(), k.detach(), v.detach()  # DLPack refuses tensors that require grad; grad mode is off here
    if prepared.adjust is not None:
        q, k, v = prepared.adjust(q, k, v, arrays[1])
    scratch = q.new_empty(prepared.scratch_floats, dtype=torch.float32) if prepared.scratch_floats else None
    cu_seqlens_q, cu_seqlens_k, plan = arrays
    prepared.launch(q, k, v, cu_seqlens_q, cu_seqlens_k, plan, scratch, out, lse, *prepared.scalars)
    return out if lse is None else (out, lse)


def _without_kernel(prepared: Prepared, arrays: Arrays, q: Any, k: Any, v: Any, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
    if prepared.runs == "nothing":
        out.zero_()
        return out if lse is None else (out, lse.fill_(-math.inf))
    with torch.autocast(q.device.type, enabled=False):  # its products are float32 on purpose
        made, made_lse = prepared.launch(q, k, v, *arrays[:2], prepared.scalars[0], prepared.is_causal)
    out.copy_(made)
    return out if lse is None else (out, lse.copy_(made_lse))


def on_device(metadata: PrefillMetadata, device: torch.device, own: bool = False) -> Arrays:
    """cu_seqlens_q, cu_seqlens_k and the work list as tensors on ``device``; copied there once per metadata.

    A copy waits for its end, since the next call may be on another stream; for ``own`` metadata there is no other call.

    Raises:
        MLAInputError: They are on another device.
    """

    def move() -> Arrays:
        made: dict[int, Any] = {}
        for name in ("cu_seqlens_q", "cu_seqlens_k", "plan"):
            array = getattr(metadata, name)
            if id(array) not in made:
                made[id(array)] = _tensor(name, array, device, own)
        return tuple(made[id(getattr(metadata, name))] for name in ("cu_seqlens_q", "cu_seqlens_k", "plan"))  # pyright: ignore[reportReturnType]

    return metadata.remember(("torch", device), move)


def _tensor(name: str, array: Any, device: torch.device, own: bool) -> Any:
    if array is None:
        return None
    if isinstance(array, torch.Tensor) or not hasattr(array, "__array_interface__"):
        tensor = array if isinstance(array, torch.Tensor) else _exchanged(name, array)
        if tensor.device != device:
            raise input_error(name, f"device {tensor.device}", f"q's device, {device}, or the host")
        return tensor.contiguous()  # kernels take raw pointers: a strided view gave wrong values (flashinfer#5260)
    return to_device(array, device) if own else torch.tensor(array, device=device)


def _exchanged(name: str, array: Any) -> torch.Tensor:
    try:
        return torch.from_dlpack(array)
    except Exception as error:  # a tracer that outlived its trace has no memory, a deleted array none any more
        got = f"a {type(array).__name__} that cannot enter torch ({str(error).splitlines()[0]})"
        raise input_error(name, got, "an array with memory of its own, on q's device or the host") from error


def to_device(array: Any, device: torch.device) -> torch.Tensor:
    """A copy of a NumPy array that the current stream sees in order, made without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    return torch.tensor(array).pin_memory().to(device, non_blocking=True)


def refuse_first_in_capture(q: torch.Tensor) -> None:
    """Refuse what a capture must not contain: loading a kernel's code, and copies of lengths from the host.

    Raises:
        MLAUnsupportedError: The current stream is being captured.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise MLAUnsupportedError(
            "CUDA graph: got the first call with this metadata, these shapes and these options during a capture; allowed: calls that ran once "
            "before. Call it once outside of the capture (it loads the kernel), with metadata from prepare_metadata(..., device=...). Nothing was launched."
        )


def spec(x: torch.Tensor) -> TensorSpec:
    """A tensor without its data.

    Raises:
        MLAInputError: It is neither on a CPU nor on a CUDA device.
    """
    device = x.device
    if device.type not in ("cpu", "cuda"):
        raise input_error("q, k, v", f"device {device}", "cpu or cuda")
    return TensorSpec(tuple(x.shape), x.stride(), DTYPE_NAMES.get(x.dtype, str(x.dtype)), device.type, device.index or 0, x.data_ptr() % 16 == 0)


def check_out(out: Any, shape: tuple[int, ...], q: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Refuse a buffer that the result does not fit; ``dtype`` is None where the kernel, which decides it, is not known yet."""
    good = isinstance(out, torch.Tensor) and tuple(out.shape) == shape and dtype in (None, out.dtype)
    if not good or out.device != q.device or not out.is_contiguous():
        raise input_error("out", _described(out), f"a contiguous tensor of shape {shape}, {dtype or q.dtype}, on {q.device}")
    if not torch.compiler.is_dynamo_compiling():  # which does not know how to ask; the operator does
        refuse_bit(out=out)
    if out.requires_grad and torch.is_grad_enabled():
        raise input_error("out", "a tensor that requires grad in grad mode", "one that does not", "Nothing here is differentiable.")


def _refuse_overlap(spans: tuple[int, int, int], q: Any, k: Any, v: Any, out: torch.Tensor) -> None:
    """Rows are written while others are still read: out in the memory of an input would be right or wrong by the kernel's schedule."""
    try:
        start = out.data_ptr()
    except RuntimeError as error:
        raise no_memory(error, "out") from None
    if not start and out.numel():
        raise no_memory("no data behind them", "out")
    stop = start + out.numel() * out.element_size()
    for name, x, span in (("q", q, spans[0]), ("k", k, spans[1]), ("v", v, spans[2])):
        first = x.data_ptr()
        if first < stop and start < first + span:
            raise input_error("out", f"memory that {name} lies in too", "memory of its own", "Inputs are never written.")


def _span(x: torch.Tensor) -> int:
    if not x.numel():
        return 0
    return (sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def _described(out: Any) -> str:
    if not isinstance(out, torch.Tensor):
        return type(out).__name__
    layout = f"strides {out.stride()}" if out.layout == torch.strided else str(out.layout)
    return f"{tuple(out.shape)}, {out.dtype}, {out.device}, {layout}"
