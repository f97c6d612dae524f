"""``mla-interop explain``."""

import json
from typing import Annotated

import typer

from mla_interop.cli.output import JSON, dtypes_named, model_named, print_table


def explain(
    model: Annotated[str, typer.Option(help="A model's name; an unknown one lists the known.")] = "deepseek-v3",
    gpu: Annotated[
        str | None, typer.Option(show_default="this machine's", help="A GPU's name (h200, b200, rtx-5090, ...), a compute capability (9.0), or cpu.")
    ] = None,
    dtype: Annotated[str, typer.Option(callback=dtypes_named, help="Of q, k and v.")] = "bfloat16",
    heads: Annotated[int | None, typer.Option(min=1, show_default="the model's", help="Heads on one device.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Query tokens of all sequences, for the choice by measured times.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Number of sequences, likewise.")] = None,
    backend: Annotated[str | None, typer.Option(show_default="selection", help="An explicit choice, or several with commas between.")] = None,
    full: Annotated[bool, typer.Option("--full", help="No causal mask: a context chunk.")] = False,
    assume_installed: Annotated[bool, typer.Option("--assume-installed", help="Leave out what is missing on this machine.")] = False,
    as_json: JSON = False,
) -> None:
    """Which backend is chosen for a problem, and why not the others. Needs no GPU."""
    import contextlib

    from mla_interop import installed, selector
    from mla_interop.doctor import target_settings

    known = model_named(model)
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
        print_table(table)
