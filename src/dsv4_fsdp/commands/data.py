"""``dsv4-fsdp data``: look at what a model will see before anything is spent on it, and prepare it ahead of a run."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dsv4_fsdp.data.batches import Batch
    from dsv4_fsdp.data.token_cache import Counts

__all__ = ["data_app", "prepare_ahead", "preview"]

# Of a packed row, written out.
_MOST_DOCUMENTS = 4

data_app = typer.Typer(name="data", help="Look at training data, and prepare it.", no_args_is_help=True)


@data_app.command()
def preview(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A run's YAML; its data section, changed by the options below.")
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="pretrain, sft or stdlib.")] = None,
    path: Annotated[str | None, typer.Option(metavar="PATH", help="A file, a folder, or a glob pattern.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="A folder with a tokenizer.")] = None,
    sequence_length: Annotated[str | None, typer.Option(metavar="TOKENS", help="The longest row.")] = None,
    template: Annotated[
        str | None, typer.Option(metavar="NAME", help="sft: deepseek_v4, tokenizer, or a .jinja file.")
    ] = None,
    train_on: Annotated[str | None, typer.Option(metavar="all|last", help="sft: which turns are learned from.")] = None,
    too_long: Annotated[
        str | None, typer.Option(metavar="truncate|drop", help="sft: what happens to rows that are too long.")
    ] = None,
    text_field: Annotated[
        str | None, typer.Option(metavar="NAME", help="pretrain: the field of JSON lines and Parquet.")
    ] = None,
    text_unit: Annotated[
        str | None, typer.Option(metavar="file|paragraph|line", help="pretrain: a document of a .txt file.")
    ] = None,
    isolate_documents: Annotated[
        bool | None, typer.Option("--isolate-documents", help="pretrain: one document a row.")
    ] = None,
    pack: Annotated[
        bool | None, typer.Option("--pack", help="Several documents or conversations a row, kept apart.")
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=0, help="Rows to show.")] = 2,
    ends: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to show at each end of a row.")] = 8,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Documents or conversations to read; 0 reads all.")
    ] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all tokens of the rows.")] = False,
) -> None:
    """Show rows as the model will see them, what is learned from, and what was left out."""
    from dsv4_fsdp.data.errors import DataError

    given = {
        "kind": kind,
        "path": path,
        "tokenizer": tokenizer,
        "sequence_length": sequence_length,
        "template": template,
        "train_on": train_on,
        "too_long": too_long,
        "text_field": text_field,
        "text_unit": text_unit,
        "isolate_documents": isolate_documents,
        "pack": pack,
    }
    try:
        found = _look(config, {name: value for name, value in given.items() if value is not None}, rows, limit)
    except DataError as error:
        _fail(error.problems)
    if as_json:
        print(json.dumps(found.as_dict()))
        return

    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for part in _summary(found):
        console.print(part)
    for number, row in enumerate(found.rows):
        console.print()
        for part in _row(number, row, ends=ends):
            console.print(part)


@data_app.command("prepare")
def prepare_ahead(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The run's YAML.")],
    cache_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where prepared tokens are kept; default data.cache_dir.")
    ] = None,
) -> None:
    """Tokenise a run's data into its cache before the run, on one machine without its accelerators."""
    from dsv4_fsdp.data.errors import DataError
    from dsv4_fsdp.data.settings import RowSettings
    from dsv4_fsdp.train.config import ConfigError, read_config_file, resolve

    try:
        run = resolve({}, base=read_config_file(config))
        settings = run.data
        if not isinstance(settings, RowSettings):
            raise DataError(f"data.kind: {settings.kind} needs no preparation")
        folder = cache_dir or settings.cache_dir
        if folder is None:
            raise DataError("data.cache_dir: missing; give a folder, here (--cache-dir) and to the run")
        if problems := settings.problems():
            raise DataError(*problems)

        from dsv4_fsdp.data.prepare import load_tokenizer, prepare

        batches = prepare(
            settings,
            tokenizer=load_tokenizer(settings.tokenizer or run.model.path),
            cache_dir=Path(folder),
            seed=run.seed,
            is_maker=True,
            wait=lambda: None,
        )
    except (ConfigError, DataError) as error:
        _fail(error.problems)
    print(batches.counts)
    for notice in batches.notices:
        print(f"note: {notice}")


