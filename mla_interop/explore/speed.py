"""``timing``: how long backends take for one input, here and now; and ``load_results``: how long they took in a result file."""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mla_interop.backends.registry import parse_names
from mla_interop.bench.timing import side_by_side
from mla_interop.capability import machine_name
from mla_interop.errors import MLAError, MLAUnsupportedError, input_error
from mla_interop.explore.batch import Batch, make_batch
from mla_interop.explore.table import Explored, Row, html_failed, needed, text_failed
from mla_interop.neutral import mla_prefill

# What does the work of the kernel alone, and no more: an LSE is more, and ten calls in a CUDA graph are launched at once.
_CALLS = ("mla_interop", "mla_interop, torch.compile", "mla_interop, outside jit")
_SHORT_US = 200.0  # the time of a kernel that takes longer varies by more than what a call costs


def timing(
    q: Any,
    k: Any,
    v: Any,
    *,
    backends: Any = None,
    frameworks: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    return_lse: bool = False,
    repeats: int = 7,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    scale: float | None = None,
    is_causal: bool = True,
) -> "Timing":
    """Time calls of each backend, through each framework: prepared metadata, and inside ``jax.jit`` for JAX.

    Args:
        q, k, v: As in :func:`compare`.
        backends: A name or several; None: all that can serve this here.
        frameworks: ``"torch"``, ``"jax"``, ``"numpy"``; None: that of q.
        lengths: Times the first so many rows, as one sequence, for each of these; None: the batch as it is.
        return_lse: Whether LSE is asked for too.
        repeats: Rounds, of which the median counts: each has a loop of at least 10 ms for every backend, in an order that changes.
        cu_seqlens_q, cu_seqlens_k, scale, is_causal: As in ``mla_interop.mla_prefill``.

    Raises:
        MLAInputError: Wrong arguments.
        MLAUnsupportedError: A backend that was named cannot serve this, or none can.
    """
    whole = make_batch(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, is_causal)
    if lengths is not None and not len(lengths):
        raise input_error("lengths", repr(lengths), "numbers of tokens, or None")
    named = None if backends is None else parse_names("backends", backends)
    rows, failed = [], {}
    for batch in [whole] if lengths is None else [whole.first(int(length)) for length in lengths]:
        runs: dict[tuple[str, str, str], tuple[Callable[[int], None], int]] = {}
        for framework in frameworks or (batch.framework,):
            local = batch.to(framework)
            for name in batch.backends() if named is None else named:
                try:
                    run = _runner(local, framework, name, return_lse)
                    run(1)
                    runs[framework, name, local.kernel(name)] = run, 1
                except Exception as error:  # a package may raise anything; it must not hide what the others took
                    if named is not None:
                        raise
                    failed[f"{name} ({framework})"] = str(error) if isinstance(error, MLAError) else f"{type(error).__name__}: {error}"
        rows += [_row(batch, framework, kernel, return_lse, found) for (framework, _, kernel), found in side_by_side(runs, repeats).items()]
    if not rows:
        raise MLAUnsupportedError("\n  ".join(["no backend can serve this here; mla_interop.explain says why.", *text_failed(failed)]))
    first = "" if lengths is None else "the first rows, as one sequence, of "
    return Timing(f"{first}{whole.words}\n{machine_name(whole.device[0])}", rows, failed)


def load_results(path: str | Path) -> "Timing":
    """The times in a result file of ``mla-interop bench`` or of the layer benchmark.

    Args:
        path: The JSON file.

    Raises:
        MLAInputError: It is no such file.
    """
    path = Path(path)
    try:
        results = json.loads(path.read_text())
        environment = results["environment"]
        return Timing.of_results(f"{path.name}: {environment['machine']}, {environment['date']}", results)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise input_error("path", f"{path} ({type(error).__name__}: {error})", "a JSON file with environment and rows, as mla-interop bench writes") from error


