"""torch_side on a GPU: CUDA graphs, compiled programs, streams, and that a call never waits for the device."""

import threading
from typing import Any

import numpy as np
import oracle
import pytest
from cases import MLA, offsets
from frontends import LSE_TOLERANCE, TOLERANCE, to_numpy, waiting_refused

import mla_interop
from mla_interop import MLAUnsupportedError
from mla_interop.dimensions import MLADimensions
from mla_interop.selector_config import MLAPrefillSelectorConfig

torch = pytest.importorskip("torch")
# A capture that is refused leaves an empty graph, which torch warns of.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")]

import torch_side  # noqa: E402

T, S, HEADS = 320, 448, 5
BATCHES = [
    ((60, 0, 190, 7), (64, 9, 200, 7)),
    ((1, 128, 129, 62), (400, 1, 30, 0)),
    ((0, 0, 320, 0), (0, 17, 320, 5)),
    ((5, 6, 7, 8), (100, 101, 102, 103)),
]
KERNELS = ["FLASH_ATTN.fa4", "FLASHINFER.fa3"]


def configuration(**settings: Any) -> MLAPrefillSelectorConfig:
    return MLAPrefillSelectorConfig(dtype="bfloat16", dimensions=MLADimensions.from_head_dims(*MLA), num_heads=HEADS, device_type="cuda", **settings)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    """A kernel that can be captured, if it is here."""
    row = next(row for row in mla_interop.explain(configuration(), request.param).rows if row.backend == request.param)
    if row.reasons:
        pytest.skip("; ".join(row.reasons))
    return request.param


def arrays(seed: int, device: str = "cuda") -> tuple[Any, Any, Any]:
    make = torch.Generator().manual_seed(seed)
    q, k, kv = (torch.randn(n, HEADS, d, generator=make).to(device, torch.bfloat16) for n, d in ((T, 192), (S, 192), (S, 256)))
    return q, k, kv[..., 128:]


def judge(out: Any, lse: Any, inputs: Any, lengths: Any, is_causal: bool = True) -> None:
    cu_q, cu_k = map(offsets, lengths)
    expected, expected_lse = oracle.attention(*(to_numpy(x) for x in inputs), cu_q, cu_k, is_causal=is_causal)
    made, made_lse = to_numpy(out), to_numpy(lse)
    empty = np.isneginf(expected_lse)
    assert not made[empty.T].any() and np.isneginf(made_lse[empty]).all(), "rows without a key and rows of the tail"
    assert np.linalg.norm(made - expected) <= TOLERANCE["bfloat16"] * np.linalg.norm(expected)
    assert np.abs(made_lse[~empty] - expected_lse[~empty]).max() <= LSE_TOLERANCE


def changing(kernel: str, lengths: Any, is_causal: bool = True) -> Any:
    plan = {"config": configuration(is_causal=is_causal), "backend": kernel} if kernel.startswith("FLASHINFER") else {}
    return torch_side.prepare_metadata(*map(offsets, lengths), num_tokens_q=T, num_tokens_k=S, device="cuda", changing=True, **plan)


def test_a_graph_is_replayed_with_other_inputs_and_other_lengths(kernel: str) -> None:
    """One capture; every replay is the oracle's, out and lse poisoned before it."""
    static = arrays(0)
    for is_causal in (True, False):
        metadata = changing(kernel, BATCHES[0], is_causal)
        run = lambda: torch_side.mla_prefill(*static, metadata=metadata, return_lse=True, is_causal=is_causal, backend=kernel)  # noqa: B023, E731
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = run()
        for seed, lengths in enumerate([*BATCHES, BATCHES[0]]):
            inputs = arrays(seed + 1)
            for target, source in zip(static, inputs):
                target.copy_(source)
            torch_side.update_metadata(metadata, *map(offsets, lengths))
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            graph.replay()
            judge(out, lse, inputs, lengths, is_causal)


def test_graphed_callables(kernel: str) -> None:
    metadata, sample = changing(kernel, BATCHES[0]), arrays(0)
    module = torch_side.MLAPrefill(MLADimensions.from_head_dims(*MLA), backend=kernel)

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return module(q, k, v, metadata=metadata, return_lse=True)

    graphed = torch.cuda.make_graphed_callables(Layer(), tuple(x.contiguous() for x in sample))
    for seed, lengths in enumerate(BATCHES):
        inputs = arrays(seed + 20)
        torch_side.update_metadata(metadata, *map(offsets, lengths))
        judge(*graphed(*inputs), inputs, lengths)


