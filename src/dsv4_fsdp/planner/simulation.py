"""Check a plan against the real thing: run :func:`dsv4_fsdp.parallelize` on the meta model with a fake process group.

What ``fully_shard`` did is then read off the live parameter groups, not guessed: the same code as in training, at any
number of ranks, on one CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from dsv4_fsdp.expert_parallel import make_expert_mesh
from dsv4_fsdp.names import canonical_name
from dsv4_fsdp.parallelize import parallelize
from dsv4_fsdp.plan import ShardingPlan
from dsv4_fsdp.torch_private import parameter_groups

from .fake_mesh import fake_mesh

__all__ = ["simulate"]


def simulate(model: nn.Module, plan: ShardingPlan, *, fp32_params: Sequence[str] = ()) -> list[str]:
    """Shard ``model`` (on meta, changed in place) as ``plan`` says; return what is not as planned, a sentence each.

    Compares, for every parameter group of every unit, the bytes of its shards with padding and the size of its
    all-gather; ``parallelize`` itself has compared dtypes, units and groups of every parameter by then.

    Args:
        fp32_params: islands beyond the class's lists, which the plan was made with.
    """
    reshard = next((u.reshard_after_forward for u in plan.units if u.role == "block"), True)
    with fake_mesh(plan.mesh_shape) as mesh, _quiet():
        applied = parallelize(
            model,
            mesh,
            island_units=plan.island_units,
            reshard_after_forward=True if reshard is None else reshard,
            activation_checkpointing=plan.activation_checkpointing,
            fp32_params=tuple(fp32_params) or None,
            expert_mesh=make_expert_mesh(mesh, plan.expert_parallel) if plan.expert_parallel > 1 else None,
        )
    found = [] if applied.hash == plan.hash else ["parallelize applied another plan than the one shown"]
    shard_sizes = {unit.fqn: plan.shard_size(unit) for unit in plan.units}
    live: dict[str, list[tuple[int, int]]] = {}
    for name, group in parameter_groups(model):
        numels = [
            (p.padded_sharded_param_size.numel(), p.sharded_param.dtype.itemsize, p.mp_policy.param_dtype)
            for p in group.fsdp_params
        ]
        shard_size = shard_sizes.get(canonical_name(name), plan.mesh_shape[-1])
        shard_bytes = sum(numel * itemsize for numel, itemsize, _ in numels)
        gathered = shard_size * sum(
            numel * (itemsize if compute is None else compute.itemsize) for numel, itemsize, compute in numels
        )
        live.setdefault(canonical_name(name), []).append((shard_bytes, gathered))
    for unit in plan.units:
        planned = [(group.shard_bytes, group.all_gather_bytes) for group in unit.groups]
        got = live.get(unit.fqn, [])
        if got != planned:
            found.append(f"unit {unit.fqn or '(root)'}: planned (shard, gathered) bytes {planned}, live {got}")
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the message on frozen indexers: the plan says it."""
    logger = logging.getLogger("dsv4_fsdp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
