"""accelerate's FSDP2 plugin and transformers' ``Trainer``: the fault, and the line that mends it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_integrations import accelerate_lockstep, accelerate_lost_bits, accelerate_low_memory, train_with_trainer
from reference import assert_lockstep

from dsv4_fsdp import keep_fp32_islands
from dsv4_fsdp.integrations import UnsupportedLibrary

UNITS = ["", "lm_head", "model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm"]


def test_without_the_line_every_island_is_computed_in_bf16(run_ranks: Any) -> None:
    """And reduced in it. No error, no warning: storage is fp32 throughout, the logits are others."""
    for result in run_ranks(2, accelerate_lockstep, line=False):
        assert result.storage == {"torch.float32"}
        assert result.island_dtypes == result.island_reduces == {torch.bfloat16}
        assert result.lockstep.bit_equal == [False]


@pytest.mark.parametrize("upcast", [True, False], ids=["master weights", "stored as loaded"])
def test_with_the_line_islands_are_computed_and_reduced_in_fp32_in_one_unit_per_block(
    run_ranks: Any, upcast: bool
) -> None:
    """Forward bit-equal to the unsharded bf16 model with ranks' lengths mixed; bf16 storage on request."""
    results = run_ranks(2, accelerate_lockstep, line=True, upcast=upcast)
    for result in results:
        assert sorted(result.units) == UNITS
        assert result.island_dtypes == result.island_reduces == {torch.float32}
        assert result.storage == ({"torch.float32"} if upcast else {"torch.float32", "torch.bfloat16"})
        assert result.trainable_indexer == []
    # accelerate's policy reduces what is no island in bf16: one rounding per addend, 2**-9 of an element each.
    assert_lockstep([result.lockstep for result in results], grad_tol=5e-3)


def test_with_the_line_lost_bits_are_refused_before_the_upcast_hides_them(run_ranks: Any) -> None:
    """An island was rounded to bf16; accelerate would store the rounded values in fp32, and nobody could tell."""
    for message in run_ranks(2, accelerate_lost_bits):
        assert "1 tensor that must be fp32 is stored in a narrower dtype" in message
        assert "model.layers.0.attn_hc.fn" in message


def test_low_memory_loading_fails_in_accelerate_itself(run_ranks: Any) -> None:
    """1.15.0 takes every saved buffer for a DTensor, and DeepSeek-V4 has some. Not ours to mend; here to be noticed."""
    assert run_ranks(2, accelerate_low_memory) == ["'Tensor' object has no attribute 'device_mesh'"] * 2


@pytest.mark.parametrize("upcast", [True, False], ids=["master weights", "stored as loaded"])
def test_the_trainer_saves_resumes_and_continues_as_if_it_had_not_stopped(
    run_ranks: Any, tmp_path: Path, upcast: bool
) -> None:
    """Four steps at once, and two resumed from the checkpoint after the second: every parameter the same."""
    whole = run_ranks(2, train_with_trainer, tmp_path, resume=False, upcast=upcast)
    resumed = run_ranks(2, train_with_trainer, tmp_path, resume=True, upcast=upcast)
    assert resumed == whole
    for result in whole:
        assert sorted(result["units"]) == UNITS
        assert result["island_dtypes"] == {torch.float32}
        assert sorted(result["losses"]) == [1, 2, 3, 4]
        assert len(set(result["losses"].values())) == 4


# --- The patch itself -------------------------------------------------------------------------------------------------


def _names() -> tuple[Any, Any]:
    accelerator = importlib.import_module("accelerate.accelerator")
    return accelerator.fsdp2_prepare_model, torch.distributed.fsdp.fully_shard


def test_the_patch_is_undone_on_any_exit() -> None:
    """Also after an exception; torch's name is touched only while accelerate shards."""
    before = _names()
    with pytest.raises(KeyError), keep_fp32_islands():
        raise KeyError(_names())
    assert _names() == before
    with keep_fp32_islands():
        assert [old is new for old, new in zip(before, _names(), strict=True)] == [False, True]


@pytest.mark.parametrize(
    ("module", "value", "said"),
    [
        ("accelerate.accelerator", lambda accelerator, model: model, "is not accelerate's own function"),
        ("accelerate.utils.fsdp_utils", lambda model: model, "takes (model), not (accelerator, model)"),
        ("accelerate.utils.fsdp_utils", lambda accelerator, model: model, "does not use fully_shard"),
    ],
)
def test_unknown_internals_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, module: str, value: Any, said: str
) -> None:
    """Nothing is patched, transformers neither, and the message says what differs and what to do."""
    mixin = importlib.import_module("transformers.distributed.mixin")
    monkeypatch.setattr(importlib.import_module(module), "fsdp2_prepare_model", value)
    before = (*_names(), mixin.apply_fully_sharded_data_parallelism)
    with pytest.raises(UnsupportedLibrary) as error, keep_fp32_islands():
        pass
    assert said in str(error.value)
    assert "expected: accelerate 1.15.0" in str(error.value)
    assert (*_names(), mixin.apply_fully_sharded_data_parallelism) == before
