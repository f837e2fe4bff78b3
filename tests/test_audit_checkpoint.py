"""The audit of a checkpoint: healthy ones pass, and each fault is caught and named, from the headers or with --bits."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import (
    edit,
    nemo_release_checkpoint,
    original_names_checkpoint,
    rewrite,
    sparse_flash_checkpoint,
    transformers_checkpoint,
    write_sparse,
)
from tiny_models import require_nemo, tiny_transformers

from dsv4_fsdp.audit_report import AuditReport
from dsv4_fsdp.checkpoint_audit import audit_checkpoint
from dsv4_fsdp.errors import ContractError

Tensors = dict[str, torch.Tensor]

FN = "model.layers.1.attn_hc.fn"
SINKS = "model.layers.2.self_attn.sinks"
TABLE = "model.layers.0.mlp.gate.tid2eid"
EXPERT = "layers.2.ffn.experts.3.w1"
PROJECTION = "layers.0.attn.wq_a"


def kinds(report: AuditReport) -> list[tuple[str, str]]:
    return [(violation.kind, violation.name) for violation in report.violations]


# --- Healthy ----------------------------------------------------------------------------------------------------------


def masters(folder: Path) -> Path:
    return transformers_checkpoint(folder, model=tiny_transformers(dtype=torch.float32))


def tied(folder: Path) -> Path:
    return transformers_checkpoint(folder, model=tiny_transformers(tie_word_embeddings=True))


def sharded(folder: Path) -> Path:
    return transformers_checkpoint(folder, sharded=True)


HEALTHY: dict[str, Callable[[Path], Path]] = {
    "transformers": transformers_checkpoint,
    "transformers_sharded": sharded,
    "transformers_in_fp32": masters,
    "transformers_tied": tied,
    "transformers_under_original_names": original_names_checkpoint,
    "release": nemo_release_checkpoint,
}


@pytest.mark.parametrize("bits", [False, True], ids=["headers", "bits"])
@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_on_a_healthy_checkpoint(name: str, bits: bool, tmp_path: Path) -> None:
    """Both layouts, one file or many, bf16 or fp32 storage, quantised or not."""
    if name == "release":
        require_nemo()
    report = audit_checkpoint(HEALTHY[name](tmp_path), bits=bits)
    assert report.ok, report.table()
    assert sum(row.island for row in report.rows) >= (37 if name == "release" else 58)
    assert report.table().startswith("OK: no violation.")


# --- Faults in the model's own names ----------------------------------------------------------------------------------


def downcast(tensors: Tensors) -> None:
    tensors[FN] = tensors[FN].bfloat16()


def lose_bits(tensors: Tensors) -> None:
    tensors[SINKS] = tensors[SINKS].bfloat16().float()


def cast_table(tensors: Tensors) -> None:
    tensors[TABLE] = tensors[TABLE].bfloat16()


def drop(tensors: Tensors) -> None:
    del tensors[SINKS]


def add(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_c_proj.weight"] = torch.zeros(2, 2)


def wrap(tensors: Tensors) -> None:
    tensors["model.layers.1._checkpoint_wrapped_module.attn_hc.fn"] = tensors.pop(FN)


def put_nan(tensors: Tensors) -> None:
    tensors[SINKS][1] = torch.nan


def save_a_shard(tensors: Tensors) -> None:
    tensors[FN] = tensors[FN][:12].contiguous()


def empty_table(tensors: Tensors) -> None:
    tensors[TABLE].zero_()


FAULTS: dict[str, tuple[Callable[[Tensors], None], bool, list[tuple[str, str]], str]] = {
    "island_downcast": (downcast, False, [("island-downcast", FN)], "casts every tensor to one dtype"),
    "upcast_with_lost_bits": (lose_bits, True, [("lost-bits", SINKS)], "downcast to bf16 and upcast again"),
    "integer_table_cast": (cast_table, False, [("integer-cast", TABLE)], "did not spare integer tables"),
    "missing": (drop, False, [("missing-tensor", SINKS)], "lost on save"),
    "unexpected": (
        add,
        False,
        [("unexpected-tensor", "model.layers.0.self_attn.q_c_proj.weight")],
        "a key that the loader drops",
    ),
    "wrapper_in_the_name": (
        wrap,
        False,
        [
            ("unexpected-tensor", "model.layers.1._checkpoint_wrapped_module.attn_hc.fn"),
            ("missing-tensor", FN),
        ],
        "saved from a wrapped model",
    ),
    "nan_in_an_island": (put_nan, True, [("not-finite", SINKS)], "nobody initialised"),
    "a_rank_s_shard_saved": (save_a_shard, False, [("wrong-shape", FN)], "a rank's shard"),
    "table_never_loaded": (empty_table, True, [("empty-table", TABLE)], "never loaded"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught_and_named(name: str, tmp_path: Path) -> None:
    """The one tensor that is wrong, and no other, with the likely cause; the answer is in the first three lines."""
    change, bits, expected, cause = FAULTS[name]
    folder = edit(transformers_checkpoint(tmp_path), change)
    report = audit_checkpoint(folder, bits=bits)
    assert kinds(report) == expected
    assert cause in report.violations[0].cause
    first, second, third, *_ = report.table().splitlines()
    assert first.startswith(f"VIOLATED: {len(expected)} violation")
    assert expected[0][1][-20:] in second
    assert third.startswith("likely cause: ")
    if bits:
        assert audit_checkpoint(folder).ok, "the headers alone cannot know"


def test_a_constant_island_is_called_inconclusive(tmp_path: Path) -> None:
    """All ones or zeros fit into bf16 however they were made."""

    def make_constant(tensors: Tensors) -> None:
        tensors[SINKS].zero_()
        tensors["model.layers.0.attn_hc.scale"].fill_(1)

    report = audit_checkpoint(edit(transformers_checkpoint(tmp_path), make_constant), bits=True)
    assert report.ok
    assert any("inconclusive" in note and "2 islands" in note for note in report.notes), report.notes
    assert {row.name for row in report.rows if row.bits == "constant"} == {SINKS, "model.layers.0.attn_hc.scale"}


def test_fp32_norms_with_bf16_values_are_a_note(tmp_path: Path) -> None:
    """They are bf16 in the released files, so upcasting them proves nothing."""
    name = "model.layers.0.input_layernorm.weight"

    def round_norm(tensors: Tensors) -> None:
        tensors[name] = tensors[name].bfloat16().float()

    report = audit_checkpoint(edit(transformers_checkpoint(tmp_path), round_norm), bits=True)
    assert report.ok
    assert any(name in note for note in report.notes)


# --- Faults in the release's layout -----------------------------------------------------------------------------------


def drop_scale(tensors: Tensors) -> None:
    del tensors[f"{EXPERT}.scale"]


def drop_scaled(tensors: Tensors) -> None:
    del tensors[f"{EXPERT}.weight"]


def dequantise_half(tensors: Tensors) -> None:
    tensors[f"{PROJECTION}.weight"] = tensors[f"{PROJECTION}.weight"].bfloat16()


def cast_scale(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.scale"] = tensors[f"{EXPERT}.scale"].bfloat16()


def bytes_as_numbers(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.scale"] = tensors[f"{EXPERT}.scale"].view(torch.uint8).float()


def byte_255(tensors: Tensors) -> None:
    scale = tensors[f"{EXPERT}.scale"].view(torch.uint8).clone()
    scale[0, 0] = 255
    tensors[f"{EXPERT}.scale"] = scale.view(torch.float8_e8m0fnu)


def downcast_in_release(tensors: Tensors) -> None:
    tensors["layers.1.hc_attn_fn"] = tensors["layers.1.hc_attn_fn"].bfloat16()


def one_norm_downcast(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith("norm.weight") and name != "layers.1.attn_norm.weight":
            tensors[name] = tensors[name].float() + 0.001


def one_expert_too_many(tensors: Tensors) -> None:
    for part in ("w1", "w2", "w3"):
        for what in ("weight", "scale"):
            tensors[f"layers.2.ffn.experts.4.{part}.{what}"] = tensors[f"layers.2.ffn.experts.3.{part}.{what}"].clone()


def break_grid(tensors: Tensors) -> None:
    scale = tensors[f"{EXPERT}.scale"].view(torch.uint8)
    tensors[f"{EXPERT}.scale"] = torch.cat([scale, scale[:3]]).view(torch.float8_e8m0fnu)


RELEASE_FAULTS: dict[str, tuple[Callable[[Tensors], None], bool, list[tuple[str, str]], str]] = {
    "tensor_without_scale": (drop_scale, False, [("missing-scale", f"{EXPERT}.weight")], "scales dropped"),
    "scale_without_tensor": (
        drop_scaled,
        False,
        [
            ("scale-without-tensor", f"{EXPERT}.scale"),
            ("missing-tensor", "model.layers.2.mlp.experts.gate_up_proj"),
        ],
        "the scale left behind",
    ),
    "dequantised_with_its_scale": (
        dequantise_half,
        False,
        [("scale-without-tensor", f"{PROJECTION}.scale")],
        "a second time",
    ),
    "scale_cast": (cast_scale, False, [("scale-dtype", f"{EXPERT}.scale")], "cast with the weights"),
    "scale_bytes_as_numbers": (bytes_as_numbers, True, [("scale-dtype", f"{EXPERT}.scale")], "byte 120"),
    "e8m0_byte_255": (byte_255, True, [("not-finite", f"{EXPERT}.scale")], "nobody initialised"),
    "one_expert_too_many": (
        one_expert_too_many,
        False,
        [("unexpected-tensor", f"layers.2.ffn.experts.4.{part}.weight") for part in ("w1", "w2", "w3")],
        "with fewer experts",
    ),
    "scale_grid": (break_grid, False, [("scale-shape", f"{EXPERT}.scale")], "resharded"),
    "island_downcast": (downcast_in_release, False, [("island-downcast", "layers.1.hc_attn_fn")], "one dtype"),
    "one_norm_of_many_downcast": (
        one_norm_downcast,
        False,
        [("island-downcast", "layers.1.attn_norm.weight")],
        "one dtype",
    ),
}


@pytest.mark.parametrize("name", RELEASE_FAULTS)
def test_fault_in_the_release_layout_is_caught_and_named(name: str, tmp_path: Path) -> None:
    """Quantised tensors and their scales belong together."""
    require_nemo()
    change, bits, expected, cause = RELEASE_FAULTS[name]
    report = audit_checkpoint(edit(nemo_release_checkpoint(tmp_path), change), bits=bits)
    assert kinds(report) == expected
    assert cause in report.violations[0].cause


# --- Faults of files --------------------------------------------------------------------------------------------------


def test_truncated_file_is_named_with_its_size(tmp_path: Path) -> None:
    """An interrupted download: the header says more bytes than there are."""
    folder = sharded(tmp_path)
    file = folder / "model-00002-of-00003.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1000)
    (violation,) = audit_checkpoint(folder, bits=True).violations
    assert (violation.kind, violation.name) == ("truncated-file", file.name)
    assert f"{size:,}" in violation.expected
    assert "interrupted download" in violation.cause


@pytest.mark.parametrize("keep_bytes", [3, 300])
def test_file_cut_in_its_header_is_truncated_too(keep_bytes: int, tmp_path: Path) -> None:
    """Even the length of the header may be missing."""
    folder = sharded(tmp_path)
    file = folder / "model-00001-of-00003.safetensors"
    os.truncate(file, keep_bytes)
    assert ("truncated-file", file.name) in kinds(audit_checkpoint(folder))


def test_noise_is_a_damaged_file(tmp_path: Path) -> None:
    """A header that is no JSON."""
    folder = transformers_checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{")
    assert kinds(audit_checkpoint(folder)) == [("damaged-file", "model.safetensors")]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """The index names it; its tensors are not listed one by one."""
    folder = sharded(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert kinds(audit_checkpoint(folder)) == [("missing-file", "model-00002-of-00003.safetensors")]


def test_index_that_disagrees_with_the_files_is_named(tmp_path: Path) -> None:
    """A tensor that moved, one that the index does not know, and one that no file holds."""
    folder = sharded(tmp_path)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][SINKS] = "model-00003-of-00003.safetensors"
    del index["weight_map"][FN]
    path.write_text(json.dumps(index))
    report = audit_checkpoint(folder)
    assert sorted(kinds(report)) == [("index-mismatch", FN), ("index-mismatch", SINKS)]
    assert {v.found.partition(" ")[0] for v in report.violations} == {"it", "in"}


def test_shards_without_an_index_are_a_violation(tmp_path: Path) -> None:
    """Transformers cannot load them."""
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert ("missing-file", "model.safetensors.index.json") in kinds(audit_checkpoint(folder))


def test_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    """Which copy is loaded depends on the loader."""
    folder = sharded(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in sorted(set(index.values())) if file != index[SINKS])
    rewrite(folder / other, lambda tensors: tensors.update({SINKS: torch.zeros(4)}))
    assert ("duplicate-tensor", SINKS) in kinds(audit_checkpoint(folder))


def test_config_that_still_says_quantised_is_a_violation(tmp_path: Path) -> None:
    """An export of dequantised weights with the quantised model's config."""
    folder = transformers_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    assert kinds(audit_checkpoint(folder)) == [("config-mismatch", "config.json")]


