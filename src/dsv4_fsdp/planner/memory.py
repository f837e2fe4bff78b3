"""Bytes per rank, by name: what is there all the time, what each unit needs for a while, and a step moment by moment.

What stays (parameters, gradients, optimizer state) is exact, with padding: FSDP2 pads dim 0 of a parameter to a
multiple of the shard axis (another dim divides, or is not cut: :func:`dsv4_fsdp.plan.even_dim`), keeps padded shards,
and reduces into padded gradients; the optimizer's state is not padded, so the first rank of the shard axis has most of
it and is the one that is planned. Under expert parallelism a rank has its part of the experts, and of that its shard.

What comes and goes follows FSDP2's own order (``_fsdp_param_group.py`` of torch 2.13): in forward a unit's flat
all-gather output is held until the next unit is copied out, while the next unit's gather is in flight; in backward
the unit before is gathered while a unit computes, its unsharded gradients exist until they are copied into the
reduce-scatter's input, and that input is held until the next unit reduces. This is the order of allocations as the
caching allocator sees it with all streams running as issued; fragmentation is in the margin.

Upper bounds, on purpose: a recomputed block's forward counts what it would keep without checkpointing, all of a
unit's gradients exist from the start of its backward, and a block works as hard before and after its dispatched experts
as anywhere in it. With several micro-batches the last one is shown, when all gradients are there.

Not counted: NCCL's own buffers and the CUDA context (in the
margin), gradient accumulation without reduction, and torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dsv4_fsdp.names import is_adapter_name
from dsv4_fsdp.plan import GroupPlan, ParamPlan, ShardingPlan, UnitPlan, padded_numel

from .activations import Activations, Part
from .optimizer_state import Roles, algorithm_of, optimizer_state_bytes, optimizer_temporaries
from .settings import Cluster, TrainingSettings

__all__ = [
    "MARGIN_FRACTION",
    "HostMemory",
    "Moment",
    "StateBytes",
    "UnitPeak",
    "buffer_bytes",
    "checkpoint_bytes",
    "host_memory",
    "peak_of",
    "state_bytes",
    "step_moments",
    "unit_peaks",
]

MARGIN_FRACTION = 0.08
"""Share of a device's memory that is left to the CUDA context, NCCL's buffers and the allocator's fragmentation. An
assumption: nothing of this project has run on a GPU yet."""


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found.itemsize


def _padded_numel(plan: ShardingPlan, unit: UnitPlan, param: ParamPlan) -> int:
    """Elements of one rank's shard, with padding."""
    return padded_numel(_held(plan, unit, param), param.shard_dim, plan.shard_size(unit))


