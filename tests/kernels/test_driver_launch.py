"""``csrc/driver_launch.h`` against a driver that is a fake: what reaches it, what is looked up how often, and what is left to the runtime."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mla_interop.kernels.build import SOURCES

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")
SIZES = (2, 3, 5, 7, 11, 13, 17)
STREAM, ARGUMENTS = 19, 23


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    for source, made in (("fake_driver.cc", "libcuda.so.1"), ("driver_launch_door.cc", "door.so")):
        command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{SOURCES}", str(HERE / source), "-o", str(folder / made), "-ldl"]
        subprocess.run(command, check=True)
    return folder


def run(libraries: Path, function: str, driver: bool = True) -> None:
    """Call a function of this file in a process whose libcuda is the fake, or that has none."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_driver_launch as t; t.{function}(t.Path({str(libraries)!r}))"
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries) if driver else ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def launch(libraries: Path, kernel: int) -> int:
    door = ctypes.CDLL(str(libraries / "door.so"))
    return door.launch(ctypes.c_void_p(kernel), (ctypes.c_uint * 7)(*SIZES), ctypes.c_void_p(STREAM), ctypes.c_void_p(ARGUMENTS))


def fake() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.launched_with.restype = ctypes.c_uint64
    driver.enter.argtypes = [ctypes.c_void_p]
    return driver


def what_reaches_the_driver(libraries: Path) -> None:
    driver = fake()
    driver.enter(1000)
    assert launch(libraries, 29) == 0
    assert [driver.launched_with(i) for i in range(11)] == [1029, *SIZES, STREAM, ARGUMENTS, 0]
    driver.tell(0, 700)
    assert launch(libraries, 29) == 700, "the launch's error"


def a_function_is_looked_up_once(libraries: Path) -> None:
    driver = fake()
    for kernel in (29, 31):
        for context in (1000, 2000):
            for _ in range(3):
                driver.enter(context)
                assert launch(libraries, kernel) == 0 and driver.launched_with(0) == context + kernel
    assert driver.count_lookups() == 4
    for kernel in (*range(40, 45), *range(40, 45)):  # more than are kept
        assert launch(libraries, kernel) == 0 and driver.launched_with(0) == 2000 + kernel
    assert driver.count_lookups() == 14


def what_is_left_to_the_runtime(libraries: Path) -> None:
    driver = fake()
    assert launch(libraries, 29) == -1, "no current context"
    driver.enter(1000)
    driver.tell(500, 0)
    assert launch(libraries, 29) == -1 and launch(libraries, 29) == -1, "no function in this context"
    driver.tell(0, 0)
    assert launch(libraries, 29) == 0, "what failed is asked again"


def the_current_device(libraries: Path) -> None:
    device, driver = ctypes.CDLL(str(libraries / "door.so")).device, fake()
    assert device() == -1
    for number in (1, 3):
        driver.enter(1000 * number)
        assert device() == number


def no_driver(libraries: Path) -> None:
    assert launch(libraries, 29) == -1 and ctypes.CDLL(str(libraries / "door.so")).device() == -1


@pytest.mark.parametrize("function", [what_reaches_the_driver, a_function_is_looked_up_once, what_is_left_to_the_runtime, the_current_device])
def test_with_a_driver(libraries: Path, function: object) -> None:
    run(libraries, function.__name__)  # type: ignore[attr-defined]


def test_without_a_driver(libraries: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        run(libraries, "no_driver", driver=False)
    else:
        pytest.skip("this machine has a driver")