def test_one_shard_is_judged_by_itself(tmp_path: Path) -> None:
    """What it holds must be right; what it does not hold is in the others."""
    file = sharded(tmp_path) / "model-00002-of-00003.safetensors"
    report = audit_checkpoint(file)
    assert report.ok
    assert any("missing tensors were not looked for" in note for note in report.notes)


# --- Input, and cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "empty_folder", "other_file", "no_config", "unknown_model"])
def test_bad_input_is_an_error_that_says_what_to_do(what: str, tmp_path: Path) -> None:
    """Not a violation of a checkpoint: there is none, or nobody knows its model."""
    path = tmp_path
    if what == "nothing":
        path = tmp_path / "nothing"
    elif what == "other_file":
        path = tmp_path / "weights.bin"
        path.write_bytes(b"0")
    elif what in ("no_config", "unknown_model"):
        transformers_checkpoint(tmp_path)
        (tmp_path / "config.json").unlink()
        if what == "unknown_model":
            (tmp_path / "config.json").write_text('{"model_type": "deepseek_v77"}')
    with pytest.raises(ContractError, match="what to do"):
        audit_checkpoint(path)


def bytes_read_by(call: Callable[[], object]) -> int:
    """What this process asked the kernel to read during ``call``."""

    def counter() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = counter()
    call()
    return counter() - before


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts read bytes through Linux's /proc")
def test_headers_alone_are_read_even_of_600_gb(tmp_path: Path) -> None:
    """A sparse folder of 600 GB: no more bytes are read than its headers, its config and its index."""
    folder = tmp_path
    (folder / "config.json").write_text((transformers_checkpoint(tmp_path / "tiny") / "config.json").read_text())
    weight_map, header_bytes = {}, 0
    for shard in range(60):
        file = folder / f"model-{shard + 1:05}-of-00060.safetensors"
        name = f"mtp.{shard}.big.weight"
        weight_map[name] = file.name
        entry = {name: {"dtype": "BF16", "shape": [5000, 1_000_000], "data_offsets": [0, 10_000_000_000]}}
        header_bytes += write_sparse(file, entry)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    audit_checkpoint(folder)  # imports
    report: list[AuditReport] = []
    read = bytes_read_by(lambda: report.append(audit_checkpoint(folder)))
    assert "600.0 GB" in report[0].summary
    # The config and the index are read too, by this package and by Transformers.
    assert header_bytes <= read < header_bytes + 100_000


