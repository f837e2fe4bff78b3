"""What ``sharding.py`` runs in each rank: ways to shard a model, what a step of each does, how long it takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases_collectives import shard_blocks_head_root
from cases_parity import BF16, blocks_of, mesh_of
from measuring import peak_bytes
from reference import lockstep, logits_of, token_loss
from tiny_models import tiny_batch, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import dsv4_fsdp.fsdp
from dsv4_fsdp import parallelize
from dsv4_fsdp.alignment import freeze_indexers

OURS = "dsv4-fsdp, `parallelize`"
OURS_IN_ROOT = 'dsv4-fsdp, `parallelize(island_units="root")`'
OURS_FUNCTION = "dsv4-fsdp, `fully_shard_deepseek_v4` grouped"
OURS_NESTED = "dsv4-fsdp, `fully_shard_deepseek_v4` nested"
NEMO = "nemo-automodel, `fully_shard_deepseek_v4`"
NATIVE = "transformers native, fp32 storage, mixed precision"
UNIFORM = "plain FSDP2, all in bf16 (lower bound, wrong numerics)"

SIDES = {
    "nemo": (OURS, OURS_IN_ROOT, OURS_FUNCTION, OURS_NESTED, NEMO, UNIFORM),
    "transformers": (OURS, OURS_IN_ROOT, NATIVE, UNIFORM),
}


@dataclass(frozen=True)
class Case:
    """One model on one mesh. ``folder`` has the Transformers model as a checkpoint, for its native sharding."""

    kind: str
    num_blocks: int
    mesh_shape: tuple[int, ...]
    num_tokens: int = 256
    hidden_size: int = 64
    repeats: int = 9
    folder: str = ""


@dataclass
class Side:
    """What one rank found of one way. Collectives and bytes are those of one forward and backward."""

    counts: dict[str, int] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)
    """All-gathers by their output, reductions by their input."""
    logit_error: float = 0.0
    grad_error: float = 0.0
    stored_bytes: int = 0
    """This rank's shards."""
    peak_bytes: int = 0
    """The most that a step allocates beside them, gradients included."""
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def measure(case: Case) -> dict[str, Side]:
    """Every side of ``case``: one step in lock-step with the unsharded model, then timed steps in turns."""
    found = {name: Side() for name in SIDES[case.kind]}
    steps: dict[str, Callable[[], None]] = {}
    batch = tiny_batch(case.kind, case.num_tokens, seed=dist.get_rank())  # type: ignore[arg-type]
    for name, side in found.items():
        kept: list[nn.Module] = []

        def shard(model: nn.Module, name: str = name, kept: list[nn.Module] = kept) -> None:
            _shard(name, model, case)
            kept.append(model)

        result = lockstep(
            functools.partial(_build, name, case), shard, [batch], build_reference=lambda: _whole(case), record=True
        ).steps[0]
        for collective in result.collectives:
            whole = collective.group_size if collective.kind == "all_gather" else 1
            size = collective.numel * collective.dtype.itemsize * whole
            side.counts[collective.kind] = side.counts.get(collective.kind, 0) + 1
            side.payload_bytes[collective.kind] = side.payload_bytes.get(collective.kind, 0) + size
        side.logit_error, side.grad_error = result.logit_error, result.grad_error
        side.stored_bytes = sum(_local_bytes(param) for param in kept[0].parameters())
        steps[name] = functools.partial(_step, kept[0], batch)
        side.peak_bytes = peak_bytes(steps[name])
        steps[name]()
    names = list(found)
    for repeat in range(case.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            found[name].wall_s.append(time.perf_counter() - wall)
            found[name].cpu_s.append(time.process_time() - cpu)
    return found


def _step(model: nn.Module, batch: Any) -> None:
    token_loss(logits_of(model(input_ids=batch.input_ids)), batch).backward()
    model.zero_grad(set_to_none=True)


def _whole(case: Case) -> nn.Module:
    over: dict[str, Any] = {"hidden_size": case.hidden_size}
    if case.kind == "nemo":
        return tiny_nemo(case.num_blocks, **over)
    kinds = ("sliding_attention", *("heavily_compressed_attention", "compressed_sparse_attention") * case.num_blocks)
    return tiny_transformers(kinds[: case.num_blocks], **over)


def _build(name: str, case: Case) -> nn.Module:
    if name == NATIVE:
        from cases_integrations import load

        replicas = {"dp_replicate_size": case.mesh_shape[0]} if len(case.mesh_shape) == 2 else {}
        sizes = {"fsdp_size": case.mesh_shape[-1], **replicas}
        model: nn.Module = load(Path(case.folder), "float32", **sizes, fsdp_mixed_precision=True)
        return model
    model = _whole(case)
    return _all_bf16(model) if name == UNIFORM else model


def _all_bf16(model: nn.Module) -> nn.Module:
    """Every parameter in bf16; where the model's code hands an fp32 tensor to what was an fp32 ``Linear``, a cast."""

    def cast(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.bfloat16() for tensor in args)

    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
            module.register_forward_pre_hook(cast)
    return model.to(torch.bfloat16)


def _shard(name: str, model: nn.Module, case: Case) -> None:
    if name == NATIVE:
        return  # it came sharded
    mesh = mesh_of(case.mesh_shape)
    if name in (OURS, OURS_IN_ROOT):
        parallelize(model, mesh, island_units="root" if name == OURS_IN_ROOT else "grouped")
    elif name == UNIFORM:
        freeze_indexers(model)
        for module in [*blocks_of(model), model]:
            torch_fully_shard(module, mesh=mesh, mp_policy=BF16)
    elif name == NEMO:
        from nemo_automodel.components.models.deepseek_v4.fsdp import fully_shard_deepseek_v4

        shard_blocks_head_root(fully_shard_deepseek_v4, model, mesh)
    else:
        units = "nested" if name == OURS_NESTED else "grouped"
        shard_blocks_head_root(dsv4_fsdp.fsdp.fully_shard_deepseek_v4, model, mesh, island_units=units)


def _local_bytes(param: torch.Tensor) -> int:
    return (param.to_local() if isinstance(param, DTensor) else param).nbytes


def save_checkpoint(case: Case, folder: Path) -> None:
    """The case's Transformers model, for ``from_pretrained``."""
    model: Any = _whole(case)
    model.save_pretrained(folder)
