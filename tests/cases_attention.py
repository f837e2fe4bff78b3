"""Windowed attention and the chunked loss under FSDP2; run inside ranks."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases_parity import mesh_of
from reference import LockstepResult, Recorder, lockstep, logits_of, token_loss
from tiny_models import ModelKind, tiny_batch, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.tensor import DTensor

from dsv4_fsdp import parallelize, use_windowed_attention, with_chunked_loss

# Rank by rank: one has HCA windows (32 tokens), the other has none.
LENGTHS = (70, 20)


def windowed_model() -> nn.Module:
    model = tiny_transformers()
    use_windowed_attention(model)
    return model


def windowed_parity(*, checkpointing: bool) -> LockstepResult:
    """Sharded against unsharded, both in windows; lengths change places after the first step."""
    rank = dist.get_rank()
    batches = [tiny_batch("transformers", LENGTHS[(rank + i) % 2], seed=10 * rank + i) for i in range(2)]
    return lockstep(
        windowed_model,
        lambda model: parallelize(model, mesh_of((2,)), activation_checkpointing=checkpointing),
        batches,
        steps=2,
    )


def indexer_calls_when_sharded() -> dict[str, int]:
    """How often each indexer runs in a step of two micro-batches, both forwards before both backwards."""
    model = windowed_model()
    parallelize(model, mesh_of((2,)), activation_checkpointing=True)
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if type(module).__name__ == "DeepseekV4Indexer":
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    batches = [tiny_batch("transformers", length, seed=dist.get_rank()) for length in LENGTHS]
    losses = [token_loss(logits_of(model(input_ids=batch.input_ids)), batch) for batch in batches]
    for loss in losses:
        loss.backward()
    return dict(calls)


def loss_model(kind: ModelKind, *, tied: bool) -> nn.Module:
    if kind == "nemo":
        return tiny_nemo(compress_ratios=(0, 4))
    return tiny_transformers(("sliding_attention", "compressed_sparse_attention"), tie_word_embeddings=tied)


def chunked_loss_parity(kind: ModelKind, *, tied: bool = False) -> dict[str, Any]:
    """What the chunked loss of a sharded model shows beside the unsharded one's, and beside the sharded stock loss.

    Rank 1 has no label at all.
    """
    rank = dist.get_rank()
    batch = tiny_batch(kind, 40, seed=rank)
    labels = batch.labels if rank == 0 else torch.full_like(batch.labels, -100)
    build = functools.partial(loss_model, kind, tied=tied)

    whole = build()
    expected, _ = with_chunked_loss(whole, chunk_tokens=16)(batch.input_ids, labels)
    expected.backward()
    sharded = build()
    parallelize(sharded, mesh_of((2,)))
    with Recorder() as ours:
        loss, num_tokens = with_chunked_loss(sharded, chunk_tokens=16)(batch.input_ids, labels)
        loss.backward()
    found = {name: param.grad for name, param in sharded.named_parameters()}

    wanted = {}
    for name, param in whole.named_parameters():
        if name in found and found[name] is not None:
            grad = torch.zeros_like(param, dtype=torch.float64) if param.grad is None else param.grad.double()
            dist.all_reduce(grad)
            wanted[name] = grad / 2
    errors = {}
    for name, grad in wanted.items():
        value = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        errors[name] = float((value.double() - grad).norm() / grad.norm().clamp(min=1e-30))

    sharded.zero_grad()
    with Recorder() as stock:
        output = sharded(input_ids=batch.input_ids, use_cache=False)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum").backward()
    return {
        "bit_equal": torch.equal(loss.detach(), expected.detach()),
        "loss": float(loss),
        "num_tokens": int(num_tokens),
        "missing": [n for n, p in sharded.named_parameters() if p.requires_grad and found[n] is None],
        "errors": errors,
        "collectives": [str(each) for each in ours.collectives],
        "stock_collectives": [str(each) for each in stock.collectives],
    }
