"""What a run is told: one validated, frozen value, checked before any process group or model exists.

A preset is a named starting point; ``--section.key value`` on the command line changes single settings of it. Nothing
here imports torch, so a typing mistake is answered at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from dsv4_fsdp.errors import Dsv4FsdpError
from dsv4_fsdp.settings_section import Section

__all__ = [
    "MAX_SEQUENCE_LENGTH",
    "PRESETS",
    "ConfigError",
    "DataConfig",
    "OptimizerConfig",
    "TrainConfig",
    "flat_settings",
    "resolve",
]

MAX_SEQUENCE_LENGTH = 1024
"""``max_position_embeddings`` of the tiny model."""


class ConfigError(Dsv4FsdpError, ValueError):
    """The configuration is wrong. ``problems`` has one line for each mistake found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _split_commas(value: Any) -> Any:
    """The command line gives a list as ``64,192,256``."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class DataConfig(Section):
    """The batches: see :class:`dsv4_fsdp.train.stdlib_text.StdlibText`."""

    # One token has no next token to predict.
    sequence_lengths: Annotated[
        tuple[Annotated[int, Field(ge=2, le=MAX_SEQUENCE_LENGTH)], ...],
        BeforeValidator(_split_commas),
        Field(min_length=1),
    ]
    batch_tokens: int = Field(gt=0)

    @model_validator(mode="after")
    def _longest_fits(self) -> DataConfig:
        if max(self.sequence_lengths) > self.batch_tokens:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, less than the longest of sequence_lengths, "
                f"{max(self.sequence_lengths)}"
            )
        return self


class OptimizerConfig(Section):
    """AdamW, its schedule (linear warm-up, then a cosine down to ``final_lr_fraction``) and clipping."""

    lr: float = Field(gt=0)
    final_lr_fraction: float = Field(ge=0, le=1)
    warmup_fraction: float = Field(ge=0, le=1)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    weight_decay: float = Field(ge=0)
    clip_grad_norm: float = Field(gt=0)


class TrainConfig(Section):
    """A whole run. ``nproc`` is the number of ranks that the command starts; under torchrun it is the world size."""

    preset: str
    steps: int = Field(gt=0)
    seed: int = Field(ge=0, lt=2**31)
    nproc: int = Field(gt=0)
    data: DataConfig
    optimizer: OptimizerConfig


PRESETS: dict[str, TrainConfig] = {
    # A quarter of the sequences is shorter than one HCA window (128 tokens), so most steps have ranks that differ.
    "tiny": TrainConfig(
        preset="tiny",
        steps=120,
        seed=0,
        nproc=2,
        data=DataConfig(sequence_lengths=(64, 192, 256, 512), batch_tokens=512),
        optimizer=OptimizerConfig(
            lr=2e-3,
            final_lr_fraction=0.1,
            warmup_fraction=0.1,
            beta1=0.9,
            # bf16 storage means bf16 moments: 0.999 would change the second one by less than its last bit.
            beta2=0.95,
            weight_decay=0.1,
            clip_grad_norm=1.0,
        ),
    ),
}


def resolve(overrides: Mapping[str, str]) -> TrainConfig:
    """The preset named in ``overrides`` with the other settings applied.

    Args:
        overrides: dotted setting (``optimizer.lr``) -> text as typed.

    Raises:
        ConfigError: with every mistake found, one line each.
    """
    name = overrides.get("preset", "tiny")
    if name not in PRESETS:
        raise ConfigError([f"preset: {name!r} is unknown; there is: {', '.join(PRESETS)}"])
    values: dict[str, Any] = PRESETS[name].model_dump()
    problems = []
    for setting, text in overrides.items():
        *sections, key = setting.split(".")
        inner: Any = values
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or key not in inner or isinstance(inner[key], dict):
            problems.append(_unknown(setting))
        else:
            inner[key] = text
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError([*problems, *map(_in_words, error.errors())]) from None
    if problems:
        raise ConfigError(problems)
    return config


def flat_settings(config: TrainConfig) -> dict[str, str]:
    """Every setting by its dotted name, as text."""
    return _flat(config.model_dump())


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
    return flat


def _unknown(setting: str) -> str:
    known = list(flat_settings(PRESETS["tiny"]))
    close = difflib.get_close_matches(setting, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there is: {', '.join(known)}"
    return f"{setting}: no such setting; {hint}"


def _in_words(error: ErrorDetails) -> str:
    """One pydantic error as one line: where, what was expected, what came."""
    where = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # raised here, and complete
        return f"{where}: {message}"
    return f"{where}: {message[0].lower()}{message[1:]}, got {error['input']}"
