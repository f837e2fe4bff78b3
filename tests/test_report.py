"""``dsv4-fsdp report``: what the page shows, what it refuses, and how it looks in a real browser."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner, Result

import pool
from dsv4_fsdp import parallelize, plan_sharding, precision_table, read_back
from dsv4_fsdp.audit_report import AuditReport, Violation
from dsv4_fsdp.cli import app
from dsv4_fsdp.report.breakdown import breakdown_svg, breakdowns_of
from dsv4_fsdp.report.charts import Line, charts_of, svg
from dsv4_fsdp.report.page import page
from dsv4_fsdp.report.run_data import read_run
from dsv4_fsdp.train.config import flat_settings, resolve, to_yaml
from dsv4_fsdp.train.progress import StepMetrics
from dsv4_fsdp.train.tiny_model import build_tiny_model

STEP = StepMetrics(
    step=1,
    loss=5.5,
    grad_norm=6.25,
    lr=2e-3,
    tokens=1000,
    tokens_per_s=500.0,
    ranks_without_window=1,
    skipped_steps=0,
    elapsed_s=2.0,
    memory_bytes=500 * 2**20,
    data_s=0.25,
    compute_s=1.25,
    reduce_s=0.25,
    optimizer_s=0.25,
)
HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;"


def shard_and_read_back() -> dict[str, str]:
    """The texts that the trainer leaves in a run folder, from the trainer's own model."""
    model = build_tiny_model(seed=0)
    plan = parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return {
        "plan.json": plan.to_json(),
        "plan.txt": plan.table(),
        "precision.txt": precision_table(read_back(model, plan)),
    }


@pytest.fixture(scope="module")
def run_files() -> dict[str, str]:
    """A run folder's small files: plan and precision are real, of two ranks; the twelve steps are made up."""
    files: dict[str, str] = pool.run_ranks(2, shard_and_read_back)[0]
    steps = [replace(STEP, step=i, loss=5.5 - i / 4, elapsed_s=2.0 * i) for i in range(1, 13)]
    return files | {
        "metrics.jsonl": "".join(f"{step.to_json()}\n" for step in steps),
        "config.yaml": to_yaml(resolve({"steps": "12"})),
    }


