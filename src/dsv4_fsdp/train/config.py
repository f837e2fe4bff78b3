"""What a run is told: one validated, frozen value, checked before any process group or model exists.

A preset is a named starting point; a YAML file (``--config``) and ``--section.key value`` on the command line change
single settings of it, in this order. All mistakes are reported together, one line each. Nothing here imports torch, so
a typing mistake is answered at once.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from dsv4_fsdp.data.settings import DataSettings
from dsv4_fsdp.errors import Dsv4FsdpError
from dsv4_fsdp.settings_section import Section

from .optimizer_settings import OptimizerSettings

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "EvaluationConfig",
    "LoggingConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "TrainConfig",
    "flat_settings",
    "from_yaml",
    "read_config_file",
    "resolve",
    "to_yaml",
]


class ConfigError(Dsv4FsdpError, ValueError):
    """The configuration is wrong. ``problems`` has one line for each mistake found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _split_commas(value: Any) -> Any:
    """The command line gives a list as ``q_a_proj,q_b_proj``."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _number_or_bool(value: Any) -> Any:
    """The command line gives numbers and yes or no alike as text."""
    if isinstance(value, str):
        text = value.strip().lower()
        return {"true": True, "yes": True, "false": False, "no": False}.get(
            text, int(text) if text.isdigit() else value
        )
    return value


_Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_split_commas)]


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights (peft).

    Attributes:
        rank, alpha, dropout: as in peft.
        targets: last parts of the names of linear layers, in attention and in the shared experts. The Lightning
            Indexer's are never among them: it gets no gradient.
        experts: adapters on the routed experts' fused weights too.
        dtype: in which adapters are stored, computed and reduced: ``fp32`` (islands of their own) or ``bf16``.
    """

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: _Names = ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj")
    experts: bool = False
    dtype: Literal["fp32", "bf16"] = "fp32"


class ModelConfig(Section):
    """Which model, from which weights, and what of it is trained.

    Attributes:
        path: a folder with ``config.json`` and, with ``init: checkpoint``, safetensors files: Transformers' layout or
            DeepSeek's release, quantised or not. ``tiny`` is the built-in model.
        init: ``checkpoint``, or ``random`` from the run's seed.
        storage: ``bf16``: half the memory, and small updates are lost unless the optimizer rounds stochastically.
            ``fp32``: master weights; they compute in bf16, at four bytes and fp32 moments each. Frozen weights stay
            bf16 either way, and islands fp32.
        train: ``full`` or ``lora``.
        freeze: patterns (runs of whole components of a parameter's name) of what is not trained.
        attention: ``windowed`` (ours: memory linear in the sequence) or ``eager`` (Transformers').
        loss: ``chunked`` (ours: the logits of a whole sequence are never there) or ``stock``.
        experts: Transformers' ``experts_implementation``; ``auto`` is grouped matrix products, one by one on a CPU.
        allow_downcast_islands: accept a checkpoint whose islands were stored in bf16 by somebody.
    """

    path: str = Field(min_length=1)
    init: Literal["checkpoint", "random"] = "checkpoint"
    storage: Literal["bf16", "fp32"] = "bf16"
    train: Literal["full", "lora"] = "full"
    lora: LoraConfig = LoraConfig()
    freeze: _Names = ()
    attention: Literal["windowed", "eager"] = "windowed"
    loss: Literal["chunked", "stock"] = "chunked"
    experts: Literal["auto", "eager", "grouped_mm", "batched_mm"] = "auto"
    allow_downcast_islands: bool = False

    @property
    def leaves_out_base(self) -> bool:
        """Whether training checkpoints leave frozen weights to the checkpoint in ``path``. Not of a run that freezes
        nothing but the indexer, as all do: its checkpoints are to need no other files."""
        return self.init == "checkpoint" and (self.train == "lora" or bool(self.freeze))


class MeshConfig(Section):
    """How the ranks share the model.

    Attributes:
        replicate: whole replicas of the sharded model (HSDP); 1 is plain FSDP.
        expert_parallel: ranks that the experts of a layer are dealt to.
        island_units: ``grouped``, or ``root`` for fewer collectives and more memory: see ``parallelize``.
        reshard_after_forward: free a block's weights after its forward; a number shares them among so many ranks.
        activation_checkpointing: 0 none, 1 every block, n every n-th is recomputed in backward.
        cpu_offload: shards, gradients and optimizer state in host memory.
        timeout_s: how long a rank may keep the others waiting before the run ends.
        start_timeout_s: how long ranks may take to come together before anything is read.
    """

    replicate: int = Field(default=1, gt=0)
    expert_parallel: int = Field(default=1, gt=0)
    island_units: Literal["grouped", "root"] = "grouped"
    reshard_after_forward: Annotated[bool | int, BeforeValidator(_number_or_bool)] = True
    activation_checkpointing: Annotated[int, Field(ge=0)] = 0
    cpu_offload: bool = False
    timeout_s: float = Field(default=600.0, gt=0)
    start_timeout_s: float = Field(default=120.0, gt=0)


