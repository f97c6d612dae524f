"""Tables for documents, rendered from result files: no number in a document is typed by hand.

``python -m mla_interop.bench.tables`` rewrites the tables of ``DOCUMENTS``, between markers ``<!-- table:NAME -->``; ``--check`` says whether they are
what it would write. It runs in a clone, where the result files are; a file that is not there is left out.
"""

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mla_interop import support
from mla_interop.capability import KNOWN_GPUS
from mla_interop.config import use_config
from mla_interop.dimensions import MODELS
from mla_interop.installed import assume_installed
from mla_interop.selector import explain
from mla_interop.selector_config import MLAPrefillSelectorConfig

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/performance.md")
# Of several files the first is the table's; a later one adds rows of what the earlier ones have not measured, each with a mark.
SOURCES = {"gpu": ("h200.json", "h200_calls.json"), "cpu": ("cpu.json",), "layer": ("h200_layer.json",), "two": ("h200_x2.json",)}
FLOORS = ("kernel object", "kernel in a CUDA graph")
MARK = " †"


class Label(NamedTuple):
    """A row of a table of times: what was called from where, and the kernel, where it is ours."""

    framework: str
    name: str
    kernel: str

    @property
    def plain(self) -> str:
        """The name without what says that LSE is computed too."""
        return self.name.removesuffix(" + lse")


class Times:
    """Microseconds a call by label and problem, of one dtype.

    Args:
        files: Results in the format of ``mla_interop.bench.run``; of a label that several have, the first file's rows count.
        dtype: Name of the dtype.
    """

    def __init__(self, files: Iterable[dict[str, Any]], dtype: str) -> None:
        self.cells: dict[Label, dict[str, float | str]] = {}
        self.added: set[Label] = set()
        for number, results in enumerate(files):
            found: dict[Label, dict[str, float | str]] = {}
            for row in results["rows"]:
                if row["dtype"] == dtype:
                    found.setdefault(Label(row["framework"], row["name"], row["kernel"]), {})[row["problem"]] = row.get("us", "failed")
            new = {label: cells for label, cells in found.items() if label not in self.cells}
            self.added |= set(new) if number else set()
            self.cells |= new
        self.problems = list(dict.fromkeys(problem for cells in self.cells.values() for problem in cells))
        self.compiled = {label.kernel for label in self.cells if label.name in FLOORS}

    def main(self) -> list[Label]:
        """What a user compares: this package with each backend's first compiled kernel, that kernel alone, and what there is otherwise; without LSE."""
        first: dict[str, str] = {}
        for label in self.cells:
            if label.kernel in self.compiled:
                first.setdefault(label.kernel.partition(".")[0], label.kernel)
        names = ("mla_interop", "kernel object")
        chosen = [
            label
            for label in self.cells
            if (label.kernel in first.values() and label.name in names) or (not label.kernel and label.name == label.plain and "outside jit" not in label.name)
        ]
        return sorted(chosen, key=lambda label: (label.framework != "torch", label.name in FLOORS, not label.kernel, label.name))

    def others(self) -> list[Label]:
        """What is left: other kernels, packages' own APIs as kernels (*python*), other ways to call, and calls that compute LSE too."""
        main = set(self.main())
        left = (label for label in self.cells if label not in main)
        return sorted(left, key=lambda label: (label.framework != "torch", not label.kernel, label.kernel not in self.compiled, label.kernel, label.name))

    def table(self, labels: list[Label]) -> str:
        """Markdown; in bold the fastest call of each framework, kernels alone aside."""
        best: dict[tuple[str, str], float] = {}
        for label in labels:
            for problem, us in self.cells[label].items():
                if isinstance(us, float | int) and label.name not in FLOORS:
                    best[label.framework, problem] = min(us, best.get((label.framework, problem), us))
        lines = [f"| from | call | kernel | {' | '.join(self.problems)} |", "|---|---|---|" + "---:|" * len(self.problems)]
        for label in labels:
            cells = self.cells[label]
            texts = [_cell(cells.get(problem), best.get((label.framework, problem)), label.name in FLOORS) for problem in self.problems]
            kernel = f"`{label.kernel}`" if label.kernel else ""
            lines.append(f"| {label.framework} | {label.name}{MARK if label in self.added else ''} | {kernel} | {' | '.join(texts)} |")
        return "\n".join(lines)


def _cell(us: float | str | None, best: float | None, floor: bool) -> str:
    if us is None or isinstance(us, str):
        return us or ""
    return f"**{number(us)}**" if us == best and not floor else number(us)


