"""The known faults of this field (``FAULTS.md``), each by its number: what others reported must not happen here.

Whole models in lock-step with their references are in ``test_parity.py``; here are sharp tests, which fail for one
fault and little else. Each was seen to fail with its fault injected.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cases_faults as cases
import pytest
import torch
from cases_faults import BF, FP
from cases_parity import AS_STORED, BF16
from reference import assert_lockstep
from tiny_models import ModelKind, island_names, require_nemo, tiny_transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import ContractError, contract_of
from dsv4_fsdp.checkpoint_headers import fp32_names
from dsv4_fsdp.torch_private import has_native_override
from pool import run_ranks

both_kinds = pytest.mark.parametrize("kind", ["transformers", "nemo"])


def _skip_without(kind: ModelKind) -> None:
    if kind == "nemo":
        require_nemo()


# --- Mixed dtypes and silent precision loss ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "policy", "keys"),
    [
        pytest.param(
            # The first two compute alike, the last two are stored alike.
            {"weight": BF, "master": FP, "island": FP},
            BF16,
            {"weight": (BF, BF, FP), "master": (FP, BF, FP), "island": (FP, FP, FP)},
            id="storage-and-compute",
        ),
        pytest.param(
            {"weight": FP, "island": FP},
            MixedPrecisionPolicy(param_dtype=FP, reduce_dtype=BF),
            {"weight": (FP, FP, BF), "island": (FP, FP, FP)},
            id="reduce",
        ),
        pytest.param(
            {"weight": BF, "fp16": torch.float16, "island": FP},
            AS_STORED,
            {"weight": (BF, BF, BF), "fp16": (torch.float16,) * 3, "island": (FP, FP, FP)},
            id="as-stored",
        ),
    ],
)
def test_fault_01_parameters_that_differ_in_one_dtype_do_not_crash_their_unit(
    storage: Any, policy: Any, keys: Any
) -> None:
    """Parameters that differ in storage, compute or reduce dtype alone train in one unit, each as the contract says."""
    compute = {name: key[1] for name, key in keys.items()}
    for found in run_ranks(2, cases.unit_of, storage, compute, policy, ["island"]):
        assert found["keys"] == keys
        assert found["computed_in"] == compute
        assert found["gradients_in"] == storage
        assert found["bit_equal"]


def test_fault_01_mixed_dtypes_are_refused_at_wrap_time_by_name() -> None:
    """Where nothing says what the fp32 parameters are, the call that wraps says which they are, not the forward."""
    for error in run_ranks(2, cases.wrap_without_a_word):
        assert error is not None
        assert error[0] == "ShardingError"
        assert "stored in float32:\n  - sinks\n" in error[1]
        assert "fp32_params" in error[1]


@both_kinds
def test_fault_02_storage_is_not_cast_to_satisfy_a_check(kind: ModelKind) -> None:
    """Sharding, in every way that the parity tests know, leaves each tensor's dtype and every bit as they were."""
    _skip_without(kind)
    for found in run_ranks(2, cases.storage_changed_by_sharding, kind, timeout_s=300):
        assert len(found) >= 14
        assert {line: names for line, names in found.items() if names} == {}


def test_fault_03_one_bf16_weight_does_not_make_master_weights_compute_in_fp32() -> None:
    """A natively bf16 weight among fp32 master weights changes nothing for them, before or after it."""
    storage = {"before": FP, "native": BF, "after": FP, "island": FP}
    compute = {"before": BF, "native": BF, "after": BF, "island": FP}
    for found in run_ranks(2, cases.unit_of, storage, compute, BF16, ["island"]):
        assert found["computed_in"] == compute
        assert found["gradients_in"] == storage
        assert found["bit_equal"]


@both_kinds
def test_fault_04_no_float_cast_reaches_integer_tables(kind: ModelKind) -> None:
    """The hash routers' tables are int64 and the same after sharding and a step."""
    _skip_without(kind)
    for count, altered in run_ranks(2, cases.tables_after_a_step, kind):
        assert count >= 2
        assert altered == []


