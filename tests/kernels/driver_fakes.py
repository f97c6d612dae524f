"""A driver and a CUDA runtime that are fakes, and processes that meet them."""

import os
import subprocess
import sys
from pathlib import Path

from tvm_ffi import libinfo

from mla_interop.kernels.build import SOURCES

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")


def make(folder: Path) -> None:
    """The fake driver and runtime, and what is tested against them: the header, and FlashAttention-4's calls of the runtime without its kernel."""
    parts = {
        "libcuda.so.1": [HERE / "fake_driver.cc"],
        "runtime.so": [HERE / "fake_runtime.cc"],
        "door.so": [HERE / "driver_launch_door.cc"],
        "wraps.so": [SOURCES / "fa4_launch.cc", HERE / "fake_runtime.cc"],
    }
    include = [f"-I{path}" for path in (SOURCES, *libinfo.include_paths())]
    for made, sources in parts.items():
        subprocess.run([COMPILER, "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", *include, *sources, "-o", folder / made, "-ldl"], check=True)


def run(call: str, driver: Path | None, **more: str) -> None:
    """Evaluate ``call`` of a test module here in a process whose libcuda is the fake in ``driver``, or that has none."""
    module = call.partition(".")[0]
    found = os.pathsep.join([*([str(driver)] if driver else []), os.environ.get("LD_LIBRARY_PATH", "")])
    code = f"import sys; sys.path[:0] = {[str(HERE), *sys.path]!r}; import {module}; {call}"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"LD_LIBRARY_PATH": found} | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
