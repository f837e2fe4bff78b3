"""The ranks of a run: joining and leaving the process group, and agreeing before anything depends on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from dsv4_fsdp.errors import Dsv4FsdpError
from dsv4_fsdp.expert_parallel import make_expert_mesh

from .config import MeshConfig

__all__ = ["Ranks", "RanksDiffer", "RanksMissing", "join_ranks"]


class RanksDiffer(Dsv4FsdpError, RuntimeError):
    """The ranks were about to do different things together."""


class RanksMissing(Dsv4FsdpError, RuntimeError):
    """Not all ranks came."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank, world_size: as in ``torch.distributed``.
        local_rank: among the processes of this machine.
        device: this rank's own device.
        mesh: all ranks: one axis ``shard``, or ``replicate`` and ``shard``.
        expert_mesh: the same ranks with an axis ``expert``, or ``None`` without expert parallelism.
        store: where the ranks met.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None
    store: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def axes(self) -> dict[str, int]:
        """Name and size of each axis, for what is written down."""
        meshes = [self.mesh] + ([] if self.expert_mesh is None else [self.expert_mesh])
        return {name: mesh[name].size() for mesh in meshes for name in mesh.mesh_dim_names or ()}

    def wait(self) -> None:
        """Return once all ranks are here. An all-reduce, so that it goes where gradients go."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def wait_patiently(self, what: str, *, told_to_stop: Callable[[], bool]) -> None:
        """Return once all ranks are here, however long that takes: for work that only some do, outside of training.

        A rank that fails meanwhile does not come; whoever started the ranks then tells the others to stop. There is
        nothing to save yet, so they leave at once.

        Raises:
            RanksMissing: ``told_to_stop``.
        """
        if self.store is None:
            self.wait()
            return
        self.store.set(f"{what}/{self.rank}", "done")
        for other in range(self.world_size):
            while not self.store.check([f"{what}/{other}"]):
                if told_to_stop():
                    raise RanksMissing(
                        f"told to stop while waiting for rank {other} to be done with: {what}.\n"
                        "expected: to be told (by a signal, the file RUN/stop or checkpoint.time_limit_s) in training\n"
                        "got: that before the first step, when there is nothing to save\n"
                        "what to do: if that rank has failed, mend what it says; if not, give the run more time. Then "
                        "start the same command again."
                    )
                time.sleep(0.2)

    def agree(self, values: Mapping[str, str]) -> None:
        """Raise ``RanksDiffer`` on all ranks alike unless each has the same ``values``; names what and who differs."""
        everyone: list[Mapping[str, str] | None] = [None] * self.world_size
        dist.all_gather_object(everyone, dict(values))
        if problem := disagreement([dict(theirs or {}) for theirs in everyone]):
            raise RanksDiffer(problem)


@contextmanager
def join_ranks(config: MeshConfig) -> Iterator[Ranks]:
    """Join the process group that torchrun's environment describes, and leave it whatever happens.

    Everybody is waited for, at most ``start_timeout_s``, before anything else is done; then one all-reduce shows that
    the ranks reach each other.

    An exception is written to torchrun's error file *before* leaving: leaving breaks the other ranks' collectives, and
    whoever reads the files must be able to tell which came first.

    Raises:
        RanksMissing: some did not come; says which.
    """
    errors = get_error_handler()
    errors.initialize()
    try:
        yield _join(config)
    except Exception as error:
        errors.record_exception(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(config: MeshConfig) -> Ranks:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    store, rank, world_size = _meet(config.start_timeout_s)
    timeout = timedelta(seconds=config.timeout_s)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device = torch.device("cpu")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        # Written for CUDA and NCCL, but not run yet: no such machine was at hand.
        device = torch.device(accelerator.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device)
    shard = world_size // config.replicate
    shape, names = ((shard,), ("shard",)) if config.replicate == 1 else ((config.replicate, shard), _HSDP)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    expert_mesh = make_expert_mesh(mesh, config.expert_parallel) if config.expert_parallel > 1 else None
    ranks = Ranks(rank, world_size, local_rank, device, mesh, expert_mesh, store)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if int(total.item()) != world_size:
        raise RanksMissing(f"an all-reduce over {world_size} ranks added up {int(total.item())} of them")
    return ranks


_HSDP = ("replicate", "shard")


def _store(timeout: timedelta) -> tuple[Any, int, int]:
    """The store of torchrun's environment, this rank, and how many there are; does not wait for the others.

    Torchrun's agent holds the store. Where there is none (``srun`` with RANK and WORLD_SIZE set), rank 0 does: torch's
    own rendezvous would have it wait there for everybody, and could not say who did not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        return store, rank, world_size
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is not set") from None
    # Public, but torch does not say so to type checkers.
    make_store = dist.TCPStore  # type: ignore[attr-defined]
    return make_store(address, port, world_size, rank == 0, timeout, wait_for_workers=False), rank, world_size


def _meet(timeout_s: float) -> tuple[Any, int, int]:
    """The store of torchrun's environment, this rank and how many there are, once all have come to it.

    Raises:
        RanksMissing: the place cannot be reached, or ranks did not come in time; says which.
    """
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    try:
        store, rank, world_size = _store(timedelta(seconds=timeout_s))
    except (dist.DistError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RanksMissing(
            f"the ranks' meeting point {where} cannot be reached.\nexpected: an answer within {timeout_s:g} s\n"
            f"got: {first}\nwhere: rank {os.environ.get('RANK', '?')} on {os.uname().nodename}\n"
            "what to do: give every node the same --rdzv-endpoint (or MASTER_ADDR and MASTER_PORT), one that all of "
            "them reach and whose port is free; on one machine leave them out."
        ) from error
    # torchrun starts ranks again with the same store: what a former attempt left must not count.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"dsv4_fsdp/{attempt}", store)
    store.set(f"here/{rank}", os.uname().nodename)
    deadline = time.monotonic() + timeout_s
    missing = list(range(world_size))
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            raise RanksMissing(
                f"{len(missing)} of {world_size} ranks did not come within {timeout_s:g} s.\n"
                f"expected: all of them at {where}\ngot: nothing from {_ranks(missing)}\n"
                "what to do: look at what these printed, or why they were not started; a slow start needs a longer "
                "mesh.start_timeout_s."
            )
        time.sleep(0.05)
    return store, rank, world_size


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
