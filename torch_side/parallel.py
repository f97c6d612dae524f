"""Context parallelism over ``torch.distributed``: keys spread over ranks, partial results added up by LSE."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mla_interop.context_parallel import contribution, share_of
from mla_interop.errors import MLAInputError, input_error
from mla_interop.lengths import check_integer
from mla_interop.lse import merge
from mla_interop.sequences import PrefillMetadata
from mla_interop.sequences import prepare_metadata as prepare_neutral
from torch_side.functional import mla_prefill
from torch_side.metadata import prepare_metadata


class ContextParallelMetadata(NamedTuple):
    """What :func:`prepare_context_parallel_metadata` returns: this rank's problems.

    Attributes:
        causal: Under the causal mask; None without one.
        full: Without a mask.
        rows: Rows of k and v on this rank.
    """

    causal: PrefillMetadata | None
    full: PrefillMetadata
    rows: int


def context_parallel_mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    metadata: ContextParallelMetadata | None = None,
    first_row: int | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Any = None,
    fallback: bool = False,
    padding: str = "finite",
) -> Any:
    """Attention of q over keys that are spread over the ranks of a group; every rank gets the whole result, with the same bits.

    The packed k and v of the whole batch are cut into contiguous runs of rows, one a rank, in the order of the ranks. Two collectives: LSE is
    gathered, and float32 outputs are summed.

    Args:
        q: ``[T, N, D]``, the same on every rank.
        k, v: ``[S_rank, N, D]``, ``[S_rank, N, V]``: this rank's rows. A rank may have none.
        group: The process group; None: the default one.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` of the *whole* batch; ``cu_seqlens_k=None`` means equal to q's.
        metadata: What :func:`prepare_context_parallel_metadata` returned, instead of the lengths; for any number of layers.
        first_row: Where this rank's run starts; None: at ``rank * S_rank``, which is right where all ranks have equally many rows.
        is_causal: Bottom-right aligned over the whole batch: new tokens. False: a context.
        scale, return_lse, backend, fallback, padding: As in :func:`torch_side.mla_prefill`.

    Returns:
        ``out [T, N, V]`` in q's dtype (bfloat16 for 8-bit q); with ``return_lse`` also float32 ``lse [N, T]``, of the whole problem.

    Raises:
        MLAInputError: An argument is wrong; nothing was launched on this rank.
        MLAUnsupportedError: No backend can serve it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise MLAInputError("group: got no process group; allowed: one of torch.distributed. Call torch.distributed.init_process_group first.")
    if dist.get_rank(group) < 0:
        raise input_error("group", "a group without this process", "a group that it belongs to")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise input_error(name, type(x).__name__, "a torch.Tensor")
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise input_error("q, k, v", f"{q.dim()}, {k.dim()}, {v.dim()} dimensions", "packed [tokens, heads, dim]")
    if metadata is None:
        if cu_seqlens_q is None:
            raise input_error("cu_seqlens_q", "None", "the lengths of the whole batch, or metadata", "A rank's own tensors do not say them.")
        metadata = prepare_context_parallel_metadata(
            cu_seqlens_q, cu_seqlens_k, rows=k.shape[0], group=group, first_row=first_row, is_causal=is_causal, num_tokens_q=q.shape[0], device=q.device
        )
    elif cu_seqlens_q is not None or cu_seqlens_k is not None or first_row is not None:
        raise MLAInputError("metadata: given together with cu_seqlens or first_row; allowed: one of the two, since metadata holds both.")
    _check(metadata, k, is_causal)
    options = {"scale": scale, "return_lse": True, "backend": backend, "fallback": fallback, "padding": padding}
    out, lse = mla_prefill(q, k, v, metadata=metadata.full, is_causal=False, **options)
    if metadata.causal is not None:
        # No query has keys in both: each takes its own side bit for bit.
        out, lse = merge(out, lse, *mla_prefill(q, k, v, metadata=metadata.causal, is_causal=True, **options), out=out, lse=lse)
    out, lse = _sum(out, lse, group)
    return (out, lse) if return_lse else out


def prepare_context_parallel_metadata(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    rows: int,
    group: Any = None,
    first_row: int | None = None,
    is_causal: bool = True,
    num_tokens_q: int | None = None,
    device: Any = None,
) -> ContextParallelMetadata:
    """This rank's part of a batch whose keys are spread over a group, for any number of layers.

    Args:
        cu_seqlens_q, cu_seqlens_k: As in :func:`context_parallel_mla_prefill`; on the host they are checked, on a device not read.
        rows: Rows of k and v on this rank.
        group, first_row, is_causal: As there.
        num_tokens_q: T, where q has rows past the last sequence.
        device: Where q, k and v are; None leaves the copy to the first call.

    Raises:
        MLAInputError: The lengths, ``first_row`` or ``rows`` cannot be.
    """
    if is_causal is not True and is_causal is not False:
        raise input_error("is_causal", repr(is_causal), "True or False")
    for name, value in (("rows", rows), ("first_row", first_row)):
        if value is not None:
            check_integer(name, value)
    whole = prepare_neutral(cu_seqlens_q, cu_seqlens_k, num_tokens_q=num_tokens_q)
    first = dist.get_rank(group) * rows if first_row is None else first_row
    if first < 0 or rows < 0:
        raise input_error("first_row, rows", f"{first}, {rows}", "not negative")
    if device is not None and whole.host is None:
        device = whole.cu_seqlens_q.device
    share = share_of(whole.cu_seqlens_q, whole.cu_seqlens_k, first, rows, is_causal)

    def part(cu_seqlens_k: Any) -> PrefillMetadata:
        return prepare_metadata(share.cu_seqlens_q, cu_seqlens_k, num_tokens_q=whole.bounds.num_tokens_q, num_tokens_k=rows, device=device)

    return ContextParallelMetadata(part(share.cu_seqlens_k) if is_causal else None, part(share.cu_seqlens_k_full), rows)


def _check(metadata: Any, k: torch.Tensor, is_causal: bool) -> None:
    if not isinstance(metadata, ContextParallelMetadata):
        raise input_error("metadata", type(metadata).__name__, "what prepare_context_parallel_metadata returns")
    if is_causal is not (metadata.causal is not None):
        prepared = "with" if metadata.causal is not None else "without"
        raise input_error("is_causal", is_causal, f"the mask that the metadata was prepared for: {prepared} the causal one")
    if k.shape[0] != metadata.rows:
        raise input_error("k", f"{k.shape[0]} rows", f"{metadata.rows}, since the metadata was prepared for them")


def _sum(out: torch.Tensor, lse: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = dist.get_world_size(group)
    all_lse = lse.new_empty(ranks * lse.shape[0], lse.shape[1])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 warns of the second in every call
    gather(all_lse, lse.contiguous(), group=group)
    part, whole = contribution(out, lse, all_lse.view(ranks, *lse.shape))
    part = part.contiguous()  # it has the layout of lse's transpose; NCCL takes no such tensor, though gloo does
    dist.all_reduce(part, group=group)
    return part.to(out.dtype), whole
