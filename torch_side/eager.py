"""Calls outside of any tracing: launched from here, or, where C++ can serve the next one like it, through the operators.

C++ serves calls of metadata that is used again, if its library is at hand (``kernels/torch_op.py``): a first call does not wait ten seconds for what saves
microseconds. The operators' arguments are then the metadata's arrays and, as their text, a number (``op.Offer``).
"""

from typing import Any

import torch

from mla_interop.config import config_in_use
from mla_interop.kernels import torch_op
from mla_interop.prefill import Options
from mla_interop.sequences import PrefillMetadata
from torch_side.launch import Arrays, Prepared, launch, prepared_call
from torch_side.op import Offer, can_be_remembered, prefill_lse_op, prefill_lse_out_op, prefill_op, prefill_out_op

_TENSOR = torch.Tensor


def call(q: Any, k: Any, v: Any, options: Options, metadata: PrefillMetadata, out: Any, own: bool = False) -> Any:
    """One call on packed tensors. ``own``: no other call knows this metadata.

    Raises:
        MLAInputError: A tensor is a view with the negative bit, or has no memory.
    """
    # What arrays there are depends on the device, and what is chosen on the configuration; the rest is in the operators' own key.
    key = "eager", options, q.device, config_in_use()
    offer = metadata._memo.get(key)
    # Of a subclass an operator makes all its results; what is no tensor it refuses in torch's words, and another device's buffer is that device's business.
    plain = type(q) is type(k) is type(v) is _TENSOR and (out is None or (type(out) is _TENSOR and out.device == q.device))
    if not offer or not plain:
        prepared, arrays = prepared_call(q, k, v, options, metadata, own)
        made = launch(prepared, arrays, q, k, v, out)
        if offer is None and not own:
            metadata.remember(key, lambda: _can_be_offered(prepared, arrays) and Offer(options, metadata, arrays))
        return made
    if out is None:
        return (prefill_lse_op if options.return_lse else prefill_op)(q, k, v, *offer.arguments)
    if options.return_lse:
        return out, prefill_lse_out_op(q, k, v, *offer.arguments, out)
    prefill_out_op(q, k, v, *offer.arguments, out)
    return out


def _can_be_offered(prepared: Prepared, arrays: Arrays) -> bool:
    return can_be_remembered(prepared) and all(x is None or type(x) is _TENSOR for x in arrays) and torch_op.at_hand()