def capture(call: Any) -> str:
    """What a capture of a call is refused with; the stream must be usable afterwards."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(MLAUnsupportedError) as refusal:
        with torch.cuda.graph(graph):
            call()
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3
    return str(refusal.value)


def test_what_a_capture_must_not_contain_is_refused_before_a_launch(kernel: str) -> None:
    """flashinfer#4609: a read-back inside a capture; flashinfer#4703."""
    inputs = arrays(0)
    metadata = torch_side.prepare_metadata(offsets(BATCHES[0][0]), offsets(BATCHES[0][1]), num_tokens_q=T, num_tokens_k=S, device="cuda")
    call = lambda: torch_side.mla_prefill(*inputs, metadata=metadata, backend=kernel)  # noqa: E731
    assert "the first call with this metadata" in capture(call)
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    graph.replay()
    assert torch.equal(made, expected)
    host = {"cu_seqlens_q": offsets(BATCHES[0][0]), "cu_seqlens_k": offsets(BATCHES[0][1])}
    torch_side.mla_prefill(*inputs, **host, backend=kernel)
    assert "the first call with this metadata" in capture(lambda: torch_side.mla_prefill(*inputs, **host, backend=kernel))


def test_lengths_on_the_device_are_captured_without_metadata() -> None:
    if not mla_interop.explain(configuration(traced=True), "FLASH_ATTN.fa4").chosen:
        pytest.skip("no kernel that reads lengths from the device and can be captured")
    inputs, cu = arrays(0), [torch.tensor(offsets(x), device="cuda") for x in BATCHES[0]]
    call = lambda: torch_side.mla_prefill(*inputs, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], return_lse=True, backend="FLASH_ATTN.fa4")  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths in BATCHES:
        for target, source in zip(cu, lengths):
            target.copy_(torch.tensor(offsets(source)))
        graph.replay()
        judge(out, lse, inputs, lengths)


def test_a_python_kernel_says_that_it_cannot_be_captured() -> None:
    row = next(row for row in mla_interop.explain(configuration(), "FLASH_ATTN.fa2torch").rows if row.backend == "FLASH_ATTN.fa2torch")
    if row.reasons:
        pytest.skip("; ".join(row.reasons))
    inputs = arrays(0)
    metadata = torch_side.prepare_metadata(offsets(BATCHES[0][0]), offsets(BATCHES[0][1]), num_tokens_q=T, num_tokens_k=S, device="cuda")
    call = lambda: torch_side.mla_prefill(*inputs, metadata=metadata, backend="FLASH_ATTN.fa2torch")  # noqa: E731
    call()
    assert "cannot be captured" in capture(call)


def test_no_call_waits_for_the_device(kernel: str) -> None:
    """Prepared metadata, host lengths in every call, and lengths on the device."""
    inputs = arrays(0)
    metadata = torch_side.prepare_metadata(offsets(BATCHES[0][0]), offsets(BATCHES[0][1]), num_tokens_q=T, num_tokens_k=S, device="cuda")
    ways: list[dict[str, Any]] = [{"metadata": metadata}, {"cu_seqlens_q": offsets(BATCHES[0][0]), "cu_seqlens_k": offsets(BATCHES[0][1])}]
    if kernel != "FLASHINFER.fa3":
        ways.append({"cu_seqlens_q": torch.tensor(offsets(BATCHES[0][0]), device="cuda"), "cu_seqlens_k": torch.tensor(offsets(BATCHES[0][1]), device="cuda")})
    bucket = changing(kernel, BATCHES[0])
    for lengths in ways:
        torch_side.mla_prefill(*inputs, **lengths, return_lse=True, backend=kernel)
    with waiting_refused():
        for lengths in ways:
            torch_side.mla_prefill(*inputs, **lengths, return_lse=True, backend=kernel)
        torch_side.update_metadata(bucket, *map(offsets, BATCHES[1]))
    judge(*torch_side.mla_prefill(*inputs, metadata=bucket, return_lse=True, backend=kernel), inputs, BATCHES[1])


def test_a_call_is_one_launch_by_the_driver(kernel: str) -> None:
    """And none by a CUDA runtime, which would find the kernel's function anew each time; lengths and tensors are such that nothing is left to finish."""
    inputs, metadata = arrays(0), torch_side.prepare_metadata([0, 60, 100, T], device="cuda")
    q, k, v = inputs[0], inputs[1][:T], inputs[2][:T]
    torch_side.mla_prefill(q, k, v, metadata=metadata, backend=kernel)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        torch_side.mla_prefill(q, k, v, metadata=metadata, backend=kernel)
        torch.cuda.synchronize()
    launches = [event.name for event in profile.events() if "LaunchKernel" in event.name]
    assert launches == ["cuLaunchKernel"]


