"""Loading checkpoints into sharded models, in ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tiny_checkpoints import released_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dsv4_fsdp import parallelize, plan
from dsv4_fsdp.checkpoint_loading import CheckpointReader, load_checkpoint
from dsv4_fsdp.expert_parallel import make_expert_mesh
from dsv4_fsdp.initialization import initialize
from dsv4_fsdp.materialize import materialize, refuse_uninitialized
from dsv4_fsdp.names import canonical_name


def on_meta() -> nn.Module:
    from transformers import DeepseekV4ForCausalLM

    config = released_model().config
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
        )
    assert isinstance(model, nn.Module)
    return model.train()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_and_compare(
    folder: Path, shape: tuple[int, ...], expert_parallel: int, *, dim: int = 0
) -> tuple[list[str], int, int]:
    """Shard on meta, load ``folder``: names of tensors unlike those of ``released_model()``, bytes read, and stored."""
    model = sharded_on_meta(shape, expert_parallel, dim)
    with CheckpointReader(folder) as reader:
        report = load_checkpoint(model, reader)
    refuse_uninitialized(model)
    wrong = []
    expected = released_model().state_dict()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for raw_name, tensor in tensors:
        name = canonical_name(raw_name)
        if name in expected:
            got = whole(tensor)
            if got.dtype != expected[name].dtype or not torch.equal(got, expected[name]):
                wrong.append(name)
    stored = sum(
        (t.to_local() if isinstance(t, DTensor) else t).numel() * t.element_size() for _, t in model.named_parameters()
    )
    return wrong, report.bytes_read, stored


def sharded_on_meta(shape: tuple[int, ...], expert_parallel: int, dim: int) -> nn.Module:
    """The model in shards with memory; whatever divides evenly along ``dim`` is cut there."""
    model = on_meta()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    expert_mesh = make_expert_mesh(mesh, expert_parallel) if expert_parallel > 1 else None

    def there(shape: Sequence[int], num_ranks: int) -> int:
        return dim if len(shape) > dim and shape[dim] % num_ranks == 0 else 0

    with mock.patch.object(plan, "even_dim", there) if dim else contextlib.nullcontext():
        parallelize(model, mesh, expert_mesh=expert_mesh)
    if dim:
        assert any(Shard(dim) in param.placements for param in model.parameters() if isinstance(param, DTensor))
    materialize(model, "cpu")
    return model


def initialized(shape: tuple[int, ...], expert_parallel: int, seed: int, *, dim: int = 0) -> dict[str, torch.Tensor]:
    """The whole tensors of a model that was initialised in shards."""
    model = sharded_on_meta(shape, expert_parallel, dim)
    initialize(model, seed=seed)
    refuse_uninitialized(model)
    found: dict[str, Any] = {canonical_name(name): whole(p).detach() for name, p in model.named_parameters()}
    return found | dict(model.named_buffers())
