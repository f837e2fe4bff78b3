"""What ``fully_shard_deepseek_v4`` does, one behaviour a test: with ``fully_shard`` recorded, then on real ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import cases_fsdp as cases
import pytest
import torch
from fake_nemo import Config, block, compressor, holder, leaf, norm, of_class, plain, vision_block, wrap
from reference import assert_lockstep
from tiny_models import require_nemo, tiny_transformers
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from dsv4_fsdp import fsdp
from dsv4_fsdp.errors import ContractError, ShardingError
from dsv4_fsdp.fsdp import fully_shard_deepseek_v4
from pool import run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ISLAND = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
SELF_CASTING = MixedPrecisionPolicy(torch.float32, torch.float32, None, cast_forward_inputs=False)
MESH: Any = SimpleNamespace(ndim=2)


@dataclass
class Recorded:
    """One intercepted ``fully_shard`` call."""

    module: Any
    kwargs: dict[str, Any]

    @property
    def policy(self) -> Any:
        return self.kwargs["mp_policy"]


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The units that were made, in order; nothing is really sharded, but each module of a unit counts as sharded."""
    recorded: list[Recorded] = []
    sharded: set[int] = set()

    def record(module: Any, **kwargs: Any) -> Any:
        recorded.append(Recorded(module, kwargs))
        sharded.update(id(m) for m in (module if isinstance(module, list) else [module]))
        return module

    monkeypatch.setattr(fsdp, "fully_shard", record)
    monkeypatch.setattr(fsdp, "_has_fsdp_state", lambda module: id(module) in sharded)
    return recorded


