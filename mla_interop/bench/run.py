"""Runs the contenders and writes what they took, beside the machine, the versions and the date."""

import datetime
import functools
import importlib
import importlib.util
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mla_interop.bench.calls import call_costs
from mla_interop.bench.ceiling import matrix_product
from mla_interop.bench.overheads import host_costs
from mla_interop.bench.problems import CPU_PROBLEMS, GPU_PROBLEMS, Problem, errors, expected, inputs
from mla_interop.bench.timing import side_by_side
from mla_interop.capability import machine_name
from mla_interop.kernels.build import package_version
from mla_interop.progress import Progress, silent

DISTRIBUTIONS = (
    "mla-interop",
    "torch",
    "jax",
    "jaxlib",
    "apache-tvm-ffi",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "flashinfer-python",
    "fa4-jax",
    "cutejax",
    "nvidia-cudnn-cu13",
)


# Measured once more, by turns and with nothing else between: they are closer to each other than what a GPU's clock does among dozens of contenders.
# Framework, one name, the other name, and the kernels of the first (() for every one; the second's is the same, where it has one).
PAIRS = (
    ("torch", "mla_interop", "kernel object", ()),
    ("jax", "mla_interop", "fa4-jax", ("FLASH_ATTN.fa4",)),
    ("jax", "mla_interop + lse", "fa4-jax + lse", ("FLASH_ATTN.fa4",)),
    ("jax", "mla_interop", "FlashAttention-4 by cutlass_call", ("FLASH_ATTN.fa4",)),
    ("jax", "mla_interop", "jax.nn.dot_product_attention, V padded", ("FLASH_ATTN.fa4", "FLASHINFER.fa3")),
)
PAIR_ROUNDS = 41


def environment(device: str) -> dict[str, Any]:
    """Machine, versions and date of a run."""
    versions = {name: package_version(name) for name in DISTRIBUTIONS}
    return {
        "machine": machine_name(device),
        "python": platform.python_version(),
        "versions": {name: found for name, found in versions.items() if found != "none"},
        "date": datetime.date.today().isoformat(),
    }


def measure(
    device: str,
    dtypes: Sequence[str],
    problems: Iterable[Problem] | None = None,
    only: str = "",
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run every contender on every problem.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        dtypes: Names of the dtypes to run.
        problems: None: the device's own.
        only: Run only contenders whose framework, name or kernel contains this.
        report: Called with each row, and each of the pairs, as it is ready.
        progress: Told how far it is.

    Returns:
        ``{"environment": ..., "host": [...], "ceiling": [...], "pairs": [...], "rows": [...]}``; times in microseconds a call, errors against
        float64. ``ceiling``: a matrix product in each dtype, which the ``tflops`` of rows are to be compared with. ``pairs``: see :data:`PAIRS`.
    """
    if problems is None:
        problems = GPU_PROBLEMS if device == "cuda" else CPU_PROBLEMS
    rows, parts = [], [(problem, dtype) for problem in problems for dtype in dtypes]
    pairs: list[dict[str, Any]] = []
    for index, (problem, dtype) in enumerate(parts):
        for row in _rows(problem, device, dtype, only, functools.partial(progress, index / (len(parts) + 1))):
            (pairs if "names" in row else rows).append(row)
            report(row)
    progress(len(parts) / (len(parts) + 1), "what surrounds the kernels")
    ceiling = [matrix_product(device, dtype) for dtype in dtypes]  # right after the rows, when the device is as warm as it was for them
    around = {"ceiling": ceiling, "host": host_costs() + call_costs(device, dtypes[0])}
    return {"environment": environment(device), "rows": rows, "pairs": pairs, **around}


def _rows(problem: Problem, device: str, dtype: str, only: str, starting: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The rows of a problem, and its pairs, which have ``names``."""
    starting(f"{problem.name}, {dtype}: the answer in float64")
    q, k, v = inputs(problem, device, dtype)
    truth = expected(problem, q, k, v)
    for framework in ("torch", "jax"):
        if importlib.util.find_spec(framework) is None:
            continue
        try:
            module = importlib.import_module(f"mla_interop.bench.{framework}_contenders")
        except (Exception, SystemExit) as error:  # packages raise whatever they like (oumi#2586)
            why = f"cannot be imported ({type(error).__name__}: {error})"
            yield {"problem": problem.name, "dtype": dtype, "framework": framework, "name": framework, "kernel": "", "failed": why}
            continue
        rows: list[dict[str, Any]] = []
        runs: dict[int, tuple[Callable[[int], None], int]] = {}
        for contender in module.contenders(problem, q, k, v, dtype):
            words = f"{contender.framework} {contender.name} {contender.kernel}"
            if only not in words:
                continue
            starting(f"{problem.name}, {dtype}: {words}")
            head = {"problem": problem.name, "dtype": dtype, "framework": contender.framework, "name": contender.name, "kernel": contender.kernel}
            try:
                head |= errors(contender.result(), truth)
                contender.run(1)
                runs[len(rows)] = contender.run, contender.calls_in_a_run
            except Exception as error:
                head["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append(head)
        times = side_by_side(runs, target_s=0.02)
        starting(f"{problem.name}, {dtype}: what is close, from {framework}")
        yield from _pairs(rows, runs)
        for number, row in enumerate(rows):
            if number in times:
                row |= times[number]
                row["tflops"] = problem.flops / row["us"] * 1e-6
            yield row


def _pairs(rows: list[dict[str, Any]], runs: dict[int, tuple[Callable[[int], None], int]]) -> Iterator[dict[str, Any]]:
    for framework, ours, theirs, kernels in PAIRS:
        for a in runs:
            for b in runs:
                if (rows[a]["framework"], rows[a]["name"], rows[b]["name"]) != (framework, ours, theirs):
                    continue
                if rows[a]["kernel"] not in (kernels or rows[a]["kernel"]) or rows[b]["kernel"] not in ("", rows[a]["kernel"]):
                    continue
                times = side_by_side({a: runs[a], b: runs[b]}, PAIR_ROUNDS, 0.02)
                us = times[a]["us"], times[b]["us"]
                head = {name: rows[a][name] for name in ("problem", "dtype", "framework", "kernel")}
                yield {**head, "names": [ours, theirs], "us": us, "us_min": (times[a]["us_min"], times[b]["us_min"]), "ratio": us[0] / us[1]}


def save(results: dict[str, Any], path: Path) -> None:
    """Write results as JSON, one row a line, so that two files can be compared by eye."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("  " + json.dumps({name: _short(value) for name, value in row.items()}) for row in results["rows"])
    others = {name: value for name, value in results.items() if name != "rows"}
    head = json.dumps(others, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
