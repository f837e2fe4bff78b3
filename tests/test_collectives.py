"""What is on the wire: how many collectives, in which dtype, of which size."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from cases_collectives import eight_nemo_blocks, recorded_step, reductions_of_a_thawed_block
from reference import LockstepResult, assert_lockstep
from tiny_models import ModelKind, require_nemo

from dsv4_fsdp.torch_private import has_native_override
from pool import run_ranks


def _counts(result: LockstepResult) -> dict[str, int]:
    return dict(Counter(c.kind for step in result.steps for c in step.collectives))


def test_grouped_units_need_a_third_of_the_collectives_of_nested_units() -> None:
    """The 8-block NeMo model at 256 tokens on 2 ranks: NeMo's own, ours nested, grouped, with islands in the root."""
    require_nemo()
    theirs, nested, grouped, in_root = (
        run_ranks(2, eight_nemo_blocks, units) for units in ("nemo-automodel", "nested", "grouped", "root")
    )
    assert _counts(theirs[0]) == {"all_gather": 97, "reduce_scatter": 53, "all_reduce": 4}
    assert _counts(nested[0]) == _counts(theirs[0])
    assert _counts(grouped[0]) == {"all_gather": 36, "reduce_scatter": 19}
    assert_lockstep(grouped)
    # Per block two all-gathers and a reduce-scatter, as of one dtype, whose embedding and head are in the root (17 and
    # 9). Here these are units, and the root has two dtypes.
    assert _counts(in_root[0]) == {"all_gather": 20, "reduce_scatter": 12}
    assert_lockstep(in_root)
    # Nested units cast what enters and leaves an island, which the unsharded model does not do.
    assert not all(theirs[0].bit_equal)
    assert theirs[0].worst_logit_error == nested[0].worst_logit_error


@pytest.mark.parametrize("islands", ["grouped", "root"])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_islands_travel_in_fp32_and_the_rest_in_bf16(kind: ModelKind, mesh: tuple[int, ...], islands: str) -> None:
    """Each all-gather's dtype and size, and each reduction's, as the plan says for its parameter group."""
    if kind == "nemo":
        require_nemo()
    shard = mesh[-1]
    for plan, forward, backward in run_ranks(math.prod(mesh), recorded_step, kind, mesh, island_units=islands):
        groups = [group for unit in plan.units for group in unit.groups]
        islands = [g for g in groups if all(p.island for p in g.params)]
        assert 0 < len(islands) < len(groups)
        assert all(p.island == (p.compute == "float32") for g in groups for p in g.params)

        gathered = Counter((c.dtype, c.numel) for c in forward if c.kind == "all_gather")
        # One rank's input: its shard, in the compute dtype.
        expected = Counter(
            (_dtype(g.computes[0]), _shard_numel(g.all_gather_bytes, g.computes[0], shard)) for g in groups
        )
        assert gathered == expected

        trainable = [g for g in groups if g.reduce_scatter_bytes]
        reduced = Counter((c.dtype, c.numel) for c in backward if c.kind == "reduce_scatter")
        assert reduced == Counter((torch.float32, g.reduce_scatter_bytes // 4) for g in trainable)
        all_reduces = [c for c in forward + backward if c.kind == "all_reduce"]
        assert len(all_reduces) == (len(trainable) if len(mesh) == 2 else 0)
        assert all(c.dtype == torch.float32 for c in all_reduces)


@pytest.mark.skipif(not has_native_override(), reason="torch < 2.15 has no param_dtype_override_fn: two per unit")
@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_with_master_weights_the_native_override_needs_one_all_gather_per_unit_and_pass(kind: ModelKind) -> None:
    """fp32 storage throughout: islands ride with the weights of their unit, each in its own compute dtype."""
    if kind == "nemo":
        require_nemo()
    for plan, forward, backward in run_ranks(2, recorded_step, kind, (2,), master_weights=True):
        units = [unit for unit in plan.units if unit.groups]
        floating = [[group for group in unit.groups if group.reduce is not None] for unit in units]
        assert {len(groups) for groups in floating} == {1}
        assert any(len(group.computes) == 2 for groups in floating for group in groups)
        others = sum(len(unit.groups) - 1 for unit in units)  # integer tables have a group of their own
        gathers = Counter(c.kind for c in forward)["all_gather"], Counter(c.kind for c in backward)["all_gather"]
        again = [unit for unit in units if unit.gathers_in_backward]
        assert gathers == (len(units) + others, len(again) + sum(len(unit.groups) - 1 for unit in again))
        trained = [unit for unit in units if unit.trainable_fqns]
        assert Counter(c.kind for c in backward)["reduce_scatter"] == len(trained)


def test_a_block_that_is_thawed_after_its_first_step_reduces_in_fp32() -> None:
    """torch before 2.15 takes a group's dtypes from what is trainable at its first forward: here, nothing."""
    for dtypes in run_ranks(2, reductions_of_a_thawed_block, "transformers"):
        assert dtypes == {torch.float32}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _shard_numel(all_gather_bytes: int, compute: str, shard: int) -> int:
    return all_gather_bytes // _dtype(compute).itemsize // shard
