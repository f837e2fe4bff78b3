"""The gradient of an optimizer step is one process's; it is measured over all meshes, and ranks judge it alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_gradients import (
    clipped,
    error_of_small_mesh,
    expert_parallel,
    missing,
    not_finite_on_one_rank,
    one_step,
    plain_and_sharded_together,
)
from tiny_models import tiny_transformers

from dsv4_fsdp.train.gradients import (
    GradientError,
    SkippedSteps,
    StepTotal,
    StepTotals,
    TooManySkippedSteps,
    _squared_norm,
    loss_scale,
)

# --- Scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_gradient_of_a_step_is_that_of_one_process_on_all_tokens(
    run_ranks: Any, world_size: int, accumulate: int
) -> None:
    """Padded rows, micro-batches of different sizes, a rank without any supervised token; one reduction a step."""
    for found in run_ranks(world_size, one_step, accumulate):
        # fp32 throughout. The two scales differ by the number of ranks, a power of two, so each micro-batch's gradient
        # is the reference's in every bit; only the sums differ: up to 12 terms, which may cancel, in fp32 or in fp64.
        assert found["error"] < 1e-6, found["name"]
        if world_size * accumulate == 1:
            assert found["error"] == 0.0
        assert found["num_tokens"][0] == found["num_tokens"][1]
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-6)
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-6)
        assert found["next_tokens"] == sum(range(1, world_size + 1))
        assert found["stop_ranks"] == 1
        assert found["reductions"] == 1
    if world_size > 1:
        assert run_ranks(world_size, one_step, accumulate)[1]["mine"] == 0


def test_with_bf16_gradients_it_is_so_up_to_their_rounding(run_ranks: Any) -> None:
    """bf16 weights and fp32 islands, as models are trained."""
    for found in run_ranks(2, one_step, 3, bf16=True):
        # Two roundings of 2**-9 of the bf16 sum of three micro-batches, and one of the reduction of each; the terms may
        # cancel, so that the sum is smaller than what was rounded.
        assert found["error"] < 6e-3, found["name"]
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=4e-3)


def test_a_step_without_any_supervised_token_scales_by_zero_and_is_not_made() -> None:
    """In place of a division by zero."""
    assert loss_scale(0, 4) == 0.0
    assert loss_scale(8, 4) == 0.5
    skipped = SkippedSteps(max_in_a_row=1)
    assert not skipped.may_step(3, total(num_tokens=0))
    with pytest.raises(TooManySkippedSteps, match="no supervised token on any rank"):
        skipped.may_step(4, total(num_tokens=0))


def test_what_does_not_fit_the_one_vector_is_refused_before_it_hangs(run_ranks: Any) -> None:
    """Another length than the other ranks' would."""
    for text in run_ranks(1, _misfits):
        assert "window_flags do not fit.\nexpected: shape (2,), as StepTotals was made\ngot: nothing" in text
        assert "the number of tokens of the first step is not known" in text


def _misfits() -> str:
    totals = StepTotals([], num_windows=2)
    texts = []
    for _ in range(2):
        try:
            totals.reduce(loss_sum=torch.zeros(()), next_tokens=0)
        except GradientError as error:
            texts.append(str(error))
        totals.first_tokens(1)
    return "\n".join(texts)


# --- Norm and clipping (faults 20, 30, 31) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "offload"),
    [((1,), False), ((2,), False), ((4,), False), ((2, 2), False), ((2,), True)],
    ids=["1", "2", "4", "2x2", "2, offloaded"],
)
def test_the_norm_is_that_of_the_whole_gradient_and_clipping_cuts_to_it(
    run_ranks: Any, mesh: tuple[int, ...], offload: bool
) -> None:
    """Two dtypes, empty shards, replicas; a gradient within the limit is not touched."""
    for found in run_ranks(math.prod(mesh), clipped, mesh, offload=offload):
        # Squares in fp32 over rows of 1,024 elements, fp64 from there on: 2**-24 times a few.
        assert found["said"] == pytest.approx(found["exact"], rel=1e-6)
        assert found["coefficient"] == pytest.approx(0.5, rel=1e-6)
        # Halving is exact but for the last bits of the coefficient; a bf16 gradient then rounds once, to either side.
        assert found["after"] == pytest.approx(found["exact"] / 2, rel=2**-9)
        assert found["within the limit"] == 1.0


def test_tensors_that_every_rank_holds_count_once(run_ranks: Any) -> None:
    """Beside sharded ones, on two ranks and on four (with an uneven split)."""
    for world_size in (2, 4):
        for said, expected in run_ranks(world_size, plain_and_sharded_together):
            assert said == pytest.approx(expected, rel=1e-7)


