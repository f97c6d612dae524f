"""The demo from its arguments to its report."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mla_interop.demo.layer import default_files, read_model, read_texts, take_layer_inputs
from mla_interop.demo.paths import run_paths
from mla_interop.demo.report import Report, draw
from mla_interop.errors import input_error
from mla_interop.progress import Progress, silent, within

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run_demo(
    files: Sequence[Path] = (),
    *,
    model: str = "deepseek-v2-lite",
    config: Path | None = None,
    output: Path = Path("demo-output"),
    max_tokens: int = 1024,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Report:
    """Run texts through one attention layer of a model, compute its attention by every path, and draw where they differ.

    Args:
        files: Text files, one sequence each; none: the project's README and docs.
        model: A name in ``mla_interop/data/models.json``.
        config: Path of any MLA model's ``config.json``, instead of ``model``.
        output: Folder for the picture.
        max_tokens: Where each text is cut.
        dtype: Of the layer, q, k and v. None: float32 on a CPU, bfloat16 on a GPU.
        device: ``"cpu"`` or ``"cuda"``. None: the GPU where there is one.
        seed: Of the weights and the embedding.
        progress: Told how far it is.

    Raises:
        MLAInputError: An argument is wrong.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise input_error("--dtype", repr(dtype), ", ".join(DTYPES))
    if device == "cuda" and not torch.cuda.is_available():
        raise input_error("--device", repr(device), "cpu on this machine", "PyTorch finds no CUDA device.")
    name, fields = read_model(model, config)
    texts = read_texts(files or default_files(), max_tokens)
    progress(0.0, f"one layer of {name}")
    inputs = take_layer_inputs(fields, texts, DTYPES[dtype], device, seed)
    paths, out64 = run_paths(inputs, within(progress, 0.3, 0.9))
    progress(0.9, "drawing where they differ")
    picture = output / f"{Path(name).name}-{dtype}-{device}.png"
    draw(paths, out64, texts, f"One attention layer of {name}, {dtype} on {device}: where the outputs differ", picture)
    return Report(name, texts, inputs, paths, picture)
