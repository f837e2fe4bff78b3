"""The parts of the trainer by themselves: data, model, schedule, loop, export, reports."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_train import another_seed_on_rank_1, gradients_of_first_step, lonely_parameter, one_rank_not_finite
from rich.console import Console
from safetensors.torch import save_file
from tiny_models import island_buffer_names, island_names
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dsv4_fsdp.data.stdlib_text import BOS, EOS, VOCAB_SIZE, StdlibText, stdlib_files
from dsv4_fsdp.export.safetensors_writer import SafetensorsWriter
from dsv4_fsdp.train.config import ConfigError, flat_settings, from_yaml, resolve, to_yaml
from dsv4_fsdp.train.export import ExportError, reload_with_stock, write_checkpoint
from dsv4_fsdp.train.launch import failure_report
from dsv4_fsdp.train.presets import PRESETS
from dsv4_fsdp.train.progress import Progress, StepMetrics
from dsv4_fsdp.train.ranks import disagreement
from dsv4_fsdp.train.run_folder import RunFolder
from dsv4_fsdp.train.tiny_model import build_tiny_model, byte_tokenizer
from pool import run_ranks

# --- Data ------------------------------------------------------------------------------------------------------------

LENGTHS = (64, 192, 256, 512)


@pytest.fixture(scope="module")
def text() -> StdlibText:
    return StdlibText(seed=0, sequence_lengths=LENGTHS, batch_tokens=512)


def test_a_batch_depends_on_seed_and_position_only(text: StdlibText) -> None:
    """Another object gives the same batches, in whatever order they are asked for; another seed gives others."""
    again = StdlibText(seed=0, sequence_lengths=LENGTHS, batch_tokens=512)
    other = StdlibText(seed=1, sequence_lengths=LENGTHS, batch_tokens=512)
    backwards = {position: again.batch(position) for position in reversed(range(20))}
    assert again.digest == other.digest == text.digest
    assert all(torch.equal(text.batch(position), backwards[position]) for position in range(20))
    assert not any(torch.equal(text.batch(position), other.batch(position)) for position in range(20))


def test_the_lengths_of_a_seed_are_the_same_on_every_machine(text: StdlibText) -> None:
    """Pinned, since a change would silently give a resumed or compared run other data."""
    assert [text.batch(position).shape[1] for position in range(10)] == [64, 64, 64, 512, 256, 512, 256, 512, 64, 192]


def test_batches_have_all_lengths_and_fill_their_tokens(text: StdlibText) -> None:
    """No batch exceeds its budget, none could hold a row more, and every length occurs."""
    shapes = [tuple(text.batch(position).shape) for position in range(100)]
    assert {length for _, length in shapes} == set(LENGTHS)
    assert all(rows * length <= 512 < (rows + 1) * length for rows, length in shapes)


def test_the_text_is_the_files_byte_for_byte(text: StdlibText) -> None:
    """Between one BOS and one EOS for each file, and no id is outside of the vocabulary."""
    contents = [content for path in stdlib_files() if (content := path.read_bytes())]
    assert text.num_files == len(contents)
    assert int((text.tokens == BOS).sum()) == int((text.tokens == EOS).sum()) == len(contents)
    assert 0 <= int(text.tokens.min()) <= int(text.tokens.max()) < VOCAB_SIZE
    tokens = text.tokens.tolist()
    expected = [token for content in contents for token in (BOS, *content, EOS)]
    assert tokens == expected


def test_no_standard_library_source_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that ships compiled files only cannot run the tiny preset."""
    monkeypatch.setattr("dsv4_fsdp.data.stdlib_text.stdlib_files", list)
    with pytest.raises(Exception, match=r"expected: \.py files with at least 512 bytes"):
        StdlibText(seed=0, sequence_lengths=LENGTHS, batch_tokens=512)


# --- Model and optimizer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build_tiny_model(seed=0)


def test_the_seed_alone_makes_the_weights(model: nn.Module) -> None:
    """Every rank builds the same model, and the global random state is left alone."""
    state = torch.get_rng_state()
    again, other = build_tiny_model(seed=0), build_tiny_model(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in again.state_dict().items())
    assert not torch.equal(theirs["lm_head.weight"], ours["lm_head.weight"])
    table = "model.layers.0.mlp.gate.tid2eid"
    assert not torch.equal(theirs[table], ours[table])


