"""``dsv4-fsdp train`` as its users run it: a whole run on two ranks, failures in the middle, and wrong input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases_train import UNEQUAL, make_data
from safetensors.torch import load_file
from tiny_models import island_buffer_names, island_names
from typer.testing import CliRunner

from dsv4_fsdp import __version__, plan_sharding, use_windowed_attention
from dsv4_fsdp.cli import app
from dsv4_fsdp.train.config import from_yaml
from dsv4_fsdp.train.tiny_model import build_tiny_model

STEPS = 8
# A starting process imports torch and transformers: seconds when the machine is idle, far more when it is not.
TIMEOUT_S = 300


@dataclass(frozen=True)
class Run:
    """A finished command."""

    folder: Path
    exit_code: int
    stdout: str
    stderr: str


def dsv4_fsdp(*arguments: object, folder: Path, env: dict[str, str] | None = None) -> Run:
    """Run the real command in processes of its own."""
    command = [sys.executable, "-m", "dsv4_fsdp.cli", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return Run(folder, done.returncode, done.stdout, done.stderr)


# --- A whole run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "below" / "run"
    settings = [part for name, value in UNEQUAL.items() for part in (f"--{name}", value)]
    run = dsv4_fsdp("train", "--run-dir", folder, "--steps", STEPS, *settings, folder=folder)
    assert run.exit_code == 0, run.stdout + run.stderr
    return run


@pytest.fixture(scope="module")
def metrics(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_in_its_folder_and_nothing_else(run: Run) -> None:
    """No temporary file is left over."""
    names = {path.name for path in run.folder.iterdir()}
    assert names == {
        "audit.json",
        "audit.txt",
        "checkpoints",
        "config.yaml",
        "export",
        "metrics.jsonl",
        "plan.json",
        "plan.txt",
        "precision.txt",
    }


def test_every_step_has_a_metrics_line_with_all_fields(metrics: list[dict[str, float]]) -> None:
    """The documented fields, each plausible."""
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    for row in metrics:
        assert list(row) == [
            "step",
            "loss",
            "grad_norm",
            "lr",
            "tokens",
            "tokens_per_s",
            "ranks_without_window",
            "skipped_steps",
            "elapsed_s",
            "memory_bytes",
            "data_s",
            "compute_s",
            "reduce_s",
            "optimizer_s",
            "checkpoint_s",
            "eval_loss",
            "expert_load",
        ]
        assert 0 < row["loss"] < 6
        assert row["grad_norm"] > 0
        assert 0 < row["lr"] <= 3e-3
        assert row["tokens"] in (2 * 567, 567 + 399, 2 * 399)
        assert row["skipped_steps"] == 0
        assert row["memory_bytes"] > 100 * 2**20
        # 8 experts, 2 for each token: the busiest has between 1 and 4 times the mean.
        assert 1 <= row["expert_load"] <= 4
    elapsed = [row["elapsed_s"] for row in metrics]
    assert elapsed == sorted(elapsed)


def test_the_loss_falls(metrics: list[dict[str, float]]) -> None:
    """From that of a uniform guess, ln 258 = 5.55; eight steps take it below 4.5."""
    assert 5.4 < metrics[0]["loss"] < 5.8
    assert metrics[-1]["loss"] < 4.5


def test_the_first_loss_is_the_mean_over_all_ranks_tokens(run: Run, metrics: list[dict[str, float]]) -> None:
    """Of the unsharded model, on both ranks' batches; a mean of the two means would be another number."""
    config = from_yaml((run.folder / "config.yaml").read_text())
    data = make_data(config)
    model = build_tiny_model(seed=config.seed)
    use_windowed_attention(model)
    sums, counts = [], []
    for position in range(2):
        batch = data.batch(position)
        with torch.no_grad():
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        sums.append(F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item())
        counts.append(batch[:, 1:].numel())
    mean = sum(sums) / sum(counts)
    mean_of_means = sum(s / c for s, c in zip(sums, counts, strict=True)) / 2
    assert metrics[0]["tokens"] == sum(counts)
    # The forward is bit-equal; what may differ is the order in which fp32 sums of some thousand terms are taken.
    assert abs(metrics[0]["loss"] - mean) < 1e-5 < abs(mean - mean_of_means)


def test_ranks_with_short_sequences_are_counted(run: Run, metrics: list[dict[str, float]]) -> None:
    """Rows of 64 tokens close no HCA window, rows of 400 do; one rank of two was short, and both were."""
    config = from_yaml((run.folder / "config.yaml").read_text())
    data = make_data(config)
    short = [sum(data.batch(2 * step + rank).shape[1] < 128 for rank in range(2)) for step in range(STEPS)]
    assert [row["ranks_without_window"] for row in metrics] == short
    assert {1, 2} <= set(short)


