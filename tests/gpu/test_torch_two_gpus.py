"""torch_side on two GPUs: device 1 with device 0 current, heads and keys spread over NCCL."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

import frontends  # noqa: E402
from cases import BY_NAME  # noqa: E402
from ranks import run_ranks  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "REFERENCE"])
def test_device_1_while_device_0_is_current_and_warm(backend: str) -> None:
    """flashinfer#452, #924: an illegal access; FlashMLA#158: device 0 hard-coded."""
    case = BY_NAME["every-kind"]
    with torch.cuda.device(0):
        for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
            out, lse = frontends.run_torch(case.problem(), device, return_lse=True, backend=backend)
            assert str(out.device) == str(lse.device) == device and torch.cuda.current_device() == 0
            frontends.assert_right(case, out, lse)


def test_a_compiled_call_on_device_1() -> None:
    problem: Any = BY_NAME["every-kind"].problem()
    compiled = torch.compile(torch_side.mla_prefill, fullgraph=True, backend="aot_eager")
    with torch.cuda.device(0), torch.no_grad():
        q, k, v = (frontends.to_torch(x, "cuda:1") for x in (problem.q, problem.k, problem.v))
        metadata = torch_side.prepare_metadata(problem.cu_q, problem.cu_k, device="cuda:1")
        frontends.assert_right(BY_NAME["every-kind"], *compiled(q, k, v, metadata=metadata, return_lse=True))


def test_devices_are_not_mixed() -> None:
    x = [torch.zeros(4, 2, 192, device=f"cuda:{i}", dtype=torch.bfloat16) for i in range(2)]
    with pytest.raises(mla_interop.MLAInputError, match="k: got device cuda:1; allowed: q's device, cuda:0"):
        torch_side.mla_prefill(x[0], x[1], x[0])


def test_context_parallel_over_nccl(tmp_path: Path) -> None:
    run_ranks("context_parallel", 2, "cuda", tmp_path)


def test_heads_as_dtensors_over_nccl(tmp_path: Path) -> None:
    run_ranks("sharded_heads", 2, "cuda", tmp_path)
