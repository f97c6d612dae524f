"""The XLA handler and its Python side: values, errors, registration, export, and that a call neither leaks nor runs Python."""

import ctypes
import dataclasses
import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
tvm_ffi = pytest.importorskip("tvm_ffi")

import jax.numpy as jnp  # noqa: E402

from jax_side import callback, ffi  # noqa: E402
from mla_interop.backends import registry  # noqa: E402
from mla_interop.kernels import xla  # noqa: E402
from mla_interop.kernels.build import compile_cpp  # noqa: E402

BACKEND = "CPU_SDPA"
T, S, N, D, V = 7, 9, 2, 6, 4
CU_Q, CU_K = np.array([0, 3, 7], np.int32), np.array([0, 5, 9], np.int32)


def writable(tensor: Any) -> np.ndarray:
    """A float32 tensor's memory; NumPy before 2.2 takes what comes without a DLPack version for read-only."""
    array = np.from_dlpack(tensor)
    return array if array.flags.writeable else np.ctypeslib.as_array((ctypes.c_float * array.size).from_address(array.ctypes.data)).reshape(array.shape)


def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, plan: Any, scratch: Any, out: Any, lse: Any, scale: float, *bounds: int) -> None:
    """Attention without a mask in the package's ABI, over NumPy views."""
    q, k, v, cu_q, cu_k = (np.from_dlpack(tensor) for tensor in (q, k, v, cu_q, cu_k))
    out, lse = writable(out), np.empty((N, len(q)), np.float32) if lse is None else writable(lse)
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        scores = np.einsum("tnd,snd->nts", q[rows], k[keys]) * scale
        lse[:, rows] = np.log(np.exp(scores).sum(-1))
        out[rows] = np.einsum("nts,snv->tnv", np.exp(scores - lse[:, rows, None]), v[keys])


@pytest.fixture(autouse=True)
def on_a_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything but the tests of a GPU runs on a CPU, also where there is a GPU."""
    with jax.default_device(jax.local_devices(backend="cuda" if request.node.get_closest_marker("gpu") else "cpu")[0]):
        yield


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Any:
    """Registers functions as kernels under names that no other test has: a name stands for one function for good."""
    names = []

    def register(function: Callable[..., Any]) -> str:
        name = f"mla_interop.kernel.test.{request.node.originalname}.{len(names)}.{time.monotonic_ns()}"
        tvm_ffi.register_global_func(name, function)
        names.append(name)
        return name

    yield register
    for name in names:
        tvm_ffi.remove_global_func(name)


@pytest.fixture
def problem(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k."""
    return (*(rng.standard_normal(shape, np.float32) for shape in [(T, N, D), (S, N, D), (S, N, V)]), CU_Q, CU_K)


@functools.cache
def toy() -> Any:
    """The compiled kernels of toy_kernel.cc."""
    return tvm_ffi.load_module(str(compile_cpp("toy_kernel", [str(Path(__file__).parent / "toy_kernel.cc")])))


def make_spec(kernel: str, kind: str = "python", **changes: Any) -> ffi.CallSpec:
    spec = ffi.CallSpec(BACKEND, kind, kernel, (T, N, V), np.dtype(np.float32), (N, T), 0, 0.5, 4, 5, 0)
    return dataclasses.replace(spec, **changes)


def expected(problem: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    out, lse = np.empty((T, N, V), np.float32), np.empty((N, T), np.float32)
    attention(*problem, None, None, out, lse, 0.5)
    return out, lse


def test_values_eager_jit_and_scan(kernel: Any, problem: Any) -> None:
    spec = make_spec(kernel(attention))
    want_out, want_lse = expected(problem)
    run = functools.partial(ffi.call, spec)
    scanned = jax.jit(lambda *args: jax.lax.scan(lambda carry, _: (carry, run(*args)), 0, None, length=3)[1])
    for got in (run(*problem), jax.jit(run)(*problem), tuple(leaf[2] for leaf in scanned(*problem))):
        np.testing.assert_allclose(got[0], want_out, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], want_lse, rtol=1e-5, atol=1e-6)


def test_optional_buffers_and_dtypes_reach_the_kernel(kernel: Any, problem: Any) -> None:
    seen = []

    def look(*args: Any) -> None:
        seen.append([(str(arg.dtype), arg.shape, arg.strides) if isinstance(arg, tvm_ffi.Tensor) else arg for arg in args])
        np.from_dlpack(args[7])  # out

    q, k, v, cu_q, cu_k = problem
    name = kernel(look)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2):
        spec = make_spec(name, out_dtype=np.dtype(np.float32), lse_shape=None, scratch_floats=12, finish=3)
        out, lse = ffi.call(spec, q.astype(dtype), k, v, cu_q, cu_k, jnp.zeros(16, jnp.uint8))
        jax.block_until_ready(out)
        assert lse is None
        assert seen[-1][0] == (jnp.dtype(dtype).name, (T, N, D), (N * D, D, 1))
        assert seen[-1][3:7] == [("int32", (3,), (1,)), ("int32", (3,), (1,)), ("uint8", (16,), (1,)), ("float32", (12,), (1,))]
        assert seen[-1][7:] == [("float32", (T, N, V), (N * V, V, 1)), None, 0.5, 4, 5, 3]
    jax.block_until_ready(ffi.call(make_spec(name), *problem))
    assert seen[-1][5:7] == [None, None] and seen[-1][8] == ("float32", (N, T), (T, 1))


