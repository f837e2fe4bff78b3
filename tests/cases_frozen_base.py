"""What the ranks do in test_frozen_base.py: runs whose checkpoints leave the frozen base where it is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from cases_optimizer_and_checkpoint import fingerprint
from cases_train_runs import run

from dsv4_fsdp.errors import CheckpointError
from dsv4_fsdp.train import checkpoints, loop
from dsv4_fsdp.train.config import ModelConfig
from dsv4_fsdp.train.ranks import RanksDiffer

Rows = list[tuple[int, float, float]]


def leg(folder: Path, settings: dict[str, str], *, stop_after: int | None = None) -> tuple[Rows, str, str]:
    """Go on with the run in ``folder``: its steps, and fingerprints of model and optimizer before and after them."""
    found: list[str] = []

    def make_steps(training: Any, *args: Any) -> Any:
        found.append(fingerprint(training.sharded.model, training.optimizer))
        reason = steps(training, *args)
        found.append(fingerprint(training.sharded.model, training.optimizer))
        return reason

    steps = loop._make_steps
    with mock.patch.object(loop, "_make_steps", make_steps):
        rows = run(folder, settings, stop_after=stop_after)
    return rows, *found


def run_that_holds_all(folder: Path, settings: dict[str, str]) -> Rows:
    """A run as it was before frozen weights were left out, stopped after its second step."""
    with mock.patch.object(ModelConfig, "leaves_out_base", False):
        return run(folder, settings, stop_after=2)


def refused(folder: Path, settings: dict[str, str], *, other_on_rank: int | None = None) -> str:
    """The error of going on with the run in ``folder``, before any step.

    Args:
        other_on_rank: this rank alone sees another base.
    """
    seen = contextlib.nullcontext()
    if dist.get_rank() == other_on_rank:
        seen = mock.patch.object(checkpoints, "refuse_other_base", side_effect=CheckpointError("it is another"))
    try:
        with seen:
            run(folder, settings)
    except CheckpointError as error:
        return str(error)
    return "no error"


def started_with_another_base(folder: Path, settings: dict[str, str]) -> str:
    """The error of a new run of which rank 1 reads other files than rank 0."""
    other = {"config.json": "0"} if dist.get_rank() == 1 else {"config.json": "1"}
    try:
        with mock.patch.object(checkpoints, "checkpoint_digests", return_value=other):
            run(folder, settings)
    except RanksDiffer as error:
        return str(error)
    return "no error"
