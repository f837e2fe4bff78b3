"""One model under one configuration: the plan and everything that is predicted from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from dsv4_fsdp.contract import Contract, contract_of
from dsv4_fsdp.plan import ShardingPlan, plan_sharding

from .activations import Activations, measure_activations
from .communication import Traffic, traffic
from .memory import (
    MARGIN_FRACTION,
    HostMemory,
    Moment,
    StateBytes,
    UnitPeak,
    buffer_bytes,
    checkpoint_bytes,
    host_memory,
    peak_of,
    state_bytes,
    step_moments,
    unit_peaks,
)
from .model_sources import build_on_meta
from .settings import Cluster, TrainingSettings
from .simulation import simulate

__all__ = ["Estimate", "Estimator"]

_SHORT_KINDS = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "CSA",
    "heavily_compressed_attention": "HCA",
    "hash_moe": "hash router",
    "moe": "top-k router",
}


@dataclass(frozen=True)
class Estimate:
    """What ``dsv4-fsdp plan`` shows. Bytes are per rank unless a name says otherwise."""

    model: str
    num_parameters: int
    cluster: Cluster
    settings: TrainingSettings
    plan: ShardingPlan
    activations: Activations
    state: StateBytes
    moments: tuple[Moment, ...]
    traffic: tuple[Traffic, ...]
    host: HostMemory
    export_bytes: int
    checkpoint_bytes: int

    @property
    def peak(self) -> Moment:
        return peak_of(self.moments)

    @property
    def margin_bytes(self) -> int:
        """What is left free: a share of the device, or of the peak where no device was named."""
        return int(MARGIN_FRACTION * (self.cluster.device_memory_bytes or self.peak.total_bytes))

    @property
    def needed_bytes(self) -> int:
        return self.peak.total_bytes + self.margin_bytes

    @property
    def spare_bytes(self) -> int | None:
        """Device memory less what is needed: below 0 it does not fit. ``None`` without a device."""
        device = self.cluster.device_memory_bytes
        return None if device is None else device - self.needed_bytes

    @property
    def unit_peaks(self) -> tuple[UnitPeak, ...]:
        return unit_peaks(self.plan)

    @property
    def moved_bytes(self) -> int:
        """What one rank sends to others in a step."""
        return sum(row.moved_bytes for row in self.traffic)

    @property
    def inter_node_bytes(self) -> int:
        """The part of it that goes between nodes."""
        return sum(row.inter_node_bytes for row in self.traffic)

    @property
    def host_copy_bytes(self) -> int:
        """With CPU offload: shards copied to the device for each gather, and gradients copied back, per step."""
        if not self.settings.offload:
            return 0
        shards = sum(
            group.shard_bytes * (1 + unit.gathers_in_backward) for unit in self.plan.units for group in unit.groups
        )
        return shards + self.state.gradients + self.state.island_gradients

    @property
    def padding_fraction(self) -> float:
        """Share of all gathered bytes that is padding: 0.6 where 384 experts lie on a shard axis of 1,024 ranks."""
        gathered = needed = 0
        for unit in self.plan.units:
            for group in unit.groups:
                gathered += group.all_gather_bytes
                needed += sum(math.prod(p.shape) * getattr(torch, p.compute).itemsize for p in group.params)
        return 1 - needed / gathered if gathered else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything shown, and the whole plan."""
        plan = asdict(self.plan)
        return {
            "model": self.model,
            "num_parameters": self.num_parameters,
            "cluster": asdict(self.cluster),
            "settings": asdict(self.settings),
            "verdict": {
                "fits": None if self.spare_bytes is None else self.spare_bytes >= 0,
                "needed_bytes": self.needed_bytes,
                "margin_bytes": self.margin_bytes,
                "spare_bytes": self.spare_bytes,
                "peak": {"moment": self.peak.label, "total_bytes": self.peak.total_bytes, "terms": self.peak.terms},
            },
            "state_bytes": asdict(self.state),
            "moments": [{"moment": m.label, "total_bytes": m.total_bytes, "terms": m.terms} for m in self.moments],
            "unit_peaks_bytes": [
                {
                    "unit": peak.unit.fqn,
                    "all_gather_output": peak.all_gather,
                    "unsharded_parameters": peak.gathered,
                    "unsharded_gradients": peak.unsharded_gradients,
                    "reduce_scatter_input": peak.reduce_scatter_input,
                }
                for peak in self.unit_peaks
            ],
            "padding_fraction": self.padding_fraction,
            "activations": asdict(self.activations),
            "traffic_per_step": [asdict(row) | {"moved_bytes": row.moved_bytes} for row in self.traffic],
            "host_copy_bytes_per_step": self.host_copy_bytes,
            "host_bytes_per_node": asdict(self.host),
            "export_bytes": self.export_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "plan_hash": self.plan.hash,
            "plan": plan,
        }


