"""What PyTorch's transformations see of a call: one operator, with lengths as data. Values are those of the eager call, which other tests judge."""

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import frontends  # noqa: E402
from cases import BY_NAME  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop import MLAInputError  # noqa: E402
from torch_side.op import prefill_lse_op, prefill_lse_out_op, prefill_op, prefill_out_op  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
R1 = mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
HEADS, T, S = 3, 12, 17


def arrays(tokens: int = T, keys: int = S, seed: int = 0) -> tuple[Any, Any, Any]:
    """q, k, and v as the right part of an up-projection."""
    make = torch.Generator().manual_seed(seed)
    q, k, kv = (torch.randn(n, HEADS, d, generator=make) for n, d in ((tokens, 192), (keys, 192), (keys, 256)))
    return q, k, kv[..., 128:]


def bucket(cu_q: list[int], cu_k: list[int], **options: Any) -> Any:
    return torch_side.prepare_metadata(cu_q, cu_k, num_tokens_q=T, num_tokens_k=S, device="cpu", **options)


def layer(q: Any, k: Any, v: Any, metadata: Any, **options: Any) -> Any:
    out, lse = torch_side.mla_prefill(q * 1.5, k, v, metadata=metadata, return_lse=True, **options)
    return out.flatten(1) + 1, lse


