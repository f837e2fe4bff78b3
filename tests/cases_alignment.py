"""Random mixtures of lengths, accumulation and checkpointing, for the alignment tests; run inside ranks."""

from __future__ import annotations

import functools
import random

import torch.distributed as dist
from cases_parity import mesh_of
from reference import LockstepResult, lockstep
from tiny_models import Batch, ModelKind, tiny_batch, tiny_nemo, tiny_transformers
from torch import nn

from dsv4_fsdp import parallelize, tie_compressors

# A small HCA window, so that sequences of up to four windows stay cheap. CSA's is 4 in both models.
HCA_WINDOW = 8
# Lengths of a step are drawn up to one of these: mostly several windows, now and then no HCA window on any rank, or not
# even a CSA window.
LONGEST = (4 * HCA_WINDOW, 4 * HCA_WINDOW, 2 * HCA_WINDOW, HCA_WINDOW - 1, 3)


def model_with_small_windows(kind: ModelKind) -> nn.Module:
    """One HCA and one CSA layer; the others have nothing to align."""
    if kind == "transformers":
        layers = ("heavily_compressed_attention", "compressed_sparse_attention")
        return tiny_transformers(layers, hca_window=HCA_WINDOW)
    return tiny_nemo(compress_ratios=(HCA_WINDOW, 4))


def drop_gradients_nobody_computed(model: nn.Module) -> list[str]:
    """What a trainer does with the number it reduces anyway; returns the compressors that no rank had a window for."""
    alignment = tie_compressors(model)
    flags = alignment.window_flags()
    dist.all_reduce(flags)
    return alignment.drop_untouched(flags)


def random_mixture(
    kind: ModelKind, mesh_shape: tuple[int, ...], *, accumulate: int, checkpointing: bool, steps: int, seed: int
) -> tuple[LockstepResult, int]:
    """``steps`` steps, each micro-batch with new lengths; and in how many of them some compressor saw no window."""
    mesh = mesh_of(mesh_shape)
    rng = random.Random(seed)  # the same draws on every rank
    batches: list[Batch] = []
    for index in range(steps * accumulate):
        if index % accumulate == 0:
            longest = rng.choice(LONGEST)
        lengths = [rng.randint(1, longest) for _ in range(dist.get_world_size())]
        batches.append(tiny_batch(kind, lengths[dist.get_rank()], seed=1000 * dist.get_rank() + index))
    untouched: list[list[str]] = []
    result = lockstep(
        functools.partial(model_with_small_windows, kind),
        lambda model: parallelize(model, mesh, activation_checkpointing=checkpointing),
        batches,
        steps=steps,
        accumulate=accumulate,
        sync="last",
        after_backward=lambda model: untouched.append(drop_gradients_nobody_computed(model)),
    )
    return result, sum(1 for names in untouched if names)


def untied(kind: ModelKind) -> LockstepResult:
    """The same mixture without the tie: what the tie is for."""
    mesh = mesh_of((2,))

    def shard(model: nn.Module) -> None:
        parallelize(model, mesh)
        for module in model.modules():
            if type(module).__name__.endswith("Compressor"):
                module._forward_hooks.clear()

    length = 2 * HCA_WINDOW if dist.get_rank() == 0 else HCA_WINDOW // 2
    return lockstep(functools.partial(model_with_small_windows, kind), shard, [tiny_batch(kind, length)])


def all_short(kind: ModelKind, *, drop: bool) -> tuple[list[str], list[str]]:
    """(names without gradient, names with an all-zero one) among compressor parameters when no rank has a window."""
    model = model_with_small_windows(kind)
    parallelize(model, mesh_of((2,)))
    batch = tiny_batch(kind, 3, seed=dist.get_rank())
    output = model(input_ids=batch.input_ids)
    output.logits.float().logsumexp(-1).sum().backward()
    if drop:
        drop_gradients_nobody_computed(model)
    compressor = {n: p for n, p in model.named_parameters() if "compressor" in n and p.requires_grad}
    without = [name for name, param in compressor.items() if param.grad is None]
    zero = [n for n, p in compressor.items() if p.grad is not None and not p.grad.full_tensor().any()]
    return without, zero
