"""The compressors and the Lightning Indexer for windowed attention: same values as eager's, no ``[S, T]`` tensors.

Transformers' compressors return their entries and a bias ``[B, 1, S, T]`` that says who sees them; its indexer computes
``[B, S, heads, T]`` scores at once. Here the bias is replaced by two bounds per query and the indexer's choice, and the
indexer scores blocks of queries with the entries that they can see. Where eager's result is a matter of rounding (the
pooled entries) or of ties (top-k), the operations and their order are eager's.

The indexer reaches the loss through top-k only, so it runs without a graph; and where a query can see no more entries
than the indexer may choose, it does not run at all. A recomputed block keeps its choice, and its entries if no gradient
goes through them (:mod:`dsv4_fsdp.recomputation`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from dsv4_fsdp.chunk_sizes import are_for_cpu
from dsv4_fsdp.recomputation import keep

from .documents import Documents

__all__ = ["Entries", "choose_entries", "compress_heavily", "compress_sparsely"]

# Index scores of one block, in elements ([B, queries, heads, T]); see windowed.py for the two of them.
_SCORE_ELEMENTS_ON_CPU = 2**21
_SCORE_ELEMENTS = 2**26


class Entries(NamedTuple):
    """The compressed entries that a call's queries may see; the fields are those of ``windowed.Sight``."""

    num_entries: int
    rate: int | None
    first: torch.Tensor | None
    visible: torch.Tensor
    choice: torch.Tensor | None = None


def compress_heavily(
    compressor: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor, documents: Documents | None, cache: Any
) -> tuple[torch.Tensor, Entries]:
    """HCA: one entry per window. Entries ``[B, 1, T, D]``, and who sees them.

    Args:
        compressor: a ``DeepseekV4HCACompressor``.
        hidden_states: ``[B, S, hidden]``.
        position_ids: ``[1 or B, S]``; read with a cache only.
        documents: ``None``: each row is one document, from position 0 on.
        cache: the layer's part of a key-value cache; it goes with ``documents=None``.
    """
    entries = _entries(compressor, hidden_states, documents, cache, overlap=False)
    return entries.unsqueeze(1), _visibility(compressor, entries, position_ids, documents, cache, hidden_states)


def compress_sparsely(
    compressor: Any,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    documents: Documents | None,
    cache: Any,
    *,
    run_indexer: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, Entries]:
    """CSA: one entry per window and the one before, and the indexer's choice, for a ``DeepseekV4CSACompressor``.

    ``run_indexer()`` calls the indexer as a module, so that its hooks see it. A block that runs again leaves the call
    out where the indexer is frozen; where it is not, a loss of the caller's may hang on it.
    """
    entries = _entries(compressor, hidden_states, documents, cache, overlap=True)
    seen = _visibility(compressor, entries, position_ids, documents, cache, hidden_states)
    # A cached indexer keeps what it is shown, so it must be shown everything.
    if cache is not None or entries.shape[1] > compressor.indexer.index_topk:
        once = cache is None and _is_frozen(compressor.indexer)
        choice = keep(compressor.indexer, run_indexer) if once else run_indexer()
        if entries.shape[1] > compressor.indexer.index_topk:
            seen = seen._replace(choice=choice)
    return entries.unsqueeze(1), seen


