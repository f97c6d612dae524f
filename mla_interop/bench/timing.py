"""How time is taken: wall time of a loop long enough to hide the launch of its first call, median of many loops."""

import contextlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

REPEATS = 21


def per_call(run: Callable[[int], None], calls_in_a_run: int = 1, repeats: int = REPEATS, target_s: float = 0.01) -> dict[str, float]:
    """:func:`side_by_side` for one thing."""
    return side_by_side({"": (run, calls_in_a_run)}, repeats, target_s)[""]


def side_by_side(
    runs: Mapping[Name, tuple[Callable[[int], None], int]], repeats: int = REPEATS, target_s: float = 0.01, over: Mapping[Name, Name] = MappingProxyType({})
) -> dict[Name, dict[str, float]]:
    """Microseconds a call, of things that are to be compared: each round measures all of them, in another order.

    A GPU that gets warm, or nears its power limit, slows down by several percent within seconds: what is measured later would be the loser.

    Args:
        runs: For each name: ``run``, where ``run(n)`` makes n runs and returns when the device has finished them, and how many calls one
            run consists of.
        repeats: Rounds, of which the median counts.
        target_s: How long one loop should at least take.
        over: What a thing is compared with: the median of what it took longer than that in the same round is added, as ``us_over``. A host that
            is slow for a while is slow for both.
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
    found = {name: {"us": statistics.median(some), "us_min": min(some), "us_max": max(some)} for name, some in times.items()}
    for name, base in over.items():
        if name in times and base in times:
            found[name]["us_over"] = statistics.median(a - b for a, b in zip(times[name], times[base], strict=True))
    return found


def on_a_quiet_core(measure: Callable[[], dict[Name, dict[str, float]]], by: Name, sittings: int) -> dict[Name, dict[str, float]]:
    """The best of several sittings of :func:`side_by_side`, each on another core: for what the host alone takes.

    On a shared machine a core may be slow for a while, and slow for one thing more than for another, because half of it serves somebody else.

    Args:
        measure: One sitting.
        by: What the others are compared with: the sitting in which it was the fastest was disturbed least. The others have no say.
        sittings: How many.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()  # Linux has it, for a thread
    cores = itertools.cycle([{core} for core in sorted(allowed)] or [allowed])
    found = []
    try:
        for _ in range(sittings):
            _keep_on(next(cores))
            found.append(measure())
    finally:
        _keep_on(allowed)
    return min(found, key=lambda times: times[by]["us"])


def _keep_on(cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # a sandbox forbids it: the sittings are still sittings
        if cores:
            os.sched_setaffinity(0, cores)


def _loops(run: Callable[[int], None], target_s: float) -> int:
    run(2)
    begin = time.perf_counter()
    run(3)
    return max(1, min(500, int(target_s * 3 / (time.perf_counter() - begin))))
