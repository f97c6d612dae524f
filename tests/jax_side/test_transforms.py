"""What JAX does to functions, done to ``mla_prefill``: traced once for a bucket, inside control flow, rematerialised, donated, described, refused."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
from cases import offsets

jax = pytest.importorskip("jax")
pytest.importorskip("torch", reason="CPU_SDPA's kernel is torch's")

import jax.numpy as jnp  # noqa: E402

import jax_side  # noqa: E402
import mla_interop  # noqa: E402
from mla_interop import MLAInputError, MLAUnsupportedError  # noqa: E402
from mla_interop.backends.base import Kernel  # noqa: E402

ROWS_Q, ROWS_K, HEADS = 14, 24, 3
BATCHES = (([5, 0, 9], [7, 3, 9]), ([1, 1, 1], [8, 8, 8]), ([0, 0, 0], [0, 0, 0]), ([14, 0, 0], [20, 0, 4]), ([3, 4, 5], [3, 0, 6]))


def arrays(seed: int = 0, dims: tuple[int, int] = (192, 128), dtype: Any = np.float32, rows: tuple[int, int] = (ROWS_Q, ROWS_K), heads: int = HEADS) -> Any:
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.standard_normal((n, heads, d)), dtype) for n, d in ((rows[0], dims[0]), (rows[1], dims[0]), (rows[1], dims[1])))


def lengths(batch: tuple[list[int], list[int]], rows: tuple[int, int] = (ROWS_Q, ROWS_K)) -> Any:
    return jax_side.prepare_metadata(*map(offsets, batch), num_tokens_q=rows[0], num_tokens_k=rows[1])


def right(out: Any, inputs: Any, batch: tuple[list[int], list[int]], **options: Any) -> None:
    np.testing.assert_allclose(out, oracle.attention(*map(np.asarray, inputs), *map(offsets, batch), **options)[0], rtol=1e-4, atol=1e-5)


def kernel(q: Any, k: Any, v: Any, metadata: Any, **options: Any) -> Any:
    return jax_side.mla_prefill(q, k, v, metadata=metadata, **{"backend": "CPU_SDPA", **options})


class Counted:
    """A jitted call, and how often it was traced."""

    def __init__(self, **options: Any) -> None:
        self.traces = 0

        def call(q: Any, k: Any, v: Any, metadata: Any) -> Any:
            self.traces += 1
            return kernel(q, k, v, metadata, **options)

        self.run = jax.jit(call)


def test_one_trace_for_each_bucket_and_no_more() -> None:
    """T, S and B buckets, heads and dtype: each is another program once, and lengths are none."""
    counted = Counted()
    variants = {
        "as it is": (arrays(), lambda b: lengths(b)),
        "T": (arrays(rows=(15, ROWS_K)), lambda b: lengths(b, (15, ROWS_K))),
        "S": (arrays(rows=(ROWS_Q, 32)), lambda b: lengths(b, (ROWS_Q, 32))),
        "B": (arrays(), lambda b: lengths(([*b[0], 0], [*b[1], 0]))),
        "heads": (arrays(heads=2), lambda b: lengths(b)),
        "dtype": (arrays(dtype=jnp.bfloat16), lambda b: lengths(b)),
        "dimensions": (arrays(dims=(128, 128)), lambda b: lengths(b)),
    }
    for _ in range(2):
        for inputs, make in variants.values():
            for batch in BATCHES:
                out = counted.run(*inputs, make(batch))
                if inputs[0].dtype == np.float32:
                    right(out, inputs, batch)
    assert counted.traces == len(variants)
    for options in ({"is_causal": False}, {"return_lse": True}, {"scale": 1.0}):
        another = Counted(**options)
        for batch in BATCHES:
            another.run(*arrays(), lengths(batch))
        assert another.traces == 1


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
def test_control_flow(backend: str) -> None:
    """scan over layers, cond over masks, a while loop of as many turns as an argument says: each with traced lengths."""
    batch, (q, k, v) = ([5, 4, 5], [7, 6, 9]), arrays(dims=(128, 128))

    def attend(q: Any, metadata: Any, is_causal: bool = True) -> Any:
        return kernel(q, k, v, metadata, backend=backend, is_causal=is_causal)

    @jax.jit
    def run(q: Any, metadata: Any, causal: Any, limit: Any) -> Any:
        scanned, each = jax.lax.scan(lambda x, w: (attend(x * w, metadata), x), q, jnp.asarray([1.0, 0.5, 2.0]))
        chosen = jax.lax.cond(causal, lambda: attend(q, metadata), lambda: attend(q, metadata, False))
        looped = jax.lax.while_loop(lambda x: x[1] < limit, lambda x: (attend(x[0], metadata) / 2, x[1] + 1), (q, 0))
        return scanned, each, chosen, looped

    expected = loops = q
    for weight in (1.0, 0.5, 2.0):
        expected = attend(expected * weight, lengths(batch))
        loops = attend(loops, lengths(batch)) / 2
    for causal in (True, False):
        scanned, each, chosen, looped = run(q, lengths(batch), causal, 3)
        np.testing.assert_allclose(scanned, expected, rtol=1e-4, atol=1e-5)
        assert each.shape == (3, *q.shape)
        right(chosen, (q, k, v), batch, is_causal=causal)
        assert looped[1] == 3
        np.testing.assert_allclose(looped[0], loops, rtol=1e-4, atol=1e-5)


def layer(q: Any, k: Any, v: Any, metadata: Any) -> Any:
    return jnp.sin(jnp.sin(kernel(q, k, v, metadata, backend="REFERENCE"))).sum()


def test_rematerialisation_has_the_same_gradients() -> None:
    inputs, metadata = arrays(), lengths(([5, 0, 9], [7, 3, 9]))
    plain = jax.jit(jax.grad(layer, (0, 1, 2)))(*inputs, metadata)
    for policy in (None, jax.checkpoint_policies.save_only_these_names("mla_prefill"), jax.checkpoint_policies.dots_saveable):
        made = jax.jit(jax.grad(jax.checkpoint(layer, policy=policy), (0, 1, 2)))(*inputs, metadata)
        for a, b in zip(made, plain):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_policies_can_save_the_result_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the name a policy has nothing to hold on to, and attention runs once more in every backward pass."""
    inputs, metadata = arrays(), lengths(([5, 0, 9], [7, 3, 9]))
    for name, saved in (("mla_prefill", True), ("another", False)):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(layer, policy=policy), *inputs, metadata)
        text = capsys.readouterr().out
        # Where the name is; JAX before 0.10 shows what comes last in there.
        result = rf"f32\[{ROWS_Q},{HEADS},128\] output of (jitted function 'array_code'|reduce_precision)"
        assert bool(re.search(result, text)) == saved, text
    names = [line for line in str(jax.make_jaxpr(lambda *x: kernel(*x, return_lse=True))(*inputs, metadata)).splitlines() if "name=mla_prefill]" in line]
    assert len(names) == 2, "a kernel's out and lse have the name too"


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda f, q: jax.grad(f)(q),
    "jit of grad": lambda f, q: jax.jit(jax.grad(f))(q),
    "grad of jit": lambda f, q: jax.grad(jax.jit(f))(q),
    "value_and_grad": lambda f, q: jax.value_and_grad(f)(q),
    "checkpoint": lambda f, q: jax.grad(jax.checkpoint(f))(q),
    "checkpoint, saved": lambda f, q: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("mla_prefill")))(q),
    "hessian": lambda f, q: jax.hessian(f)(q),
    "jacfwd": lambda f, q: jax.jacfwd(f)(q),
    "jacrev": lambda f, q: jax.jacrev(f)(q),
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,)),
    "vjp": lambda f, q: jax.vjp(f, q),
    "linearize": lambda f, q: jax.linearize(f, q),
    "scan": lambda f, q: jax.grad(lambda q: jax.lax.scan(lambda c, _: (c + f(q), None), 0.0, length=2)[0])(q),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_of_a_kernel_are_refused_when_traced(name: str) -> None:
    q, k, v = arrays()
    metadata = lengths(([5, 0, 9], [7, 3, 9]))
    with pytest.raises(MLAUnsupportedError, match=r"mla_prefill \(CPU_SDPA\) is forward only.*stop_gradient.*backend='REFERENCE'"):
        TRANSFORMS[name](lambda q: kernel(q, k, v, metadata).sum(), q)


