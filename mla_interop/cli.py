"""The ``mla-interop`` command."""

import json
import sys
from pathlib import Path
from typing import Annotated

from mla_interop.errors import MLAError

try:
    import typer
except ImportError as error:
    sys.exit(f"mla-interop: the command needs typer and rich ({error}); install them with: pip install 'mla-interop[cli]'")

app = typer.Typer(help="MLA prefill attention from PyTorch and from JAX, through one core.", no_args_is_help=True, add_completion=False)


@app.callback()
def commands() -> None:
    """Keeps the name of a command required, even while there is only one."""


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


def main() -> None:
    """Entry point: an error that we raise on purpose is told in words, without a traceback."""
    try:
        app()
    except MLAError as error:
        sys.exit(f"mla-interop: {error}")
