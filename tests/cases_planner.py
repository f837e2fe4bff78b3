"""The cases of ``test_planner.py`` that run in ranks: train one real step, and count what is really there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases_plan import LENGTHS, LINES
from reference import Recorder, logits_of, token_loss
from tiny_models import tiny_batch, tiny_transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dsv4_fsdp import ShardingPlan, parallelize, recomputation, use_windowed_attention
from dsv4_fsdp.alignment import indexer_parameters
from dsv4_fsdp.chunked_loss import with_chunked_loss
from dsv4_fsdp.expert_parallel import make_expert_mesh
from dsv4_fsdp.names import canonical_name
from dsv4_fsdp.torch_private import parameter_groups
from dsv4_fsdp.train.build_model import prepare
from dsv4_fsdp.train.config import ModelConfig
from dsv4_fsdp.train.optimizer_settings import OptimizerSettings
from dsv4_fsdp.train.optimizers import make_optimizer
from dsv4_fsdp.train.optimizers import parameter_groups as parameter_groups_of_trainer

SGD_MOMENTUM = {"sgd": 0.0, "sgd-momentum": 0.9}


@dataclass
class LiveBytes:
    """What one rank held after a step, islands apart: (others, islands) each, and what it sent."""

    plan: ShardingPlan
    shard_coordinate: int
    parameters: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]
    roles: dict[str, tuple[str, str]]
    """Canonical name -> role and algorithm, of the trainer's groups."""
    collectives: list[tuple[str, str, int, int]]
    """(kind, dtype, ranks of the group, payload bytes) of each, in order."""


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def train_a_step(
    line_name: str, mesh_shape: tuple[int, ...], optimizer_name: str, expert_parallel: int = 1
) -> LiveBytes:
    """Parallelize the line's model, run one step, and add up the storages that are live then."""
    line = LINES[line_name]
    model = line.build()
    mesh = mesh_of(mesh_shape)
    expert_mesh = make_expert_mesh(mesh, expert_parallel) if expert_parallel > 1 else None
    plan = parallelize(model, mesh, expert_mesh=expert_mesh, **line.kwargs)
    islands = {p.fqn for unit in plan.units for group in unit.groups for p in group.params if p.island}
    # While the root is gathered it has other parameters registered, so the sharded ones come from the groups.
    params = {canonical_name(name): param for name, param in model.named_parameters()}
    settings = OptimizerSettings(name="adamw" if optimizer_name in SGD_MOMENTUM else optimizer_name, lr=1e-3)
    groups = parameter_groups_of_trainer(model, settings, islands=islands)
    if optimizer_name in SGD_MOMENTUM:
        trained = [param for param in params.values() if param.requires_grad]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            trained, lr=1e-3, momentum=SGD_MOMENTUM[optimizer_name], foreach=False
        )
    else:
        optimizer = make_optimizer(groups, settings, seed=0)
    batch = tiny_batch(line.kind, LENGTHS[line.kind])
    with Recorder() as recorder:
        token_loss(logits_of(model(input_ids=batch.input_ids)), batch).backward()
    optimizer.step()
    params = {canonical_name(name): param for name, param in model.named_parameters()}

    def both(tensors: dict[str, list[torch.Tensor]]) -> tuple[int, int]:
        return (
            _storage_bytes(t for name, ts in tensors.items() if name not in islands for t in ts),
            _storage_bytes(t for name, ts in tensors.items() if name in islands for t in ts),
        )

    return LiveBytes(
        plan,
        mesh.get_coordinate()[-1],
        both({name: [param.detach()] for name, param in params.items()}),
        both({name: [param.grad] for name, param in params.items() if param.grad is not None}),
        both(
            {
                name: [part for value in optimizer.state[param].values() for part in _parts(value)]
                for name, param in params.items()
            }
        ),
        {fqn: (group.role, group.algorithm) for group in groups for fqn in group.fqns},
        [
            (c.kind, str(c.dtype).removeprefix("torch."), c.group_size, _payload(c))
            for c in recorder.collectives
            if not (c.kind == "all_reduce" and c.numel == 1)  # NeMo's own alignment
        ],
    )


