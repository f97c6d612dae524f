"""How time is taken: wall time of a loop long enough to hide the launch of its first call, median of many loops."""

import statistics
import time
from collections.abc import Callable

REPEATS = 21


def per_call(run: Callable[[int], None], calls_in_a_run: int = 1, repeats: int = REPEATS, target_s: float = 0.01) -> dict[str, float]:
    """Microseconds a call.

    Args:
        run: ``run(n)`` makes n runs and returns when the device has finished them.
        calls_in_a_run: Attention calls that one run consists of.
        repeats: Loops, of which the median counts.
        target_s: How long one loop should at least take.
    """
    run(2)
    begin = time.perf_counter()
    run(3)
    once = (time.perf_counter() - begin) / 3
    loops = max(1, min(500, int(target_s / once)))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(loops)
        times.append((time.perf_counter() - begin) / (loops * calls_in_a_run) * 1e6)
    return {"us": statistics.median(times), "us_min": min(times), "us_max": max(times)}
