"""``mla-interop cache``: what was built and kept."""

import json
from typing import Annotated, Any

import typer

from mla_interop.cli.output import JSON, NO, console, mib, plain

cache = typer.Typer(help="Kernels that were built, and times that were measured: what is kept, and where.", no_args_is_help=True)

NAMES = Annotated[list[str] | None, typer.Argument(metavar="[NAMES]...", show_default="all", help="Starts of names, as `cache list` shows them.")]


@cache.command("list", epilog="Example: mla-interop cache list fa4-sm_90a --json")
def show(names: NAMES = None, as_json: JSON = False) -> None:
    """Names, sizes, ages, and what each was built for."""
    from mla_interop.kernels.build import cache_dir

    found = _entries(names)
    if as_json:
        print(json.dumps({"folder": str(cache_dir()), "bytes": sum(entry.bytes for entry in found), "entries": [e.to_dict() for e in found]}, indent=2))
        return
    screen = console()
    screen.print(_table(found))
    screen.print(plain(f"{len(found)} entries, {mib(sum(entry.bytes for entry in found))}, in {cache_dir()}"))


@cache.command("clear", epilog="Example: mla-interop cache clear cpu_sdpa --yes")
def clear(
    names: NAMES = None,
    older_than: Annotated[float, typer.Option(min=0, help="Only what is older than so many days.")] = 0,
    times: Annotated[bool, typer.Option("--times", help="Also the times that `tune` measured.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JSON = False,
) -> None:
    """Remove what was built; it is built again when it is needed. Exit code 1 if something could not be removed, or the answer was no."""
    from mla_interop.kernels.cache import remove

    found = [entry for entry in _entries(names) if entry.seconds >= older_than * 86400 and (times or entry.kind != "times")]
    if found and not yes:
        console(stderr=True).print(_table(found))
        typer.confirm(f"Remove these {len(found)} entries, {mib(sum(entry.bytes for entry in found))}?", abort=True, err=True)
    removed, kept = remove(found)
    if as_json:
        print(json.dumps({"removed": [entry.to_dict() for entry in removed], "kept": kept}, indent=2))
    else:
        print(f"removed {len(removed)} entries, {mib(sum(entry.bytes for entry in removed))}")
        for name, why in kept.items():
            print(f"kept {name}: {why}")
    if kept:
        raise typer.Exit(NO)


def _entries(names: list[str] | None) -> list[Any]:
    from mla_interop.kernels.cache import entries

    return [entry for entry in entries() if not names or entry.name.startswith(tuple(names))]


def _table(found: list[Any]) -> Any:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("name", max_width=34, overflow="fold")
    shown.add_column("size", justify="right", no_wrap=True)
    shown.add_column("age", justify="right", no_wrap=True)
    shown.add_column("what for", overflow="fold", ratio=1)
    for entry in found:
        shown.add_row(plain(entry.name), mib(entry.bytes), _age(entry.seconds), plain(entry.purpose))
    return shown


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
