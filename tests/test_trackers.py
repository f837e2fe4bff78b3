"""A run's numbers go where the configuration says, and a tracker that is not there is said before the run starts."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsv4_fsdp.train.config import LoggingConfig, resolve
from dsv4_fsdp.train.progress import StepMetrics
from dsv4_fsdp.train.trackers import Trackers, tracker_problems


def row(step: int, **over: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": 2.5 - step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "ranks_without_window": 0,
        "skipped_steps": 0,
        "elapsed_s": 2.0 * step,
        "memory_bytes": 2**30,
        "data_s": 0.1,
        "compute_s": 1.5,
        "reduce_s": 0.1,
        "optimizer_s": 0.3,
    }
    return StepMetrics(**(values | over))


def test_tensorboard_gets_every_number_of_every_step(tmp_path: Path) -> None:
    """By name and step; what was not measured in a step has no point there."""
    config = resolve({"logging.tensorboard": "true"})
    with Trackers(config, tensorboard=tmp_path, name="run") as trackers:
        trackers.record(row(1))
        trackers.record(row(2, eval_loss=3.5))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 1.5), (2, 0.5)]
    assert [(point.step, point.value) for point in events.Scalars("train/eval_loss")] == [(2, 3.5)]
    assert "train/expert_load" not in events.Tags()["scalars"]
    assert "train/step" not in events.Tags()["scalars"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_is_started_fed_and_finished(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the three calls that wandb and trackio share; neither is installed here, so a module stands in for it."""
    calls: list[tuple[str, Any]] = []
    module = types.ModuleType(name)
    module.init = lambda **kwargs: calls.append(("init", kwargs))  # type: ignore[attr-defined]
    module.log = lambda numbers, *, step: calls.append(("log", (step, numbers["loss"])))  # type: ignore[attr-defined]
    module.finish = lambda: calls.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    config = resolve({"logging.tracker": name, "logging.project": "mine"})
    with Trackers(config, tensorboard=tmp_path, name="run") as trackers:
        trackers.record(row(1))
    assert [kind for kind, _ in calls] == ["init", "log", "finish"]
    assert calls[0][1]["project"] == "mine"
    assert calls[0][1]["name"] == "run"
    assert calls[0][1]["config"]["optimizer.lr"] == "0.002"
    assert calls[1][1] == (1, 1.5)
    assert list(tmp_path.iterdir()) == []


def test_without_either_nothing_is_written(tmp_path: Path) -> None:
    """The default: ``metrics.jsonl`` alone."""
    with Trackers(resolve({}), tensorboard=tmp_path, name="run") as trackers:
        trackers.record(row(1))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_named() -> None:
    """With the command that mends it."""
    assert tracker_problems(LoggingConfig()) == []
    assert tracker_problems(LoggingConfig(tensorboard=True)) == []
    assert tracker_problems(LoggingConfig(tracker="wandb")) == [
        "logging.tracker: wandb is not installed; pip install wandb"
    ]