def _held(plan: ShardingPlan, unit: UnitPlan, param: ParamPlan) -> tuple[int, ...]:
    """The shape that the rank's unit is gathered to: the whole, or the rank's part of dispatched experts."""
    return (param.shape[0] // (plan.expert_parallel if unit.role == "experts" else 1), *param.shape[1:])


def _local_numel(plan: ShardingPlan, unit: UnitPlan, param: ParamPlan, coordinate: int) -> int:
    """Elements of the shard that the rank at ``coordinate`` of the shard axis has, without padding."""
    held, size, dim = _held(plan, unit, param), plan.shard_size(unit), param.shard_dim
    if unit.role == "experts":
        coordinate //= plan.expert_parallel  # neighbours hold different experts
    rows = math.ceil(held[dim] / size)
    return max(0, min(rows, held[dim] - rows * coordinate)) * math.prod(held) // held[dim]


# --- What stays -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds between steps, islands apart. ``buffers`` are whole on every rank."""

    parameters: int
    island_parameters: int
    gradients: int
    island_gradients: int
    optimizer: int
    island_optimizer: int
    buffers: int


def state_bytes(
    plan: ShardingPlan, *, optimizer: str, roles: Roles | None = None, buffers: int = 0, shard_coordinate: int = 0
) -> StateBytes:
    """Exact bytes of parameters, gradients (after a backward) and optimizer state (after a step) of one rank.

    Args:
        optimizer, roles: see :mod:`.optimizer_state`.
        shard_coordinate: the rank's place on the shard axis; the first has the largest optimizer state.
    """
    sums = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    islands = dict(sums)
    for unit, group, param in _parameters(plan):
        itemsize = _itemsize(group.storage)
        into = islands if param.island else sums
        padded = _padded_numel(plan, unit, param) * itemsize
        into["parameters"] += padded
        if param.trainable:
            into["gradients"] += padded
            into["optimizer"] += optimizer_state_bytes(
                algorithm_of(optimizer, param, roles, num_shards=plan.mesh_shape[-1]),
                local_numel=_local_numel(plan, unit, param, shard_coordinate),
                itemsize=itemsize,
            )
    return StateBytes(
        sums["parameters"], islands["parameters"], sums["gradients"], islands["gradients"],
        sums["optimizer"], islands["optimizer"], buffers,
    )  # fmt: skip


def _parameters(plan: ShardingPlan) -> Iterable[tuple[UnitPlan, GroupPlan, ParamPlan]]:
    return ((unit, group, param) for unit in plan.units for group in unit.groups for param in group.params)


# --- What each unit needs for a while ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitPeak:
    """Bytes that a unit needs while it is gathered and while it reduces, on the device.

    Attributes:
        gathered: its unsharded parameters, padded, in compute dtype; the flat all-gather output is as large.
        all_gather: that flat output; 0 on a shard axis of one rank, where torch copies.
        last_all_gather: the part of it that belongs to the last group, which forward holds longer.
        unsharded_gradients: the gradients that autograd makes, in compute dtype, not padded.
        reduce_scatter_input: padded, in reduce dtype; and, in compute dtype, a copy of the gradients that are cut along
            another dim than the first. (The copy that gathering makes of such is no more than the next unit's output,
            which is in flight right after.)
        reduce_scatter_output: a rank's share of it, before it is cast to the storage dtype.
    """

    unit: UnitPlan
    gathered: int
    all_gather: int
    last_all_gather: int
    unsharded_gradients: int
    reduce_scatter_input: int
    reduce_scatter_output: int
    sharded_gradients: int
    island_gradients: int


def unit_peaks(plan: ShardingPlan) -> tuple[UnitPeak, ...]:
    """One for each unit, in the plan's order."""
    peaks = []
    for unit in plan.units:
        shard = plan.shard_size(unit)
        gathered = sum(group.all_gather_bytes for group in unit.groups)
        reduced = sum(group.reduce_scatter_bytes for group in unit.groups)
        trained = [(group, param) for group in unit.groups for param in group.params if param.trainable]
        copied = sum(math.prod(_held(plan, unit, p)) * _itemsize(p.compute) for _, p in trained if p.shard_dim)
        gradients = {True: 0, False: 0}
        for group, param in trained:
            gradients[param.island] += _padded_numel(plan, unit, param) * _itemsize(group.storage)
        peaks.append(
            UnitPeak(
                unit=unit,
                gathered=gathered,
                all_gather=gathered if shard > 1 else 0,
                last_all_gather=unit.groups[-1].all_gather_bytes if unit.groups and shard > 1 else 0,
                unsharded_gradients=sum(math.prod(_held(plan, unit, p)) * _itemsize(p.compute) for _, p in trained),
                reduce_scatter_input=reduced + copied,
                reduce_scatter_output=reduced // shard,
                sharded_gradients=gradients[False],
                island_gradients=gradients[True],
            )
        )
    return tuple(peaks)


# --- A step, moment by moment -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """What is in a device's memory at one moment of a step: bytes by term, terms of 0 bytes left out."""

    label: str
    terms: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())


