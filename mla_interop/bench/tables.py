"""Tables for documents, rendered from result files: no number in a document is typed by hand.

``python -m mla_interop.bench.tables`` rewrites the tables of README.md; ``--check`` says whether they are what it would write.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")


def times(results: dict[str, Any], dtype: str, lse: bool = False) -> str:
    """Microseconds a call: a row for each contender, a column for each problem, the fastest of a framework in bold."""
    rows = [row for row in results["rows"] if row["dtype"] == dtype and row["name"].endswith("+ lse") == lse and "us" in row]
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    labels = list(dict.fromkeys((row["framework"], row["name"], row["kernel"]) for row in rows))
    cells = {(row["framework"], row["name"], row["kernel"], row["problem"]): row["us"] for row in rows}
    best: dict[tuple[str, str], float] = {}
    for (framework, _, _, problem), us in cells.items():
        best[framework, problem] = min(us, best.get((framework, problem), us))
    lines = [f"| from | what | {' | '.join(problems)} |", "|---|---|" + "---:|" * len(problems)]
    for framework, name, kernel in labels:
        marks = [_cell(cells.get((framework, name, kernel, problem)), best.get((framework, problem))) for problem in problems]
        lines.append(f"| {framework} | {name}{f', `{kernel}`' if kernel else ''} | {' | '.join(marks)} |")
    return "\n".join(lines)


def caption(results: dict[str, Any]) -> str:
    """Machine, date and versions of a result file."""
    environment = results["environment"]
    versions = ", ".join(f"{name} {found}" for name, found in environment["versions"].items())
    return f"{environment['machine']}, {environment['date']}; Python {environment['python']}, {versions}."


def _cell(us: float | None, best: float | None) -> str:
    if us is None:
        return ""
    text = f"{us:.1f}" if us < 100 else f"{us:.0f}"
    return f"**{text}**" if us == best else text


def render(name: str) -> str:
    """The text between a marker pair ``<!-- table:NAME -->``: ``gpu`` or ``cpu``."""
    results = json.loads((RESULTS / {"gpu": "h200.json", "cpu": "cpu.json"}[name]).read_text())
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in results["rows"]):
        parts += [f"{dtype}, causal, 192/128; microseconds a call, median:", "", times(results, dtype), ""]
    return "\n".join([*parts, caption(results)])


def rewritten(text: str) -> str:
    """A document with its tables rendered anew."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table:{match[1]} -->\n\n{render(match[1])}\n\n<!-- /table:{match[1]} -->"

    return re.sub(r"<!-- table:(\w+) -->.*?<!-- /table:\1 -->", table, text, flags=re.DOTALL)


def main() -> None:
    """Rewrite README.md, or check it."""
    path = Path("README.md")
    old = path.read_text()
    new = rewritten(old)
    if "--check" in sys.argv:
        sys.exit(0 if new == old else "README.md: its tables are not those of benchmarks/results; run python -m mla_interop.bench.tables")
    path.write_text(new)


if __name__ == "__main__":
    main()