@pytest.fixture
def grouped_units(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The grouped units that were made, each with the modules that were tied before."""
    recorded: list[Recorded] = []
    tied: list[Any] = []

    def record(module: Any, **kwargs: Any) -> Any:
        recorded.append(Recorded(module, kwargs | {"tied_before": list(tied)}))
        return module

    monkeypatch.setattr(fsdp, "tie_compressors", tied.append)
    monkeypatch.setattr(fsdp, "fully_shard_grouped", record)
    return recorded


def names_of(units: list[Recorded], root: nn.Module) -> list[str]:
    names = {id(module): name for name, module in root.named_modules()}
    return [names[id(unit.module)] for unit in units]


def islands_of(root: nn.Module) -> list[str]:
    return names_of([Recorded(module, {}) for module in fsdp._iter_dsv4_fp32_modules(root)], root)


# ---------------------------------------------------------------------------------------------- what is DeepSeek-V4


@pytest.mark.parametrize("name", sorted(fsdp._DSV4_CLASS_NAMES))
def test_a_module_is_recognised_by_its_class_name(name: str) -> None:
    """Each class of the table, by name alone."""
    assert fsdp._is_deepseek_v4_module(of_class(name))


def test_a_module_is_recognised_by_its_config() -> None:
    """``config.model_type`` of the module or of any submodule."""
    module = plain(sub=leaf())
    assert not fsdp._is_deepseek_v4_module(module)
    module.sub.config = Config(model_type="deepseek_v4")
    assert fsdp._module_config_model_type(module.sub) == "deepseek_v4"
    assert fsdp._is_deepseek_v4_module(module)


@pytest.mark.parametrize("config", [None, Config(), Config(model_type=4), Config(model_type=None), "deepseek_v4"])
def test_a_config_without_a_model_type_is_none(config: Any) -> None:
    """No config, no ``model_type``, or one that is no string."""
    module = leaf()
    assert fsdp._module_config_model_type(module) is None
    module.config = config
    assert fsdp._module_config_model_type(module) is None
    assert not fsdp._is_deepseek_v4_module(module)


def test_a_module_is_recognised_through_a_wrapper_and_by_any_submodule() -> None:
    """A wrapped block, a block deep inside, and a block that ``fully_shard`` has given another class."""
    assert fsdp._is_deepseek_v4_module(wrap(wrap(block())))
    assert fsdp._is_deepseek_v4_module(nn.Sequential(nn.ModuleDict({"0": plain(x=block())})))
    sharded_class = type("FSDPDeepseekV4Block", (type(block()),), {})
    assert fsdp._is_deepseek_v4_module(sharded_class())


@pytest.mark.parametrize("name", ["DeepseekV4Attention", "DeepseekV3Model", "DeepseekV4Blocks", "deepseekv4block"])
def test_other_class_names_are_not_deepseek_v4(name: str) -> None:
    """The name is compared whole."""
    assert not fsdp._is_deepseek_v4_module(of_class(name))


# ---------------------------------------------------------------------------------------------------- what is an island


@pytest.mark.parametrize("suffix", fsdp._DSV4_FP32_MODULE_SUFFIXES)
def test_a_suffix_matches_at_a_dot_boundary_only(suffix: str) -> None:
    """The whole name, or its last components; neither a longer word nor something behind it."""
    for name in (suffix, f"layers.0.{suffix}", f"a.{suffix}"):
        assert fsdp._matches_suffix(name, suffix)
    for name in ("", f"foo_{suffix}", f"layers.0.foo_{suffix}", f"{suffix}.weight", f"{suffix}2", suffix[1:]):
        assert not fsdp._matches_suffix(name, suffix)


def test_islands_are_found_at_any_depth_and_look_alikes_are_not() -> None:
    """Short suffixes match anywhere; long ones need all their components."""
    module = block(
        attn_hc=leaf(),
        foo_attn_hc=leaf(),
        self_attn=leaf(sinks_param=holder(), wkv=leaf(), compressor=leaf(wkv=leaf(), indexer=leaf(wgate=leaf()))),
        other=leaf(compressor=leaf(wkv=leaf()), ffn_hc=leaf()),
        norm=leaf(),
        vision=leaf(norm=leaf()),
    )
    assert islands_of(module) == [
        "attn_hc",
        "self_attn.sinks_param",
        "self_attn.compressor.wkv",
        "self_attn.compressor.indexer.wgate",
        "other.ffn_hc",
        "vision.norm",
    ]


def test_a_vision_norm_is_an_island_wherever_it_stands() -> None:
    """By its class, also under a name that no suffix knows; but never the module that was given itself."""
    assert islands_of(plain(a=leaf(b=norm()), c=wrap(norm()))) == ["a.b", "c"]
    assert islands_of(norm()) == []
    assert islands_of(wrap(norm())) == []


def test_a_module_found_by_class_and_by_name_is_one_island() -> None:
    """``vision.norm`` is both; so is a module that is registered twice."""
    shared = norm()
    assert islands_of(plain(vision=vision_block(norm=norm()))) == ["vision.norm"]
    assert islands_of(block(norm1=shared, norm2=shared)) == ["norm1"]
    assert islands_of(block(first=(late := leaf()), attn_hc=late)) == ["first"]


def test_a_checkpoint_wrapper_around_an_island_is_taken_once_and_is_the_one_taken() -> None:
    """The outermost wrapper, as for a block that is wrapped first and sharded then."""
    assert islands_of(block(attn_hc=wrap(leaf()), norm1=wrap(wrap(norm())), ffn_hc=leaf())) == [
        "attn_hc",
        "norm1",
        "ffn_hc",
    ]


def test_islands_are_found_through_wrappers_anywhere_in_their_name() -> None:
    """Around the block, around ``self_attn``, and by ``torch.compile``."""
    attention = leaf(torch.bfloat16, compressor=wrap(leaf(torch.bfloat16, wkv=leaf())))
    module = wrap(block(self_attn=wrap(attention), attn_hc=torch.compile(leaf(), backend="eager")))
    inner = "_checkpoint_wrapped_module"
    assert islands_of(module) == [f"{inner}.self_attn.{inner}.compressor.{inner}.wkv", f"{inner}.attn_hc"]


def test_an_island_inside_an_island_belongs_to_the_outer_one() -> None:
    """One unit, so no order between them matters."""
    assert islands_of(block(attn_hc=leaf(norm1=norm(), deep=leaf(x=norm())))) == ["attn_hc"]


def test_only_modules_whose_floating_parameters_are_all_fp32_are_islands() -> None:
    """Integer parameters do not count, a module without floating parameters is none, any other dtype rules it out."""
    with_integers = leaf()
    with_integers.ids = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    only_integers = nn.Module()
    only_integers.ids = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    module = block(
        attn_hc=with_integers,
        ffn_hc=only_integers,
        hc_head=nn.Identity(),
        lm_head=leaf(torch.bfloat16),
        norm1=leaf(torch.float64),
        norm2=leaf(torch.bfloat16, inner=norm()),
    )
    assert fsdp._floating_param_dtypes(only_integers) == set()
    assert fsdp._floating_param_dtypes(module.norm2) == {torch.bfloat16, torch.float32}
    # What is inside a module that is passed over stands for itself.
    with pytest.warns(UserWarning, match="lm_head"):
        pass_over = fully_shard_names(module)
    assert islands_of(module) == ["attn_hc", "norm2.inner"] == pass_over[:-1]


def fully_shard_names(module: nn.Module) -> list[str]:
    """The names of the units that a bf16 policy gives, without a fixture."""
    recorded: list[Recorded] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "fully_shard", lambda unit, **kwargs: recorded.append(Recorded(unit, kwargs)))
        fully_shard_deepseek_v4(module, MESH, BF16)
    return names_of(recorded, module)


# ---------------------------------------------------------------------------------------------------- policies


def test_the_island_policy_is_fp32_in_parameters_reduction_and_output() -> None:
    """Whatever the caller's policy says of the three; ``cast_forward_inputs`` stays."""
    for cast in (True, False):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float16, cast_forward_inputs=cast)
        expected = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32, cast_forward_inputs=cast)
        assert fsdp._fp32_mp_policy(policy) == expected
        assert policy.param_dtype is torch.bfloat16


def test_the_island_policy_keeps_fields_that_it_does_not_know() -> None:
    """A policy of a later torch, or a caller's subclass, keeps its type and its other fields."""

    @dataclass(frozen=True)
    class LaterPolicy(MixedPrecisionPolicy):
        new_field: int = 0

    assert fsdp._fp32_mp_policy(LaterPolicy(torch.bfloat16, new_field=7)) == LaterPolicy(*[torch.float32] * 3, True, 7)


def test_the_island_policy_drops_a_function_that_sends_parameters_elsewhere() -> None:
    """torch 2.15's ``param_dtype_override_fn`` overrules ``param_dtype``, also for an island."""

    @dataclass(frozen=True)
    class Policy215(MixedPrecisionPolicy):
        param_dtype_override_fn: Callable[[Any], torch.dtype] | None = None

    policy = Policy215(torch.float32, param_dtype_override_fn=lambda param: torch.bfloat16)
    assert fsdp._fp32_mp_policy(policy).param_dtype_override_fn is None


def test_preserving_the_activation_dtype_means_no_cast_on_either_side() -> None:
    """fp32 parameters and reduction, but inputs and outputs pass as they are."""
    assert fsdp._fp32_mp_policy(BF16, preserve_activation_dtype=True) == SELF_CASTING


