"""Many calls inside ``jax.jit`` leave the process as it is, their sizes and lengths changing; the million is run by the benchmark."""

import pytest

jax = pytest.importorskip("jax")

from mla_interop.bench import overheads  # noqa: E402


def check(found: dict[str, int], bytes_allowed: int) -> None:
    assert found["grown_files"] == 0 and found["grown_threads"] == 0 and found["grown_device_bytes"] == 0, found
    assert found["grown_bytes"] <= bytes_allowed, found


@pytest.mark.slow
def test_many_calls_of_changing_sizes_hold_nothing() -> None:
    """Fifty bytes a call would show: there are 20 000 in the second half."""
    check(overheads.soak("cpu", 40_000), 1 << 20)


def test_what_is_held_is_found() -> None:
    """Files and threads are those of this process, and memory that a run keeps is growth."""
    kept = []

    def run(times: int) -> dict[str, int]:
        kept.append(bytearray(64 << 20))
        kept[-1][::4096] = b"x" * (16 << 10)
        kept.append(open("/proc/self/status"))
        return overheads.held(7 * len(kept))

    try:
        found = overheads._growth(run, 400, "calls")
    finally:
        for file in kept[1::2]:
            file.close()
    assert (found["grown_files"], found["grown_device_bytes"], found["grown_threads"]) == (2, 28, 0) and found["grown_bytes"] >= 120 << 20


@pytest.mark.gpu
@pytest.mark.slow
def test_many_calls_on_a_gpu_hold_nothing() -> None:
    check(overheads.soak("cuda", 200_000), 4 << 20)