@pytest.mark.parametrize("how", ["parallelize", "fully_shard"])
@pytest.mark.parametrize("name", ["self_attn.sinks", "attn_hc.scale", "mlp.gate.e_score_correction_bias"])
def test_fault_04_a_downcast_island_is_an_error_and_no_line_in_a_log(name: str, how: str) -> None:
    """One island in bf16, parameter or buffer, is an error when wrapping, by name, before any collective."""
    for error, num_collectives in run_ranks(
        2, cases.wrap_with_downcast, "transformers", [f"model.layers.3.{name}"], how
    ):
        assert error is not None
        assert error[0] == "ContractError"
        assert error[1].startswith("1 tensor that must be fp32 is stored in a narrower dtype")
        assert name in error[1]
        assert num_collectives == 0


def test_fault_05_an_old_class_list_does_not_turn_fp32_into_bf16_on_save(tmp_path: Path) -> None:
    """With an empty class list the checkpoint's own dtypes give the islands; both ways of saving keep each dtype."""
    source = tiny_transformers()
    cases.save_as_transformers(source, source.state_dict(), tmp_path / "source")
    islands = {rule.fqn for rule in contract_of(source).islands}
    assert set(fp32_names(tmp_path / "source")) == islands
    for found in run_ranks(2, cases.load_and_save_with_an_old_list, tmp_path / "source", tmp_path):
        assert found["islands"] == set(island_names(source))
        assert found["computed_in_fp32"] == found["islands"]
        assert found["altered"] == set()
        assert found["transformers"] == []
        assert found["headers"]
        assert found["dcp"] == []


def test_fault_05_a_checkpoint_that_an_old_list_downcast_on_loading_is_refused(tmp_path: Path) -> None:
    """A class that lists nothing finds nothing wrong with a model that is all bf16; the checkpoint does."""
    model = tiny_transformers()
    cases.save_as_transformers(model, model.state_dict(), tmp_path)
    names = fp32_names(tmp_path)
    with cases.without_class_lists(model):
        model.to(BF)
        assert contract_of(model).islands == ()
        with pytest.raises(ContractError, match=f"^{len(names)} tensors that must be fp32 are stored in a narrower"):
            contract_of(model, fp32_params=names)


@both_kinds
def test_fault_06_no_path_from_build_to_save_downcasts_an_island(kind: ModelKind, tmp_path: Path) -> None:
    """Islands are fp32 and the source's in every bit: built, loaded, in forward and recomputation, gathered, saved."""
    _skip_without(kind)
    for found in run_ranks(2, cases.fp32_all_along, kind, tmp_path):
        assert {station: names for station, names in found.items() if names} == {}


@both_kinds
def test_fault_07_fp32_storage_does_not_mean_fp32_compute(kind: ModelKind) -> None:
    """All stored in fp32: under a bf16 policy all but the islands compute in bf16; without one all compute in fp32."""
    _skip_without(kind)
    for dtypes, islands in run_ranks(2, cases.compute_dtypes, kind, BF16):
        assert {name for name, seen in dtypes.items() if seen != {BF}} == set(islands)
        assert all(dtypes[name] == {FP} for name in islands)
    for dtypes, _ in run_ranks(2, cases.compute_dtypes, kind, AS_STORED):
        assert {dtype for seen in dtypes.values() for dtype in seen} == {FP}


def test_fault_07_an_audit_does_not_take_a_gathered_parameter_for_the_stored_one() -> None:
    """fp32 masters are read back as stored in fp32 also while their bf16 copies are registered in the modules."""
    assert run_ranks(2, cases.read_back_of_a_gathered_model) == [True, True]


@pytest.mark.parametrize("how", ["parallelize", "fully_shard"])
def test_fault_08_an_upcast_changes_what_the_module_holds(how: str) -> None:
    """``restore_fp32`` upcasts what the module holds and forward uses, parameters and buffers, and nothing else."""
    for found in run_ranks(2, cases.restored, how):
        assert found["said"]
        assert found["stored"] == found["islands"]
        assert found["buffers"] == found["island_buffers"]
        assert found["computed"] == found["islands"]
        assert found["others"] == {BF}


def test_fault_09_rope_tables_and_masks_arrive_as_they_were_sent() -> None:
    """Whatever a unit with islands is given arrives as it was sent, at any depth; masks and ids always do."""
    for dtypes, altered, same_structure in run_ranks(2, cases.received_by, island=True, ours=True):
        assert altered == []
        assert same_structure
        assert {FP, BF, torch.int32, torch.int64, torch.bool} == set(dtypes)