def step_moments(
    plan: ShardingPlan, activations: Activations, state: StateBytes, settings: TrainingSettings
) -> tuple[Moment, ...]:
    """The moments of a step's last micro-batch: each unit's forward, backward and reduction, then the optimizer."""
    on_device = 0 if settings.offload else 1
    stays = {
        "parameters": on_device * state.parameters,
        "fp32 islands": on_device * state.island_parameters,
        "optimizer state": on_device * (state.optimizer + state.island_optimizer),
        "buffers": state.buffers,
    }
    peaks = unit_peaks(plan)
    root = peaks[-1]
    islands = sum(p.gathered for p in peaks if p.unit.role == "island")
    stages = _stages(plan, peaks, islands)
    moments: list[Moment] = []
    accumulated = state.gradients + state.island_gradients if settings.micro_batches > 1 else 0
    reduced = 0

    def note(label: str, **terms: int) -> None:
        everything = stays | {
            "gradients": on_device * (accumulated or reduced),
            **{name.replace("_", " "): size for name, size in terms.items()},
        }
        moments.append(Moment(label, {name: size for name, size in everything.items() if size}))

    # Forward. The root is gathered first and stays; so does what is not resharded.
    kept_gathered = root.gathered
    kept = activations.prelude.saved_bytes
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        unit = stage.peak.unit
        note(
            f"forward of {unit.fqn}",
            gathered_parameters=kept_gathered + stage.gathered,
            all_gather_buffers=stage.last_all_gather + (following.peak.all_gather if following is not None else 0),
            saved_activations=kept if unit.role != "embedding" else 0,
            working_memory=stage.part(activations).forward_peak_bytes,
        )
        kept += stage.kept_bytes(activations)
        kept_gathered += stage.stays_gathered
    if stages[-1].peak.unit.role != "head":
        note(
            "forward of the head, in the root unit",
            gathered_parameters=kept_gathered,
            saved_activations=kept,
            working_memory=activations.epilogue.forward_peak_bytes,
        )

    # Backward, from the loss. The epilogue's saved tensors are freed with it.
    held_input = 0
    head = activations.epilogue
    if stages[-1].peak.unit.role != "head":
        last = stages[-1].peak
        note(
            "backward of the head, in the root unit",
            gathered_parameters=kept_gathered,
            all_gather_buffers=last.all_gather if last.unit.gathers_in_backward else 0,
            saved_activations=kept + head.saved_bytes,
            working_memory=head.backward_peak_bytes,
            unsharded_gradients=root.unsharded_gradients,
        )
    root_gradients = 0
    for stage, before in zip(reversed(stages), [*reversed(stages[:-1]), None], strict=True):
        peak, experts = stage.peak, stage.experts
        unit = peak.unit
        prefetched = before.peak.all_gather if before is not None and before.peak.unit.gathers_in_backward else 0
        part = stage.part(activations)
        kept_gathered -= stage.stays_gathered
        saved = kept + (head.saved_bytes if unit.role == "head" else 0)
        working, recomputed = part.backward_peak_bytes, 0
        if stage.recomputed:
            # It is run again first: what it saves is then there during its backward.
            recomputed = part.saved_bytes
            working = max(part.forward_peak_bytes, recomputed + part.backward_peak_bytes)
        gathered = stage.gathered if unit.role != "embedding" or stage.stays_gathered else 0
        if unit.reached_in_backward:
            note(
                f"backward of {unit.fqn}",
                gathered_parameters=kept_gathered + gathered,
                all_gather_buffers=prefetched,
                saved_activations=saved,
                working_memory=working,
                unsharded_gradients=stage.unsharded_gradients + root_gradients,
                reduce_buffers=held_input,
            )
        if experts is not None and experts.reduce_scatter_input:
            inside = {
                "gathered_parameters": kept_gathered + gathered - experts.gathered,
                "all_gather_buffers": prefetched,
                "saved_activations": saved,
            }
            note(
                f"gradient reduction of {experts.unit.fqn}",
                **inside,
                working_memory=recomputed,
                unsharded_gradients=stage.unsharded_gradients + root_gradients,
                reduce_buffers=experts.reduce_scatter_input + experts.reduce_scatter_output,
            )
            held_input = experts.reduce_scatter_input
            reduced += experts.sharded_gradients + experts.island_gradients
            note(
                f"backward of {unit.fqn}, after its experts",
                **inside,
                working_memory=working,
                unsharded_gradients=peak.unsharded_gradients + root_gradients,
                reduce_buffers=held_input,
            )
        if peak.reduce_scatter_input:
            note(
                f"gradient reduction of {unit.fqn}",
                gathered_parameters=kept_gathered,
                all_gather_buffers=prefetched,
                saved_activations=kept,
                unsharded_gradients=peak.unsharded_gradients + root_gradients,
                reduce_buffers=peak.reduce_scatter_input + peak.reduce_scatter_output,
            )
            held_input = peak.reduce_scatter_input
            reduced += peak.sharded_gradients + peak.island_gradients
        if unit.role == "head":
            root_gradients = root.unsharded_gradients  # the last norm's, until the root reduces at the very end
        kept -= stage.kept_bytes(activations)
    reduced += sum(p.sharded_gradients + p.island_gradients for p in peaks if p.unit.role == "island")
    if root.reduce_scatter_input:
        note(
            "gradient reduction of the root",
            unsharded_gradients=root.unsharded_gradients,
            reduce_buffers=root.reduce_scatter_input + root.reduce_scatter_output + held_input,
        )
    reduced += root.sharded_gradients + root.island_gradients
    shards = [(_padded_numel(plan, u, p), p.shape) for u, _, p in _parameters(plan) if p.trainable]
    temporaries = optimizer_temporaries(settings.optimizer, gradients=reduced, shards=shards)
    note("optimizer step", working_memory=on_device * temporaries)
    return tuple(moments)