def _payload(collective: Any) -> int:
    whole = collective.group_size if collective.kind == "all_gather" else 1
    return int(collective.numel * collective.dtype.itemsize * whole)


def _parts(state: Any) -> list[torch.Tensor]:
    """The tensors that hold an entry of an optimizer's state: torchao's 8-bit ones are made of three."""
    if not isinstance(state, torch.Tensor):
        return []
    local = state.to_local() if isinstance(state, DTensor) else state
    return [local.codes, local.scale, local.qmap] if hasattr(local, "codes") else [state]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each once: padding counts, and a gradient that is part of a larger
    buffer counts as the buffer."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


# --- What autograd keeps ----------------------------------------------------------------------------------------------


class _Kept:
    """What autograd holds in place of a saved tensor: it is kept as long as this lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_by_a_real_forward(
    *,
    batch: int,
    length: int,
    checkpointing: int = 0,
    attention: str = "eager",
    sharded: bool = False,
    expert_parallel: int = 1,
    trained: ModelConfig | None = None,
    chunked: bool = True,
) -> int:
    """Bytes that autograd keeps of a forward with loss on this process's CPU, without parameters and buffers."""
    model = tiny_transformers()
    if trained is not None:
        prepare(model, trained, [])
        for param in indexer_parameters(model).values():
            param.requires_grad_(False)
    model.config._experts_implementation = "grouped_mm"  # type: ignore[union-attr]
    if attention == "windowed":
        use_windowed_attention(model)
    if sharded:
        mesh = mesh_of((dist.get_world_size(),))
        expert_mesh = make_expert_mesh(mesh, expert_parallel) if expert_parallel > 1 else None
        parallelize(model, mesh, activation_checkpointing=checkpointing, expert_mesh=expert_mesh)
    elif checkpointing:
        _checkpoint_blocks(model, checkpointing)
    kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
    inputs: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> _Kept:
        packed = _Kept(tensor)
        kept.add(packed)
        return packed

    def keep_inputs(_: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:  # else nothing of the call survives it
            leaves = tree_leaves((args, kwargs))  # RoPE tables come in a dict
            inputs.extend(value for value in leaves if isinstance(value, torch.Tensor))

    if checkpointing:
        for block in [*model.get_submodule("model.layers").children()][::checkpointing]:
            block.register_forward_hook(keep_inputs, with_kwargs=True)
    ids = torch.randint(0, 128, (batch, length))
    runs: weakref.WeakSet[recomputation.Run] = weakref.WeakSet()  # of blocks that will run again

    def contexts(make: Any = recomputation.contexts) -> tuple[recomputation.Run, recomputation.Run]:
        first, second = make()
        runs.add(second)
        return first, second

    with (
        mock.patch.object(recomputation, "contexts", contexts),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda packed: packed.tensor),
    ):
        if chunked:
            loss = with_chunked_loss(model)(ids, ids).loss_sum
        else:
            logits = model(input_ids=ids, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="sum")
    own = [*model.parameters(), *model.buffers()]
    ours = {(t.to_local() if isinstance(t, DTensor) else t).untyped_storage()._cdata for t in own}
    for _, group in parameter_groups(model):
        for param in group.fsdp_params:
            # What a unit is gathered into; freed or not, it is the unit's and not autograd's.
            ours |= {t.untyped_storage()._cdata for t in param.all_gather_outputs}
    storages = {s._cdata: s for s in (t.untyped_storage() for t in [*(k.tensor for k in kept), *inputs])}
    total = sum(storage.nbytes() for key, storage in storages.items() if key not in ours)
    total += sum(run.kept_bytes for run in runs)
    loss.backward()
    return total


def _checkpoint_blocks(model: nn.Module, every: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    layers = model.get_submodule("model.layers")
    for name, block in list(layers.named_children())[::every]:
        layers.register_module(name, checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, recomputation.checkpoint))
