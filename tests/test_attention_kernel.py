"""``windowed_attention`` against attention written out over all keys, in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dsv4_fsdp.attention import windowed
from dsv4_fsdp.attention.documents import Documents
from dsv4_fsdp.attention.windowed import Sight, windowed_attention

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, DIM = 3, 6


def dense(query: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor, *, scale: float, sight: Sight) -> torch.Tensor:
    """The slow reference: every score, a mask, one softmax with the sink as one more column."""
    batch, _, num_queries, _ = query.shape
    num_local = keys.shape[1] - sight.num_entries
    local = torch.arange(num_local)
    own = torch.arange(num_queries).unsqueeze(1) + num_local - num_queries
    sees = ((local <= own) & (local > own - sight.window)).expand(batch, -1, -1)
    if sight.real is not None:
        sees = sees & sight.real.unsqueeze(1)
    if sight.start is not None:
        sees = sees & (local >= sight.start.unsqueeze(-1))
    if sight.num_entries:
        assert sight.visible is not None
        entry = torch.arange(sight.num_entries)
        sees_entry = (entry < sight.visible.unsqueeze(-1)).expand(batch, -1, -1)
        if sight.first is not None:
            sees_entry = sees_entry & (entry >= sight.first.unsqueeze(-1))
        if sight.choice is not None:
            sees_entry = sees_entry & (sight.choice.unsqueeze(-1) == entry).any(-2)
        sees = torch.cat([sees, sees_entry], dim=-1)
    scores = torch.einsum("bhsd,btd->bhst", query, keys) * scale
    scores = scores.masked_fill(~sees.unsqueeze(1), -torch.inf)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(batch, -1, num_queries, 1)], dim=-1)
    return torch.einsum("bhst,btd->bshd", scores.softmax(-1)[..., :-1], keys)


def sight_of(case: str, batch: int, num_queries: int, window: int) -> tuple[Sight, int]:
    """A way to see, and the number of cached local keys before the first query."""
    generator = torch.Generator().manual_seed(num_queries)
    rate, entries = 4, num_queries // 4
    visible = ((torch.arange(num_queries) + 1) // rate).unsqueeze(0)
    choice = torch.rand(batch, num_queries, entries, generator=generator)
    choice = choice.masked_fill(torch.arange(entries) >= visible.unsqueeze(-1), -1).topk(min(3, entries)).indices
    choice = torch.where(choice < visible.unsqueeze(-1), choice, -1).int()
    if case == "window":
        return Sight(window), 0
    if case == "padding":
        return Sight(window, real=torch.rand(batch, num_queries, generator=generator) < 0.7), 0
    if case == "cached keys":
        past = min(5, window - 1)
        visible = torch.full((1, num_queries), 2)
        return Sight(window, 3, None, real=torch.rand(batch, past + num_queries) < 0.8, visible=visible), past
    if case == "entries":
        return Sight(window, entries, rate, visible=visible), 0
    if case == "choice":
        return Sight(window, entries, rate, visible=visible, choice=choice), 0
    positions = (torch.arange(num_queries) % 11).expand(batch, -1).clone()
    positions[-1] = torch.arange(num_queries) % 17
    documents = Documents(positions)
    windows = documents.windows(rate)
    return Sight(window, entries, rate, None, documents.start, windows.first, windows.visible), 0


CASES = ["window", "padding", "cached keys", "entries", "choice", "documents"]


@pytest.mark.parametrize("num_queries", [1, 7, 8, 9, 33, 50])
@pytest.mark.parametrize("case", CASES)
def test_blocks_give_what_all_scores_give(case: str, num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and all gradients, with blocks of 8 and chunks of one or two of them, and of the default sizes."""
    for block, chunk, gather_from in ((8, 1, 4), (8, 2000, 0), (32, 2**20, 4)):
        monkeypatch.setattr(windowed, "_BLOCK", block)
        monkeypatch.setattr(windowed, "_CHUNK_ELEMENTS_ON_CPU", chunk)
        monkeypatch.setattr(windowed, "_GATHER_FROM", gather_from)  # 0: gathers wherever there is a choice
        for window in (1, 8, 13):
            sight, past = sight_of(case, 2, num_queries, window)
            generator = torch.Generator().manual_seed(window)
            sizes = [(2, HEADS, num_queries, DIM), (2, past + num_queries + sight.num_entries, DIM), (HEADS,)]
            inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
            cotangent = torch.randn(2, num_queries, HEADS, DIM, generator=generator, dtype=torch.float64)
            found, expected = (
                _output_and_grads(function, inputs, cotangent, sight) for function in (windowed_attention, dense)
            )
            for ours, theirs in zip(found, expected, strict=True):
                # fp64: sums of some hundred terms of order one, in another order.
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def _output_and_grads(
    function: Any, inputs: list[torch.Tensor], cotangent: torch.Tensor, sight: Sight
) -> list[torch.Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*inputs, scale=0.7, sight=sight)
    return [output.detach(), *torch.autograd.grad(output, inputs, cotangent)]


# torch 2.13's dynamo makes an instance of every autograd function that it traces, and torch warns of that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("case", ["entries", "choice"])
def test_dynamo_traces_it_without_a_break(case: str) -> None:
    """One graph for forward and one for backward: no branch on data, nothing but tensor operations."""
    sight, _ = sight_of(case, 1, 50, 8)
    inputs = [torch.randn(1, HEADS, 50, DIM), torch.randn(1, 50 + sight.num_entries, DIM), torch.randn(HEADS)]

    def run(query: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return windowed_attention(query, keys, sinks, scale=0.7, sight=sight)

    cotangent = torch.randn(1, 50, HEADS, DIM)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for function in (run, compiled):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        results.append(torch.autograd.grad(function(*leaves), leaves, cotangent))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_documents_have_the_windows_that_each_would_have_alone() -> None:
    """Slots from the left, a document's incomplete last window dropped, its queries bounded on both sides."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 5]])  # documents of 5, 2 and 6 tokens
    documents = Documents(positions)
    assert documents.start.tolist() == [[0] * 5 + [5] * 2 + [7] * 6]
    windows = documents.windows(2)
    assert windows.tokens.tolist() == [[[0, 1], [2, 3], [5, 6], [7, 8], [9, 10], [11, 12]]]
    assert windows.opens_document.tolist() == [[True, False, True, True, False, False]]
    assert windows.positions.tolist() == [[0, 2, 0, 0, 2, 4]]
    assert windows.first.tolist() == [[0] * 5 + [2] * 2 + [3] * 6]
    assert windows.visible.tolist() == [[0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6]]
    assert dataclasses.asdict(documents.windows(4))["tokens"].shape == (1, 3, 4)  # two used, one left over
