"""The contract on a GPU: every kernel by itself through the ABI, and every way in; outcomes go to ``MLA_INTEROP_RESULTS``.

A kernel that cannot be had here must say so when it is named, which is asserted. Kernels that are compiled anew for each
dtype and size have the other dtypes and sizes in the slow suite.
"""

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import frontends
import numpy as np
import pytest
from cases import BY_NAME, CASES, ESSENTIAL, MLA, YARN_SCALE, Case
from frontends import FRONTENDS, TRACED, assert_right, configuration, declared_reasons, to_torch

import mla_interop
from mla_interop.backends.base import CallShape, Kernel
from mla_interop.backends.registry import backend_class
from mla_interop.prefill import FINISH_EMPTY_ROWS, FINISH_TAIL

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytestmark = pytest.mark.gpu

KERNELS = [f"FLASH_ATTN.{variant}" for variant in ("fa4", "fa4api", "fa3", "fa3vllm", "fa2", "fa2torch")]
KERNELS += ["FLASHINFER.fa3", "FLASHINFER.fa2", "CUDNN.graph", "REFERENCE.xp"]
COMPILED_PER_SIZE = ("FLASH_ATTN.fa4", "FLASH_ATTN.fa4api", "FLASHINFER.fa3", "FLASHINFER.fa2")
DEVICE = "cuda"


