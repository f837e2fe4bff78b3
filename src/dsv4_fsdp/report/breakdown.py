"""Where a run's steps spent their time: one picture a run, its parts stacked, as inline SVG or as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .charts import Chart, Frame, Line, points_of, svg_around
from .run_data import RunData

__all__ = ["PARTS", "Breakdown", "breakdown_png", "breakdown_svg", "breakdowns_of"]

PARTS = {
    "data_s": "batches",
    "compute_s": "forward and backward",
    "reduce_s": "reduction",
    "optimizer_s": "optimizer",
    "checkpoint_s": "checkpoint",
}
"""Field of :class:`dsv4_fsdp.train.progress.StepMetrics` -> its name here, from the bottom of the picture up."""
_PNG_COLOURS = ("#E69F00", "#0072B2", "#CC79A7", "#009E73", "#999999")


@dataclass(frozen=True)
class Breakdown:
    """One run's steps. ``parts`` has seconds for each of ``steps`` by name, bottom first; ``place`` is 0 or 1."""

    place: int
    label: str
    steps: tuple[int, ...]
    parts: tuple[tuple[str, tuple[float, ...]], ...]

    @property
    def total_s(self) -> float:
        return sum(map(sum, (values for _, values in self.parts)))

    @property
    def shares(self) -> list[tuple[str, float]]:
        """Each part's share of all the time, 0 to 1."""
        return [(name, sum(values) / self.total_s if self.total_s else 0.0) for name, values in self.parts]

    @property
    def chart(self) -> Chart:
        """The whole step's seconds."""
        whole = tuple(map(sum, zip(*(values for _, values in self.parts), strict=True)))
        line = Line(self.place, self.label, self.steps, whole)
        note = "seconds on rank 0; reduction waits for the slowest rank"
        return Chart(f"step_time_{'ab'[self.place]}", "Step time", note, (line,), from_zero=True)


def breakdowns_of(runs: Sequence[RunData], labels: Sequence[str]) -> tuple[Breakdown, ...]:
    """Of the runs that recorded it."""
    found = []
    for place, (run, label) in enumerate(zip(runs, labels, strict=True)):
        columns = {field: run.columns[field] for field in PARTS if field in run.columns}
        if columns:
            by_step = {field: dict(zip(c.steps, c.values, strict=True)) for field, c in columns.items()}
            parts = tuple(
                (PARTS[field], tuple(max(0.0, seconds.get(step) or 0.0) for step in run.steps))
                for field, seconds in by_step.items()
            )
            found.append(Breakdown(place, label, run.steps, parts))
    return tuple(found)


def breakdown_svg(breakdown: Breakdown) -> str:
    """Classes ``s0`` to ``s4`` are the parts, bottom first."""
    chart = breakdown.chart
    frame = Frame(chart)
    inside = []
    for index, (name, low, high) in enumerate(_layers(breakdown)):
        there = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in high]
        back = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in reversed(low)]
        title = f"<title>{escape(breakdown.label)}: {escape(name)}</title>"
        inside.append(f'<polygon class="s{index}" points="{" ".join(there + back)}">{title}</polygon>')
    return svg_around(chart, frame, inside)


def breakdown_png(breakdown: Breakdown) -> bytes:
    """1040 x 585 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for (name, low, high), colour in zip(_layers(breakdown), _PNG_COLOURS, strict=False):
        steps = [step for step, _ in high]
        axes.fill_between(steps, [v for _, v in low], [v for _, v in high], color=colour, label=name, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_title("Step time", loc="left", fontweight="bold")
    axes.set_title(breakdown.chart.note, loc="right", fontsize=9)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=len(PARTS), fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


_Curve = list[tuple[float, float]]


def _layers(breakdown: Breakdown) -> list[tuple[str, _Curve, _Curve]]:
    """Each part with its lower and upper edge, thinned as every chart is. A single step is drawn as wide as a step."""
    layers = []
    low: _Curve | None = None
    sums = [0.0] * len(breakdown.steps)
    for name, values in breakdown.parts:
        sums = [a + b for a, b in zip(sums, values, strict=True)]
        points = points_of(Line(breakdown.place, name, breakdown.steps, tuple(sums)))
        high = [(point.step, point.mean or 0.0) for point in points]
        if len(high) == 1:
            (step, value) = high[0]
            high = [(step - 0.5, value), (step + 0.5, value)]
        layers.append((name, low or [(step, 0.0) for step, _ in high], high))
        low = high
    return layers
