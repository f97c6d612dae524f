"""The operators' C++ side (``kernels/csrc/torch_op.cc``): which calls it serves without Python, which it leaves to Python, and that both do the same."""

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import frontends
import numpy as np
import oracle
import pytest
from cases import Problem

torch = pytest.importorskip("torch")

import tvm_ffi  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop import MLABuildError, MLAInputError  # noqa: E402
from mla_interop.kernels import torch_op  # noqa: E402
from torch_side import op  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
HEADS, D, V = 3, 24, 16
CU_Q, CU_K = (0, 5, 5, 6, 13), (0, 4, 9, 15, 22)  # rows without a key, and a sequence without queries
PADDED = "{'padded_q': true, 'padded_k': true}"
FULL = "{'padded_q': true, 'padded_k': true, 'is_causal': false}"
KINDS = [(False, False), (True, False), (False, True), (True, True)]
KIND_NAMES = ["prefill", "prefill_lse", "prefill_out", "prefill_lse_out"]
OPERATORS = dict(zip(KINDS, (op.prefill_op, op.prefill_lse_op, op.prefill_out_op, op.prefill_lse_out_op)))


class Native(NamedTuple):
    """``asked``: one entry for each call that Python served. ``library``: the C++ side."""

    asked: list[int]
    library: Any

    def serves(self, run: Any) -> bool:
        """Whether ``run()`` is served without Python."""
        before = len(self.asked)
        run()
        return len(self.asked) == before


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    """An empty memory of calls, and an account of those that Python serves."""
    library = torch_op._library()
    assert library is not None, "it cannot be built here; the warning says why"
    library.forget()
    asked: list[int] = []
    real = op.launch
    monkeypatch.setattr(op, "launch", lambda *arguments: asked.append(1) or real(*arguments))
    yield Native(asked, library)
    library.forget()


class Call(NamedTuple):
    """An operator's arguments but for ``out``."""

    q: Any
    k: Any
    v: Any
    cu_q: Any
    cu_k: Any
    plan: Any = None
    num_q: Any = None
    num_k: Any = None
    max_q: Any = None
    max_k: Any = None
    scale: Any = None
    options: str = PADDED

    def poisoned(self) -> Any:
        return torch.full((*self.q.shape[:-1], self.v.shape[-1]), math.nan, dtype=self.q.dtype, device=self.q.device)

    def run(self, kind: tuple[bool, bool] = (True, False), out: Any = None) -> tuple[Any, Any]:
        """out and lse, or None in its place."""
        return_lse, has_out = kind
        if has_out and out is None:
            out = self.poisoned()
        made = OPERATORS[kind](*self, *[out] * has_out)
        if has_out:
            return out, made if return_lse else None
        return made if return_lse else (made, None)

    def assert_right(self, made: tuple[Any, Any]) -> None:
        """As the float64 oracle has it."""
        q, k, v = (frontends.to_numpy(x) for x in (self.q, self.k, self.v))
        out, lse = made
        if q.ndim == 4:
            batch, tokens, keys = q.shape[0], q.shape[1], k.shape[1]
            cu_q, cu_k = np.arange(batch + 1) * tokens, np.arange(batch + 1) * keys
            q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
            assert out.shape == self.poisoned().shape and out.is_contiguous()
            out, lse = out.flatten(0, 1), lse if lse is None else lse.transpose(0, 1).flatten(1)
        else:
            cu_q, cu_k = ((0, len(x)) if self.cu_q is None else (self.cu_q if cu is None else cu).tolist() for x, cu in ((q, self.cu_q), (k, self.cu_k)))
        expected = oracle.attention(q, k, v, np.asarray(cu_q), np.asarray(cu_k), self.scale, self.options != FULL)
        out_error, lse_error = frontends.errors(Problem(q, k, v, np.asarray(cu_q), np.asarray(cu_k), *expected), out, lse)
        assert out.dtype == self.q.dtype and out_error <= frontends.TOLERANCE[str(out.dtype).removeprefix("torch.")]
        assert lse_error <= frontends.LSE_TOLERANCE