@dataclass(frozen=True)
class _Row:
    """One row: per position the input, its text, the label (-100: none) and its text (then empty).

    ``spans`` is the whole row as text, in stretches of what is learned (``True``) and what is given. ``starts`` are the
    positions at which documents begin, ``span_documents`` says of each span which of them it is in.
    """

    ids: list[int]
    tokens: list[str]
    labels: list[int]
    label_tokens: list[str]
    spans: list[tuple[bool, str]]
    starts: list[int]
    span_documents: list[int]


@dataclass(frozen=True)
class _Found:
    kind: str
    source: str
    counts: Counts | None
    was_cut: bool
    notices: list[str]
    rows: list[_Row]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _look(config: Path | None, given: dict[str, Any], num_rows: int, limit: int) -> _Found:
    from dsv4_fsdp.data.errors import DataError
    from dsv4_fsdp.data.settings import RowSettings, StdlibSettings, data_settings

    values, model, attention = _read(config) if config else ({}, None, "windowed")
    # How rows are dealt is no part of a preview.
    values = ({} if (values | given).get("kind") == "stdlib" else {"global_batch_size": 1}) | values | given
    settings = data_settings(values)
    if problems := settings.problems():
        raise DataError(*problems)

    from dsv4_fsdp.data.batches import RowBatches, StdlibBatches
    from dsv4_fsdp.data.prepare import build_cache, load_tokenizer, tokenizer_notices

    if isinstance(settings, StdlibSettings):
        from dsv4_fsdp.train.tiny_model import byte_tokenizer

        loaded = byte_tokenizer()
        text = StdlibBatches(settings.model_copy(update={"global_batch_size": 1}), seed=0)
        shown = [text.micro_batches(step, rank=0, world_size=1)[0] for step in range(num_rows)]
        return _Found("stdlib", "Python's library", None, False, [], [_as_row(batch, loaded) for batch in shown])

    assert isinstance(settings, RowSettings)
    if problems := settings.attention_problems(attention):
        raise DataError(*problems)
    folder = settings.tokenizer or model
    if folder is None:
        raise DataError("data.tokenizer: missing; give a folder with a tokenizer")
    loaded = load_tokenizer(folder)
    with tempfile.TemporaryDirectory(prefix="dsv4-fsdp-preview-") as scratch:
        cache = build_cache(
            settings, path=settings.path, tokenizer=loaded, folder=Path(scratch, "rows"), limit=limit or None
        )
        batches = RowBatches(
            cache, evaluation=None, settings=settings, seed=0, pad_id=0, notices=tokenizer_notices(loaded)
        )
        order: Iterable[int] = range(cache.num_rows)
        if cache.is_packed:  # those with most documents first
            order = sorted(order, key=lambda row: -len(cache.document_sizes(row)))
        shown = [batches.row(row) for row in islice(order, num_rows)]
        return _Found(
            kind=values["kind"],
            source=settings.path,
            counts=cache.counts,
            was_cut=cache.counts.read == limit,
            notices=list(batches.notices),
            rows=[_as_row(batch, loaded) for batch in shown],
        )


def _read(config: Path) -> tuple[dict[str, Any], str | None, str]:
    """The ``data`` section of a run's YAML file on top of its preset's; its model's folder, if named, and attention."""
    from dsv4_fsdp.data.errors import DataError
    from dsv4_fsdp.train.config import ConfigError, read_config_file
    from dsv4_fsdp.train.presets import PRESETS

    try:
        document = read_config_file(config)
    except ConfigError as error:
        raise DataError(*error.problems) from None
    section = document.get("data")
    if not isinstance(section, dict):
        raise DataError(f"--config: {str(config)!r} has no data section")
    preset = PRESETS.get(document.get("preset", "tiny"), {}).get("data", {})
    if section.get("kind", preset.get("kind")) == preset.get("kind"):
        section = preset | section
    model = document.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    attention = model.get("attention", "windowed") if isinstance(model, dict) else "windowed"
    return section, path if isinstance(path, str) else None, str(attention)


def _as_row(batch: Batch, tokenizer: Any) -> _Row:
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    positions = None if batch.position_ids is None else batch.position_ids[0].tolist()
    starts = [0] if positions is None else [place for place, position in enumerate(positions) if position == 0]
    spans, span_documents = [], []
    for document, (start, end) in enumerate(pairwise([*starts, len(ids)])):
        # Whether a token is learned is written at the position before it; the last label is no input.
        flags = [False, *(label >= 0 for label in labels[start:end])]
        own = [*ids[start:end], labels[end - 1]] if flags[-1] else ids[start:end]
        for flag, group in groupby(zip(own, flags, strict=False), key=lambda pair: pair[1]):
            spans.append((flag, _printable(tokenizer.decode([id for id, _ in group]))))
            span_documents.append(document)
    return _Row(
        ids=ids,
        tokens=[_token(tokenizer, id) for id in ids],
        labels=labels,
        label_tokens=["" if id < 0 else _token(tokenizer, id) for id in labels],
        spans=spans,
        starts=starts,
        span_documents=span_documents,
    )


