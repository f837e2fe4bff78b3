"""Where a run puts what it makes. One folder a run; nothing is ever written into another run's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .config import ConfigError, TrainConfig

__all__ = ["RunFolder"]


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, JSON."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The sharding plan as text; ``plan.json`` beside it is what its hash is made of."""
        return self.path / "plan.txt"

    @property
    def precision(self) -> Path:
        """The precision table, as read back from the live units."""
        return self.path / "precision.txt"

    @property
    def metrics(self) -> Path:
        """One JSON object a step, see :class:`dsv4_fsdp.train.progress.StepMetrics`."""
        return self.path / "metrics.jsonl"

    @property
    def export(self) -> Path:
        """The trained model as a Transformers checkpoint; there only once it was reloaded and compared."""
        return self.path / "export"

    def check(self) -> None:
        """Raise ``ConfigError`` unless the folder is new or empty. Writes nothing."""
        if self.path.exists():
            if not self.path.is_dir():
                raise ConfigError([f"--run-dir: {self.path} is a file; give a folder that is new or empty"])
            if any(self.path.iterdir()):
                raise ConfigError([f"--run-dir: {self.path} is not empty; give a folder that is new or empty"])
        for parent in self.path.parents:
            if parent.exists():
                if not parent.is_dir():
                    raise ConfigError([f"--run-dir: {parent}, in {self.path}, is a file"])
                break

    def create(self, config: TrainConfig) -> None:
        """Make the folder and write the configuration into it."""
        self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        self.config.write_text(config.model_dump_json(indent=2) + "\n")
