"""The JAX frontend: tracing, recompilation, transformations, routes and layouts."""

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import BY_NAME, Case, offsets

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from frontends import assert_right, to_jax  # noqa: E402

import jax_side  # noqa: E402
import mla_interop  # noqa: E402
from mla_interop import MLAInputError, MLAUnsupportedError  # noqa: E402
from mla_interop.backends import registry  # noqa: E402

MISSING = registry.backend_class("CPU_SDPA").unavailable_reasons()
needs_kernel = pytest.mark.skipif(bool(MISSING), reason=f"CPU_SDPA: {'; '.join(MISSING)}")
BACKENDS = (pytest.param("CPU_SDPA", marks=needs_kernel), "REFERENCE")


def arrays(tokens: int = 7, keys: int = 7, heads: int = 2, dims: tuple[int, int] = (192, 128)) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(tokens)
    return tuple(jnp.asarray(random.standard_normal((n, heads, d)), jnp.float32) for n, d in ((tokens, dims[0]), (keys, dims[0]), (keys, dims[1])))


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_lengths_in_one_bucket_do_not_trace_again(backend: str) -> None:
    traces = []

    @jax.jit
    def call(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        traces.append(1)
        return jax_side.mla_prefill(q, k, v, metadata=metadata, backend=backend)

    q, k, v = arrays(16, 32)
    for lengths_q, lengths_k in (([3, 9], [5, 9]), ([0, 16], [32, 0]), ([0, 0], [0, 0]), ([8, 8], [16, 16])):
        cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
        metadata = jax_side.prepare_metadata(cu_q, cu_k, num_tokens_q=16, num_tokens_k=32, max_seqlen_q=16, max_seqlen_k=32)
        made = call(q, k, v, metadata)
        np.testing.assert_allclose(made, mla_interop.mla_prefill(*map(np.asarray, (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), rtol=1e-5, atol=1e-5)
    assert len(traces) == 1
    call(q[:15], k, v, jax_side.prepare_metadata([0, 3, 9], [0, 5, 9], num_tokens_q=15, num_tokens_k=32))
    assert len(traces) == 2, "another bucket is another program: the count counts"


@pytest.mark.parametrize(
    "prepare",
    [
        lambda: jax_side.prepare_metadata([0, 3, 9], [0, 5, 7], num_tokens_q=16, num_tokens_k=1000),
        lambda: jax_side.prepare_context_metadata([3, 5], [30, 0], np.arange(6).reshape(2, 3), block_size=16, workspace_rows=64, num_context_rows=1000),
        lambda: jax_side.prepare_context_metadata([3, 5], [30, 40], np.arange(6).reshape(2, 3), block_size=16, workspace_rows=48),
    ],
    ids=["lengths", "padded context", "exact context"],
)
def test_a_jitted_call_with_metadata_made_anew_runs_no_python(prepare: Callable[[], Any]) -> None:
    add, x = jax.jit(lambda x, metadata: x + 1), jnp.ones(3)
    add(x, prepare())
    again, ran = prepare(), []
    gc.collect()  # what earlier tests left may have finalizers, which are Python too
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        add(x, again)
    finally:
        sys.setprofile(None)
    assert ran == [], "JAX compares what is static: __eq__ of a dataclass is Python"
    assert add._cache_size() == 1


def test_metadata_is_a_pytree_whose_host_part_stays_outside() -> None:
    metadata = jax_side.prepare_metadata([0, 3, 7])
    leaves, structure = jax.tree.flatten(metadata)
    assert len(leaves) == 1 and isinstance(leaves[0], jax.Array), "equal lengths are one argument of a program"
    assert len(jax.tree.leaves(jax_side.prepare_metadata([0, 3, 7], [0, 4, 9]))) == 2
    assert metadata.host is not None and jax.tree.unflatten(structure, leaves).host is None
    assert structure == jax.tree.structure(jax_side.prepare_metadata([0, 1, 7])) != jax.tree.structure(jax_side.prepare_metadata([0, 1, 8]))


def test_traced_lengths_of_another_dtype_are_refused() -> None:
    q, k, v = arrays()
    with jax.experimental.enable_x64() if hasattr(jax.experimental, "enable_x64") else jax.enable_x64(True):
        lengths = jnp.asarray(np.array([0, 7], np.int64))
        with pytest.raises(MLAInputError, match="cu_seqlens_q: got dtype int64 on a device; allowed: int32"):
            jax.jit(lambda cu: jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu))(lengths)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("route", ["ffi", "callback"])
def test_padding_any_clears_a_tail_of_nan_in_a_jitted_program(backend: str, route: str) -> None:
    case = BY_NAME["tail-of-every-kind"]
    problem = case.problem()
    q, k, v = (to_jax(x) for x in (problem.q, problem.k, problem.v))
    call = jax.jit(
        lambda q, k, v, cu_q, cu_k: jax_side.mla_prefill(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, padding="any", return_lse=True, backend=backend, route=route
        )
    )
    assert_right(case, *call(q, k, v, jnp.asarray(problem.cu_q), jnp.asarray(problem.cu_k)))


@needs_kernel
@pytest.mark.parametrize("case", [BY_NAME["every-kind"], BY_NAME["tail-of-every-kind"], BY_NAME["all-k-empty"]], ids=str)
def test_the_callback_route_gives_the_same_bits(case: Case) -> None:
    """jax#24255: a callback that used JAX itself would hang; the suite's timeout watches."""
    problem = case.problem()
    q, k, v = (to_jax(x) for x in (problem.q, problem.k, problem.v))
    made = [
        jax_side.mla_prefill(q, k, v, cu_seqlens_q=problem.cu_q, cu_seqlens_k=problem.cu_k, backend="CPU_SDPA", return_lse=True, route=route)
        for route in ("ffi", "callback")
    ]
    assert all(np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in zip(*made))
    assert_right(case, *made[1])


@needs_kernel
def test_gradients_of_a_kernel_are_refused_in_words() -> None:
    q, k, v = arrays()

    def loss(q: Any) -> Any:
        return jax_side.mla_prefill(q, k, v, backend="CPU_SDPA").sum()

    for call in (lambda: jax.grad(loss)(q), lambda: jax.jvp(loss, (q,), (q,)), lambda: jax.jit(jax.grad(loss))(q), lambda: jax.linearize(loss, q)):
        with pytest.raises(MLAUnsupportedError, match=r"mla_prefill \(CPU_SDPA\) is forward only.*backend='REFERENCE'"):
            call()
    assert np.isfinite(jax.jit(loss)(jax.lax.stop_gradient(q)))


@needs_kernel
def test_stopped_gradients_pass() -> None:
    q, k, v = arrays()
    stop = jax.lax.stop_gradient
    grad = jax.grad(lambda x: jax_side.mla_prefill(stop(x), k, v, backend="CPU_SDPA").sum() + x.sum())(q)
    assert np.array_equal(grad, np.ones_like(grad))


@needs_kernel
def test_vmap_of_a_kernel_is_refused_in_words() -> None:
    batch = tuple(jnp.stack([x, x]) for x in arrays())
    for call in (jax.vmap(lambda q, k, v: jax_side.mla_prefill(q, k, v, backend="CPU_SDPA")),):
        for run in (call, jax.jit(call)):
            with pytest.raises(MLAUnsupportedError, match=r"mla_prefill \(CPU_SDPA\) under jax.vmap: packed input is a batch already"):
                run(*batch)
    made = jax.vmap(lambda q, k, v: jax_side.mla_prefill(q, k, v, backend="REFERENCE"))(*batch)
    np.testing.assert_allclose(made[1], jax_side.mla_prefill(*arrays(), backend="CPU_SDPA"), rtol=1e-5, atol=1e-5)


def dense_formula(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
    """Causal attention of each sequence as one would write it down."""
    outs = []
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        scores = jnp.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * q.shape[2] ** -0.5
        seen = jnp.arange(k1 - k0)[None] <= jnp.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        outs.append(jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v[k0:k1]))
    return jnp.concatenate(outs)


def test_reference_has_the_gradients_of_the_formula() -> None:
    cu_q, cu_k = offsets([3, 4, 1]), offsets([5, 4, 1])
    inputs = arrays(8, 10, dims=(24, 16))

    def reference(q: Any, k: Any, v: Any) -> Any:
        return (jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="REFERENCE") ** 2).sum()

    made = jax.grad(reference, (0, 1, 2))(*inputs)
    expected = jax.grad(lambda *x: (dense_formula(*x, cu_q, cu_k) ** 2).sum(), (0, 1, 2))(*inputs)
    for a, b in zip(made, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_reference_gradients_are_finite_with_rows_without_a_key() -> None:
    """A select whose other branch is NaN has NaN gradients: rows without a key and tails must not poison the rest."""
    cu_q, cu_k = offsets([3, 4, 2]), offsets([0, 6, 1])
    q, k, v = arrays(12, 10, dims=(24, 16))

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="REFERENCE", return_lse=True)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    assert all(np.isfinite(x).all() for x in grads)
    assert not np.asarray(grads[0])[:3].any() and not np.asarray(grads[0])[9:].any() and not np.asarray(grads[1])[7:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_in_a_scan(backend: str) -> None:
    q, k, v = arrays(dims=(128, 128))
    metadata = jax_side.prepare_metadata([0, 3, 7])

    @jax.jit
    def layers(q: Any, metadata: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jax_side.mla_prefill(x, k, v, metadata=metadata, backend=backend), None), q, length=3)[0]

    expected = q
    for _ in range(3):
        expected = jax_side.mla_prefill(expected, k, v, metadata=metadata, backend=backend)
    np.testing.assert_allclose(layers(q, metadata), expected, rtol=1e-5, atol=1e-5)


def test_donated_arrays() -> None:
    q, k, v = arrays()
    x = q + 0
    x.delete()
    with pytest.raises(MLAInputError, match="q: got an array whose buffer was deleted or donated; allowed: a live array"):
        jax_side.mla_prefill(x, k, v)
    with pytest.raises(MLAInputError, match="v: got an array whose buffer was deleted"):
        jax_side.mla_prefill(q, k, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_come_from_v(backend: str) -> None:
    """pytorch#133674."""
    shape = jax.eval_shape(lambda *x: jax_side.mla_prefill(*x, return_lse=True, backend=backend), *arrays(7, 9))
    assert [(x.shape, x.dtype) for x in shape] == [((7, 2, 128), np.float32), ((2, 7), np.float32)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dense_batch_is_the_packed_one(backend: str) -> None:
    q, k, v = (jnp.asarray(np.random.default_rng(n + d).standard_normal((2, n, 3, d)), jnp.float32) for n, d in ((5, 192), (9, 192), (9, 128)))
    out, lse = jax.jit(lambda *x: jax_side.mla_prefill(*x, return_lse=True, backend=backend))(q, k, v)
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    packed, packed_lse = jax_side.mla_prefill(*flat, cu_seqlens_q=[0, 5, 10], cu_seqlens_k=[0, 9, 18], return_lse=True, backend=backend)
    np.testing.assert_allclose(out.reshape(10, 3, 128), packed, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse.swapaxes(0, 1).reshape(3, 10), packed_lse, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"out": np.zeros(3)}, "out: got ndarray; allowed: None. JAX arrays are immutable"),
        ({"route": "pure_callback"}, "route: got 'pure_callback'; allowed: 'ffi' or 'callback'."),
    ],
)
def test_options_of_this_frontend(options: dict[str, Any], text: str) -> None:
    with pytest.raises(MLAInputError) as refusal:
        jax_side.mla_prefill(*arrays(), **options)
    assert str(refusal.value).startswith(text)