def test_host_known_lengths_cut_only_k_and_v(kernel: Any, problem: Any) -> None:
    shapes = []
    name = kernel(lambda *args: shapes.append([args[i].shape[0] for i in (0, 1, 2, 7)]))
    jax.block_until_ready(ffi.call(make_spec(name, num_q=5, num_k=8), *problem))
    assert shapes == [[T, 8, 8, T]]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: kernel .*num_k is more"):
        jax.block_until_ready(ffi.call(make_spec(name, num_k=S + 1), *problem))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: kernel .*num_q is more"):
        jax.block_until_ready(ffi.call(make_spec(name, num_q=T + 1), *problem))


@pytest.mark.parametrize(("error", "status"), [(ValueError, "INVALID_ARGUMENT"), (RuntimeError, "INTERNAL"), (KeyError, "INTERNAL")])
def test_an_error_of_the_kernel_reaches_the_caller(kernel: Any, problem: Any, error: type[Exception], status: str) -> None:
    def fail(*args: Any) -> None:
        raise error("the block table is upside down")

    name = kernel(fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{status}: kernel {name}: {error.__name__}: .*upside down"):
        jax.block_until_ready(jax.jit(functools.partial(ffi.call, make_spec(name)))(*problem))


def test_a_kernel_that_keeps_a_tensor_is_an_error_but_a_dead_cycle_is_not(kernel: Any, problem: Any) -> None:
    kept = []
    with pytest.raises(jax.errors.JaxRuntimeError, match="kept a tensor"):
        jax.block_until_ready(ffi.call(make_spec(kernel(lambda *args: kept.append(args[0]))), *problem))

    def cycle(*args: Any) -> None:
        loop = [args[0]]
        loop.append(loop)

    jax.block_until_ready(ffi.call(make_spec(kernel(cycle)), *problem))


def test_an_unknown_kernel_is_loaded_once_or_not_found(monkeypatch: pytest.MonkeyPatch, problem: Any) -> None:
    asked = []
    name = f"mla_interop.kernel.test.late.{time.monotonic_ns()}"
    previous = tvm_ffi.get_global_func(xla.LOAD_KERNEL, allow_missing=True)

    def load(wanted: str) -> None:
        asked.append(wanted)
        if wanted == name:
            tvm_ffi.register_global_func(name, attention)

    tvm_ffi.register_global_func(xla.LOAD_KERNEL, load, override=True)
    try:
        for _ in range(3):
            out, _ = ffi.call(make_spec(name), *problem)
        np.testing.assert_allclose(out, expected(problem)[0], rtol=1e-5, atol=1e-6)
        assert asked == [name]
        with pytest.raises(jax.errors.JaxRuntimeError, match="NOT_FOUND: kernel nowhere"):
            jax.block_until_ready(ffi.call(make_spec("nowhere"), *problem))
    finally:
        tvm_ffi.remove_global_func(xla.LOAD_KERNEL)
        if previous is not None:
            tvm_ffi.register_global_func(xla.LOAD_KERNEL, previous)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [0, 4242])
def test_the_environment_stream_is_the_callers_again_afterwards(kernel: Any, problem: Any, before: int, fails: bool) -> None:
    device, inside = tvm_ffi.device("cpu:0"), []

    def look(*args: Any) -> None:
        inside.append((threading.get_ident(), tvm_ffi.get_raw_stream(device)))
        if fails:
            raise ValueError("no")

    run = jax.jit(functools.partial(ffi.call, make_spec(kernel(look))))
    with tvm_ffi.use_raw_stream(device, before):
        try:
            jax.block_until_ready(run(*problem))
        except jax.errors.JaxRuntimeError:
            assert fails
        assert tvm_ffi.get_raw_stream(device) == before
    assert inside == [(threading.get_ident(), 0)]  # on this very thread, or the test would show nothing


