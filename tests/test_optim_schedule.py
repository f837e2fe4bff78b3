"""The learning rate is a pure function of the step."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_fsdp.train.optimizer_settings import OptimizerSettings
from dsv4_fsdp.train.schedule import learning_rate


def rates(steps: int, **values: Any) -> list[float]:
    settings = OptimizerSettings(**({"lr": 1.0, "final_lr_fraction": 0.0} | values))
    return [learning_rate(step, steps=steps, settings=settings) for step in range(steps)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "cosine"}, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
        ({"schedule": "wsd", "decay_fraction": 0.4}, [1, 1, 1, 0.5, 0]),
        ({"schedule": "wsd", "decay_fraction": 1.0}, [1, 0.75, 0.5, 0.25, 0]),  # nothing stable left: a line
        ({"schedule": "linear", "final_lr_fraction": 0.5}, [1, 0.875, 0.75, 0.625, 0.5]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.5, 0]),
        ({"schedule": "cosine", "warmup_fraction": 0.4}, [0.5, 1, 1, 0.5, 0]),
        ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1]),
        ({"schedule": "wsd", "warmup_steps": 2, "decay_fraction": 0.4}, [0.5, 1, 1, 0.5, 0]),
        ({"warmup_steps": 50}, [0.2, 0.4, 0.6, 0.8, 1]),
        ({"warmup_fraction": 1.0}, [0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_the_rate_rises_to_lr_and_falls_to_its_last_fraction(values: dict[str, Any], expected: list[float]) -> None:
    """Every schedule, by hand, over five steps."""
    assert rates(5, **values) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_run_of_one_step_and_steps_past_the_end_have_a_rate(schedule: Any) -> None:
    """A run that is resumed with fewer steps must not divide by zero or rise again."""
    assert rates(1, schedule=schedule) == [1.0]
    for warmup in (0.0, 1.0):
        settings = OptimizerSettings(lr=1.0, schedule=schedule, final_lr_fraction=0.25, warmup_fraction=warmup)
        assert learning_rate(9, steps=5, settings=settings) == learning_rate(4, steps=5, settings=settings)
