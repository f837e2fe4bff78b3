"""Training checkpoints leave out frozen weights that the model's own checkpoint holds, and nothing is lost by it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_frozen_base import leg, refused, run_that_holds_all, started_with_another_base
from cases_train_runs import run
from safetensors.torch import load_file
from test_export_checkpoint import loaded, raw
from tiny_checkpoints import release_checkpoint, released_model, rewrite
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dsv4_fsdp.checkpoint_digests import checkpoint_digests
from dsv4_fsdp.export import export_checkpoint
from dsv4_fsdp.export.trained_tensors import CheckpointTensors
from dsv4_fsdp.names import is_adapter_name, matches_components
from dsv4_fsdp.planner.estimate import Estimator
from dsv4_fsdp.planner.settings import Cluster, TrainingSettings
from dsv4_fsdp.train.checkpoint_folder import latest_checkpoint
from dsv4_fsdp.train.config import ModelConfig

ROOT = Path(__file__).parent.parent
LORA = {"model.train": "lora", "model.lora.rank": "4", "optimizer.lr": "0.01"}
FROZEN = ("embed_tokens", "layers.0", "mlp.experts")
FREEZE = {"model.freeze": ",".join(FROZEN), "router_bias_rate": "0.01"}
KINDS = pytest.mark.parametrize("more", [LORA, FREEZE], ids=["lora", "freeze"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised release. Shared: copy it to change it."""
    return release_checkpoint(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def settings(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four steps on the README's conversations."""
    return {
        "steps": "4",
        "checkpoint.every": "2",
        "model.init": "checkpoint",
        "model.path": str(base),
        "data.kind": "sft",
        "data.path": str(ROOT / "examples/sft/conversations.jsonl"),
        "data.template": str(ROOT / "examples/sft/chat.jinja"),
        "data.tokenizer": str(base),
        "data.sequence_length": "64",
        "data.global_batch_size": "4",
        "data.cache_dir": str(tmp_path_factory.mktemp("cache")),
    }


def saved_in(run_folder: Path) -> dict[str, TensorStorageMetadata]:
    """What DCP says is in the newest checkpoint: tensors by name."""
    found, _ = latest_checkpoint(run_folder / "checkpoints")
    assert found is not None
    entries = FileSystemReader(found.path / "state").read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def bytes_of(entries: dict[str, TensorStorageMetadata]) -> int:
    return sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in entries.values())


def size_on_disk(run_folder: Path) -> int:
    """Of the newest checkpoint's tensors and small values."""
    found, _ = latest_checkpoint(run_folder / "checkpoints")
    assert found is not None
    return sum(path.stat().st_size for path in (found.path / "state").glob("*.distcp"))


# --- What is in it ----------------------------------------------------------------------------------------------------


@KINDS
def test_no_byte_of_a_frozen_base_is_in_a_checkpoint(
    run_ranks: Any, settings: dict[str, str], base: Path, more: dict[str, str], tmp_path: Path
) -> None:
    """All that is trained is, and every buffer; files have room for nothing else. The manifest says of the rest."""
    run_ranks(2, run_that_holds_all, tmp_path / "all", settings | more)
    run_ranks(2, run, tmp_path / "cut", settings | more, stop_after=2)
    everything, held = saved_in(tmp_path / "all"), saved_in(tmp_path / "cut")

    def is_frozen(name: str) -> bool:
        if name.endswith((".e_score_correction_bias", ".tid2eid")):  # buffers
            return False
        if more is LORA:
            return not is_adapter_name(name)
        return ".indexer." in name or any(matches_components(name, pattern) for pattern in FROZEN)

    frozen = {name for name in everything if name.startswith("model.") and is_frozen(name)}
    assert held.keys() == everything.keys() - frozen
    assert len(frozen) > 10
    saved_bytes = size_on_disk(tmp_path / "all") - size_on_disk(tmp_path / "cut")
    assert saved_bytes >= bytes_of({name: everything[name] for name in frozen})
    assert size_on_disk(tmp_path / "cut") - bytes_of(held) < 4000 * len(held)  # headers and alignment of torch.save
    manifest = json.loads((tmp_path / "cut/checkpoints/step-00000002/manifest.json").read_text())
    assert manifest["source"] == str(base)
    assert manifest["base"] == checkpoint_digests(base)
    assert json.loads((tmp_path / "all/checkpoints/step-00000002/manifest.json").read_text())["base"] is None


@pytest.mark.parametrize(
    "more",
    [{"model.freeze": "", "model.train": "full"}, LORA | {"model.init": "random"}],
    ids=["nothing_frozen", "random"],
)
def test_what_comes_from_no_base_is_saved(
    run_ranks: Any, settings: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    """Random weights, frozen or not. And a run that trains all keeps its frozen indexer, so as to need no base."""
    run_ranks(1, run, tmp_path, settings | more, stop_after=1)
    names = saved_in(tmp_path)
    assert "model.model.embed_tokens.weight" in names
    assert any(".indexer." in name for name in names if name.startswith("model."))
    assert json.loads((tmp_path / "checkpoints/step-00000001/manifest.json").read_text())["base"] is None


@KINDS
def test_a_plan_says_what_a_checkpoint_takes(
    run_ranks: Any, settings: dict[str, str], base: Path, more: dict[str, str], tmp_path: Path
) -> None:
    """To the byte: what DCP holds of weights, buffers and moments, and the RoPE tables, which are not saved."""
    from transformers import AutoConfig

    run_ranks(2, run, tmp_path, settings | more, stop_after=2)
    config = AutoConfig.from_pretrained(base)
    del config.quantization_config
    lora = {"rank": 4} if more is LORA else {}
    freeze = () if more is LORA else FROZEN
    trained = ModelConfig(path=str(base), train="lora" if more is LORA else "full", lora=lora, freeze=freeze)
    estimator = Estimator("tiny", config, trained=trained)
    options = TrainingSettings(batch=2, sequence=64, optimizer="adamw")
    estimate = estimator.estimate(Cluster(2, 2), options)
    model = estimator._model("bf16").model
    tables = {id(b): b.nbytes for n, b in model.named_buffers() if n not in model.state_dict()}
    held = {n: entry for n, entry in saved_in(tmp_path).items() if not n.startswith("rng.")}
    assert estimate.checkpoint_bytes == bytes_of(held) + sum(tables.values())
    whole = Estimator("tiny", config, trained=trained.model_copy(update={"init": "random"}))
    before = whole.estimate(Cluster(2, 2), options)
    assert before.checkpoint_bytes - estimate.checkpoint_bytes > 100_000
    assert before.host.save_sharded - estimate.host.save_sharded > 100_000
    assert before.export_bytes == estimate.export_bytes


# --- Going on ---------------------------------------------------------------------------------------------------------


@KINDS
def test_a_run_goes_on_in_every_bit_on_any_mesh(
    run_ranks: Any, settings: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    """On the same ranks the steps are those of a run that was never stopped. From 2 ranks to 2 x 2 with dealt experts,
    to 4, to 1, every bit of weights, buffers and moments arrives."""
    whole = run_ranks(2, leg, tmp_path / "whole", settings | more)
    run_ranks(2, leg, tmp_path / "cut", settings | more, stop_after=2)
    resumed = run_ranks(2, leg, tmp_path / "cut", settings | more)
    assert resumed[0][0] == whole[0][0][2:]
    assert [end for _, _, end in resumed] == [end for _, _, end in whole]

    hsdp = {"mesh.replicate": "2", "mesh.expert_parallel": "2"}
    saved = None
    for stop_after, (num_ranks, mesh) in enumerate([(2, {}), (4, hsdp), (4, {}), (1, {})], start=1):
        legs = run_ranks(num_ranks, leg, tmp_path / "moving", settings | more | mesh, stop_after=1)
        assert [row[0] for row in legs[0][0]] == [stop_after]
        assert saved is None or {begin for _, begin, _ in legs} == {saved}
        saved = legs[0][2]


@KINDS
def test_a_checkpoint_that_holds_the_base_is_still_read(
    run_ranks: Any, settings: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    """As older versions wrote them. The run did not read the base, and keeps writing such."""
    whole = run_ranks(2, run, tmp_path / "whole", settings | more)[0]
    first = run_ranks(2, run_that_holds_all, tmp_path / "cut", settings | more)[0]
    assert first + run_ranks(2, run, tmp_path / "cut", settings | more)[0] == whole
    names = saved_in(tmp_path / "cut")
    assert "model.model.embed_tokens.weight" in names
    manifest = tmp_path / "cut/checkpoints/step-00000002/manifest.json"
    values = json.loads(manifest.read_text())
    del values["base"]  # was not written at all
    manifest.write_text(json.dumps(values))
    shutil.rmtree(tmp_path / "cut/checkpoints/step-00000004")
    assert run_ranks(2, run, tmp_path / "cut", settings | more)[0] == whole[2:]


def test_another_set_of_frozen_weights_is_refused(run_ranks: Any, settings: dict[str, str], tmp_path: Path) -> None:
    """What is trained now and was frozen has no moments; what was trained would stand still. On all ranks."""
    run_ranks(2, run, tmp_path, settings | FREEZE, stop_after=1)
    fewer, more = "embed_tokens,layers.0", ",".join([*FROZEN, "lm_head"])
    for error in run_ranks(2, refused, tmp_path, settings | FREEZE | {"model.freeze": fewer}):
        assert "tensors of the model are not in the checkpoint:\n  - model.layers.1.mlp.experts" in error
    for error in run_ranks(2, refused, tmp_path, settings | FREEZE | {"model.freeze": more}):
        assert "1 parameters were trained and now are not (frozen, or left out):\n  - lm_head.weight" in error


# --- Another base -----------------------------------------------------------------------------------------------------


def other_config(base: Path) -> None:
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 2e-6}))


def other_byte_in_a_header(base: Path) -> None:
    file = base / "model-00002-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    place = data.index(b'"pt"')
    data[place : place + 4] = b'"pT"'  # of the metadata: every tensor is as it was
    file.write_bytes(data)


def other_weight(base: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"][3] += 1

    for file in base.glob("*.safetensors"):
        if "norm.weight" in load_file(file):
            before = file.stat().st_size
            rewrite(file, change)
            assert file.stat().st_size == before


def lost_file(base: Path) -> None:
    (base / "model-00002-of-00003.safetensors").unlink()


def moved(base: Path) -> None:
    shutil.move(base, base.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_config, "- config.json: another file under this name\n"),
        (other_byte_in_a_header, "- model-00002-of-00003.safetensors: another file under this name\n"),
        (other_weight, ".safetensors: another file under this name\n"),
        (lost_file, "- model-00002-of-00003.safetensors: no such file\n"),
        (moved, "- no such folder\n"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_another_base_is_refused_and_nothing_is_lost(
    run_ranks: Any,
    settings: dict[str, str],
    base: Path,
    change: Callable[[Path], None],
    said: str,
    tmp_path: Path,
) -> None:
    """On all ranks, by its files, with what to do; with the right one, also elsewhere, the run goes on."""
    copy = Path(shutil.copytree(base, tmp_path / "base"))
    more = settings | LORA | {"model.path": str(copy)}
    folder = tmp_path / "run"
    run_ranks(2, run, folder, more, stop_after=2)
    before = sorted(path for path in (folder / "checkpoints").rglob("*"))
    config = (folder / "config.yaml").read_text()
    change(copy)
    errors = run_ranks(2, refused, folder, more | {"checkpoint.keep": "9"})
    assert errors[0] == errors[1]
    checkpoint = folder / "checkpoints" / "step-00000002"
    assert errors[0].startswith(f"the frozen weights that {checkpoint} was trained on are not there; ")
    assert "\nexpected: the checkpoint that the run started from, 4 files by their digests\ngot:\n" in errors[0]
    assert said in errors[0]
    assert f"\nwhere: {copy}\nwhat to do: name its folder with --model.path (it was {copy}), or fetch " in errors[0]
    assert sorted(path for path in (folder / "checkpoints").rglob("*")) == before
    assert (folder / "config.yaml").read_text() == config
    assert [row[0] for row in run_ranks(2, run, folder, more | {"model.path": str(base)})[0]] == [3, 4]


def test_one_rank_that_sees_another_base_stops_all(run_ranks: Any, settings: dict[str, str], tmp_path: Path) -> None:
    """A node with a copy of its own: at a resume, and already at the start."""
    run_ranks(2, run, tmp_path / "run", settings | LORA, stop_after=1)
    errors = run_ranks(2, refused, tmp_path / "run", settings | LORA, other_on_rank=1)
    assert errors[1] == "it is another"
    assert errors[0].endswith("rank 1 failed.\ngot: it is another")
    for error in run_ranks(2, started_with_another_base, tmp_path / "new", settings | LORA):
        assert "the ranks differ in: digest of frozen weights" in error


def test_the_command_says_so_once_and_fails(
    run_ranks: Any, settings: dict[str, str], base: Path, tmp_path: Path
) -> None:
    """Exit code 1, without a traceback."""
    copy = Path(shutil.copytree(base, tmp_path / "base"))
    more = settings | LORA | {"model.path": str(copy)}
    run_ranks(1, run, tmp_path / "run", more, stop_after=1)
    other_config(copy)
    command = [sys.executable, "-m", "dsv4_fsdp.cli", "train", "--run-dir", str(tmp_path / "run"), "--nproc", "2"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert said.count("config.json: another file under this name") == 1
    assert "what to do: name its folder with --model.path" in said
    assert "Traceback" not in said


def test_digests_are_cheap_and_see_another_training(tmp_path: Path) -> None:
    """64 KiB of each file's data and its header. What lies between is not seen: one number of a large file."""
    from safetensors.torch import save_file

    weights = torch.arange(2**20, dtype=torch.float32)
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": weights}, tmp_path / "model.safetensors")
    first = checkpoint_digests(tmp_path)
    weights[5000] += 1  # behind the first block, before the second
    save_file({"w": weights}, tmp_path / "model.safetensors")
    assert checkpoint_digests(tmp_path) == first
    save_file({"w": weights * 1.001}, tmp_path / "model.safetensors")
    assert checkpoint_digests(tmp_path) != first


# --- Exports ----------------------------------------------------------------------------------------------------------


@KINDS
def test_an_export_is_that_of_a_run_that_holds_all(
    run_ranks: Any, settings: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    """Whole or merged, in both layouts, and the adapter alone: every name, dtype and byte. Moved biases are there."""
    run_ranks(2, run_that_holds_all, tmp_path / "all", settings | more)
    run_ranks(2, run, tmp_path / "cut", settings | more, stop_after=1)
    run_ranks(2, run, tmp_path / "cut", settings | more, stop_after=1)
    kinds: list[dict[str, Any]] = [{}, {"layout": "release"}]
    if more is LORA:
        kinds = [{}, *({"merge": True} | kind for kind in kinds)]
    for number, options in enumerate(kinds):
        for name in ("all", "cut"):
            check = name == "cut" and options == {}
            exported = export_checkpoint(tmp_path / name, tmp_path / name / str(number), check=check, **options)
            assert (exported.reloaded is not None) == check
        assert raw(tmp_path / "cut" / str(number)) == raw(tmp_path / "all" / str(number)), options
    if more is FREEZE:
        found, _ = latest_checkpoint(tmp_path / "cut" / "checkpoints")
        assert found is not None
        held = CheckpointTensors(found.path / "state")
        biases = [name for name in held.specs if name.endswith("e_score_correction_bias")]
        exported_tensors = loaded(tmp_path / "cut" / "0")
        assert biases
        for name in biases:
            assert torch.equal(exported_tensors[name], held.read(name))
            assert not torch.equal(exported_tensors[name], released_model().state_dict()[name])


def test_the_trainers_own_export_is_the_commands(run_ranks: Any, settings: dict[str, str], tmp_path: Path) -> None:
    """Of a run that was stopped and went on: what it writes at its end, and what is made of its last checkpoint."""
    run_ranks(2, run, tmp_path, settings | FREEZE, stop_after=2)
    run_ranks(2, run, tmp_path, settings | FREEZE, steps_only=False)
    export_checkpoint(tmp_path, tmp_path / "again", check=False)
    assert raw(tmp_path / "again") == raw(tmp_path / "export")


def test_an_export_refuses_another_base(run_ranks: Any, settings: dict[str, str], base: Path, tmp_path: Path) -> None:
    """And takes the right one from its new place."""
    from dsv4_fsdp.errors import ExportError

    copy = Path(shutil.copytree(base, tmp_path / "base"))
    run_ranks(1, run, tmp_path / "run", settings | LORA | {"model.path": str(copy)}, stop_after=1)
    other_weight(copy)
    for merge in (False, True):
        with pytest.raises(ExportError, match=r"another file under this name(.|\n)*--source") as caught:
            export_checkpoint(tmp_path / "run", tmp_path / "export", merge=merge)
        assert f"where: {copy}" in str(caught.value)
        assert not (tmp_path / "export").exists()
    export_checkpoint(tmp_path / "run", tmp_path / "export", source=base, merge=True)
