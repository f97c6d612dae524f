"""The wheel in empty environments, with one extra alone: it installs, and the tests that need nothing else pass there.

pip fetches what the wheel asks for, as a user's would. What a combination lacks is skipped by its tests, with the reason, which is read here.
"""

import os
import re
import shutil
import subprocess
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from released import PACKAGES, ROOT, Release

# Of the tests themselves. ml_dtypes, which JAX brings, gives NumPy a bfloat16.
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
MEANT = "not slow and not gpu"
# A skip for another reason would hide a test that the combination can run.
REASONS = re.compile(
    r"could not import '(torch|torch_side|jax|jax_side|jax\.numpy|ml_dtypes|typer|rich|transformers|matplotlib|pandas|triton|flash_attn|flashinfer)'"
    r"|CPU_SDPA: python package torch: got none|CPU_SDPA's kernel is torch's"
    r"|not installed|got version none|got none|no CUDA device|another machine"
    r"|jax.export serializes with flatbuffers|may not mount a small file system"
    # These are skipped everywhere.
    r"|many chunks in one unrolled program|JAX arrays have no views|N == T: no shape shows it"
)


@dataclass(frozen=True)
class Combination:
    """What is installed, and what of the tests is run.

    Attributes:
        extra: Of the wheel; "" for none.
        packages: Installed with it: exact versions, and tools of the tests.
        tests: Files and folders.
        lacks: Modules that must not be there.
        at_least: Tests that must have passed.
    """

    extra: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    lacks: tuple[str, ...]
    at_least: int

    def __str__(self) -> str:
        return self.extra or "core"


def torch_for_cpus() -> str:
    """The exact version that the Makefile installs where there is no GPU."""
    found = re.search(r"^TORCH_CPU \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return found[1]


CORE = Combination("", (), ("tests/core", "tests/contract"), ("torch", "jax", "ml_dtypes", "typer", "rich"), 1300)
CLI = Combination(
    "cli",
    (),
    ("tests/core/test_cli.py", "tests/core/test_cli_broken.py", "tests/core/test_cli_cache.py", "tests/core/test_doctor.py"),
    ("torch", "jax", "matplotlib"),
    50,
)
TORCH = Combination(
    "torch",
    (torch_for_cpus(), "ml_dtypes"),
    ("tests/core", "tests/contract", "tests/torch_side", "tests/context/test_torch_attention.py", "tests/kernels/test_cpu_sdpa.py"),
    ("jax", "typer"),
    2000,
)
JAX = Combination("jax", (), ("tests/core", "tests/contract", "tests/jax_side", "tests/context/test_jax_attention.py"), ("torch", "typer"), 1700)


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """stdout of a command that knows nothing of this environment's packages."""
    inherited = {name: value for name, value in os.environ.items() if not re.match(r"PYTHON|VIRTUAL_ENV|MLA_INTEROP_|PYTEST_", name)}
    done = subprocess.run([str(part) for part in command], cwd=folder, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def install(release: Release, folder: Path, extra: str, packages: tuple[str, ...]) -> Path:
    """The ``bin`` of a new environment that holds the wheel, what it asks for, and the tests' tools."""
    venv.create(folder, with_pip=True)
    wheel = f"{release.wheel}[{extra}]" if extra else str(release.wheel)
    run([folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, *packages, *TOOLS], folder)
    run([folder / "bin" / "python", "-m", "pip", "check"], folder)
    return folder / "bin"


def without_packages(release: Release, folder: Path) -> Path:
    """The sdist without the packages: what the tests import is what was installed."""
    unpacked = release.unpack(folder)
    for package in PACKAGES:
        for path in sorted((unpacked / package).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (unpacked / package).rmdir()
    return unpacked


def run_tests(programs: Path, source: Path, cache: Path, tests: tuple[str, ...]) -> int:
    """How many tests passed. None may fail, and each skip must have one of the reasons."""
    report = cache / "report.xml"
    cache.mkdir(exist_ok=True)
    run([programs / "pytest", "-q", "-m", MEANT, "-p", "no:cacheprovider", f"--junitxml={report}", *tests], source, MLA_INTEROP_CACHE=str(cache))
    suite = ElementTree.parse(report).getroot()[0]
    skipped = {skip.get("message", "") + (skip.text or "") for skip in suite.iter("skipped")}
    assert not [why for why in skipped if not REASONS.search(why)]
    return int(suite.attrib["tests"]) - int(suite.attrib["skipped"])


SLOW = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Gone afterwards: an environment has gigabytes, and pytest keeps the folders of three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("combination", [CORE, pytest.param(CLI, marks=SLOW), pytest.param(TORCH, marks=SLOW), pytest.param(JAX, marks=SLOW)], ids=str)
def test_one_extra_alone(release: Release, combination: Combination, folder: Path) -> None:
    programs = install(release, folder / "environment", combination.extra, combination.packages)
    looked = "import importlib.util, sys; print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
    assert run([programs / "python", "-c", looked, *combination.lacks], folder).strip() == "", "what it must lack is there: nothing would be proven"
    where = "import mla_interop, mla_interop.version; print(mla_interop.version.__file__)"
    assert str(folder / "environment") in run([programs / "python", "-c", where], folder)
    passed = run_tests(programs, without_packages(release, folder / "sdist"), folder / "cache", combination.tests)
    assert passed >= combination.at_least


def lowest(release: Release) -> list[str]:
    """The lower bounds that the wheel states for the core, torch and JAX, as exact versions."""
    bounds = []
    for line in release.metadata().get_all("Requires-Dist", []):
        requirement, _, condition = line.partition(";")
        found = re.match(r"([a-z0-9-]+)[^>]*>=([0-9.]+)", requirement.replace(" ", ""))
        if found and (not condition or condition.strip() in ("extra == 'torch'", "extra == 'jax'")):
            bounds.append(f"{found[1]}=={found[2]}")
    return bounds


def test_the_lower_bounds_are_read(release: Release) -> None:
    assert {bound.partition("==")[0] for bound in lowest(release)} == {"numpy", "array-api-compat", "apache-tvm-ffi", "torch", "jax"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_oldest_versions_that_are_stated_work(release: Release, folder: Path) -> None:
    programs = install(release, folder / "environment", "torch,jax", (*lowest(release), "ml_dtypes"))
    tests = ("tests/core", "tests/contract", "tests/torch_side", "tests/jax_side", "tests/context", "tests/kernels/test_cpu_sdpa.py")
    assert run_tests(programs, without_packages(release, folder / "sdist"), folder / "cache", tests) >= 3000
