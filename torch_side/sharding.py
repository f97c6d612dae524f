"""DTensors: heads split over a mesh run one shard per rank, without gathering; every other way to split is refused."""

from collections.abc import Callable
from typing import Any

import torch

from mla_interop.errors import MLAInputError, input_error


def is_distributed(x: Any) -> bool:
    """Whether ``x`` is a DTensor; nothing is imported to find out."""
    return hasattr(x, "device_mesh")


def distributed_call(
    run: Callable[..., Any], q: Any, k: Any, v: Any, lengths: tuple[Any, ...], check: bool, options: tuple[Any, ...], out: Any
) -> tuple[Any, Any] | Any:
    """``mla_prefill`` of DTensors: ``run`` on the local shards, results as DTensors with the same placements.

    An operator with a sharding rule would redistribute what does not fit, which is an all-gather of K and V that nobody asked for.

    Args:
        run: ``mla_prefill`` of plain tensors.
        q, k, v: DTensors of one mesh. Each of its dimensions replicates them, or shards the heads of all three (packed: dimension 1, dense: 2),
            or, dense only, the batch.
        lengths: metadata, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, of the whole batch; plain, equal on every rank.
        check, options: As in ``mla_prefill``.
        out: Must be None.

    Raises:
        MLAInputError: Any other placement.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_distributed(x):
            raise input_error(name, "a plain tensor beside DTensors", "DTensors of one mesh", "DTensor.from_local(..., [Replicate()]) makes one.")
        if x.device_mesh != q.device_mesh:
            raise input_error(name, f"mesh {x.device_mesh}", f"q's mesh, {q.device_mesh}")
    if out is not None:
        raise input_error("out", type(out).__name__, "None for DTensors")
    heads = q.dim() - 2
    allowed = (heads,) if heads == 1 else (0, heads)
    for name, x in (("q", q), ("k", k), ("v", v)):
        for place in x.placements:
            # Exactly Shard: a subclass of it deals elements out in another order.
            if not isinstance(place, Replicate) and not (type(place) is Shard and place.dim % x.dim() in allowed):
                raise _wrong(name, x.placements, q.dim())
    if not q.placements == k.placements == v.placements:
        raise MLAInputError(
            f"q, k, v: got placements {q.placements}, {k.placements}, {v.placements}; allowed: the same for all three. Redistribute first, if you mean it."
        )
    names = ("metadata", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    option_names = ("scale", "is_causal", "return_lse", "backend", "fallback", "padding")
    given = {**dict(zip(names, lengths)), **dict(zip(option_names, options)), "check": check}
    made = run(q.to_local(), k.to_local(), v.to_local(), **given)

    def whole(local: Any, shape: tuple[int, ...], stride: tuple[int, ...], move: Callable[[int], int]) -> Any:
        placements = [Shard(move(place.dim % q.dim())) if isinstance(place, Shard) else place for place in q.placements]
        return DTensor.from_local(local, q.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    out_shape = (*q.shape[:-1], v.shape[-1])
    if not isinstance(made, tuple):
        return whole(made, out_shape, _compact(out_shape), lambda dim: dim)
    if heads == 1:
        lse_shape, lse_stride = (q.shape[1], q.shape[0]), _compact((q.shape[1], q.shape[0]))
    else:
        batch, tokens, count = q.shape[:3]
        lse_shape, lse_stride = (batch, count, tokens), (tokens, batch * tokens, 1)
    lse_dims = {heads: 0} if heads == 1 else {0: 0, heads: 1}
    return whole(made[0], out_shape, _compact(out_shape), lambda dim: dim), whole(made[1], lse_shape, lse_stride, lse_dims.__getitem__)


def _wrong(name: str, placements: Any, dims: int) -> MLAInputError:
    allowed = "Replicate, or Shard(1): heads" if dims == 3 else "Replicate, Shard(0): batch, or Shard(2): heads"
    return input_error(
        name,
        f"placements {placements}",
        allowed,
        "Tokens are not split like this: a sequence would need keys of other ranks. See torch_side.context_parallel_mla_prefill.",
    )


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))
