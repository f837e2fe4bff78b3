"""The plan: pure and the same everywhere, and what it says of bytes and collectives is what torch then does."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_plan import LINES, Live, apply_and_step, frozen_up_to, tiny_llama
from tiny_models import require_nemo, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import ContractError, ShardingError, ShardingPlan, contract_of, plan_sharding
from dsv4_fsdp.plan import GroupPlan, even_dim
from pool import run_ranks


@pytest.fixture(scope="module")
def _built() -> nn.Module:
    return tiny_transformers()


@pytest.fixture
def model(_built: nn.Module) -> nn.Module:
    """Transformers' tiny DeepSeek-V4; a copy, so that a test may change it."""
    return copy.deepcopy(_built)


def groups_of(plan: ShardingPlan) -> list[GroupPlan]:
    return [group for unit in plan.units for group in unit.groups]


def units_of(plan: ShardingPlan) -> list[tuple[str, str]]:
    return [(unit.role, unit.fqn) for unit in plan.units]


# --- Pure -------------------------------------------------------------------------------------------------------------


def test_planning_changes_nothing_and_needs_no_process_group(model: nn.Module) -> None:
    """Same parameter objects, values, dtypes and ``requires_grad``; no hook, no class, no attribute is added."""

    def state() -> list[Any]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return [
            [(n, id(t), t.dtype, t.requires_grad, t._version, sorted(vars(t))) for n, t in tensors],
            [(n, type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
            torch.get_rng_state().tolist(),
        ]

    before = state()
    plan_sharding(model, mesh_shape=(2, 64), activation_checkpointing=True)
    assert state() == before
    assert not dist.is_initialized()


def test_plan_is_equal_for_meta_and_real_models(model: nn.Module) -> None:
    """No tensor is read, so planning needs no memory for the weights."""
    real = plan_sharding(model, mesh_shape=(4,))
    assert plan_sharding(copy.deepcopy(model).to("meta"), mesh_shape=(4,)) == real


@pytest.mark.parametrize("build", [tiny_transformers, tiny_llama], ids=["deepseek_v4", "llama"])
def test_plan_holds_each_parameter_once_and_the_units_in_order(build: Callable[[], nn.Module]) -> None:
    """Embedding, blocks, head, root; every parameter in the unit of the module that holds it."""
    model = build()
    plan = plan_sharding(model, mesh_shape=(2,))
    blocks = [("block", f"model.layers.{i}") for i in range(len(model.model.layers))]
    expected = [("embedding", "model.embed_tokens"), *blocks, ("head", "lm_head"), ("root", "")]
    assert units_of(plan) == expected
    names = [param.fqn for group in groups_of(plan) for param in group.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for unit in plan.units:
        assert all(param.fqn.startswith(unit.fqn) for group in unit.groups for param in group.params)


def test_plan_says_what_the_contract_says(model: nn.Module) -> None:
    """Dtypes, island or not and the reason, and the unsharded shape, of each parameter."""
    rules = {rule.fqn: rule for rule in contract_of(model)}
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for group in groups_of(plan_sharding(model, mesh_shape=(2,))):
        for param in group.params:
            rule = rules[param.fqn]
            assert (f"torch.{group.storage}", f"torch.{param.compute}", f"torch.{group.reduce}") == tuple(
                map(str, rule.group_key)
            )
            assert (param.island, param.reason, param.shape) == (rule.island, rule.reason, shapes[param.fqn])


def test_tied_embeddings_belong_to_the_root(model: nn.Module) -> None:
    """Embedding and head have no unit of their own then: one parameter, one unit."""
    plan = plan_sharding(tiny_transformers(tie_word_embeddings=True), mesh_shape=(2,))
    assert {role for role, _ in units_of(plan)} == {"block", "root"}
    assert "model.embed_tokens.weight" in {p.fqn for group in plan.units[-1].groups for p in group.params}


def test_wrapped_models_have_the_plan_of_the_bare_one(model: nn.Module) -> None:
    """Checkpoint-wrapped blocks and ``torch.compile``: the same units, names and bytes."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare = plan_sharding(model, mesh_shape=(2,))
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(block)
    assert plan_sharding(model, mesh_shape=(2,)) == bare
    assert plan_sharding(torch.compile(model, backend="eager"), mesh_shape=(2,)) == bare


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_of_one_dtype_gets_one_group_per_unit(dtype: torch.dtype) -> None:
    """All bf16 or all fp32 without a list: not one collective more than with stock ``fully_shard``."""
    plan = plan_sharding(tiny_llama(dtype), mesh_shape=(2,))
    assert [len(unit.groups) for unit in plan.units] == [1] * len(plan.units)
    assert not any(param.island for group in groups_of(plan) for param in group.params)


def test_all_fp32_compute_gets_one_group_per_unit() -> None:
    """DeepSeek-V4 stored in fp32 under a policy that keeps it there: islands and weights share their group."""
    plan = plan_sharding(tiny_transformers(dtype=torch.float32), mesh_shape=(2,), mp_policy=MixedPrecisionPolicy())
    assert [len(unit.groups) for unit in plan.units] == [1] * len(plan.units)


def test_a_plan_from_a_contract_is_the_plan_without_one(model: nn.Module) -> None:
    """Handing the contract in saves making it twice, nothing else."""
    assert plan_sharding(model, mesh_shape=(2,), contract=contract_of(model)) == plan_sharding(model, mesh_shape=(2,))


def test_a_plan_refuses_a_contract_of_another_model_or_names_beside_one(model: nn.Module) -> None:
    """Both would otherwise be a guess."""
    with pytest.raises(ContractError, match=r"embed_tokens\.weight"):
        plan_sharding(model, mesh_shape=(2,), contract=contract_of(tiny_transformers()))
    with pytest.raises(ContractError, match="both given"):
        plan_sharding(model, mesh_shape=(2,), contract=contract_of(model), fp32_params=["lm_head"])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mesh_shape": ()}, r"got: shape \(\)"),
        ({"mesh_shape": (2, 2, 2)}, r"got: shape \(2, 2, 2\)"),
        ({"mesh_shape": (2, 0)}, r"got: shape \(2, 0\)"),
        ({"mesh_shape": (4,), "reshard_after_forward": 3}, "got: 3"),
        ({"mesh_shape": (4,), "reshard_after_forward": 8}, "got: 8"),
        ({"mesh_shape": (8, 4), "reshard_after_forward": 0}, "size 4\ngot: 0"),
        ({"mesh_shape": (4,), "island_units": "auto"}, "got: 'auto'"),
    ],
)
def test_impossible_arguments_are_refused(kwargs: dict[str, Any], message: str, model: nn.Module) -> None:
    """Mesh shapes, group sizes and modes that nothing could be built from, before anything is built."""
    with pytest.raises(ShardingError, match=message):
        plan_sharding(model, **kwargs)


def test_a_scalar_parameter_is_refused_by_name(model: nn.Module) -> None:
    """There is nothing to shard."""
    model.model.layers[0].temperature = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    with pytest.raises(ShardingError, match=r"model\.layers\.0\.temperature"):
        plan_sharding(model, mesh_shape=(2,))


# --- Hash, table, JSON ------------------------------------------------------------------------------------------------


def test_hash_is_the_same_in_another_process(model: nn.Module) -> None:
    """The workers' interpreter has another hash seed, so its sets (class lists are sets) are ordered differently."""
    seen = live("plain", (2,))[0]
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        assert seen.hash_of_a_word != hash("word")
    assert seen.plan.hash == plan_sharding(model, mesh_shape=(2,)).hash


def test_hash_tells_every_input(model: nn.Module) -> None:
    """Mesh, policy, reshard, checkpointing, an island more, the indexer, a frozen or wider parameter: all different."""
    plan = functools.partial(plan_sharding, model)
    usual = {"mesh_shape": (4,)}
    variants: dict[str, dict[str, Any]] = {
        "usual": {},
        "mesh": {"mesh_shape": (8,)},
        "axes": {"mesh_shape": (1, 4)},
        "axes swapped": {"mesh_shape": (4, 1)},
        "compute": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float32)},
        "reduce": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
        "islands in the root": {"island_units": "root"},
        "reshard": {"reshard_after_forward": False},
        "reshard to two": {"reshard_after_forward": 2},
        "checkpointing": {"activation_checkpointing": True},
        "indexer": {"freeze_indexer": False},
    }
    hashes = {what: plan(**(usual | kwargs)).hash for what, kwargs in variants.items()}
    model.lm_head.weight.requires_grad_(False)
    hashes["frozen"] = plan(**usual).hash
    model.lm_head.requires_grad_(True).float()
    hashes["master"] = plan(**usual).hash
    hashes["island"] = plan(**usual, fp32_params=["lm_head"]).hash
    hashes["layers"] = plan_sharding(tiny_transformers(["sliding_attention"] * 4), **usual).hash
    assert len(set(hashes.values())) == len(hashes), hashes


def test_json_holds_the_whole_plan(model: nn.Module) -> None:
    """It loads, and has every unit, group and parameter in it."""
    plan = plan_sharding(model, mesh_shape=(2, 2))
    loaded = json.loads(plan.to_json())
    assert loaded["mesh_shape"] == [2, 2]
    assert [unit["fqn"] for unit in loaded["units"]] == [unit.fqn for unit in plan.units]
    names = [p["fqn"] for unit in loaded["units"] for group in unit["groups"] for p in group["params"]]
    assert names == [param.fqn for group in groups_of(plan) for param in group.params]


@pytest.mark.parametrize("full_size", [False, True])
def test_table_stays_within_100_columns_and_adds_up(full_size: bool, model: nn.Module) -> None:
    """For the tiny model and for DeepSeek-V4 at its default size; equal units share a line."""
    if full_size:
        model = full_size_model()
    plan = plan_sharding(model, mesh_shape=(2, 64) if full_size else (2,))
    lines = plan.table().splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 40
    shards = sum(group.shard_bytes for group in groups_of(plan))
    assert f"parameters per rank: {shards / 2**20:.2f} MiB" in lines
    assert f"{len(plan.units)} units" in plan.table()
    assert plan.hash[:16] in lines[-1]


def full_size_model() -> nn.Module:
    """DeepSeek-V4 as Transformers' default config has it, on the meta device."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    with torch.device("meta"):
        return DeepseekV4ForCausalLM._from_config(DeepseekV4Config(), dtype=torch.bfloat16)


def test_bytes_of_a_group_are_counted_with_padding() -> None:
    """By hand: a (5, 3) bf16 weight on 4 ranks has 2 rows on each, 16 bytes short of 4 * 12 in use."""
    model = tiny_llama()
    model.model.layers[0].odd = nn.Parameter(torch.rand(5, 3, dtype=torch.bfloat16))
    without = plan_sharding(tiny_llama(), mesh_shape=(4,)).units[1].groups[0]
    odd = plan_sharding(model, mesh_shape=(4,)).units[1].groups[0]
    assert odd.shard_bytes - without.shard_bytes == 2 * 3 * 2
    assert odd.all_gather_bytes - without.all_gather_bytes == 4 * 2 * 3 * 2
    assert odd.reduce_scatter_bytes - without.reduce_scatter_bytes == 4 * 2 * 3 * 4  # reduced in fp32
    assert odd.numel - without.numel == 15


@pytest.mark.parametrize(
    ("shape", "num_ranks", "dim"),
    [
        ((48, 6144, 7168), 128, 1),  # Pro's experts, dealt to 8 ranks, on 1,024: 128 rows for 48
        ((24, 28672), 1024, 1),
        ((384, 6144, 7168), 256, 0),  # padded by a third, less than a copy
        ((256, 4096), 256, 0),
        ((4, 6, 8), 8, 2),
        ((24,), 128, 0),
        ((7, 5), 16, 0),  # nothing divides
        ((1, 4), 1, 0),
    ],
)
def test_a_tensor_is_cut_where_padding_costs_least(shape: tuple[int, ...], num_ranks: int, dim: int) -> None:
    """Along dim 0, unless padding it would be more than half of the tensor and another dim divides evenly."""
    assert even_dim(shape, num_ranks) == dim


def test_where_torch_gathers_along_dim_0_alone_nothing_else_is_cut() -> None:
    """What a number of ranks share after forward; and nested units, which are NeMo AutoModel's."""
    model = tiny_transformers(n_routed_experts=5)
    dims = {}
    for reshard in (True, False, 2):
        plan = plan_sharding(model, mesh_shape=(4,), reshard_after_forward=reshard)
        dims[reshard] = {param.shard_dim for group in groups_of(plan) for param in group.params}
    assert dims == {True: {0, 1}, False: {0, 1}, 2: {0}}


def test_micro_batches_multiply_the_collectives(model: nn.Module) -> None:
    """Each gathers and reduces."""
    plan = plan_sharding(model, mesh_shape=(2, 2))
    once = plan.collectives_per_step()
    assert plan.collectives_per_step(micro_batches=3) == {kind: 3 * count for kind, count in once.items()}


def test_frozen_blocks_before_the_first_trainable_one_are_not_gathered_in_backward() -> None:
    """All but the last of them, which its successor prefetches."""
    for num_frozen, expected in {0: [True] * 4, 1: [True] * 4, 3: [False, False, True, True]}.items():
        plan = plan_sharding(frozen_up_to(num_frozen, tiny_transformers()), mesh_shape=(2,))
        assert [unit.gathers_in_backward for unit in plan.units if unit.role == "block"] == expected


# --- What torch then does ---------------------------------------------------------------------------------------------

CASES = [
    *[(name, (2,)) for name in LINES if name != "reshard_to_two"],
    *[("plain", mesh) for mesh in [(1,), (3,), (4,), (2, 2), (1, 2), (2, 1)]],
    ("reshard_to_two", (4,)),
    ("three_blocks_frozen", (2, 2)),
    ("nemo_grouped", (2, 2)),
    ("root_plain", (2, 2)),
    ("five_experts", (4,)),
    ("five_experts", (1, 4)),
    ("root_plain", (1,)),
]


@functools.cache
def live(line: str, mesh: tuple[int, ...]) -> list[Live]:
    return run_ranks(math.prod(mesh), apply_and_step, line, mesh)


@pytest.mark.parametrize(("line", "mesh"), CASES, ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)))
class TestLive:
    """Each way of calling ``parallelize``, on real ranks; one run for all tests of a way."""

    def test_every_group_holds_the_planned_bytes(self, line: str, mesh: tuple[int, ...]) -> None:
        """Per unit and group: the padded shards that FSDP2 allocated, on each rank."""
        _skip_without_nemo(line)
        for seen in live(line, mesh):
            planned = {u.fqn: [g.shard_bytes for g in u.groups] for u in seen.plan.units if u.groups}
            assert seen.shard_bytes == planned

    def test_a_step_sends_the_planned_collectives(self, line: str, mesh: tuple[int, ...]) -> None:
        """Their number, by kind, as recorded in one forward and backward; NeMo's own alignment aside."""
        _skip_without_nemo(line)
        for seen in live(line, mesh):
            sent = Counter(c.kind for c in parameter_collectives(seen))
            expected = seen.plan.collectives_per_step()
            assert sent == Counter(expected)  # a Counter: kinds with none are equal to kinds left out

    def test_a_step_sends_the_planned_bytes(self, line: str, mesh: tuple[int, ...]) -> None:
        """Each collective's size: all-gathers by their output, reductions by their input."""
        _skip_without_nemo(line)
        for seen in live(line, mesh):
            sent: dict[str, Counter[int]] = {
                "all_gather": Counter(),
                "reduce_scatter": Counter(),
                "all_reduce": Counter(),
            }
            for c in parameter_collectives(seen):
                whole = c.group_size if c.kind == "all_gather" else 1
                sent[c.kind][c.numel * c.dtype.itemsize * whole] += 1
            assert sent == planned_bytes(seen.plan)

    def test_all_ranks_have_one_plan_and_send_alike(self, line: str, mesh: tuple[int, ...]) -> None:
        """The hash, and the sequence of collectives with their sizes."""
        _skip_without_nemo(line)
        first, *others = live(line, mesh)
        for other in others:
            assert other.plan.hash == first.plan.hash
            assert other.collectives == first.collectives


