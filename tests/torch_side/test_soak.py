"""Many calls from torch leave the process as it is; the million is run by the benchmark."""

import pytest

torch = pytest.importorskip("torch")

from mla_interop.bench.overheads import torch_soak  # noqa: E402


def check(found: dict[str, int], bytes_allowed: int) -> None:
    assert found["grown_files"] == 0 and found["grown_threads"] == 0 and found["grown_device_bytes"] == 0, found
    assert found["grown_bytes"] <= bytes_allowed, found


@pytest.mark.slow
def test_many_calls_of_changing_sizes_hold_nothing() -> None:
    """Fifty bytes a call would show: there are 10 000 in the second half."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check(torch_soak("cpu", 20_000), 512 << 10)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.slow
def test_many_calls_on_a_gpu_hold_nothing() -> None:
    check(torch_soak("cuda", 200_000), 4 << 20)