def lengths(*values: int, device: str = "cpu") -> Any:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed(dtype: Any = torch.float32, **changed: Any) -> Call:
    """Five sequences of every kind; v is the right part of an up-projection."""
    q, k, kv = normal(CU_Q[-1], HEADS, D, dtype=dtype), normal(CU_K[-1], HEADS, D, dtype=dtype), normal(CU_K[-1], HEADS, D + V, dtype=dtype)
    return Call(q, k, kv[..., D:], lengths(*CU_Q), lengths(*CU_K))._replace(**changed)


def dense(batch: int = 4, tokens: int = 5, keys: int = 9, **changed: Any) -> Call:
    return Call(normal(batch, tokens, HEADS, D), normal(batch, keys, HEADS, D), normal(batch, keys, HEADS, V), None, None)._replace(**changed)


def at_offset(x: Any, elements: int) -> Any:
    """A copy that begins so many elements behind where it would."""
    buffer = torch.empty(x.numel() + elements, dtype=x.dtype)
    return buffer[elements:].view(x.shape).copy_(x)


SERVED = {
    "packed": packed,
    "bfloat16": lambda: packed(torch.bfloat16),
    "float16": lambda: packed(torch.float16),
    "no mask": lambda: packed(options=FULL),
    "scale 0": lambda: packed(scale=0.0),
    "negative scale": lambda: packed(scale=-0.3),
    "equal lengths": lambda: packed(k=normal(13, HEADS, D), v=normal(13, HEADS, V), cu_k=None),
    "bounds": lambda: packed(num_q=13, num_k=22, max_q=9, max_k=7),
    "off by an element": lambda: packed(q=at_offset(packed().q, 1), cu_q=at_offset(lengths(*CU_Q), 1)),
    "strided": lambda: packed(q=normal(HEADS, 13, D).transpose(0, 1)),
    "one row": lambda: packed(q=normal(1, HEADS, D), cu_q=lengths(0, 0, 0, 1, 1)),
    "one sequence": lambda: packed(cu_q=None, cu_k=None),
    "keys' lengths alone do not count": lambda: packed(cu_q=None, cu_k=lengths(0, 5), plan=normal(4)),
    "dense": dense,
    "dense, one of it": lambda: dense(1, q=normal(1, 7, HEADS, D)[:, :5]),
    "dense, one query": lambda: dense(tokens=1, q=normal(4, 7, HEADS, D)[:, 3:4]),
    "dense, one key": lambda: dense(keys=1, v=normal(4, 3, HEADS, V)[:, :1]),
}
LEFT = {
    "array code": lambda: packed(options="{'padded_q': true, 'padded_k': true, 'backend': 'REFERENCE'}"),
    "float64": lambda: packed(torch.float64),
    "a tail to clear": lambda: packed(options="{'padded_q': true, 'padded_k': true, 'padding': 'any'}"),
    "heads to copy": lambda: packed(k=normal(22, 1, D).expand(-1, HEADS, -1)),
    "lengths to copy": lambda: packed(cu_q=torch.stack([lengths(*CU_Q)] * 2, 1)[:, 0]),
    "no queries": lambda: packed(q=normal(0, HEADS, D), cu_q=lengths(0, 0, 0, 0, 0)),
    "no keys": lambda: packed(k=normal(0, HEADS, D), v=normal(0, HEADS, V), cu_k=lengths(0, 0, 0, 0, 0)),
    "no sequences": lambda: packed(cu_q=lengths(0), cu_k=lengths(0)),
    "dense, uneven queries": lambda: dense(q=normal(4, 7, HEADS, D)[:, :5]),
    "dense, uneven values": lambda: dense(v=normal(4, 10, HEADS, V)[:, 1:]),
    "dense, heads first": lambda: dense(k=normal(4, HEADS, 9, D).transpose(1, 2)),
    "dense, the same keys": lambda: dense(k=normal(1, 9, HEADS, D).expand(4, -1, -1, -1)),
    "dense, the same row": lambda: dense(tokens=1, q=normal(1, 1, HEADS, D).expand(4, -1, -1, -1)),
    "dense, no batch": lambda: dense(0),
}


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("name", SERVED)
def test_the_second_call_of_a_kind_is_served_without_python(name: str, kind: tuple[bool, bool], native: Native) -> None:
    call = SERVED[name]()
    for number in range(3):
        call.assert_right(call.run(kind))
        assert len(native.asked) == 1 and native.library.remembered() == 1, number


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("name", LEFT)
def test_what_is_more_than_a_launch_is_left_to_python(name: str, kind: tuple[bool, bool], native: Native) -> None:
    call = LEFT[name]()
    for number in range(1, 4):
        made = call.run(kind)
        if call.q.dtype != torch.float64:
            call.assert_right(made)
        assert len(native.asked) == number and native.library.remembered() == 0


