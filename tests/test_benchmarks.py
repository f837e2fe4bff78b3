"""The benchmark commands work, and what is exact in their tables is right. Nothing here is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_models import tiny_transformers

from dsv4_fsdp import plan_sharding

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a benchmark's ``main`` with arguments in this process; returns the page that it printed."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        # What keep_memory() would start the process anew for.
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**32))
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**33))
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{name}.py"), *arguments])
        capsys.readouterr()
        __import__(name).main()
        printed = capsys.readouterr().out
        return printed[printed.index("# ") :]

    return run


def rows_of(page: str) -> dict[str, dict[str, str]]:
    """The rows of the page's only table, by their first cell: header -> cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    header, _, *rows = lines
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_sharding_benchmark_counts_the_planned_collectives_and_finds_no_logit_difference(run_command) -> None:
    """Two blocks on two ranks: ours exact and as planned; one group per unit in the lower bound; others differ."""
    page = run_command("sharding", "--cases", "transformers:2:2", "--tokens", "40", "--repeats", "1")
    ours, in_root, native, lower_bound = rows_of(page).values()
    layers = ("sliding_attention", "heavily_compressed_attention")
    for row, islands in ((ours, "grouped"), (in_root, "root")):
        plan = plan_sharding(tiny_transformers(layers), mesh_shape=(2,), island_units=islands)  # type: ignore[arg-type]
        for kind in ("all_gather", "reduce_scatter"):
            number = row[f"{kind.replace('_', '-')}: number / KiB"].split(" / ")[0]
            assert int(number) == plan.collectives_per_step()[kind]
        assert row["logit difference"] == "0"
    assert float(native["logit difference"]) > 0.1
    assert float(lower_bound["logit difference"]) > 0.1
    # Two blocks, forward and backward, and the root once; a reduction each.
    assert lower_bound["all-gather: number / KiB"].startswith("5 / ")
    assert lower_bound["reduce-scatter: number / KiB"].startswith("3 / ")
    assert "commit" in page
    assert "transformers 5." in page


def test_loss_benchmark_prints_its_page(run_command, one_thread: None) -> None:
    """At its smallest size, with the goal's line and the versions."""
    page = run_command("loss", "--tokens", "1024", "--vocabulary", "2048", "--repeats", "1", "--dtypes", "bfloat16")
    assert float(rows_of(page)["bfloat16"]["memory ratio"]) < 1
    assert "peak memory over stock, worst case <= 0.25" in page
    assert "torch 2." in page
