"""Tiny checkpoints on disk, each written by the code that writes the real ones.

- ``transformers_checkpoint``: ``save_pretrained`` under the model's own names, in one file or in shards with an index.
- ``original_names_checkpoint``: ``save_pretrained`` back under DeepSeek's words (``layers.0.attn.wq_a.weight``).
- ``nemo_release_checkpoint``: what DeepSeek publishes: NeMo AutoModel's state-dict adapter makes names, FP8 weights and
  packed FP4 experts with their scales; its placeholders are filled with values here, and norms are bf16.

Three hold one and the same model, ``released_model()``: quantising loses nothing, so each must load to its exact bits.

- ``release_checkpoint``: DeepSeek's names; FP8 blocks and packed FP4 experts with E8M0 scales, multi-token prediction
  tensors, several files, a tokenizer.
- ``base_fp8_checkpoint``: the same, the experts in FP8 blocks too: the form of the "-Base" models.
- ``transformers_checkpoint(folder, model=released_model())``: bf16 with fp32 islands.

- ``sparse_flash_checkpoint``: the real model's size, without data, for what only headers tell.

``edit`` and ``rewrite`` change a checkpoint as a careless tool would: they are how faults are injected.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_nemo, tiny_transformers, transformers_config

__all__ = [
    "base_fp8_checkpoint",
    "edit",
    "nemo_release_checkpoint",
    "original_names_checkpoint",
    "release_checkpoint",
    "released_model",
    "rewrite",
    "sparse_flash_checkpoint",
    "training_checkpoint",
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


def nemo_release_checkpoint(folder: Path) -> Path:
    """A quantised checkpoint in the release's layout, with a config that Transformers reads. Needs nemo-automodel."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_nemo_release_state(), folder / "model.safetensors", metadata={"format": "pt"})
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
def _nemo_release_state() -> dict[str, torch.Tensor]:
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


# --- What DeepSeek publishes, of a known model ------------------------------------------------------------------------

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # FP4 values; the code's fourth bit is the sign


@functools.cache
def released_model() -> Any:
    """The Transformers model that ``release_checkpoint`` and ``base_fp8_checkpoint`` hold. Shared: do not change it.

    Its quantised weights are values that FP8, and for experts FP4, holds exactly; its norms are bf16 values, as in the
    release. Its vocabulary has room for the byte tokenizer.
    """
    model: Any = tiny_transformers(vocab_size=264, num_attention_heads=8, num_nextn_predict_layers=1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if (form := _form(name)) is not None:
                flat = tensor.reshape(-1, tensor.shape[-1])
                tensor.copy_(_dequantise(*_QUANTISE[form](flat)).reshape(tensor.shape))
            elif name.endswith("norm.weight"):
                tensor.copy_(tensor.bfloat16())
    return model


def release_checkpoint(folder: Path) -> Path:
    """``released_model()`` as DeepSeek publishes it, in three files with an index."""
    return _write_release(folder, expert_dtype="fp4", scale_dtype=torch.float8_e8m0fnu)


def base_fp8_checkpoint(folder: Path, *, scale_dtype: torch.dtype = torch.float8_e8m0fnu) -> Path:
    """``released_model()`` as the "-Base" models come: experts in FP8 blocks like the rest. Scales E8M0, or fp32."""
    return _write_release(folder, expert_dtype="fp8", scale_dtype=scale_dtype)


def _form(name: str) -> str | None:
    """How the release stores the tensor with this Transformers name: ``fp4``, ``fp8``, or as it is."""
    if ".mlp.experts." in name:
        return "fp4"
    quantised = (".self_attn.q_", ".self_attn.kv_proj", ".self_attn.o_", ".indexer.q_b_proj", ".shared_experts.")
    return "fp8" if any(part in name for part in quantised) and "norm" not in name else None


def _quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows, cols)`` -> FP8 of that shape and one power of two for each 128 x 128 block, fp32."""
    rows, cols = (-(-dim // 128) for dim in weight.shape)
    scales = torch.empty(rows, cols)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for col in range(cols):
            part = slice(128 * row, 128 * row + 128), slice(128 * col, 128 * col + 128)
            scales[row, col] = scale = (weight[part].float().abs().max() / 448).log2().ceil().exp2()
            values[part] = (weight[part].float() / scale).to(torch.float8_e4m3fn)
    return values, scales


def _quantise_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows, cols)`` -> int8 ``(rows, cols / 2)``, the even column in the low half, and a scale for each 32."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(-1) / 6).log2().ceil().exp2()
    scaled = blocks / scales.unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1) + 8 * scaled.signbit()
    codes = codes.flatten(-2).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8), scales


def _dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight in fp32, ``(rows, cols)``."""
    if values.dtype == torch.int8:
        codes = torch.stack([values.view(torch.uint8) & 15, values.view(torch.uint8) >> 4], dim=-1).flatten(-2).long()
        weight = _E2M1[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)  # -0.0 among them
        return weight * scales.repeat_interleave(32, dim=1)
    spread = scales.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return values.float() * spread[: values.shape[0], : values.shape[1]]


