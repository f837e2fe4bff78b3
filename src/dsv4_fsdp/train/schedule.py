"""The learning rate of each step: a pure function, so a resumed run needs no state of a schedule."""

from __future__ import annotations

import math

from .optimizer_settings import OptimizerSettings

__all__ = ["learning_rate", "warmup_steps"]


def warmup_steps(steps: int, settings: OptimizerSettings) -> int:
    """How many of ``steps`` the rate rises in: ``warmup_steps``, or ``warmup_fraction`` of them."""
    wanted = settings.warmup_steps
    return round(settings.warmup_fraction * steps) if wanted is None else min(wanted, steps)


def learning_rate(step: int, *, steps: int, settings: OptimizerSettings) -> float:
    """The rate of ``step``, counted from 0, in a run of ``steps``.

    It rises in a line to ``lr``, which the last warm-up step has (the first has one part of it, not 0, so that no step
    does nothing). Then, down to ``final_lr_fraction * lr`` at the last step:

    - ``cosine``: half a cosine; ``linear``: a line;
    - ``wsd`` (warm-up, stable, decay): ``lr``, then a line over the last ``decay_fraction`` of the run;
    - ``constant``: ``lr`` to the end.

    ``step`` past the end has the rate of the last step.
    """
    rising = warmup_steps(steps, settings)
    step = min(step, steps - 1)
    if step < rising:
        return settings.lr * (step + 1) / rising
    last = steps - 1
    first = rising
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "wsd":
        # The last stable step is where the line starts, so that the first falling step is below lr already.
        first = max(rising, steps - round(settings.decay_fraction * steps) - 1)
    done = max(0, step - first) / max(1, last - first)
    share = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.lr * (settings.final_lr_fraction + (1 - settings.final_lr_fraction) * share)
