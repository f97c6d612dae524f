"""The same prefill by every path there is here: the model library's eager attention, PyTorch, JAX; timed, and held against float64."""

import importlib
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mla_interop.backends.base import MLAPrefillBackend
from mla_interop.demo.layer import LayerInputs
from mla_interop.exchange import TensorSpec
from mla_interop.prefill import Options, Resolved, resolve
from mla_interop.progress import Progress, silent, told, within

ROWS_PER_BLOCK = 256
SECONDS_PER_PATH = 0.5


@dataclass(frozen=True)
class PathResult:
    """What one path gave and cost.

    Attributes:
        name: What computed it.
        backend, kernel: Our backend and its kind of kernel; empty for the model library's own attention.
        copies: What was copied or padded on the way to the kernel.
        milliseconds: Median of a call, after a warm-up, finished on the device.
        out: float64 ``[T, N, V]``.
        lse: float64 ``[N, T]``, or None where the path has none.
        out_error: Frobenius norm of the difference from float64, relative to the norm of the float64 result.
        lse_error: Largest absolute difference from float64.
    """

    name: str
    backend: str
    kernel: str
    copies: tuple[str, ...]
    milliseconds: float
    out: np.ndarray
    lse: np.ndarray | None
    out_error: float
    lse_error: float | None


def float64_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_seqlens: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of each sequence on itself in float64, in blocks of query rows; out ``[T, N, V]`` and lse ``[N, T]``."""
    out, lse = np.zeros((q.shape[0], q.shape[1], v.shape[2])), np.full((q.shape[1], q.shape[0]), -np.inf)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        for first in range(start, end, ROWS_PER_BLOCK):
            last = min(first + ROWS_PER_BLOCK, end)
            scores = np.matmul(q[first:last].transpose(1, 0, 2), k[start:last].transpose(1, 2, 0)) * scale
            scores[:, np.arange(start, last)[None, :] > np.arange(first, last)[:, None]] = -np.inf
            top = scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=-1, keepdims=True)
            out[first:last] = np.matmul(weights / total, v[start:last].transpose(1, 0, 2)).transpose(1, 0, 2)
            lse[:, first:last] = (np.log(total) + top)[..., 0]
    return out, lse


def run_paths(inputs: LayerInputs, progress: Progress = silent) -> tuple[tuple[PathResult, ...], np.ndarray]:
    """Every path that this machine has (JAX is left out where it is not installed), and out in float64."""
    q, k, v = (part.double().cpu().numpy() for part in (inputs.q, inputs.k, inputs.v))
    progress(0.0, "the answer in float64")
    out64, lse64 = float64_reference(q, k, v, inputs.cu_seqlens, inputs.scale)
    results = []
    paths = list(_paths(inputs))
    for name, backend, copies, call in told(paths, within(progress, 0.2, 1.0), lambda path: path[0]):
        (out, lse), milliseconds = _timed(call)
        out_error = float(np.linalg.norm(out - out64) / np.linalg.norm(out64))
        lse_error = None if lse is None else float(np.abs(lse - lse64).max())
        kind = backend.kernel.kind if backend else ""
        results.append(PathResult(name, backend.get_name() if backend else "", kind, copies, milliseconds, out, lse, out_error, lse_error))
    return tuple(results), out64


Path = tuple[str, MLAPrefillBackend | None, tuple[str, ...], Callable[[], Any]]


def _paths(inputs: LayerInputs) -> Iterator[Path]:
    yield "transformers", None, (), lambda: (inputs.eager(), None)
    yield _torch_path(inputs)
    if importlib.util.find_spec("jax"):
        try:
            importlib.import_module("jax")
        except (Exception, SystemExit) as error:  # packages raise whatever they like (oumi#2586)
            warnings.warn(f"without JAX, which cannot be imported: {type(error).__name__}: {error}", stacklevel=2)
        else:
            yield _jax_path(inputs)


def _resolve(inputs: LayerInputs, device_type: str, strided: bool) -> Resolved:
    """What the frontends ask the core for these inputs: which backend, and which of q, k and v it needs copied."""
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    q, k, v = (
        TensorSpec(tuple(part.shape), part.stride() if strided else None, dtype, device_type, part.device.index or 0, part.data_ptr() % 16 == 0)
        for part in (inputs.q, inputs.k, inputs.v)
    )
    return resolve(q, k, v, Options(scale=inputs.scale, return_lse=True), len(inputs.cu_seqlens) - 1, has_lengths=strided)


def _torch_path(inputs: LayerInputs) -> Path:
    import torch_side

    options: dict[str, Any] = dict(cu_seqlens_q=inputs.cu_seqlens, scale=inputs.scale, return_lse=True)

    def call() -> Any:
        with torch.inference_mode():
            return torch_side.mla_prefill(inputs.q, inputs.k, inputs.v, **options)

    resolved = _resolve(inputs, inputs.q.device.type, strided=True)
    copied = [name for name, copy in zip("qkv", resolved.copies) if copy]
    strided = (f"{', '.join(copied)} made contiguous",) if copied else ()
    return "torch_side", resolved.backend, (*resolved.kernel.copies, *strided), call


def _jax_path(inputs: LayerInputs) -> Path:
    # PyTorch holds memory on the same device; JAX would take three quarters of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    import jax_side

    longest = int(np.diff(inputs.cu_seqlens).max())

    @jax.jit
    def prefill(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array) -> Any:
        return jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, scale=inputs.scale, return_lse=True)

    # A JAX array has no strides: the layer's views are packed once, on the way in, and shared by DLPack from there on.
    on_host = inputs.q.device.type == "cpu" or jax.default_backend() != "gpu"
    q, k, v = (jax.dlpack.from_dlpack((part.cpu() if on_host else part).contiguous()) for part in (inputs.q, inputs.k, inputs.v))
    cu_seqlens = jax.device_put(inputs.cu_seqlens, q.device)
    resolved = _resolve(inputs, "cpu" if on_host else "cuda", strided=False)
    return "jax_side (jit)", resolved.backend, resolved.kernel.copies, lambda: jax.block_until_ready(prefill(q, k, v, cu_seqlens))


def _timed(call: Callable[[], Any]) -> tuple[tuple[np.ndarray, np.ndarray | None], float]:
    """The result of a warm-up call as float64, and the median time of at least three more, in milliseconds."""
    out, lse = call()
    result = _to_float64(out), None if lse is None else _to_float64(lse)
    times: list[float] = []
    while len(times) < 3 or (len(times) < 15 and sum(times) < SECONDS_PER_PATH):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return result, 1e3 * statistics.median(times)


def _to_float64(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        return array.double().cpu().numpy()
    return np.asarray(array).astype(np.float64)
