"""Exports of a live model, however it is sharded; and dry exports of models that are too large to write for a check."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_export import dry_export_of_a_large_model, failing_on_first, published, published_adapter, saved_by_trainer
from safetensors.torch import load_file
from tiny_models import tiny_transformers

from dsv4_fsdp.export import export_checkpoint
from dsv4_fsdp.export.source_checkpoint import same_bits
from dsv4_fsdp.export.trained_tensors import GivenTensors, HeadersOnly
from dsv4_fsdp.export.verify import refuse_what_stock_refuses
from dsv4_fsdp.export.write_model import write_model
from dsv4_fsdp.safetensors_headers import read_header


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "model"
    tiny_transformers().save_pretrained(path, save_original_format=False)  # type: ignore[operator]
    return path


def assert_all_negated(checkpoint: Path, export: Path) -> None:
    """Every parameter of ``export`` is that of ``checkpoint`` with the other sign, every buffer is the same."""
    before, after = load_file(checkpoint / "model.safetensors"), load_file(export / "model.safetensors")
    assert before.keys() == after.keys()
    buffers = {"tid2eid", "e_score_correction_bias"}
    for name, tensor in before.items():
        expected = tensor if name.rpartition(".")[2] in buffers else -tensor
        assert same_bits(after[name], expected), name


# Dispatched experts are sharded twice along the dim of their number: by ep outside, by efsdp inside.
MESHES = {
    "fsdp": (2, {"fsdp_size": 2}, {"('fsdp',)('S(0)',)"}),
    "hsdp": (4, {"fsdp_size": 2, "dp_replicate_size": 2}, {"('dp_replicate', 'fsdp')('R', 'S(0)')"}),
    "ep_x_fsdp": (4, {"fsdp_size": 4, "ep_size": 2}, {"('fsdp',)('S(0)',)", "('efsdp', 'ep')('_S(0, 2)', 'S(0)')"}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sharded_model_is_exported_whole(run_ranks: Any, mesh: str, checkpoint: Path, tmp_path: Path) -> None:
    """Every bit of every tensor, all experts of all ranks among them (fault 17); nothing else is left in the run."""
    num_ranks, distributed, layouts = MESHES[mesh]
    found = run_ranks(num_ranks, published, checkpoint, tmp_path, reload=mesh == "ep_x_fsdp", **distributed)
    assert found[0] == (mesh == "ep_x_fsdp", layouts)
    assert found[1:] == [None] * (num_ranks - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert_all_negated(checkpoint, tmp_path / "export")


def test_a_sharded_model_with_adapters_is_exported_as_an_adapter(
    run_ranks: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """Adapters injected as the trainer does it, in fp32, experts among them; stock peft gives equal logits."""
    assert run_ranks(2, published_adapter, checkpoint, tmp_path)[0] is True
    adapter = load_file(tmp_path / "export" / "adapter_model.safetensors")
    # 4 layers: q_a_proj, and nested one in the other the experts' two parameters; A and B each.
    assert len(adapter) == 4 * 3 * 2
    assert all(name.startswith("base_model.model.model.layers.") for name in adapter)
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert json.loads((tmp_path / "export" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        checkpoint
    )


def test_a_checkpoint_that_the_trainer_saved_is_exported(run_ranks: Any, checkpoint: Path, tmp_path: Path) -> None:
    """By two ranks, optimizer state and all; read back in one process, tensor by tensor, every bit."""
    run_ranks(2, saved_by_trainer, checkpoint, tmp_path / "run")
    exported = export_checkpoint(tmp_path / "run", tmp_path / "export", check=False)
    assert (exported.checkpoint.step, exported.source) == (7, checkpoint)
    assert_all_negated(checkpoint, tmp_path / "export")


def test_when_rank_0_cannot_write_all_ranks_say_so(run_ranks: Any, tmp_path: Path) -> None:
    """The others do not wait in a collective that never comes."""
    run = tmp_path / "run"
    run.touch()
    first, second = run_ranks(2, failing_on_first, run)
    assert first.startswith("ExportError: the export cannot be written.\n")
    assert f"got: Not a directory\nwhere: {run / '.export-dry'}\n" in first
    assert second.startswith("ExportError: rank 0 could not export:")


@pytest.mark.parametrize("downcast", [False, True], ids=["sound", "island_in_bf16"])
def test_a_dry_export_of_a_large_model_gathers_nothing_and_still_judges(
    downcast: bool, run_ranks: Any, tmp_path: Path
) -> None:
    """Names, shapes, dtypes and the config go through the same writer, as files without data; nothing is left."""
    for error, gathered, left in run_ranks(2, dry_export_of_a_large_model, tmp_path, downcast=downcast):
        assert gathered == 0
        assert left == []
        assert ("an fp32 island was trained in torch.bfloat16" in error) == downcast


def test_a_full_size_flash_is_judged_in_seconds_without_its_570_gb(tmp_path: Path) -> None:
    """Stock Transformers accepts every header of a dry export; the files are holes."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(architectures=["DeepseekV4ForCausalLM"])
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM._from_config(config, dtype=torch.bfloat16)
    trained = HeadersOnly(GivenTensors(model.state_dict()))
    written = write_model(trained, tmp_path, prepare=lambda folder: config.save_pretrained(folder))
    assert written.total_bytes > 560e9
    files = list(tmp_path.glob("*.safetensors"))
    # The largest tensor is a layer's gate and up projections of 256 experts.
    assert max(file.stat().st_size for file in files) < 9e9
    assert sum(os.stat(file).st_blocks * 512 for file in files) < 50e6
    assert all(read_header(file).problem is None for file in files)
    refuse_what_stock_refuses(tmp_path, onto_meta=True)
