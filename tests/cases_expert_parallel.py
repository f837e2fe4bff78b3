"""Expert parallelism beside FSDP2, in ranks: against the unsharded model, and against its plan."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from cases_parity import batches_for
from reference import LockstepResult, Recorder, lockstep, logits_of, token_loss
from tiny_models import tiny_batch, tiny_transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import ShardingPlan, parallelize, plan_sharding
from dsv4_fsdp.expert_parallel import make_expert_mesh
from dsv4_fsdp.names import canonical_name
from dsv4_fsdp.torch_private import parameter_groups

FP32 = MixedPrecisionPolicy(torch.float32, torch.float32)


def meshes(shape: tuple[int, ...], expert_parallel: int) -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return mesh, make_expert_mesh(mesh, expert_parallel)


def ep_lockstep(
    shape: tuple[int, ...],
    expert_parallel: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_experts: int = 4,
    **kwargs: Any,
) -> LockstepResult:
    """One step beside the unsharded model, each rank with a sequence of another length."""
    mesh, expert_mesh = meshes(shape, expert_parallel)
    build = functools.partial(tiny_transformers, dtype=dtype, n_routed_experts=num_experts)
    if dtype == torch.float32:
        kwargs["mp_policy"] = FP32
    return lockstep(
        build,
        lambda model: parallelize(model, mesh, expert_mesh=expert_mesh, **kwargs),
        batches_for("transformers"),
        # Experts and the rest are on two meshes, which one foreach kernel cannot take.
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2, foreach=False),
    )


@dataclass
class Applied:
    plan: ShardingPlan
    planned_before: ShardingPlan
    """Of the model before its experts were dealt, without a process group."""
    shard_bytes: dict[str, list[int]]
    collectives: dict[str, int]


def apply_and_step(shape: tuple[int, ...], expert_parallel: int, **kwargs: Any) -> Applied:
    """Parallelize, read the groups' padded sizes, and count the collectives of one forward and backward."""
    model = tiny_transformers()
    before = plan_sharding(model, mesh_shape=shape, expert_parallel=expert_parallel, **kwargs)
    mesh, expert_mesh = meshes(shape, expert_parallel)
    plan = parallelize(model, mesh, expert_mesh=expert_mesh, **kwargs)
    shard_bytes: dict[str, list[int]] = {}
    for name, group in parameter_groups(model):
        padded = sum(p.padded_sharded_param_size.numel() * p.sharded_param.dtype.itemsize for p in group.fsdp_params)
        shard_bytes.setdefault(canonical_name(name), []).append(padded)
    batch = tiny_batch("transformers", 33)
    with Recorder() as recorder:
        token_loss(logits_of(model(input_ids=batch.input_ids)), batch).backward()
    counts: dict[str, int] = {}
    for collective in recorder.collectives:
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
    return Applied(plan, before, shard_bytes, counts)
