"""``mla-interop backends``."""

import json
from typing import Annotated

import typer

from mla_interop.cli.output import JSON, print_table


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
        print_table(table)
