"""``compare``: the same input through several backends, and where and how much their results differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mla_interop.backends.registry import parse_names
from mla_interop.errors import MLAError, MLAUnsupportedError, input_error
from mla_interop.explore import exact
from mla_interop.explore.batch import Batch, check_array, make_batch, values
from mla_interop.explore.table import Explored, Row, data_frame, html_failed, html_table, needed, plain, text_failed, text_table
from mla_interop.neutral import mla_prefill
from mla_interop.numeric_check import NAMED_FACTORS
from mla_interop.progress import Progress, silent, told, within

FLOAT64 = "float64"
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}  # of the significand
_LSE_FITS = 1e-2  # absolute: an LSE in another base is off by far more


def compare(
    q: Any,
    k: Any,
    v: Any,
    *,
    backends: Any = None,
    frameworks: Sequence[str] | None = None,
    results: Mapping[str, tuple[Any, Any]] | None = None,
    baseline: str = FLOAT64,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    scale: float | None = None,
    is_causal: bool = True,
    progress: Progress = silent,
) -> "Comparison":
    """Run several backends on one input, and compare them, and results that somebody else computed, with a baseline.

    Args:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]`` packed, or dense with a batch in front; of any framework.
        backends: A name or several (``"FLASH_ATTN.fa4"`` names a kernel); None: all that can serve this here; ``()``: none.
        frameworks: Through which each backend is called: ``"torch"``, ``"jax"``, ``"numpy"``. None: that of q.
        results: By a label of your own: ``(out, lse)`` of any framework, packed ``[T, N, V]`` and ``[N, T]``; lse may be None.
        baseline: ``"float64"`` (computed here, on the host), or the label of one of the results.
        cu_seqlens_q, cu_seqlens_k, scale, is_causal: As in ``mla_interop.mla_prefill``.
        progress: Told how far it is, as ``progress(share, what)``: the share that is done, from 0 to 1, and what comes next.

    Returns:
        The comparison. Backends that fail though nobody named them are in its ``failed``.

    Raises:
        MLAInputError: Wrong arguments; or the float64 baseline would take too long.
        MLAUnsupportedError: A backend that was named cannot serve this; or nothing is left to compare.
    """
    batch = make_batch(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, is_causal)
    named = () if backends is not None and not len(backends) else None if backends is None else parse_names("backends", backends)
    made, failed = _run(batch, named, tuple(frameworks or (batch.framework,)), within(progress, 0.0, 0.7))
    for label, result in (results or {}).items():
        if label in made or label == FLOAT64:
            raise input_error("results", f"the label {label!r}", f"one that is not in use ({', '.join([FLOAT64, *made])})")
        made[label] = _checked(label, result, batch)
    if baseline == FLOAT64:
        progress(0.7, "the answer in float64")
        made = {FLOAT64: exact.attention(batch), **made}
    if baseline not in made:
        raise input_error("baseline", repr(baseline), ", ".join(repr(name) for name in (FLOAT64, *made)))
    if len(made) < 2:
        reasons = "".join(f"\n  {label}: {why}" for label, why in failed.items())
        raise MLAUnsupportedError(f"nothing to compare with {baseline}: name backends, or give results.{reasons}")
    return _compared(batch, made, baseline, failed)


def _run(batch: Batch, named: Sequence[str] | None, frameworks: Sequence[str], progress: Progress) -> tuple[dict[str, tuple[Any, Any]], dict[str, str]]:
    made, failed = {}, {}
    names = batch.backends() if named is None else named
    for index, framework in enumerate(frameworks):
        local = batch.to(framework)
        part = within(progress, index / len(frameworks), (index + 1) / len(frameworks))
        for name in told(names, part, f"{{}} from {framework}".format):
            label = name if len(frameworks) == 1 else f"{name} ({framework})"
            try:
                out, lse = mla_prefill(local.q, local.k, local.v, backend=name, return_lse=True, **batch.options)
            except Exception as error:  # a package may raise anything; it must not hide what the others gave
                if named is not None:
                    raise
                failed[label] = str(error) if isinstance(error, MLAError) else f"{type(error).__name__}: {error}"
                continue
            made[label] = values(out), values(lse)
    return made, failed


def _checked(label: str, result: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray | None]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise input_error(f"results[{label!r}]", type(result).__name__, "(out, lse); lse may be None")
    tokens, heads, _ = batch.q.shape
    out, lse = result
    _check_shape(f"results[{label!r}], out", out, (tokens, heads, batch.v.shape[2]), "")
    if lse is None:
        return values(out), None
    _check_shape(f"results[{label!r}], lse", lse, (heads, tokens), "mla_interop.lse.normalize(lse, layout='TN') transposes.")
    return values(out), values(lse)


def _check_shape(name: str, array: Any, shape: tuple[int, ...], advice: str) -> None:
    check_array(name, array)
    if tuple(array.shape) != shape:
        raise input_error(name, f"shape {tuple(array.shape)}", str(shape), advice)


@dataclass(eq=False)
class Comparison(Explored):
    """Results of one input beside a baseline.

    Attributes:
        title: The problem in words.
        rows: One for each result. ``out error``: relative, Frobenius norm. ``x rounding``: that, in units of what rounding the float64 result to the
            input's dtype alone costs. ``worst row``: the largest error of one query and head, relative to the usual size of a row. ``lse error``: the
            largest, absolute. ``bad rows``: rows with NaN or infinity, or not 0 and -inf where no key is seen.
        baseline: Its label.
        errors: By label, ``[T, N]``: norm of the difference over the usual size of a row; infinite where it is not finite.
        lse_errors: By label, ``[N, T]``: lse minus the baseline's; 0 where both are -inf. Without results that have no lse.
        agreement: ``[M, M]`` of ``labels``: relative difference of each two outs (of the second, relative to the first).
        labels: The baseline's, then the others.
        edges: Cumulative query lengths, int32 ``[B + 1]``.
        failed: Backends that nobody named and that failed, with why.
    """

    title: str
    rows: list[Row]
    baseline: str
    errors: dict[str, np.ndarray]
    lse_errors: dict[str, np.ndarray]
    agreement: np.ndarray
    labels: list[str]
    edges: np.ndarray
    failed: dict[str, str] = field(default_factory=dict)

    def worst(self, count: int = 10) -> list[Row]:
        """The rows that differ most, of all results: sequence, position in it, head, and errors."""
        found = []
        for label, errors in self.errors.items():
            for place in np.argsort(-errors, axis=None, kind="stable")[:count]:
                token, head = np.unravel_index(place, errors.shape)
                lse = self.lse_errors.get(label)
                error = {"error": float(errors[token, head]), "lse error": None if lse is None else float(lse[head, token])}
                found.append({"result": label, **_place(self.edges, int(token)), "head": int(head), **error})
        return sorted(found, key=lambda row: -row["error"])[:count]

    def heads(self) -> list[Row]:
        """For each head: the root mean square over its rows of each result's error, relative to the usual size of a row."""
        count = next(iter(self.errors.values())).shape[1]
        return [{"head": head, **{label: float(np.sqrt((x[:, head] ** 2).mean())) for label, x in self.errors.items()}} for head in range(count)]

    def agreement_rows(self) -> list[Row]:
        """The agreement table: a row and a column for each result, the baseline first."""
        return [{"": label, **dict(zip(self.labels, map(float, line)))} for label, line in zip(self.labels, self.agreement)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; numbers that are not finite are words."""
        tables = {"worst": self.worst(), "heads": self.heads(), "agreement": self.agreement.tolist()}
        return {**super().to_dict(), "baseline": self.baseline, "labels": self.labels, **plain(tables), "failed": self.failed}

    def to_dataframe(self, what: str = "rows") -> Any:
        """A ``pandas.DataFrame`` of ``"rows"``, ``"worst"``, ``"heads"`` or ``"agreement"``.

        Raises:
            MLAInputError: Another name.
            MLAUnavailableError: pandas is not installed.
        """
        tables = {"rows": lambda: self.rows, "worst": self.worst, "heads": self.heads, "agreement": self.agreement_rows}
        if what not in tables:
            raise input_error("what", repr(what), ", ".join(tables))
        return data_frame(tables[what]())

    def plot(self) -> Any:
        """A heat map of the errors by head and position, and a histogram of the LSE differences, for each result."""
        return needed("mla_interop.explore.pictures").comparison(self)

    def __str__(self) -> str:
        parts = [
            super().__str__(),
            "",
            "agreement (relative difference of out):",
            *text_table(self.agreement_rows()),
            "",
            "worst rows:",
            *text_table(self.worst(5)),
        ]
        return "\n".join([*parts, *text_failed(self.failed)])

    def _repr_html_(self) -> str:
        shades = {(i, label): _shade(x) for i, line in enumerate(self.agreement) for label, x in zip(self.labels, line)}
        agreement = html_table(self.agreement_rows(), "agreement: relative difference of out", shades)
        return super()._repr_html_() + agreement + html_table(self.worst(5), "worst rows") + html_failed(self.failed)


def _compared(batch: Batch, made: dict[str, tuple[Any, Any]], baseline: str, failed: dict[str, str]) -> Comparison:
    base_out, base_lse = made.pop(baseline)
    rounding = _rounding(base_out, batch.dtype) if baseline == FLOAT64 else None
    usual = float(np.sqrt((base_out**2).sum(-1)[np.isfinite(base_out).all(-1)].mean())) or 1.0
    rows, errors, lse_errors = [], {}, {}
    for label, (out, lse) in made.items():
        with np.errstate(all="ignore"):
            error = np.sqrt(((out - base_out) ** 2).sum(-1)) / usual
        errors[label] = np.where(np.isfinite(error), error, np.inf)
        if lse is not None and base_lse is not None:
            lse_errors[label] = _lse_difference(lse, base_lse)
        rows.append(_row(batch, label, (out, lse), (base_out, base_lse), errors[label], lse_errors.get(label), rounding))
    outs = {baseline: base_out, **{label: out for label, (out, _) in made.items()}}
    agreement = np.array([[_relative(b, a) for b in outs.values()] for a in outs.values()])
    title = f"{batch.words}; against {baseline}"
    return Comparison(title, rows, baseline, errors, lse_errors, agreement, list(outs), batch.lengths.cu_seqlens_q, failed)


def _row(batch: Batch, label: str, made: Any, base: Any, error: np.ndarray, lse_error: np.ndarray | None, rounding: float | None) -> Row:
    (out, lse), (base_out, base_lse) = made, base
    relative = _relative(out, base_out)
    token, head = np.unravel_index(error.argmax(), error.shape) if error.size else (0, 0)
    at = _place(batch.lengths.cu_seqlens_q, int(token)) if error.size else {}
    bad = ~np.isfinite(out).all(-1)
    if lse is not None and base_lse is not None:
        empty = np.isneginf(base_lse).T
        bad |= np.where(empty, ~np.isneginf(lse).T | out.any(-1), ~np.isfinite(lse).T)
    return {
        "result": label,
        "out error": relative,
        "x rounding": relative / rounding if rounding else None,
        "worst row": float(error.max(initial=0.0)),
        "at": f"sequence {at['sequence']}, position {at['position']}, head {head}" if error.any() else "",
        "lse error": None if lse_error is None else float(np.abs(lse_error).max(initial=0.0)),
        "bad rows": int(bad.sum()),
        "note": _note(lse, base_lse, lse_error),
    }


def _note(lse: np.ndarray | None, base: np.ndarray | None, error: np.ndarray | None) -> str:
    """What is wrong with an LSE, if it is a fault that has a name."""
    if lse is None or base is None or error is None or np.abs(error).max(initial=0.0) <= _LSE_FITS:
        return ""
    finite = np.isfinite(base) & np.isfinite(lse)
    known = (text for factor, text in NAMED_FACTORS.items() if finite.any() and np.abs(lse[finite] / factor - base[finite]).max() <= _LSE_FITS)
    return next((f"LSE off by {text}" for text in known), "")


def _lse_difference(lse: np.ndarray, base: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isneginf(lse) & np.isneginf(base), 0.0, lse - base)
    return np.where(np.isnan(difference), np.inf, difference)


def _rounding(out: np.ndarray, dtype: str) -> float | None:
    """Relative error of rounding to a dtype (bfloat16 for 8-bit inputs), which no kernel that returns that dtype can be below."""
    bits = _BITS.get(dtype, _BITS["bfloat16"])
    mantissa, exponent = np.frexp(out)
    return _relative(np.ldexp(np.rint(mantissa * 2.0**bits) * 0.5**bits, exponent), out) or None


def _relative(out: np.ndarray, base: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        error = float(np.linalg.norm(out - base) / (np.linalg.norm(base) or 1.0))
    return error if np.isfinite(error) else float("inf")


def _place(edges: np.ndarray, token: int) -> Row:
    sequence = int(np.searchsorted(edges, token, side="right")) - 1
    inside = token < edges[-1]
    return {"sequence": sequence if inside else "padding", "position": token - int(edges[sequence])}


def _shade(error: float) -> str:
    """From green (the same) to red (nothing in common), on a logarithmic scale."""
    share = 0.0 if error <= 1e-6 else min(1.0, (np.log10(error) + 6) / 6) if np.isfinite(error) else 1.0
    return f"hsl({120 * (1 - share):.0f}, 60%, 80%)"
