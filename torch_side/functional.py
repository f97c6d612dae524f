"""``mla_prefill`` on torch tensors: describe, resolve, allocate, launch."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from mla_interop import sequences
from mla_interop.config import config_in_use
from mla_interop.errors import MLAInputError, input_error
from mla_interop.exchange import TensorSpec
from mla_interop.prefill import Options, bind, dense_call, make_options, metadata_for, resolve
from mla_interop.sequences import PrefillMetadata

_DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


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
        backend: A backend's name, or several in order; None: ``MLA_INTEROP_BACKEND``, else the device's order.
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
    _check_tensors(q, k, v)
    options = make_options(scale, is_causal, return_lse, backend, fallback, padding)
    if q.dim() == 4:
        if out is not None:
            _check_out(out, (*q.shape[:3], v.shape[-1]), q, None)
            out = out.flatten(0, 1)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, metadata)
        return dense_call(q, k, v, lengths, lambda q, k, v, metadata: _call(q, k, v, options, metadata, out))
    metadata = metadata_for(q.shape, k.shape, metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, check)
    return _call(q, k, v, options, metadata, out)


def prepare_metadata(cu_seqlens_q: Any, cu_seqlens_k: Any = None, *, device: Any = None, **options: Any) -> PrefillMetadata:
    """``mla_interop.prepare_metadata``, with its arrays already on ``device``: no call with the result copies anything to it.

    Args:
        cu_seqlens_q, cu_seqlens_k: As in ``mla_prefill``.
        device: Where q, k and v are; None leaves the copy to the first call.
        **options: As in ``mla_interop.prepare_metadata``.
    """
    metadata = sequences.prepare_metadata(cu_seqlens_q, cu_seqlens_k, **options)
    if device is not None:
        _on_device(metadata, torch.empty(0, device=device).device)
    return metadata


class _Launch(NamedTuple):
    """All that calls with the same metadata, shapes, strides and options share: what is left to do is allocate and launch.

    Attributes:
        launch: The kernel's launch function.
        arrays: cu_seqlens_q, cu_seqlens_k and the work list, on the device.
        scalars: The last arguments of the launch.
        adjust: What has to be done to q, k and v first; None, as a rule, for nothing.
    """

    launch: Callable[..., Any]
    out_shape: tuple[int, int, int]
    out_dtype: torch.dtype
    lse_shape: tuple[int, int] | None
    scratch_floats: int
    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    scalars: tuple[float, int, int, int]
    adjust: Callable[[Any, Any, Any], tuple[Any, Any, Any]] | None
    runs: Literal["kernel", "array code", "nothing"]
    is_causal: bool


def _call(q: Any, k: Any, v: Any, options: Options, metadata: PrefillMetadata, out: Any) -> Any:
    # A choice is kept by the metadata: preparing new metadata is how a change of the environment takes effect.
    layouts = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15)
    key = (layouts, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options, config_in_use())
    prepared = metadata.remember(key, lambda: _prepare(q, k, v, options, metadata))
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return _launch(prepared, q, k, v, out)
    return _launch(prepared, q, k, v, out)


def _prepare(q: Any, k: Any, v: Any, options: Options, metadata: PrefillMetadata) -> _Launch:
    if options.backend is None and metadata.bounds.backend is not None:
        options = options._replace(backend=metadata.bounds.backend)
    call = resolve(_spec(q), _spec(k), _spec(v), options, metadata.bounds.num_seqs, metadata.has_lengths)
    rows = k.shape[0]
    bound = bind(call, metadata, rows, exact=True)
    arrays = _on_device(bound.metadata, q.device)
    cut = bound.num_tokens_k if bound.num_tokens_k < rows else None
    clear = arrays[1] if options.padding == "any" and metadata.host is None and metadata.bounds.padded_k else None
    return _Launch(
        launch=call.kernel.launch,
        out_shape=call.out_shape,
        out_dtype=_DTYPES[call.out_dtype],
        lse_shape=call.lse_shape if options.return_lse else None,
        scratch_floats=bound.scratch_floats,
        arrays=arrays,
        scalars=(call.scale, bound.max_seqlen_q, bound.max_seqlen_k, bound.finish),
        adjust=None if cut is None and clear is None and not any(call.copies) else _adjustment(cut, clear, call.copies),
        runs="nothing" if bound.empty else "array code" if call.kernel.kind == "array" else "kernel",
        is_causal=options.is_causal,
    )


def _adjustment(cut: int | None, clear: torch.Tensor | None, copies: tuple[bool, bool, bool]) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """Cuts k and v to the rows that hold keys, clears v's tail, and makes contiguous what the kernel cannot read through its strides."""

    def adjust(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        if cut is not None:
            k, v = k[:cut], v[:cut]
        if clear is not None:
            v = sequences.clear_tail(v, clear)
        packed = [x.clone(memory_format=torch.contiguous_format) if copy else x for x, copy in zip((q, k, v), copies)]
        return packed[0], packed[1], packed[2]

    return adjust


def _launch(prepared: _Launch, q: Any, k: Any, v: Any, out: Any) -> Any:
    if out is None:
        out = q.new_empty(prepared.out_shape, dtype=prepared.out_dtype)
    else:
        _check_out(out, prepared.out_shape, q, prepared.out_dtype)
    lse = None if prepared.lse_shape is None else q.new_empty(prepared.lse_shape, dtype=torch.float32)
    if prepared.runs != "kernel":
        return _without_kernel(prepared, q, k, v, out, lse)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        q, k, v = q.detach(), k.detach(), v.detach()  # DLPack refuses tensors that require grad; grad mode is off here
    if prepared.adjust is not None:
        q, k, v = prepared.adjust(q, k, v)
    scratch = q.new_empty(prepared.scratch_floats, dtype=torch.float32) if prepared.scratch_floats else None
    cu_seqlens_q, cu_seqlens_k, plan = prepared.arrays
    prepared.launch(q, k, v, cu_seqlens_q, cu_seqlens_k, plan, scratch, out, lse, *prepared.scalars)
    return out if lse is None else (out, lse)


def _without_kernel(prepared: _Launch, q: Any, k: Any, v: Any, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
    if prepared.runs == "nothing":
        out.zero_()
        return out if lse is None else (out, lse.fill_(-math.inf))
    made, made_lse = prepared.launch(q, k, v, *prepared.arrays[:2], prepared.scalars[0], prepared.is_causal)
    out.copy_(made)
    return out if lse is None else (out, lse.copy_(made_lse))


def _on_device(metadata: PrefillMetadata, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    def move() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        arrays = [_tensor(name, getattr(metadata, name), device) for name in ("cu_seqlens_q", "cu_seqlens_k", "plan")]
        return arrays[0], arrays[1], arrays[2]

    return metadata.remember(("torch", device), move)


def _tensor(name: str, array: Any, device: torch.device) -> Any:
    if array is None:
        return None
    if isinstance(array, torch.Tensor) or not hasattr(array, "__array_interface__"):
        tensor = array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)
        if tensor.device != device:
            raise input_error(name, f"device {tensor.device}", f"q's device, {device}, or the host")
        return tensor.contiguous()  # kernels take raw pointers: a strided view gave wrong values (flashinfer#5260)
    return torch.tensor(array, device=device)


def _spec(x: torch.Tensor) -> TensorSpec:
    device = x.device
    if device.type not in ("cpu", "cuda"):
        raise input_error("q, k, v", f"device {device}", "cpu or cuda")
    return TensorSpec(tuple(x.shape), x.stride(), _DTYPE_NAMES.get(x.dtype, str(x.dtype)), device.type, device.index or 0, x.data_ptr() % 16 == 0)


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    tensor = torch.Tensor
    if isinstance(q, tensor) and isinstance(k, tensor) and isinstance(v, tensor) and not torch.is_grad_enabled():
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise input_error(name, type(x).__name__, "a torch.Tensor", "mla_interop.mla_prefill takes arrays of any framework.")
        if x.requires_grad and torch.is_grad_enabled():
            raise MLAInputError(
                f"{name}: got a tensor that requires grad in grad mode; allowed: inference only, for now. "
                "Call under torch.no_grad() or torch.inference_mode(), or detach it; backend='REFERENCE' code in JAX is differentiable."
            )


def _check_out(out: Any, shape: tuple[int, ...], q: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Refuse a buffer that the result does not fit; ``dtype`` is None where the kernel, which decides it, is not known yet."""
    good = isinstance(out, torch.Tensor) and tuple(out.shape) == shape and dtype in (None, out.dtype)
    if not good or out.device != q.device or not out.is_contiguous():
        got = f"{tuple(out.shape)}, {out.dtype}, {out.device}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise input_error("out", got, f"a contiguous tensor of shape {shape}, {dtype or q.dtype}, on {q.device}")
