"""The export of a training checkpoint on disk, in one process without a GPU: what ``dsv4-fsdp export`` does.

A training checkpoint is ``RUN/checkpoints/step-00000100/``: ``manifest.json`` (written last: ``format``, ``step``,
``source``, ``base``), ``model/`` (``config.json``, tokenizer files, of a LoRA run ``adapter_config.json``) and
``state/`` (``torch.distributed.checkpoint``). Frozen weights that it left to the source come from there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_fsdp.checkpoint_digests import refuse_other_base
from dsv4_fsdp.checkpoint_layout import CheckpointLayout, model_of_folder
from dsv4_fsdp.contract import widen_meta_islands
from dsv4_fsdp.errors import CheckpointError, ContractError, ExportError
from dsv4_fsdp.names import is_adapter_name

from . import adapter as lora
from .source_checkpoint import SourceCheckpoint, WithFrozen
from .trained_tensors import CheckpointTensors, Only, TrainedTensors
from .verify import Reloaded, refuse_what_stock_refuses, verify
from .write_model import DEFAULT_SHARD_BYTES, Layout, WrittenModel, folder_published_at_end, write_model

__all__ = ["Exported", "TrainingCheckpoint", "export_checkpoint", "find_checkpoint"]

_FORMAT = 1
_STEP = re.compile(r"step-(\d+)")
_VERIFIED_BYTES = 2_000_000_000
"""Up to this size an export is verified by itself: three copies of it are in memory then."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A complete training checkpoint.

    Attributes:
        folder: where it is.
        step: the optimizer step after which it was saved.
        source: the checkpoint that training started from, ``None`` for a model from scratch.
        base: digests of the files there, if frozen weights were left to them.
    """

    folder: Path
    step: int
    source: Path | None
    base: Mapping[str, str] | None = None

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    @property
    def islands(self) -> tuple[str, ...]:
        """Names, or parts of names, of the run's fp32 islands beyond the model's class list."""
        path = self.model_folder / lora.ISLANDS_FILE
        return tuple(json.loads(path.read_text())) if path.is_file() else ()

    @property
    def is_lora(self) -> bool:
        return (self.model_folder / lora.ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class Exported:
    """What was exported: ``written`` of a whole model or, of an adapter, the number of its tensors."""

    checkpoint: TrainingCheckpoint
    source: Path | None
    written: WrittenModel | None
    adapter_tensors: int
    reloaded: Reloaded | None


def find_checkpoint(path: Path) -> TrainingCheckpoint:
    """The checkpoint at ``path``, or the newest complete one of the run at ``path``.

    Raises:
        ExportError: there is none.
    """
    folder = path
    if not (path / "manifest.json").is_file():
        found = path / "checkpoints"
        steps = [entry for entry in found.iterdir() if _STEP.fullmatch(entry.name)] if found.is_dir() else []
        complete = [entry for entry in steps if (entry / "manifest.json").is_file()]
        if not complete:
            got = "nothing at all" if not path.exists() else "none"
            if steps or _STEP.fullmatch(path.name):
                got = "one without manifest.json: it was not written to its end"
            raise ExportError(
                "there is nothing to export.\nexpected: a run with checkpoints/step-*/manifest.json, or one of these "
                f"checkpoints\ngot: {got}\nwhere: {path}\nwhat to do: name the folder of a run that has saved."
            )
        folder = max(complete, key=lambda entry: int(entry.name.removeprefix("step-")))
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        version, step, source = manifest["format"], int(manifest["step"]), manifest.get("source")
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"a checkpoint's manifest cannot be read.\nexpected: JSON with format and step\ngot: {error}\n"
            f"where: {folder / 'manifest.json'}\nwhat to do: export another checkpoint."
        ) from error
    if version != _FORMAT:
        raise ExportError(
            f"a checkpoint of another format.\nexpected: format {_FORMAT}\ngot: format {version}\nwhere: {folder}\n"
            "what to do: export it with the version of dsv4-fsdp that wrote it."
        )
    if not (folder / "model" / "config.json").is_file():
        raise ExportError(
            f"a checkpoint without its model's config.\nexpected: model/config.json\ngot: no such file\n"
            f"where: {folder}\nwhat to do: export another checkpoint."
        )
    return TrainingCheckpoint(folder, step, None if source is None else Path(source), manifest.get("base"))


def export_checkpoint(
    path: Path,
    target: Path,
    *,
    layout: Layout = "transformers",
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    with_mtp: bool = True,
    merge: bool = False,
    check: bool | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Exported:
    """Export the checkpoint or run at ``path`` to the new folder ``target``.

    Args:
        source: where the checkpoint that training started from is now, if it was moved.
        merge: of a LoRA run, write the whole model instead of the adapter.
        check: reload the export in a fresh process and compare logits; ``None``: if it is small enough.

    Raises:
        ExportError: nothing is left under ``target``.
        OSError: likewise, such as a full disk.
    """
    checkpoint = find_checkpoint(path)
    source = _source(checkpoint, source)
    if merge and not checkpoint.is_lora:
        raise ExportError(
            f"there is nothing to merge.\nexpected: a LoRA run\ngot: no {lora.ADAPTER_CONFIG} in model/\n"
            f"where: {checkpoint.folder}\nwhat to do: leave --merge away."
        )
    if checkpoint.is_lora and not merge and (layout == "release" or dtype is not None):
        asked = "--layout release" if layout == "release" else "--dtype"
        raise ExportError(
            f"an adapter has peft's layout and the dtype it was trained in.\nexpected: {asked} with --merge\n"
            f"got: {asked} of the adapter alone\nwhat to do: add --merge, or leave {asked} away."
        )
    trained = _tensors(checkpoint, source)
    with folder_published_at_end(target) as folder:
        if checkpoint.is_lora and not merge:
            return _export_adapter(checkpoint, trained, folder, source=source, check=check)
        tensors = trained
        if checkpoint.is_lora:
            only_base = Only(trained, lambda name: not is_adapter_name(name))
            tensors = lora.MergedTensors(only_base, trained, lora.peft_model_of(checkpoint.model_folder))

        def prepare(folder: Path) -> None:
            for file in sorted(checkpoint.model_folder.iterdir()):
                if file.name not in (lora.ADAPTER_CONFIG, lora.ISLANDS_FILE):
                    shutil.copy2(file, folder)

        written = write_model(
            tensors,
            folder,
            prepare=prepare,
            layout=layout,
            source=source,
            dtype=dtype,
            with_mtp=with_mtp,
            islands=checkpoint.islands,
            max_shard_bytes=max_shard_bytes,
        )
        reloaded = None
        if check or (check is None and written.total_bytes <= _VERIFIED_BYTES):
            reloaded = verify(tensors, folder)
        else:
            refuse_what_stock_refuses(folder, onto_meta=True)
    return Exported(checkpoint, source, written, 0, reloaded)


def _export_adapter(
    checkpoint: TrainingCheckpoint,
    trained: TrainedTensors,
    folder: Path,
    *,
    source: Path | None,
    check: bool | None,
) -> Exported:
    peft_model = lora.peft_model_of(checkpoint.model_folder)
    config = peft_model.peft_config["default"]
    if source is not None:
        config.base_model_name_or_path = str(source.resolve())
    written = lora.write_adapter(trained, folder, keys=lora.adapter_keys(peft_model), config=config)
    lora.copy_tokenizer_files(checkpoint.model_folder, folder)
    reloaded = None
    if check is not False and source is not None:
        size = sum(tensor.nbytes for tensor in peft_model.get_base_model().state_dict().values())
        if check or size <= _VERIFIED_BYTES:
            reloaded = verify(trained, folder, adapter=peft_model)
    return Exported(checkpoint, source, None, len(written), reloaded)


def _tensors(checkpoint: TrainingCheckpoint, source: Path | None) -> TrainedTensors:
    """The run's tensors: all that the checkpoint holds, and the frozen weights of the source that it left out."""
    trained = CheckpointTensors(checkpoint.folder / "state")
    if checkpoint.base is None or source is None:
        return trained
    try:
        model = model_of_folder(checkpoint.model_folder)
    except ContractError as error:
        raise ExportError(str(error)) from error
    widen_meta_islands(model, checkpoint.islands)
    layout = CheckpointLayout(model)
    return WithFrozen(trained, SourceCheckpoint(source, layout), model, layout)


def _source(checkpoint: TrainingCheckpoint, given: Path | None) -> Path | None:
    source = given or checkpoint.source
    if source is not None and not (source / "config.json").is_file():
        said = "--source" if given else "the checkpoint's manifest"
        raise ExportError(
            f"the checkpoint that training started from is not there.\nexpected: a folder with config.json, as {said} "
            f"says\ngot: {'no config.json in it' if source.exists() else 'no such folder'}\nwhere: {source}\n"
            "what to do: name its new place with --source; what the run did not train is read from there."
        )
    if source is not None and checkpoint.base is not None:
        try:
            remedy = "name the folder where it is now with --source."
            refuse_other_base(source, checkpoint.base, held_by=checkpoint.folder, remedy=remedy)
        except CheckpointError as error:
            raise ExportError(str(error)) from error
    return source