_QUANTISE = {"fp8": _quantise_fp8, "fp4": _quantise_fp4}


def _write_release(folder: Path, *, expert_dtype: str, scale_dtype: torch.dtype) -> Path:
    from dsv4_fsdp.train.tiny_model import byte_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in released_model().state_dict().items():
        form = expert_dtype if ".mlp.experts." in name else _form(name)
        for part_name, part in _under_release_names(name, tensor):
            state |= _stored(part_name, part, form, scale_dtype)
    state |= _mtp_tensors(state, scale_dtype)
    files = {name: {"layers": 2, "mtp": 3}.get(name.partition(".")[0], 1) for name in state}
    for number in (1, 2, 3):
        part_of = {name: tensor for name, tensor in state.items() if files[name] == number}
        save_file(part_of, folder / f"model-{number:05}-of-00003.safetensors", metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())},
        "weight_map": {name: f"model-{number:05}-of-00003.safetensors" for name, number in files.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = released_model().config.to_dict() | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "expert_dtype": expert_dtype,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0" if scale_dtype == torch.float8_e8m0fnu else "float",
            "weight_block_size": [128, 128],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    released_model().generation_config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _under_release_names(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """DeepSeek's name for a tensor of the Transformers model; of fused experts, all names and parts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    mapping = get_model_conversion_mapping(released_model(), add_legacy=False)
    back = [entry.reverse_transform() for entry in mapping[::-1] if isinstance(entry, WeightRenaming)]
    base, _, leaf = apply_renamings(name.removeprefix("model."), back).rpartition(".")
    if ".experts." in name:
        parts = zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True) if leaf == "gate_up_proj" else [("w2", tensor)]
        return [(f"{base}.{i}.{part}.weight", expert) for part, whole in parts for i, expert in enumerate(whole)]
    # The loader leaves `attn.kv_norm` alone, so going back it takes it for a compressor's `norm`.
    release_name = f"{base}.{leaf}" if base else leaf
    return [(release_name.replace(".attn.norm.", ".attn.kv_norm."), tensor)]


def _stored(name: str, tensor: torch.Tensor, form: str | None, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One tensor as it is in the file, with its scale if it is quantised."""
    if form is None:
        stored = tensor.bfloat16() if name.endswith("norm.weight") else tensor
        return {name: stored.detach().clone().contiguous()}
    values, scales = _QUANTISE[form](tensor.detach())
    assert torch.equal(_dequantise(values, scales), tensor.float()), f"{name} loses bits in {form}"
    return {name: values.contiguous(), name.removesuffix("weight") + "scale": scales.to(scale_dtype).contiguous()}


def _mtp_tensors(state: dict[str, torch.Tensor], scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One block of multi-token prediction: the last layer's tensors again, and those that only such a block has."""
    generator = torch.Generator().manual_seed(11)
    tensors = {
        name.replace("layers.3.", "mtp.0."): tensor.clone()
        for name, tensor in state.items()
        if name.startswith("layers.3.") and ".compressor." not in name
    }
    hidden_size = released_model().config.hidden_size
    for name in ("e_proj", "h_proj"):
        weight = torch.randn(hidden_size, hidden_size, generator=generator)
        values, scales = _quantise_fp8(weight)
        tensors |= {f"mtp.0.{name}.weight": values, f"mtp.0.{name}.scale": scales.to(scale_dtype)}
    for name in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = torch.rand(hidden_size, generator=generator).bfloat16()
    return tensors | {f"mtp.0.{name}": state[name].clone() for name in ("hc_head_fn", "hc_head_base", "hc_head_scale")}


# --- What the trainer saves ------------------------------------------------------------------------------------------


def training_checkpoint(
    folder: Path,
    model: Any,
    *,
    source: Path | None = None,
    state: dict[str, torch.Tensor] | None = None,
    leaves_out_base: bool = False,
) -> Path:
    """A training checkpoint of ``model`` (or a ``PeftModel``), as the trainer lays it out; returns ``folder``.

    ``state`` (by default the model's) is saved by the real ``torch.distributed.checkpoint``, beside an optimizer's.
    """
    import torch.distributed.checkpoint as dcp

    from dsv4_fsdp.checkpoint_digests import checkpoint_digests
    from dsv4_fsdp.train.tiny_model import byte_tokenizer

    is_peft = hasattr(model, "peft_config")
    base = model.get_base_model() if is_peft else model
    values: dict[str, Any] = {f"model.{name}": t.detach() for name, t in (state or model.state_dict()).items()}
    values |= {"optimizer.state.lm_head.weight.step": torch.tensor(3.0), "progress": {"position": 7}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(values, checkpoint_id=folder / "state", no_dist=True)
    base.config.save_pretrained(folder / "model")
    base.generation_config.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    if is_peft:
        model.peft_config["default"].save_pretrained(folder / "model")
    (folder / "config.yaml").write_text("preset: tiny\n")
    manifest: dict[str, Any] = {"format": 1, "step": 100, "source": None if source is None else str(source)}
    manifest["base"] = checkpoint_digests(source) if leaves_out_base and source is not None else None
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


# --- The real size, without data --------------------------------------------------------------------------------------


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
