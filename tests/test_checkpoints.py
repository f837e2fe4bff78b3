"""Training checkpoints: a resumed run is the uninterrupted one, on the same ranks in every bit, on others too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from cases_checkpoints import (
    Leg,
    before_the_first_step,
    changed_options,
    ep_leg,
    leg,
    misfits,
    names_in_checkpoint,
    no_gradient_so_far,
    pieces_of_dispatched_experts,
    read_with_plain_dcp,
    refused_entries,
    with_optimizer,
)
from tiny_models import tiny_transformers

from pool import run_ranks


def ranks_of(mesh: tuple[int, ...]) -> int:
    return math.prod(mesh)


# --- Whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "asynchronous"),
    [((1,), False), ((2,), True), ((2, 2), False)],
    ids=["1", "2, in the background", "2x2"],
)
def test_a_resumed_run_is_the_uninterrupted_one_in_every_bit(
    mesh: tuple[int, ...], asynchronous: bool, tmp_path: Path
) -> None:
    """Losses, weights, moments; with a schedule, accumulation, other data on each rank, and three random generators."""
    whole = run_ranks(ranks_of(mesh), leg, mesh, tmp_path, range(4), resume=False, save_at=2, asynchronous=asynchronous)
    resumed = run_ranks(ranks_of(mesh), leg, mesh, tmp_path, range(2, 4), resume=True, save_at=None)
    for uninterrupted, found in zip(whole, resumed, strict=True):
        assert found.loaded == uninterrupted.saved
        assert found.losses == uninterrupted.losses[2:]
        assert found.end == uninterrupted.end
        assert found.train == {"step": 2, "position": 7 * ranks_of(mesh), "skipped": [1, 2]}
        assert found.notes == []
    assert len({tuple(result.losses) for result in resumed}) == len(resumed), "ranks were to differ"


def test_a_run_moves_from_two_ranks_to_four_as_hsdp_to_four_to_one(tmp_path: Path) -> None:
    """Every bit of the state arrives, empty shards or not; the losses are those of one rank that was never stopped.

    Exactly so, since all ranks have the same batch: means of two or four equal gradients are exact.
    """
    whole: Leg = run_ranks(1, leg, (1,), tmp_path / "whole", range(4), resume=False, save_at=None, ranks_differ=False)[
        0
    ]
    losses: list[float] = []
    saved = ""
    for step, mesh in enumerate([(2,), (2, 2), (4,), (1,)]):
        results = run_ranks(
            ranks_of(mesh),
            leg,
            mesh,
            tmp_path / "moving",
            range(step, step + 1),
            resume=step > 0,
            save_at=step + 1,
            ranks_differ=False,
        )
        assert all(result.losses == results[0].losses and result.end == results[0].end for result in results)
        assert step == 0 or {result.loaded for result in results} == {saved}
        losses += results[0].losses
        saved = results[0].saved
        same_ranks = step in (0, 2)  # 2x2 to 4: the generators' states are restored
        assert bool(results[0].notes) is not same_ranks
    assert losses == whole.losses
    assert saved == whole.end


def test_on_another_number_of_ranks_the_generators_are_seeded_anew_and_it_is_said(tmp_path: Path) -> None:
    """From seed, step and rank: each rank another stream, and the same each time."""
    run_ranks(2, leg, (2,), tmp_path, range(1), resume=False, save_at=1)
    first = run_ranks(1, leg, (1,), tmp_path, range(1, 2), resume=True, save_at=None)
    again = run_ranks(1, leg, (1,), tmp_path, range(1, 2), resume=True, save_at=None)
    assert first[0].losses == again[0].losses
    assert first[0].notes == [
        "resumed on 1 ranks a run of 2: random generators are seeded anew from seed, step and rank"
    ]


@pytest.fixture(scope="module")
def six_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4 with six experts: under EP, three a rank, which two ranks share unevenly."""
    path = tmp_path_factory.mktemp("experts") / "model"
    tiny_transformers(n_routed_experts=6).save_pretrained(path)
    return path


EP2 = {"fsdp_size": 2, "ep_size": 2}
EP_MESHES: list[tuple[int, dict[str, Any]]] = [
    (4, {"fsdp_size": 4, "ep_size": 2}),  # efsdp 2 x ep 2: dim 0 of the experts is cut twice, unevenly
    (4, EP2 | {"dp_replicate_size": 2}),
    (2, {"fsdp_size": 2}),
]


def test_a_run_moves_between_expert_parallelism_and_anything_else(six_experts: Path, tmp_path: Path) -> None:
    """EP on 2 ranks, EP x FSDP on 4, EP x HSDP on 4, FSDP on 2: as a run on one rank that was never stopped.

    Exactly so, as above: all ranks have the same batch, and the owner of an expert adds up 2 or 4 equal gradients.
    """
    first = run_ranks(2, ep_leg, six_experts, tmp_path, range(2), resume=False, save=True, **EP2)
    whole = run_ranks(1, ep_leg, six_experts, tmp_path / "whole", range(2 + len(EP_MESHES)), resume=False, save=True)
    losses = list(first[0].losses)
    saved = first[0].saved
    for step, (num_ranks, distributed) in enumerate(EP_MESHES, start=2):
        results = run_ranks(
            num_ranks, ep_leg, six_experts, tmp_path, range(step, step + 1), resume=True, save=True, **distributed
        )
        assert {result.loaded for result in results} == {saved}, distributed
        losses += results[0].losses
        saved = results[0].saved
    assert losses == whole[0].losses
    assert saved == whole[0].saved


