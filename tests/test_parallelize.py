"""What ``parallelize`` does to a model beside sharding it."""

from __future__ import annotations

from typing import cast

import pytest
from cases_parallelize import (
    audit_between_steps,
    islands_in_dealt_experts,
    shared_with_the_root,
    train_around_evaluations,
)
from tiny_models import tiny_transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dsv4_fsdp import ShardingError, parallelize
from dsv4_fsdp.planner.fake_mesh import fake_mesh
from pool import run_ranks


@pytest.mark.parametrize("by", ["torch", "transformers"])
def test_blocks_that_recompute_already_are_not_wrapped_again(by: str) -> None:
    """``activation_checkpointing=True`` would otherwise recompute inside the recomputation, at twice the cost."""
    model = tiny_transformers(("sliding_attention", "heavily_compressed_attention"))
    layers = model.get_submodule("model.layers")
    if by == "torch":
        layers.register_module("0", checkpoint_wrapper(layers.get_submodule("0")))
    else:
        cast(PreTrainedModel, model).activation_checkpointing_enable()
    with fake_mesh((1,)) as mesh:
        parallelize(model, mesh, activation_checkpointing=True)
    wrapped = [name for name, module in model.named_modules() if isinstance(module, CheckpointWrapper)]
    assert wrapped == ([] if by == "transformers" else ["model.layers.0", "model.layers.1"])


@pytest.mark.parametrize("island_units", ["grouped", "root"])
def test_evaluations_anywhere_change_no_step(island_units: str) -> None:
    """Before the optimizer is made, and between backward and clipping: losses and norms stay, and everything trains."""
    quiet, busy = (run_ranks(2, train_around_evaluations, island_units, evaluates=way) for way in (False, True))
    for (losses, _, still), (expected, whole, _) in zip(quiet, busy, strict=True):
        assert losses == expected
        assert whole == []
        assert still == []


def test_an_audit_after_an_evaluation_leaves_the_model_as_it_was() -> None:
    """It looks at gathered parameters too, whose memory FSDP2 frees and takes again."""
    for losses in run_ranks(2, audit_between_steps):
        assert losses[0] != losses[1]


def test_islands_of_dealt_experts_are_not_the_roots() -> None:
    """They are sharded over other ranks than it."""
    grouped, in_root = (run_ranks(4, islands_in_dealt_experts, way) for way in ("grouped", "root"))
    assert grouped == in_root
    assert all(param.island for unit in grouped[0] for group in unit.groups for param in group.params)


def test_an_island_that_the_root_reads_too_is_one() -> None:
    """It is the root's once, whoever reads it."""
    for equal, error in run_ranks(2, shared_with_the_root):
        assert equal
        assert error < 5e-3


def test_an_island_that_the_head_reads_too_is_refused_before_anything_is_sharded() -> None:
    """Two units cannot share it."""
    model = tiny_transformers()
    model.lm_head.input_layernorm = model.get_submodule("model.layers.1.input_layernorm").weight
    with fake_mesh((2,)) as mesh, pytest.raises(ShardingError, match="would be in two units") as caught:
        parallelize(model, mesh, island_units="root")
    assert "lm_head.input_layernorm: the root" in str(caught.value)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
