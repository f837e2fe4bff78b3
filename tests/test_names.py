"""Names: what wrappers add to one is taken off again, and patterns match whole components."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dsv4_fsdp.names import canonical_name, is_adapter_name, matches_components, named_parameters_all, pattern_name


@pytest.mark.parametrize(
    ("fqn", "canonical"),
    [
        ("", ""),
        ("weight", "weight"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("_checkpoint_wrapped_module", ""),
        ("_checkpoint_wrapped_module.weight", "weight"),
        ("layers.0._checkpoint_wrapped_module", "layers.0"),
        ("layers.0._checkpoint_wrapped_module._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("_orig_mod.model.layers.0._checkpoint_wrapped_module.norm.weight", "model.layers.0.norm.weight"),
        ("_fsdp_wrapped_module.weight", "weight"),
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("_orig_mod.base_model.model.lm_head.weight", "lm_head.weight"),
        (
            "base_model.model.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
            "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        ),
        # Words that only look like a wrapper's, and peft's prefix anywhere but in front, stay.
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("base_layers.0.weight", "base_layers.0.weight"),
        ("encoder.base_model.model.weight", "encoder.base_model.model.weight"),
        ("base_model.modelling.weight", "base_model.modelling.weight"),
    ],
)
def test_canonical_name_takes_off_what_wrappers_add(fqn: str, canonical: str) -> None:
    """Once is enough: the canonical name is its own canonical name."""
    assert canonical_name(fqn) == canonical
    assert canonical_name(canonical) == canonical


@pytest.mark.parametrize(
    ("fqn", "is_adapter"),
    [
        ("q_proj.lora_A.default.weight", True),
        ("q_proj.lora_embedding_B.default", True),
        ("q_proj.lora_magnitude_vector.default.weight", True),
        ("q_proj.base_layer.weight", False),
        ("explora_tion.weight", False),
    ],
)
def test_adapter_names_are_pefts_lora_parameters(fqn: str, is_adapter: bool) -> None:
    """A component that starts in ``lora_``."""
    assert is_adapter_name(fqn) is is_adapter


@pytest.mark.parametrize(
    ("fqn", "pattern", "matches"),
    [
        ("self_attn.sinks", "sinks", True),
        ("sinks.weight", "sinks", True),
        ("sinks", "sinks", True),
        ("self_attn.sinks_param.weight", "sinks", False),
        ("self_attn.my_sinks", "sinks", False),
        ("layers.1.attn_hc.fn", "attn_hc.fn", True),
        ("layers.1.attn_hc.fn", "attn_hc", True),
        ("layers.1.attn_hc.fn", "layers.1", True),
        ("layers.11.attn_hc.fn", "layers.1", False),
        ("layers.1.attn_hc.fn", "layers.attn_hc", False),  # a run, without gaps
        ("layers.1.attn_hc.fn", "layers.*.attn_hc", True),
        ("layers.1.self_attn.attn_hc", "layers.*.attn_hc", False),  # a star does not cross a dot
        ("layers.1.attn_hc.fn", "*_hc", True),
        ("layers.1.attn_hc.fn", "*_h", False),
        ("layers.1.attn_hc.fn", "attn_*.fn", True),
        ("a.norm", "norm.*", False),  # a star is one component, not none
        ("a.norm.weight", "norm.*", True),
        ("gate+weight", "gate+weight", True),  # nothing but the star is special
        ("gatexweight", "gate.weight", False),
        ("gate.weight", "gat[e].weight", False),
        ("weight", "", False),
    ],
)
def test_patterns_match_runs_of_whole_components(fqn: str, pattern: str, matches: bool) -> None:
    """Dots are boundaries, a star stands for text within one component."""
    assert matches_components(fqn, pattern) is matches


@pytest.mark.parametrize(
    ("fqn", "pattern"),
    [
        ("model.layers.12.mlp.experts.3.weight", "model.layers.*.mlp.experts.*.weight"),
        ("layers.0", "layers.*"),
        ("lm_head.weight", "lm_head.weight"),
        ("conv1.weight", "conv1.weight"),
        ("", ""),
    ],
)
def test_pattern_name_replaces_number_components(fqn: str, pattern: str) -> None:
    """Layers of a model fall together; digits inside a word stay."""
    assert pattern_name(fqn) == pattern


def test_named_parameters_all_gives_a_tied_parameter_under_each_canonical_name() -> None:
    """torch leaves out the second name, which is the one a list may match."""
    model = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    model["head"].weight = model["embed"].weight
    model["head"] = checkpoint_wrapper(model["head"])
    found = list(named_parameters_all(model))
    assert [name for name, _ in found] == ["embed.weight", "head.weight"]
    assert found[0][1] is found[1][1]
    assert isinstance(found[0][1], torch.Tensor)
