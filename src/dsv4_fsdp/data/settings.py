"""The ``data`` section of a run: what is read, how it becomes rows, and how rows become batches.

One of three kinds. ``stdlib`` needs no files at all, ``pretrain`` reads documents, ``sft`` reads conversations. What
can be judged by the values alone is judged when the section is made; :meth:`RowSettings.problems` looks at the disk and
is a step of its own, since the settings of an old run must load where its data is not. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from dsv4_fsdp.settings_section import Section

from .errors import DataError
from .files import find_files

__all__ = [
    "DataSettings",
    "PretrainSettings",
    "RowSettings",
    "SftSettings",
    "StdlibSettings",
    "data_settings",
]


def _split_commas(value: Any) -> Any:
    """The command line gives a list as ``64,192,256``."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class StdlibSettings(Section):
    """The source of Python's standard library as bytes: see :mod:`dsv4_fsdp.data.stdlib_text`.

    A *sequence* is one position of that text: rows of one length, ``batch_tokens`` tokens in all.
    """

    kind: Literal["stdlib"] = "stdlib"
    sequence_lengths: Annotated[
        tuple[Annotated[int, Field(ge=2)], ...],  # one token has no next token to predict
        BeforeValidator(_split_commas),
        Field(min_length=1, description="Lengths in tokens; each position draws one."),
    ]
    batch_tokens: int = Field(gt=0, description="Rows x length of a position is at most this.")
    global_batch_size: int | None = Field(
        default=None, gt=0, description="Positions per optimizer step over all ranks; by default one for each rank."
    )
    eval_sequences: int | None = Field(
        default=None, gt=0, description="Positions to evaluate on: rows that training does not draw, of the same text."
    )

    @model_validator(mode="after")
    def _longest_fits(self) -> StdlibSettings:
        if max(self.sequence_lengths) > self.batch_tokens:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, less than the longest of sequence_lengths, "
                f"{max(self.sequence_lengths)}"
            )
        return self

    @property
    def longest(self) -> int:
        """The longest sequence that a model will see, in tokens."""
        return max(self.sequence_lengths)

    @property
    def has_evaluation(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.eval_sequences is not None

    def accumulation(self, world_size: int) -> int:
        """Forwards per rank and optimizer step; ``DataError`` if the batch cannot be dealt evenly."""
        return _accumulation(self.global_batch_size or world_size, 1, world_size)

    def problems(self) -> list[str]:
        """Nothing on disk can be wrong."""
        return []


class RowSettings(Section):
    """What ``pretrain`` and ``sft`` have in common: files of text that become rows of tokens, once, in a cache."""

    suffixes: ClassVar[tuple[str, ...]]
    """The kinds of file that are read."""

    path: str = Field(min_length=1, description="A file, a folder (with all below it), or a glob pattern.")
    tokenizer: str | None = Field(default=None, description="A folder with a tokenizer; by default the model's own.")
    sequence_length: int = Field(ge=2, description="The longest row, in tokens.")
    global_batch_size: int = Field(gt=0, description="Sequences (rows, if packed) per optimizer step, over all ranks.")
    micro_batch_size: int = Field(default=1, gt=0, description="Sequences per rank and forward.")
    pack: bool = Field(
        default=False,
        description="Documents or conversations share a row and are kept apart; needs model.attention windowed.",
    )
    balance_lengths: bool = Field(
        default=False, description="Deal the sequences of a step to ranks by length, so that ranks wait less."
    )
    eval_path: str | None = Field(default=None, min_length=1, description="Data to evaluate on, as in `path`.")
    eval_sequences: int | None = Field(default=None, gt=0, description="Evaluate on the first so many; default all.")
    cache_dir: str | None = Field(
        default=None, min_length=1, description="Where prepared tokens are kept; by default in the run's folder."
    )

    @model_validator(mode="after")
    def _evaluation_has_a_path(self) -> RowSettings:
        if self.eval_sequences is not None and self.eval_path is None:
            raise ValueError("eval_sequences is given, but there is no eval_path to take them from")
        return self

    @model_validator(mode="after")
    def _batch_holds_a_micro_batch(self) -> RowSettings:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size is {self.global_batch_size}, not a multiple of micro_batch_size, "
                f"{self.micro_batch_size}"
            )
        return self

    @property
    def longest(self) -> int:
        """The longest sequence that a model will see, in tokens."""
        return self.sequence_length

    @property
    def has_evaluation(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.eval_path is not None

    def accumulation(self, world_size: int) -> int:
        """Forwards per rank and optimizer step; ``DataError`` if the batch cannot be dealt evenly."""
        return _accumulation(self.global_batch_size, self.micro_batch_size, world_size)

    def attention_problems(self, attention: str) -> list[str]:
        """What is wrong with these rows under ``model.attention``, one line each."""
        if not self.pack or attention == "windowed":
            return []
        problem = (
            f"data.pack: only model.attention windowed keeps the documents of a row apart, not {attention}, whose "
            "compressed entries reach from one into the next; give windowed, or data.pack false"
        )
        return [problem]

    def problems(self) -> list[str]:
        """What is wrong on disk, one line each: missing or empty files, of the wrong kind, no tokenizer folder."""
        problems = []
        for name in ("path", "eval_path"):
            pattern = getattr(self, name)
            if pattern is not None:
                try:
                    find_files(pattern, suffixes=self.suffixes)
                except DataError as error:
                    problems.append(f"data.{name}: {error}")
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            problems.append(f"data.tokenizer: there is no folder {self.tokenizer!r}")
        return problems


class PretrainSettings(RowSettings):
    """Documents, each with BOS at its start and EOS at its end, joined and cut into rows of one length.

    Documents that were joined see each other. With ``pack`` or ``isolate_documents`` none does.
    A ``.txt`` file is one document, or many with ``text_unit``; a line of ``.jsonl`` and a row of ``.parquet`` are one.
    """

    suffixes = (".jsonl", ".parquet", ".txt")

    kind: Literal["pretrain"] = "pretrain"
    text_field: str = Field(
        default="text", min_length=1, description="The field of JSON lines and Parquet rows that is read."
    )
    text_unit: Literal["file", "paragraph", "line"] = Field(
        default="file", description="What one document is in a .txt file; paragraphs end at an empty line."
    )
    isolate_documents: bool = Field(
        default=False,
        description="A row holds (a piece of) one document, so that no document sees another; short rows are padded.",
    )

    @model_validator(mode="after")
    def _one_way_to_rows(self) -> PretrainSettings:
        if self.pack and self.isolate_documents:
            raise ValueError(
                "pack lets documents share a row, isolate_documents gives each a row of its own; give one of them "
                "(no document sees another with either)"
            )
        return self

    @model_validator(mode="after")
    def _something_to_balance(self) -> PretrainSettings:
        if self.balance_lengths and not self.isolate_documents and not self.pack:
            raise ValueError(
                "balance_lengths has nothing to do: without isolate_documents or pack all rows are equally long"
            )
        return self


class SftSettings(RowSettings):
    """Conversations, one JSON object a line: ``messages``, or ``prompt`` and ``completion``.

    Only what the assistant says is learned from.
    """

    suffixes = (".jsonl",)

    kind: Literal["sft"] = "sft"
    template: str = Field(
        default="deepseek_v4",
        min_length=1,
        description="deepseek_v4 (built in), tokenizer (its own chat template), or the path of a .jinja file.",
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="Which turns of the assistant are learned from."
    )
    keep_reasoning: bool = Field(
        default=False, description="deepseek_v4 only: keep the reasoning of turns before the last user message."
    )
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate", description="What happens to a row longer than sequence_length."
    )

    @model_validator(mode="after")
    def _template_is_known(self) -> SftSettings:
        if self.template not in ("deepseek_v4", "tokenizer") and not self.template.endswith(".jinja"):
            raise ValueError(
                f"template is {self.template!r}; there is deepseek_v4, tokenizer, or the path of a .jinja file"
            )
        if self.keep_reasoning and self.template != "deepseek_v4":
            raise ValueError(
                f"keep_reasoning is for template deepseek_v4; {self.template} decides for itself what it keeps"
            )
        return self

    def problems(self) -> list[str]:
        """As for all rows, and a template file that is missing."""
        problems = super().problems()
        if self.template.endswith(".jinja") and not Path(self.template).is_file():
            problems.append(f"data.template: there is no file {self.template!r}")
        return problems


