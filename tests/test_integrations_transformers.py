"""transformers' own ``from_pretrained(distributed_config=...)``: the fault, and the line that mends it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases_integrations import (
    mixers_under_trainer,
    native_load_and_compare,
    native_lockstep,
    native_patch_after_a_crash,
    native_save,
    native_without_the_line,
)
from reference import assert_lockstep
from tiny_models import island_names, tiny_transformers, transformers_config

from dsv4_fsdp import ContractError, contract_of, keep_fp32_islands
from dsv4_fsdp.integrations import UnsupportedLibrary

NUM_BLOCKS = 4
EP = {"fsdp_size": 2, "ep_size": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4 (sliding, HCA, CSA, HCA) as ``save_pretrained`` leaves it: bf16 with fp32 islands."""
    path = tmp_path_factory.mktemp("native") / "model"
    tiny_transformers().save_pretrained(path)
    return path


@pytest.mark.parametrize("distributed", [{"fsdp_size": 2}, EP], ids=["fsdp", "ep"])
def test_bf16_crashes_at_the_first_forward_without_the_line(
    run_ranks: Any, checkpoint: Path, distributed: dict[str, int]
) -> None:
    """And a CSA layer is twelve units, single norms among them."""
    for units, _, error in run_ranks(2, native_without_the_line, checkpoint, "bfloat16", **distributed):
        assert "FSDP expects uniform original parameter dtype" in error
        csa = [name for name in units if f"{name}.".startswith("model.layers.2.") and not name.endswith("experts")]
        assert len(csa) == 12
        assert "model.layers.2.self_attn.compressor.indexer.kv_norm" in csa


def test_fp32_with_mixed_precision_computes_every_island_in_bf16_without_the_line(
    run_ranks: Any, checkpoint: Path
) -> None:
    """No error, no warning."""
    results = run_ranks(2, native_without_the_line, checkpoint, "float32", fsdp_size=2, fsdp_mixed_precision=True)
    for _, island_dtypes, error in results:
        assert error == ""
        assert island_dtypes == {torch.bfloat16}


MIXED = {"fsdp_mixed_precision": True}


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "distributed"),
    [
        pytest.param(2, "bfloat16", {"fsdp_size": 2}, id="fsdp"),
        pytest.param(2, "bfloat16", {"fsdp_size": 2} | MIXED, id="fsdp, fp32 reduction"),
        pytest.param(2, "float32", {"fsdp_size": 2} | MIXED, id="fsdp, fp32 storage"),
        pytest.param(4, "bfloat16", {"fsdp_size": 2, "dp_replicate_size": 2}, id="hsdp"),
        pytest.param(2, "bfloat16", EP, id="ep on 2"),
        pytest.param(4, "bfloat16", EP | {"fsdp_size": 4} | MIXED, id="ep on 4"),
        pytest.param(4, "bfloat16", EP | {"dp_replicate_size": 2}, id="ep and hsdp"),
        pytest.param(2, "float32", EP | MIXED, id="ep, fp32 storage"),
    ],
)
def test_with_the_line_it_trains_in_one_unit_per_block_and_follows_the_unsharded_model(
    run_ranks: Any, checkpoint: Path, num_ranks: int, dtype: str, distributed: dict[str, Any]
) -> None:
    """Forward bit-equal, islands computed in fp32, indexers frozen; sequences with and without windows mixed."""
    results = run_ranks(num_ranks, native_lockstep, checkpoint, dtype, **distributed)
    experts = [f"model.layers.{i}.mlp.experts" for i in range(NUM_BLOCKS)] if "ep_size" in distributed else []
    blocks = [f"model.layers.{i}" for i in range(NUM_BLOCKS)]
    for result in results:
        assert sorted(result.units) == sorted(["", "model.embed_tokens", *blocks, *experts, "model.norm", "lm_head"])
        assert result.island_dtypes == {torch.float32}
        assert result.trainable_indexer == []
    # Gradients: one rounding to bf16 after a reduction in fp32 (2**-9 of an element); where transformers reduces in
    # bf16, another per level of the reduction. Under EP the reference rounds each rank's expert gradient and then
    # averages, while the owner of an expert adds up the tokens of all ranks and then rounds: one rounding more. The
    # worst measured is 3.1e-3, so the usual 5e-3 holds for all.
    # Parameters: each side rounds one update to bf16, at most 2**-8 of an element apart.
    assert_lockstep([result.lockstep for result in results], grad_tol=5e-3, param_tol=2**-8)


def test_a_unit_that_the_user_asks_for_inside_a_block_stays(run_ranks: Any, checkpoint: Path) -> None:
    """Only transformers' own additions for single islands go; an attention with bare islands in it is no problem."""
    plan = {"model.layers.*.self_attn": "free_full_weight"}
    results = run_ranks(2, native_lockstep, checkpoint, "bfloat16", fsdp_size=2, fsdp_plan=plan)
    for result in results:
        assert [name for name in result.units if name.startswith("model.layers.1")] == [
            "model.layers.1",
            "model.layers.1.self_attn",
        ]
    assert_lockstep([result.lockstep for result in results], param_tol=2**-8)