@dataclass(frozen=True)
class _Stage:
    """A unit as it runs, with the dispatched experts inside of it; ``islands``: of nested units, gathered with it."""

    peak: UnitPeak
    experts: UnitPeak | None
    block: int | None
    recomputed: bool
    islands: int

    @property
    def gathered(self) -> int:
        inside = self.experts.gathered if self.experts is not None else 0
        return self.peak.gathered + inside + self.islands

    @property
    def last_all_gather(self) -> int:
        """The flat output that is still held while it runs: its own, then its experts'."""
        return max(self.peak.last_all_gather, self.experts.last_all_gather if self.experts is not None else 0)

    @property
    def stays_gathered(self) -> int:
        """Bytes of its parameters that stay on the rank between its forward and its backward."""
        return sum(_stays_gathered(peak) for peak in (self.peak, self.experts) if peak is not None)

    @property
    def unsharded_gradients(self) -> int:
        return sum(peak.unsharded_gradients for peak in (self.peak, self.experts) if peak is not None)

    def part(self, activations: Activations) -> Part:
        if self.block is not None:
            return activations.of_block(self.block).part
        return activations.prelude if self.peak.unit.role == "embedding" else activations.epilogue

    def kept_bytes(self, activations: Activations) -> int:
        """Bytes kept between its forward and its backward, if it is a block."""
        return 0 if self.block is None else activations.kept_by_block(self.block, checkpointing=self.recomputed)


def _stages(plan: ShardingPlan, peaks: Iterable[UnitPeak], islands: int) -> list[_Stage]:
    peak_of_unit = {peak.unit.fqn: peak for peak in peaks}
    stages: list[_Stage] = []
    num_blocks = 0
    for unit, *inside in plan.stages:
        if unit.role == "island":
            continue
        experts = peak_of_unit[inside[0].fqn] if inside else None
        block = num_blocks if unit.role == "block" else None
        recomputed = block is not None and plan.recomputes(unit)
        stages.append(_Stage(peak_of_unit[unit.fqn], experts, block, recomputed, 0 if block is None else islands))
        num_blocks += block is not None
    return stages


