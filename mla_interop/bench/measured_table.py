"""Tables for measured selection, rendered from result files of the benchmarks.

``python -m mla_interop.bench.measured_table benchmarks/results/h200.json mla_interop/data/measured_sm90.json`` writes the one that ships.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from mla_interop.bench.problems import QK_HEAD_DIM, V_HEAD_DIM, Problem, equal, ragged
from mla_interop.capability import KNOWN_GPUS
from mla_interop.errors import input_error
from mla_interop.measured import FORMAT
from mla_interop.selector_config import nearest_power_of_two

# Of all that is measured, what a user's call takes, with prepared metadata, and the part of an entry that it goes into.
_NAMES = {"mla_interop": "us", "mla_interop + lse": "us_lse"}


def render(results: dict[str, Any], source: str) -> dict[str, Any]:
    """A table (``mla_interop.measured`` reads it) from results in the format of ``mla_interop.bench.run``.

    Calls from torch and from JAX are averaged, geometrically, since one choice serves both; so are problems that fall into one bucket of shapes.

    Args:
        results: ``environment`` and ``rows``; a capability that ``environment`` lacks is that of the known GPU of its name.
        source: The result file, for people.

    Raises:
        MLAInputError: A problem's name, or the machine, is not known.
    """
    environment = results["environment"]
    found: dict[tuple[Any, ...], dict[str, dict[str, list[float]]]] = {}
    for row in results["rows"]:
        if row["name"] not in _NAMES or not row["kernel"] or "us" not in row:
            continue
        problem = problem_named(row["problem"])
        dims = tuple(row.get("dims", (QK_HEAD_DIM, V_HEAD_DIM)))
        shape = problem.heads, nearest_power_of_two(problem.tokens), nearest_power_of_two(len(problem.lengths))
        times = found.setdefault((row["dtype"], dims, *shape), {}).setdefault(_NAMES[row["name"]], {})
        times.setdefault(row["kernel"], []).append(row["us"])
    entries = [
        {
            "device": _device(environment),
            "dtype": dtype,
            "dims": list(dims),
            "heads": heads,
            "tokens": tokens,
            "seqs": seqs,
            **{part: {kernel: float(f"{statistics.geometric_mean(us):.4g}") for kernel, us in sorted(times.items())} for part, times in sorted(parts.items())},
        }
        for (dtype, dims, heads, tokens, seqs), parts in sorted(found.items())
    ]
    head = {name: environment[name] for name in ("machine", "date", "versions")}
    return {"format": FORMAT, "source": source, **head, "entries": entries}


def problem_named(name: str) -> Problem:
    """The problem that a result's name stands for: heads x length x sequences.

    Raises:
        MLAInputError: It is no such name.
    """
    match = re.fullmatch(r"(\d+)x(random)?(\d+)x(\d+)", name)
    if match is None:
        raise input_error("problem", repr(name), "heads x length x sequences, such as 16x512x1 or 128xrandom4096x32")
    heads, longest, batch = int(match[1]), int(match[3]), int(match[4])
    return ragged(heads, batch, longest) if match[2] else equal(heads, longest, batch)


def write(table: dict[str, Any], path: Path) -> None:
    """Write a table, an entry a line."""
    head = json.dumps({name: value for name, value in table.items() if name != "entries"}, indent=1)[:-2]
    entries = ",\n".join("  " + json.dumps(entry) for entry in table["entries"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "entries": [\n{entries}\n ]\n}}\n')


def _device(environment: dict[str, Any]) -> str:
    if "device" in environment:
        return environment["device"]
    known = {gpu.name: str(gpu.capability) for gpu in KNOWN_GPUS.values()}
    if environment["machine"] not in known:
        raise input_error("machine", repr(environment["machine"]), ", ".join(known), 'Say what it is in the results: environment.device, such as "9.0".')
    return known[environment["machine"]]


if __name__ == "__main__":
    write(render(json.loads(Path(sys.argv[1]).read_text()), sys.argv[1]), Path(sys.argv[2]))
