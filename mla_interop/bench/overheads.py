"""What surrounds the kernels: preparing metadata, planning, importing; and whether very many calls leave the process any larger."""

import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mla_interop import prepare_metadata
from mla_interop.bench.problems import equal, ragged
from mla_interop.bench.timing import per_call
from mla_interop.errors import MLABuildError

H200_SMS = 132


def host_costs() -> list[dict[str, Any]]:
    """Microseconds of the work on the host, with nothing but NumPy and our planner; ``failed`` where that cannot be built here."""
    from mla_interop.kernels import flashinfer_module

    lengths = np.arange(65, dtype=np.int32) * 100
    rows: list[dict[str, Any]] = [{"name": "prepare_metadata, 64 sequences", **_timed(lambda: prepare_metadata(lengths))}]
    for problem in (equal(128, 1024, 8), ragged(128, 32, 4096)):
        cu = problem.cu_seqlens

        def plan(cu: np.ndarray = cu) -> None:
            flashinfer_module.plan(3, cu, cu, int(cu[-1]), 128, True, H200_SMS)

        row: dict[str, Any] = {"name": f"FA3 work list, {problem.name}"}
        try:
            row |= _timed(plan)
        except MLABuildError as error:
            row["failed"] = str(error)
        rows.append(row)
    rows.append({"name": "import mla_interop, over bare Python", **_import_cost()})
    return rows


def _timed(call: Callable[[], Any]) -> dict[str, float]:
    def run(n: int) -> None:
        for _ in range(n):
            call()

    return per_call(run)


def _import_cost(repeats: int = 15) -> dict[str, float]:
    """What Python itself says that the import took in fresh interpreters, all that it pulls in counted: microseconds.

    Not the difference of the wall times of two interpreters: on a machine that does something else beside it, that is noise of its own size.
    """

    def cost() -> float:
        done = subprocess.run([sys.executable, "-X", "importtime", "-c", "import mla_interop"], check=True, capture_output=True, text=True)
        [line] = [line for line in done.stderr.splitlines() if line.endswith("| mla_interop")]
        return float(line.split("|")[1])

    times = [cost() for _ in range(1 + repeats)][1:]  # the first may write bytecode
    return {"us": statistics.median(times), "us_min": min(times), "us_max": max(times)}


def soak(device: str, calls: int = 2_000_000) -> dict[str, Any]:
    """What the process holds before and after ``calls`` calls inside ``jax.jit``, a hundred to a program, whose sizes and lengths change.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        calls: Rounded to what a program of a hundred divides. Half of them warm up: with a million in all, processes beside an H200 still grew in
            the second half, and with two million hardly (``h200_calls.json``).

    Returns:
        ``{"name": ..., "calls": ..., "grown_bytes": ..., "grown_device_bytes": ..., "grown_files": ..., "grown_threads": ...}``: growth over the
        second half, when all is warm.
    """
    import jax
    import jax.numpy as jnp

    import jax_side

    place = jax.devices(device)[0]
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    sizes = range(8, 72, 16)
    inputs = {rows: [jax.device_put(jnp.ones((rows, 2, width), dtype), place) for width in (192, 192, 128)] for rows in sizes}

    @jax.jit
    def hundred(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        for _ in range(100):
            q = q.at[0, 0, 0].set(jax_side.mla_prefill(q, k, v, metadata=metadata)[0, 0, 0])
        return q

    def run(times: int) -> dict[str, int]:
        made = None
        for block in range(times):
            rows = sizes[block % len(sizes)]
            metadata = jax_side.prepare_metadata([0, 1 + block % 5, rows - block % 3], num_tokens_q=rows, device=place)
            q, k, v = inputs[rows]
            made = hundred(q, k, v, metadata)
        jax.block_until_ready(made)
        del made
        return held((place.memory_stats() or {}).get("bytes_in_use", 0))

    return _growth(run, calls, f"{calls} calls inside jax.jit")


def torch_soak(device: str, calls: int = 1_000_000) -> dict[str, Any]:
    """What the process holds before and after ``calls`` calls of ``torch_side.mla_prefill`` whose sizes and lengths change.

    Half of the calls bring lengths, which makes metadata anew; half use metadata, which is replaced every twenty calls: so often that what is
    kept for a number of them, and then dropped, was full before the second half.

    Returns:
        ``{"name": ..., "calls": ..., "grown_bytes": ..., "grown_device_bytes": ..., "grown_files": ..., "grown_threads": ...}``: growth over the
        second half, when all is warm.
    """
    import torch

    import torch_side

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = range(8, 72, 4)
    inputs = {rows: [torch.ones(rows, 2, width, device=device, dtype=dtype) for width in (192, 192, 128)] for rows in sizes}

    def run(times: int) -> dict[str, int]:
        for block in range(5 * times):
            rows = sizes[block % len(sizes)]
            lengths = [0, 1 + block % 5, rows - block % 3]
            metadata = torch_side.prepare_metadata(lengths, num_tokens_q=rows, device=device)
            for _ in range(10):
                torch_side.mla_prefill(*inputs[rows], metadata=metadata)
                torch_side.mla_prefill(*inputs[rows], cu_seqlens_q=lengths)
        if device == "cuda":
            torch.cuda.synchronize()
        return held(torch.cuda.memory_reserved() if device == "cuda" else 0)

    return _growth(run, calls, f"{calls} calls from torch")


def _growth(run: Callable[[int], dict[str, int]], calls: int, name: str) -> dict[str, Any]:
    """``run(n)`` makes n hundreds of calls and says what the process holds then; what that grew by in the second half.

    Of its two quarters the lesser growth counts, twice: what calls leave behind is in both, a pool that a library enlarges once is in one.
    """
    run(calls // 200)
    states = [run(1), *(run(calls // 400) for _ in range(2))]
    quarters = [{what: after[what] - before[what] for what in after} for before, after in zip(states, states[1:])]
    return {"name": name, "calls": calls, **{f"grown_{what}": 2 * min(quarter[what] for quarter in quarters) for what in states[0]}}


def held(device_bytes: int = 0) -> dict[str, int]:
    """Resident memory, and open files and threads, of this process."""
    gc.collect()
    return {"bytes": _resident(), "device_bytes": device_bytes, "files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