def equal(made: Any, expected: Any) -> None:
    for a, b in zip(made, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


def operators(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes if "mla_interop" in str(node.target)]


BATCHES = [([0, 3, 9], [0, 8, 17]), ([0, 0, 12], [0, 0, 3]), ([0, 5, 5], [0, 0, 9]), ([0, 1, 2], [0, 16, 16])]


def test_the_graph_has_one_node_and_lengths_inside_a_bucket_do_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seed, lengths in enumerate(BATCHES):
        inputs, metadata = arrays(seed=seed), bucket(*lengths)
        equal(compiled(*inputs, metadata), layer(*inputs, metadata))
    assert counter.frame_count == 1 and operators(counter.graphs[0].graph) == ["mla_interop.prefill_lse.default"]


@pytest.mark.parametrize("padding", ["finite", "any"])
def test_a_compiled_call_is_the_oracles(padding: str) -> None:
    """Empty sequences of every kind and a tail: the program knows bounds only, so the kernel has to fill all that could be empty."""
    case = BY_NAME["tail-of-every-kind"]
    problem = case.problem()
    q, k, v = (frontends.to_torch(x, "cpu") for x in (problem.q, problem.k, problem.v))
    if padding == "finite":
        k, v = torch.nan_to_num(k), torch.nan_to_num(v)
    metadata = torch_side.prepare_metadata(problem.cu_q, problem.cu_k, num_tokens_q=len(q), num_tokens_k=len(k), device="cpu")
    compiled = torch.compile(torch_side.mla_prefill, fullgraph=True, backend="aot_eager")
    frontends.assert_right(case, *compiled(q, k, v, metadata=metadata, return_lse=True, padding=padding))


def test_number_of_tokens_and_sequences_are_dynamic() -> None:
    """Without a bucket: the second shape makes the program dynamic, and no other shape recompiles. float32 and two masks are other programs."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, cu_q, cu_k: torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), fullgraph=True, backend=counter)
    for tokens, lengths in ((12, [5, 7]), (20, [4, 10, 6]), (33, [30, 1, 1, 1]), (7, [2, 0, 5]), (64, [64, 0])):
        q, k, v = arrays(tokens, tokens, seed=tokens)
        cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        assert torch.equal(compiled(q, k, v, cu, cu.clone()), torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu.tolist()))
    assert counter.frame_count == 2


@pytest.mark.parametrize("keys", ["own lengths", "equal lengths"])
def test_metadata_of_other_sizes_makes_the_program_dynamic_once(keys: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, metadata: torch_side.mla_prefill(q, k, v, metadata=metadata), fullgraph=True, backend=counter)
    for tokens, lengths in ((12, [5, 7]), (20, [4, 16]), (33, [30, 3]), (7, [2, 5])):
        cu = np.cumsum([0, *lengths])
        metadata = torch_side.prepare_metadata(cu, cu if keys == "own lengths" else None, device="cpu")
        inputs = arrays(tokens, tokens, seed=tokens)
        assert torch.equal(compiled(*inputs, metadata), torch_side.mla_prefill(*inputs, metadata=metadata))
    assert counter.frame_count == 2


def test_what_the_text_holds_is_guarded_and_each_call_of_a_program_has_its_own() -> None:
    """The text is made once, when a program is traced: other options and other bounds must be other programs."""
    counter = CompileCounterWithBackend("aot_eager")

    def two(q: Any, k: Any, v: Any, metadata: Any, is_causal: bool, padding: str, backend: Any, scale: float) -> Any:
        first = torch_side.mla_prefill(q, k, v, metadata=metadata, is_causal=is_causal, padding=padding, backend=backend, scale=scale)
        return first, torch_side.mla_prefill(q, k, v, metadata=metadata, is_causal=not is_causal)

    compiled, inputs = torch.compile(two, fullgraph=True, backend=counter), arrays(12, 12)
    equal_lengths, own = (torch_side.prepare_metadata([0, 3, 12], cu_k, device="cpu") for cu_k in (None, [0, 7, 12]))
    padded = torch_side.prepare_metadata([0, 3, 9], num_tokens_q=12, device="cpu")
    calls: list[Any] = [(own, True, "finite", None, 0.1), (own, False, "finite", None, 0.1), (own, True, "any", None, 0.1)]
    calls += [(own, True, "finite", ["reference"], 0.1), (equal_lengths, True, "finite", None, 0.1), (padded, True, "finite", None, 0.1)]
    for number, call in enumerate(calls, 1):
        equal(compiled(*inputs, *call), two(*inputs, *call))
        assert counter.frame_count == number
    texts = [[node.args[-1] for node in graph.graph.nodes if "mla_interop" in str(node.target)] for graph in counter.graphs]
    environment = texts[0][0].split("'")[3]
    # Between single quotes: Inductor's C++ wrapper puts the text between double ones as it is, and would not compile.
    assert texts[3] == [f"{{'backend': 'REFERENCE', 'environment': '{environment}'}}", f"{{'is_causal': false, 'environment': '{environment}'}}"]


def test_a_call_has_few_guards() -> None:
    """Dynamo checks each in every call of a program. Beyond those of a program that only reads the tensors of its arguments, these are ours."""
    counts = []

    def guards_of(function: Any) -> int:
        options = {"guard_filter_fn": lambda entries: counts.append(len(entries)) or [True] * len(entries)}
        torch.compile(function, fullgraph=True, backend="eager", options=options)(*arrays(12, 12), torch_side.prepare_metadata([0, 12], device="cpu"))
        return counts[-1]

    least = guards_of(lambda q, k, v, metadata: q + k + v.sum() + metadata.cu_seqlens_q.sum())
    assert guards_of(lambda q, k, v, metadata: torch_side.mla_prefill(q, k, v, metadata=metadata)) - least <= 57


def test_one_sequence_and_a_dense_batch() -> None:
    q, k, v = arrays()
    compiled = torch.compile(lambda q, k, v: torch_side.mla_prefill(q, k, v, return_lse=True, scale=0.1), fullgraph=True, backend="aot_eager", dynamic=True)
    equal(compiled(q, k, v), torch_side.mla_prefill(q, k, v, return_lse=True, scale=0.1))
    dense = [torch.randn(2, n, 3, d) for n, d in ((5, 192), (9, 192), (9, 128))]
    equal(compiled(*dense), torch_side.mla_prefill(*dense, return_lse=True, scale=0.1))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, when Inductor is imported
def test_inductor_reads_v_through_its_strides() -> None:
    """The up-projection is computed in the program; v reaches the operator as a view of it."""
    seen = []

    def attention(q: Any, latent: Any, weight: Any, metadata: Any) -> Any:
        kv = (latent @ weight).view(-1, HEADS, 320)
        return torch_side.mla_prefill(q, kv[..., :192], kv[..., 192:], metadata=metadata) * 2

    q, latent, weight, metadata = arrays()[0], torch.randn(S, 24), torch.randn(24, HEADS * 320), bucket(*BATCHES[0])
    compiled = torch.compile(attention, fullgraph=True)
    real = torch_side.op.call_key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_side.op, "call_key", lambda q, k, v, rest: seen.append(v.stride()) or real(q, k, v, rest))
        made = compiled(q, latent, weight, metadata)
    torch.testing.assert_close(made, attention(q, latent, weight, metadata))
    assert seen == [(HEADS * 320, 320, 1)]


def test_the_module_and_named_backends() -> None:
    module = torch_side.MLAPrefill(R1, scale=0.2, backend=["flash_attn", "reference"])
    compiled, inputs, metadata = torch.compile(module, fullgraph=True, backend="aot_eager"), arrays(), bucket(*BATCHES[0])
    assert torch.equal(compiled(*inputs, metadata=metadata), module(*inputs, metadata=metadata))
    with pytest.raises(mla_interop.MLAUnsupportedError, match="FLASH_ATTN: device cpu"):
        torch.compile(torch_side.mla_prefill, fullgraph=True, backend="aot_eager")(*inputs, metadata=metadata, backend="FLASH_ATTN")


def test_out_is_written_by_a_compiled_call() -> None:
    q, k, v = arrays()
    metadata, out = bucket(*BATCHES[0]), torch.full((T, HEADS, 128), torch.nan)
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: Any, k: Any, v: Any, metadata: Any, out: Any) -> Any:
        return torch_side.mla_prefill(q, k, v, metadata=metadata, out=out, return_lse=True)[1]

    lse = torch.compile(call, fullgraph=True, backend=counter)(q, k, v, metadata, out)
    equal((out, lse), torch_side.mla_prefill(q, k, v, metadata=metadata, return_lse=True))
    assert operators(counter.graphs[0].graph) == ["mla_interop.prefill_lse_out.default"]


def arguments(metadata: Any, options: str = '{"padded_q": true, "padded_k": true}') -> tuple[Any, ...]:
    """An operator's, from ``cu_seqlens_q`` to ``options``."""
    b = metadata.bounds
    return metadata.cu_seqlens_q, metadata.cu_seqlens_k, None, b.num_tokens_q, b.num_tokens_k, b.max_seqlen_q, b.max_seqlen_k, None, options


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
def test_opcheck(return_lse: bool, dense: bool) -> None:
    inputs, rest = arrays(), arguments(bucket(*BATCHES[0]))
    if dense:
        inputs, rest = tuple(x.unflatten(0, (1, -1)).expand(2, -1, -1, -1) for x in inputs), (*[None] * 8, "{}")
    torch.library.opcheck(prefill_lse_op if return_lse else prefill_op, (*inputs, *rest))
    out = torch.zeros(*inputs[0].shape[:-1], 128)
    torch.library.opcheck(prefill_lse_out_op if return_lse else prefill_out_op, (*inputs, *rest, out))


def test_eight_bit_inputs_give_sixteen_bits_in_the_fake_too() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(5, HEADS, d, dtype=torch.float8_e4m3fn) for d in (192, 192, 128))
        out, lse = torch_side.mla_prefill(q, k, v, cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32), return_lse=True)
    assert out.dtype == torch.bfloat16 and out.shape == (5, HEADS, 128) and lse.shape == (HEADS, 5) and lse.dtype == torch.float32


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator_and_no_lengths(mode: str) -> None:
    """A direct launch would be invisible to it: what the kernel wrote would become a constant."""
    inputs, metadata = arrays(), bucket(*BATCHES[0])

    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        lengths = metadata.with_arrays(cu_q, cu_k, None)
        return torch_side.mla_prefill(q, k, v, metadata=lengths)

    graph = make_fx(call, tracing_mode=mode)(*inputs, metadata.cu_seqlens_q, metadata.cu_seqlens_k)
    assert operators(graph.graph) == ["mla_interop.prefill.default"] and not [n for n in graph.graph.nodes if n.op == "get_attr"]
    other, fresh_inputs = bucket(*BATCHES[1]), arrays(seed=5)
    made = graph(*fresh_inputs, other.cu_seqlens_q, other.cu_seqlens_k)
    assert torch.equal(made, torch_side.mla_prefill(*fresh_inputs, metadata=other))
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got list inside compiled code; allowed: int32 tensors, or metadata"):
        make_fx(lambda q: torch_side.mla_prefill(q, q, q, cu_seqlens_q=[0, 12]), tracing_mode=mode)(inputs[0])


