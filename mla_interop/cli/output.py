"""What every command shares: options, the console, tables, and how a package that a command needs is asked for."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_interop.errors import MLAUnavailableError, input_error
from mla_interop.progress import Progress, silent

JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]

OK, NO, BAD_USE = 0, 1, 2
"""Exit codes: done; done, and the answer is no (something deviates, or could not be had); asked in a way that makes no sense."""


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}
_MARKS = {"->": "bold green", "ok": "green", "no": "yellow"}


def model_named(name: str) -> Any:
    """The :class:`~mla_interop.dimensions.Model` of that name.

    Raises:
        MLAInputError: It is unknown; the text lists the known ones.
    """
    from mla_interop.dimensions import MODELS

    if name not in MODELS:
        raise input_error("model", repr(name), ", ".join(MODELS))
    return MODELS[name]


def dtypes_named(names: str | None) -> str | None:
    """Names of dtypes with commas between, those in full that serving commands shorten (``bf16``)."""
    return names and ",".join(_SHORT.get(name.strip().lower(), name.strip()) for name in names.split(","))


def device_named(name: str | None) -> str:
    """``"cpu"`` or ``"cuda"``; None: cuda where there is a GPU.

    Raises:
        MLAInputError: It is neither, or this machine has no GPU.
    """
    from mla_interop.doctor import gpus

    if name not in (None, "cpu", "cuda"):
        raise input_error("device", repr(name), "cpu or cuda")
    here = "cuda" if gpus() else "cpu"
    if name == "cuda" and here == "cpu":
        raise input_error("device", repr(name), "cpu on this machine", "No CUDA device was found; `mla-interop doctor` says what was.")
    return name or here


def require(module: str, extra: str) -> Any:
    """A module that a command cannot do without, imported.

    Raises:
        MLAUnavailableError: It is not installed, or raises when it is imported: packages raise whatever they like (oumi#2586).
    """
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        why = "is not installed" if missing else f"cannot be imported ({type(error).__name__}: {error})"
        raise MLAUnavailableError(f"this command needs {module}, which {why}; install it with: pip install 'mla-interop[{extra}]'") from error


def check_picture(path: Path) -> None:
    """Whether a picture can be written in the format that the suffix names; asked before anything is computed.

    Raises:
        MLAInputError: matplotlib does not know it.
        MLAUnavailableError: matplotlib cannot be imported.
    """
    require("matplotlib", "notebook")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise input_error("picture", repr(str(path)), f"a path that ends in {', '.join(f'.{name}' for name in known)}")


def console(stderr: bool = False) -> Any:
    """A console of at most 110 columns; 80 where no terminal says otherwise."""
    from rich.console import Console

    made = Console(highlight=False, stderr=stderr)
    made.width = min(made.width, 110) if made.is_terminal else 80
    return made


@contextlib.contextmanager
def progress_bar(what: str, quiet: bool = False) -> Iterator[Progress]:
    """A bar while something takes long, with what is being done and how much is: on a terminal's stderr, and gone at the end.

    stdout holds results alone, so a pipe or file there gets nothing of it. Until the first share is known, the bar only moves.
    """
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield silent
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (text, BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn())
    # Results that are printed meanwhile go above the bar; but they are stdout's, where that is not this terminal.
    with Bar(*columns, console=console(stderr=True), transient=True, expand=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=None)
        # A step is shown however short it is.
        yield lambda share, what: bar.update(task, total=1.0, completed=share, description=what, refresh=True)


def print_table(table: Any) -> None:
    """A selection table, within the console's width."""
    from rich.table import Table

    shown = Table(title=table.problem, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, fold in (("", False), ("backend", False), ("kernel", False), ("why", True)):
        shown.add_column(name, no_wrap=not fold, overflow="fold")
    for mark, backend, kernel, why in table.cells():
        shown.add_row(plain(mark, _MARKS[mark]), plain(backend), plain(kernel), plain("\n".join(why)))
    screen = console()
    screen.print(shown)
    screen.print(plain("\n".join([*table.footer(), f"order: {', '.join(table.order)}", ""])))


def plain(text: str, style: str = "") -> Any:
    """Text in which rich looks for no markup."""
    from rich.text import Text

    return Text(text, style)


def mib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**20:.2f} MiB"