def peak_of(moments: Iterable[Moment]) -> Moment:
    """The moment with most in memory."""
    return max(moments, key=lambda moment: moment.total_bytes)


def _stays_gathered(peak: UnitPeak) -> int:
    """Bytes of a unit's parameters that stay on the rank between its forward and its backward."""
    reshard = peak.unit.reshard_after_forward
    if reshard is True:
        return 0
    return peak.gathered // reshard if reshard else peak.gathered


# --- Host memory and files --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostMemory:
    """Bytes per node in host memory.

    Attributes:
        offload: pinned shards, gradients and optimizer state of the node's ranks, with CPU offload.
        load_whole: every rank of the node builds the whole model with ``from_pretrained`` and shards it then.
        load_streamed: built on meta and filled tensor by tensor: the largest one, for each rank of the node.
        save_sharded: a copy of what a checkpoint holds of the node's ranks: shards and optimizer state (DCP,
            asynchronous).
        export: the whole model, on the first node only.
    """

    offload: int
    load_whole: int
    load_streamed: int
    save_sharded: int
    export: int


def host_memory(
    plan: ShardingPlan, state: StateBytes, cluster: Cluster, *, offload: bool, leaves_out_base: bool = False
) -> HostMemory:
    """See :class:`HostMemory` and, for ``leaves_out_base``, :func:`checkpoint_bytes`."""
    local_ranks = min(cluster.ranks, cluster.ranks_per_node)
    weights, _ = checkpoint_bytes(plan, optimizer="sgd", buffers=state.buffers)
    largest = max(
        (math.prod(param.shape) * _itemsize(group.storage) for _, group, param in _parameters(plan)), default=0
    )
    parameters = state.parameters + state.island_parameters
    optimizer = state.optimizer + state.island_optimizer
    pinned = parameters + state.gradients + state.island_gradients + optimizer
    left_out = sum(
        _padded_numel(plan, unit, param) * _itemsize(group.storage)
        for unit, group, param in _parameters(plan)
        if leaves_out_base and _is_frozen_weight(param)
    )
    return HostMemory(
        offload=local_ranks * pinned if offload else 0,
        load_whole=local_ranks * weights,
        load_streamed=local_ranks * largest,
        save_sharded=local_ranks * (parameters - left_out + optimizer),
        export=weights,
    )


def checkpoint_bytes(
    plan: ShardingPlan,
    *,
    optimizer: str,
    buffers: int,
    roles: Roles | None = None,
    leaves_out_base: bool = False,
) -> tuple[int, int]:
    """Bytes on disk: of all weights (an export), and of a training checkpoint with the optimizer's state.

    Args:
        leaves_out_base: the training checkpoint leaves frozen weights to the one that the run started from.
    """
    weights = left_out = states = 0
    for _, group, param in _parameters(plan):
        itemsize = _itemsize(group.storage)
        numel = math.prod(param.shape)
        weights += numel * itemsize
        if leaves_out_base and _is_frozen_weight(param):
            left_out += numel * itemsize
        if param.trainable:
            algorithm = algorithm_of(optimizer, param, roles, num_shards=plan.mesh_shape[-1])
            states += optimizer_state_bytes(algorithm, local_numel=numel, itemsize=itemsize)
    return weights + buffers, weights - left_out + buffers + states


def _is_frozen_weight(param: ParamPlan) -> bool:
    return not param.trainable and not is_adapter_name(param.fqn)


def buffer_bytes(model: nn.Module) -> int:
    """All buffers of ``model``, which are whole on every rank (router biases, hash tables, RoPE frequencies)."""
    return sum({id(b): b.numel() * b.element_size() for b in model.buffers()}.values())
