"""The one metadata path: cumulative lengths in, checked and immutable metadata out, for every frontend and every backend.

Lengths that are on the host are checked here, once.  Lengths that are only on a device, or traced, are never read back
in a call (``check=True`` does, for debugging); what is then known of them are bounds.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import array_api_compat
import numpy as np

from mla_interop.config import environment_key
from mla_interop.errors import input_error
from mla_interop.lengths import INT32_MAX, check_maximum, check_same_shape, checked_lengths, checked_tokens
from mla_interop.selector_config import MLAPrefillSelectorConfig

if TYPE_CHECKING:
    from mla_interop.backends.base import MLAPrefillBackend


class Bounds(NamedTuple):  # compared in every jitted call that is given metadata made anew, so by C and not by a dataclass
    """The static part of metadata: what a compiled program may depend on. It does not change with the lengths inside one bucket.

    Attributes:
        num_seqs: B.
        num_tokens_q, num_tokens_k: Rows of q (T) and of k, v (S), when stated or known; None leaves them to the call.
        padded_q, padded_k: Whether rows past the last sequence may exist.
        max_seqlen_q, max_seqlen_k: The caller's upper bounds of one sequence's length; None means T and S.
        same_lengths: Whether keys have the queries' lengths by construction: then every query row of a sequence sees a key.
        plan_for: Name of the kernel that the work list belongs to, if there is one.
    """

    num_seqs: int
    num_tokens_q: int | None
    num_tokens_k: int | None
    padded_q: bool
    padded_k: bool
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    same_lengths: bool = False
    plan_for: str | None = None

    @property
    def backend(self) -> str | None:
        """The backend that the work list was made for, which is then the backend of every call with this metadata."""
        return self.plan_for.partition(".")[0] if self.plan_for else None


@dataclass(frozen=True, eq=False)
class HostLengths:
    """Lengths known on the host, with what follows from them. Arrays are int32 and read-only."""

    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray

    @functools.cached_property
    def total_q(self) -> int:
        """Query tokens of all sequences."""
        return int(self.cu_seqlens_q[-1])

    @functools.cached_property
    def total_k(self) -> int:
        """Key tokens of all sequences."""
        return int(self.cu_seqlens_k[-1])

    @functools.cached_property
    def lengths_q(self) -> np.ndarray:
        """int32 ``[B]``, query tokens of each sequence."""
        return np.diff(self.cu_seqlens_q)

    @functools.cached_property
    def lengths_k(self) -> np.ndarray:
        """int32 ``[B]``, key tokens of each sequence."""
        return np.diff(self.cu_seqlens_k)

    @functools.cached_property
    def max_seqlen_q(self) -> int:
        """Query tokens of the longest sequence; 0 without sequences."""
        return int(self.lengths_q.max(initial=0))

    @functools.cached_property
    def max_seqlen_k(self) -> int:
        """Key tokens of the longest sequence; 0 without sequences."""
        return int(self.lengths_k.max(initial=0))

    def has_empty_rows(self, is_causal: bool) -> bool:
        """Whether some query row sees no key: under the causal mask those are the first len_q - len_k of a sequence."""
        missing = self.lengths_q > self.lengths_k if is_causal else (self.lengths_q > 0) & (self.lengths_k == 0)
        return bool(missing.any())


@dataclass(frozen=True, eq=False)
class PrefillMetadata:
    """Checked lengths of a ragged batch, for any number of layers and calls. Made by :func:`prepare_metadata`.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]``: NumPy, a device array, or a tracer.
        own_cu_seqlens_k: The same for keys; None where ``bounds.same_lengths``: an array less for a program to take.
        plan: The work list of ``bounds.plan_for`` (uint8), or None.
        bounds: The static part.
        host: The lengths, where the host knows them. They do not enter a compiled program.
    """

    cu_seqlens_q: Any
    own_cu_seqlens_k: Any
    plan: Any
    bounds: Bounds
    host: HostLengths | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.bounds.same_lengths:
            object.__setattr__(self, "own_cu_seqlens_k", None)

    @property
    def cu_seqlens_k(self) -> Any:
        """int32 ``[B + 1]`` of keys: ``cu_seqlens_q`` itself where the lengths are the same."""
        return self.cu_seqlens_q if self.bounds.same_lengths else self.own_cu_seqlens_k

    def remember(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gave for ``key`` the first time: device copies, work lists and checked calls are made once per metadata."""
        try:
            return self._memo[key]
        except KeyError:
            return self._memo.setdefault(key, make())

    @property
    def has_lengths(self) -> bool:
        """Whether a kernel with a work list can be served: the host knows the lengths, or the list is there."""
        return self.host is not None or self.plan is not None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the lengths; kernels and device copies are made anew where they arrive."""
        return PrefillMetadata, (self.cu_seqlens_q, self.cu_seqlens_k, self.plan, self.bounds, self.host)

    def with_arrays(self, cu_seqlens_q: Any, cu_seqlens_k: Any, plan: Any, bounds: Bounds | None = None) -> "PrefillMetadata":
        """The same lengths in other arrays (moved to a device, or with a work list)."""
        return PrefillMetadata(cu_seqlens_q, cu_seqlens_k, plan, bounds or self.bounds, self.host)


def prepare_metadata(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_tokens_q: int | None = None,
    num_tokens_k: int | None = None,
    is_causal: bool | None = None,
    config: MLAPrefillSelectorConfig | None = None,
    backend: Any = None,
    check: bool = False,
) -> PrefillMetadata:
    """Check the lengths of a ragged batch and derive what kernels need from them.

    Args:
        cu_seqlens_q: int32 ``[B + 1]`` cumulative query lengths, starting at 0, never decreasing. A list, a NumPy array, or any
            array in CPU memory is known to the host and checked; int64 is range-checked and converted. A device array or a
            tracer must be int32 and is not read.
        cu_seqlens_k: The same for keys; None means equal to ``cu_seqlens_q``.
        max_seqlen_q, max_seqlen_k: Upper bounds of one sequence's length, in tokens. An error if the host knows better.
        num_tokens_q, num_tokens_k: T and S of the (padded) buffers. None: exactly ``cu_seqlens[-1]`` where the host knows it.
            State a bucket's size here, and new lengths inside the bucket do not recompile a jitted program.
        is_causal: The mask of the calls, which some work lists are made for (FLASHINFER's on Hopper); None: the ``config``'s. Lengths serve
            both masks.
        config: Makes the work list, if the backend selected for this configuration needs one.
        backend: An explicit choice, as for ``select``; only with ``config``.
        check: Read device arrays back and check them too (a host sync, for debugging).

    Returns:
        Immutable metadata.

    Raises:
        MLAInputError: See above; also if lengths end past the stated tokens, or the two have unequal lengths.
        MLAUnsupportedError: With ``config``: no backend can serve it.
    """
    if check is not True and check is not False:
        raise input_error("check", repr(check), "True or False")
    if is_causal is not None and is_causal is not True and is_causal is not False:
        raise input_error("is_causal", repr(is_causal), "True, False or None")
    same = cu_seqlens_k is None
    array_q, host_q = checked_lengths("cu_seqlens_q", cu_seqlens_q, check)
    array_k, host_k = (array_q, host_q) if same else checked_lengths("cu_seqlens_k", cu_seqlens_k, check)
    check_same_shape(array_q, array_k)
    host = HostLengths(host_q, host_k) if host_q is not None and host_k is not None else None
    num_tokens_k = num_tokens_q if same and num_tokens_k is None else num_tokens_k
    # Each side by itself: what the host knows is checked, whether it knows the other side or not.
    tokens_q, padded_q = checked_tokens("num_tokens_q", num_tokens_q, host_q)
    tokens_k, padded_k = checked_tokens("num_tokens_k", num_tokens_k, host_k)
    check_maximum("max_seqlen_q", max_seqlen_q, host_q)
    check_maximum("max_seqlen_k", max_seqlen_k, host_k)
    bounds = Bounds(array_q.shape[0] - 1, tokens_q, tokens_k, padded_q, padded_k, max_seqlen_q, max_seqlen_k, same)
    metadata = PrefillMetadata(array_q, array_k, None, bounds, host)
    if config is None:
        return metadata
    return planner(config, backend, is_causal, bounds).prepare_metadata(metadata)


def planner(config: MLAPrefillSelectorConfig, backend: Any, is_causal: bool | None, bounds: Bounds) -> "MLAPrefillBackend":
    """The backend that makes the work list of metadata with these bounds; arguments as in :func:`prepare_metadata`.

    Raises:
        MLAInputError: ``config`` is none.
        MLAUnsupportedError: No backend can serve it.
    """
    from mla_interop.selector import select  # backends, which it chooses from, are themselves made of this module's metadata

    if not isinstance(config, MLAPrefillSelectorConfig):
        raise input_error("config", repr(config), "an MLAPrefillSelectorConfig, or None")
    if config.num_tokens is None and config.num_seqs is None:
        config = replace(config, num_tokens=bounds.num_tokens_q, num_seqs=bounds.num_seqs)
    if is_causal is not None and is_causal != config.is_causal:
        config = replace(config, is_causal=is_causal)
    return select(config, backend)


def dense_metadata(batch: int, tokens_q: int, tokens_k: int) -> PrefillMetadata:
    """Metadata of ``batch`` sequences of equal length, as a dense ``[B, T, N, D]`` input has them; kept, with all that calls make of it."""
    return _dense_metadata(batch, tokens_q, tokens_k, environment_key())


@functools.lru_cache(maxsize=256)
def _dense_metadata(batch: int, tokens_q: int, tokens_k: int, environment: tuple[str | None, ...]) -> PrefillMetadata:
    del environment  # only a part of the key: the caller never sees this metadata, and could not prepare it anew (flash-linear-attention#881)
    if batch * max(tokens_q, tokens_k) > INT32_MAX:
        raise input_error("q, k", f"{batch} x {max(tokens_q, tokens_k)} tokens", f"at most {INT32_MAX} tokens in all (int32 offsets)")
    steps = np.arange(batch + 1, dtype=np.int32)
    return prepare_metadata(steps * np.int32(tokens_q), None if tokens_q == tokens_k else steps * np.int32(tokens_k))


def clear_tail(values: Any, cu_seqlens: Any) -> Any:
    """``values`` with 0 in its rows at or past ``cu_seqlens[-1]``, by selection: a new array, which XLA fuses into the producer."""
    xp = array_api_compat.array_namespace(values)
    inside = xp.arange(values.shape[0], dtype=xp.int32, device=array_api_compat.device(cu_seqlens)) < cu_seqlens[-1]
    return xp.where(xp.reshape(inside, (-1,) + (1,) * (values.ndim - 1)), values, xp.zeros_like(values))