def test_full_size_flash_takes_seconds_and_raises_no_alarm(tmp_path: Path) -> None:
    """67,593 tensors under the release's names."""
    folder = sparse_flash_checkpoint(tmp_path)
    audit_checkpoint(folder)  # imports
    # Of this process alone, whatever else the machine does. 2.6 s in December 2026.
    started = time.process_time()
    report = audit_checkpoint(folder)
    assert time.process_time() - started < 8
    assert report.ok, report.table()
    assert len(report.rows) == 67_593
    assert sum(row.island for row in report.rows) == 407


def test_bits_reads_islands_tables_and_no_weight(tmp_path: Path) -> None:
    """The summary says how much was read."""
    folder = transformers_checkpoint(tmp_path)
    audit_checkpoint(folder, bits=True)
    islands = sum(t.numel() * 4 for n, t in _tensors(folder).items() if t.dtype == torch.float32)
    tables = sum(t.numel() * 8 for t in _tensors(folder).values() if t.dtype == torch.int64)
    extra = bytes_read_by(lambda: audit_checkpoint(folder, bits=True)) - bytes_read_by(lambda: audit_checkpoint(folder))
    assert extra == islands + tables


def _tensors(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# --- What is printed --------------------------------------------------------------------------------------------------


def test_text_stays_within_100_columns_and_json_has_everything(tmp_path: Path) -> None:
    """Text for a terminal, JSON for a script."""

    def break_much(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name] = tensors[name].bfloat16()

    report = audit_checkpoint(edit(transformers_checkpoint(tmp_path), break_much))
    assert max(map(len, report.table().splitlines()[1:])) <= 100
    found = json.loads(report.to_json())
    assert found["ok"] is False
    assert len(found["violations"]) == 60
    assert found["violations"][0].keys() == {"kind", "name", "expected", "found", "cause", "ranks"}
    assert len(found["rows"]) == 116
