"""Training runs that are clipped, saved and resumed, on one mesh or from one mesh to the next; run inside ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_faults import FULL_STATE, full, load_training, save_training, small_windows, step_loss, trainable_of
from cases_parity import mesh_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from dsv4_fsdp import parallelize, tie_compressors
from dsv4_fsdp.alignment import freeze_indexers

LENGTH = 12
MeshShape = tuple[int, ...]


def grouped(mesh_shape: MeshShape, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny model, bf16 with fp32 islands, in grouped units, and its AdamW."""
    model = small_windows(seed)
    parallelize(model, mesh_of(mesh_shape))
    return model, torch.optim.AdamW(trainable_of(model), lr=1e-3, weight_decay=0.1, foreach=True)


def plain(mesh_shape: MeshShape) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model in plain FSDP2 units. These take one dtype only, so it is stored in fp32."""
    model = small_windows().float()
    tie_compressors(model)
    freeze_indexers(model)
    kwargs: dict[str, Any] = {"mesh": mesh_of(mesh_shape), "mp_policy": MixedPrecisionPolicy()}
    for block in model.get_submodule("model.layers").children():
        torch_fully_shard(block, **kwargs)
    torch_fully_shard(model, **kwargs)
    return model, torch.optim.AdamW(trainable_of(model), lr=1e-3, weight_decay=0.1, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, seed: int) -> list[float]:
    """The losses of ``steps``, whose batches depend on the step and on ``seed`` only."""
    losses = []
    for step in steps:
        loss = step_loss(model, "transformers", LENGTH + step, seed=100 * seed + step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of every parameter, buffer, moment and step count, gathered whole, with names and dtypes."""
    named: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, param in model.named_parameters():
        named |= {f"{name} {key}": value for key, value in optimizer.state.get(param, {}).items()}
    digest = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        value = full(tensor.detach()).contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def keys_of(build: Callable[[MeshShape], tuple[nn.Module, torch.optim.Optimizer]], mesh_shape: MeshShape) -> Any:
    """The keys of every kind of state dict after a step: (model's own, DCP's model, gathered, DCP's optimizer)."""
    model, optimizer = build(mesh_shape)
    train(model, optimizer, range(1), seed=0)
    state = get_optimizer_state_dict(model, optimizer)
    gathered = get_model_state_dict(model, options=FULL_STATE)
    return (
        list(model.state_dict()),
        list(get_model_state_dict(model)),
        list(gathered) if dist.get_rank() == 0 else None,
        {name: sorted(entry) for name, entry in state["state"].items()},
        [sorted(group["params"]) for group in state["param_groups"]],
    )


def saved_keys(build: Callable[[MeshShape], tuple[nn.Module, torch.optim.Optimizer]], folder: Path) -> list[str]:
    """The keys of a DCP checkpoint of model and optimizer on two ranks."""
    model, optimizer = build((2,))
    train(model, optimizer, range(1), seed=0)
    save_training(model, optimizer, folder)
    return sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def clipped(mesh_shape: MeshShape, max_norm: float) -> dict[str, float]:
    """Gradient norms: what ``clip_grad_norm_`` says, exactly, exactly after clipping, and of an unsharded run."""
    model, _ = grouped(mesh_shape)
    reference = small_windows()
    freeze_indexers(reference)
    # The same batch everywhere: one unsharded run has the ranks' mean.
    step_loss(model, "transformers", LENGTH).backward()
    step_loss(reference, "transformers", LENGTH).backward()
    before = exact_norm(model)
    total = torch.nn.utils.clip_grad_norm_(trainable_of(model), max_norm)
    return {
        "said": full(total).item(),
        "before": before,
        "after": exact_norm(model),
        "unsharded": exact_norm(reference),
    }


def exact_norm(model: nn.Module) -> float:
    """The norm of all gradients, in fp64."""
    return torch.stack([full(p.grad).double().norm() for p in trainable_of(model) if p.grad is not None]).norm().item()


def interrupted(mesh_shape: MeshShape, folder: Path) -> tuple[list[float], list[float], bool]:
    """Losses of steps 2 and 3, uninterrupted and resumed in a new model; and whether all ends the same in every bit."""
    rank = dist.get_rank()
    model, optimizer = grouped(mesh_shape)
    train(model, optimizer, range(2), seed=rank)
    save_training(model, optimizer, folder)
    expected = train(model, optimizer, range(2, 4), seed=rank)
    resumed, resumed_optimizer = grouped(mesh_shape, seed=1)
    load_training(resumed, resumed_optimizer, folder)
    losses = train(resumed, resumed_optimizer, range(2, 4), seed=rank)
    return expected, losses, fingerprint(model, optimizer) == fingerprint(resumed, resumed_optimizer)


def leg(mesh_shape: MeshShape, steps: range, load: Path | None, save: Path | None) -> tuple[list[float], str, str]:
    """One part of a run that moves between meshes: (losses, fingerprint after loading, fingerprint at the end)."""
    model, optimizer = grouped(mesh_shape, seed=0 if load is None else 1)
    if load is not None:
        load_training(model, optimizer, load)
    at_start = fingerprint(model, optimizer)
    losses = train(model, optimizer, steps, seed=0)
    if save is not None:
        save_training(model, optimizer, save)
    return losses, at_start, fingerprint(model, optimizer)
