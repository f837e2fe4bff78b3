"""``dsv4-fsdp export`` as its users run it: what it says, and one line and nothing half-written for wrong input."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from tiny_checkpoints import release_checkpoint, released_model, training_checkpoint
from typer.testing import CliRunner, Result

from dsv4_fsdp.commands.export import export

app = typer.Typer()
app.command()(export)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a release and a run that started from it and changed one tensor, as relative paths."""
    folder = tmp_path_factory.mktemp("export")
    release_checkpoint(folder / "source")
    state = {name: tensor.clone() for name, tensor in released_model().state_dict().items()}
    state["lm_head.weight"][2, 2] += 1
    checkpoint = folder / "run" / "checkpoints" / "step-00000100"
    training_checkpoint(checkpoint, released_model(), source=Path("source"), state=state)
    return folder


@pytest.fixture
def work(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_it_says_what_was_kept_what_changed_and_how_it_was_checked(work: Path) -> None:
    """And the export is there, reloaded by stock Transformers, with the tokenizer; the release's own layout."""
    result = run("run", "--to", "out", "--layout", "release")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        f"from    step 100, {Path('run/checkpoints/step-00000100')}",
        "export  out: 300 tensors (44 BF16, 48 F32, 43 F8_E4M3, 103 F8_E8M0, 2 I64, 60 I8), 0.6 MB",
        "source  source",
        "        115 tensors as they are there, 41 of them quantised; 1 changed",
        "mtp     41 tensors carried over",
        "checked reloaded in a fresh process by stock libraries: logits equal in every bit",
    ]
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {path.name for path in Path("out").iterdir()}
    assert not list(work.glob(".out*"))


def test_rounding_of_master_weights_is_said(work: Path) -> None:
    """With the option that keeps them."""
    checkpoint = work / "masters"
    state = {n: t.float() if t.is_floating_point() else t for n, t in released_model().state_dict().items()}
    training_checkpoint(checkpoint, released_model(), state=state)
    result = run("masters", "--to", "out", "--no-verify")
    assert result.exit_code == 0, result.stderr
    weights = sum(t.dtype == torch.bfloat16 for t in released_model().state_dict().values())
    assert f"dtype   {weights} fp32 master weights rounded to bf16; --dtype float32 keeps them\n" in result.stdout
    assert result.stdout.endswith("checked by its headers; not reloaded (--verify)\n")
    result = run("masters", "--to", "wide", "--no-verify", "--dtype", "float32")
    assert "dtype" not in result.stdout
    assert {str(t.dtype) for t in load_file("wide/model.safetensors").values()} == {"torch.float32", "torch.int64"}


# --- Wrong input ------------------------------------------------------------------------------------------------------

CHECKPOINT = Path("run/checkpoints/step-00000100")


def cut(pattern: str) -> Callable[[], None]:
    def change() -> None:
        path = sorted(Path().glob(pattern))[0]
        os.truncate(path, path.stat().st_size // 2)

    return change


def unfinished() -> None:
    (CHECKPOINT / "manifest.json").unlink()


def new_format() -> None:
    (CHECKPOINT / "manifest.json").write_text(json.dumps({"format": 2, "step": 100}))


def no_run() -> None:
    shutil.rmtree("run")


def never_saved() -> None:
    shutil.rmtree("run/checkpoints")


def target_is_full() -> None:
    Path("out").mkdir()
    Path("out", "precious").touch()


def target_is_a_file() -> None:
    Path("out").touch()


def source_is_gone() -> None:
    shutil.rmtree("source")


def metadata_is_gone() -> None:
    (CHECKPOINT / "state" / ".metadata").unlink()


def shard_is_gone() -> None:
    next((CHECKPOINT / "state").glob("*.distcp")).unlink()


def is_lora() -> None:
    (CHECKPOINT / "model" / "adapter_config.json").write_text("{}")


def other_model() -> None:
    path = CHECKPOINT / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_routed_experts": 8}))


def unknown_model() -> None:
    path = CHECKPOINT / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "nobody"}))


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (no_run, [], "there is nothing to export; .*got: nothing at all; where: run; "),
        (never_saved, [], "there is nothing to export; .*got: none; where: run; "),
        (unfinished, [], "there is nothing to export; .*got: one without manifest.json: it was not written to its end"),
        (new_format, [], "a checkpoint of another format; expected: format 1; got: format 2; "),
        (cut("run/**/manifest.json"), [], "a checkpoint's manifest cannot be read; "),
        (target_is_full, [], "the export would overwrite something; .*got: a folder that is not empty; where: out; "),
        (target_is_a_file, [], "the export would overwrite something; .*got: a file; where: out; "),
        (
            cut("run/**/*.distcp"),
            [],
            "the training checkpoint is cut short; expected: [0-9,]+ bytes; got: [0-9,]+ bytes",
        ),
        (shard_is_gone, [], "the training checkpoint is cut short; expected: [0-9,]+ bytes; got: no such file; "),
        (metadata_is_gone, [], "the training checkpoint cannot be read; "),
        (cut("run/**/.metadata"), [], "the training checkpoint cannot be read; "),
        (
            source_is_gone,
            [],
            "the checkpoint that training started from is not there; .*got: no such folder; ",
        ),
        (nothing, ["--source", "run"], "the checkpoint that training started from is not there; .*where: run; "),
        (cut("source/model-00002*"), [], r"the source checkpoint has a damaged file \(truncated-file\); "),
        (nothing, ["--merge"], "there is nothing to merge; "),
        (is_lora, ["--layout", "release"], "an adapter has peft's layout .*; what to do: add --merge, "),
        (
            other_model,
            [],
            r"what was trained is not the model that its config describes, in 14 tensors: model.layers.0.mlp",
        ),
        (unknown_model, [], "the checkpoint's model cannot be built"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    change: Callable[[], None], options: list[str], message: str, work: Path
) -> None:
    """Exit code 2, no folder under the final name or another, what was there untouched."""
    change()
    before = sorted(work.rglob("*"))
    result = run("run", "--to", "out", *options)
    assert result.exit_code == 2, result.output
    assert re.match(f"error: {message}", result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted(work.rglob("*")) == before


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the least that the export can take."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=300_000))
    result = run("run", "--to", "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: the disk is too full for the export; expected: at least 0.001 GB; got: 0.000 GB free; "
    )
    assert not [path for path in work.iterdir() if "out" in path.name]


def test_a_disk_that_runs_full_leaves_nothing_half_written(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else fills it while the files are written."""

    def full(_: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run("run", "--to", "out")
    assert result.exit_code == 2
    assert result.stderr == "error: [Errno 28] No space left on device\n"
    assert not [path for path in work.iterdir() if "out" in path.name]
