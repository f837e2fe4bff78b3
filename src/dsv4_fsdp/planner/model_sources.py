"""Which model is planned: a preset, a config.json, or a checkpoint folder, built by Transformers on the meta device.

The presets, and where their numbers are from:

**deepseek-v4-flash** is ``DeepseekV4Config()`` of transformers 5.24 unchanged: its documented checkpoint is
``deepseek-ai/DeepSeek-V4-Flash-Base``, and it has 284.33 B parameters without the multi-token prediction layer, which
Transformers does not build. Assumption: its ``layer_types`` default (two HCA layers first), which the same file calls
V4-Pro's. Were they sliding-window layers, as compress ratios of 0 would say, the total would be 9 M smaller (0.003 %).

**deepseek-v4-pro** has from transformers' own words (``DeepseekV4GroupedLinear``): 128 heads of 512, 16 output groups
of rank 1024, hidden size 7168; and from ``DeepseekV4Config``: two HCA layers, then CSA and HCA in turn. Assumptions,
nowhere in the library: 61 layers, 384 routed experts of width 3072, query rank 1536, 1024 entries kept by the indexer.
They give 1.573 T parameters, within 2 % of the 1.6 T by which the model is known; a checkpoint's own config.json is
always better than this preset.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .settings import SettingsError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PRESETS", "TINY", "build_on_meta", "has_windowed_attention", "load_config", "more_islands"]

TINY = "tiny"
"""The trainer's built-in model."""

PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v4-flash": {},
    "deepseek-v4-pro": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "q_lora_rank": 1536,
        "index_topk": 1024,
    },
}


def load_config(source: str | Path) -> Any:
    """The Transformers config of a preset's name or of the path of a config.json. Imports transformers: seconds.

    Raises:
        SettingsError: the file is no JSON, or no config of a causal language model that Transformers has.
    """
    from transformers import AutoConfig, DeepseekV4Config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if source == TINY:
        from dsv4_fsdp.train.tiny_model import tiny_model_config

        return tiny_model_config()
    if isinstance(source, str):
        return DeepseekV4Config(**PRESETS[source])
    try:
        values = json.loads(source.read_text())
        if not isinstance(values, dict) or "model_type" not in values:
            raise SettingsError([f"MODEL: {source} is no model's config.json: it has no model_type"])
        config = AutoConfig.from_pretrained(source)
    except SettingsError:
        raise
    # Transformers' strict configs raise their own errors (StrictDataclassError, ...), all with a message for users.
    except Exception as error:  # noqa: BLE001
        raise SettingsError(
            [f"MODEL: {source} cannot be read as a config: {str(error).strip().splitlines()[0]}"]
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SettingsError([f"MODEL: Transformers has no causal language model for model_type {config.model_type!r}"])
    return config


def build_on_meta(config: Any, *, attention: str = "eager") -> nn.Module:
    """The real model in bf16 with fp32 islands, in training mode, on the meta device: no weight exists.

    A checkpoint's quantisation is left out, since training needs the dequantised weights.

    Args:
        attention: ``"eager"`` or ``"windowed"``, of DeepSeek-V4. Other models have what Transformers gives them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    chosen: dict[str, Any] = {}
    if has_windowed_attention(config):
        chosen["attn_implementation"] = "eager"
        if attention == "windowed":
            from dsv4_fsdp.attention import IMPLEMENTATION

            chosen["attn_implementation"] = IMPLEMENTATION
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **chosen)
    assert isinstance(model, torch.nn.Module)
    return model.train()


def has_windowed_attention(config: Any) -> bool:
    """Whether :mod:`dsv4_fsdp.attention` is made for this model."""
    return bool(config.model_type == "deepseek_v4")


def more_islands(folder: Path) -> list[str]:
    """Islands beyond the class's lists in a run that starts from this checkpoint: what it stores in fp32. By its
    headers; empty if the folder holds no weights."""
    if not any(folder.glob("*.safetensors")):
        return []
    from dsv4_fsdp.checkpoint_loading import CheckpointReader, fp32_islands

    with CheckpointReader(folder) as reader:
        return fp32_islands(reader)
