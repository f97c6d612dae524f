"""One device against several: the same attention with its heads split over the devices of this machine, ten calls in one program.

``python -m mla_interop.bench.two_gpus --out FILE`` writes JSON: machine, versions, and a row for each framework, way in and kernel, with
microseconds a call on one device (``one_us``), on all (``all_us``), and their ratio, which is 0.5 for two devices where splitting costs nothing.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mla_interop.bench.problems import QK_HEAD_DIM, V_HEAD_DIM, Problem, equal
from mla_interop.bench.run import environment, save
from mla_interop.bench.timing import side_by_side

CHAIN = 10
# A program over several devices takes the host some hundred microseconds to start: a loop must hold many for that to be hidden, as it is in use.
ROUNDS, LOOP_S = 11, 0.1
PROBLEM = equal(128, 4096, 1)


def measure(problem: Problem = PROBLEM, device: str = "cuda", dtype: str = "bfloat16", num_devices: int = 2) -> dict[str, Any]:
    """Every framework's rows, and what they were measured on."""
    rows = [row for rows in FRAMEWORKS.values() for row in rows(problem, device, dtype, num_devices)]
    return {"environment": {**environment(device), "devices": num_devices}, "problem": problem.name, "dtype": dtype, "rows": rows}


def jax_rows(problem: Problem, device: str, dtype: str, num_devices: int) -> Iterator[dict[str, Any]]:
    """``jax_side``: plain ``jax.jit`` on arrays that are split by heads, and ``sharded_mla_prefill``; each with every kernel of this machine."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jax_side
    from mla_interop.bench.torch_contenders import kernels_here

    spec = PartitionSpec(None, "h", None)

    def operands(mesh: Any) -> tuple[Any, ...]:
        keys, placement = jax.random.split(jax.random.key(1), 3), NamedSharding(mesh, spec)
        drawn = [jax.random.normal(key, (problem.tokens, problem.heads, d), jnp.dtype(dtype)) for key, d in zip(keys, (QK_HEAD_DIM, QK_HEAD_DIM, V_HEAD_DIM))]
        return tuple(jax.device_put(x, placement) for x in drawn)

    def contender(kernel: str, by_hand: bool, devices: list[Any]) -> tuple[Callable[[int], None], Any]:
        mesh = jax.make_mesh((len(devices),), ("h",), axis_types=(AxisType.Auto,), devices=devices)
        call = jax_side.sharded_mla_prefill(mesh, head_axis="h") if by_hand else jax_side.mla_prefill
        options = {"cu_seqlens_q": problem.cu_seqlens, "backend": kernel, "return_lse": True}

        def chain(q: Any, k: Any, v: Any) -> Any:
            made = []
            for _ in range(CHAIN):
                made.append(call(q, k, v, **options))
                row = made[-1][0][0, :, 0]  # of every head, so that each device feeds its own next call
                q, v = q.at[0, :, 0].set(row), v.at[0, :, 0].set(row)
            return q, v, made

        q, k, v = operands(mesh)
        first = np.asarray(jax.jit(lambda *x: call(*x, **options)[0])(q, k, v), np.float32)
        program, state = jax.jit(chain, donate_argnums=(0, 2)), [q, v]

        def run(n: int) -> None:
            made = None
            for _ in range(n):
                state[0], state[1], made = program(state[0], k, state[1])
            jax.block_until_ready(made)

        return run, first

    devices = jax.devices(device)[:num_devices]
    if len(devices) < num_devices:
        raise RuntimeError(f"JAX shows {len(devices)} {device} devices; allowed: at least {num_devices}")
    with jax.default_device(devices[0]):
        for backend, kernel in kernels_here(problem, device, dtype):
            name = f"{backend}.{kernel.variant}"
            for by_hand in (False, True):
                if kernel.plan is not None and not by_hand:
                    continue  # a work list is for all heads: such a kernel is split by hand
                head = {"framework": "jax", "name": "sharded_mla_prefill" if by_hand else "plain jit", "kernel": name}
                yield _row(head, lambda some, name=name, by_hand=by_hand: contender(name, by_hand, some), devices)


def torch_rows(problem: Problem, device: str, dtype: str, num_devices: int) -> Iterator[dict[str, Any]]:
    """``torch_side``: each device its heads, called in turn by one thread, with every kernel of this machine."""
    import torch

    import torch_side
    from mla_interop.bench.problems import inputs
    from mla_interop.bench.torch_contenders import kernels_here

    if device != "cuda":
        return
    whole = inputs(problem, device, dtype)

    def contender(kernel: str, devices: list[Any]) -> tuple[Callable[[int], None], Any]:
        metadata = [torch_side.prepare_metadata(problem.cu_seqlens, device=where) for where in devices]
        operands = list(zip(*([part.to(where) for part, where in zip(x.chunk(len(devices), dim=1), devices)] for x in whole), metadata))

        def call() -> list[Any]:
            return [torch_side.mla_prefill(q, k, v, metadata=m, backend=kernel) for q, k, v, m in operands]

        def run(n: int) -> None:
            for _ in range(n * CHAIN):
                call()
            for where in devices:
                torch.cuda.synchronize(where)

        return run, np.concatenate([part.float().cpu().numpy() for part in call()], axis=1)

    devices = [torch.device(device, index) for index in range(num_devices)]
    for backend, kernel in kernels_here(problem, device, dtype):
        name = f"{backend}.{kernel.variant}"
        yield _row({"framework": "torch", "name": "mla_prefill", "kernel": name}, lambda some, name=name: contender(name, some), devices)


def _row(head: dict[str, Any], make: Callable[[list[Any]], tuple[Callable[[int], None], Any]], devices: list[Any]) -> dict[str, Any]:
    """One row: ``make(devices)`` gives what to run, and a result that must not depend on the devices."""
    try:
        runs, results = zip(*map(make, (devices[:1], devices)))
        found = side_by_side({number: (run, CHAIN) for number, run in enumerate(runs)}, ROUNDS, LOOP_S)
        times = [found[number]["us"] for number in range(2)]
        norm = float(np.linalg.norm(results[0]))
        difference = float(np.linalg.norm(results[1] - results[0])) / (norm or math.inf)
        return {**head, "one_us": times[0], "all_us": times[1], "ratio": times[1] / times[0], "difference": difference}
    except Exception as error:
        return {**head, "failed": f"{type(error).__name__}: {str(error)[:300]}"}


FRAMEWORKS: dict[str, Callable[[Problem, str, str, int], Iterator[dict[str, Any]]]] = {"jax": jax_rows, "torch": torch_rows}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Attention with its heads split over the devices of this machine, against one device.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    given = parser.parse_args()
    results = measure(equal(given.heads, given.length, 1), given.device, given.dtype, given.devices)
    save(results, given.out)
    for row in results["rows"]:
        print(row)


if __name__ == "__main__":
    main()
