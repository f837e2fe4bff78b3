"""The ranks of a run: joining and leaving the process group, and agreeing before anything depends on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dsv4_fsdp.errors import Dsv4FsdpError

__all__ = ["Ranks", "RanksDiffer", "join_ranks"]

# How long a rank may keep the others waiting: longer than the check of an export in a fresh process takes.
_TIMEOUT = timedelta(minutes=10)


class RanksDiffer(Dsv4FsdpError, RuntimeError):
    """The ranks were about to do different things together."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank, world_size: as in ``torch.distributed``.
        device: this rank's own device.
        mesh: all ranks, one axis named ``shard``.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def wait(self) -> None:
        """Return once all ranks are here. An all-reduce, so that it goes where gradients go."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def agree(self, values: Mapping[str, str]) -> None:
        """Raise ``RanksDiffer`` on all ranks alike unless each has the same ``values``; names what and who differs."""
        everyone: list[Mapping[str, str] | None] = [None] * self.world_size
        dist.all_gather_object(everyone, dict(values))
        if problem := disagreement([dict(theirs or {}) for theirs in everyone]):
            raise RanksDiffer(problem)


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the process group that torchrun's environment describes, and leave it whatever happens.

    An exception is written to torchrun's error file *before* leaving: leaving breaks the other ranks' collectives, and
    whoever reads the files must be able to tell which came first.
    """
    errors = get_error_handler()
    errors.initialize()
    try:
        yield _join()
    except Exception as error:
        errors.record_exception(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join() -> Ranks:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    else:
        # Written for CUDA and NCCL, but not run yet: no such machine was at hand.
        device = torch.device(accelerator.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(timeout=_TIMEOUT, device_id=device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return Ranks(dist.get_rank(), dist.get_world_size(), device, mesh)


def disagreement(everyone: list[dict[str, str]]) -> str | None:
    """In words, what differs between the ranks' values; ``None`` if nothing does."""
    lines = []
    for name in everyone[0]:
        holders: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            holders.setdefault(values.get(name, "(nothing)"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"the ranks differ in: {name}")
            lines += [f"  {value} on {_ranks(ranks)}" for value, ranks in holders.items()]
    if not lines:
        return None
    lines.append("what to do: give every rank the same code, library versions, command line and data.")
    return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
