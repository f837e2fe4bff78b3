"""One step of a sharded model as a list of events: which gathers start, and what computes meanwhile. Inside ranks."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases_parity import mesh_of, whole_model
from reference import Recorder, token_loss
from tiny_models import ModelKind, tiny_batch
from torch import nn

from dsv4_fsdp import ShardingPlan, parallelize
from dsv4_fsdp.names import canonical_name
from dsv4_fsdp.torch_private import parameter_groups

Event = tuple[str, str]


def step_events(kind: ModelKind, **kwargs: Any) -> tuple[ShardingPlan, list[Event], list[Event]]:
    """The plan, and the events of a forward and of a backward, in order.

    ``("gather", "<unit>/<group>")`` when an all-gather is issued; ``("compute", "<unit>")`` when a unit's own hooks are
    through and its forward begins, or its backward.
    """
    model = whole_model(kind)
    plan = parallelize(model, mesh_of((dist.get_world_size(),)), **kwargs)
    events: list[Event] = []
    labels: dict[int, str] = {}
    numbers: dict[str, int] = {}
    for raw_name, group in parameter_groups(model):
        name = canonical_name(raw_name)
        number = numbers[name] = numbers.get(name, -1) + 1
        labels[id(group)] = f"{name}/{number}"
    group_class = type(next(group for _, group in parameter_groups(model)))
    unshard = group_class.unshard

    def noted_unshard(group: Any, async_op: bool = False) -> None:
        before = group._all_gather_result
        unshard(group, async_op)
        if before is None and group._all_gather_result is not None:
            events.append(("gather", labels[id(group)]))

    modules = {canonical_name(name): module for name, module in model.named_modules()}
    for unit in plan.units:
        # FSDP2's hooks were there first (forward) or go first (pre-forward): these find all its gathers issued.
        modules[unit.fqn].register_forward_pre_hook(functools.partial(_note_forward, events, unit.fqn))
        modules[unit.fqn].register_forward_hook(functools.partial(_note_backward, events, unit.fqn))
    batch = tiny_batch(kind, 40, seed=dist.get_rank())
    with mock.patch.object(group_class, "unshard", noted_unshard):
        loss = token_loss(model(input_ids=batch.input_ids).logits, batch)
        forward = events.copy()
        events.clear()
        loss.backward()
    return plan, forward, events


def _note_forward(events: list[Event], name: str, module: nn.Module, args: Any) -> None:
    events.append(("compute", name))


def _note_backward(events: list[Event], name: str, module: nn.Module, args: Any, output: Any) -> None:
    first = output if isinstance(output, torch.Tensor) else next(t for t in _values(output) if t is not None)
    first.register_hook(lambda grad: events.append(("compute", name)))


def _values(output: Any) -> Any:
    return output.values() if hasattr(output, "values") else output


def reductions_of_a_step(kind: ModelKind) -> tuple[ShardingPlan, list[int]]:
    """The plan, and how many elements each reduce-scatter of a step took in."""
    model = whole_model(kind)
    plan = parallelize(model, mesh_of((dist.get_world_size(),)))
    batch = tiny_batch(kind, 40, seed=dist.get_rank())
    with Recorder() as recorder:
        token_loss(model(input_ids=batch.input_ids).logits, batch).backward()
    return plan, [c.numel for c in recorder.collectives if c.kind == "reduce_scatter"]