DataSettings = Annotated[StdlibSettings | PretrainSettings | SftSettings, Field(discriminator="kind")]
"""The type of the ``data`` section."""


def data_settings(values: Any) -> StdlibSettings | PretrainSettings | SftSettings:
    """The section made of ``values`` (from YAML, say). Raises ``DataError`` with one line for each mistake."""
    try:
        adapter: TypeAdapter[StdlibSettings | PretrainSettings | SftSettings] = TypeAdapter(DataSettings)
        return adapter.validate_python(values)
    except ValidationError as error:
        lines = []
        for found in error.errors():
            # The first part of a location is the kind, which is not a part of the setting's name.
            where = ".".join(["data", *(str(part) for part in found["loc"][1:])])
            message = found["msg"].removeprefix("Value error, ")
            got = "" if found["type"] in ("missing", "value_error") else f", got {found['input']!r}"
            lines.append(f"{where}: {message[0].lower()}{message[1:]}{got}")
        raise DataError(*lines) from None


def _accumulation(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    at_once = world_size * micro_batch_size
    if global_batch_size % at_once:
        micro = f" x micro_batch_size {micro_batch_size}" if micro_batch_size > 1 else ""
        raise DataError(
            f"data.global_batch_size: {global_batch_size} sequences cannot be dealt evenly to {world_size} ranks"
            f"{micro}; give a multiple of {at_once}"
        )
    return global_batch_size // at_once
