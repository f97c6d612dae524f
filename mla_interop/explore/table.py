"""What every answer of the exploration API can do: show itself as text and as HTML, and give its numbers away."""

import html
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mla_interop.errors import MLAUnavailableError

Row = dict[str, Any]


class Explored:
    """Base of the answers. A subclass has ``title`` and ``rows``; it draws in ``plot``."""

    title: str
    rows: list[Row]

    def __str__(self) -> str:
        return "\n".join([self.title, *text_table(self.rows)])

    def _repr_html_(self) -> str:
        return html_table(self.rows, self.title)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON, which knows no infinity: numbers that are not finite are words."""
        return plain({"title": self.title, "rows": self.rows})

    def to_dataframe(self) -> Any:
        """The rows as a ``pandas.DataFrame``.

        Raises:
            MLAUnavailableError: pandas is not installed; ``rows`` has the same numbers.
        """
        return data_frame(self.rows)

    def plot(self) -> Any:
        """A picture: a matplotlib Figure, made without pyplot, that shows itself in a notebook.

        Raises:
            MLAUnavailableError: matplotlib is not installed.
        """
        raise NotImplementedError


def plain(value: Any) -> Any:
    """``value`` with its numbers that are not finite as words (``"inf"``, ``"nan"``)."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """``rows`` as a ``pandas.DataFrame``; pandas is imported here only."""
    return needed("pandas").DataFrame(list(rows))


def needed(module: str, extra: str = "notebook") -> Any:
    """An optional module, or one of ours that needs matplotlib.

    Raises:
        MLAUnavailableError: It cannot be imported; with what to install.
    """
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # packages raise whatever they like (oumi#2586)
        name, why = getattr(error, "name", None) or module, str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise MLAUnavailableError(f"{name}: cannot be imported ({why}); install it with: pip install 'mla-interop[{extra}]'") from error


def cell(value: Any) -> str:
    """A value in few characters: three digits of a number, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-2 or abs(value) >= 1e6 else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that any row has something in, in the order they first appear."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) not in (None, "") for row in rows)]


def text_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of aligned columns; numbers to the right."""
    names = columns(rows)
    cells = [[cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) if cells else len(name) for i, name in enumerate(names)]
    right = [any(_is_number(row.get(name)) for row in rows) for name in names]
    lines = [[text.rjust(width) if to_right else text.ljust(width) for text, width, to_right in zip(line, widths, right)] for line in (names, *cells)]
    return ["  ".join(line).rstrip() for line in lines]


def html_table(rows: Sequence[Mapping[str, Any]], caption: str, shades: Mapping[tuple[int, str], str] | None = None) -> str:
    """A table; ``shades`` gives cells, by row and column, a background colour."""
    names = columns(rows)
    head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in names)
    lines = []
    for i, row in enumerate(rows):
        tds = []
        for name in names:
            style = "text-align:right" if _is_number(row.get(name)) else "text-align:left"
            shade = (shades or {}).get((i, name))
            style += f";background:{shade};color:black" if shade else ""
            tds.append(f"<td style='{style}'>{html.escape(cell(row.get(name)))}</td>")
        lines.append(f"<tr>{''.join(tds)}</tr>")
    title = f"<caption style='text-align:left;caption-side:top'>{html.escape(caption)}</caption>"
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def text_failed(failed: Mapping[str, str]) -> list[str]:
    """A line for each backend that failed."""
    return [f"{label} failed: {why}" for label, why in failed.items()]


def html_failed(failed: Mapping[str, str]) -> str:
    """A table of the backends that failed, if any did."""
    return html_table([{"failed": label, "why": why} for label, why in failed.items()], "") if failed else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
