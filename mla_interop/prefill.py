"""From a call's arguments to a launch: the checks, the selection and the arithmetic that every frontend shares.

``resolve`` depends on shapes, dtypes and options only, and is cached; ``bind`` adds what the lengths say.  A frontend describes
its arrays as :class:`TensorSpec`, calls both, allocates, and launches.
"""

import functools
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mla_interop.backends.base import CallShape, Kernel, MLAPrefillBackend
from mla_interop.backends.registry import parse_names
from mla_interop.call_forms import check_tensors
from mla_interop.capability import device_capability, device_properties
from mla_interop.config import environment_key
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import input_error
from mla_interop.exchange import TensorSpec
from mla_interop.selector import select
from mla_interop.selector_config import MLAPrefillSelectorConfig
from mla_interop.sequences import PrefillMetadata
from mla_interop.strides import needs_copy, outer_strides

FINISH_TAIL, FINISH_EMPTY_ROWS = 1, 2
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Options(NamedTuple):
    """The options of a call that decide what runs; hashable."""

    scale: float | None = None
    is_causal: bool = True
    return_lse: bool = False
    backend: Any = None
    fallback: bool = False
    padding: str = "finite"


def make_options(scale: Any, is_causal: Any, return_lse: Any, backend: Any, fallback: Any, padding: Any) -> Options:
    """The options of a call, in types that can be looked up: a cache takes 1 for True, and cannot take a tracer or a set.

    Raises:
        MLAInputError: A flag is not a bool, the scale is not a number, or the backend is not a name.
    """
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse), ("fallback", fallback)):
        if value is not True and value is not False:
            raise input_error(name, repr(value), "True or False")
    if scale is not None and type(scale) is not float:
        scale = number_of_scale(scale)
    if not isinstance(padding, str):
        raise input_error("padding", repr(padding), "'finite' or 'any'")
    if backend is not None and not isinstance(backend, str):
        backend = parse_names("backend", backend)
    return Options(scale, is_causal, return_lse, backend, fallback, padding)


def number_of_scale(scale: Any) -> float:
    """A scale of any type of number as a float, as a program that is compiled needs it: there a NumPy scalar is an array.

    Raises:
        MLAInputError: It is not a number.
    """
    allowed = "a finite number, or None for D ** -0.5"
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        if hasattr(scale, "shape"):  # the text of an array that is traced cannot be had
            raise input_error("scale", f"a {type(scale).__name__}", allowed, "float() makes one of an array of one element.")
        raise input_error("scale", repr(scale), allowed)
    try:
        return float(scale)
    except OverflowError:
        raise input_error("scale", f"a {type(scale).__name__} beyond float64", allowed) from None


@dataclass(frozen=True)
class Resolved:
    """A checked call: which kernel, and the shapes of what it writes.

    Attributes:
        backend: The ready backend.
        out_shape, lse_shape: ``(T, N, V)`` and ``(N, T)``.
        scale: The softmax scale.
        copies: Which of q, k, v the frontend has to make contiguous for this kernel.
        strides: Row and head strides with which q, k and v reach the kernel, in elements.
        device_index: Index of their device.
        empty: Whether there is nothing to launch: no query row, no key, no head or no sequence. Then out is 0 and lse -inf.
    """

    backend: MLAPrefillBackend
    out_shape: tuple[int, int, int]
    lse_shape: tuple[int, int]
    scale: float
    copies: tuple[bool, bool, bool]
    strides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    device_index: int
    empty: bool
    options: Options

    @property
    def kernel(self) -> Kernel:
        """The backend's kernel for this call."""
        return self.backend.kernel

    @property
    def out_dtype(self) -> str:
        """NumPy-style name of out's dtype."""
        return self.kernel.out_dtype or self.backend.config.dtype


class Bound(NamedTuple):
    """What the lengths add to a resolved call: the scalar arguments of a launch, the rows of k and v that it may read, and whether
    there is nothing to launch."""

    metadata: PrefillMetadata
    max_seqlen_q: int
    max_seqlen_k: int
    finish: int
    num_tokens_k: int
    scratch_floats: int
    empty: bool


def resolve(q: TensorSpec, k: TensorSpec, v: TensorSpec, options: Options, num_seqs: int, has_lengths: bool) -> Resolved:
    """Check a packed call and select its kernel.

    Args:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]``.
        options: The call's options.
        num_seqs: B.
        has_lengths: Whether the host knows the lengths, or a work list came with them.

    Raises:
        MLAInputError: An argument is wrong.
        MLAUnsupportedError: No backend, or not the one asked for, can serve it.
    """
    return _resolve(q, k, v, options, num_seqs, has_lengths, environment_key())


@functools.lru_cache(maxsize=8192)
def _resolve(q: TensorSpec, k: TensorSpec, v: TensorSpec, options: Options, num_seqs: int, has_lengths: bool, environment: tuple[str | None, ...]) -> Resolved:
    del environment  # only a part of the key
    check_tensors(q, k, v)
    scale = _check_options(options, q)
    tokens, heads, qk_head_dim = q.shape
    on_gpu = q.device_type == "cuda"
    config = MLAPrefillSelectorConfig(
        dtype=q.dtype,
        dimensions=MLADimensions.from_head_dims(qk_head_dim, v.shape[2]),
        num_heads=heads,
        device_type=q.device_type,
        capability=device_capability("cuda", q.device_index) if on_gpu else None,
        is_causal=options.is_causal,
        needs_lse=options.return_lse,
        traced=not has_lengths,
        scale=scale,
        num_sms=device_properties(q.device_index).num_sms if on_gpu and device_capability("cuda", q.device_index) else None,
        num_tokens=tokens,
        num_seqs=num_seqs,
    )
    backend = select(config, options.backend, options.fallback)
    copies = tuple(needs_copy(name, spec, backend.kernel) for name, spec in zip("qkv", (q, k, v), strict=True))
    empty = not (tokens and k.shape[0] and heads and num_seqs)
    strides = tuple(outer_strides(spec, copy) for spec, copy in zip((q, k, v), copies, strict=True))
    shapes = (tokens, heads, v.shape[2]), (heads, tokens)
    return Resolved(backend, *shapes, scale, copies, strides, q.device_index, empty, options)  # pyright: ignore[reportArgumentType]