def test_traced_scales_are_refused_in_words() -> None:
    """A scale decides what is compiled."""
    with pytest.raises(MLAInputError, match="scale: got"):
        jax.jit(lambda scale: jax_side.mla_prefill(*arrays(), scale=scale))(0.5)


def test_numpy_scalars_are_scales() -> None:
    made = [jax_side.mla_prefill(*arrays(), scale=scale) for scale in (0.5, np.float32(0.5), np.float64(0.5))]
    assert all(np.array_equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("value", [[1.0], None, "q"])
def test_only_arrays(value: Any) -> None:
    with pytest.raises(MLAInputError, match="q: got .*; allowed: a jax.Array or a NumPy array"):
        jax_side.mla_prefill(value, *arrays()[1:])


def test_the_neutral_door_refuses_tracers() -> None:
    _, k, v = arrays()
    with pytest.raises(MLAInputError, match="q: got a JAX tracer; the neutral door needs values. Inside jax.jit, call jax_side.mla_prefill"):
        jax.jit(lambda q: mla_interop.mla_prefill(q, k, v))(arrays()[0])


def test_check_reads_device_lengths_and_does_nothing_for_tracers() -> None:
    q, k, v = arrays()
    with pytest.raises(MLAInputError, match="cu_seqlens_q: got 5 followed by 3"):
        jax_side.mla_prefill(q, k, v, cu_seqlens_q=jnp.asarray([0, 5, 3], jnp.int32), check=True)
    assert jax.jit(lambda cu: jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu, check=True))(jnp.asarray([0, 5, 7], jnp.int32)).shape == (7, 2, 128)


