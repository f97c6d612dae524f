"""The pictures of the exploration API. The only module of it that imports matplotlib; pyplot and its global state are not touched."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from mla_interop.explore.attention import AttentionMap
from mla_interop.explore.choice import Choices
from mla_interop.explore.comparison import Comparison
from mla_interop.explore.profile import LSEProfile
from mla_interop.explore.speed import Timing
from mla_interop.explore.table import cell

_BAD = "#00c8d7"  # what is not finite: a colour that no colour map here has
_COLOURS = {"torch": "#d9622b", "jax": "#3b6fb6", "numpy": "#6b7280"}
_PIXELS = 1200  # columns of a heat map beyond which neighbours are pooled by their maximum
_BARS = 12


class Picture(Figure):
    """A Figure that shows itself in a notebook, though pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def comparison(found: Comparison) -> Picture:
    """For each result a heat map of the error by head and position, and a histogram of the LSE differences."""
    labels = list(found.errors)
    figure = Picture(figsize=(11, 0.9 + 2.1 * len(labels)), layout="constrained")
    axes = figure.subplots(len(labels), 2, squeeze=False, width_ratios=[2.4, 1])
    seen = np.concatenate([x[(x > 0) & np.isfinite(x)] for x in found.errors.values()])
    low, high = np.quantile(seen, [0.01, 0.999]) if seen.size else (1e-9, 1e-8)
    norm = LogNorm(low, max(high, 2 * low))
    for label, (left, right), row in zip(labels, axes, found.rows):
        left.tick_params(labelbottom=label == labels[-1])
        _heat(left, found.errors[label], norm, found.edges)
        left.set_title(f"{label} against {found.baseline}: {_largest(found.errors[label])}", fontsize=10, loc="left")
        _lse_histogram(right, found.lse_errors.get(label), row)
        for axis in (left, right) if label == labels[-1] else ():
            axis.set_xlabel("token, packed end to end (lines: where a sequence starts)" if axis is left else "lse minus the baseline's")
    _bar(figure, norm, axes[:, 0].tolist(), "error / usual size of a row", aspect=12 * len(labels))
    return figure


def _largest(errors: np.ndarray) -> str:
    finite = np.isfinite(errors)
    wrong = f", and {errors.size - finite.sum()} rows not finite" if not finite.all() else ""
    return f"at most {cell(float(errors[finite].max(initial=0.0)))}{wrong}" if errors.any() else "the same, bit for bit"


def _bar(figure: Picture, norm: LogNorm, axes: list[Any], label: str, aspect: int) -> None:
    """A colour bar with five numbers on it, however many powers of ten it spans."""
    ticks = np.geomspace(norm.vmin or 1e-9, norm.vmax or 1.0, 5)
    bar = figure.colorbar(ScalarMappable(norm, "magma"), ax=axes, label=label, pad=0.01, aspect=aspect)
    bar.set_ticks(ticks.tolist(), labels=[cell(float(tick)) for tick in ticks])
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _heat(axis: Any, errors: np.ndarray, norm: LogNorm, edges: np.ndarray) -> None:
    """``errors [T, N]`` with heads down; infinite ones in a colour of their own, and those below the scale in its darkest."""
    image = np.maximum(_pooled(errors.T, _PIXELS), norm.vmin or 0.0)
    masked = np.ma.masked_where(~np.isfinite(image), image)
    axis.set_facecolor(_BAD)
    axis.imshow(masked, aspect="auto", norm=norm, cmap="magma", interpolation="nearest", extent=(-0.5, len(errors) - 0.5, errors.shape[1] - 0.5, -0.5))
    for edge in edges[1:-1]:
        axis.axvline(edge - 0.5, color="white", linewidth=0.8)
    axis.set_ylabel("head")
    axis.yaxis.get_major_locator().set_params(integer=True)


