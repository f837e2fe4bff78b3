"""Estimates as a PNG: a stacked bar of the peak for each configuration, and the first one's memory over a step.

matplotlib is imported when a picture is drawn; it is in the ``report`` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .estimate import Estimate

__all__ = ["draw"]

# Okabe and Ito's palette, told apart with colour-blind eyes; in the order in which the terms are stacked.
_COLOURS = {
    "parameters": "#0072B2",
    "fp32 islands": "#56B4E9",
    "optimizer state": "#004466",
    "buffers": "#BBBBBB",
    "gradients": "#009E73",
    "gathered parameters": "#E69F00",
    "all gather buffers": "#F0C75E",
    "unsharded gradients": "#7FCFB3",
    "reduce buffers": "#CC79A7",
    "saved activations": "#D55E00",
    "working memory": "#F5A37A",
}
_GIB = 2**30


def draw(estimates: Sequence[Estimate], path: Path) -> None:
    """Write the picture of one or more estimates to ``path``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2 + 0.42 * len(estimates)), dpi=130, layout="constrained")
    bars, line = figure.subplots(2, 1, height_ratios=[1 + 0.42 * len(estimates), 3.6])
    first = estimates[0]
    device = first.cluster.device_memory_bytes

    labels = [estimate.settings.describe(estimate.cluster) for estimate in estimates]
    places = range(len(estimates))
    left = [0.0] * len(estimates)
    used = [name for name in _COLOURS if any(name in moment.terms for e in estimates for moment in e.moments)]
    for name in used:
        widths = [estimate.peak.terms.get(name, 0) / _GIB for estimate in estimates]
        bars.barh(places, widths, left=left, color=_COLOURS[name], label=name, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    margins = [estimate.margin_bytes / _GIB for estimate in estimates]
    bars.barh(
        places, margins, left=left, facecolor="none", edgecolor="#888888", hatch="////", height=0.62, label="margin"
    )
    for place, estimate in zip(places, estimates, strict=True):
        bars.text(left[place] + margins[place], place, f" {estimate.needed_bytes / _GIB:.1f}", va="center", fontsize=9)
    bars.set_yticks(list(places), labels, fontsize=9)
    bars.invert_yaxis()
    bars.set_xlabel("GiB per device at the peak")
    bars.set_xlim(0, 1.08 * max(*(a + b for a, b in zip(left, margins, strict=True)), (device or 0) / _GIB))
    bars.set_title(f"{first.model} on {first.cluster.ranks} ranks", loc="left", fontweight="bold")

    moments = first.moments
    times = list(range(len(moments)))
    stacks = [[moment.terms.get(name, 0) / _GIB for moment in moments] for name in used]
    line.stackplot(times, stacks, colors=[_COLOURS[name] for name in used], step="mid", linewidth=0)
    last_forward = max(i for i, moment in enumerate(moments) if moment.label.startswith("forward"))
    line.axvline(last_forward + 0.5, color="#333333", linewidth=0.8, linestyle=":")
    line.axvline(len(moments) - 1.5, color="#333333", linewidth=0.8, linestyle=":")
    top = 1.18 * max(max(moment.total_bytes for moment in moments), device or 0) / _GIB
    line.set_ylim(0, top)
    line.set_xlim(-0.5, len(moments) - 0.5)
    for start, end, text in (
        (-0.5, last_forward + 0.5, "forward"),
        (last_forward + 0.5, len(moments) - 1.5, "backward"),
    ):
        line.text((start + end) / 2, 0.965 * top, text, ha="center", va="top", fontsize=9)
    line.text(len(moments) - 1.7, 0.965 * top, "optimizer", ha="right", va="top", fontsize=9)
    peak = moments.index(first.peak)
    line.annotate(
        f"{first.peak.label}: {first.peak.total_bytes / _GIB:.1f} GiB",
        (peak, first.peak.total_bytes / _GIB),
        xytext=(0, 8),
        textcoords="offset points",
        ha="left" if peak < len(moments) / 2 else "right",
        fontsize=9,
    )
    line.set_xticks([])
    line.set_xlabel("a step, unit by unit (not to scale in time)")
    line.set_ylabel("GiB per device")
    line.set_title(f"Memory over a step: {labels[0]}", loc="left", fontsize=10)
    if device is not None:
        for axes, draw_line in ((bars, bars.axvline), (line, line.axhline)):
            draw_line(device / _GIB, color="black", linewidth=1.2, linestyle="--")
            assert axes is not None
        line.text(-0.2, device / _GIB, " device memory", va="bottom", fontsize=8)
    handles, names = bars.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path)
