"""``doctor``: versions that do not get along, what JAX takes of a GPU, and that nothing stops it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner  # noqa: E402

from mla_interop import doctor, machine  # noqa: E402
from mla_interop.cli import app  # noqa: E402
from mla_interop.known_bad import RULES, known_bad, stated_minima  # noqa: E402

GOOD = {
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "jax-cuda13-plugin": "0.11.2",
    "torch": "2.11.0+cu130",
    "nvidia-cudnn-cu13": "9.19.0.56",
    "nvidia-cuda-runtime": "13.0.96",
    "driver": "13.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "quack-kernels": "0.6.5",
    "nvidia-cudnn-frontend": "1.32.0",
    "transformers": "5.24.0",
    "flash-attn-4": "4.0.0b36",
}


@pytest.mark.parametrize(
    ("changed", "found", "why"),
    [
        ({"jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0"}, "jaxlib 0.12.0 with jax 0.11.2", "newer than itself"),
        ({"jax-cuda13-plugin": "0.11.1"}, "jax-cuda13-plugin 0.11.1 with jaxlib 0.11.2", "finds no GPU"),
        ({"jax-tvm-ffi": "0.1.2"}, "jax-tvm-ffi 0.1.2 with jax 0.11.2", "not found by the first call"),
        ({"nvidia-cudnn-cu13": "9.10.1.4"}, "nvidia-cudnn-cu13 9.10.1.4", "wrong results"),
        ({"nvidia-cudnn-cu12": "9.19.0.56"}, "nvidia-cudnn-cu13 9.19.0.56 with nvidia-cudnn-cu12 9.19.0.56", "IsaacLab#4980"),
        ({"nvidia-cutlass-dsl": "4.7.9"}, "nvidia-cudnn-frontend 1.32.0 with nvidia-cutlass-dsl 4.7.9", "4.8.0 or later"),
        ({"driver": "12.8"}, "nvidia-cuda-runtime 13.0.96 with driver 12.8", "driver is older"),
        ({"transformers": "5.19.1"}, "transformers 5.19.1", "YaRN"),
    ],
)
def test_what_does_not_get_along_is_named(changed: dict[str, str], found: str, why: str) -> None:
    assert known_bad(GOOD) == []
    named = {finding.found: finding for finding in known_bad(GOOD | changed)}
    assert why in named[found].why and named[found].do


def test_what_is_not_installed_is_no_pair() -> None:
    assert known_bad({name: "none" for rule in RULES for name in rule.packages}) == [] and known_bad({}) == []


def test_what_is_older_than_this_package_states() -> None:
    minima = stated_minima()
    assert minima["numpy"] >= (2, 0) and "torch" in minima
    assert known_bad({"numpy": "1.26.4"})[0].found == "numpy 1.26.4"


@pytest.mark.parametrize(
    ("environment", "preallocates", "fraction"),
    [
        ({}, True, 0.75),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False, 0.0),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_CLIENT_MEM_FRACTION": ".4"}, True, 0.4),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, True, 0.3),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", "XLA_CLIENT_MEM_FRACTION": "0.4"}, True, None),
        ({"XLA_CLIENT_MEM_FRACTION": "half"}, True, None),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False, 0.0),
    ],
)
def test_what_jax_takes_of_a_gpu(environment: dict[str, str], preallocates: bool, fraction: float | None) -> None:
    found = machine.jax_memory(environment)
    assert (found["preallocates"], found["fraction"]) == (preallocates, fraction) and found["why"]


def test_the_driver_s_version_is_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:  gcc version 12.2.0\n"
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(machine, "_KERNEL_MODULE", tmp_path / "version")
    assert machine.driver_version() == "580.65.06"
    monkeypatch.setattr(machine, "_KERNEL_MODULE", tmp_path / "none")
    assert machine.driver_version() == "none"


def test_a_compiler_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvcc").write_text("no program")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setattr(machine, "find_nvcc", lambda: str(tmp_path / "nvcc"))
    assert "does not run" in machine.nvcc_version()


@pytest.mark.parametrize(
    "what", ["gpus", "tables", "known_bad", "cache", "package_version", "machine.nvcc_version", "machine.gpu_memory", "machine.jax_memory"]
)
def test_whatever_breaks_is_a_line_of_the_report(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(f"mla_interop.doctor.{what}", breaks)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    assert any("RuntimeError: broken on purpose" in problem for problem in json.loads(result.stdout)["problems"])
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0 and "broken on purpose" in re.sub(r"\s+", " ", shown.output)


def test_what_was_found_is_shown_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = GOOD | {"transformers": "5.19.1"}
    monkeypatch.setattr(doctor, "package_version", lambda name: versions.get(name, "none"))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)  # commands set it, in this process too
    shown = CliRunner().invoke(app, ["doctor"]).output
    flat = re.sub(r"\s+", " ", shown)
    assert "versions that do not get along" in flat and "YaRN" in flat and "takes 75% of a GPU" in flat
    assert max(map(len, shown.splitlines())) <= 80
