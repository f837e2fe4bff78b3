"""What the loop takes from the data: tensors, by step and rank.

**Labels** are shifted already: the label of a position is the token after it, or -100 where nothing is learned (from a
prompt, from padding, at the end of a row). So the loss is a plain cross-entropy of logits and labels, with no cutting.

**Padding** is on the right only, and known by position, never by token: a padding token may well be EOS. Causal
attention keeps it from every real token, compressed windows included (a window that holds padding ends behind the real
tokens, and is seen by padding only), so no attention mask is needed. Padding on the *left* would be averaged into the
windows of real tokens.

**Documents** that are joined into a row see each other; there are no position ids then. Where rows are packed,
``position_ids`` restart at each document, and windowed attention (:mod:`dsv4_fsdp.attention`) keeps documents apart by
them: each is computed as if it had a row of its own. Eager attention does not: Transformers' DeepSeek-V4 numbers
compressed windows from the start of the *row*, so a second document that starts again at position 0 sees the windows
of the first one instead of its own (``test_restarted_positions_do_not_isolate_documents``). A run refuses the two
together. Padding behind packed documents is at position 0, token by token: documents of their own, too short for any
window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from .order import deal, deal_by_length, place
from .settings import RowSettings, StdlibSettings
from .stdlib_text import VOCAB_SIZE, StdlibText
from .token_cache import Counts, TokenCache

__all__ = ["NOT_SUPERVISED", "Batch", "Batches", "RowBatches", "StdlibBatches", "pad_rows"]

NOT_SUPERVISED = -100
"""The label of a position from which nothing is learned: ``ignore_index`` of torch's cross-entropy."""


