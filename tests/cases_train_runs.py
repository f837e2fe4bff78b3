"""What the ranks do in test_train_runs.py: whole runs of the trainer's loop, on the pool's processes."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dsv4_fsdp.expert_parallel import make_expert_mesh
from dsv4_fsdp.train import loop
from dsv4_fsdp.train.checkpoints import CheckpointError
from dsv4_fsdp.train.config import TrainConfig, resolve
from dsv4_fsdp.train.progress import StepMetrics
from dsv4_fsdp.train.ranks import Ranks
from dsv4_fsdp.train.run_folder import RunFolder
from dsv4_fsdp.train.stopping import StopRequests
from dsv4_fsdp.train.trackers import Trackers


def join_pool(config: TrainConfig) -> Ranks:
    """The pool's own process group as the trainer would make one for ``config``."""
    names = ("shard",) if config.mesh.replicate == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=names)
    expert_mesh = make_expert_mesh(mesh, config.mesh.expert_parallel) if config.mesh.expert_parallel > 1 else None
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"), mesh, expert_mesh)


def run(
    folder: Path, settings: dict[str, str], *, stop_after: int | None = None, steps_only: bool = True
) -> list[tuple[int, float, float]]:
    """Train in ``folder`` to the end, or as if told to stop after so many steps.

    Returns step, loss and gradient norm of the steps that this call made, on rank 0; elsewhere nothing.

    Args:
        steps_only: leave out what surrounds the steps: audit, rehearsal of the export, export.
    """
    config = resolve(settings | {"nproc": str(dist.get_world_size())})
    ranks = join_pool(config)
    rows: list[StepMetrics] = []

    def stop_requested(self: StopRequests) -> bool:
        return stop_after is not None and ranks.is_first and len(rows) + 1 >= stop_after

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(loop, "show_notices"))  # they would change a shared process
        stack.enter_context(mock.patch.object(Trackers, "record", lambda self, row: rows.append(row)))
        stack.enter_context(mock.patch.object(StopRequests, "requested", stop_requested))
        for name in ("_audit", "dry_export", "publish_export") if steps_only else ():
            stack.enter_context(mock.patch.object(loop, name, return_value=None))
        loop.train(config, RunFolder(folder), ranks)
    return [(row.step, row.loss, row.grad_norm) for row in rows]


def full_while_saving(folder: Path, settings: dict[str, str]) -> str:
    """Go on with the run in ``folder`` while no file may be longer than 300 kB; the error's text.

    A real limit, since what torch's archive writer makes of a write that falls short is its own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        run(folder, settings)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "no error"
