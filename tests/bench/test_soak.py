"""Many calls leave the process as it is, their sizes and lengths changing; the million is run by the benchmark."""

from collections.abc import Iterator

import pytest

from mla_interop.bench import overheads

SOAKS = {"torch": overheads.torch_soak, "jax": overheads.soak}


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(found: dict[str, int], bytes_allowed: int) -> None:
    assert found["grown_files"] == 0 and found["grown_threads"] == 0 and found["grown_device_bytes"] == 0, found
    assert found["grown_bytes"] <= bytes_allowed, found


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "calls"), [("torch", 20_000), ("jax", 40_000)])
def test_many_calls_hold_nothing(framework: str, calls: int, one_thread: None) -> None:
    """Fifty bytes a call would show: half of them are in the second half."""
    pytest.importorskip(framework)
    check(SOAKS[framework]("cpu", calls), calls // 2 * 50)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("framework", SOAKS)
def test_many_calls_on_a_gpu_hold_nothing(framework: str) -> None:
    pytest.importorskip(framework)
    check(SOAKS[framework]("cuda", 200_000), 4 << 20)


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