def bind(call: Resolved, metadata: PrefillMetadata, num_tokens_k: int, exact: bool) -> Bound:
    """Add what the lengths say: bounds, which rows may be read, what has to be filled, and the work list.

    Args:
        call: The resolved call.
        metadata: Its lengths.
        num_tokens_k: Rows of k and v.
        exact: Whether the true maxima may be used where the host knows them; a compiled program would depend on them.

    Raises:
        MLAInputError: The lengths do not fit the tensors.
    """
    bounds, host = metadata.bounds, metadata.host
    tokens = call.out_shape[0]
    _check_tokens("q", "cu_seqlens_q", tokens, bounds.num_tokens_q, bounds.padded_q, host and host.total_q)
    _check_tokens("k", "cu_seqlens_k", num_tokens_k, bounds.num_tokens_k, bounds.padded_k, host and host.total_k)
    if host is not None:
        tail, empties = host.total_q < tokens, host.has_empty_rows(call.options.is_causal)
        readable = host.total_k
    else:
        tail, empties, readable = bounds.padded_q, not bounds.same_lengths, num_tokens_k
    if host is not None and exact:
        max_q, max_k = host.max_seqlen_q, host.max_seqlen_k
    else:
        max_q = tokens if bounds.max_seqlen_q is None else bounds.max_seqlen_q
        max_k = num_tokens_k if bounds.max_seqlen_k is None else bounds.max_seqlen_k
    finish = FINISH_TAIL * tail + FINISH_EMPTY_ROWS * (empties and not call.kernel.native_empty_rows)
    if call.kernel.plan is not None and not call.empty and readable:
        metadata = call.backend.with_plan(_with_rows(metadata, tokens))
    empty = call.empty or readable == 0
    scratch = 0 if empty else workspace(call, readable, bounds.num_seqs, max_q, max_k)
    return Bound(metadata, max_q, max_k, finish, readable, scratch, empty)


def workspace(call: Resolved, num_tokens_k: int, num_seqs: int, max_seqlen_q: int, max_seqlen_k: int) -> int:
    """float32 elements of scratch that a launch needs; a kernel that prepares for its calls does so here."""
    (tokens, heads, _), kernel, needs_lse = call.out_shape, call.kernel, call.options.return_lse
    if kernel.prepare is None:
        return kernel.scratch_floats(tokens, heads, needs_lse)
    return kernel.prepare(CallShape(tokens, num_tokens_k, num_seqs, max_seqlen_q, max_seqlen_k, needs_lse, call.device_index, call.strides))


def with_heads(call: Resolved, heads: int) -> Resolved:
    """A resolved call of compact arrays for another number of heads, by the same kernel: one device's part of a call split by heads."""
    config, (tokens, _, v_head_dim) = replace(call.backend.config, num_heads=heads), call.out_shape
    backend = select(config, f"{call.backend.get_name()}.{call.kernel.variant}")
    qk, v = (heads * config.dimensions.qk_head_dim, config.dimensions.qk_head_dim), (heads * v_head_dim, v_head_dim)
    return replace(call, backend=backend, out_shape=(tokens, heads, v_head_dim), lse_shape=(heads, tokens), strides=(qk, qk, v))


def _check_options(options: Options, q: TensorSpec) -> float:
    if options.padding not in ("finite", "any"):
        raise input_error("padding", repr(options.padding), "'finite' or 'any'")
    if options.scale is None:
        return q.shape[2] ** -0.5
    if not math.isfinite(options.scale):
        raise input_error("scale", repr(options.scale), "a finite number, or None for D ** -0.5")
    # Kernels multiply in float32, where a larger scale is infinite and every score NaN; float64 goes to array code, which does not.
    if abs(options.scale) > FLOAT32_MAX and q.dtype != "float64":
        raise input_error("scale", repr(options.scale), f"a number of float32, at most {FLOAT32_MAX:.4g}")
    return options.scale


def _check_tokens(tensor: str, lengths: str, rows: int, stated: int | None, padded: bool, total: int | None) -> None:
    if total is not None and total > rows:
        raise input_error(lengths, f"a last value of {total}", f"at most the {rows} rows of {tensor}")
    # Exact metadata promised that there is no row past the end; a compiled program relies on it.
    if stated is not None and stated != rows:
        kind = "a buffer of" if padded else "exactly"
        raise input_error(tensor, f"{rows} rows", f"{stated}, since the metadata was prepared for {kind} {stated}", "See num_tokens_q, num_tokens_k.")


def _with_rows(metadata: PrefillMetadata, rows: int) -> PrefillMetadata:
    """Metadata that states T, which work lists depend on."""
    if metadata.bounds.num_tokens_q is not None:
        return metadata
    return metadata.with_arrays(metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.plan, metadata.bounds._replace(num_tokens_q=rows))
