"""One call of a kernel in a traced program: how it is split over devices, and what it refuses to be transformed into.

From the outside in: ``custom_jvp`` and ``custom_vmap``, which refuse in words; ``custom_partitioning``, through which XLA's partitioner
(Shardy) runs one shard of heads per device; the custom call.  On one device the first three leave nothing in the program.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jax_side import ffi
from jax_side.ffi import CallSpec
from mla_interop.capability import stated_target
from mla_interop.errors import MLAUnsupportedError
from mla_interop.prefill import Bound, Resolved, with_heads, workspace

RESIDUAL = "mla_prefill"
"""What out and lse are called for policies of ``jax.checkpoint``: ``save_only_these_names("mla_prefill")`` keeps them."""

# t, s: tokens; h: heads; d, e: head dimensions; b, c: sequences; p: work list. Heads alone may be split.
_RULE_IN, _WORK_LIST, _RULE_OUT, _RULE_LSE = "t h d, s h d, s h e, b, c", ", p", " -> t h e", ", h t"
_WHOLE = ("t", "d", "s", "e", "b", "c")


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel as one static value: what it is for all heads, and what it would be for fewer.

    Attributes:
        spec: The custom call.
        resolved: The call that it was made of.
        rows_k: Rows of k and v.
        bounds: B, the upper bounds of the lengths, the ABI's ``finish`` and the rows of k and v that may be read.
    """

    spec: CallSpec
    resolved: Resolved
    rows_k: int
    bounds: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, call: Resolved, bound: Bound, rows_k: int) -> "KernelCall":
        """The call that ``resolve`` and ``bind`` describe."""
        bounds = (bound.metadata.bounds.num_seqs, bound.max_seqlen_q, bound.max_seqlen_k, bound.finish, bound.num_tokens_k)
        return cls(_spec(call, bounds, bound.scratch_floats, rows_k), call, rows_k, bounds)

    def for_heads(self, heads: int) -> "KernelCall":
        """The same call for another number of heads; its scratch, and what a kernel prepares, follow."""
        if heads == self.spec.out_shape[1]:
            return self
        call = with_heads(self.resolved, heads)
        num_seqs, max_q, max_k, _, readable = self.bounds
        return replace(self, spec=_spec(call, self.bounds, workspace(call, readable, num_seqs, max_q, max_k), self.rows_k), resolved=call)


def _spec(call: Resolved, bounds: tuple[int, int, int, int, int], scratch_floats: int, rows_k: int) -> CallSpec:
    kernel, (_, max_seqlen_q, max_seqlen_k, finish, readable) = call.kernel, bounds
    elsewhere = call.backend.config.device_type == "cuda" and stated_target() is not None  # the process that runs it finds it by name
    return CallSpec(
        backend=call.backend.get_name(),
        kind=kernel.kind,
        kernel=kernel.global_name if elsewhere else kernel.register(),
        out_shape=call.out_shape,
        out_dtype=np.dtype(call.out_dtype),
        lse_shape=call.lse_shape if call.options.return_lse else None,
        scratch_floats=scratch_floats,
        scale=call.scale,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        finish=finish,
        num_k=readable if readable < rows_k else -1,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def array_code(scale: float, is_causal: bool, attention: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Any, Any]:
    """REFERENCE: ordinary XLA, which differentiates, batches and partitions it by itself."""
    with jax.default_matmul_precision("highest"):  # float32 products would be TF32 on a GPU
        out, lse = attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, is_causal)
    return checkpoint_name(out, RESIDUAL), checkpoint_name(lse, RESIDUAL)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def custom_call(call: KernelCall, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, plan: Any) -> tuple[Any, Any]:
    """Run ``call``: out ``[T, N, V]`` and lse ``[N, T]``, or None where the call has none.

    Raises:
        MLAUnsupportedError: It is differentiated or vmapped.
    """
    name = call.spec.backend
    run = jax.custom_batching.custom_vmap(_partitioned(call, plan is not None))

    @run.def_vmap
    def refuse_vmap(axis_size: int, in_batched: Any, *args: Any) -> Any:
        raise MLAUnsupportedError(
            f"mla_prefill ({name}) under jax.vmap: packed input is a batch already. Give all sequences in one call with cu_seqlens, "
            "or a dense [B, T, N, D] batch; backend='REFERENCE' can be vmapped."
        )

    def refuse_jvp(primals: Any, tangents: Any) -> Any:
        raise MLAUnsupportedError(
            f"mla_prefill ({name}) is forward only: it cannot be differentiated (jax.grad, jax.jvp). "
            "Stop gradients at its inputs with jax.lax.stop_gradient, or use backend='REFERENCE', which is differentiable."
        )

    forward_only = jax.custom_jvp(run)
    forward_only.defjvp(refuse_jvp)
    made = forward_only(q, k, v, cu_seqlens_q, cu_seqlens_k, *(() if plan is None else (plan,)))
    out, *lse = (checkpoint_name(x, RESIDUAL) for x in made)
    return out, lse[0] if lse else None


def _partitioned(call: KernelCall, has_plan: bool) -> Any:
    """The custom call with a rule for XLA's partitioner: heads may be split over any axes, everything else is whole on every device."""
    if jax.sharding.get_abstract_mesh().manual_axes:  # inside shard_map a device has its shard already
        return _body(call)
    has_lse = call.spec.lse_shape is not None

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        heads = operands[0].sharding.spec[1]
        split = PartitionSpec(None, heads, None)
        shards = int(np.prod([mesh.shape[axis] for axis in ((heads,) if isinstance(heads, str) else heads or ())], initial=1))
        if shards > 1 and has_plan:
            raise MLAUnsupportedError(
                f"mla_prefill ({call.spec.backend}) with heads split over {heads}: its work list is for all heads. "
                "Call it through jax_side.sharded_mla_prefill(mesh, head_axis=...), or choose a backend without a work list."
            )
        local = call.for_heads(-(-call.spec.out_shape[1] // shards))
        others = [NamedSharding(mesh, PartitionSpec(None)) for _ in operands[3:]]
        lse = [NamedSharding(mesh, PartitionSpec(heads, None))] if has_lse else []
        return mesh, _body(local), (NamedSharding(mesh, split), *lse), (*[NamedSharding(mesh, split)] * 3, *others)

    run = custom_partitioning(_body(call))
    rule = _RULE_IN + _WORK_LIST * has_plan + _RULE_OUT + _RULE_LSE * has_lse
    run.def_partition(partition, sharding_rule=rule, need_replication_factors=_WHOLE + ("p",) * has_plan)
    return run


def _body(call: KernelCall) -> Any:
    def run(*operands: Any) -> tuple[Any, ...]:
        out, lse = ffi.call(call.spec, *operands)
        return (out,) if lse is None else (out, lse)

    return run