def _token(tokenizer: Any, id: int) -> str:
    """The text of a token, on one line; its name in the vocabulary if it is a part of a letter only."""
    text: str = tokenizer.decode([id])
    return str(tokenizer.convert_ids_to_tokens(id)) if not text or "\ufffd" in text else _printable(text)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _summary(found: _Found) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_row("data", Text(f"{found.kind}, {found.source}"))
    counts = found.counts
    if counts is not None:
        unit = "documents" if found.kind == "pretrain" else "conversations"
        cut = " (the first; --limit 0 reads all)" if found.was_cut else ""
        table.add_row("read", f"{counts.read:,} {unit}{cut}")
        table.add_row("rows", f"{counts.rows:,}")
        if counts.fill_rate is not None:
            pieces = " or pieces of them" if found.kind == "pretrain" else ""
            table.add_row("packed", f"{counts.packed:,} {unit}{pieces}; the rows are {counts.fill_rate:.1%} full")
        if found.kind == "pretrain":
            table.add_row("dropped", f"{counts.dropped_tokens:,} tokens at the end that fill no row")
            table.add_row("", f"{counts.empty:,} documents without text")
        else:
            table.add_row("truncated", f"{counts.truncated:,}")
            table.add_row("dropped", f"{counts.dropped_without_labels:,} with nothing left to learn from")
            table.add_row("", f"{counts.dropped_too_long:,} too long")
        share = counts.supervised / counts.tokens
        table.add_row("tokens", f"{counts.tokens:,}, of them {counts.supervised:,} ({share:.0%}) supervised")
    for notice in found.notices:
        table.add_row("note", Text(notice))
    return [table]


def _row(number: int, row: _Row, *, ends: int) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    num = len(row.ids)
    supervised = [label >= 0 for label in row.labels]
    spans = Table.grid(padding=(0, 2))
    for document, start in enumerate(row.starts[:_MOST_DOCUMENTS]):
        if len(row.starts) > 1:
            spans.add_row(Text("document"), Text(f"{document + 1}, from position {start}", style="bold"))
        for learned, text in (span for span, own in zip(row.spans, row.span_documents, strict=True) if own == document):
            text = _cut(text, 240)
            spans.add_row(
                Text("learned" if learned else "given", style="bold green" if learned else "dim"),
                Text(f"[{text}]" if learned else text, style="green" if learned else ""),
            )
    if more := row.starts[_MOST_DOCUMENTS:]:
        places = _cut(", ".join(map(str, more)), 240)
        spans.add_row(Text("..."), Text(f"{len(more)} more documents, from position {places}", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("position", "id", "token", "", "label", "token"):
        table.add_column(heading, justify="left" if heading in ("token", "") else "right", overflow="fold")
    shown = sorted(set(_places(row, ends=ends)))
    for before, position in zip([-1, *shown], shown, strict=False):
        if position != before + 1:
            table.add_row("...", "", Text(f"{position - before - 1} more"), "", "", "")
        learned = supervised[position]
        table.add_row(
            str(position),
            str(row.ids[position]),
            Text(_cut(row.tokens[position], 30)),
            Text("->" if learned else "", style="green"),
            str(row.labels[position]),
            Text(_cut(row.label_tokens[position], 30), style="green"),
        )
    title = f"row {number}: {num} tokens, {sum(supervised)} supervised"
    documents = f", {len(row.starts)} documents" if len(row.starts) > 1 else ""
    return [Text(title + documents, style="bold"), spans, table]


def _places(row: _Row, *, ends: int) -> Iterator[int]:
    """The positions to show: ``ends`` at each end of the row, and those around the first border between documents."""
    num = len(row.ids)
    yield from range(min(ends, num))
    yield from range(max(ends, num - ends), num)
    if len(row.starts) > 1:
        yield from range(max(0, row.starts[1] - 2), min(row.starts[1] + 2, num))


def _cut(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def _fail(problems: list[str]) -> NoReturn:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    raise typer.Exit(2)