@pytest.mark.parametrize("name", ["vmap", "vmap of jit", "jit of vmap", "scan inside vmap", "jacobian by vmap"])
def test_vmap_of_a_kernel_is_refused_when_traced(name: str) -> None:
    q, k, v = arrays()
    metadata, batch = lengths(([5, 0, 9], [7, 3, 9])), jnp.stack([q, q])

    def f(q: Any) -> Any:
        return kernel(q, k, v, metadata)

    calls: dict[str, Callable[[], Any]] = {
        "vmap": lambda: jax.vmap(f)(batch),
        "vmap of jit": lambda: jax.vmap(jax.jit(f))(batch),
        "jit of vmap": lambda: jax.jit(jax.vmap(f))(batch),
        "scan inside vmap": lambda: jax.vmap(lambda q: jax.lax.scan(lambda c, _: (c + f(q).sum(), None), 0.0, length=2)[0])(batch),
        "jacobian by vmap": lambda: jax.vmap(lambda x: kernel(q, k, v * x, metadata))(jnp.ones(3)),
    }
    with pytest.raises(MLAUnsupportedError, match=r"mla_prefill \(CPU_SDPA\) under jax.vmap: packed input is a batch already.*cu_seqlens"):
        calls[name]()


def test_donation() -> None:
    """q, k and v may be given away: XLA reuses their memory for what comes later, and never for the result while it is written."""
    batch, inputs = ([5, 0, 9], [7, 3, 9]), arrays(dims=(128, 128))
    kept = [np.array(x) for x in inputs]

    def step(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        return kernel(q, k, v, metadata), k + 1, v + 1

    q, k, v = inputs
    made = jax.jit(step, donate_argnums=(0, 1, 2))(q, k, v, lengths(batch))
    right(made[0], kept, batch)
    np.testing.assert_array_equal(made[1], kept[1] + 1)
    assert q.is_deleted() and k.is_deleted() and v.is_deleted()
    for use in (lambda: kernel(q, made[1], made[2], lengths(batch)), lambda: mla_interop.mla_prefill(q, made[1], made[2])):
        with pytest.raises(MLAInputError, match="q: got an array whose buffer was deleted or donated; allowed: a live array"):
            use()


def test_shapes_and_programs_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """eval_shape, make_jaxpr and lower launch nothing; one custom call is all there is."""
    launches = []
    original = Kernel.register

    def register(self: Kernel) -> str:
        launches.append(self.name)
        return original(self)

    monkeypatch.setattr(Kernel, "register", register)
    inputs = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays()]
    metadata = lengths(([5, 0, 9], [7, 3, 9]))

    def call(*x: Any) -> Any:
        return kernel(*x, return_lse=True)

    made = jax.eval_shape(call, *inputs, metadata)
    assert [(x.shape, x.dtype) for x in made] == [((ROWS_Q, HEADS, 128), jnp.bfloat16), ((HEADS, ROWS_Q), np.float32)]
    jaxpr = str(jax.make_jaxpr(call)(*inputs, metadata))
    assert jaxpr.count("ffi_call[") == 1 and "target_name=mla_interop.prefill.v1.CPU_SDPA" in jaxpr and "pure_callback" not in jaxpr
    assert str(jax.jit(call).lower(*inputs, metadata).as_text()).count("stablehlo.custom_call @mla_interop") == 1
    assert launches and not any(hasattr(x, "devices") for x in made)


