"""Every command in a broken world: no torch, no JAX, packages that raise, a cache that is full or cannot be written, two processes at once.

The commands run in processes of their own, since what is imported cannot be taken back. Every answer is words or JSON, never a traceback.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from mla_interop.bench.problems import CPU_PROBLEMS  # noqa: E402

LOOKING = (["doctor"], ["backends"], ["explain", "--gpu", "h200"], ["cache", "list"])
# Raises what an operating system raises when the disk is full or read-only, for what Python itself writes under a folder.
REFUSE_WRITES = """
import errno, os, sys
def hook(event, arguments, folder={folder!r}, number=errno.{name}):
    writes = (event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")) or event in ("os.mkdir", "os.rename", "tempfile.mkdtemp")
    if writes and str(arguments[0]).startswith(folder):
        raise OSError(number, os.strerror(number), str(arguments[0]))
sys.addaudithook(hook)
"""


def start(*arguments: str, before: str = "", **environment: str) -> subprocess.Popen[str]:
    code = f"import sys\n{before}\nfrom mla_interop.cli import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )


def run(*arguments: str, before: str = "", **environment: str) -> tuple[int, str, str]:
    process = start(*arguments, before=before, **environment)
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in err and "╭─" not in out + err, out + err
    return process.returncode, out, err


def without(*modules: str) -> str:
    return f"sys.modules.update(dict.fromkeys({modules!r}))"


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("missing", [("torch",), ("torch", "jax", "jaxlib")])
@pytest.mark.parametrize("command", LOOKING, ids=lambda command: command[0])
def test_what_only_looks_needs_no_framework(command: list[str], missing: tuple[str, ...], tmp_path: Path) -> None:
    code, out, err = run(*command, "--json", before=without(*missing), MLA_INTEROP_CACHE=str(tmp_path))
    assert code == 0, err
    assert json.loads(out)


@pytest.mark.parametrize("command", ["tune", "bench", "demo"])
def test_what_needs_torch_says_so(command: str) -> None:
    code, out, err = run(command, before=without("torch"))
    assert code == 1 and not out
    assert words(err).startswith("mla-interop: this command needs torch, which is not installed; install it with: pip install 'mla-interop[")


def test_compare_without_a_framework_runs_on_numpy(tmp_path: Path) -> None:
    before = without("torch", "jax", "jaxlib", "matplotlib")
    code, out, err = run("compare", "--heads", "2", "--tokens", "5,9,3", "--context", "4,0,7", "--json", "--picture", str(tmp_path / "a.png"), before=before)
    assert code == 0, err
    made = json.loads(out)
    assert [row["result"] for row in made["rows"]] == ["REFERENCE"] and made["picture"] == "" and "no picture: " in err
    assert 0 < made["rows"][0]["out error"] < 1e-5 and not (tmp_path / "a.png").exists()


def test_compare_without_a_framework_refuses_what_numpy_cannot_hold() -> None:
    code, _, err = run("compare", "--dtype", "bfloat16", "--no-picture", before=without("torch", "jax", "jaxlib", "ml_dtypes"))
    assert code == 1 and "dtype bfloat16: NumPy alone has none" in err


def test_warmup_without_frameworks_says_what_could_not_be_and_why() -> None:
    code, out, _ = run("warmup", "--gpu", "h200", "--json", before=without("torch", "jax", "jaxlib", "flash_attn"))
    steps = {step["what"]: step for step in json.loads(out)["steps"]}
    assert code == 1 and steps["REFERENCE.xp"]["state"] == "failed" and "plain array code" in steps["REFERENCE.xp"]["why"]
    assert steps["XLA handler"] == steps["XLA handler"] | {"state": "left out", "why": "JAX is not installed"}
    assert steps["torch operators"] == steps["torch operators"] | {"state": "left out", "why": "torch is not installed"}
    assert steps["FLASH_ATTN.fa4"]["state"] == "left out" and "python package flash_attn: got none" in steps["FLASH_ATTN.fa4"]["why"]


@pytest.fixture
def raising(tmp_path: Path) -> Iterator[str]:
    """A folder of packages that raise when they are imported, put first on the path."""
    for name in ("torch", "jax", "flash_attn", "flashinfer", "flash_attn_interface", "triton", "vllm", "cudnn", "transformers", "matplotlib"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    yield f"sys.path.insert(0, {str(tmp_path)!r})"


@pytest.mark.parametrize("command", [*LOOKING, ["warmup", "--gpu", "cpu"]], ids=lambda command: command[0])
def test_packages_that_raise_stop_no_command_that_looks(command: list[str], raising: str, tmp_path: Path) -> None:
    code, out, err = run(*command, "--json", before=raising, MLA_INTEROP_CACHE=str(tmp_path / "cache"))
    assert json.loads(out) and code == (1 if command[0] == "warmup" else 0), err
    if command[0] == "warmup":
        assert any(step["what"] == "XLA handler" and "RuntimeError: broken on purpose" in step["why"] for step in json.loads(out)["steps"])


@pytest.mark.parametrize("command", ["tune", "bench", "demo"])
def test_packages_that_raise_are_named_by_what_needs_them(command: str, raising: str) -> None:
    code, _, err = run(command, before=raising)
    assert code == 1 and "needs torch, which cannot be imported (RuntimeError: broken on purpose)" in words(err)


def test_without_a_gpu_first_calls_on_one_are_refused() -> None:
    code, _, err = run("warmup", "--gpu", "12.1", "--backend", "REFERENCE", "--no-jax", "--first-call")
    assert code == 1 and "--first-call: this machine has no GPU of compute capability 12.1" in words(err)


@pytest.mark.parametrize(("name", "text"), [("ENOSPC", "No space left on device"), ("EROFS", "Read-only file system")])
def test_a_cache_that_takes_nothing(name: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "home" / ".cache" / "mla_interop"
    refuse = REFUSE_WRITES.format(folder=str(tmp_path / "home"), name=name)
    (tmp_path / "home").mkdir()
    home = {"HOME": str(tmp_path / "home"), "MLA_INTEROP_CACHE": "", "XDG_CACHE_HOME": ""}
    code, out, err = run("warmup", "--gpu", "cpu", "--no-jax", "--no-torch", "--json", before=refuse, **home)
    step = json.loads(out)["steps"][0]
    assert code == 1 and step["what"] == "CPU_SDPA.torch" and step["state"] == "failed"
    assert text in step["why"] and str(folder) in step["why"] and "Set MLA_INTEROP_CACHE to a folder that can be written." in step["why"]
    for command in LOOKING if name == "EROFS" else ():
        assert run(*command, before=refuse, **home)[0] == 0


def test_compare_where_no_kernel_can_be_kept_uses_what_needs_none(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    refuse = REFUSE_WRITES.format(folder=str(tmp_path), name="ENOSPC")
    arguments = ("--heads", "2", "--tokens", "5,9", "--no-picture", "--json")
    code, out, err = run("compare", *arguments, before=refuse, MLA_INTEROP_CACHE=str(tmp_path / "cache"))
    made = json.loads(out)
    assert code == 0 and [row["result"] for row in made["rows"]] == ["REFERENCE"] and "No space left on device" in made["failed"]["CPU_SDPA"], err


@pytest.mark.parametrize("command", [("compare", "--heads", "1", "--tokens", "3,5", "--backend", "REFERENCE", "--picture", "PICTURE")])
def test_a_picture_that_cannot_be_written_is_told(command: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    code, _, err = run(*(str(tmp_path / "file" / "a.png") if part == "PICTURE" else part for part in command), before=without("torch", "jax", "jaxlib"))
    assert code == 1 and err.startswith("mla-interop: ") and "file" in err


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler that takes a second, notes that it was called, and makes a megabyte of nothing: warming up loads nothing."""
    script = tmp_path / "bin" / "compiler"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho called >> {tmp_path / "calls"}\nfor out; do :; done\nsleep 1\nexec head -c 1000000 /dev/zero > "$out"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, less than any kernel needs."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("this process may not mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(full_disk: Path, compiler: Path) -> None:
    """The compiler, not Python, meets the full disk: its words are told, and nothing is left behind."""
    pytest.importorskip("torch")
    code, out, _ = run("warmup", "--gpu", "cpu", "--no-jax", "--no-torch", "--json", MLA_INTEROP_CACHE=str(full_disk), CXX=str(compiler))
    step = json.loads(out)["steps"][0]
    assert code == 1 and step["state"] == "failed" and "cannot build cpu_sdpa" in step["why"] and "No space left on device" in step["why"]
    assert not [path for path in full_disk.iterdir() if path.suffix == ".so" or path.is_dir()]
    code, out, _ = run("cache", "list", MLA_INTEROP_CACHE=str(full_disk))
    assert code == 0 and "nothing was built" in words(out)


def test_two_processes_fill_one_cache_at_once(compiler: Path, tmp_path: Path) -> None:
    """Both succeed: one builds, and the other waits for it and takes its file."""
    pytest.importorskip("torch")
    cache = tmp_path / "cache"
    arguments, environment = ("warmup", "--gpu", "cpu", "--no-jax", "--no-torch", "--json"), {"MLA_INTEROP_CACHE": str(cache), "CXX": str(compiler)}
    both = [start(*arguments, **environment) for _ in range(2)]
    answers = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    steps = [json.loads(out)["steps"][0] for out, _ in answers]
    assert steps[0]["file"] == steps[1]["file"] and {step["bytes"] for step in steps} == {1000000}
    assert (tmp_path / "calls").read_text().split() == ["called"]
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock", ".so"]
    assert json.loads(run(*arguments, **environment)[1])["steps"][0]["state"] == "was there"


PROBLEM = CPU_PROBLEMS[0].name
WITH_TORCH = {
    "compare": ("compare", "--heads", "2", "--tokens", "5,9", "--no-picture", "--json"),
    "tune": ("tune", "--device", "cpu", "--dtype", "float32", "--heads", "2", "--seconds", "20", "--json"),
    "bench": ("bench", "--device", "cpu", "--problems", PROBLEM, "--only", "mla_interop + lse", "--json"),
    "demo": ("demo", "--device", "cpu", "--max-tokens", "16", "--json"),
}
SLOW = ("tune", "bench", "demo")  # ten seconds and more each
COMMANDS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WITH_TORCH]


