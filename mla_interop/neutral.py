"""The neutral door: ``mla_prefill`` on any objects with ``__dlpack__``, mixed as they come; the result is of q's type."""

import importlib
import math
from typing import Any

import numpy as np

from mla_interop.call_forms import dense_call, metadata_for
from mla_interop.errors import MLAInputError, input_error
from mla_interop.exchange import TensorSpec, framework_of, host_values, is_tracer
from mla_interop.host_tensor import DLPACK_CODES, as_tensor
from mla_interop.prefill import Options, bind, make_options, resolve
from mla_interop.sequences import PrefillMetadata

_FRONTENDS = {"torch": "torch_side", "jax": "jax_side"}


def mla_prefill(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """MLA prefill attention on arrays of any framework; runs on their device, returns the type of q.

    torch tensors and JAX arrays go to their frontends, with k and v exchanged by DLPack where they are of another framework;
    CuPy arrays and other exporters of DLPack go through torch. NumPy arrays run on the CPU.

    Args:
        q, k, v: As in ``torch_side.mla_prefill``.
        **options: As there: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, metadata, scale, is_causal, return_lse, backend,
            fallback, padding, check; ``out`` for torch and NumPy.

    Returns:
        As there: ``out``, and with ``return_lse`` also float32 ``lse``, natural log, ``[N, T]`` packed or ``[B, N, T]`` dense.

    Raises:
        MLAInputError: Also for tracers: inside ``jax.jit`` use ``jax_side.mla_prefill``.
        MLAUnsupportedError: No backend, or not the one asked for, can serve it; with every reason.
    """
    kind = framework_of(q)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if is_tracer(array):
            raise MLAInputError(f"{name}: got a JAX tracer; the neutral door needs values. Inside jax.jit, call jax_side.mla_prefill.")
        if not framework_of(array):
            raise input_error(name, type(array).__name__, "an array with __dlpack__ and __dlpack_device__ (NumPy, CuPy, torch, JAX, ...)")
    if kind in _FRONTENDS:
        frontend = importlib.import_module(_FRONTENDS[kind])
        return frontend.mla_prefill(q, *(array if framework_of(array) == kind else _imported(kind, array, q) for array in (k, v)), **options)
    if kind == "numpy":
        return _numpy(q, *(array if isinstance(array, np.ndarray) else _host(name, array, q.dtype) for name, array in (("k", k), ("v", v))), **options)
    return _through_torch(q, k, v, options)


def _imported(kind: str, array: Any, like: Any) -> Any:
    if kind == "torch":
        torch = importlib.import_module("torch")
        try:
            # NumPy cannot export ml_dtypes' types; TVM FFI's tensor over the same memory can.
            return torch.from_dlpack(as_tensor(array) if framework_of(array) == "numpy" and array.dtype.name in DLPACK_CODES else array)
        except Exception as error:
            raise MLAInputError(f"k, v: a {type(array).__name__} cannot enter torch without a copy ({error}).") from error
    if framework_of(array) == "numpy":
        return array  # jax_side takes it, and refuses what JAX would silently narrow
    # JAX takes compact arrays only, and says so in words of its own; torch's view of the same memory can be made compact.
    try:
        return importlib.import_module("jax").dlpack.from_dlpack(array)
    except Exception as error:
        raise MLAInputError(
            f"k, v: a {type(array).__name__} cannot enter JAX without a copy ({error}). Make it contiguous, detached and on q's device."
        ) from error


def _host(name: str, array: Any, like: np.dtype) -> np.ndarray:
    if int(array.__dlpack_device__()[0]) != 1:
        raise input_error(name, "an array on a device", "CPU memory, where q is", "Nothing is copied between devices here.")
    try:
        if framework_of(array) != "torch":
            return np.asarray(array) if hasattr(array, "__array__") else np.from_dlpack(array)
        array = array.detach()
        if like.name in DLPACK_CODES and str(array.dtype) == f"torch.{like.name}":  # torch makes no NumPy array of these
            return array.view(getattr(importlib.import_module("torch"), f"int{8 * like.itemsize}")).numpy().view(like)
        return array.numpy()
    except Exception as error:
        got = f"a {type(array).__name__} that cannot become a NumPy array ({error})"
        raise input_error(name, got, "an array in CPU memory, of q's dtype") from error


def _through_torch(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise MLAInputError(f"q: a {type(q).__name__} needs torch to run its kernel, and torch is not installed ({error}).") from error
    result = importlib.import_module("torch_side").mla_prefill(*(x if isinstance(x, torch.Tensor) else _imported("torch", x, q) for x in (q, k, v)), **options)
    back = getattr(importlib.import_module(type(q).__module__.partition(".")[0]), "from_dlpack", None)
    if back is None:
        return result
    return tuple(map(back, result)) if isinstance(result, tuple) else back(result)


def _numpy(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    metadata: Any = None,
    scale: float | None = None,
    is_causal: bool = True,
    return_lse: bool = False,
    backend: Any = None,
    fallback: bool = False,
    padding: str = "finite",
    check: bool = False,
    out: np.ndarray | None = None,
) -> Any:
    options = make_options(scale, is_causal, return_lse, backend, fallback, padding)
    if out is not None:
        _check_out(out, (*q.shape[:-1], *v.shape[-1:]), q.dtype)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if np.may_share_memory(out, x):  # rows are written while others are still read
                raise input_error("out", f"memory that {name} lies in too", "memory of its own", "Inputs are never written.")
    if q.ndim == 4:
        packed_out = None if out is None else out.reshape(out.shape[0] * out.shape[1], *out.shape[2:])  # -1 is no answer where there are no heads
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, metadata)
        return dense_call(q, k, v, lengths, lambda q, k, v, metadata: _run_numpy(q, k, v, options, metadata, packed_out))
    metadata = metadata_for(q.shape, k.shape, metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, check)
    return _run_numpy(q, k, v, options, metadata, out)


def _check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    good = isinstance(out, np.ndarray) and out.shape == shape and out.dtype == dtype and out.flags.c_contiguous and out.flags.writeable
    if not good:
        got = f"{out.shape}, {out.dtype}" if isinstance(out, np.ndarray) else type(out).__name__
        raise input_error("out", got, f"a writable C-contiguous NumPy array of shape {shape}, {dtype}")


def _run_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options, metadata: PrefillMetadata, out: np.ndarray | None) -> Any:
    # A field of a structured array may have strides that are no multiples of an item's size, which nothing but NumPy can express.
    q, k, v = (np.ascontiguousarray(x) if x.ndim and any(stride % x.itemsize for stride in x.strides) else x for x in (q, k, v))
    call = resolve(_spec(q), _spec(k), _spec(v), options, metadata.bounds.num_seqs, metadata.has_lengths)
    bound = bind(call, metadata, k.shape[0], exact=True)
    out = np.empty(call.out_shape, np.dtype(call.out_dtype)) if out is None else out
    lse = np.empty(call.lse_shape, np.float32) if options.return_lse else None
    k, v = k[: bound.num_tokens_k], v[: bound.num_tokens_k]
    q, k, v = (np.ascontiguousarray(x) if copy else x for x, copy in zip((q, k, v), call.copies, strict=True))
    lengths = _lengths(bound.metadata)
    if bound.empty:
        out.fill(0)
        if lse is not None:
            lse.fill(-math.inf)
    elif call.kernel.kind == "array":
        made, made_lse = call.kernel.launch(q, k, v, *lengths, call.scale, options.is_causal)
        out[...] = made
        if lse is not None:
            lse[...] = made_lse
    else:
        inputs = [as_tensor(x) for x in (q, k, v, *lengths)]
        written = as_tensor(out), None if lse is None else as_tensor(lse)
        call.kernel.launch(*inputs, None, None, *written, call.scale, bound.max_seqlen_q, bound.max_seqlen_k, bound.finish)
    return out if lse is None else (out, lse)


def _lengths(metadata: PrefillMetadata) -> tuple[np.ndarray, np.ndarray]:
    if metadata.host is not None:
        return metadata.host.cu_seqlens_q, metadata.host.cu_seqlens_k
    made = [(array, host_values(array)) for array in (metadata.cu_seqlens_q, metadata.cu_seqlens_k)]
    for name, (array, values) in zip(("cu_seqlens_q", "cu_seqlens_k"), made, strict=True):
        if values is None:
            raise input_error(name, f"a {type(array).__name__} that is traced or on a device", "values in CPU memory, where q is")
    return made[0][1], made[1][1]  # pyright: ignore[reportReturnType]


def _spec(x: np.ndarray) -> TensorSpec:
    strides = None if x.flags.c_contiguous else tuple(stride // x.itemsize for stride in x.strides)
    return TensorSpec(x.shape, strides, x.dtype.name if x.dtype.isnative else x.dtype.str, "cpu")
