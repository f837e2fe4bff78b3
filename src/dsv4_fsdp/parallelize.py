"""Shard a whole model: the story of one DeepSeek-V4 under FSDP2, top to bottom in one function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from .alignment import freeze_indexers, tie_compressors
from .contract import IslandPredicate, contract_of, default_mp_policy, model_speaks
from .errors import ShardingError
from .expert_parallel import average_over_batches, dispatch_experts, sharding_axes
from .fsdp import fully_shard_deepseek_v4
from .grouped_unit import refuse_ambiguous_dtypes, refuse_foreign_mesh, refuse_sharded_modules, shard_unit
from .live_precision import differences, read_back
from .names import canonical_name
from .plan import IslandUnits, ShardingPlan, UnitPlan, islands_left_to_root, plan_sharding
from .recomputation import checkpoint
from .torch_private import require_grouped_units

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    island_units: IslandUnits = "grouped",
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy | None = None,
    activation_checkpointing: bool | int = False,
    fp32_params: Iterable[str] | IslandPredicate | None = None,
    restore_fp32: bool = False,
    freeze_indexer: bool = True,
    expert_mesh: DeviceMesh | None = None,
) -> ShardingPlan:
    """Shard ``model`` in place: embedding, blocks, head and root, its fp32 islands intact; return the plan applied.

    Works on Transformers' and NeMo AutoModel's DeepSeek-V4 and on any Transformers model that lists its fp32 parameters
    in ``_keep_in_fp32_modules_strict``. Call it on every rank, with the same model, before making the optimizer.

    What padding along its first dim would make larger by half is cut along another (:func:`~dsv4_fsdp.plan.even_dim`).
    After a forward without grad, head and root are sharded again, unless ``reshard_after_forward`` is ``False``.

    Args:
        model: the unsharded model, on the mesh's device or on the meta device (materialise and load afterwards).
        mesh: one axis (FSDP), or two as (replicate, shard) (HSDP).
        mp_policy: default ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)``. Islands are fp32
            whatever it says. Its ``output_dtype`` and ``cast_forward_inputs`` apply to the root only: inside, tensors
            pass from unit to unit as in the unsharded model.
        island_units: how islands are isolated. ``"grouped"``: one unit per block, one parameter group per dtype in it.
            ``"root"``: the islands of all blocks are the root's: gathered once at the start of a forward and reduced
            once at the end of backward, two collectives in place of three per block, for as much memory as all islands
            and their gradients take. ``"nested"``: each island module is a unit of its own (NeMo AutoModel's layout
            only, more collectives).
        reshard_after_forward: for embedding and blocks, as in ``fully_shard``.
        offload_policy: as in ``fully_shard``.
        activation_checkpointing: recompute each block in backward (non-reentrant), or every n-th if it is a number n,
            the first block among them; none that does so already. A frozen indexer's choice is kept
            (:mod:`~dsv4_fsdp.recomputation`). Parameter names then contain ``_checkpoint_wrapped_module``; state dicts
            do not.
        fp32_params: further islands, see :func:`~dsv4_fsdp.contract.contract_of`; an empty collection says that there
            are none, where the model itself lists nothing.
        restore_fp32: upcast islands that are stored below fp32; lost bits do not come back.
        freeze_indexer: freeze the Lightning Indexers, which get no gradient (a log message says so).
        expert_mesh: deal the experts of each layer to the ``expert`` axis of this mesh, see
            :func:`~dsv4_fsdp.expert_parallel.make_expert_mesh`. Transformers models only.

    Raises:
        ContractError: an island is stored below fp32, or ``fp32_params`` matches nothing.
        ShardingError: no blocks found, an impossible mesh, tied parameters in two units, nested units asked for where
            islands are bare parameters.
        UnsupportedTorch: torch < 2.12.
    """
    require_grouped_units()
    refuse_foreign_mesh(mesh)
    refuse_sharded_modules([model], None)
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ShardingError(
            "a mesh of two axes needs names for them.\nexpected: mesh_dim_names=('replicate', 'shard') or others\n"
            f"got: a mesh of shape {tuple(mesh.shape)} without names\n"
            "what to do: pass mesh_dim_names to init_device_mesh; the first axis replicates, the second shards."
        )
    if expert_mesh is not None:
        dispatch_experts(model, expert_mesh)
    policy = default_mp_policy() if mp_policy is None else mp_policy
    contract = contract_of(model, mp_policy=policy, fp32_params=fp32_params, restore_fp32=restore_fp32)
    plan = plan_sharding(
        model,
        mesh_shape=tuple(mesh.shape),
        mp_policy=policy,
        island_units=island_units,
        reshard_after_forward=reshard_after_forward,
        activation_checkpointing=activation_checkpointing,
        freeze_indexer=freeze_indexer,
        expert_parallel=1 if expert_mesh is None else expert_mesh["expert"].size(),
        contract=contract,
    )
    if fp32_params is None and not model_speaks(model):
        refuse_ambiguous_dtypes([model], list(model.parameters()), policy)

    if freeze_indexer:
        freeze_indexers(model)
    if island_units != "nested":
        tie_compressors(model)
    if activation_checkpointing:
        _checkpoint_blocks(model, plan)

    modules = {canonical_name(name): module for name, module in model.named_modules()}
    common: dict[str, Any] = {} if offload_policy is None else {"offload_policy": offload_policy}
    if placement := _placements(model, plan):
        common["shard_placement_fn"] = lambda param: placement.get(id(param))
    inner_policy = replace(policy, output_dtype=None)
    if island_units != "nested":  # these need the cast: each has one dtype, and its neighbours another
        inner_policy = replace(inner_policy, cast_forward_inputs=False)
    left_to_root: list[nn.Parameter] = []
    if island_units == "root":
        left_to_root = islands_left_to_root(model, contract, expert_parallel=plan.expert_parallel)
    units: list[tuple[UnitPlan, FSDPModule]] = []
    for unit in plan.units:
        if unit.role == "island":
            continue  # made by the nested call on the block around it
        module = modules[unit.fqn]
        kwargs = {**common, "mesh": mesh, "mp_policy": policy if unit.role == "root" else inner_policy}
        if unit.reshard_after_forward is not None:
            kwargs["reshard_after_forward"] = unit.reshard_after_forward
        if unit.role == "head" and unit.cast_inputs_to == "float32":
            kwargs["mp_policy"] = _fp32_policy()
        if unit.role == "experts":
            assert expert_mesh is not None
            kwargs["mesh"] = sharding_axes(mesh, expert_mesh)
        if island_units == "nested" and unit.role in ("block", "root"):
            fully_shard_deepseek_v4(module, **kwargs, island_units="nested")
        else:
            if unit.role == "block" and left_to_root:
                kwargs["ignored_params"] = set(left_to_root)
            adopted = left_to_root if unit.role == "root" else []
            shard_unit(module, **kwargs, fp32_params=contract, adopted=adopted)
        assert isinstance(module, FSDPModule)
        if not unit.unshard_in_backward:
            module.set_unshard_in_backward(False)
        if unit.role == "experts":
            assert expert_mesh is not None
            average_over_batches(module, expert_mesh)
        units.append((unit, module))

    _prefetch(plan, units, backward=island_units != "nested")
    if reshard_after_forward is not False:  # else the caller wants everything to stay gathered
        kept = [module for unit, module in units if unit.role in ("head", "root")]
        model.register_forward_hook(lambda *_: _reshard_if_nothing_follows(kept))
    wrong = differences(read_back(model, plan), plan)
    assert not wrong, "fully_shard built something other than the plan: " + "; ".join(wrong[:5])
    return plan


def _fp32_policy() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True)


def _reshard_if_nothing_follows(kept: list[FSDPModule]) -> None:
    """After a forward without grad: shard what torch would keep gathered for a backward that does not come.

    An optimizer that is made then, or a clipping of gradients, would find whole tensors there and pass them over, and a
    step between this forward and the next would not reach them.
    """
    if not torch.is_grad_enabled():
        for module in kept:
            module.reshard()


def _placements(model: nn.Module, plan: ShardingPlan) -> dict[int, Shard]:
    """The parameters that are not cut along dim 0, by id."""
    dims = {param.fqn: param.shard_dim for unit in plan.units for group in unit.groups for param in group.params}
    named = {canonical_name(name): param for name, param in model.named_parameters()}
    return {id(named[fqn]): Shard(dim) for fqn, dim in dims.items() if dim}


def _checkpoint_blocks(model: nn.Module, plan: ShardingPlan) -> None:
    """Wrap each block for recomputation.

    The block inside the wrapper becomes the unit. Backward gathers it when it reaches the block's output, before it
    recomputes, so recomputing needs no gather of its own.
    """
    raw_names: dict[str, str] = {}  # peft puts words before a block's name; the outermost of several wrappers counts
    for name, _ in model.named_modules():
        raw_names.setdefault(canonical_name(name), name)
    for unit in plan.units:
        if unit.role == "block" and plan.recomputes(unit):
            parent_name, _, child_name = raw_names[unit.fqn].rpartition(".")
            parent = model.get_submodule(parent_name)
            block = model.get_submodule(raw_names[unit.fqn])
            if isinstance(block, CheckpointWrapper) or getattr(block, "gradient_checkpointing", False):
                continue  # it recomputes already, by torch's wrapper or by Transformers' own means
            # Containers (ModuleList, ModuleDict) and plain modules alike keep their children by name.
            wrapper = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, checkpoint_fn=checkpoint)
            parent.register_module(child_name, wrapper)


def _prefetch(plan: ShardingPlan, units: list[tuple[UnitPlan, FSDPModule]], *, backward: bool) -> None:
    """While one unit computes, the gathers of the next are in flight: all of its parameter groups, in running order.

    A block has its own dispatched experts gathered and then the next unit; experts ask for nothing. They are inside of
    the block, so where it is recomputed their forward runs in backward, which would gather the next block once more.

    Backward is the same towards the front, root first. torch's own order (each unit prefetches what ended its forward
    before it) takes the last group alone where the unit at work has but one, as the head has: the last block's other
    groups would then be waited for. ``backward=False`` leaves that order, which nested units need: what ends before a
    block there are its own islands.
    """
    modules = {unit.fqn: module for unit, module in units}
    stages = [[modules[unit.fqn] for unit in stage] for stage in plan.stages if stage[0].role != "island"]
    root = modules[""]
    for (current, *its_experts), (following, *_) in pairwise(stages):
        current.set_modules_to_forward_prefetch([*its_experts, following])
    if backward:
        for (previous, *_), (current, *its_experts) in pairwise([*stages, [root]]):
            current.set_modules_to_backward_prefetch([*reversed(its_experts), previous])
