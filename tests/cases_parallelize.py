"""What is done with a model between its steps; run inside ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from cases_parity import mesh_of, whole_model
from reference import canonical, token_loss
from tiny_models import tiny_batch, tiny_transformers
from torch import nn
from torch.distributed.tensor import DTensor

from dsv4_fsdp import audit, parallelize
from dsv4_fsdp.expert_parallel import make_expert_mesh
from dsv4_fsdp.plan import UnitPlan


def _loss(model: nn.Module, seed: int) -> torch.Tensor:
    batch = tiny_batch("transformers", (70, 20)[dist.get_rank() % 2], seed=seed)
    return token_loss(model(input_ids=batch.input_ids).logits, batch)


def train_around_evaluations(island_units: Any, *, evaluates: bool) -> tuple[list[float], list[str], list[str]]:
    """Losses and clipped norms of three steps; parameters that are whole after an evaluation; those that never moved.

    The optimizer is made after the first evaluation, and there is one between backward and clipping.
    """
    model = whole_model("transformers")
    parallelize(model, mesh_of((2,)), island_units=island_units)

    def evaluate() -> list[str]:
        if evaluates:
            model.eval()
            with torch.no_grad():
                _loss(model, 99)
            model.train()
        return [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]

    whole = evaluate()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    before = {name: param.full_tensor().clone() for name, param in model.named_parameters()}
    found = []
    for step in range(3):
        loss = _loss(model, step)
        loss.backward()
        evaluate()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    still = [
        canonical(name)
        for name, param in model.named_parameters()
        if param.requires_grad and torch.equal(param.full_tensor(), before[name])
    ]
    return found, whole, still


def audit_between_steps() -> list[float]:
    """Losses of two steps, of which the second comes after an evaluation and an audit."""
    model = whole_model("transformers")
    plan = parallelize(model, mesh_of((2,)))
    losses = []
    for step in range(2):
        loss = _loss(model, step)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            _loss(model, 7)
        assert audit(model, plan=plan).ok
    return losses


def islands_in_dealt_experts(island_units: Any) -> list[UnitPlan]:
    """The units of dealt experts that are islands themselves, once the model is sharded."""
    model = tiny_transformers()
    for name, param in model.named_parameters():
        if ".experts." in name:
            param.data = param.data.float()
    mesh = mesh_of((4,))
    plan = parallelize(
        model, mesh, expert_mesh=make_expert_mesh(mesh, 2), island_units=island_units, fp32_params=["mlp.experts"]
    )
    return [unit for unit in plan.units if unit.role == "experts"]


class WithSharedScale(nn.Module):
    """A model that reads one block's island once more, outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_transformers()
        self.scale = self.inner.get_submodule("model.layers.1.input_layernorm").weight

    def forward(self, input_ids: torch.Tensor) -> Any:
        output = self.inner(input_ids=input_ids)
        output.logits = output.logits * self.scale.mean()
        return output


def shared_with_the_root() -> tuple[bool, float]:
    """Whether the forward is that of the whole model, and the worst relative error of the shared scale's gradient."""
    model = WithSharedScale()
    whole = copy.deepcopy(model)
    parallelize(model, mesh_of((2,)), island_units="root")
    losses = [_loss(each, 0) for each in (model, whole)]
    for loss in losses:
        loss.backward()
    assert isinstance(model.scale.grad, DTensor)
    assert whole.scale.grad is not None
    expected = whole.scale.grad.clone()
    dist.all_reduce(expected)
    error = (model.scale.grad.full_tensor() - expected / 2).norm() / (expected / 2).norm()
    return torch.equal(*losses), float(error)
