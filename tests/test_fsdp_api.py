"""``dsv4_fsdp.fsdp`` has NeMo AutoModel's interface: its names, signatures and tables, and makes the same units.

nemo-automodel 0.7.0 is the black box: its function and ours shard the same module with a recorder in place of
``fully_shard``. Its ``DeepseekV4FSDPKwargs`` and its lists came after 0.7.0; for these the API page of the later
version is the source.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases_fsdp import tiny_vision_tower
from fake_nemo import block, holder, leaf, norm, plain, vision_block, wrap
from tiny_models import require_nemo, tiny_nemo
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dsv4_fsdp import fsdp

FUNCTIONS = {
    "_attach_hca_param_sync_group": "module, mesh",
    "_floating_param_dtypes": "module",
    "_fp32_module_fsdp_kwargs": "module, fsdp_kwargs",
    "_fp32_mp_policy": "mp_policy, *, preserve_activation_dtype=False",
    "_fsdp_kwargs_for_module": "module, fsdp_kwargs",
    "_fully_shard_once": "module, *, mesh, mp_policy, offload_policy, fp32_policy=False, **fsdp_kwargs",
    "_has_fsdp_state": "module",
    "_hca_param_sync_group_from_1d_mesh": "mesh",
    "_is_deepseek_v4_module": "module",
    "_iter_dsv4_fp32_modules": "module",
    "_matches_suffix": "name, suffix",
    "_module_config_model_type": "module",
}
TABLES = {
    "_DSV4_CLASS_NAMES": {
        "DeepseekV4ForCausalLM",
        "DeepseekV4Model",
        "DeepseekV4Block",
        "DeepseekV4VisionBlock",
        "DeepseekV4VisionTransformer",
    },
    "_DSV4_FP32_MODULE_SUFFIXES": (
        "attn_hc",
        "ffn_hc",
        "hc_head",
        "lm_head",
        "self_attn.sinks_param",
        "self_attn.compressor.wkv",
        "self_attn.compressor.wgate",
        "self_attn.compressor.ape_param",
        "self_attn.compressor.indexer.wkv",
        "self_attn.compressor.indexer.wgate",
        "self_attn.compressor.indexer.ape_param",
        "norm1",
        "norm2",
        "vision.norm",
    ),
    "_DSV4_RETURNED_FP32_PARAMETER_CLASS_NAMES": {"DeepseekV4FP32Parameter"},
    "_DSV4_SELF_CASTING_FP32_MODULE_CLASS_NAMES": {"DeepseekV4VisionRMSNorm"},
}


def nemo_fsdp() -> Any:
    require_nemo()
    return importlib.import_module("nemo_automodel.components.models.deepseek_v4.fsdp")


def parameters_of(function: Callable[..., Any]) -> str:
    """The parameters of a signature as they are written, without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]


# ---------------------------------------------------------------------------------------------------- names, signatures


@pytest.mark.parametrize("name", FUNCTIONS)
def test_helper_has_the_documented_signature(name: str) -> None:
    """Each underscored function takes what the API page says."""
    assert parameters_of(getattr(fsdp, name)) == FUNCTIONS[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_helper_has_the_signature_of_the_installed_nemo(name: str) -> None:
    """Each underscored function can be called as NeMo AutoModel 0.7.0's can."""
    assert parameters_of(getattr(fsdp, name)) == parameters_of(getattr(nemo_fsdp(), name))


def test_fully_shard_deepseek_v4_has_the_documented_signature_and_two_keywords_more() -> None:
    """Positional order and ``**fsdp_kwargs`` as documented; what we add is keyword-only and has a default."""
    added = "*, island_units='auto', hca_owner_axis=None, "
    ours = parameters_of(fsdp.fully_shard_deepseek_v4)
    assert ours == f"module, mesh, mp_policy, offload_policy=None, {added}**fsdp_kwargs"
    assert ours.replace(added, "") == parameters_of(nemo_fsdp().fully_shard_deepseek_v4)


def test_annotations_of_fully_shard_deepseek_v4_are_the_documented_ones() -> None:
    """A module or a list in, the same out; the further arguments are those of ``DeepseekV4FSDPKwargs``."""
    hints = typing.get_type_hints(fsdp.fully_shard_deepseek_v4)
    assert hints["module"] == nn.Module | list[nn.Module]
    assert hints["mp_policy"] is MixedPrecisionPolicy
    assert hints["return"] == FSDPModule | list[FSDPModule]
    assert hints["fsdp_kwargs"] == typing.Unpack[fsdp.DeepseekV4FSDPKwargs]


def test_deepseek_v4_fsdp_kwargs_is_an_optional_typed_dict() -> None:
    """Two keys, neither required."""
    assert typing.is_typeddict(fsdp.DeepseekV4FSDPKwargs)
    assert fsdp.DeepseekV4FSDPKwargs.__required_keys__ == frozenset()
    assert typing.get_type_hints(fsdp.DeepseekV4FSDPKwargs) == {
        "ignored_params": set[nn.Parameter] | None,
        "reshard_after_forward": bool | int | None,
    }


@pytest.mark.parametrize("name", TABLES)
def test_table_holds_the_documented_data(name: str) -> None:
    """Same type, same content."""
    assert getattr(fsdp, name) == TABLES[name]
    assert type(getattr(fsdp, name)) is type(TABLES[name])


@pytest.mark.parametrize("name", TABLES)
def test_table_equals_that_of_the_installed_nemo(name: str) -> None:
    """The tables have not drifted from NeMo AutoModel 0.7.0."""
    assert getattr(fsdp, name) == getattr(nemo_fsdp(), name)


def test_fully_shard_is_a_module_level_name() -> None:
    """The name that a caller replaces to intercept units is torch's own function."""
    assert fsdp.fully_shard is fully_shard


def test_public_names() -> None:
    """What ``import *`` gives."""
    assert sorted(fsdp.__all__) == ["DeepseekV4FSDPKwargs", "fully_shard_deepseek_v4"]


# ---------------------------------------------------------------------------------------------------- the black box

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
POLICIES = {
    "bf16": BF16,
    "bf16_all_fields": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=False),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16),
    "fp32": MixedPrecisionPolicy(torch.float32, torch.bfloat16, torch.bfloat16, cast_forward_inputs=False),
    "none": MixedPrecisionPolicy(),
    "no_policy": None,
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: block(attn_hc=leaf(), ffn_hc=leaf(), mlp=leaf(torch.bfloat16)),
    "compressor": lambda: block(
        self_attn=leaf(
            torch.bfloat16,
            sinks_param=holder(),
            compressor=leaf(
                torch.bfloat16,
                wkv=leaf(),
                wgate=leaf(),
                ape_param=holder(),
                indexer=leaf(torch.bfloat16, wkv=leaf(), wgate=leaf(), ape_param=holder()),
            ),
        )
    ),
    "vision_block": lambda: vision_block(norm1=norm(), norm2=norm(), attn=leaf(torch.bfloat16)),
    "norm_elsewhere": lambda: block(deep=leaf(torch.bfloat16, any_name=norm())),
    "vision_norm": lambda: plain(torch.bfloat16, vision=vision_block(norm=norm()), layers=leaf(torch.bfloat16)),
    "masters": lambda: block(torch.float32, attn_hc=leaf(), mlp=leaf(), sub=leaf(norm1=norm())),
    "not_v4": lambda: plain(torch.bfloat16, attn_hc=leaf()),
    "not_v4_fp32": lambda: plain(torch.float32, attn_hc=leaf()),
    "lm_head_alone": lambda: nn.Linear(2, 2),
    "holder_alone": holder,
    "norm_alone": norm,
    "wrapped_island": lambda: block(attn_hc=wrap(leaf()), norm1=wrap(norm()), mlp=leaf(torch.bfloat16)),
    "wrapped_block": lambda: wrap(block(attn_hc=leaf(), sub=leaf(torch.bfloat16, sinks_param=holder()))),
    "island_in_island": lambda: block(attn_hc=leaf(norm1=norm(), x=norm())),
    "look_alikes": lambda: block(foo_attn_hc=leaf(), attn_hc2=leaf(), sinks_param=holder(), vision_norm=leaf()),
    "empty_island": lambda: block(attn_hc=nn.Identity(), ffn_hc=leaf()),
    "v4_below": lambda: plain(torch.bfloat16, hc_head=leaf(), lm_head=leaf(), layers=block(attn_hc=leaf())),
}


