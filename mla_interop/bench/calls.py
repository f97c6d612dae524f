"""What one call from Python costs beside the least that each framework's compiler makes a call cost: ``x + 1``, and an operator that does nothing."""

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from mla_interop.bench.problems import QK_HEAD_DIM, V_HEAD_DIM, Problem, equal
from mla_interop.bench.timing import on_a_quiet_core, side_by_side

# As small as the benchmarks have: a call's cost is the host's there.
PROBLEMS = {"cuda": equal(16, 512, 1), "cpu": equal(2, 8, 1)}
# Another framework in the process would be in the way of the one that is measured: each has processes of its own, as many as this. A process may be
# slower than the next one all its life, whatever the core; a start takes torch's compiler too long to be repeated.
PROCESSES = {"torch": 1, "jax": 4}
# On how many cores a process sits down, how many rounds each time, and how long a loop is: long enough to hide that the last call is waited for.
SITTINGS, ROUNDS, LOOP_S = 12, 9, 0.02
# What the calls of a framework are compared with in each round.
FLOORS = {"torch": "from torch: x + 1 in torch.compile", "jax": "from JAX: x + 1 in jax.jit"}
COMPARED = ("from torch: mla_prefill in torch.compile", "from JAX: mla_prefill in jax.jit", "from JAX: x + 1 in jax.jit, given mla_prefill's arguments")
MARK, TIMEOUT_S = "rows: ", 900  # packages print what they like, also after the rows
# What runs n programs and waits, and how many calls a program has.
Run = tuple[Callable[[int], None], int]


def call_costs(device: str, dtype: str) -> list[dict[str, Any]]:
    """Microseconds a call of this package from torch, compiled or not, and of one jitted call, each beside its floor; timed in turns.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        dtype: Name of q's dtype.

    Returns:
        A row for each, with ``us_over`` for what is :data:`COMPARED` with its floor, and with ``failed`` where it cannot be called. None of a
        framework that is not installed or cannot be imported, which the contenders say. Beside a GPU several processes are asked, and the one
        counts in which the floor was the fastest; what the others said is in ``us_over_elsewhere``, from the next fastest floor to the slowest.
    """
    rows: list[dict[str, Any]] = []
    for framework in FLOORS:
        if importlib.util.find_spec(framework) is None:
            continue
        found: list[list[dict[str, Any]]] = []
        for _ in range(PROCESSES[framework] if device == "cuda" else 1):
            try:
                found.append(_from_a_process(framework, device, dtype))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                rows.append({"name": f"calls from {framework}", "failed": str(error)})
                break  # the next would fail likewise, or take as long
        if found:
            rows += _of_the_quietest(found, FLOORS[framework])
    return rows


def _of_the_quietest(found: list[list[dict[str, Any]]], floor: str) -> list[dict[str, Any]]:
    def floor_us(rows: list[dict[str, Any]]) -> float:
        return min((row["us"] for row in rows if row["name"].startswith(f"{floor}, ") and "us" in row), default=math.inf)

    quietest, *others = sorted(found, key=floor_us)
    for row in quietest:
        elsewhere = [other["us_over"] for rows in others for other in rows if other["name"] == row["name"] and "us_over" in other]
        if elsewhere and "us_over" in row:
            row["us_over_elsewhere"] = elsewhere
    return quietest


