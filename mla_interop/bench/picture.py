"""The picture of the README and of ``docs/performance.md``: single calls on a GPU, drawn from a result file.

It is written with the tables (``python -m mla_interop.bench.tables``). It holds a digest of what it shows, so that a check needs
no matplotlib, whose versions draw the same times a little differently.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from mla_interop.bench.tables import FLOORS, RESULTS, ROOT, SOURCES, Label, Times

FILE = ROOT / "docs" / "times.png"
DTYPE = "bfloat16"
HEADS = "128x"  # DeepSeek-V3's, and of those a row of panels
PANELS = 3


def read(folder: Path = RESULTS) -> dict[str, Any]:
    """The results that are drawn."""
    return json.loads((folder / SOURCES["gpu"][0]).read_text())


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What a user compares (the upper table, but for kernels alone), of a few problems."""
    times = Times([results], DTYPE)
    problems = [problem for problem in times.problems if problem.startswith(HEADS)][:PANELS]
    labels = {label for label in times.main() if label.name not in FLOORS}
    chosen = (row for row in results["rows"] if row["dtype"] == DTYPE and row["problem"] in problems and "us" in row)
    return [row for row in chosen if Label(row["framework"], row["name"], row["kernel"]) in labels]


def digest(results: dict[str, Any]) -> str:
    """Of all that the picture shows."""
    shown = [[row[name] for name in ("framework", "name", "kernel", "problem", "us")] for row in rows(results)]
    return hashlib.sha256(json.dumps([_title(results), shown]).encode()).hexdigest()


def is_current(results: dict[str, Any], file: Path = FILE) -> bool:
    """Whether the picture is there and shows these results."""
    return file.exists() and digest(results).encode() in file.read_bytes()


def draw(results: dict[str, Any], file: Path = FILE) -> None:
    """Write the picture, unless it shows these results already. Needs matplotlib."""
    from mla_interop.explore.speed import Timing

    if not is_current(results, file):
        Timing(_title(results), rows(results)).plot().savefig(file, dpi=100, metadata={"Description": digest(results), "Software": None})


def _title(results: dict[str, Any]) -> str:
    environment = results["environment"]
    return f"{environment['machine']}, {environment['date']}, {DTYPE}, causal, D/V = 192/128"
