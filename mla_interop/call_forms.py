"""The forms in which a caller gives a problem: packed or dense arrays, and lengths as metadata, as cumulative lengths, or not at all."""

from collections.abc import Callable, Iterable
from typing import Any

from mla_interop.errors import MLAInputError, input_error
from mla_interop.exchange import TensorSpec
from mla_interop.sequences import PrefillMetadata, dense_metadata, prepare_metadata

FORMS = "packed [tokens, heads, dim] or dense [batch, tokens, heads, dim]; the same form for q, k and v"


def metadata_for(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    metadata: PrefillMetadata | None,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    check: bool,
) -> PrefillMetadata:
    """The metadata of a call from whichever form the caller gave: metadata, cumulative lengths, or neither (one sequence, or dense).

    Raises:
        MLAInputError: Two forms at once, or lengths with a dense batch.
    """
    if metadata is not None:
        if cu_seqlens_q is not None or cu_seqlens_k is not None or max_seqlen_q is not None or max_seqlen_k is not None:
            raise MLAInputError("metadata: given together with cu_seqlens or max_seqlen; allowed: one of the two, since metadata holds both.")
        if not isinstance(metadata, PrefillMetadata):
            raise input_error("metadata", type(metadata).__name__, "what prepare_metadata returns")
        return metadata
    for name, shape in (("q", q_shape), ("k", k_shape)):
        if len(shape) != 3:  # before lengths are compared with what is no number of tokens
            raise input_error(name, f"shape {tuple(shape)}", FORMS)
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise input_error("cu_seqlens_q", "None with cu_seqlens_k given", "both, or cu_seqlens_q alone")
    if cu_seqlens_q is None:
        if max_seqlen_q is None and max_seqlen_k is None:
            return dense_metadata(1, q_shape[0], k_shape[0])
        cu_seqlens_q, cu_seqlens_k = (0, q_shape[0]), (0, k_shape[0])
    return prepare_metadata(
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_tokens_q=q_shape[0],
        num_tokens_k=k_shape[0],
        check=check,
    )


def dense_call(q: Any, k: Any, v: Any, lengths: tuple[Any, ...], run: Callable[..., Any]) -> Any:
    """A dense ``[B, T, N, D]`` batch through the packed call ``run(q, k, v, metadata)``; arrays of any framework.

    Packing is a view wherever the strides allow one. LSE comes back as ``[B, N, T]``.

    Raises:
        MLAInputError: k or v does not match q, or lengths were given too.
    """
    refuse_lengths(lengths)
    if not (len(k.shape) == len(v.shape) == 4 and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]):
        got = f"shapes {tuple(k.shape)}, {tuple(v.shape)}"
        raise input_error("k, v", got, f"dense like q, {tuple(q.shape)}, with the same batch, and k as long as v")
    batch, tokens, heads, _ = q.shape
    packed = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, v))
    result = run(*packed, dense_metadata(batch, tokens, k.shape[1]))
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.reshape(batch, tokens, heads, v.shape[3])
    return out if lse is None else (out, lse.reshape(heads, batch, tokens).swapaxes(0, 1))


def refuse_lengths(lengths: Iterable[Any]) -> None:
    """Of a dense batch, whose lengths are its shape.

    Raises:
        MLAInputError: Some were given: cumulative lengths, a maximum, or metadata.
    """
    if any(given is not None for given in lengths):
        raise MLAInputError("cu_seqlens, max_seqlen, metadata: given with a dense [B, T, N, D] batch; allowed: packed [T, N, D] input, or no lengths.")


def check_tensors(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> None:
    """Check that packed q, k and v belong together: heads, dtypes, devices, rows and last dimensions.

    Raises:
        MLAInputError: They do not, or are not packed.
    """
    for name, spec in zip("qkv", (q, k, v), strict=True):
        if len(spec.shape) != 3:
            raise input_error(name, f"shape {spec.shape}", FORMS)
    for name, spec in (("k", k), ("v", v)):
        if spec.dtype != q.dtype:
            raise input_error(name, f"dtype {spec.dtype}", f"q's dtype, {q.dtype}")
        if (spec.device_type, spec.device_index) != (q.device_type, q.device_index):
            raise input_error(name, f"device {spec.device}", f"q's device, {q.device}")
        if spec.shape[1] != q.shape[1]:
            raise input_error(name, f"{spec.shape[1]} heads", f"q's number of heads, {q.shape[1]}", "K and V must be expanded to all heads.")
    if k.shape[2] != q.shape[2]:
        raise input_error("k", f"last dim {k.shape[2]}", f"q's last dim, {q.shape[2]}")
    if k.shape[0] != v.shape[0]:
        raise input_error("v", f"{v.shape[0]} rows", f"k's number of rows, {k.shape[0]}")
    if q.shape[2] == 0 or v.shape[2] == 0:
        raise input_error("q" if q.shape[2] == 0 else "v", "last dim 0", "a positive head dimension")
