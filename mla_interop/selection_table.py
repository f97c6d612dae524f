"""The table that ``explain`` gives: every backend, whether it can serve, its reasons, and which one is chosen."""

import html
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mla_interop.backends.base import Kernel
from mla_interop.measured import Times

_WIDTH = 110  # columns


@dataclass(frozen=True)
class Row:
    """One backend's line. ``instead_of``: where its kernel is Python, the one that it would prefer, and why that cannot be had."""

    backend: str
    valid: bool
    reasons: tuple[str, ...]
    kernel: str
    variant: str
    kind: str
    copies: tuple[str, ...]
    versions: tuple[str, ...]
    us: float | None = None
    instead_of: str = ""

    @classmethod
    def of(cls, backend: str, reasons: tuple[str, ...], kernel: Kernel | None, us: float | None = None, refused: Sequence[str] = ()) -> "Row":
        """From a backend's reasons, its preferred kernel (None where it has none), the microseconds that were measured for it, and why kernels
        that it would prefer are not to be had."""
        if kernel is None:
            return cls(backend, False, reasons, "", "", "", (), ())
        instead_of = refused[0] if refused else ""
        return cls(backend, not reasons, reasons, kernel.name, kernel.variant, kernel.kind, copies_of(kernel), kernel.versions, us, instead_of)


def copies_of(kernel: Kernel) -> tuple[str, ...]:
    """What is copied in a call, in words: by the kernel itself, and by the frontend where the kernel cannot read strides."""
    packed = sorted({"q", "k", "v"} - kernel.strided)
    strided = () if not packed or kernel.kind == "array" else (f"{', '.join(packed)} made contiguous if strided",)
    return (*kernel.copies, *strided)


@dataclass(frozen=True)
class SelectionTable:
    """The answer to "which backends exist here, which one is used, and why". Prints as text, shows as HTML in a notebook."""

    config: Any
    rows: tuple[Row, ...]
    chosen: str | None
    explicit: tuple[str, ...]
    order: tuple[str, ...]
    measured: Times | None = None

    def __str__(self) -> str:
        head = f"MLA prefill, {self.problem}"
        lines = [f"{self._mark(row)} {row.backend:<14} {row.kind or '-':<9} {self._why(row)}" for row in self.rows]
        return "\n".join(
            [head, *(textwrap.fill(line, _WIDTH, subsequent_indent=" " * 28, break_long_words=False, break_on_hyphens=False) for line in lines), *self.footer()]
        )

    def _repr_html_(self) -> str:
        cells = [[self._mark(row), row.backend, row.kind, self._why(row)] for row in self.rows]
        body = "".join("<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        header = "".join(f"<th style='text-align:left'>{title}</th>" for title in ("", "backend", "kernel", "why"))
        caption = f"<caption style='text-align:left;caption-side:top'>{html.escape(self.problem)}</caption>"
        return f"<table>{caption}<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "problem": {**asdict(self.config), "capability": str(self.config.capability) if self.config.capability else None},
            "chosen": self.chosen,
            "order": list(self.order),
            "measured": None if self.measured is None else self.measured._asdict(),
            "backends": [asdict(row) for row in self.rows],
        }

    def refusal(self, tried: dict[str, str] | None = None) -> str:
        """Why nothing (or not what was asked for) can serve, with every reason."""
        asked = f"backend {', '.join(self.explicit)} cannot serve" if self.explicit else "no backend can serve"
        lines = [f"  {row.backend}: {'; '.join(row.reasons)}" for row in self.rows if row.reasons and (not self.explicit or row.backend in self.explicit)]
        lines += [f"  {name}: {reason}" for name, reason in (tried or {}).items()]
        left_out = [] if self.explicit else [row.backend for row in self.rows if row.valid and row.backend not in self.order]
        lines += [f"  {name}: could, but is not in the order that was set ({', '.join(self.order)})" for name in left_out]
        others = [row.backend for row in self.rows if row.valid and row.backend in self.order and row.backend not in self.explicit]
        advice = f"\nCould serve it: {', '.join(others)} (fallback=True chooses automatically)." if self.explicit and others else ""
        return "\n".join([f"{asked} {self.problem}:", *lines]) + advice

    def cells(self) -> list[tuple[str, str, str, list[str]]]:
        """A row for each backend: its mark, its name, its kernel's kind, and why: one line, or each reason against it."""
        return [(self._mark(row), row.backend, row.kind, [self._why(row)] if row.valid else list(row.reasons)) for row in self.rows]

    def footer(self) -> list[str]:
        """Where the measured times come from, if any decided."""
        return [] if self.measured is None else [f"measured: {self.measured}"]

    @property
    def problem(self) -> str:
        """The problem in words."""
        config = self.config
        where = config.device_type if config.capability is None else f"{config.device_type} {config.capability}"
        mask = "causal" if config.is_causal else "full"
        dims = f"{config.dimensions.qk_head_dim}/{config.dimensions.v_head_dim}"
        lengths = ", lengths on the device only" if config.traced else ""
        return f"{where}, {config.dtype}, {config.num_heads} heads of {dims}, {mask}{', lse' if config.needs_lse else ''}{lengths}"

    def _mark(self, row: Row) -> str:
        return "->" if row.backend == self.chosen else ("ok" if row.valid else "no")

    def _why(self, row: Row) -> str:
        if not row.valid:
            return "; ".join(row.reasons)
        times = () if row.us is None else (f"{row.us:.1f} us",)
        known = (version for version in row.versions if not version.endswith(" none"))  # of a package that is assumed to be there
        detail = "; ".join((row.variant, *times, *known, *row.copies, *([f"instead of {row.instead_of}"] if row.instead_of else [])))
        if row.backend != self.chosen:
            return detail
        asked = "asked for" if row.backend in self.explicit else "first valid in the order" if row.us is None else "fastest that was measured"
        return f"{asked}; {detail}"