def test_fault_09_a_unit_without_islands_casts_as_torch_does() -> None:
    """The drop-in changes nothing where there is nothing to protect: the same dtypes arrive as under torch's own."""
    ours = run_ranks(2, cases.received_by, island=False, ours=True)
    torchs = run_ranks(2, cases.received_by, island=False, ours=False)
    assert ours == torchs
    dtypes, altered, _ = ours[0]
    assert FP not in dtypes
    assert {BF, torch.int32, torch.int64, torch.bool} == set(dtypes)
    assert len(altered) == sum(dtype == BF for dtype in dtypes) - 1  # all that float, but for the one sent in bf16


def test_fault_10_a_weight_at_one_moves_at_small_learning_rates_if_stored_in_fp32() -> None:
    """Stored in bf16 it does not, which is bf16's price; fp32 master weights move, with the same bf16 compute."""
    for moved, compute, moments in run_ranks(2, cases.moves_at_small_lr, BF):
        assert (moved, compute, moments) == (False, BF, {BF})
    for moved, compute, moments in run_ranks(2, cases.moves_at_small_lr, FP):
        assert (moved, compute, moments) == (True, BF, {FP})


# --- Building, loading, saving ----------------------------------------------------------------------------------------


def test_fault_11_rope_tables_are_recomputed_on_every_rank() -> None:
    """On every rank ``materialize`` leaves the tables of a model built on the CPU, before anything is loaded."""
    for count, differ, error in run_ranks(2, cases.rope_tables_after_meta, forget_on_rank=None):
        assert count >= 16
        assert differ == []
        assert error is None


def test_fault_11_rope_tables_left_as_allocated_on_rank_1_are_found_there() -> None:
    """The sweep runs on each rank by itself, and names the tables where they are missing."""
    well, ill = run_ranks(2, cases.rope_tables_after_meta, forget_on_rank=1)
    assert well[1:] == ([], None)
    assert len(ill[1]) == ill[0]
    assert ill[2] is not None
    assert ill[2][0] == "ShardingError"
    assert ill[2][1].startswith(f"{ill[0]} tensor(s) were never given a value")
    assert "model.rotary_emb.main_inv_freq" in "".join(ill[1])


@pytest.mark.parametrize(
    ("name", "rank"),
    [("weight", 1), ("island", 0), ("short", 0), ("ids", 1), ("bias", 1), ("table", 1), ("inv_freq", 1)],
)
def test_fault_11_a_tensor_that_one_rank_forgot_is_named_there(name: str, rank: int) -> None:
    """Each kind of tensor, left as allocated on one rank, is named there and nowhere else."""
    errors = run_ranks(2, cases.sweep_after_forgetting, name, rank)
    assert errors[1 - rank] is None
    assert errors[rank] is not None
    assert f"got, still as allocated:\n  - {name}\nwhat to do" in errors[rank][1]


def test_fault_11_the_sweep_does_not_cry_wolf() -> None:
    """Zeros everywhere, and a rank that holds no row of a parameter, are no finding."""
    assert run_ranks(2, cases.sweep_after_forgetting, None, 0) == [None, None]
    assert run_ranks(2, cases.sweep_after_forgetting, "short", 1) == [None, None]


def test_fault_11_one_nan_in_a_checkpoint_is_found() -> None:
    """By the rank whose shard holds it."""
    first, second = run_ranks(2, cases.sweep_after_forgetting, "weight", 1, value=float("nan"))
    assert first is None
    assert second is not None
    assert "  - weight\n" in second[1]


@pytest.mark.parametrize("old_torch", [False, True], ids=["this-torch", "torch-without-uid"])
def test_fault_13_tied_embeddings_in_two_units_are_refused_by_both_names(old_torch: bool) -> None:
    """The second owner is refused when wrapped, by both names, also where torch itself would say nothing."""
    for error in run_ranks(2, cases.tied_in_two_units, old_torch=old_torch, stock=False):
        assert error is not None
        assert error[0] == "ShardingError"
        assert "got:\n  - weight of Linear, sharded before as weight of Embedding\nwhat" in error[1]


