"""README.md: its code runs, its tables are those of the result files, and its links lead somewhere; and how tables are rendered."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_interop.bench import tables

README = (tables.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[0])
def test_the_code_of_the_readme_runs(code: str) -> None:
    for framework in ("torch", "jax"):
        if re.search(rf"^import {framework}\b", code, flags=re.MULTILINE):
            pytest.importorskip(framework)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    if "out" in names:
        assert tuple(names["out"].shape) == (305, 16, 128) and tuple(names["lse"].shape) == (16, 305)
        assert bool((names["out"] == names["out"]).all())


def test_the_readme_has_code_for_both_frameworks_and_the_choice() -> None:
    for needed in ("from torch_side import", "from jax_side import", "explain("):
        assert any(needed in code for code in BLOCKS), needed
    assert all(len(code.strip().splitlines()) <= 12 for code in BLOCKS)


def test_its_tables_are_those_of_the_result_files() -> None:
    done = subprocess.run([sys.executable, "-m", "mla_interop.bench.tables", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"<!-- table:(\w+) -->", README)) == {"explain", *tables.SOURCES}


def test_a_changed_number_is_noticed() -> None:
    changed = re.sub(r"\*\*(\d)", r"**9\1", README, count=1)
    assert changed != README and tables.rewritten(changed) == README


@pytest.mark.parametrize("document", ["README.md", "CHANGELOG.md", "docs/architecture.md", "docs/backends.md", "docs/adding_a_backend.md"])
def test_links_and_paths_lead_somewhere(document: str) -> None:
    path = tables.ROOT / document
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target
    for name in re.findall(r"`((?:mla_interop|torch_side|jax_side|tests|docs|benchmarks)/[\w/.]+)`", text):
        assert (tables.ROOT / name).exists(), name


def results(*rows: tuple[str, str, str, str, float | str], **more: Any) -> dict[str, Any]:
    made = [
        {
            "framework": framework,
            "name": name,
            "kernel": kernel,
            "problem": problem,
            "dtype": "bfloat16",
            **({"us": us} if us != "failed" else {"failed": "why"}),
        }
        for framework, name, kernel, problem, us in rows
    ]
    return {"environment": {"machine": "M", "date": "D", "python": "3", "versions": {"torch": "2"}}, "rows": made, **more}


FIRST = results(
    ("torch", "mla_interop", "A.c", "1x2x1", 12.34),
    ("torch", "mla_interop", "A.c", "1x4x1", 1234.5),
    ("torch", "mla_interop + lse", "A.c", "1x2x1", 13.0),
    ("torch", "kernel object", "A.c", "1x2x1", 9.0),
    ("torch", "mla_interop", "A.p", "1x2x1", 99.0),
    ("torch", "peer", "", "1x2x1", "failed"),
    ("jax", "mla_interop", "A.c", "1x2x1", 20.0),
    host=[{"name": "planning", "us": 7.25}],
    soak=[{"name": "1000000 calls", "calls": 1000000, "grown_bytes": 4096, "grown_files": 0}],
)
SECOND = results(
    ("torch", "mla_interop", "A.c", "1x2x1", 1.0),
    ("torch", "kernel object", "B.c", "1x2x1", 2.0),
    ("torch", "mla_interop", "B.c", "1x2x1", 3.0),
    note="Cut off.",
)


def test_a_table_of_times() -> None:
    text = tables.times([FIRST, SECOND])
    main, rest = text.split("<details>")
    assert "| torch | mla_interop | `A.c` | 12.3 | **1,234** |" in main, "the first file's times, and thousands apart"
    assert "| torch | mla_interop † | `B.c` | **3.0** |  |" in main and "| torch | kernel object | `A.c` | 9.0 |  |" in main
    assert "| torch | peer |  | failed |  |" in main and "| jax | mla_interop | `A.c` | **20.0** |  |" in main
    assert "A.p" not in main and "lse" not in main.partition("|")[2]
    assert "| torch | mla_interop | `A.p` | 99.0 |" in rest and "+ lse" in rest
    assert "| planning | 7.2 us |" in rest and "second half of 1,000,000 calls | 4,096 bytes, 0 files |" in rest
    assert text.endswith("† From another run. Cut off.")


def test_a_file_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    assert tables.render("gpu", tmp_path) == tables.render("layer", tmp_path) == ""
    (tmp_path / tables.SOURCES["gpu"][0]).write_text(json.dumps(FIRST))
    assert "†" not in tables.render("gpu", tmp_path) and "A.c" in tables.render("gpu", tmp_path)