@dataclass(eq=False)
class Timing(Explored):
    """Times.

    Attributes:
        title: The machine, and the problem or the file.
        rows: ``problem`` (heads x tokens x sequences), ``framework``, ``name``, ``kernel``, ``us`` (median microseconds a call), ``us_min``, ``us_max``,
            ``tflops`` (achieved, 10^12 floating-point operations a second), ``overhead_us`` (what the median call takes beyond that of the same kernel
            alone, in microseconds, where a result file has both and the kernel is short), and whatever a result file has beside them.
        failed: Backends that nobody named and that failed, with why.
        ceilings: For dtypes of a result file, the TFLOP/s of a large matrix product in the same run.
    """

    title: str
    rows: list[Row]
    failed: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_results(cls, title: str, results: dict[str, Any]) -> "Timing":
        """The times of what ``mla_interop.bench.run.measure`` returns, or of the layer benchmark's results."""
        rows = [{"problem": "layer", "kernel": row.get("backend", ""), **row} for row in results["rows"] if "us" in row]
        alone = {(row["problem"], row.get("dtype"), row["kernel"]): row["us"] for row in rows if row["name"] == "kernel object"}
        for row in rows:
            floor = alone.get((row["problem"], row.get("dtype"), row["kernel"]))
            if floor is not None and floor <= _SHORT_US and row["name"] in _CALLS:
                row["overhead_us"] = row["us"] - floor
        return cls(title, rows, ceilings={row["dtype"]: row["tflops"] for row in results.get("ceiling", ())})

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *text_failed(self.failed)])

    def _repr_html_(self) -> str:
        return super()._repr_html_() + html_failed(self.failed)

    def where(self, keep: Callable[[Row], bool] | None = None, **wanted: Any) -> "Timing":
        """The rows whose columns have the wanted values (or one of them, if it is a list), and which ``keep`` keeps.

        Raises:
            MLAInputError: Nothing is left.
        """
        lists = {name: value if isinstance(value, list | tuple | set) else [value] for name, value in wanted.items()}
        rows = [row for row in self.rows if all(row.get(name) in allowed for name, allowed in lists.items()) and (keep is None or keep(row))]
        if not rows:
            known = {name: sorted({str(row.get(name)) for row in self.rows}) for name in wanted}
            raise input_error("where", ", ".join(f"{name}={value!r}" for name, value in wanted.items()), f"values that occur: {known}")
        return replace(self, rows=rows)

    def labelled(self) -> Iterator[tuple[str, Row]]:
        """Each row with what tells it from others of its problem and framework."""
        for row in self.rows:
            name, kernel = row["name"], row.get("kernel", "")
            ours = name.startswith("mla_interop")
            text = f"{kernel}{name.removeprefix('mla_interop')}" if ours and kernel else f"{name}, {kernel}" if kernel else name
            yield f"{text} ({row['framework']})", row

    def best(self) -> list[Row]:
        """The fastest row of each problem."""
        problems = dict.fromkeys(row["problem"] for row in self.rows)
        return [min((row for row in self.rows if row["problem"] == problem), key=lambda row: row["us"]) for problem in problems]

    def plot(self, what: str = "us") -> Any:
        """Lines over the lengths where those vary in one way only; else bars, a panel for each problem.

        Args:
            what: ``"us"`` (microseconds a call), ``"tflops"`` (achieved; a line is a large matrix product's, where the run measured one), or
                ``"overhead_us"`` (microseconds beyond the kernel alone).

        Raises:
            MLAInputError: Another name, or no row has it.
            MLAUnavailableError: matplotlib is not installed.
        """
        known = [name for name in ("us", "tflops", "overhead_us") if any(name in row for row in self.rows)]
        if what not in known:
            raise input_error("what", repr(what), " or ".join(map(repr, known)))
        return needed("mla_interop.explore.pictures").times(self, what)


def _row(batch: Batch, framework: str, kernel: str, return_lse: bool, found: dict[str, float]) -> Row:
    tokens, heads, _ = batch.q.shape
    problem = f"{heads}x{tokens}x{len(batch.lengths.lengths_q)}"
    ours = f"mla_interop{' + lse' if return_lse else ''}"
    head = {"problem": problem, "tokens": tokens, "framework": framework, "name": ours, "kernel": kernel}
    return {**head, **found, "tflops": batch.flops / found["us"] * 1e-6}


def _runner(batch: Batch, framework: str, name: str, return_lse: bool) -> Callable[[int], None]:
    """``run(n)``: n calls, finished when it returns."""
    options = {"scale": batch.scale, "is_causal": batch.is_causal, "return_lse": return_lse, "backend": name}
    lengths = batch.lengths.cu_seqlens_q, batch.lengths.cu_seqlens_k
    arrays = batch.q, batch.k, batch.v
    if framework == "jax":
        return _jax_runner(batch, options)
    if framework == "numpy":
        return _looped(lambda: mla_prefill(*arrays, **batch.options, return_lse=return_lse, backend=name), lambda: None)
    torch, torch_side = importlib.import_module("torch"), importlib.import_module("torch_side")
    metadata = torch_side.prepare_metadata(*lengths, device=batch.q.device)
    wait = torch.cuda.synchronize if batch.q.is_cuda else lambda: None
    return _looped(lambda: torch_side.mla_prefill(*arrays, metadata=metadata, **options), wait)


def _looped(call: Callable[[], Any], wait: Callable[[], Any]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            call()
        wait()

    return run


def _jax_runner(batch: Batch, options: dict[str, Any]) -> Callable[[int], None]:
    jax, jax_side = importlib.import_module("jax"), importlib.import_module("jax_side")
    device = batch.q.devices().pop()
    config = replace(batch.config, needs_lse=options["return_lse"])
    lengths = batch.lengths.cu_seqlens_q, batch.lengths.cu_seqlens_k
    metadata = jax_side.prepare_metadata(*lengths, device=device, is_causal=batch.is_causal, config=config, backend=options["backend"])
    call = jax.jit(lambda q, k, v, metadata: jax_side.mla_prefill(q, k, v, metadata=metadata, **options))
    in_order = device.platform == "gpu"  # on the CPU calls may run side by side

    def run(n: int) -> None:
        made = None
        for _ in range(n):
            made = call(batch.q, batch.k, batch.v, metadata)
            if not in_order:
                jax.block_until_ready(made)
        jax.block_until_ready(made)

    return run