def test_tracers_at_the_neutral_door() -> None:
    q, k, v = map(np.asarray, arrays())
    for i in range(3):
        operands = [q, k, v]

        def call(x: Any, i: int = i, operands: list[Any] = operands) -> Any:
            return mla_interop.mla_prefill(*operands[:i], x, *operands[i + 1 :])

        with pytest.raises(MLAInputError, match=f"{'qkv'[i]}: got a JAX tracer.*Inside jax.jit, call jax_side.mla_prefill"):
            jax.jit(call)(operands[i])


@dataclass(frozen=True)
class Device:
    platform: str
    id: int = 0
    local_hardware_id: int = 0


@pytest.mark.parametrize("platform", ["tpu", "METAL"])
def test_other_platforms_are_refused_when_traced(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such device here: what JAX says of it is all that is looked at."""
    module = importlib.import_module("jax_side.target")
    text = f"q, k, v: got arrays on {platform}; allowed: CPU or CUDA GPU. jax.device_put moves them"
    with pytest.raises(MLAInputError, match=text):
        module.device_of({Device(platform)})
    monkeypatch.setattr(module.jax, "default_backend", lambda: platform)
    with jax.default_device(None), pytest.raises(MLAInputError, match=text):
        jax.jit(lambda *x: jax_side.mla_prefill(*x)).lower(*arrays())


def test_a_program_for_another_default_device_kind_is_another_program() -> None:
    """The device that a trace was made for is a part of jit's key: ``jax.default_device`` by JAX itself, a stated target by our context."""
    counted, inputs = Counted(), arrays()
    metadata = lengths(BATCHES[0])
    counted.run(*inputs, metadata)
    with jax_side.target("h200"), pytest.raises(MLAUnsupportedError, match="CPU_SDPA: device cuda"):
        counted.run.lower(*inputs, metadata)
    counted.run(*inputs, metadata)
    assert counted.traces == 2
