"""One process, several of everything: Python threads, frameworks in either order, and neither where it was not asked for."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import oracle
import pytest
from cases import offsets

jax = pytest.importorskip("jax")
pytest.importorskip("torch", reason="CPU_SDPA's kernel is torch's")

import jax.numpy as jnp  # noqa: E402

import jax_side  # noqa: E402
from mla_interop import selector  # noqa: E402

THREADS, TURNS = 8, 6


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
@pytest.mark.parametrize("warm", [True, False])
def test_eight_threads_get_their_own_right_values(backend: str, warm: bool) -> None:
    """One jitted function and one metadata object for all, and calls without jit beside them; cold: all of them trace and load at once."""
    barrier, random = Barrier(THREADS), np.random.default_rng(1)
    cu_q, cu_k, device = offsets([3, 0, 4 + warm]), offsets([5, 2, 4]), jax.devices("cpu")[0]
    metadata = jax_side.prepare_metadata(cu_q, cu_k, device=device)
    inputs = [[random.standard_normal((n, 2, d)).astype(np.float32) for n, d in ((cu_q[-1], 192), (11, 192), (11, 128))] for _ in range(THREADS)]
    truth = [oracle.attention(*x, cu_q, cu_k)[0] for x in inputs]
    jitted = jax.jit(lambda q, k, v, metadata: jax_side.mla_prefill(q, k, v, metadata=metadata, backend=backend))
    if warm:
        jitted(*inputs[0], metadata)
    else:
        selector.clear_cache()

    def work(index: int) -> float:
        barrier.wait(60)
        worst = 0.0
        with jax.default_device(device):
            for _ in range(TURNS):
                for call in (jitted, lambda *x: jax_side.mla_prefill(*x[:3], metadata=x[3], backend=backend)):
                    made = call(*map(jnp.asarray, inputs[index]), metadata)
                    worst = max(worst, float(np.abs(made - truth[index]).max()))
        return worst

    with ThreadPoolExecutor(THREADS) as pool:
        assert max(pool.map(work, range(THREADS))) < 1e-4


USE = {
    "torch": "import torch, torch_side; made['torch'] = torch_side.mla_prefill(*(torch.from_numpy(x) for x in arrays), cu_seqlens_q=cu).numpy()",
    "jax": "import jax, jax_side; made['jax'] = np.asarray(jax.jit(lambda *x: jax_side.mla_prefill(*x, cu_seqlens_q=cu))(*arrays))",
}
START = """
import json, sys, numpy as np
random, made, cu = np.random.default_rng(0), {}, [0, 3, 3, 7]
arrays = [random.standard_normal((7, 2, d)).astype(np.float32) for d in (192, 192, 128)]
"""


def run(*statements: str) -> Any:
    """What a fresh process prints last, as JSON."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", "\n".join((START, *statements))], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("order", [("torch", "jax"), ("jax", "torch")])
def test_both_frameworks_in_one_process_in_either_order(order: tuple[str, str]) -> None:
    """jax#19004, jax#18032: whichever is imported first, the other still works, and their values are the same."""
    difference = run(*(USE[name] for name in order), "print(json.dumps(float(np.abs(made['torch'] - made['jax']).max())))")
    assert difference < 1e-6


def test_a_torch_program_starts_no_jax() -> None:
    """diffusers#1794: JAX takes three quarters of a GPU's memory when it starts."""
    loaded = run(USE["torch"], "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))")
    assert "torch" in loaded and not {"jax", "jaxlib"} & set(loaded)


def test_importing_jax_side_starts_no_device_and_no_torch() -> None:
    """A process may still choose its devices after the import; TVM FFI, which is loaded with the first kernel, imports torch by itself."""
    statements = "import jax_side; from jax._src import xla_bridge; print(json.dumps([xla_bridge.backends_are_initialized(), 'torch' in sys.modules]))"
    assert run(statements) == [False, False]
