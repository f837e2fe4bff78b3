"""Live precision: what is read back from a live model is what it really does, and a wrong unit is named."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from cases_live_precision import (
    BF16,
    LAYERS,
    Seen,
    full_size_table,
    planned,
    stock,
    with_an_island_of_the_callers,
    with_fault,
)
from tiny_models import island_buffer_names, island_names, tiny_transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import plan_sharding, precision_table, read_back
from dsv4_fsdp.live_precision import LiveTensor, differences
from pool import run_ranks

AS_STORED = MixedPrecisionPolicy()


@functools.cache
def seen_under(policy: MixedPrecisionPolicy) -> list[Seen]:
    return run_ranks(2, stock, policy)


def parameters(rows: list[LiveTensor]) -> dict[str, LiveTensor]:
    return {row.fqn: row for row in rows if row.kind == "parameter"}


# --- What is read back is what is there -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BF16, AS_STORED], ids=["accelerate", "plain"])
def test_compute_dtype_is_the_one_inside_forward(policy: MixedPrecisionPolicy) -> None:
    """Models sharded by torch's own function: each parameter's dtype as its module's forward sees it."""
    for seen in seen_under(policy):
        assert {fqn: row.compute for fqn, row in parameters(seen.rows).items()} == seen.in_forward


def test_an_island_that_silently_computes_in_bf16_is_seen() -> None:
    """accelerate's way, fp32 storage under a bf16 policy: the rows say island, and compute in bf16."""
    for seen in seen_under(BF16):
        islands = [row for row in seen.rows if row.island and row.kind == "parameter"]
        assert {row.fqn for row in islands} == set(island_names(tiny_transformers(LAYERS)))
        assert {(row.storage, row.compute, row.reduce) for row in islands} == {
            (torch.float32, torch.bfloat16, torch.float32)
        }
        assert re.search(
            r"^\S*attn_hc\.fn +2  fp32    bf16    fp32    island: class list$", precision_table(seen.rows), re.M
        )


def test_a_model_without_a_policy_computes_as_stored() -> None:
    """Plain ``fully_shard``: fp32 throughout."""
    for seen in seen_under(AS_STORED):
        for row in parameters(seen.rows).values():
            assert (row.storage, row.compute, row.reduce) == (torch.float32,) * 3


def test_units_groups_and_placements_are_read_back() -> None:
    """Stock units hold one group each; parameters outside the blocks are the root's."""
    for seen in seen_under(BF16):
        for fqn, row in parameters(seen.rows).items():
            block = re.match(r"model\.layers\.\d+", fqn)
            assert (row.unit, row.group) == (block[0] if block else "", 0)
            assert row.placements == "(Shard(dim=0),)"


def test_rows_come_in_named_parameters_order_with_floating_buffers_after() -> None:
    """Integer tables are left out."""
    model = tiny_transformers(LAYERS)
    floating = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    rows = read_back(model)
    assert [row.fqn for row in rows] == [*(name for name, _ in model.named_parameters()), *floating]
    assert [row.fqn for row in rows if row.kind == "buffer" and row.island] == island_buffer_names(model)


def test_a_model_that_is_not_sharded_reads_as_stored() -> None:
    """No unit, no group, no placement, no reduction: nothing is made up."""
    for row in read_back(tiny_transformers(LAYERS)):
        assert (row.unit, row.group, row.placements, row.reduce) == (None, None, "", None)
        assert row.compute == row.storage
        if row.kind == "parameter" and not row.island:
            assert row.reason == "in no unit"


def test_a_planned_model_reads_back_as_planned_before_and_after_a_step() -> None:
    """Grouped units: two groups in a block; islands compute in fp32 in forward, the rest in bf16."""
    for seen in run_ranks(2, planned):
        assert seen.differences == []
        rows = parameters(seen.rows)
        assert {fqn: row.compute for fqn, row in rows.items()} == seen.in_forward
        assert {fqn for fqn, row in rows.items() if row.compute == torch.float32} == set(
            island_names(tiny_transformers(LAYERS))
        )
        assert {row.group for row in rows.values() if row.unit == "model.layers.1"} == {0, 1}


def test_the_plans_reasons_are_taken_over() -> None:
    """An island that only the caller knows about is one in the rows, with the caller's reason."""
    [seen] = run_ranks(1, with_an_island_of_the_callers)
    row = parameters(seen.rows)["lm_head.weight"]
    assert row.island
    assert row.reason == "fp32_params 'lm_head'"


