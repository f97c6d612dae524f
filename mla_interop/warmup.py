"""Builds what a deployment will need before its first request: on its machine, or on one without its GPU whose cache is copied.

For both masks, with and without LSE: the libraries of every kernel that may be chosen, XLA's handler, and torch's operators. Nothing is loaded or launched.
"""

import dataclasses
import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mla_interop import installed, measured
from mla_interop.backends.base import Kernel
from mla_interop.backends.registry import backend_class
from mla_interop.errors import MLAError
from mla_interop.kernels.build import cache_dir
from mla_interop.progress import Progress, silent
from mla_interop.selector import explain, kernels_of
from mla_interop.selector_config import MLAPrefillSelectorConfig

State = Literal["built", "was there", "nothing to build", "left out", "failed"]
# What a library is called here, the framework that it is for, and the module of mla_interop.kernels that builds it.
_XLA_HANDLER = ("XLA handler", "JAX", "xla")
_TORCH_OPERATORS = ("torch operators", "torch", "torch_op")
_NO_KERNEL = "no kernel for this GPU can be had here: plain array code, which is slow, would run"


@dataclass(frozen=True)
class Step:
    """One library, or one thing that could not be had.

    Attributes:
        what: The kernel it is for, in the form ``BACKEND.variant``, or ``XLA handler``, or ``torch operators``.
        state: ``left out`` is no failure: it is not installed here, or nobody named it.
        file: Path of the library; "" where there is none.
        bytes: Its size.
        seconds: How long it took.
        why: The reason, where nothing was built.
    """

    what: str
    state: State
    file: str = ""
    bytes: int = 0
    seconds: float = 0.0
    why: str = ""

    @property
    def name(self) -> str:
        """Name of the library without its digest."""
        return Path(self.file).stem.rpartition("-")[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


def warm_up(
    config: MLAPrefillSelectorConfig, backends: Sequence[str] = (), *, jax: bool = True, torch: bool = True, progress: Progress = silent
) -> Iterator[Step]:
    """Build, and say what was done, step by step. What fails is a step too, and stops no other.

    Args:
        config: The problem; its mask and ``needs_lse`` do not matter: all four combinations are built.
        backends: Names as in ``select``, all of which are built. None named: the one that is chosen, and those that are the fastest at any shape for
            which times were measured on such a device.
        jax: Whether to build XLA's handler too.
        torch: Whether to build the operators that compiled programs of torch call.
        progress: Told how far it is, and what is about to be built.
    """
    combinations = [dataclasses.replace(config, is_causal=causal, needs_lse=lse) for causal in (True, False) for lse in (True, False)]
    wanted = list(backends) or _choices(config)
    seen: set[Path] = set()
    jobs = [(name, each) for name in wanted for each in combinations]
    total = len(jobs) + jax + torch
    for index, (name, each) in enumerate(jobs):
        yield from _kernel(name, each, bool(backends), seen, functools.partial(progress, index / total))
    for index, glue in enumerate([_XLA_HANDLER] * jax + [_TORCH_OPERATORS] * torch):
        yield _glue(*glue, functools.partial(progress, (len(jobs) + index) / total))
    if not backends:
        yield from _left_out(config, set(wanted))


def _choices(config: MLAPrefillSelectorConfig) -> list[str]:
    """What may be chosen, as ``BACKEND.variant``: without knowing the batch, and at every shape that was measured; with LSE and without."""
    found: dict[str, None] = {}
    for each in (dataclasses.replace(config, needs_lse=needs_lse) for needs_lse in (True, False)):
        sizes = [(each.num_tokens, each.num_seqs)]
        if each.num_tokens is None:
            sizes += sorted({(shape.tokens, shape.seqs) for shape in measured.shapes_for(each)})
        for tokens, seqs in sizes:
            table = explain(dataclasses.replace(each, num_tokens=tokens, num_seqs=seqs))
            row = next((row for row in table.rows if row.backend == table.chosen), None)
            if row is not None:
                found[f"{row.backend}.{row.variant}"] = None
    return list(found)


def _kernel(name: str, config: MLAPrefillSelectorConfig, asked: bool, seen: set[Path], starting: Callable[[str], None]) -> Iterator[Step]:
    try:
        table = explain(config, name)
        row = next(row for row in table.rows if row.backend.partition(".")[0] == table.explicit[0].partition(".")[0])
        kernel = kernels_of(table.explicit[0], table.config)[0] if row.valid else None
    except Exception as error:  # a probe may raise anything; here it is an answer
        yield Step(name, "failed", why=_words(error))
        return
    if kernel is None:
        if config.is_causal and config.needs_lse:  # once
            yield Step(name, "failed", why="; ".join(row.reasons))
        return
    what = f"{row.backend.partition('.')[0]}.{kernel.variant}"
    if not kernel.parts:
        if config.is_causal and config.needs_lse:
            slow = kernel.kind == "array" and config.device_type == "cuda" and not asked
            yield Step(what, "failed", why=_NO_KERNEL) if slow else Step(what, "nothing to build", why=_without_parts(kernel))
        return
    for part in kernel.parts:
        step = _build(what, part, starting, kernel.name)
        if step.state == "failed" or Path(step.file) not in seen:
            seen.add(Path(step.file))
            yield step


def _without_parts(kernel: Kernel) -> str:
    return "plain array code" if kernel.kind == "array" else f"its package compiles what it needs by itself ({', '.join(kernel.versions)})"


def _build(what: str, build: Callable[[], Path], starting: Callable[[str], None], detail: str) -> Step:
    starting(f"building {detail}")
    there = set(cache_dir().glob("*.so"))
    start = time.perf_counter()
    try:
        path = build()
        return Step(what, "was there" if path in there else "built", str(path), path.stat().st_size, round(time.perf_counter() - start, 3))
    except (MLAError, OSError, ImportError) as error:
        return Step(what, "failed", seconds=round(time.perf_counter() - start, 3), why=_words(error))


def _glue(what: str, framework: str, module: str, starting: Callable[[str], None]) -> Step:
    """What a framework's programs call kernels through."""
    try:
        found = importlib.util.find_spec(framework.lower()) is not None
    except (ImportError, ValueError):  # blocked
        found = False
    if not found:
        return Step(what, "left out", why=f"{framework} is not installed")
    starting(f"importing {framework}")
    try:
        importlib.import_module(framework.lower())
    except (Exception, SystemExit) as error:  # packages raise whatever they like (oumi#2586)
        return Step(what, "failed", why=f"{framework} cannot be imported: {_words(error)}")
    return _build(what, importlib.import_module(f"mla_interop.kernels.{module}").build, starting, what)


def _left_out(config: MLAPrefillSelectorConfig, wanted: set[str]) -> Iterator[Step]:
    """What each backend would have served the problem with on a machine that has everything, where this one has not."""
    with installed.assume_installed():
        ideal = {row.backend: row.variant for row in explain(config).rows if row.valid}
    table = explain(config)
    for row in table.rows:
        name = f"{row.backend}.{ideal.get(row.backend)}"
        if row.backend not in ideal or name in wanted or (row.valid and row.variant == ideal[row.backend]):
            continue
        reasons = row.reasons or tuple(_refused(row.backend, table.config))
        own = [reason for reason in reasons if reason.startswith(f"{ideal[row.backend]}: ")]
        yield Step(name, "left out", why="; ".join(own or reasons))


def _refused(backend: str, config: MLAPrefillSelectorConfig) -> list[str]:
    try:
        return backend_class(backend).kernels(config)[1]
    except Exception as error:  # a probe may raise anything
        return [_words(error)]


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, MLAError) else f"{type(error).__name__}: {error}"
