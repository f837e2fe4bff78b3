"""Reading what users have: text, JSON lines and Parquet, one item at a time, with the place of every mistake.

Every error is one line that starts with the place: ``file:line: what is wrong``.

JSON lines and text are read here, because their errors must name the line; Parquet is read by ``datasets``, which
streams it. Nothing holds more than one file's row group, or one document, in memory.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DataError

__all__ = ["Item", "find_files", "read_json_lines", "read_parquet", "read_text"]


@dataclass(frozen=True)
class Item:
    """Something that was read, and where: ``place`` is ``file:line`` or ``file, row n`` (both counted from 1)."""

    place: str
    value: Any


def find_files(pattern: str, *, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that a file's, a folder's or a glob's name stands for, sorted by path; never none, never empty ones.

    A folder stands for every file below it with one of the ``suffixes``, hidden ones left out.

    Raises:
        DataError: one line, without the place.
    """
    path = Path(pattern)
    wanted = " or ".join(suffixes)
    if path.is_dir():
        below = sorted(found for found in path.rglob("*") if found.suffix in suffixes and found.is_file())
        files = [found for found in below if not any(part.startswith(".") for part in found.relative_to(path).parts)]
        if not files:
            raise DataError(f"the folder {pattern!r} has no {wanted} file")
    elif path.exists():
        files = [path]
    elif glob.has_magic(pattern):
        files = sorted(Path(found) for found in glob.glob(pattern, recursive=True) if Path(found).is_file())
        if not files:
            raise DataError(f"nothing matches {pattern!r}")
    else:
        raise DataError(f"there is no file {pattern!r}")
    for file in files:
        if file.suffix not in suffixes:
            raise DataError(f"{str(file)!r} is not a {wanted} file")
    if not any(file.stat().st_size for file in files):
        raise DataError(f"{pattern!r} is empty")
    return files


def read_json_lines(path: Path) -> Iterator[Item]:
    """The objects of a JSON lines file. Empty lines are skipped, and counted in line numbers.

    Raises:
        DataError: a line that is not UTF-8, not JSON, or not an object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            text = _decode(line, place)
            if number == 1:
                text = text.removeprefix("\ufeff")  # a byte order mark, as some Windows programs write it
            if not text.strip():
                continue
            try:
                value = json.loads(text.rstrip())
            except json.JSONDecodeError as error:
                raise DataError(f"{place}: not JSON: {error.msg} (column {error.colno})") from None
            except RecursionError:
                raise DataError(f"{place}: nested too deeply") from None
            if not isinstance(value, dict):
                raise DataError(f"{place}: expected a JSON object, got {_short(value)}")
            yield Item(place, value)


def read_text(path: Path, *, unit: str) -> Iterator[Item]:
    """The documents of a text file: the whole ``file``, or each ``paragraph`` or ``line`` that is not blank.

    Line ends stay as they are inside a document, and are left out at its end, except for a whole file.

    Raises:
        DataError: bytes that are not UTF-8.
    """
    if unit == "file":
        yield Item(str(path), _decode(path.read_bytes(), str(path)))
        return
    lines: list[str] = []
    first = 1
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, f"{path}:{number}")
            if text.strip() and unit == "paragraph":
                first = first if lines else number
                lines.append(text)
                continue
            if lines:
                yield Item(f"{path}:{first}", "".join(lines).rstrip("\r\n"))
                lines = []
            if text.strip():
                yield Item(f"{path}:{number}", text.rstrip("\r\n"))
    if lines:
        yield Item(f"{path}:{first}", "".join(lines).rstrip("\r\n"))


def read_parquet(path: Path, *, column: str, cache_dir: Path) -> Iterator[Item]:
    """The values of one column, streamed by ``datasets``. It keeps what it keeps below ``cache_dir``.

    Raises:
        DataError: no Parquet file, or no such column.
    """
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True, cache_dir=str(cache_dir)
        )
        names = rows.column_names or []
        if names and column not in names:
            raise DataError(f"{path}: has no column {column!r}; it has: {', '.join(names)}")
        for number, row in enumerate(rows.select_columns([column]) if names else rows, 1):
            yield Item(f"{path}, row {number}", row[column])
    except DataError:
        raise
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:  # Arrow's errors are ValueErrors
        raise DataError(f"{path}: {str(error).splitlines()[0]}") from None
    finally:
        if shown:
            datasets.enable_progress_bars()


def _decode(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."
