"""Where a run puts what it makes. One folder a run; nothing is ever written into another run's."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dsv4_fsdp.errors import Dsv4FsdpError

from .config import ConfigError, TrainConfig, flat_settings, from_yaml, to_yaml

__all__ = ["RunFolder", "RunFolderError"]


class RunFolderError(Dsv4FsdpError, RuntimeError):
    """A run's folder cannot be made or written to."""


# What may differ when a run is continued: how it runs and what it leaves, not what is learned.
# A path may: digests are compared, the data's and that of frozen weights; the checkpoint holds the others.
_MAY_DIFFER = (
    "nproc",
    "steps",
    "mesh.",
    "checkpoint.",
    "logging.",
    "evaluation.",
    "data.micro_batch_size",
    "data.cache_dir",
    "data.path",
    "data.eval_path",
    "data.eval_sequences",
    "data.tokenizer",
    "model.path",
    "model.attention",
    "model.loss",
    "model.experts",
)


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """The sharding plan as text; ``plan.json`` beside it is what its hash is made of."""
        return self.path / "plan.txt"

    @property
    def precision(self) -> Path:
        """The precision table, as read back from the live units."""
        return self.path / "precision.txt"

    @property
    def audit(self) -> Path:
        """The audit of the first step, JSON; ``audit.txt`` beside it is its table."""
        return self.path / "audit.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step, see :class:`dsv4_fsdp.train.progress.StepMetrics`."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Training checkpoints, see :mod:`dsv4_fsdp.train.checkpoints`."""
        return self.path / "checkpoints"

    @property
    def data_cache(self) -> Path:
        """Prepared tokens, if the settings name no other place."""
        return self.path / "data-cache"

    @property
    def tensorboard(self) -> Path:
        """Event files, if asked for."""
        return self.path / "tensorboard"

    @property
    def stop(self) -> Path:
        """A file that asks the run to save and stop; it is removed then."""
        return self.path / "stop"

    @property
    def export(self) -> Path:
        """The trained model as a Transformers checkpoint; there only once it was reloaded and compared."""
        return self.path / "export"

    def former_config(self) -> TrainConfig | None:
        """The configuration of the run that is in the folder already, if there is one.

        Raises:
            ConfigError: it cannot be read.
        """
        if not self.config.is_file():
            return None
        try:
            return from_yaml(self.config.read_text())
        except ConfigError as error:
            raise ConfigError([f"{self.config}: {problem}" for problem in error.problems]) from None

    def check(self, config: TrainConfig) -> None:
        """Raise ``ConfigError`` unless the folder is new, empty, or of a run that ``config`` continues. Writes
        nothing."""
        if self.path.exists():
            if not self.path.is_dir():
                raise ConfigError([f"--run-dir: {self.path} is a file; give a folder that is new or empty"])
            former = self.former_config()
            if former is not None:
                self._check_continues(former, config)
                if self.export.exists() and not (self.checkpoints.is_dir() and any(self.checkpoints.iterdir())):
                    problem = f"--run-dir: the run in {self.path} has ended and kept no checkpoint to go on from "
                    raise ConfigError([problem + "(checkpoint.every); give a folder that is new or empty"])
            elif any(self.path.iterdir()):
                raise ConfigError([f"--run-dir: {self.path} is not empty; give a folder that is new or empty"])
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise ConfigError([f"--run-dir: {self.path} cannot be written to"])
        for parent in self.path.parents:
            if parent.exists():
                if not parent.is_dir():
                    raise ConfigError([f"--run-dir: {parent}, in {self.path}, is a file"])
                if not self.path.exists() and not os.access(parent, os.W_OK | os.X_OK):
                    raise ConfigError([f"--run-dir: {self.path} cannot be made: {parent} cannot be written to"])
                break

    def _check_continues(self, former: TrainConfig, config: TrainConfig) -> None:
        old, new = flat_settings(former), flat_settings(config)
        changed = [
            f"{name}: the run in {self.path} has {old.get(name, '(nothing)')}, not {new.get(name, '(nothing)')}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name) and name != "preset" and not name.startswith(_MAY_DIFFER)
        ]
        if changed:
            raise ConfigError([*changed, "--run-dir: to train with other settings give a folder that is new or empty"])

    def create(self, config: TrainConfig) -> None:
        """Make the folder and write the configuration into it, unless there is one; see :meth:`keep_config`.

        Raises:
            RunFolderError: the machine does not let it.
        """
        if not self.config.is_file():
            self.keep_config(config)

    def keep_config(self, config: TrainConfig) -> None:
        """Write the configuration that the run goes on with, once it is sure that it can.

        Raises:
            RunFolderError: the machine does not let it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary = self.config.with_name(".config.yaml")
            temporary.write_text(to_yaml(config))
            temporary.replace(self.config)
            self.stop.unlink(missing_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"the run's folder cannot be written.\nexpected: room for files\ngot: {error.strerror or error}"
                f"\nwhere: {error.filename or self.path}\nwhat to do: free space, or give another --run-dir."
            ) from error

    def set_export_aside(self, step: int) -> Path | None:
        """Rename the export of a run that had ended after ``step`` and now goes on; where it is, if there was one."""
        if not self.export.exists():
            return None
        aside = self.export.with_name(f"export-step-{step:08}")
        if aside.exists():
            shutil.rmtree(aside)
        self.export.rename(aside)
        return aside

    def keep_metrics(self, steps: int) -> None:
        """Drop the lines of ``metrics.jsonl`` behind ``steps``: steps that were made, lost, and will be made again."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text().splitlines():
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a run that was killed
            if step <= steps:
                kept.append(f"{line}\n")
        temporary = self.metrics.with_name(".metrics.jsonl")
        temporary.write_text("".join(kept))
        temporary.replace(self.metrics)
