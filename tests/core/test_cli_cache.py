"""``mla-interop cache`` and ``warmup``: what they say is on disk is on disk, and nothing that is not theirs is touched."""

import fcntl
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner  # noqa: E402

from mla_interop import warmup  # noqa: E402
from mla_interop.capability import DeviceCapability  # noqa: E402
from mla_interop.cli import app  # noqa: E402
from mla_interop.dimensions import DEEPSEEK_R1  # noqa: E402
from mla_interop.errors import MLABuildError  # noqa: E402
from mla_interop.first_call import FRONTENDS, first_call  # noqa: E402
from mla_interop.kernels import build, fa4, torch_op, xla  # noqa: E402
from mla_interop.kernels.cache import entries  # noqa: E402
from mla_interop.selector import explain  # noqa: E402
from mla_interop.selector_config import MLAPrefillSelectorConfig  # noqa: E402

HOPPER = MLAPrefillSelectorConfig(dimensions=DEEPSEEK_R1, num_heads=16, capability=DeviceCapability(9, 0), num_sms=132)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two kernels, a table of times, an abandoned and a young scratch folder, and things of somebody else."""
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    build.cached("fa4-sm_90a", {"variant": {"arch": "sm_90a", "is_causal": True}, "source": "x" * 9999}, lambda out: out.write_bytes(bytes(3 << 20)))
    build.cached("mla_finish", {"command": ["nvcc"], "texts": {"finish.cu": "", "a.h": ""}, "tvm_ffi": "0.1"}, lambda out: out.write_bytes(bytes(1 << 20)))
    (tmp_path / "measured-a-gpu.json").write_text(json.dumps({"machine": "A GPU", "date": "2026-01-02"}))
    for name in (".fa4-sm_90a-abcd1234", ".fa4-sm_90a-young123", ".config-dir"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".fa4-sm_90a-abcd1234", (0, 0))
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "library.so").write_text("mine")
    return tmp_path


def run(*arguments: str, code: int = 0, **options: str) -> str:
    result = CliRunner().invoke(app, arguments, **options)
    assert result.exit_code == code, result.output
    return result.stdout


def words(text: str) -> str:
    return " ".join(text.split())


def test_list_says_names_sizes_and_what_for(folder: Path) -> None:
    made = json.loads(run("cache", "list", "--json"))
    assert made["folder"] == str(folder)
    found = {entry["name"]: entry for entry in made["entries"]}
    assert {name: entry["kind"] for name, entry in found.items()} == {
        "fa4-sm_90a": "kernel",
        "mla_finish": "kernel",
        "measured-a-gpu": "times",
        ".fa4-sm_90a-abcd1234": "left behind",
    }
    assert found["fa4-sm_90a"]["purpose"] == "arch sm_90a, is_causal True" and found["mla_finish"]["purpose"] == "finish.cu, tvm_ffi 0.1"
    assert found["measured-a-gpu"]["purpose"] == "times of A GPU, 2026-01-02"
    assert found["fa4-sm_90a"]["bytes"] >= 3 << 20 and len(found["fa4-sm_90a"]["files"]) == 3
    shown = run("cache", "list")
    assert "4 entries, 4.0" in words(shown) and max(map(len, shown.splitlines())) <= 80
    assert [entry["name"] for entry in json.loads(run("cache", "list", "fa4", "--json"))["entries"]] == ["fa4-sm_90a"]


def test_clear_removes_what_is_ours_and_keeps_times(folder: Path) -> None:
    run("cache", "clear", input="n\n", code=1)
    assert len(entries()) == 4
    assert "removed 3 entries" in run("cache", "clear", input="y\n")
    assert sorted(path.name for path in folder.iterdir()) == [".config-dir", ".fa4-sm_90a-young123", "library.so", "measured-a-gpu.json", "notes.json"]
    assert [entry["name"] for entry in json.loads(run("cache", "clear", "--times", "--yes", "--json"))["removed"]] == ["measured-a-gpu"]
    assert run("cache", "clear", "--yes") == "removed 0 entries, 0.00 MiB\n"


def test_clear_takes_names_and_ages(folder: Path) -> None:
    assert "removed 1 entries" in run("cache", "clear", "--older-than", "1", "--yes")
    assert json.loads(run("cache", "clear", "mla_", "--yes", "--json"))["removed"][0]["name"] == "mla_finish"
    assert [entry.name for entry in entries()] == ["fa4-sm_90a", "measured-a-gpu"]


def test_clear_leaves_what_is_being_built(folder: Path) -> None:
    lock = next(folder.glob("fa4*.lock"))
    with open(lock) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        made = json.loads(run("cache", "clear", "fa4", "--yes", "--json", code=1))
    assert made == {"removed": [], "kept": {"fa4-sm_90a": "is being built right now"}} and len(list(folder.glob("fa4*"))) == 3


@pytest.mark.parametrize("text", ["", "[]", "{", '"text"'])
def test_descriptions_that_are_damaged(folder: Path, text: str) -> None:
    next(folder.glob("fa4*.json")).write_text(text)
    (folder / "measured-a-gpu.json").write_text(text)
    assert {entry.purpose for entry in entries() if entry.name in ("fa4-sm_90a", "measured-a-gpu")} == {"unknown: its description cannot be read"}


@pytest.fixture
def stub_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[object, ...]]:
    """FlashAttention-4's compiler and the C++ compiler as stand-ins that write a little file under the real names; the calls of the first."""
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    calls: list[tuple[object, ...]] = []

    def made(*variant: object) -> Path:
        calls.append(variant)
        return build.cached("fa4", {"variant": variant}, lambda out: out.write_bytes(bytes(1000)))

    monkeypatch.setattr(fa4, "build", made)
    monkeypatch.setattr(fa4, "_installation_reasons", list)
    monkeypatch.setattr(xla, "build", lambda: build.cached("xla_call", {}, lambda out: out.write_bytes(bytes(10))))
    monkeypatch.setattr(torch_op, "build", lambda: build.cached("torch_op", {}, lambda out: out.write_bytes(bytes(10))))
    return calls


