"""A run that is killed, at any moment, loses nothing but the steps since its last checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4_fsdp.train.checkpoint_folder import latest_checkpoint

STEPS = 100
KILLS = 20
SETTINGS = {
    "steps": str(STEPS),
    "data.sequence_lengths": "16,40,140",
    "data.batch_tokens": "140",
    "checkpoint.every": "1",
    "checkpoint.export": "false",
    "logging.audit": "off",
}
# Of the numbers of a step, those that do not depend on the clock.
SAME = ("step", "loss", "grad_norm", "lr", "tokens", "ranks_without_window", "skipped_steps", "expert_load")


def start(folder: Path) -> subprocess.Popen[bytes]:
    options = [part for name, value in SETTINGS.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "dsv4_fsdp.cli", "train", "--run-dir", str(folder), *options]
    with log_of(folder).open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def rows(folder: Path) -> list[tuple[object, ...]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[name] for name in SAME) for line in lines]


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started and that train."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and int((path / "stat").read_text().rpartition(")")[2].split()[1]) == launcher:
                environment = (path / "environ").read_bytes().split(b"\0")
                found += [int(path.name)] if any(entry.startswith(b"LOCAL_RANK=") for entry in environment) else []
        except OSError:
            continue  # gone meanwhile
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks by /proc")
def test_a_run_killed_at_twenty_random_moments_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    """``kill -9`` of one rank, also inside of saves: the others end within 15 s, what is published is whole, and after
    all resumes every step's numbers are those of the uninterrupted run, bit for bit."""
    whole = start(tmp_path / "whole")
    assert whole.wait(timeout=900) == 0, log_of(tmp_path / "whole").read_text()
    expected = rows(tmp_path / "whole")
    assert len(expected) == STEPS

    folder = tmp_path / "killed"
    rng = random.Random(1)
    kills = 0
    while True:
        process = start(folder)
        if kills < KILLS:
            # Steps are counted from the moment when this attempt has made one: every attempt gets on.
            before = len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0
            deadline = time.monotonic() + 600
            while process.poll() is None and time.monotonic() < deadline:
                now = len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0
                if now > before and ranks_of(process.pid):
                    break
                before = min(before, now)  # a resume drops the lines of lost steps
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 0.7))
            victims = ranks_of(process.pid)
            if process.poll() is None and victims:
                os.kill(rng.choice(victims), signal.SIGKILL)
                killed_at = time.monotonic()
                assert process.wait(timeout=60) != 0
                assert time.monotonic() - killed_at < 15
                assert not any(Path(f"/proc/{victim}").exists() for victim in victims)
                kills += 1
                # Perhaps none yet; but what has a name is whole.
                _, problems = latest_checkpoint(folder / "checkpoints")
                assert problems == []
                continue
        assert process.wait(timeout=900) == 0, log_of(folder).read_text()
        break
    assert kills == KILLS
    assert rows(folder) == expected
