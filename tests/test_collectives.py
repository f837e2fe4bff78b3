"""What is on the wire: how many collectives, in which dtype, of which size."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from cases_collectives import eight_nemo_blocks, recorded_step
from reference import LockstepResult, assert_lockstep
from tiny_models import ModelKind, require_nemo

from pool import run_ranks


def _counts(result: LockstepResult) -> dict[str, int]:
    return dict(Counter(c.kind for step in result.steps for c in step.collectives))


def test_grouped_units_need_a_third_of_the_collectives_of_nested_units() -> None:
    """The 8-block NeMo model at 256 tokens on 2 ranks, three ways in one run: NeMo's own, ours nested, ours grouped."""
    require_nemo()
    theirs, nested, grouped = (
        run_ranks(2, eight_nemo_blocks, units) for units in ("nemo-automodel", "nested", "grouped")
    )
    assert _counts(theirs[0]) == {"all_gather": 97, "reduce_scatter": 53, "all_reduce": 4}
    assert _counts(nested[0]) == _counts(theirs[0])
    assert _counts(grouped[0]) == {"all_gather": 36, "reduce_scatter": 19}
    assert_lockstep(grouped)
    # Nested units cast what enters and leaves an island, which the unsharded model does not do.
    assert not all(theirs[0].bit_equal)
    assert theirs[0].worst_logit_error == nested[0].worst_logit_error


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_islands_travel_in_fp32_and_the_rest_in_bf16(kind: ModelKind, mesh: tuple[int, ...]) -> None:
    """Each all-gather's dtype and size, and each reduction's, as the plan says for its parameter group."""
    if kind == "nemo":
        require_nemo()
    shard = mesh[-1]
    for plan, forward, backward in run_ranks(math.prod(mesh), recorded_step, kind, mesh):
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


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _shard_numel(all_gather_bytes: int, compute: str, shard: int) -> int:
    return all_gather_bytes // _dtype(compute).itemsize // shard
