"""The curves of one or two runs: which there are, and each as inline SVG or as a PNG.

The SVG is written by hand: it takes its colours from the page's style sheet, so it follows light and dark, and it is
small. The PNG needs matplotlib (the ``report`` extra), which is imported when one is drawn.

A long run is drawn in at most 300 points: the mean of the steps that a point stands for, with their range behind it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from .run_data import RunData

__all__ = ["Chart", "Frame", "Line", "charts_of", "number", "png", "points_of", "svg", "svg_around"]

_MAX_POINTS = 300
_DOTS_UP_TO = 40
_LOG_FROM = 30.0
# The picture in its own units; a page shows it 300 to 560 pixels wide, so 13 is a readable font.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 210, 48, 12, 10, 26
_STEP_TIME = {"data_s", "compute_s", "reduce_s", "optimizer_s", "checkpoint_s"}  # see the module breakdown
_PNG_COLOURS = ("#0072B2", "#D55E00")


@dataclass(frozen=True)
class Line:
    """One run's values. ``values[i]`` belongs to ``steps[i]``; ``None`` was not finite. ``place`` is 0 or 1: A or B."""

    place: int
    label: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if value is not None)


@dataclass(frozen=True)
class Chart:
    """One picture: a field of ``metrics.jsonl``, of each run that recorded it.

    Attributes:
        key: the field; also the PNG's name.
        title, note: what it is, and over what.
        lines: one a run.
        from_zero: whether the axis starts at 0.
        stepped: whether values hold for a step and are not joined (counts).
        may_be_log: whether a wide range is drawn on a logarithmic axis.
        reference: a level to compare with, and its name.
    """

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    from_zero: bool = False
    stepped: bool = False
    may_be_log: bool = False
    reference: tuple[float, str] | None = None

    @property
    def finite(self) -> tuple[float, ...]:
        return tuple(value for line in self.lines for value in line.finite)

    @property
    def is_zero(self) -> bool:
        """Whether there is nothing to draw: every value is 0."""
        return all(value == 0 for line in self.lines for value in line.values)

    @property
    def is_log(self) -> bool:
        values = self.finite
        return self.may_be_log and bool(values) and 0 < min(values) * _LOG_FROM < max(values)


def charts_of(runs: Sequence[RunData], labels: Sequence[str]) -> tuple[Chart, ...]:
    """The charts of what ``runs`` recorded: the known fields first, then every other number that is in the files."""
    clips = {(run.config or {}).get("optimizer.clip_grad_norm") for run in runs}
    clip = _float(clips.pop()) if len(clips) == 1 else None
    memory_unit, memory_name = 2**20, "MiB"
    if any(
        max(run.columns["memory_bytes"].finite, default=0) >= 2**33 for run in runs if "memory_bytes" in run.columns
    ):
        memory_unit, memory_name = 2**30, "GiB"

    def chart(key: str, title: str, note: str, *, scale: float = 1, **looks: object) -> Chart:
        lines = tuple(
            Line(place, label, column.steps, tuple(None if v is None else _drawable(v / scale) for v in column.values))
            for place, (run, label) in enumerate(zip(runs, labels, strict=True))
            if (column := run.columns.get(key)) is not None
        )
        return Chart(key, title, note, lines, **looks)  # type: ignore[arg-type]

    charts = [
        chart("loss", "Loss", "nats per token, mean over all ranks"),
        chart("eval_loss", "Evaluation loss", "nats per token of the evaluation's data"),
        chart(
            "grad_norm",
            "Gradient norm",
            "all ranks, before clipping",
            may_be_log=True,
            reference=None if clip is None else (clip, f"clipped to {number(clip)}"),
        ),
        chart("lr", "Learning rate", "of the step", from_zero=True),
        chart("tokens_per_s", "Tokens per second", "predicted tokens of all ranks", from_zero=True),
        chart("memory_bytes", "Memory", f"{memory_name}, peak so far on rank 0", scale=memory_unit, from_zero=True),
        chart(
            "expert_load", "Expert load", "busiest expert's tokens over the mean, worst router", reference=(1.0, "even")
        ),
        chart("skipped_steps", "Skipped steps", "so far; the gradient was not finite", from_zero=True, stepped=True),
        chart(
            "ranks_without_window",
            "Ranks without window",
            "sequences too short for a compressor",
            from_zero=True,
            stepped=True,
        ),
    ]
    known = {c.key for c in charts} | {"tokens", "elapsed_s"} | _STEP_TIME
    others = dict.fromkeys(key for run in runs for key in run.columns if key not in known)
    charts += [chart(key, key, "as recorded") for key in others]
    return tuple(c for c in charts if c.lines)


