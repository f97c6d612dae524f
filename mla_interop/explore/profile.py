"""``lse_profile``: what LSE values look like beside the number of keys that each query sees, which shows their base."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_interop.errors import input_error
from mla_interop.explore.batch import check_array, keys_seen, known_lengths, values
from mla_interop.explore.table import Explored, Row, needed


def lse_profile(lse: Any, *, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, is_causal: bool = True) -> "LSEProfile":
    """Profile one LSE, or several by label.

    Args:
        lse: ``[N, T]`` of any framework, or a mapping of labels to such arrays.
        cu_seqlens_q, cu_seqlens_k: As in ``mla_interop.mla_prefill``; None: one sequence of T queries and keys.
        is_causal: The mask it was computed under.

    Raises:
        MLAInputError: Wrong arguments.
    """
    arrays = dict(lse) if isinstance(lse, Mapping) else {"lse": lse}
    if not arrays:
        raise input_error("lse", "an empty mapping", "an array [N, T], or a mapping of labels to such arrays")
    for label, array in arrays.items():
        check_array(f"lse ({label})", array)
        if len(array.shape) != 2:
            raise input_error(f"lse ({label})", f"shape {tuple(array.shape)}", "[N, T]")
    tokens = next(iter(arrays.values())).shape[1]
    for label, array in arrays.items():
        if array.shape[1] != tokens:
            raise input_error(f"lse ({label})", f"shape {tuple(array.shape)}", f"[N, {tokens}]", "mla_interop.lse.normalize(lse, layout='TN') transposes.")
    last = tokens if cu_seqlens_k is None else max(tokens, int(values(cu_seqlens_k)[-1]))
    lengths = known_lengths(cu_seqlens_q, cu_seqlens_k, tokens, last)
    seen = np.zeros(tokens, np.int64)
    seen[: lengths.total_q] = keys_seen(lengths, is_causal)
    numbers = {label: values(array) for label, array in arrays.items()}
    title = f"LSE of {tokens} queries that see {seen.min(initial=tokens)} to {seen.max(initial=0)} keys"
    return LSEProfile(title, [_row(label, array, seen) for label, array in numbers.items()], numbers, seen)


@dataclass(eq=False)
class LSEProfile(Explored):
    """LSE by the number of keys.

    Attributes:
        title: How many queries and keys.
        rows: One for each label. ``per e-fold`` is the slope of the median lse over the natural log of the number of keys: scores that are distributed
            alike for all keys give 1 in natural log and 1.44 in base 2. ``without a key`` and ``expected``: rows that are -inf, and rows that see no
            key. ``not finite``: NaN, +inf, or -inf where keys are seen.
        lse: By label, float64 ``[N, T]``.
        keys: Keys that each query sees, ``[T]``; 0 in padding.
    """

    title: str
    rows: list[Row]
    lse: dict[str, np.ndarray]
    keys: np.ndarray

    def plot(self) -> Any:
        """LSE over the number of keys, with the middle 80 % of the rows; and a histogram."""
        return needed("mla_interop.explore.pictures").profile(self)

    def bands(self, label: str, bins: int = 40) -> tuple[np.ndarray, np.ndarray]:
        """For numbers of keys in ``bins`` steps of equal ratio: their mean ``[bins]``, and the 10, 50 and 90 % quantiles of lse ``[3, bins]``.

        Steps without a finite row are left out.
        """
        return _bands(self.lse[label], self.keys, bins)


def _bands(lse: np.ndarray, keys: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    step = (np.log2(np.maximum(keys, 1)) / np.log2(max(2, keys.max(initial=1) + 1)) * bins).astype(int)
    centres, quantiles = [], []
    for i in range(bins):
        columns = np.flatnonzero((step == i) & (keys > 0))
        part = lse[:, columns]
        if np.isfinite(part).any():
            centres.append(keys[columns].mean())
            quantiles.append(np.quantile(part[np.isfinite(part)], (0.1, 0.5, 0.9)))
    return np.array(centres), np.array(quantiles).reshape(-1, 3).T


def _row(label: str, lse: np.ndarray, keys: np.ndarray) -> Row:
    finite, empty = np.isfinite(lse), np.broadcast_to(keys == 0, lse.shape)
    numbers = lse[finite]
    low, middle, high = (float(f(numbers)) if numbers.size else None for f in (np.min, np.median, np.max))
    centres, quantiles = _bands(lse, keys, 40)
    slope = float(np.polyfit(np.log(centres), quantiles[1], 1)[0]) if len(centres) > 2 else None
    counts = {"without a key": int(np.isneginf(lse).sum()), "expected": int(empty.sum()), "not finite": int((~finite & ~(np.isneginf(lse) & empty)).sum())}
    return {"lse": label, "min": low, "median": middle, "max": high, "per e-fold": slope, **counts}
