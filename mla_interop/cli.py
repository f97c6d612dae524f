"""The ``mla-interop`` command."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from mla_interop.errors import MLAError, input_error

try:
    import typer
except ImportError as error:
    sys.exit(f"mla-interop: the command needs typer and rich ({error}); install them with: pip install 'mla-interop[cli]'")

app = typer.Typer(help="MLA prefill attention from PyTorch and from JAX, through one core.", no_args_is_help=True, add_completion=False)


@app.command()
def demo(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[TEXT_FILES]...", help="Text files, one sequence each. [default: the README and docs]")] = None,
    model: Annotated[str, typer.Option(help="A model's name; an unknown one lists the known.")] = "deepseek-v2-lite",
    config: Annotated[Path | None, typer.Option(help="config.json of any MLA model in the Hugging Face format, instead of --model.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo-output"),
    max_tokens: Annotated[int, typer.Option(min=1, help="Where each text is cut.")] = 1024,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. [default: float32 on a CPU, else bfloat16]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """One attention layer of a real model's geometry, on real text, from both frameworks.

    The weights are random and the tokens are the text's bytes, so nothing is downloaded.
    """
    try:
        from mla_interop.demo.run import run_demo
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"the demo needs {error.name}; install it with: pip install 'mla-interop[demo]'", param_hint="demo") from error
    from rich.console import Console

    report = run_demo(files or (), model=model, config=config, output=output, max_tokens=max_tokens, dtype=dtype, device=device, seed=seed)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console = Console()
        console.width = min(console.width, 100) if console.is_terminal else 100
        report.print(console)


JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def backends(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/backends.md: all that is supported, whatever is installed.")] = False,
    as_json: JSON = False,
) -> None:
    """Which backends there are, and what can serve DeepSeek's dimensions on this machine."""
    from mla_interop import doctor, support

    if markdown:
        print(support.markdown(), end="")
        return
    tables = doctor.tables(doctor.gpus())
    if as_json:
        print(json.dumps([table.to_dict() for table in tables], indent=2))
        return
    for table in tables:
        _print_table(table)


