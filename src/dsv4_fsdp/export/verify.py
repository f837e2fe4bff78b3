"""The proof of an export: stock Transformers, in a process of its own, reads it and gives the same logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dsv4_fsdp.errors import ExportError, listing
from dsv4_fsdp.names import canonical_name, is_adapter_name

from .trained_tensors import TrainedTensors

__all__ = ["Reloaded", "quiet_transformers", "refuse_what_stock_refuses", "reload_with_stock", "verify"]

_SCRIPT = Path(__file__).with_name("stock_reload.py")
# Which variables make a process a rank, in torch's eyes or Transformers'.
_OF_TORCHRUN = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_TOKENS = 200  # longer than DeepSeek-V4's longest compression window, 128


@dataclass(frozen=True)
class Reloaded:
    """What the fresh process found: the number of tensors by dtype, and text that the model wrote."""

    dtypes: dict[str, int]
    sample: str


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back Transformers' progress bars and warnings (that it dequantises on a CPU)."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def refuse_what_stock_refuses(folder: Path, *, onto_meta: bool) -> None:
    """Have stock ``from_pretrained`` look up every tensor of ``folder``; raise if it misses or refuses one.

    Args:
        onto_meta: do not read data: names and shapes only, for what does not fit into memory.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"device_map": "meta"} if onto_meta else {}
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        from transformers import FineGrainedFP8Config

        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    with quiet_transformers():
        _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    _refuse_loading_problems({kind: sorted(map(str, names)) for kind, names in loading.items() if names})


def verify(trained: TrainedTensors, folder: Path, *, adapter: nn.Module | None = None) -> Reloaded:
    """Compare the logits of the tensors that were exported with those of the export, reloaded in a fresh process.

    Args:
        trained: the tensors that ``folder`` was written from.
        adapter: of an adapter's export, the ``PeftModel`` on the meta device; ``folder`` then names its base model.

    Raises:
        ExportError: they differ in a bit, or stock Transformers cannot load the export.
    """
    with quiet_transformers(), tempfile.TemporaryDirectory() as temporary:
        model = _rebuilt(trained, folder, adapter)
        config = model.config
        generator = torch.Generator().manual_seed(0)
        length = min(_TOKENS, config.max_position_embeddings)
        tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        reference = Path(temporary) / "reference.safetensors"
        save_file({"input_ids": tokens, "logits": logits.contiguous()}, reference)
        del model
        return reload_with_stock(folder, reference)


def _rebuilt(trained: TrainedTensors, folder: Path, adapter: Any) -> Any:
    """The model on the CPU, filled with ``trained``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if adapter is None:
        config = AutoConfig.from_pretrained(folder)
    else:
        config = adapter.get_base_model().config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Its tables (RoPE) are computed on construction, its weights filled below.
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None) or torch.bfloat16)
    if adapter is not None:
        from peft import get_peft_model

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in adapter.peft_model_of
            # As trained, and as stock_reload.py loads it: peft would widen bf16 adapters to fp32.
            dtypes = {dtype for name, (dtype, _) in trained.specs.items() if is_adapter_name(name)}
            widen = dtypes != {torch.bfloat16}
            model = get_peft_model(model, adapter.peft_config["default"], autocast_adapter_dtype=widen)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if (known := canonical_name(name)) in trained.specs:
                tensor.copy_(trained.read(known))
    return model.eval()


def reload_with_stock(
    folder: Path, reference: Path, *, prompt: str = "", seed: int = 0, device: torch.device | str = "cpu"
) -> Reloaded:
    """Run ``stock_reload.py`` on an export; raise ``ExportError`` unless it gives the logits in ``reference``."""
    # The process is to be no rank of anything, but to compute with as many threads: the order of sums depends on it.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    # -P: without it, this folder's modules would shadow others of the same name.
    command = [sys.executable, "-P", str(_SCRIPT), str(folder), str(reference), prompt, str(seed), str(device)]
    command.append(str(torch.get_num_threads()))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExportError(f"stock Transformers could not reload {folder}:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    _refuse_loading_problems(found["loading"])
    if not found["equal"]:
        raise ExportError(
            "the export, reloaded by stock Transformers, does not give the trained model's logits.\n"
            f"expected: equal in every bit\ngot: differences up to {found['max_abs_difference']}\n"
            f"what to do: do not use {folder}."
        )
    return Reloaded(found["dtypes"], found["sample"])


def _refuse_loading_problems(problems: Mapping[str, list[str]]) -> None:
    if problems:
        lines = [f"{kind}: {name}" for kind, names in problems.items() for name in names]
        raise ExportError(f"stock Transformers reloads the export with problems:\n{listing(lines)}")
