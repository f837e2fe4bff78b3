"""Tiny models of every family of the installed transformers that lists tensors to keep in fp32.

A family is a folder below ``transformers.models`` in which a model class has ``_keep_in_fp32_modules_strict``. Its
configuration class has defaults for everything, and ``tiny_config`` makes each number small by the words in its name
(``SMALL``), sub-configurations included. ``SPECIAL`` has what the words cannot know. What cannot be built and run this
way says why, in words, in ``UNBUILT``.

Constants are made random as in ``tiny_models.py``: an island of ones would survive a downcast unseen.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["Family", "declared_families", "family_inputs", "tiny_family_model"]

VOCAB_SIZE = 128
TOKENS = 24

# The first pattern that matches a field's whole name gives its value; other fields keep their default.
SMALL: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?", VOCAB_SIZE),
    (r"first_k_dense_replace|num_dense_layers|n_dense_layers|first_dense_layers", 1),
    (r"(num|n)_(nextn_predict|mtp)_layers|num_mtp.*", 0),
    (r"(num|n)_(hidden_)?layers|(.*_)?(num|n)_(hidden_)?layers|depth|(.*_)?depth|(encoder|decoder)_layers", 2),
    (r"(num|n)_(routed_)?experts|num_local_experts|moe_num_experts", 4),
    (r"(moe_)?(num_)?(n_)?shared_experts|moe_num_shared_experts", 1),
    (r"(.*_)?num_experts_per_tok|moe_k|moe_top_?k|top_?k(_experts)?|moe_router_topk", 2),
    (r"(n|num)_(expert_)?groups?|topk_group|(num_)?limited_groups?", 1),
    (r"(.*_)?(num|n)_(attention_)?heads|(.*_)?attention_heads|(.*_)?num_heads(_.*)?", 4),
    (r"(.*_)?lora_rank", 16),
    (r"(.*_)?(head_dim|rope_head_dim|nope_head_dim|head_size)", 16),
    (r"index_topk", 4),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|intermediate_dim)(_.*)?|mlp_dim", 32),
    (r"(.*_)?(hidden_size|hidden_dim|embed_dim|d_model|n_embd|dim|width)", 64),
    (r"(.*_)?max_position_embeddings", 256),
    (r"(.*_)?(sliding_window|chunk_size|window_size)", 8),
)


def mel_inputs(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """A mel spectrogram for a CTC encoder."""
    bins = config.encoder_config.num_mel_bins
    return {"input_features": torch.randn(1, 64, 4 * bins, generator=generator).bfloat16()}


def pixel_inputs(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """One picture."""
    size = config.vision_config.image_size
    return {"pixel_values": torch.randn(1, 3, size, size, generator=generator).bfloat16()}


def codebook_inputs(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """A word and a sound's codes at each place."""
    return {
        "input_ids": torch.randint(0, 100, (1, TOKENS, config.num_codebooks + 1), generator=generator),
        "use_cache": False,
    }


