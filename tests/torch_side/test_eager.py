"""Eager calls that C++ serves: from which call on, which ones never, and that nothing but the time is different."""

import functools
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import frontends
import numpy as np
import oracle
import pytest
from cases import Problem

torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi")

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop import MLAInputError  # noqa: E402
from mla_interop.kernels import torch_op  # noqa: E402
from torch_side import eager, op  # noqa: E402

HEADS, D, V = 3, 24, 16
CU_Q, CU_K = [0, 5, 5, 6, 13], [0, 4, 9, 15, 22]  # rows without a key, and a sequence without queries


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who launched, of what Python launches: ``eager`` or the operators, ``op``."""
    library = torch_op._library()
    assert library is not None, "it cannot be built here; the warning says why"
    library.forget()
    launches: list[str] = []
    for name, module in (("eager", eager), ("op", op)):
        real = module.launch
        monkeypatch.setattr(module, "launch", lambda *arguments, real=real, name=name: launches.append(name) or real(*arguments))
    yield launches
    library.forget()


class Call(NamedTuple):
    """A call's tensors, and its lengths or metadata."""

    q: Any
    k: Any
    v: Any
    lengths: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012  never written

    def run(self, return_lse: bool = True, has_out: bool = True) -> tuple[Any, Any]:
        out = torch.full((*self.q.shape[:-1], V), math.nan, dtype=self.q.dtype) if has_out else None
        made = torch_side.mla_prefill(self.q, self.k, self.v, **self.lengths, **self.options, return_lse=return_lse, out=out)
        out_made, lse = made if return_lse else (made, None)
        assert out is None or (out_made.data_ptr() == out.data_ptr() and out_made.shape == out.shape)
        return out_made, lse

    def assert_right(self, made: tuple[Any, Any], cu_q: Any = CU_Q, cu_k: Any = CU_K) -> None:
        q, k, v = (frontends.to_numpy(x) for x in (self.q, self.k, self.v))
        out, lse = made
        if q.ndim == 4:
            cu_q, cu_k = (np.arange(x.shape[0] + 1) * x.shape[1] for x in (q, k))
            q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
            out, lse = out.flatten(0, 1), lse if lse is None else lse.transpose(0, 1).flatten(1)
        cu_q, cu_k = np.asarray(cu_q), np.asarray(cu_k)
        expected = oracle.attention(q, k, v, cu_q, cu_k, self.options.get("scale"), self.options.get("is_causal", True))
        out_error, lse_error = frontends.errors(Problem(q, k, v, cu_q, cu_k, *expected), out, lse)
        assert out_error <= frontends.TOLERANCE[str(out.dtype).removeprefix("torch.")] and lse_error <= frontends.LSE_TOLERANCE


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed(rows_q: int = 13, rows_k: int = 22, dtype: Any = torch.float32, options: dict[str, Any] | None = None, **lengths: Any) -> Call:
    q, k, kv = (normal(rows, HEADS, width, dtype=dtype) for rows, width in ((rows_q, D), (rows_k, D), (rows_k, D + V)))
    given = lengths or {"metadata": torch_side.prepare_metadata(CU_Q, CU_K, num_tokens_q=rows_q, num_tokens_k=rows_k)}
    return Call(q, k, kv[..., D:], given, options or {})


def dense() -> Call:
    return Call(normal(4, 5, HEADS, D), normal(4, 9, HEADS, D), normal(4, 9, HEADS, V), {})


def changing() -> Any:
    return torch_side.prepare_metadata(CU_Q, CU_K, num_tokens_q=13, num_tokens_k=22, device="cpu", changing=True)


SERVED: dict[str, Callable[[], Call]] = {
    "lengths of the host": packed,
    "lengths of the device": lambda: packed(metadata=changing()),
    "bfloat16": lambda: packed(dtype=torch.bfloat16),
    "no mask": lambda: packed(options={"is_causal": False}),
    "scale": lambda: packed(options={"scale": -0.3}),
    "by name": lambda: packed(options={"backend": "CPU_SDPA"}),
    "a tail of q": lambda: packed(rows_q=15),
    "dense": dense,
}
LEFT: dict[str, Callable[[], Call]] = {
    "lengths with the call": lambda: packed(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K),
    "a tail of keys": lambda: packed(rows_k=25),
    "a tail to clear": lambda: packed(metadata=changing(), options={"padding": "any"}),
    "array code": lambda: packed(options={"backend": "REFERENCE"}),
}


