"""From conversations to rows of tokens, one row for each; or, with ``pack``, several in a row (:mod:`.packing`).

A row is at most ``sequence_length`` positions, which takes one token more: the label of the last. A longer conversation
is cut at its end or left out. If cutting took all that it had to teach, it is left out as well: it would only cost
time.
"""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

from .chat import ChatFormat
from .errors import DataError
from .files import read_json_lines
from .packing import Packer
from .settings import SftSettings
from .token_cache import CacheWriter, Counts

__all__ = ["write_conversations"]


def write_conversations(
    files: list[Path], *, settings: SftSettings, tokenizer: Any, writer: CacheWriter, limit: int | None = None
) -> None:
    """Render and tokenise ``files`` into ``writer``; of them no more than ``limit`` conversations.

    Raises:
        DataError: what is wrong, and where.
    """
    chat = ChatFormat(
        tokenizer, template=settings.template, train_on=settings.train_on, keep_reasoning=settings.keep_reasoning
    )
    packer = Packer(length=settings.sequence_length, write_row=writer.packed_row) if settings.pack else None
    place = writer.row if packer is None else packer.add
    notices: tuple[str, ...] = ()
    read = kept = truncated = too_long = without_labels = tokens = learned = 0
    for item in islice(chain.from_iterable(map(read_json_lines, files)), limit):
        try:
            ids, supervised = chat.encode(item.value)
        except DataError as error:
            raise DataError(f"{item.place}: {error}") from None
        read += 1
        if read == 1:
            notices = chat.notices(ids, supervised)
        if len(ids) - 1 > settings.sequence_length:
            if settings.too_long == "drop":
                too_long += 1
                continue
            truncated += 1
            ids, supervised = ids[: settings.sequence_length + 1], supervised[: settings.sequence_length + 1]
        labels = sum(supervised[1:])
        if not labels:
            without_labels += 1
            continue
        place(writer.tokens(ids, supervised), len(ids))
        kept += 1
        tokens += len(ids) - 1
        learned += labels
    if packer is not None:
        packer.finish()
    if not kept:
        raise DataError(
            f"data.path: {settings.path!r} has no conversation in it"
            if not read
            else f"data.path: none of the {read} conversations in {settings.path!r} is left: {too_long} are longer "
            f"than sequence_length {settings.sequence_length}, {without_labels} have nothing to learn from within it"
        )
    counts = Counts(
        read=read,
        rows=writer.num_rows,
        truncated=truncated,
        dropped_too_long=too_long,
        dropped_without_labels=without_labels,
        tokens=tokens,
        supervised=learned,
        packed=kept if settings.pack else 0,
        room=writer.num_rows * settings.sequence_length if settings.pack else 0,
    )
    writer.finish(counts=counts, notices=notices, sequence_length=settings.sequence_length)