@pytest.mark.parametrize("distributed_checkpoint", [False, True], ids=["gathered", "distributed"])
@pytest.mark.parametrize("distributed", [{"fsdp_size": 2}, EP], ids=["fsdp", "ep"])
def test_what_transformers_saves_of_it_loads_with_the_same_bits_and_dtypes(
    run_ranks: Any, checkpoint: Path, tmp_path: Path, distributed: dict[str, int], distributed_checkpoint: bool
) -> None:
    """Whole (by a stock process) or in shards (by the line again)."""
    run_ranks(2, native_save, checkpoint, tmp_path, distributed_checkpoint=distributed_checkpoint, **distributed)
    if not distributed_checkpoint:
        assert run_ranks(1, native_load_and_compare, checkpoint, tmp_path) == [[]]
    assert run_ranks(2, native_load_and_compare, checkpoint, tmp_path, **distributed) == [[], []]


@pytest.mark.parametrize(("bf16", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_under_the_trainer_mixers_stay_in_fp32_unless_it_is_told_to_autocast(
    run_ranks: Any, checkpoint: Path, tmp_path: Path, bf16: bool, dtype: torch.dtype
) -> None:
    """Its ``bf16=True`` is torch's autocast, which no storage dtype withstands: our docs advise against it."""
    assert run_ranks(2, mixers_under_trainer, checkpoint, tmp_path, bf16=bf16) == [{dtype}] * 2


# --- The patch itself -------------------------------------------------------------------------------------------------


def _names() -> tuple[Any, Any]:
    mixin = importlib.import_module("transformers.distributed.mixin")
    fsdp = importlib.import_module("transformers.distributed.fsdp")
    return mixin.apply_fully_sharded_data_parallelism, fsdp.fully_shard


def test_the_patch_is_undone_on_any_exit_and_can_be_nested() -> None:
    """Also after an exception in the block."""
    before = _names()
    with keep_fp32_islands("transformers"):
        outer = _names()
        assert outer[0] is not before[0]
        with pytest.raises(KeyError), keep_fp32_islands("transformers"):
            raise KeyError(_names()[0] is not outer[0])
        assert _names() == outer
    assert _names() == before


def test_the_patch_is_undone_if_sharding_crashes(run_ranks: Any, checkpoint: Path) -> None:
    """Also the inner one, which lasts as long as transformers' function runs."""
    assert run_ranks(2, native_patch_after_a_crash, checkpoint) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (
            "mixin",
            "apply_fully_sharded_data_parallelism",
            lambda model, mesh: model,
            "mixin.apply_fully_sharded_data_parallelism is not transformers' own function",
        ),
        ("fsdp", "apply_fully_sharded_data_parallelism", lambda model, mesh: model, "takes (model, mesh), not (model,"),
        ("fsdp", "fully_shard", None, "fsdp.fully_shard is missing"),
        ("fsdp", "_get_fsdp_policy_kwargs", None, "_get_fsdp_policy_kwargs is missing"),
        ("mixin", "DistributedMixin", SimpleNamespace(__name__="DistributedMixin"), "_expand_parallel_plan is missing"),
    ],
)
def test_unknown_internals_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str, value: Any, said: str
) -> None:
    """Nothing is patched, and the message says what differs and what to do."""
    module = importlib.import_module(f"transformers.distributed.{owner}")
    monkeypatch.setattr(module, name, value)
    before = _names()
    with pytest.raises(UnsupportedLibrary) as error, keep_fp32_islands("transformers"):
        pass
    assert said in str(error.value)
    assert "expected: transformers 5.24.0" in str(error.value)
    assert "what to do: install one of the versions above" in str(error.value)
    assert _names() == before


def test_calls_that_would_do_nothing_are_refused() -> None:
    """An unknown library, and an option of a library that is not patched."""
    with pytest.raises(ValueError, match="does not know 'axolotl'"), keep_fp32_islands("axolotl"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="has no effect"), keep_fp32_islands("transformers", accelerate_upcast=False):
        pass


def test_islands_that_a_class_builds_in_the_default_dtype_are_widened_on_the_meta_device() -> None:
    """The loader will cast them when it reads; stored bits of a real tensor are never touched."""
    from transformers import DeepseekV4ForCausalLM

    from dsv4_fsdp.contract import widen_meta_islands

    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(transformers_config()).to(torch.bfloat16)
    with pytest.raises(ContractError):
        contract_of(model)
    widen_meta_islands(model)
    islands = set(island_names(model))
    assert {rule.fqn for rule in contract_of(model).islands if rule.kind == "parameter"} == islands
    assert {p.dtype for n, p in model.named_parameters() if n not in islands} == {torch.bfloat16}

    real = tiny_transformers().to(torch.bfloat16)
    widen_meta_islands(real)
    with pytest.raises(ContractError):
        contract_of(real)
