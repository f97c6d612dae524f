"""The commands that say what is here and what is chosen: for people in 80 columns, for programs as JSON, with and without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner  # noqa: E402

import mla_interop  # noqa: E402
from mla_interop.backends.registry import names, order_for  # noqa: E402
from mla_interop.capability import KNOWN_GPUS  # noqa: E402
from mla_interop.cli import app  # noqa: E402
from mla_interop.selector_config import DTYPES  # noqa: E402


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("gpu", ["h200", "b200", "rtx-5090", "H200", "cpu"])
def test_explain_prints_the_full_order_with_reasons_for_a_stated_target(gpu: str) -> None:
    target = KNOWN_GPUS.get(gpu.lower())
    order = order_for("cpu", None) if target is None else order_for("cuda", target.capability)
    shown = run("explain", "--model", "deepseek-v3", "--gpu", gpu, "--dtype", "bfloat16")
    made = json.loads(run("explain", "--gpu", gpu, "--json"))
    assert f"order: {', '.join(order)}" in words(shown) and made["order"] == list(order)
    assert [row["backend"] for row in made["backends"]][: len(order)] == list(order) and {row["backend"] for row in made["backends"]} == set(names())
    for row in made["backends"]:
        assert row["valid"] or row["reasons"]
        assert all("".join(reason.split()) in "".join(shown.split()) for reason in row["reasons"])
    assert "128 heads of 192/128" in words(shown) and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("short", "full"), [("bf16", "bfloat16"), ("FP16", "float16"), ("fp8", "float8_e4m3fn"), ("float32", "float32")])
def test_a_dtype_may_be_shortened(short: str, full: str) -> None:
    assert json.loads(run("explain", "--gpu", "h200", "--dtype", short, "--json"))["problem"]["dtype"] == full


def test_explain_takes_every_setting() -> None:
    settings = [
        "--model",
        "glm-5",
        "--gpu",
        "9.0",
        "--heads",
        "8",
        "--tokens",
        "4000",
        "--sequences",
        "3",
        "--full",
        "--dtype",
        "float16",
        "--assume-installed",
    ]
    made = json.loads(run("explain", *settings, "--backend", "flashinfer,flash_attn", "--json"))
    problem = made["problem"]
    assert (problem["capability"], problem["num_heads"], problem["is_causal"], problem["dtype"]) == ("9.0", 8, False, "float16")
    assert (problem["num_tokens"], problem["num_seqs"], problem["dimensions"]["v_head_dim"]) == (4096, 4, 256)
    assert made["chosen"] == "FLASHINFER"
    bare = json.loads(run("explain", "--gpu", "h200", "--assume-installed", "--json"))
    assert bare["chosen"] == "FLASH_ATTN" and "not installed" not in json.dumps(bare)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "gpt-2"], "model: got 'gpt-2'; allowed: deepseek-v2, "),
        (["--gpu", "riva-128"], "gpu: got 'riva-128'; allowed: a100, h100, "),
        (["--dtype", "int8"], f"dtype: got 'int8'; allowed: {', '.join(DTYPES)}"),
        (["--backend", "fa"], "backend: got 'fa'; allowed: FLASH_ATTN"),
    ],
)
def test_explain_refuses_in_words(arguments: list[str], text: str) -> None:
    with pytest.raises(mla_interop.MLAInputError) as refusal:
        run("explain", *arguments)
    assert str(refusal.value).startswith(text)


def test_an_error_is_told_without_a_traceback() -> None:
    code = "from mla_interop.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "explain", "--gpu", "riva-128"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("mla-interop: gpu: got 'riva-128'") and "Traceback" not in done.stderr


def test_backends_writes_the_document() -> None:
    assert run("backends", "--markdown") == (Path(__file__).parents[2] / "docs" / "backends.md").read_text()


def test_backends_shows_what_is_here() -> None:
    shown, made = run("backends"), json.loads(run("backends", "--json"))
    assert all(name in shown for name in names()) and max(map(len, shown.splitlines())) <= 80
    assert made[-1]["problem"]["device_type"] == "cpu" and made[-1]["chosen"] in ("CPU_SDPA", "REFERENCE")


def test_doctor_says_versions_devices_backends_and_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "one.so").write_bytes(bytes(3 << 20))
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    made = json.loads(run("doctor", "--json"))
    assert made["version"] == mla_interop.__version__ and made["packages"]["frameworks"]["numpy"] != "none"
    assert made["cache"] == {"folder": str(tmp_path), "writable": True, "files": 1, "mib": 3.0}
    assert made["settings"]["MLA_INTEROP_CACHE"] == str(tmp_path)
    shown = "".join(run("doctor").split())  # a long folder is wrapped
    assert all("".join(word.split()) in shown for word in ("machine", "kernels", "flash-attn-4", "CUDA driver", f"{tmp_path}, 1 files, 3.0 MiB", "CPU_SDPA"))


def test_doctor_of_a_cache_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path / "not" / "yet"))
    assert json.loads(run("doctor", "--json"))["cache"]["files"] == 0 and not (tmp_path / "not").exists()


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError", "SystemExit"])
def test_doctor_survives_broken_packages(tmp_path: Path, error: str) -> None:
    """torch, jax and every kernel package raise when imported; doctor imports none of them."""
    for name in ("torch", "jax", "flash_attn", "flashinfer", "flash_attn_interface", "triton", "vllm", "_vllm_fa3_C", "flash_attn_2_cuda", "cudnn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {error}('broken on purpose')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mla_interop.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    made: Any = json.loads(done.stdout)
    assert {row["backend"] for row in made["backends"][-1]["backends"]} == set(names())


def test_doctor_runs_the_self_check_and_fails_where_something_deviates(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_interop.numeric_check import Finding, SelfCheck

    good, bad = SelfCheck("A.b", "cpu", "float32", ()), SelfCheck("C.d", "cpu", "float32", (Finding("LSE base", False, "off by a factor of 1.4427"),))
    monkeypatch.setattr("mla_interop.doctor.self_checks", lambda progress: [good])
    assert "A.b on cpu, float32: ok" in run("doctor", "--self-check")
    assert json.loads(run("doctor", "--self-check", "--json"))["self_check"][0]["ok"] is True
    monkeypatch.setattr("mla_interop.doctor.self_checks", lambda progress: [good, bad])
    result = CliRunner().invoke(app, ["doctor", "--self-check"])
    assert result.exit_code == 1 and "LSE base: off by a factor of 1.4427" in result.output


def test_every_kernel_of_this_machine_is_checked() -> None:
    pytest.importorskip("torch")
    from mla_interop.doctor import self_checks

    found = self_checks()
    assert {check.kernel for check in found if check.device == "cpu"} >= {"REFERENCE.xp"} and all(check.ok for check in found), "\n".join(map(str, found))