def units_of(
    fsdp_module: Any, monkeypatch: pytest.MonkeyPatch, module: nn.Module, *args: Any, **kwargs: Any
) -> list[Any]:
    """What ``fsdp_module.fully_shard_deepseek_v4`` would make units of, in order, with their arguments."""
    names = {id(m): name for name, m in module.named_modules()}
    units: list[Any] = []

    def record(unit: nn.Module, *, mesh: Any, mp_policy: Any, offload_policy: Any, **others: Any) -> nn.Module:
        if "ignored_params" in others:
            others["ignored_params"] = len(others["ignored_params"])
        units.append((names[id(unit)], mesh, mp_policy, offload_policy, others))
        return unit

    with monkeypatch.context() as patch:
        patch.setattr(fsdp_module, "fully_shard", record)
        assert fsdp_module.fully_shard_deepseek_v4(module, "mesh", *args, **kwargs) is module
    return units


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODULES)
def test_units_are_those_of_the_installed_nemo(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same modules in the same order, under the same policies and arguments."""
    build, mp_policy = MODULES[name], POLICIES[policy]
    ours = units_of(fsdp, monkeypatch, build(), mp_policy)
    assert ours == units_of(nemo_fsdp(), monkeypatch, build(), mp_policy)


@pytest.mark.parametrize("name", MODULES)
def test_arguments_of_units_are_those_of_the_installed_nemo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``reshard_after_forward``, ``ignored_params`` and the offload policy reach each unit as they do there."""
    for reshard in (True, False, None, 2):
        recorded = []
        for fsdp_module in (fsdp, nemo_fsdp()):
            module = MODULES[name]()
            ignored = set(list(module.parameters())[::2])
            kwargs = {"offload_policy": "offload", "reshard_after_forward": reshard, "ignored_params": ignored}
            recorded.append(units_of(fsdp_module, monkeypatch, module, BF16, **kwargs))
        assert recorded[0] == recorded[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", ["bf16", "none"])
def test_units_of_the_real_model_are_those_of_the_installed_nemo(
    dtype: torch.dtype, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo AutoModel's own model, whole and block by block: sliding, HCA and CSA layers."""
    model = tiny_nemo(compress_ratios=[0, 128, 4], dtype=dtype)
    for module in (model, model.model, *model.model.layers.values(), model.lm_head, model.model.embed_tokens):
        ours = units_of(fsdp, monkeypatch, module, POLICIES[policy])
        assert ours == units_of(nemo_fsdp(), monkeypatch, module, POLICIES[policy])


@pytest.mark.parametrize("policy", ["bf16", "none"])
def test_units_of_the_real_vision_tower_are_those_of_the_installed_nemo(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo AutoModel's own vision transformer, whole and one block of it."""
    require_nemo()
    tower = tiny_vision_tower()
    for module in (tower, tower.blocks[0], tower.norm):
        ours = units_of(fsdp, monkeypatch, module, POLICIES[policy])
        assert ours == units_of(nemo_fsdp(), monkeypatch, module, POLICIES[policy])
