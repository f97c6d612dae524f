"""Builds native code once and keeps it: a content-addressed cache on disk, safe for many processes at once.

Everything that can change the result of a build goes into its key (sources, flags, versions, architecture), so a
stale object can never be loaded and nothing has to be invalidated by hand.  A build happens in a temporary folder
under a file lock and is moved into place by one atomic rename: a process that loads an object never sees another
process relink it (NVIDIA/TensorRT-LLM#18368), and N processes with an empty cache build once, not N times.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mla_interop.errors import MLABuildError

SOURCES = Path(__file__).parent / "csrc"
SLOW_BUILD_S = 5.0  # a build that takes longer says so
_log = logging.getLogger("mla_interop")


def cache_dir() -> Path:
    """The folder that holds built objects: ``MLA_INTEROP_CACHE``, else ``$XDG_CACHE_HOME/mla_interop``."""
    named = os.environ.get("MLA_INTEROP_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mla_interop"


def package_version(distribution: str) -> str:
    """The installed version of a distribution, or ``"none"``."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def cached(name: str, key: Mapping[str, object], build: Callable[[Path], None], suffix: str = ".so") -> Path:
    """The path of the artefact ``name`` for ``key``, built by ``build(path_to_write)`` if it is not there yet.

    Args:
        name: Start of the file's name, for people who look into the cache.
        key: All that the result depends on; any JSON-serialisable values.
        build: Writes the artefact to the path it is given (a temporary one).
        suffix: End of the file's name.

    Raises:
        MLABuildError: The build failed, or the cache folder cannot be written.
    """
    path = cached_path(name, key, suffix)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _build_into(path, name, key, build)
    except OSError as error:
        raise MLABuildError(
            f"cannot build {name!r} into the cache folder {path.parent}: {error}. Set MLA_INTEROP_CACHE to a folder that can be written."
        ) from error
    return path


def cached_path(name: str, key: Mapping[str, object], suffix: str = ".so") -> Path:
    """Where :func:`cached` keeps the artefact, whether it is there or not."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_dir() / f"{name}-{digest}{suffix}"


def _build_into(path: Path, name: str, key: Mapping[str, object], build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=path.parent))
    # A first call that waits for minutes must not look like one that hangs.
    note = threading.Timer(SLOW_BUILD_S, _log.warning, ["%s is being built, once; this can take minutes. `mla-interop warmup` builds beforehand.", name])
    note.daemon = True
    note.start()
    try:
        made = scratch / path.name
        build(made)
        # The key beside the artefact tells a person what an object was built for.
        path.with_suffix(".json").write_text(json.dumps(dict(key), sort_keys=True, default=str, indent=1))
        os.replace(made, path)
    finally:
        note.cancel()
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_tool(command: Sequence[str], what: str, env: Mapping[str, str] | None = None) -> None:
    """Run a compiler or linker.

    Raises:
        MLABuildError: It is not there, or failed; with the last lines of what it printed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except FileNotFoundError as error:
        raise MLABuildError(f"cannot build {what}: {command[0]!r} is not on PATH; install a C++ compiler (g++).") from error
    if done.returncode != 0:
        # A compiler's command line can be thousands of characters: it would bury what the compiler said.
        tail = "\n".join(line[:300] for line in (done.stderr or done.stdout).strip().splitlines()[-25:])
        raise MLABuildError(f"cannot build {what}: {command[0]} exited with {done.returncode}.\n{tail}")


def compile_cpp(
    name: str,
    sources: Sequence[str],
    *,
    include: Sequence[str] = (),
    library_dirs: Sequence[str] = (),
    libraries: Sequence[str] = (),
    flags: Sequence[str] = (),
    depends: Mapping[str, str] | None = None,
) -> Path:
    """Compile first-party C++ from ``csrc/`` against TVM FFI into a shared library; return its (cached) path.

    Args:
        name: Name of the library.
        sources: File names under ``csrc/``.
        include: Further include folders.
        library_dirs: Folders of ``libraries``; also put on the library's run path.
        libraries: Names for ``-l``.
        flags: Further compiler flags.
        depends: Versions of whatever the result depends on besides the sources and TVM FFI.
    """
    command = _cpp_command(sources, include, library_dirs, libraries, flags)
    return cached(name, _key(command, sources, depends), lambda out: run_tool([*command, "-o", str(out)], name))


def is_cpp_built(name: str, sources: Sequence[str], *, depends: Mapping[str, str] | None = None, **options: Sequence[str]) -> bool:
    """Whether :func:`compile_cpp`, with these arguments, would find its library in the cache."""
    return cached_path(name, _key(_cpp_command(sources, **options), sources, depends)).exists()


