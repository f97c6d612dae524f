"""How time is taken: wall time of a loop long enough to hide the launch of its first call, median of many loops."""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

REPEATS = 21


def per_call(run: Callable[[int], None], calls_in_a_run: int = 1, repeats: int = REPEATS, target_s: float = 0.01) -> dict[str, float]:
    """:func:`side_by_side` for one thing."""
    return side_by_side({"": (run, calls_in_a_run)}, repeats, target_s)[""]


def side_by_side(runs: Mapping[Name, tuple[Callable[[int], None], int]], repeats: int = REPEATS, target_s: float = 0.01) -> dict[Name, dict[str, float]]:
    """Microseconds a call, of things that are to be compared: each round measures all of them, in another order.

    A GPU that gets warm, or nears its power limit, slows down by several percent within seconds: what is measured later would be the loser.

    Args:
        runs: For each name: ``run``, where ``run(n)`` makes n runs and returns when the device has finished them, and how many calls one
            run consists of.
        repeats: Rounds, of which the median counts.
        target_s: How long one loop should at least take.
    """
    loops = {name: _loops(run, target_s) for name, (run, _) in runs.items()}
    times: dict[Name, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            run, calls = runs[name]
            begin = time.perf_counter()
            run(loops[name])
            times[name].append((time.perf_counter() - begin) / (loops[name] * calls) * 1e6)
    return {name: {"us": statistics.median(some), "us_min": min(some), "us_max": max(some)} for name, some in times.items()}


def _loops(run: Callable[[int], None], target_s: float) -> int:
    run(2)
    begin = time.perf_counter()
    run(3)
    return max(1, min(500, int(target_s * 3 / (time.perf_counter() - begin))))
