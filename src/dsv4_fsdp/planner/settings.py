"""What ``dsv4-fsdp plan`` is asked: the cluster and the training settings, checked before torch has work to do.

Everything is taken as text and checked here, so that all mistakes of a command line are reported together.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from dsv4_fsdp.errors import Dsv4FsdpError

__all__ = [
    "ATTENTIONS",
    "ISLAND_UNITS",
    "OPTIMIZERS",
    "STORAGES",
    "Cluster",
    "Request",
    "SettingsError",
    "TrainingSettings",
    "find_model",
    "resolve",
]

STORAGES = ("bf16", "fp32")
ATTENTIONS = ("windowed", "eager")
ISLAND_UNITS = ("grouped", "root")
OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_bf16_sr", "muon", "sgd", "sgd-momentum")
"""The trainer's (:mod:`dsv4_fsdp.train.optimizers`), and torch's SGD without and with momentum."""


class SettingsError(Dsv4FsdpError, ValueError):
    """What was asked cannot be planned. ``problems`` has one line for each mistake found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Cluster:
    """The machines. Ranks are numbered node by node, as torchrun does."""

    ranks: int
    ranks_per_node: int
    device_memory_gib: float | None = None

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def replica_counts(self) -> list[int]:
        """Replicas worth trying: 1 (FSDP), and as many as make a replica fill 1, 2, 4, ... nodes."""
        found = [1]
        size = self.ranks_per_node
        while size < self.ranks:
            if self.ranks % size == 0:
                found.append(self.ranks // size)
            size *= 2
        return found

    def expert_parallel_sizes(self, replicate: int, num_experts: int) -> list[int]:
        """Numbers of ranks worth dealing experts to, out of those that divide a replica's ranks and the experts.

        The largest within a node, where tokens travel fast; the largest of all; and 1, no expert parallelism.
        """
        common = math.gcd(self.ranks // replicate, num_experts) if num_experts else 1
        possible = [size for size in range(1, common + 1) if common % size == 0]
        in_a_node = max(size for size in possible if self.ranks_per_node % size == 0)
        return list(dict.fromkeys((in_a_node, common, 1)))

    @property
    def device_memory_bytes(self) -> int | None:
        return None if self.device_memory_gib is None else int(self.device_memory_gib * 2**30)


@dataclass(frozen=True)
class TrainingSettings:
    """How the model is sharded and trained.

    Attributes:
        replicate: replicas of the sharded model (HSDP); 1 is plain FSDP.
        expert_parallel: ranks that the experts of a layer are dealt to; 1 means that each rank computes all of them.
        storage: dtype of what is no fp32 island: ``"bf16"``, or ``"fp32"`` for master weights.
        island_units: one of :data:`ISLAND_UNITS`, see :func:`dsv4_fsdp.parallelize`.
        reshard_after_forward: as in ``fully_shard``, for embedding and blocks.
        offload: FSDP2's ``CPUOffloadPolicy``: shards, gradients and optimizer state in host memory.
        activation_checkpointing: 0 nothing, 1 every block, n every n-th block is recomputed in backward.
        batch, sequence: sequences per rank and micro-batch, and tokens of each.
        micro_batches: forwards and backwards per optimizer step.
        optimizer: one of :data:`OPTIMIZERS`.
        attention: ``"windowed"`` (:mod:`dsv4_fsdp.attention`), or ``"eager"`` (Transformers').
    """

    replicate: int = 1
    expert_parallel: int = 1
    storage: str = "bf16"
    island_units: Literal["grouped", "root"] = "grouped"
    reshard_after_forward: bool | int = True
    offload: bool = False
    activation_checkpointing: int = 0
    batch: int = 1
    sequence: int = 4096
    micro_batches: int = 1
    optimizer: str = "adamw"
    attention: str = "windowed"

    def mesh_shape(self, cluster: Cluster) -> tuple[int, ...]:
        """``(shard,)``, or ``(replicate, shard)`` with more than one replica."""
        shard = cluster.ranks // self.replicate
        return (shard,) if self.replicate == 1 else (self.replicate, shard)

    def describe(self, cluster: Cluster) -> str:
        """One line, such as ``HSDP 16x8, EP 8, bf16, reshard, recompute``."""
        shape = self.mesh_shape(cluster)
        reshard = self.reshard_after_forward
        parts = [
            f"{'HSDP' if len(shape) == 2 else 'FSDP'} {'x'.join(map(str, shape))}",
            *([f"EP {self.expert_parallel}"] if self.expert_parallel > 1 else []),
            self.storage,
            *(["islands in the root"] if self.island_units == "root" else []),
            "reshard" if reshard is True else "no reshard" if reshard is False else f"reshard to {reshard}",
        ]
        if self.activation_checkpointing:
            every = self.activation_checkpointing
            parts.append("recompute" if every == 1 else f"recompute 1 in {every}")
        parts += ["offload"] * self.offload
        return ", ".join(parts)


@dataclass(frozen=True)
class Request:
    """A checked command line. ``given`` names the training settings that were said, which a search leaves alone."""

    cluster: Cluster
    settings: TrainingSettings
    given: frozenset[str] = field(default_factory=frozenset)


def resolve(
    texts: Mapping[str, Any], *, configured: Mapping[str, Any] | None = None, problems: list[str] | None = None
) -> Request:
    """Check ``texts`` (setting -> text, bool, or ``None`` where nothing was said).

    Args:
        configured: what a configuration file says; ``texts`` win over it.
        problems: what was found wrong before, to be reported together with what is found here.

    Raises:
        SettingsError: with every mistake, each in the words of the command line.
    """
    found = list(problems or [])
    given = {name for name, value in texts.items() if value is not None}
    said = {**(configured or {}), **{name: texts[name] for name in given}}

    def number(name: str, *, default: int, at_least: int = 1) -> int:
        if name not in said:
            return default
        try:
            value = int(said[name])
        except (TypeError, ValueError):
            value = at_least - 1
        if value < at_least:
            found.append(f"{_flag(name)}: expected a whole number of {at_least} or more, got {said[name]!r}")
            return default
        return value

    def choice(name: str, choices: tuple[str, ...]) -> str:
        value = str(said.get(name, choices[0]))
        if value not in choices:
            close = difflib.get_close_matches(value, choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            found.append(f"{_flag(name)}: expected one of {', '.join(choices)}, got {value!r}{hint}")
        return value

    if "ranks" not in said:
        found.append("--ranks: missing; give the number of devices, such as --ranks 128")
    ranks = number("ranks", default=0)
    ranks_per_node = number("ranks_per_node", default=min(8, ranks) or 1)
    replicate = number("replicate", default=1)
    expert_parallel = number("expert_parallel", default=1)
    checkpointing = number("activation_checkpointing", default=0, at_least=0)
    micro_batches = number("micro_batches", default=1)
    batch = number("batch", default=TrainingSettings.batch)
    # One token has no next token to predict.
    sequence = number("sequence", default=TrainingSettings.sequence, at_least=2)
    storage = choice("storage", STORAGES)
    island_units = choice("island_units", ISLAND_UNITS)
    optimizer = choice("optimizer", OPTIMIZERS)
    attention = choice("attention", ATTENTIONS)
    memory_gib = _memory(said.get("device_memory_gib"), found)
    reshard = _reshard(said.get("reshard_after_forward"), found)
    if ranks:
        if ranks % replicate:
            found.append(f"--replicate: {ranks} ranks cannot be split into {replicate} equal replicas")
        elif not isinstance(reshard, bool) and (ranks // replicate) % reshard:
            found.append(
                f"--reshard-after-forward: expected true, false or a divisor of the {ranks // replicate} ranks of a "
                f"replica, got {reshard}"
            )
        elif (ranks // replicate) % expert_parallel:
            found.append(
                f"--expert-parallel: expected a divisor of the {ranks // replicate} ranks of a replica, got "
                f"{expert_parallel}"
            )
        if ranks > ranks_per_node and ranks % ranks_per_node:
            found.append(f"--ranks-per-node: {ranks} ranks do not fill nodes of {ranks_per_node}")
    if found:
        raise SettingsError(found)
    settings = TrainingSettings(
        replicate=replicate,
        expert_parallel=expert_parallel,
        storage=storage,
        island_units=cast(Literal["grouped", "root"], island_units),
        reshard_after_forward=reshard,
        offload=bool(said.get("offload", False)),
        activation_checkpointing=checkpointing,
        batch=batch,
        sequence=sequence,
        micro_batches=micro_batches,
        optimizer=optimizer,
        attention=attention,
    )
    names = {each.name for each in fields(TrainingSettings)}
    return Request(Cluster(ranks, ranks_per_node, memory_gib), settings, frozenset(names & given))


def find_model(model: str, *, problems: list[str], presets: tuple[str, ...]) -> str | Path | None:
    """A preset's name, or the path of a config.json; what is wrong with ``model`` goes into ``problems``."""
    if model in presets:
        return model
    path = Path(model)
    config = path / "config.json" if path.is_dir() else path
    if config.is_file():
        return config
    if path.is_dir():
        problems.append(f"MODEL: the folder {model} has no config.json")
        return None
    close = difflib.get_close_matches(model, presets, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    problems.append(
        f"MODEL: expected {', '.join(presets)}, a config.json or a checkpoint folder, got {model!r}, "
        f"which is no file{hint}"
    )
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _memory(text: Any, found: list[str]) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        found.append(f"--device-memory-gib: expected a number above 0, such as 80, got {text!r}")
        return None
    return value


def _reshard(text: Any, found: list[str]) -> bool | int:
    value = str(True if text is None else text).lower()
    if value in ("true", "false"):
        return value == "true"
    if value.isdecimal() and int(value) >= 1:
        return int(value)
    found.append(f"--reshard-after-forward: expected true, false or a number of ranks, got {text!r}")
    return True
