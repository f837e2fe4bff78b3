"""What the benchmarks share: time and peak memory of a function, tables of them, and the page that is printed."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

__all__ = [
    "ROOT",
    "Goal",
    "Measured",
    "growth_exponent",
    "keep_memory",
    "measure_alternating",
    "page",
    "paired_ratio",
    "peak_bytes",
    "spread",
    "table",
]

ROOT = Path(__file__).resolve().parents[1]


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


def spread(values: Sequence[float], *, unit: float = 1.0, digits: int = 3) -> str:
    """``median (lower quartile to upper quartile)``, in ``unit``."""
    scaled = [value / unit for value in values]
    if len(scaled) < 2:
        return f"{scaled[0]:.{digits}f}"
    lower, middle, upper = statistics.quantiles(scaled, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({lower:.{digits}f} to {upper:.{digits}f})"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """``ours / theirs`` of each turn: what slowed the machine down for a while met both sides of a turn."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


@dataclass(frozen=True)
class Goal:
    """A figure that the project wants to reach, and where it stands."""

    text: str
    limit: float
    got: float
    at_least: bool = False

    def line(self) -> str:
        met = self.got >= self.limit if self.at_least else self.got <= self.limit
        sign = ">=" if self.at_least else "<="
        return f"- {self.text} {sign} {self.limit:g}: **{self.got:.2f}**, {'met' if met else 'not met'}."


def page(
    title: str, document: str | None, tables: Sequence[str], *, goals: Sequence[Goal] = (), packages: Sequence[str] = ()
) -> str:
    """The Markdown page of a benchmark: what is measured, tables, goals, and where and when that was.

    Args:
        document: the benchmark's docstring: its first line and its last paragraph say what was done.
        packages: distributions besides torch whose versions matter.
    """
    first, *_, last = (document or "").strip().split("\n\n")
    parts = [f"# {title}", first, *tables]
    if goals:
        parts.append("Goals:\n\n" + "\n".join(goal.line() for goal in goals))
    parts += [last, _stamp(packages)]
    return "\n\n".join(parts) + "\n"


def _stamp(packages: Sequence[str]) -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", *packages)]
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    command = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return "\n".join(
        [
            f"- `{command}`, commit {_commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"- Python {platform.python_version()}, {', '.join(versions)}",
            f"- {_processor()}, {os.cpu_count()} cores; load (1, 5, 15 minutes) at the end {load}",
        ]
    )


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks", "tests")
        return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
