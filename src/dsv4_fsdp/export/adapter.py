"""The export of a LoRA run: a stock peft adapter, or the whole model with the adapter merged in.

Nothing of peft's format is written down here. The run's ``LoraConfig`` makes a peft model on the meta device; peft says
which of its tensors belong into an adapter's file and under which keys, and peft's own layers merge, one at a time,
with real tensors in place of the meta ones.

Merging is done in fp32 and rounded once, to the storage dtype of the weight.

Not supported: ``modules_to_save`` in a merge, several adapters.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsv4_fsdp.checkpoint_layout import model_of_folder
from dsv4_fsdp.errors import ExportError, listing
from dsv4_fsdp.names import canonical_name

from .safetensors_writer import SafetensorsWriter
from .trained_tensors import TrainedTensors

__all__ = [
    "ADAPTER_CONFIG",
    "ISLANDS_FILE",
    "MergedTensors",
    "adapter_keys",
    "peft_model_of",
    "write_adapter",
]

ADAPTER_CONFIG = "adapter_config.json"
ISLANDS_FILE = "islands.json"
"""In a training checkpoint's ``model/``: names, or parts of names, of fp32 islands beyond the model's class list."""

_PREFIX = "base_model.model."
_ADAPTER_FILE = "adapter_model.safetensors"


def peft_model_of(folder: Path) -> Any:
    """The ``PeftModel`` of ``folder/config.json`` and ``folder/adapter_config.json``, on the meta device."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ExportError(
            "this is a LoRA run, and peft is not installed.\nexpected: peft\ngot: none\n"
            "what to do: pip install 'dsv4-fsdp[train]'."
        ) from error
    config = LoraConfig.from_pretrained(str(folder))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft has to say about the config was said when the run started
        return get_peft_model(model_of_folder(folder), config)


def adapter_keys(peft_model: Any) -> dict[str, str]:
    """Key in ``adapter_model.safetensors`` -> name of the tensor in the trained model, as peft says.

    Also of a model with adapters injected: its keys get the prefix under which a ``PeftModel`` looks for them.
    """
    from peft import get_peft_model_state_dict

    state = dict(peft_model.state_dict(keep_vars=True))
    names = {id(tensor): name for name, tensor in state.items()}
    # Not "auto": that asks a hub whether the vocabulary has been resized.
    found = get_peft_model_state_dict(peft_model, state_dict=state, save_embedding_layers=False)
    return {
        key if key.startswith(_PREFIX) else _PREFIX + key: canonical_name(names[id(tensor)])
        for key, tensor in sorted(found.items())
    }


def write_adapter(trained: TrainedTensors, folder: Path, *, keys: Mapping[str, str], config: Any) -> dict[str, Any]:
    """Write a stock peft adapter into ``folder``; returns key -> (dtype, shape). On one rank.

    Args:
        trained: holds the adapter's tensors, among others. Those of ``keys`` are read in its order.
        keys: of ``adapter_keys``.
        config: peft's ``LoraConfig``.

    Raises:
        ExportError: tensors of the adapter are missing.
    """
    if missing := [name for name in keys.values() if name not in trained.specs]:
        raise ExportError(
            f"the run holds no such tensors of its adapter, {len(missing)} in all:\n{listing(missing)}\n"
            "what to do: export another checkpoint; this one was not saved from the model of its adapter_config.json."
        )
    writer = SafetensorsWriter(folder, max_shard_bytes=2**62)  # peft reads one file
    for key, name in keys.items():
        writer.add_tensor(key, trained.read(name))
    writer.finish()
    (folder / "model.safetensors").rename(folder / _ADAPTER_FILE)
    was_in_inference = config.inference_mode
    config.inference_mode = True  # as peft's own save: whoever loads it says if it is to be trained on
    config.save_pretrained(str(folder))
    config.inference_mode = was_in_inference
    return dict(writer.written)


class MergedTensors:
    """The tensors of the model without adapter, each with what the adapter adds to it."""

    def __init__(self, base: TrainedTensors, adapter: TrainedTensors, peft_model: Any) -> None:
        from peft.tuners.lora.layer import LoraLayer

        if peft_model.peft_config["default"].modules_to_save:
            raise ExportError(
                "an adapter with modules_to_save cannot be merged here.\nexpected: LoRA layers only\n"
                f"got: {peft_model.peft_config['default'].modules_to_save}\n"
                "what to do: export the adapter, and merge it with peft's merge_and_unload()."
            )
        self.specs = dict(base.specs)
        self._base = base
        self._adapter = adapter
        self._layers: dict[str, list[tuple[str, Any, str]]] = {}
        for name, module in peft_model.named_modules():
            if isinstance(module, LoraLayer):
                weight = getattr(module, "parameter_name", "weight")
                self._layers.setdefault(canonical_name(f"{name}.{weight}"), []).append((name, module, weight))
        if lost := [name for name in self._layers if name not in self.specs]:
            raise ExportError(
                f"the adapter changes tensors that are not this model's:\n{listing(lost)}\n"
                "what to do: export another checkpoint; this one's configs do not belong together."
            )

    def read(self, name: str) -> torch.Tensor:
        tensor = self._base.read(name)
        for module_name, module, weight in self._layers.get(name, ()):
            tensor = self._merged(tensor, module_name, module, weight).to(tensor.dtype)
        return tensor

    def _merged(self, tensor: torch.Tensor, module_name: str, module: Any, weight: str) -> torch.Tensor:
        """``tensor``, fp32, as peft's layer ``module`` merges it. The layer's own tensors stay on the meta device."""
        base_layer = module.get_base_layer()
        places = [(base_layer, weight, tensor.float())]
        for name, _ in module.named_parameters():
            if name.startswith("lora_"):
                owner, _, leaf = name.rpartition(".")
                value = self._adapter.read(canonical_name(f"{module_name}.{name}")).float()
                places.append((module.get_submodule(owner), leaf, value))
        before = [owner._parameters[leaf] for owner, leaf, _ in places]
        for owner, leaf, value in places:
            owner._parameters[leaf] = nn.Parameter(value.clone(), requires_grad=False)
        module.merge()
        merged = base_layer._parameters[weight].data
        module.merged_adapters.clear()
        for (owner, leaf, _), meta in zip(places, before, strict=True):
            owner._parameters[leaf] = meta
        assert isinstance(merged, torch.Tensor)
        return merged


def copy_tokenizer_files(model_folder: Path, folder: Path) -> None:
    """Everything but the model's own config files, which beside an adapter would pass for a whole model's."""
    for path in sorted(model_folder.iterdir()):
        if path.name not in ("config.json", "generation_config.json", ADAPTER_CONFIG, ISLANDS_FILE):
            shutil.copy2(path, folder)
