"""One model under one configuration: the plan and everything that is predicted from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from dsv4_fsdp.contract import Contract, contract_of
from dsv4_fsdp.model_layout import layout_of
from dsv4_fsdp.plan import ShardingPlan, plan_sharding
from dsv4_fsdp.train.build_model import prepare
from dsv4_fsdp.train.config import ModelConfig
from dsv4_fsdp.train.optimizer_settings import OptimizerSettings
from dsv4_fsdp.train.optimizers import parameter_groups

from .activations import Activations, measure_activations
from .communication import Dispatch, Traffic, traffic
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
from .model_sources import build_on_meta, has_windowed_attention
from .optimizer_state import Roles
from .settings import ATTENTIONS, STORAGES, Cluster, TrainingSettings
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
    """What ``dsv4-fsdp plan`` shows. Bytes are per rank unless a name says otherwise.

    ``attention_bytes`` has what is kept between forward and backward with each attention that was measured.
    """

    model: str
    num_parameters: int
    cluster: Cluster
    settings: TrainingSettings
    plan: ShardingPlan
    activations: Activations
    attention_bytes: Mapping[str, int]
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
        return self.settings.micro_batches * (shards + self.state.gradients + self.state.island_gradients)

    @property
    def padding_fraction(self) -> float:
        """Share of all gathered bytes that is padding: 0.6 where 384 experts lie on a shard axis of 1,024 ranks."""
        gathered = needed = 0
        for unit in self.plan.units:
            for group in unit.groups:
                gathered += group.all_gather_bytes
                held = sum(math.prod(p.shape) * getattr(torch, p.compute).itemsize for p in group.params)
                needed += held // (self.plan.expert_parallel if unit.role == "experts" else 1)
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
            "kept_bytes_by_attention": dict(self.attention_bytes),
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
        trained: what of the model is trained (adapters, frozen weights), as the trainer is told; by default all of it.
        optimizer: which parameters the trainer's optimizers treat apart; by default as when nothing is said.
        islands: names of islands beyond the class's lists.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        *,
        trained: ModelConfig | None = None,
        optimizer: OptimizerSettings | None = None,
        islands: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.config = config
        self.trained = ModelConfig(path=name) if trained is None else trained
        self._optimizer = OptimizerSettings(lr=1.0) if optimizer is None else optimizer
        self._more_islands = list(islands)
        self._models: dict[str, _Model] = {}
        self._plans: dict[tuple[Any, ...], ShardingPlan] = {}
        self._roles: dict[tuple[str, str], Roles] = {}
        self._activations: dict[tuple[int, int, str], Activations] = {}

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that can be dealt to ranks; 0 if there are none."""
        if self.trained.train == "lora" and self.trained.lora.experts:
            return 0  # adapters on dealt experts are not supported
        model = self._model(self.trained.storage).model
        counts = {
            param.shape[0] for name in layout_of(model).experts for param in model.get_submodule(name).parameters()
        }
        return math.gcd(*counts) if counts else 0

    @property
    def storages(self) -> tuple[str, ...]:
        """The storage dtypes that make sense: fp32 is for weights that are trained."""
        return ("bf16",) if self.trained.train == "lora" else STORAGES

    def estimate(self, cluster: Cluster, settings: TrainingSettings, *, compare_attention: bool = False) -> Estimate:
        """Raises what :func:`~dsv4_fsdp.plan.plan_sharding` raises.

        Args:
            compare_attention: measure the other attention too.
        """
        model = self._model(settings.storage).model
        plan = self.plan(cluster, settings)
        activations = self._measured(settings, settings.attention)
        measured = {settings.attention: activations}
        if compare_attention and has_windowed_attention(self.config):
            measured |= {other: self._measured(settings, other) for other in ATTENTIONS if other != settings.attention}
        roles = self.roles(settings, plan)
        state = state_bytes(plan, optimizer=settings.optimizer, roles=roles, buffers=buffer_bytes(model))
        leaves_out_base = self.trained.leaves_out_base
        export, checkpoint = checkpoint_bytes(
            plan,
            optimizer=settings.optimizer,
            buffers=state.buffers,
            roles=roles,
            leaves_out_base=leaves_out_base,
        )
        return Estimate(
            model=self.name,
            num_parameters=sum(param.numel() for param in model.parameters()),
            cluster=cluster,
            settings=settings,
            plan=plan,
            activations=activations,
            attention_bytes={
                name: each.saved_bytes(checkpointing=settings.activation_checkpointing)
                for name, each in measured.items()
            },
            state=state,
            moments=step_moments(plan, activations, state, settings),
            traffic=traffic(
                plan, cluster, micro_batches=settings.micro_batches, dispatch=self._dispatch(plan, settings)
            ),
            host=host_memory(plan, state, cluster, offload=settings.offload, leaves_out_base=leaves_out_base),
            export_bytes=export,
            checkpoint_bytes=checkpoint,
        )

    def plan(self, cluster: Cluster, settings: TrainingSettings) -> ShardingPlan:
        """The plan that ``parallelize`` applies under ``settings``."""
        shape, experts = settings.mesh_shape(cluster), settings.expert_parallel
        key = (shape, settings.storage, settings.island_units, settings.reshard_after_forward, experts)
        if key not in self._plans:
            made = self._model(settings.storage)
            self._plans[key] = plan_sharding(
                made.model,
                mesh_shape=shape,
                island_units=settings.island_units,
                reshard_after_forward=settings.reshard_after_forward,
                expert_parallel=experts,
                contract=made.contract,
            )
        every = settings.activation_checkpointing
        return replace(self._plans[key], activation_checkpointing=every if every > 1 else bool(every))

    def roles(self, settings: TrainingSettings, plan: ShardingPlan) -> Roles | None:
        """How the trainer's optimizer treats each parameter; ``None`` where all are treated alike."""
        if settings.optimizer not in ("adamw_8bit", "muon"):
            return None
        key = (settings.storage, settings.optimizer)
        if key not in self._roles:
            islands = {p.fqn for unit in plan.units for group in unit.groups for p in group.params if p.island}
            chosen = self._optimizer.model_copy(update={"name": settings.optimizer})
            groups = parameter_groups(self._model(settings.storage).model, chosen, islands=islands)
            self._roles[key] = {fqn: (group.role, group.algorithm) for group in groups for fqn in group.fqns}
        return self._roles[key]

    def verify(self, plan: ShardingPlan, settings: TrainingSettings) -> list[str]:
        """What the real ``fully_shard`` does otherwise than ``plan`` on a fake process group; empty if nothing."""
        made = self._make(settings.storage)
        return simulate(made.model, plan, fp32_params=made.islands)

    def _model(self, storage: str) -> _Model:
        if storage not in self._models:
            self._models[storage] = self._make(storage)
        return self._models[storage]

    def _make(self, storage: str, attention: str = "eager") -> _Model:
        model = build_on_meta(self.config, attention=attention)
        _, islands = prepare(model, self.trained.model_copy(update={"storage": storage}), list(self._more_islands))
        return _Model(model, contract_of(model, fp32_params=islands or None), tuple(islands))

    def _measured(self, settings: TrainingSettings, attention: str) -> Activations:
        """With bf16 storage: what is computed, and so kept, is the same with fp32 masters."""
        key = (settings.batch, settings.sequence, attention)
        if key not in self._activations:
            self._activations[key] = measure_activations(
                self._make("bf16", attention).model,
                batch=settings.batch,
                sequence=settings.sequence,
                loss=self.trained.loss,
                names=_block_names(self.config),
            )
        return self._activations[key]

    def _dispatch(self, plan: ShardingPlan, settings: TrainingSettings) -> Dispatch | None:
        if plan.expert_parallel == 1:
            return None
        per_token = self.config.num_experts_per_tok
        rows = settings.batch * settings.sequence * per_token
        return Dispatch(rows=rows, hidden=self.config.hidden_size, num_experts=self.num_experts)


@dataclass(frozen=True)
class _Model:
    """What is trained, on the meta device; ``islands``: names beyond the class's lists."""

    model: nn.Module
    contract: Contract
    islands: tuple[str, ...]


def _block_names(config: Any) -> list[str] | None:
    """``"CSA, top-k router"`` for each block of a DeepSeek-V4; ``None`` for other models."""
    attention = getattr(config, "layer_types", None)
    routers = getattr(config, "mlp_layer_types", None)
    if not attention or not routers or len(attention) != len(routers):
        return None
    return [f"{_SHORT_KINDS.get(a, a)}, {_SHORT_KINDS.get(r, r)}" for a, r in zip(attention, routers, strict=True)]