def other(out: bool = False, **changed: Any) -> Any:
    """A call that differs from ``packed()`` in one part of the key, and its ``out``, which is its own if ``out``."""
    return lambda: (packed(**changed), at_offset(packed().poisoned(), 1) if out else None)


def other_rows() -> tuple[Call, Any]:
    call = packed()
    return call._replace(k=call.k[:-1], v=call.v[:-1], cu_k=lengths(0, 4, 9, 15, 21)), None


KEY = {
    "dtype": lambda: (packed(torch.bfloat16), None),
    "scale": other(scale=0.7),
    "another scale": other(scale=-0.2),
    "max_seqlen_q": other(max_q=9),
    "max_seqlen_k": other(max_k=9),
    "another max_seqlen_q": other(max_q=7),
    "num_tokens_q": other(num_q=13),
    "num_tokens_k": other(num_k=22),
    "options": other(options=FULL),
    "options as long": other(options="{'padded_q': true, 'padded_k': true, 'is_causal': true }"),
    "rows": other_rows,
    "sequences": other(cu_q=lengths(0, 2, 13), cu_k=lengths(0, 9, 22)),
    "strides": lambda: (packed(v=packed().v.contiguous()), None),
    "place of q": lambda: (packed(q=at_offset(packed().q, 1)), None),
    "place of k": lambda: (packed(k=at_offset(packed().k, 2)), None),
    "place of v": lambda: (packed(v=at_offset(packed().v, 1)), None),
    "place of out": other(out=True),
}
PAIRS = [("max_seqlen_q", "max_seqlen_k"), ("max_seqlen_q", "another max_seqlen_q"), ("num_tokens_q", "num_tokens_k")]
PAIRS += [("scale", "another scale"), ("options", "options as long")]
PAIRS += [("strides", "place of v"), *(("", name) for name in KEY if name != "place of v")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_call_that_differs_in_one_part_of_the_key_is_another(first: str, second: str, native: Native) -> None:
    """Else a kernel that was chosen for the one would be launched for the other, with its scale and its bounds."""
    made = [KEY[name]() if name else (packed(), None) for name in (first, second)]
    for number, (call, out) in enumerate(made, 1):
        call.assert_right(call.run((True, True), out))
        assert len(native.asked) == native.library.remembered() == number
    for call, out in made:
        call.assert_right(call.run((True, True), out))
    assert len(native.asked) == 2


@pytest.mark.parametrize("shape", [packed, dense])
def test_each_operator_remembers_for_itself(shape: Any, native: Native) -> None:
    """Without LSE a kernel may be another, and is not asked for LSE."""
    for number, kind in enumerate(KINDS, 1):
        shape().assert_right(shape().run(kind))
        assert len(native.asked) == native.library.remembered() == number


@pytest.mark.gpu
def test_the_device_is_a_part_of_the_key(native: Native) -> None:
    call = packed(torch.bfloat16, q=normal(13, HEADS, 192, dtype=torch.bfloat16), k=normal(22, HEADS, 192, dtype=torch.bfloat16))
    call = call._replace(v=normal(22, HEADS, 128, dtype=torch.bfloat16))
    moved = call._replace(**{name: getattr(call, name).cuda() for name in ("q", "k", "v", "cu_q", "cu_k")})
    for each in (call, moved, call, moved):
        each.assert_right(each.run())
    assert native.library.remembered() == 2


@pytest.mark.parametrize("name", ["packed", "bounds", "one row", "one sequence", "equal lengths", "dense", "dense, one query", "dense, one of it"])
def test_a_kernel_gets_from_cpp_what_it_gets_from_python(name: str, native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each array's shape and strides, for this machine's kernel may not look at all of them, and all that is no array."""
    passed: list[Any] = []

    def described(x: Any) -> Any:
        return (tuple(x.shape), tuple(x.strides), str(x.dtype)) if hasattr(x, "strides") else x

    recorder = tvm_ffi.convert(lambda *arguments: passed.append([described(x) for x in arguments]))
    remember = op._remember
    monkeypatch.setattr(op, "_remember", lambda prepared, *arrays: remember(prepared._replace(launch=recorder), *arrays))
    real = op.launch
    monkeypatch.setattr(op, "launch", lambda prepared, *rest: real(prepared._replace(launch=recorder), *rest))
    call = SERVED[name]()
    for kind in KINDS:
        passed.clear()
        call.run(kind)
        before = len(native.asked)
        call.run(kind)
        assert len(native.asked) == before and passed[0] == passed[1], kind


def refused_values(*values: int) -> Any:
    return lambda call: (call._replace(cu_q=lengths(*values)), call.poisoned())


REFUSED = {
    "falling lengths": refused_values(0, 9, 3, 6, 13),
    "lengths past the end": refused_values(0, 5, 5, 6, 14),
    "lengths that begin late": refused_values(1, 5, 5, 6, 13),
    "negative lengths": refused_values(0, -1, 5, 6, 13),
    "int64": lambda call: (call._replace(cu_k=call.cu_k.long()), call.poisoned()),
    "fewer lengths": lambda call: (call._replace(cu_k=call.cu_k[:-1]), call.poisoned()),
    "a small out": lambda call: (call, call.poisoned()[:-1]),
    "a strided out": lambda call: (call, torch.zeros(13, HEADS, 2 * V)[..., :V]),
    "another dtype of out": lambda call: (call, call.poisoned().double()),
    "out in q": lambda call: (call, call.q.view(-1)[: 13 * HEADS * V].view(13, HEADS, V)),
    "out at the end of k": lambda call: (call, call.k.view(-1)[-13 * HEADS * V :].view(13, HEADS, V)),
    "out over v": lambda call: (call, call.v.as_strided((13, HEADS, V), (HEADS * V, V, 1), 0)),
    "a scale": lambda call: (call._replace(scale=math.inf), call.poisoned()),
    "a maximum": lambda call: (call._replace(max_q=-1), call.poisoned()),
    "dense with lengths": lambda call: (dense(cu_q=call.cu_q, cu_k=call.cu_k), dense().poisoned()),
}


@pytest.mark.parametrize("kind", KINDS[2:], ids=KIND_NAMES[2:])
@pytest.mark.parametrize("name", REFUSED)
def test_what_python_refuses_is_refused_in_its_words_after_a_call_was_remembered(name: str, kind: tuple[bool, bool], native: Native) -> None:
    good = packed(num_q=13, num_k=22)
    call, out = REFUSED[name](good)
    # A served call with the layouts of the refused one, so that nothing but what is wrong tells them apart.
    for _ in range(2):
        call._replace(cu_q=good.cu_q, cu_k=good.cu_k, scale=None, max_q=None).run(kind) if call.q.dim() == 3 else dense().run(kind)
        good.run(kind)
    if out.shape == good.poisoned().shape and out.is_contiguous() and out.dtype == call.q.dtype:
        fresh = at_offset(out, out.data_ptr() % 16 // out.element_size())
        good.run(kind, fresh)
        assert native.serves(lambda: good.run(kind, fresh))
    in_python: Any = op._run
    with pytest.raises(Exception) as expected:
        in_python(kind[0], *call, out)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as raised:
            call.run(kind, out)
        assert str(raised.value) == str(expected.value)
    assert native.serves(lambda: good.assert_right(good.run(kind)))


def test_out_that_requires_grad_is_refused_in_grad_mode_alone(native: Native) -> None:
    call = packed()
    with torch.enable_grad():
        for _ in range(2):
            call.run((False, True))
        out = call.poisoned().requires_grad_()
        with pytest.raises(MLAInputError, match="out: got a tensor that requires grad in grad mode"):
            call.run((False, True), out)
    assert native.serves(lambda: call.assert_right(call.run((False, True), out)))


@pytest.mark.parametrize("way", ["requires grad", "parameter", "inference", "autocast", "deterministic", "subclass"])
def test_states_of_torch_change_nothing(way: str, native: Native) -> None:
    call = packed()
    for _ in range(2):
        call.run()
    if way == "requires grad":
        with torch.enable_grad():
            made = call._replace(**{name: getattr(call, name).clone().requires_grad_() for name in "qk"}).run()
    elif way == "parameter":
        made = call._replace(q=torch.nn.Parameter(call.q)).run()
    elif way == "inference":
        with torch.inference_mode():
            made = call._replace(q=call.q.clone()).run()
    elif way == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = call.run()
    elif way == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            made = call.run()
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        made = call._replace(q=call.q.as_subclass(type("Mine", (torch.Tensor,), {}))).run()
        made = tuple(x.as_subclass(torch.Tensor) for x in made)
    call.assert_right(tuple(x.detach() for x in made))
    assert len(native.asked) == 1


def test_a_lazy_copy_is_written_and_what_it_is_a_copy_of_is_not(native: Native) -> None:
    """Torch gives the copy memory of its own when that is asked for in order to be written."""
    call = packed()
    for number in range(3):
        origin = torch.full_like(call.poisoned(), 7.0)
        call.assert_right(call.run((True, True), torch._lazy_clone(origin)))
        assert bool((origin == 7).all()), number
    assert len(native.asked) == 1


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind in KINDS for name in ["q", "k", "v", "cu_q", *["out"] * kind[1]]])
def test_a_view_with_the_negative_bit_is_refused(name: str, kind: tuple[bool, bool], native: Native) -> None:
    """Of out torch looks for the copy that it made among the results, and where there is none it read what lay behind them."""
    call = packed()
    for _ in range(2):
        call.run(kind)
    given = call if name == "out" else call._replace(**{name: torch._neg_view(getattr(call, name))})
    said = {"cu_q": "cu_seqlens_q"}.get(name, name)
    for _ in range(2):
        with pytest.raises(MLAInputError, match=f"{said}: got a view with the negative bit; allowed: a tensor that holds its values"):
            given.run(kind, torch._neg_view(call.poisoned()) if name == "out" else None)
    assert native.serves(lambda: call.assert_right(call.run(kind)))


def test_a_conjugate_view_is_refused_before_torch_copies_it(native: Native) -> None:
    out = torch.zeros(13, HEADS, V, dtype=torch.complex64).conj()
    with pytest.raises(MLAInputError, match="out: got a view with the conjugate bit"):
        packed().run((False, True), out)


def test_a_compiled_call_refuses_a_negative_view_when_it_is_traced() -> None:
    """Inductor read it with the other sign."""
    call = packed()
    compiled = torch.compile(lambda q, k, v, cu_q, cu_k: torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), backend="aot_eager")
    with pytest.raises(Exception, match="q: got a view with the negative bit"):
        compiled(torch._neg_view(call.q), *call[1:5])


def test_a_compiled_program_keeps_its_choice(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another, which is traced under other settings, has its own, although all of its tensors are alike."""

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        return torch_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)

    call = packed()
    first, second = (torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager") for _ in range(2))
    for number in range(3):
        call.assert_right(first(*call[:5]))
        assert len(native.asked) == 1, number
    with mla_interop.use_config({"backend": "REFERENCE"}):
        assert native.serves(lambda: call.assert_right(first(*call[:5])))
        torch._dynamo.reset()
        for number in (2, 3):
            call.assert_right(second(*call[:5]))
            assert len(native.asked) == number and native.library.remembered() == 1
    monkeypatch.setenv("MLA_INTEROP_BACKEND", "REFERENCE")
    assert native.library.remembered() == 1


def test_a_dispatch_mode_sees_what_cpp_serves(native: Native) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    call = packed()
    for _ in range(2):
        call.run()
    with Watch():
        assert native.serves(lambda: call.run())
    assert seen == ["mla_interop.prefill_lse.default"]


def test_threads_share_what_is_remembered(native: Native) -> None:
    """While others forget all, and calls of many kinds are remembered anew."""
    q, k, v, wrong = packed().q, packed().k, packed().v, []
    calls = [Call(q[:t], k[:s], v[:s], lengths(0, t), lengths(0, s)) for t in (1, 6, 13) for s in (1, 9, 22)]
    expected = [call.run() for call in calls]

    def work(start: int) -> None:
        for number in range(start, start + 120):
            made, right = calls[number % 9].run(), expected[number % 9]
            if not all(torch.equal(a, b) for a, b in zip(made, right)):
                wrong.append(number)
            if number % 40 == 0:
                native.library.forget()

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 40, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and 0 < native.library.remembered() <= 9
    for call, made in zip(calls, expected):
        call.assert_right(made)


def test_what_is_remembered_is_bounded(native: Native) -> None:
    """Calls that differ only in the size of a work list, which this kernel does not look at, are alike to Python."""
    call, buffer, largest = packed(q=normal(1, HEADS, D), cu_q=lengths(0, 0, 0, 0, 1)), torch.zeros(8193, dtype=torch.uint8), 0
    for size in range(1, 8194):
        OPERATORS[False, False](*call._replace(plan=buffer[:size]))
        largest = max(largest, native.library.remembered())
    assert largest == 8192 and native.library.remembered() == 1


def test_a_kernel_that_is_python_is_not_called_from_cpp(native: Native) -> None:
    torch_op.remember(lambda *arguments: None, torch.float32, 0, (1.0, 1, 1, 0), (None, None, None))
    torch_op.remember(native.library["forget"], torch.float32, 0, (1.0, 1, 1, 0), (None, None, None))  # outside of any call
    assert native.library.remembered() == 0


def test_where_it_cannot_be_built_python_serves_and_says_so_once(native: Native, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Any:
        raise MLABuildError("cannot build torch_op: no compiler")

    monkeypatch.setattr(torch_op, "build", build)
    torch_op._library.cache_clear()
    call = packed()
    try:
        for number in range(1, 4):
            call.assert_right(call.run())
            assert len(native.asked) == number
    finally:
        torch_op._library.cache_clear()
    assert [record.getMessage().partition("slower: ")[2] for record in caplog.records] == ["cannot build torch_op: no compiler"]
    monkeypatch.undo()
    assert torch_op._library() is not None  # registering again does nothing


FIRST_CALLS = """
import logging, threading, torch, torch_side
from mla_interop import MLABuildError
from mla_interop.kernels import torch_op
from torch_side import op

q, k, v = torch.load("tensors.pt")
cu_q, cu_k = torch.tensor({cu_q}, dtype=torch.int32), torch.tensor({cu_k}, dtype=torch.int32)
call = lambda: op.prefill_lse_op(q, k, v, cu_q, cu_k, *[None] * 6, "{options}")

build, said = torch_op.build, []
logging.getLogger("mla_interop").addFilter(lambda record: said.append(record.getMessage()))
def fail():
    raise MLABuildError("no compiler")
torch_op.build = fail
results = [call() for _ in range(3)]
assert len(said) == 1 and said[0].endswith("no compiler"), said

torch_op.build = build
torch_op._library.cache_clear()
together = threading.Barrier(8)
def work():
    together.wait()
    results.extend(call() for _ in range(50))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert torch_op._library().remembered() == 1 and len(results) == 403
torch.save([torch.stack(x) for x in zip(*results)], "results.pt")
"""


def test_the_first_calls_of_a_process_may_be_those_of_many_threads(tmp_path: Any) -> None:
    """One of them registers the operators' C++ side while the others call them; before, in the same process, it could not be built."""
    call = packed()
    torch.save(call[:3], tmp_path / "tensors.pt")
    script = FIRST_CALLS.format(cu_q=CU_Q, cu_k=CU_K, options=PADDED)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=300)
    outs, lses = torch.load(tmp_path / "results.pt")
    assert bool((outs == outs[0]).all()) and bool((lses == lses[0]).all())
    call.assert_right((outs[0], lses[0]))
