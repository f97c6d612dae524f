"""Tables in the README and on the site are those of the result files, however they are rendered; and paths that documents name exist."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pages
import pytest

from mla_interop.bench import picture, tables

README = (tables.ROOT / "README.md").read_text()


def test_tables_are_those_of_the_result_files() -> None:
    done = subprocess.run([sys.executable, "-m", "mla_interop.bench.tables", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for document in tables.DOCUMENTS:
        found = re.findall(r"<!-- table:(\w+) -->", (tables.ROOT / document).read_text())
        # The README has what runs on one machine of one GPU or none.
        missing = {"two"} if document == "README.md" else set()
        assert {*tables.ASKED, *(name.removesuffix("_main") for name in found)} == {*tables.ASKED, *tables.SOURCES} - missing, document
    assert all(f"<!-- table:{name} -->" in README for name in tables.ASKED)


def test_the_picture_is_of_these_results(tmp_path: Path) -> None:
    found = picture.read()
    assert picture.is_current(found), "run python -m mla_interop.bench.tables"
    shown = picture.rows(found)
    assert {row["framework"] for row in shown} == {"torch", "jax"} and len({row["problem"] for row in shown}) == picture.PANELS
    shown[0]["us"] += 1
    assert not picture.is_current(found), "another time is another picture"
    assert not picture.is_current(found, tmp_path / "none.png")


def test_a_negative_difference_is_no_number() -> None:
    made = tables.host([{"host": [{"name": "import", "us": -3.0}, {"name": "planning", "us": 2.0}]}])
    assert "| import | less than the noise |" in made and "| planning | 2.0 us |" in made


@pytest.mark.parametrize("document", tables.DOCUMENTS)
def test_a_changed_number_is_noticed(document: str) -> None:
    text = (tables.ROOT / document).read_text()
    changed = re.sub(r"\*\*(\d)", r"**9\1", text, count=1)
    assert changed != text and tables.rewritten(changed) == text


@pytest.mark.parametrize("document", [*map(pages.name, pages.PAGES), "CHANGELOG.md"])
def test_links_and_paths_lead_somewhere(document: str) -> None:
    path = tables.ROOT / document
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
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
    ceiling=[{"dtype": "bfloat16", "size": 8192, "us": 1473.0, "tflops": 746.2}],
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
    main, rest = text.split("<details>", 1)
    assert tables.times([FIRST], main_only=True).startswith(tables.times([FIRST]).split("<details>")[0].rstrip()) and "A.p" not in tables.shortly(
        [FIRST, SECOND]
    )
    assert "| torch | mla_interop | `A.c` | 12.3 | **1,234** |" in main, "the first file's times, and thousands apart"
    assert "| torch | mla_interop † | `B.c` | **3.0** |  |" in main and "| torch | kernel object | `A.c` | 9.0 |  |" in main
    assert "| torch | peer |  | failed |  |" in main and "| jax | mla_interop | `A.c` | **20.0** |  |" in main
    assert "A.p" not in main and "lse" not in main.partition("|")[2]
    assert "| torch | mla_interop | `A.p` | 99.0 |" in rest and "+ lse" in rest
    assert "| a matrix product of 8192 cubed, bfloat16 | 746 TFLOP/s |" in rest
    assert "| planning | 7.2 us |" in rest and "second half of 1,000,000 calls | 4,096 bytes, 0 files |" in rest
    assert text.endswith("† From another run. Cut off.")


def test_a_table_of_pairs() -> None:
    head = {"framework": "jax", "names": ["mine", "theirs"], "dtype": "bfloat16"}
    rows = [{**head, "kernel": kernel, "problem": problem, "ratio": ratio} for kernel, problem, ratio in (("A", "p", 0.5), ("B", "r", 2.0), ("A", "r", 1.25))]
    assert tables.pairs({"pairs": rows}).splitlines()[2:] == [
        "| from | call | over | kernel | p | r |",
        "|---|---|---|---|---:|---:|",
        "| jax | mine | theirs | `A` | 0.500 | 1.250 |",
        "| jax | mine | theirs | `B` |  | 2.000 |",
    ]
    assert tables.pairs({"rows": []}) == ""


def test_a_table_of_two_gpus(tmp_path: Path) -> None:
    head = {"framework": "jax", "name": "plain jit", "kernel": "FLASH_ATTN.fa4"}
    rows = [{**head, "one_us": 1143.2, "all_us": 571.6, "ratio": 0.5, "difference": 0.0}, {**head, "kernel": "CUDNN.graph", "failed": "RuntimeError: no"}]
    environment = {"machine": "NVIDIA H200", "date": "2026-01-02", "python": "3.12", "versions": {"jax": "0.11"}, "devices": 2}
    content = {"environment": environment, "problem": "128x4096x1", "dtype": "bfloat16", "rows": rows}
    (tmp_path / "h200_x2.json").write_text(json.dumps(content))
    made = tables.render("two", tmp_path)
    assert "| jax | plain jit | `FLASH_ATTN.fa4` | 1,143 us | 572 us | 0.50 |" in made and "| `CUDNN.graph` | failed |" in made
    assert made.startswith("Heads split over 2 GPUs, 128x4096x1") and made.endswith("NVIDIA H200, 2026-01-02; Python 3.12, jax 0.11.")


def test_a_file_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    assert tables.render("gpu", tmp_path) == tables.render("layer", tmp_path) == ""
    (tmp_path / tables.SOURCES["gpu"][0]).write_text(json.dumps(FIRST))
    assert "†" not in tables.render("gpu", tmp_path) and "A.c" in tables.render("gpu", tmp_path)