@pytest.mark.parametrize("has_out", [True, False], ids=["out", "no out"])
@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("name", SERVED)
def test_the_third_call_needs_no_python(name: str, return_lse: bool, has_out: bool, asked: list[str]) -> None:
    call = SERVED[name]()
    eager_calls: list[list[str]] = []
    for _ in range(4):
        made = call.run(return_lse, has_out)
        if name == "a tail of q":
            made = made[0][:13], None if made[1] is None else made[1][:, :13]
            call._replace(q=call.q[:13]).assert_right(made)
        else:
            call.assert_right(made)
        eager_calls.append(asked.copy())
        asked.clear()
    assert eager_calls == [["eager"], ["op"], [], []] or (name == "dense" and eager_calls[2:] == [[], []]), "equal batches share their metadata"


@pytest.mark.parametrize("name", LEFT)
def test_what_is_more_than_a_launch_stays_with_python(name: str, asked: list[str]) -> None:
    call = LEFT[name]()
    for _ in range(3):
        made = call.run()
        call._replace(k=call.k[:22], v=call.v[:22]).assert_right(made)
    assert asked == ["eager"] * 3


def test_layouts_of_one_metadata_are_told_apart(asked: list[str]) -> None:
    call = packed()
    others = [call, call._replace(v=call.v.contiguous()), call._replace(q=normal(HEADS, 13, D).transpose(0, 1)), packed(dtype=torch.float16, **call.lengths)]
    for _ in range(3):
        for other in others:
            other.assert_right(other.run())
    assert asked == ["eager", "op", "op", "op", "op"]


def test_lengths_that_change_in_place_are_read_anew(asked: list[str]) -> None:
    call = packed(metadata=changing())
    for cu_q, cu_k in ((CU_Q, CU_K), (CU_Q, CU_K), ([0, 1, 4, 9, 13], [0, 9, 9, 12, 22]), ([0, 7, 13], [0, 20, 22])):
        torch_side.update_metadata(call.lengths["metadata"], cu_q, cu_k)
        call.assert_right(call.run(), cu_q, cu_k)
    assert asked == ["eager", "op"]


def test_a_choice_is_the_settings(asked: list[str]) -> None:
    call = packed()
    for _ in range(3):
        call.run()
    with mla_interop.use_config({"backend": "REFERENCE"}):
        for _ in range(2):
            call.assert_right(call.run())
    call.run()
    assert asked == ["eager", "op", "eager", "eager"]


def test_what_is_offered_goes_with_the_metadata(asked: list[str]) -> None:
    gc.collect()
    known = len(op._offers)
    call = packed()
    call.run()
    call.run()
    assert len(op._offers) == known + 1
    del call
    gc.collect()
    assert len(op._offers) == known


