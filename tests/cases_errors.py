"""The mistakes of ``test_error_messages.py``: how each is made and how it is made good; run in ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import tiny_batch, tiny_transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import contract_of, fully_shard, parallelize, torch_private

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYERS = ("sliding_attention", "heavily_compressed_attention")

# --- Models -----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A user's own block: bf16 weights, fp32 parameters, and no list that says what these are."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.sinks = nn.Parameter(torch.rand(8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.float() + self.sinks + self.proj(x.bfloat16()).float())


MIXED_ISLANDS = ["sinks", "norm"]


class TwoMixed(nn.Module):
    """Two blocks whose projections are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixed(), Mixed()
        self.second.proj.weight = self.first.proj.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def tiny() -> nn.Module:
    return tiny_transformers(LAYERS)


def tiny_in_bf16() -> nn.Module:
    return tiny().bfloat16()


def tiny_with_fp32_tied_head() -> nn.Module:
    model = tiny_transformers(LAYERS, tie_word_embeddings=True)
    model.lm_head.float()
    return model


def tiny_with_tied_blocks() -> nn.Module:
    model = tiny()
    first, second = (block.self_attn.q_a_proj for block in model.model.layers)
    second.weight = first.weight
    return model


def untie_blocks(model: nn.Module) -> None:
    projection = model.model.layers[1].self_attn.q_a_proj
    projection.weight = nn.Parameter(projection.weight.detach().clone())


