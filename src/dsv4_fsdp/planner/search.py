"""Try the configurations that were not ruled out, and rank those that fit by what they send.

What varies: replicas (FSDP over all ranks; HSDP within a node, and within 2, 4, ... nodes), expert parallelism (within
a node, as wide as possible, none), storage dtype, resharding, CPU offload and activation checkpointing (every block or
none). What the command line said is left alone, and so are batch, sequence, optimizer and attention.

Fitting ones are ordered by the bytes on slow ways (between nodes, and with offload between host and device), then by
bytes in all, then by recomputing, which costs time that bytes do not show; fp32 masters come before bf16 storage where
all else is equal, being safer to train with. Host memory is shown and not judged: the command does not know how much
a node has.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from .estimate import Estimate, Estimator
from .render import gib, section
from .settings import STORAGES, Cluster, Request, TrainingSettings

__all__ = ["Candidate", "Found", "candidate_settings", "search_configurations", "search_text"]


@dataclass(frozen=True)
class Candidate:
    """A configuration that was tried; ``reason`` says why it does not fit, ``""`` if it does."""

    estimate: Estimate
    reason: str

    def as_dict(self) -> dict[str, Any]:
        estimate = self.estimate
        return {
            "settings": asdict(estimate.settings),
            "needed_bytes": estimate.needed_bytes,
            "spare_bytes": estimate.spare_bytes,
            "moved_bytes": estimate.moved_bytes,
            "inter_node_bytes": estimate.inter_node_bytes,
            "host_copy_bytes": estimate.host_copy_bytes,
            "host_bytes_per_node": estimate.host.offload,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Found:
    """All that was tried: the fitting ones, best first, and the others, nearest to fitting first."""

    model: str
    cluster: Cluster
    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "cluster": asdict(self.cluster),
            "fitting": [candidate.as_dict() for candidate in self.fitting],
            "rejected": [candidate.as_dict() for candidate in self.rejected],
        }


def candidate_settings(
    request: Request, *, num_experts: int = 0, storages: Iterable[str] = STORAGES
) -> Iterator[TrainingSettings]:
    """Every combination of what ``request`` left open.

    Args:
        num_experts: routed experts of a layer that can be dealt to ranks.
        storages: the storage dtypes that the model can be trained in.
    """
    settings, given, cluster = request.settings, request.given, request.cluster

    def values(name: str, options: Iterable[Any]) -> list[Any]:
        return [getattr(settings, name)] if name in given else list(options)

    for replicate, storage, reshard, offload, checkpointing in itertools.product(
        values("replicate", cluster.replica_counts),
        values("storage", storages),
        values("reshard_after_forward", (True, False)),
        values("offload", (False, True)),
        values("activation_checkpointing", (0, 1)),
    ):
        shard = cluster.ranks // replicate
        for experts in values("expert_parallel", cluster.expert_parallel_sizes(replicate, num_experts)):
            if shard % experts == 0:
                yield replace(
                    settings,
                    replicate=replicate,
                    expert_parallel=experts,
                    storage=storage,
                    reshard_after_forward=reshard if isinstance(reshard, bool) or shard % reshard == 0 else True,
                    offload=offload,
                    activation_checkpointing=checkpointing,
                )


def search_configurations(estimator: Estimator, request: Request) -> Found:
    """Estimate every candidate. ``request`` must name the device memory."""
    candidates = []
    for settings in candidate_settings(request, num_experts=estimator.num_experts, storages=estimator.storages):
        estimate = estimator.estimate(request.cluster, settings)
        candidates.append(Candidate(estimate, _reason(estimate)))
    return Found(
        estimator.name,
        request.cluster,
        tuple(sorted((c for c in candidates if not c.reason), key=lambda c: _cost(c.estimate))),
        tuple(sorted((c for c in candidates if c.reason), key=lambda c: c.estimate.needed_bytes)),
    )


def _reason(estimate: Estimate) -> str:
    spare = estimate.spare_bytes
    assert spare is not None, "a search needs the device memory"
    if spare >= 0:
        return ""
    name, size = max(estimate.peak.terms.items(), key=lambda term: term[1])
    return f"{gib(-spare)} too much: {name} {gib(size)}"


def _cost(estimate: Estimate) -> tuple[Any, ...]:
    settings = estimate.settings
    return (
        estimate.inter_node_bytes + estimate.host_copy_bytes,
        estimate.moved_bytes,
        settings.activation_checkpointing,
        settings.storage != "fp32",
    )


def search_text(found: Found, *, limit: int = 12) -> RenderableType:
    """For a terminal: the best one first, then the fitting ones, then those that do not fit and why."""
    memory = gib(found.cluster.device_memory_bytes or 0)
    num_tried = len(found.fitting) + len(found.rejected)
    head = f"of {num_tried} configurations fit {memory} per device ({found.model}, {found.cluster.ranks} ranks)"
    if found.fitting:
        best = found.fitting[0].estimate
        lines = [
            Text(f"{len(found.fitting)} {head}", style="bold green"),
            Text(f"Least moved: {best.settings.describe(found.cluster)}"),
            Text(
                f"It needs {gib(best.needed_bytes)}, {gib(best.spare_bytes or 0)} to spare; a step moves "
                f"{gib(best.moved_bytes)} per rank, {gib(best.inter_node_bytes)} between nodes"
            ),
        ]
    else:
        nearest = found.rejected[0]
        reasons = Counter(max(c.estimate.peak.terms, key=lambda t: c.estimate.peak.terms[t]) for c in found.rejected)
        lines = [
            Text(f"None {head}", style="bold red"),
            Text(f"Nearest: {nearest.estimate.settings.describe(found.cluster)}: {nearest.reason}"),
            Text("In the way: " + ", ".join(f"{name} ({count} times)" for name, count in reasons.most_common(3))),
        ]
    fits = section(["configuration", "needs", "moved", "between", "copies", "host"])
    for column in fits.columns[1:]:
        column.min_width = len("1,000.0")  # a long configuration is cut, not a number
    for candidate in found.fitting[:limit]:
        estimate = candidate.estimate
        offload = (estimate.host_copy_bytes, estimate.host.offload) if estimate.settings.offload else ()
        sizes = (estimate.needed_bytes, estimate.moved_bytes, estimate.inter_node_bytes, *offload)
        fits.add_row(estimate.settings.describe(found.cluster), *(f"{size / 2**30:,.1f}" for size in sizes))
    if len(found.fitting) > limit:
        fits.add_row(f"... and {len(found.fitting) - limit} more (--json has all)")
    rejected = section(["configuration", "why"])
    rejected.columns[1].justify = "left"
    rejected.columns[1].min_width = 40
    for candidate in found.rejected[:limit]:
        rejected.add_row(candidate.estimate.settings.describe(found.cluster), candidate.reason)
    if len(found.rejected) > limit:
        rejected.add_row(f"... and {len(found.rejected) - limit} more (--json has all)", "")
    parts: list[RenderableType] = [*lines, Text("")]
    parts += (
        [
            Text("Fitting, least moved first (GiB per device, moved per step and between nodes of it;", style="bold"),
            Text("copies to and from the host per step; offloaded to the host per node)", style="bold"),
            fits,
            Text(""),
        ]
        if found.fitting
        else []
    )
    parts += [Text("Not fitting, nearest first", style="bold"), rejected, Text("")] if found.rejected else []
    return Group(*parts)
