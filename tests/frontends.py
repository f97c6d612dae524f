"""The ways into the package, as functions of a problem, so that one test runs through all of them; and how results are judged."""

import contextlib
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cases import Case, Problem

import mla_interop
from mla_interop.backends import registry
from mla_interop.dimensions import MLADimensions
from mla_interop.selector_config import MLAPrefillSelectorConfig

TOLERANCE = {"bfloat16": 3e-3, "float16": 3e-3, "float32": 1e-5}  # of out, relative, Frobenius
LSE_TOLERANCE = 1e-3  # absolute
_SIGNED = {1: "i1", 2: "i2", 4: "i4", 8: "i8"}


@contextlib.contextmanager
def waiting_refused() -> Iterator[None]:
    """Torch raises on what makes the host wait for the GPU. Turning that on warns that it is a prototype, and must be undone whatever happens."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def to_torch(array: np.ndarray, device: str = "cpu") -> Any:
    """A torch tensor with the array's values and, in elements, its strides: views of a wider buffer stay views, on a GPU too."""
    torch = pytest.importorskip("torch")
    base = array
    while isinstance(base.base, np.ndarray) and base.base.dtype == array.dtype:
        base = base.base
    offset = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // array.itemsize
    buffer = torch.from_numpy(base.view(_SIGNED[array.itemsize]).reshape(-1).copy()).to(device).view(getattr(torch, array.dtype.name))
    return buffer.as_strided(array.shape, [stride // array.itemsize for stride in array.strides], offset)


def to_jax(array: np.ndarray, device: str = "cpu") -> Any:
    """A JAX array on the first device of a kind."""
    jax = pytest.importorskip("jax")
    return jax.device_put(np.ascontiguousarray(array), jax.devices(device)[0])


def to_numpy(array: Any) -> np.ndarray:
    """float64 values of a result of any framework."""
    if hasattr(array, "detach"):
        array = array.detach().float().cpu() if array.dtype.itemsize < 8 else array.detach().cpu()
    return np.asarray(array).astype(np.float64)


def run_torch(problem: Problem, device: str, **options: Any) -> tuple[Any, Any]:
    """``torch_side``, lengths from the host, out poisoned with NaN beforehand."""
    torch = pytest.importorskip("torch")
    import torch_side

    q, k, v = (to_torch(x, device) for x in (problem.q, problem.k, problem.v))
    out = torch.full(problem.out.shape, math.nan, dtype=q.dtype, device=device)
    return _unchanged(lambda: torch_side.mla_prefill(q, k, v, cu_seqlens_q=problem.cu_q, cu_seqlens_k=problem.cu_k, out=out, **options), q, k, v)


def run_torch_device(problem: Problem, device: str, **options: Any) -> tuple[Any, Any]:
    """``torch_side`` with lengths that the host does not look at, as a serving stack has them: metadata without host values."""
    torch = pytest.importorskip("torch")
    import torch_side

    q, k, v = (to_torch(x, device) for x in (problem.q, problem.k, problem.v))
    cu_q, cu_k = (torch.tensor(x, device=device) for x in (problem.cu_q, problem.cu_k))
    bounds = mla_interop.prepare_metadata(problem.cu_q, problem.cu_k, num_tokens_q=len(problem.q), num_tokens_k=len(problem.k)).bounds
    metadata = mla_interop.PrefillMetadata(cu_q, cu_k, None, bounds)
    return _unchanged(lambda: torch_side.mla_prefill(q, k, v, metadata=metadata, padding="any", **options), q, k, v)


def run_jax(problem: Problem, device: str, **options: Any) -> tuple[Any, Any]:
    """``jax_side`` outside ``jax.jit``, lengths from the host."""
    pytest.importorskip("jax")
    import jax_side

    q, k, v = (to_jax(x, device) for x in (problem.q, problem.k, problem.v))
    return _unchanged(lambda: jax_side.mla_prefill(q, k, v, cu_seqlens_q=problem.cu_q, cu_seqlens_k=problem.cu_k, **options), q, k, v)


def run_jit(problem: Problem, device: str, **options: Any) -> tuple[Any, Any]:
    """``jax_side`` inside ``jax.jit``, metadata as an argument, so that the lengths are traced; tails may hold anything."""
    jax = pytest.importorskip("jax")
    import jax_side

    q, k, v = (to_jax(x, device) for x in (problem.q, problem.k, problem.v))
    metadata = jax_side.prepare_metadata(
        problem.cu_q, problem.cu_k, num_tokens_q=len(problem.q), num_tokens_k=len(problem.k), device=jax.devices(device)[0], **_plan(problem, device, options)
    )
    call = jax.jit(lambda q, k, v, metadata: jax_side.mla_prefill(q, k, v, metadata=metadata, padding="any", **options))
    return _unchanged(lambda: call(q, k, v, metadata), q, k, v)


def run_numpy(problem: Problem, device: str, **options: Any) -> tuple[Any, Any]:
    """The neutral door with read-only NumPy arrays (scverse/anndata#2561); out poisoned with NaN."""
    out = np.full(problem.out.shape, math.nan, dtype=problem.q.dtype)
    arrays = problem.q, problem.k, problem.v
    return _unchanged(lambda: mla_interop.mla_prefill(*arrays, cu_seqlens_q=problem.cu_q, cu_seqlens_k=problem.cu_k, out=out, **options), *arrays)


FRONTENDS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "torch": run_torch,
    "torch-device-lengths": run_torch_device,
    "jax": run_jax,
    "jit": run_jit,
    "numpy": run_numpy,
}
TRACED = ("torch-device-lengths",)


def _unchanged(call: Callable[[], Any], *inputs: Any) -> tuple[Any, Any]:
    """Call twice: inputs must keep their bits, and the second result must have the first one's."""
    before = [_digest(x) for x in inputs]
    first = call()
    first = first if isinstance(first, tuple) else (first,)
    digests = [_digest(x) for x in first]
    second = call()
    second = second if isinstance(second, tuple) else (second,)
    assert [_digest(x) for x in second] == digests, "the same inputs gave other bits"
    assert [_digest(x) for x in inputs] == before, "an input was written"
    return second[0], second[1] if len(second) > 1 else None


def _digest(array: Any) -> str:
    if hasattr(array, "detach"):
        import torch

        array = array.detach().contiguous().cpu().flatten().view(torch.uint8).numpy() if array.numel() else np.zeros(0)
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _plan(problem: Problem, device: str, options: dict[str, Any]) -> dict[str, Any]:
    """A jitted call of a kernel that follows a work list needs metadata prepared for it."""
    if device == "cpu":
        return {}
    settings = {name: options[name] for name in ("is_causal", "scale") if options.get(name) is not None}
    return {"config": configuration(problem, device, False, **settings), "backend": options.get("backend")}


def needs(backend: str) -> None:
    """Skip where the backend lacks what has to be installed for it."""
    missing = registry.backend_class(backend).unavailable_reasons()
    if missing:
        pytest.skip(f"{backend}: {'; '.join(missing)}")


def configuration(problem: Problem, device: str, traced: bool, **settings: Any) -> MLAPrefillSelectorConfig:
    """The selector's view of a problem."""
    dimensions = MLADimensions.from_head_dims(problem.q.shape[2], problem.v.shape[2])
    return MLAPrefillSelectorConfig(
        dtype=problem.q.dtype.name, dimensions=dimensions, num_heads=problem.q.shape[1], device_type=device, traced=traced, **settings
    )


def declared_reasons(backend: str, case: Case, device: str, traced: bool = False, needs_lse: bool = True) -> list[str]:
    """Why a backend says it cannot serve a case."""
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    config = configuration(case.problem(), device, traced, is_causal=case.is_causal, scale=scale, needs_lse=needs_lse)
    return next(list(row.reasons) for row in mla_interop.explain(config, backend).rows if row.backend == backend)


def errors(problem: Problem, out: Any, lse: Any) -> tuple[float, float]:
    """Relative Frobenius error of out and largest absolute error of lse over the rows that have keys; the other rows are asserted exact."""
    made, no_key = to_numpy(out), np.isneginf(problem.lse)
    assert made.shape == problem.out.shape
    assert not made[no_key.T].any(), "rows without a key must be 0"  # NaN counts as true
    norm = np.linalg.norm(problem.out)
    out_error = float(np.linalg.norm(made - problem.out) / norm) if norm else 0.0
    if lse is None:
        return out_error, 0.0
    made_lse = to_numpy(lse)
    assert made_lse.shape == problem.lse.shape and str(lse.dtype).endswith("float32")
    assert np.isneginf(made_lse[no_key]).all(), "lse of rows without a key must be -inf"
    return out_error, float(np.abs(made_lse[~no_key] - problem.lse[~no_key]).max(initial=0.0))


def assert_right(case: Case, out: Any, lse: Any) -> tuple[float, float]:
    """The contract's tolerances. float32 cannot hold 1e-3 beside logits of thousands: there its own spacing is allowed too."""
    problem = case.problem()
    out_error, lse_error = errors(problem, out, lse)
    largest = np.abs(problem.lse[np.isfinite(problem.lse)]).max(initial=0.0)
    assert out_error <= TOLERANCE[case.dtype], f"out: relative error {out_error:.2e}"
    assert lse_error <= LSE_TOLERANCE + 8 * np.spacing(np.float32(largest)), f"lse: absolute error {lse_error:.2e}"
    return out_error, lse_error