# --- Differences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "names", "what"),
    [
        ("none", [], ""),
        (
            "island in the bf16 group",
            ["model.layers.1.self_attn.sinks"],
            "'float32', 'bfloat16', 'float32')",  # the group's index differs between torch versions
        ),
        ("a unit left out", ["lm_head.weight"], "expected (unit, group, storage, compute, reduce) ('lm_head', 0,"),
        (
            "parameter in another unit",
            [
                "model.layers.1.mlp.gate.weight",
                "model.layers.1.mlp.experts.gate_up_proj",
                "model.layers.1.mlp.experts.down_proj",
                "model.layers.1.mlp.shared_experts.gate_proj.weight",
                "model.layers.1.mlp.shared_experts.up_proj.weight",
                "model.layers.1.mlp.shared_experts.down_proj.weight",
            ],
            "got ('model.layers.1.mlp', 0, 'bfloat16', 'bfloat16', 'float32')",
        ),
        ("ignored parameter", ["lm_head.weight"], "got (None, None, 'bfloat16', 'bfloat16', None)"),
        ("new parameter", ["model.layers.0.extra"], "in the model, not in the plan"),
    ],
)
def test_differences_name_what_is_not_as_planned(fault: str, names: list[str], what: str) -> None:
    """Exactly the parameters that were put wrong, each with what was expected and what is there."""
    for found in run_ranks(2, with_fault, fault):
        assert [text.partition(":")[0] for text in found] == names
        assert all(what in text for text in found)


@pytest.mark.parametrize("fault", ["reduced in bf16", "cast afterwards"])
def test_differences_name_every_parameter_of_a_wrong_unit(fault: str) -> None:
    """A reduce dtype, and a cast after sharding that the parameters do not show until the next forward."""
    for found in run_ranks(1, with_fault, fault):
        assert found
        assert all(text.startswith("model.layers.0.") for text in found)


def test_a_parameter_that_has_gone_is_a_difference() -> None:
    """Planned, and no longer in the model."""
    model = tiny_transformers(LAYERS)
    plan = plan_sharding(model, mesh_shape=(1,))
    rows = [row for row in read_back(model) if row.fqn != "lm_head.weight"]
    assert "lm_head.weight: planned in unit lm_head, not in the model" in differences(rows, plan)


# --- The table --------------------------------------------------------------------------------------------------------


def counts(table: str) -> int:
    return sum(int(re.split(r"\s+", line)[1]) for line in table.splitlines()[1:])


def test_precision_table_folds_layers_and_keeps_within_100_columns() -> None:
    """One line per kind of tensor; the counts add up to the number of tensors."""
    for seen in run_ranks(1, planned):
        table = precision_table(seen.rows)
        assert max(map(len, table.splitlines())) <= 100
        assert counts(table) == len(seen.rows)
        assert "model.layers.*.self_attn.sinks" in table
        assert "layers.0" not in table


def test_precision_table_keeps_layers_of_other_dtypes_apart() -> None:
    """One layer with another dtype has a line of its own: that is what the table is for."""
    model = tiny_transformers(["sliding_attention"] * 3)
    alike = precision_table(read_back(model)).splitlines()
    model.model.layers[1].self_attn.sinks.data = model.model.layers[1].self_attn.sinks.data.bfloat16()
    lines = precision_table(read_back(model)).splitlines()
    assert len(lines) == len(alike) + 1
    sinks = [line.split()[:5] for line in lines if "sinks" in line]
    assert sorted(sinks) == [
        ["model.layers.*.self_attn.sinks", "1", "bf16", "bf16", "-"],
        ["model.layers.*.self_attn.sinks", "2", "fp32", "fp32", "-"],
    ]


@pytest.mark.parametrize("columns", [80, 90, 100])
def test_precision_table_keeps_within_the_width_asked_for(columns: int) -> None:
    """Long names and reasons lose their middle and keep their telling end."""
    rows = read_back(tiny_transformers())
    long = replace(rows[0], fqn=".".join(["a_long_name"] * 12 + ["telling_end"]), reason="a long reason " * 9)
    table = precision_table([*rows, long], columns=columns)
    assert max(map(len, table.splitlines())) <= columns
    assert "position_bias " in table
    assert re.search(r"^a_long.*….*telling_end .* a lon.*…", table, re.MULTILINE)


@pytest.mark.parametrize("mesh", [(128,), (2, 64)], ids=["128", "2x64"])
def test_tables_of_the_full_size_model_keep_within_100_columns(mesh: tuple[int, ...]) -> None:
    """DeepSeek-V4 at its default size, really sharded on the meta device over fake ranks: a page, not a book."""
    [(precision, plan, num_rows)] = run_ranks(1, full_size_table, mesh)
    for table in (precision, plan):
        assert max(map(len, table.splitlines())) <= 100
        assert len(table.splitlines()) < 80
    assert counts(precision) == num_rows


def test_an_empty_table_is_a_header() -> None:
    """No rows, no error."""
    assert precision_table([]).split() == ["name", "count", "storage", "compute", "reduce", "reason"]