def restore(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns, as it should
        contract_of(model, restore_fp32=True)


def unlisted() -> nn.Module:
    """A Transformers model without a list, whose norms somebody has put into fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.model.norm.float()
    return model


def transposed(model: nn.Module, mesh: DeviceMesh) -> None:
    model.proj.weight.data = model.proj.weight.data.t()


def contiguous(model: nn.Module) -> None:
    model.proj.weight.data = model.proj.weight.data.contiguous()


# --- Calls ------------------------------------------------------------------------------------------------------------

Call = Callable[[nn.Module, DeviceMesh], Any]


def unit(*path: str, **kwargs: Any) -> Call:
    """``fully_shard`` on a submodule, or on the model itself."""

    def call(model: nn.Module, mesh: DeviceMesh) -> None:
        modules = [model.get_submodule(name) for name in path]
        fully_shard(modules if len(modules) > 1 else (modules or [model])[0], mesh=mesh, mp_policy=BF16, **kwargs)

    return call


def whole(**kwargs: Any) -> Call:
    return lambda model, mesh: parallelize(model, mesh, **kwargs)


def both_blocks_as_one_unit(model: nn.Module, mesh: DeviceMesh) -> None:
    unit("first", "second", fp32_params=MIXED_ISLANDS)(model, mesh)
    unit()(model, mesh)


def by_hand_with_a_contract(model: nn.Module, mesh: DeviceMesh) -> None:
    contract = contract_of(model, mp_policy=BF16)
    for name in ("model.layers.0.attn_hc", "model.layers.0", "model.layers.1", ""):
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=BF16, fp32_params=contract)


def with_a_torch_that_has_no_parameter_groups(model: nn.Module, mesh: DeviceMesh) -> None:
    module = torch_private._fully_shard_module()
    original = module._init_param_group
    del module._init_param_group
    try:
        parallelize(model, mesh)
    finally:
        module._init_param_group = original


def one_axis() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def three_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pipeline", "replicate", "shard"))


# --- The mistakes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """After ``before``, ``wrong`` raises on the last rank and changes nothing; after ``mend``, ``right`` works.

    All on one model, but for ``right`` if ``afresh``.
    """

    wrong: Call
    build: Callable[[], nn.Module] = tiny
    before: Call | None = None
    mend: Callable[[nn.Module], Any] | None = None
    right: Call = parallelize
    afresh: bool = False
    mesh: Callable[[], DeviceMesh] = one_axis
    ranks: int = 1


MISTAKES: dict[str, Mistake] = {
    "mixed_dtypes_and_nothing_said": Mistake(build=Mixed, wrong=unit(), right=unit(fp32_params=MIXED_ISLANDS)),
    "mixed_dtypes_and_nothing_said_by_a_model": Mistake(build=unlisted, wrong=whole(), right=whole(fp32_params=[])),
    "part_of_a_block_without_names": Mistake(
        wrong=unit("model.layers.0.attn_hc"),
        right=by_hand_with_a_contract,
    ),
    "empty_list": Mistake(wrong=lambda model, mesh: fully_shard([], mesh=mesh)),
    "parameter_that_is_not_contiguous": Mistake(
        build=Mixed,
        before=transposed,
        wrong=unit(fp32_params=MIXED_ISLANDS),
        mend=contiguous,
        right=unit(fp32_params=MIXED_ISLANDS),
    ),
    "islands_in_bf16": Mistake(build=tiny_in_bf16, wrong=whole(), mend=restore),
    "islands_in_bf16_in_a_unit": Mistake(build=tiny_in_bf16, wrong=unit("model.layers.1.self_attn"), mend=restore),
    "fp32_params_match_nothing_in_a_unit": Mistake(
        build=Mixed, wrong=unit(fp32_params=["sink", "self_attn.norm"]), right=unit(fp32_params=MIXED_ISLANDS)
    ),
    "fp32_params_match_some_names_in_a_unit": Mistake(
        build=Mixed, wrong=unit(fp32_params=["sinks", "nrom"]), right=unit(fp32_params=MIXED_ISLANDS)
    ),
    "fp32_params_match_nothing_in_a_model": Mistake(wrong=whole(fp32_params=["sinks", "layers.*.attn_hcc"])),
    "fp32_params_is_one_string": Mistake(wrong=whole(fp32_params="sinks")),
    "fp32_params_is_a_contract": Mistake(
        wrong=lambda model, mesh: parallelize(model, mesh, fp32_params=contract_of(model))
    ),
    "contract_of_another_model": Mistake(
        wrong=lambda model, mesh: unit("model.layers.0", fp32_params=contract_of(tiny()))(model, mesh)
    ),
    "contract_of_another_policy": Mistake(
        wrong=lambda model, mesh: unit(
            "model.layers.0",
            fp32_params=contract_of(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)),
        )(model, mesh)
    ),
    "tied_parameter_in_two_units": Mistake(
        build=TwoMixed,
        before=unit("first", fp32_params=MIXED_ISLANDS),
        wrong=unit("second", fp32_params=MIXED_ISLANDS),
        right=both_blocks_as_one_unit,
        afresh=True,
    ),
    "tied_parameter_in_two_units_of_a_plan": Mistake(build=tiny_with_tied_blocks, wrong=whole(), mend=untie_blocks),
    "tied_pair_wants_two_dtypes": Mistake(
        build=tiny_with_fp32_tied_head,
        wrong=whole(fp32_params=["lm_head"]),
        right=whole(),  # stored in fp32, computed in bf16
    ),
    "no_blocks_found": Mistake(build=Mixed, wrong=whole(), right=unit(fp32_params=MIXED_ISLANDS)),
    "mesh_of_three_axes": Mistake(
        wrong=whole(), right=lambda model, mesh: parallelize(model, mesh["replicate", "shard"]), mesh=three_axes
    ),
    "mesh_of_two_axes_without_names": Mistake(
        wrong=whole(),
        right=lambda model, mesh: parallelize(model, one_axis()),
        mesh=lambda: init_device_mesh("cpu", (1, 1)),
    ),
    "mesh_without_this_rank": Mistake(
        wrong=whole(),
        right=lambda model, mesh: parallelize(model, one_axis()),
        mesh=lambda: DeviceMesh("cpu", [0]),
        ranks=2,
    ),
    "mesh_without_this_rank_in_a_unit": Mistake(
        build=Mixed,
        wrong=unit(fp32_params=MIXED_ISLANDS),
        right=lambda model, mesh: unit(fp32_params=MIXED_ISLANDS)(model, one_axis()),
        mesh=lambda: DeviceMesh("cpu", [0]),
        ranks=2,
    ),
    "reshard_to_a_number_that_does_not_divide": Mistake(wrong=whole(reshard_after_forward=2)),
    "unknown_island_units": Mistake(wrong=whole(island_units="auto")),
    "nested_units_with_bare_islands": Mistake(wrong=whole(island_units="nested")),
    "unit_inside_a_unit": Mistake(
        build=Mixed,
        before=unit(fp32_params=MIXED_ISLANDS),
        wrong=unit("proj"),
        right=lambda model, mesh: None,
    ),
    "parallelized_twice": Mistake(before=whole(), wrong=whole(), right=lambda model, mesh: None),
    "scalar_parameter": Mistake(
        before=lambda model, mesh: model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0))),
        wrong=whole(),
        mend=lambda model: model._parameters.pop("temperature"),
    ),
    "torch_too_old": Mistake(wrong=with_a_torch_that_has_no_parameter_groups),
}


@dataclass
class Outcome:
    """What the last rank saw of a mistake."""

    error: str
    message: str
    bases: list[str]
    changed: list[str]
    """What of the model is not as it was before the mistake, in words."""


def make(name: str) -> Outcome:
    """Make the mistake, look at what is left of the model, do it right, and train a step."""
    mistake = MISTAKES[name]
    mesh = mistake.mesh()
    model = mistake.build()
    if mistake.before is not None:
        mistake.before(model, mesh)
    state = _state_of(model)
    outcome = Outcome("nothing", "", [], [])
    if dist.get_rank() == mistake.ranks - 1:
        try:
            mistake.wrong(model, mesh)
        except Exception as error:  # noqa: BLE001 - the test compares its type
            outcome = Outcome(type(error).__name__, str(error), [cls.__name__ for cls in type(error).__mro__], [])
        outcome.changed = [what for what, value in _state_of(model).items() if state.get(what) != value]
    if mistake.mend is not None:
        mistake.mend(model)
    if mistake.afresh:
        model = mistake.build()
    mistake.right(model, mesh)
    _train_a_step(model)
    return outcome


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that sharding, tying, freezing or casting would change."""
    state: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        state[f"tensor {name}"] = (id(tensor), type(tensor), tensor.dtype, tensor.requires_grad, tensor._version)
    for name, module in model.named_modules():
        hooks = [list(module._forward_hooks), list(module._forward_pre_hooks), list(module._state_dict_hooks)]
        state[f"module {name}"] = (id(module), type(module), hooks)
    return state


def _train_a_step(model: nn.Module) -> None:
    if isinstance(model, (Mixed, TwoMixed)):
        output = model(torch.rand(2, 8))
    else:
        output = model(input_ids=tiny_batch("transformers", 33).input_ids).logits
    output.float().sum().backward()
    assert any(param.grad is not None for param in model.parameters())
