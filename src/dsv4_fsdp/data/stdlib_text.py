"""The tiny preset's data: the source of this Python's own standard library, as bytes.

Every machine that can run the trainer has it, so the first run downloads nothing. All ``.py`` files below the standard
library's folder, in sorted order, are joined into one stream of token ids: 0 to 255 are the bytes themselves, and each
file starts with ``BOS`` and ends with ``EOS``. Test suites and ``site-packages`` are left out, since they differ most
between distributions.

What a run sees is a pure function of (seed, position). A *position* is one batch: rows of one common length, so nothing
is padded. The length is drawn from ``sequence_lengths``, and there are as many rows as fit into ``batch_tokens``, so
that batches of different lengths cost about the same. Lengths below one window of heavily compressed attention (128
tokens) are there on purpose: they are what makes ranks differ (see :mod:`dsv4_fsdp.alignment`). At each step, rank r of
w takes position ``step * w + r``.

Not supported: epochs (rows are drawn with replacement), and the same text on another Python version: compare losses
within one only (:attr:`StdlibText.digest` tells them apart).
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from functools import cached_property
from pathlib import Path

import torch

from dsv4_fsdp.errors import Dsv4FsdpError

__all__ = ["BOS", "EOS", "VOCAB_SIZE", "StdlibText", "stdlib_files"]

BOS = 256
EOS = 257
VOCAB_SIZE = 258
"""256 bytes, ``BOS`` and ``EOS``."""

_LEFT_OUT = frozenset({"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests"})


def stdlib_files() -> list[Path]:
    """The ``.py`` files that make up the text, in the order in which they are joined."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        # In place, so that the walk does not enter them: site-packages can hold tens of thousands of files.
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


class StdlibText:
    """Batches of token ids by position.

    Args:
        seed: draws lengths and rows.
        sequence_lengths: the lengths to draw from, in tokens.
        batch_tokens: rows x length of a batch is at most this, and less by under one row.

    Attributes:
        tokens: the whole text, int16, shape ``(num_tokens,)``.

    Raises:
        Dsv4FsdpError: this Python comes without the source of its standard library.
    """

    def __init__(self, *, seed: int, sequence_lengths: tuple[int, ...], batch_tokens: int) -> None:
        self.seed = seed
        self.sequence_lengths = sequence_lengths
        self.batch_tokens = batch_tokens
        self.num_files = 0
        pieces: list[torch.Tensor] = []
        for path in stdlib_files():
            content = bytearray(path.read_bytes())
            if content:
                body = torch.frombuffer(content, dtype=torch.uint8).to(torch.int16)
                pieces += [torch.tensor([BOS], dtype=torch.int16), body, torch.tensor([EOS], dtype=torch.int16)]
                self.num_files += 1
        self.tokens = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int16)
        if len(self.tokens) < max(sequence_lengths):
            raise Dsv4FsdpError(
                "the tiny preset trains on the source of Python's standard library.\n"
                f"expected: .py files with at least {max(sequence_lengths)} bytes in {sysconfig.get_path('stdlib')}\n"
                f"got: {self.num_files} files, {len(self.tokens)} tokens\n"
                "what to do: use a Python that ships its .py files, not only compiled or zipped ones."
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text, hex. Ranks with different texts would train on them without anyone noticing."""
        return hashlib.sha256(self.tokens.numpy().data).hexdigest()

    def batch(self, position: int) -> torch.Tensor:
        """The token ids of one position: int64, shape ``(rows, length)``."""
        rng = random.Random(f"dsv4_fsdp stdlib text: seed {self.seed}, position {position}")
        length = rng.choice(self.sequence_lengths)
        starts = [rng.randrange(len(self.tokens) - length + 1) for _ in range(self.batch_tokens // length)]
        return torch.stack([self.tokens[start : start + length] for start in starts]).long()
