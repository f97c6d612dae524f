"""What lies in the cache folder that ``build`` fills: which files, what for, how large, how old; and how they are removed.

The folder may be one that holds other things too: only files with the names that this package gives are listed or removed.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mla_interop.kernels.build import cache_dir

_ARTEFACT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)-(?P<digest>[0-9a-f]{24})\.(?P<end>so|json|lock)")
_TIMES = re.compile(r"measured-[a-z0-9-]+\.json")
_SCRATCH = re.compile(r"\.[A-Za-z0-9_.-]+-[a-z0-9_]{8}")
# The longest build may take a quarter of an hour: a scratch folder of that age belongs to nobody.
_ABANDONED_S = 3600
# Parts of a key that no person reads: texts of sources, compilers' command lines, paths.
_LONG = ("texts", "source", "command", "libraries")

Kind = Literal["kernel", "times", "left behind"]


class Entry(NamedTuple):
    """One thing in the cache.

    Attributes:
        name: What it is called, without the digest.
        kind: ``kernel``: a built library. ``times``: a table of ``mla-interop tune``. ``left behind``: of a build that was ended.
        files: Paths that belong to it.
        bytes: Of all of them.
        seconds: Since it was made.
        purpose: What it was built for, in words.
    """

    name: str
    kind: Kind
    files: tuple[Path, ...]
    bytes: int
    seconds: float
    purpose: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**self._asdict(), "files": [str(path) for path in self.files], "seconds": round(self.seconds)}


def entries(folder: Path | None = None) -> list[Entry]:
    """Everything of this package in the cache folder, by kind and name; [] where there is no such folder.

    Raises:
        OSError: The folder cannot be read.
    """
    folder = folder or cache_dir()
    groups: dict[tuple[str, str, Kind], list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        artefact = _ARTEFACT.fullmatch(path.name)
        if artefact:
            groups.setdefault((artefact["name"], artefact["digest"], "kernel"), []).append(path)
        elif _TIMES.fullmatch(path.name):
            groups.setdefault((path.stem, "", "times"), []).append(path)
        elif _SCRATCH.fullmatch(path.name) and path.is_dir() and _age(path) > _ABANDONED_S:
            groups.setdefault((path.name, "", "left behind"), []).append(path)
    made = [_entry(name, kind, paths) for (name, _, kind), paths in groups.items()]
    return sorted((entry for entry in made if entry is not None), key=lambda entry: (entry.kind, entry.name))


def remove(found: Sequence[Entry]) -> tuple[list[Entry], dict[str, str]]:
    """Remove entries; a library that a process has loaded stays usable in it.

    Returns:
        What was removed, and by name why something was not: it is being built right now, or may not be removed.
    """
    removed, kept = [], {}
    for entry in found:
        try:
            with _unused(entry):
                for path in entry.files:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(entry)
        except BlockingIOError:
            kept[entry.name] = "is being built right now"
        except OSError as error:
            kept[entry.name] = str(error)
    return removed, kept


@contextlib.contextmanager
def _unused(entry: Entry) -> Iterator[None]:
    lock = next((path for path in entry.files if path.suffix == ".lock"), None)
    if lock is None:
        yield
        return
    with open(lock) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _entry(name: str, kind: Kind, paths: list[Path]) -> Entry | None:
    try:
        newest = min(_age(path) for path in paths)
        return Entry(name, kind, tuple(paths), sum(map(_size, paths)), newest, _purpose(kind, paths))
    except FileNotFoundError:  # another process removed it meanwhile
        return None


def _age(path: Path) -> float:
    return max(0.0, time.time() - path.stat().st_mtime)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(os.path.getsize(each) for each in path.rglob("*") if each.is_file())
    return path.stat().st_size


def _purpose(kind: Kind, paths: list[Path]) -> str:
    if kind == "left behind":
        return "of a build that did not end"
    described = next((path for path in paths if path.suffix == ".json"), None)
    if kind == "kernel" and not any(path.suffix == ".so" for path in paths):
        return "nothing was built: a build failed, or is going on"
    if described is None:
        return "unknown: its description is gone"
    try:
        key = json.loads(described.read_text())
        if kind == "times":
            return f"times of {key['machine']}, {key['date']}"
        sources = [name for name in key.get("texts", ()) if not name.endswith(".h")]
        return ", ".join([*sources, *_words(key)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "unknown: its description cannot be read"


def _words(key: dict[str, Any]) -> Iterator[str]:
    for name, value in key.items():
        if name in _LONG or value in (None, "none", {}, []):
            continue
        if isinstance(value, dict):
            yield from _words(value)
        else:
            yield f"{name} {'x'.join(map(str, value)) if isinstance(value, list) else value}"
