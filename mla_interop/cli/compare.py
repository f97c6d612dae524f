"""``mla-interop compare``."""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_interop.cli.output import JSON, NO, check_picture, console, device_named, dtypes_named, model_named, plain, progress_bar
from mla_interop.errors import MLAUnavailableError, input_error

# What rounding explains in every kernel family: out relative (Frobenius norm), lse absolute.
_MAX_ERROR = {"float32": 1e-5, "float64": 1e-5, "float8_e4m3fn": 1e-1, "float8_e5m2": 1e-1}
_MAX_ERROR_16_BITS, _MAX_LSE_ERROR, _SHOWN = 3e-3, 1e-3, 8


def compare(
    file: Annotated[
        Path | None,
        typer.Argument(
            show_default="random numbers", help="A .npz with q, k, v, and perhaps cu_seqlens (or cu_seqlens_q, cu_seqlens_k), out, lse, scale, is_causal."
        ),
    ] = None,
    backend: Annotated[str | None, typer.Option(show_default="all that can serve this here", help="Backends or kernels, with commas between.")] = None,
    frameworks: Annotated[str | None, typer.Option(show_default="torch where it is", help="Call each from torch, jax, numpy; with commas between.")] = None,
    baseline: Annotated[str, typer.Option(help="What the others are compared with: float64, a backend, or `file`.")] = "float64",
    dtype: Annotated[
        str | None, typer.Option(callback=dtypes_named, show_default="the file's; else float32 on a CPU, bfloat16 on a GPU", help="Round q, k and v to it.")
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="16-bit integers in the file are the bits of bfloat16.")] = False,
    model: Annotated[str, typer.Option(help="Whose dimensions random numbers have.")] = "deepseek-v2-lite",
    heads: Annotated[int | None, typer.Option(min=1, show_default="the model's", help="Of random numbers.")] = None,
    tokens: Annotated[str, typer.Option(help="Query tokens of each sequence of random numbers, with commas between.")] = "31,96,200",
    context: Annotated[str | None, typer.Option(show_default="none", help="Earlier keys of each.")] = None,
    seed: Annotated[int, typer.Option(help="Of random numbers.")] = 0,
    scale: Annotated[float | None, typer.Option(show_default="the file's; else D ** -0.5", help="Of the scores.")] = None,
    full: Annotated[bool, typer.Option("--full", help="No causal mask.")] = False,
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one", help="cpu or cuda.")] = None,
    max_error: Annotated[float | None, typer.Option(min=0, show_default="what rounding explains", help="Largest relative error of out to accept.")] = None,
    max_lse_error: Annotated[float, typer.Option(min=0, help="Largest absolute error of lse to accept.")] = _MAX_LSE_ERROR,
    picture: Annotated[Path, typer.Option(help="Where to write the picture; the suffix decides the format.")] = Path("mla-interop-compare.png"),
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Write none.")] = False,
    as_json: JSON = False,
) -> None:
    """The same input through several backends, or your own results: where and how much they differ.

    bfloat16 in a file: float32 with its values and --dtype bfloat16, or its bits as uint16 and --bf16.

    Exit code 1 if a result differs by more than is accepted, or has NaN or infinity where it must not.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same GPU
    from mla_interop import explore

    device = device_named(device)
    if not no_picture and picture.suffix != ".png":  # without matplotlib there is no picture, but an answer
        check_picture(picture)
    given = _inputs(file, dtype, bf16, model, heads, tokens, context, seed, device)
    with progress_bar("comparing", quiet=as_json) as progress:
        found = explore.compare(
            *given.arrays(device),
            backends=backend.split(",") if backend else None,
            frameworks=frameworks.split(",") if frameworks else None,
            results={"file": (given.out, given.lse)} if given.out is not None else None,
            baseline=baseline,
            cu_seqlens_q=given.cu_seqlens_q,
            cu_seqlens_k=given.cu_seqlens_k,
            scale=given.scale if scale is None else scale,
            is_causal=not full and given.is_causal is not False,
            progress=progress,
        )
        progress(0.8, "drawing where they differ")
        drawn = "" if no_picture else _draw(found, picture)
    limit = _MAX_ERROR.get(given.dtype, _MAX_ERROR_16_BITS) if max_error is None else max_error
    deviating = {row["result"]: why for row in found.rows if (why := _deviates(row, limit, max_lse_error))}
    if as_json:
        print(json.dumps(_sound({**found.to_dict(), "accepted": {"out": limit, "lse": max_lse_error}, "deviating": deviating, "picture": drawn}), indent=2))
    else:
        _print(found, deviating, (limit, max_lse_error), drawn)
    if deviating:
        raise typer.Exit(NO)


def _inputs(file: Path | None, dtype: str | None, bf16: bool, model: str, heads: int | None, tokens: str, context: str | None, seed: int, device: str) -> Any:
    from mla_interop.saved_inputs import random_inputs, read_npz
    from mla_interop.selector_config import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise input_error("dtype", repr(dtype), ", ".join(DTYPES))
    if file is not None:
        return read_npz(file, dtype, bf16)
    known, lengths = model_named(model), _integers("tokens", tokens)
    earlier = _integers("context", context) if context else [0] * len(lengths)
    return random_inputs(known, heads or known.num_heads, lengths, earlier, dtype or ("float32" if device == "cpu" else "bfloat16"), seed)


def _integers(name: str, text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise input_error(name, repr(text), "integers with commas between")
    return [int(part) for part in text.split(",")]


def _draw(found: Any, picture: Path) -> str:
    """The path that was written; "" where there is no matplotlib."""
    try:
        figure = found.plot()
    except MLAUnavailableError as error:
        console(stderr=True).print(plain(f"no picture: {error}"))
        return ""
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    return str(picture)


def _deviates(row: dict[str, Any], limit: float, lse_limit: float) -> str:
    """What of a result is not accepted, in words; "" if everything is."""
    said = [f"out error {row['out error']:.1e} (accepted: {limit:.0e})"] if not row["out error"] <= limit else []
    if row["lse error"] is not None and not row["lse error"] <= lse_limit:
        said.append(f"lse error {row['lse error']:.1e} (accepted: {lse_limit:.0e})")
    if row["bad rows"]:
        said.append(f"{row['bad rows']} rows with NaN or infinity, or not 0 and -inf where no key is seen")
    return "; ".join([*said, *([row["note"]] if row["note"] else [])])


def _sound(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become strings."""
    if isinstance(value, dict):
        return {name: _sound(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_sound(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print(found: Any, deviating: dict[str, str], accepted: tuple[float, float], drawn: str) -> None:
    screen = console()
    screen.print(plain(found.title))
    summary = ("result", "out error", "x rounding", "worst row", "lse error", "bad rows")
    screen.print(_table([{name: row[name] for name in summary} for row in found.rows]))
    screen.print("[bold]rows that differ most[/bold]")
    screen.print(_table(found.worst(_SHOWN)))
    heads = sorted(found.heads(), key=lambda row: -max(value for name, value in row.items() if name != "head"))
    screen.print("[bold]heads that differ most[/bold] (root mean square over their rows)")
    screen.print(_table(heads[:_SHOWN]))
    for label, why in found.failed.items():
        screen.print(plain(f"{label} failed: {why}"))
    for label, why in deviating.items():
        screen.print(plain(f"{label} DEVIATES: {why}"))
    if not deviating:
        screen.print(plain(f"Nothing deviates (accepted: out error {accepted[0]:.0e}, lse error {accepted[1]:.0e}, no bad rows)."))
    screen.print(plain("Errors are relative to the usual size of a row; of lse, absolute. x rounding: out error over what rounding to the dtype alone gives."))
    if drawn:
        screen.print(plain(f"picture: {drawn}"), soft_wrap=True)


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from mla_interop.explore.table import cell, columns

    shown = Table(box=None, pad_edge=False)
    names = columns(rows)
    for name in names:
        shown.add_column(name, justify="left" if name == "result" else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(plain(cell(row.get(name))) for name in names))
    return shown
