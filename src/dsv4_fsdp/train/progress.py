"""What a run shows while it runs: a progress bar on a terminal, plain lines elsewhere, and ``metrics.jsonl`` always."""

from __future__ import annotations

import json
import math
import resource
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO

import rich.progress
import torch
from rich.console import Console

__all__ = ["Progress", "StepMetrics", "peak_memory_bytes"]

_PLAIN_LINES = 20


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, and one line of ``metrics.jsonl``. A number that is not finite is written as null.

    Attributes:
        step: counts from 1.
        loss: mean over the step's ``tokens``, of all ranks, in nats.
        grad_norm: of all ranks' gradients, before clipping.
        lr: the learning rate of the step.
        tokens: supervised tokens, of all ranks.
        tokens_per_s: ``tokens`` by the step's own time.
        ranks_without_window: on how many ranks some compressor closed no window (their sequences were too short).
        skipped_steps: steps left out so far because a loss or gradient was not finite.
        elapsed_s: since training began, or went on after a resume.
        memory_bytes: peak so far on rank 0: of its accelerator, or without one of the process.
        data_s, compute_s, reduce_s, optimizer_s: where the step's time went on rank 0: making the batches; forward and
            backward, with the collectives in them; the step's one reduction, which waits for the slowest rank; clipping
            and optimizer.
        checkpoint_s: what saving after the step before this one took; 0 for most.
        eval_loss: mean over the evaluation's tokens after this step; null in steps without one.
        expert_load: the busiest expert's tokens over the mean, of the worst top-k router; null without such.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    ranks_without_window: int
    skipped_steps: int
    elapsed_s: float
    memory_bytes: int
    data_s: float
    compute_s: float
    reduce_s: float
    optimizer_s: float
    checkpoint_s: float = 0.0
    eval_loss: float | None = None
    expert_load: float | None = None

    def to_json(self) -> str:
        """One line. JSON has no nan, and readers choke on Python's."""
        values = asdict(self)
        return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()})


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held so far: on its accelerator, or in RAM if it has none."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Progress:
    """Shows and writes the steps of a run. For rank 0 only.

    Args:
        steps: how many there will be.
        metrics: the file to write; a resumed run adds to it.
        done: steps that were made before.
        console: where to show them; by default the terminal, or whatever stdout is.
    """

    def __init__(self, *, steps: int, metrics: Path, done: int = 0, console: Console | None = None) -> None:
        self._steps = steps
        self._metrics = metrics
        self._console = Console() if console is None else console
        self._file: IO[str] | None = None
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:>{task.fields[digits]}}/{task.total}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            rich.progress.TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, digits=len(str(steps)), numbers="")

    def __enter__(self) -> Progress:
        # Line by line, so that a run that is killed has told everything up to then.
        self._file = self._metrics.open("a", buffering=1)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._file is not None:
            self._file.close()

    def record(self, row: StepMetrics) -> None:
        """Take note of one finished step."""
        assert self._file is not None, "record() outside of the with statement"
        print(row.to_json(), file=self._file)
        numbers = f"loss {row.loss:.3f}  grad {row.grad_norm:.2f}  lr {row.lr:.1e}  {row.tokens_per_s:,.0f} tokens/s"
        numbers += f"  {row.memory_bytes / 2**20:,.0f} MiB"
        if row.eval_loss is not None:
            numbers += f"  eval {row.eval_loss:.3f}"
        if row.skipped_steps:
            numbers += f"  {row.skipped_steps} skipped"
        self._bar.update(self._task, completed=row.step, numbers=numbers)
        every = max(1, self._steps // _PLAIN_LINES)
        if self._bar.disable and (row.step == 1 or row.step % every == 0 or row.step == self._steps):
            elapsed = timedelta(seconds=round(row.elapsed_s))
            print(f"step {row.step:>{len(str(self._steps))}}/{self._steps}  {numbers}  {elapsed}", flush=True)