def test_registration_survives_reloads_and_other_importers(kernel: Any, problem: Any) -> None:
    spec = make_spec(kernel(attention))
    want = np.asarray(ffi.call(spec, *problem)[0])
    again = importlib.reload(ffi)
    importlib.reload(xla)
    np.testing.assert_array_equal(again.call(spec, *problem)[0], want)
    del sys.modules["jax_side.ffi"], sys.modules["mla_interop.kernels.xla"]
    try:
        fresh = importlib.import_module("jax_side.ffi")
        assert fresh is not ffi
        np.testing.assert_array_equal(fresh.call(spec, *problem)[0], want)
    finally:
        sys.modules.update({"jax_side.ffi": ffi, "mla_interop.kernels.xla": xla})


def test_every_target_can_be_registered_and_has_its_export_check() -> None:
    ffi.register_all()
    ffi.register_all()
    assert ffi.target_name("FLASHINFER", "compiled") == "mla_interop.prefill.v1.FLASHINFER"
    assert ffi.target_name("FLASHINFER", "python") == "mla_interop.prefill.v1.FLASHINFER.python"
    with pytest.raises(ValueError, match="kind: got 'array'"):
        ffi.target_name("FLASHINFER", "array")
    ours = {ffi.target_name(backend, kind) for backend in registry.names() for kind in ffi.KINDS}
    assert ours <= {name for name, _ in xla.REGISTERED}
    assert len(set(ffi.EXPORT_CHECKS)) == len(ours)


@pytest.mark.parametrize("serialized", [False, True])
def test_export_round_trip(kernel: Any, problem: Any, serialized: bool) -> None:
    run = jax.jit(functools.partial(ffi.call, make_spec(kernel(attention))))
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=ffi.EXPORT_CHECKS)(*problem)
    if serialized:
        pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
        exported = jax.export.deserialize(exported.serialize())
    out, lse = exported.call(*problem)
    np.testing.assert_allclose(out, expected(problem)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected(problem)[1], rtol=1e-5, atol=1e-6)


def test_vmap_is_refused(kernel: Any, problem: Any) -> None:
    run = functools.partial(ffi.call, make_spec(kernel(attention)))
    with pytest.raises(Exception, match="vmap"):
        jax.vmap(run, (0, None, None, None, None))(jnp.stack([problem[0]] * 2), *problem[1:])


def test_calls_of_any_kernel_can_be_counted(kernel: Any, problem: Any) -> None:
    """What the tests of CUDA graphs rely on: on a CPU, where nothing is captured, every call counts."""
    run = jax.jit(functools.partial(ffi.call, make_spec(kernel(toy().counted(tvm_ffi.convert(attention))))))
    before = toy().counted_calls()
    for _ in range(3):
        np.testing.assert_allclose(run(*problem)[0], expected(problem)[0], rtol=1e-5, atol=1e-6)
    assert toy().counted_calls() - before == 3


def test_a_compiled_kernel_runs_without_the_gil(kernel: Any, problem: Any) -> None:
    with jax.enable_x64(True):
        spec = make_spec(kernel(toy().report), "compiled", out_shape=(1, 1, 8), out_dtype=np.dtype(np.float64), num_k=8, finish=2)
        run = jax.jit(functools.partial(ffi.call, spec))
        for _ in range(2):  # the first call asks Python for the function
            np.testing.assert_array_equal(np.asarray(run(*problem)[0]).ravel(), [0, 8, 0, 4, 5, 2, 0.5, 0])
        # The probe can say otherwise: through a python kernel, the same function finds the GIL held.
        report = toy().report
        report.release_gil = False
        through_python = make_spec(kernel(lambda *args: report(*args)), out_shape=(1, 1, 8), out_dtype=np.dtype(np.float64))
        assert np.asarray(ffi.call(through_python, *problem)[0]).ravel()[0] == 1


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("with_lse", [True, False])
def test_callback_route(rng: np.random.Generator, problem: Any, dtype: Any, with_lse: bool) -> None:
    seen = []

    def launch(*args: Any) -> None:
        seen.append([str(tensor.dtype) for tensor in args[:3]] + [args[1].shape[0], args[5], args[6].shape, str(args[7].dtype)])
        if dtype == np.float32:
            attention(*args)

    spec = make_spec("unused", out_dtype=np.dtype(dtype), num_k=S, scratch_floats=3, lse_shape=(N, T) if with_lse else None)
    arrays = (*(array.astype(dtype) for array in problem[:3]), *problem[3:])
    out, lse = jax.jit(functools.partial(callback.pure_callback, launch, spec))(*arrays)
    assert out.dtype == dtype and (lse is not None) == with_lse
    name = np.dtype(dtype).name
    assert seen[-1] == [name, name, name, S, None, (3,), name]
    if dtype == np.float32:
        np.testing.assert_allclose(out, expected(problem)[0], rtol=1e-5, atol=1e-6)


