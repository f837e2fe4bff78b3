"""What ``parallelize`` does to a model beside sharding it."""

from __future__ import annotations

from typing import cast

import pytest
from tiny_models import tiny_transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from transformers import PreTrainedModel

from dsv4_fsdp import parallelize
from dsv4_fsdp.planner.fake_mesh import fake_mesh


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
