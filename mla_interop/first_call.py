"""How long the first call takes in a fresh process, after its imports: what a deployment's first request waits for.

``python -m mla_interop.first_call`` is that process; :func:`first_call` starts it.
"""

import importlib
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

FRONTENDS = ("torch_side", "jax_side")
_TIMEOUT_S = 900
_LENGTHS = [0, 31, 96]


@dataclass(frozen=True)
class FirstCall:
    """One measurement.

    Attributes:
        frontend: One of ``FRONTENDS``.
        backend: What was chosen, as ``BACKEND.variant``; "" if the call failed.
        imports: Seconds for importing the framework, the frontend and TVM FFI (which imports torch wherever that is installed, for JAX's callers
            too), and for making q, k and v.
        seconds: Of the call: selection, loading, the launch, until the result is there.
        why: What went wrong; "" if nothing did.
    """

    frontend: str
    backend: str = ""
    imports: float = 0.0
    seconds: float = 0.0
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def first_call(frontend: str, device: str, dtype: str, num_heads: int, head_dims: tuple[int, int], backend: str | None = None) -> FirstCall:
    """Measure it in a process of its own.

    Args:
        frontend: One of ``FRONTENDS``.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: Of q, k and v.
        num_heads: N.
        head_dims: (D, V).
        backend: An explicit choice, or several with commas between; None: what is chosen.
    """
    stated = json.dumps([frontend, device, dtype, num_heads, *head_dims, backend])
    try:
        done = subprocess.run([sys.executable, "-m", "mla_interop.first_call", stated], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return FirstCall(frontend, why=f"did not end within {_TIMEOUT_S} s")
    if done.returncode != 0:
        return FirstCall(frontend, why=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return FirstCall(frontend, **json.loads(done.stdout.splitlines()[-1]))


def _measure(frontend: str, device: str, dtype: str, heads: int, qk_head_dim: int, v_head_dim: int, backend: str | None) -> dict[str, Any]:
    start = time.perf_counter()
    side, _ = importlib.import_module(frontend), importlib.import_module("tvm_ffi")
    make, wait = _torch_arrays(device, dtype) if frontend == "torch_side" else _jax_arrays(device, dtype)
    arrays = [make((_LENGTHS[-1], heads, width)) for width in (qk_head_dim, qk_head_dim, v_head_dim)]
    wait(arrays)
    ready = time.perf_counter()
    wait([side.mla_prefill(*arrays, cu_seqlens_q=_LENGTHS, backend=backend.split(",") if backend else None)])
    ended = time.perf_counter()
    return {"backend": _chosen(device, dtype, heads, qk_head_dim, v_head_dim, backend), "imports": ready - start, "seconds": ended - ready}


def _torch_arrays(device: str, dtype: str) -> tuple[Any, Any]:
    import torch

    return lambda shape: torch.ones(shape, dtype=getattr(torch, dtype), device=device), lambda arrays: device == "cpu" or torch.cuda.synchronize()


def _jax_arrays(device: str, dtype: str) -> tuple[Any, Any]:
    import jax

    return lambda shape: jax.device_put(jax.numpy.ones(shape, dtype), jax.devices(device)[0]), jax.block_until_ready


def _chosen(device: str, dtype: str, heads: int, qk_head_dim: int, v_head_dim: int, backend: str | None) -> str:
    """By the same rules as the call's, whose choice is in the selector's cache; a kernel that failed to load is left out there."""
    from mla_interop.dimensions import MLADimensions
    from mla_interop.selector import select
    from mla_interop.selector_config import MLAPrefillSelectorConfig

    dimensions = MLADimensions.from_head_dims(qk_head_dim, v_head_dim)
    config = MLAPrefillSelectorConfig(
        dtype=dtype,
        dimensions=dimensions,
        num_heads=heads,
        device_type=device,
        needs_lse=False,
        scale=qk_head_dim**-0.5,
        num_tokens=_LENGTHS[-1],
        num_seqs=len(_LENGTHS) - 1,
    )
    chosen = select(config, backend.split(",") if backend else None)
    return f"{chosen.get_name()}.{chosen.kernel.variant}"


if __name__ == "__main__":
    print(json.dumps(_measure(*json.loads(sys.argv[1]))))
