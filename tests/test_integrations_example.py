"""``examples/plain_script.py``: what a script of your own needs to change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "plain_script.py"
OURS = "from dsv4_fsdp import fully_shard, tie_compressors"
TORCHS = "from dsv4_fsdp import tie_compressors; from torch.distributed.fsdp import fully_shard"


def _torchrun(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_the_plain_script_is_40_lines_and_trains_under_torchrun() -> None:
    """On two CPU ranks, of which only one has a sequence of a whole HCA window; the loss falls on both."""
    assert len(SCRIPT.read_text().splitlines()) <= 40
    done = _torchrun(SCRIPT)
    assert done.returncode == 0, done.stderr
    # Two processes share the pipe, so a line's end may come late; each entry is whole.
    losses: dict[str, list[float]] = {"0": [], "1": []}
    for rank, loss in re.findall(r"rank (\d) step \d loss (\d+\.\d+)", done.stdout):
        losses[rank].append(float(loss))
    for of_rank in losses.values():
        assert len(of_rank) == 10
        assert of_rank[-1] < of_rank[0] - 1


def test_with_torchs_fully_shard_the_same_script_crashes_at_the_first_forward(tmp_path: Path) -> None:
    """The one import is what makes the difference."""
    script = tmp_path / "stock.py"
    assert OURS in SCRIPT.read_text()
    script.write_text(SCRIPT.read_text().replace(OURS, TORCHS))
    done = _torchrun(script)
    assert done.returncode != 0
    assert "FSDP expects uniform original parameter dtype" in done.stderr
    assert "step 0" not in done.stdout
