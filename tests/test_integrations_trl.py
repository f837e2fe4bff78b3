"""TRL's ``SFTTrainer``: what it needs for this model by itself, the fault, and the line that mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases_integrations import sft_one_step, sft_without_the_switch, train_with_sft


def test_sft_needs_the_balancing_loss_switched_off(run_ranks: Any, tmp_path: Path) -> None:
    """TRL 1.16.0 asks the config for ``num_experts``; ``SFTConfig(router_aux_loss_coef=0.0)`` makes it not ask."""
    for message in run_ranks(2, sft_without_the_switch, tmp_path):
        assert message == "'DeepseekV4Config' object has no attribute 'num_experts'"


def test_without_the_line_sft_computes_every_island_in_bf16(run_ranks: Any, tmp_path: Path) -> None:
    """It trains without a word; the last hidden state and the gradients are others."""
    for result in run_ranks(2, sft_one_step, tmp_path, line=False):
        assert result["island_dtypes"] == result["island_reduces"] == {torch.bfloat16}
        assert not result["bit_equal"]
        assert result["worst"][0] > 0.1


@pytest.mark.parametrize("upcast", [True, False], ids=["master weights", "stored as loaded"])
def test_with_the_line_sft_computes_and_reduces_islands_in_fp32(run_ranks: Any, tmp_path: Path, upcast: bool) -> None:
    """The hidden state before the head is the unsharded model's bit by bit, the gradients within rounding."""
    for result in run_ranks(2, sft_one_step, tmp_path, line=True, upcast=upcast):
        assert result["island_dtypes"] == result["island_reduces"] == {torch.float32}
        assert result["bit_equal"]
        # accelerate's policy reduces what is no island in bf16: one rounding per addend, 2**-9 of an element each.
        assert result["worst"][0] < 5e-3, result["worst"]
        assert result["head_error"] < 5e-3


def test_sft_saves_resumes_and_continues_as_if_it_had_not_stopped(run_ranks: Any, tmp_path: Path) -> None:
    """Four steps at once, and two resumed from the checkpoint after the second: every parameter the same."""
    whole = run_ranks(2, train_with_sft, tmp_path, resume=False)
    resumed = run_ranks(2, train_with_sft, tmp_path, resume=True)
    for result, again in zip(whole, resumed, strict=True):
        assert again == result
        assert sorted(result["losses"]) == [1, 2, 3, 4]
        assert len(set(result["losses"].values())) == 4
