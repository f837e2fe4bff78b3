"""From the sharded model to a Transformers checkpoint that was seen to work.

The weights are gathered to rank 0 and written by Transformers' own ``save_pretrained`` under a temporary name; then
the file's headers are compared with the model, tensor by tensor, because a cast on the way is how fp32 gets lost at
the end of a run. :func:`publish_export` also reloads the checkpoint in a fresh process that knows stock Transformers
only (``stock_reload.py``), compares the logits on a fixed batch with the sharded model's, bit for bit, and gives it
its final name only then. :func:`dry_export` does the first half before training, so that a format problem shows
before the time is spent.

The keys are Transformers' names, the same as in ``model.state_dict()``. ``save_pretrained`` by itself would write a
mixture (the release's leaf names below Transformers' prefixes); ``save_original_format=False`` turns that off.

Not supported: models larger than rank 0's memory (everything is gathered there).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from dsv4_fsdp.errors import Dsv4FsdpError, listing

from .ranks import Ranks
from .run_folder import RunFolder

__all__ = ["ExportError", "PublishedExport", "dry_export", "publish_export", "reload_with_stock", "write_checkpoint"]

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
# Which variables make a process a rank, in torch's eyes or Transformers'.
_OF_TORCHRUN = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


class ExportError(Dsv4FsdpError, RuntimeError):
    """The exported checkpoint is not the trained model."""


@dataclass(frozen=True)
class PublishedExport:
    """What the fresh process found: the number of tensors by dtype, and text that the model wrote."""

    dtypes: dict[str, int]
    sample: str


def dry_export(model: nn.Module, folder: RunFolder, ranks: Ranks, *, tokenizer: Any) -> None:
    """Write, check, reload and delete an export of the untrained model. All ranks call it."""
    state = _gather_to_first(model)
    if ranks.is_first:
        target = folder.path / ".export-dry"
        write_checkpoint(model, state, target, tokenizer=tokenizer)
        from transformers import AutoModelForCausalLM

        _, loading = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        _refuse_loading_problems({kind: sorted(map(str, names)) for kind, names in loading.items() if names})
        shutil.rmtree(target)
    ranks.wait()


def publish_export(
    model: nn.Module, folder: RunFolder, ranks: Ranks, *, tokenizer: Any, tokens: torch.Tensor, prompt: str, seed: int
) -> PublishedExport | None:
    """Write the export, have it reloaded and compared, and give it its name. All ranks call it.

    Args:
        tokens: the fixed batch to compare logits on, int64, shape ``(rows, length)``.
        prompt, seed: of the text to generate.

    Returns:
        On rank 0 what was found, elsewhere ``None``.

    Raises:
        ExportError: on rank 0. What was written stays in ``.export-unchecked``.
    """
    state = _gather_to_first(model)
    logits = _logits(model, tokens)
    published = None
    if ranks.is_first:
        target = folder.path / ".export-unchecked"
        write_checkpoint(model, state, target, tokenizer=tokenizer)
        reference = folder.path / ".export-reference.safetensors"
        save_file({"input_ids": tokens.cpu(), "logits": logits.cpu().contiguous()}, reference)
        published = reload_with_stock(target, reference, prompt=prompt, seed=seed, device=ranks.device)
        reference.unlink()
        target.rename(folder.export)
    ranks.wait()
    return published


def _gather_to_first(model: nn.Module) -> dict[str, Any]:
    """The whole state dict on rank 0, in CPU memory and each tensor's own dtype; an empty one on the others."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    model.train(was_training)
    assert isinstance(logits, torch.Tensor)
    return logits


def write_checkpoint(model: nn.Module, state: Mapping[str, torch.Tensor], target: Path, *, tokenizer: Any) -> None:
    """Write ``state``, gathered from ``model``, as a Transformers checkpoint; a tied parameter once.

    Raises:
        ExportError: a name, dtype or shape in the files' headers is not that of the sharded model itself.
    """
    live = model.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    first_name = {name: firsts.setdefault(id(tensor), name) for name, tensor in live.items()}
    # Gathering makes two tensors of a tied parameter. Given one under both names, Transformers saves it once.
    tied = {name: state[first_name.get(name, name)] for name in state}
    model.save_pretrained(target, state_dict=tied, save_original_format=False)  # type: ignore[operator]
    tokenizer.save_pretrained(target)
    written: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                header = file.get_slice(name)
                written[name] = (header.get_dtype(), tuple(header.get_shape()))
    saved = {first_name.get(name) for name in written}
    expected = {
        name: (_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in live.items()
        if name in written or first_name[name] not in saved
    }
    if wrong := [
        f"{name}: expected {expected.get(name, 'no such tensor')}, got {written.get(name, 'no such tensor')}"
        for name in sorted(expected.keys() | written.keys())
        if expected.get(name) != written.get(name)
    ]:
        raise ExportError(
            f"the written checkpoint differs from the model in {len(wrong)} tensors:\n{listing(wrong)}\n"
            f"what to do: do not use {target}; this transformers version saves in another way than the one tested."
        )


def reload_with_stock(
    target: Path, reference: Path, *, prompt: str, seed: int, device: torch.device | str = "cpu"
) -> PublishedExport:
    """Run ``stock_reload.py`` on a checkpoint; raise ``ExportError`` unless it gives the logits in ``reference``."""
    script = Path(__file__).with_name("stock_reload.py")
    # The process is to be no rank of anything, but to compute with as many threads: the order of sums depends on it.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    # -P: without it, this folder's modules would shadow others of the same name.
    command = [sys.executable, "-P", str(script), str(target), str(reference), prompt, str(seed), str(device)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExportError(f"stock Transformers could not reload {target}:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    _refuse_loading_problems(found["loading"])
    if not found["equal"]:
        raise ExportError(
            "the export, reloaded by stock Transformers, does not give the trained model's logits.\n"
            f"expected: equal in every bit\ngot: differences up to {found['max_abs_difference']}\n"
            f"what to do: do not use {target}."
        )
    return PublishedExport(found["dtypes"], found["sample"])


def _refuse_loading_problems(problems: Mapping[str, list[str]]) -> None:
    if problems:
        lines = [f"{kind}: {name}" for kind, names in problems.items() for name in names]
        raise ExportError(f"stock Transformers reloads the export with problems:\n{listing(lines)}")