@pytest.mark.parametrize(
    ("num_experts", "rows"),
    [
        (4, [[0], [2], [1], [3]]),
        (6, [[0, 1], [3, 4], [2], [5]]),
        (2, [[0], [1], [], []]),
    ],
)
def test_pieces_of_dispatched_experts_say_where_their_rows_are(num_experts: int, rows: list[list[int]]) -> None:
    """FSDP over EP, both on dim 0: a strided placement, whose rows are one run all the same."""
    found = run_ranks(4, pieces_of_dispatched_experts, num_experts, 2, 2)
    for expected, (held, begins, other_dim, placements) in zip(rows, found, strict=True):
        assert "_StridedShard" in placements
        assert held == expected
        assert begins == (expected[0] if expected else num_experts)
        assert other_dim == 0


def test_a_part_that_is_not_one_block_is_refused() -> None:
    """DCP would write both without a word, the strided one to the wrong place."""
    for errors in run_ranks(2, refused_entries):
        for error in errors:
            assert "cannot hold w: this rank's part of it is not one block of the whole tensor" in error


# --- Optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16_sr", "muon", "torchao 8 bit", "two of torch's", "sgd", "wide"])
def test_every_optimizer_goes_on_in_every_bit(kind: str, tmp_path: Path) -> None:
    """Also where moments have another dtype than their weight, or are 8-bit blocks, or rounding is drawn at random."""
    for expected, found in run_ranks(2, with_optimizer, kind, tmp_path):
        assert found == expected


def test_a_weight_without_state_has_none_after_loading(tmp_path: Path) -> None:
    """It got no gradient before the save: its step count must begin at 1 afterwards, as it would have."""
    for saved, with_state, steps, uninterrupted, resumed in run_ranks(2, no_gradient_so_far, tmp_path):
        state = "optimizer.state.first.weight"
        assert saved == ["optimizer.groups", f"{state}.exp_avg", f"{state}.exp_avg_sq", f"{state}.step"]
        assert with_state == ["first.weight"]
        assert steps == [2, 1]
        assert uninterrupted == resumed


def test_a_checkpoint_before_the_first_step_makes_no_optimizer_state(tmp_path: Path) -> None:
    """DCP's getter would, by a step that counts."""
    assert run_ranks(2, before_the_first_step, tmp_path) == [(0, 0, 1)] * 2


# --- Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "load_as"),
    [("recomputed compiled", "as it is"), ("as it is", "recomputed"), ("peft recomputed", "peft"), ("tied", "tied")],
)
def test_names_are_canonical_whatever_wraps_the_model(how: str, load_as: str, tmp_path: Path) -> None:
    """And a model that is wrapped otherwise reads them."""
    for names, same in run_ranks(2, names_in_checkpoint, how, tmp_path, load_as):
        assert same
        words = ("_checkpoint_wrapped_module", "_orig_mod", "base_model", "base_layer", "_fsdp_wrapped_module")
        assert [name for name in names if any(word in name for word in words)] == []
        assert "model.model.layers.0.self_attn.q_b_proj.weight" in names
        assert ("model.model.layers.0.self_attn.q_b_proj.lora_A.default.weight" in names) is ("peft" in how)
        tied = ["model.lm_head.weight"] if "tied" not in how else []  # under one of its two names
        assert [name for name in names if name in ("model.lm_head.weight", "model.model.embed_tokens.weight")] == [
            *tied,
            "model.model.embed_tokens.weight",
        ]
        moments = [name for name in names if name.endswith(".exp_avg")]
        assert moments
        assert {name.split(".")[0] for name in names} == {"model", "optimizer", "train", "rng"}
        assert not any(".indexer." in name for name in moments)


def test_torchs_own_dcp_reads_it(tmp_path: Path) -> None:
    """Names as documented, integers and fp32 as they were."""
    for found in run_ranks(2, read_with_plain_dcp, tmp_path):
        assert {name: dtype for name, (dtype, _) in found.items()} == {
            "model.first.weight": "torch.float32",
            "model.second.weight": "torch.float32",
            "model.table": "torch.int64",
            "model.bias": "torch.float32",
        }
        assert found["model.table"][1] == [0, 1, 2, 3, 4]
        assert found["model.bias"][1] == [1 + 2**-20] * 3
        assert any(found["model.second.weight"][1])


# --- What does not fit ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_something_else_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """By name, on all ranks, with what to do."""
    expected = {
        "shape": "first.weight: (6, 4) saved, (6, 8) here",
        "optimizer": "it was trained with AdamW, and this run uses RMSprop",
        "stepped": "the AdamW to load a checkpoint into has stepped already",
        "dtype": "first.weight: torch.float32 saved, torch.bfloat16 here",
        "names": "1 tensors of the model are not in the checkpoint:\n  - third.weight\n"
        "1 tensors of the checkpoint are not in the model:\n  - second.weight",
        "frozen": "1 parameters were trained and now are not (frozen, or left out):\n  - first.weight",
        "amsgrad": "2 tensors of the optimizer are not in the checkpoint:\n  - first.weight.max_exp_avg_sq",
    }
    for errors in run_ranks(2, misfits, tmp_path):
        assert errors.keys() == expected.keys()
        for name, text in expected.items():
            assert text in errors[name], name
            assert "what to do: " in errors[name]


def test_options_that_changed_are_reported_and_those_of_the_run_count(tmp_path: Path) -> None:
    """A learning rate is no option: the loop sets it."""
    first, second = run_ranks(2, changed_options, tmp_path)
    assert first == [
        "the optimizer's betas was (0.9, 0.999) in the checkpoint and is (0.8, 0.9) now, for 2 parameters",
        "the optimizer's weight_decay was 0.01 in the checkpoint and is 0.25 now, for 2 parameters",
    ]
    assert second == []
