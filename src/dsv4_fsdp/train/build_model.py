"""The model of a run: built without memory, sharded as planned, and only then filled.

Two steps, with the ranks' agreement between them: :func:`shard_on_meta` builds the model on the meta device and shards
it, which costs no memory and reads no weight; :func:`fill` gives it memory and values: from a checkpoint, of which each
rank reads its own part, or random ones, of which each rank draws its own part.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from dsv4_fsdp.alignment import indexer_parameters
from dsv4_fsdp.checkpoint_loading import CheckpointReader, LoadReport, fp32_islands, load_checkpoint
from dsv4_fsdp.contract import widen_meta_islands
from dsv4_fsdp.errors import Dsv4FsdpError, listing
from dsv4_fsdp.initialization import initialize, initialize_adapters
from dsv4_fsdp.materialize import materialize, refuse_uninitialized
from dsv4_fsdp.names import canonical_name, is_adapter_name, matches_components
from dsv4_fsdp.parallelize import parallelize
from dsv4_fsdp.plan import ShardingPlan

from .config import ModelConfig, TrainConfig

__all__ = [
    "ADAPTER_ISLANDS",
    "ISLANDS_FILE",
    "ModelError",
    "ShardedModel",
    "build_on_meta",
    "fill",
    "frozen_weights",
    "prepare",
    "shard_on_meta",
    "source_of",
]

ADAPTER_ISLANDS = ("lora_A", "lora_B")
"""Names of adapters that are declared fp32."""

ISLANDS_FILE = "islands.json"
"""In a training checkpoint's folder ``model``: :attr:`ShardedModel.islands`."""


class ModelError(Dsv4FsdpError, ValueError):
    """The model cannot be built as the settings say."""


@dataclass(frozen=True)
class ShardedModel:
    """A model on the meta device, sharded.

    Attributes:
        model: in training mode.
        plan: what was applied.
        adapter: peft's configuration of the adapters inside, or ``None``.
        islands: names of islands beyond the class's lists: what the checkpoint stores in fp32, fp32 adapters.
    """

    model: nn.Module
    plan: ShardingPlan
    adapter: Any
    islands: tuple[str, ...]


def build_on_meta(config: ModelConfig) -> nn.Module:
    """The unsharded model on the meta device, bf16 with its fp32 islands, in training mode.

    Raises:
        ModelError: Transformers cannot build it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from .tiny_model import tiny_model_config

    if config.path == "tiny":
        settings = tiny_model_config()
    else:
        try:
            settings = AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"model.path: {config.path} cannot be read: {_first_line(error)}") from error
        # What is trained are the dequantised weights.
        if hasattr(settings, "quantization_config"):
            del settings.quantization_config
    attention = "dsv4_windowed" if config.attention == "windowed" else "eager"
    if attention == "dsv4_windowed":
        import dsv4_fsdp.attention  # noqa: F401  (registers it)
    on_cpu = torch.accelerator.current_accelerator(check_available=True) is None
    experts = {"auto": "eager" if on_cpu else "grouped_mm"}.get(config.experts, config.experts)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                settings, dtype=torch.bfloat16, attn_implementation=attention, experts_implementation=experts
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model.path: Transformers cannot build {config.path}: {_first_line(error)}") from error
    assert isinstance(model, nn.Module)
    return model.train()


def shard_on_meta(
    config: TrainConfig,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None,
    reader: CheckpointReader | None,
    resumed_from: Path | None = None,
) -> ShardedModel:
    """Build and shard the model as ``config`` says. All ranks call it.

    Args:
        expert_mesh: with ``mesh.expert_parallel`` above 1.
        reader: of the checkpoint to start from, if there is one: what it stores in fp32 are islands too.
        resumed_from: the folder ``model`` of the training checkpoint that will be read into it.

    Raises:
        ModelError: a pattern of ``model.freeze`` or a target of ``model.lora`` matches nothing.
        ContractError, ShardingError: see :func:`dsv4_fsdp.parallelize`.
    """
    settings = config.model
    islands = [] if reader is None else fp32_islands(reader)
    if resumed_from is not None:
        settings = settings.model_copy(update={"path": str(resumed_from)})
        islands = [n for n in json.loads((resumed_from / ISLANDS_FILE).read_text()) if n not in ADAPTER_ISLANDS]
    model = build_on_meta(settings)
    adapter, islands = prepare(model, config.model, islands)
    plan = parallelize(
        model,
        mesh,
        island_units=config.mesh.island_units,
        reshard_after_forward=config.mesh.reshard_after_forward,
        offload_policy=_offload_policy() if config.mesh.cpu_offload else None,
        activation_checkpointing=config.mesh.activation_checkpointing,
        fp32_params=islands or None,
        expert_mesh=expert_mesh,
    )
    return ShardedModel(model, plan, adapter, tuple(islands))


def prepare(model: nn.Module, settings: ModelConfig, islands: list[str]) -> tuple[Any, list[str]]:
    """Make of a model in bf16, on the meta device, what is trained: adapters, frozen weights, storage dtypes.

    Args:
        islands: names of islands beyond the class's lists.

    Returns:
        peft's configuration of the adapters, or ``None``, and ``islands`` with fp32 adapters.

    Raises:
        ModelError: a pattern of ``model.freeze`` or a target of ``model.lora`` matches nothing.
    """
    widen_meta_islands(model, islands)
    adapter = None
    if settings.train == "lora":
        adapter = _inject_adapters(model, settings)
        if settings.lora.dtype == "fp32":
            islands = [*islands, *ADAPTER_ISLANDS]
    _freeze(model, settings.freeze)
    if settings.storage == "fp32":
        _store_masters(model)
    return adapter, islands


def fill(
    sharded: ShardedModel,
    config: TrainConfig,
    device: torch.device,
    *,
    reader: CheckpointReader | None,
    later: bool = False,
) -> LoadReport | None:
    """Give the model memory on ``device`` and its values; what was read, if anything was.

    Args:
        reader: of the checkpoint to start from; if ``later``, of the one that the frozen weights come from.
        later: the caller reads a training checkpoint into it; here only the frozen weights, if there is a ``reader``.

    Raises:
        CheckpointError: see :func:`~dsv4_fsdp.checkpoint_loading.load_checkpoint`.
        ShardingError: a tensor holds NaN.
    """
    model = sharded.model
    materialize(model, "cpu" if config.mesh.cpu_offload else device, buffer_device=device)
    report = None
    if later:
        return None if reader is None else load_checkpoint(model, reader, only=frozen_weights(model))
    if reader is None:
        initialize(model, seed=config.seed)
    else:
        report = load_checkpoint(model, reader)
        initialize_adapters(model, seed=config.seed)
    refuse_uninitialized(model)
    return report


def frozen_weights(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that a run leaves as its checkpoint has them. Frozen adapters do not come from one."""
    names = {canonical_name(name): param for name, param in model.named_parameters()}
    return frozenset(n for n, param in names.items() if not param.requires_grad and not is_adapter_name(n))


