"""Arguments of a traced call: what is refused there in the words of an eager call, what the program decides when it is traced, and who traces."""

import threading
from typing import Any

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop import MLAInputError  # noqa: E402
from torch_side.op import prefill_lse_op  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
HEADS, T, S = 3, 12, 17
CU_Q, CU_K = [0, 3, 12], [0, 8, 17]


def arrays(tokens: int = T, keys: int = S, seed: int = 0) -> tuple[Any, Any, Any]:
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, HEADS, d, generator=make) for n, d in ((tokens, 24), (keys, 24), (keys, 16)))


def lengths(*values: int, dtype: Any = torch.int32) -> Any:
    return torch.tensor(values, dtype=dtype)


def compiled(function: Any = torch_side.mla_prefill, **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", **{"fullgraph": True, **options})


def assert_right(made: Any, q: Any, k: Any, v: Any, cu_q: Any = None, cu_k: Any = None, **options: Any) -> None:
    cu_q, cu_k = ([0, len(x)] if cu is None else cu for x, cu in ((q, cu_q), (k, cu_k)))
    expected = oracle.attention(*(x.detach().numpy() for x in (q, k, v)), np.asarray(cu_q), np.asarray(cu_k), **options)
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, atol=2e-5)


BAD_LENGTHS = {
    "int64": ((lengths(*CU_Q, dtype=torch.int64), lengths(*CU_K, dtype=torch.int64)), "cu_seqlens_q: got dtype int64"),
    "keys int64": ((lengths(*CU_Q), lengths(*CU_K, dtype=torch.int64)), "cu_seqlens_k: got dtype int64"),
    "fewer": ((lengths(*CU_Q), lengths(0, 17)), r"cu_seqlens_k: got shape \(2,\)"),
    "more": ((lengths(*CU_Q), lengths(0, 3, 8, 17)), r"cu_seqlens_k: got shape \(4,\)"),
    "two dimensions": ((lengths(*CU_Q)[None], lengths(*CU_K)[None]), r"cu_seqlens_q: got shape \(1, 3\)"),
    "none": ((lengths(), lengths()), r"cu_seqlens_q: got shape \(0,\)"),
}


@pytest.mark.parametrize("way", ["compiled", "operator"])
@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_lengths_that_a_kernel_would_read_as_others_are_refused(name: str, way: str) -> None:
    """Of int64 a kernel reads every other half, and of fewer lengths what lies behind them. An exported program has no guard on a dtype."""
    given, words = BAD_LENGTHS[name]
    with pytest.raises(Exception, match=words):
        if way == "compiled":
            compiled()(*arrays(), cu_seqlens_q=given[0], cu_seqlens_k=given[1])
        else:
            prefill_lse_op(*arrays(), *given, *[None] * 6, '{"padded_q": true, "padded_k": true}')


def test_an_exported_program_refuses_other_lengths_when_it_runs() -> None:
    class Plain(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
            return torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)

    program = torch.export.export(Plain(), (*arrays(), lengths(*CU_Q), lengths(*CU_K))).module()
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got dtype int64"):
        program(*arrays(), lengths(*CU_Q).long(), lengths(*CU_K).long())


def test_lengths_whose_number_only_data_decide() -> None:
    """The trace cannot compare their sizes; the call does."""

    def call(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any) -> Any:
        cu_q, cu_k = (torch.nn.functional.pad(ends.nonzero()[:, 0].int() + 1, (1, 0)) for ends in (ends_q, ends_k))
        return torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)

    ends_q, ends_k = torch.zeros(T, dtype=torch.bool), torch.zeros(S, dtype=torch.bool)
    ends_q[[2, 11]], ends_k[[7, 16]] = True, True
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        program = compiled(call)
        assert_right(program(*arrays(), ends_q, ends_k), *arrays(), CU_Q, CU_K)
        ends_k[3] = True
        with pytest.raises(MLAInputError, match=r"cu_seqlens_k: got shape \(4,\); allowed: the shape of cu_seqlens_q, \(3,\)"):
            program(*arrays(), ends_q, ends_k)


@pytest.mark.parametrize("value", [7.0, "7", True, -1, torch.tensor(7)], ids=str)
def test_a_bound_that_is_none(value: Any) -> None:
    with pytest.raises(Exception, match="max_seqlen_k: got"):
        compiled()(*arrays(), cu_seqlens_q=lengths(*CU_Q), cu_seqlens_k=lengths(*CU_K), max_seqlen_k=value)


@pytest.mark.parametrize("value", [torch.tensor(0.3), np.float64(0.3), np.float32(0.3)], ids=str)
def test_a_scale_that_is_an_array_inside_compiled_code(value: Any) -> None:
    with pytest.raises(Exception, match="scale: got a (Tensor|ndarray); allowed: a finite number.*float"):
        compiled(lambda q, k, v, scale: torch_side.mla_prefill(q, k, v, scale=scale))(*arrays(), value)


