"""Whole runs on packed rows: the unpacked run's first step, and stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases_train_runs import run
from tiny_checkpoints import transformers_checkpoint
from tiny_models import tiny_transformers
from tiny_tokenizer import deepseek_tokenizer

ROOT = Path(__file__).parent.parent
NUM_CONVERSATIONS = 22
NUM_ROWS = 8
"""That they are packed into: as many rows of single ones, or of packed ones, are one epoch."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Some of the README's conversations, which are evaluated on too.

    Sixteen index heads: with the two of other tests, entries often tie at a score of zero, and top-k may choose
    otherwise among them in a packed row.
    """
    folder = tmp_path_factory.mktemp("data")
    lines = (ROOT / "examples/sft/conversations.jsonl").read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:NUM_CONVERSATIONS]))
    transformers_checkpoint(folder / "model", model=tiny_transformers(vocab_size=264, index_n_heads=16))
    deepseek_tokenizer().save_pretrained(folder / "model")
    return {
        "model.init": "checkpoint",
        "model.path": str(folder / "model"),
        "data.kind": "sft",
        "data.path": str(folder / "a.jsonl"),
        "data.eval_path": str(folder / "a.jsonl"),
        "data.sequence_length": "240",
        "data.cache_dir": str(folder / "cache"),
        "evaluation.every": "1",
    }


def column(folder: Path, name: str) -> list[Any]:
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loss", ["chunked", "stock"])
def test_a_packed_epoch_has_the_loss_of_the_unpacked_one(
    run_ranks: Any, settings: dict[str, str], tmp_path: Path, loss: str
) -> None:
    """All conversations in one global batch of two ranks, eleven forwards each or four: loss, gradient, evaluation."""
    settings = settings | {"steps": "1", "optimizer.lr": "1e-9", "model.loss": loss}  # bf16 weights do not move by it
    ours, theirs = tmp_path / "packed", tmp_path / "apart"
    run_ranks(2, run, ours, settings | {"data.pack": "true", "data.global_batch_size": str(NUM_ROWS)})
    run_ranks(2, run, theirs, settings | {"data.global_batch_size": str(NUM_CONVERSATIONS)})
    assert column(ours, "tokens") == column(theirs, "tokens")
    assert column(ours, "tokens")[0] > 350
    # bf16 logits of about 2, rounded otherwise in other blocks, are 2**-8 apart; so then is a token's loss, and their
    # mean by the root of 367 less: 2e-4, of 6. Three times that. Rows whose documents see each other are ten times off.
    for name in ("loss", "eval_loss"):
        assert column(ours, name) == pytest.approx(column(theirs, name), rel=1e-4), name
    assert column(ours, "grad_norm") == pytest.approx(column(theirs, "grad_norm"), rel=2**-8)


def test_a_packed_run_goes_on_as_if_it_had_not_been_stopped(
    run_ranks: Any, settings: dict[str, str], tmp_path: Path
) -> None:
    """At any step, with accumulation, recomputed blocks and evaluation; on other ranks it sees the same tokens."""
    settings = settings | {
        "steps": "3",
        "data.pack": "true",
        "data.global_batch_size": "4",
        "mesh.activation_checkpointing": "1",
    }
    whole = tmp_path / "whole"
    rows = run_ranks(2, run, whole, settings)[0]
    for stop_after in (1, 2):
        folder = tmp_path / f"cut-{stop_after}"
        cut = run_ranks(2, run, folder, settings, stop_after=stop_after)[0]
        assert cut + run_ranks(2, run, folder, settings)[0] == rows
        assert column(folder, "eval_loss") == column(whole, "eval_loss")
    other = tmp_path / "other"
    run_ranks(1, run, other, settings | {"data.micro_batch_size": "2", "data.balance_lengths": "true"})
    assert column(other, "tokens") == column(whole, "tokens")
    # Gradients are added up in another order and rounded to bf16 elsewhere: 2**-8 at each of three steps.
    assert column(other, "loss") == pytest.approx(column(whole, "loss"), rel=3 * 2**-8)
