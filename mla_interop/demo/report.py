"""What a person sees of the demo: one sentence, one table, one picture; or the same as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from mla_interop.demo.layer import LayerInputs, Text
from mla_interop.demo.paths import PathResult

PACKAGES = ("mla-interop", "torch", "jax", "transformers", "numpy", "apache-tvm-ffi")


@dataclass(frozen=True)
class Report:
    """The demo's result.

    Attributes:
        model: The model's name.
        texts: The sequences.
        inputs: q, k and v of the layer.
        paths: What each path gave.
        picture: Where the picture was written.
    """

    model: str
    texts: Sequence[Text]
    inputs: LayerInputs
    paths: Sequence[PathResult]
    picture: Path

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(text.ids) for text in self.texts]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        q, v = self.inputs.q, self.inputs.v
        measured = ("name", "backend", "kernel", "copies", "milliseconds", "out_error", "lse_error")
        return {
            "model": self.model,
            "num_heads": q.shape[1],
            "qk_head_dim": q.shape[2],
            "v_head_dim": v.shape[2],
            "scale": self.inputs.scale,
            "dtype": str(q.dtype).removeprefix("torch."),
            "device": q.device.type,
            "sequences": [{"name": text.name, "tokens": len(text.ids)} for text in self.texts],
            "paths": [{name: getattr(path, name) for name in measured} for path in self.paths],
            "picture": str(self.picture),
            "versions": {name: _version(name) for name in PACKAGES},
        }

    def print(self, console: Console) -> None:
        """The sentence, the table and the picture's path, within 80 columns but for paths."""
        q, v = self.inputs.q, self.inputs.v
        console.print(
            f"{len(self.lengths)} texts (of {self._tokens()} bytes, each a token) went, packed end to end, through one attention layer of {self.model} as "
            f"transformers builds it ({q.shape[1]} heads of {q.shape[2]}/{v.shape[2]}, {_dtype(self)}, {q.device.type}, random weights); "
            "every path computed the attention of the q, k and v that the layer gave:"
        )
        console.print(self._table())
        copies = {path.name: ", ".join(path.copies) or "none" for path in self.paths if path.backend}
        for what in dict.fromkeys(copies.values()):
            console.print(f"Copies: {what} ({', '.join(name for name, each in copies.items() if each == what)}).")
        left_out = "" if any(path.name.startswith("jax") for path in self.paths) else " JAX is not installed, so its path was left out."
        console.print(f"Errors are against float64: relative (Frobenius norm) for out, the largest absolute one for lse.{left_out}")
        console.print(f"\nPicture of where the outputs differ, per head and token:\n  {self.picture.resolve()}", soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1), collapse_padding=True)
        for title in ("path", "backend", "kernel"):
            table.add_column(title, no_wrap=True)
        for title in ("time", "out error", "lse error"):
            table.add_column(title, justify="right", no_wrap=True)
        for path in self.paths:
            lse_error = "none given" if path.lse_error is None else f"{path.lse_error:.1e}"
            ours = (path.backend, path.kernel) if path.backend else ("its own", "")
            table.add_row(path.name, *ours, f"{path.milliseconds:.2f} ms", f"{path.out_error:.1e}", lse_error)
        return table

    def _tokens(self) -> str:
        """The length of all, where it is one; else each, or of many the ends."""
        if len(set(self.lengths)) == 1:
            return f"{self.lengths[0]:,}"
        return ", ".join(f"{length:,}" for length in self.lengths) if len(self.lengths) <= 6 else f"{min(self.lengths):,} to {max(self.lengths):,}"


def draw(paths: Sequence[PathResult], out64: np.ndarray, texts: Sequence[Text], title: str, file: Path) -> None:
    """Write the picture: the outputs' differences per head (rows) and position (columns), relative to an output's usual size.

    One panel for each path against float64, and one for PyTorch against JAX.
    """
    panels = [(f"{_label(path)} minus float64", path.out - out64) for path in paths]
    if len(paths) > 2:
        panels.append((f"{_label(paths[1])} minus {_label(paths[2])}", paths[1].out - paths[2].out))
    size = np.sqrt((out64**2).sum(-1).mean())
    images = [(label, np.sqrt((difference**2).sum(-1)).T / size) for label, difference in panels]
    seen = np.concatenate([image[image > 0] for _, image in images])
    low, high = np.quantile(seen, [0.01, 0.999]) if seen.size else (1e-9, 1e-8)
    norm = LogNorm(low, max(high, 2 * low), clip=True)
    # Without pyplot there is no global state, and no screen is looked for.
    figure = Figure(figsize=(11, 1.2 + 2.0 * len(images)), layout="constrained")
    axes = figure.subplots(len(images), 1, sharex=True, squeeze=False)
    for axis, (label, image) in zip(axes[:, 0], images):
        axis.imshow(np.maximum(image, low), aspect="auto", norm=norm, cmap="magma", interpolation="nearest")
        note = f"at most {image.max():.1e}" if image.any() else "the same, bit for bit"
        axis.set_title(f"{label}: {note}", fontsize=10, loc="left")
        axis.set_ylabel("head")
        for edge in np.cumsum([len(text.ids) for text in texts])[:-1]:
            axis.axvline(edge - 0.5, color="white", linewidth=1)
    axes[-1, 0].set_xlabel(f"token, packed end to end: {', '.join(text.name for text in texts)}")
    figure.suptitle(title, fontsize=11)
    figure.colorbar(ScalarMappable(norm, "magma"), ax=axes[:, 0].tolist(), label="difference / usual size of an output", pad=0.01)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def _label(path: PathResult) -> str:
    return f"{path.name} ({path.backend})" if path.backend else path.name


def _dtype(report: Report) -> str:
    return str(report.inputs.q.dtype).removeprefix("torch.")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