def test_the_precision_table_is_printed_and_shows_fp32_islands(run: Run) -> None:
    """As read back from the live units: islands fp32 throughout, the other weights bf16 with fp32 reduction."""
    table = (run.folder / "precision.txt").read_text()
    assert table in run.stdout
    rows = [line.split(maxsplit=5) for line in table.splitlines()[1:]]
    dtypes = {name: (storage, compute, reduce) for name, _, storage, compute, reduce, _ in rows}
    assert dtypes["model.layers.*.self_attn.sinks"] == ("fp32", "fp32", "fp32")
    assert dtypes["model.layers.*.attn_hc.fn"] == ("fp32", "fp32", "fp32")
    assert dtypes["model.layers.*.self_attn.q_a_proj.weight"] == ("bf16", "bf16", "fp32")
    assert dtypes["lm_head.weight"] == ("bf16", "bf16", "fp32")
    model = build_tiny_model(seed=0)
    islands = sum(int(count) for _, count, *_, reason in rows if reason.startswith("island"))
    assert islands == len(island_names(model)) + len(island_buffer_names(model))


def test_the_plan_is_the_one_that_anybody_can_make_without_processes(run: Run) -> None:
    """``plan.txt`` and ``plan.json`` are ``plan_sharding``'s."""
    plan = plan_sharding(build_tiny_model(seed=0), mesh_shape=(2,))
    assert (run.folder / "plan.txt").read_text() == plan.table() + "\n"
    assert (run.folder / "plan.json").read_text() == plan.to_json() + "\n"
    assert plan.hash[:16] in run.stdout


def test_the_export_was_reloaded_with_equal_logits_and_keeps_every_dtype(run: Run) -> None:
    """The names and dtypes of the model itself, fp32 islands among them; the fresh process reported equality."""
    assert "reloaded by stock Transformers in a fresh process: logits equal in every bit" in run.stdout
    exported = load_file(run.folder / "export" / "model.safetensors")
    untrained = build_tiny_model(seed=int(UNEQUAL["seed"])).state_dict()
    assert {name: tensor.dtype for name, tensor in exported.items()} == {
        name: tensor.dtype for name, tensor in untrained.items()
    }
    for name, tensor in untrained.items():
        indexer = ".indexer." in name  # frozen: it has no gradient
        untouched = indexer or not tensor.is_floating_point() or name.endswith("e_score_correction_bias")
        assert torch.equal(exported[name], tensor) == untouched, name


def test_a_sample_is_printed(run: Run) -> None:
    """Text that begins with the prompt, at the end of the output."""
    sample = run.stdout.partition("What it writes after 'def ':\n\n")[2]
    assert sample.startswith("    def ")


def test_the_output_is_quiet_and_fits_into_100_columns(run: Run) -> None:
    """Nothing on stderr, no control characters; the sample alone may have longer lines."""
    assert run.stderr == ""
    text = run.stdout.partition("What it writes")[0]
    assert "\x1b" not in text
    assert "\r" not in text
    paths = re.compile(re.escape(str(run.folder)))
    assert max(len(paths.sub("runs/tiny", line)) for line in text.splitlines()) <= 100
    assert text.count("note ") == 2  # the frozen indexer, and what bf16 storage costs
    assert len(re.findall(r"(?m)^step +\d+/8 ", text)) == STEPS


