"""What the benchmarks share: time and peak memory of a function, and tables of them."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

__all__ = ["Measured", "growth_exponent", "keep_memory", "measure_alternating", "peak_bytes", "table"]


@dataclass(frozen=True)
class Measured:
    """CPU seconds of each run (all threads of this process), and the highest sum of tensor bytes that one allocated.

    Bytes that were there before do not count.
    """

    seconds: tuple[float, ...]
    peak_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def keep_memory() -> None:
    """Start this script again under a malloc that keeps what is freed, unless it runs so already. For all sides alike.

    glibc gives every tensor above 32 MB back to the system and pays for its pages again at the next use: between
    lengths below and above that, time would grow by this and not by what is computed.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def peak_bytes(run: Callable[[], object]) -> int:
    """The highest sum of bytes that ``run()`` has allocated at one time on the CPU, as torch's allocator counts them.

    Exact and repeatable, unlike the process's resident memory; scratch space inside matrix products is not in it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def measure_alternating(runs: Sequence[Callable[[], object]], *, repeats: int) -> list[Measured]:
    """Time the functions in turns, so that whatever else the machine does meets all of them; one warm-up each."""
    peaks = [peak_bytes(run) for run in runs]  # the warm-up too
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, into in zip(runs, seconds, strict=True):
            started = time.process_time()
            run()
            into.append(time.process_time() - started)
    return [Measured(tuple(into), peak) for into, peak in zip(seconds, peaks, strict=True)]


def growth_exponent(smaller: tuple[int, float], larger: tuple[int, float]) -> float:
    """``p`` where the cost grows as ``size ** p`` between two ``(size, cost)`` points."""
    return math.log(larger[1] / smaller[1]) / math.log(larger[0] / smaller[0])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
