"""Packed documents: which tokens belong together, and where their compressed windows lie.

Several documents in one row are told apart by ``position_ids``: where a position is not its predecessor's plus one, a
document begins (Transformers' own rule for its sliding-window mask). A document's compressed windows count from its own
first token and its last, incomplete one is dropped, as if it were alone. A row of ``S`` tokens has at most
``S // rate`` windows however it is cut, so the entries get that many *slots*, filled from the left in order; slots left
over hold finite values that no query sees. No shape depends on data, but for one case: if no document of the batch
fills a window, there are no slots, as there are none in a row that is too short for one. So the compressor has no part
in the loss, and :mod:`dsv4_fsdp.alignment` can tell. A compiled graph cannot branch on it and keeps the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DocumentWindows", "Documents", "starts_a_document"]


def starts_a_document(position_ids: torch.Tensor) -> torch.Tensor:
    """Whether a document begins at each token but the first: bool, ``[B, S - 1]``."""
    return position_ids[:, 1:] - position_ids[:, :-1] != 1


@dataclass(frozen=True)
class DocumentWindows:
    """The compressed windows of all documents of each row, for one compression rate.

    Attributes:
        tokens: int64 ``[B, T, rate]``, the tokens of each slot's window; some window's or the first ones if unused.
        opens_document: bool ``[B, T]``, whether the window is its document's first.
        positions: int64 ``[B, T]``, ``position_ids`` of the window's first token.
        first: int64 ``[B, S]``, the slot of the first window of each token's document.
        visible: int64 ``[B, S]``, one past the last slot whose window is complete at this token.
    """

    tokens: torch.Tensor
    opens_document: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    visible: torch.Tensor


class Documents:
    """The documents of a batch of rows.

    Attributes:
        position_ids: int64 ``[B, S]``.
        start: int64 ``[B, S]``, the first token of each token's document.
    """

    def __init__(self, position_ids: torch.Tensor) -> None:
        self.position_ids = position_ids
        tokens = torch.arange(position_ids.shape[1], device=position_ids.device)
        begins = torch.nn.functional.pad(starts_a_document(position_ids), (1, 0), value=True)
        self.start = torch.where(begins, tokens, 0).cummax(dim=1).values
        self._index = tokens - self.start
        self._windows: dict[int, DocumentWindows] = {}

    def windows(self, rate: int) -> DocumentWindows:
        """The windows of ``rate`` tokens. Kept: all layers of a kind ask for the same."""
        if rate not in self._windows:
            self._windows[rate] = self._find_windows(rate)
        return self._windows[rate]

    def _find_windows(self, rate: int) -> DocumentWindows:
        batch, num_tokens = self.position_ids.shape
        num_slots = num_tokens // rate
        tokens = torch.arange(num_tokens, device=self.position_ids.device)
        closes = (self._index + 1) % rate == 0
        if not torch.compiler.is_compiling() and not bool(closes.any()):  # read from the device, once a forward
            num_slots = 0
        visible = closes.cumsum(dim=1)
        first = (visible - closes.long()).gather(1, self.start)
        # The last token of each slot. What closes no window goes to a slot that is cut off again.
        last = tokens.new_full((batch, num_slots + 1), rate - 1)
        last = last.scatter(1, torch.where(closes, visible - 1, num_slots), tokens.expand(batch, -1))[:, :num_slots]
        begin = last - (rate - 1)
        return DocumentWindows(
            tokens=begin.unsqueeze(-1) + torch.arange(rate, device=begin.device),
            opens_document=self._index.gather(1, begin) == 0,
            positions=self.position_ids.gather(1, begin),
            first=first,
            visible=visible,
        )
