"""Collectives and bytes of one optimizer step, by kind, mesh axis and dtype; inside nodes and between them.

Two sizes are told apart. The *payload* is the tensor: an all-gather's whole output, a reduce-scatter's whole input, the
buffer of an all-reduce. *Moved* is what one rank sends, and receives, of it. A ring of ``n`` ranks moves ``(n - 1)/n``
of an all-gather's or reduce-scatter's payload, and twice that of an all-reduce's: the least that is possible, and what
NCCL does. Of a ring's ``n`` hops, as many lead from one node to another as it has nodes; that share of what is
moved goes between nodes, on average over the ranks (NCCL runs several rings with different entry ranks, which evens
it out).

An all-to-all's payload is what a rank hands in. How many tokens go to which expert is known to nobody before the run:
what is planned is as many to each, so that ``1/n`` of the rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from dsv4_fsdp.plan import GroupPlan, ShardingPlan, UnitPlan

from .settings import Cluster

__all__ = ["Collective", "Dispatch", "Traffic", "collectives", "traffic"]


@dataclass(frozen=True)
class Dispatch:
    """What a micro-batch sends to experts under expert parallelism, in one layer and from one rank.

    Attributes:
        rows: (token, expert) pairs: tokens times experts per token.
        hidden: elements of a row.
        num_experts: routed experts of the layer.
    """

    rows: int
    hidden: int
    num_experts: int


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        axis: ``"shard"``, ``"replicate"``, ``"expert_shard"`` (ranks that share a part of the experts) or ``"expert"``
            (ranks that the experts are dealt to).
        dtype: on the wire.
        group_size: ranks that take part.
        payload_bytes: see the module.
    """

    kind: str
    axis: str
    dtype: str
    group_size: int
    payload_bytes: int


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind, axis and dtype. Moved bytes are per rank and step."""

    kind: str
    axis: str
    dtype: str
    count: int
    payload_bytes: int
    intra_node_bytes: int
    inter_node_bytes: int

    @property
    def moved_bytes(self) -> int:
        return self.intra_node_bytes + self.inter_node_bytes


def collectives(plan: ShardingPlan, dispatch: Dispatch | None = None) -> Iterator[Collective]:
    """The collectives of one step with one micro-batch, in the order in which they start.

    Forward gathers the root, then the units as they run; a block asks for its dispatched experts and for the unit after
    it, and exchanges tokens then. In backward each unit, when its turn comes, has its own groups gathered that are not
    there yet, then its dispatched experts, and the unit that ran before it: all of their groups, last first
    (``parallelize`` says so). Then it reduces, last group first, each all-reduce right after its reduce-scatter; a
    block's experts do so inside the block's backward. Gradients of a unit whose input needs none (the
    first that trains) wait for the end of backward, and so do the root's, which go before them. The order is that of
    grouped units; with nested ones it is the plan's.

    Args:
        dispatch: without it the all-to-alls of expert parallelism are left out.
    """
    root = plan.units[-1]
    stages = plan.stages
    started: set[int] = set()

    def gather(unit: UnitPlan) -> Iterator[Collective]:
        if id(unit) not in started:
            started.add(id(unit))
            for group in unit.groups:
                yield from _gather(plan, unit, group, plan.shard_size(unit))

    yield from gather(root)
    for stage, following in zip(stages, [*stages[1:], (root,)], strict=True):
        for unit in (*stage, following[0]):
            yield from gather(unit)
        if dispatch is not None:
            for unit in stage[1:]:
                yield from _exchange(plan, unit, dispatch, "forward")
    backward = _Backward(plan)
    trained = (u for stage in stages for u in stage if plan.trains(u))
    first = None if plan.embedding_trains_in_root else next(trained, None)
    yield from backward.arrive(root)
    for stage in reversed(stages):
        block = stage[0]
        if not plan.gradient_arrives_at(block):
            continue  # gathered at most, by the unit after it
        yield from backward.arrive(block)
        for unit in stage[1:]:
            if dispatch is not None and plan.recomputes(block):
                yield from _exchange(plan, unit, dispatch, "forward")
            yield from backward.arrive(unit)
            if dispatch is not None:
                yield from _exchange(plan, unit, dispatch, "backward")
            if unit is not first:
                yield from _reduce(plan, unit)
        if block is not first:
            yield from _reduce(plan, block)
    yield from _reduce(plan, root)
    if first is not None:
        yield from _reduce(plan, first)


class _Backward:
    """Which groups backward has gathered so far."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        # What a unit asks for when its turn comes: see `parallelize`. Dispatched experts ask for nothing.
        self._asks_for = {
            id(current): [*reversed(its_experts), previous]
            for (previous, *_), (current, *its_experts) in pairwise([*plan.stages, (plan.units[-1],)])
        }
        self._gathered: set[int] = set()

    def arrive(self, unit: UnitPlan) -> Iterator[Collective]:
        """The gathers that start when the gradient of the unit's output is there."""
        for group in unit.groups:
            yield from self._need(unit, group)
        for wanted in self._asks_for.get(id(unit), ()):
            for group in reversed(wanted.groups):
                yield from self._need(wanted, group)

    def _need(self, unit: UnitPlan, group: GroupPlan) -> Iterator[Collective]:
        if unit.gathers_in_backward and id(group) not in self._gathered:
            self._gathered.add(id(group))
            reshard = unit.reshard_after_forward
            # A number of ranks: what they share after forward is gathered among these only.
            ranks = self._plan.shard_size(unit) if isinstance(reshard, bool) or reshard is None else reshard
            yield from _gather(self._plan, unit, group, ranks)


