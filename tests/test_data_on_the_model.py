"""What batches are laid out for, on the real DeepSeek-V4 of Transformers with every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsv4_fsdp.data.batches import pad_rows
from dsv4_fsdp.train.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    # fp32: what differs is then not rounding.
    model = build_tiny_model(seed=0).float().eval()
    for module in model.modules():
        # The indexer's top-k breaks ties differently for rows of another length, and exact ties (scores of zero: no
        # head's ReLU is open) are frequent with few heads. Let it choose every window, as it does in short rows.
        if hasattr(module, "index_topk"):
            module.index_topk = 1000
    return model


def logits(model: nn.Module, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **kwargs).logits


def text(length: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


# Less than a window of 4 tokens, all but the last of a window of 128, just that window, more.
@pytest.mark.parametrize("length", [3, 127, 128, 140])
def test_padding_on_the_right_changes_no_real_token(model: nn.Module, length: int) -> None:
    """No attention mask is needed: not at a window's edge, nor where padding completes a window."""
    short = text(length)
    rows = [(row[0].numpy(), row[0].numpy()) for row in (short, text(160, seed=1))]
    padded = logits(model, pad_rows(rows, pad_id=7).input_ids)
    # Matrix products of another shape add in another order: fp32 rounding over four layers of logits below 1.
    torch.testing.assert_close(padded[:1, :length], logits(model, short), rtol=0, atol=1e-5)


def test_padding_on_the_left_pollutes_compressed_windows(model: nn.Module) -> None:
    """Even with an attention mask and positions that leave it out: the reason why it is refused."""
    tokens = text(100)
    padded = torch.cat([torch.full((1, 60), 7), tokens], dim=1)
    mask = torch.cat([torch.zeros(1, 60), torch.ones(1, 100)], dim=1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, padded, attention_mask=mask, position_ids=positions)[:, 60:]
    assert (found - logits(model, tokens)).abs().max() > 0.05


def test_restarted_positions_do_not_isolate_documents(model: nn.Module) -> None:
    """In eager attention: a second document sees the first one's windows in place of its own. So ``data.pack`` with it
    is refused; if this fails, it need not be."""
    second = text(60, seed=1)
    positions = torch.cat([torch.arange(100), torch.arange(60)]).unsqueeze(0)
    after_first, after_other = (
        logits(model, torch.cat([text(100, seed=seed), second], dim=1), position_ids=positions)[:, 100:]
        for seed in (0, 2)
    )
    assert (after_first - after_other).abs().max() > 0.05
    assert (after_first - logits(model, second)).abs().max() > 0.05
