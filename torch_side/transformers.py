"""MLA models of the ``transformers`` library through this package: ``attn_implementation="mla_interop"``.

That library asks two functions by name: one makes a mask, once per forward pass, the other is called by every layer. Here the mask is
the list of the batch's ragged sequences, so that what has to be read back from a device is read once per forward pass, not per layer.
"""

import importlib
from typing import Any

import torch

from mla_interop.backends.registry import parse_names
from mla_interop.errors import MLAUnavailableError, input_error
from mla_interop.sequences import PrefillMetadata
from torch_side.functional import mla_prefill, prepare_metadata
from torch_side.ragged_mask import EAGER, RaggedMask, ragged_mask


def register_transformers(name: str = "mla_interop", *, backend: Any = None) -> str:
    """Make this package's attention known to ``transformers`` under a name. Registering again replaces.

    ``AutoModelForCausalLM.from_config(config, attn_implementation=name)``, ``from_pretrained(..., attn_implementation=name)`` and
    ``model.set_attn_implementation(name)`` then run models of the DeepSeek-V2 and V3 families through :func:`torch_side.mla_prefill`:
    padded batches (``attention_mask``), packed ones (``position_ids`` that start again, or ``cu_seq_lens_q``), with a cache, and one
    token at a time. Rows of padding get zeros. Inference only.

    Args:
        name: For ``attn_implementation``. Not with "flash" in it: the library would take the implementation for one of its own.
        backend: As in :func:`torch_side.mla_prefill`.

    Returns:
        The name.

    Raises:
        MLAInputError: The name or the backend.
        MLAUnavailableError: ``transformers`` is not installed, or has no attention interface.
    """
    if not isinstance(name, str) or not name or "flash" in name or "|" in name or "/" in name:
        raise input_error("name", repr(name), "a word without 'flash', '|' and '/'")
    backend = None if backend is None else parse_names("backend", backend)
    try:
        library = importlib.import_module("transformers")
        interfaces = library.AttentionInterface, library.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise MLAUnavailableError(f"transformers: cannot be imported or has no attention interface ({error}); install transformers>=5.17.") from error

    def attention(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return attend(*arguments, backend=backend, **options)

    for interface, function in zip(interfaces, (attention, ragged_mask), strict=True):
        interface.register(name, function)
    return name


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    backend: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: called by every layer.

    Args:
        module: The layer.
        query, key, value: ``[B, N, T, D]``, ``[B, N, S, D]``, ``[B, N, S, V]``; value unpadded.
        attention_mask: What :func:`ragged_mask` made. None: no padding, and the mask that the layer says.
        dropout: 0.
        scaling: Softmax scale, YaRN's factor included.
        is_causal: Overrides the layer's, where ``attention_mask`` is None.
        backend: As in :func:`torch_side.mla_prefill`.
        **options: What the model was called with. ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k`` are lengths of a
            packed batch of one row.

    Returns:
        ``[B, T, N, V]``, and None for the weights, which a fused kernel does not have.

    Raises:
        MLAInputError: Something is asked for that this attention does not do.
    """
    _check(attention_mask, dropout, options)
    mask = attention_mask
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = RaggedMask((query.shape[0], 1, query.shape[2], key.shape[2]), None, None, None, key.shape[2], bool(causal))
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, : mask.keys], value[:, :, : mask.keys]))
    metadata = _given_lengths(mask, query.shape[0], options) or mask.metadata
    if metadata is None:
        return mla_prefill(q, k, v, scale=scaling, is_causal=mask.is_causal, backend=backend), None
    q, k, v = mask.take(q, "rows_q"), mask.take(k, "rows_k"), mask.take(v, "rows_k")
    packed = mla_prefill(q, k, v, metadata=metadata, scale=scaling, is_causal=mask.is_causal, backend=backend)
    batch, _, tokens, _ = query.shape
    index = mask.index("rows_q", query.device)
    if index is not None:
        packed = packed.new_zeros(batch * tokens, *packed.shape[1:]).index_copy_(0, index[0], packed)
    return packed.view(batch, tokens, *packed.shape[1:]), None


def _check(mask: Any, dropout: float, options: dict[str, Any]) -> None:
    if mask is not None and not isinstance(mask, RaggedMask):
        got = f"a mask of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else type(mask).__name__
        raise input_error("attention_mask", got, "[B, S] of 0 and 1, packed position_ids, or None", f"A mask of arbitrary entries needs another way. {EAGER}")
    if dropout:
        raise input_error("dropout", dropout, "0", "Attention dropout is for training; call model.eval(), or set config.attention_dropout to 0.")
    if options.get("output_attentions"):
        raise input_error("output_attentions", True, "False", f"A fused kernel has no attention weights to give. {EAGER}")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(name) is not None:
            raise input_error(name, _brief(options[name]), "None", f"MLA prefill kernels have none. {EAGER}")


def _given_lengths(mask: RaggedMask, batch: int, options: dict[str, Any]) -> PrefillMetadata | None:
    """Lengths that the caller gave with the model's inputs, as data collators for packed batches do; None where positions say them too."""
    given = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if (given[0] is None and given[1] is None) or (mask.metadata is not None and mask.rows_k is None):
        return None
    if given[0] is None or batch != 1 or mask.rows_k is not None:
        got = f"a batch of {batch} rows" if batch != 1 else "cu_seq_lens_k alone" if given[0] is None else "padding too"
        raise input_error("cu_seq_lens_q", got, "with a packed batch of one row, without padding")
    # Every layer is given the same tensors; they are kept, so that their ids stay theirs.
    key = ("cu_seq_lens", *map(id, given))
    if key not in mask.memo:
        made = prepare_metadata(*given, max_seqlen_q=options.get("max_length_q"), max_seqlen_k=options.get("max_length_k"))
        mask.memo[key] = made, given
    return mask.memo[key][0]


def _brief(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