def _cpp_command(
    sources: Sequence[str],
    include: Sequence[str] = (),
    library_dirs: Sequence[str] = (),
    libraries: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> list[str]:
    from tvm_ffi import libinfo

    compiler = os.environ.get("CXX", "g++")
    dirs = [str(Path(libinfo.find_libtvm_ffi()).parent), *library_dirs]
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", *flags]
    command += [f"-I{path}" for path in (*libinfo.include_paths(), *include)]
    command += [str(SOURCES / source) for source in sources]
    command += [f"-L{path}" for path in dirs] + [f"-Wl,-rpath,{path}" for path in dirs]
    return [*command, "-ltvm_ffi", *[f"-l{library}" for library in libraries]]


def package_root(name: str) -> Path | None:
    """The folder of an installed package, which is not imported for it; None where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # blocked, or a module without a spec that was put into sys.modules by hand
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def wheel_folders(kind: str) -> Iterator[Path]:
    """The folders ``kind`` (``"lib"``, ``"include"``) of NVIDIA's installed wheels: what the CUDA builds of torch and JAX bring along."""
    wheels = importlib.util.find_spec("nvidia")
    for root in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from sorted(Path(root).glob(f"*/{kind}"))


def open_library(path: Path) -> Any:
    """A built library as a TVM FFI module.

    Raises:
        MLABuildError: It does not load; the text says why.
    """
    import tvm_ffi

    try:
        return tvm_ffi.load_module(path)
    except (RuntimeError, OSError) as error:
        raise MLABuildError(f"cannot load {path}: {error}") from error


def find_nvcc() -> str | None:
    """The CUDA compiler, or None: under ``CUDA_HOME`` or ``CUDA_PATH``, else on ``PATH``, else in CUDA's default folder."""
    named = [f"{home}/bin/nvcc" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    return next((path for name in [*named, "nvcc", "/usr/local/cuda/bin/nvcc"] if (path := shutil.which(name))), None)


def compile_cuda(
    name: str,
    sources: Sequence[str],
    arch: str,
    *,
    flags: Sequence[str] = (),
    include: Sequence[str] = (),
    depends: Mapping[str, str] | None = None,
) -> Path:
    """Compile first-party CUDA C++ from ``csrc/`` against TVM FFI and the static CUDA runtime; return the library's (cached) path.

    Neither the library nor its key names a path of this machine: a cache that was filled elsewhere serves a machine without nvcc.

    Args:
        name: Name of the library.
        sources: File names under ``csrc/``.
        arch: The one architecture to compile for, as in ``"90a"``.
        flags: Further flags of nvcc.
        include: Further include folders, searched last; ``depends`` says which versions they hold.
        depends: Versions of whatever the result depends on besides the sources and TVM FFI.

    Raises:
        MLABuildError: There is no nvcc, or it failed.
    """
    command = _cuda_command(arch, flags)

    def build(out: Path) -> None:
        from tvm_ffi import libinfo

        nvcc = find_nvcc()
        if nvcc is None:
            raise MLABuildError(f"cannot build {name}: no nvcc under CUDA_HOME, CUDA_PATH or /usr/local/cuda, nor on PATH; install the CUDA toolkit.")
        # Quoted: nvcc splits at spaces and commas what it passes on.
        paths = [f"-I{path}" for path in libinfo.include_paths()] + [f'-Xcompiler=-idirafter,"{path}"' for path in include]
        paths += [str(SOURCES / source) for source in sources]
        run_tool([nvcc, *command, *paths, f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi", "-o", str(out)], name)

    return cached(name, _key(command, sources, depends), build)


def is_cuda_built(name: str, sources: Sequence[str], arch: str, *, flags: Sequence[str] = (), depends: Mapping[str, str] | None = None) -> bool:
    """Whether :func:`compile_cuda` would find its library in the cache."""
    return cached_path(name, _key(_cuda_command(arch, flags), sources, depends)).exists()


def _cuda_command(arch: str, flags: Sequence[str]) -> list[str]:
    command = ["-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", "-cudart=static", *flags]
    return [*command, f"-gencode=arch=compute_{arch},code=sm_{arch}"]


def _key(command: Sequence[str], sources: Sequence[str], depends: Mapping[str, str] | None) -> dict[str, object]:
    headers = sorted(SOURCES.glob("*.h"))
    texts = {path.name: path.read_text() for path in [*headers, *(SOURCES / source for source in sources)]}
    return {"command": command, "texts": texts, "tvm_ffi": package_version("apache-tvm-ffi"), "depends": dict(depends or {})}
