"""Compiled blocks beside the same model uncompiled; run inside ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cases_faults import full
from cases_parity import blocks_of, mesh_of
from reference import LockstepResult, canonical, lockstep, token_loss
from tiny_models import island_names, tiny_batch, tiny_transformers
from torch import nn

from dsv4_fsdp import audit, compile_blocks, parallelize, use_windowed_attention


@dataclass
class CompiledResult:
    lockstep: LockstepResult
    blocks: tuple[str, ...]
    graphs: int
    graphs_run: dict[str, int]
    breaks: dict[str, int]
    text: str
    island_dtypes: set[torch.dtype]
    audit_ok: bool


def compiled_lockstep(layers: tuple[str, ...], backend: str, *, first: str) -> CompiledResult:
    """A step of a model whose blocks are compiled, beside the unsharded, uncompiled one.

    ``first`` is what comes first, ``"compile"`` or ``"shard"``.
    """
    torch._dynamo.reset()
    kept: list[Any] = []
    island_dtypes: set[torch.dtype] = set()

    def note(block: nn.Module, *call: Any) -> None:
        # A hook inside the block would be traced, and compiled again for each module.
        names = {".".join(name.split(".")[3:]) for name in island_names(kept[1])}
        island_dtypes.update(param.dtype for name, param in block.named_parameters() if name in names)

    def shard(model: nn.Module) -> None:
        if first == "compile":
            kept.append(compile_blocks(model, backend=backend))
        plan = parallelize(model, mesh_of((dist.get_world_size(),)))
        if first == "shard":
            kept.append(compile_blocks(model, backend=backend))
        for block in blocks_of(model):
            block.register_forward_pre_hook(note)  # after FSDP2's own, so it sees gathered parameters
        kept.extend((model, plan))

    # Rank 1 has no HCA window, so that the compressors' ties are inside the graphs.
    batch = tiny_batch("transformers", (40, 20)[dist.get_rank()], seed=dist.get_rank())
    found = lockstep(functools.partial(tiny_transformers, layers), shard, [batch])
    report, model, plan = kept

    def step() -> None:
        token_loss(model(input_ids=batch.input_ids).logits, batch).backward()

    return CompiledResult(
        lockstep=found,
        blocks=report.blocks,
        graphs=report.graphs,
        graphs_run=dict(report.graphs_run),
        breaks=report.breaks,
        text=report.text(),
        island_dtypes=island_dtypes,
        audit_ok=audit(model, plan=plan, step=step).ok,
    )


def recomputed_windowed_gradients(layers: tuple[str, ...], *, compiled: bool) -> dict[str, torch.Tensor]:
    """Gradients of two steps, packed documents and one, of recomputed blocks with windowed attention."""
    torch._dynamo.reset()
    model = tiny_transformers(layers)
    use_windowed_attention(model)
    parallelize(model, mesh_of((dist.get_world_size(),)), activation_checkpointing=True)
    if compiled:
        compile_blocks(model, backend="eager")
    batch = tiny_batch("transformers", 66)
    for positions in (None, torch.cat([torch.arange(40), torch.arange(26)]).unsqueeze(0)):
        output = model(input_ids=batch.input_ids, position_ids=positions, use_cache=False)
        token_loss(output.logits, batch).backward()
    found = {canonical(name): param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: full(grad).clone() for name, grad in found.items()}
