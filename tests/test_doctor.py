"""``dsv4-fsdp doctor``: what it finds by trying, what it says of a broken environment, and that it needs torch only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import dsv4_fsdp.doctor
from dsv4_fsdp import torch_private
from dsv4_fsdp.doctor import Diagnosis, Fact, Problem, diagnose

ROOT = Path(__file__).parent.parent


def _main(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The console command in a process in which these packages cannot be imported."""
    code = (
        f"import sys\nfor name in {without}: sys.modules[name] = None\nsys.argv = {['dsv4-fsdp', *arguments]}\n"
        "from dsv4_fsdp.__main__ import main\nmain()"
    )
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


def test_doctor_finds_the_mechanisms_of_this_torch_by_trying() -> None:
    """All that the engine needs; the native override where the policy has it; gloo; the verdict is the exit code."""
    done = _main("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["ok"]
    mechanisms = {fact["name"]: fact["ok"] for fact in found["mechanisms"]}
    assert mechanisms.pop("native param_dtype_override_fn") == torch_private.has_native_override()
    assert all(mechanisms.values())
    assert len(mechanisms) == 5
    assert {"name": "gloo", "ok": True, "detail": "one rank, one all-reduce"} in found["backends"]


def test_without_the_train_extra_doctor_runs_and_everything_else_says_what_to_install() -> None:
    """The extra brings typer. One line and exit code 2, not a traceback."""
    done = _main("plan", "deepseek-v4-flash", without=("typer",))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: the commands need more than the engine: pip install "dsv4-fsdp[train]"\n'
    done = _main("doctor", without=("typer", "rich", "transformers", "accelerate", "peft"))
    assert done.returncode == 0
    assert "The engine works here" in done.stdout
    assert "transformers cannot be imported" in done.stdout


def test_a_torch_without_the_engines_mechanism_is_fatal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, the answer in the second line, the mend at the end; no process group is left behind."""
    monkeypatch.delattr(torch_private._fully_shard_module(), "_init_param_group")
    assert dsv4_fsdp.doctor.run(as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("The engine does NOT work here; ")
    at = lines.index("What would go wrong, and how to mend it")
    assert lines[at + 1].startswith(
        "  1. FATAL: several parameter groups per unit: dsv4-fsdp needs an FSDP2 whose units"
    )
    assert "Install torch 2.12 or later" in " ".join(line.strip() for line in lines[at:])
    assert not dist.is_initialized()


def test_libraries_with_other_internals_are_told_before_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``keep_fp32_islands`` would refuse them; not fatal, since the engine works without."""
    monkeypatch.setattr("accelerate.accelerator.fsdp2_prepare_model", lambda accelerator, model: model)
    found = diagnose()
    assert found.ok
    assert any('keep_fp32_islands("accelerate") will refuse' in problem.what for problem in found.problems)


def test_what_is_missing_or_untested_is_said() -> None:
    """With what it is needed for, and what to install."""
    problems: list[Problem] = []
    versions = dict.fromkeys(("torch", *dsv4_fsdp.doctor._PACKAGES)) | {"torch": "2.99.0"}
    dsv4_fsdp.doctor._look_at_packages(versions, {"torch": ("2.13.0",)}, problems)
    missing, untested = problems
    assert missing.what.startswith("not installed: transformers (the trainer, ")
    assert missing.mend == 'pip install "dsv4-fsdp[train]" brings them.'
    assert untested.what == "torch 2.99.0 is not among the tested versions (2.13.0)"
    assert not missing.fatal
    assert not untested.fatal


def test_the_text_stays_within_100_columns() -> None:
    """Also with long words in it, the first problem first."""
    long = "a sentence of some length, " * 12
    text = Diagnosis(
        system="Python 3.11, Linux x86_64, 2 CPUs",
        versions={"dsv4-fsdp": "0.1.0", "torch": "2.13.0+cpu", "trl": None},
        tested={"torch": ("2.12.1", "2.13.0"), "trl": ("1.16.0",)},
        mechanisms=(Fact("several parameter groups per unit", True, long),),
        backends=(Fact("gloo", False, long),),
        problems=(Problem(long, long, fatal=True),),
    ).text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[:5] == [
        "dsv4-fsdp 0.1.0 on Python 3.11, Linux x86_64, 2 CPUs",
        "The engine does NOT work here; 1 remark at the end.",
        "",
        "Versions",
        "  dsv4-fsdp       0.1.0",
    ]
    assert lines[5:7] == ["  torch           2.13.0+cpu      tested", "  trl             not installed"]


def test_a_bug_report_asks_for_it_first() -> None:
    """The issue template's first question."""
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.md").read_text()
    assert template.partition("**1.")[2].partition("**2.")[0].count("`dsv4-fsdp doctor`") == 1
