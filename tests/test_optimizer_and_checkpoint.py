"""Optimizer, clipping, state dicts and DCP take grouped units as they take plain FSDP2 units."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cases_faults import small_windows
from cases_optimizer_and_checkpoint import clipped, grouped, interrupted, keys_of, leg, plain, saved_keys

from pool import run_ranks

meshes = pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=lambda m: "x".join(map(str, m)))


@meshes
def test_state_dict_keys_are_those_of_plain_fsdp2(mesh: tuple[int, ...]) -> None:
    """The model's own, DCP's and the gathered one, and the optimizer's, which also have the unsharded model's names."""
    ours = run_ranks(math.prod(mesh), keys_of, grouped, mesh)
    assert ours == run_ranks(math.prod(mesh), keys_of, plain, mesh)
    own, dcp_model, gathered, optimizer, _ = ours[0]
    assert own == dcp_model == gathered == list(small_windows().state_dict())
    assert {tuple(entry) for entry in optimizer.values()} == {("exp_avg", "exp_avg_sq", "step")}


def test_checkpoint_keys_are_those_of_plain_fsdp2(tmp_path: Path) -> None:
    """What DCP writes has the same names, so either can load what the other saved."""
    ours = run_ranks(2, saved_keys, grouped, tmp_path / "grouped")
    assert ours == run_ranks(2, saved_keys, plain, tmp_path / "plain")
    assert len(ours[0]) > 100


@pytest.mark.parametrize("mesh", [(1,), (2,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
def test_clipping_uses_the_norm_of_the_unsharded_gradients(mesh: tuple[int, ...]) -> None:
    """``clip_grad_norm_`` over parameters of two dtypes, and of several sizes below the number of ranks."""
    for found in run_ranks(math.prod(mesh), clipped, mesh, 0.5):
        # A bf16 gradient is rounded once when it is reduced.
        assert found["before"] == pytest.approx(found["unsharded"], rel=2**-9)
        # torch takes each parameter's norm in the gradient's dtype: bf16 rounds the local norm and the total, by 2**-9.
        assert found["said"] == pytest.approx(found["unsharded"], rel=2**-8)
        assert found["before"] > 0.5
        assert found["after"] == pytest.approx(0.5, rel=2**-7)


@meshes
def test_a_resumed_run_is_bit_equal_to_the_uninterrupted_one(mesh: tuple[int, ...], tmp_path: Path) -> None:
    """Losses after the load, and every parameter, moment and step count at the end."""
    for expected, losses, equal in run_ranks(math.prod(mesh), interrupted, mesh, tmp_path):
        assert losses == expected
        assert equal


def test_a_run_moves_from_two_ranks_to_four_to_one(tmp_path: Path) -> None:
    """2 -> 2x2 -> 4 -> 1 ranks, bit-equal to a run on one rank: each rank has the same batch, and means are exact."""
    whole, _, end = run_ranks(1, leg, (1,), range(4), None, None)[0]
    route = [((2,), None), ((2, 2), "a"), ((4,), "b"), ((1,), "c")]
    losses: list[float] = []
    fingerprint = ""
    for step, (mesh, source) in enumerate(route):
        target = None if step == 3 else tmp_path / "abc"[step]
        results = run_ranks(
            math.prod(mesh), leg, mesh, range(step, step + 1), None if source is None else tmp_path / source, target
        )
        assert all(result == results[0] for result in results)
        loss, at_start, at_end = results[0]
        assert source is None or at_start == fingerprint
        fingerprint = at_end
        losses += loss
    assert losses == whole
    assert fingerprint == end
