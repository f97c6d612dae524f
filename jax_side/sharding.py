"""Arrays of several devices: which ways of splitting them are right, and the call that runs one shard per device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mla_interop.errors import input_error
from mla_interop.exchange import is_tracer
from mla_interop.sequences import PrefillMetadata


class Split(NamedTuple):
    """How a call is split.

    Attributes:
        mesh: The mesh.
        data: Axis, or axes, over which sequences are split (dimension 0 of q, k, v); None: not split.
        heads: The same for heads.
        lengths: How the cumulative lengths are split: as ``data`` where each shard has its own, else None.
    """

    mesh: Any
    data: Any
    heads: Any
    lengths: Any = None


def explicit_split(q: Any, k: Any, v: Any) -> Split | None:
    """How arrays of an explicit mesh are split, by their types; None where their types say nothing (no mesh, or automatic axes).

    A custom call would get all of each array on every device (jax#32098, jax#38551), and tokens that are split while cumulative lengths
    are not would be wrong data.

    Raises:
        MLAInputError: They are split over anything but heads (or the batch of a dense one), or differently.
    """
    types = [jax.typeof(x) for x in (q, k, v)]
    if not any(any(x.sharding.spec) for x in types):
        return None
    dims = {3: (1,), 4: (0, 2)}.get(q.ndim, ())
    for name, x in zip("qkv", types):
        wrong = [entry for dim, entry in enumerate(x.sharding.spec) if entry is not None and dim not in dims]
        if wrong or x.ndim != q.ndim or x.sharding.mesh != types[0].sharding.mesh:
            raise input_error(name, f"the sharding {x.sharding.spec}", _ALLOWED[q.ndim == 4], _ADVICE)
    specs = [tuple(x.sharding.spec[dim] for dim in dims) for x in types]
    if not specs[0] == specs[1] == specs[2]:
        got = ", ".join(str(x.sharding.spec) for x in types)
        raise input_error("q, k, v", f"the shardings {got}", "the same for all three", "jax.sharding.reshard changes one.")
    traced = any(map(is_tracer, (q, k, v)))
    return Split(types[0].sharding.mesh if traced else q.sharding.mesh, specs[0][0] if q.ndim == 4 else None, specs[0][-1])


_ALLOWED = (
    "heads split (dimension 1), or nothing",
    "batch (dimension 0) and heads (dimension 2) split, or nothing",
)
_ADVICE = (
    "Sequences split with lengths of their own: jax_side.sharded_mla_prefill(mesh, data_axis=...); "
    "keys split: jax_side.context_parallel_mla_prefill(mesh, axis); else jax.sharding.reshard first."
)


def run_split(split: Split, run: Callable[..., Any], q: Any, k: Any, v: Any, metadata: PrefillMetadata | None, return_lse: bool) -> Any:
    """``run(q, k, v, metadata)`` on every device's shard, without any communication."""
    middle = (None,) * (q.ndim - 3)
    spec = PartitionSpec(split.data, *middle, split.heads, None)
    lse = PartitionSpec(split.data, split.heads, None) if q.ndim == 4 else PartitionSpec(split.heads, split.data)
    given = () if metadata is None else (metadata.cu_seqlens_q, metadata.own_cu_seqlens_k, metadata.plan)
    # Host values stay constants: a kernel that follows a work list can have one made for its number of heads.
    operands = [_as_split(x, split) for x in given if x is not None and not isinstance(x, np.ndarray)]

    def local(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        if metadata is None:
            return run(q, k, v, None)
        rest = iter(arrays)
        cu_q, cu_k, plan = (x if x is None or isinstance(x, np.ndarray) else next(rest) for x in given)
        return run(q, k, v, metadata.with_arrays(cu_q, cu_k, plan))

    mapped = jax.shard_map(
        local,
        mesh=split.mesh,
        in_specs=(spec, spec, spec, *[PartitionSpec(split.lengths)] * len(operands)),
        out_specs=(spec, lse) if return_lse else spec,
    )
    return mapped(q, k, v, *operands)


def _as_split(lengths: Any, split: Split) -> Any:
    """Lengths in the type that an explicit mesh wants them in: constants have none, and may be cut anywhere."""
    if split.lengths is None or not split.mesh.explicit_axes or any(jax.typeof(lengths).sharding.spec):
        return lengths
    return jax.sharding.reshard(lengths, NamedSharding(split.mesh, PartitionSpec(split.lengths)))
