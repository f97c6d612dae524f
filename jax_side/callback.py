"""The route of last resort: a kernel that runs on the CPU, called through ``jax.pure_callback``.

It needs no C++ compiler and works from a program on any device, but everything goes through host memory, and through Python:
a callback that does nothing, of 2048 tokens and 16 heads, took 63 ms on an H200, where the attention itself takes 42
microseconds.  Such a program can be neither exported nor captured into a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_side.ffi import CallSpec
from mla_interop.host_tensor import as_tensor


def pure_callback(
    launch: Callable[..., Any],
    spec: CallSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    plan: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Run ``launch``, a CPU kernel of the package's ABI, on the host; arguments and results are those of ``jax_side.ffi.call``.

    Raises:
        jax.errors.JaxRuntimeError: At run time, with the traceback of what ``launch`` raised.
    """
    has_lse = spec.lse_shape is not None
    buffers = spec.results()
    returned = buffers[: 1 + has_lse]

    def on_host(*arrays: Any) -> tuple[np.ndarray, ...]:
        # Only NumPy and TVM FFI from here on: JAX operations inside a callback can hang (jax-ml/jax#24255).
        q, k, v, *others = (np.asarray(array) for array in arrays)
        if spec.num_k >= 0:
            k, v = k[: spec.num_k], v[: spec.num_k]
        operands = [as_tensor(array) for array in (q, k, v, *others)]
        results = [np.empty(buffer.shape, buffer.dtype) for buffer in buffers]
        written = [as_tensor(array) for array in results]
        lse = written[1] if has_lse else None
        scratch = written[-1] if spec.scratch_floats else None
        work_list = operands[5] if len(operands) == 6 else None
        launch(*operands[:5], work_list, scratch, written[0], lse, spec.scale, spec.max_seqlen_q, spec.max_seqlen_k, spec.finish)
        return tuple(results[: len(returned)])

    operands = (q, k, v, cu_seqlens_q, cu_seqlens_k) + (() if plan is None else (plan,))
    out, *lse = jax.pure_callback(on_host, returned, *operands)
    return out, lse[0] if has_lse else None