@app.command()
def explain(
    model: Annotated[str, typer.Option(help="A model's name; an unknown one lists the known.")] = "deepseek-v3",
    gpu: Annotated[
        str | None, typer.Option(help="A GPU's name (h200, b200, rtx-5090, ...), a compute capability (9.0), or cpu. [default: this machine's]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "bfloat16",
    heads: Annotated[int | None, typer.Option(min=1, help="Heads on one device. [default: the model's]")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Query tokens of all sequences, for the choice by measured times.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Number of sequences, likewise.")] = None,
    backend: Annotated[str | None, typer.Option(help="An explicit choice, or several with commas between.")] = None,
    full: Annotated[bool, typer.Option("--full", help="No causal mask: a context chunk.")] = False,
    assume_installed: Annotated[bool, typer.Option("--assume-installed", help="Leave out what is missing on this machine.")] = False,
    as_json: JSON = False,
) -> None:
    """Which backend is chosen for a problem, and why not the others. Needs no GPU."""
    import contextlib

    from mla_interop import installed, selector
    from mla_interop.doctor import target_settings

    known = _model(model)
    config = selector.MLAPrefillSelectorConfig(
        dtype=dtype,
        dimensions=known.dimensions,
        num_heads=heads or known.num_heads,
        is_causal=not full,
        num_tokens=tokens,
        num_seqs=sequences,
        **target_settings(gpu),
    )
    with installed.assume_installed() if assume_installed else contextlib.nullcontext():
        table = selector.explain(config, backend.split(",") if backend else None)
    if as_json:
        print(json.dumps(table.to_dict(), indent=2))
    else:
        _print_table(table)


@app.command()
def tune(
    model: Annotated[str, typer.Option(help="Whose head dimensions; an unknown name lists the known.")] = "deepseek-v3",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")] = None,
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "bfloat16",
    heads: Annotated[str | None, typer.Option(help="Numbers of heads, with commas between. [default: 16,128; on a CPU 8]")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="When to stop. A kernel that must be built first may take longer.")] = 40,
    as_json: JSON = False,
) -> None:
    """Measure every kernel on this machine, and keep the times: choices are made by them from then on."""
    from mla_interop.bench.tune import tune
    from mla_interop.doctor import gpus

    device = device or ("cuda" if gpus() else "cpu")
    counts = heads or ("8" if device == "cpu" else "16,128")
    if not all(count.isdigit() and int(count) for count in counts.split(",")):
        raise input_error("heads", repr(heads), "positive integers with commas between")

    def said(row: dict[str, Any]) -> None:
        if not as_json:
            print(
                f"{row['problem']:<16} {row['kernel']:<24} {row['us']:10.1f} us" if "us" in row else f"{row['problem']:<16} {row['kernel']:<24} {row['failed']}"
            )

    path = tune(_model(model), device, dtype, tuple(map(int, counts.split(","))), seconds, said)
    print(path.read_text() if as_json else f"kept in {path}", end="" if as_json else "\n")


@app.command()
def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")] = None,
    dtype: Annotated[str, typer.Option(help="Of q, k and v; several with commas between.")] = "bfloat16",
    only: Annotated[str, typer.Option(help="Run only what has this in its framework, name or kernel.")] = "",
    problems: Annotated[str | None, typer.Option(help="Names as in the tables (128x4096x1), with commas between. [default: all]")] = None,
    soak: Annotated[bool, typer.Option("--soak", help="Also a million calls each, and whether the process grew.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the results as JSON.")] = None,
    as_json: JSON = False,
) -> None:
    """Every kernel from both frameworks, and the peers that are installed, on the same inputs in one run."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same GPU
    from mla_interop.bench import overheads, run
    from mla_interop.bench.problems import CPU_PROBLEMS, GPU_PROBLEMS
    from mla_interop.doctor import gpus

    device = device or ("cuda" if gpus() else "cpu")
    known = {problem.name: problem for problem in (GPU_PROBLEMS if device == "cuda" else CPU_PROBLEMS)}
    names = problems.split(",") if problems else [*known]
    if not set(names) <= set(known):
        raise input_error("problems", problems, ", ".join(known))

    def said(row: dict[str, Any]) -> None:
        if not as_json:
            took = f"{row['us']:10.1f} us" if "us" in row else row["failed"]
            print(f"{row['problem']:<18} {row['dtype']:<9} {row['framework']:<6} {row['name']:<42} {row['kernel']:<22} {took}")

    results = run.measure(device, dtype.split(","), [known[name] for name in names], only, said)
    if soak:
        results["soak"] = [overheads.soak(device), overheads.torch_soak(device)]
    if output is not None:
        run.save(results, output)
    if as_json:
        print(json.dumps(results, indent=2))


@app.command()
def doctor(
    self_check: Annotated[bool, typer.Option("--self-check", help="Also run each available backend, and compare it with float64.")] = False,
    as_json: JSON = False,
) -> None:
    """Versions, GPUs, backends, settings and caches of this machine."""
    from mla_interop import doctor

    report = doctor.report()
    checks = doctor.self_checks() if self_check else []
    if as_json:
        print(json.dumps({**report, **({"self_check": [check.to_dict() for check in checks]} if self_check else {})}, indent=2))
    else:
        _print_doctor(report, checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _print_doctor(report: dict[str, Any], checks: list[Any]) -> None:
    from mla_interop import doctor

    console = _console()
    for title, values in doctor.sections(report).items():
        console.print(f"[bold]{title}[/bold]")
        for name, value in values.items():
            console.print(f"  {name:<24} {value}", markup=False)
    for table in doctor.tables(doctor.gpus()):
        _print_table(table)
    for check in checks:
        console.print(_plain(str(check)))


def _model(name: str) -> Any:
    from mla_interop.dimensions import MODELS

    if name not in MODELS:
        raise input_error("model", repr(name), ", ".join(MODELS))
    return MODELS[name]


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, 110) if console.is_terminal else 80
    return console


def _print_table(table: Any) -> None:
    from rich.table import Table

    shown = Table(title=table.problem, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, fold in (("", False), ("backend", False), ("kernel", False), ("why", True)):
        shown.add_column(name, no_wrap=not fold, overflow="fold")
    for cells in table.cells():
        shown.add_row(*map(_plain, cells))
    console = _console()
    console.print(shown)
    console.print(_plain("\n".join([*table.footer(), f"order: {', '.join(table.order)}", ""])))


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def main() -> None:
    """Entry point: an error that we raise on purpose is told in words, without a traceback."""
    try:
        app()
    except MLAError as error:
        sys.exit(f"mla-interop: {error}")
