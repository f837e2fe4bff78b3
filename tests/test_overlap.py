"""What is in flight while a unit computes, and what never shares a buffer."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
from cases_overlap import Event, reductions_of_a_step, step_events
from tiny_models import ModelKind, require_nemo

from dsv4_fsdp import ShardingPlan
from dsv4_fsdp.plan import UnitPlan
from pool import run_ranks


@pytest.mark.parametrize("islands", ["grouped", "root"])
@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("transformers", False), ("transformers", True), ("nemo", False)], ids=str
)
def test_all_groups_of_the_next_unit_are_in_flight_while_one_computes(
    kind: ModelKind, checkpointing: bool, islands: str
) -> None:
    """The recorded order of gathers and computations is the planned one, forward and backward, on each rank."""
    if kind == "nemo":
        require_nemo()
    kwargs = {"activation_checkpointing": checkpointing, "island_units": islands}
    for plan, forward, backward in run_ranks(2, step_events, kind, **kwargs):
        assert islands == "root" or any(len(unit.groups) == 2 for unit in plan.units)
        assert forward == _planned_forward(plan)
        # A recomputed block begins twice, its forward and its backward, with nothing gathered in between.
        begun = [event for event, _ in groupby(event for event in backward if event != ("compute", ""))]
        assert begun == _planned_backward(plan)


def _planned_forward(plan: ShardingPlan) -> list[Event]:
    *running, root = plan.units
    events = [*_gathers(root), ("compute", ""), *_gathers(running[0])]
    for unit, following in zip(running, [*running[1:], None], strict=True):
        events += [*(_gathers(following) if following else []), ("compute", unit.fqn)]
    return events


def _planned_backward(plan: ShardingPlan) -> list[Event]:
    running = [*reversed(plan.units[:-1])]
    events: list[Event] = []
    for unit, following in zip(running, [*running[1:], None], strict=True):
        gathered = following is not None and following.gathers_in_backward
        events += [*(reversed(_gathers(following)) if gathered and following else []), ("compute", unit.fqn)]
    return events


def _gathers(unit: UnitPlan) -> list[Event]:
    return [("gather", f"{unit.fqn}/{number}") for number in range(len(unit.groups))]


@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_each_vocabulary_table_is_reduced_in_a_buffer_of_its_own(kind: ModelKind) -> None:
    """Embedding and head: one reduce-scatter each, of exactly the table; no other is as large as both."""
    if kind == "nemo":
        require_nemo()
    for plan, reduced in run_ranks(2, reductions_of_a_step, kind):
        tables = [
            math.prod(param.shape)
            for unit in plan.units
            for group in unit.groups
            for param in group.params
            if param.fqn in ("model.embed_tokens.weight", "lm_head.weight")
        ]
        alone = [[p.fqn for g in u.groups for p in g.params] for u in plan.units if u.role in ("embedding", "head")]
        assert alone == [["model.embed_tokens.weight"], ["lm_head.weight"]]
        assert len(tables) == 2
        assert all(reduced.count(numel) >= 1 for numel in tables)
        # All trainable elements once: so neither table is in another buffer too.
        groups = [g for u in plan.units for g in u.groups if g.reduce_scatter_bytes]
        assert sum(reduced) == sum(g.reduce_scatter_bytes for g in groups) // 4