@torch.no_grad()
def choose_entries(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    documents: Documents | None,
    cache: Any,
) -> torch.Tensor:
    """The entries with the highest index scores: int32 ``[B, S, min(index_topk, T)]``, -1 where fewer are visible.

    Equal scores are told apart as ``torch.topk`` does it, which is eager's way too.
    """
    keys = _pooled(indexer, "indexer", hidden_states, documents, cache, overlap=True)
    seen = _visibility(indexer, keys, position_ids, documents, cache, hidden_states)
    batch, num_queries, _ = hidden_states.shape
    num_entries = keys.shape[1]
    num_chosen = min(indexer.index_topk, num_entries)
    elements = _SCORE_ELEMENTS_ON_CPU if are_for_cpu(hidden_states.device) else _SCORE_ELEMENTS
    keys = keys.float().transpose(1, 2)
    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    scorer = indexer.scorer
    blocks = []
    step = max(1, elements // max(1, batch * indexer.num_heads * num_entries))
    for begin in range(0, num_queries, step):
        end = min(num_queries, begin + step)
        visible = seen.visible[:, begin:end].unsqueeze(-1)
        first = 0 if seen.first is None else seen.first[:, begin:end].unsqueeze(-1)
        width = num_entries if seen.rate is None else min(num_entries, end // seen.rate)
        if width <= num_chosen:  # all that is visible is chosen
            index = torch.arange(num_chosen, device=keys.device)
            chosen = index.expand(batch, end - begin, -1)
        else:
            query = indexer.q_b_proj(q_residual[:, begin:end]).unflatten(-1, (-1, indexer.head_dim))
            query = apply_rotary_pos_emb(query, cos[:, begin:end], sin[:, begin:end], unsqueeze_dim=2)
            scores = torch.matmul(query.float().flatten(1, 2), keys[..., :width]).unflatten(1, query.shape[1:3])
            weights = scorer.weights_proj(hidden_states[:, begin:end]).float() * scorer.weights_scaling
            scores = scores.relu_().mul_(scorer.softmax_scale).mul_(weights.unsqueeze(-1)).sum(dim=2)
            index = torch.arange(width, device=keys.device)
            scores.masked_fill_((index >= visible) | (index < first), -torch.inf)
            # Ties depend on the length of what top-k looks through, so it gets eager's.
            scores = nn.functional.pad(scores, (0, num_entries - width), value=-torch.inf)
            chosen = scores.topk(num_chosen, dim=-1).indices
        blocks.append(torch.where((chosen < visible) & (chosen >= first), chosen, -1).int())
    return torch.cat(blocks, dim=1)


def _is_frozen(module: nn.Module) -> bool:
    return not any(param.requires_grad for param in module.parameters())


def _entries(
    compressor: Any, hidden_states: torch.Tensor, documents: Documents | None, cache: Any, *, overlap: bool
) -> torch.Tensor:
    """A compressor's entries, pooled in both runs of a recomputed block only if a gradient goes through them.

    With a cache they always are: pooling writes there.
    """

    def pool() -> torch.Tensor:
        return _pooled(compressor, "compressor", hidden_states, documents, cache, overlap=overlap)

    if cache is None and not hidden_states.requires_grad and _is_frozen(compressor):
        return keep(compressor, pool)
    return pool()


def _visibility(
    module: Any,
    entries: torch.Tensor,
    position_ids: torch.Tensor,
    documents: Documents | None,
    cache: Any,
    hidden_states: torch.Tensor,
) -> Entries:
    """A query sees the entries whose window its own token or an earlier one completes."""
    rate, num_entries, num_queries = module.compress_rate, entries.shape[1], hidden_states.shape[1]
    if documents is not None:
        windows = documents.windows(rate)
        return Entries(num_entries, rate, windows.first, windows.visible)
    if cache is None:
        index = torch.arange(1, num_queries + 1, device=entries.device)
        return Entries(num_entries, rate, None, (index // rate).unsqueeze(0))
    # With a cache eager goes by `position_ids`, which fall behind the entries where a batch is padded on the left.
    return Entries(num_entries, None, None, ((position_ids + 1) // rate).clamp(max=num_entries))


def _pooled(
    module: Any, name: str, hidden_states: torch.Tensor, documents: Documents | None, cache: Any, *, overlap: bool
) -> torch.Tensor:
    """The entries of complete windows, ``[B, T, head_dim]``: those of a cache first, then the new ones.

    ``module`` is a compressor or an indexer; they name their projections alike.
    """
    rate, dim = module.compress_rate, module.head_dim
    kv, gate = module.kv_proj(hidden_states), module.gate_proj(hidden_states)
    position = 0
    if cache is not None:
        kv, gate, position = cache.store_compression_weights(name, kv, gate)
    windows = None if documents is None else documents.windows(rate)
    num_windows = kv.shape[1] // rate if windows is None else windows.tokens.shape[1]
    if num_windows == 0:
        entries = kv.new_zeros((kv.shape[0], 0, dim))
    else:
        kv, gate = _cut(kv, rate, windows), _cut(gate, rate, windows) + module.position_bias
        if overlap:
            kv, gate = _with_previous(kv, gate, name, dim, None if windows is None else windows.opens_document, cache)
        weights = gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)
        entries = module.kv_norm((kv * weights).sum(dim=2))
        if windows is None:
            positions = (torch.arange(num_windows, device=kv.device) * rate + position).expand(kv.shape[0], -1)
        else:
            positions = windows.positions
        cos, sin = module.rotary_emb(entries, position_ids=positions, layer_type=module.rope_layer_type)
        entries = apply_rotary_pos_emb(entries.unsqueeze(1), cos, sin).squeeze(1)
    return entries if cache is None else cache.update_compressor_states(name, entries)


def _cut(tokens: torch.Tensor, rate: int, windows: Any) -> torch.Tensor:
    """``[B, S, F]`` -> ``[B, T, rate, F]``."""
    _, num_tokens, features = tokens.shape
    if windows is None:
        return tokens[:, : num_tokens // rate * rate].unflatten(1, (-1, rate))
    index = windows.tokens.flatten(1).unsqueeze(-1).expand(-1, -1, features)
    return tokens.gather(1, index).unflatten(1, (-1, rate))


def _with_previous(
    kv: torch.Tensor, gate: torch.Tensor, name: str, dim: int, opens_document: torch.Tensor | None, cache: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """CSA's two series: the first half of the previous window's features, then the second half of the window's own.

    ``[B, T, rate, 2 * dim]`` -> ``[B, T, 2 * rate, dim]``. What has no window before it gets a gate of ``-inf`` there.
    """
    before_kv, before_gate = torch.zeros_like(kv[:, :1, :, :dim]), torch.full_like(gate[:, :1, :, :dim], -torch.inf)
    if cache is not None:
        prior_kv, prior_gate = cache.update_overlap_state(name, kv, gate, dim)
        if prior_kv is not None:
            before_kv, before_gate = prior_kv.unsqueeze(1).to(kv.dtype), prior_gate.unsqueeze(1).to(gate.dtype)
    previous_kv = torch.cat([before_kv, kv[:, :-1, :, :dim]], dim=1)
    previous_gate = torch.cat([before_gate, gate[:, :-1, :, :dim]], dim=1)
    if opens_document is not None:
        opens = opens_document[:, :, None, None]
        previous_kv = previous_kv.masked_fill(opens, 0)
        previous_gate = previous_gate.masked_fill(opens, -torch.inf)
    return torch.cat([previous_kv, kv[..., dim:]], dim=2), torch.cat([previous_gate, gate[..., dim:]], dim=2)
