"""The contract: which tensors must be fp32, who says so, and that nothing else decides it."""

from __future__ import annotations

import copy
import functools
import gc
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import island_buffer_names, island_names, require_nemo, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import Contract, ContractError, contract_of, nemo_layout
from dsv4_fsdp.contract import TensorRule, class_lists

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def _built() -> nn.Module:
    return tiny_transformers()


@pytest.fixture
def model(_built: nn.Module) -> nn.Module:
    """Transformers' tiny DeepSeek-V4 in bf16 with fp32 islands; a copy, so that a test may change it."""
    return copy.deepcopy(_built)


def names_of(rules: tuple[TensorRule, ...], kind: str = "parameter") -> set[str]:
    return {rule.fqn for rule in rules if rule.kind == kind}


def verdicts(contract: Contract) -> dict[str, tuple[Any, ...]]:
    """Everything that the contract says but the reason's text, by name."""
    return {rule.fqn: (rule.kind, rule.storage, rule.compute, rule.reduce, rule.island) for rule in contract}


def rule_named(contract: Contract, fqn: str) -> TensorRule:
    return next(rule for rule in contract if rule.fqn == fqn)


def compiled(module: nn.Module) -> nn.Module:
    """``torch.compile``'s wrapper; the eager back end, because the default one costs a long import."""
    return torch.compile(module, backend="eager")


class Toy(nn.Module):
    """A model that says nothing about itself: two linear layers and an fp32 one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False, dtype=BF16)
        self.sinks = nn.Parameter(torch.rand(4))
        self.sinks_too = nn.Linear(4, 4, bias=False)


# --- Source 1: the model's class --------------------------------------------------------------------------------------


def fp32_after_loading(loaded: nn.Module) -> set[str]:
    """The saved tensors that are fp32 in a model that ``from_pretrained`` returned."""
    saved = loaded.state_dict().keys()
    tensors = [*loaded.named_parameters(), *loaded.named_buffers()]
    return {name for name, tensor in tensors if tensor.dtype == FP32 and name in saved}


def saved_and_loaded(model: nn.Module, folder: Path, dtype: torch.dtype) -> nn.Module:
    if not folder.joinpath("config.json").exists():
        model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# One list (deepseek_v3), one list per class that transformers merges, hyper-connections among them (hy_v4), and bare
# parameters (kimi_linear: `dt_bias`).
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "hy_v4": {},
    "kimi_linear": {},
}


@functools.cache
def small_family(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **FAMILIES[name]), dtype=BF16)


def test_islands_are_what_from_pretrained_keeps_in_fp32(model: nn.Module, tmp_path: Path) -> None:
    """A checkpoint of DeepSeek-V4 loaded by transformers in bf16: its fp32 tensors are exactly the islands."""
    loaded = saved_and_loaded(model, tmp_path, BF16)
    contract = contract_of(loaded)
    kept = fp32_after_loading(loaded)
    assert {rule.fqn for rule in contract.islands} == kept
    assert names_of(contract.islands) == set(island_names(model))
    assert names_of(contract.islands, "buffer") == set(island_buffer_names(model)) != set()


def test_islands_are_what_from_pretrained_keeps_in_fp32_under_fp16(model: nn.Module, tmp_path: Path) -> None:
    """In fp16 transformers keeps a second list in fp32 for its range; that one is storage only, and no island."""
    loaded = saved_and_loaded(model, tmp_path, FP16)
    contract = contract_of(loaded, mp_policy=MixedPrecisionPolicy(FP16, FP32))
    extra = fp32_after_loading(loaded) - {rule.fqn for rule in contract.islands}
    assert {rule.fqn for rule in contract.islands} <= fp32_after_loading(loaded)
    assert extra
    for name in extra:
        assert any(pattern in name for pattern in loaded._keep_in_fp32_modules)
        assert rule_named(contract, name).compute == FP16


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_islands_are_what_from_pretrained_keeps_in_fp32(name: str, tmp_path: Path) -> None:
    """Three other model families, whose lists are written differently."""
    loaded = saved_and_loaded(small_family(name), tmp_path, BF16)
    assert {rule.fqn for rule in contract_of(loaded).islands} == fp32_after_loading(loaded) != set()


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("norm", "q_a_norm.weight", True),  # a search: no boundary on the left ...
        ("norm", "norm_of_all.weight", True),  # ... nor on the right
        ("gate.weight", "mlp.gate.weight", True),
        ("gate.weight", "mlp.shared_gate.weight", True),
        ("gate.weight", "mlp.gate_weight", True),  # the dot is a regular expression's
        ("gate.weight", "mlp.gate.bias", False),
        ("layers.*.hc", "layers.0.hc", True),
        ("layers.*.hc", "layers.0.attn.deep.hc", True),  # the star crosses dots
        ("layers.*.hc", "blocks.0.hc", False),
        ("^norm", "norm.weight", True),
        ("^norm", "layers.0.norm.weight", False),
    ],
)
def test_class_list_matches_as_transformers_loader_does(pattern: str, name: str, matches: bool) -> None:
    """A regular-expression search with ``*`` for any text: asserted of us and of transformers' own matcher."""
    from transformers.core_model_loading import build_glob_alternation

    alternation, *_ = build_glob_alternation([pattern])
    assert bool(alternation.search(name)) is matches

    root = nn.Module()
    root._keep_in_fp32_modules_strict = {pattern}
    *path, leaf = name.split(".")
    parent = root
    for part in path:
        parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.register_parameter(leaf, nn.Parameter(torch.rand(2)))
    assert rule_named(contract_of(root), name).island is matches


