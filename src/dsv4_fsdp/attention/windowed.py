"""Attention over a local window and compressed entries, without the scores of a whole sequence.

What Transformers' eager attention computes with ``[B, H, S, S + T]`` scores, of which each query may see ``window``
local keys and some compressed entries:

- Queries go in blocks of ``Q``. A block's local keys are the ``Q`` tokens of the block and the ones before it, so local
  scores are ``[B, blocks, H, Q, Q + window]``. Blocks go in chunks of bounded size, so no memory but inputs and outputs
  grows with the sequence.
- The one key-value head is never expanded: the query heads of a block are rows of one matrix product with it.
- Entries are one more group of keys: those closed before the chunk ends, or, with an indexer's ``choice``, the chosen
  ones (see ``_GATHER_FROM``).
- The softmax is in fp32 (fp64 for fp64 inputs) over both groups, and the sink is one more term of its denominator.
- Backward computes the scores again, chunk by chunk. Saved are the inputs and one number per query and head.

Plain torch operations, nothing that needs a CPU; nothing here was run on a GPU. ``index_add_``, used where entries are
gathered, adds in any order on CUDA unless ``torch.use_deterministic_algorithms`` is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from dsv4_fsdp.chunk_sizes import are_for_cpu

__all__ = ["Sight", "windowed_attention"]

# Queries per block. A block looks at block + window keys, half of the block's triangle and of the window's for nothing:
# smaller blocks waste less, larger ones make larger matrix products (of heads * block rows).
_BLOCK = 32
# Scores of one chunk, in elements; the temporaries of a chunk are a few times this. On a CPU more would leave the
# caches; elsewhere it is a guess at what hides the launches (128 MB in fp32), never measured.
_CHUNK_ELEMENTS_ON_CPU = 2**20
_CHUNK_ELEMENTS = 2**25
# With an indexer's choice of k entries, a chunk that can see up to this many times k entries computes the scores of all
# of them and masks those not chosen. From there on it gathers the k: a product with keys that all queries share is
# several times cheaper per key than one with keys of one's own.
_GATHER_FROM = 4


@dataclass(frozen=True)
class Sight:
    """What each query sees. ``B`` rows, ``S`` queries, ``L`` local keys of which the last ``S`` are the queries' own.

    Attributes:
        window: local keys that a query sees, its own included.
        num_entries: compressed entries ``T``, which follow the local keys.
        rate: tokens per entry if no query before token ``t`` sees an entry from ``t // rate`` on, else ``None``.
        real: bool ``[B, L]``, false for local keys that are padding; ``None``: all are real.
        start: int64 ``[B, S]``, the first local key that a query may see (its document's); ``None``: no bound.
        first: int64 ``[B, S]``, likewise the first entry.
        visible: int64 ``[B or 1, S]``, one past the last entry that a query may see; ``None`` if ``T`` is 0.
        choice: integers ``[B, S, k]``, entries that a query sees, all within the two bounds, -1 for none; ``None``: all
            within the bounds.
    """

    window: int
    num_entries: int = 0
    rate: int | None = None
    real: torch.Tensor | None = None
    start: torch.Tensor | None = None
    first: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    choice: torch.Tensor | None = None


def windowed_attention(
    query: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor, *, scale: float, sight: Sight
) -> torch.Tensor:
    """Attention of ``query`` ``[B, H, S, D]`` to ``keys`` ``[B, L + T, D]``, which are the values too.

    Args:
        query: any floating dtype.
        keys: the same dtype; ``L`` local keys, then the entries.
        sinks: one logit per head, ``[H]``, floating; part of the denominator and of nothing else.
        scale: factor of the scores.
        sight: who sees whom.

    Returns:
        ``[B, S, H, D]``, contiguous, in the dtype of ``query``. It has a first derivative only.
    """
    output = _WindowedAttention.apply(
        query,
        keys,
        sinks,
        sight.real,
        sight.start,
        sight.first,
        sight.visible,
        sight.choice,
        scale,
        (sight.window, sight.num_entries, sight.rate),
    )
    assert isinstance(output, torch.Tensor)
    return output


class _Chunk(NamedTuple):
    """Queries ``begin`` to ``end``, of ``num_blocks`` blocks, the last of which may be filled up with zeros."""

    begin: int
    end: int
    num_blocks: int
    num_entries: int
    gathers: bool


class _Shape:
    """Sizes, and the chunks that they give. ``reach``: keys before a block, the window rounded up to whole blocks."""

    def __init__(self, query: torch.Tensor, keys: torch.Tensor, sight: Sight) -> None:
        self.batch, self.heads, self.queries, self.dim = query.shape
        self.entries = sight.num_entries
        self.local = keys.shape[1] - self.entries
        self.past = self.local - self.queries
        self.chunk_elements = _CHUNK_ELEMENTS_ON_CPU if are_for_cpu(query.device) else _CHUNK_ELEMENTS
        self.block = min(_BLOCK, self.queries)
        self.reach = -(-sight.window // self.block) * self.block
        self.span = self.block + self.reach
        self.blocks = -(-self.queries // self.block)
        self.rate = sight.rate
        self.choices = None if sight.choice is None else sight.choice.shape[-1]

    def chunks(self) -> Iterator[_Chunk]:
        begin = 0
        while begin < self.queries:
            # The bound on entries needs the chunk's end, which needs the bound: take the one of the smallest chunk.
            gathers, entries = self._entries_before(begin + self.block)
            width = self.heads * (self.span + (self.choices or 0 if gathers else entries))
            if gathers:
                width = max(width, (self.choices or 0) * self.dim)
            blocks = max(1, self.chunk_elements // (self.batch * width * self.block))
            end = min(self.queries, begin + blocks * self.block)
            gathers, entries = self._entries_before(end)
            yield _Chunk(begin, end, -(-(end - begin) // self.block), entries, gathers)
            begin = end

    def _entries_before(self, end: int) -> tuple[bool, int]:
        entries = self.entries if self.rate is None else min(self.entries, end // self.rate)
        return self.choices is not None and entries > _GATHER_FROM * self.choices, entries


class _Group(NamedTuple):
    """Keys of a chunk and their scores.

    ``view`` is the storage of ``rows`` as ``[B, blocks, H, Q, keys]``. Where each query has keys of its own,
    ``gathered`` says which entry each key is, of ``B * T``.
    """

    keys: torch.Tensor
    rows: torch.Tensor
    view: torch.Tensor
    gathered: torch.Tensor | None


class _Operands:
    """The tensors of one call, and the parts of them that a chunk needs. The same for forward and backward."""

    def __init__(self, query: torch.Tensor, keys: torch.Tensor, scale: float, sight: Sight) -> None:
        self.shape = shape = _Shape(query, keys, sight)
        self.query, self.scale, self.sight = query, scale, sight
        self.compute_dtype = torch.promote_types(query.dtype, torch.float32)
        self.compressed = keys[:, shape.local :]
        # Local keys from `reach` before the first query to the end of the last block. Rows that are no tokens are zero.
        self.front = shape.reach - shape.past
        tail = shape.blocks * shape.block - shape.queries
        local = keys[:, max(0, -self.front) : shape.local]
        self.padded = F.pad(local, (0, 0, max(0, self.front), tail))
        device = query.device
        if sight.real is None:
            real = torch.ones((1, local.shape[1]), dtype=torch.bool, device=device)
        else:
            real = sight.real[:, max(0, -self.front) :]
        self.real = F.pad(real, (max(0, self.front), tail), value=False)
        row = torch.arange(shape.block, device=device).unsqueeze(1) + shape.reach
        column = torch.arange(shape.span, device=device)
        self.band = (column <= row) & (column > row - sight.window)

    def rows(self, tensor: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """``[B, H, S, D]`` -> the chunk's ``[B, blocks, H * Q, D]``."""
        shape = self.shape
        part = _pad(tensor[:, :, chunk.begin : chunk.end], 2, chunk.num_blocks * shape.block)
        return part.unflatten(2, (chunk.num_blocks, shape.block)).transpose(1, 2).flatten(2, 3)

    def unrows(self, rows: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """``[B, blocks, H * Q, D]`` -> a view ``[B, H, queries of the chunk, D]``; a copy if there are blocks."""
        view = rows.unflatten(2, (self.shape.heads, self.shape.block)).transpose(1, 2)
        return view.flatten(2, 3)[:, :, : chunk.end - chunk.begin]

    def per_query(self, tensor: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """``[B, S]`` or ``[B, S, k]`` -> ``[B, blocks, Q]`` or ``[B, blocks, Q, k]``, zeros behind the last query."""
        part = _pad(tensor[:, chunk.begin : chunk.end], 1, chunk.num_blocks * self.shape.block)
        return part.unflatten(1, (chunk.num_blocks, self.shape.block))

    def scores(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``[N, R, D]``, ``[N, K, D]`` -> ``[N, R, K]`` in the compute dtype.

        The product scales what it has summed up, before it rounds to the dtype of its inputs: one rounding where eager
        has two.
        """
        return _product(rows, keys.transpose(-1, -2), self.scale).to(self.compute_dtype)

    def local(self, rows: torch.Tensor, chunk: _Chunk) -> _Group:
        """The chunk's scores with its local keys, ``-inf`` where there is nothing to see."""
        shape, sight = self.shape, self.sight
        stop = chunk.begin + chunk.num_blocks * shape.block + shape.reach
        keys = self.padded[:, chunk.begin : stop].unfold(1, shape.span, shape.block).transpose(-1, -2)
        scores = self.scores(rows.flatten(0, 1), keys.flatten(0, 1)).unflatten(0, rows.shape[:2])
        view = scores.unflatten(2, (shape.heads, shape.block))
        sees = self.band & self.real[:, chunk.begin : stop].unfold(1, shape.span, shape.block).unsqueeze(2)
        if sight.start is not None:
            # Key `i` of block `b` is the local key `begin + b * Q + i - front`.
            first = torch.arange(chunk.num_blocks, device=rows.device) * shape.block + (chunk.begin - self.front)
            index = first.unsqueeze(1) + torch.arange(shape.span, device=rows.device)
            sees = sees & (index.unsqueeze(1) >= self.per_query(sight.start, chunk).unsqueeze(-1))
        view.masked_fill_(~sees.unsqueeze(2), -torch.inf)
        return _Group(keys, scores, view, None)

    def entries(self, rows: torch.Tensor, chunk: _Chunk) -> _Group | None:
        """Likewise with the compressed entries; ``None`` if the chunk sees none."""
        shape, sight = self.shape, self.sight
        if chunk.num_entries == 0:
            return None
        if chunk.gathers:
            return self._gathered(rows, chunk)
        keys = self.compressed[:, : chunk.num_entries]
        scores = self.scores(rows.flatten(1, 2), keys)
        view = scores.unflatten(1, (chunk.num_blocks, shape.heads, shape.block))
        if sight.choice is not None:
            choice = self.per_query(sight.choice, chunk).long()
            # One column more, for what is no choice; and what zeros behind the last query choose, nobody reads.
            sees = choice.new_zeros((*choice.shape[:3], chunk.num_entries + 1), dtype=torch.bool)
            none = torch.full_like(choice, chunk.num_entries)
            sees = sees.scatter_(-1, torch.where(choice < 0, none, choice), True)[..., :-1]
        else:
            assert sight.visible is not None
            # Entries complete before the chunk are visible to all of it, if there is but one document.
            common = chunk.begin // sight.rate if sight.rate is not None and sight.first is None else 0
            index = torch.arange(common, chunk.num_entries, device=rows.device)
            sees = index < self.per_query(sight.visible, chunk).unsqueeze(-1)
            if sight.first is not None:
                sees = sees & (index >= self.per_query(sight.first, chunk).unsqueeze(-1))
            view[..., common:].masked_fill_(~sees.unsqueeze(2), -torch.inf)
            return _Group(keys, scores, view, None)
        view.masked_fill_(~sees.unsqueeze(2), -torch.inf)
        return _Group(keys, scores, view, None)

    def _gathered(self, rows: torch.Tensor, chunk: _Chunk) -> _Group:
        """Entries of each query's own: keys ``[B * queries, k, D]``, scores ``[B * queries, H, k]``."""
        shape = self.shape
        assert self.sight.choice is not None
        choice = self.per_query(self.sight.choice, chunk).long()
        chosen = choice >= 0
        row_offset = torch.arange(shape.batch, device=rows.device).view(-1, 1, 1, 1) * shape.entries
        index = (torch.where(chosen, choice, 0) + row_offset).flatten()
        keys = self.compressed.reshape(-1, shape.dim).index_select(0, index)
        keys = keys.unflatten(0, (-1, choice.shape[-1]))
        scores = self.scores(self.by_query(rows, chunk), keys)
        view = scores.unflatten(0, (shape.batch, chunk.num_blocks, shape.block)).transpose(2, 3)
        view.masked_fill_(~chosen.unsqueeze(2), -torch.inf)
        return _Group(keys, scores, view, index)

    def by_query(self, rows: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """``[B, blocks, H * Q, D]`` -> ``[B * queries, H, D]``."""
        return rows.unflatten(2, (self.shape.heads, self.shape.block)).transpose(2, 3).flatten(0, 2)

    def from_query(self, by_query: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """``[B * queries, H, D]`` -> ``[B, blocks, H * Q, D]``."""
        view = by_query.unflatten(0, (self.shape.batch, chunk.num_blocks, self.shape.block))
        return view.transpose(2, 3).flatten(2, 3)

    def weighted(
        self,
        near_rows: torch.Tensor,
        far_rows: torch.Tensor | None,
        groups: tuple[_Group, _Group | None],
        chunk: _Chunk,
        *,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """``factor`` times the sum of keys with these weights (rows of the groups): ``[B, blocks, H * Q, D]``."""
        near, far = groups
        total = _product(near_rows.flatten(0, 1), near.keys.flatten(0, 1), factor).unflatten(0, near_rows.shape[:2])
        if far is None or far_rows is None:
            return total
        if far.gathered is not None:
            return total + self.from_query(_product(far_rows, far.keys, factor), chunk)
        return torch.baddbmm(total.flatten(1, 2), far_rows, far.keys, alpha=factor).unflatten(1, total.shape[1:3])


def _product(left: torch.Tensor, right: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor * left @ right`` over a batch, scaled before it is rounded."""
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=factor)


def _weight_and_score_grads(
    weights: torch.Tensor, grad_rows: torch.Tensor, score_grads: torch.Tensor, rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """The gradient of keys: as values ``weights.T @ grad_rows``, as keys ``scale * score_grads.T @ rows``."""
    total = torch.bmm(weights.transpose(-1, -2), grad_rows)
    return torch.baddbmm(total, score_grads.transpose(-1, -2), rows, alpha=scale)


def _pad(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """``tensor`` with zeros at the end of ``dim``, up to ``length``."""
    missing = length - tensor.shape[dim]
    return tensor if missing == 0 else F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing))


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        sinks: torch.Tensor,
        real: torch.Tensor | None,
        start: torch.Tensor | None,
        first: torch.Tensor | None,
        visible: torch.Tensor | None,
        choice: torch.Tensor | None,
        scale: float,
        sizes: tuple[int, int, int | None],
    ) -> torch.Tensor:
        sight = Sight(*sizes, real, start, first, visible, choice)
        with torch.autocast(query.device.type, enabled=False):
            operands = _Operands(query, keys, scale, sight)
            shape, dtype = operands.shape, operands.compute_dtype
            output = query.new_empty((shape.batch, shape.queries, shape.heads, shape.dim))
            normalizer = query.new_empty((shape.batch, shape.heads, shape.queries), dtype=dtype)
            sink = sinks.to(dtype).view(-1, 1)
            for chunk in shape.chunks():
                rows = operands.rows(query, chunk)
                groups = near, far = operands.local(rows, chunk), operands.entries(rows, chunk)
                highest = torch.maximum(near.view.amax(-1), sink)
                if far is not None:
                    highest = torch.maximum(highest, far.view.amax(-1))
                total = torch.exp(sink - highest)
                for group in groups:
                    if group is not None:
                        total += group.view.sub_(highest.unsqueeze(-1)).exp_().sum(-1)
                for group in groups:
                    if group is not None:
                        group.view.div_(total.unsqueeze(-1))
                far_rows = None if far is None else far.rows.to(query.dtype)
                result = operands.weighted(near.rows.to(query.dtype), far_rows, groups, chunk)
                output[:, chunk.begin : chunk.end] = operands.unrows(result, chunk).transpose(1, 2)
                highest += total.log_()
                normalizer[:, :, chunk.begin : chunk.end] = operands.unrows(
                    highest.flatten(2).unsqueeze(-1), chunk
                ).squeeze(-1)
        ctx.save_for_backward(query, keys, sinks, normalizer, real, start, first, visible, choice)
        ctx.scale, ctx.sizes = scale, sizes
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys, sinks, normalizer, *sees = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            operands = _Operands(query, keys, ctx.scale, Sight(*ctx.sizes, *sees))
            shape, dtype = operands.shape, operands.compute_dtype
            grad_heads = grad_output.transpose(1, 2)
            grad_query = torch.empty_like(query)
            # Sums over chunks are in the compute dtype: a key gets gradients from many queries.
            grad_padded = torch.zeros_like(operands.padded, dtype=dtype)
            grad_entries = torch.zeros_like(operands.compressed, dtype=dtype)
            grad_sinks = torch.zeros_like(sinks, dtype=dtype)
            sink = sinks.to(dtype).view(-1, 1)
            for chunk in shape.chunks():
                rows, grad_rows = operands.rows(query, chunk), operands.rows(grad_heads, chunk)
                groups = near, far = operands.local(rows, chunk), operands.entries(rows, chunk)
                # Filled-up queries are zero; their normalizer is what keeps the exponential of their scores finite.
                log_total = operands.rows(normalizer.unsqueeze(-1), chunk).view(near.view.shape[:-1])
                grad_weights = torch.matmul(grad_rows, near.keys.transpose(-1, -2)).to(dtype)
                near.view.sub_(log_total.unsqueeze(-1)).exp_()
                grad_near = grad_weights.view_as(near.view)
                # What a query's weights lose together when one of them gains: the sum over all keys, sink excluded.
                shared = (near.view * grad_near).sum(-1)
                far_grads = None
                if far is not None:
                    far.view.sub_(log_total.unsqueeze(-1)).exp_()
                    if far.gathered is None:
                        far_grads = torch.matmul(grad_rows.flatten(1, 2), far.keys.transpose(-1, -2)).to(dtype)
                        grad_far = far_grads.view_as(far.view)
                    else:
                        by_query = operands.by_query(grad_rows, chunk)
                        far_grads = torch.matmul(by_query, far.keys.transpose(-1, -2)).to(dtype)
                        grad_far = far_grads.unflatten(0, (shape.batch, chunk.num_blocks, shape.block)).transpose(2, 3)
                    shared += (far.view * grad_far).sum(-1)
                    grad_far.sub_(shared.unsqueeze(-1)).mul_(far.view)
                    far_grads = far_grads.to(query.dtype)
                grad_near.sub_(shared.unsqueeze(-1)).mul_(near.view)
                near_grads = grad_weights.to(query.dtype)
                grad_sinks -= (torch.exp(sink - log_total) * shared).sum((0, 1, 3))

                grad_part = operands.weighted(near_grads, far_grads, groups, chunk, factor=ctx.scale)
                grad_query[:, :, chunk.begin : chunk.end] = operands.unrows(grad_part, chunk)
                near_rows = near.rows.to(query.dtype).flatten(0, 1)
                grad_keys = _weight_and_score_grads(
                    near_rows, grad_rows.flatten(0, 1), near_grads.flatten(0, 1), rows.flatten(0, 1), ctx.scale
                )
                _overlap_add(grad_padded, grad_keys.unflatten(0, rows.shape[:2]), chunk, shape)
                if far is not None and far_grads is not None:
                    far_rows = far.rows.to(query.dtype)
                    if far.gathered is None:
                        grad_keys = _weight_and_score_grads(
                            far_rows, grad_rows.flatten(1, 2), far_grads, rows.flatten(1, 2), ctx.scale
                        )
                        grad_entries[:, : chunk.num_entries] += grad_keys
                    else:
                        grad_keys = _weight_and_score_grads(
                            far_rows,
                            operands.by_query(grad_rows, chunk),
                            far_grads,
                            operands.by_query(rows, chunk),
                            ctx.scale,
                        )
                        grad_entries.view(-1, shape.dim).index_add_(0, far.gathered, grad_keys.flatten(0, 1).to(dtype))
        unseen = max(0, -operands.front)
        grad_local = grad_padded[:, max(0, operands.front) :][:, : shape.local - unseen]
        grad = torch.cat([F.pad(grad_local, (0, 0, unseen, 0)), grad_entries], dim=1).to(keys.dtype)
        return grad_query, grad, grad_sinks.to(sinks.dtype), *[None] * 7


def _overlap_add(total: torch.Tensor, blocks: torch.Tensor, chunk: _Chunk, shape: _Shape) -> None:
    """Add ``[B, blocks, span, D]`` to the keys ``[B, padded, D]`` that they belong to; neighbours overlap."""
    length = chunk.num_blocks * shape.block
    for offset in range(0, shape.span, shape.block):
        part = blocks[:, :, offset : offset + shape.block].flatten(1, 2)
        total[:, chunk.begin + offset : chunk.begin + offset + length] += part