class CheckpointConfig(Section):
    """Training checkpoints, below the run's folder.

    Attributes:
        every: optimizer steps between them; 0 for none but the one at a stop.
        keep: how many of the newest stay.
        asynchronous: write while training goes on; costs a copy of the shards in host memory.
        time_limit_s: save and stop after so many seconds.
        export: write the model in Transformers' layout when the run is finished.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, gt=0)
    asynchronous: bool = False
    time_limit_s: float | None = Field(default=None, gt=0)
    export: bool = True


class EvaluationConfig(Section):
    """Loss on other data, every so many steps (0: never); what data is in section ``data``."""

    every: int = Field(default=0, ge=0)


class LoggingConfig(Section):
    """What a run shows beside its progress and ``metrics.jsonl``.

    Attributes:
        tensorboard: event files in the run's folder.
        tracker: ``wandb`` or ``trackio``, if installed.
        project: the tracker's name for what the run belongs to.
        audit: observe every dtype in the first step: ``stop`` ends the run on a violation, ``warn`` says so, ``off``
            does not look.
    """

    tensorboard: bool = False
    tracker: Literal["none", "wandb", "trackio"] = "none"
    project: str = Field(default="dsv4-fsdp", min_length=1)
    audit: Literal["stop", "warn", "off"] = "stop"


class TrainConfig(Section):
    """A whole run. ``nproc`` is the number of ranks that the command starts; under torchrun it is the world size.

    ``router_bias_rate``: what the routers' biases move by against the load each step; 0 leaves them alone.
    """

    preset: str
    steps: int = Field(gt=0)
    seed: int = Field(ge=0, lt=2**31)
    nproc: int = Field(gt=0)
    model: ModelConfig
    data: DataSettings
    optimizer: OptimizerSettings
    router_bias_rate: float = Field(default=0.0, ge=0)
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> TrainConfig:
        problems = []
        if self.nproc % self.mesh.replicate:
            problems.append(f"mesh.replicate: {self.mesh.replicate} replicas cannot share {self.nproc} ranks evenly")
        elif self.shard % self.mesh.expert_parallel:
            problems.append(
                f"mesh.expert_parallel: {self.mesh.expert_parallel} does not divide the {self.shard} ranks that share "
                "a model"
            )
        elif not isinstance(reshard := self.mesh.reshard_after_forward, bool) and (reshard < 1 or self.shard % reshard):
            problems.append(
                f"mesh.reshard_after_forward: {reshard} does not divide the {self.shard} ranks that share a model; "
                "give true, false, or the number of ranks of one machine"
            )
        if self.model.path == "tiny" and self.model.init == "checkpoint":
            problems.append("model.init: the built-in model has no checkpoint; say --model.init random")
        if self.model.path == "tiny" and self.data.kind != "stdlib":
            problems.append(f"data.kind: the built-in model reads bytes, data.kind stdlib, not {self.data.kind}")
        if self.model.path != "tiny" and self.data.kind == "stdlib":
            problems.append("data.kind: stdlib is for the built-in model; give pretrain or sft")
        if self.data.kind != "stdlib":
            problems += self.data.attention_problems(self.model.attention)
        if self.evaluation.every and not self.data.has_evaluation:
            problems.append(
                "evaluation.every: there is nothing to evaluate on; see data.eval_path, data.eval_sequences"
            )
        if self.model.train == "lora" and self.model.freeze:
            problems.append("model.freeze: LoRA freezes every weight already")
        if self.model.train == "lora" and self.model.lora.experts and self.mesh.expert_parallel > 1:
            problems.append("model.lora.experts: adapters on experts that are dealt to ranks are not supported")
        if self.model.train == "lora" and self.model.storage == "fp32":
            problems.append("model.storage: fp32 is for weights that are trained; model.lora.dtype is the adapters'")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def shard(self) -> int:
        """Ranks that share one replica of the model."""
        return self.nproc // self.mesh.replicate

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """``(shard,)``, or ``(replicate, shard)`` with more than one replica."""
        return (self.shard,) if self.mesh.replicate == 1 else (self.mesh.replicate, self.shard)


def resolve(overrides: Mapping[str, str], *, base: Mapping[str, Any] | None = None) -> TrainConfig:
    """A preset, with the settings of a file on top, and those of the command line on top of these.

    Args:
        overrides: dotted setting (``optimizer.lr``) -> text as typed.
        base: the settings of a configuration file (:func:`read_config_file`), nested.

    Raises:
        ConfigError: with every mistake found, one line each.
    """
    from .presets import PRESETS

    values = dict(base or {})
    name = overrides.get("preset", values.get("preset", "tiny"))
    if name not in PRESETS:
        raise ConfigError([f"preset: {name!r} is unknown; there is: {', '.join(PRESETS)}"])
    preset = copy.deepcopy(PRESETS[name])
    problems: list[str] = []
    # Another kind of data has other settings: then nothing of the preset's data is kept.
    kind = overrides.get("data.kind", _inner(values, "data").get("kind", preset["data"]["kind"]))
    merged: dict[str, Any] = _merge(
        preset | ({} if kind == preset["data"]["kind"] else {"data": {"kind": kind}}), values
    )
    merged["preset"] = name
    known = _known_settings(str(kind))
    for setting, text in overrides.items():
        if setting not in known:
            problems.append(_unknown(setting, known))
            continue
        *sections, key = setting.split(".")
        inner = merged
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = None if text in ("None", "null") else text
    try:
        config = TrainConfig.model_validate(merged)
    except ValidationError as error:
        lines = [line for found in error.errors() for line in _in_words(found, known)]
        raise ConfigError([*problems, *dict.fromkeys(lines)]) from None
    if problems:
        raise ConfigError(problems)
    return config


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, nested.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError([f"--config: {path} cannot be read: {error.strerror or error}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"--config: {path} is no YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError([f"--config: {path} holds no settings; expected lines like `steps: 100`"])
    return values


def to_yaml(config: TrainConfig) -> str:
    """The whole configuration as YAML, in the order of the fields."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def from_yaml(text: str) -> TrainConfig:
    """What :func:`to_yaml` wrote.

    Raises:
        ConfigError: it is something else.
    """
    import yaml

    values = yaml.safe_load(text)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        known = _known_settings("stdlib")
        raise ConfigError([line for found in error.errors() for line in _in_words(found, known)]) from None


