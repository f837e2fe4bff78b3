"""The README's second example, as a user runs it: a quantised release checkpoint, conversations, EP and FSDP on four
processes, killed half-way, resumed, exported and reloaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import release_checkpoint, released_model

from dsv4_fsdp.train.config import from_yaml

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 900
STEPS = 8


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsv4_fsdp.cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def train_command(model: Path, run: Path) -> list[object]:
    return [
        *("train", "--config", "examples/sft/sft.yaml", "--run-dir", run),
        *("--model.path", model, "--steps", STEPS, "--checkpoint.every", 2, "--checkpoint.export", "false"),
        # The tiny release model has 32 rows a window and learns slowly from 256 tokens: enough to run, not to shine.
        *("--data.sequence_length", 96),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_checkpoint(tmp_path_factory.mktemp("release") / "model")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its first checkpoint and started again."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    command = [sys.executable, "-m", "dsv4_fsdp.cli", *map(str, train_command(model, folder))]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "checkpoints" / "step-00000004").exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)  # ranks are in sessions of their own
    time.sleep(1)
    done = cli(*train_command(model, folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume " in done.stdout
    assert "8 sequences" not in done.stderr
    return folder


def test_the_resumed_run_has_every_step_once(run: Path) -> None:
    """Also those that the kill took; the loss is over supervised tokens and falls."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["tokens"] < 8 * 96 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_experts_were_dealt_and_islands_stayed_fp32(run: Path) -> None:
    """By the plan that was applied, and by what was observed in the first step."""
    plan = json.loads((run / "plan.json").read_text())
    assert plan["expert_parallel"] == 2
    assert plan["mesh_shape"] == [4]
    assert json.loads((run / "audit.json").read_text())["ok"] is True
    assert from_yaml((run / "config.yaml").read_text()).mesh.expert_parallel == 2


@pytest.mark.parametrize("layout", ["transformers", "release"])
def test_the_export_is_the_trained_model(layout: str, run: Path, tmp_path: Path) -> None:
    """Stock Transformers loads either layout, and the weights that were trained have moved."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = cli("export", run, "--to", tmp_path / layout, "--layout", layout)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / layout, dtype="bfloat16", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    before = released_model().state_dict()
    after = loaded.state_dict()
    assert after.keys() == before.keys()
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "lm_head.weight" in moved
    assert "model.layers.1.mlp.experts.gate_up_proj" in moved
    assert "model.layers.0.self_attn.sinks" in moved
    assert not {name for name in moved if ".indexer." in name or name.endswith("tid2eid")}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / layout)
    prompt = tokenizer("User: What is 1 + 1?\nAssistant: ", return_tensors="pt")
    sample = loaded.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert sample.shape[1] > prompt["input_ids"].shape[1]


def test_untouched_tensors_of_the_release_keep_their_bits(model: Path, run: Path, tmp_path: Path) -> None:
    """The indexer is frozen: its FP8 weights and their scales, and multi-token prediction, are the source's bytes."""
    done = cli("export", run, "--to", tmp_path / "out", "--layout", "release")
    assert done.returncode == 0, done.stdout + done.stderr
    source: dict[str, torch.Tensor] = {}
    exported: dict[str, torch.Tensor] = {}
    for folder, state in ((model, source), (tmp_path / "out", exported)):
        for file in folder.glob("*.safetensors"):
            state |= load_file(file)
    kept = [name for name in source if ".indexer." in name or name.startswith("mtp.") or name.endswith("tid2eid")]
    assert kept
    for name in kept:
        assert exported[name].dtype == source[name].dtype, name
        assert torch.equal(exported[name].view(torch.uint8), source[name].view(torch.uint8)), name
