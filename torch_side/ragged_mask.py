"""A batch's mask as the list of its ragged sequences: what ``transformers`` asks for once per forward pass, and hands to every layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mla_interop.errors import input_error
from mla_interop.sequences import PrefillMetadata
from torch_side.functional import prepare_metadata

EAGER = "Use attn_implementation='eager' for it."


@dataclass(frozen=True, eq=False)
class RaggedMask:
    """What a batch's mask amounts to: its sequences, and where their rows are.

    Attributes:
        shape: ``(B, 1, T, S)`` of the mask that this stands for. ``transformers`` looks at ``shape`` and ``ndim``, and passes a mask of four
            dimensions on as it is.
        metadata: Lengths of the sequences; None: every row of the batch is one sequence of T queries and ``keys`` keys.
        rows_q, rows_k: Which rows of the batch, flattened to ``[B * T]`` and ``[B * keys]``, belong to sequences, in order; None: all.
        keys: Keys that exist: a static cache is longer than what was written to it.
        is_causal: The mask inside a sequence.
        memo: What layers make of it once: indices on their device, metadata of lengths that came with the model's inputs.
    """

    shape: tuple[int, int, int, int]
    metadata: PrefillMetadata | None
    rows_q: np.ndarray | None
    rows_k: np.ndarray | None
    keys: int
    is_causal: bool
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    ndim = 4

    def take(self, x: torch.Tensor, which: str) -> torch.Tensor:
        """``x [B, S, N, D]`` as packed rows: those of ``rows_q`` or ``rows_k``. One copy, where there has to be one."""
        index = self.index(which, x.device)
        # Flattening first would be another copy: the library's tensors have the head before the token.
        return x.flatten(0, 1) if index is None else x[index[1], index[2]]

    def index(self, which: str, device: torch.device) -> tuple[torch.Tensor, ...] | None:
        """``rows_q`` or ``rows_k`` on a device, flat, and as numbers of the batch's row and of the token; copied there once."""
        rows = getattr(self, which)
        if rows is None:
            return None
        key = which, device
        if key not in self.memo:
            per_row = self.keys if which == "rows_k" else self.shape[2]
            self.memo[key] = tuple(torch.from_numpy(part).to(device) for part in (rows, rows // per_row, rows % per_row))
        return self.memo[key]


def ragged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Any:
    """The mask function: called once per forward pass, and the only place that reads from a device.

    Args:
        batch_size, q_length, kv_length: B, T, S.
        q_offset: Position of the first query: tokens that the cache holds already.
        kv_offset: Position of the first key.
        mask_function: The library's description of the mask, a function of indices. None: causal.
        attention_mask: bool ``[B, past + T]``, False for padding; or None; or a mask made before, which is returned.
        use_vmap: The library's sign that a caller put functions of his own into the mask.
        device: Where ``mask_function`` computes.

    Raises:
        MLAInputError: The mask is neither causal, full, nor a packing of causal sequences; or it does not cover the queries.
    """
    if isinstance(attention_mask, RaggedMask):
        return attention_mask
    if use_vmap or kv_offset:
        got = "a function of the caller's (or_mask_function, and_mask_function)" if use_vmap else f"keys that start at position {kv_offset} (sliding cache)"
        raise input_error("mask", got, "padding, packing, and causal or full attention inside a sequence", EAGER)
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    past = int(q_offset)
    keys = min(kv_length, past + q_length)
    shape = (batch_size, 1, q_length, kv_length)
    is_causal = mask_function is not bidirectional_mask_function
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        starts = _packed_starts(mask_function, batch_size, q_length, keys, attention_mask, device)
        return RaggedMask(shape, prepare_metadata(_cumulative(np.diff(np.append(starts, batch_size * q_length)))), None, None, keys, True)
    if attention_mask is None:
        return RaggedMask(shape, None, None, None, keys, is_causal)
    if attention_mask.shape[1] < past + q_length:
        got = f"{attention_mask.shape[1]} columns"
        raise input_error("attention_mask", got, f"at least {past + q_length}: {past} tokens in the cache and {q_length} new ones")
    valid = attention_mask[:, : past + q_length].bool().cpu().numpy()
    if valid.all():
        return RaggedMask(shape, None, None, None, keys, is_causal)
    queries, present = valid[:, past:], valid[:, :keys]
    metadata = prepare_metadata(_cumulative(queries.sum(1)), _cumulative(present.sum(1)))
    return RaggedMask(shape, metadata, None if queries.all() else np.flatnonzero(queries), np.flatnonzero(present), keys, is_causal)


def _packed_starts(mask_function: Any, batch: int, tokens: int, keys: int, padding: Any, device: Any) -> np.ndarray:
    """First rows of packed sequences, in ``[B * T]``, asked of the library's own mask function, and that it masks nothing else.

    What is asked: does a query see the key before it (else a sequence starts here), itself, its sequence's first key, and not the next?
    """
    if padding is not None or keys != tokens:
        raise input_error("mask", "a pattern together with padding or a cache", "padding, or packing, or causal attention", EAGER)
    row, here = torch.arange(batch, device=device)[:, None], torch.arange(tokens, device=device)[None, :]
    head = torch.zeros((), dtype=torch.int64, device=device)

    def sees(query: Any, key: Any) -> Any:
        return torch.broadcast_to(mask_function(row, head, query, key), (batch, query.shape[-1]))

    starts = torch.ones(batch, tokens, dtype=torch.bool, device=device)
    starts[:, 1:] = ~sees(here[:, 1:], here[:, :-1])
    first = torch.where(starts, here, 0).cummax(1).values
    plain = sees(here, here) & torch.broadcast_to(mask_function(row, head, here, first), (batch, tokens))
    plain[:, :-1] &= ~sees(here[:, :-1], here[:, 1:])
    both = torch.stack([starts, plain]).cpu().numpy()
    if not both[1].all():
        raise input_error("mask", "a sliding window, blocks or another pattern", "causal attention inside packed sequences", EAGER)
    return np.flatnonzero(both[0])


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])