def test_warmup_builds_both_masks_with_and_without_lse(stub_build: list[tuple[object, ...]]) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    arguments = ("warmup", "--gpu", "h200", "--dtype", "bfloat16,float16", "--json")
    made = json.loads(run(*arguments))
    assert {call[4:] for call in stub_build} == {(causal, lse, False) for causal in (True, False) for lse in (True, False)}, "none for any scale"
    assert {call[:4] for call in stub_build} == {("sm_90a", dtype, 192, 128) for dtype in ("bfloat16", "float16")} and len(stub_build) == 8
    built = [step for step in made["steps"] if step["state"] == "built"]
    assert [step["what"] for step in built] == ["FLASH_ATTN.fa4"] * 4 + ["XLA handler", "torch operators"] + ["FLASH_ATTN.fa4"] * 4
    assert all(Path(step["file"]).exists() for step in built) and {step["bytes"] for step in built} == {1000, 10}
    again = json.loads(run(*arguments))["steps"]
    assert [step["file"] for step in again if step["state"] == "was there"] == [step["file"] for step in built]
    shown = run("warmup", "--gpu", "h200")
    assert "built 0 (0.00 MiB), 6 were there, 0 failed" in words(shown) and max(map(len, shown.splitlines())) <= 80


def test_warmup_goes_on_after_a_failure(stub_build: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*variant: object) -> Path:
        if variant[5]:
            raise MLABuildError("no luck with lse")
        return build.cached("fa4", {"variant": variant}, lambda out: out.write_bytes(bytes(1000)))

    monkeypatch.setattr(fa4, "build", fails)
    made = json.loads(run("warmup", "--gpu", "h200", "--no-jax", "--json", code=1))
    assert sorted(step["state"] for step in made["steps"] if step["what"] == "FLASH_ATTN.fa4") == ["built", "built", "failed"]
    assert "no luck with lse" in json.dumps(made)


def test_warmup_of_a_backend_that_cannot_be_had(stub_build: list[tuple[object, ...]]) -> None:
    made = json.loads(run("warmup", "--gpu", "h200", "--backend", "TRTLLM_RAGGED,FLASH_ATTN", "--no-jax", "--json", code=1))
    failed = [step for step in made["steps"] if step["state"] == "failed"]
    assert [step["what"] for step in failed] == ["TRTLLM_RAGGED"] and "compute capability 9.0" in failed[0]["why"]
    assert sum(step["what"] == "FLASH_ATTN.fa4" for step in made["steps"]) == 4


def test_warmup_covers_every_choice_that_measured_times_can_make(all_installed: None) -> None:
    """The table that ships for Hopper prefers different kernels at different shapes: all of them are built."""
    names = warmup._choices(HOPPER)
    chosen = {explain(HOPPER).chosen}
    for tokens, seqs in ((512, 1), (8192, 1), (8192, 8), (32768, 32)):
        table = explain(MLAPrefillSelectorConfig(dimensions=DEEPSEEK_R1, num_heads=16, capability=DeviceCapability(9, 0), num_tokens=tokens, num_seqs=seqs))
        chosen.add(table.chosen)
    assert chosen <= {name.partition(".")[0] for name in names} and all("." in name for name in names)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "CUDNN"])
def test_compiled_kernels_say_what_they_are_loaded_from(backend: str, all_installed: None) -> None:
    from mla_interop.selector import kernels_of

    kernels = [kernel for kernel in kernels_of(backend, HOPPER) if kernel.kind == "compiled"]
    assert kernels and all(kernel.parts for kernel in kernels)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_first_call_is_timed_in_a_process_of_its_own(frontend: str) -> None:
    """How long it may take is a matter for a machine of its own (tests/gpu): here, that the call is made, timed and named."""
    pytest.importorskip(frontend.removesuffix("_side"))
    call = first_call(frontend, "cpu", "float32", 2, (96, 64), "REFERENCE")
    assert (call.frontend, call.backend, call.why) == (frontend, "REFERENCE.xp", "") and 0 < call.seconds and 0 < call.imports


def test_a_first_call_that_fails_says_why() -> None:
    pytest.importorskip("torch")
    assert "backend: got 'NONE'; allowed: " in first_call("torch_side", "cpu", "float32", 2, (96, 64), "NONE").why
