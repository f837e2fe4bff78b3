"""Other families of transformers with fp32 tensors: stock FSDP2 beside ours, and the table of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases_families import WAYS, family_step
from family_models import UNBUILT, Family, declared_families, tiny_family_model
from torch import nn

from dsv4_fsdp import plan_sharding

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "families.md"
PINS = ROOT / "constraints.txt"

# What stock FSDP2 does with the model as loaded and stored in fp32, and what ours do. As different as families are:
FAMILIES = {
    # a dense first block without islands, whose inputs must not be cast all the same
    "ernie4_5_moe": ("crash", "silent downcast", "right", "right"),
    # a norm inside the embedding, which backward reads
    "inkling": ("crash", "silent downcast", "right", "right"),
    # an encoder of sounds, with convolutions that do not even run in bf16
    "granite_speech5": ("crash", "crash", "right", "right"),
    # a table of positions that is never called, and frozen: torch does not look at its dtype
    "voxtral": ("silent downcast", "silent downcast", "right", "right"),
    # a tower that is an island as a whole; its blocks do not know that
    "nemotron3_5_transcribe": ("crash", "silent downcast", "refused", "right"),
    # no block is named
    "slanext": ("crash", "crash", "right", "refused"),
}


def _family(name: str) -> Family:
    return next(family for family in declared_families() if family.name == name)


@pytest.mark.parametrize("name", FAMILIES)
def test_ours_is_right_or_refuses_where_stock_fsdp2_crashes_or_downcasts(run_ranks: Any, name: str) -> None:
    """One training step on two ranks, four ways, beside the unsharded model."""
    steps = {way: run_ranks(2, family_step, name, way) for way in WAYS}
    outcomes = tuple({step.outcome for step in steps[way]} for way in WAYS)
    assert outcomes == tuple({outcome} for outcome in FAMILIES[name]), steps
    for way in WAYS:
        for step in steps[way]:
            if step.outcome == "right":
                assert 0 < step.islands_seen == step.island_params


def test_an_embedding_that_is_more_than_a_lookup_is_gathered_for_backward() -> None:
    """Backward of a norm inside it reads the norm's weight; that of a lookup reads nothing."""
    model = tiny_family_model(_family("inkling"))
    embedding = plan_sharding(model, mesh_shape=(2,)).units[0]
    assert (embedding.fqn, embedding.role, embedding.unshard_in_backward) == ("model.embed_tokens", "embedding", True)
    inner = model.get_submodule("model.embed_tokens")
    assert isinstance(inner, nn.Embedding)
    plain = nn.Embedding(*inner.weight.shape, dtype=torch.bfloat16)
    model.get_submodule("model").embed_tokens = plain
    assert not plan_sharding(model, mesh_shape=(2,)).units[0].unshard_in_backward


def _rows() -> dict[str, list[str]]:
    rows = [line.strip("|").split("|") for line in DOC.read_text().splitlines() if line.startswith("| ")][1:]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_the_table_has_the_families_of_the_installed_transformers() -> None:
    """No more, no fewer, and made with these versions; what was not tried has its reason. `make families` mends it."""
    text = DOC.read_text()
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    assert f"torch {pins['torch']}, transformers {pins['transformers']};" in text
    assert _rows().keys() | UNBUILT.keys() == {family.name for family in declared_families()}
    assert not _rows().keys() & UNBUILT.keys()
    assert all(f"- {name}: {reason}" in text for name, reason in UNBUILT.items())


def test_in_the_table_ours_is_right_or_refuses() -> None:
    """Nowhere a crash, a downcast or other numbers, and no family refuses both ways."""
    for name, (model, islands, *outcomes) in _rows().items():
        ours = outcomes[len(WAYS) - 2 :]
        assert set(ours) <= {"right", "refused"}, (name, model, islands, ours)
        assert "right" in ours
    assert {name: tuple(_rows()[name][2:]) for name in FAMILIES} == FAMILIES
