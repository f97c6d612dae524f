"""Several devices by hand: heads and sequences split with no communication, and keys split with one merge by LSE."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_side import sharding
from jax_side.functional import mla_prefill
from mla_interop.call_forms import metadata_for, refuse_lengths
from mla_interop.context_parallel import contribution, share_of
from mla_interop.errors import input_error
from mla_interop.exchange import host_values
from mla_interop.sequences import PrefillMetadata, prepare_metadata

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_PER_CALL = ("scale", "is_causal", "return_lse", "backend", "fallback", "padding", "route")


def sharded_mla_prefill(mesh: Any, *, head_axis: Any = None, data_axis: Any = None) -> Callable[..., Any]:
    """``mla_prefill`` on a mesh, one shard per device: heads split over one axis, sequences over another. Nothing is communicated.

    The function that is returned takes what ``mla_prefill`` takes, arrays of the whole mesh, and gives arrays of the whole mesh. Use it inside
    ``jax.jit``: called by itself it is traced anew each time.

    - Over ``data_axis``, packed tokens are split into equal blocks of rows, and each shard has sequences of its own: ``cu_seqlens_q`` and ``cu_seqlens_k`` are
      then one prefix sum of ``B + 1`` numbers *per shard*, each starting at 0, one after the other: ``[shards * (B + 1)]``. A dense batch is
      split over its sequences. ``metadata`` is for a batch that is not split.
    - Over ``head_axis`` every device has all lengths. A backend with a work list makes it for a shard's heads where the host knows the lengths.

    Args:
        mesh: A ``jax.sharding.Mesh`` (or abstract mesh, inside ``jax.jit``).
        head_axis, data_axis: Names of its axes (or tuples of names); None: not split.

    Raises:
        MLAInputError: The mesh has no such axis; from the function: sizes that its shards do not divide, or lengths that are not per shard.
    """
    heads, shards = _size(mesh, "head_axis", head_axis), _size(mesh, "data_axis", data_axis)

    def call(q: Any, k: Any, v: Any, *, metadata: PrefillMetadata | None = None, check: bool = False, **options: Any) -> Any:
        cu_q, cu_k, max_q, max_k = lengths = [options.pop(name, None) for name in _LENGTHS]
        _check_options("sharded_mla_prefill", options)
        return_lse = options.get("return_lse", False)
        dense = q.ndim == 4
        _check_divisible("heads", q.shape[-2], heads, head_axis)
        for name, x in (("q", q), ("k", k)):
            _check_divisible(f"dimension 0 of {name}", x.shape[0], shards, data_axis)
        if dense:
            refuse_lengths((metadata, *lengths))
        elif data_axis is None:
            metadata = metadata_for(q.shape, k.shape, metadata, cu_q, cu_k, max_q, max_k, check)
        elif metadata is not None:
            raise input_error("metadata", "given with data_axis", "cu_seqlens_q and cu_seqlens_k, one prefix sum per shard")
        else:
            metadata = _per_shard(q.shape[0] // shards, k.shape[0] // shards, shards, cu_q, cu_k, max_q, max_k)
        split = sharding.Split(mesh, data_axis, head_axis, data_axis)
        return sharding.run_split(split, lambda q, k, v, metadata: mla_prefill(q, k, v, metadata=metadata, **options), q, k, v, metadata, return_lse)

    return call


def context_parallel_mla_prefill(mesh: Any, axis: str, *, head_axis: Any = None) -> Callable[..., Any]:
    """``mla_prefill`` with keys spread over a mesh axis: each rank attends to its own keys, and partial results are merged by LSE.

    The function that is returned takes packed q, whole on every rank of ``axis``; k and v, ``[S, N, ...]``, cut into equal contiguous runs of rows,
    one a rank (``PartitionSpec(axis, head_axis, None)``; rows past the last sequence are padding); and the *whole* batch's ``cu_seqlens_q`` and
    ``cu_seqlens_k``. Its other options are those of ``mla_prefill``. The result is whole on every rank. Use it inside ``jax.jit``.

    The causal mask is that of the whole batch, bottom-right: a rank's part of it is one causal and one unmasked call of the same kernel over
    lengths of its own (``mla_interop.context_parallel``). Keys that are dealt out in turn (interleaved) have no such form under the causal mask.
    Two collectives: the ranks' LSE, and a float32 sum of their outputs.

    Args:
        mesh: A ``jax.sharding.Mesh`` (or abstract mesh, inside ``jax.jit``).
        axis: Name of the axis over which keys are split.
        head_axis: Name of the axis (or a tuple of names) over which heads are split too; None: not split.

    Raises:
        MLAInputError: The mesh has no such axis; from the function: a dense batch, metadata, or sizes that its shards do not divide.
    """
    ranks, heads = _size(mesh, "axis", axis), _size(mesh, "head_axis", head_axis)

    def call(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, return_lse: bool = False, **options: Any) -> Any:
        is_causal = options.pop("is_causal", True)
        _check_options("context_parallel_mla_prefill", options)
        if q.ndim != 3 or k.ndim != 3 or v.ndim != 3:
            raise input_error("q, k, v", f"{q.ndim}, {k.ndim}, {v.ndim} dimensions", "packed [tokens, heads, dim]")
        _check_divisible("heads", q.shape[1], heads, head_axis)
        _check_divisible("rows of k", k.shape[0], ranks, axis)
        whole = metadata_for(q.shape, k.shape, None, cu_seqlens_q, cu_seqlens_k, None, None, False)
        rows = k.shape[0] // ranks

        def rank(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
            share = share_of(cu_q, cu_k, jax.lax.axis_index(axis) * rows, rows, is_causal)

            def part(cu_k: Any, mask: bool) -> Any:
                return mla_prefill(q, k, v, cu_seqlens_q=share.cu_seqlens_q, cu_seqlens_k=cu_k, is_causal=mask, return_lse=True, **options)

            out, lse = part(share.cu_seqlens_k_full, False)
            if is_causal:
                seen_in_part, lse_in_part = part(share.cu_seqlens_k, True)
                # A query has keys in one of the two at most, and the other gives it out 0 and lse -inf.
                out, lse = out + seen_in_part, jnp.maximum(lse, lse_in_part)
            own = jnp.arange(ranks)[:, None, None] == jax.lax.axis_index(axis)
            # A sum, not an all-gather: shard_map knows that every rank has the same sum.
            added, lse = contribution(out, lse, jax.lax.psum(jnp.where(own, lse, 0), axis))
            return jax.lax.psum(added, axis).astype(out.dtype), lse

        split, keys = PartitionSpec(None, head_axis, None), PartitionSpec(axis, head_axis, None)
        none = PartitionSpec()
        mapped = jax.shard_map(rank, mesh=mesh, in_specs=(split, keys, keys, none, none), out_specs=(split, PartitionSpec(head_axis, None)))
        out, lse = mapped(q, k, v, jnp.asarray(whole.cu_seqlens_q), jnp.asarray(whole.cu_seqlens_k))
        return (out, lse) if return_lse else out

    return call


def _per_shard(
    rows_q: int, rows_k: int, shards: int, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> PrefillMetadata:
    """Metadata of one shard, whose arrays are those of all shards, one after the other."""
    if cu_seqlens_q is None:
        raise input_error("cu_seqlens_q", "None with data_axis", "one prefix sum per shard, [shards * (B + 1)]")
    same = cu_seqlens_k is None
    pieces = [_pieces(name, x, shards) for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_q if same else cu_seqlens_k))]
    made = [
        prepare_metadata(
            of_q,
            None if same else of_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            num_tokens_q=rows_q,
            num_tokens_k=rows_k,
        )
        for of_q, of_k in zip(*pieces, strict=True)
    ][0]
    arrays = [jnp.asarray(x, jnp.int32) for x in (cu_seqlens_q, cu_seqlens_q if same else cu_seqlens_k)]
    return PrefillMetadata(arrays[0], arrays[1], None, made.bounds)


def _pieces(name: str, cu_seqlens: Any, shards: int) -> list[Any]:
    """Each shard's lengths where the host knows them; else ``shards`` times the first, of which only the shape and the dtype are looked at."""
    shape = np.shape(cu_seqlens)
    if len(shape) != 1 or shape[0] == 0 or shape[0] % shards:
        raise input_error(name, f"shape {shape}", f"one prefix sum for each of the {shards} shards, [{shards} * (B + 1)]")
    host = host_values(cu_seqlens)
    return [cu_seqlens[: shape[0] // shards]] * shards if host is None else np.split(host, shards)


def _size(mesh: Any, argument: str, axis: Any) -> int:
    names = (axis,) if isinstance(axis, str) else tuple(axis or ())
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
        raise input_error(argument, repr(axis), f"axes of the mesh: {', '.join(map(str, mesh.shape))}")
    return int(np.prod([mesh.shape[name] for name in names], initial=1))


def _check_divisible(what: str, size: int, shards: int, axis: Any) -> None:
    if size % shards:
        raise input_error(what, str(size), f"a multiple of the {shards} shards of {axis!r}", "Pad it.")


def _check_options(function: str, options: dict[str, Any]) -> None:
    unknown = sorted(set(options) - set(_PER_CALL))
    if unknown:
        raise TypeError(f"{function}(...) got unexpected keyword arguments {', '.join(unknown)}; allowed: {', '.join((*_LENGTHS, *_PER_CALL))}")