def test_fault_13_a_weight_tied_to_a_unit_of_stock_torch_is_refused() -> None:
    """A first owner that torch's own ``fully_shard`` took counts too."""
    for error in run_ranks(2, cases.tied_in_two_units, old_torch=False, stock=True):
        assert error is not None
        assert error[0] == "ShardingError"
        assert "got:\n  - weight of Linear, sharded before by torch's own fully_shard\nwhat" in error[1]


def test_fault_13_a_tied_pair_in_one_unit_is_one_parameter() -> None:
    """``fully_shard([embedding, head])`` shards one parameter, which both modules still hold after a step."""
    assert run_ranks(2, cases.tied_in_one_unit) == [(True, 1, 1)] * 2


def test_fault_13_a_tied_pair_survives_the_meta_device_and_a_step() -> None:
    """Meta, shard, materialize, load, step: one parameter in the model, in the optimizer and in its state dict."""
    found = run_ranks(2, cases.tied_from_meta)
    for each in found:
        assert each["loss_equal"]
        assert each["moved"]
        assert each["one_object"]
        assert each["in_optimizer"] == 1
    assert len(found[0]["optimizer_entries"]) == 1


def test_fault_13_a_tied_pair_is_saved_once(tmp_path: Path) -> None:
    """An export of the sharded model has one copy, and stock Transformers ties the pair again."""
    names, problems, tied = run_ranks(2, cases.export_tied, tmp_path)[0]
    assert len(names) == 1
    assert problems == []
    assert tied


@pytest.mark.parametrize("grouped", [True, False], ids=["fully_shard", "parallelize"])
def test_fault_13_a_tied_pair_that_wants_two_dtypes_is_refused(grouped: bool) -> None:
    """An fp32 head tied to an embedding that is no island is refused, with both names."""
    for error in run_ranks(2, cases.tied_pair_of_two_dtypes, grouped=grouped):
        assert error is not None
        assert error[0] == "ContractError"
        assert "two names of one tied parameter want two dtypes" in error[1]
        assert "head.weight" in error[1]
        assert ("embedding.weight" if grouped else "model.embed_tokens.weight") in error[1]


# --- Ranks that differ ------------------------------------------------------------------------------------------------


@both_kinds
def test_fault_18_a_short_rank_sends_the_same_collectives(kind: ModelKind) -> None:
    """A rank without any complete window gathers and reduces exactly what a rank with windows does."""
    _skip_without(kind)
    long, short = run_ranks(2, cases.collectives_of_a_short_and_a_long_rank, kind)
    assert len(long) > 20
    assert long == short


@pytest.mark.parametrize(
    ("mesh", "skip_on_ranks", "count"),
    [((2,), [1], "on 1 of 2 ranks"), ((3,), [0, 2], "on 1 of 3 ranks"), ((2, 2), [3], "on 3 of 4 ranks")],
)
def test_fault_18_a_parameter_used_on_some_ranks_only_is_named_and_does_not_hang(
    mesh: Any, skip_on_ranks: Any, count: str
) -> None:
    """The probe names it on every rank, says on how many it was used and whether here, and leaves nothing behind."""
    num_ranks = torch.Size(mesh).numel()
    for rank, found in enumerate(run_ranks(num_ranks, cases.probed_backward, mesh, skip_on_ranks)):
        assert found["error"] is not None
        assert found["error"][0] == "ShardingError"
        among = "not" if rank in skip_on_ranks else "among them"
        assert f"got:\n  - sometimes: {count}, this rank ({rank}) {among}\nwhat" in found["error"][1]
        assert not found["left"]


def test_fault_18_a_unit_whose_output_some_ranks_skip_is_named_and_does_not_hang() -> None:
    """Ranks that are at different units by then are told so, each with the same two units."""
    for rank, error in enumerate(run_ranks(2, cases.probed_backward_of_units)):
        assert error is not None
        assert error[0] == "ShardingError"
        here = [f", this rank ({rank}) among them" if rank == at else "" for at in (1, 0)]
        first = f"  - 1 of 2 ranks{here[0]}: first.weight and 1 more\n"
        second = f"  - 1 of 2 ranks{here[1]}: second.weight and 1 more\n"
        assert f"got:\n{first}{second}what" in error[1]


