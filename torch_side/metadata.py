"""Lengths of a batch for torch: on a device before the first call, and, for CUDA graphs, changed in place between replays."""

from typing import Any

import numpy as np
import torch

from mla_interop import sequences
from mla_interop.backends.base import MLAPrefillBackend
from mla_interop.errors import MLAUnsupportedError, input_error
from mla_interop.lengths import readable
from mla_interop.sequences import PrefillMetadata
from torch_side.launch import on_device, to_device

_PLANNER = "backend that plans"


@torch.compiler.disable(reason="lengths of the host are read here; prepare them outside of the program")
def prepare_metadata(cu_seqlens_q: Any, cu_seqlens_k: Any = None, *, device: Any = None, changing: bool = False, **options: Any) -> PrefillMetadata:
    """``mla_interop.prepare_metadata``, with its arrays on ``device`` already: no call with the result copies anything to it.

    Args:
        cu_seqlens_q, cu_seqlens_k: As in ``mla_prefill``.
        device: Where q, k and v are; None leaves the copy to the first call, which waits for it. Compiled code needs it.
        changing: The lengths will change in place, by :func:`update_metadata`, so nothing of a call may depend on them: what a CUDA graph that is
            replayed with other lengths needs. ``num_tokens_q`` and ``num_tokens_k`` (the buffers' rows) and ``device`` must be given. Calls are then
            those with lengths on the device: v past the last key must be finite (``padding``), and kernels get upper bounds.
        **options: As in ``mla_interop.prepare_metadata``.

    Raises:
        MLAInputError: As there; also with ``changing``: no device, or the sizes of the buffers are not stated.
        MLAUnsupportedError: With ``config``: no backend can serve it.
    """
    metadata = sequences.prepare_metadata(cu_seqlens_q, cu_seqlens_k, **options)
    if device is None:
        if changing:
            raise input_error("device", "None with changing=True", "the device of q, k and v")
        return metadata
    where = torch.empty(0, device=device).device
    arrays = on_device(metadata, where)
    if not changing:
        return metadata.with_arrays(*arrays)
    for name in ("num_tokens_q", "num_tokens_k"):
        if not (metadata.bounds.padded_q if name == "num_tokens_q" else metadata.bounds.padded_k) or getattr(metadata.bounds, name) is None:
            raise input_error(name, "None with changing=True", "the number of rows of the buffers, which longer and shorter batches share")
    # Own memory: what the caller gave must not change with it. Tensors of inference mode could not be changed outside of it.
    with torch.inference_mode(False):
        queries = arrays[0].clone()
        keys = queries if metadata.bounds.same_lengths else arrays[1].clone()
        made = PrefillMetadata(queries, keys, None if arrays[2] is None else arrays[2].clone(), metadata.bounds)
    if metadata.plan is not None:
        made.remember(_PLANNER, lambda: sequences.planner(options["config"], options.get("backend"), options.get("is_causal"), metadata.bounds))
    return made


@torch.compiler.disable(reason="lengths of the host are read here; update them outside of the program")
def update_metadata(metadata: PrefillMetadata, cu_seqlens_q: Any, cu_seqlens_k: Any = None) -> PrefillMetadata:
    """New lengths into metadata that was prepared with ``changing=True``, in place, on the current stream, without waiting for the device.

    A CUDA graph that was captured with it is then replayed with them, on the same stream or after it. A work list is made anew and copied too.

    Args:
        metadata: What ``prepare_metadata(..., changing=True)`` returned.
        cu_seqlens_q, cu_seqlens_k: New cumulative lengths inside the same bounds, of as many sequences or fewer (the rest are empty). On the host
            they are checked; on a device, int32 ``[B + 1]``, they are not read.

    Returns:
        ``metadata``.

    Raises:
        MLAInputError: The lengths do not fit the bounds; nothing was changed.
        MLAUnsupportedError: There is a work list to make, and only the device knows the lengths.
    """
    if not isinstance(metadata, PrefillMetadata):
        raise input_error("metadata", type(metadata).__name__, "what prepare_metadata(..., changing=True) returned")
    bounds = metadata.bounds
    if metadata.host is not None or not isinstance(metadata.cu_seqlens_q, torch.Tensor) or not (bounds.padded_q and bounds.padded_k):
        raise input_error("metadata", "lengths that calls may depend on", "what prepare_metadata(..., changing=True) returned")
    if bounds.same_lengths and cu_seqlens_k is not None:
        raise input_error("cu_seqlens_k", "lengths of their own", "None, since the metadata was prepared with equal lengths")
    sizes = {name: getattr(bounds, name) for name in ("num_tokens_q", "num_tokens_k", "max_seqlen_q", "max_seqlen_k")}
    lengths = [x if x is None else _padded(name, x, bounds.num_seqs) for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))]
    checked = sequences.prepare_metadata(*lengths, **sizes)
    if checked.bounds.same_lengths != bounds.same_lengths:
        raise input_error("cu_seqlens_k", "None", "lengths, since the metadata was prepared with keys' lengths of their own")
    targets = [(metadata.cu_seqlens_q, checked.cu_seqlens_q)]
    if not bounds.same_lengths:
        targets.append((metadata.cu_seqlens_k, checked.cu_seqlens_k))
    if metadata.plan is not None:
        targets.append((metadata.plan, _replanned(metadata, checked)))
    for target, source in targets:
        target.copy_(source if isinstance(source, torch.Tensor) else to_device(source, target.device), non_blocking=True)
    return metadata


def _padded(name: str, cu_seqlens: Any, num_seqs: int) -> Any:
    host = readable(name, cu_seqlens)
    values = cu_seqlens if host is None else host
    if host is not None and host.ndim == 1 and 0 < len(host) <= num_seqs:
        return np.pad(host, (0, num_seqs + 1 - len(host)), mode="edge")
    if tuple(getattr(values, "shape", ())) != (num_seqs + 1,):
        got = f"shape {tuple(values.shape)}" if hasattr(values, "shape") else type(values).__name__
        raise input_error(name, got, f"at most [{num_seqs + 1}] on the host, or exactly that on a device")
    return values


def _replanned(metadata: PrefillMetadata, checked: PrefillMetadata) -> Any:
    def unknown() -> MLAPrefillBackend:
        raise MLAUnsupportedError("update_metadata: this work list was not made by prepare_metadata(..., config=..., changing=True), which knows its maker.")

    planned = metadata.remember(_PLANNER, unknown).prepare_metadata(checked)
    if tuple(planned.plan.shape) != tuple(metadata.plan.shape):
        raise MLAUnsupportedError(
            f"update_metadata: the new work list has {planned.plan.shape[0]} bytes and the old one {metadata.plan.shape[0]}; capture the graph anew."
        )
    return planned.plan
