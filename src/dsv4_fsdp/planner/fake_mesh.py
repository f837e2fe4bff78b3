"""A mesh without other processes, on torch's fake process group. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dsv4_fsdp.torch_private import fake_store

__all__ = ["fake_mesh"]


@contextmanager
def fake_mesh(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A mesh of ``shape`` seen from rank 0, with no other process: collectives do nothing and return at once.

    Raises ``RuntimeError`` if this process has a default process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a plan is checked in a process without a process group, and this one has one already")
    world_size = 1
    for size in shape:
        world_size *= size
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    finally:
        dist.destroy_process_group()
