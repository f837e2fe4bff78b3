"""Router biases under sharding, accumulation and activation checkpointing; run inside ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases_gradients import loss_sum_of, micro_batch
from cases_parity import mesh_of
from reference import canonical
from tiny_models import tiny_transformers
from torch import nn

from dsv4_fsdp import parallelize
from dsv4_fsdp.train.gradients import StepTotals
from dsv4_fsdp.train.router_bias import RouterBalance

RATE = 0.25  # exact in fp32, as are the sums of it


def build() -> nn.Module:
    return tiny_transformers()


def biases_of(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def choices_by_hand(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Each router's choices on ``batches``, counted one by one, where a token has a label."""
    seen: list[list[list[int]]] = []
    routers = [module for module in model.modules() if type(module).__name__ == "DeepseekV4TopKRouter"]
    hooks = [
        r.register_forward_hook(lambda m, a, out, i=i: seen[i].append(out[2].tolist())) for i, r in enumerate(routers)
    ]
    counts = torch.zeros(len(routers), 4, dtype=torch.int64)
    for tokens, labels in batches:
        seen[:] = [[] for _ in routers]
        with torch.no_grad():
            model(input_ids=tokens)
        for row, calls in enumerate(seen):
            (choices,) = calls
            for chosen, label in zip(choices, labels.flatten().tolist(), strict=True):
                if label != -100:
                    for expert in chosen:
                        counts[row, expert] += 1
    for hook in hooks:
        hook.remove()
    return counts


def a_step(accumulate: int, *, checkpointing: bool) -> dict[str, Any]:
    """One step on all ranks: counts, biases, loads."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build()
    batches = [micro_batch(i, zero_tokens=False) for i in range(world_size * accumulate)]
    expected = choices_by_hand(build(), batches)
    before = [bias.clone() for bias in biases_of(model)]
    parallelize(model, mesh_of((world_size,)), activation_checkpointing=checkpointing)
    balance = RouterBalance(model, rate=RATE)
    totals = StepTotals(
        [p for p in model.parameters() if p.requires_grad],
        expert_counts_shape=(len(balance.router_fqns), balance.num_experts),
    )
    totals.first_tokens(1)
    loss_sum = torch.zeros(())
    for tokens, labels in batches[rank * accumulate : (rank + 1) * accumulate]:
        balance.use_mask(labels != -100)
        loss = loss_sum_of(model, tokens, labels)
        loss.backward()
        loss_sum += loss.detach()
    model.eval()
    with torch.no_grad():
        model(input_ids=batches[0][0])  # an evaluation between the steps
    model.train()
    total = totals.reduce(loss_sum=loss_sum, next_tokens=0, expert_counts=balance.counts())
    load = balance.update(total.expert_counts)
    mean = expected.double().mean(1, keepdim=True)
    wanted = [b + RATE * sign for b, sign in zip(before, (mean - expected).sign().float(), strict=True)]
    biases = biases_of(model)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, torch.stack(biases))
    saved = {canonical(name): value for name, value in model.state_dict().items()}
    return {
        "counts": total.expert_counts.tolist(),
        "expected": expected.tolist(),
        "biases": all(torch.equal(a, b) for a, b in zip(biases, wanted, strict=True)),
        "moved": not torch.equal(biases[0], before[0]),
        "same on all ranks": all(torch.equal(gathered[0], other) for other in gathered),
        "in the state dict": [
            torch.equal(saved[f"{name}.e_score_correction_bias"], bias)
            for name, bias in zip(balance.router_fqns, biases, strict=True)
        ],
        "load": load.busiest,
        "counts afterwards": int(balance.counts().sum()),
    }


def loads_of_steps(num_steps: int) -> list[float]:
    """The worst load of each step, on one batch, of routers that first send everything to two of four experts."""
    model = build()
    for bias in biases_of(model):
        bias.copy_(torch.tensor([4.0, 4.0, 0.0, 0.0]))
    balance = RouterBalance(model, rate=RATE)
    tokens, _ = micro_batch(0, zero_tokens=False)
    loads = []
    for _ in range(num_steps):
        with torch.no_grad():
            model(input_ids=tokens)
        loads.append(balance.update(balance.counts()).worst)
    return loads