def number(us: float) -> str:
    """Three digits or all before the point, thousands apart."""
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def caption(results: dict[str, Any]) -> str:
    """Machine, date and versions of a result file, and its note."""
    environment = results["environment"]
    versions = ", ".join(f"{name} {found}" for name, found in environment["versions"].items())
    note = f" {results['note']}" if "note" in results else ""
    return f"{environment['machine']}, {environment['date']}; Python {environment['python']}, {versions}.{note}"


def host(files: list[dict[str, Any]]) -> str:
    """A matrix product, what the host does around the kernels, and whether very many calls leave the process any larger; "" where none was measured."""
    lines = [f"| {name}{MARK * bool(number)} | {cell} |" for number, results in enumerate(files) for name, cell in _around(results)]
    return "\n".join(["<details><summary>Around the kernels</summary>", "", "| | |", "|---|---:|", *lines, "", "</details>"]) if lines else ""


def _around(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for row in results.get("ceiling", ()):
        yield f"a matrix product of {row['size']} cubed, {row['dtype']}", f"{row['tflops']:,.3g} TFLOP/s"
    for row in results.get("host", ()):
        if "us" in row:
            yield row["name"], _host_cell(row)
    for row in results.get("soak", ()):
        grown = ", ".join(f"{value:,} {name.removeprefix('grown_').replace('_', ' ')}" for name, value in row.items() if name.startswith("grown_"))
        yield f"growth over the second half of {row['name'].replace(str(row['calls']), format(row['calls'], ','))}", grown


def pairs(results: dict[str, Any]) -> str:
    """Ratios of what was measured by turns, a row for each pair; "" where none was."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in results.get("pairs", ()):
        found.setdefault((row["framework"], *row["names"], row["kernel"]), {})[row["problem"]] = f"{row['ratio']:.3f}"
    if not found:
        return ""
    problems = list(dict.fromkeys(problem for cells in found.values() for problem in cells))
    lines = [f"| from | call | over | kernel | {' | '.join(problems)} |", "|---|---|---|---|" + "---:|" * len(problems)]
    for (framework, ours, theirs, kernel), cells in found.items():
        lines.append(f"| {framework} | {ours} | {theirs} | `{kernel}` | {' | '.join(cells.get(problem, '') for problem in problems)} |")
    head = "Ratios of two calls' times that were measured by turns and with nothing between, which a GPU's clock cannot tell apart:"
    return "\n".join([head, "", *lines])


def _host_cell(row: dict[str, Any]) -> str:
    """A time, or, where it is a difference of two that noise made negative, that it is none; and what it is more than its floor."""
    if row["us"] < 0:
        return "less than the noise"
    if "us_over" not in row:
        return f"{number(row['us'])} us"
    elsewhere = ", ".join(f"{us:+.1f}" for us in row.get("us_over_elsewhere", ()))
    return f"{number(row['us'])} us ({row['us_over']:+.1f} by turns over x + 1{f'; in slower processes {elsewhere}' if elsewhere else ''})"


def shortly(files: list[dict[str, Any]]) -> str:
    """What a user compares, from the first file alone."""
    return times(files[:1], main_only=True)


def times(files: list[dict[str, Any]], main_only: bool = False) -> str:
    """The tables of the benchmark of single calls, a pair for each dtype; then what surrounds them."""
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for results in files for row in results["rows"]):
        found = Times(files, dtype)
        head = f"{dtype}, causal, D/V = 192/128, microseconds a call (median). Columns: heads x tokens of a sequence x sequences."
        parts += [head, "", found.table(found.main()), ""]
        if found.others() and not main_only:
            parts += [
                "<details><summary>All else that was measured: other kernels, CUDA graphs, torch.compile, calls outside jit, calls with LSE</summary>",
                "",
                found.table(found.others()),
                "",
                "</details>",
                "",
            ]
    more = () if main_only else (pairs(files[0]), host(files))
    captions = [caption(files[0])]
    for results in files[1:]:
        same = results["environment"] == files[0]["environment"]
        captions.append(f"{MARK.strip()} From another run" + (f". {results.get('note', '')}" if same else f": {caption(results)}"))
    return "\n".join([*parts, *(line for text in more if text for line in (text, "")), "\n\n".join(captions).rstrip()])


def layers(files: list[dict[str, Any]]) -> str:
    """The table of ``mla_interop.bench.layer``: a whole layer from latents, its unavoidable parts, and the same from plain operations."""
    lines = ["| from | backend | layer | unavoidable parts | ratio | plain operations | memory of a layer |", "|---|---|---:|---:|---:|---:|---:|"]
    for results in files:
        rows = {(row["framework"], row["backend"], row["name"]): row for row in results["rows"]}
        for ratio in results["ratios"]:
            who = ratio["framework"], ratio["backend"]
            layer, plain = rows[*who, "layer"], rows.get((*who, "composed of plain operations"))
            memory = f"{layer['peak_extra_bytes'] / 2**30:.2f} GiB" if "peak_extra_bytes" in layer else ""
            cells = (_ms(layer["us"]), _ms(ratio["parts_us"]), f"{ratio['layer_over_parts']:.2f}", _ms(plain["us"]) if plain else "", memory)
            lines.append(f"| {who[0]} | {who[1]} | {' | '.join(cells)} |")
    heads, query, context, rank = (
        ast.literal_eval(re.findall(rf"\b{name}=(\(.*?\)|\d+)", files[0]["layer"])[0]) for name in ("heads", "query_lens", "context_lens", "kv_lora_rank")
    )
    problem = f"{heads} heads, latents of {rank}, {len(query)} requests with {sum(query):,} new tokens and {sum(context):,} tokens of context in a paged cache"
    head = f"One layer's attention from latents: {problem}; median. Unavoidable are the up-projections' products and the attention kernels."
    return "\n".join([head, "", *lines, "", caption(files[0])])


def two(files: list[dict[str, Any]]) -> str:
    """The table of ``mla_interop.bench.two_gpus``: heads split over devices, against one."""
    results = files[0]
    lines = ["| from | call | kernel | one GPU | all | ratio |", "|---|---|---|---:|---:|---:|"]
    for row in results["rows"]:
        cells = (f"{number(row['one_us'])} us", f"{number(row['all_us'])} us", f"{row['ratio']:.2f}") if "ratio" in row else ("failed", "", "")
        lines.append(f"| {row['framework']} | {row['name']} | `{row['kernel']}` | {' | '.join(cells)} |")
    head = f"Heads split over {results['environment']['devices']} GPUs, {results['problem']} (heads x tokens x sequences), {results['dtype']}; median."
    return "\n".join([head, "", *lines, "", caption(results)])


def _ms(us: float) -> str:
    return f"{us / 1000:.2f} ms"


def explained() -> str:
    """What ``explain`` says for DeepSeek-V3 on an H200 with every package installed, as the order has it; without the versions of this machine."""
    gpu = KNOWN_GPUS["h200"]
    model = MODELS["deepseek-v3"]
    config = MLAPrefillSelectorConfig(dimensions=model.dimensions, num_heads=model.num_heads, capability=gpu.capability, num_sms=gpu.num_sms)
    with assume_installed(), use_config({"policy": "order"}):
        table = explain(config)
    return f"```text\n{replace(table, rows=tuple(replace(row, versions=()) for row in table.rows))}\n```"


ASKED = {"explain": explained, "support": support.summary}
"""What is rendered from the code itself, not from results."""


def render(name: str, folder: Path = RESULTS) -> str:
    """The text between a pair of markers: a name of ``ASKED`` or of ``SOURCES``, or one of those with ``_main``; "" where there are no results for it."""
    if name in ASKED:
        return ASKED[name]()
    source, short, _ = name.partition("_main")
    files = [json.loads(path.read_text()) for file in SOURCES[source] if (path := folder / file).exists()]
    return {"layer": layers, "two": two}.get(name, shortly if short else times)(files) if files else ""


def rewritten(text: str) -> str:
    """A document with its tables rendered anew."""

    def table(match: re.Match[str]) -> str:
        made = render(match[1])
        return f"<!-- table:{match[1]} -->\n" + (f"\n{made}\n\n" if made else "") + f"<!-- /table:{match[1]} -->"

    return re.sub(r"<!-- table:(\w+) -->.*?<!-- /table:\1 -->", table, text, flags=re.DOTALL)


def main() -> None:
    """Rewrite the documents and their picture, or check them."""
    from mla_interop.bench import picture

    results = picture.read()
    if "--check" not in sys.argv:
        picture.draw(results)
    elif not picture.is_current(results):
        sys.exit(f"{picture.FILE.name} does not show benchmarks/results; run python -m mla_interop.bench.tables")
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text()
        new = rewritten(old)
        if "--check" not in sys.argv:
            path.write_text(new)
        elif new != old:
            sys.exit(f"{name}: its tables are not those of benchmarks/results; run python -m mla_interop.bench.tables")


if __name__ == "__main__":
    main()
