"""Optimizers over sharded parameters, beside the same on whole ones; run inside ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases_faults import full, load_training, save_training, small_windows, step_loss
from cases_optimizer_and_checkpoint import train
from cases_parity import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dsv4_fsdp import parallelize
from dsv4_fsdp.train.exact_state import local_values
from dsv4_fsdp.train.muon import Muon
from dsv4_fsdp.train.optimizers import (
    OptimizerSettings,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
)

MeshShape = tuple[int, ...]


def sharded(name: str, mesh_shape: MeshShape, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny model, bf16 with fp32 islands, and the named optimizer over it."""
    model = small_windows(seed)
    parallelize(model, mesh_of(mesh_shape))
    settings = OptimizerSettings(name=name, lr=1e-3)  # type: ignore[arg-type]
    return model, make_optimizer(parameter_groups(model, settings), settings, seed=5)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def bits(value: Any) -> list[torch.Tensor]:
    """This rank's part of a state, as plain tensors: two for a quantised one."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return [local.codes, local.scale] if hasattr(local, "codes") else [local]


def states_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    """Whether both have the same states, groups and rates, bit for bit, and every one of them has been in a step."""
    params = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in (a, b)]
    for mine, theirs in zip(*params, strict=True):
        if a.state[mine].keys() != b.state[theirs].keys() or not a.state[mine]:
            return False
        for key, value in a.state[mine].items():
            pairs = zip(bits(value), bits(b.state[theirs][key]), strict=True)
            if not all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs):
                return False
    return options_of(a) == options_of(b)


def resumed(name: str, mesh_shape: MeshShape, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, two steps; and the last two again from the checkpoint, in a new model."""
    rank = dist.get_rank()
    model, optimizer = sharded(name, mesh_shape)
    train(model, optimizer, range(2), seed=rank)
    save_training(model, optimizer, folder)
    expected = train(model, optimizer, range(2, 4), seed=rank)

    again, again_optimizer = sharded(name, mesh_shape, seed=1)
    torch.rand(7)  # the run's own random numbers are elsewhere than they were
    load_training(again, again_optimizer, folder)
    losses = train(again, again_optimizer, range(2, 4), seed=rank)
    weights = [torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    kinds = {type(bits_of(v)).__name__ for state in optimizer.state.values() for v in state.values()}
    return {
        "expected": expected,
        "losses": losses,
        "weights equal": all(weights),
        "states equal": states_equal(optimizer, again_optimizer),
        "kinds": kinds,
    }


def bits_of(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def stochastic_replicas(name: str) -> dict[str, Any]:
    """Three steps under HSDP 2x2 with equal gradients: shards of the two replicas, and the run's own random state."""
    model, optimizer = sharded(name, (2, 2))
    torch.manual_seed(dist.get_rank())  # as ranks that draw their own dropout would be
    before = torch.get_rng_state()
    for step in range(3):
        step_loss(model, "transformers", 12, seed=step).backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(bits_of(param).detach().flatten().view(torch.uint8).numpy().tobytes())
    found: list[str] = [""] * 4
    dist.all_gather_object(found, digest.hexdigest())
    return {
        "replicas equal": found[0] == found[2] and found[1] == found[3],
        "random state untouched": torch.equal(before, torch.get_rng_state()),
    }


def shards_draw_differently() -> bool:
    """Two shards with equal weights and gradients: whether their stochastic roundings differ."""
    mesh = mesh_of((2,))
    param = nn.Parameter(distribute_tensor(torch.ones(128, 64, dtype=torch.bfloat16), mesh, [Shard(0)]))
    holder = nn.Module()
    holder.weight = param
    settings = OptimizerSettings(name="adamw_bf16_sr", lr=1e-3)
    optimizer = make_optimizer(parameter_groups(holder, settings, islands=()), settings, seed=0)
    param.grad = distribute_tensor(torch.ones(128, 64, dtype=torch.bfloat16), mesh, [Shard(0)])
    optimizer.step()
    first, second = full(param.detach()).chunk(2)
    assert not torch.equal(first, torch.ones_like(first))
    return not torch.equal(first, second)


def ones_after(name: str, steps: int, *, lr: float = 1e-5) -> torch.Tensor:
    """Weights of 1.0 in bf16 after ``steps`` of a constant gradient and no decay."""
    layer = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    settings = OptimizerSettings(name=name, lr=lr, weight_decay=0.0)  # type: ignore[arg-type]
    optimizer = make_optimizer(parameter_groups(layer, settings, islands=()), settings, seed=3)
    for _ in range(steps):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    return layer.weight.detach()


SHAPES = ((10, 6), (6, 10), (7, 5), (1, 5), (3, 64), (4, 6, 5), (5, 3, 4), (1, 4, 4))


def values_of(seed: int) -> list[torch.Tensor]:
    """Numbers for each of ``SHAPES``: uneven and empty shards among them on two and four ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def muon_of(params: Iterable[torch.Tensor]) -> Muon:
    return Muon([{"params": list(params), "algorithm": "muon", "weight_decay": 0.1}], lr=0.02)


def muon_on_shards(mesh_shape: MeshShape, dim: int) -> list[bool]:
    """For each of ``SHAPES``: three steps on shards equal, bit for bit, three on the whole tensor."""
    mesh = mesh_of(mesh_shape)

    def distributed(value: torch.Tensor) -> DTensor:
        placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(min(dim, value.ndim - 1))]
        return distribute_tensor(value, mesh, placements)

    whole = [nn.Parameter(value) for value in values_of(0)]
    parts = [nn.Parameter(distributed(value)) for value in values_of(0)]
    optimizers = [muon_of(whole), muon_of(parts)]
    for step in range(1, 4):
        for a, b, grad in zip(whole, parts, values_of(step), strict=True):
            a.grad = grad
            b.grad = distributed(grad)
        for optimizer in optimizers:
            optimizer.step()
    return [torch.equal(a, full(b.detach())) for a, b in zip(whole, parts, strict=True)]


def rates_after_set(name: str) -> dict[str, float]:
    """Group name -> rate, after setting 0.5 on groups of which one has a factor."""
    model = small_windows()
    settings = OptimizerSettings(name=name, lr=1.0, lr_scale={"lm_head": 0.25})  # type: ignore[arg-type]
    optimizer = make_optimizer(parameter_groups(model, settings), settings, seed=0)
    set_learning_rate(optimizer, 0.5)
    return {group["name"]: float(group["lr"]) for group in optimizer.param_groups}


def state_kinds() -> dict[str, str]:
    """Shape -> kind of an 8-bit optimizer's first moment, on this rank of two."""
    mesh = mesh_of((2,))
    holder = nn.Module()
    for i, shape in enumerate(((64, 128), (31, 256), (33, 512), (32, 128), (64, 100))):
        param = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))
        param.grad = distribute_tensor(torch.ones(shape), mesh, [Shard(0)])
        holder.register_parameter(f"weight{i}", param)
    settings = OptimizerSettings(name="adamw_8bit", lr=1e-3)
    optimizer = make_optimizer(parameter_groups(holder, settings, islands=()), settings, seed=0)
    optimizer.step()
    return {
        str(tuple(p.shape)): type(local_values(optimizer.state[p]["exp_avg"])).__name__ for p in holder.parameters()
    }


def eight_bits_saved(folder: Path) -> dict[str, Any]:
    """Two steps with 8-bit moments, saved; see ``moments_of``."""
    model, optimizer = sharded("adamw_8bit", (dist.get_world_size(),))
    train(model, optimizer, range(2), seed=0)
    save_training(model, optimizer, folder)
    return moments_of(model, optimizer)


def eight_bits_loaded(folder: Path) -> dict[str, Any]:
    """The same after loading on however many ranks there are."""
    model, optimizer = sharded("adamw_8bit", (dist.get_world_size(),), seed=1)
    load_training(model, optimizer, folder)
    return moments_of(model, optimizer)


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Name of each moment -> (kind of this rank's part, the whole of it in fp32)."""
    found = {}
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            assert isinstance(param, DTensor), name
            local = local_values(optimizer.state[param][key])
            values = local.dequantize() if hasattr(local, "codes") else local
            sharded_like = {"shape": param.shape, "stride": param.stride(), "run_check": False}
            whole = DTensor.from_local(values, param.device_mesh, param.placements, **sharded_like).full_tensor()
            found[f"{name} {key}"] = (type(local).__name__, whole)
    return found
