"""``mla-interop tune``."""

from typing import Annotated, Any

import typer

from mla_interop.cli.output import JSON, device_named, dtypes_named, model_named, progress_bar, require
from mla_interop.errors import input_error


def tune(
    model: Annotated[str, typer.Option(help="Whose head dimensions; an unknown name lists the known.")] = "deepseek-v3",
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one", help="cpu or cuda.")] = None,
    dtype: Annotated[str, typer.Option(callback=dtypes_named, help="Of q, k and v.")] = "bfloat16",
    heads: Annotated[str | None, typer.Option(show_default="16,128; on a CPU 8", help="Numbers of heads, with commas between.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="When to stop. A kernel that must be built first may take longer.")] = 40,
    as_json: JSON = False,
) -> None:
    """Measure every kernel on this machine, and keep the times: choices are made by them from then on."""
    require("torch", "torch")
    from mla_interop.bench.tune import tune

    device = device_named(device)
    counts = heads or ("8" if device == "cpu" else "16,128")
    if not all(count.isdigit() and int(count) for count in counts.split(",")):
        raise input_error("heads", repr(heads), "positive integers with commas between")

    def said(row: dict[str, Any]) -> None:
        if not as_json:
            print(
                f"{row['problem']:<16} {row['kernel']:<24} {row['us']:10.1f} us" if "us" in row else f"{row['problem']:<16} {row['kernel']:<24} {row['failed']}"
            )

    with progress_bar("looking around", quiet=as_json) as progress:
        path = tune(model_named(model), device, dtype, tuple(map(int, counts.split(","))), seconds, said, progress)
    print(path.read_text() if as_json else f"kept in {path}", end="" if as_json else "\n")