def number(value: float) -> str:
    """``value`` with four digits or so."""
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{value:,.0f}"
    if size >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}" if size >= 1e-4 else f"{value:.3g}"


def svg(chart: Chart) -> str:
    """The chart as an SVG element. Classes: ``a``/``b`` (runs), ``axis``, ``grid``, ``range``, ``ref``, ``lost``."""
    frame = Frame(chart)
    inside = [part for line in chart.lines for part in _svg_line(chart, line, "ab"[line.place], frame)]
    return svg_around(chart, frame, inside)


def svg_around(chart: Chart, frame: Frame, inside: Sequence[str]) -> str:
    """Title and axes of ``chart`` as an SVG element around what is drawn."""
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    for value in frame.y_ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="{_LEFT - 6}" y="{y + 4.5:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in frame.x_ticks:
        x, y_text = frame.x(value), _HEIGHT - 6
        parts.append(f'<text class="axis" x="{x:.1f}" y="{y_text}" text-anchor="middle">{_tick(value)}</text>')
    parts.append(f'<text class="axis" x="{_LEFT - 6}" y="{_HEIGHT - 6}" text-anchor="end">step</text>')
    if chart.reference is not None and frame.low <= chart.reference[0] <= frame.high:
        level, name = chart.reference
        y = frame.y(level)
        parts.append(f'<line class="ref" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(name)}</text>'
        )
    return "\n".join([*parts, *inside, "</svg>"])


