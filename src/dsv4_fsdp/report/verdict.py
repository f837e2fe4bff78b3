"""The answer in three lines: the loss, the steps, and whether the fp32 islands are fp32."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from .run_data import RunData

__all__ = ["Answer", "State", "verdict"]

State = Literal["good", "warn", "bad", "plain"]

_TAIL = 10


@dataclass(frozen=True)
class Answer:
    """One line: what matters, what it rests on, and how it should look."""

    headline: str
    detail: str
    state: State


def verdict(run: RunData) -> tuple[Answer, Answer, Answer]:
    """Loss, steps, islands."""
    return _loss(run), _steps(run), _islands(run)


def _loss(run: RunData) -> Answer:
    column = run.columns["loss"]
    tail = column.finite[-_TAIL:]
    if not tail:
        return Answer("loss never finite", "not one step had a loss that is a number", "bad")
    first = "not finite" if column.values[0] is None else f"{column.values[0]:.3f}"
    detail = f"{first} at the first step, {fmean(tail):.3f} over the last {len(tail)}"
    if (evaluated := run.last("eval_loss")) is not None:
        detail += f", {evaluated:.3f} in the last evaluation"
    last = column.values[-1]
    if last is None:
        return Answer("loss not finite at the last step", detail, "bad")
    return Answer(f"loss {last:.3f}", detail, "plain")


def _steps(run: RunData) -> Answer:
    done = run.steps[-1]
    asked = (run.config or {}).get("steps", "")
    whole = not asked.isdigit() or done >= int(asked)
    skipped = run.last("skipped_steps")
    steps = f"{done} of {asked} steps" if asked else f"{done} step{'s' * (done != 1)}"
    steps += ", skipped not recorded" if skipped is None else f", {skipped:.0f} skipped"
    details = []
    if not whole:
        details.append("stopped early or still running")
    if (elapsed := run.last("elapsed_s")) is not None:
        details.append(_duration(elapsed))
    if "tokens_per_s" in run.columns and (rates := run.columns["tokens_per_s"].finite):
        details.append(f"{median(rates):,.0f} tokens/s (median)")
    return Answer(steps, ", ".join(details), "warn" if skipped or not whole else "plain")


def _islands(run: RunData) -> Answer:
    violated = [audit for audit in run.audits if not audit.ok]
    if violated:
        count = sum(len(audit.violations) for audit in violated)
        return Answer("fp32 islands: no", f"{count} violations in {violated[0].file}", "bad")
    if run.precision is None:
        return Answer("fp32 islands: unknown", "the run has no precision.txt", "warn")
    broken = [row for row in run.precision if row.is_broken_island]
    islands = sum(row.count for row in run.precision if row.is_island)
    if broken:
        worst = broken[0]
        detail = f"{sum(row.count for row in broken)} of {islands} are not, such as {worst.name}"
        return Answer("fp32 islands: no", f"{detail} ({' / '.join(worst.dtypes)})", "bad")
    if not islands:
        return Answer("fp32 islands: none", "precision.txt has no island", "warn")
    return Answer("fp32 islands: yes", f"all {islands} tensors, read back before the first step", "good")


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
