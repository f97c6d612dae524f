"""``mla-interop demo``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_interop.cli.output import JSON, console, dtypes_named, progress_bar, require


def demo(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[TEXT_FILES]...", show_default="the README and docs", help="Text files, one sequence each.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model's name; an unknown one lists the known.")] = "deepseek-v2-lite",
    config: Annotated[Path | None, typer.Option(help="config.json of any MLA model in the Hugging Face format, instead of --model.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo-output"),
    max_tokens: Annotated[int, typer.Option(min=1, help="Where each text is cut.")] = 1024,
    dtype: Annotated[
        str | None, typer.Option(callback=dtypes_named, show_default="float32 on a CPU, else bfloat16", help="float32, bfloat16 or float16.")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one", help="cpu or cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    as_json: JSON = False,
) -> None:
    """One attention layer of a real model's geometry, on real text, from both frameworks.

    The weights are random and the tokens are the text's bytes, so nothing is downloaded.
    """
    for module in ("torch", "transformers", "matplotlib"):
        require(module, "demo")
    from mla_interop.demo.run import run_demo

    settings: Any = dict(model=model, config=config, output=output, max_tokens=max_tokens, dtype=dtype, device=device, seed=seed)
    with progress_bar("reading the texts", quiet=as_json) as progress:
        report = run_demo(files or (), **settings, progress=progress)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        report.print(console())
