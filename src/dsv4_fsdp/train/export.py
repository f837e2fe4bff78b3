"""From the sharded model to a Transformers checkpoint that was seen to work: what the trainer calls.

The tensors of the live model are gathered one at a time and written by rank 0 (:mod:`dsv4_fsdp.export`) under a
temporary name. :func:`publish_export` then has the checkpoint reloaded in a fresh process that knows stock Transformers
only, compares the logits on a fixed batch with the sharded model's, bit for bit, and gives it its final name only then.
:func:`dry_export` shows before training whether that can come out well.

**Large models.** Above a size the dry export writes files without data (holes, which take no disk), so that names,
shapes, dtypes and the config are checked by the code that will write the real ones, and the final export is checked by
stock Transformers on the meta device instead of by its logits.

A rank that fails makes all ranks fail: the others go on gathering until rank 0 has told them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from dsv4_fsdp.errors import ExportError
from dsv4_fsdp.export.adapter import adapter_keys, write_adapter
from dsv4_fsdp.export.trained_tensors import GivenTensors, HeadersOnly, LiveTensors, TrainedTensors
from dsv4_fsdp.export.verify import Reloaded, refuse_what_stock_refuses, reload_with_stock
from dsv4_fsdp.export.write_model import write_model

from .ranks import Ranks
from .run_folder import RunFolder

__all__ = ["ExportError", "PublishedExport", "dry_export", "publish_export", "reload_with_stock", "write_checkpoint"]

_REAL_DRY_EXPORT_BYTES = 2_000_000_000
_RELOADED_BYTES = 20_000_000_000

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class PublishedExport:
    """What was found: the number of tensors by dtype, text that the model wrote, and whether it was reloaded at all."""

    dtypes: dict[str, int]
    sample: str
    reloaded: bool = True


def dry_export(
    model: nn.Module,
    folder: RunFolder,
    ranks: Ranks,
    *,
    tokenizer: Any,
    source: Path | None = None,
    islands: Collection[str] = (),
) -> None:
    """Write, check, reload and delete an export of the untrained model. All ranks call it.

    Args:
        source: the checkpoint that the model was loaded from.
        islands: names, or parts of names, of fp32 islands beyond the model's class list.

    Raises:
        ExportError: on all ranks.
    """
    live = LiveTensors(model)
    is_large = _num_bytes(live) > _REAL_DRY_EXPORT_BYTES
    names = _names_to_read(model, live)

    def write(trained: TrainedTensors) -> None:
        target = _fresh(folder.path / ".export-dry")
        try:
            tensors = HeadersOnly(live) if is_large else trained
            # Multi-token prediction is copied from file to file: nothing that a dry run could find out about it.
            with_mtp = not is_large
            _write(model, tensors, target, tokenizer=tokenizer, source=source, islands=islands, with_mtp=with_mtp)
            if _peft(model) is None:
                refuse_what_stock_refuses(target, onto_meta=is_large)
        finally:
            shutil.rmtree(target)

    _on_first(ranks, live, [] if is_large else names, write)


def publish_export(
    model: nn.Module,
    folder: RunFolder,
    ranks: Ranks,
    *,
    tokenizer: Any,
    tokens: torch.Tensor,
    prompt: str,
    seed: int,
    source: Path | None = None,
    islands: Collection[str] = (),
) -> PublishedExport | None:
    """Write the export, have it reloaded and compared, and give it its name. All ranks call it.

    Of a peft model the adapter is written; it is reloaded if ``source``, its base model, is known.

    Args:
        tokens: the fixed batch to compare logits on, int64, shape ``(rows, length)``.
        prompt, seed: of the text to generate.
        source, islands: as in ``dry_export``.

    Returns:
        On rank 0 what was found, elsewhere ``None``.

    Raises:
        ExportError: on all ranks. What was written stays in ``.export-unchecked``.
    """
    logits = _logits(model, tokens)
    live = LiveTensors(model)
    target = folder.path / ".export-unchecked"

    def write(trained: TrainedTensors) -> dict[str, int]:
        return _write(model, trained, _fresh(target), tokenizer=tokenizer, source=source, islands=islands)

    written = _on_first(ranks, live, _names_to_read(model, live), write)

    def check(_: TrainedTensors) -> PublishedExport:
        assert written is not None
        published = PublishedExport(written, "", reloaded=False)
        if _num_bytes(live) <= _RELOADED_BYTES and (_peft(model) is None or source is not None):
            reference = folder.path / ".export-reference.safetensors"
            save_file({"input_ids": tokens.cpu(), "logits": logits.cpu().contiguous()}, reference)
            try:
                found: Reloaded = reload_with_stock(target, reference, prompt=prompt, seed=seed, device=ranks.device)
            finally:
                reference.unlink()
            # Of an adapter, what was found is its base model too.
            dtypes = found.dtypes if _peft(model) is None else written
            published = PublishedExport(dtypes, found.sample)
        elif _peft(model) is None:
            refuse_what_stock_refuses(target, onto_meta=True)
        target.rename(folder.export)
        return published

    return _on_first(ranks, live, [], check)


def write_checkpoint(model: nn.Module, state: Mapping[str, torch.Tensor], target: Path, *, tokenizer: Any) -> None:
    """Write ``state``, gathered from ``model``, as a Transformers checkpoint; a tied parameter once. On one rank.

    Raises:
        ExportError: a name or shape is not the model's, an island is not fp32, or the files are not what was written.
    """
    live = LiveTensors(model)  # knows which names are one tied parameter
    given = {name: tensor for name, tensor in state.items() if name in live.specs}
    _write(model, GivenTensors(given), _fresh(target), tokenizer=tokenizer, source=None)


# --- Parts ------------------------------------------------------------------------------------------------------------


class _Counted:
    """Hands reading on, and knows how many tensors were read."""

    def __init__(self, tensors: TrainedTensors) -> None:
        self.specs = tensors.specs
        self.count = 0
        self._tensors = tensors

    def read(self, name: str) -> torch.Tensor:
        self.count += 1
        return self._tensors.read(name)


def _on_first(
    ranks: Ranks, live: LiveTensors, names: Sequence[str], work: Callable[[TrainedTensors], _Result]
) -> _Result | None:
    """Do ``work`` on rank 0, which reads ``names`` in order, while the others help to gather; fail on all alike."""
    result: _Result | None = None
    error: Exception | None = None
    if ranks.is_first:
        counted = _Counted(live)
        try:
            result = work(counted)
        except Exception as problem:  # noqa: BLE001  (raised below, once the others have been told)
            error = _in_words(problem) if isinstance(problem, OSError) else problem
            for name in names[counted.count :]:  # the others gather them, whatever has happened here
                live.read(name)
    else:
        for name in names:
            live.read(name)
    told = [str(error) if error is not None else None]
    dist.broadcast_object_list(told, src=0, device=ranks.device)
    if error is not None:
        raise error from error.__cause__
    if told[0] is not None:
        raise ExportError(f"rank 0 could not export:\n{told[0]}")
    return result


def _in_words(error: OSError) -> ExportError:
    """What the machine refused (a full disk, a file where a folder should be), as an error of ours."""
    where = f"\nwhere: {error.filename}" if error.filename else ""
    what = "the export cannot be written.\nexpected: room for the whole model in the run's folder"
    remedy = "free space, or put the run elsewhere"
    if isinstance(error, FileNotFoundError):
        what = (
            "a file that the export needs is not there any more.\nexpected: the checkpoint that training started from"
        )
        remedy = "put it back, or name its new place with --model.path"
    got = f"got: {error.strerror or error}{where}"
    words = ExportError(f"{what}\n{got}\nwhat to do: {remedy}, and start it again.")
    words.__cause__ = error
    return words


def _peft(model: Any) -> Any | None:
    """peft's config, if there are adapters in ``model``."""
    configs = getattr(model, "peft_config", None)
    return configs["default"] if isinstance(configs, dict) and configs else None


