"""The folder of a run's checkpoints, as anybody may read it: which there are, and whether they are whole.

No process group, no model. Who writes it, and what is in it: :mod:`dsv4_fsdp.train.checkpoints`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_fsdp.errors import listing

from .checkpoint_pieces import CheckpointError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "SavedCheckpoint",
    "folder_name",
    "latest_checkpoint",
    "published",
    "read_checkpoint",
]

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint whose files are all there.

    Attributes:
        path: its folder.
        manifest: what ``manifest.json`` holds.
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.manifest["step"])

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return int(self.manifest["world_size"])

    @property
    def base(self) -> dict[str, str] | None:
        """Digests of the checkpoint that holds the frozen weights; ``None`` if this one holds all."""
        found = self.manifest.get("base")
        return None if found is None else {str(name): str(digest) for name, digest in found.items()}

    @property
    def config_text(self) -> str:
        """The configuration of the run that wrote it, YAML."""
        return (self.path / "config.yaml").read_text()


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """The checkpoint in the folder ``path``, if it is whole. Needs no process group.

    Raises:
        CheckpointError: what is missing, cut off or unknown.
    """
    again = "what to do: use another checkpoint; this one was damaged after it was written, or not written by a run."
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {MANIFEST} cannot be read ({error}).\n{again}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(
            f"{path / MANIFEST} has format {found!r}, and this version of dsv4-fsdp reads format {FORMAT}.\n"
            "what to do: resume with the version that wrote it."
        )
    try:
        files = {str(name): int(size) for name, size in manifest["files"].items()}
        int(manifest["step"]), int(manifest["world_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged ({type(error).__name__}: {error}).\n{again}") from None
    problems = []
    for name, size in files.items():
        try:
            found_bytes = (path / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing ({size:,} bytes)")
            continue
        if found_bytes != size:
            problems.append(f"{name} has {found_bytes:,} bytes instead of {size:,}")
    if problems:
        raise CheckpointError(f"the checkpoint {path} is damaged:\n{listing(problems)}\n{again}")
    return SavedCheckpoint(path, manifest)


def latest_checkpoint(folder: Path) -> tuple[SavedCheckpoint | None, list[str]]:
    """The newest whole checkpoint in ``folder`` (``RUN/checkpoints``), and what is wrong with newer ones, in words.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    problems: list[str] = []
    for path in reversed(published(folder)):
        try:
            return read_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        text = "\n\n".join(problems)
        raise CheckpointError(f"no checkpoint in {folder} can be used:\n\n{text}\n\nTo start over, move {folder} away.")
    return None, []


def published(folder: Path) -> list[Path]:
    """The folders of checkpoints, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.startswith("step-") and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def folder_name(step: int) -> str:
    """The name of the folder of one checkpoint."""
    return f"step-{step:08d}"
