"""What ``mla-interop bench --picture`` draws: the times, and beside them what there is of TFLOP/s and of overheads."""

import json
from pathlib import Path

import pytest

for module in ("typer", "rich", "matplotlib"):
    pytest.importorskip(module)

from mla_interop.bench.tables import RESULTS  # noqa: E402
from mla_interop.cli.bench import _draw  # noqa: E402


def test_three_pictures_of_a_result_file(tmp_path: Path) -> None:
    results = json.loads((RESULTS / "h200.json").read_text())
    _draw(results, tmp_path / "a.png")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a-tflops.png", "a-overhead.png"}
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 3


def test_without_a_kernel_alone_there_is_no_overhead(tmp_path: Path) -> None:
    results = json.loads((RESULTS / "cpu.json").read_text())
    results["rows"] = [row for row in results["rows"] if row["name"] != "kernel object"]
    _draw(results, tmp_path / "a.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"a.svg", "a-tflops.svg"}
