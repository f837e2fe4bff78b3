"""The data section by itself: what is refused, and in which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4_fsdp.data.errors import DataError
from dsv4_fsdp.data.settings import PretrainSettings, SftSettings, StdlibSettings, data_settings

STDLIB = {"kind": "stdlib", "sequence_lengths": (64, 256), "batch_tokens": 512}
PRETRAIN = {"kind": "pretrain", "path": "x", "sequence_length": 64, "global_batch_size": 4}
SFT = PRETRAIN | {"kind": "sft"}


def test_the_kind_decides_which_settings_there_are() -> None:
    """And all have the same questions answered."""
    kinds = [(STDLIB, StdlibSettings, 256), (PRETRAIN, PretrainSettings, 64), (SFT, SftSettings, 64)]
    for values, section, longest in kinds:
        settings = data_settings(values)
        assert type(settings) is section
        assert settings.longest == longest
        assert settings.accumulation(2) == (1 if section is StdlibSettings else 2)
        assert not settings.has_evaluation
        assert data_settings(settings.model_dump(mode="json")) == settings


def test_every_setting_is_described() -> None:
    """For the reference that a user reads."""
    for section in (StdlibSettings, PretrainSettings, SftSettings):
        fields = section.model_fields.items()
        assert all(field.description or name in ("kind", "sequence_lengths") for name, field in fields)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "data: unable to extract tag using discriminator 'kind', got {}"),
        ({"kind": "rl"}, "data: input tag 'rl' found using 'kind' does not match any of the expected tags"),
        (STDLIB | {"batch_tokens": 128}, "data: batch_tokens is 128, less than the longest of sequence_lengths, 256"),
        (STDLIB | {"sequence_lengths": "64,1"}, "data.sequence_lengths.1: input should be greater than or equal to 2"),
        (STDLIB | {"path": "x"}, "data.path: extra inputs are not permitted, got 'x'"),
        (PRETRAIN | {"template": "x"}, "data.template: extra inputs are not permitted, got 'x'"),
        ({"kind": "sft", "path": "x", "sequence_length": 8}, "data.global_batch_size: field required"),
        (SFT | {"global_batch_size": 0}, "data.global_batch_size: input should be greater than 0, got 0"),
        (SFT | {"micro_batch_size": 3}, "data: global_batch_size is 4, not a multiple of micro_batch_size, 3"),
        (SFT | {"eval_sequences": 8}, "data: eval_sequences is given, but there is no eval_path to take them from"),
        (SFT | {"template": "chatml"}, "data: template is 'chatml'; there is deepseek_v4, tokenizer, or the path of a"),
        (
            SFT | {"template": "my.jinja", "keep_reasoning": True},
            "data: keep_reasoning is for template deepseek_v4; my.jinja decides for itself what it keeps",
        ),
        (
            PRETRAIN | {"balance_lengths": True},
            "data: balance_lengths has nothing to do: without isolate_documents or pack all rows are equally long",
        ),
        (
            PRETRAIN | {"pack": True, "isolate_documents": True},
            "data: pack lets documents share a row, isolate_documents gives each a row of its own; give one of them",
        ),
        (STDLIB | {"pack": True}, "data.pack: extra inputs are not permitted, got True"),
        (SFT | {"isolate_documents": True, "pack": True}, "data.isolate_documents: extra inputs are not permitted"),
    ],
)
def test_impossible_settings_are_an_error_of_one_line(values: dict[str, Any], problem: str) -> None:
    """With the setting's name in front."""
    with pytest.raises(DataError) as caught:
        data_settings(values)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


def test_several_mistakes_are_reported_together() -> None:
    """One line each."""
    with pytest.raises(DataError) as caught:
        data_settings(SFT | {"sequence_length": 0, "too_long": "wrap", "colour": "red"})
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "data.sequence_length",
        "data.too_long",
        "data.colour",
    ]


def test_what_is_missing_on_disk_is_told_by_name(tmp_path: Path) -> None:
    """Nothing there, an empty file, a folder without data, the wrong kind of file; all of them at once."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.md").write_text("x")

    def problems(path: str, **values: Any) -> list[str]:
        return data_settings(SFT | {"path": str(tmp_path / path)} | values).problems()

    assert problems("none.jsonl", eval_path="/no/*.jsonl", tokenizer="/no/folder", template="/no/x.jinja") == [
        f"data.path: there is no file '{tmp_path}/none.jsonl'",
        "data.eval_path: nothing matches '/no/*.jsonl'",
        "data.tokenizer: there is no folder '/no/folder'",
        "data.template: there is no file '/no/x.jinja'",
    ]
    assert problems("empty.jsonl") == [f"data.path: '{tmp_path}/empty.jsonl' is empty"]
    assert problems("folder") == [f"data.path: the folder '{tmp_path}/folder' has no .jsonl file"]
    assert problems("notes.md") == [f"data.path: '{tmp_path}/notes.md' is not a .jsonl file"]


def test_settings_do_not_import_torch() -> None:
    """So a mistake in them is answered at once."""
    code = (
        "import sys; sys.modules['torch'] = None\nimport importlib.util as u, types\n"
        # The package's own __init__ needs torch; its folder does not.
        "root = types.ModuleType('dsv4_fsdp'); root.__path__ = u.find_spec('dsv4_fsdp').submodule_search_locations\n"
        "sys.modules['dsv4_fsdp'] = root\nimport dsv4_fsdp.data.settings, dsv4_fsdp.data.files"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
