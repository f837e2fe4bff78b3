"""``dsv4-fsdp data preview`` and ``data prepare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from tiny_tokenizer import EOS, deepseek_tokenizer
from typer.testing import CliRunner, Result

from dsv4_fsdp.commands.data import data_app
from dsv4_fsdp.data.prepare import load_tokenizer, prepare
from dsv4_fsdp.train.config import read_config_file, resolve

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is [b]2+2[/b]?\nSay é. {EOS}"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
        ]
    },
    {"prompt": "q" * 200, "completion": "lost"},
    {"prompt": "q", "completion": "x" * 200},
]


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.add_typer(data_app)
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def preview(*arguments: str | Path) -> Result:
    return run("preview", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    deepseek_tokenizer(padding_side="left").save_pretrained(folder / "tokenizer")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "a.txt").write_text("some text\n" * 20)
    (folder / "run.yaml").write_text(
        f"steps: 10\nmodel:\n  path: {folder}/tokenizer\n"
        f"data:\n  kind: sft\n  path: {folder}/a.jsonl\n  sequence_length: 100\n  global_batch_size: 64\n"
    )
    return folder


def sft_options(folder: Path) -> list[str | Path]:
    options = ["--kind", "sft", "--path", folder / "a.jsonl", "--tokenizer", folder / "tokenizer"]
    return [*options, "--sequence-length", "100"]


def test_the_preview_shows_what_is_learned_and_what_was_left_out(folder: Path) -> None:
    """Counts, the conversation with what is learned in brackets, first and last tokens with labels; 100 columns."""
    shown = preview(*sft_options(folder))
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for expected in (
        "read 3 conversations",
        "rows 2",
        "truncated 2",
        "dropped 1 with nothing left to learn from",
        "given <｜begin▁of▁sentence｜><｜User｜>What is [b]2+2[/b]?\\nSay é.",
        "<｜end▁of▁sentence｜><｜Assistant｜></think>",
        "learned [4<｜end▁of▁sentence｜>]",
        "given <｜User｜>Sure?<｜Assistant｜><think>",
        "learned [hm</think>Yes.<｜end▁of▁sentence｜>]",
        "position id token label token",
        "0 256 <｜begin▁of▁sentence｜> -100",
    ):
        assert any(line.startswith(expected) for line in lines), expected
    assert any(line.endswith(". -> 257 <｜end▁of▁sentence｜>") for line in lines)
    assert any(line.startswith("note the tokenizer asks for padding on the left") for line in lines)
    assert max(cell_len(line) for line in shown.stdout.splitlines()) <= 100


def test_the_preview_as_json_has_whole_rows(folder: Path) -> None:
    """Inputs, labels and counts; as many rows as asked for."""
    shown = preview(*sft_options(folder), "--rows", "1", "--json")
    found = json.loads(shown.stdout)
    assert found["counts"]["dropped_without_labels"] == 1
    (row,) = found["rows"]
    assert row["labels"][-1] == 257
    assert row["ids"][1:] == [
        label if label >= 0 else id for id, label in zip(row["ids"][1:], row["labels"], strict=False)
    ]
    assert sum(label >= 0 for label in row["labels"]) == len(b"4") + 1 + len(b"hm") + 1 + len(b"Yes.") + 1
    assert [learned for learned, _ in row["spans"]] == [False, True, False, True]


def test_the_preview_reads_a_runs_configuration(folder: Path) -> None:
    """Its data section and the tokenizer of its model; options change it."""
    found = json.loads(preview("--config", folder / "run.yaml", "--json").stdout)
    assert (found["kind"], found["counts"]["rows"], found["counts"]["truncated"]) == ("sft", 2, 2)
    found = json.loads(preview("--config", folder / "run.yaml", "--too-long", "drop", "--json").stdout)
    assert (found["counts"]["rows"], found["counts"]["dropped_too_long"]) == (1, 2)


def test_what_a_preset_sets_is_known_to_the_preview(folder: Path) -> None:
    """A file that says no more than what its user knows."""
    config = folder / "preset.yaml"
    config.write_text(f"preset: flash-sft\ndata: {{path: {folder}/a.jsonl, tokenizer: {folder}/tokenizer}}")
    found = json.loads(preview("--config", config, "--json").stdout)
    assert (found["kind"], found["counts"]["truncated"], found["counts"]["rows"]) == ("sft", 0, 3)


def test_data_can_be_prepared_ahead_of_a_run(folder: Path) -> None:
    """What it writes is what the run would write, so the run finds it."""
    config = folder / "ahead.yaml"
    config.write_text(f"preset: flash-sft\nmodel: {{path: {folder}/tokenizer}}\ndata: {{path: {folder}/a.jsonl}}")
    shown = run("prepare", "--config", config, "--cache-dir", folder / "cache")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("3 rows of 3 read; 489 tokens, 216 of them (44%) supervised\nnote: the tokenizer")
    settings = resolve({}, base=read_config_file(config)).data
    tokenizer = load_tokenizer(folder / "tokenizer")
    found = prepare(
        settings, tokenizer=tokenizer, cache_dir=folder / "cache", seed=0, is_maker=False, wait=lambda: None
    )
    assert found.num_sequences == 3
    shown = run("prepare", "--config", config)
    assert (shown.exit_code, shown.stderr.startswith("error: data.cache_dir: missing; give a folder")) == (2, True)


def test_the_preview_reads_no_more_than_its_limit(folder: Path) -> None:
    """And says so."""
    shown = preview(*sft_options(folder), "--limit", "1")
    assert "1 conversations (the first; --limit 0 reads all)" in shown.stdout


def test_documents_and_the_standard_library_are_shown_too(folder: Path) -> None:
    """Everything is learned from but the first token."""
    shown = preview(
        "--kind", "pretrain", "--path", folder / "a.txt", "--tokenizer", folder / "tokenizer", "--sequence-length", "64"
    )
    assert shown.exit_code == 0, shown.output
    assert "192, of them 192 (100%) supervised" in shown.stdout
    assert "9 tokens at the end that fill no row" in shown.stdout
    config = folder / "stdlib.yaml"
    config.write_text("data: {kind: stdlib, sequence_lengths: [64], batch_tokens: 64}")
    shown = preview("--config", config, "--rows", "1")
    assert shown.exit_code == 0, shown.output
    assert "row 0: 64 tokens, 63 supervised" in shown.stdout


def test_the_preview_shows_where_packed_documents_begin(folder: Path) -> None:
    """How full rows are, each document from its position on, and the tokens at the border of the first two."""
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": 8 * letter}) + "\n" for letter in "abcdefg"))
    options = ["--kind", "pretrain", "--path", folder / "short.jsonl", "--tokenizer", folder / "tokenizer"]
    options += ["--sequence-length", "60", "--rows", "1", "--pack"]
    shown = preview(*options)
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for expected in (
        "packed 7 documents or pieces of them; the rows are 52.5% full",
        "row 0: 54 tokens, 54 supervised, 6 documents",
        "document 1, from position 0",
        "learned [aaaaaaaa<｜end▁of▁sentence｜>]",
        "document 2, from position 9",
        "given <｜begin▁of▁sentence｜>",
        "... 2 more documents, from position 36, 45",
        "8 97 a -> 257 <｜end▁of▁sentence｜>",
        "9 256 <｜begin▁of▁sentence｜> -> 98 b",
        "... 35 more",
    ):
        assert expected in lines, (expected, shown.stdout)
    assert max(cell_len(line) for line in shown.stdout.splitlines()) <= 100
    found = json.loads(preview(*options, "--json").stdout)
    assert (found["counts"]["packed"], found["counts"]["rows"], found["counts"]["room"]) == (7, 2, 120)
    (row,) = found["rows"]
    assert row["starts"] == [0, 9, 18, 27, 36, 45]
    assert row["span_documents"] == [document for document in range(6) for _ in range(2)]
    assert "packed" not in preview(*options[:-1]).stdout
    (row,) = json.loads(preview(*options[:-1], "--json").stdout)["rows"]
    assert row["starts"] == [0]


def test_packed_data_can_be_prepared_ahead_of_a_run(folder: Path) -> None:
    """How full its rows are is told; a run that could not keep them apart is refused before anything is read."""
    config = folder / "packed.yaml"
    text = f"preset: flash-sft\nmodel: {{path: {folder}/tokenizer}}\ndata: {{path: {folder}/a.jsonl, pack: true}}\n"
    config.write_text(text)
    shown = run("prepare", "--config", config, "--cache-dir", folder / "packed-cache")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("1 rows of 3 read, 3 packed into them, 6.0% full; 489 tokens, 216 of them (44%)")
    config.write_text(text.replace("model: {", "model: {attention: eager, "))
    shown = run("prepare", "--config", config, "--cache-dir", folder / "refused")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("error: data.pack: only model.attention windowed keeps the documents of a row apart")
    assert not (folder / "refused").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (["--path", "/no/file.jsonl"], "error: data.path: there is no file '/no/file.jsonl'"),
        (["--sequence-length", "many"], "error: data.sequence_length: input should be a valid integer"),
        (["--template", "chatml"], "error: data: template is 'chatml'; there is deepseek_v4, tokenizer, or the path"),
        (["--kind", "pretrain", "--template", "x.jinja"], "error: data.template: extra inputs are not permitted"),
        (["--kind", "pretrain", "--pack", "--isolate-documents"], "error: data: pack lets documents share a row, "),
        (["--config", "/no/run.yaml"], "error: --config: /no/run.yaml cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, change: list[Any], problem: str) -> None:
    """On standard error, with nothing on standard output."""
    shown = preview(*sft_options(folder), *change)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith(problem)
    assert shown.stderr.count("\n") == 1


def test_a_preview_without_a_tokenizer_asks_for_one(folder: Path) -> None:
    """There is no model whose tokenizer it could take."""
    shown = preview("--kind", "sft", "--path", folder / "a.jsonl", "--sequence-length", "100")
    assert shown.exit_code == 2
    assert shown.stderr == "error: data.tokenizer: missing; give a folder with a tokenizer\n"