class Outcomes:
    """The worst errors of each kernel, way in and dtype; and what each kernel that is not here said."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.refused: dict[str, list[str]] = {}

    def add(self, kernel: str, way: str, dtype: str, errors: tuple[float, float]) -> None:
        row = self.rows.setdefault((kernel, way, dtype), {"cases": 0, "out_relative_error": 0.0, "lse_absolute_error": 0.0})
        row["cases"] += 1
        for name, error in zip(("out_relative_error", "lse_absolute_error"), errors):
            row[name] = max(row[name], float(f"{error:.3g}"))

    def include(self, others: dict[str, Any]) -> None:
        """Add what another process found."""
        for row in others["results"]:
            mine = self.rows.setdefault((row["kernel"], row["framework"], row["dtype"]), {"cases": 0, "out_relative_error": 0.0, "lse_absolute_error": 0.0})
            mine["cases"] += row["cases"]
            for name in ("out_relative_error", "lse_absolute_error"):
                mine[name] = max(mine[name], row[name])
        for name, reasons in others["refused"].items():
            self.refused[name] = sorted({*self.refused.get(name, []), *reasons})

    def to_dict(self) -> dict[str, Any]:
        jax = __import__("jax")
        versions = {"torch": torch.__version__, "jax": jax.__version__, "mla_interop": mla_interop.__version__}
        rows = [{"kernel": kernel, "framework": way, "dtype": dtype, **row} for (kernel, way, dtype), row in sorted(self.rows.items())]
        machine = {"gpu": torch.cuda.get_device_name(), "date": datetime.now(UTC).date().isoformat(), "versions": versions}
        return {**machine, "tolerance": {"out": frontends.TOLERANCE, "lse": frontends.LSE_TOLERANCE}, "results": rows, "refused": self.refused}


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    """Collected over the module, written at its end."""
    collected = Outcomes()
    yield collected
    path = os.environ.get("MLA_INTEROP_RESULTS")
    if path:
        with open(f"{path}.lock", "w") as lock:  # several pytest-xdist workers add to one file
            fcntl.flock(lock, fcntl.LOCK_EX)
            if Path(path).exists():
                collected.include(json.loads(Path(path).read_text()))
            Path(path).write_text(json.dumps(collected.to_dict(), indent=1) + "\n")


def parameters(cases: list[Case]) -> list[Any]:
    """Kernel and case; what needs a compilation of its own is slow."""
    made = []
    for kernel in KERNELS:
        for case in cases:
            slow = kernel in COMPILED_PER_SIZE and (case.dims != MLA or case.dtype == "float16")
            made.append(pytest.param(kernel, case, id=f"{kernel}-{case}", marks=pytest.mark.slow if slow else ()))
    return made


def the_kernel(name: str, case: Case, device: str, needs_lse: bool = True) -> Kernel | None:
    """The kernel that a name stands for; None, if it says that it cannot serve the case here, and select refuses it with those words."""
    problem = case.problem()
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    config = configuration(problem, device, False, is_causal=case.is_causal, scale=scale, needs_lse=needs_lse)
    reasons = declared_reasons(name, case, device, needs_lse=needs_lse)
    if reasons:
        with pytest.raises(mla_interop.MLAUnsupportedError):
            mla_interop.select(config, name)
        return None
    return mla_interop.select(config, name).kernel


def launch(kernel: Kernel, case: Case, device: str, scratch_value: float = math.nan, needs_lse: bool = True) -> tuple[Any, Any]:
    """One launch in the ABI, with out, lse and scratch filled beforehand."""
    problem = case.problem()
    host = mla_interop.prepare_metadata(problem.cu_q, problem.cu_k).host
    assert host is not None
    q, k, v = (to_torch(x, device) for x in (problem.q, problem.k, problem.v))
    k, v = k[: host.total_k], v[: host.total_k]
    q, k, v = (x if name in kernel.strided else x.contiguous() for name, x in zip("qkv", (q, k, v)))
    cu_q, cu_k = (torch.tensor(x, device=device) for x in (problem.cu_q, problem.cu_k))
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    if kernel.kind == "array":
        return kernel.launch(q, k, v, cu_q, cu_k, scale, case.is_causal)
    tokens, heads = q.shape[:2]
    out, lse = torch.full(problem.out.shape, math.nan, dtype=q.dtype, device=device), torch.full(problem.lse.shape, math.nan, device=device)
    strides = tuple(x.stride()[:2] for x in (q, k, v))
    longest = host.max_seqlen_q, host.max_seqlen_k
    shape = CallShape(tokens, k.shape[0], len(problem.cu_q) - 1, *longest, needs_lse, 0, strides)
    floats = kernel.scratch_floats(tokens, heads, needs_lse) if kernel.prepare is None else kernel.prepare(shape)
    scratch = torch.full((floats,), scratch_value, device=device) if floats else None
    plan = None if kernel.plan is None else torch.tensor(kernel.plan(host, tokens, heads), device=device)
    finish = FINISH_TAIL * (host.total_q < tokens) + FINISH_EMPTY_ROWS * host.has_empty_rows(case.is_causal)
    kernel.launch(q, k, v, cu_q, cu_k, plan, scratch, out, lse if needs_lse else None, scale, host.max_seqlen_q, host.max_seqlen_k, finish)
    return out, lse if needs_lse else None


def check_kernel(name: str, case: Case, device: str) -> tuple[float, float] | None:
    """Right, and the same bits whatever scratch held before (flashinfer#2409, vllm#26397)."""
    kernel = the_kernel(name, case, device)
    if kernel is None:
        return None
    out, lse = launch(kernel, case, device)
    found = assert_right(case, out, lse)
    again, lse_again = launch(kernel, case, device, scratch_value=1e4)
    assert torch.equal(out, again) and torch.equal(lse, lse_again), "what scratch held before changed the result"
    return found


def check_way_in(frontend: str, name: str, case: Case, device: str) -> tuple[float, float] | None:
    """Right through a frontend, or refused as declared."""
    options = {"backend": name, "is_causal": case.is_causal, "scale": case.scale, "return_lse": True}
    if declared_reasons(name, case, device, frontend in TRACED):
        with pytest.raises(mla_interop.MLAUnsupportedError):
            FRONTENDS[frontend](case.problem(), device, **options)
        return None
    return assert_right(case, *FRONTENDS[frontend](case.problem(), device, **options))


LAUNCHABLE = [case for case in CASES if sum(case.lengths_q) and sum(case.lengths_k)]
WAYS = ["torch", "torch-device-lengths", "jit"]


@pytest.mark.parametrize(("name", "case"), parameters(LAUNCHABLE))
def test_every_case_in_the_abi(outcomes: Outcomes, name: str, case: Case) -> None:
    found = check_kernel(name, case, DEVICE)
    if found is None:
        outcomes.refused[name] = sorted({*outcomes.refused.get(name, []), *declared_reasons(name, case, DEVICE)})
    else:
        outcomes.add(name, "kernel", case.dtype, found)


@pytest.mark.parametrize(("name", "case"), parameters(ESSENTIAL))
@pytest.mark.parametrize("frontend", WAYS)
def test_essential_cases_every_way_in(outcomes: Outcomes, frontend: str, name: str, case: Case) -> None:
    found = check_way_in(frontend, name, case, DEVICE)
    if found is not None:
        outcomes.add(name, frontend, case.dtype, found)


@pytest.mark.parametrize("name", KERNELS)
def test_many_launches_give_the_same_bits(name: str) -> None:
    """Tiles that store over each other's rows do so in one launch of dozens."""
    case = dataclasses.replace(BY_NAME["tiles-without-keys"], heads=16)
    kernel = the_kernel(name, case, DEVICE)
    if kernel is None:
        return
    out, lse = launch(kernel, case, DEVICE)
    assert_right(case, out, lse)
    for _ in range(40):
        again, lse_again = launch(kernel, case, DEVICE)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_outside_jit(name: str, is_causal: bool) -> None:
    """The same custom call as inside; one case is enough."""
    case = next(case for case in CASES if case.name == "tail-of-every-kind" and case.is_causal == is_causal)
    check_way_in("jax", name, case, DEVICE)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_out_is_the_same_without_lse(name: str, is_causal: bool) -> None:
    case = next(case for case in CASES if case.name == "every-kind" and case.is_causal == is_causal)
    kernel, without = the_kernel(name, case, DEVICE), the_kernel(name, case, DEVICE, needs_lse=False)
    if kernel is not None and without is not None:
        assert torch.equal(launch(kernel, case, DEVICE)[0], launch(without, case, DEVICE, needs_lse=False)[0])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("split", [((4096,), (16,)), ((256, 0, 40), (16, 5, 1)), ((16, 3, 0), (256, 1, 9))], ids=["4096+16", "mixed+16", "16+256"])
def test_context_and_new_tokens_merge_to_one_pass(outcomes: Outcomes, name: str, split: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """sglang#40903, vllm#52796, TensorRT-LLM#19112: bases of LSE, lopsided splits, YaRN's scale."""
    import ml_dtypes
    from merging import check, one_pass

    import torch_side

    if any(declared_reasons(name, BY_NAME["scale-yarn"], DEVICE)):
        return
    case = one_pass(*split, heads=2, dtype=np.dtype(ml_dtypes.bfloat16), scale=YARN_SCALE)
    outcomes.add(name, "merge", "bfloat16", check(case, name, torch_side.mla_prefill, lambda x: to_torch(x, DEVICE), "bfloat16"))


def test_streams_are_the_callers() -> None:
    """sglang#36572, drjit#198: inputs that a side stream is still writing when the kernel is called on it."""
    import torch_side

    case = BY_NAME["16-heads"]
    problem = case.problem()
    q, k, v = (to_torch(x, DEVICE) for x in (problem.q, problem.k, problem.v))
    busy = torch.randn(4096, 4096, device=DEVICE)
    for name in KERNELS:
        if declared_reasons(name, case, DEVICE):
            continue
        metadata = torch_side.prepare_metadata(problem.cu_q, problem.cu_k, device=DEVICE)
        torch_side.mla_prefill(q, k, v, metadata=metadata, backend=name)  # whatever is compiled or copied first is not timed here
        torch.cuda.synchronize()
        stream, late = torch.cuda.Stream(), torch.full_like(q, math.nan)
        with torch.cuda.stream(stream):
            for _ in range(4):
                busy @ busy
            late.copy_(q)
            out, lse = torch_side.mla_prefill(late, k, v, metadata=metadata, backend=name, return_lse=True)
        stream.synchronize()
        assert_right(case, out, lse)


def test_every_kernel_is_one_of_these() -> None:
    """A kernel that is added to a backend must be added here."""
    config = configuration(BY_NAME["16-heads"].problem(), DEVICE, False)
    made = {f"{backend}.{kernel.variant}" for backend in ("FLASH_ATTN", "FLASHINFER", "REFERENCE") for kernel in backend_class(backend).kernels(config)[0]}
    assert made <= set(KERNELS)
