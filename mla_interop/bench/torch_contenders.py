"""The contenders that are called from PyTorch: the raw kernel object, this package's frontend, and what a user has otherwise."""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import torch_side
from mla_interop.backends.base import Kernel
from mla_interop.backends.registry import backend_class
from mla_interop.bench.problems import QK_HEAD_DIM, V_HEAD_DIM, Problem
from mla_interop.dimensions import MLADimensions
from mla_interop.prefill import Options, bind, resolve
from mla_interop.selector_config import MLAPrefillSelectorConfig
from torch_side.launch import spec

# T x N above which a call's cost is its kernel's, and compiling it shows nothing.
COMPILED_UP_TO = 16 * 512
# Calls in one compiled program.
COMPILED_CALLS = 10


@dataclass
class Contender:
    """One way to compute a problem.

    Attributes:
        name: What is called, for tables.
        framework: ``torch`` or ``jax``.
        kernel: Our kernel's variant, where it is ours.
        call: One call; returns what it computes.
        result: (out, lse or None) as torch tensors, to be checked; None if it computes something else.
        run: n calls, synchronised.
        calls_in_a_run: Attention calls in one run.
    """

    name: str
    framework: str
    kernel: str
    result: Callable[[], tuple[Any, Any] | None]
    run: Callable[[int], None]
    calls_in_a_run: int = 1


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched on the current GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def looped(call: Callable[[], Any], device: torch.device) -> Callable[[int], None]:
    """``run(n)``: n calls, and then one wait for the device."""

    def run(n: int) -> None:
        for _ in range(n):
            call()
        synchronize(device)

    return run


def config_for(problem: Problem, device: str, dtype: str, lse: bool) -> MLAPrefillSelectorConfig:
    """The selector's view of a problem."""
    dimensions = MLADimensions.from_head_dims(QK_HEAD_DIM, V_HEAD_DIM)
    return MLAPrefillSelectorConfig(dtype=dtype, dimensions=dimensions, num_heads=problem.heads, device_type=device, needs_lse=lse)


def kernels_here(problem: Problem, device: str, dtype: str) -> Iterator[tuple[str, Kernel]]:
    """Every kernel of every backend but REFERENCE that can serve the problem on this machine."""
    config = config_for(problem, device, dtype, True)
    for name in ("FLASH_ATTN", "FLASHINFER", "CUDNN", "CPU_SDPA"):
        cls = backend_class(name)
        if not cls.validate_configuration(config):
            for kernel in cls.kernels(config)[0]:
                yield name, kernel


def with_lse(kernel: Kernel) -> tuple[bool, ...]:
    """Whether a kernel is measured without LSE and with it; a package's own API computes it in any case."""
    return (False, True) if kernel.kind == "compiled" else (True,)


def contenders(problem: Problem, q: Any, k: Any, v: Any, dtype: str) -> Iterator[Contender]:
    """All of them, in the order of the tables."""
    device = q.device.type
    for backend, kernel in kernels_here(problem, device, dtype):
        name = f"{backend}.{kernel.variant}"
        yield from failures_told(_of_kernel(problem, q, k, v, dtype, name, kernel), "torch", name)
    if device == "cpu":
        yield _sdpa(problem, q, k, v)
    else:
        yield from _package_apis(problem, q, k, v)


def failures_told(made: Iterator[Contender], framework: str, kernel: str) -> Iterator[Contender]:
    """A kernel's contenders. One that cannot be made becomes one that says so when it is run: those of other kernels follow."""
    try:
        yield from made
    except Exception as error:
        failure = error

        def fails(*_: Any) -> Any:
            raise failure

        yield Contender("cannot be prepared", framework, kernel, fails, fails)


def _of_kernel(problem: Problem, q: Any, k: Any, v: Any, dtype: str, name: str, kernel: Kernel) -> Iterator[Contender]:
    for lse in with_lse(kernel):
        yield _frontend(problem, q, k, v, name, lse)
    if kernel.kind == "compiled":
        if problem.tokens * problem.heads <= COMPILED_UP_TO:
            yield _compiled(problem, q, k, v, dtype, name)
        if kernel.cuda_graph and q.device.type == "cuda":
            yield _graphed(problem, q, k, v, name)
        yield from _raw(problem, q, k, v, dtype, name)


def _frontend(problem: Problem, q: Any, k: Any, v: Any, backend: str, lse: bool) -> Contender:
    """``torch_side.mla_prefill`` with prepared metadata."""
    metadata = torch_side.prepare_metadata(problem.cu_seqlens, device=q.device)

    def call() -> Any:
        return torch_side.mla_prefill(q, k, v, metadata=metadata, backend=backend, return_lse=lse)

    def result() -> tuple[Any, Any]:
        made = call()
        return made if lse else (made, None)

    return Contender(f"mla_interop{' + lse' if lse else ''}", "torch", backend, result, looped(call, q.device))


