"""Other places that a run's numbers go to: TensorBoard's event files, and wandb or trackio if they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from .config import LoggingConfig, TrainConfig, flat_settings
from .progress import StepMetrics

__all__ = ["Trackers", "tracker_problems"]


def tracker_problems(config: LoggingConfig) -> list[str]:
    """What is asked for and not installed, one line each."""
    problems = []
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        problems.append("logging.tensorboard: it is not installed; pip install 'dsv4-fsdp[tensorboard]'")
    if config.tracker != "none" and importlib.util.find_spec(config.tracker) is None:
        problems.append(f"logging.tracker: {config.tracker} is not installed; pip install {config.tracker}")
    return problems


class Trackers:
    """Sends each step's numbers to what the configuration names. For rank 0 only; a context manager.

    wandb and trackio are called through what they have in common: ``init``, ``log`` and ``finish``.
    """

    def __init__(self, config: TrainConfig, *, tensorboard: Path, name: str) -> None:
        self._writer: Any = None
        self._tracker: Any = None
        if config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard))
        if config.logging.tracker != "none":
            self._tracker = importlib.import_module(config.logging.tracker)
            self._tracker.init(project=config.logging.project, name=name, config=flat_settings(config))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._tracker is not None:
            self._tracker.finish()

    def record(self, row: StepMetrics) -> None:
        """Send one step; what was not measured in it is left out."""
        numbers = {key: value for key, value in asdict(row).items() if key != "step" and value is not None}
        if self._writer is not None:
            for key, value in numbers.items():
                self._writer.add_scalar(f"train/{key}", value, row.step)
        if self._tracker is not None:
            self._tracker.log(numbers, step=row.step)