def test_a_module_whose_scale_is_a_numpy_number_compiles() -> None:
    """``1 / np.sqrt(D)`` is one, and inside compiled code it would be an array."""
    module = torch_side.MLAPrefill(mla_interop.MLADimensions.from_head_dims(24, 16), scale=1 / np.sqrt(48))
    assert_right(compiled(module)(*arrays(), return_lse=True), *arrays(), scale=48**-0.5)
    with pytest.raises(MLAInputError, match="scale: got '1'"):
        torch_side.MLAPrefill(module.dimensions, scale="1")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dynamic", [None, True])
def test_flags_that_depend_on_sizes_are_guarded(dynamic: bool | None) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return torch_side.mla_prefill(q, k, v, is_causal=q.shape[0] == k.shape[0], return_lse=q.shape[0] > 0)

    program = compiled(call, dynamic=dynamic)
    for tokens, keys in ((12, 17), (14, 14), (13, 13), (5, 20), (20, 5)):
        inputs = arrays(tokens, keys)
        assert_right(program(*inputs), *inputs, is_causal=tokens == keys)
    assert_right(make_fx(call, tracing_mode="symbolic")(*arrays())(*arrays()), *arrays(), is_causal=False)


def test_a_dense_batch_of_none() -> None:
    q, k, v = (torch.randn(0, n, HEADS, d) for n, d in ((5, 24), (9, 24), (9, 16)))
    for made, plain in zip(compiled()(q, k, v, return_lse=True), torch_side.mla_prefill(q, k, v, return_lse=True), strict=True):
        assert made.shape == plain.shape and made.stride() == plain.stride()


BAD_OUT = {
    "shape": lambda: torch.empty(T, HEADS, 17),
    "strides": lambda: torch.empty(T, HEADS, 32)[..., ::2],
    "repeated": lambda: torch.empty(1, HEADS, 16).expand(T, -1, -1),
    "device": lambda: torch.empty(T, HEADS, 16, device="meta"),
    "text": lambda: "out",
}


@pytest.mark.parametrize("name", BAD_OUT)
def test_out_that_does_not_fit_a_compiled_call(name: str) -> None:
    with pytest.raises(Exception, match=r"out: got .*; allowed: a contiguous tensor of shape \(12, 3, 16\)"):
        compiled(lambda q, k, v, out: torch_side.mla_prefill(q, k, v, out=out))(*arrays(), BAD_OUT[name]())


def test_out_that_requires_grad_in_a_compiled_call() -> None:
    call = compiled(lambda q, k, v, out: torch_side.mla_prefill(q, k, v, out=out))
    with torch.enable_grad(), pytest.raises(Exception, match="out: got a tensor that requires grad in grad mode"):
        call(*arrays(), torch.zeros(T, HEADS, 16, requires_grad=True))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_nested_tensors_are_refused_with_the_way(way: str) -> None:
    q = torch.nested.nested_tensor([arrays()[0][:3], arrays()[0][3:]], layout=torch.jagged)
    with pytest.raises(Exception, match=r"q: got a nested tensor; allowed: its values\(\), packed"):
        (compiled() if way == "compiled" else torch_side.mla_prefill)(q, *arrays()[1:])
    made = torch_side.mla_prefill(q.values(), *arrays()[1:], cu_seqlens_q=q.offsets().int(), cu_seqlens_k=CU_K, return_lse=True)
    assert_right(made, *arrays(), CU_Q, CU_K)


def test_an_eager_call_beside_a_thread_that_compiles() -> None:
    """torch.compiler.is_compiling() is true of all threads while one compiles: lengths in a list were refused."""
    started, finished, made = threading.Event(), threading.Event(), []

    def slow(graph: Any, inputs: Any) -> Any:
        started.set()
        assert finished.wait(60)
        return graph.forward

    def call() -> None:
        with torch.no_grad():
            made.append(torch.compile(torch_side.mla_prefill, backend=slow, fullgraph=True)(*arrays(), return_lse=True))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert started.wait(60)
        assert_right(torch_side.mla_prefill(*arrays(), cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, return_lse=True), *arrays(), CU_Q, CU_K)
    finally:
        finished.set()
        thread.join()
    assert_right(made[0], *arrays())


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, on the way to forward mode
def test_calls_inside_a_transformation_of_something_else() -> None:
    """A direct launch there wrote into shells, and lengths that were kept as shells made the next call read freed memory."""
    q, k, v = arrays(9, 11)
    metadata = torch_side.prepare_metadata([0, 4, 9], [0, 5, 11])
    expected = torch_side.mla_prefill(q, k, v, cu_seqlens_q=[0, 4, 9], cu_seqlens_k=[0, 5, 11])

    def weighted(weight: Any) -> Any:
        return (torch_side.mla_prefill(q, k, v, metadata=metadata) * weight).sum()

    one = torch.ones(())
    with torch.enable_grad():
        torch.testing.assert_close(torch.func.grad(weighted)(one), expected.sum())
        torch.testing.assert_close(torch.func.jvp(weighted, (one,), (one,)), (expected.sum(),) * 2)
    torch.testing.assert_close(torch.func.vmap(weighted)(torch.tensor([1.0, 2.0])), torch.stack([expected.sum(), 2 * expected.sum()]))
    functional = torch.func.functionalize(lambda q: torch_side.mla_prefill(q, k, v, metadata=metadata))
    assert torch.equal(functional(q), expected)
    with pytest.raises(MLAInputError, match="they belong to a transformation of torch.func"):
        torch.func.vmap(lambda out: torch_side.mla_prefill(q, k, v, metadata=metadata, out=out))(torch.zeros(2, 9, HEADS, 16))
    assert_right(torch_side.mla_prefill(q, k, v, metadata=metadata, return_lse=True), q, k, v, [0, 4, 9], [0, 5, 11])