@pytest.mark.parametrize("world", ["without JAX", "JAX raises"])
@pytest.mark.parametrize("command", COMMANDS)
def test_torch_alone_is_enough(command: str, world: str, tmp_path: Path) -> None:
    """What JAX would have added is left out; where it is broken, bench and demo say so."""
    for module in ("torch", *(("transformers", "matplotlib") if command == "demo" else ())):
        pytest.importorskip(module)
    (tmp_path / "broken" / "jax").mkdir(parents=True)
    (tmp_path / "broken" / "jax" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    before = without("jax", "jaxlib") if world == "without JAX" else f"sys.path.insert(0, {str(tmp_path / 'broken')!r})"
    output = ("--output", str(tmp_path / "demo")) if command == "demo" else ()
    code, out, err = run(*WITH_TORCH[command], *output, before=before, MLA_INTEROP_CACHE=str(tmp_path / "cache"))
    made = json.loads(out)
    assert code == 0, err
    if command == "bench":
        failed = [row["failed"] for row in made["rows"] if row["framework"] == "jax"]
        assert failed == ([] if world == "without JAX" else ["cannot be imported (RuntimeError: broken on purpose)"])
        assert any("us" in row for row in made["rows"] if row["framework"] == "torch")
    if command == "demo" and world == "JAX raises":
        assert "without JAX, which cannot be imported: RuntimeError: broken on purpose" in words(err)


def test_torch_that_raises_is_named_by_compare(raising: str) -> None:
    code, _, err = run(*WITH_TORCH["compare"], before=raising)
    assert code == 1 and "torch: cannot be imported (RuntimeError: broken on purpose)" in words(err)


@pytest.mark.parametrize("command", [name for name in WITH_TORCH if name != "demo"])
def test_a_gpu_that_is_asked_for_and_not_there(command: str) -> None:
    pytest.importorskip("torch")
    code, _, err = run(*WITH_TORCH[command], "--device", "cuda", before="import mla_interop.doctor\nmla_interop.doctor.gpus = list")
    assert code == 2 and words(err).startswith("mla-interop: device: got 'cuda'; allowed: cpu on this machine. No CUDA device was found")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_home_that_takes_nothing(command: str, tmp_path: Path) -> None:
    """Kernels that must be built are left out; what a command is for, if it has to be kept, is refused in words."""
    for module in ("torch", *(("transformers", "matplotlib") if command == "demo" else ())):
        pytest.importorskip(module)
    (tmp_path / "home").mkdir()
    refuse = REFUSE_WRITES.format(folder=str(tmp_path / "home"), name="EROFS")
    home = {"HOME": str(tmp_path / "home"), "MLA_INTEROP_CACHE": "", "XDG_CACHE_HOME": ""}
    output = ("--output", str(tmp_path / "demo")) if command == "demo" else ()
    code, out, err = run(*WITH_TORCH[command], *output, before=refuse, **home)
    if command == "tune":
        assert code == 1 and "Read-only file system" in err and not out
        return
    made = json.loads(out)
    assert code == 0, err
    if command == "bench":
        assert any("Read-only file system" in row["failed"] for row in made["rows"] if row["framework"] == "torch")


@pytest.mark.parametrize("command", ["bench", pytest.param("demo", marks=pytest.mark.slow)])
def test_an_output_that_cannot_be_written(command: str, tmp_path: Path) -> None:
    """bench finds out before it measures."""
    for module in ("torch", *(("transformers", "matplotlib") if command == "demo" else ())):
        pytest.importorskip(module)
    (tmp_path / "full").mkdir()
    output = tmp_path / "full" / ("a.json" if command == "bench" else "pictures")
    before = REFUSE_WRITES.format(folder=str(tmp_path / "full"), name="ENOSPC")
    code, out, err = run(*WITH_TORCH[command], "--output", str(output), before=before, MLA_INTEROP_CACHE=str(tmp_path / "cache"))
    assert code == 1 and not out and "mla-interop: [Errno 28] No space left on device" in words(err)


def test_a_cache_that_cannot_be_cleared_says_what_it_kept(tmp_path: Path) -> None:
    (tmp_path / "mla_finish-0123456789abcdef01234567.so").write_bytes(bytes(10))
    before = "import errno, os, pathlib\ndef refuse(self, missing_ok=False): raise OSError(errno.EROFS, os.strerror(errno.EROFS))\npathlib.Path.unlink = refuse"
    code, out, _ = run("cache", "clear", "--yes", "--json", before=before, MLA_INTEROP_CACHE=str(tmp_path))
    made = json.loads(out)
    assert code == 1 and made["removed"] == [] and "Read-only file system" in made["kept"]["mla_finish"]