def flat_settings(config: TrainConfig) -> dict[str, str]:
    """Every setting by its dotted name, as the command line would have it."""
    return _flat(config.model_dump(mode="json"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in _MAPPINGS:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _as_text(value)
    return flat


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


_MAPPINGS = frozenset({"optimizer.lr_scale"})
"""Settings that are mappings themselves."""


def _known_settings(kind: str) -> list[str]:
    """The dotted names of all settings, with the data section of ``kind``."""
    from dsv4_fsdp.data.settings import PretrainSettings, SftSettings, StdlibSettings

    data = {"pretrain": PretrainSettings, "sft": SftSettings}.get(kind, StdlibSettings)

    def names(section: Any, prefix: str) -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            if prefix + name == "data":
                found += names(data, "data.")
            elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                found += names(field.annotation, f"{prefix}{name}.")
            else:
                found.append(prefix + name)
        return found

    return names(TrainConfig, "")


def _inner(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, dict) else {}


def _merge(low: Mapping[str, Any], high: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``high`` over ``low``, section by section."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        is_section = isinstance(value, dict) and isinstance(old, dict) and prefix + key not in _MAPPINGS
        merged[key] = _merge(old, value, f"{prefix}{key}.") if is_section else value  # type: ignore[arg-type]
    return merged


def _unknown(setting: str, known: list[str]) -> str:
    close = difflib.get_close_matches(setting, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there is: {', '.join(known)}"
    return f"{setting}: no such setting; {hint}"


def _in_words(error: ErrorDetails, known: list[str]) -> list[str]:
    """One pydantic error as lines: where, what was expected, what came."""
    # A union puts the kind of data into the location.
    parts = [
        str(part)
        for i, part in enumerate(error["loc"])
        if not (i == 1 and error["loc"][0] == "data" and len(error["loc"]) > 1)
    ]
    if error["loc"] and error["loc"][0] == "data" and len(error["loc"]) == 2 and error["type"] == "value_error":
        parts = ["data"]
    where = ".".join(parts)
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # raised here, and complete; that of the whole has its places in it
        return [f"{where}: {message}"] if where else message.splitlines()
    if error["type"] == "extra_forbidden":
        return [_unknown(where, known)]
    if error["type"] == "missing":
        return [f"{where}: missing; give a value for it"]
    return [f"{where}: {message[0].lower()}{message[1:]}, got {error['input']}"]
