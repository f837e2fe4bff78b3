"""What the ranks do in test_train_parts.py: the trainer's own functions, on the pool's processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from dsv4_fsdp import Dsv4FsdpError, use_windowed_attention
from dsv4_fsdp.data.stdlib_text import StdlibText
from dsv4_fsdp.parallelize import parallelize
from dsv4_fsdp.train import build_model, loop
from dsv4_fsdp.train.config import TrainConfig, resolve
from dsv4_fsdp.train.ranks import Ranks
from dsv4_fsdp.train.run_folder import RunFolder
from dsv4_fsdp.train.tiny_model import build_tiny_model

# Batches of 9 x 64 and 1 x 400 tokens: ranks with clearly different token counts. With this seed one rank of two has no
# HCA window in the first step, and neither has in the second.
UNEQUAL = {"data.sequence_lengths": "64,400", "data.batch_tokens": "600", "seed": "10"}


def join_pool() -> Ranks:
    """The pool's own process group as the trainer sees one."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    return Ranks(dist.get_rank(), world_size, dist.get_rank(), torch.device("cpu"), mesh, None)


def make_data(config: TrainConfig) -> StdlibText:
    return StdlibText(
        seed=config.seed,
        sequence_lengths=config.data.sequence_lengths,
        batch_tokens=config.data.batch_tokens,
    )


@contextlib.contextmanager
def steps_only() -> Iterator[None]:
    """Leave out what surrounds the steps: test_train.py runs all of it. Notices would change a shared process."""
    with contextlib.ExitStack() as stack:
        for name in ("show_notices", "dry_export", "publish_export", "_audit"):
            stack.enter_context(mock.patch.object(loop, name, return_value=None))
        yield


class _Enough(Exception):
    pass


def gradients_of_first_step() -> tuple[float, list[int]]:
    """The loop's gradients against one process on the concatenated batch.

    Returns the worst relative difference of a parameter's gradient, and the ranks' token counts.
    """
    ranks = join_pool()
    config = resolve(UNEQUAL | {"nproc": str(ranks.world_size), "optimizer.clip_grad_norm": "1e9"})
    sharded: dict[int, torch.Tensor] = {}

    def take_gradients(self: torch.optim.Optimizer) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                sharded[id(param)] = param.grad.full_tensor()
        raise _Enough

    made: list[Any] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        made.append(build_model.shard_on_meta(*args, **kwargs))
        return made[-1]

    with steps_only(), mock.patch.object(loop, "shard_on_meta", build):
        with mock.patch.object(torch.optim.AdamW, "step", take_gradients), contextlib.suppress(_Enough):
            loop.train(config, RunFolder(Path("run")), ranks)

    data = make_data(config)
    batches = [data.batch(position) for position in range(ranks.world_size)]
    counts = [batch[:, 1:].numel() for batch in batches]
    model = build_tiny_model(seed=config.seed)
    use_windowed_attention(model)
    for batch in batches:
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        (F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum") / sum(counts)).backward()
    worst = 0.0
    for (name, reference), param in zip(model.named_parameters(), made[0].model.parameters(), strict=True):
        if param.requires_grad:
            assert reference.grad is not None, name
            expected, got = reference.grad.double(), sharded[id(param)].double()
            worst = max(worst, float((got - expected).norm() / expected.norm()))
    return worst, counts


def one_rank_not_finite(where: str) -> tuple[int, list[bool]]:
    """Three steps; in the second, rank 1 alone meets a nan in its loss, or in its gradient with a finite loss.

    Returns how many optimizer steps this rank made, and for each training step whether its weights changed.
    """
    ranks = join_pool()
    config = resolve({"nproc": str(ranks.world_size), "steps": "3", "model.loss": "stock"})
    original, calls = F.cross_entropy, 0

    def spoiled(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls != 2 or ranks.rank != 1:
            return original(logits, *args, **kwargs)
        if where == "loss":
            return original(logits, *args, **kwargs) * float("nan")
        logits.register_hook(lambda gradient: gradient * float("nan"))
        return original(logits, *args, **kwargs)

    applied = 0
    before: list[torch.Tensor] = []
    moved: list[bool] = []
    step, zero_grad = torch.optim.AdamW.step, torch.optim.AdamW.zero_grad

    def weights(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        return torch.cat([p.to_local().flatten().float() for group in optimizer.param_groups for p in group["params"]])

    def counted_step(self: Any, *args: Any) -> Any:
        nonlocal applied
        applied += 1
        return step(self, *args)

    def watched_zero_grad(self: Any, *args: Any) -> None:
        now = weights(self).detach().clone()
        assert bool(now.isfinite().all())
        if before:
            moved.append(not torch.equal(now, before[-1]))
        before.append(now)
        zero_grad(self, *args)

    with (
        steps_only(),
        mock.patch.object(F, "cross_entropy", spoiled),
        mock.patch.object(torch.optim.AdamW, "step", counted_step),
        mock.patch.object(torch.optim.AdamW, "zero_grad", watched_zero_grad),
    ):
        loop.train(config, RunFolder(Path("run")), ranks)
    return applied, moved


def lonely_parameter() -> str:
    """Train a model whose Lightning Indexer was left trainable, which nothing reaches; return the error's text."""

    def with_trainable_indexer(*args: Any, **kwargs: Any) -> Any:
        return parallelize(*args, **kwargs, freeze_indexer=False)

    ranks = join_pool()
    config = resolve({"nproc": str(ranks.world_size), "steps": "2"})
    with steps_only(), mock.patch.object(build_model, "parallelize", with_trainable_indexer):
        try:
            loop.train(config, RunFolder(Path("run")), ranks)
        except Dsv4FsdpError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def another_seed_on_rank_1() -> str:
    """Start a run whose ranks were given different seeds; return the error's text."""
    ranks = join_pool()
    config = resolve({"nproc": str(ranks.world_size), "seed": str(ranks.rank)})
    with steps_only():
        try:
            loop.train(config, RunFolder(Path("run")), ranks)
        except Dsv4FsdpError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
