"""``choices``: which backend is chosen for each of many problems, as a table and as a coloured grid."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mla_interop.errors import input_error
from mla_interop.explore.table import Explored, Row, needed
from mla_interop.selector import explain
from mla_interop.selector_config import MLAPrefillSelectorConfig


def choices(config: MLAPrefillSelectorConfig, *, num_heads: Sequence[int], num_tokens: Sequence[int], num_seqs: int = 1) -> "Choices":
    """What ``explain`` chooses for each number of heads and of tokens; nothing is compiled or run.

    Args:
        config: The rest of the problem.
        num_heads: Numbers of heads, N.
        num_tokens: Numbers of query tokens of all sequences, T.
        num_seqs: Sequences, B.

    Raises:
        MLAInputError: A list is empty, or a number is not positive.
    """
    for name, numbers in (("num_heads", num_heads), ("num_tokens", num_tokens), ("num_seqs", [num_seqs])):
        if not numbers or not all(isinstance(number, int) and number > 0 for number in numbers):
            raise input_error(name, repr(numbers), "positive integers")
    tables = {(n, t): explain(replace(config, num_heads=n, num_tokens=t, num_seqs=num_seqs)) for n in num_heads for t in num_tokens}
    rows = [_row(heads, tokens, table) for (heads, tokens), table in tables.items()]
    first = next(iter(tables.values()))
    target = first.config.device_type if first.config.capability is None else f"{first.config.device_type} {first.config.capability}"
    return Choices(f"{target}, {config.dtype}, {num_seqs} sequence{'s' if num_seqs > 1 else ''}: chosen backend", rows)


def _row(heads: int, tokens: int, table: Any) -> Row:
    row = next((row for row in table.rows if row.backend == table.chosen), None)
    why = "nothing can serve it" if row is None else "first valid in the order" if row.us is None else "fastest that was measured"
    return {"heads": heads, "tokens": tokens, "backend": table.chosen or "none", "kernel": row.variant if row else "", "why": why}


@dataclass(eq=False)
class Choices(Explored):
    """The choices.

    Attributes:
        title: Device, dtype and sequences.
        rows: One for each problem: ``heads``, ``tokens``, ``backend``, ``kernel`` and ``why``.
    """

    title: str
    rows: list[Row]

    def plot(self) -> Any:
        """A grid: heads down, tokens to the right, a colour for each backend."""
        return needed("mla_interop.explore.pictures").choices(self)