def _pooled(image: np.ndarray, columns: int) -> np.ndarray:
    if image.shape[1] <= columns:
        return image
    return np.maximum.reduceat(image, np.arange(columns) * image.shape[1] // columns, axis=1)


def _lse_histogram(axis: Any, difference: np.ndarray | None, row: dict[str, Any]) -> None:
    finite = np.empty(0) if difference is None else difference[np.isfinite(difference)]
    if difference is None or not finite.size:
        said = "no lse" if difference is None else "no lse is finite where the baseline's is"
        axis.text(0.5, 0.5, said, ha="center", va="center", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
        return
    axis.hist(finite, bins=60, color="#5b3a8e")
    axis.set_yscale("log")
    axis.set_ylabel("rows")
    axis.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    wrong = difference.size - finite.size
    said = [f"lse: off by at most {cell(row['lse error'])}", *([f"{wrong} not finite"] if wrong else [])]
    axis.set_title("; ".join(said), fontsize=10, loc="left", color="#b3261e" if row["note"] or wrong else "black")
    if row["note"]:
        axis.text(0.03, 0.95, row["note"].replace(": ", ":\n"), transform=axis.transAxes, va="top", fontsize=8, color="#b3261e", wrap=True)


def attention(found: AttentionMap) -> Picture:
    """A map for each head, on one logarithmic scale."""
    count = len(found.weights)
    across = min(4, count)
    down = -(-count // across)
    figure = Picture(figsize=(1.2 + 2.9 * across, 0.9 + 3.0 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    positive = found.weights[found.weights > 0]
    low, high = np.quantile(positive, [0.05, 0.9995]) if positive.size else (1e-9, 1.0)
    norm = LogNorm(low, max(high, 2 * low), clip=True)
    extent = (0, int(found.key_edges[-1]), int(found.query_edges[-1]), 0)
    for axis, weights, row in zip(axes.flat, found.weights, found.rows):
        axis.set_facecolor("#e8e8ee")
        shown = np.ma.masked_where(weights == 0, weights)
        axis.imshow(shown, norm=norm, cmap="magma", interpolation="nearest", aspect="auto", extent=extent)
        axis.set_title(f"head {row['head']}: {cell(row['keys in use'])} keys in use", fontsize=10, loc="left")
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("query")
    for axis in axes[-1]:
        axis.set_xlabel("key")
    figure.suptitle(found.title, fontsize=11)
    _bar(figure, norm, axes.ravel().tolist(), "weight (of a cell's keys together)", aspect=20 * down)
    return figure


def profile(found: LSEProfile) -> Picture:
    """LSE over the number of keys, and a histogram."""
    figure = Picture(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for i, (label, lse) in enumerate(found.lse.items()):
        keys, (low, middle, high) = found.bands(label)
        left.fill_between(keys, low, high, color=f"C{i}", alpha=0.25, linewidth=0)
        left.plot(keys, middle, color=f"C{i}", label=label)
        finite = lse[np.isfinite(lse)]
        right.hist(finite, bins=60, histtype="stepfilled", alpha=0.5, color=f"C{i}", label=label)
    most = max(2, int(found.keys.max(initial=1)))
    line = np.geomspace(1, most, 50)
    left.plot(line, np.log(line), color="black", linestyle="--", linewidth=1, label="ln(keys): all scores 0")
    left.set(xscale="log", xlabel="keys that the query sees", ylabel="lse")
    left.set_title("median and middle 80 % of the rows", fontsize=10, loc="left")
    left.legend(fontsize=9, frameon=False)
    right.set(xlabel="lse", ylabel="rows")
    empty = sum(row["without a key"] for row in found.rows)
    right.set_title(f"rows without a key, which are -inf, are left out ({empty})" if empty else "all rows", fontsize=10, loc="left")
    right.legend(fontsize=9, frameon=False)
    return figure


def times(found: Timing, what: str) -> Picture:
    """Lines over the tokens of one sequence where only those vary, else bars."""
    labelled = [(label, row) for label, row in found.labelled() if row.get(what) is not None]
    swept = {row.get("tokens") for _, row in labelled}
    return _lines(found, labelled, what) if len(swept) > 1 and None not in swept else _panels(found, labelled, what)


_UNITS = {"us": "microseconds a call", "tflops": "TFLOP/s", "overhead_us": "microseconds beyond the kernel alone"}


def _lines(found: Timing, labelled: Sequence[tuple[str, Any]], what: str) -> Picture:
    figure = Picture(figsize=(11, 4), layout="constrained")
    axis = figure.subplots()
    for i, label in enumerate(dict.fromkeys(label for label, _ in labelled)):
        rows = sorted((row for name, row in labelled if name == label), key=lambda row: row["tokens"])
        tokens = [row["tokens"] for row in rows]
        axis.plot(tokens, [row[what] for row in rows], marker="o", color=f"C{i}", label=label)
        if what == "us":
            axis.fill_between(tokens, [row["us_min"] for row in rows], [row["us"] for row in rows], color=f"C{i}", alpha=0.15, linewidth=0)
    axis.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel=_UNITS[what])
    ticks = sorted({row["tokens"] for _, row in labelled})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.grid(alpha=0.3)
    shade = "median; shade: down to the fastest loop" if what == "us" else None
    figure.legend(loc="outside right upper", fontsize=9, frameon=False, title=shade, title_fontsize=9, alignment="left")
    figure.suptitle(found.title, fontsize=10, x=0.01, ha="left")
    return figure


def _panels(found: Timing, labelled: Sequence[tuple[str, Any]], what: str) -> Picture:
    """A panel for each problem, a bar for each contender, the best over all problems on top; numbers stand beside the bars."""
    several = len({row.get("dtype") for _, row in labelled}) > 1
    panels = [f"{row['problem']}, {row['dtype']}" if several else row["problem"] for _, row in labelled]
    problems = list(dict.fromkeys(panels))
    dtypes = {panel: row.get("dtype") for panel, (_, row) in zip(panels, labelled)}
    value = {(label, panel): row[what] for panel, (label, row) in zip(panels, labelled)}
    framework = {label: row["framework"] for label, row in labelled}
    ranked = sorted(framework, key=lambda label: _slowness(label, problems, value, what))
    shown = ranked[:_BARS]
    across = min(3, len(problems))
    down = -(-len(problems) // across)
    figure = Picture(figsize=(4.2 + 2.6 * across, down * (0.9 + 0.27 * len(shown)) + 0.6), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    for axis, problem in zip(axes.flat, problems):
        _bars(axis, problem, shown, value, framework, what)
        if what == "tflops" and dtypes[problem] in found.ceilings:
            _ceiling(axis, found.ceilings[dtypes[problem]])
    axes[0, 0].invert_yaxis()
    for axis in axes.flat[len(problems) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(_UNITS[what], fontsize=9)
    left_out = f"the best {_BARS} of {len(ranked)}; " if len(ranked) > _BARS else ""
    named = "panels: heads x tokens x sequences; " if all(problem[0].isdigit() for problem in problems) else ""
    figure.suptitle(f"{found.title}\n{named}{left_out}bold: the best", fontsize=10)
    return figure


def _slowness(label: str, problems: Sequence[str], value: dict[tuple[str, str], float], what: str) -> float:
    """Mean over the problems of the logarithm of how much worse than the best it is, in those where it has a time; of overheads, the mean itself."""
    if what == "overhead_us":  # where it is lost in the noise of a long kernel, it is below 0
        return float(np.mean([value[label, problem] for problem in problems if (label, problem) in value]))
    sign, ratios = (1 if what == "us" else -1), []
    for problem in problems:
        if (label, problem) in value:
            logs = [sign * np.log(number) for (_, name), number in value.items() if name == problem]
            ratios.append(sign * np.log(value[label, problem]) - min(logs))
    return float(np.mean(ratios))


def _bars(axis: Any, problem: str, shown: Sequence[str], value: dict[tuple[str, str], float], framework: dict[str, str], what: str) -> None:
    numbers = [value.get((label, problem)) for label in shown]
    known = [number for number in numbers if number is not None]
    best = (max if what == "tflops" else min)(known, default=None)
    axis.barh(range(len(shown)), [number or 0.0 for number in numbers], color=[_COLOURS.get(framework[label], "#6b7280") for label in shown], height=0.7)
    longest = max([number for number in known if number > 0], default=1.0)
    for place, number in enumerate(numbers):
        text = "not measured" if number is None else f"{number:.1f}" if number < 100 else f"{number:,.0f}".replace(",", " ")
        axis.text(max(number or 0.0, 0.0) + 0.02 * longest, place, text, va="center", fontsize=8, fontweight="bold" if number == best else "normal")
    axis.set_xlim(1.1 * min([0.0, *known]), 1.3 * longest)
    axis.set_yticks(range(len(shown)), shown, fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(problem, fontsize=10, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _ceiling(axis: Any, tflops: float) -> None:
    """A line at what a matrix product did in the same run."""
    axis.axvline(tflops, color="black", linestyle="--", linewidth=1)
    axis.set_title(f"line: a matrix product, {tflops:.3g}", fontsize=8, loc="right")
    axis.set_xlim(right=max(axis.get_xlim()[1], 1.05 * tflops))


def choices(found: Choices) -> Picture:
    """A grid of the chosen kernels."""
    heads, tokens = (sorted({row[name] for row in found.rows}) for name in ("heads", "tokens"))
    backends = list(dict.fromkeys(row["backend"] for row in found.rows))
    figure = Picture(figsize=(2.0 + 1.35 * len(tokens), 1.3 + 0.55 * len(heads)), layout="constrained")
    axis = figure.subplots()
    image = np.zeros((len(heads), len(tokens)))
    for row in found.rows:
        down, right = heads.index(row["heads"]), tokens.index(row["tokens"])
        image[down, right] = backends.index(row["backend"])
        axis.text(right, down, f"{row['backend']}\n{row['kernel']}", ha="center", va="center", fontsize=8)
    axis.imshow(image, cmap="Pastel1", vmin=-0.5, vmax=8.5, aspect="auto")
    axis.set_xticks(range(len(tokens)), list(map(str, tokens)))
    axis.set_yticks(range(len(heads)), list(map(str, heads)))
    axis.set(xlabel="query tokens", ylabel="heads")
    axis.set_title(found.title, fontsize=10, loc="left")
    return figure
