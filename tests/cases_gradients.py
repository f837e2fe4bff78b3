"""One optimizer step's gradient over ranks and micro-batches, beside one process; run inside ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases_faults import full, small_windows, trainable_of
from cases_integrations import load
from cases_parity import BF16, mesh_of
from reference import Recorder, canonical
from tiny_models import VOCAB_SIZE
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dsv4_fsdp import Dsv4FsdpError, keep_fp32_islands, parallelize, tie_compressors
from dsv4_fsdp.alignment import freeze_indexers
from dsv4_fsdp.train.gradients import (
    SkippedSteps,
    StepTotals,
    TooManySkippedSteps,
    clip_to_norm,
    loss_scale,
    refuse_missing_gradients,
    squared_norm_share,
)
from dsv4_fsdp.train.optimizers import OptimizerSettings, make_optimizer, parameter_groups

MeshShape = tuple[int, ...]
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
LENGTHS = (25, 9, 2, 14)


def micro_batch(index: int, *, zero_tokens: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of tokens and labels (already shifted); the second row is padded on the right, to an index's length.

    With ``zero_tokens`` every label is -100, as in a batch of prompts only.
    """
    length = LENGTHS[index % len(LENGTHS)]
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(1, VOCAB_SIZE, (2, length), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    shorter = max(1, length // 2)
    tokens[1, shorter:] = 0
    labels[1, shorter - 1 :] = -100
    if zero_tokens:
        labels.fill_(-100)
    return tokens, labels


def loss_sum_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def batches_of_step(world_size: int, accumulate: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of all ranks. With several ranks the whole of rank 1 has no supervised token; alone, the second micro-batch."""
    batches = []
    for rank in range(world_size):
        for micro in range(accumulate):
            zero = rank == 1 if world_size > 1 else micro == 1
            batches.append(micro_batch(rank * accumulate + micro, zero_tokens=zero))
    return batches


def reference_gradients(
    model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], float, int]:
    """One process: gradients of the mean over all tokens, summed in fp64 over the batches; the loss; the tokens."""
    sums: dict[str, torch.Tensor] = {}
    loss = 0.0
    num_tokens = sum(int((labels != -100).sum()) for _, labels in batches)
    for tokens, labels in batches:
        loss_sum = loss_sum_of(model, tokens, labels)
        (loss_sum * (1 / num_tokens)).backward()
        loss += float(loss_sum.detach().double())
        for name, param in model.named_parameters():
            if param.grad is not None:
                sums[name] = sums.get(name, 0) + param.grad.double()
                param.grad = None
    return sums, loss / num_tokens, num_tokens


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(grad.square().sum()) for grad in gradients.values()))


def worst_error(model: nn.Module, expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of a parameter's gradient, and whose it is; no gradient on either side is none."""
    worst = (0.0, "")
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        wanted = expected.get(canonical(name))
        assert (param.grad is None) == (wanted is None), (name, param.grad is None)
        if wanted is not None and param.grad is not None:
            error = float((full(param.grad).double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
            worst = max(worst, (error, name))
    return worst


def one_step(accumulate: int, *, bf16: bool = False) -> dict[str, Any]:
    """One optimizer step by the trainer's own functions, against one process on all batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = small_windows if bf16 else lambda: small_windows().float()
    model = build()
    parallelize(model, mesh_of((world_size,)), mp_policy=BF16 if bf16 else FP32)
    alignment = tie_compressors(model)
    batches = batches_of_step(world_size, accumulate)
    mine = batches[rank * accumulate : (rank + 1) * accumulate]
    supervised = sum(int((labels != -100).sum()) for _, labels in mine)

    totals = StepTotals(trainable_of(model), num_windows=len(alignment.compressor_fqns))
    scale = loss_scale(totals.first_tokens(supervised), world_size)
    loss_sum = torch.zeros(())
    for tokens, labels in mine:
        part = loss_sum_of(model, tokens, labels)
        (part * scale).backward()
        loss_sum += part.detach()
    with Recorder() as recorder:
        total = totals.reduce(
            loss_sum=loss_sum,
            next_tokens=rank + 1,
            window_flags=alignment.window_flags(),
            stop=rank == world_size - 1,
        )
    alignment.drop_untouched(total.window_flags)

    reference = build()
    freeze_indexers(reference)
    expected, loss, num_tokens = reference_gradients(reference, batches)
    error, name = worst_error(model, expected)
    return {
        "error": error,
        "name": name,
        "num_tokens": (total.num_tokens, num_tokens),
        "mine": supervised,
        "loss": (total.loss, loss),
        "norm": (total.grad_norm, norm_of(expected)),
        "next_tokens": totals.num_tokens,
        "stop_ranks": total.stop_ranks,
        "reductions": len(recorder.collectives),
    }


# --- Norm and clipping ------------------------------------------------------------------------------------------------


def measured_norm(params: list[nn.Parameter]) -> float:
    """The trainer's share of each rank, added up."""
    share = squared_norm_share(params)
    dist.all_reduce(share)
    return math.sqrt(share.item())


def clipped(mesh_shape: MeshShape, *, offload: bool = False, big: bool = False) -> dict[str, float]:
    """Norms by the trainer and in fp64, before and after clipping to half; bf16 and fp32 gradients, empty shards."""
    model = small_windows()
    parallelize(model, mesh_of(mesh_shape), offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None)
    tokens, labels = micro_batch(dist.get_rank(), zero_tokens=False)
    loss_sum_of(model, tokens, labels).backward()
    exact = norm_of({n: full(p.grad).double() for n, p in model.named_parameters() if p.grad is not None})
    said = measured_norm(trainable_of(model))
    coefficient = clip_to_norm(trainable_of(model), said, exact / 2)
    after = norm_of({n: full(p.grad).double() for n, p in model.named_parameters() if p.grad is not None})
    again = clip_to_norm(trainable_of(model), measured_norm(trainable_of(model)), exact)
    return {
        "said": said,
        "exact": exact,
        "coefficient": coefficient,
        "after": after,
        "within the limit": again,
    }


def expert_parallel(path: Path, **distributed: Any) -> dict[str, Any]:
    """fp32 throughout: gradients, the norm over all meshes, a clipped SGD step, then AdamW over the groups."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with keep_fp32_islands("transformers"):
        model = load(path, "float32", **distributed)
    batches = [micro_batch(4 * index, zero_tokens=False) for index in range(world_size)]
    supervised = int((batches[rank][1] != -100).sum())
    params = trainable_of(model)
    totals = StepTotals(params)
    scale = loss_scale(totals.first_tokens(supervised), world_size)
    loss_sum = loss_sum_of(model, *batches[rank])
    (loss_sum * scale).backward()
    total = totals.reduce(loss_sum=loss_sum, next_tokens=0)

    reference = load(path, "float32")
    freeze_indexers(reference)
    expected, _, _ = reference_gradients(reference, batches)
    # Compressors without a window have zeros here, and nothing there.
    for name, param in model.named_parameters():
        if param.grad is not None and name not in expected:
            assert not full(param.grad).any(), name
            param.grad = None
    error, name = worst_error(model, expected)

    exact = norm_of(expected)
    coefficient = clip_to_norm(params, total.grad_norm, exact / 2)
    # One at a time: momentum-free SGD is linear in the gradient, so a factor of ep_size would show.
    torch.optim.SGD(params, lr=0.1, foreach=False).step()
    moved = 0.0
    with torch.no_grad():
        for name_, param in reference.named_parameters():
            if name_ in expected:
                param.sub_((0.1 * coefficient * expected[name_]).float())
            difference = (full(model.get_parameter(name_).detach()) - param).double().norm()
            moved = max(moved, float(difference / param.double().norm()))

    settings = OptimizerSettings(lr=1e-3)
    groups = parameter_groups(model, settings)
    make_optimizer(groups, settings, seed=0).step()  # foreach: refuses two meshes in a group
    return {
        "error": error,
        "name": name,
        "norm": (total.grad_norm, exact),
        "coefficient": coefficient,
        "moved": moved,
        "groups": [group.name for group in groups],
        "meshes": sorted({str(tuple(p.device_mesh.shape)) for p in params if isinstance(p, DTensor)}),
    }


def error_of_small_mesh() -> str:
    """The error of measuring gradients on a mesh of two of four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))["shard"]
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    try:
        squared_norm_share([param])
    except Dsv4FsdpError as error:
        return str(error)
    return ""


def plain_and_sharded_together() -> tuple[float, float]:
    """The norm over a tensor that every rank holds whole and one that is sharded over all; and what it is."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((dist.get_world_size(),))
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.tensor([1.0, 2.0, 2.0])
    sharded = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.full((5, 2), 2.0), mesh, [Shard(0)])
    return measured_norm([plain, sharded]), 7.0  # 9 + 40 = 49


# --- Steps that are not finite ----------------------------------------------------------------------------------------


def not_finite_on_one_rank(where: str, max_in_a_row: int) -> dict[str, Any]:
    """Steps of which, from the second on, rank 1 alone meets a nan in its loss, or in its gradient; until it ends.

    Returns what this rank decided at each step, whether weights were moved, and the error.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = small_windows()
    parallelize(model, mesh_of((world_size,)))
    params = trainable_of(model)
    settings = OptimizerSettings(lr=1e-2)
    optimizer = make_optimizer(parameter_groups(model, settings), settings, seed=0)
    totals = StepTotals(params)
    skipped = SkippedSteps(max_in_a_row=max_in_a_row)
    tokens, labels = micro_batch(0, zero_tokens=False)
    supervised = int((labels != -100).sum())
    totals.first_tokens(supervised)
    decisions, moved, error = [], [], ""
    for step in range(6):
        before = [full(param.detach()).clone() for param in params]
        loss_sum = loss_sum_of(model, tokens, labels)
        if step and rank == 1:
            if where == "loss":
                loss_sum = loss_sum * float("nan")
            else:
                loss_sum.register_hook(lambda grad: grad * float("inf"))
        (loss_sum * loss_scale(totals.num_tokens, world_size)).backward()
        total = totals.reduce(loss_sum=loss_sum, next_tokens=supervised)
        clip_to_norm(params, total.grad_norm, 1.0)
        try:
            decisions.append(skipped.may_step(step, total))
        except TooManySkippedSteps as caught:
            error = str(caught)
            break
        if decisions[-1]:
            optimizer.step()
        optimizer.zero_grad()
        moved.append(not all(torch.equal(a, full(b.detach())) for a, b in zip(before, params, strict=True)))
    return {"decisions": decisions, "moved": moved, "error": error, "total": skipped.total}


# --- Missing gradients ------------------------------------------------------------------------------------------------


class Lonely(nn.Module):
    """``used`` on every rank, ``sometimes`` on rank 0 only, ``never`` on none."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.sometimes = nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def missing(allow: tuple[str, ...]) -> list[str] | str:
    """Names that were excused, or the error."""
    model = Lonely()
    loss = model.used(torch.ones(2)).sum()
    if dist.get_rank() == 0:
        loss = loss + model.sometimes(torch.ones(2)).sum()
    loss.backward()
    try:
        return refuse_missing_gradients(model, allow=allow)
    except Dsv4FsdpError as error:
        return str(error)