def test_a_mode_that_only_watches_sees_the_operator_and_changes_nothing() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = arrays()
    with Watch():
        made = torch_side.mla_prefill(q, k, v, cu_seqlens_q=[0, 3, 12], cu_seqlens_k=[0, 9, 17])
    assert torch.equal(made, torch_side.mla_prefill(q, k, v, cu_seqlens_q=[0, 3, 12], cu_seqlens_k=[0, 9, 17]))
    assert seen.count("mla_interop.prefill.default") == 1


class Layer(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any, metadata: Any) -> Any:
        return layer(q, k, v, metadata)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_takes_metadata_as_an_input(strict: bool) -> None:
    inputs, metadata = arrays(), bucket(*BATCHES[0])
    program = torch.export.export(Layer(), (*inputs, metadata), strict=strict)
    assert operators(program.graph) == ["mla_interop.prefill_lse.default"]
    other, fresh_inputs = bucket(*BATCHES[2]), arrays(seed=7)
    equal(program.module()(*fresh_inputs, other), layer(*fresh_inputs, other))


def test_export_with_a_dynamic_number_of_tokens_survives_a_file() -> None:
    class Plain(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, cu: Any) -> Any:
            return torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu)

    tokens, count = torch.export.Dim("tokens", min=2), torch.export.Dim("count", min=2)
    q, k, v = arrays(12, 12)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    dynamic = {"q": {0: tokens}, "k": {0: tokens}, "v": {0: tokens}, "cu": {0: count}}
    program = torch.export.export(Plain(), (q, k, v, cu), dynamic_shapes=dynamic)
    q, k, v = arrays(40, 40)
    assert torch.equal(program.module()(q, k, v, torch.tensor([0, 1, 30, 40], dtype=torch.int32)), torch_side.mla_prefill(q, k, v, cu_seqlens_q=[0, 1, 30, 40]))


