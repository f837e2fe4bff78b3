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

from dsv4_fsdp.plan import ShardingPlan

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
    """The collectives for parameters and gradients of one step with one micro-batch, unit by unit.

    A group of several compute dtypes (torch's native override) travels as bytes.
    """
    shard = plan.mesh_shape[-1]
    replicate = plan.mesh_shape[0] if len(plan.mesh_shape) == 2 else None
    for unit in plan.units:
        for group in unit.groups:
            compute = group.computes[0] if len(group.computes) == 1 else "uint8"
            if shard > 1:
                yield Collective("all_gather", "shard", compute, shard, group.all_gather_bytes)
                if unit.gathers_in_backward:
                    reshard = unit.reshard_after_forward
                    # A number of ranks: what they share after forward is gathered among these only.
                    ranks = shard if isinstance(reshard, bool) or reshard is None else reshard
                    yield Collective("all_gather", "shard", compute, ranks, group.all_gather_bytes)
            if group.reduce_scatter_bytes:
                assert group.reduce is not None
                if shard > 1:
                    yield Collective("reduce_scatter", "shard", group.reduce, shard, group.reduce_scatter_bytes)
                if replicate is not None:
                    payload = group.reduce_scatter_bytes // shard
                    yield Collective("all_reduce", "replicate", group.reduce, replicate, payload)


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
