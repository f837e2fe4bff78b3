"""Which checkpoint a folder holds: digests that cost some megabytes of reading, whatever the size of the weights.

One of ``config.json`` and one of each safetensors file: of its size, its header and 16 blocks of 4 KiB spread evenly
over its data, the first and the last among them. Headers and sizes alone would not do: every model that was trained
from another has the same ones.

**What they do not see**: a change of weights between the blocks. Training changes nearly every number of what it
trains, so another training's result is found; a few numbers edited by hand in a large file may not be. Data of up to
64 KiB are read whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from .checkpoint_audit import checkpoint_files
from .errors import CheckpointError, ContractError, listing
from .safetensors_headers import read_header

__all__ = ["checkpoint_digests", "refuse_other_base"]

_NUM_BLOCKS = 16
_BLOCK_BYTES = 4096


def checkpoint_digests(folder: Path) -> dict[str, str]:
    """File name -> digest (hexadecimal) of the checkpoint in ``folder``. What is wrong with a file is not judged.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        _, files, _, _ = checkpoint_files(folder)
        config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
        return {"config.json": config} | {file.name: _digest_of(file) for file in files}
    except ContractError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(
            f"a checkpoint cannot be read.\nexpected: config.json and safetensors files\ngot: {error.strerror}\n"
            f"where: {error.filename or folder}\nwhat to do: name the folder that holds the model."
        ) from error


def refuse_other_base(folder: Path, expected: Mapping[str, str], *, held_by: Path, remedy: str) -> None:
    """Raise ``CheckpointError`` unless ``folder`` holds the checkpoint whose digests are ``expected``.

    Args:
        held_by: the training checkpoint that they were written down in.
        remedy: what to do about it.
    """
    if folder.is_dir():
        found = checkpoint_digests(folder)
        differing = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
        got = [f"{name}: {_difference(expected.get(name), found.get(name))}" for name in differing]
    else:
        got = ["no such folder"]
    if got:
        raise CheckpointError(
            f"the frozen weights that {held_by} was trained on are not there; it holds what was trained only.\n"
            f"expected: the checkpoint that the run started from, {len(expected)} files by their digests\n"
            f"got:\n{listing(got)}\nwhere: {folder}\nwhat to do: {remedy}"
        )


def _difference(expected: str | None, found: str | None) -> str:
    if found is None:
        return "no such file"
    return "was not there" if expected is None else "another file under this name"


def _digest_of(file: Path) -> str:
    header = read_header(file)
    digest = hashlib.sha256(str(header.size_bytes).encode())
    # Unbuffered: a buffered file would read on.
    with file.open("rb", buffering=0) as handle:
        digest.update(handle.read(header.bytes_read))
        for start in _block_starts(header.bytes_read, header.size_bytes):
            handle.seek(start)
            digest.update(handle.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _block_starts(first: int, end: int) -> list[int]:
    """Where blocks begin in the bytes from ``first`` to ``end``; they cover small data wholly."""
    last = max(first, end - _BLOCK_BYTES)
    steps = _NUM_BLOCKS - 1
    return sorted({first + (last - first) * step // steps for step in range(_NUM_BLOCKS)})
