"""Ranks with and without complete windows: same collectives, right gradients, ``None`` where one process has it."""

from __future__ import annotations

import math

import pytest
from cases_alignment import all_short, random_mixture, untied
from reference import assert_lockstep
from tiny_models import ModelKind, require_nemo

from dsv4_fsdp import tie_compressors
from pool import RankFailure, run_ranks

MIXTURES = [
    # (accumulation, checkpointing, steps): 50 steps in all.
    (1, False, 12),
    (2, False, 8),
    (3, False, 6),
    (1, True, 10),
    (2, True, 8),
    (3, True, 6),
]


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_fifty_random_mixed_length_steps_follow_the_reference(kind: ModelKind, mesh: tuple[int, ...]) -> None:
    """Lengths of 1 to 4 windows per rank, accumulation 1 to 3, checkpointing on and off, ``None`` patterns included."""
    if kind == "nemo":
        require_nemo()
    assert sum(steps for _, _, steps in MIXTURES) == 50
    nobody_had_a_window = 0
    for seed, (accumulate, checkpointing, steps) in enumerate(MIXTURES):
        results = run_ranks(
            math.prod(mesh),
            random_mixture,
            kind,
            mesh,
            accumulate=accumulate,
            checkpointing=checkpointing,
            steps=steps,
            seed=seed,
            timeout_s=300,
        )
        # Strict: a zero gradient where the reference has None is a fault here.
        assert_lockstep([result for result, _ in results])
        nobody_had_a_window += results[0][1]
    assert nobody_had_a_window > 0, "the draw never made all ranks short, so None was not tested"


@pytest.mark.parametrize("kind", ["transformers"])
def test_without_the_tie_mixed_lengths_break_the_reduction(kind: ModelKind) -> None:
    """The failure that the tie prevents is real: reduce-scatter sizes differ between ranks."""
    with pytest.raises(RankFailure):
        run_ranks(2, untied, kind, timeout_s=60)


@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_all_short_batches_leave_gradients_none(kind: ModelKind) -> None:
    """Zeros by themselves, ``None`` once the trainer passes on that no rank had a window."""
    if kind == "nemo":
        require_nemo()
    without, zero = run_ranks(2, all_short, kind, drop=False)[0]
    assert without == []
    assert len(zero) > 0
    dropped, left = run_ranks(2, all_short, kind, drop=True)[0]
    assert sorted(dropped) == sorted(zero)
    assert left == []


def test_tying_twice_adds_no_second_hook() -> None:
    """``tie_compressors`` is idempotent, for a model and for its blocks alike."""
    from tiny_models import tiny_transformers

    model = tiny_transformers()
    first = tie_compressors(model)
    hooks = [len(m._forward_hooks) for m in model.modules()]
    second = tie_compressors(model)
    tie_compressors(model.model.layers[1])
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert first.compressor_fqns == second.compressor_fqns
    assert len(first.compressor_fqns) == 3


def test_flags_of_another_length_are_refused() -> None:
    """A flag per compressor, or an error that says how many were expected."""
    import torch
    from tiny_models import tiny_transformers

    alignment = tie_compressors(tiny_transformers())
    with pytest.raises(ValueError, match="expected one flag for each of 3 compressors"):
        alignment.drop_untouched(torch.zeros(4))