def test_reason_names_the_list_and_the_entry(model: nn.Module) -> None:
    """Who said so, in words, for an island and for a weight."""
    contract = contract_of(model)
    assert rule_named(contract, "model.layers.1.self_attn.sinks").reason == "class list 'sinks'"
    assert rule_named(contract, "model.layers.1.self_attn.q_a_proj.weight").reason == "mixed-precision policy"


def test_a_list_of_a_submodel_applies_inside_that_submodel_only(model: nn.Module) -> None:
    """A model held by a plain module, beside a layer whose name its list would match."""
    holder = nn.Module()
    holder.language = model
    holder.norm = nn.Linear(4, 4, dtype=BF16)
    contract = contract_of(holder)
    assert names_of(contract.islands) == {f"language.{name}" for name in island_names(model)}
    assert not rule_named(contract, "norm.weight").island


def test_an_empty_or_missing_list_makes_no_islands() -> None:
    """``None`` and an empty list: what most Transformers classes have."""
    for nothing in (None, [], set()):
        model = Toy()
        model._keep_in_fp32_modules_strict = nothing
        assert class_lists(model) == []
        assert contract_of(model).islands == ()


def in_a_file_of_its_own(**classes: dict[str, Any]) -> types.ModuleType:
    """A module file with ``nn.Module`` classes of the given names and attributes."""
    file = types.ModuleType("a_modeling_file")
    for name, attributes in classes.items():
        setattr(file, name, type(name, (Toy,), {"__module__": file.__name__, **attributes}))
    return file