def test_inputs_that_arrive_late_on_a_side_stream(kernel: str) -> None:
    """100 times: the launch must follow the current stream, or it reads what was there before."""
    metadata = torch_side.prepare_metadata(*map(offsets, BATCHES[0]), num_tokens_q=T, num_tokens_k=S, device="cuda")
    sources = [arrays(seed) for seed in range(4)]
    expected = [torch_side.mla_prefill(*x, metadata=metadata, backend=kernel) for x in sources]
    side, static = torch.cuda.Stream(), [torch.empty_like(x) for x in sources[0]]
    torch.cuda.synchronize()
    for i in range(100):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            for target, source in zip(static, sources[i % 4]):
                target.copy_(source)
            made = torch_side.mla_prefill(*static, metadata=metadata, backend=kernel)
        side.synchronize()
        assert torch.equal(made, expected[i % 4]), i


def test_two_threads_on_two_streams_share_metadata(kernel: str) -> None:
    metadata = torch_side.prepare_metadata(*map(offsets, BATCHES[0]), num_tokens_q=T, num_tokens_k=S)  # the first call copies it
    inputs = [arrays(seed) for seed in range(2)]
    expected = [torch_side.mla_prefill(*x, cu_seqlens_q=offsets(BATCHES[0][0]), cu_seqlens_k=offsets(BATCHES[0][1]), backend=kernel) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []
    begin = threading.Barrier(2)

    def run(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            begin.wait()
            for _ in range(100):
                made = torch_side.mla_prefill(*inputs[index], metadata=metadata, backend=kernel)
                stream.synchronize()
                if not torch.equal(made, expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_layer(mode: str, kernel: str) -> None:
    """Inductor, with its CUDA graphs too; new lengths in the bucket do not recompile; v is a view of the projection."""
    torch._dynamo.reset()

    def layer(q: Any, latent: Any, weight: Any, metadata: Any) -> Any:
        kv = (latent @ weight).view(-1, HEADS, 320)
        return torch_side.mla_prefill(q, kv[..., :192], kv[..., 192:], metadata=metadata, return_lse=True, backend=kernel)

    make = torch.Generator().manual_seed(1)
    latent, weight = (torch.randn(shape, generator=make).to("cuda", torch.bfloat16) for shape in ((S, 64), (64, HEADS * 320)))
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        for repeat in range(2):
            for seed, lengths in enumerate(BATCHES):
                q = arrays(seed)[0]
                made = [x.clone() for x in compiled(q, latent, weight, changing(kernel, lengths))]
                kv = (latent @ weight).view(-1, HEADS, 320)
                judge(*made, (q, kv[..., :192], kv[..., 192:]), lengths)
                if not repeat and not seed:
                    torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_stream_inside_compiled_code() -> None:
    torch._dynamo.reset()
    metadata, side = torch_side.prepare_metadata(*map(offsets, BATCHES[0]), num_tokens_q=T, num_tokens_k=S, device="cuda"), torch.cuda.Stream()

    def call(q: Any, k: Any, v: Any) -> Any:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # A program may not follow a work list that its metadata lacks: a kernel that both ways choose is named.
            made = torch_side.mla_prefill(q * 2, k, v, metadata=metadata, backend="FLASH_ATTN")
        torch.cuda.current_stream().wait_stream(side)
        return made + 0

    compiled = torch.compile(call)
    with torch.no_grad():
        for seed in range(20):
            inputs = arrays(seed)
            assert torch.equal(compiled(*inputs), call(*inputs))


def test_autocast_changes_nothing(kernel: str) -> None:
    inputs, metadata = arrays(0), torch_side.prepare_metadata(*map(offsets, BATCHES[0]), num_tokens_q=T, num_tokens_k=S, device="cuda")
    for backend in (kernel, "REFERENCE"):
        expected = torch_side.mla_prefill(*inputs, metadata=metadata, backend=backend)
        with torch.autocast("cuda", dtype=torch.float16):
            made = torch_side.mla_prefill(*inputs, metadata=metadata, backend=backend)
        assert made.dtype == torch.bfloat16 and torch.equal(made, expected)
