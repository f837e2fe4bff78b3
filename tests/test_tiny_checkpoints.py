"""The tiny checkpoints that other tests stand on: stock Transformers loads each to the model they say they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_checkpoints import base_fp8_checkpoint, release_checkpoint, released_model, transformers_checkpoint
from transformers import AutoTokenizer, DeepseekV4ForCausalLM, FineGrainedFP8Config
from transformers.utils import logging

from dsv4_fsdp.checkpoint_audit import audit_checkpoint

QUANTISED: dict[str, Callable[[Path], Path]] = {
    "release": release_checkpoint,
    "base": base_fp8_checkpoint,
    "base_fp32_scales": lambda folder: base_fp8_checkpoint(folder, scale_dtype=torch.float32),
}


def assert_loads_as_released_model(folder: Path, **options: object) -> None:
    logging.disable_progress_bar()
    model, loading = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert {kind: names for kind, names in loading.items() if names} == {}
    expected = released_model().state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("form", QUANTISED)
def test_stock_transformers_loads_a_quantised_checkpoint_to_the_exact_model(form: str, tmp_path: Path) -> None:
    """Every block scale, FP4 half-byte and name is where its loader looks for it."""
    assert_loads_as_released_model(QUANTISED[form](tmp_path), quantization_config=FineGrainedFP8Config(dequantize=True))


def test_stock_transformers_loads_the_transformers_layout_to_the_exact_model(tmp_path: Path) -> None:
    """bf16 with fp32 islands."""
    assert_loads_as_released_model(transformers_checkpoint(tmp_path, model=released_model()))


@pytest.mark.parametrize("form", QUANTISED)
def test_a_quantised_checkpoint_passes_the_audit(form: str, tmp_path: Path) -> None:
    """The audit knows nothing of the writer: names, scales, MTP tensors and the index are as it expects them."""
    report = audit_checkpoint(QUANTISED[form](tmp_path))
    assert report.ok, report.table()


def test_the_release_has_packed_fp4_experts_fp8_blocks_and_a_tokenizer(tmp_path: Path) -> None:
    """The dtypes of one tensor of each kind, a weight of two blocks, MTP tensors, and text there and back."""
    release_checkpoint(tmp_path)
    dtypes = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                part = opened.get_slice(name)
                dtypes[name] = part.get_dtype(), part.get_shape()
    assert dtypes["layers.0.ffn.experts.3.w1.weight"] == ("I8", [32, 32])
    assert dtypes["layers.0.ffn.experts.3.w1.scale"] == ("F8_E8M0", [32, 2])
    assert dtypes["layers.0.attn.wq_b.weight"] == ("F8_E4M3", [256, 32])
    assert dtypes["layers.0.attn.wq_b.scale"] == ("F8_E8M0", [2, 1])
    assert dtypes["layers.0.attn.kv_norm.weight"] == ("BF16", [32])
    assert dtypes["layers.0.attn.attn_sink"] == ("F32", [8])
    assert dtypes["embed.weight"] == ("BF16", [264, 64])
    assert dtypes["mtp.0.e_proj.weight"] == ("F8_E4M3", [64, 64])
    assert "mtp.0.ffn.experts.0.w2.scale" in dtypes
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("tiny").input_ids) == "tiny"