def _from_a_process(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "mla_interop.bench.calls", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise RuntimeError(f"its process exited with {done.returncode}: {done.stderr[-300:]}")


def measure(framework: str, device: str, dtype: str) -> list[dict[str, Any]]:
    """The rows of one framework."""
    try:
        importlib.import_module(framework)
    except (Exception, SystemExit):  # packages raise whatever they like (oumi#2586)
        return []
    problem = PROBLEMS[device]
    runs: dict[str, Run] = {}
    failed: list[dict[str, Any]] = []
    for name, run in {"torch": _torch, "jax": _jax}[framework](problem, device, dtype).items():
        try:
            run[0](1)
            runs[name] = run
        except Exception as error:  # no compiler, say: what was measured before must not be lost for it
            failed.append({"name": f"{name}, {problem.name}", "failed": f"{type(error).__name__}: {str(error)[:300]}"})
    floor = FLOORS[framework]
    over = {name: floor for name in COMPARED}
    if device == "cuda" and floor in runs:
        times = on_a_quiet_core(lambda: side_by_side(runs, ROUNDS, LOOP_S, over), floor, SITTINGS)
    else:  # a CPU's kernels have threads of their own
        times = side_by_side(runs, ROUNDS, LOOP_S, over)
    return [{"name": f"{name}, {problem.name}", **found} for name, found in times.items()] + failed


def _torch(problem: Problem, device: str, dtype: str) -> dict[str, Run]:
    import torch

    import torch_side
    from mla_interop.bench.torch_contenders import COMPILED_CALLS, looped

    library = torch.library.Library("mla_interop_bench", "FRAGMENT")
    library.define("nothing(Tensor x) -> Tensor")
    library.impl("nothing", lambda x: x.new_empty(1), device.upper())
    torch.library.register_fake("mla_interop_bench::nothing", lambda x: x.new_empty(1), lib=library)

    where, kind = torch.device(device), getattr(torch, dtype)
    q, k, v = (torch.randn(problem.tokens, problem.heads, width, device=where).to(kind) for width in (QK_HEAD_DIM, QK_HEAD_DIM, V_HEAD_DIM))
    metadata = torch_side.prepare_metadata(problem.cu_seqlens, device=where)

    def chain(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        for _ in range(COMPILED_CALLS):
            v = torch_side.mla_prefill(q, k, v, metadata=metadata)  # the result has v's shape, and the next call waits for it
        return v

    def nothings(x: Any) -> Any:
        for _ in range(COMPILED_CALLS):
            x = torch.ops.mla_interop_bench.nothing(x)
        return x

    add = torch.compile(lambda x: x + 1, fullgraph=True)
    nothing = torch.compile(lambda x: torch.ops.mla_interop_bench.nothing(x), fullgraph=True)
    compiled = torch.compile(lambda q, k, v, metadata: torch_side.mla_prefill(q, k, v, metadata=metadata), fullgraph=True)
    compiled_chain, compiled_nothings = torch.compile(chain, fullgraph=True), torch.compile(nothings, fullgraph=True)
    few = torch.ones(4, device=where)
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "from torch: mla_prefill": (lambda: torch_side.mla_prefill(q, k, v, metadata=metadata), 1),
        "from torch: mla_prefill in torch.compile": (lambda: compiled(q, k, v, metadata), 1),
        "from torch: mla_prefill in torch.compile, ten calls a program": (lambda: compiled_chain(q, k, v, metadata), COMPILED_CALLS),
        "from torch: x + 1 in torch.compile": (lambda: add(few), 1),
        "from torch: an operator that does nothing in torch.compile": (lambda: nothing(few), 1),
        "from torch: an operator that does nothing in torch.compile, ten calls a program": (lambda: compiled_nothings(few), COMPILED_CALLS),
        "from torch: x + 1": (lambda: few + 1, 1),
    }

    def without_grad(call: Callable[[], Any]) -> Callable[[int], None]:
        run = looped(call, where)

        def inside(n: int, library: Any = library) -> None:  # an operator lives as long as its library
            with torch.no_grad():
                run(n)

        return inside

    return {name: (without_grad(call), count) for name, (call, count) in calls.items()}


def _jax(problem: Problem, device: str, dtype: str) -> dict[str, Run]:
    import jax
    import jax.numpy as jnp

    import jax_side

    keys, widths = jax.random.split(jax.random.key(0), 3), (QK_HEAD_DIM, QK_HEAD_DIM, V_HEAD_DIM)
    place = jax.devices(device)[0]
    q, k, v = (jax.device_put(jax.random.normal(key, (problem.tokens, problem.heads, d), jnp.dtype(dtype)), place) for key, d in zip(keys, widths))
    metadata, few = jax_side.prepare_metadata(problem.cu_seqlens, device=place), jax.device_put(jnp.ones(4), place)
    add = jax.jit(lambda x: x + 1)
    add_to_one = jax.jit(lambda q, k, v, metadata: v + 1, keep_unused=True)
    attend = jax.jit(lambda q, k, v, metadata: jax_side.mla_prefill(q, k, v, metadata=metadata))

    def looped(call: Callable[[], Any]) -> Run:
        def run(n: int) -> None:
            made = None
            for _ in range(n):
                made = call()
            jax.block_until_ready(made)

        return run, 1

    return {
        "from JAX: mla_prefill in jax.jit": looped(lambda: attend(q, k, v, metadata)),
        "from JAX: x + 1 in jax.jit, given mla_prefill's arguments": looped(lambda: add_to_one(q, k, v, metadata)),
        "from JAX: x + 1 in jax.jit": looped(lambda: add(few)),
    }


if __name__ == "__main__":
    print(MARK + json.dumps(measure(*sys.argv[1:])))
