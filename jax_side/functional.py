"""``mla_prefill`` on JAX arrays and tracers: describe, resolve at trace time, and one custom call."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_side import callback, pytrees, sharding
from jax_side.kernel_call import KernelCall, array_code, custom_call
from jax_side.target import device_of, traced_device
from mla_interop import sequences
from mla_interop.call_forms import dense_call, metadata_for
from mla_interop.errors import input_error
from mla_interop.exchange import TensorSpec, is_tracer
from mla_interop.prefill import Options, bind, make_options, resolve
from mla_interop.sequences import PrefillMetadata

_ROUTES = ("ffi", "callback")


def mla_prefill(
    q: Any,
    k: Any,
    v: Any,
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
    out: None = None,
    route: str = "ffi",
) -> Any:
    """MLA prefill attention over a ragged batch, inside or outside ``jax.jit``.

    Everything but the values of the arrays is decided when the call is traced; at run time it is one XLA custom call.

    Args:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]`` packed, or ``[B, T, N, D]``, ``[B, S, N, D]``, ``[B, S, N, V]`` dense, of one
            dtype on one device. The number of dimensions says which.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` cumulative lengths of packed input: a list or NumPy array (checked, and part of a
            traced program), or a JAX array or tracer (data). ``cu_seqlens_k=None`` means equal to q's; both None means one sequence.
        max_seqlen_q, max_seqlen_k: Static upper bounds of one sequence's length; None: T and S.
        metadata: What ``prepare_metadata`` returned, instead of the lengths. It is a pytree: pass it as an argument of the jitted function,
            and new lengths inside one bucket (T, S, B) do not recompile.
        scale: Multiplied with the raw scores; None: ``D ** -0.5``. YaRN's factor is yours (``mla_interop.softmax_scale``).
        is_causal: Bottom-right aligned causal mask: query i sees key j when ``j <= i + len_k - len_q``. False: no mask.
        return_lse: Also return LSE.
        backend: A backend's name, or several in order; None: what ``use_config``, ``set_config`` or ``MLA_INTEROP_BACKEND`` say, else the fastest by
            measured times, where a table covers the call, else the first of the device's order that can serve.
        fallback: If the named backend cannot serve this, warn and choose automatically instead of raising.
        padding: ``"finite"``: rows of v past ``cu_seqlens_k[-1]`` are finite. ``"any"``: they may hold anything, and are cleared by a select.
        check: Read concrete device lengths back and check them: a host sync, for debugging. Does nothing for tracers.
        out: Only None: JAX arrays are immutable. The keyword is here for symmetry with ``torch_side``.
        route: ``"ffi"``, or ``"callback"``: through host memory and Python (``jax_side.callback`` says what that costs).

    Returns:
        ``out``, shaped like q with V as its last dimension, in q's dtype (bfloat16 for 8-bit q); with ``return_lse`` also float32 ``lse``, the natural log of
        the softmax denominator of the scaled scores, ``[N, T]`` packed or ``[B, N, T]`` dense. Rows without a key, and rows at or past
        ``cu_seqlens_q[-1]``, get 0 and -inf.

    Raises:
        MLAInputError: An argument is wrong; nothing was launched.
        MLAUnsupportedError: No backend, or not the one asked for, can serve it, with every reason; or the call is differentiated or
            vmapped (REFERENCE can be).
    """
    if out is not None:
        raise input_error("out", type(out).__name__, "None", "JAX arrays are immutable; use the returned array.")
    if route not in _ROUTES:
        raise input_error("route", repr(route), "'ffi' or 'callback'")
    q, k, v = (_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    options = make_options(scale, is_causal, return_lse, backend, fallback, padding)
    split = sharding.explicit_split(q, k, v)
    run: Any = functools.partial(_call, options=options, route=route)
    if q.ndim == 4:
        lengths, packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, metadata), run
        run, metadata = (lambda q, k, v, _: dense_call(q, k, v, lengths, packed)), None
    else:
        metadata = metadata_for(q.shape, k.shape, metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, check)
    return run(q, k, v, metadata) if split is None else sharding.run_split(split, run, q, k, v, metadata, return_lse)


def prepare_metadata(cu_seqlens_q: Any, cu_seqlens_k: Any = None, *, device: Any = None, **options: Any) -> PrefillMetadata:
    """``mla_interop.prepare_metadata``, with its arrays on a device already: a pytree to pass through ``jax.jit``.

    Args:
        cu_seqlens_q, cu_seqlens_k: As in ``mla_prefill``.
        device: A ``jax.Device`` or sharding; None: JAX's default device.
        **options: As in ``mla_interop.prepare_metadata``; ``config`` makes the work list of a backend that needs one.

    Raises:
        MLAInputError, MLAUnsupportedError: As there.
    """
    metadata = sequences.prepare_metadata(cu_seqlens_q, cu_seqlens_k, **options)
    if is_tracer(metadata.cu_seqlens_q):
        return metadata
    arrays = [jax.device_put(array, device) for array in (metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.plan)]
    return metadata.with_arrays(*arrays)


pytrees.register(PrefillMetadata, ["cu_seqlens_q", "own_cu_seqlens_k", "plan"], ["bounds"], ["host", "_memo"])


def _call(q: Any, k: Any, v: Any, metadata: PrefillMetadata, options: Options, route: str) -> Any:
    if options.backend is None and metadata.bounds.backend is not None:
        options = options._replace(backend=metadata.bounds.backend)
    for array in (metadata.cu_seqlens_q, metadata.cu_seqlens_k):
        if not isinstance(array, (np.ndarray, jax.Array)):
            advice = "Prepare metadata with jax_side.prepare_metadata, or with mla_interop.prepare_metadata for every framework."
            raise input_error("metadata, cu_seqlens", f"lengths in a {type(array).__module__}.{type(array).__name__}", "NumPy or JAX arrays", advice)
    call = resolve(*_specs(q, k, v), options, metadata.bounds.num_seqs, metadata.has_lengths)
    bound = bind(call, metadata, k.shape[0], exact=False)
    if bound.empty:
        out = jnp.zeros(call.out_shape, call.out_dtype)
        return (out, jnp.full(call.lse_shape, -math.inf, jnp.float32)) if options.return_lse else out
    lengths = (bound.metadata.cu_seqlens_q, bound.metadata.cu_seqlens_k)
    if options.padding == "any" and metadata.host is None and metadata.bounds.padded_k:
        v = sequences.clear_tail(v, jnp.asarray(lengths[1]))
    if call.kernel.kind == "array":
        out, lse = array_code(call.scale, options.is_causal, call.kernel.launch, q, k, v, *lengths)
    elif route == "callback":
        spec = KernelCall.of(call, bound, k.shape[0]).spec
        out, lse = callback.pure_callback(call.kernel.function, spec, q, k, v, *lengths, bound.metadata.plan)
    else:
        out, lse = custom_call(KernelCall.of(call, bound, k.shape[0]), q, k, v, *lengths, bound.metadata.plan)
    return (out, lse) if options.return_lse else out


def _array(name: str, x: Any) -> Any:
    if isinstance(x, np.ndarray):
        if x.dtype.kind in "OSUMm" or not x.dtype.isnative or jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:  # float64 would silently become float32
            raise input_error(name, f"dtype {x.dtype.str}", "a dtype that JAX has as it is", "float64 needs jax_enable_x64; other bytes, a conversion.")
        return jnp.asarray(x)
    if not isinstance(x, jax.Array):
        raise input_error(name, type(x).__name__, "a jax.Array or a NumPy array", "mla_interop.mla_prefill takes arrays of any framework.")
    if not is_tracer(x) and x.is_deleted():
        raise input_error(name, "an array whose buffer was deleted or donated", "a live array")
    return x


def _specs(q: Any, k: Any, v: Any) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    shared = traced_device() if any(map(is_tracer, (q, k, v))) else None
    made = [TensorSpec(x.shape, None, x.dtype.name, *(shared or device_of(x.devices()))) for x in (q, k, v)]
    return made[0], made[1], made[2]