def _skip_without_nemo(line: str) -> None:
    if "nemo" in line:
        require_nemo()


def parameter_collectives(seen: Live) -> list[Any]:
    """The collectives for parameters and gradients: NeMo's HCA alignment all-reduces one number."""
    return [c for c in seen.collectives if not (c.kind == "all_reduce" and c.numel == 1)]


def planned_bytes(plan: ShardingPlan) -> dict[str, Counter[int]]:
    planned: dict[str, Counter[int]] = {kind: Counter() for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    shard = plan.mesh_shape[-1]
    for unit in plan.units:
        for group in unit.groups:
            if shard > 1:
                planned["all_gather"][group.all_gather_bytes] += 1 + unit.gathers_in_backward
            if group.reduce_scatter_bytes and shard > 1:
                planned["reduce_scatter"][group.reduce_scatter_bytes] += 1
            if group.reduce_scatter_bytes and len(plan.mesh_shape) == 2:
                # What a rank has left after the reduce-scatter is what it adds up with its replicas.
                planned["all_reduce"][group.reduce_scatter_bytes // shard] += 1
    return planned


def test_nested_units_are_refused_where_islands_are_bare_parameters(model: nn.Module) -> None:
    """Transformers' sinks and position biases are in no module of their own."""
    with pytest.raises(ShardingError, match=r"self_attn\.sinks"):
        plan_sharding(model, mesh_shape=(2,), island_units="nested")


def test_nested_plan_has_a_unit_per_island_module() -> None:
    """In front of its block, alone in fp32; holders stay gathered because they hand out the parameter itself."""
    require_nemo()
    plan = plan_sharding(tiny_nemo(), mesh_shape=(2,), island_units="nested")
    islands = [unit for unit in plan.units if unit.role == "island"]
    assert "model.layers.1.self_attn.compressor.wkv" in {unit.fqn for unit in islands}
    for unit in islands:
        assert [group.computes for group in unit.groups] == [("float32",)]
        assert (unit.reshard_after_forward is False) == unit.fqn.endswith("_param")
    for unit in plan.units:
        if unit.role == "block":
            assert [group.computes for group in unit.groups] == [("bfloat16",)]
