"""What is in the wheel and in the sdist, and what is not."""

import json
import subprocess
from pathlib import Path

import pytest
from released import PACKAGES, ROOT, Release, build

import mla_interop

# Files that a checkout's packages have, and that nobody else needs.
_LEFT_OUT = ("__pycache__", ".pyc")


def tracked(*folders: str) -> set[str]:
    """Files under folders that are part of the project: what git knows, or what lies there in an unpacked sdist."""
    done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}
    found = {path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {name for name in found if not any(part in name for part in _LEFT_OUT)}


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(release: Release) -> None:
    """C++ and CUDA sources, tables and markers of types too; no test, no notebook, no benchmark, no document."""
    names = release.names()
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == tracked(*PACKAGES)
    assert {Path(name).suffix for name in inside} == {".py", ".cc", ".cu", ".h", ".json", ".typed"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= inside
    assert not [name for name in names if "test" in Path(name).name or name.endswith((".ipynb", ".md", ".so"))]


def test_the_sdist_has_what_its_tests_read(release: Release, tmp_path: Path) -> None:
    unpacked = release.unpack(tmp_path)
    inside = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert tracked("tests", "docs", "benchmarks", "notebooks", *PACKAGES) <= inside
    assert {"pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"} <= inside


def test_what_pip_is_told(release: Release) -> None:
    metadata = release.metadata()
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("mla-interop", mla_interop.__version__, "Apache-2.0")
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata.get_payload() == (ROOT / "README.md").read_text()
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.partition(">")[0].partition("<")[0] for line in required) == ["apache-tvm-ffi", "array-api-compat", "numpy"]
    assert {"torch", "jax", "flash-attn-4", "flashinfer", "cudnn", "cli", "demo", "notebook"} <= set(metadata.get_all("Provides-Extra", []))
    points = release.text(next(name for name in release.names() if name.endswith("entry_points.txt")))
    assert "mla-interop = mla_interop.cli:main" in points


def test_models_and_measured_times_are_json(release: Release) -> None:
    tables = [name for name in release.names() if name.endswith(".json")]
    assert "mla_interop/data/models.json" in tables and all(json.loads(release.text(name)) for name in tables)


def test_the_version_has_one_place(release: Release, tmp_path: Path) -> None:
    """Another one in version.py is another one everywhere."""
    source = release.unpack(tmp_path / "source")
    (source / "PKG-INFO").unlink()  # as in a checkout
    place = source / "mla_interop" / "version.py"
    place.write_text(place.read_text().replace(f'"{mla_interop.__version__}"', '"9.8.7"'))
    made = build(source, tmp_path / "made")
    assert made.metadata()["Version"] == "9.8.7" and made.wheel.name.startswith("mla_interop-9.8.7-") and made.sdist.name == "mla_interop-9.8.7.tar.gz"
    literal = f'"{mla_interop.__version__}"'
    assert [name for name in sorted(tracked(*PACKAGES)) if name.endswith(".py") and literal in (ROOT / name).read_text()] == ["mla_interop/version.py"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_are_there_by_name(release: Release, package: str) -> None:
    assert f"{package}/__init__.py" in release.names()