@pytest.mark.parametrize("skip_on_ranks", [[], [0, 1]], ids=["used-everywhere", "used-nowhere"])
def test_fault_18_the_probe_does_not_cry_wolf(skip_on_ranks: list[int]) -> None:
    """A parameter that all ranks use, or none, is no finding."""
    for found in run_ranks(2, cases.probed_backward, (2,), skip_on_ranks):
        assert found["error"] is None
        assert not found["left"]
        assert ("sometimes" in found["gradients"]) == (not skip_on_ranks)


def test_fault_18_the_probe_passes_a_healthy_model_and_costs_nothing_afterwards() -> None:
    """The real model with a short rank: one all-reduce per group under the probe, none before or after it."""
    for before, under, after in run_ranks(2, cases.collectives_around_the_probe):
        assert before == after
        assert before["all_reduce"] == 0
        assert under["all_reduce"] >= before["reduce_scatter"]
        assert under - before == Counter(all_reduce=under["all_reduce"])


@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize(
    "lengths", [((9, 4), (4, 9)), ((9, 4), (4, 4)), ((4, 9), (17, 5))], ids=["crossed", "one-rank", "last"]
)
def test_fault_19_an_accumulated_step_with_an_unused_compressor_is_the_step_of_the_sum(sync: str, lengths: Any) -> None:
    """Two micro-batches, one without a complete window, give the gradients and the step of their sum."""
    results = run_ranks(2, cases.one_micro_batch_without_a_window, sync, lengths)
    # Syncing each micro-batch rounds two bf16 gradients and their sum: three roundings of 2**-9 each at most; a step of
    # 1e-2 along it, rounded to bf16 once more, is 2**-9 of the weight off.
    assert_lockstep(results, grad_tol=8e-3, param_tol=2**-8, zero_for_none="any")


@pytest.mark.parametrize("sync", ["every", "last"])
def test_fault_19_accumulation_does_not_mix_gradient_dtypes(sync: str) -> None:
    """After accumulation each gradient is in its parameter's storage dtype, the compressor's too."""
    for found in run_ranks(2, cases.gradient_dtypes_after_accumulation, sync):
        assert found == {"torch.bfloat16": {BF}, "torch.float32": {FP}}


def test_fault_20_optimizer_clipping_and_checkpoint_live_with_empty_shards(tmp_path: Path) -> None:
    """Compress rates 2 and 3 and shapes (1,) and (3,) on 4 ranks: AdamW, clipping, DCP, and the resumed loss."""
    results = run_ranks(4, cases.live_with_empty_shards, tmp_path)
    last = results[3]["empty"]
    assert last["model.hc_head.hc_scale"] == (1,)
    assert last["model.layers.0.attn_hc.scale"] == (3,)
    # Of two rows on four ranks, so it is cut along its columns.
    assert "model.layers.0.self_attn.compressor.position_bias" not in last
    assert last["model.layers.1.self_attn.compressor.position_bias"][0] == 3
    assert results[0]["empty"] == {}
    for found in results:
        norm, exact, clipped = found["norm"]
        # torch takes each parameter's norm in its gradient's dtype, and bf16 rounds it by 2**-9 at most, twice.
        assert norm == pytest.approx(exact, rel=2**-8)
        assert exact > 0.5
        assert clipped == pytest.approx(0.5, rel=2**-7)
        assert found["keys_equal"]
        assert found["moments"] == []
        assert found["next"] == [True, True]
        assert found["parameters"] == []


@both_kinds
def test_fault_21_no_router_is_cut_out_of_the_graph(kind: ModelKind) -> None:
    """Every trainable parameter of the real model gets a gradient that is not zero; the indexer is frozen.

    That a run stops at a parameter without one is in ``test_train_parts.py``.
    """
    _skip_without(kind)
    assert run_ranks(2, cases.trainable_without_gradient, kind) == [([], [])] * 2


# --- Names, adapters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped_in", ["nothing", "PeftModel"])
def test_fault_26_no_wrapper_words_in_names_and_saved_keys(wrapped_in: str) -> None:
    """With activation checkpointing and peft, keys are those of the unsharded model and no name of ours has a word."""
    plain = {name for name, _ in tiny_transformers().named_parameters()}
    for found in run_ranks(2, cases.names_through_wrappers, wrapped_in):
        assert found["recomputed"]
        assert found["wrapper_words"] == []
        assert found["base_names"] == plain
        assert found["state_keys"]
        assert found["gathered_keys"]
        assert found["optimizer_words"] == []
        assert found["blocks"] == [f"model.layers.{i}" for i in range(4)]


