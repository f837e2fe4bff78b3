"""Collectives and bytes of one optimizer step, by kind, mesh axis and dtype; inside nodes and between them.

Two sizes are told apart. The *payload* is the tensor: an all-gather's whole output, a reduce-scatter's whole input, the
buffer of an all-reduce. *Moved* is what one rank sends, and receives, of it. A ring of ``n`` ranks moves ``(n - 1)/n``
of an all-gather's or reduce-scatter's payload, and twice that of an all-reduce's: the least that is possible, and what
NCCL does. Of a ring's ``n`` hops, as many lead from one node to another as it has nodes; that share of what is
moved goes between nodes, on average over the ranks (NCCL runs several rings with different entry ranks, which evens
it out).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_fsdp.plan import GroupPlan, ShardingPlan, UnitPlan

from .settings import Cluster

__all__ = ["Collective", "Traffic", "collectives", "traffic"]


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        axis: ``"shard"`` or ``"replicate"``.
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


def collectives(plan: ShardingPlan) -> Iterator[Collective]:
    """The collectives for parameters and gradients of one step with one micro-batch, in the order in which they start.

    Forward gathers the root, then the units as they run. In backward each unit, while it is at work, has the one before
    it gathered, last group first (``parallelize`` says so); then it reduces, last group first, each all-reduce right
    after its reduce-scatter. Gradients of a unit whose input needs none (the first that trains) wait
    for the end of backward, and so do the root's, which go before them. The order is that of grouped units; with
    nested ones it is the plan's.
    """
    *running, root = plan.units
    for unit in (root, *running):
        for group in unit.groups:
            yield from _gather(plan, group, plan.mesh_shape[-1])
    # Where the root holds the embedding, what it passes on needs a gradient.
    first = None if root.trains and running[0].role != "embedding" else next((u for u in running if u.trains), None)
    gathered: set[int] = set()
    for position in reversed(range(len(running))):
        unit = running[position]
        previous = running[position - 1] if position else None
        wanted = [(unit, group) for group in reversed(unit.groups)]
        if previous is not None:
            wanted += [(previous, group) for group in reversed(previous.groups)]
        for owner, group in wanted:
            if owner.gathers_in_backward and id(group) not in gathered:
                gathered.add(id(group))
                reshard = owner.reshard_after_forward
                # A number of ranks: what they share after forward is gathered among these only.
                ranks = plan.mesh_shape[-1] if isinstance(reshard, bool) or reshard is None else reshard
                yield from _gather(plan, group, ranks)
        if unit is not first:
            yield from _reduce(plan, unit)
    yield from _reduce(plan, root)
    if first is not None:
        yield from _reduce(plan, first)


def _gather(plan: ShardingPlan, group: GroupPlan, ranks: int) -> Iterator[Collective]:
    # A group of several compute dtypes (torch's native override) travels as bytes.
    dtype = group.computes[0] if len(group.computes) == 1 else "uint8"
    if plan.mesh_shape[-1] > 1:
        yield Collective("all_gather", "shard", dtype, ranks, group.all_gather_bytes)


def _reduce(plan: ShardingPlan, unit: UnitPlan) -> Iterator[Collective]:
    shard = plan.mesh_shape[-1]
    for group in reversed(unit.groups):
        if group.reduce_scatter_bytes:
            assert group.reduce is not None
            if shard > 1:
                yield Collective("reduce_scatter", "shard", group.reduce, shard, group.reduce_scatter_bytes)
            if len(plan.mesh_shape) == 2:
                payload = group.reduce_scatter_bytes // shard
                yield Collective("all_reduce", "replicate", group.reduce, plan.mesh_shape[0], payload)


def traffic(plan: ShardingPlan, cluster: Cluster, *, micro_batches: int = 1) -> tuple[Traffic, ...]:
    """:func:`collectives` added up by kind, axis and dtype, for ranks that lie in ``cluster``'s nodes."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for collective in collectives(plan):
        between = _share_between_nodes(collective, plan.mesh_shape[-1], cluster.ranks_per_node)
        passes = 2 if collective.kind == "all_reduce" else 1
        moved = passes * collective.payload_bytes * (collective.group_size - 1) // collective.group_size
        inter = round(moved * between)
        row = sums.setdefault((collective.kind, collective.axis, collective.dtype), [0, 0, 0, 0])
        for place, value in enumerate((1, collective.payload_bytes, moved - inter, inter)):
            row[place] += micro_batches * value
    return tuple(Traffic(*key, *row) for key, row in sums.items())


def _share_between_nodes(collective: Collective, shard_size: int, ranks_per_node: int) -> float:
    """Of the hops of the ring, the share that leaves a node. The first group of the axis stands for all."""
    stride = 1 if collective.axis == "shard" else shard_size
    nodes = [index * stride // ranks_per_node for index in range(collective.group_size)]
    # Ranks of a node are neighbours in the ring.
    num_nodes = len(set(nodes))
    return num_nodes / len(nodes) if num_nodes > 1 else 0.0
