"""``mla-interop doctor``."""

import json
from typing import Annotated, Any

import typer

from mla_interop.cli.output import JSON, NO, console, plain, print_table, progress_bar


def doctor(
    self_check: Annotated[bool, typer.Option("--self-check", help="Also run each available backend, and compare it with float64.")] = False,
    as_json: JSON = False,
) -> None:
    """Versions, GPUs, backends, settings and caches of this machine; imports nothing that may be broken.

    The exit code is 1 where a self-check deviates.
    """
    from mla_interop import doctor

    with progress_bar("looking around", quiet=as_json) as progress:
        found = doctor.look()
        checks = doctor.self_checks(progress) if self_check else []
    if as_json:
        made = {**found, "backends": [table.to_dict() for table in found["backends"]]}
        print(json.dumps(made | ({"self_check": [check.to_dict() for check in checks]} if self_check else {}), indent=2))
    else:
        _print(found, checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(NO)


def _print(found: dict[str, Any], checks: list[Any]) -> None:
    from rich.table import Table

    from mla_interop import doctor

    screen = console()
    sections = doctor.sections(found)
    width = min(32, max(len(name) for values in sections.values() for name in values) + 2)
    for title, values in sections.items():
        screen.print(f"[bold]{title}[/bold]")
        shown = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        shown.add_column("", min_width=width, max_width=width, overflow="fold")
        shown.add_column("", overflow="fold")
        for name, value in values.items():
            shown.add_row(plain(f"  {name}"), plain(str(value)))
        screen.print(shown)
    screen.print()
    for table in found["backends"]:
        print_table(table)
    for check in checks:
        screen.print(plain(str(check)))