def test_another_work_list_than_that_of_the_arguments_is_not_remembered(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that follows one has another for another T, of the same metadata: C++ would launch it with the first one's."""
    call = packed()
    call.run()
    real = op.prepared_call
    monkeypatch.setattr(op, "prepared_call", lambda *arguments: (real(*arguments)[0], (*real(*arguments)[1][:2], torch.zeros(4, dtype=torch.uint8))))
    for _ in range(2):
        call.assert_right(call.run())
    assert asked == ["eager", "op", "op"]


def test_out_in_the_memory_of_an_input_is_refused_whoever_serves(asked: list[str]) -> None:
    buffer = normal(13 + 22, HEADS, V)
    call = packed()._replace(v=buffer[:22])
    for start in (22, 22, 22, 9, 22):
        out = buffer[start : start + 13]
        if start == 22:
            torch_side.mla_prefill(call.q, call.k, call.v, **call.lengths, out=out)
            continue
        with pytest.raises(MLAInputError, match="out: got memory that v lies in too"):
            torch_side.mla_prefill(call.q, call.k, call.v, **call.lengths, out=out)


class Subclass(torch.Tensor):
    pass


def remains_of(transform: Any, *shape: int) -> Any:
    """A tensor that a transformation has wrapped, and which outlives it."""
    kept: list[Any] = []
    transform(lambda x: kept.append(x) or x.sum())(torch.zeros(shape))
    return kept[0]


def freed() -> Any:
    out = torch.empty(13, HEADS, V)
    out.untyped_storage().resize_(0)
    return out


NO_OUT: dict[str, Callable[[], Any]] = {
    "text": lambda: "out",
    "a NumPy array": lambda: np.zeros((13, HEADS, V), np.float32),
    "another device": lambda: torch.empty(13, HEADS, V, device="meta"),
    "no memory": freed,
    "of vmap": lambda: remains_of(torch.func.vmap, 2, 13, HEADS, V),
    "conjugate": lambda: torch.zeros(13, HEADS, V, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("name", NO_OUT)
def test_what_is_no_out_is_refused_from_the_first_call_on(name: str, return_lse: bool, asked: list[str]) -> None:
    call, out = packed(), NO_OUT[name]()
    for _ in range(3):
        with pytest.raises(MLAInputError, match="^(out|q, k, v): got"):
            torch_side.mla_prefill(call.q, call.k, call.v, **call.lengths, return_lse=return_lse, out=out)
        call.assert_right(call.run(return_lse))


@pytest.mark.parametrize("name", ["no memory", "of vmap", "of grad", "conjugate"])
def test_what_has_no_values_is_refused_from_the_first_call_on(name: str, asked: list[str]) -> None:
    call = packed()
    q = {
        "no memory": freed,
        "of vmap": lambda: remains_of(torch.func.vmap, 2, 13, HEADS, D),
        "of grad": lambda: remains_of(torch.func.grad, 13, HEADS, D),
        "conjugate": lambda: call.q.to(torch.complex64).conj(),
    }[name]()
    words = "q: got a view with the conjugate bit" if name == "conjugate" else "q, k, v: got tensors without memory"
    for _ in range(3):
        with torch.no_grad(), pytest.raises(MLAInputError, match=words):
            torch_side.mla_prefill(q, *([q, q] if name == "no memory" else [call.k, call.v]), **call.lengths)
        call.assert_right(call.run(has_out=False))


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lengths"])
def test_results_are_of_the_type_that_python_gives_them(name: str, asked: list[str]) -> None:
    """torch makes an operator's results of any argument's type."""
    call, out = packed(), torch.empty(13, HEADS, V)
    if name == "lengths":
        lengths = torch.tensor(CU_Q, dtype=torch.int32).as_subclass(Subclass), torch.tensor(CU_K, dtype=torch.int32), None
        call = call._replace(lengths={"metadata": call.lengths["metadata"].with_arrays(*lengths)})
    given = {x: getattr(call, x).as_subclass(Subclass) if x == name else getattr(call, x) for x in "qkv"}
    given["out"] = out.as_subclass(Subclass) if name == "out" else None if name == "q" else out
    for _ in range(3):
        made = torch_side.mla_prefill(**given, **call.lengths, return_lse=True)
        assert [type(x) is Subclass for x in made] == [name in ("q", "out"), name == "q"]
        call.assert_right((made[0].as_subclass(torch.Tensor), made[1].as_subclass(torch.Tensor)))
        packed(**call.lengths).run() if name != "lengths" else None


def test_a_kernel_that_failed_may_have_called_attention_itself(asked: list[str]) -> None:
    """What Python then remembers is not the inner call."""
    inner, outer = packed(), packed(options={"scale": -0.3})
    inner.run(), inner.run(), outer.run()
    (key, (prepared, lengths)) = next(item for item in outer.lengths["metadata"]._memo.items() if isinstance(item[1], tuple) and hasattr(item[1][0], "launch"))
    fails: list[int] = []

    def kernel(*arguments: Any) -> None:
        inner.assert_right(inner.run())
        if fails:
            raise RuntimeError(f"failure {fails.pop()}")
        prepared.launch(*arguments)

    outer.lengths["metadata"]._memo[key] = prepared._replace(launch=tvm_ffi.convert(kernel)), lengths
    for _ in range(2):
        outer.assert_right(outer.run())
    fails.append(1)
    outer.assert_right(outer.run())
    for call in (inner, outer, inner):
        call.assert_right(call.run())
    assert asked == ["eager", "op", "eager", "op", "op"]


def test_the_text_of_a_call_names_nothing_when_its_metadata_is_gone(asked: list[str]) -> None:
    """torch.jit.trace and the like record it, and may bring it into another process."""
    call = packed()
    call.run()
    (text,) = (text for text, offer in op._offers.items() if offer.metadata is call.lengths["metadata"])
    arguments = op._offers[text].arguments
    call.assert_right(op.prefill_lse_op(call.q, call.k, call.v, *arguments))
    asked.clear()
    lengths, call = call.lengths, call._replace(lengths={})
    lengths.clear()
    gc.collect()
    torch_op._library().forget()
    with pytest.raises(MLAInputError, match="options: got '#[0-9]+', an eager call of metadata that is gone"):
        op.prefill_lse_op(call.q, call.k, call.v, *arguments)
    assert next(op._numbers) >= 2**20, "as another process counts"


def test_without_the_library_python_serves(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_op, "at_hand", lambda: False)
    call = packed()
    for _ in range(3):
        call.assert_right(call.run())
    assert asked == ["eager"] * 3


def test_no_call_waits_for_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """An empty cache, in a process that has not loaded the library."""
    torch_op._is_built.cache_clear()
    monkeypatch.setattr(torch_op, "build", lambda: pytest.fail("nothing is built for an eager call"))
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    monkeypatch.setattr(torch_op, "_library", functools.cache(torch_op._library.__wrapped__))
    assert not torch_op.at_hand() and not any(tmp_path.iterdir())
    torch_op._is_built.cache_clear()


def test_threads_share_metadata(asked: list[str]) -> None:
    call, wrong = packed(), []

    def run() -> None:
        for _ in range(30):
            made = call.run()
            try:
                call.assert_right(made)
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and 2 <= len(asked) <= 24