@pytest.fixture
def make_run(run_files: dict[str, str], tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder; ``None`` for a file leaves it out."""

    def make(name: str = "run", files: dict[str, str | None] | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file, text in (run_files | (files or {})).items():
            if text is not None:
                (folder / file).write_text(text)
        return folder

    return make


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Reader(HTMLParser):
    """The elements of a page, its attributes, and the text that a person sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.lines: list[str] = []
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self._hidden += tag in ("head", "style")
        if tag in ("p", "h2", "h3", "td", "th", "li", "summary", "pre", "text", "small", "title", "footer"):
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("head", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.lines = self.lines or [""]
            self.lines[-1] += data

    @property
    def seen(self) -> list[str]:
        return [line.strip() for line in self.lines if line.strip()]


def rendered(*folders: Path) -> Reader:
    return Reader(page([read_run(folder) for folder in folders]))


def section(reader: Reader, title: str, following: str) -> list[str]:
    return reader.seen[reader.seen.index(title) + 1 : reader.seen.index(following)]


def metrics(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps({"step": i, "loss": 1.0} | row) + "\n" for i, row in enumerate(rows, start=1))


def test_the_answer_is_at_the_top_of_page_and_terminal(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Final loss, steps, skipped, islands: before any picture."""
    out = tmp_path / "out.html"
    result = run(make_run(), "--html", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "loss 2.500; 5.250 at the first step, 3.625 over the last 10",
        "12 of 12 steps, 0 skipped; 24 s, 500 tokens/s (median)",
        "fp32 islands: yes; all 58 tensors, read back before the first step",
        f"page {out}",
    ]
    text = out.read_text()
    assert Reader(text).seen[:6] == [
        "run: loss 2.500",
        "5.250 at the first step, 3.625 over the last 10",
        "12 of 12 steps, 0 skipped",
        "24 s, 500 tokens/s (median)",
        "fp32 islands: yes",
        "all 58 tensors, read back before the first step",
    ]


def test_the_page_needs_nothing_but_itself(make_run: Callable[..., Path]) -> None:
    """No script, no address, nothing loaded; readable on a phone and in the dark."""
    text = page([read_run(make_run())])
    reader = Reader(text)
    assert not reader.tags.keys() & {"script", "link", "img", "iframe", "object", "base", "form", "image", "use"}
    assert not reader.attributes & {"src", "href", "xlink:href", "srcset", "action"}
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert "default-src 'none'" in text
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme:dark" in text


def test_what_a_run_recorded_is_shown_and_the_rest_is_named(make_run: Callable[..., Path]) -> None:
    """A field nobody knows gets a chart; one that is missing gets none, and is in the list of what is left out."""
    rows = [{"mystery": 2.0 + i, "routing": [1, 2], "lr": 1e-3} for i in range(3)]
    reader = rendered(make_run(files={"metrics.jsonl": metrics(*rows), "precision.txt": None}))
    titles = [line for line in section(reader, "Training", "Precision") if line in ("Loss", "Memory", "mystery")]
    assert titles == ["Loss", "mystery"]
    missing = [
        "evaluation",
        "expert load",
        "step-time breakdown",
        "collectives as issued",
        "gradient norm",
        "memory",
        "skipped steps",
    ]
    assert reader.seen[reader.seen.index("Left out") + 1 : -1] == [
        f"not recorded by the run: {', '.join(missing)}",
        "not in the folder: precision.txt, export/, an audit report",
        "recorded, but no numbers to draw: routing",
    ]
    assert "fp32 islands: unknown" in reader.seen
    assert "3 of 12 steps, skipped not recorded" in reader.seen


def test_every_recorded_field_of_the_trainer_has_its_chart(make_run: Callable[..., Path]) -> None:
    """And tokens and time are in the first lines."""
    reader = rendered(make_run())
    shown = section(reader, "Training", "Precision")
    for title in ("Loss", "Gradient norm", "Learning rate", "Tokens per second", "Memory", "Ranks without window"):
        assert title in shown
    assert shown[shown.index("Skipped steps") + 2] == "0 in all 12 steps"
    assert reader.tags["svg"] == 7  # and the step's time
    assert "clipped to 1" not in shown  # far below this run's norms, where a line would flatten the curve


def test_step_time_is_stacked_and_adds_up(make_run: Callable[..., Path]) -> None:
    """Each part lies on the one below it; the top is the whole step; shares are of all the time."""
    rows = [{"data_s": 1.0, "compute_s": 5.0 + i, "reduce_s": 1.0, "optimizer_s": 1.0} for i in range(3)]
    data = read_run(make_run(files={"metrics.jsonl": metrics(*rows)}))
    (breakdown,) = breakdowns_of([data], ["run"])
    assert breakdown.shares == [
        ("batches", 3 / 27),
        ("forward and backward", 18 / 27),
        ("reduction", 3 / 27),
        ("optimizer", 3 / 27),
    ]
    assert breakdown.chart.lines[0].values == (8.0, 9.0, 10.0)
    picture = breakdown_svg(breakdown)
    edges = [
        [point.split(",")[1] for point in points.split()]
        for points in re.findall(r'<polygon class="s\d" points="([^"]*)"', picture)
    ]
    assert len(edges) == 4
    for below, above in pairwise(edges):
        assert below[:3] == above[:2:-1]
    shown = section(Reader(page([data])), "Training", "Precision")
    at = shown.index("Step time")
    assert shown[at + 2 : at + 4] == ["mean 9 s", "batches 11% forward and backward 67% reduction 11% optimizer 11%"]
    both = page([data, data])
    assert both.count('<polygon class="s0"') == 2


def test_a_single_step_has_a_breakdown(make_run: Callable[..., Path]) -> None:
    """It is drawn as wide as a step."""
    data = read_run(make_run(files={"metrics.jsonl": metrics({"compute_s": 2.0})}))
    (breakdown,) = breakdowns_of([data], ["run"])
    xs = {point.split(",")[0] for point in re.findall(r'points="([^"]*)"', breakdown_svg(breakdown))[0].split()}
    assert len(xs) == 2


def test_steps_without_an_evaluation_are_no_gaps(make_run: Callable[..., Path]) -> None:
    """Beside the loss, with the steps that had one; the answer names the last. Expert load has its level of 1."""
    rows = [{"eval_loss": 2.0 - i / 8 if i % 2 else None, "expert_load": 1.5 + i / 8} for i in range(4)]
    data = read_run(make_run(files={"metrics.jsonl": metrics(*rows)}))
    assert (data.columns["eval_loss"].steps, data.columns["eval_loss"].values) == ((2, 4), (1.875, 1.625))
    loss, evaluation, load, *_ = charts_of([data], ["run"])
    assert [c.title for c in (loss, evaluation, load)] == ["Loss", "Evaluation loss", "Expert load"]
    assert svg(evaluation).count('class="lost"') == 0
    assert 'class="ref"' in svg(load)
    assert any("1.625 in the last evaluation" in line for line in Reader(page([data])).seen[:4])


def test_a_plan_with_expert_parallelism_is_read(make_run: Callable[..., Path]) -> None:
    """As the trainer writes it, checkpointing as a number among it; all-to-alls are counted."""
    plan = plan_sharding(build_tiny_model(seed=0), mesh_shape=(2,), expert_parallel=2, activation_checkpointing=2)
    folder = make_run(files={"plan.json": plan.to_json()})
    assert read_run(folder).plan == plan
    reality = section(rendered(folder), "Plan against reality", "Configuration")
    # 4 layers, 3 forward and 2 backward, and 3 again in 2 of them.
    assert reality[reality.index("all_to_all, a step") + 1].startswith("26, ")


def test_a_downcast_island_is_the_headline(make_run: Callable[..., Path], run_files: dict[str, str]) -> None:
    """In red, by name, on top of the precision table, and as a difference from the plan."""
    healthy = run_files["precision.txt"]
    line = next(line for line in healthy.splitlines() if "self_attn.sinks" in line)
    broken = healthy.replace(line, line.replace("fp32    fp32", "bf16    bf16", 1))
    folder = make_run(files={"precision.txt": broken})
    reader = rendered(folder)
    assert "fp32 islands: no" in reader.seen
    assert "4 of 58 are not, such as model.layers.*.self_attn.sinks (bf16 / bf16 / fp32)" in reader.seen
    assert "4 tensors must be fp32 and are not:" in reader.seen
    reality = section(reader, "Plan against reality", "Configuration")
    assert "2 of the recorded figures differ from the plan." in reality
    at = reality.index("parameters in fp32 / fp32 / fp32")
    assert reality[at + 1 : at + 3] == ["56", "52"]


def test_plan_and_reality_agree_for_a_healthy_run(make_run: Callable[..., Path]) -> None:
    """Live dtypes and ranks as planned; collectives are the plan's alone, and the page says so."""
    reality = section(rendered(make_run()), "Plan against reality", "Configuration")
    assert "All that was recorded is as planned." in reality
    assert any(line.startswith("This run recorded no collectives") for line in reality)
    gathers = [reality[i + 1].split(",")[0] for i, line in enumerate(reality) if line.startswith("all_gather")]
    assert sum(map(int, gathers)) == 19  # tests/test_collectives.py counts them


def test_an_audit_saved_with_the_run_decides_about_the_islands(make_run: Callable[..., Path]) -> None:
    """Its violations are shown with their cause."""
    violation = Violation("reduce-dtype", "model.norm.weight", "F32", "BF16", "reduced in the policy's dtype")
    report = AuditReport("run", "58 islands looked at", (), (violation,))
    reader = rendered(make_run(files={"audit.json": report.to_json()}))
    assert "fp32 islands: no" in reader.seen
    shown = section(reader, "Audit", "Configuration")
    assert shown[0].startswith("VIOLATED audit.json")
    assert shown[1].startswith("reduce-dtype: model.norm.weight: BF16, must be F32")


def test_two_runs_stand_side_by_side(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Each chart has both curves; settings that differ are marked; equal precision is shown once."""
    config = resolve({"steps": "12", "seed": "7"})
    a, b = make_run("first"), make_run("second", files={"config.yaml": to_yaml(config)})
    out = tmp_path / "out.html"
    result = run(a, b, "--html", out)
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()[:6]] == ["A first"] * 3 + ["B second"] * 3
    text = out.read_text()
    assert text.count('class="line a"') == text.count('class="line b"') == 6
    assert re.findall(r'<tr class="differs"><td class="name">([^<]*)', text) == ["seed"]
    reader = Reader(text)
    assert f"1 of the {len(flat_settings(config))} settings differ." in reader.seen
    assert reader.seen.count("The same in both runs, row by row.") == 1


def test_two_runs_whose_precision_differs_say_where(make_run: Callable[..., Path], run_files: dict[str, str]) -> None:
    """Name by name, before the two tables."""
    other = run_files["precision.txt"].replace("lm_head.weight  ", "lm_head.weights ")
    assert other != run_files["precision.txt"]
    shown = section(rendered(make_run("a"), make_run("b", files={"precision.txt": other})), "Precision", "A a")
    assert shown[0].startswith("2 names differ")
    assert shown[4] == "lm_head.weight"
    assert shown[6] == "-"


def test_nothing_from_a_file_is_taken_for_markup(make_run: Callable[..., Path], run_files: dict[str, str]) -> None:
    """Folder, settings, fields, precision, plan, audit: shown as they are written, in a page of the same elements."""
    clean = make_run("clean", files={"metrics.jsonl": metrics({"field": 1.0}, {"field": 2.0})})
    precision = run_files["precision.txt"].replace("island: class list", f"island: {HOSTILE}")
    violation = {"kind": HOSTILE, "name": HOSTILE, "found": HOSTILE, "expected": HOSTILE, "cause": HOSTILE}
    audit = {"ok": False, "summary": HOSTILE, "violations": [violation]}
    plan = json.loads(run_files["plan.json"])
    plan["units"][0]["fqn"] = HOSTILE
    files = {
        "metrics.jsonl": metrics({HOSTILE: 1.0, f"{HOSTILE}2": []}, {HOSTILE: 2.0}),
        "config.yaml": json.dumps({HOSTILE: HOSTILE, "steps": 2, "nproc": HOSTILE}),
        "precision.txt": precision,
        "plan.json": json.dumps(plan),
        "audit.json": json.dumps(audit),
    }
    folder = make_run(HOSTILE.replace("/", ""), files=files)
    hostile = rendered(folder)
    assert hostile.tags.keys() - rendered(clean).tags.keys() <= {"ul", "li", "br", "code"}
    assert "onerror" not in hostile.attributes
    assert sum(HOSTILE in line for line in hostile.seen) > 20
    both = page([read_run(folder), read_run(clean)])
    assert "<img" not in both


BROKEN: dict[str, tuple[dict[str, str | None], str]] = {
    "no metrics": ({"metrics.jsonl": None}, "has no metrics.jsonl; give the folder of a run that has begun to train"),
    "empty": ({"metrics.jsonl": "\n"}, "metrics.jsonl is empty: the run has not finished a step"),
    "broken line": ({"metrics.jsonl": metrics({}, {}) + "{oops}\n" + metrics({})}, "line 3: not JSON"),
    "cut off": ({"metrics.jsonl": metrics({}) + '{"step": 2, "lo'}, "line 2: not JSON.*the run is still writing"),
    "a list": ({"metrics.jsonl": metrics({}) + "[1]\n"}, r'line 2: expected an object with a whole "step"'),
    "no step": ({"metrics.jsonl": '{"loss": 1.0}\n'}, r'line 1: expected an object with a whole "step"'),
    "steps go back": ({"metrics.jsonl": metrics({}, {}, {"step": 1})}, "line 3: step 1 comes after step 2"),
    "a nan": ({"metrics.jsonl": metrics({"loss": math.nan})}, "line 1: not JSON: NaN is no JSON"),
    "infinite": ({"metrics.jsonl": '{"step": 1, "loss": 1e999}\n'}, "line 1: loss is not finite"),
    "a word": ({"metrics.jsonl": metrics({"lr": "fast"})}, "line 1: lr: expected a number or null"),
    "no loss": ({"metrics.jsonl": '{"step": 1}\n'}, 'no line has a "loss"'),
    "broken config": ({"config.yaml": "{"}, "config.yaml: not YAML"),
    "config is a list": ({"config.yaml": "[]"}, "config.yaml: expected settings by name"),
    "a worded load": ({"metrics.jsonl": metrics({"expert_load": "even"})}, "line 1: expert_load: expected a number"),
    "other precision": ({"precision.txt": "hello"}, "precision.txt, line 1: expected the columns name count"),
    "broken plan": ({"plan.json": "{"}, "plan.json: not JSON"),
    "broken audit": ({"audit.json": "{}"}, "audit.json: not an audit report"),
}


@pytest.mark.parametrize(("files", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_run_is_one_error_and_nothing_is_written(
    files: dict[str, str | None], message: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """Exit code 2, one line that says which file and line, and no page and no picture."""
    folder = make_run(files=files)
    before = sorted(tmp_path.rglob("*"))
    result = run(folder, "--html", tmp_path / "out.html", "--png-dir", tmp_path / "pictures")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(rf"error: .*{message}.*\n", result.stderr), result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_arguments_that_cannot_work_are_refused_before_reading(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """One line each; a name that would overwrite the run's own file is not taken."""
    folder, page_file = make_run(), tmp_path / "out.html"
    for arguments, message in (
        ([tmp_path / "nothing", "--html", page_file], "nothing does not exist; give the folder of a run"),
        ([folder / "plan.txt", "--html", page_file], "plan.txt is a file; give the folder of a run"),
        ([folder, tmp_path / "nothing", "--html", page_file], "nothing does not exist"),
        ([folder], "--html: missing"),
        ([folder, "--html", folder / "metrics.jsonl"], "--html: expected a name that ends in .html"),
        ([folder, "--html", tmp_path / "no" / "out.html"], "--html: there is no folder"),
        ([folder, "--html", page_file, "--png-dir", folder / "plan.txt"], "is no folder and cannot be made one"),
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert not page_file.exists()


def test_a_plan_of_another_version_costs_its_section_only(make_run: Callable[..., Path]) -> None:
    """The rest of the run is still worth reading."""
    reality = section(rendered(make_run(files={"plan.json": '{"units": []}'})), "Plan against reality", "Configuration")
    assert reality[0].startswith("Nothing to compare: plan.json is not a plan as this version writes it")


def test_each_chart_is_written_as_a_png(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Under its field's name, never outside of the folder, with a curve in it."""
    rows = [{"grad_norm": 2.0**i, "../up": 1.0, "$x_$": None} for i in range(8)]
    pictures = tmp_path / "pictures"
    folder = make_run("$run_", files={"metrics.jsonl": metrics(*rows)})
    result = run(folder, folder, "--html", tmp_path / "out.html", "--png-dir", pictures)
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in pictures.iterdir()) == ["_up.png", "_x__.png", "grad_norm.png", "loss.png"]
    with Image.open(pictures / "grad_norm.png") as image:
        assert image.size == (1040, 585)
        assert any(g > 90 and r < 60 and b > 150 for r, g, b in pixels(image))


def pixels(image: Image.Image) -> set[tuple[int, int, int]]:
    return {colour for _, colour in image.convert("RGB").getcolors(2**24) or ()}  # type: ignore[misc]


def test_a_step_that_is_not_finite_is_a_gap_with_a_mark(make_run: Callable[..., Path]) -> None:
    """The curve does not run through it, and the number is not made up."""
    rows = [{"loss": loss} for loss in (3.0, 2.0, None, 2.5, 2.25)]
    data = read_run(make_run(files={"metrics.jsonl": metrics(*rows)}))
    (chart,) = charts_of([data], ["run"])
    picture = svg(chart)
    assert picture.count('class="line a"') == 2
    assert picture.count('class="lost"') == 1
    assert "not finite at step 3" in picture
    assert "last 2.25, from 2 to 3, 1 not finite" in Reader(page([data])).seen
    reader = rendered(make_run("other", files={"metrics.jsonl": metrics(*rows[:3])}))
    assert "other: loss not finite at the last step" in reader.seen


def test_a_long_run_is_thinned_and_keeps_its_extremes(make_run: Callable[..., Path]) -> None:
    """30,000 steps make a small page, and the one spike is within the range that is drawn."""
    rows = [{"loss": 9.0 if i == 14_321 else 1.0} for i in range(30_000)]
    data = read_run(make_run(files={"metrics.jsonl": metrics(*rows)}))
    (chart,) = charts_of([data], ["run"])
    picture = svg(chart)
    assert len(picture) < 20_000
    ys = [float(y) for y in re.findall(r",([\d.]+)", re.findall(r'class="range a" points="([^"]*)"', picture)[0])]
    assert min(ys) < 25
    assert max(ys) > 170


@pytest.mark.parametrize(
    "values",
    [
        (0.0,),
        (5.0,),
        (5.0, 5.0),
        (1.7e308, -1.7e308),
        (5e-324, 0.0),
        (1.0, 1.0 + 2**-52),
        (-3.0, -2.0),
        (1e-7, 1e9),
        (None,),
    ],
)
def test_any_finite_numbers_can_be_drawn(values: tuple[float | None, ...]) -> None:
    """Every coordinate is within the picture."""
    from dsv4_fsdp.report.charts import Chart, _drawable

    drawn = tuple(None if value is None else _drawable(value) for value in values)
    line = Line(0, "run", tuple(range(1, len(values) + 1)), drawn)
    for looks in ({}, {"from_zero": True}, {"may_be_log": True}, {"from_zero": True, "stepped": True}):
        picture = svg(Chart("key", "title", "note", (line,), reference=(1.0, "one"), **looks))
        assert "nan" not in picture
        assert "inf" not in picture
        for name, number in re.findall(r' (c?[xy][12]?)="([-\d.e]+)"', picture):
            assert -2 <= float(number) <= (420 if "x" in name else 210)


def num_rows_with(colour: tuple[int, int, int], image: Image.Image) -> int:
    rgb = image.convert("RGB").tobytes()
    stride = 3 * image.width
    rows = (rgb[start : start + stride] for start in range(0, len(rgb), stride))
    return sum(any(row[i : i + 3] == bytes(colour) for i in range(0, stride, 3)) for row in rows)


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no Chromium on this machine; the page was not looked at in a browser")


def browse(folder: Path, *arguments: str) -> str:
    """Headless Chromium's standard output."""
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={folder / 'user'}"]
    command = [chromium(), "--headless", "--no-sandbox", *quiet, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture
def framed_page(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    """The page of two runs with long names, unmodified, in frames 390 and 1280 pixels wide; widths go to the title.

    A window is never narrower than 500 pixels; a frame is, and its page takes the frame for the screen.
    """
    long_setting = {"very_long_name_without_any_blank" * 4: "x" * 300, "steps": 12, "nproc": 2}
    a = make_run("a" * 120)
    rising = metrics(*({"loss": 2.0 + i / 4} for i in range(12)))
    b = make_run("b", files={"metrics.jsonl": rising, "config.yaml": json.dumps(long_setting), "precision.txt": None})
    text = page([read_run(a), read_run(b)])
    frames = "".join(
        f'<iframe style="border:0;display:block;width:{width}px;height:{height}px" srcdoc="{html.escape(text)}">'
        "</iframe>"
        for width, height in ((390, 1400), (1280, 900))
    )
    script = """<script>addEventListener("load", () => { document.title = JSON.stringify(
        [...document.querySelectorAll("iframe")].map(f => {
            const root = f.contentDocument.documentElement;
            f.contentDocument.querySelectorAll("details").forEach(d => { d.open = true; });
            return [f.contentWindow.innerWidth, root.scrollWidth, root.scrollHeight];
        })); })</script>"""
    wrapper = tmp_path / "frames.html"
    wrapper.write_text(f'<!doctype html><title></title><body style="margin:0">{frames}{script}')
    return wrapper


def test_no_width_of_screen_has_to_scroll_sideways(framed_page: Path, tmp_path: Path) -> None:
    """In a phone's 390 pixels and a desktop's 1280, everything unfolded, names without a blank among it."""
    dom = browse(tmp_path, "--window-size=1280,2300", "--dump-dom", framed_page.as_uri())
    (title,) = re.findall(r"<title>(\[.*?\])</title>", dom)[:1]
    phone, desktop = json.loads(title)
    assert phone[:2] == [390, 390]
    assert desktop[:2] == [1280, 1280]
    assert phone[2] > desktop[2] > 1000


def test_a_screenshot_shows_curves_on_phone_and_desktop(framed_page: Path, tmp_path: Path) -> None:
    """Both runs' colours are on the screen, and text."""
    shot = tmp_path / "shot.png"
    browse(tmp_path, "--window-size=1280,2300", f"--screenshot={shot}", framed_page.as_uri())
    header = shot.read_bytes()[:24]
    assert struct.unpack(">II", header[16:]) == (1280, 2300)
    with Image.open(shot) as image:
        phone, desktop = image.crop((0, 0, 390, 1400)), image.crop((0, 1400, 1280, 2300))
        for part in (phone, desktop):
            for colour in ((0, 114, 178), (198, 85, 0)):
                # A curve from bottom to top. Keys, borders and a curve's dots alone would be 80 rows or fewer.
                assert num_rows_with(colour, part) > 110
            assert len(pixels(part)) > 100  # the edges of letters
