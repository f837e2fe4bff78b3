"""Bytes per rank, by name: what is there all the time, what each unit needs for a while, and a step moment by moment.

What stays (parameters, gradients, optimizer state) is exact, with padding: FSDP2 pads dim 0 of each parameter to a
multiple of the shard axis, keeps padded shards, and reduces into padded gradients; the optimizer's state is not padded,
so the first rank of the shard axis has most of it and is the one that is planned.

What comes and goes follows FSDP2's own order (``_fsdp_param_group.py`` of torch 2.13): in forward a unit's flat
all-gather output is held until the next unit is copied out, while the next unit's gather is in flight; in backward
the unit before is gathered while a unit computes, its unsharded gradients exist until they are copied into the
reduce-scatter's input, and that input is held until the next unit reduces. This is the order of allocations as the
caching allocator sees it with all streams running as issued; fragmentation is in the margin.

Upper bounds, on purpose: a recomputed block's forward counts what it would keep without checkpointing, and all of a
unit's gradients exist from the start of its backward. Not counted: NCCL's own buffers and the CUDA context (in the
margin), gradient accumulation without reduction, and torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dsv4_fsdp.plan import GroupPlan, ParamPlan, ShardingPlan, UnitPlan

from .activations import Activations, Part
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
    "optimizer_state_bytes",
    "peak_of",
    "state_bytes",
    "step_moments",
    "unit_peaks",
]

MARGIN_FRACTION = 0.08
"""Share of a device's memory that is left to the CUDA context, NCCL's buffers and the allocator's fragmentation. An
assumption: nothing of this project has run on a GPU yet."""

_AO_BLOCK = 256  # torchao.optim.AdamW8bit's default block_size
_AO_MIN_NUMEL = 4096  # smaller local tensors are not quantised, `_AdamBase._new_buffer` of torchao 0.18.0
_AO_QMAP_BYTES = 256 * 4
_STEP_BYTES = 4  # AdamW's step count is a scalar fp32 tensor for each parameter


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found.itemsize


def _local_shape(param: ParamPlan, shard_size: int, coordinate: int) -> tuple[int, ...]:
    """The shape of the shard that the rank at ``coordinate`` of the shard axis has, without padding."""
    rows = math.ceil(param.shape[0] / shard_size)
    return (max(0, min(rows, param.shape[0] - rows * coordinate)), *param.shape[1:])


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


def state_bytes(plan: ShardingPlan, *, optimizer: str, buffers: int = 0, shard_coordinate: int = 0) -> StateBytes:
    """Exact bytes of parameters, gradients (after a backward) and optimizer state (after a step) of one rank.

    Args:
        shard_coordinate: the rank's place on the shard axis; the first has the largest optimizer state.
    """
    shard = plan.mesh_shape[-1]
    sums = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    islands = dict(sums)
    for group in _groups(plan):
        itemsize = _itemsize(group.storage)
        for param in group.params:
            into = islands if param.island else sums
            padded = math.ceil(param.shape[0] / shard) * math.prod(param.shape[1:]) * itemsize
            into["parameters"] += padded
            if param.trainable:
                into["gradients"] += padded
                local = math.prod(_local_shape(param, shard, shard_coordinate))
                into["optimizer"] += optimizer_state_bytes(optimizer, local_numel=local, itemsize=itemsize)
    return StateBytes(
        sums["parameters"], islands["parameters"], sums["gradients"], islands["gradients"],
        sums["optimizer"], islands["optimizer"], buffers,
    )  # fmt: skip


def optimizer_state_bytes(optimizer: str, *, local_numel: int, itemsize: int) -> int:
    """State of one parameter on one rank: ``local_numel`` elements of ``itemsize`` bytes, without padding.

    ``adamw``: two moments like the parameter, and a step count. ``adamw-8bit`` (torchao): for each moment a byte per
    element, an fp32 scale per 256 of them and a table of 256, where the shard has 4,096 elements or more and they fill
    blocks of 256; otherwise moments like the parameter. ``sgd-momentum``: one buffer like the parameter.
    """
    like_param = local_numel * itemsize
    if optimizer == "adamw":
        return 2 * like_param + _STEP_BYTES
    if optimizer == "adamw-8bit":
        if local_numel >= _AO_MIN_NUMEL and local_numel % _AO_BLOCK == 0:
            return 2 * (local_numel + local_numel // _AO_BLOCK * 4 + _AO_QMAP_BYTES) + _STEP_BYTES
        return 2 * like_param + _STEP_BYTES
    if optimizer == "sgd-momentum":
        return like_param
    assert optimizer == "sgd", optimizer
    return 0


def _groups(plan: ShardingPlan) -> Iterable[GroupPlan]:
    return (group for unit in plan.units for group in unit.groups)


# --- What each unit needs for a while ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitPeak:
    """Bytes that a unit needs while it is gathered and while it reduces, on the device.

    Attributes:
        gathered: its unsharded parameters, padded, in compute dtype; the flat all-gather output is as large.
        all_gather: that flat output; 0 on a shard axis of one rank, where torch copies.
        last_all_gather: the part of it that belongs to the last group, which forward holds longer.
        unsharded_gradients: the gradients that autograd makes, in compute dtype, not padded.
        reduce_scatter_input: padded, in reduce dtype.
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
    shard = plan.mesh_shape[-1]
    peaks = []
    for unit in plan.units:
        gathered = sum(group.all_gather_bytes for group in unit.groups)
        reduced = sum(group.reduce_scatter_bytes for group in unit.groups)
        trained = [(group, param) for group in unit.groups for param in group.params if param.trainable]
        gradients = {True: 0, False: 0}
        for group, param in trained:
            padded = math.ceil(param.shape[0] / shard) * math.prod(param.shape[1:])
            gradients[param.island] += padded * _itemsize(group.storage)
        peaks.append(
            UnitPeak(
                unit=unit,
                gathered=gathered,
                all_gather=gathered if shard > 1 else 0,
                last_all_gather=unit.groups[-1].all_gather_bytes if unit.groups and shard > 1 else 0,
                unsharded_gradients=sum(math.prod(p.shape) * _itemsize(p.compute) for _, p in trained),
                reduce_scatter_input=reduced,
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
    """The moments of one step with one micro-batch: each unit's forward, backward and reduction, then the optimizer."""
    on_device = 0 if settings.offload else 1
    checkpointing = plan.activation_checkpointing
    stays = {
        "parameters": on_device * state.parameters,
        "fp32 islands": on_device * state.island_parameters,
        "optimizer state": on_device * (state.optimizer + state.island_optimizer),
        "buffers": state.buffers,
    }
    peaks = unit_peaks(plan)
    *running, root = [p for p in peaks if p.unit.role != "island"]
    islands = sum(p.gathered for p in peaks if p.unit.role == "island")
    moments: list[Moment] = []
    gradients = island_gradients = 0

    def note(label: str, **terms: int) -> None:
        everything = stays | {
            "gradients": on_device * (gradients + island_gradients),
            **{name.replace("_", " "): size for name, size in terms.items()},
        }
        moments.append(Moment(label, {name: size for name, size in everything.items() if size}))

    # Forward. The root is gathered first and stays; so does what is not resharded.
    kept_gathered = root.gathered
    kept = activations.prelude.saved_bytes
    block_index = 0
    for position, peak in enumerate(running):
        following = running[position + 1].all_gather if position + 1 < len(running) else 0
        is_block = peak.unit.role == "block"
        part = _part_of(activations, peak.unit, block_index)
        before = kept if peak.unit.role != "embedding" else 0
        note(
            f"forward of {peak.unit.fqn}",
            gathered_parameters=kept_gathered + peak.gathered + (islands if is_block else 0),
            all_gather_buffers=peak.last_all_gather + following,
            saved_activations=before,
            working_memory=part.forward_peak_bytes,
        )
        if is_block:
            kept += activations.kept_by_block(block_index, checkpointing=bool(checkpointing))
            block_index += 1
        kept_gathered += _stays_gathered(peak)
    if not any(p.unit.role == "head" for p in running):
        note(
            "forward of the head, in the root unit",
            gathered_parameters=kept_gathered,
            saved_activations=kept,
            working_memory=activations.epilogue.forward_peak_bytes,
        )

    # Backward, from the loss. The epilogue's saved tensors are freed with it.
    held_input = 0
    head = activations.epilogue
    if running[-1].unit.role != "head":
        note(
            "backward of the head, in the root unit",
            gathered_parameters=kept_gathered,
            all_gather_buffers=running[-1].all_gather if running[-1].unit.gathers_in_backward else 0,
            saved_activations=kept + head.saved_bytes,
            working_memory=head.backward_peak_bytes,
            unsharded_gradients=root.unsharded_gradients,
        )
    root_gradients = 0
    for position in reversed(range(len(running))):
        peak = running[position]
        unit = peak.unit
        previous = running[position - 1] if position else None
        prefetched = previous.all_gather if previous is not None and previous.unit.gathers_in_backward else 0
        is_block = unit.role == "block"
        if is_block:
            block_index -= 1
        part = _part_of(activations, unit, block_index)
        kept_gathered -= _stays_gathered(peak)
        saved = kept + (head.saved_bytes if unit.role == "head" else 0)
        working = part.backward_peak_bytes
        if is_block and checkpointing:
            # It is run again first: what it saves is then there during its backward.
            working = max(part.forward_peak_bytes, part.saved_bytes + part.backward_peak_bytes)
        gathered = peak.gathered if unit.role != "embedding" or _stays_gathered(peak) else 0
        if unit.reached_in_backward:
            note(
                f"backward of {unit.fqn}",
                gathered_parameters=kept_gathered + gathered + (islands if is_block else 0),
                all_gather_buffers=prefetched,
                saved_activations=saved,
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
            gradients += peak.sharded_gradients
            island_gradients += peak.island_gradients
        if unit.role == "head":
            root_gradients = root.unsharded_gradients  # the last norm's, until the root reduces at the very end
        if is_block:
            kept -= activations.kept_by_block(block_index, checkpointing=bool(checkpointing))
    for peak in (p for p in peaks if p.unit.role == "island"):
        gradients += peak.sharded_gradients
        island_gradients += peak.island_gradients
    if root.reduce_scatter_input:
        note(
            "gradient reduction of the root",
            unsharded_gradients=root.unsharded_gradients,
            reduce_buffers=root.reduce_scatter_input + root.reduce_scatter_output + held_input,
        )
    gradients += root.sharded_gradients
    island_gradients += root.island_gradients
    # AdamW(foreach) makes the square roots of all second moments at once: a list as large as the parameters.
    temporaries = (gradients + island_gradients) if settings.optimizer == "adamw" else 0
    note("optimizer step", working_memory=on_device * temporaries)
    return tuple(moments)


def peak_of(moments: Iterable[Moment]) -> Moment:
    """The moment with most in memory."""
    return max(moments, key=lambda moment: moment.total_bytes)


def _part_of(activations: Activations, unit: UnitPlan, block_index: int) -> Part:
    if unit.role == "block":
        return activations.of_block(block_index).part
    return activations.prelude if unit.role == "embedding" else activations.epilogue


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
        save_sharded: a copy of the shards and the optimizer state of the node's ranks (DCP, asynchronous).
        export: the whole model, on the first node only.
    """

    offload: int
    load_whole: int
    load_streamed: int
    save_sharded: int
    export: int


def host_memory(plan: ShardingPlan, state: StateBytes, cluster: Cluster, *, offload: bool) -> HostMemory:
    """See :class:`HostMemory`."""
    local_ranks = min(cluster.ranks, cluster.ranks_per_node)
    weights, _ = checkpoint_bytes(plan, optimizer="sgd", buffers=state.buffers)
    largest = max(
        (math.prod(param.shape) * _itemsize(group.storage) for group in _groups(plan) for param in group.params),
        default=0,
    )
    parameters = state.parameters + state.island_parameters
    optimizer = state.optimizer + state.island_optimizer
    pinned = parameters + state.gradients + state.island_gradients + optimizer
    return HostMemory(
        offload=local_ranks * pinned if offload else 0,
        load_whole=local_ranks * weights,
        load_streamed=local_ranks * largest,
        save_sharded=local_ranks * (parameters + optimizer),
        export=weights,
    )


def checkpoint_bytes(plan: ShardingPlan, *, optimizer: str, buffers: int) -> tuple[int, int]:
    """Bytes on disk: of the weights alone (an export), and with the optimizer's state (to resume)."""
    weights = states = 0
    for group in _groups(plan):
        itemsize = _itemsize(group.storage)
        for param in group.params:
            numel = math.prod(param.shape)
            weights += numel * itemsize
            if param.trainable:
                states += optimizer_state_bytes(optimizer, local_numel=numel, itemsize=itemsize)
    return weights + buffers, weights + buffers + states


def buffer_bytes(model: nn.Module) -> int:
    """All buffers of ``model``, which are whole on every rank (router biases, hash tables, RoPE frequencies)."""
    return sum({id(b): b.numel() * b.element_size() for b in model.buffers()}.values())
