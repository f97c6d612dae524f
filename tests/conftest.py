"""What every test shares: which devices and frameworks there are, seeded numbers, and a plain account of what was left out."""

import ctypes
import importlib.util
import os
import zlib
from collections import Counter
from functools import cache

import numpy as np
import pytest

# Sharding needs several devices; a CPU counts as one unless JAX is told otherwise before its first use.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

REQUIRABLE = {"torch": "torch", "jax": "jax", "flash-attn-4": "flash_attn", "flashinfer": "flashinfer"}
LEFT_OUT_WHY = {
    "slow": "slow: takes more than about ten seconds (`make test-all` runs it)",
    "gpu": "gpu: needs a CUDA device",
    "other": "not selected on the command line",
}
left_out: Counter[str] = Counter()


@cache
def cuda_device_count() -> int:
    """The number of CUDA devices, asked of the driver itself: no framework is imported and no context is made."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start without what ``MLA_INTEROP_REQUIRE`` names: a broken install must not look like skipped tests."""
    names = [name.strip() for name in os.environ.get("MLA_INTEROP_REQUIRE", "").split(",") if name.strip()]
    unknown = sorted(set(names) - set(REQUIRABLE))
    if unknown:
        raise pytest.UsageError(f"MLA_INTEROP_REQUIRE names {', '.join(unknown)}; known: {', '.join(REQUIRABLE)}")
    missing = [name for name in names if importlib.util.find_spec(REQUIRABLE[name]) is None]
    if missing:
        raise pytest.UsageError(f"MLA_INTEROP_REQUIRE names {', '.join(missing)}, which cannot be found; run `make install`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if cuda_device_count():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what ``-m`` and ``-k`` left out."""
    left_out.update(next((mark for mark in ("gpu", "slow") if item.get_closest_marker(mark)), "other") for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under xdist only the workers collect: they hand their counts to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take one worker's counts; each worker collects every test, so the counts are equal and are not added."""
    left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in words how many tests were left out before they could be skipped, and why."""
    for mark, count in sorted(left_out.items()):
        terminalreporter.write_line(f"Left out: {count} {'test' if count == 1 else 'tests'}, {LEFT_OUT_WHY[mark]}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers seeded by the test's own name: other tests, their order and their number change nothing."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