class Estimator:
    """Makes estimates of one model; what does not depend on the configuration is made once.

    Args:
        name: what to call the model.
        config: its Transformers config.
    """

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.config = config
        self._models: dict[str, tuple[nn.Module, Contract]] = {}
        self._plans: dict[tuple[Any, ...], ShardingPlan] = {}
        self._activations: dict[tuple[int, int], Activations] = {}

    def estimate(self, cluster: Cluster, settings: TrainingSettings) -> Estimate:
        """Raises what :func:`~dsv4_fsdp.plan.plan_sharding` raises."""
        model, _ = self._model(settings.storage)
        plan = self.plan(cluster, settings)
        activations = self._measured(settings.batch, settings.sequence)
        state = state_bytes(plan, optimizer=settings.optimizer, buffers=buffer_bytes(model))
        export, checkpoint = checkpoint_bytes(plan, optimizer=settings.optimizer, buffers=state.buffers)
        return Estimate(
            model=self.name,
            num_parameters=sum(param.numel() for param in model.parameters()),
            cluster=cluster,
            settings=settings,
            plan=plan,
            activations=activations,
            state=state,
            moments=step_moments(plan, activations, state, settings),
            traffic=traffic(plan, cluster),
            host=host_memory(plan, state, cluster, offload=settings.offload),
            export_bytes=export,
            checkpoint_bytes=checkpoint,
        )

    def plan(self, cluster: Cluster, settings: TrainingSettings) -> ShardingPlan:
        """The plan that ``parallelize`` applies under ``settings``."""
        key = (settings.mesh_shape(cluster), settings.storage, settings.reshard_after_forward)
        if key not in self._plans:
            model, contract = self._model(settings.storage)
            self._plans[key] = plan_sharding(
                model,
                mesh_shape=settings.mesh_shape(cluster),
                reshard_after_forward=settings.reshard_after_forward,
                contract=contract,
            )
        return replace(self._plans[key], activation_checkpointing=settings.activation_checkpointing)

    def verify(self, plan: ShardingPlan, settings: TrainingSettings) -> list[str]:
        """What the real ``fully_shard`` does otherwise than ``plan`` on a fake process group; empty if nothing."""
        return simulate(build_on_meta(self.config, storage=settings.storage), plan)

    def _model(self, storage: str) -> tuple[nn.Module, Contract]:
        if storage not in self._models:
            model = build_on_meta(self.config, storage=storage)
            self._models[storage] = (model, contract_of(model))
        return self._models[storage]

    def _measured(self, batch: int, sequence: int) -> Activations:
        """With bf16 storage: what is computed, and so kept, is the same with fp32 masters."""
        if (batch, sequence) not in self._activations:
            model = build_on_meta(self.config, storage="bf16")
            self._activations[batch, sequence] = measure_activations(
                model, batch=batch, sequence=sequence, names=_block_names(self.config)
            )
        return self._activations[batch, sequence]


def _block_names(config: Any) -> list[str] | None:
    """``"CSA, top-k router"`` for each block of a DeepSeek-V4; ``None`` for other models."""
    attention = getattr(config, "layer_types", None)
    routers = getattr(config, "mlp_layer_types", None)
    if not attention or not routers or len(attention) != len(routers):
        return None
    return [f"{_SHORT_KINDS.get(a, a)}, {_SHORT_KINDS.get(r, r)}" for a, r in zip(attention, routers, strict=True)]