def calls_in_a_loop(run: Callable[..., Any], count: int, problem: Any, plan: Any) -> Callable[[], Any]:
    """A compiled program that makes ``count`` calls, each fed by the one before, so that none can be left out."""
    q, *others = (jnp.asarray(array) for array in problem)

    def body(_: Any, q: Any) -> Any:
        return jnp.concatenate([run(q, *others, plan)[0], q[..., V:]], -1)

    loop = jax.jit(lambda q: jax.lax.fori_loop(0, count, body, q)).lower(q).compile()
    return lambda: loop(q).block_until_ready()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compiled", "python"])
def test_a_million_calls_leave_the_process_as_big_as_it_was(kernel: Any, problem: Any, kind: str) -> None:
    psutil = pytest.importorskip("psutil")
    function = toy().nothing if kind == "compiled" else lambda *args: None
    run = functools.partial(ffi.call, make_spec(kernel(function), kind))
    count = 1_000_000 if kind == "compiled" else 200_000
    loop = calls_in_a_loop(run, count // 10, problem, jnp.zeros(16, jnp.uint8))
    loop()
    before = psutil.Process().memory_info().rss
    for _ in range(10):
        loop()
    grown = psutil.Process().memory_info().rss - before
    print(f"{kind}: {count} calls, {grown} bytes more")
    assert grown < 2 * count  # two bytes a call; jax-tvm-ffi 0.1.3 leaks 16 for each attribute


@pytest.mark.slow
def test_print_the_cost_of_a_call(kernel: Any, problem: Any) -> None:
    bridge = pytest.importorskip("jax_tvm_ffi")
    plan, count = jnp.zeros(16, jnp.uint8), 100_000
    run = functools.partial(ffi.call, make_spec(kernel(toy().nothing), "compiled"))
    results = make_spec("unused").results()
    five = dict(a_scale=np.float64(0.5), b=np.int64(4), c=np.int64(5), d=np.int64(0), e=np.int64(-1))
    bridge.register_ffi_target("toy.eight", toy().nothing_of_eight, ["args", "rets"], platform="cpu")
    bridge.register_ffi_target("toy.eight_and_five", toy().nothing_of_eight_and_five, ["args", "rets", *(f"attrs.{key}" for key in five)], platform="cpu")
    paths = {
        "this handler, 8 buffers and 10 attributes": run,
        "jax-tvm-ffi, 8 buffers": lambda *args: jax.ffi.ffi_call("toy.eight", results)(*args),
        "jax-tvm-ffi, 8 buffers and 5 attributes": lambda *args: jax.ffi.ffi_call("toy.eight_and_five", results)(*args, **five),
        "no call": lambda q, *args: (q[..., :V] + 1,),
    }
    loops = {label: calls_in_a_loop(path, count, problem, plan) for label, path in paths.items()}
    for label, loop in loops.items():
        loop()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            loop()
            seconds.append(time.perf_counter() - start)
        print(f"{label}: {min(seconds) / count * 1e6:.2f} us per turn")


@pytest.mark.gpu
def test_a_compiled_kernel_follows_xlas_stream_on_a_gpu(kernel: Any, problem: Any) -> None:
    name, before, turns = kernel(toy().fill_on_gpu), toy().fills(), 50

    def two_layers(q: Any, *others: Any) -> Any:
        first = ffi.call(make_spec(name, "compiled", scale=1.5), q, *others)[0]
        return first + ffi.call(make_spec(name, "compiled", scale=2.0), q + first.mean(), *others)[0]

    run, arrays = jax.jit(two_layers), [jnp.asarray(array) for array in problem]
    for _ in range(turns):
        np.testing.assert_array_equal(run(*arrays), np.full((T, N, V), 3.5, np.float32))
    # Fewer calls than launches: XLA replays a CUDA graph that it captured.
    print(f"{toy().fills() - before} handler calls in {turns} runs of two kernels")


@pytest.mark.gpu
def test_a_python_kernel_gets_owned_tensors_on_a_gpu(kernel: Any, problem: Any) -> None:
    torch = pytest.importorskip("torch")
    streams = []

    def launch(*args: Any) -> None:
        q, out = torch.from_dlpack(args[0]), torch.from_dlpack(args[7])
        streams.append(tvm_ffi.get_raw_stream(args[0].device))
        with torch.cuda.stream(torch.cuda.ExternalStream(streams[-1])):
            torch.mul(q[..., :V], args[9], out=out)

    run, arrays = jax.jit(functools.partial(ffi.call, make_spec(kernel(launch)))), [jnp.asarray(array) for array in problem]
    for _ in range(5):
        np.testing.assert_allclose(run(*arrays)[0], problem[0][..., :V] * 0.5)
    assert len(streams) == 5 and all(streams)  # never replayed from a captured graph
    with pytest.raises(jax.errors.JaxRuntimeError, match="kept a tensor"):
        jax.block_until_ready(ffi.call(make_spec(kernel(lambda *args: streams.append(args[0]))), *arrays))