def _names_to_read(model: Any, live: LiveTensors) -> list[str]:
    return list(live.specs) if _peft(model) is None else list(adapter_keys(model).values())


def _write(
    model: Any,
    trained: TrainedTensors,
    folder: Path,
    *,
    tokenizer: Any,
    source: Path | None,
    islands: Collection[str] = (),
    with_mtp: bool = True,
) -> dict[str, int]:
    """Write the model, or its adapter, into ``folder``; the number of tensors by dtype."""
    if (config := _peft(model)) is not None:
        if source is not None:
            config.base_model_name_or_path = str(source)
        written = write_adapter(trained, folder, keys=adapter_keys(model), config=config)
        tokenizer.save_pretrained(folder)
        dtypes = [dtype for dtype, _ in written.values()]
        return {dtype: dtypes.count(dtype) for dtype in dtypes}

    def prepare(folder: Path) -> None:
        model.config.save_pretrained(folder)
        path = folder / "config.json"
        values = json.loads(path.read_text())
        # FSDP2 swaps a module's class for one of its own, whose name begins with this.
        values["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        values.pop("distributed_config", None)
        path.write_text(json.dumps(values, indent=2) + "\n")
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    whole = write_model(trained, folder, prepare=prepare, source=source, islands=islands, with_mtp=with_mtp)
    return whole.dtypes


def _num_bytes(tensors: TrainedTensors) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in tensors.specs.values())


def _fresh(folder: Path) -> Path:
    """``folder``, empty: what a run that was killed has left there goes."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    model.train(was_training)
    assert isinstance(logits, torch.Tensor)
    return logits