def test_under_torchrun_it_starts_no_ranks_and_one_rank_has_the_same_precision(run: Run, tmp_path: Path) -> None:
    """The world size is torchrun's, and the precision table does not depend on it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*torchrun, "--module", "dsv4_fsdp.cli", "train", "--run-dir", str(tmp_path / "run"), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 1 rank on cpu" in done.stdout
    assert from_yaml((tmp_path / "run" / "config.yaml").read_text()).nproc == 1
    assert (tmp_path / "run" / "precision.txt").read_text() == (run.folder / "precision.txt").read_text()
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


# --- Failures in the middle ------------------------------------------------------------------------------------------

# Python imports `sitecustomize` at its start if there is one: this makes rank 1 of the real command fail at its third
# batch (positions 1, 3, 5).
FAULT = """
import os
from pathlib import Path
if "RANK" in os.environ:
    folder = Path(os.environ["FAULT_FOLDER"])
    (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        from dsv4_fsdp.data.stdlib_text import StdlibText
        batch = StdlibText.batch
        def faulty(self, position):
            if position >= 5:
                (folder / "fault").touch()
                ACTION
            return batch(self, position)
        StdlibText.batch = faulty
"""


@pytest.mark.parametrize(
    ("action", "exit_code", "report"),
    [
        (
            "raise RuntimeError('planted')",
            1,
            r"rank 1 failed:\n\nTraceback [^\0]*\nRuntimeError: planted\n(rank 0 failed after that: .*\n)?",
        ),
        ("os.kill(os.getpid(), 9)", 137, r"rank 1 was killed by SIGKILL .*\n(rank 0 failed after that: .*\n)?"),
    ],
    ids=["raises", "killed"],
)
def test_a_rank_that_fails_ends_the_command_within_seconds(
    tmp_path: Path, action: str, exit_code: int, report: str
) -> None:
    """Its own traceback on top and no other, a non-zero exit code, no process left, no export."""
    (tmp_path / "sitecustomize.py").write_text(FAULT.replace("ACTION", action))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "FAULT_FOLDER": str(tmp_path)}
    run = dsv4_fsdp("train", "--run-dir", tmp_path / "run", "--steps", 1000, folder=tmp_path / "run", env=env)
    ended = time.time()
    assert run.exit_code == exit_code, run.stdout + run.stderr
    assert re.fullmatch(report, run.stderr), run.stderr
    # torchelastic looks every 0.1 s; on an idle machine this takes about one second.
    assert ended - (tmp_path / "fault").stat().st_mtime < 15
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
    # Rank 0 may have been ended before it noted the second step.
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) in (1, 2)
    assert not (tmp_path / "run" / "export").exists()


# --- Wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--preset", "tinny"],
            "preset: 'tinny' is unknown; there is: tiny, flash-sft, flash-lora, flash-pretrain, pro-sft, pro-lora",
        ),
        (["--steps", "0"], "steps: input should be greater than 0, got 0"),
        (
            ["--steps", "ten"],
            "steps: input should be a valid integer, unable to parse string as an integer, got ten",
        ),
        (["--nproc", "0"], "nproc: input should be greater than 0, got 0"),
        (["--seed", "-1"], "seed: input should be greater than or equal to 0, got -1"),
        (["--optimizer.lr", "0"], "optimizer.lr: input should be greater than 0, got 0"),
        (["--optimizer.lr=nan"], "optimizer.lr: input should be a finite number, got nan"),
        (["--optimizer.lrr", "1e-3"], "optimizer.lrr: no such setting; did you mean optimizer.lr?"),
        (["--optimizer.lr"], "optimizer.lr: no value given"),
        (["--optimizer.lr", "--steps", "2"], "optimizer.lr: no value given"),
        (["fast"], "'fast' is not an option; settings look like --optimizer.lr 1e-3"),
        (
            ["--data.batch_tokens", "100"],
            "data: batch_tokens is 100, less than the longest of sequence_lengths, 512",
        ),
        (
            ["--data.sequence_lengths", "1"],
            "data.sequence_lengths.0: input should be greater than or equal to 2, got 1",
        ),
        (["--run-dir", "file"], "--run-dir: file is a file; give a folder that is new or empty"),
        (["--run-dir", "file/below"], "--run-dir: file, in file/below, is a file"),
        (["--run-dir", "full"], "--run-dir: full is not empty; give a folder that is new or empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_writes_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, before any process is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dsv4_fsdp.train.launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    Path("file").touch()
    Path("full").mkdir()
    Path("full", "metrics.jsonl").touch()
    before = sorted(tmp_path.rglob("*"))
    if "--run-dir" not in arguments:
        arguments = ["--run-dir", "new", *arguments]
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.stderr == f"error: {message}\n"
    assert result.stdout == ""
    assert result.exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_run_dir_is_one_line() -> None:
    """There is no default: a run is never written where nobody looks for it."""
    result = CliRunner().invoke(app, ["train"])
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --run-dir: missing; give a folder that is new, empty, or of a run to continue\n",
    )


def test_another_nproc_than_torchruns_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the world size is what it started; asking for another would be ignored otherwise."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = CliRunner().invoke(app, ["train", "--run-dir", str(tmp_path), "--nproc", "2"])
    assert (result.exit_code, result.stderr) == (
        2,
        "error: nproc: 2 was asked for, but torchrun has started 4 ranks\n",
    )


def test_the_real_command_refuses_too(tmp_path: Path) -> None:
    """The same from outside, in a process of its own, with two mistakes at once."""
    run = dsv4_fsdp("train", "--run-dir", tmp_path / "run", "--steps", "0", "--nproc", "x", folder=tmp_path / "run")
    assert run.exit_code == 2
    assert run.stderr.splitlines() == [
        "error: steps: input should be greater than 0, got 0",
        "error: nproc: input should be a valid integer, unable to parse string as an integer, got x",
    ]
    assert not run.folder.exists()


def test_the_version_is_printed(tmp_path: Path) -> None:
    """``dsv4-fsdp --version``."""
    run = dsv4_fsdp("--version", folder=tmp_path)
    assert (run.exit_code, run.stdout, run.stderr) == (0, f"dsv4-fsdp {__version__}\n", "")