def _offload_policy() -> CPUOffloadPolicy:
    """Pinned host memory, for faster copies; without an accelerator torch cannot pin."""
    return CPUOffloadPolicy(pin_memory=torch.accelerator.current_accelerator(check_available=True) is not None)


def _store_masters(model: nn.Module) -> None:
    """Trainable weights in fp32. Frozen ones have no master: nothing ever adds to them. The Lightning Indexer's will be
    frozen by `parallelize`."""
    indexer = {id(param) for param in indexer_parameters(model).values()}
    for param in model.parameters():
        if param.requires_grad and id(param) not in indexer and param.dtype == torch.bfloat16:
            param.data = param.data.float()


def _inject_adapters(model: nn.Module, config: ModelConfig) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    lora = config.lora
    targets = "|".join(re.escape(name) for name in lora.targets)
    # Inside blocks, and never in the indexer.
    pattern = rf".*\.layers\.\d+\.(?!.*\bindexer\b).*\.({targets})"
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    unmatched = [t for t in lora.targets if not any(re.fullmatch(pattern, n) and n.endswith(f".{t}") for n in linear)]
    if unmatched:
        kinds = sorted({name.rpartition(".")[2] for name in linear if ".layers." in name})
        raise ModelError(
            f"model.lora.targets: {', '.join(unmatched)} is no linear layer of the model; there is: {', '.join(kinds)}"
        )
    for param in model.parameters():
        param.requires_grad_(False)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=pattern,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if lora.experts else None,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(settings, model)
    dtype = torch.float32 if lora.dtype == "fp32" else torch.bfloat16
    for name, param in model.named_parameters():
        if is_adapter_name(name):
            param.data = param.data.to(dtype)
    return settings


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    names = {canonical_name(name): param for name, param in model.named_parameters()}
    unmatched = [p for p in patterns if not any(matches_components(name, p) for name in names)]
    if unmatched:
        raise ModelError(
            f"model.freeze: no parameter has {', '.join(unmatched)} in its name; some names:\n{listing(list(names))}"
        )
    for name, param in names.items():
        if any(matches_components(name, pattern) for pattern in patterns):
            param.requires_grad_(False)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def source_of(config: ModelConfig) -> Path | None:
    """The checkpoint that the run starts from, if it does."""
    return Path(config.path).resolve() if config.init == "checkpoint" else None
