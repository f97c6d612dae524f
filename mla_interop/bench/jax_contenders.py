"""The contenders that are called inside ``jax.jit``: several attention calls in one program, each waiting for the one before."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jax_side
from mla_interop.bench.problems import QK_HEAD_DIM, V_HEAD_DIM, Problem
from mla_interop.bench.torch_contenders import Contender, config_for, failures_told, kernels_here, with_lse

# A launch is hidden by the calls before it; on a CPU there is nothing to hide.
CHAIN = {"gpu": 10, "cpu": 1}
# T x N above which a way to call the same kernel shows nothing.
BRIDGED_UP_TO = 16 * 2048


def contenders(problem: Problem, q: Any, k: Any, v: Any, dtype: str) -> Iterator[Contender]:
    """All of them; q, k, v are torch tensors, whose memory JAX shares where it can (it takes no strided V)."""
    arrays = tuple(jax.dlpack.from_dlpack(x.contiguous()) for x in (q, k, v))
    state = [jnp.copy(arrays[0]), jnp.copy(arrays[2])]
    for backend, kernel in kernels_here(problem, q.device.type, dtype):
        for lse in with_lse(kernel):
            name = f"{backend}.{kernel.variant}"
            yield from failures_told(_frontend(problem, arrays, state, dtype, q.device.type, name, lse), "jax", name)
    yield from _fa4_jax(problem, arrays, state)
    if problem.tokens * problem.heads <= BRIDGED_UP_TO and q.device.type == "cuda":
        yield from _cutlass_call(arrays, state, dtype, problem)
    if len(set(problem.lengths)) == 1:
        yield from _jax_nn(problem, arrays, state, False)
        yield from _jax_nn(problem, arrays, state, True)


def _chained(step: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """``step(q, k, v, *rest)`` several times, as ten layers call it: each with a q and a v that depend on the result before, all results kept.

    One number of a result goes into the next q and v, in place. Less would be unfair: XLA merges equal calls, pads a V that does not change
    once for all of them, and does not cut what nobody reads; an optimization barrier it drops too late.
    """

    def program(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        made = []
        for _ in range(calls):
            made.append(step(q, k, v, *rest))
            number = jax.tree.leaves(made[-1])[0][0, 0, 0]
            q, v = q.at[0, 0, 0].set(number), v.at[0, 0, 0].set(number)
        return q, v, made

    return program


def _contender(
    name: str, kernel: str, step: Callable[..., Any], arguments: tuple[Any, ...], state: list[Any], unpack: Callable[[Any], tuple[Any, Any]]
) -> Contender:
    """In one program; ``state`` has the q and v that chains hand on, of all contenders."""
    calls = CHAIN[arguments[0].devices().pop().platform]
    once, chain = jax.jit(step), jax.jit(_chained(step, calls), donate_argnums=(0, 2))

    def run(n: int) -> None:
        made = None
        for _ in range(n):
            state[0], state[1], made = chain(state[0], arguments[1], state[1], *arguments[3:])
        jax.block_until_ready(made)

    def result() -> tuple[Any, Any]:
        out, lse = unpack(once(*arguments))
        return _torch(out), None if lse is None else _torch(lse)

    return Contender(name, "jax", kernel, result, run, calls)


def _outside_jit(name: str, kernel: str, step: Callable[..., Any], arguments: tuple[Any, ...]) -> Contender:
    """Call by call from Python, as in a notebook: every operation that is not in a jitted function is a program of its own."""

    def run(n: int) -> None:
        made = None
        for _ in range(n):
            made = step(*arguments)
        jax.block_until_ready(made)

    return Contender(f"{name}, outside jit", "jax", kernel, lambda: (_torch(step(*arguments)), None), run)


def _torch(array: Any) -> Any:
    jax.block_until_ready(array)
    return torch.from_dlpack(array)


def _frontend(problem: Problem, arrays: tuple[Any, ...], state: list[Any], dtype: str, device: str, backend: str, lse: bool) -> Iterator[Contender]:
    """``jax_side.mla_prefill`` with prepared metadata, which is an argument of the program."""
    metadata = jax_side.prepare_metadata(problem.cu_seqlens, config=config_for(problem, device, dtype, lse), backend=backend)

    def step(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        return jax_side.mla_prefill(q, k, v, metadata=metadata, backend=backend, return_lse=lse)

    name = f"mla_interop{' + lse' if lse else ''}"
    yield _contender(name, backend, step, (*arrays, metadata), state, lambda made: made if lse else (made, None))
    if not lse and backend == "FLASH_ATTN.fa4":
        yield _outside_jit(name, backend, step, (*arrays, metadata))


def _fa4_jax(problem: Problem, arrays: tuple[Any, ...], state: list[Any]) -> Iterator[Contender]:
    try:
        from fa4_jax import flash_attn_varlen
    except Exception:
        return
    cu = jnp.asarray(problem.cu_seqlens)

    for lse in (False, True):

        def step(q: Any, k: Any, v: Any, cu: Any, lse: bool = lse) -> Any:
            return flash_attn_varlen(q, k, v, cu, cu, causal=True, return_lse=lse)

        yield _contender(f"fa4-jax{' + lse' if lse else ''}", "", step, (*arrays, cu), state, lambda made, lse=lse: made if lse else (made, None))


def _cutlass_call(arrays: tuple[Any, ...], state: list[Any], dtype: str, problem: Problem) -> Iterator[Contender]:
    """FlashAttention-4's kernel class, the one that we compile ahead of time, through CuTe DSL's own bridge to JAX."""
    try:
        import cutlass
        import cutlass.cute as cute
        from cutlass.jax import cutlass_call

        from mla_interop.kernels.fa4_kernels import DTYPES, attention
    except Exception:
        return
    attend = attention("sm_90a", DTYPES[dtype], QK_HEAD_DIM, V_HEAD_DIM, True, None)

    @cute.jit
    def launch(stream, q, k, v, cu, out):  # type: ignore[no-untyped-def]
        attend(q, k, v, out, None, cutlass.Float32(QK_HEAD_DIM**-0.5), cu, cu, stream=stream)

    def step(q: Any, k: Any, v: Any, cu: Any) -> Any:
        bridge: Any = cutlass_call
        return bridge(launch, output_shape_dtype=jax.ShapeDtypeStruct(v.shape, v.dtype))(q, k, v, cu)

    yield _contender("FlashAttention-4 by cutlass_call", "", step, (*arrays, jnp.asarray(problem.cu_seqlens)), state, lambda made: (made, None))


def _jax_nn(problem: Problem, arrays: tuple[Any, ...], state: list[Any], lse: bool) -> Iterator[Contender]:
    """What JAX itself has: V padded by hand, cuDNN on a GPU; its LSE is in the output's dtype."""
    batch, length = len(problem.lengths), problem.lengths[0]
    implementation = "cudnn" if arrays[0].devices().pop().platform == "gpu" else None

    def step(q: Any, k: Any, v: Any) -> Any:
        dense = [x.reshape(batch, length, *x.shape[1:]) for x in (q, k, v)]
        padded = jnp.pad(dense[2], [(0, 0)] * 3 + [(0, QK_HEAD_DIM - V_HEAD_DIM)])
        made: Any = jax.nn.dot_product_attention(dense[0], dense[1], padded, is_causal=True, implementation=implementation, return_residual=lse)
        out, residual = made if lse else (made, None)
        out = out[..., :V_HEAD_DIM].reshape(v.shape)
        return out if residual is None else (out, residual.reshape(-1, problem.heads).T)

    name = f"jax.nn.dot_product_attention, V padded{' + lse' if lse else ''}"
    yield _contender(name, "", step, arrays, state, lambda made: made if lse else (made, None))
    if not lse:
        yield _outside_jit(name, "", step, arrays)