def test_a_saved_program_runs_in_another_process(tmp_path: Any) -> None:
    """What its operator was given is text there too: a mask, a backend, bounds."""

    class Plain(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, metadata: Any) -> Any:
            return torch_side.mla_prefill(q, k, v, metadata=metadata, is_causal=False, backend=["cpu_sdpa", "reference"], scale=0.3)

    inputs, metadata, other = arrays(), bucket(*BATCHES[0]), bucket(*BATCHES[2])
    torch.export.save(torch.export.export(Plain(), (*inputs, metadata)), tmp_path / "program.pt2")
    torch.save((inputs, other.cu_seqlens_q, other.cu_seqlens_k), tmp_path / "inputs.pt")
    script = """
import sys, torch, torch_side
inputs, cu_q, cu_k = torch.load("inputs.pt")
metadata = torch_side.prepare_metadata(cu_q.numpy(), cu_k.numpy(), num_tokens_q=12, num_tokens_k=17, device="cpu")
with torch.no_grad():
    torch.save(torch.export.load("program.pt2").module()(*inputs, metadata), "out.pt")
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "out.pt"), Plain()(*inputs, other))


REFUSED = {
    "host lengths": ({"cu_seqlens_q": [0, 12]}, "cu_seqlens_q: got list inside compiled code"),
    "bounds alone": ({"max_seqlen_q": 12}, "cu_seqlens_q: got None inside compiled code"),
    "read back": ({"check": True}, "check: got True inside compiled code"),
    "flag": ({"is_causal": 1}, "is_causal: got 1"),
    "two forms": ({"cu_seqlens_k": [0, 12]}, "cu_seqlens_q: got None inside compiled code"),
    "two at once": (
        {"metadata": torch_side.prepare_metadata([0, 12], device="cpu"), "cu_seqlens_k": torch.tensor([0, 12], dtype=torch.int32)},
        "metadata: given together with cu_seqlens",
    ),
    "a name": ({"backend": "FLASH"}, "backend: got 'FLASH'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_in_words(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(Exception, match=words):
        torch.compile(lambda q, k, v: torch_side.mla_prefill(q, k, v, **options), fullgraph=True, backend="aot_eager")(*arrays(12, 12))


def test_metadata_without_tensors_and_wrong_shapes_are_refused_at_trace_time() -> None:
    compiled = torch.compile(torch_side.mla_prefill, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="lengths in host memory inside compiled code"):
        compiled(*arrays(12, 12), metadata=torch_side.prepare_metadata([0, 12]))
    torch._dynamo.reset()
    q, k, v = arrays()
    with pytest.raises(Exception, match="k: got last dim 100; allowed: q's last dim, 192"):
        compiled(q, k[..., :100], v, metadata=bucket(*BATCHES[0]))


def test_gradients_are_refused_in_a_compiled_call() -> None:
    q, k, v = arrays()
    metadata = bucket(*BATCHES[0])
    compiled = torch.compile(torch_side.mla_prefill, fullgraph=True, backend="aot_eager")
    with torch.enable_grad(), pytest.raises(Exception, match="q: got a tensor that requires grad in grad mode"):
        compiled(q.requires_grad_(), k, v, metadata=metadata)
    assert torch.equal(compiled(q, k, v, metadata=metadata), torch_side.mla_prefill(q, k, v, metadata=metadata))


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_autocast_changes_nothing(backend: str, way: str) -> None:
    def call(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        return torch_side.mla_prefill(q, k, v, metadata=metadata, backend=backend)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if way == "compiled" else call
    inputs, metadata = arrays(), bucket(*BATCHES[0])
    expected = run(*inputs, metadata)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = run(*inputs, metadata)
    assert made.dtype == torch.float32 and torch.equal(made, expected)


@pytest.mark.parametrize("way", ["eager", "operator", "compiled"])
def test_vmap_is_refused_with_the_alternative(way: str) -> None:
    q, k, v = (torch.stack([x, x]) for x in arrays(12, 12))
    metadata = torch_side.prepare_metadata([0, 5, 12], device="cpu")
    run: Any = torch_side.mla_prefill
    eager = torch.func.vmap(lambda *x: run(*x, metadata=metadata))
    call = {
        "eager": eager,
        "operator": torch.func.vmap(lambda *x: prefill_op(*x, *arguments(metadata))),
        "compiled": torch.compile(eager, fullgraph=True, backend="aot_eager"),
    }[way]
    with pytest.raises(Exception, match="torch.func.vmap, give the mapped dimension as the batch of a dense"):
        call(q, k, v)
    assert torch.equal(torch_side.mla_prefill(q, k, v)[1], torch_side.mla_prefill(*arrays(12, 12)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, on the way to forward mode
def test_forward_mode_and_functional_gradients_are_refused() -> None:
    q, k, v = arrays(12, 12)
    for transform in (
        lambda: torch.func.grad(lambda q: torch_side.mla_prefill(q, k, v).sum())(q),
        lambda: torch.func.jvp(lambda q: torch_side.mla_prefill(q, k, v), (q,), (q,)),
        lambda: torch.func.vjp(lambda q: torch_side.mla_prefill(q, k, v), q),
    ):
        with torch.enable_grad(), pytest.raises(MLAInputError, match="REFERENCE"):
            transform()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(MLAInputError, match="k: got a tensor with a tangent of forward-mode"):
        torch_side.mla_prefill(q, torch.autograd.forward_ad.make_dual(k, k), v)


def test_parameters_are_tensors_and_metadata_can_be_copied() -> None:
    q, k, v = arrays()
    metadata = bucket(*BATCHES[0])
    made = torch_side.mla_prefill(torch.nn.Parameter(q), k, v, metadata=metadata)
    assert torch.equal(made, torch_side.mla_prefill(q, k, v, metadata=copy.copy(metadata)))
    leaves, tree = torch.utils._pytree.tree_flatten(metadata)
    again = torch.utils._pytree.tree_unflatten(leaves, tree)
    assert again.bounds == metadata.bounds and again.host is None and torch.equal(again.cu_seqlens_k, metadata.cu_seqlens_k)