@pytest.mark.parametrize("policy", [None, object(), MagicMock(), SimpleNamespace(param_dtype=torch.bfloat16)])
def test_what_is_no_mixed_precision_policy_passes_through(policy: Any, units: list[Recorded]) -> None:
    """The same object comes back, and reaches islands and parent alike."""
    assert fsdp._fp32_mp_policy(policy) is policy
    assert fsdp._fp32_mp_policy(policy, preserve_activation_dtype=True) is policy
    fully_shard_deepseek_v4(block(attn_hc=leaf()), MESH, policy)
    assert [unit.policy for unit in units] == [policy, policy]


# -------------------------------------------------------------------------------------------------- arguments of units


@pytest.mark.parametrize("given", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": None, "other": 1}])
def test_a_holder_never_reshards_after_forward(given: dict[str, Any]) -> None:
    """Its forward returns the parameter itself; the caller's dict is left alone."""
    before = dict(given)
    for module in (holder(), wrap(holder())):
        assert fsdp._fp32_module_fsdp_kwargs(module, given) == {**given, "reshard_after_forward": False}
        assert given == before


def test_kwargs_that_need_no_change_are_returned_as_the_same_object() -> None:
    """A holder's that already say so, and those of any other module."""
    given: dict[str, Any] = {"reshard_after_forward": False}
    assert fsdp._fp32_module_fsdp_kwargs(holder(), given) is given
    given = {"reshard_after_forward": True}
    assert fsdp._fp32_module_fsdp_kwargs(leaf(), given) is given
    assert fsdp._fsdp_kwargs_for_module(leaf(), given) is given
    for ignored in (None, set()):
        given = {"ignored_params": ignored}
        assert fsdp._fsdp_kwargs_for_module(leaf(), given) is given
    module = leaf()
    given = {"ignored_params": {module.weight}}
    assert fsdp._fsdp_kwargs_for_module(module, given) is given


def test_ignored_params_are_cut_to_the_module() -> None:
    """Own ones stay, others go, and the key goes with the last of them; nothing of the caller's is changed."""
    module, other = leaf(sub=leaf()), leaf()
    ignored = {module.sub.weight, other.weight}
    given = {"ignored_params": ignored, "reshard_after_forward": True}
    assert fsdp._fsdp_kwargs_for_module(module, given) == {
        "ignored_params": {module.sub.weight},
        "reshard_after_forward": True,
    }
    assert fsdp._fsdp_kwargs_for_module(leaf(), given) == {"reshard_after_forward": True}
    assert given == {"ignored_params": ignored, "reshard_after_forward": True}
    assert ignored == {module.sub.weight, other.weight}


def test_ignored_params_reach_islands_cut_and_the_parent_whole(units: list[Recorded]) -> None:
    """An island with none of them gets no such argument; one that is ignored in full is still a unit.

    The unit without parameters is not idle: it casts the island's inputs to fp32.
    """
    module = block(attn_hc=leaf(), ffn_hc=leaf(sub=leaf()), norm1=norm(), mlp=leaf(torch.bfloat16))
    ignored = {module.attn_hc.weight, module.ffn_hc.weight, module.mlp.weight}
    fully_shard_deepseek_v4(module, MESH, BF16, ignored_params=ignored)
    assert names_of(units, module) == ["attn_hc", "ffn_hc", "norm1", ""]
    assert [unit.kwargs.get("ignored_params") for unit in units] == [
        {module.attn_hc.weight},
        {module.ffn_hc.weight},
        None,
        ignored,
    ]
    assert units[-1].kwargs["ignored_params"] is ignored
    assert "ignored_params" not in units[2].kwargs


def test_mesh_offload_policy_and_further_arguments_reach_every_unit(units: list[Recorded]) -> None:
    """The same objects, also for arguments that this package does not know."""
    offload = CPUOffloadPolicy()
    placement: Any = object()
    fully_shard_deepseek_v4(
        block(attn_hc=leaf(), sinks=leaf(torch.bfloat16)),
        MESH,
        BF16,
        offload,
        reshard_after_forward=2,
        shard_placement_fn=placement,  # type: ignore[call-arg]
    )
    expected = {"mesh": MESH, "offload_policy": offload, "reshard_after_forward": 2, "shard_placement_fn": placement}
    assert [{k: v for k, v in unit.kwargs.items() if k != "mp_policy"} for unit in units] == [expected, expected]


def test_only_the_holder_in_a_block_stays_gathered(units: list[Recorded]) -> None:
    """The other units reshard as the caller says."""
    module = block(attn_hc=leaf(), self_attn=leaf(torch.bfloat16, sinks_param=wrap(holder())))
    fully_shard_deepseek_v4(module, MESH, BF16, reshard_after_forward=True)
    assert names_of(units, module) == ["attn_hc", "self_attn.sinks_param", ""]
    assert [unit.kwargs["reshard_after_forward"] for unit in units] == [True, False, True]


# ---------------------------------------------------------------------------------------------------- which units


def test_islands_become_units_before_their_parent(units: list[Recorded]) -> None:
    """fp32 units bottom-up, self-casting ones without casts, then the module under the caller's policy."""
    module = block(attn_hc=leaf(), norm1=wrap(norm()), mlp=leaf(torch.bfloat16, any_name=norm()))
    assert fully_shard_deepseek_v4(module, MESH, BF16) is module
    assert names_of(units, module) == ["attn_hc", "norm1", "mlp.any_name", ""]
    assert [unit.policy for unit in units] == [ISLAND, SELF_CASTING, SELF_CASTING, BF16]
    assert units[-1].policy is BF16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_master_weights_under_a_narrow_policy_keep_islands_fp32(dtype: torch.dtype, units: list[Recorded]) -> None:
    """All-fp32 storage of a DeepSeek-V4 module is no wish for fp32 compute."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    module = block(torch.float32, attn_hc=leaf(), mlp=leaf())
    fully_shard_deepseek_v4(module, MESH, policy)
    assert names_of(units, module) == ["attn_hc", ""]
    assert [unit.policy for unit in units] == [ISLAND, policy]


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_all_fp32_storage_under_a_policy_that_does_not_lower_it_is_one_unit(
    dtype: torch.dtype | None, units: list[Recorded]
) -> None:
    """Islands need no unit of their own where everything is fp32; they still reduce and return fp32."""
    module = block(torch.float32, attn_hc=leaf(), norm1=norm())
    policy = MixedPrecisionPolicy(dtype, torch.bfloat16, cast_forward_inputs=False)
    assert fully_shard_deepseek_v4(module, MESH, policy) is module
    assert names_of(units, module) == [""]
    assert units[0].policy == fsdp._fp32_mp_policy(policy)


def test_a_module_that_is_no_deepseek_v4_is_one_unit(units: list[Recorded]) -> None:
    """Under the caller's own policy, island names or not, and its compressors are left alone."""
    module = plain(attn_hc=leaf(), compressor=compressor())
    fully_shard_deepseek_v4(module, MESH, BF16)
    assert names_of(units, module) == [""]
    assert units[0].policy is BF16
    assert module.compressor.groups == []


def test_an_fp32_head_handed_over_by_itself_stays_fp32(units: list[Recorded]) -> None:
    """``lm_head`` alone has no name that tells it from a master weight: fp32 it is, as in NeMo AutoModel."""
    fully_shard_deepseek_v4(nn.Linear(2, 2), MESH, BF16)
    assert [unit.policy for unit in units] == [ISLAND]


def test_none_is_returned_untouched(units: list[Recorded]) -> None:
    """An optional part of a model that is not there."""
    assert fully_shard_deepseek_v4(None, MESH, BF16) is None  # type: ignore[arg-type]
    assert units == []


@pytest.mark.parametrize("island_units", ["auto", "nested", "grouped"])
def test_a_sharded_module_is_returned_untouched(
    island_units: Any, units: list[Recorded], grouped_units: list[Recorded]
) -> None:
    """Neither the module nor anything inside it, and no compressor is told anything."""
    module = block(attn_hc=leaf(), compressor=compressor())
    fsdp.fully_shard(module)
    assert fully_shard_deepseek_v4(module, MESH, BF16, island_units=island_units) is module
    assert len(units) == 1
    assert grouped_units == []
    assert module.compressor.groups == []
    assert fsdp._fully_shard_once(module, mesh=MESH, mp_policy=BF16, offload_policy=None, fp32_policy=True) is module
    assert len(units) == 1


def test_what_an_inner_unit_owns_is_left_alone(units: list[Recorded]) -> None:
    """A root call after the blocks: islands inside them are not sharded a second time, nor warned about."""
    inner = block(attn_hc=leaf(), ffn_hc=leaf(torch.bfloat16))
    module = of_class("DeepseekV4Model", torch.bfloat16, layer=inner, hc_head=leaf())
    fsdp.fully_shard(inner)
    fully_shard_deepseek_v4(module, MESH, BF16)
    assert names_of(units, module) == ["layer", "hc_head", ""]


def test_a_call_repeated_changes_nothing(units: list[Recorded]) -> None:
    """The second call finds everything sharded."""
    module = block(attn_hc=leaf())
    for _ in range(2):
        fully_shard_deepseek_v4(module, MESH, BF16)
    assert names_of(units, module) == ["attn_hc", ""]


def test_a_list_is_one_unit_under_the_callers_policy(units: list[Recorded]) -> None:
    """One call with the caller's list, all arguments whole, no island apart; the list comes back."""
    modules = [block(attn_hc=leaf()), leaf()]
    ignored = {modules[1].weight}
    assert fully_shard_deepseek_v4(modules, MESH, BF16, ignored_params=ignored) is modules
    assert [unit.module for unit in units] == [modules]
    assert units[0].module is modules
    assert units[0].kwargs == {"mesh": MESH, "mp_policy": BF16, "offload_policy": None, "ignored_params": ignored}
    assert units[0].policy is BF16


def test_a_list_of_nothing_to_shard_is_returned_untouched(units: list[Recorded]) -> None:
    """Empty, all sharded already, all ``None``."""
    sharded = leaf()
    fsdp.fully_shard(sharded)
    lists: list[list[Any]] = [[], [None], [sharded], [sharded, None]]
    for modules in lists:
        assert fully_shard_deepseek_v4(modules, MESH, BF16) is modules
    assert len(units) == 1


def test_sharded_members_of_a_list_are_left_out_of_its_unit(units: list[Recorded]) -> None:
    """The others become one unit; the caller's list is not changed."""
    modules: Any = [leaf(), None, leaf(), block()]
    fsdp.fully_shard(modules[0])
    before = list(modules)
    assert fully_shard_deepseek_v4(modules, MESH, BF16) is modules
    assert units[1].module == modules[2:]
    assert modules == before


def test_a_list_attaches_the_group_of_its_compressors(units: list[Recorded]) -> None:
    """The compressors of each DeepSeek-V4 module in it."""
    modules: Any = [block(compressor=compressor()), plain(compressor=compressor())]
    fully_shard_deepseek_v4(modules, FakeMesh(2, ndim=1), BF16)
    assert [module.compressor.groups for module in modules] == [["group"], []]


# ---------------------------------------------------------------------------------------------------- warnings


def test_a_named_module_that_is_not_all_fp32_is_passed_over_with_one_warning(units: list[Recorded]) -> None:
    """One warning for the call: it names each such module with its dtypes, once, wrapped or not, and points here."""
    module = block(
        attn_hc=leaf(),
        ffn_hc=wrap(leaf(torch.bfloat16)),
        norm1=leaf(torch.float32, x=leaf(torch.float16)),
        foo_norm2=leaf(torch.bfloat16),
    )
    with pytest.warns(UserWarning, match="not all fp32") as caught:
        fully_shard_deepseek_v4(module, MESH, BF16)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    named = [line.strip() for line in str(caught[0].message).splitlines() if line.startswith("  - ")]
    assert named == ["- ffn_hc: bfloat16", "- norm1: float16 and float32"]
    assert names_of(units, module) == ["attn_hc", ""]


def test_no_warning_where_nothing_is_passed_over(units: list[Recorded]) -> None:
    """Modules without floating parameters, and names of another model, give none (warnings are errors here)."""
    fully_shard_deepseek_v4(block(attn_hc=leaf(), ffn_hc=nn.Identity()), MESH, BF16)
    fully_shard_deepseek_v4(plain(attn_hc=leaf(torch.bfloat16)), MESH, BF16)
    fully_shard_deepseek_v4([block(attn_hc=leaf(torch.bfloat16))], MESH, BF16)
    assert len(units) == 4


def test_a_unit_that_torch_will_refuse_is_named_in_the_log(
    units: list[Recorded], caplog: pytest.LogCaptureFixture
) -> None:
    """Trainable parameters of two dtypes outside the islands; frozen and ignored ones are fine."""
    module = block(attn_hc=leaf(), adapter=leaf(), other=leaf())
    with caplog.at_level(logging.WARNING, logger="dsv4_fsdp"):
        fully_shard_deepseek_v4(copy.deepcopy(module), MESH, BF16)
    assert "DeepseekV4Block" in caplog.text
    assert "adapter.weight" in caplog.text
    assert "attn_hc" not in caplog.text
    caplog.clear()
    module.adapter.requires_grad_(False)
    fully_shard_deepseek_v4(module, MESH, BF16, ignored_params={module.other.weight})
    assert caplog.text == ""


# ---------------------------------------------------------------------------------------------------- kinds of units


def test_grouped_units_are_made_on_request(units: list[Recorded], grouped_units: list[Recorded]) -> None:
    """One call of the engine with the caller's arguments, after its compressors were tied; no nested unit."""
    module = block(attn_hc=leaf(), compressor=compressor())
    ignored = {module.weight}
    returned = fully_shard_deepseek_v4(
        module, MESH, BF16, island_units="grouped", ignored_params=ignored, reshard_after_forward=False
    )
    assert returned is module
    assert units == []
    expected = {"mesh": MESH, "mp_policy": BF16, "ignored_params": ignored, "reshard_after_forward": False}
    assert [unit.kwargs for unit in grouped_units] == [expected | {"tied_before": [module]}]
    assert module.compressor.groups == []


def test_a_list_can_be_one_grouped_unit(units: list[Recorded], grouped_units: list[Recorded]) -> None:
    """The engine gets the list, every member is tied, the offload policy goes along."""
    modules = [block(attn_hc=leaf()), block(attn_hc=leaf())]
    offload = CPUOffloadPolicy()
    assert fully_shard_deepseek_v4(modules, MESH, BF16, offload, island_units="grouped") is modules
    assert units == []
    assert [unit.module for unit in grouped_units] == [modules]
    assert grouped_units[0].kwargs == {
        "mesh": MESH,
        "mp_policy": BF16,
        "offload_policy": offload,
        "tied_before": modules,
    }


def test_a_head_alone_stays_fp32_when_grouped_units_are_asked_for(
    units: list[Recorded], grouped_units: list[Recorded]
) -> None:
    """The engine would have no name to know it by, and compute it in bf16."""
    fully_shard_deepseek_v4(nn.Linear(2, 2), MESH, BF16, island_units="grouped")
    assert [unit.policy for unit in units] == [ISLAND]
    assert grouped_units == []


def test_auto_takes_grouped_units_where_an_island_is_a_bare_parameter(
    units: list[Recorded], grouped_units: list[Recorded]
) -> None:
    """Transformers' model: a block, a list of blocks, and the root around its blocks."""
    model = tiny_transformers(["sliding_attention"] * 2)
    for module in (model.model.layers[0], list(model.model.layers), model):
        fully_shard_deepseek_v4(module, MESH, BF16)
    assert [unit.module for unit in grouped_units] == [model.model.layers[0], list(model.model.layers), model]
    assert units == []


def test_auto_does_not_count_islands_that_are_not_the_units(
    units: list[Recorded], grouped_units: list[Recorded]
) -> None:
    """Ignored parameters and those of inner units ask for no group."""
    layer = tiny_transformers(["sliding_attention"]).model.layers[0]
    bare = {p for n, p in layer.named_parameters() if p.dtype == torch.float32 and "_hc" not in n}
    fully_shard_deepseek_v4(layer, MESH, BF16, ignored_params=bare)
    assert names_of(units, layer) == ["attn_hc", "ffn_hc", ""]
    root = of_class("DeepseekV4Model", torch.bfloat16, layers=layer)
    fully_shard_deepseek_v4(root, MESH, BF16)
    assert units[-1].module is root
    assert grouped_units == []


def test_nested_units_refuse_islands_that_are_bare_parameters(units: list[Recorded]) -> None:
    """Asked for outright on Transformers' model, they would compute the sinks in bf16 or crash."""
    layer = tiny_transformers(["sliding_attention"]).model.layers[0]
    with pytest.raises(ShardingError, match=r"(?s)self_attn\.sinks.*DeepseekV4DecoderLayer.*grouped"):
        fully_shard_deepseek_v4(layer, MESH, BF16, island_units="nested")
    assert units == []


def test_an_all_fp32_transformers_block_is_one_plain_unit_and_tied(
    units: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No dtype to keep apart; its compressors have no group setter, so the tie aligns them."""
    tied: list[Any] = []
    monkeypatch.setattr(fsdp, "tie_compressors", tied.append)
    layer = tiny_transformers(["heavily_compressed_attention"], dtype=torch.float32).model.layers[0]
    fully_shard_deepseek_v4(layer, MESH, MixedPrecisionPolicy())
    assert names_of(units, layer) == [""]
    assert tied == [layer]
    fully_shard_deepseek_v4(block(torch.float32, compressor=compressor(torch.float32)), MESH, MixedPrecisionPolicy())
    assert tied == [layer]


def test_islands_that_were_cast_to_bf16_are_an_error_in_a_grouped_unit() -> None:
    """``model.bfloat16()`` has destroyed them; the error comes from the engine and names one."""
    layer = tiny_transformers(["sliding_attention"]).model.layers[0].bfloat16()
    with pytest.raises(ContractError, match="sinks"):
        fully_shard_deepseek_v4(layer, None, BF16)  # type: ignore[arg-type]  # no mesh is needed to see it


@pytest.mark.parametrize("module", [block(attn_hc=leaf()), [block(attn_hc=leaf())]])
def test_a_grouped_unit_needs_a_policy(module: Any) -> None:
    """Something that is no policy cannot be divided by dtype: an error that says what to pass."""
    with pytest.raises(ShardingError, match=r"(?s)MixedPrecisionPolicy.*got: None.*DeepseekV4Block"):
        fully_shard_deepseek_v4(module, MESH, None, island_units="grouped")  # type: ignore[arg-type]


def test_an_unknown_kind_of_units_is_an_error(units: list[Recorded]) -> None:
    """Checked before anything is sharded, whatever the module."""
    for module in (block(), [block()], None):
        with pytest.raises(ShardingError, match=r"(?s)'auto' or 'nested' or 'grouped'.*got: 'group'"):
            fully_shard_deepseek_v4(module, MESH, BF16, island_units="group")  # type: ignore[arg-type]
    assert units == []


# ---------------------------------------------------------------------------------------------------- alignment


class FakeMesh:
    """Something with the attributes given, a ``size()`` and a ``get_group()``."""

    def __init__(self, num_ranks: int, **attributes: Any) -> None:
        vars(self).update(attributes)
        self._num_ranks = num_ranks

    def size(self) -> int:
        return self._num_ranks

    def get_group(self) -> str:
        return "group"


def without_size(**attributes: Any) -> Any:
    return SimpleNamespace(get_group=lambda: "group", **attributes)


class SizedGroup:
    def size(self) -> int:
        return 2


SIZED_GROUP = SizedGroup()


@pytest.mark.parametrize(
    ("mesh", "group"),
    [
        pytest.param(None, None, id="no_mesh"),
        pytest.param(FakeMesh(2, ndim=1), "group", id="ndim"),
        pytest.param(FakeMesh(2, shape=(2,)), "group", id="shape"),
        pytest.param(FakeMesh(2, shape=torch.Size([2])), "group", id="torch_size"),
        pytest.param(FakeMesh(2, mesh_dim_names=("dp",)), "group", id="names"),
        pytest.param(FakeMesh(2, ndim=None, shape=None, mesh_dim_names=("dp",)), "group", id="nones_before_names"),
        pytest.param(FakeMesh(2, ndim=1, mesh_dim_names=None), "group", id="unnamed"),
        pytest.param(FakeMesh(1, ndim=1), None, id="one_rank"),
        pytest.param(FakeMesh(0, ndim=1), None, id="no_rank"),
        pytest.param(FakeMesh(4, ndim=2), None, id="two_axes"),
        pytest.param(FakeMesh(4, shape=(2, 2)), None, id="two_axes_by_shape"),
        pytest.param(FakeMesh(4, mesh_dim_names=("a", "b")), None, id="two_axes_by_names"),
        pytest.param(FakeMesh(2, ndim=2, mesh_dim_names=("dp",)), None, id="ndim_before_names"),
        pytest.param(FakeMesh(2, ndim=0), None, id="no_axis"),
        pytest.param(FakeMesh(2), None, id="nothing_to_count_axes_by"),
        pytest.param(FakeMesh(2, ndim="1"), None, id="ndim_no_number"),
        pytest.param(without_size(shape=(2,)), "group", id="size_from_shape"),
        pytest.param(without_size(shape=(1,)), None, id="one_rank_from_shape"),
        pytest.param(without_size(ndim=1), None, id="size_unknown"),
        pytest.param(SimpleNamespace(ndim=1, get_group=lambda: SIZED_GROUP), SIZED_GROUP, id="size_from_group"),
        pytest.param(SimpleNamespace(ndim=1, size=lambda: 2), None, id="no_group"),
        pytest.param(object(), None, id="no_mesh_at_all"),
        pytest.param("mesh", None, id="string"),
        pytest.param(MagicMock(), None, id="mock"),
    ],
)
def test_a_one_axis_mesh_with_several_ranks_gives_its_group(mesh: Any, group: Any) -> None:
    """Whatever it is that looks like a mesh; anything else gives ``None``."""
    assert fsdp._hca_param_sync_group_from_1d_mesh(mesh) == group


def test_the_group_is_attached_to_every_compressor_once() -> None:
    """Every submodule with the setter, also inside wrappers, once each; ``None`` is told too, and replaces a group."""
    module = wrap(block(a=compressor(), deep=leaf(b=wrap(compressor(inner=leaf()))), c=leaf()))
    found = [m for m in module.modules() if hasattr(type(m), "_set_hca_param_sync_group")]
    assert len(found) == 2
    fsdp._attach_hca_param_sync_group(module, FakeMesh(2, ndim=1))
    fsdp._attach_hca_param_sync_group(module, FakeMesh(4, ndim=2))
    fsdp._attach_hca_param_sync_group(module, None)
    assert [m.groups for m in found] == [["group", None, None]] * 2


def test_nested_and_plain_units_attach_the_group(units: list[Recorded]) -> None:
    """Mixed storage, master weights, and all fp32."""
    for dtype, policy in ((torch.bfloat16, BF16), (torch.float32, BF16), (torch.float32, MixedPrecisionPolicy())):
        module = block(dtype, attn_hc=leaf(), compressor=compressor(dtype))
        fully_shard_deepseek_v4(module, FakeMesh(2, ndim=1), policy)
        assert module.compressor.groups == ["group"]


def test_alignment_that_is_off_is_said_once_in_the_log(units: list[Recorded], caplog: pytest.LogCaptureFixture) -> None:
    """Two axes and no owner axis: one message for all blocks; none with an owner axis or without a compressor."""
    mesh: Any = FakeMesh(4, shape=(2, 2), mesh_dim_names=("replicate", "shard"))
    with caplog.at_level(logging.WARNING, logger="dsv4_fsdp"):
        fully_shard_deepseek_v4(block(attn_hc=leaf()), mesh, BF16)
        fully_shard_deepseek_v4(block(compressor=compressor()), FakeMesh(4, ndim=1), BF16)  # type: ignore[arg-type]
        assert caplog.text == ""
        for _ in range(2):
            fully_shard_deepseek_v4(block(compressor=compressor()), mesh, BF16)
    assert caplog.text.count("HCA graph alignment is off") == 1
    assert "hca_owner_axis" in caplog.text


def test_an_owner_axis_has_no_place_in_grouped_units(units: list[Recorded], grouped_units: list[Recorded]) -> None:
    """Asked for together they are an error; where ``auto`` chooses grouped units the axis is checked and not used."""
    mesh: Any = FakeMesh(4, shape=(2, 2), mesh_dim_names=("replicate", "shard"))
    layer = tiny_transformers(["sliding_attention"]).model.layers[0]
    with pytest.raises(ShardingError, match="no effect in grouped units"):
        fully_shard_deepseek_v4(layer, mesh, BF16, island_units="grouped", hca_owner_axis="shard")
    with pytest.raises(ShardingError, match="got: 'dp'"):
        fully_shard_deepseek_v4(layer, mesh, BF16, hca_owner_axis="dp")
    assert grouped_units == []
    fully_shard_deepseek_v4(layer, mesh, BF16, hca_owner_axis="shard")
    assert [unit.module for unit in grouped_units] == [layer]


MESH_2X2 = "where: a mesh of shape (2, 2) with axes ('replicate', 'shard')"
NAME_SHARD = "what to do: name the shard axis; the ranks of the replicate axis are included by themselves."


@pytest.mark.parametrize(
    ("mesh", "axis", "lines"),
    [
        pytest.param(
            FakeMesh(4, shape=(2, 2), mesh_dim_names=("replicate", "shard")),
            "dp",
            ["expected: 'shard'", "got: 'dp'", MESH_2X2, NAME_SHARD],
            id="unknown",
        ),
        pytest.param(
            FakeMesh(4, shape=(2, 2), mesh_dim_names=("replicate", "shard")),
            "replicate",
            ["expected: 'shard'", "got: 'replicate', along which parameters are replicated", MESH_2X2, NAME_SHARD],
            id="replicate",
        ),
        pytest.param(
            FakeMesh(4, shape=(2, 2), mesh_dim_names=None),
            "shard",
            [
                "expected: the name of an axis",
                "got: 'shard'",
                "where: a mesh of shape (2, 2) whose axes have no names",
                "what to do: build the mesh with mesh_dim_names.",
            ],
            id="unnamed",
        ),
    ],
)
def test_an_owner_axis_that_does_not_shard_is_an_error(
    mesh: Any, axis: str, lines: list[str], units: list[Recorded]
) -> None:
    """Not an axis, the replicate axis, or no names at all: the message says which axis it must be."""
    with pytest.raises(ShardingError) as caught:
        fully_shard_deepseek_v4(block(), mesh, BF16, hca_owner_axis=axis)
    title = "hca_owner_axis must name the axis along which parameters are sharded."
    assert str(caught.value).splitlines() == [title, *lines]
    assert units == []


def test_the_owner_axis_of_a_larger_mesh_is_one_of_dp_mesh_dims() -> None:
    """With torch's ``dp_mesh_dims`` the reducing axes are those that it names, in the mesh's order."""
    mesh: Any = FakeMesh(8, shape=(2, 2, 2), mesh_dim_names=("shard", "tp", "replicate"))
    dims = SimpleNamespace(shard="shard", replicate="replicate")
    assert fsdp._reducing_axes(mesh, "shard", dims) == ("shard", "replicate")
    assert fsdp._reducing_axes(mesh, "tp", SimpleNamespace(shard=("shard", "tp"), replicate=None)) == ("shard", "tp")
    for axis in ("tp", "replicate"):
        with pytest.raises(ShardingError, match="expected: 'shard'"):
            fsdp._reducing_axes(mesh, axis, dims)


# ---------------------------------------------------------------------------------------------------- on real ranks


def test_real_nested_units_compute_gather_and_reduce_islands_in_fp32() -> None:
    """NeMo's model in bf16 with fp32 islands: dtypes inside forward, on the wire, and of the gradients."""
    require_nemo()
    for found in run_ranks(2, cases.nested_step, (2,), ["dp"], [140, 140]):
        check_nested(found, storage="bfloat16")
        assert found["groups"] == [[0, 1]]


def test_real_nested_units_keep_islands_fp32_over_master_weights() -> None:
    """The same with everything stored in fp32: outside the islands bf16 is computed and sent."""
    require_nemo()
    for found in run_ranks(2, cases.nested_step, (2,), ["dp"], [140, 140], storage="float32"):
        check_nested(found, storage="float32")


def check_nested(found: dict[str, Any], *, storage: str) -> None:
    islands = found["island_modules"]
    assert islands == [
        "model.layers.0.self_attn.sinks_param",
        "model.layers.0.attn_hc",
        "model.layers.0.ffn_hc",
        "model.layers.1.self_attn.sinks_param",
        "model.layers.1.self_attn.compressor.wkv",
        "model.layers.1.self_attn.compressor.wgate",
        "model.layers.1.self_attn.compressor.ape_param",
        "model.layers.1.attn_hc",
        "model.layers.1.ffn_hc",
        "model.hc_head",
        "lm_head",
    ]
    assert set(islands) < set(found["units"])
    for name, dtype in found["compute"].items():
        is_island = any(name.startswith(f"{island}.") for island in islands)
        assert dtype == ("float32" if is_island else "bfloat16"), name
        assert found["grad"][name] in ("float32" if is_island else storage, None), name
    assert found["wire"]["all_gather"] == {"float32", "bfloat16"}
    assert found["wire"]["reduce_scatter"] == {"float32"}


def test_real_one_axis_alignment_survives_mixed_lengths() -> None:
    """A rank without an HCA window beside one that has one: backward ends, and the compressor has a gradient."""
    require_nemo()
    results = run_ranks(2, cases.nested_step, (2,), ["dp"], [140, 20])
    for found in results:
        assert found["compressor_grad"] == results[0]["compressor_grad"] > 0


def test_real_two_axis_alignment_is_off_without_an_owner_axis() -> None:
    """As documented: no group, so all ranks need windows alike."""
    require_nemo()
    for found in run_ranks(4, cases.nested_step, (2, 2), ["replicate", "shard"], [140] * 4):
        assert found["groups"] == [None]


def test_real_two_axis_alignment_with_an_owner_axis_survives_one_long_rank() -> None:
    """One rank of four has a window: both its shard peer and the other replica must take part.

    A group of the shard axis alone would leave the other replica out of the all-reduce.
    """
    require_nemo()
    lengths = [20, 20, 140, 20]
    results = run_ranks(4, cases.nested_step, (2, 2), ["replicate", "shard"], lengths, owner_axis="shard")
    for found in results:
        assert found["groups"] == [[0, 1, 2, 3]]
        assert found["compressor_grad"] == results[0]["compressor_grad"] > 0


def test_the_owner_group_holds_every_rank_that_reduces_the_parameter() -> None:
    """Whole mesh, a slice of a larger mesh, one axis of a mesh with tensor parallelism, one axis, one rank."""
    for rank, found in enumerate(run_ranks(4, cases.owner_groups)):
        assert found == {
            "replicate_shard": [0, 1, 2, 3],
            "slice": [0, 2] if rank in (0, 2) else [1, 3],
            "dp_of_dp_tp": [0, 2] if rank in (0, 2) else [1, 3],
            "one_axis": [0, 1, 2, 3],
            "one_rank": None,
            "flattened_by_the_caller_is_reused": True,
        }


def test_real_transformers_blocks_follow_the_unsharded_model_with_mixed_lengths() -> None:
    """``auto`` on Transformers' model: grouped units, forward bit-equal, gradients right, short rank included."""
    assert_lockstep(run_ranks(2, cases.transformers_auto, [70, 20]))


def test_real_nemo_blocks_in_grouped_units_follow_the_unsharded_model() -> None:
    """``island_units="grouped"`` on NeMo's model, whole and with its head in the root's unit, on two axes."""
    require_nemo()
    assert_lockstep(run_ranks(4, cases.nemo_grouped, [140, 20, 140, 140]))


def test_real_units_are_made_once() -> None:
    """Lists, repeated calls, wrappers around sharded modules and wrapped islands, with torch's own ``fully_shard``."""
    for found in run_ranks(2, cases.units_are_made_once):
        assert found == {
            "list_is_returned": True,
            "list_shares_one_state": True,
            "second_call_same_module": True,
            "second_call_same_state": True,
            "wrapper_of_sharded_has_no_state": True,
            "sharded_wrapper_keeps_its_state": True,
            "sharded_members_are_left_out": True,
            "none": None,
            "wrapped_island_units": ["", "attn_hc", "norm1"],
            "ignored_is_whole": ["attn_hc.weight", "mlp.weight"],
            "forward_is_finite": True,
        }


def test_real_vision_tower_in_nested_units_follows_the_unsharded_one() -> None:
    """NeMo's self-casting norms as units of their own: bit-equal forward, bf16 between the modules, fp32 inside.

    Both ranks see the same patches and the mean over two equal fp32 gradients is exact, so gradients are bit-equal too.
    """
    require_nemo()
    for found in run_ranks(2, cases.vision_tower):
        assert found == {
            "bit_equal": True,
            "norm_dtypes": {"float32"},
            "units": ["", "blocks.0", "blocks.0.norm1", "blocks.0.norm2", "norm"],
            "grads_equal": True,
        }


def test_real_units_take_the_offload_policy_and_none() -> None:
    """Both reach torch for islands and parent alike, and a step runs with either."""
    for found in run_ranks(2, cases.offload):
        assert found == {"NoneType": ["NoneType"] * 3, "CPUOffloadPolicy": ["CPUOffloadPolicy"] * 3}
