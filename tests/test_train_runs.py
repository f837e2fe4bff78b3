"""Whole runs in combinations of settings: stopped and resumed, resumed elsewhere, exported."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases_train_runs import full_while_saving, run
from safetensors.torch import load_file
from tiny_checkpoints import release_checkpoint

from dsv4_fsdp.train.checkpoint_folder import latest_checkpoint
from dsv4_fsdp.train.checkpoints import Checkpoints
from dsv4_fsdp.train.config import ConfigError, from_yaml, resolve, to_yaml
from dsv4_fsdp.train.ranks import Ranks, RanksMissing
from dsv4_fsdp.train.run_folder import RunFolder, RunFolderError

ROOT = Path(__file__).parent.parent
LORA = {"model.train": "lora", "model.lora.rank": "4"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four steps on the README's conversations, from a quantised release."""
    return {
        "steps": "4",
        "model.init": "checkpoint",
        "model.path": str(release_checkpoint(tmp_path_factory.mktemp("release"))),
        "data.kind": "sft",
        "data.path": str(ROOT / "examples/sft/conversations.jsonl"),
        "data.template": str(ROOT / "examples/sft/chat.jinja"),
        "data.sequence_length": "64",
        "data.global_batch_size": "4",
        "data.cache_dir": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.mark.parametrize(
    "more",
    [
        {"model.storage": "fp32", "router_bias_rate": "0.01"},
        {"mesh.cpu_offload": "true"},
        {"optimizer.name": "adamw_8bit", "mesh.activation_checkpointing": "2"},
        {"optimizer.name": "adamw_bf16_sr", "mesh.expert_parallel": "2"},
        {"optimizer.name": "muon", "mesh.island_units": "root"},
        LORA | {"model.lora.dropout": "0.2"},
    ],
    ids=["masters-router_bias", "cpu_offload", "adamw_8bit", "adamw_bf16_sr-ep", "muon-root", "lora-dropout"],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    run_ranks: Any, settings: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    """Loss and gradient norm of every later step are equal in every bit."""
    whole = run_ranks(2, run, tmp_path / "whole", settings | more)[0]
    first = run_ranks(2, run, tmp_path / "cut", settings | more, stop_after=2)[0]
    second = run_ranks(2, run, tmp_path / "cut", settings | more)[0]
    assert (len(first), len(second)) == (2, 2)
    assert first + second == whole


def test_a_run_goes_on_with_other_ranks_and_meshes(run_ranks: Any, settings: dict[str, str], tmp_path: Path) -> None:
    """From 2 ranks to 1 to 2 x 2 with dealt experts, islands in the root: the same steps, each once in the metrics."""
    whole = run_ranks(2, run, tmp_path / "whole", settings)[0]
    folder = tmp_path / "cut"
    hsdp = {"mesh.replicate": "2", "mesh.expert_parallel": "2", "mesh.island_units": "root"}
    rows = run_ranks(2, run, folder, settings, stop_after=1)[0]
    rows += run_ranks(1, run, folder, settings, stop_after=2)[0]
    rows += run_ranks(4, run, folder, settings | hsdp)[0]
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    # Gradients are added up in another order and rounded to bf16 elsewhere: 2**-8 at each of four steps.
    for got, expected in zip(rows, whole, strict=True):
        assert got[1] == pytest.approx(expected[1], rel=4 * 2**-8)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    config = from_yaml((folder / "config.yaml").read_text())
    assert (config.nproc, config.mesh.expert_parallel) == (4, 2)


def test_a_file_that_cannot_be_written_to_its_end_is_said_in_words(
    run_ranks: Any, settings: dict[str, str], tmp_path: Path
) -> None:
    """All ranks say what to do about it, and the checkpoint before it is there to go on from."""
    run_ranks(2, run, tmp_path, settings, stop_after=1)
    for error in run_ranks(2, full_while_saving, tmp_path, settings | {"checkpoint.every": "1"}):
        assert "could not write the checkpoint of step 2." in error
        assert "what to do: free space, " in error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert [row[0] for row in run_ranks(2, run, tmp_path, settings)[0]] == [2, 3, 4]


def test_what_torchs_archive_writer_says_of_a_full_disk_is_explained(tmp_path: Path) -> None:
    """Its own words, when a tensor's bytes do not fit; the errno is lost by then."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    text = Checkpoints._words(mock.Mock(folder=tmp_path), "write it", error, tmp_path, 1, rank=0)
    assert "that is: a file could not be written to its end (disk, quota or file size limit)\n" in text
    assert "what to do: free space, " in text


def test_bf16_adapters_are_exported_though_the_tokenizer_has_no_bos(
    run_ranks: Any, settings: dict[str, str], tmp_path: Path
) -> None:
    """Stock peft, told not to widen them, gives the trained model's logits; a sample needs no BOS token."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    values = json.loads((Path(settings["model.path"]) / "tokenizer.json").read_text())
    (tokenizer / "tokenizer.json").write_text(json.dumps(values | {"added_tokens": []}))
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    more = LORA | {"steps": "1", "model.lora.dtype": "bf16", "data.tokenizer": str(tokenizer)}
    run_ranks(1, run, tmp_path / "run", settings | more, steps_only=False)
    adapter = load_file(tmp_path / "run" / "export" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}


def test_a_run_that_is_lengthened_keeps_no_old_export_under_the_name(
    run_ranks: Any, settings: dict[str, str], tmp_path: Path
) -> None:
    """The export of its former end is set aside, so that what is called ``export`` is what the run ended with."""
    folder = tmp_path / "run"
    short = settings | {"checkpoint.every": "1", "steps": "1"}
    run_ranks(1, run, folder, short)
    (folder / "export").mkdir()
    run_ranks(1, run, folder, short)  # has ended: nothing to do
    assert (folder / "export").is_dir()
    run_ranks(1, run, folder, short | {"steps": "2"})
    assert not (folder / "export").exists()
    assert (folder / "export-step-00000001").is_dir()


def test_a_run_that_has_ended_without_a_checkpoint_is_not_started_anew(tmp_path: Path) -> None:
    """It would begin at step 1 and drop the metrics that are there."""
    config = resolve({})
    folder = RunFolder(tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    folder.check(config)  # was killed before anything was kept
    (tmp_path / "export").mkdir()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="has ended and kept no checkpoint to go on from"):
        folder.check(config)
    (tmp_path / "checkpoints" / "step-00000001").mkdir()
    folder.check(config)


def test_a_run_folder_that_cannot_be_made_is_said_in_words(tmp_path: Path) -> None:
    """No traceback of ``mkdir``, whoever the user is: /proc refuses root too."""
    with pytest.raises(RunFolderError, match=r"got: .+\nwhere: /proc/run\nwhat to do: "):
        RunFolder(Path("/proc/run")).create(resolve({}))


def test_a_rank_says_who_did_not_come_and_leaves_without_a_traceback(tmp_path: Path) -> None:
    """Started by RANK and WORLD_SIZE alone, where no agent holds the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_fsdp.cli", "train", "--run-dir", tmp_path, "--mesh.start_timeout_s", "1"],
        env=os.environ | started,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("rank 0: 2 of 3 ranks did not come within 1 s.\n")
    assert f"expected: all of them at 127.0.0.1:{port}\ngot: nothing from ranks 1, 2\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_waits_for_a_dead_one_leaves_when_told_to() -> None:
    """SIGTERM is no more than a flag, so who waits outside of a collective must look at it."""
    here, away = mock.Mock(return_value=False), mock.Mock(side_effect=[False, True])
    ranks = Ranks(0, 2, 0, torch.device("cpu"), mock.Mock(), None, mock.Mock(check=lambda keys: keys == ["data/0"]))
    with pytest.raises(RanksMissing, match="told to stop while waiting for rank 1 to be done with: data"):
        ranks.wait_patiently("data", told_to_stop=away)
    everybody = Ranks(0, 2, 0, torch.device("cpu"), mock.Mock(), None, mock.Mock(check=lambda keys: True))
    everybody.wait_patiently("data", told_to_stop=here)


@pytest.mark.parametrize("value", ["0", "3"])
def test_a_number_of_ranks_to_reshard_among_must_divide_them(value: str) -> None:
    """Found before any process starts."""
    with pytest.raises(ConfigError) as caught:
        resolve({"nproc": "4", "mesh.replicate": "2", "mesh.reshard_after_forward": value})
    (problem,) = caught.value.problems
    assert problem.startswith(f"mesh.reshard_after_forward: {value} does not divide the 2 ranks that share a model; ")
    resolve({"nproc": "4", "mesh.replicate": "2", "mesh.reshard_after_forward": "2"})


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: signal.Signals(number).name)
def test_a_signal_to_the_command_saves_and_leaves(number: signal.Signals, tmp_path: Path) -> None:
    """Torchrun's code passes it to the ranks; they finish the step, save it, and the command says so."""
    folder = tmp_path / "run"
    settings = ["--steps", "1000", "--nproc", "1", "--logging.audit", "off", "--data.sequence_lengths", "16,140"]
    command = [sys.executable, "-m", "dsv4_fsdp.cli", "train", "--run-dir", str(folder), *settings]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert process.poll() is None, (tmp_path / "err").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=120) == 128 + number
    last = len(metrics.read_text().splitlines())
    found, problems = latest_checkpoint(folder / "checkpoints")
    assert problems == []
    assert found is not None
    assert found.step == last < 1000
    assert f"stopped: {number.name}, after step {last} of 1000" in (tmp_path / "out").read_text()
    assert (tmp_path / "err").read_text() == f"\nstopped by {number.name}\n"