def speech_inputs(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Words, and a sound in the place of the first eight."""
    ids = torch.randint(1, 100, (1, TOKENS), generator=generator)
    ids[:, :8] = config.audio_token_id
    bins = config.audio_config.asr_config.num_mel_bins
    sound = torch.randn(1, 64, bins, generator=generator)
    mask = torch.ones(1, 64, dtype=torch.long)
    return {"input_ids": ids, "input_features": sound, "input_features_mask": mask, "use_cache": False}


def voxtral_inputs(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Words, and a sound in the place of the first four."""
    frames = 2 * config.audio_config.max_source_positions
    ids = torch.randint(1, 100, (1, TOKENS), generator=generator)
    ids[:, :4] = config.audio_token_id
    sound = torch.randn(1, config.audio_config.num_mel_bins, frames, generator=generator)
    return {"input_ids": ids, "input_features": sound.bfloat16(), "use_cache": False}


@dataclasses.dataclass(frozen=True)
class Special:
    """What one family needs beside ``SMALL``.

    ``values`` are fields of its configuration, ``inputs`` makes what its model is called with, ``model`` is the class
    to take if it is not the most complete one.
    """

    model: str = ""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Callable[[Any, torch.Generator], dict[str, Any]] | None = None


SPECIAL: dict[str, Special] = {
    "apertus1p5": Special(
        values={
            "image_token_offset": 32,
            "audio_token_offset": 64,
            "vision_config": {"codebook_size": 32, "channel_multiplier": [1, 2], "base_channels": 32},
            "audio_config": {"codebook_size": 32, "num_filters": 4, "hidden_size": 64, "codebook_dim": 64},
        }
    ),
    "beam": Special(values={"mlp_layer_types": ["dense", "sparse"]}),
    "deepseek_ocr2": Special(values={"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}),
    "deepseek_v2": Special(values={"num_experts_per_tok": 2}),
    "dots1": Special(values={"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}),
    "dots3_note": Special(
        values={
            "text_config": {"use_sliding_window": False, "head_dim": 32, "sliding_window": 8},
            "vision_config": {"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 64, "adapter_out_dim": 64},
            "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        }
    ),
    "ernie4_5_vl_moe": Special(
        values={
            "text_config": {
                "moe_intermediate_size": [32, 32],
                "mlp_layer_types": ["dense", "sparse"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
            }
        }
    ),
    "glm4v_moe": Special(
        values={
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
        }
    ),
    "glm5_next": Special(
        values={"text_config": {"index_topk": 4, "index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 4}}
    ),
    "granite_speech5": Special(inputs=mel_inputs),
    "hy_v4_vl": Special(
        values={
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
        }
    ),
    "inkling": Special(model="InklingForCausalLM"),
    "kyutai_speech_to_text": Special(
        inputs=codebook_inputs,
        values={
            "codec_config": {
                "upsample_groups": 64,
                "num_filters": 2,
                "hidden_size": 64,
                "vector_quantization_hidden_dimension": 16,
                "codebook_dim": 16,
                "codebook_size": 32,
            }
        },
    ),
    "muse_spark": Special(
        values={
            "out_hidden_size": 64,
            "projector_hidden_size": 64,
            "text_config": {"moe_hidden_size": 64},
            "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 16, 16], "out_hidden_size": 64},
        }
    ),
    "nemotron3_5_transcribe": Special(inputs=speech_inputs, values={"audio_token_id": 120}),
    "slanext": Special(
        inputs=pixel_inputs,
        values={
            "vision_config": {"image_size": 64, "global_attn_indexes": [1], "output_channels": 32},
            "post_conv_in_channels": 32,
            "post_conv_out_channels": 64,
            "max_text_length": 8,
        },
    ),
    "voxtral": Special(
        inputs=voxtral_inputs,
        values={
            "audio_token_id": 120,
            "text_config": {"num_key_value_heads": 2, "head_dim": 16},
            "audio_config": {"max_source_positions": 16, "intermediate_size": 256},
        },
    ),
}

UNBUILT: dict[str, str] = {
    "esmfold2": "folds proteins: its input is a complex of atoms, made by a processor from structures, and its "
    "configuration checks the widths of seven parts against each other",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family: its folder's name, the classes that have the list themselves, and the class that is tried."""

    name: str
    declaring: tuple[str, ...]
    model: str


@functools.cache
def declared_families() -> tuple[Family, ...]:
    """The families of the installed transformers, by name. Imports their modules."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(root.glob("*/modeling_*.py")):
        if not re.search(r"_keep_in_fp32_modules_strict\s*=", path.read_text()):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        classes = [
            cls
            for cls in vars(module).values()
            if isinstance(cls, type)
            and cls.__module__ == module.__name__
            and issubclass(cls, transformers.PreTrainedModel)
        ]
        listing = [cls for cls in classes if getattr(cls, "_keep_in_fp32_modules_strict", None)]
        if listing:
            declaring = tuple(cls.__name__ for cls in listing if vars(cls).get("_keep_in_fp32_modules_strict"))
            found.append(Family(path.parent.name, declaring, _most_complete(path.parent.name, listing).__name__))
    return tuple(found)


def _most_complete(family: str, classes: list[type]) -> type:
    if family in SPECIAL and (wanted := SPECIAL[family].model):
        return next(cls for cls in classes if cls.__name__ == wanted)
    for kind in ("ForConditionalGeneration", "ForCausalLM", "ForCTC", "ForTokenClassification", "For"):
        for cls in classes:
            if kind in cls.__name__:
                return cls
    return classes[-1]


def _model_class(family: Family) -> Any:
    import transformers

    return getattr(transformers, family.model, None) or getattr(
        importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}"), family.model
    )


# --- Configurations ---------------------------------------------------------------------------------------------------


def tiny_config(config_class: Any, values: dict[str, Any] | None = None) -> Any:
    """A configuration of ``config_class`` in which every size is small; ``values`` overrides (a dict for a part)."""
    return config_class(**_small_values(config_class, values or {}))


def _small_values(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    default = config_class()
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    small: dict[str, Any] = {}
    parts = getattr(config_class, "sub_configs", {})
    for field in dataclasses.fields(config_class):
        name = field.name
        if name in parts:
            part = getattr(default, name, None)
            if part is not None:
                own = values.get(name, {})
                small[name] = _small_values(type(part), own) if isinstance(own, dict) else own
        elif (
            name.endswith(("token_id", "token_index"))
            and isinstance(field.default, int)
            and field.default >= VOCAB_SIZE
        ):
            small[name] = VOCAB_SIZE - 1 - len([v for k, v in small.items() if k.endswith(("token_id", "token_index"))])
        elif isinstance(field.default, int) and not isinstance(field.default, bool):
            if name.endswith(("num_key_value_heads", "num_kv_heads")):
                heads = defaults.get(name.replace("key_value", "attention").replace("kv", "attention"))
                small[name] = 4 if heads == field.default else 2  # as many as heads, or grouped
            elif (size := _small(name)) is not None:
                small[name] = min(size, field.default)
    return small | {name: value for name, value in values.items() if name not in parts}


def _small(name: str) -> int | None:
    return next((size for pattern, size in SMALL if re.fullmatch(pattern, name)), None)


# --- Models -----------------------------------------------------------------------------------------------------------


def tiny_family_model(family: Family, *, seed: int = 0) -> nn.Module:
    """The family's model in bf16, its fp32 list kept, constants random, in training mode without dropout."""
    model_class = _model_class(family)
    special = SPECIAL.get(family.name, Special())
    config = tiny_config(model_class.config_class, special.values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and not name.endswith("inv_freq") and tensor.numel():
                if bool((tensor == tensor.flatten()[0]).all()):
                    tensor.copy_(tensor.float() + torch.rand(tensor.shape, generator=generator) * 0.5)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def family_inputs(family: Family, model: Any, seed: int) -> dict[str, Any]:
    """Keyword arguments for one forward, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    special = SPECIAL.get(family.name, Special())
    if special.inputs is not None:
        return special.inputs(model.config, generator)
    return {"input_ids": torch.randint(1, 100, (1, TOKENS), generator=generator), "use_cache": False}