@both_kinds
def test_fault_27_fp32_adapters_in_a_bf16_block_are_a_group_of_their_own(kind: ModelKind) -> None:
    """They are a group of their own in each block, stored in fp32 and computed in bf16, beside base and islands."""
    _skip_without(kind)
    for blocks in run_ranks(2, cases.adapter_groups, kind, computed_in_fp32=False):
        assert len(blocks) == 4
        for groups in blocks:
            # Two targets, A and B of each, whatever stands beside them.
            assert {key: count for group in groups for key, count in group.items() if key[2]} == {(FP, BF, True): 4}
            assert {key for group in groups for key in group} == {(BF, BF, False), (FP, BF, True), (FP, FP, False)}
            if has_native_override():
                # torch >= 2.15 gathers what is stored and reduced alike together.
                assert [len({storage for storage, _, _ in group}) for group in groups] == [1, 1]
            else:
                assert [len(group) for group in groups] == [1, 1, 1]


def test_fault_27_adapters_declared_fp32_share_the_islands_group() -> None:
    """Asked to compute in fp32 they need no gather of their own."""
    for blocks in run_ranks(2, cases.adapter_groups, "transformers", computed_in_fp32=True):
        for groups in blocks:
            assert len(groups) == 2
            assert {key for group in groups for key in group} == {(BF, BF, False), (FP, FP, False), (FP, FP, True)}


@pytest.mark.parametrize("train", ["shared_experts.down_proj", ""], ids=["almost-all-frozen", "all-frozen"])
def test_fault_28_frozen_fp32_weights_do_not_escape_the_compute_cast(train: str) -> None:
    """A frozen base stored in fp32 computes in bf16, and gives the bf16 model's logits, on one rank and on two."""
    islands = set(island_names(tiny_transformers()))
    results = [*run_ranks(1, cases.frozen_fp32_base, train=train), *run_ranks(2, cases.frozen_fp32_base, train=train)]
    for logits, dtypes, reference in results:
        assert {name for name, seen in dtypes.items() if seen != {BF}} == islands
        assert logits.dtype == reference.dtype
        assert torch.equal(logits, reference)
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fault_29_frozen_weights_are_not_upcast(num_ranks: int) -> None:
    """The frozen base of a LoRA run keeps its bytes, bits and dtype: as planned, after sharding, after a step."""
    for found in run_ranks(num_ranks, cases.frozen_bytes):
        assert found["sharded"] == found["after_step"] == found["expected"]
        assert found["planned"] == found["expected_of_all"]
        assert found["changed"] == []
        assert found["gradients"] == []
        assert found["optimizer_params"] == found["trainable"]


# --- Activation checkpointing, order ----------------------------------------------------------------------------------


def test_fault_35_recomputation_routes_to_the_same_experts_and_counts_once() -> None:
    """Every router picks the same experts again, and a window is flagged once, as without recomputation."""
    for rank, found in enumerate(run_ranks(2, cases.routes_and_flags, checkpointing=True)):
        # Four routers, two micro-batches, each run twice.
        assert found["runs"] == {f"model.layers.{i}.mlp.gate": 4 for i in range(4)}, rank
        assert found["differ"] == []
        before_backward, after = found["flags"]
        assert after == before_backward == [1.0, 1.0, 1.0]
    for found in run_ranks(2, cases.routes_and_flags, checkpointing=False):
        assert found["runs"] == {f"model.layers.{i}.mlp.gate": 1 for i in range(4)}
        assert found["flags"] == ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])


@both_kinds
def test_fault_36_no_weight_is_read_outside_the_forward_of_its_unit(kind: ModelKind) -> None:
    """In a forward no operator is given a sharded tensor: not a weight, not the bare tensor of a holder."""
    _skip_without(kind)
    assert run_ranks(2, cases.operands_of_forward, kind) == [None, None]


def test_fault_36_the_check_finds_a_weight_read_outside() -> None:
    """A chunked loss that multiplies by the head's weight itself is caught."""
    for error in run_ranks(2, cases.operands_of_forward, None):
        assert error is not None
        assert "was given a sharded tensor" in error[1]
