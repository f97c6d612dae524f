"""What FlashInfer's kernels need, as they say it themselves, and how their module is found in the cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mla_interop.errors import MLABuildError
from mla_interop.kernels import build, flashinfer_fa3, flashinfer_module
from mla_interop.kernels.flashinfer_corrections import MAIN_LOOP_3, PREFILL_2

GOOD = ((9, 0), "bfloat16", 192, 128)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """FlashInfer 0.6.14 and all that builds it, as far as anybody can tell, and an empty cache; returns the cache's folder."""
    monkeypatch.setattr(flashinfer_module, "_flashinfer_version", lambda: "0.6.14")
    monkeypatch.setattr(flashinfer_module, "_missing_build_tools", lambda generation: [])
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("asked", "generation", "texts"),
    [
        (GOOD, 3, []),
        (GOOD, 2, []),
        (((8, 0), "float16", 192, 128), 2, []),
        (((8, 0), *GOOD[1:]), 3, ["compute capability: got (8, 0); allowed: (9, 0)"]),
        (((10, 0), *GOOD[1:]), 3, ["compute capability: got (10, 0); allowed: (9, 0)"]),
        (((7, 5), *GOOD[1:]), 2, ["compute capability: got (7, 5); allowed: (8, 0) and later"]),
        (((9, 0), "float32", 192, 128), 3, ["dtype: got float32; allowed: float16 or bfloat16"]),
        (((9, 0), "bfloat16", 192, 64), 3, ["head dims of q/k and v: got (192, 64); allowed: one of"]),
        (((9, 0), "bfloat16", 96, 64), 2, ["head dims of q/k and v: got (96, 64); allowed: multiples of 64"]),
        (((8, 0), "int8", 1, 1), 3, ["compute capability", "dtype", "head dims"]),
        (GOOD, 4, ["generation: got 4; allowed: 2 or 3"]),
    ],
)
def test_reasons_say_what_came_and_what_is_allowed(asked: tuple[tuple[int, int], str, int, int], generation: int, texts: list[str]) -> None:
    reasons = flashinfer_module.unsupported_reasons(*asked, generation)
    assert len(reasons) == len(texts) and all(reason.startswith(text) for reason, text in zip(reasons, texts)), reasons


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("version", "refused"), [("0.6.13", True), ("0.6.14", False), ("0.6.18.post1", False), ("0.7.4", False), ("0.7.5", True), ("odd", True), ("none", True)]
)
def test_only_versions_whose_internal_call_is_known(monkeypatch: pytest.MonkeyPatch, version: str, refused: bool) -> None:
    monkeypatch.setattr(flashinfer_module, "_flashinfer_version", lambda: version)
    reasons = flashinfer_module.unsupported_reasons(*GOOD, 3)
    assert bool(reasons) == refused and all(reason.startswith("flashinfer-python: ") for reason in reasons)


def test_a_module_in_the_cache_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, installed: Path) -> None:
    monkeypatch.setattr(flashinfer_module, "_missing_build_tools", lambda generation: ["nvcc: not found"])
    assert flashinfer_module.unsupported_reasons(*GOOD, 2) == ["nvcc: not found"]
    name, key = flashinfer_module._artefact(*GOOD[1:], GOOD[0])
    build.cached_path(name, key).touch()
    assert flashinfer_module.unsupported_reasons(*GOOD, 2) == []
    assert flashinfer_module.unsupported_reasons((9, 0), "float16", 192, 128, 2) == ["nvcc: not found"]
    assert flashinfer_module.upstream_module(*GOOD[1:], GOOD[0]) == build.cached_path(name, key)


def test_a_library_of_generation_3_in_the_cache_needs_no_compiler_and_no_package_data(monkeypatch: pytest.MonkeyPatch, installed: Path) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(flashinfer_module, "_missing_build_tools", lambda generation: ["nvcc: not found"])
    assert flashinfer_module.unsupported_reasons(*GOOD, 3) == ["nvcc: not found"] and not flashinfer_fa3.is_built(*GOOD[1:])
    arguments = flashinfer_fa3._arguments(*GOOD[1:])
    path = build.cached_path(arguments["name"], build._key(build._cuda_command("90a", arguments["flags"]), arguments["sources"], arguments["depends"]))
    path.touch()
    assert flashinfer_module.unsupported_reasons(*GOOD, 3) == [] and flashinfer_fa3.library(*GOOD[1:]) == path
    assert flashinfer_module.unsupported_reasons((9, 0), "float16", 192, 128, 3) == ["nvcc: not found"]


@pytest.mark.usefixtures("installed")
def test_package_data_that_are_not_there_or_not_those_are_a_build_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flashinfer_fa3, "_package_data", lambda: tmp_path)
    with pytest.raises(MLABuildError, match="cannot build FlashInfer's fa3 kernel: .*No such file"):
        flashinfer_fa3.library(*GOOD[1:])
    header = tmp_path / "include" / MAIN_LOOP_3.header
    header.parent.mkdir(parents=True)
    header.write_text("#include <another.h>")
    with pytest.raises(MLABuildError, match="is there 0 times, not 1"):
        flashinfer_fa3.library(*GOOD[1:])


def test_the_corrections_fit_the_package_data_that_are_installed() -> None:
    if build.package_root("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    include = flashinfer_fa3._package_data() / "include"
    for header in (MAIN_LOOP_3, PREFILL_2):
        assert header.corrected((include / header.header).read_text()) != (include / header.header).read_text()


def test_the_key_of_a_module_names_no_path_and_no_python() -> None:
    _, key = flashinfer_module._artefact(*GOOD[1:], GOOD[0])
    text = json.dumps(key)
    assert "/" not in text and sys.version.split()[0] not in text
    assert key.keys() == {"flashinfer", "tvm_ffi", "generation", "dtype", "head_dims", "capability", "corrections"}
    arguments = flashinfer_fa3._arguments(*GOOD[1:])
    assert arguments["depends"].keys() == {"flashinfer", "corrections"}
    assert "/" not in json.dumps(arguments)


def test_asking_for_reasons_imports_neither_torch_nor_flashinfer() -> None:
    code = (
        "import sys; from mla_interop.kernels import flashinfer_module as module; before = set(sys.modules);"
        "module.unsupported_reasons((9, 0), 'bfloat16', 192, 128, 3);"
        "assert not {'torch', 'flashinfer', 'tvm_ffi'} & (sys.modules.keys() - before)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(flashinfer_module.__file__).parents[2])


def test_nvcc_is_looked_for_where_the_environment_says_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("home", "path"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        (tmp_path / folder / "bin" / "nvcc").touch(0o755)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_nvcc() == str(tmp_path / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert build.find_nvcc() == str(tmp_path / "path" / "bin" / "nvcc")


def test_cuda_code_without_nvcc_is_a_build_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(MLABuildError, match="no nvcc"):
        build.compile_cuda("mla_finish", ["finish.cu"], "90")
