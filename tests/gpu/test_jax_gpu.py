"""JAX on a GPU: a program of real kernels runs as a CUDA graph, with right values when inputs and lengths change; donation; threads."""

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from cases import offsets

jax = pytest.importorskip("jax")
tvm_ffi = pytest.importorskip("tvm_ffi")

import jax.numpy as jnp  # noqa: E402

import jax_side  # noqa: E402
from mla_interop import MLADimensions, MLAPrefillSelectorConfig, explain  # noqa: E402
from mla_interop.backends.base import Kernel  # noqa: E402
from mla_interop.kernels.build import compile_cpp  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS, HEADS, LAYERS, TURNS = 384, 4, 8, 30
KERNELS = ("FLASH_ATTN.fa4", "FLASHINFER.fa3", "CUDNN.graph")


@functools.cache
def toy() -> Any:
    return tvm_ffi.load_module(str(compile_cpp("toy_kernel", [str(Path(__file__).parents[1] / "jax_side" / "toy_kernel.cc")])))


def config(is_causal: bool = True) -> MLAPrefillSelectorConfig:
    return MLAPrefillSelectorConfig(dimensions=MLADimensions.from_head_dims(192, 128), num_heads=HEADS, is_causal=is_causal)


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest) -> str:
    """A compiled kernel that this machine has."""
    table = explain(config(), request.param)
    if table.chosen != request.param:
        pytest.skip(table.refusal())
    return request.param


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel goes into programs under a name that no other test has, and counts its calls."""
    stamp = time.monotonic_ns()
    names: dict[str, str] = {}

    def register(kernel: Kernel) -> str:
        name = names.setdefault(kernel.name, f"{kernel.global_name}.counted.{stamp}")
        tvm_ffi.register_global_func(name, toy().counted(kernel.function), override=True)
        return name

    monkeypatch.setattr(Kernel, "register", register)


def inputs(seed: int) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (jax.random.normal(key, (ROWS, HEADS, d), jnp.bfloat16) for key, d in zip(keys, (192, 192, 128)))
    return q, k, v


def metadata_of(lengths_q: list[int], lengths_k: list[int], backend: str) -> Any:
    cu = map(offsets, (lengths_q, lengths_k))
    return jax_side.prepare_metadata(*cu, num_tokens_q=ROWS, num_tokens_k=ROWS, config=config(), backend=backend)


def layers(q: Any, k: Any, v: Any, metadata: Any, backend: str) -> Any:
    """Calls that each wait for the one before; all their results."""
    made = []
    for _ in range(LAYERS):
        made.append(jax_side.mla_prefill(q, k, v, metadata=metadata, backend=backend, return_lse=True))
        q = jnp.concatenate([made[-1][0], q[..., 128:]], -1)
    return made


LENGTHS = (([100, 0, 200], [150, 33, 200]), ([384, 0, 0], [384, 0, 0]), ([1, 2, 3], [130, 120, 110]), ([50, 60, 70], [50, 0, 90]))


@pytest.mark.usefixtures("counted")
def test_the_program_runs_as_a_cuda_graph_with_new_inputs_and_lengths(backend: str) -> None:
    """XLA calls a handler to capture it, and then replays: there are fewer calls than launches. Each turn's values are those of calls without jit.

    A graph holds addresses, and XLA captures anew when they change. So all turns' operands stay where they are and the program
    picks its own, by a number that it counts in place; results go before the next turn needs their memory.
    """
    turns = [(*inputs(turn), metadata_of(*lengths, backend)) for turn, lengths in enumerate(LENGTHS)]
    expected = [[[np.asarray(x, np.float32) for x in pair] for pair in layers(*turn, backend)] for turn in turns]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *turns)

    def step(turn: Any, stacked: Any) -> Any:
        mine = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, turn, keepdims=False), stacked)
        return (turn + 1) % len(LENGTHS), layers(*mine, backend)

    run, turn, calls = jax.jit(step, donate_argnums=0), jnp.int32(0), 0
    for number in range(TURNS):
        before = toy().counted_calls()
        turn, made = run(turn, stacked)
        jax.block_until_ready(made)
        calls += toy().counted_calls() - before
        for pair, right in zip(made, expected[number % len(LENGTHS)]):
            for x, y in zip(pair, right):
                np.testing.assert_array_equal(np.asarray(x, np.float32), y)
        del made, pair, x
    print(f"{backend}: {calls} calls of the handler in {TURNS} runs of {LAYERS} kernels")
    assert calls < TURNS * LAYERS, "XLA called the kernel in every run: nothing was captured into a CUDA graph"


def test_the_first_layer_is_the_oracles(backend: str) -> None:
    run = jax.jit(functools.partial(layers, backend=backend))
    for turn, (lengths_q, lengths_k) in enumerate(LENGTHS):
        q, k, v = inputs(turn)
        out, lse = run(q, k, v, metadata_of(lengths_q, lengths_k, backend))[0]
        right, right_lse = oracle.attention(*(np.asarray(x, np.float64) for x in (q, k, v)), offsets(lengths_q), offsets(lengths_k))
        assert np.linalg.norm(np.asarray(out, np.float64) - right) <= 3e-3 * np.linalg.norm(right)
        np.testing.assert_allclose(np.asarray(lse, np.float64), right_lse, atol=1e-3)


def test_inputs_that_are_given_away(backend: str) -> None:
    (q, k, v), metadata = inputs(0), metadata_of(*LENGTHS[0], backend)
    right = [np.asarray(x, np.float32) for x in layers(q, k, v, metadata, backend)[-1]]
    made = jax.jit(lambda q, k, v, m: (layers(q, k, v, m, backend)[-1], q + 1, k + 1, v + 1), donate_argnums=(0, 1, 2))(q, k, v, metadata)
    for x, y in zip(made[0], right):
        np.testing.assert_array_equal(np.asarray(x, np.float32), y)
    assert q.is_deleted() and k.is_deleted() and v.is_deleted()


def test_eight_threads(backend: str) -> None:
    run = jax.jit(functools.partial(layers, backend=backend))
    metadata = metadata_of(*LENGTHS[0], backend)
    expected = [np.asarray(run(*inputs(i), metadata)[-1][0], np.float32) for i in range(8)]

    def work(index: int) -> bool:
        operands = inputs(index)
        return all(np.array_equal(np.asarray(run(*operands, metadata)[-1][0], np.float32), expected[index]) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
