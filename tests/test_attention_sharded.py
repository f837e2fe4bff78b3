"""Windowed attention in FSDP2 units, on ranks with and without complete windows."""

from __future__ import annotations

import pytest
from cases_attention import windowed_parity
from reference import assert_lockstep

from pool import run_ranks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharded_is_bit_equal_to_unsharded(checkpointing: bool) -> None:
    """Logits and loss in every bit, gradients within one bf16 rounding; the tie of short ranks' compressors holds."""
    assert_lockstep(run_ranks(2, windowed_parity, checkpointing=checkpointing))
