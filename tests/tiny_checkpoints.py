"""Tiny checkpoints on disk, each written by the code that writes the real ones.

- ``transformers_checkpoint``: ``save_pretrained`` under the model's own names, in one file or in shards with an index.
- ``original_names_checkpoint``: ``save_pretrained`` back under DeepSeek's words (``layers.0.attn.wq_a.weight``).
- ``release_checkpoint``: what DeepSeek publishes: NeMo AutoModel's state-dict adapter makes names, FP8 weights and
  packed FP4 experts with their scales; its placeholders are filled with values here, and norms are bf16.

- ``sparse_flash_checkpoint``: the real model's size, without data, for what only headers tell.

``edit`` and ``rewrite`` change a checkpoint as a careless tool would: they are how faults are injected.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_nemo, tiny_transformers, transformers_config

__all__ = [
    "edit",
    "original_names_checkpoint",
    "release_checkpoint",
    "rewrite",
    "sparse_flash_checkpoint",
    "transformers_checkpoint",
    "write_sparse",
]


@functools.cache
def _transformers_model() -> Any:
    return tiny_transformers()


def transformers_checkpoint(folder: Path, *, sharded: bool = False, model: Any = None) -> Path:
    """The Transformers model (``tiny_transformers()`` by default) as ``save_pretrained`` writes it, in ``folder``."""
    model = _transformers_model() if model is None else model
    # 653 kB in all: three files.
    size = "250kB" if sharded else "5GB"
    model.save_pretrained(folder, save_original_format=False, max_shard_size=size)
    return folder


def original_names_checkpoint(folder: Path) -> Path:
    """The Transformers model under DeepSeek's words, as ``save_pretrained`` translates them back."""
    _transformers_model().save_pretrained(folder, save_original_format=True)
    return folder


def release_checkpoint(folder: Path) -> Path:
    """A quantised checkpoint in the release's layout, with a config that Transformers reads. Needs nemo-automodel."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_release_state(), folder / "model.safetensors", metadata={"format": "pt"})
    config = transformers_config(hca_window=128).to_dict()  # NeMo's tiny model has windows of 128 tokens
    config["architectures"] = ["DeepseekV4ForCausalLM"]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


@functools.cache
def _release_state() -> dict[str, torch.Tensor]:
    model: Any = tiny_nemo()
    from nemo_automodel.components.models.deepseek_v4.state_dict_adapter import DeepSeekV4StateDictAdapter

    adapter = DeepSeekV4StateDictAdapter(
        config=model.config, moe_config=model.model.moe_config, backend=model.backend, dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(5)
    state = {}
    for name, tensor in adapter.to_hf(model.state_dict(), quantization=True).items():
        tensor = tensor.detach().clone()
        if tensor.dtype == torch.int8:
            tensor = torch.randint(-128, 128, tensor.shape, generator=generator, dtype=torch.int8)
        elif name.endswith(".scale"):
            # NeMo's placeholder is fp32 for FP8 weights; the release has E8M0 throughout. 120 is 2**-7.
            tensor = torch.full(tensor.shape, 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        elif name.endswith(("norm.weight", "wkv.weight", "wgate.weight", "head.weight")) and tensor.is_floating_point():
            # fp32 in NeMo's model, bf16 in the release, except for the attention's own FP8 ``wkv``.
            tensor = tensor if tensor.dtype == torch.float8_e4m3fn else tensor.bfloat16()
        state[name] = tensor
    return state


def sparse_flash_checkpoint(folder: Path) -> Path:
    """All 67,593 tensors of a full-size DeepSeek-V4-Flash in the release's layout, in files without data (sparse).

    Names are Transformers' own, translated back; dtypes as in ``release_checkpoint``. 156 GB long, some MB on disk.
    """
    from transformers import DeepseekV4Config
    from transformers.core_model_loading import apply_renamings

    from dsv4_fsdp.checkpoint_layout import layout_of_folder
    from dsv4_fsdp.safetensors_headers import BITS_PER_ELEMENT

    folder.mkdir(parents=True, exist_ok=True)
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = DeepseekV4Config().to_dict() | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "quantization_config": quantised,
    }
    (folder / "config.json").write_text(json.dumps(config, default=str))
    layout = layout_of_folder(folder)
    back = [renaming.reverse_transform() for renaming in layout._renamings[::-1]]
    tensors: dict[str, tuple[str, list[int]]] = {}
    for expected in layout.expected.values():
        name = apply_renamings(expected.name, back).removeprefix("model.")
        base, _, leaf = name.rpartition(".")
        if ".experts." in name:
            num_experts, rows, cols = expected.shape
            parts = {"w1": rows // 2, "w3": rows // 2} if leaf == "gate_up_proj" else {"w2": rows}
            for expert in range(num_experts):
                for part, part_rows in parts.items():
                    tensors[f"{base}.{expert}.{part}.weight"] = "I8", [part_rows, cols // 2]
                    tensors[f"{base}.{expert}.{part}.scale"] = "F8_E8M0", [part_rows, cols // 32]
        elif not expected.is_floating:
            tensors[name] = "I64", list(expected.shape)
        elif ".attn.w" in name or ".shared_experts." in name:
            tensors[name] = "F8_E4M3", list(expected.shape)
            tensors[f"{base}.scale"] = "F8_E8M0", [-(-dim // 128) for dim in expected.shape]
        else:
            is_fp32 = expected.island_reason is not None and not name.endswith("norm.weight")
            tensors[name] = "F32" if is_fp32 else "BF16", list(expected.shape)

    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS_PER_ELEMENT[dtype] // 8
        if end + size > 10_000_000_000:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_sparse(file, shard)
        weight_map |= dict.fromkeys(shard, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_sparse(file: Path, header: dict[str, Any]) -> int:
    """A file with this header and a hole in place of data; returns the length of its header in bytes."""
    text = json.dumps(header).encode()
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
    return 8 + len(text)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrite the file of ``folder`` that holds most tensors after ``change`` has changed its dict in place."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    rewrite(files[-1], change)
    return folder


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Load ``file``, let ``change`` change the dict in place, and write it again."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
