"""Expert parallelism: the experts of a layer are dealt to ranks, and tokens travel to them.

The ranks that share one sharded model (the shard axis) form groups of ``expert`` ranks. Inside a group each rank holds
its part of every layer's experts, and an all-to-all brings it the tokens that chose them; the groups' copies of a part
are sharded by FSDP2 over the ``expert_shard`` axis, and whole replicas of the model over ``replicate``. All three axes
are views of the same ranks as (replicate, shard)::

    shard:         0  1  2  3       4 ranks, each with its own batch
    expert:       (0  1)(2  3)      2 groups; the first rank of each holds the first half of the experts
    expert_shard: (0     2)(1    3) the two holders of a half share it by FSDP2

The dispatch itself (all-to-all, its backward, the experts on local numbers) is Transformers' ``ep_dispatch_experts``.
A part receives gradients from the batches of its whole replica's ranks, so FSDP2 must divide by their number and not by
that of the ``expert_shard`` axis: :func:`average_over_batches` says so to the unit.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .errors import ShardingError
from .model_layout import layout_of

__all__ = ["EXPERT_AXES", "average_over_batches", "dispatch_experts", "make_expert_mesh", "sharding_axes"]

EXPERT_AXES = ("replicate", "expert_shard", "expert")


def make_expert_mesh(mesh: DeviceMesh, expert_parallel: int) -> DeviceMesh:
    """The ranks of ``mesh``, which are all of the default group, as (replicate, expert_shard, expert).

    Every rank calls it. ``expert_parallel`` must divide the last axis of ``mesh``.
    """
    replicate = mesh.size(0) if mesh.ndim == 2 else 1
    shard = mesh.size(mesh.ndim - 1)
    if expert_parallel < 1 or shard % expert_parallel:
        raise ShardingError(
            "experts cannot be dealt to ranks like this.\n"
            f"expected: a divisor of the shard axis' size {shard}\ngot: {expert_parallel}\nwhere: expert_parallel\n"
            "what to do: choose a number that divides the ranks that share a model, or 1."
        )
    return init_device_mesh(
        mesh.device_type, (replicate, shard // expert_parallel, expert_parallel), mesh_dim_names=EXPERT_AXES
    )


def sharding_axes(mesh: DeviceMesh, expert_mesh: DeviceMesh) -> DeviceMesh:
    """The axes of ``expert_mesh`` that FSDP2 shards dispatched experts over, with the replicas if ``mesh`` has them."""
    return expert_mesh["replicate", "expert_shard"] if mesh.ndim == 2 else expert_mesh["expert_shard"]


def dispatch_experts(model: nn.Module, expert_mesh: DeviceMesh) -> None:
    """Deal the experts of every layer of a Transformers model to the ``expert`` axis; before FSDP2, meta device or not.

    Afterwards each expert parameter is a DTensor, sharded on dim 0 (the experts). Dispatched ones are left as they are.

    Raises:
        ShardingError: the model is none of Transformers', or has no experts to deal.
    """
    names = layout_of(model).experts
    if not names:
        raise ShardingError(
            "experts cannot be dealt to ranks.\n"
            "expected: a mixture-of-experts model of Transformers with an `ep_plan`\n"
            f"got: {type(model).__name__}\nwhat to do: leave expert_mesh out."
        )
    if all(isinstance(param, DTensor) for name in names for param in model.get_submodule(name).parameters()):
        return
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan: dict[str, Any] = {}
    for name in names:
        for param_name, _ in model.get_submodule(name).named_parameters(recurse=False):
            plan[f"{name}.{param_name}"] = "grouped_gemm"
        plan[name] = "ep_dispatch_experts"
    # Transformers' dispatch asks which ranks hold the same batch (tensor parallelism): each rank is alone in that.
    alone = init_device_mesh(expert_mesh.device_type, (expert_mesh.size(), 1), mesh_dim_names=("ranks", "alone"))
    apply_expert_parallelism(model, expert_mesh["expert"], alone["alone"], plan, ep_implementation="all_to_all")


def average_over_batches(unit: FSDPModule, expert_mesh: DeviceMesh) -> None:
    """Make the unit of dispatched experts divide its gradients by the number of all ranks' batches.

    Where nobody shares a part (an ``expert_shard`` axis of 1) FSDP2 reduces nothing and divides by itself; elsewhere it
    would scale inside the reduction, which gloo cannot and NCCL does wrongly in bf16, so it sums and divides after.
    """
    unit.set_gradient_divide_factor(float(expert_mesh.size()))
    if expert_mesh["expert_shard"].size() > 1:
        unit.set_force_sum_reduction_for_comms(True)
