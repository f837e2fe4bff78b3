"""Experts dealt to ranks: the same forward, the same gradients, as planned."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases_expert_parallel import apply_and_step, ep_lockstep
from reference import assert_lockstep
from tiny_models import tiny_transformers

from dsv4_fsdp import ShardingError, plan_sharding
from pool import run_ranks

MESHES = [((2,), 2), ((4,), 2), ((4,), 4), ((2, 2), 2)]
IDS = ["2-ep2", "4-ep2", "4-ep4", "2x2-ep2"]


@pytest.mark.parametrize(("shape", "expert_parallel"), MESHES, ids=IDS)
def test_forward_and_gradients_are_those_of_the_unsharded_model(shape: tuple[int, ...], expert_parallel: int) -> None:
    """Ranks of mixed lengths, three micro-batches; experts' gradients are not ``expert_parallel`` times too large."""
    results = run_ranks(math.prod(shape), ep_lockstep, shape, expert_parallel)
    # Of a parameter's change in one step, 2**-8 is the last bit of a bf16 weight.
    assert_lockstep(results, param_tol=2**-8, zero_for_none="any")


@pytest.mark.parametrize("kwargs", [{}, {"activation_checkpointing": True, "island_units": "root"}], ids=str)
def test_dealt_experts_fewer_than_ranks_are_cut_through(kwargs: dict[str, Any]) -> None:
    """Two experts on EP 2 x FSDP 2: one for two ranks, cut along its rows (``even_dim``) and not padded to two."""
    results = run_ranks(4, ep_lockstep, (4,), 2, num_experts=2, **kwargs)
    assert_lockstep(results, param_tol=2**-8, zero_for_none="any")
    plan = plan_sharding(tiny_transformers(n_routed_experts=2), mesh_shape=(4,), expert_parallel=2)
    experts = [p for unit in plan.units if unit.role == "experts" for group in unit.groups for p in group.params]
    assert {param.shard_dim for param in experts} == {1}


@pytest.mark.parametrize("expert_parallel", [1, 2, 4])
def test_gradients_in_fp32_do_not_depend_on_the_number_of_ranks_that_share_experts(expert_parallel: int) -> None:
    """EP 1, 2 and 4 on four ranks, with SGD, to the rounding of fp32 sums that are taken in another order."""
    for result in run_ranks(4, ep_lockstep, (4,), expert_parallel, dtype=torch.float32):
        (step,) = result.steps
        # An expert's product over another number of tokens adds up in another order: a few last bits of fp32 (6e-8
        # each) per layer, in logits of size 1. A gradient that is counted twice is off by 1.
        assert step.logit_error < 1e-5
        assert step.grad_error < 2e-5
        assert step.param_error < 1e-6
        assert step.none_mismatch == []


@pytest.mark.parametrize(("shape", "expert_parallel"), MESHES, ids=IDS)
def test_what_was_built_and_sent_is_what_the_plan_says(shape: tuple[int, ...], expert_parallel: int) -> None:
    """Bytes with padding, collectives by kind, and the plan of the model before its experts were dealt."""
    ways = ({}, {"activation_checkpointing": True}, {"activation_checkpointing": 2}, {"island_units": "root"})
    for kwargs in ways:
        for found in run_ranks(math.prod(shape), apply_and_step, shape, expert_parallel, **kwargs):
            planned = {unit.fqn: [group.shard_bytes for group in unit.groups] for unit in found.plan.units}
            assert found.shard_bytes == planned
            assert found.collectives == {k: n for k, n in found.plan.collectives_per_step().items() if n}
            assert found.planned_before == found.plan
    assert f"experts dealt to {expert_parallel} ranks" in found.plan.table()


@pytest.mark.parametrize(
    ("build", "kwargs", "expected", "got"),
    [
        (tiny_transformers, {"mesh_shape": (4,), "expert_parallel": 3}, "a divisor of the shard axis' size 4", "3"),
        (tiny_transformers, {"mesh_shape": (4,), "expert_parallel": 0}, "a divisor of the shard axis' size 4", "0"),
        (
            tiny_transformers,
            {"mesh_shape": (16,), "expert_parallel": 16},
            "a number of experts that 16 divides",
            "4 in model.layers.",
        ),
        (
            tiny_transformers,
            {"mesh_shape": (2,), "expert_parallel": 2, "island_units": "nested"},
            "island_units='grouped' or 'root'",
            "nested",
        ),
    ],
    ids=["no divisor", "zero", "experts", "nested"],
)
def test_experts_that_cannot_be_dealt_are_an_error(build: Any, kwargs: dict[str, Any], expected: str, got: str) -> None:
    """One message, from the plan, before any process group exists."""
    with pytest.raises(ShardingError, match="experts cannot be dealt") as error:
        plan_sharding(build(), **kwargs)
    assert f"expected: {expected}\n" in str(error.value)
    assert got in str(error.value)
