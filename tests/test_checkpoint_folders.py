"""The folder of checkpoints: what is published is whole, whoever is killed and whatever goes wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases_checkpoint_folders import (
    bad_folder,
    failing_saves,
    killed_run,
    latest_of,
    leftovers,
    manifest_of,
    replace_a_damaged_one,
    save_twice,
    saved_in_the_background,
)
from cases_checkpoints import publish

import pool
from dsv4_fsdp.train.checkpoints import CheckpointError, latest_checkpoint, read_checkpoint
from pool import run_ranks


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("published") / "run" / "checkpoints"
    run_ranks(2, publish, folder, [1, 2, 3])
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A copy of ``published`` to damage."""
    return Path(shutil.copytree(published, tmp_path / "checkpoints"))


# --- What is written --------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_documented_layout(published: Path) -> None:
    """Everything that is in the folder is in the manifest, with its size."""
    path = published / "step-00000003"
    manifest = manifest_of(path)
    files = manifest.pop("files")
    assert manifest == {
        "format": 1,
        "step": 3,
        "source": None,
        "base": None,
        "world_size": 2,
        "mesh": {"shard": 2},
        "plan_hash": "0123",
        "optimizer": ["AdamW"],
        "torch": torch.__version__,
    }
    there = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    del there["manifest.json"]
    assert files == there
    assert set(files) == {
        "config.yaml",
        "model/config.json",
        "state/.metadata",
        "state/__0_0.distcp",
        "state/__1_0.distcp",
    }
    assert (path / "config.yaml").read_text() == "steps: 4\n"
    assert read_checkpoint(path).config_text == "steps: 4\n"


def test_the_newest_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    """Also no folder with a dot."""
    run_ranks(2, publish, tmp_path, [1, 2, 9, 10], keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]


def test_what_a_killed_run_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """And a checkpoint that had just lost its name to its successor gets it back."""
    assert run_ranks(2, leftovers, tmp_path) == [["step-00000001"]] * 2


def test_one_step_is_saved_once(tmp_path: Path) -> None:
    """A run that stops where it has just saved, or where it began, does not write the same again."""
    for before, after in run_ranks(2, save_twice, tmp_path):
        assert before == after


def test_a_damaged_checkpoint_gives_way_to_a_new_one_of_its_step(tmp_path: Path) -> None:
    """It is in the way of the rename."""
    for names, newest in run_ranks(2, replace_a_damaged_one, tmp_path):
        assert names == ["step-00000001", "step-00000002"]
        assert newest == 2


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """What is written is the state of the moment of the call; published only at the end."""
    assert run_ranks(2, saved_in_the_background, tmp_path) == [(True, [], True)] * 2


# --- Damage -----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path / "state" / "__1_0.distcp", 100)


def lose(path: Path) -> None:
    (path / "state" / "__0_0.distcp").unlink()


def without_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def other_format(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps({"format": 2}))


def half_a_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 50)


def another_manifest(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": ["state"]}))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut, "state/__1_0.distcp has 100 bytes instead of "),
    (lose, "state/__0_0.distcp is missing ("),
    (without_manifest, "is no checkpoint: manifest.json cannot be read ("),
    (other_format, "has format 2, and this version of dsv4-fsdp reads format 1"),
    (half_a_manifest, "is no checkpoint: manifest.json cannot be read ("),
    (another_manifest, "manifest.json is damaged ("),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    folder: Path, damage: Callable[[Path], None], said: str
) -> None:
    """What is missing or cut off, and what to do."""
    damage(folder / "step-00000003")
    found, problems = latest_checkpoint(folder)
    assert found is not None
    assert found.step == 2
    assert len(problems) == 1
    assert said in problems[0]
    assert "step-00000003" in problems[0]
    assert "what to do: " in problems[0]


def test_if_all_are_damaged_that_is_an_error_with_every_reason(folder: Path) -> None:
    """Starting over without a word would throw the run away."""
    cut(folder / "step-00000003")
    lose(folder / "step-00000002")
    without_manifest(folder / "step-00000001")
    with pytest.raises(CheckpointError) as error:
        latest_checkpoint(folder)
    for text in ("__1_0.distcp has 100 bytes", "__0_0.distcp is missing", "step-00000001 is no checkpoint"):
        assert text in str(error.value)


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    """Nor does one with other people's files."""
    assert latest_checkpoint(tmp_path / "none") == (None, [])
    (tmp_path / "step-notes.txt").touch()
    (tmp_path / ".tmp-step-00000001").mkdir()
    assert latest_checkpoint(tmp_path) == (None, [])


