"""Threads that share metadata, on the CPU; streams and devices are in tests/gpu."""

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_side  # noqa: E402


@pytest.mark.parametrize("prepared", [True, False], ids=["one metadata object", "lengths in every call"])
@pytest.mark.parametrize("way", ["eager", "operator"])
def test_threads_that_share_metadata_get_their_own_values(prepared: bool, way: str) -> None:
    metadata = torch_side.prepare_metadata([0, 3, 12], [0, 9, 17], device="cpu")
    wrong: list[Any] = []
    begin = threading.Barrier(8)

    def call(inputs: Any) -> Any:
        lengths = {"metadata": metadata} if prepared else {"cu_seqlens_q": [0, 3, 12], "cu_seqlens_k": [0, 9, 17]}
        if way == "eager":
            return torch_side.mla_prefill(*inputs, **lengths)
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return function(*args, **(kwargs or {}))

        with Watch():
            return torch_side.mla_prefill(*inputs, **lengths)

    def run(seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        # Every thread with its own number of heads: what one prepares must not serve another.
        inputs = [torch.randn(n, 1 + seed % 4, d, generator=make) for n, d in ((12, 192), (17, 192), (17, 128))]
        expected = torch_side.mla_prefill(*inputs, cu_seqlens_q=[0, 3, 12], cu_seqlens_k=[0, 9, 17], backend="REFERENCE")
        begin.wait()
        for _ in range(20):
            if not torch.allclose(call(inputs), expected, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