def _shard_axis(unit: UnitPlan) -> str:
    return "expert_shard" if unit.role == "experts" else "shard"


def _gather(plan: ShardingPlan, unit: UnitPlan, group: GroupPlan, ranks: int) -> Iterator[Collective]:
    # A group of several compute dtypes (torch's native override) travels as bytes.
    dtype = group.computes[0] if len(group.computes) == 1 else "uint8"
    if plan.shard_size(unit) > 1:
        yield Collective("all_gather", _shard_axis(unit), dtype, ranks, group.all_gather_bytes)


def _reduce(plan: ShardingPlan, unit: UnitPlan) -> Iterator[Collective]:
    shard = plan.shard_size(unit)
    for group in reversed(unit.groups):
        if group.reduce_scatter_bytes:
            assert group.reduce is not None
            if shard > 1:
                yield Collective("reduce_scatter", _shard_axis(unit), group.reduce, shard, group.reduce_scatter_bytes)
            if len(plan.mesh_shape) == 2:
                payload = group.reduce_scatter_bytes // shard
                yield Collective("all_reduce", "replicate", group.reduce, plan.mesh_shape[0], payload)


def _exchange(plan: ShardingPlan, unit: UnitPlan, dispatch: Dispatch, direction: str) -> Iterator[Collective]:
    """Forward: how many rows for each expert, the rows, the results. Backward: the gradients of these two."""
    dtype = unit.groups[0].computes[0]
    rows = dispatch.rows * dispatch.hidden * getattr(torch, dtype).itemsize
    if direction == "forward":
        yield Collective("all_to_all", "expert", "int64", plan.expert_parallel, dispatch.num_experts * 8)
    for _ in range(2):
        yield Collective("all_to_all", "expert", dtype, plan.expert_parallel, rows)


def traffic(
    plan: ShardingPlan, cluster: Cluster, *, micro_batches: int = 1, dispatch: Dispatch | None = None
) -> tuple[Traffic, ...]:
    """:func:`collectives` added up by kind, axis and dtype, for ranks that lie in ``cluster``'s nodes."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for collective in collectives(plan, dispatch):
        between = _share_between_nodes(collective, plan, cluster.ranks_per_node)
        passes = 2 if collective.kind == "all_reduce" else 1
        moved = passes * collective.payload_bytes * (collective.group_size - 1) // collective.group_size
        inter = round(moved * between)
        row = sums.setdefault((collective.kind, collective.axis, collective.dtype), [0, 0, 0, 0])
        for place, value in enumerate((1, collective.payload_bytes, moved - inter, inter)):
            row[place] += micro_batches * value
    return tuple(Traffic(*key, *row) for key, row in sums.items())


def _share_between_nodes(collective: Collective, plan: ShardingPlan, ranks_per_node: int) -> float:
    """The share of what is moved that leaves a node. The first group of the axis stands for all."""
    stride = {"shard": 1, "expert": 1, "expert_shard": plan.expert_parallel, "replicate": plan.mesh_shape[-1]}
    nodes = [index * stride[collective.axis] // ranks_per_node for index in range(collective.group_size)]
    if collective.kind == "all_to_all":
        # Each sends to each other, as much to one as to another.
        elsewhere = sum(node != other for node in nodes for other in nodes)
        return elsewhere / max(1, len(nodes) * (len(nodes) - 1))
    # Ranks of a node are neighbours in the ring.
    num_nodes = len(set(nodes))
    return num_nodes / len(nodes) if num_nodes > 1 else 0.0