@dataclass(frozen=True)
class Batch:
    """One forward of one rank.

    Attributes:
        input_ids: int64, shape ``(rows, length)``.
        labels: int64, the same shape; the next token, or -100.
        lengths: int64, shape ``(rows,)``: how many tokens of each row are real; padding follows.
        position_ids: int64, the same shape as ``input_ids``, from 0 at the start of each document and at each token of
            padding; ``None`` if a row is one document to the model.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor
    position_ids: torch.Tensor | None = None

    @property
    def num_supervised(self) -> int:
        """Positions with a label. It may be zero."""
        return int((self.labels != NOT_SUPERVISED).sum())

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.lengths.sum())

    def to(self, device: torch.device) -> Batch:
        """The same on ``device``."""
        positions = None if self.position_ids is None else self.position_ids.to(device)
        return Batch(self.input_ids.to(device), self.labels.to(device), self.lengths.to(device), positions)

    def without_labels(self) -> Batch:
        """The same tokens with nothing to learn: what a rank runs through while others still have something."""
        return replace(self, labels=torch.full_like(self.labels, NOT_SUPERVISED))


def pad_rows(
    rows: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]],
    *,
    pad_id: int,
    positions: Sequence[np.ndarray[Any, Any]] | None = None,
) -> Batch:
    """Rows of (tokens, labels), each pair of one length, as one batch as long as the longest.

    ``positions`` are those of each row's tokens, if rows are packed.
    """
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    shape = (len(rows), int(lengths.max()))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    labels = torch.full(shape, NOT_SUPERVISED, dtype=torch.int64)
    for row, (tokens, wanted) in enumerate(rows):
        input_ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        labels[row, : len(tokens)] = torch.from_numpy(wanted.astype(np.int64))
    if positions is None:
        return Batch(input_ids, labels, lengths)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for row, own in enumerate(positions):
        position_ids[row, : len(own)] = torch.from_numpy(own)
    return Batch(input_ids, labels, lengths, position_ids)


class Batches(Protocol):
    """Data, ready to train on. Every method is a pure function of its arguments: any rank can ask for any other's."""

    @property
    def digest(self) -> str:
        """SHA-256 over the tokens and all that decides their order, hex. Another number of ranks does not change it."""

    @property
    def num_sequences(self) -> int | None:
        """Sequences of an epoch; ``None`` if they are drawn without end."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps after which each sequence was seen; ``None`` if they are drawn without end."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that can come."""

    @property
    def counts(self) -> Counts | None:
        """What preparation met and left out."""

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should be told once, in words."""

    def check(self, world_size: int) -> None:
        """Raise ``DataError`` unless a step can be dealt evenly to ``world_size`` ranks."""

    def micro_batches(self, step: int, *, rank: int, world_size: int) -> list[Batch]:
        """What ``rank`` computes in optimizer step ``step`` (from 0): as many forwards on every rank, at least one."""

    def eval_batches(self, rank: int, world_size: int) -> list[Batch]:
        """What ``rank`` evaluates: as many batches on every rank; those that are over have no labels."""


class RowBatches:
    """Batches of prepared rows.

    Args:
        cache: what is trained on.
        evaluation: what is evaluated on, if anything is.
        settings: how rows are dealt.
        seed: orders them.
        pad_id: the token that fills short rows; any token will do.
        notices: what the user should be told, beside what preparation noticed.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        evaluation: TokenCache | None,
        settings: RowSettings,
        seed: int,
        pad_id: int,
        notices: tuple[str, ...] = (),
    ) -> None:
        self._cache = cache
        self._evaluation = evaluation
        self._settings = settings
        self._seed = seed
        self._pad_id = pad_id
        self._notices = notices

    @property
    def digest(self) -> str:
        order = f"seed {self._seed}, {self._settings.global_batch_size} sequences a step"
        evaluation = self._evaluation.digest if self._evaluation else "nothing"
        return _sha256(f"{self._cache.digest}, {order}; evaluation on {evaluation}")

    @property
    def num_sequences(self) -> int:
        return self._cache.num_rows

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._cache.num_rows // self._settings.global_batch_size)

    @property
    def vocab_size(self) -> int:
        return max(self._cache.vocab_size, self._evaluation.vocab_size if self._evaluation else 0)

    @property
    def counts(self) -> Counts:
        return self._cache.counts

    @property
    def notices(self) -> tuple[str, ...]:
        return self._notices + self._cache.notices

    def check(self, world_size: int) -> None:
        self._settings.accumulation(world_size)

    def sequences(self, step: int) -> list[int]:
        """The rows of a step, over all ranks, in the order of the seed."""
        size = self._settings.global_batch_size
        places = range(step * size, (step + 1) * size)
        return [place(position, num=self._cache.num_rows, seed=self._seed) for position in places]

    def micro_batches(self, step: int, *, rank: int, world_size: int) -> list[Batch]:
        self.check(world_size)
        size = self._settings.global_batch_size
        micro_batch_size = self._settings.micro_batch_size
        if self._settings.balance_lengths:
            dealt = deal_by_length(
                self.sequences(step),
                length_of=self._cache.length,
                rank=rank,
                world_size=world_size,
                micro_batch_size=micro_batch_size,
            )
        else:
            mine = deal(size, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
            dealt = [
                [place(step * size + position, num=self._cache.num_rows, seed=self._seed) for position in positions]
                for positions in mine
            ]
        return [self._batch(self._cache, rows) for rows in dealt]

    def row(self, row: int) -> Batch:
        """One row by its number in the order of the files, as it will be trained on."""
        return self._batch(self._cache, [row])

    def eval_batches(self, rank: int, world_size: int) -> list[Batch]:
        if self._evaluation is None:
            return []
        num = min(self._evaluation.num_rows, self._settings.eval_sequences or self._evaluation.num_rows)
        size = self._settings.micro_batch_size
        batches = []
        for start in range(rank * size, -(-num // (world_size * size)) * world_size * size, world_size * size):
            rows = [self._evaluated(position) for position in range(start, min(start + size, num))]
            batches.append(
                self._batch(self._evaluation, rows)
                if rows
                else self._batch(self._evaluation, [self._evaluated(0)]).without_labels()
            )
        return batches

    def _evaluated(self, position: int) -> int:
        """The row that is evaluated at ``position``: the first ones, but of packed rows a sample.

        The packer closes rows of long documents first. The sample is the same whatever the seed of the run.
        """
        assert self._evaluation is not None
        return place(position, num=self._evaluation.num_rows, seed=0) if self._evaluation.is_packed else position

    def _batch(self, cache: TokenCache, rows: Sequence[int]) -> Batch:
        sizes = [cache.document_sizes(row) for row in rows]
        return pad_rows(
            [_with_labels(*cache.row(row), sizes=own) for row, own in zip(rows, sizes, strict=True)],
            pad_id=self._pad_id,
            positions=[_positions(own) for own in sizes] if cache.is_packed else None,
        )


class StdlibBatches:
    """Batches of :class:`~dsv4_fsdp.data.stdlib_text.StdlibText`: one position a forward.

    Evaluation takes the positions below zero, which training never comes to. They are other rows of the same text.
    """

    num_sequences = None
    steps_per_epoch = None
    vocab_size = VOCAB_SIZE
    counts = None
    notices: tuple[str, ...] = ()

    def __init__(self, settings: StdlibSettings, *, seed: int) -> None:
        self.text = StdlibText(
            seed=seed, sequence_lengths=settings.sequence_lengths, batch_tokens=settings.batch_tokens
        )
        self._settings = settings

    @property
    def digest(self) -> str:
        chosen = self._settings
        order = f"seed {self.text.seed}, {chosen.sequence_lengths}, {chosen.batch_tokens} tokens"
        return _sha256(f"{self.text.digest}, {order}, {chosen.global_batch_size} positions a step")

    def check(self, world_size: int) -> None:
        self._settings.accumulation(world_size)

    def micro_batches(self, step: int, *, rank: int, world_size: int) -> list[Batch]:
        self.check(world_size)
        size = self._settings.global_batch_size or world_size
        mine = deal(size, rank=rank, world_size=world_size, micro_batch_size=1)
        return [self._batch(step * size + position) for (position,) in mine]

    def eval_batches(self, rank: int, world_size: int) -> list[Batch]:
        num = self._settings.eval_sequences or 0
        starts = range(rank, -(-num // world_size) * world_size, world_size)
        return [self._batch(-1 - place) if place < num else self._batch(-1).without_labels() for place in starts]

    def _batch(self, position: int) -> Batch:
        tokens = self.text.batch(position)
        labels = torch.full_like(tokens, NOT_SUPERVISED)
        labels[:, :-1] = tokens[:, 1:]
        return Batch(tokens, labels, torch.full((len(tokens),), tokens.shape[1]))


def _with_labels(
    tokens: np.ndarray[Any, Any], supervised: np.ndarray[Any, Any] | None, *, sizes: Sequence[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A row's tokens without the last of each document, and for each the one after it, or -100 where that is not
    supervised. ``sizes`` are the documents' tokens."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    starts = ends - np.array(sizes, dtype=np.int64)
    following = np.delete(tokens, starts).astype(np.int64)
    if supervised is not None:
        following[np.delete(supervised, starts) == 0] = NOT_SUPERVISED
    return np.delete(tokens, ends - 1), following


def _positions(sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """Of each token that :func:`_with_labels` leaves, in its document."""
    return np.concatenate([np.arange(size - 1, dtype=np.int64) for size in sizes])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