def test_a_gradient_inside_a_program_is_refused() -> None:
    """Dynamo does not say of the argument of torch.func.grad that it requires grad: the gradient was 0."""
    q, k, v = arrays()
    with torch.enable_grad(), pytest.raises(Exception, match="q: got a tensor that requires grad in grad mode"):
        compiled(torch.func.grad(lambda q: torch_side.mla_prefill(q, k, v).sum()))(q)


def test_a_gradient_under_a_mode_that_watches_is_refused() -> None:
    q, k, v = arrays()
    with torch.enable_grad(), FlopCounterMode(display=False), pytest.raises(MLAInputError, match="k: got a tensor that requires grad in grad mode"):
        torch_side.mla_prefill(q, k.requires_grad_(), v)


def test_int64_lengths_under_a_mode_that_watches_are_those_of_the_host() -> None:
    given = {"cu_seqlens_q": lengths(*CU_Q, dtype=torch.int64), "cu_seqlens_k": lengths(*CU_K, dtype=torch.int64)}
    with FlopCounterMode(display=False):
        made = torch_side.mla_prefill(*arrays(), return_lse=True, **given)
        with pytest.raises(MLAInputError, match="num_tokens_k: got 17 tokens; allowed: at least the last cumulative length, 18"):
            torch_side.mla_prefill(*arrays(), cu_seqlens_q=lengths(*CU_Q), cu_seqlens_k=lengths(0, 8, 18))
    assert_right(made, *arrays(), CU_Q, CU_K)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_with_lengths_of_the_host(device: str) -> None:
    """A model's shapes, on a machine that need not have its device."""
    metadata = torch_side.prepare_metadata(CU_Q, CU_K)
    with FakeTensorMode():
        inputs = [torch.empty(x.shape, device=device) for x in arrays()]
        for given in ({"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}, {"metadata": metadata}):
            out, lse = torch_side.mla_prefill(*inputs, return_lse=True, **given)
            assert out.device.type == device and out.shape == (T, HEADS, 16) and lse.shape == (HEADS, T)
    assert_right(torch_side.mla_prefill(*arrays(), metadata=metadata, return_lse=True), *arrays(), CU_Q, CU_K)


@pytest.mark.parametrize("kind", ["tensors", "lists"])
def test_lengths_are_prepared_changed_and_read_where_a_program_breaks(kind: str) -> None:
    """Without fullgraph: eager pieces, which Dynamo tries to trace one by one. It stopped at the device of a tensor."""
    give = lengths if kind == "tensors" else lambda *values: list(values)
    changing = torch_side.prepare_metadata(CU_Q, CU_K, num_tokens_q=T, num_tokens_k=S, device="cpu", changing=True)

    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        torch_side.update_metadata(changing, cu_q, cu_k)
        metadata = torch_side.prepare_metadata(cu_q, cu_k, num_tokens_q=T, num_tokens_k=S, device="cpu")
        made = [torch_side.mla_prefill(q, k, v, metadata=each, return_lse=True) for each in (changing, metadata)]
        return *made, torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, check=True, return_lse=True)

    program = compiled(call, fullgraph=False)
    for cu_q, cu_k in ((CU_Q, CU_K), ([0, 0, 12], [0, 0, 17]), ([0, 2, 9], [0, 3, 15])):
        for made in program(*arrays(), give(*cu_q), give(*cu_k)):
            assert_right(made, *arrays(), cu_q, cu_k)


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
@pytest.mark.parametrize("index", range(3))
def test_a_view_with_the_negative_bit_is_refused(index: int, backend: str) -> None:
    """It would be read with the wrong sign; a copy in each call would go unnoticed."""
    inputs = list(arrays())
    inputs[index] = torch._neg_view(inputs[index])
    with pytest.raises(MLAInputError, match="got a view with the negative bit; allowed: a tensor that holds its values"):
        torch_side.mla_prefill(*inputs, backend=backend, return_lse=True)
    inputs[index] = inputs[index].resolve_neg()
    assert_right(torch_side.mla_prefill(*inputs, backend=backend, return_lse=True), *inputs)