def _compiled(problem: Problem, q: Any, k: Any, v: Any, dtype: str, backend: str) -> Contender:
    """The same inside ``torch.compile``: ten calls in one program, as a model's layers are. A work list comes with the metadata.

    Each call's v is the result of the call before, which has its shape: so they wait for each other, no operation comes between, and only two
    results are alive beside the first, which is the one that is checked.
    """
    config = config_for(problem, q.device.type, dtype, False)
    metadata = torch_side.prepare_metadata(problem.cu_seqlens, device=q.device, config=config, backend=backend)

    def chain(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        first = last = torch_side.mla_prefill(q, k, v, metadata=metadata, backend=backend)
        for _ in range(COMPILED_CALLS - 1):
            last = torch_side.mla_prefill(q, k, last.to(v.dtype), metadata=metadata, backend=backend)  # from 8-bit inputs comes a wider type
        return first, last

    # Dynamo keeps programs by code object, up to a limit, and looks through all of one code object's in every call: this one has its own.
    own = types.FunctionType(chain.__code__.replace(), chain.__globals__, "chain", None, chain.__closure__)
    program = torch.compile(own, fullgraph=True)

    def call() -> Any:
        with torch.no_grad():
            return program(q, k, v, metadata)

    return Contender("mla_interop, torch.compile", "torch", backend, lambda: (call()[0], None), looped(call, q.device), COMPILED_CALLS)


def _graphed(problem: Problem, q: Any, k: Any, v: Any, backend: str) -> Contender:
    """The same in a CUDA graph, ten calls to a graph: what is left of a call is its kernel."""
    metadata = torch_side.prepare_metadata(problem.cu_seqlens, device=q.device)

    def call() -> Any:
        return torch_side.mla_prefill(q, k, v, metadata=metadata, backend=backend)

    result, replay = _captured(call)
    return Contender("mla_interop in a CUDA graph", "torch", backend, lambda: (result(), None), looped(replay, q.device), 10)


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Ten calls as a CUDA graph: what replays it and returns the last result, and what only replays it."""
    out = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            out = call()

    def replay(inputs: Any = call) -> None:  # the graph has addresses only: what the calls read must live as long
        graph.replay()

    return lambda: (replay(), out)[1], replay


def _raw(problem: Problem, q: Any, k: Any, v: Any, dtype: str, backend: str) -> Iterator[Contender]:
    """The kernel object alone, into buffers that exist: what a call cannot be faster than; and its CUDA graph, without any launch cost.

    The buffer of its output is taken anew for each loop, from the same pool as every call's: of two buffers at other addresses one can be some percent
    slower to write, which is nothing that a frontend does or could change.
    """
    ready = resolve(spec(q), spec(k), spec(v), Options(backend=backend), len(problem.lengths), True)
    bound = bind(ready, torch_side.prepare_metadata(problem.cu_seqlens), problem.tokens, exact=True)
    cu = torch.tensor(problem.cu_seqlens, device=q.device)
    plan = None if bound.metadata.plan is None else torch.tensor(bound.metadata.plan, device=q.device)
    scratch = torch.empty(bound.scratch_floats, device=q.device) if bound.scratch_floats else None
    longest, scale, launch = max(problem.lengths), QK_HEAD_DIM**-0.5, ready.kernel.launch

    def empty() -> Any:
        return torch.empty(problem.tokens, problem.heads, V_HEAD_DIM, dtype=q.dtype, device=q.device)

    def call(out: Any) -> Any:
        launch(q, k, v, cu, cu, plan, scratch, out, None, scale, longest, longest, 0)
        return out

    def run(n: int) -> None:
        out = empty()
        looped(lambda: call(out), q.device)(n)

    yield Contender("kernel object", "torch", backend, lambda: (call(empty().fill_(float("nan"))), None), run)
    if q.device.type == "cuda" and ready.kernel.cuda_graph:
        kept = empty()
        replayed, replay = _captured(lambda: call(kept))
        yield Contender("kernel in a CUDA graph", "torch", backend, lambda: (replayed(), None), looped(replay, q.device), 10)


def _sdpa(problem: Problem, q: Any, k: Any, v: Any) -> Contender:
    """torch's default attention, which takes V of another width, and falls to its math path for it."""
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True)

    return Contender("torch scaled_dot_product_attention", "torch", "", lambda: (call()[0].transpose(0, 1), None), looped(call, q.device))


def _package_apis(problem: Problem, q: Any, k: Any, v: Any) -> Iterator[Contender]:
    """The kernels' own Python APIs, as their users call them."""
    cu, longest = torch.tensor(problem.cu_seqlens, device=q.device), max(problem.lengths)
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except Exception:
        pass
    else:

        def call() -> Any:
            return flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True)[0]

        yield Contender("flash_attn.cute (its own API)", "torch", "", lambda: (call(), None), looped(call, q.device))
    try:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper as Wrapper
    except Exception:
        return
    wrapper = Wrapper(torch.empty(128 << 20, dtype=torch.uint8, device=q.device), "NHD", backend="fa3")
    host = cu.cpu()
    wrapper.plan(host, host, problem.heads, problem.heads, QK_HEAD_DIM, head_dim_vo=V_HEAD_DIM, causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
    yield Contender("FlashInfer wrapper, run only", "torch", "", lambda: (wrapper.run(q, k, v), None), looped(lambda: wrapper.run(q, k, v), q.device))