@pytest.mark.parametrize("nothing", [None, [], set()])
def test_a_model_that_lists_nothing_is_not_given_the_list_of_another(
    nothing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with two models, only one of which has a list: nothing of the other is an island, bf16 or not."""
    file = in_a_file_of_its_own(
        Listed={"_keep_in_fp32_modules_strict": ["first", "sinks"]}, Other={"_keep_in_fp32_modules_strict": nothing}
    )
    monkeypatch.setitem(sys.modules, file.__name__, file)
    assert contract_of(file.Other()).islands == ()
    assert contract_of(nn.Sequential(file.Other())).islands == ()


def test_a_lone_block_is_given_the_list_of_the_model_that_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with two models: ``_no_split_modules`` says whose block it is."""
    file = in_a_file_of_its_own(
        Text={"_keep_in_fp32_modules_strict": ["sinks"], "_no_split_modules": ["TextBlock"]},
        Vision={"_keep_in_fp32_modules_strict": ["sinks_too"], "_no_split_modules": ["VisionBlock"]},
        TextBlock={},
        VisionBlock={},
    )
    monkeypatch.setitem(sys.modules, file.__name__, file)
    assert names_of(contract_of(file.VisionBlock()).islands) == {"sinks_too.weight"}
    # "sinks" is searched for, so it is in the other name too.
    assert names_of(contract_of(file.TextBlock()).islands) == {"sinks", "sinks_too.weight"}


# --- A block by itself ------------------------------------------------------------------------------------------------


def family_or_deepseek_v4(name: str) -> nn.Module:
    return tiny_transformers() if name == "deepseek_v4" else small_family(name)


@pytest.mark.parametrize("name", ["deepseek_v4", *FAMILIES])
def test_a_lone_block_gets_the_verdicts_that_it_gets_in_its_model(name: str) -> None:
    """A block carries no list; the one of the file that defines its class is found."""
    model = family_or_deepseek_v4(name)
    whole = verdicts(contract_of(model))
    for index, block in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        inside = {fqn.removeprefix(prefix): verdict for fqn, verdict in whole.items() if fqn.startswith(prefix)}
        assert verdicts(contract_of(block)) == inside
    assert any(verdict[-1] for verdict in whole.values())


def test_a_lone_block_gets_its_verdicts_through_wrappers(model: nn.Module) -> None:
    """A checkpoint wrapper, ``torch.compile`` and a list-like holder around the block."""
    block = model.model.layers[1]
    expected = verdicts(contract_of(block))
    assert verdicts(contract_of(checkpoint_wrapper(block))) == expected
    assert verdicts(contract_of(compiled(block))) == expected
    assert verdicts(contract_of(nn.Sequential(block))) == {f"0.{fqn}": v for fqn, v in expected.items()}


def test_a_lone_nemo_block_gets_the_verdicts_that_it_gets_in_its_model() -> None:
    """NeMo AutoModel's blocks: found by the layout tables, since the list is in another file."""
    require_nemo()
    model = tiny_nemo()
    whole = verdicts(contract_of(model))
    for index, block in model.model.layers.items():
        prefix = f"model.layers.{index}."
        inside = {fqn.removeprefix(prefix): v for fqn, v in whole.items() if fqn.startswith(prefix)}
        alone = verdicts(contract_of(block))
        assert {fqn: v for fqn, v in alone.items() if v[0] == "parameter"} == {
            fqn: v for fqn, v in inside.items() if v[0] == "parameter"
        }


# --- Source 2: the NeMo AutoModel layout ------------------------------------------------------------------------------


def test_nemo_layout_alone_names_the_islands_that_nemos_class_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables and the class list of nemo-automodel 0.7.0 agree on every parameter of its DeepSeek-V4."""
    require_nemo()
    model = tiny_nemo()
    listed = set(island_names(model))
    assert names_of(contract_of(model).islands) == listed
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", [])
    contract = contract_of(model)
    assert names_of(contract.islands) == listed
    assert rule_named(contract, "model.layers.1.attn_hc.fn").reason == "NeMo layout 'attn_hc'"


def test_nemo_layout_is_read_into_nemo_models_only(model: nn.Module) -> None:
    """Transformers' ``lm_head`` is bf16, though NeMo's table names ``lm_head`` and the classes share names."""
    assert "lm_head" in nemo_layout.FP32_MODULE_SUFFIXES
    assert not rule_named(contract_of(model), "lm_head.weight").island


# --- Source 3: the caller ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "islands"),
    [
        (["sinks"], {"sinks"}),  # not `sinks_too`: names end at dots
        (["sinks_too"], {"sinks_too.weight"}),
        (["sinks_too.weight"], {"sinks_too.weight"}),
        (["*_too.weight", "sinks"], {"sinks_too.weight", "sinks"}),
        (("sinks", "sinks_too"), {"sinks", "sinks_too.weight"}),
        ({"sinks"}, {"sinks"}),
        (iter(["sinks"]), {"sinks"}),
        ([], set()),
        (lambda fqn, tensor: tensor.ndim == 1, {"sinks"}),
        (lambda fqn, tensor: fqn.endswith("too.weight"), {"sinks_too.weight"}),
    ],
    ids=[
        "bare parameter",
        "module",
        "weight",
        "star",
        "tuple",
        "set",
        "iterator",
        "nothing",
        "predicate of the tensor",
        "predicate of the name",
    ],
)
def test_the_caller_names_islands(names: Any, islands: set[str]) -> None:
    """Names at dot boundaries in any collection, one that can be read only once too, or a predicate."""
    assert names_of(contract_of(Toy(), fp32_params=names).islands) == islands


def test_the_callers_islands_join_those_of_the_class(model: nn.Module) -> None:
    """A union: the caller can add islands, and an empty collection takes none away."""
    model.lm_head.float()
    of_class = names_of(contract_of(model).islands)
    assert names_of(contract_of(model, fp32_params=[]).islands) == of_class
    contract = contract_of(model, fp32_params=["lm_head"])
    assert names_of(contract.islands) == of_class | {"lm_head.weight"}
    assert rule_named(contract, "lm_head.weight").reason == "fp32_params 'lm_head'"
    by_predicate = contract_of(model, fp32_params=lambda fqn, tensor: fqn == "lm_head.weight")
    assert verdicts(by_predicate) == verdicts(contract)
    assert rule_named(by_predicate, "lm_head.weight").reason == "fp32_params predicate"


def test_the_caller_may_name_a_buffer(model: nn.Module) -> None:
    """RoPE tables are fp32 as built; naming them makes that a rule."""
    contract = contract_of(model, fp32_params=["rotary_emb"])
    assert "model.rotary_emb.main_inv_freq" in names_of(contract.islands, "buffer")


def test_a_name_that_matches_nothing_is_refused(model: nn.Module) -> None:
    """One misspelt name among good ones is enough for a whole model."""
    with pytest.raises(ContractError, match="sink_s"):
        contract_of(model, fp32_params=["sinks", "sink_s"])


def test_a_contract_in_place_of_names_is_refused(model: nn.Module) -> None:
    """``fully_shard`` takes one; here it would be a collection of rules, which are no names."""
    with pytest.raises(ContractError, match="Contract with a TensorRule in it"):
        contract_of(model, fp32_params=contract_of(model))


def test_one_string_in_place_of_a_collection_is_refused(model: nn.Module) -> None:
    """A string is a collection of letters, which match nothing or, worse, something."""
    with pytest.raises(ContractError, match=re.escape("fp32_params=['sinks']")):
        contract_of(model, fp32_params="sinks")


# --- What makes no island ---------------------------------------------------------------------------------------------


def test_fp32_storage_alone_makes_no_island() -> None:
    """Master weights: everything stored in fp32, only the listed tensors compute in it."""
    model = tiny_transformers(dtype=FP32)
    contract = contract_of(model)
    assert names_of(contract.islands) == set(island_names(model))
    for rule in contract:
        if rule.kind == "parameter" and not rule.island:
            assert (rule.storage, rule.compute, rule.reduce) == (FP32, BF16, FP32)
            assert rule.reason == "float32 master weight"


def test_one_bf16_weight_does_not_change_what_its_neighbours_compute_in() -> None:
    """FAULTS 3: a natively bf16 weight among masters leaves the masters in bf16 compute, and the islands in fp32."""
    masters = tiny_transformers(dtype=FP32)
    expected = verdicts(contract_of(masters))
    weight = masters.model.layers[0].self_attn.q_a_proj.weight
    weight.data = weight.data.to(BF16)
    got = verdicts(contract_of(masters))
    name = "model.layers.0.self_attn.q_a_proj.weight"
    assert got.pop(name) == ("parameter", BF16, BF16, FP32, False)
    expected.pop(name)
    assert got == expected


def with_lora(model: nn.Module, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets), model)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.float()
    return model


def test_lora_adapters_stored_in_fp32_are_no_islands(model: nn.Module) -> None:
    """An fp32 adapter on a bf16 weight is computed as the policy says, and the reason says what it is."""
    contract = contract_of(with_lora(model, ["q_b_proj"]))
    rule = rule_named(contract, "model.layers.0.self_attn.q_b_proj.lora_A.default.weight")
    assert (rule.storage, rule.compute, rule.island) == (FP32, BF16, False)
    assert rule.reason == "float32 adapter"


@pytest.mark.parametrize("source", ["class list", "NeMo layout"])
def test_lora_adapters_inside_an_island_module_are_no_islands(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source names the module; the base weight in it stays an island, the adapter is none unless the caller says
    so."""
    require_nemo()
    model = with_lora(tiny_nemo(), ["wgate", "wq_b"])
    if source == "NeMo layout":
        monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", [])
    contract = contract_of(model)
    module = "model.layers.1.self_attn.compressor.wgate"
    assert rule_named(contract, f"{module}.weight").island
    assert rule_named(contract, f"{module}.weight").reason.startswith(source)
    assert not rule_named(contract, f"{module}.lora_A.default.weight").island
    by_caller = contract_of(model, fp32_params=["lora_A", "lora_B"])
    assert rule_named(by_caller, f"{module}.lora_A.default.weight").island


def test_integer_parameters_are_never_cast_nor_reduced(model: nn.Module) -> None:
    """A table of token ids that is a parameter, even where a name of the list matches it."""
    model.model.layers[0].sinks_table = nn.Parameter(torch.arange(4), requires_grad=False)
    rule = rule_named(contract_of(model), "model.layers.0.sinks_table")
    assert (rule.storage, rule.compute, rule.reduce, rule.island) == (torch.int64, torch.int64, None, False)


# --- An island whose bits are lost ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_island_below_fp32_is_an_error_that_names_it(model: nn.Module, dtype: torch.dtype) -> None:
    """FAULTS 4: a parameter in bf16 or fp16 is refused, by name, dtype and reason; nothing is changed."""
    sinks = model.model.layers[1].self_attn.sinks
    sinks.data = sinks.data.to(dtype)
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    with pytest.raises(ContractError) as error:
        contract_of(model)
    assert "model.layers.1.self_attn.sinks (parameter, " + str(dtype).removeprefix("torch.") in str(error.value)
    assert "class list 'sinks'" in str(error.value)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before


def test_an_island_buffer_below_fp32_is_an_error_that_names_it(model: nn.Module) -> None:
    """The router bias decides which experts run; it has no gradient, but it has bits to lose."""
    gate = model.model.layers[2].mlp.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias.to(BF16)
    with pytest.raises(ContractError, match=r"layers\.2\.mlp\.gate\.e_score_correction_bias \(buffer, bfloat16"):
        contract_of(model)


def test_a_whole_model_cast_to_bf16_is_an_error_that_counts_all_its_islands() -> None:
    """``model.to(bfloat16)``, the usual accident: as many tensors are counted as the class lists."""
    model = tiny_transformers()
    count = len(island_names(model)) + len(island_buffer_names(model))
    with pytest.raises(ContractError, match=rf"^{count} tensors that must be fp32 are"):
        contract_of(model.to(BF16))


def test_restore_fp32_upcasts_in_place_and_says_so_in_words() -> None:
    """The registered tensors are fp32 afterwards, hold the bf16 values, and the warning names them."""
    model = tiny_transformers().to(BF16)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    identity = {name: id(param) for name, param in model.named_parameters()}
    with pytest.warns(UserWarning, match="do not come back") as caught:
        contract = contract_of(model, restore_fp32=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning must point at the caller's line"
    assert "model.layers.0.self_attn.sinks" in str(caught[0].message)

    islands = {rule.fqn for rule in contract.islands}
    assert islands == {*island_names(model), *island_buffer_names(model)}
    assert {name: id(param) for name, param in model.named_parameters()} == identity
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (FP32 if name in islands else before[name].dtype)
        assert torch.equal(tensor, before[name].to(tensor.dtype))
    for rule in contract.islands:
        assert (rule.storage, rule.compute) == (FP32, FP32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdicts(contract_of(model)) == verdicts(contract), "a second look must find nothing left to do"


def test_restore_fp32_without_need_says_nothing(model: nn.Module) -> None:
    """Intact islands: no warning (warnings are errors here), and the same contract."""
    assert verdicts(contract_of(model, restore_fp32=True)) == verdicts(contract_of(model))


# --- Buffers ----------------------------------------------------------------------------------------------------------


def test_buffers_keep_their_dtype_and_integer_buffers_are_not_touched(model: nn.Module) -> None:
    """No rule changes a buffer: RoPE tables stay as built, and integer tables (``tid2eid``) are no business of ours."""
    tables = {name: b.clone() for name, b in model.named_buffers() if not b.is_floating_point()}
    assert tables
    contract = contract_of(model)
    buffers = {rule.fqn: rule for rule in contract if rule.kind == "buffer"}
    assert buffers.keys() == {name for name, b in model.named_buffers() if b.is_floating_point()}
    for rule in buffers.values():
        assert rule.storage == rule.compute
        assert rule.reduce is None
    model.to(BF16)
    with pytest.warns(UserWarning, match="restore_fp32"):
        contract_of(model, restore_fp32=True)
    for name, table in tables.items():
        assert torch.equal(model.get_buffer(name), table)
        assert model.get_buffer(name).dtype == table.dtype


# --- Tied parameters --------------------------------------------------------------------------------------------------


def test_a_tied_parameter_has_one_rule_under_its_first_name() -> None:
    """As ``named_parameters`` counts it."""
    model = tiny_transformers(tie_word_embeddings=True)
    contract = contract_of(model)
    assert [rule.fqn for rule in contract if rule.kind == "parameter"] == [name for name, _ in model.named_parameters()]
    assert contract.rule_of(model.lm_head.weight) is rule_named(contract, "model.embed_tokens.weight")


def test_a_tied_pair_that_wants_two_dtypes_is_refused_and_may_be_named_whole() -> None:
    """FAULTS 13: an fp32 head tied to a bf16 embedding. Naming both is the way out."""
    model = tiny_transformers(tie_word_embeddings=True)
    model.lm_head.float()
    with pytest.raises(ContractError, match=r"lm_head\.weight must be fp32.*model\.embed_tokens\.weight need not"):
        contract_of(model, fp32_params=["lm_head"])
    contract = contract_of(model, fp32_params=["lm_head", "embed_tokens"])
    assert rule_named(contract, "model.embed_tokens.weight").island


# --- Policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "weight", "master"),
    [
        (None, (BF16, FP32), (BF16, FP32)),
        (MixedPrecisionPolicy(BF16, FP32), (BF16, FP32), (BF16, FP32)),
        (MixedPrecisionPolicy(BF16, BF16), (BF16, BF16), (BF16, BF16)),
        (MixedPrecisionPolicy(FP16, FP32), (FP16, FP32), (FP16, FP32)),
        (MixedPrecisionPolicy(FP32, FP32), (FP32, FP32), (FP32, FP32)),
        (MixedPrecisionPolicy(None, FP32), (BF16, FP32), (FP32, FP32)),  # no param_dtype: computed as stored
        (MixedPrecisionPolicy(), (BF16, BF16), (FP32, FP32)),
    ],
)
def test_the_policy_decides_what_is_no_island(policy: Any, weight: tuple[Any, ...], master: tuple[Any, ...]) -> None:
    """A bf16 weight and an fp32 master weight under each policy; islands are fp32 under all of them."""
    model = tiny_transformers()
    model.lm_head.float()
    contract = contract_of(model, mp_policy=policy)
    bf16_rule = rule_named(contract, "model.layers.0.self_attn.q_a_proj.weight")
    assert (bf16_rule.storage, bf16_rule.compute, bf16_rule.reduce) == (BF16, *weight)
    fp32_rule = rule_named(contract, "lm_head.weight")
    assert (fp32_rule.storage, fp32_rule.compute, fp32_rule.reduce) == (FP32, *master)
    for rule in contract.islands:
        assert (rule.storage, rule.compute) == (FP32, FP32)
        assert rule.reduce == (FP32 if rule.kind == "parameter" else None)


# --- Wrappers ---------------------------------------------------------------------------------------------------------


def in_checkpoint_wrappers(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(block)
    model.model.norm = checkpoint_wrapper(model.model.norm)
    return model


def in_peft(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers 5.24 for `is_gradient_checkpointing`
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_b_proj"]), autocast_adapter_dtype=False)


@pytest.mark.parametrize("wrap", [in_checkpoint_wrappers, checkpoint_wrapper, compiled, in_peft])
def test_wrappers_do_not_change_names_or_verdicts(wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> None:
    """``_checkpoint_wrapped_module``, ``_orig_mod``, ``base_model.model.`` and ``base_layer`` are no part of a name."""
    expected = verdicts(contract_of(model))
    got = verdicts(contract_of(wrap(model)))
    assert {fqn: verdict for fqn, verdict in got.items() if "lora_" not in fqn} == expected


# --- The object -------------------------------------------------------------------------------------------------------


def test_contract_follows_named_parameters_order_and_finds_rules_by_tensor(model: nn.Module) -> None:
    """One rule for each parameter and floating buffer, in order, and ``rule_of`` goes by identity."""
    contract = contract_of(model)
    floating = [name for name, b in model.named_buffers() if b.is_floating_point()]
    assert [rule.fqn for rule in contract] == [*(name for name, _ in model.named_parameters()), *floating]
    for name, param in model.named_parameters():
        rule = contract.rule_of(param)
        assert rule is not None
        assert rule.fqn == name
    assert contract.rule_of(nn.Parameter(torch.rand(2))) is None


def test_contract_keeps_no_parameter_alive() -> None:
    """The model can be freed while its contract lives on; the rules stay readable."""
    model = tiny_transformers(["sliding_attention"])
    contract = contract_of(model)
    alive = [weakref.ref(tensor) for tensor in tensors_of(model)]
    num_rules = len(contract.rules)
    del model
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
    assert len(list(contract)) == num_rules


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def test_making_a_contract_changes_nothing(model: nn.Module) -> None:
    """Pure: same parameter objects, same dtypes and values, same ``requires_grad``, no hook, no new attribute."""
    before = {name: (id(p), p.dtype, p.requires_grad, p._version) for name, p in model.named_parameters()}
    attributes = {name: set(vars(p)) for name, p in model.named_parameters()}
    contract_of(model)
    assert {name: (id(p), p.dtype, p.requires_grad, p._version) for name, p in model.named_parameters()} == before
    assert {name: set(vars(p)) for name, p in model.named_parameters()} == attributes


def test_a_meta_model_has_the_contract_of_a_real_one(model: nn.Module) -> None:
    """No tensor is read."""
    assert contract_of(copy.deepcopy(model).to("meta")).rules == contract_of(model).rules
