"""A training run's configuration file as the planner's settings, and which of them are from where. Imports no torch.

The file is read and checked by the trainer's own code (:mod:`dsv4_fsdp.train.config`), so a preset fills in what the
file does not say, and an unknown setting is an error. Flags of the command line win.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_fsdp.data.errors import DataError
from dsv4_fsdp.data.settings import StdlibSettings
from dsv4_fsdp.train.config import ConfigError, ModelConfig, TrainConfig, flat_settings, read_config_file, resolve
from dsv4_fsdp.train.optimizer_settings import OptimizerSettings
from dsv4_fsdp.train.presets import PRESETS

from .settings import SettingsError

__all__ = ["RunConfig", "read_run_config"]

_SETTINGS = {
    "ranks": "nproc",
    "replicate": "mesh.replicate",
    "expert_parallel": "mesh.expert_parallel",
    "island_units": "mesh.island_units",
    "reshard_after_forward": "mesh.reshard_after_forward",
    "activation_checkpointing": "mesh.activation_checkpointing",
    "offload": "mesh.cpu_offload",
    "storage": "model.storage",
    "attention": "model.attention",
    "optimizer": "optimizer.name",
    "sequence": "data.sequence_length",
    "batch": "data.micro_batch_size",
    "micro_batches": "data.global_batch_size",
}
"""The planner's setting -> the trainer's that it is read from."""
_OF_STDLIB = {"sequence": "data.sequence_lengths", "batch": "data.batch_tokens"}
_MODEL_SETTINGS = ("model.path", "model.init", "model.train", "model.lora", "model.freeze", "model.loss")
# Told to the trainer's checks too, or they would judge what the file says instead.
_PASSED_ON = ("ranks", "replicate", "expert_parallel", "storage", "batch", "sequence")


@dataclass(frozen=True)
class RunConfig:
    """What a configuration file says to the planner.

    Attributes:
        settings: the planner's setting -> value, without those that the command line gave.
        sources: trainer's settings, or flags, by where they are from, in the order command line, file, preset, default.
        model, optimizer: sections of the configuration.
    """

    settings: Mapping[str, Any]
    sources: Mapping[str, tuple[str, ...]]
    model: ModelConfig
    optimizer: OptimizerSettings

    def describe(self) -> list[str]:
        """One line for each source: ``From run.yaml: mesh.replicate 2, optimizer.name muon``."""
        return [f"From {source}: {', '.join(names)}" for source, names in self.sources.items() if names]


def read_run_config(path: Path, *, model: str | None, given: Mapping[str, Any]) -> RunConfig:
    """Read ``path`` as the trainer would.

    Args:
        model: the command line's MODEL, in place of ``model.path``.
        given: the flags of the command line, by the planner's setting.

    Raises:
        SettingsError: with every mistake, in the trainer's words.
    """
    try:
        base = read_config_file(path)
        config = resolve(_overrides(base, model, given), base=base)
    except ConfigError as error:
        raise SettingsError(error.problems) from None
    settings = _settings(config, given)
    names = _SETTINGS | (_OF_STDLIB if isinstance(config.data, StdlibSettings) else {})
    flat = flat_settings(config)
    sources: dict[str, list[str]] = {
        "the command line": [*(["MODEL"] if model else []), *(f"--{name.replace('_', '-')}" for name in given)],
        str(path): [],
        f"preset {config.preset}": [],
        "defaults": [],
    }
    for name, setting in [*((n, s) for n, s in names.items() if n not in given), *((None, s) for s in _MODEL_SETTINGS)]:
        if setting == "model.path" and model:
            continue
        places = (str(path), base), (f"preset {config.preset}", PRESETS[config.preset])
        source = next((place for place, values in places if _has(values, setting)), "defaults")
        if name is None and source == "defaults":
            continue
        text = flat.get(setting) or ""
        sources[source].append(f"{setting} {text}".rstrip())
    return RunConfig(
        {name: value for name, value in settings.items() if name not in given},
        {source: tuple(found) for source, found in sources.items()},
        config.model,
        config.optimizer,
    )


def _overrides(base: Mapping[str, Any], model: str | None, given: Mapping[str, Any]) -> dict[str, str]:
    kind = _inner(base, "data").get("kind", PRESETS.get(base.get("preset", "tiny"), {}).get("data", {}).get("kind"))
    overrides = {} if model is None else {"model.path": model}
    if kind != "stdlib" and "path" not in _inner(base, "data"):
        overrides["data.path"] = "(not given)"  # nothing of the data is looked at
    for name in _PASSED_ON:
        if name in given and not (kind == "stdlib" and name in _OF_STDLIB):
            overrides[_SETTINGS[name]] = str(given[name])
    return overrides


def _settings(config: TrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    data = config.data
    if isinstance(data, StdlibSettings):
        batch = data.batch_tokens // data.longest
    else:
        batch = data.micro_batch_size
    try:
        micro_batches = 1 if "micro_batches" in given else data.accumulation(config.nproc)
    except DataError as error:
        raise SettingsError(str(error).splitlines()) from None
    return {
        "ranks": config.nproc,
        "replicate": config.mesh.replicate,
        "expert_parallel": config.mesh.expert_parallel,
        "island_units": config.mesh.island_units,
        "reshard_after_forward": config.mesh.reshard_after_forward,
        "activation_checkpointing": config.mesh.activation_checkpointing,
        "offload": config.mesh.cpu_offload,
        "storage": config.model.storage,
        "attention": config.model.attention,
        "optimizer": config.optimizer.name,
        "sequence": data.longest,
        "batch": batch,
        "micro_batches": micro_batches,
    }


def _has(values: Mapping[str, Any], setting: str) -> bool:
    section, _, key = setting.rpartition(".")
    return key in (_inner(values, section) if section else values)


def _inner(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, dict) else {}