def test_a_mesh_that_does_not_cover_the_ranks_is_refused(run_ranks: Any) -> None:
    """Its shards would be counted wrongly."""
    for text in run_ranks(4, error_of_small_mesh):
        assert "expected: shards or replicas on a mesh of all 4 ranks" in text
        assert "on a mesh of shape (2,)" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_shard_is_not_short(dtype: torch.dtype) -> None:
    """Adding up 2**24 squares one after the other in fp32 misses 4e-4 of them, and 2**26 half a per cent."""
    values = torch.randn(2**24 + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert float(_squared_norm(values).sqrt()) == pytest.approx(float(values.double().norm()), rel=5e-7)
    assert float(_squared_norm(values[:0])) == 0.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4 as ``save_pretrained`` leaves it."""
    path = tmp_path_factory.mktemp("experts") / "model"
    tiny_transformers().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("distributed", "meshes"),
    [
        ({"fsdp_size": 4}, ["(4,)"]),
        ({"fsdp_size": 4, "ep_size": 2}, ["(2, 2)", "(4,)"]),
        ({"fsdp_size": 4, "ep_size": 4}, ["(1, 4)", "(4,)"]),
        ({"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2}, ["(2, 1, 2)", "(2, 2)"]),
    ],
    ids=["ep 1", "ep 2 x fsdp 2", "ep 4", "ep 2 x 2 replicas"],
)
def test_expert_parallel_gradients_norm_and_step_are_the_unsharded_model_s(
    run_ranks: Any, checkpoint: Path, distributed: dict[str, int], meshes: list[str]
) -> None:
    """In fp32, with SGD; then AdamW's foreach kernel takes the groups, which it would not if they mixed meshes."""
    for found in run_ranks(4, expert_parallel, checkpoint, **distributed):
        assert found["meshes"] == meshes
        # fp32 throughout, but experts multiply other sets of tokens at a time than the reference does: sums in another
        # order. A factor of ep_size would be an error of 1.
        assert found["error"] < 1e-4, found["name"]
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-5)
        assert found["coefficient"] == pytest.approx(0.5, rel=1e-5)
        assert found["moved"] < 1e-5
        on_expert_mesh = [name for name in found["groups"] if name.startswith("matrices, on")]
        assert len(on_expert_mesh) == (1 if "ep_size" in distributed else 0)


# --- Steps that are not finite (fault 22) -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_and_too_many_end_the_run(
    run_ranks: Any, where: str
) -> None:
    """Weights stay in every bit; all ranks raise the same error."""
    results = run_ranks(2, not_finite_on_one_rank, where, 2)
    assert results[0] == results[1]
    found = results[0]
    assert found["decisions"] == found["moved"] == [True, False, False]
    assert found["total"] == 3
    assert "3 optimizer steps in a row were skipped, the last of them step 3" in found["error"]
    assert "expected: at most 2 (optimizer.max_skipped_steps)" in found["error"]
    said = "a loss that is not finite on 1 ranks" if where == "loss" else "finite losses, but a gradient norm of"
    assert f"got: {said}" in found["error"]


def total(*, num_tokens: int = 8, grad_norm: float = 1.0, bad_ranks: int = 0) -> StepTotal:
    nothing = torch.zeros(0)
    return StepTotal(num_tokens, 1.0, grad_norm, bad_ranks, 0, nothing, nothing.long())


def test_only_skipped_steps_in_a_row_end_a_run_and_all_of_them_are_counted() -> None:
    """A step that is made starts the row again; the count goes on from where a resumed run left it."""
    skipped = SkippedSteps(max_in_a_row=1, total=5)
    for step in range(4):
        assert not skipped.may_step(2 * step, total(grad_norm=math.inf))
        assert skipped.may_step(2 * step + 1, total())
    assert (skipped.total, skipped.in_a_row) == (9, 0)


# --- Missing gradients (fault 21) -------------------------------------------------------------------------------------


def test_parameters_without_gradient_on_any_rank_end_the_run_on_all_ranks_unless_declared(run_ranks: Any) -> None:
    """Not frozen ones, and not those that one rank used."""
    texts = run_ranks(2, missing, ())
    assert texts[0] == texts[1]
    assert "2 trainable parameters have no gradient on any rank:\n  - never.weight\n  - never.bias\n" in texts[0]
    assert "optimizer.allow_missing_gradients" in texts[0]
    assert run_ranks(2, missing, ("never",)) == [["never.weight", "never.bias"]] * 2
    assert "1 trainable parameters have no gradient" in run_ranks(2, missing, ("never.weight",))[0]
