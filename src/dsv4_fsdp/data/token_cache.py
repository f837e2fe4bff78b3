"""Prepared tokens on disk: written once, as a stream, and then mapped into memory by every rank.

A cache is a folder:

- ``tokens.bin``: all token ids, int32, one row after the other;
- ``supervised.bin``: one byte for each token, 1 where it is learned from; missing if all are;
- ``rows.bin``: for each row its start and its number of tokens, int64; missing if all rows are equally long. Where
  rows are packed: for each document in them, row after row;
- ``packed.bin``: for each row one past its last document in ``rows.bin``, int64; missing if rows are not packed;
- ``about.json``: what was counted, and the SHA-256 of the above.

It is written under another name beside its own, flushed, and renamed when it is whole, so a killed run leaves nothing
that could be taken for a cache. Two writers of one cache do no harm: the second finds the name taken and keeps the
first. What a killed run leaves is named ``*.partial-*`` and can be removed.

A row of n + 1 tokens is n positions to a model: each but the last is an input, each but the first a label. So is each
document of a packed row: its last token is a label only, and no position has the next document's first token as label.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import DataError

__all__ = ["CacheWriter", "Counts", "TokenCache"]

_FORMAT = 1


@dataclass(frozen=True)
class Counts:
    """What preparation met. Tokens are counted as a model sees them: inputs, and labels that are learned from.

    Attributes:
        read: documents or conversations that were read.
        rows: rows that came of them.
        empty: documents without text, left out.
        truncated: rows that were cut at the end (and kept, or dropped for having lost their labels).
        dropped_too_long: rows left out for their length.
        dropped_without_labels: rows left out because truncation cut off all they had to teach.
        dropped_tokens: tokens at the end of a corpus that fill no row.
        tokens: inputs of all rows.
        supervised: labels of all rows.
        packed: documents, or pieces of one longer than a row, that share rows; 0 without packing.
        room: tokens that packed rows could hold; 0 without packing.
    """

    read: int = 0
    rows: int = 0
    empty: int = 0
    truncated: int = 0
    dropped_too_long: int = 0
    dropped_without_labels: int = 0
    dropped_tokens: int = 0
    tokens: int = 0
    supervised: int = 0
    packed: int = 0
    room: int = 0

    @property
    def fill_rate(self) -> float | None:
        """The share of packed rows that tokens fill; ``None`` without packing."""
        return self.tokens / self.room if self.room else None

    def __str__(self) -> str:
        """One line; what did not happen is not mentioned."""
        happened = (
            (self.empty, "without text"),
            (self.truncated, "truncated"),
            (self.dropped_too_long, "dropped as too long"),
            (self.dropped_without_labels, "dropped with nothing left to learn from"),
            (self.dropped_tokens, "tokens left over at the end"),
        )
        parts = [f"{self.rows:,} rows of {self.read:,} read"]
        if self.fill_rate is not None:
            parts.append(f"{self.packed:,} packed into them, {self.fill_rate:.1%} full")
        parts += [f"{num:,} {what}" for num, what in happened if num]
        share = self.supervised / max(1, self.tokens)
        return f"{', '.join(parts)}; {self.tokens:,} tokens, {self.supervised:,} of them ({share:.0%}) supervised"


class CacheWriter:
    """Takes tokens and rows as they come. Made by :meth:`create`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._hashes: dict[str, Any] = {}
        self.num_tokens = 0
        self.num_rows = 0
        self._num_packed = 0
        self._largest = -1

    def tokens(self, ids: Any, supervised: Any = None) -> int:
        """Append token ids, and 0 or 1 for each (in all calls or in none). Returns where they start."""
        start = self.num_tokens
        values = np.asarray(ids, dtype=np.int32)
        self._write("tokens", values)
        if supervised is not None:
            assert len(supervised) == len(values)
            self._write("supervised", np.asarray(supervised, dtype=np.uint8))
        self.num_tokens += len(values)
        self._largest = max(self._largest, int(values.max(initial=-1)))
        return start

    def row(self, start: int, num_tokens: int) -> None:
        """A row of ``num_tokens`` tokens that starts at ``start``."""
        self._write("rows", np.asarray([start, num_tokens], dtype=np.int64))
        self.num_rows += 1

    def packed_row(self, documents: Sequence[tuple[int, int]]) -> None:
        """A row of several documents: start and number of tokens of each. In all calls this, or :meth:`row`."""
        self._write("rows", np.asarray(documents, dtype=np.int64))
        self._num_packed += len(documents)
        self._write("packed", np.asarray([self._num_packed], dtype=np.int64))
        self.num_rows += 1

    def _write(self, name: str, values: np.ndarray[Any, Any]) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.bin").open("wb")
            self._hashes[name] = hashlib.sha256()
        data = values.tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)

    def finish(self, *, counts: Counts, notices: tuple[str, ...], sequence_length: int) -> None:
        """Write what was counted. ``sequence_length`` cuts the tokens into rows if :meth:`row` was never called."""
        parts = {name: hash.hexdigest() for name, hash in sorted(self._hashes.items())}
        stride = None if "rows" in parts else sequence_length
        about = {
            "format": _FORMAT,
            "digest": hashlib.sha256(json.dumps([parts, stride]).encode()).hexdigest(),
            "stride": stride,
            "num_tokens": self.num_tokens,
            "vocab_size": self._largest + 1,
            "counts": asdict(counts),
            "notices": list(notices),
        }
        (self._folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")

    def close(self, *, flush: bool) -> None:
        """Close the files; with ``flush``, once they are on disk."""
        for file in self._files.values():
            if flush:
                file.flush()
                os.fsync(file.fileno())
            file.close()

    @staticmethod
    @contextmanager
    def create(folder: Path) -> Iterator[CacheWriter]:
        """A writer whose result is renamed to ``folder`` if the block ends well, and removed if it does not.

        Raises:
            DataError: the disk is full, or the folder cannot be written.
        """
        partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
        try:
            partial.mkdir(parents=True)
            writer = CacheWriter(partial)
            try:
                yield writer
            except BaseException:
                # Closing writes what is buffered, which fails again on a full disk, and hides the first error.
                with suppress(OSError):
                    writer.close(flush=False)
                raise
            writer.close(flush=True)
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / "about.json").exists():
                    raise
        except OSError as error:
            raise DataError(f"cannot write prepared data to {folder.parent}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class TokenCache:
    """A finished cache, mapped into memory.

    Raises:
        DataError: there is none in ``folder``, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            about = json.loads((folder / "about.json").read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{folder}: no prepared data there, or damaged: {error}") from None
        self.digest: str = about["digest"]
        self.vocab_size: int = about["vocab_size"]
        self.counts = Counts(**about["counts"])
        self.notices = tuple(about["notices"])
        self._stride: int | None = about["stride"]
        self.num_rows = self.counts.rows
        for name, itemsize in (("tokens", 4), ("supervised", 1)):
            path = folder / f"{name}.bin"
            expected = about["num_tokens"] * itemsize
            if name == "supervised" and not path.exists():
                continue
            if not path.exists() or path.stat().st_size != expected:
                raise DataError(f"{folder}: damaged: {path.name} has not the {expected:,} bytes written; remove it")
        if self._stride is None:
            found = len(self._rows if self._packed is None else self._packed)
            if found != self.num_rows:
                raise DataError(f"{folder}: damaged: {found} rows where {self.num_rows} were written; remove it")

    @cached_property
    def _tokens(self) -> np.ndarray[Any, Any]:
        return np.memmap(self._folder / "tokens.bin", dtype=np.int32, mode="r")

    @cached_property
    def _supervised(self) -> np.ndarray[Any, Any] | None:
        path = self._folder / "supervised.bin"
        return np.memmap(path, dtype=np.uint8, mode="r") if path.exists() else None

    @cached_property
    def _rows(self) -> np.ndarray[Any, Any]:
        return np.memmap(self._folder / "rows.bin", dtype=np.int64, mode="r").reshape(-1, 2)

    @cached_property
    def _packed(self) -> np.ndarray[Any, Any] | None:
        path = self._folder / "packed.bin"
        return np.memmap(path, dtype=np.int64, mode="r") if path.exists() else None

    @property
    def is_packed(self) -> bool:
        """Whether documents share rows and are to be kept apart."""
        return self._packed is not None

    def _spans(self, row: int) -> list[tuple[int, int]]:
        """Start and number of tokens of each of its documents; of the row, if it is not packed."""
        if self._stride is not None:
            return [(row * self._stride, self._stride + 1)]
        first, end = row, row + 1
        if self._packed is not None:
            first, end = self._packed[row - 1] if row else 0, self._packed[row]
        return [(int(start), int(num_tokens)) for start, num_tokens in self._rows[first:end]]

    def document_sizes(self, row: int) -> list[int]:
        """The tokens of each of its documents; of the row, if it is not packed."""
        return [num_tokens for _, num_tokens in self._spans(row)]

    def length(self, row: int) -> int:
        """The positions of ``row`` to a model: one less than the tokens of each document."""
        return sum(size - 1 for size in self.document_sizes(row))

    def row(self, row: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Its token ids, int32, and 0 or 1 for each, uint8 (``None``: all are supervised), of one document after the
        other."""
        slices = [slice(start, start + num_tokens) for start, num_tokens in self._spans(row)]
        tokens = np.concatenate([self._tokens[each] for each in slices])
        supervised = self._supervised
        return tokens, None if supervised is None else np.concatenate([supervised[each] for each in slices])
