"""Bars of work that takes long: on a terminal's stderr, with a percentage and what is being done; nowhere else, and never beside JSON."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from mla_interop.bench.problems import CPU_PROBLEMS  # noqa: E402
from mla_interop.progress import told, within  # noqa: E402

LONG = {
    "warmup": (["warmup", "--gpu", "cpu", "--backend", "CPU_SDPA", "--no-jax", "--no-torch"], "building CPU_SDPA"),
    "compare": (["compare", "--heads", "2", "--tokens", "5,9", "--backend", "REFERENCE", "--no-picture"], "REFERENCE from torch"),
    "tune": (["tune", "--device", "cpu", "--dtype", "float32", "--heads", "2", "--seconds", "120"], "REFERENCE.xp"),
    "bench": (["bench", "--device", "cpu", "--problems", CPU_PROBLEMS[0].name, "--only", "none of them"], "what surrounds the kernels"),
    "doctor": (["doctor", "--self-check"], "checking REFERENCE.xp on cpu"),
    "demo": (["demo", "--max-tokens", "16"], "the answer in float64"),
}


def run(arguments: list[str], tmp_path: Path, terminal: bool = True, both: bool = False, **environment: str) -> tuple[str, str]:
    """stdout, a file unless both are one terminal, and what stderr showed: a terminal of 80 columns, or a pipe."""
    main, other = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    settings = {"TERM": "xterm", "COLUMNS": "80", "MLA_INTEROP_CACHE": str(tmp_path / "cache")} | environment
    command = [sys.executable, "-c", "from mla_interop.cli import main; main()", *arguments]
    with (tmp_path / "stdout").open("wb") as stdout:
        process = subprocess.Popen(
            command, stdout=other if both else stdout, stderr=other if terminal else subprocess.PIPE, env=inherited | settings, cwd=tmp_path
        )
    os.close(other)
    shown = b"".join(iter(lambda: _read(main), b"")) if terminal else process.communicate(timeout=240)[1]
    os.close(main)
    assert process.wait() == 0, shown.decode()
    return (tmp_path / "stdout").read_text(), shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end was closed
        return b""


SLOW = [pytest.param(name, marks=pytest.mark.slow) if name in ("bench", "demo") else name for name in LONG]


@pytest.mark.parametrize("command", SLOW)
def test_a_terminal_sees_how_far_it_is(command: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if command == "demo":
        pytest.importorskip("transformers")
        pytest.importorskip("matplotlib")
    arguments, step = LONG[command]
    out, shown = run(arguments, tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert step in plain and re.search(r"\b\d{1,3}%", plain)
    assert "\x1b" not in out and "%" not in out.replace("75% of a GPU", ""), "results alone"
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= 80


@pytest.mark.parametrize("arguments", [LONG["compare"][0], [*LONG["compare"][0], "--json"]])
def test_nobody_else_sees_it(arguments: list[str], tmp_path: Path) -> None:
    as_json = "--json" in arguments
    out, shown = run(arguments, tmp_path, terminal=as_json)
    assert shown == "" and (json.loads(out) if as_json else "out error" in out)


def test_results_on_the_same_terminal_go_above_the_bar(tmp_path: Path) -> None:
    """The bar's line is erased before a result takes its place."""
    pytest.importorskip("torch")
    _, shown = run(LONG["warmup"][0], tmp_path, both=True)
    result = shown.index("CPU_SDPA.torch     ")
    bar = shown.rindex("%", 0, result)
    assert "\x1b[2K" in shown[bar:result] and "cpu_sdpa" in shown[result:]


def test_a_terminal_that_cannot_move_its_cursor_sees_none(tmp_path: Path) -> None:
    assert run(LONG["compare"][0], tmp_path, TERM="dumb")[1] == ""


def test_shares_of_shares() -> None:
    said: list[tuple[float, str]] = []
    tell = lambda share, what: said.append((share, what))  # noqa: E731
    for index in range(2):
        for _ in told(["a", "b"], within(tell, index / 2, (index + 1) / 2), "{}!".format):
            pass
    assert said == [(0.0, "a!"), (0.25, "b!"), (0.5, "a!"), (0.75, "b!")] and list(told([], tell)) == []