def test_frontends_say_the_same() -> None:
    """The same mistake, the same words, from every way in; they are the core's."""
    torch, torch_side = pytest.importorskip("torch"), importlib.import_module("torch_side")
    q, k, v = (np.asarray(x) for x in arrays())
    mistakes: list[dict[str, Any]] = [
        {"cu_seqlens_q": [0, 5, 3]},
        {"cu_seqlens_q": [0, 9]},
        {"scale": float("nan")},
        {"backend": "FLASHATTN"},
        {"backend": "FLASH_ATTN"},
        {"padding": "no"},
        {"max_seqlen_q": 3},
        {"is_causal": 2},
    ]
    for mistake in mistakes:
        texts = set()
        for call, give in ((torch_side.mla_prefill, torch.from_numpy), (jax_side.mla_prefill, jnp.asarray), (mla_interop.mla_prefill, np.asarray)):
            with pytest.raises(mla_interop.MLAError) as refusal:
                call(*(give(x.copy()) for x in (q, k, v)), **mistake)
            texts.add((refusal.type, str(refusal.value)))
        assert len(texts) == 1, texts


@pytest.mark.parametrize("dtype", ["float64", ">f4", "O", "U1"])
def test_numpy_arrays_that_jax_would_change_or_not_take(dtype: str) -> None:
    """float64 became float32 without a word where 64-bit types are off."""
    x = np.zeros((2, 3, 8), dtype)
    with pytest.raises(MLAInputError, match="q: got dtype .*; allowed: a dtype that JAX has as it is"):
        jax_side.mla_prefill(x, x, x)


def test_metadata_in_another_frameworks_arrays_is_refused() -> None:
    """JAX would say that a torch tensor is no valid type, and not which argument holds it."""
    torch_side = pytest.importorskip("torch_side")
    metadata = torch_side.prepare_metadata([0, 3, 7], device="cpu")
    with pytest.raises(MLAInputError, match=r"metadata, cu_seqlens: got lengths in a torch\.Tensor; allowed: NumPy or JAX arrays"):
        jax_side.mla_prefill(*arrays(), metadata=metadata)


def test_the_neutral_door_does_not_narrow_what_comes_beside_a_jax_array() -> None:
    q, k, v = arrays()
    with pytest.raises(MLAInputError, match="k: got dtype"):
        mla_interop.mla_prefill(q, np.asarray(k, np.float64), v)
