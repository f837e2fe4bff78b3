"""``dsv4-fsdp audit`` as a user runs it: exit codes, JSON, and what a terminal of 100 columns shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import edit, transformers_checkpoint
from typer.testing import CliRunner, Result

from dsv4_fsdp.cli import app

FN = "model.layers.1.attn_hc.fn"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def downcast(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FN] = tensors[FN].bfloat16()


def lose_bits(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FN] = tensors[FN].bfloat16().float()


@pytest.mark.parametrize("options", [[], ["--bits"], ["--json"]], ids=["text", "bits", "json"])
def test_healthy_checkpoint_exits_with_0(options: list[str], tmp_path: Path) -> None:
    """The verdict comes first, in text and in JSON."""
    result = run(transformers_checkpoint(tmp_path), *options)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] if options == ["--json"] else result.stdout.startswith("OK: no violation.")


def test_violation_exits_with_1_and_the_answer_in_three_lines(tmp_path: Path) -> None:
    """What, where and why, before anything else."""
    folder = edit(transformers_checkpoint(tmp_path), downcast)
    result = run(folder)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:3] == [
        f"VIOLATED: 1 violation. checkpoint {folder}",
        f"island-downcast: {FN}: BF16, must be F32",
        "likely cause: saved by code that casts every tensor to one dtype",
    ]
    found = json.loads(run(folder, "--json").stdout)
    assert [(v["kind"], v["name"]) for v in found["violations"]] == [("island-downcast", FN)]


def test_bits_are_read_when_asked_for(tmp_path: Path) -> None:
    """The header of an upcast tensor looks healthy."""
    folder = edit(transformers_checkpoint(tmp_path), lose_bits)
    assert run(folder).exit_code == 0
    result = run(folder, "--bits")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].startswith(f"lost-bits: {FN}")


def test_bad_input_exits_with_2_and_says_what_to_do(tmp_path: Path) -> None:
    """Nothing on standard output: a script that reads JSON gets none."""
    for arguments in ([tmp_path / "nothing"], [tmp_path], ["--json", tmp_path], []):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr
    assert "what to do: " in run(tmp_path).stderr