def test_fp32_is_stored_exactly_where_the_class_wants_it(model: nn.Module) -> None:
    """The islands of ``_keep_in_fp32_modules_strict`` in fp32, everything else in bf16."""
    fp32 = [name for name, param in model.named_parameters() if param.dtype == torch.float32]
    bf16 = [name for name, param in model.named_parameters() if param.dtype == torch.bfloat16]
    assert fp32 == island_names(model)
    assert len(fp32) + len(bf16) == sum(1 for _ in model.parameters())
    buffers = dict(model.named_buffers())
    assert all(buffers[name].dtype == torch.float32 for name in island_buffer_names(model))


def test_hash_routers_give_every_token_distinct_experts(model: nn.Module) -> None:
    """And all experts are somebody's."""
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("tid2eid")]
    assert len(tables) == 2
    for table in tables:
        assert table.shape == (VOCAB_SIZE, 2)
        assert bool((table[:, 0] != table[:, 1]).all())
        assert sorted(table.unique().tolist()) == list(range(8))


def test_the_model_has_every_kind_of_layer(model: nn.Module) -> None:
    """Sliding, CSA and HCA attention, both routers, hyper-connections."""
    kinds = {type(module).__name__.removeprefix("DeepseekV4") for module in model.modules()}
    assert kinds >= {"HCACompressor", "CSACompressor", "Indexer", "HashRouter", "TopKRouter", "HyperConnection"}
    assert model.get_submodule("model.layers.0.self_attn").compressor is None


def test_the_tokenizer_maps_bytes_to_themselves() -> None:
    """Ids are the UTF-8 bytes of the text, and come back as the text."""
    tokenizer = byte_tokenizer()
    snippet = "def naïve(x):\n\treturn  x  # €\n"
    ids = tokenizer(snippet)["input_ids"]
    assert ids == list(snippet.encode())
    assert tokenizer.decode(ids) == snippet
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (BOS, EOS, VOCAB_SIZE)


# --- The loop on two ranks -------------------------------------------------------------------------------------------


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_gradient_is_that_of_one_process_on_the_concatenated_batch(in_tmp_path: Path) -> None:
    """With ranks of different token counts, where a mean of the ranks' means would be another gradient."""
    results = run_ranks(2, gradients_of_first_step)
    for worst, counts in results:
        # Averaging means would weigh each rank by a half instead of these shares: off by 17 %.
        assert counts in ([567, 399], [399, 567])
        # One rounding of each gradient to bf16 is up to 2**-9 = 0.002.
        assert worst < 5e-3


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_on_one_rank_makes_all_ranks_skip_the_step(in_tmp_path: Path, where: str) -> None:
    """Same optimizer steps on both ranks, weights untouched in the skipped one, and the count is shown."""
    results = run_ranks(2, one_rank_not_finite, where)
    # Of the three steps, the changes from the first to the second and from the second to the third.
    assert results == [(2, [False, True]), (2, [False, True])]
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1]
    assert rows[1]["grad_norm"] is None
    assert (rows[1]["loss"] is None) == (where == "loss")


def test_a_parameter_that_gets_no_gradient_stops_the_run_after_the_first_step(in_tmp_path: Path) -> None:
    """It would never train, and nothing else would say so. Short sequences, mixed in here, are no reason."""
    for message in run_ranks(2, lonely_parameter):
        assert message.startswith("MissingGradients: after the first step 6 trainable parameters have no gradient")
        assert "  - model.layers.2.self_attn.compressor.indexer.q_b_proj.weight\n" in message


def test_ranks_that_differ_are_named_before_they_depend_on_each_other(in_tmp_path: Path) -> None:
    """All ranks get the same message."""
    for message in run_ranks(2, another_seed_on_rank_1):
        assert message.startswith("RanksDiffer: the ranks differ in: seed\n  0 on rank 0\n  1 on rank 1\n")
    assert not Path("run").exists()


