"""What is released, built from this checkout: a wheel, and an sdist, whose tests run against the wheel in environments of their own."""

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mla_interop", "torch_side", "jax_side")


@dataclass(frozen=True)
class Release:
    """The two files."""

    wheel: Path
    sdist: Path

    def names(self) -> list[str]:
        """Paths in the wheel."""
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def text(self, name: str) -> str:
        """A file of the wheel."""
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(name).decode()

    def metadata(self) -> Message:
        """What pip reads of the wheel."""
        return Parser().parsestr(self.text(next(name for name in self.names() if name.endswith(".dist-info/METADATA"))))

    def unpack(self, folder: Path) -> Path:
        """The sdist's own folder, unpacked under ``folder``."""
        with tarfile.open(self.sdist) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = folder.iterdir()
        return unpacked


def build(source: Path, folder: Path) -> Release:
    """``python -m build``: the sdist, and from that the wheel; by the installed build backend, so that no network is needed."""
    for package in ("build", "hatchling"):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Release(wheel, sdist)
