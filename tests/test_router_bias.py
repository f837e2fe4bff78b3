"""Router biases move against the load: counted exactly, once per token, alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases_gradients import micro_batch
from cases_router_bias import a_step, biases_of, build, choices_by_hand, loads_of_steps
from torch import nn

from dsv4_fsdp.train.router_bias import RouterBalance, RouterBiasError


@pytest.mark.parametrize(
    ("world_size", "accumulate", "checkpointing"), [(1, 1, False), (2, 2, False), (2, 2, True), (4, 1, True)]
)
def test_every_token_counts_once_whatever_ranks_micro_batches_and_recomputation(
    run_ranks: Any, world_size: int, accumulate: int, checkpointing: bool
) -> None:
    """Against a count one by one in an unsharded model; pads and an evaluation between do not count (fault 35)."""
    for found in run_ranks(world_size, a_step, accumulate, checkpointing=checkpointing):
        assert found["counts"] == found["expected"]
        assert found["biases"]
        assert found["moved"]
        assert found["same on all ranks"]
        assert found["in the state dict"] == [True, True]
        assert found["load"] == {
            f"model.layers.{layer}.mlp.gate": max(counts) * len(counts) / sum(counts)
            for layer, counts in zip((2, 3), found["expected"], strict=True)
        }
        assert found["counts afterwards"] == 0


def test_the_load_evens_out(run_ranks: Any) -> None:
    """A router that sends everything to two experts uses all four after some steps."""
    (loads,) = run_ranks(1, loads_of_steps, 12)
    assert loads[0] == 2.0  # half of the experts have all of it
    assert min(loads[-4:]) < 1.6


def test_a_skipped_step_moves_nothing_and_starts_counting_anew() -> None:
    """As the optimizer."""
    model = build()
    balance = RouterBalance(model, rate=0.25)
    before = [bias.clone() for bias in biases_of(model)]
    with torch.no_grad():
        model(input_ids=micro_batch(0, zero_tokens=False)[0])
    balance.update(balance.counts(), move=False)
    assert all(torch.equal(a, b) for a, b in zip(before, biases_of(model), strict=True))
    assert not balance.counts().any()


def test_an_attention_mask_serves_as_the_mask_and_one_of_another_size_is_refused() -> None:
    """It holds for one forward; without any, all tokens count."""
    model = build()
    balance = RouterBalance(model, rate=0.25)
    tokens, _ = micro_batch(0, zero_tokens=False)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=mask)
        assert balance.counts().sum(1).tolist() == [2 * int(mask.sum())] * 2
        model(input_ids=tokens)
        assert balance.counts().sum(1).tolist() == [2 * int(mask.sum()) + 2 * tokens.numel()] * 2
        balance.use_mask(mask[:1])
        with pytest.raises(RouterBiasError, match="expected: one entry for each of 50 tokens\ngot: shape \\(1, 25\\)"):
            model(input_ids=tokens)


def test_after_an_error_in_forward_and_after_removal_nothing_counts() -> None:
    """A router called by itself is no part of a step."""
    model = build()
    balance = RouterBalance(model, rate=0.25)
    router = model.get_submodule("model.layers.3.mlp.gate")
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 10_000))
    router(torch.zeros(1, 4, 64, dtype=torch.bfloat16))
    assert not balance.counts().any()
    balance.remove()
    choices_by_hand(model, [micro_batch(0, zero_tokens=False)])
    assert not balance.counts().any()


def test_what_cannot_be_balanced_is_refused() -> None:
    """No routers, biases that lost their bits, a rate below 0; counts of nothing."""
    with pytest.raises(RouterBiasError, match="got: 0 routers"):
        RouterBalance(nn.Linear(2, 2), rate=0.1)
    with pytest.raises(RouterBiasError, match=r"rate -0\.1"):
        RouterBalance(build(), rate=-0.1)
    with pytest.raises(RouterBiasError, match=r"dtypes \['torch.bfloat16'\]"):
        RouterBalance(build().bfloat16(), rate=0.1)
    balance = RouterBalance(build(), rate=0.1)
    with pytest.raises(RouterBiasError, match=r"tokens per router \[0, 0\]"):
        balance.update(balance.counts())
