"""Times every kernel that this machine has, at a few shapes, and keeps them for measured selection: under a minute."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mla_interop.bench.measured_table import render, write
from mla_interop.bench.problems import Problem, equal
from mla_interop.bench.run import environment
from mla_interop.bench.timing import side_by_side
from mla_interop.capability import device_capability, machine_name
from mla_interop.dimensions import Model
from mla_interop.errors import MLAUnsupportedError
from mla_interop.measured import device_key, user_table
from mla_interop.progress import Progress, silent, told, within
from mla_interop.selector import clear_cache, explain, kernels_of
from mla_interop.selector_config import MLAPrefillSelectorConfig

_GPU_SHAPES = ((512, 1), (2048, 1), (4096, 1), (1024, 8))  # tokens of a sequence, sequences
_CPU_SHAPES = ((128, 1), (512, 1), (128, 8))


def tune(
    model: Model,
    device: str,
    dtype: str,
    heads: tuple[int, ...],
    seconds: float,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    progress: Progress = silent,
) -> Path:
    """Measure, and write this machine's table, from which the next choice is made.

    Args:
        model: Whose head dimensions are measured.
        device: ``"cuda"`` or ``"cpu"``.
        dtype: Of q, k and v.
        heads: Numbers of heads.
        seconds: When to stop: what could not be measured by then is left out. A kernel that has to be built first may take longer.
        report: Called with each row of results, in the form of ``mla_interop.bench.run``, as it is ready.
        progress: Told how far it is.

    Returns:
        The path of the table.

    Raises:
        MLAUnsupportedError: Nothing could be measured, with what failed.
    """
    end, rows = time.monotonic() + seconds, []
    problems = [equal(count, tokens, batch) for tokens, batch in (_CPU_SHAPES if device == "cpu" else _GPU_SHAPES) for count in heads]
    for index, problem in enumerate(problems):
        for row in _rows(model, problem, device, dtype, end, within(progress, index / len(problems), (index + 1) / len(problems))):
            rows.append(row)
            report(row)
    late = time.monotonic() > end
    if not any("us" in row for row in rows):
        nothing = f"the {seconds:.0f} seconds were over before the first kernel was" if late else "no kernel can serve it (`mla-interop explain` says why)"
        failed = "; ".join(f"{row['kernel']}: {row['failed']}" for row in rows) or nothing
        raise MLAUnsupportedError(f"nothing could be measured on {device} in {dtype}: {failed}")
    results = {"environment": {**environment(device), "device": device_key(device, device_capability(device))}, "rows": rows}
    path = user_table(machine_name(device))
    write(render(results, "mla-interop tune"), path)
    clear_cache()
    return path


def _rows(model: Model, problem: Problem, device: str, dtype: str, end: float, progress: Progress) -> Iterator[dict[str, Any]]:
    """One row for each kernel; REFERENCE is measured on a CPU, where it can be the best there is."""
    import torch

    import torch_side

    dims = model.dimensions.qk_head_dim, model.dimensions.v_head_dim
    config = MLAPrefillSelectorConfig(dtype=dtype, dimensions=model.dimensions, num_heads=problem.heads, device_type=device, scale=dims[0] ** -0.5)
    metadata = torch_side.prepare_metadata(problem.cu_seqlens, device=device)
    kind = getattr(torch, dtype)
    q, k, v = (torch.randn(problem.tokens, problem.heads, width, device=device).to(kind) for width in (dims[0], dims[0], dims[1]))
    valid = [row.backend for row in explain(config).rows if row.valid and (device == "cpu" or row.backend != "REFERENCE")]
    kernels = [f"{name}.{kernel.variant}" for name in valid for kernel in kernels_of(name, config)]
    head = {"problem": problem.name, "dtype": dtype, "dims": dims, "framework": "torch", "name": "mla_interop"}
    runs: dict[str, tuple[Callable[[int], None], int]] = {}
    for wanted in told(kernels, progress, lambda kernel: f"{problem.name}, {kernel}"):
        if time.monotonic() > end:
            break

        def run(count: int, wanted: str = wanted) -> None:
            for _ in range(count):
                torch_side.mla_prefill(q, k, v, metadata=metadata, backend=wanted)
            if device == "cuda":
                torch.cuda.synchronize()

        try:
            run(1)
            runs[wanted] = run, 1
        except Exception as error:
            yield {**head, "kernel": wanted, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    for wanted, measured in side_by_side(runs, repeats=3, target_s=0.004).items():
        yield {**head, "kernel": wanted, **measured}
