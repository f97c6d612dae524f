"""``csrc/driver_launch.h`` against a driver that is a fake: what reaches it, what is looked up how often, and what is left to the runtime."""

import ctypes
import shutil
import threading
from pathlib import Path
from typing import Any

import driver_fakes
import pytest

pytestmark = pytest.mark.skipif(shutil.which(driver_fakes.COMPILER) is None, reason="no C++ compiler")
SIZES = (2, 3, 5, 7, 11, 13, 17)
STREAM, ARGUMENTS = 19, 23


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    driver_fakes.make(folder)
    return folder


def launch(libraries: str, kernel: int) -> int:
    door = ctypes.CDLL(f"{libraries}/door.so")
    return door.launch(ctypes.c_void_p(kernel), (ctypes.c_uint * 7)(*SIZES), ctypes.c_void_p(STREAM), ctypes.c_void_p(ARGUMENTS))


def fake() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.launched_with.restype = ctypes.c_uint64
    driver.enter.argtypes = [ctypes.c_void_p]
    return driver


def what_reaches_the_driver(libraries: str) -> None:
    driver = fake()
    driver.enter(1000)
    assert launch(libraries, 29) == 0
    assert [driver.launched_with(i) for i in range(11)] == [1029, *SIZES, STREAM, ARGUMENTS, 0]
    driver.tell(0, 700)
    assert launch(libraries, 29) == 700, "the launch's error"


def a_function_is_looked_up_once(libraries: str) -> None:
    driver = fake()
    for kernel in (29, 31):
        for context in (1000, 2000):
            for _ in range(3):
                driver.enter(context)
                assert launch(libraries, kernel) == 0 and driver.launched_with(0) == context + kernel
    assert driver.count_lookups() == 4
    other = threading.Thread(target=lambda: (driver.enter(1000), launch(libraries, 29)))
    other.start()
    other.join()
    assert driver.count_lookups() == 5, "a thread has what it looked up for itself"
    for kernel in (*range(40, 45), *range(40, 45)):  # more than are kept
        assert launch(libraries, kernel) == 0 and driver.launched_with(0) == 2000 + kernel
    assert driver.count_lookups() == 15


def what_is_left_to_the_runtime(libraries: str) -> None:
    driver = fake()
    assert launch(libraries, 29) == -1, "no current context"
    driver.enter(1000)
    driver.tell(500, 0)
    assert launch(libraries, 29) == -1 and launch(libraries, 29) == -1, "no function in this context"
    driver.tell(0, 0)
    assert launch(libraries, 29) == 0, "what failed is asked again"


def the_current_device(libraries: str) -> None:
    device, driver = ctypes.CDLL(f"{libraries}/door.so").device, fake()
    assert device() == -1
    for number in (1, 3):
        driver.enter(1000 * number)
        assert device() == number


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def what_flash_attention_4_asks_of_the_runtime(libraries: str) -> None:
    """Its launches, unless an attribute asks for something: 2 a cooperative one, 4 clusters, 6 an early start."""
    driver, wraps = fake(), ctypes.CDLL(f"{libraries}/wraps.so")
    driver.enter(1000)

    def by_driver(*attributes: tuple[int, int]) -> bool:
        before = driver.count_launches(), wraps.runtime_launches()
        given = (Attribute * max(1, len(attributes)))(*(Attribute(each, 0, (ctypes.c_int * 16)(value)) for each, value in attributes))
        config = LaunchConfig((ctypes.c_uint * 6)(*SIZES[:6]), SIZES[6], STREAM, given, len(attributes))
        assert wraps.__wrap__cudaLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(29), ctypes.c_void_p(ARGUMENTS)) == 0
        made = driver.count_launches() - before[0], wraps.runtime_launches() - before[1]
        assert sum(made) == 1
        return made[0] == 1

    assert by_driver() and [driver.launched_with(i) for i in range(11)] == [1029, *SIZES, STREAM, ARGUMENTS, 0]
    assert by_driver((6, 0), (2, 0))
    for asked in (((2, 1),), ((6, 1),), ((4, 2),), ((4, 0),), ((6, 0), (4, 2), (2, 0))):
        assert not by_driver(*asked), asked
    device = ctypes.c_int(-7)
    assert wraps.__wrap__cudaGetDevice(ctypes.byref(device)) == 0 and device.value == 1 and wraps.runtime_devices() == 0
    driver.enter(None)
    assert not by_driver()
    assert wraps.__wrap__cudaGetDevice(ctypes.byref(device)) == 0 and device.value == 0 and wraps.runtime_devices() == 1


def no_driver(libraries: str) -> None:
    assert launch(libraries, 29) == -1 and ctypes.CDLL(f"{libraries}/door.so").device() == -1


WITH_A_DRIVER = [
    what_reaches_the_driver,
    a_function_is_looked_up_once,
    what_is_left_to_the_runtime,
    the_current_device,
    what_flash_attention_4_asks_of_the_runtime,
]


@pytest.mark.parametrize("function", WITH_A_DRIVER, ids=lambda function: function.__name__)
def test_with_a_driver(libraries: Path, function: Any) -> None:
    driver_fakes.run(f"test_driver_launch.{function.__name__}({str(libraries)!r})", libraries)


def test_without_a_driver(libraries: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        driver_fakes.run(f"test_driver_launch.no_driver({str(libraries)!r})", None)
    else:
        pytest.skip("this machine has a driver")