def test_all_ranks_are_told_of_the_same_checkpoint(folder: Path) -> None:
    """Rank 0 looks and speaks; an error is raised on all."""
    cut(folder / "step-00000003")
    (step, said, _), other = run_ranks(2, latest_of, folder)
    assert step == 2
    assert len(said) == 1
    assert "__1_0.distcp has 100 bytes" in said[0]
    assert other == (2, [], "")
    for path in folder.iterdir():
        without_manifest(path)
    errors = [error for _, _, error in run_ranks(2, latest_of, folder)]
    assert errors[0] == errors[1]
    assert "can be used" in errors[0]


# --- Saves that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_loses_nothing(tmp_path: Path, asynchronous: bool) -> None:
    """A full disk in the middle of it or seen before it, no permission, a disk that does not keep what it is given,
    a folder that not all ranks share."""
    path = tmp_path / "checkpoints"
    results = run_ranks(2, failing_saves, path, asynchronous=asynchronous, timeout_s=60)
    assert results[0] == results[1]
    found = results[0]
    temporary = path / ".tmp-step-00000002"
    assert found["fine"] == found["fine again"] == ""
    assert "could not write the checkpoint of step 2.\ngot: " in found["one rank"]
    assert f"where: {temporary}" in found["one rank"]
    assert "on rank 1\n" in found["one rank"]
    assert "on rank 0\n" in found["rank 0"]
    assert "PermissionError" in found["model files"]
    assert "config.json, on rank 0\n" in found["model files"]
    assert "No space left on device" in found["no space"]
    assert "Input/output error" in found["no sync"]
    for name in ("one rank", "rank 0", "model files", "no space", "no sync"):
        assert "needed: about 32.0 MiB; free there: " in found[name]
        is_full = name in ("one rank", "rank 0", "no space")
        mend = "free space, lower checkpoint.keep" if is_full else "mend what is said above"
        assert f"what to do: {mend}, or put the run folder elsewhere" in found[name]
        assert "earlier checkpoints are as they were" in found[name]
    assert "rank 0 does not see what other ranks wrote" in found["not shared"]
    assert "- __1_0.distcp\nwhat to do: put the run folder on a file system" in found["not shared"]
    for step in range(1, 8):
        assert found[f"names after {step}"] == ["step-00000001"]
    assert found["names after 8"] == ["step-00000001", "step-00000008"]
    assert found["newest"] == 8


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    """On all ranks, before anything is trained."""
    (tmp_path / "file").touch()
    errors = run_ranks(2, bad_folder, tmp_path / "file" / "checkpoints")
    assert errors[0] == errors[1]
    assert "could not prepare" in errors[0]
    assert "NotADirectoryError" in errors[0]


# --- Killed runs ------------------------------------------------------------------------------------------------------

NUM_KILLS = 20


def test_a_run_killed_at_any_moment_of_a_save_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """20 times: one rank, or both; everything published can be read, and holds one step's state throughout."""
    seed = int(os.environ.get("KILL_SEED", "0"))
    rng = random.Random(seed)
    folder = tmp_path / "checkpoints"
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*pool.PRELOAD, "torch.distributed.checkpoint.state_dict"])
    newest, within, save_s = 0, 0, 0.1
    for generation in range(NUM_KILLS):
        ours, theirs = server.Pipe(duplex=False)
        store = str(tmp_path / f"store{generation}")
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
            ranks = [
                server.Process(target=killed_run, args=(rank, 2, store, str(folder), theirs), daemon=True)
                for rank in range(2)
            ]
            for process in ranks:
                process.start()
        theirs.close()
        try:
            assert ours.poll(60), f"seed {seed}, generation {generation}: no start"
            assert ours.recv() == ("loaded", newest), f"seed {seed}, generation {generation}"
            for _ in range(rng.randint(1, 2)):
                began = time.monotonic()
                assert ours.poll(30)
                assert ours.recv()[0] == "saving"
            save_s = 0.5 * (save_s + time.monotonic() - began) if generation else save_s
            time.sleep(rng.uniform(0, 1.5 * save_s))
            first = rng.choice([[0], [1], [0, 1]])
            for rank in first:
                os.kill(ranks[rank].pid or 0, signal.SIGKILL)
            for process in ranks:
                process.join(timeout=15)
                assert process.exitcode, f"seed {seed}, generation {generation}: a rank waits for a dead one"
        finally:
            for process in ranks:
                process.kill()
            ours.close()
        within += any(path.name.startswith(".tmp-") for path in folder.iterdir())
        found, problems = latest_checkpoint(folder)
        assert problems == []
        assert found is None or found.step >= newest
        newest = 0 if found is None else found.step
    assert newest > 0
    assert within >= NUM_KILLS // 4, f"only {within} kills were inside a save"
