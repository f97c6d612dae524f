"""Which kernel is fastest, by tables of measured times: data that ships with the package, and what ``mla-interop tune`` measured on this machine.

A table has times for a device (a compute capability, or ``cpu``), a dtype and head dimensions, at some shapes.  A problem takes the times of the
nearest shape: the one with the smallest sum of ``|log2|`` of the ratios of heads, of tokens per sequence, and of sequences; of two that are
equally near, the smaller one.  Times were taken under the causal mask, and serve calls without it too.  With LSE and without are measured
separately, since what a kernel's LSE costs differs; where a table has one of the two for a kernel, it serves both.  Nothing is measured in a call.
"""

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mla_interop.capability import machine_name
from mla_interop.kernels.build import cache_dir
from mla_interop.selector_config import MLAPrefillSelectorConfig

FORMAT = 1
DATA = Path(__file__).parent / "data"
_T = TypeVar("_T")


class Shape(NamedTuple):
    """N, T and B, the last two rounded to powers of two as in a selector's configuration."""

    heads: int
    tokens: int
    seqs: int

    def distance(self, other: "Shape") -> float:
        """How far apart two shapes are, in powers of two."""
        pairs = ((self.heads, other.heads), (self.tokens * other.seqs, other.tokens * self.seqs), (self.seqs, other.seqs))
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.tokens} tokens in {self.seqs}"


class Times(NamedTuple):
    """What decides for a problem: where the times come from, the shape they were measured at, and microseconds a call by kernel."""

    source: str
    shape: Shape
    us: dict[str, float]

    def of(self, backend: str, variant: str) -> float | None:
        """Microseconds of a kernel, if it was measured."""
        return self.us.get(f"{backend}.{variant}")

    def __str__(self) -> str:
        return f"times of {self.source} at {self.shape}"


class Table(NamedTuple):
    """One file: its source in words, and the times at every shape, by (device, dtype, D, V, with LSE)."""

    source: str
    times: dict[tuple[str, str, int, int, bool], dict[Shape, dict[str, float]]]


def times_for(config: MLAPrefillSelectorConfig) -> Times | None:
    """The times for a problem: from this machine's own table if it covers the problem, else from what ships; None if neither does."""
    if config.num_tokens is None or config.num_seqs is None:
        return None
    key = _key(config)
    wanted = Shape(config.num_heads, config.num_tokens, config.num_seqs)
    for table in tables(str(cache_dir()), machine_name(config.device_type)):
        if key in table.times:
            nearest = min(table.times[key], key=lambda shape: (shape.distance(wanted), shape))
            return Times(table.source, nearest, table.times[key][nearest])
    return None


def shapes_for(config: MLAPrefillSelectorConfig) -> list[Shape]:
    """The shapes at which the table that would decide for a problem has times, whatever T and B; [] where none covers it."""
    key = _key(config)
    return next((sorted(table.times[key]) for table in tables(str(cache_dir()), machine_name(config.device_type)) if key in table.times), [])


def _key(config: MLAPrefillSelectorConfig) -> tuple[str, str, int, int, bool]:
    dims = config.dimensions.qk_head_dim, config.dimensions.v_head_dim
    return device_key(config.device_type, config.capability), config.dtype, *dims, config.needs_lse


def device_key(device_type: str, capability: object) -> str:
    """How a table names a device: ``"9.0"``, ``"cpu"``, or ``"cuda"`` for a GPU of unknown capability."""
    return device_type if capability is None else str(capability)


def fastest_first(items: Sequence[_T], us: Callable[[_T], float | None]) -> list[_T]:
    """The items that have a time, sorted by it, in the places that these items had; an item without a time keeps its place."""
    timed = iter(sorted((item for item in items if us(item) is not None), key=lambda item: us(item) or 0.0))
    return [item if us(item) is None else next(timed) for item in items]


def user_table(machine: str) -> Path:
    """Where ``mla-interop tune`` keeps the table of a machine (a GPU's or a CPU's name)."""
    return cache_dir() / f"measured-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"


@functools.lru_cache(maxsize=64)
def tables(folder: str, machine: str) -> tuple[Table, ...]:
    """The tables there are for a machine, nearest first; read once for each cache folder."""
    del folder  # only a part of the key: user_table asks for it itself
    own = user_table(machine) if machine else None
    return tuple(_readable([*([own] if own is not None and own.exists() else []), *sorted(DATA.glob("measured_*.json"))]))


def _readable(paths: Iterable[Path]) -> Iterable[Table]:
    for path in paths:
        try:
            yield read(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{path} is no table of measured times ({type(error).__name__}: {error}) and is left out; `mla-interop tune` writes one anew"
            warnings.warn(text, stacklevel=2)


def read(content: dict[str, Any]) -> Table:
    """A table from its JSON content, as ``mla_interop.bench.measured_table`` makes it.

    Raises:
        ValueError, KeyError, TypeError: It is no such content, or of another format.
    """
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']} (allowed: {FORMAT})")
    times: dict[tuple[str, str, int, int, bool], dict[Shape, dict[str, float]]] = {}
    for entry in content["entries"]:
        qk_head_dim, v_head_dim = entry["dims"]
        without, with_lse = ({name: float(us) for name, us in entry.get(part, {}).items()} for part in ("us", "us_lse"))
        shape = Shape(entry["heads"], entry["tokens"], entry["seqs"])
        for needs_lse, us in ((False, with_lse | without), (True, without | with_lse)):
            times.setdefault((entry["device"], entry["dtype"], int(qk_head_dim), int(v_head_dim), needs_lse), {})[shape] = us
    return Table(f"{content['machine']}, {content['date']}", times)
