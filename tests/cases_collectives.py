"""Steps whose collectives are recorded; run inside ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from cases_parity import BF16, blocks_of, mesh_of, whole_model, with_master_weights
from reference import LockstepResult, Recorder, lockstep, token_loss
from tiny_models import ModelKind, tiny_batch, tiny_nemo
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dsv4_fsdp.fsdp
from dsv4_fsdp import ShardingPlan, parallelize
from dsv4_fsdp.alignment import freeze_indexers

EIGHT_BLOCKS = (0, 128, 4, 128) * 2


def shard_blocks_head_root(function: object, model: nn.Module, mesh: object, **kwargs: object) -> None:
    """Blocks, then the fp32 head as its own unit, then the root: what NeMo AutoModel's parallelizer does."""
    freeze_indexers(model)
    for block in model.get_submodule("model.layers").children():
        function(block, mesh=mesh, mp_policy=BF16, **kwargs)
    head_policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    function(model.get_submodule("lm_head"), mesh=mesh, mp_policy=head_policy, **kwargs)
    function(model, mesh=mesh, mp_policy=BF16, **kwargs)


def eight_nemo_blocks(units: str) -> LockstepResult:
    """One step of the 8-block NeMo model at 256 tokens, sharded by ``units``: ours or NeMo AutoModel's own function."""
    mesh = mesh_of((2,))
    build = functools.partial(tiny_nemo, compress_ratios=EIGHT_BLOCKS)

    def shard(model: nn.Module) -> None:
        if units == "nemo-automodel":
            from nemo_automodel.components.models.deepseek_v4.fsdp import fully_shard_deepseek_v4 as function

            shard_blocks_head_root(function, model, mesh)
        elif units == "root":
            parallelize(model, mesh, island_units="root")
        else:
            shard_blocks_head_root(dsv4_fsdp.fsdp.fully_shard_deepseek_v4, model, mesh, island_units=units)

    return lockstep(build, shard, [tiny_batch("nemo", 256, seed=dist.get_rank())], record=True)


def recorded_step(
    kind: ModelKind, mesh_shape: tuple[int, ...], *, master_weights: bool = False, **kwargs: Any
) -> tuple[ShardingPlan, list, list]:
    """The plan, and the collectives of one forward and of one backward, in order."""
    model = with_master_weights(kind) if master_weights else whole_model(kind)
    plan = parallelize(model, mesh_of(mesh_shape), **kwargs)
    batch = tiny_batch(kind, 40, seed=dist.get_rank())
    with Recorder() as forward:
        loss = token_loss(model(input_ids=batch.input_ids).logits, batch)
    with Recorder() as backward:
        loss.backward()
    assert math.isfinite(loss.item())
    return plan, forward.collectives, backward.collectives


def reductions_of_a_thawed_block(kind: ModelKind) -> set[torch.dtype]:
    """In what a block's gradients are reduced that was frozen, islands too, for the first step."""
    model = whole_model(kind)
    block = blocks_of(model)[1]
    block.requires_grad_(False)
    parallelize(model, mesh_of((dist.get_world_size(),)))
    batch = tiny_batch(kind, 40, seed=dist.get_rank())
    for frozen in (True, False):
        block.requires_grad_(not frozen)
        freeze_indexers(model)
        with Recorder() as step:
            token_loss(model(input_ids=batch.input_ids).logits, batch).backward()
    assert any(param.grad is not None for param in block.parameters())
    return {c.dtype for c in step.collectives if c.kind == "reduce_scatter"}
