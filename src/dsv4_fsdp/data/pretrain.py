"""From documents to rows of tokens.

Each document becomes BOS (if the tokenizer has one), its tokens, EOS. Then:

- all documents are one stream, cut every ``sequence_length`` tokens. A row takes the next row's first token as
  its last label, so every token but the very first is predicted exactly once. What fills no row at the end is dropped
  and counted.
- with ``isolate_documents`` each document is cut by itself, and its last row is short. No row has two documents;
- with ``pack`` each document is cut likewise, and the pieces share rows (:mod:`.packing`), where none sees another.

Special tokens are put by position. The text of a document makes none, even where it has the letters of one; tokens that
the tokenizer has added without marking them as special are found in it, as they are at inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from .errors import DataError
from .files import Item, read_json_lines, read_parquet, read_text
from .packing import Packer
from .settings import PretrainSettings
from .token_cache import CacheWriter, Counts

__all__ = ["write_documents"]

# Documents that are tokenised together: a fast tokenizer spreads them over the cores.
_AT_ONCE = 64


def write_documents(
    files: list[Path],
    *,
    settings: PretrainSettings,
    tokenizer: Any,
    writer: CacheWriter,
    cache_dir: Path,
    limit: int | None = None,
) -> None:
    """Tokenise ``files`` into ``writer``; of them no more than ``limit`` documents.

    Raises:
        DataError: what is wrong, and where.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        raise DataError("data.tokenizer: it has no EOS token, so the ends of documents would be lost")
    before = [] if bos is None else [bos]
    length = settings.sequence_length
    packer = Packer(length=length, write_row=writer.packed_row) if settings.pack else None
    place = writer.row if packer is None else packer.add
    cuts_each = settings.isolate_documents or settings.pack
    read = empty = pieces = tokens = 0
    documents = islice(_documents(files, settings=settings, cache_dir=cache_dir), limit)
    while batch := list(islice(documents, _AT_ONCE)):
        read += len(batch)
        texts = [text for item in batch if (text := _text(item, settings.text_field))]
        empty += len(batch) - len(texts)
        # `split_special_tokens` makes text of special tokens; `verbose` would complain about long documents.
        encoded = (
            tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            if texts
            else []
        )
        for ids in encoded:
            document = [*before, *ids, eos]
            start = writer.tokens(document)
            if cuts_each:
                for offset in range(0, len(document) - 1, length):
                    size = min(length + 1, len(document) - offset)
                    place(start + offset, size)
                    pieces += 1
                    tokens += size - 1
    if packer is not None:
        packer.finish()
    rows = writer.num_rows
    if not cuts_each:
        rows = max(0, writer.num_tokens - 1) // length
        tokens = rows * length
        if writer.num_tokens and not rows:
            raise DataError(
                f"data.path: {settings.path!r} has {writer.num_tokens} tokens, less than one row of "
                f"{length} and the token after it; give more text or a smaller sequence_length"
            )
    if not rows:
        raise DataError(f"data.path: {settings.path!r} has no text in it ({read} documents read)")
    counts = Counts(
        read=read,
        rows=rows,
        empty=empty,
        dropped_tokens=0 if cuts_each else writer.num_tokens - 1 - tokens,
        tokens=tokens,
        supervised=tokens,
        packed=pieces if settings.pack else 0,
        room=rows * length if settings.pack else 0,
    )
    writer.finish(counts=counts, notices=(), sequence_length=length)


def _documents(files: list[Path], *, settings: PretrainSettings, cache_dir: Path) -> Iterator[Item]:
    for path in files:
        if path.suffix == ".txt":
            yield from read_text(path, unit=settings.text_unit)
        elif path.suffix == ".jsonl":
            for item in read_json_lines(path):
                if settings.text_field not in item.value:
                    fields = ", ".join(item.value) or "nothing"
                    raise DataError(f"{item.place}: has no field {settings.text_field!r}; it has: {fields}")
                yield Item(item.place, item.value[settings.text_field])
        else:
            yield from read_parquet(path, column=settings.text_field, cache_dir=cache_dir)


def _text(item: Item, field: str) -> str:
    if not isinstance(item.value, str):
        got = "null" if item.value is None else type(item.value).__name__
        raise DataError(f"{item.place}: expected text in {field!r}, got {got}")
    return item.value