def png(chart: Chart) -> bytes:
    """The chart as a PNG of 1040 x 585 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for line in chart.lines:
        colour = _PNG_COLOURS[line.place]
        points = points_of(line)
        steps = [p.step for p in points]
        style = "steps-mid" if chart.stepped and len(points) == len(line.steps) else "default"
        marker = "o" if len(line.steps) <= _DOTS_UP_TO else ""
        means = [math.nan if p.mean is None else p.mean for p in points]
        axes.plot(steps, means, color=colour, label=line.label, drawstyle=style, marker=marker, markersize=4)
        if len(points) < len(line.steps):
            low = [math.nan if p.low is None else p.low for p in points]
            high = [math.nan if p.high is None else p.high for p in points]
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        for point in points:
            if point.num_lost:
                axes.axvline(point.step, color="#CC0000", linewidth=1, alpha=0.6)
    frame = Frame(chart)
    if chart.is_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(frame.low, frame.high)
    if chart.reference is not None and frame.low <= chart.reference[0] <= frame.high:
        axes.axhline(chart.reference[0], color="#666666", linestyle="--", linewidth=1, label=chart.reference[1])
    # Names come from files and folders; a dollar sign in one is no formula.
    axes.set_title(_plain(chart.title), loc="left", fontweight="bold")
    axes.set_title(_plain(chart.note), loc="right", fontsize=9)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    if len(chart.lines) > 1 or chart.reference is not None:
        legend = axes.legend(frameon=False)
        for text in legend.get_texts():
            text.set_text(_plain(text.get_text()))
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


@dataclass(frozen=True)
class _Point:
    """One or several steps of a line: their middle, mean and range, and how many were not finite."""

    step: float
    mean: float | None
    low: float | None
    high: float | None
    num_lost: int


def points_of(line: Line) -> list[_Point]:
    size = math.ceil(len(line.steps) / _MAX_POINTS)
    points = []
    for start in range(0, len(line.steps), size):
        steps, values = line.steps[start : start + size], line.values[start : start + size]
        finite = [value for value in values if value is not None]
        middle = (steps[0] + steps[-1]) / 2
        lost = len(values) - len(finite)
        if finite:
            points.append(_Point(middle, fmean(finite), min(finite), max(finite), lost))
        else:
            points.append(_Point(middle, None, None, None, lost))
    return points


class Frame:
    """The axes of a chart: their range, ticks, and where a value lies in the SVG."""

    def __init__(self, chart: Chart) -> None:
        values = list(chart.finite) or [0.0, 1.0]
        self.is_log = chart.is_log
        low, high = min(values), max(values)
        # The reference is worth showing where it is near; far away it would flatten the curve.
        if chart.reference is not None and (self.is_log or low / 3 <= chart.reference[0] <= high * 1.5):
            low, high = min(low, chart.reference[0]), max(high, chart.reference[0])
        if self.is_log:
            self.low, self.high = low / 1.15, high * 1.15
            self.y_ticks = _log_ticks(self.low, self.high)
        else:
            if chart.from_zero:
                low, high = min(low, 0.0), max(high, 0.0)
            span, size = high - low, max(abs(low), abs(high))
            pad = span * 0.06 if span > 1e-9 * size and size > 1e-90 else size * 0.1 if size > 1e-90 else 0.5
            self.low = low if chart.from_zero and low == 0 else low - pad
            self.high = high + pad
            self.y_ticks = _ticks(self.low, self.high, whole=chart.stepped)
        steps = [step for line in chart.lines for step in (line.steps[0], line.steps[-1])]
        self.first, self.last = float(min(steps)), float(max(steps))
        if self.first == self.last:
            self.first, self.last = self.first - 0.5, self.last + 0.5
        self.x_ticks = _ticks(self.first, self.last, whole=True, at_most=6)

    def x(self, step: float) -> float:
        return _LEFT + 6 + (step - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT - 12)

    def y(self, value: float) -> float:
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.is_log
            else (
                self.low,
                self.high,
                value,
            )
        )
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _svg_line(chart: Chart, line: Line, colour: str, frame: Frame) -> list[str]:
    points = points_of(line)
    parts = []
    is_thinned = len(points) < len(line.steps)
    if is_thinned:
        for piece in _pieces(points):
            there = [f"{frame.x(p.step):.1f},{frame.y(p.high):.1f}" for p in piece if p.high is not None]
            back = [f"{frame.x(p.step):.1f},{frame.y(p.low):.1f}" for p in reversed(piece) if p.low is not None]
            parts.append(f'<polygon class="range {colour}" points="{" ".join(there + back)}"/>')
    half = (
        (frame.x(frame.first + 1) - frame.x(frame.first)) * (points[1].step - points[0].step if points[1:] else 1) / 2
    )
    for piece in _pieces(points):
        path: list[str] = []
        for point in piece:
            assert point.mean is not None
            x, y = frame.x(point.step), frame.y(point.mean)
            if chart.stepped and not is_thinned:
                left, right = max(_LEFT, x - half), min(_WIDTH - _RIGHT, x + half)
                path.append(f"{'L' if path else 'M'}{left:.1f} {y:.1f}L{right:.1f} {y:.1f}")
            else:
                path.append(f"{'L' if path else 'M'}{x:.1f} {y:.1f}")
        parts.append(f'<path class="line {colour}" d="{"".join(path)}"/>')
        if len(line.steps) <= _DOTS_UP_TO or len(piece) == 1:
            for point in piece:
                assert point.mean is not None
                x, y = frame.x(point.step), frame.y(point.mean)
                parts.append(
                    f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">'
                    f"<title>{escape(line.label)}: {number(point.mean)} at step {number(point.step)}</title></circle>"
                )
    for point in points:
        if point.num_lost:
            x = frame.x(point.step)
            parts.append(
                f'<line class="lost" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
                f"<title>{escape(line.label)}: not finite at step {number(point.step)}</title></line>"
            )
    return parts


def _pieces(points: Sequence[_Point]) -> list[list[_Point]]:
    """Runs of neighbours that have a value: a line does not cross a step that has none."""
    pieces: list[list[_Point]] = [[]]
    for point in points:
        if point.mean is not None:
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _ticks(low: float, high: float, *, whole: bool = False, at_most: int = 5) -> list[float]:
    span = high - low
    size = 10.0 ** math.floor(math.log10(span / at_most))
    step = next(size * m for m in (1, 2, 2.5, 5, 10, 20) if span / (size * m) <= at_most)
    if whole:
        step = float(max(1, math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for marks in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**d for d in decades for m in marks if low <= m * 10.0**d <= high]
        if len(ticks) <= 6:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 6)]


def _tick(value: float) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-2 or size >= 1e9:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for unit, letter in ((1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):g}{letter}"
    return f"{value:g}"


def _drawable(value: float) -> float:
    """``value``, within what can be scaled without overflow."""
    return max(-1e90, min(1e90, value))


def _plain(text: str) -> str:
    return text.replace("$", r"\$")


def _float(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
