"""``mla-interop bench``."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_interop.cli.output import JSON, check_picture, device_named, dtypes_named, progress_bar, require
from mla_interop.errors import input_error
from mla_interop.progress import told, within


def bench(
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one", help="cpu or cuda.")] = None,
    dtype: Annotated[str, typer.Option(callback=dtypes_named, help="Of q, k and v; several with commas between.")] = "bfloat16",
    only: Annotated[str, typer.Option(help="Run only what has this in its framework, name or kernel.")] = "",
    problems: Annotated[str | None, typer.Option(show_default="all", help="Names as in the tables (128x4096x1), with commas between.")] = None,
    soak: Annotated[bool, typer.Option("--soak", help="Also two million calls inside jax.jit and a million from torch, and whether the process grew.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the results as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the times, and beside it TFLOP/s and overheads; the suffix decides the format.")] = None,
    as_json: JSON = False,
) -> None:
    """Every kernel from both frameworks, and the peers that are installed, on the same inputs in one run."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same GPU
    require("torch", "torch")
    if soak:
        require("jax", "jax")
    from mla_interop.bench import overheads, run
    from mla_interop.bench.problems import CPU_PROBLEMS, GPU_PROBLEMS

    device = device_named(device)
    known = {problem.name: problem for problem in (GPU_PROBLEMS if device == "cuda" else CPU_PROBLEMS)}
    names = problems.split(",") if problems else [*known]
    if not set(names) <= set(known):
        raise input_error("problems", problems, ", ".join(known))

    if picture is not None:
        check_picture(picture)
    for path in (output, picture):  # before anything is measured, not after
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
    shown: list[tuple[str, str]] = []

    def said(row: dict[str, Any]) -> None:
        if as_json:
            return
        if (row["problem"], row["dtype"]) not in shown[-1:]:
            shown.append((row["problem"], row["dtype"]))
            print(f"{row['problem']}, {row['dtype']}")
        took = f"{row['us']:>11,.1f} us" if "us" in row else row["failed"]
        print(f"  {row['framework']:<5} {' '.join((row['name'], row['kernel'])):<57} {took}")

    with progress_bar("looking around", quiet=as_json) as progress:
        results = run.measure(device, dtype.split(","), [known[name] for name in names], only, said, within(progress, 0.0, 0.5 if soak else 1.0))
        if soak:
            soaks = {"inside jax.jit": overheads.soak, "from torch": overheads.torch_soak}
            each = told([*soaks.items()], within(progress, 0.5, 1.0), lambda item: f"very many calls {item[0]}")
            results["soak"] = [call(device) for _, call in each]
    if output is not None:
        run.save(results, output)
    if picture is not None:
        _draw(results, picture)
    if as_json:
        print(json.dumps(results, indent=2))
    elif output is None:
        print("Not kept: --output FILE writes these times, --picture FILE draws them.")


def _draw(results: dict[str, Any], picture: Path) -> None:
    """The times; and, with a word in the name, what of the device's arithmetic they use, and what a call takes beyond its kernel."""
    from mla_interop.explore.speed import Timing

    environment = results["environment"]
    found = Timing.of_results(f"{environment['machine']}, {environment['date']}", results)
    for what, name in (("us", ""), ("tflops", "-tflops"), ("overhead_us", "-overhead")):
        if any(what in row for row in found.rows):
            found.plot(what).savefig(picture.with_stem(picture.stem + name), dpi=130)