def test_a_disagreement_lists_who_holds_what() -> None:
    """And nothing is said where all agree."""
    assert disagreement([{"plan": "a", "text": "t"}] * 3) is None
    everyone = [{"plan": "a", "text": "t"}, {"plan": "b", "text": "t"}, {"plan": "a", "text": "t"}]
    assert (disagreement(everyone) or "").startswith("the ranks differ in: plan\n  a on ranks 0, 2\n  b on rank 1\n")


# --- Export ----------------------------------------------------------------------------------------------------------


def test_an_export_that_lost_an_islands_fp32_is_refused(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers of the written file are compared with the model, so a cast while saving cannot pass."""
    original = SafetensorsWriter.add_tensor

    def casting(writer: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        original(writer, name, tensor.bfloat16() if name == "model.layers.0.self_attn.sinks" else tensor)

    monkeypatch.setattr(SafetensorsWriter, "add_tensor", casting)
    with pytest.raises(ExportError, match=r"in 1 tensors:\n  - model\.layers\.0\.self_attn\.sinks: expected \('F32'"):
        write_checkpoint(model, model.state_dict(), tmp_path / "export", tokenizer=byte_tokenizer())


def test_an_export_with_other_logits_is_refused(model: nn.Module, tmp_path: Path) -> None:
    """One bit in one logit is enough."""
    tokens = torch.arange(200).unsqueeze(0)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.clone()
    model.train()
    logits[0, 7, 11] = torch.nextafter(logits[0, 7, 11], torch.tensor(9.0, dtype=torch.bfloat16))
    write_checkpoint(model, model.state_dict(), tmp_path / "export", tokenizer=byte_tokenizer())
    save_file({"input_ids": tokens, "logits": logits}, tmp_path / "reference")
    with pytest.raises(ExportError, match="does not give the trained model's logits"):
        reload_with_stock(tmp_path / "export", tmp_path / "reference", prompt="def ", seed=0)


# --- Configuration, progress, reports --------------------------------------------------------------------------------


def test_every_preset_is_valid_as_text_too() -> None:
    """What the command line would type for each setting gives the same configuration."""
    missing = {"model.path": "model", "data.path": "data.jsonl"}
    for name in PRESETS:
        preset = resolve({"preset": name} | (missing if name != "tiny" else {}))
        assert resolve(flat_settings(preset)) == preset
        assert from_yaml(to_yaml(preset)) == preset


def test_all_mistakes_are_reported_together() -> None:
    """One line each, so that a command is mended in one go."""
    with pytest.raises(ConfigError) as caught:
        resolve({"steps": "0", "optimizer.lrr": "1", "data.sequence_lengths": "1,x", "nproc": "two"})
    assert caught.value.problems == [
        "optimizer.lrr: no such setting; did you mean optimizer.lr?",
        "steps: input should be greater than 0, got 0",
        "nproc: input should be a valid integer, unable to parse string as an integer, got two",
        "data.sequence_lengths.0: input should be greater than or equal to 2, got 1",
        "data.sequence_lengths.1: input should be a valid integer, unable to parse string as an integer, got x",
    ]


def _row(step: int, **over: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": 12.3456,
        "grad_norm": 123.456,
        "lr": 1.234e-4,
        "tokens": 1000,
        "tokens_per_s": 123456.7,
        "ranks_without_window": 0,
        "skipped_steps": 12,
        "elapsed_s": 1.5 * step,
        "memory_bytes": 12345 * 2**20,
        "data_s": 0.1,
        "compute_s": 1.0,
        "reduce_s": 0.2,
        "optimizer_s": 0.2,
    }
    return StepMetrics(**(values | over))


def test_a_metrics_line_is_json_even_if_the_loss_is_not_finite() -> None:
    """nan is not JSON."""
    row = json.loads(_row(1, loss=float("nan"), grad_norm=float("inf")).to_json())
    assert (row["loss"], row["grad_norm"], row["lr"]) == (None, None, 1.234e-4)


def test_the_progress_bar_fits_into_100_columns(tmp_path: Path) -> None:
    """With wide numbers and skipped steps, everything on one line and legible."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    with Progress(steps=1000, metrics=tmp_path / "metrics.jsonl", console=console) as progress:
        for step in range(1, 1001):
            progress.record(_row(step))
    lines = [re.sub(r"\x1b\[\??[0-9]*[A-Za-z]", "", line) for line in screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= 100
    last = [line for line in lines if line.strip()][-1]
    assert last.startswith("step 1000/1000 ━")
    assert "loss 12.346  grad 123.46  lr 1.2e-04  123,457 tokens/s" in last
    assert "12 skipped" in last
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1000


def test_without_a_terminal_there_are_some_twenty_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log file gets no control characters and not a line for each of 1,000 steps."""
    with Progress(steps=1000, metrics=tmp_path / "metrics.jsonl", console=Console(file=io.StringIO())) as progress:
        for step in range(1, 1001):
            progress.record(_row(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert "\x1b" not in "".join(lines)
    assert lines[-1].startswith("step 1000/1000  loss 12.346")


def _failure(folder: Path, rank: int, *, exit_code: int, error: str | None, written_at: float = 0) -> ProcessFailure:
    path = folder / f"error{rank}.json"
    if error is not None:
        trace = f"Traceback (most recent call last):\n  somewhere\n{error}\n"
        extra = {"py_callstack": trace, "timestamp": "1000"}
        path.write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
        os.utime(path, (written_at, written_at))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file=str(path))


def test_the_report_begins_with_the_rank_that_failed_first(tmp_path: Path) -> None:
    """Milliseconds count: torchelastic's own time stamps are in seconds, and equal here."""
    failures = {
        0: _failure(tmp_path, 0, exit_code=1, error="RuntimeError: Connection closed by peer", written_at=1000.002),
        1: _failure(tmp_path, 1, exit_code=1, error="ValueError: the cause", written_at=1000.001),
        2: _failure(tmp_path, 2, exit_code=-15, error=None),  # how torchrun ends the others
    }
    report, exit_code = failure_report(failures)
    assert exit_code == 1
    assert report == (
        "rank 1 failed:\n\nTraceback (most recent call last):\n  somewhere\nValueError: the cause\n"
        "rank 0 failed after that: RuntimeError: Connection closed by peer"
    )


def test_the_report_takes_a_killed_rank_for_the_cause(tmp_path: Path) -> None:
    """It leaves no error file, so its time is when it was noticed, after the others' errors."""
    failures = {
        0: _failure(tmp_path, 0, exit_code=1, error="RuntimeError: Connection closed by peer", written_at=1000.0),
        1: _failure(tmp_path, 1, exit_code=-9, error=None),
    }
    report, exit_code = failure_report(failures)
    assert exit_code == 128 + 9
    assert report.splitlines() == [
        "rank 1 was killed by SIGKILL (often the system's answer to a lack of memory)",
        "rank 0 failed after that: RuntimeError: Connection closed by peer",
    ]


def test_a_run_folder_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    """A new folder and an empty one are fine, below folders that do not exist yet too."""
    config = resolve({})
    RunFolder(tmp_path).check(config)
    RunFolder(tmp_path / "new" / "deeper").check(config)
    (tmp_path / "file").touch()
    for path, problem in [
        (tmp_path, "is not empty; give a folder that is new or empty"),
        (tmp_path / "file", "is a file; give a folder that is new or empty"),
        (tmp_path / "file" / "below", "is a file"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            RunFolder(path).check(config)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_is_continued_with_its_own_settings_only(tmp_path: Path) -> None:
    """What decides what is learned must be the same; how it runs, and for how long, need not."""
    folder = RunFolder(tmp_path)
    folder.create(resolve({"steps": "10"}))
    assert folder.former_config() == resolve({"steps": "10"})
    folder.check(resolve({"steps": "20", "nproc": "4", "checkpoint.every": "3", "logging.audit": "off"}))
    with pytest.raises(ConfigError) as caught:
        folder.check(resolve({"optimizer.lr": "1", "seed": "3"}))
    assert caught.value.problems == [
        f"optimizer.lr: the run in {tmp_path} has 0.002, not 1.0",
        f"seed: the run in {tmp_path} has 0, not 3",
        "--run-dir: to train with other settings give a folder that is new or empty",
    ]


def test_steps_that_were_lost_leave_no_line(tmp_path: Path) -> None:
    """A resumed run makes them again; the cut line of a killed run goes as well."""
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(_row(step).to_json() + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    folder.keep_metrics(2)
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]
