"""Who sees which sequence when: permutations, dealing, batches."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_fsdp.data.batches import Batch, Batches, RowBatches, StdlibBatches, pad_rows
from dsv4_fsdp.data.errors import DataError
from dsv4_fsdp.data.order import deal, deal_by_length, permuted, place
from dsv4_fsdp.data.settings import SftSettings, StdlibSettings
from dsv4_fsdp.data.token_cache import CacheWriter, Counts, TokenCache

# --- The order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 7, 16, 17, 99, 1000, 1023])
def test_a_permutation_hits_everything_once(num: int) -> None:
    """For sizes around squares too, where the network's cells and the sequences differ most."""
    assert sorted(permuted(position, num=num, key="k") for position in range(num)) == list(range(num))


def test_the_order_of_a_seed_is_the_same_on_every_machine() -> None:
    """Pinned, since a change would silently give a resumed run other data."""
    assert [place(position, num=10, seed=0) for position in range(20)] == PINNED
    assert sorted(PINNED[:10]) == sorted(PINNED[10:]) == list(range(10))


PINNED = [5, 6, 1, 7, 9, 8, 2, 3, 0, 4, 4, 2, 9, 3, 6, 5, 8, 7, 0, 1]


def test_a_sequence_is_equally_likely_at_every_place() -> None:
    """Over 2,000 keys, each of 12 places gets sequence 0 about 167 times; 60 is 4.8 standard deviations."""
    found = Counter(
        next(position for position in range(12) if permuted(position, num=12, key=f"{key}") == 0) for key in range(2000)
    )
    assert all(abs(count - 2000 / 12) < 60 for count in found.values())
    assert len(found) == 12


def test_neighbours_are_torn_apart() -> None:
    """Few sequences follow the one that they follow in the file: one in a thousand pairs does by chance."""
    order = [place(position, num=1000, seed=3) for position in range(1000)]
    assert sum(second == first + 1 for first, second in pairwise(order)) < 8


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (1, 4), (2, 3), (4, 1), (3, 4), (12, 1)])
def test_dealing_gives_each_place_to_one_rank(world_size: int, micro_batch_size: int) -> None:
    """In micro-batches of the size asked for, as many on every rank, by length or not."""
    lengths = [(7 * place) % 5 for place in range(12)]
    for by_length in (False, True):
        kwargs: dict[str, Any] = {"world_size": world_size, "micro_batch_size": micro_batch_size}
        dealt = [
            deal_by_length(range(12), length_of=lengths.__getitem__, rank=rank, **kwargs)
            if by_length
            else deal(12, rank=rank, **kwargs)
            for rank in range(world_size)
        ]
        assert {len(batches) for batches in dealt} == {12 // world_size // micro_batch_size}
        assert sorted(place for batches in dealt for batch in batches for place in batch) == list(range(12))
        assert {len(batch) for batches in dealt for batch in batches} == {micro_batch_size}


# --- Batches of rows -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """37 rows of 2 to 60 tokens. A row's tokens are its number, the first third of each is not supervised."""
    folder = tmp_path_factory.mktemp("cache") / "rows"
    lengths = [2 + (31 * row * row) % 59 for row in range(37)]
    with CacheWriter.create(folder) as writer:
        for row, length in enumerate(lengths):
            supervised = [int(position >= length // 3) for position in range(length)]
            writer.row(writer.tokens([row] * length, supervised), length)
        writer.finish(counts=Counts(rows=37), notices=("odd",), sequence_length=60)
    return TokenCache(folder)


def make(cache: TokenCache, *, seed: int = 5, evaluation: TokenCache | None = None, **settings: Any) -> RowBatches:
    values = {"path": "x.jsonl", "sequence_length": 60, "global_batch_size": 12} | settings
    return RowBatches(cache, evaluation=evaluation, settings=SftSettings(**values), seed=seed, pad_id=99)


def rows_of(batches: list[Batch]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch.input_ids]


@pytest.mark.parametrize("balance_lengths", [False, True])
def test_a_step_has_the_same_sequences_for_every_number_of_ranks(cache: TokenCache, balance_lengths: bool) -> None:
    """Also across the border of an epoch, and whatever the micro-batch. So a run resumes on other ranks."""
    for step in range(8):  # an epoch ends in step 3 and in step 6
        seen = []
        for world_size, micro_batch_size in [(1, 1), (2, 1), (4, 3), (3, 2), (12, 1), (1, 12)]:
            batches = make(cache, micro_batch_size=micro_batch_size, balance_lengths=balance_lengths)
            ranks = [batches.micro_batches(step, rank=rank, world_size=world_size) for rank in range(world_size)]
            assert {len(mine) for mine in ranks} == {12 // world_size // micro_batch_size}
            seen.append(sorted(row for mine in ranks for row in rows_of(mine)))
        assert all(rows == seen[0] for rows in seen)
        assert seen[0] == sorted(make(cache).sequences(step))


def test_an_epoch_has_every_sequence_once_and_the_next_one_another_order(cache: TokenCache) -> None:
    """37 sequences at 12 a step: nothing is dropped at the end of an epoch, the next one starts within the step."""
    batches = make(cache)
    line = [row for step in range(7) for row in batches.sequences(step)]
    assert sorted(line[:37]) == sorted(line[37:74]) == list(range(37))
    assert line[:37] != line[37:74]
    assert (batches.num_sequences, batches.steps_per_epoch) == (37, 4)


def test_batches_depend_on_seed_and_step_only(cache: TokenCache) -> None:
    """Asked for in any order, by any object."""
    one, other = make(cache), make(cache)
    backwards = {step: other.micro_batches(step, rank=1, world_size=2) for step in reversed(range(5))}
    for step in range(5):
        for ours, theirs in zip(one.micro_batches(step, rank=1, world_size=2), backwards[step], strict=True):
            assert torch.equal(ours.input_ids, theirs.input_ids)
            assert torch.equal(ours.labels, theirs.labels)
    assert make(cache, seed=6).sequences(0) != one.sequences(0)


def test_the_digest_tells_what_changes_the_order_and_nothing_else(cache: TokenCache) -> None:
    """A run may go on with other ranks and micro-batches, not with another seed or batch."""
    same = {make(cache, micro_batch_size=m, balance_lengths=b).digest for m in (1, 2) for b in (False, True)}
    assert len(same) == 1
    others = {make(cache, seed=6).digest, make(cache, global_batch_size=24).digest}
    others |= {make(cache, evaluation=cache).digest}
    assert len(others | same) == 4


def test_balanced_ranks_wait_less(cache: TokenCache) -> None:
    """What ranks wait for the largest of each forward, in shares of all tokens: 21 % instead of 52 % at 3 forwards."""

    def waste(balance_lengths: bool) -> float:
        batches = make(cache, balance_lengths=balance_lengths)
        waiting = tokens = 0
        for step in range(6):
            ranks = [batches.micro_batches(step, rank=rank, world_size=4) for rank in range(4)]
            for forward in zip(*ranks, strict=True):
                sizes = [batch.input_ids.numel() for batch in forward]
                waiting += sum(max(sizes) - size for size in sizes)
                tokens += sum(batch.num_tokens for batch in forward)
        return waiting / tokens

    plain, balanced = waste(False), waste(True)
    assert balanced < plain / 2, (plain, balanced)


def test_labels_are_the_next_tokens_where_supervised_and_padding_is_right_and_known_by_position(
    tmp_path: Path,
) -> None:
    """A padding token equal to EOS hides no EOS: the label of the last input is there (FAULTS 40)."""
    eos = 9
    with CacheWriter.create(tmp_path / "c") as writer:
        for ids in ([1, 2, 3, eos], [1, 4, eos, 5, 6, eos]):
            writer.row(writer.tokens(ids, [0, 0, *[1] * (len(ids) - 2)]), len(ids))
        writer.finish(counts=Counts(rows=2), notices=(), sequence_length=8)
    settings = SftSettings(path="x.jsonl", sequence_length=8, global_batch_size=2, micro_batch_size=2)
    batches = RowBatches(TokenCache(tmp_path / "c"), evaluation=None, settings=settings, seed=0, pad_id=eos)
    (batch,) = batches.micro_batches(0, rank=0, world_size=1)
    rows = dict(
        zip(batch.lengths.tolist(), zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True), strict=True)
    )
    assert rows[3] == ([1, 2, 3, eos, eos], [-100, 3, eos, -100, -100])
    assert rows[5] == ([1, 4, eos, 5, 6], [-100, eos, 5, 6, eos])
    assert (batch.num_supervised, batch.num_tokens) == (6, 8)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


def test_a_batch_that_cannot_be_dealt_is_an_error_of_one_line(cache: TokenCache) -> None:
    """Before anything is computed."""
    batches: Batches = make(cache, micro_batch_size=3)
    batches.check(4)
    with pytest.raises(DataError) as caught:
        batches.check(8)
    (problem,) = caught.value.problems
    assert problem == (
        "data.global_batch_size: 12 sequences cannot be dealt evenly to 8 ranks x micro_batch_size 3; "
        "give a multiple of 24"
    )
    with pytest.raises(DataError, match="12 sequences cannot be dealt evenly to 5 ranks; give a multiple of 5"):
        make(cache).micro_batches(0, rank=0, world_size=5)


@pytest.mark.parametrize(("eval_sequences", "num"), [(None, 37), (10, 10), (1, 1), (500, 37)])
def test_evaluation_has_each_sequence_once_and_as_many_batches_on_every_rank(
    cache: TokenCache, eval_sequences: int | None, num: int
) -> None:
    """Ranks that have run out run through batches without labels."""
    for world_size, micro_batch_size in [(1, 1), (2, 4), (4, 1), (8, 2)]:
        batches = make(
            cache,
            evaluation=cache,
            eval_path="x.jsonl",
            eval_sequences=eval_sequences,
            global_batch_size=16,
            micro_batch_size=micro_batch_size,
        )
        ranks = [batches.eval_batches(rank, world_size) for rank in range(world_size)]
        assert {len(mine) for mine in ranks} == {-(-num // (world_size * micro_batch_size))}
        counted = [row for mine in ranks for row in rows_of([batch for batch in mine if batch.num_supervised])]
        assert sorted(counted) == list(range(num))
    assert make(cache).eval_batches(0, 2) == []


def test_a_fully_masked_batch_has_no_supervised_token() -> None:
    """And cross-entropy summed over it is zero with a gradient, not NaN."""
    batch = pad_rows([(np.array([1, 2]), np.array([2, 3]))], pad_id=0).without_labels()
    assert batch.num_supervised == 0
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


# --- The standard library's text -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stdlib() -> StdlibBatches:
    return StdlibBatches(StdlibSettings(sequence_lengths=(64, 256), batch_tokens=512, eval_sequences=3), seed=0)


def test_stdlib_gives_rank_r_of_w_position_step_times_w_plus_r(stdlib: StdlibBatches) -> None:
    """Its own tokens, each labelled with the next one; the last of a row has none."""
    for step, rank, world_size in [(0, 0, 1), (3, 1, 2), (5, 3, 4)]:
        (batch,) = stdlib.micro_batches(step, rank=rank, world_size=world_size)
        tokens = stdlib.text.batch(step * world_size + rank)
        assert torch.equal(batch.input_ids, tokens)
        assert torch.equal(batch.labels[:, :-1], tokens[:, 1:])
        assert (batch.labels[:, -1] == -100).all()
        assert batch.num_supervised == tokens.numel() - len(tokens)
        assert batch.num_tokens == tokens.numel()


def test_stdlib_with_a_global_batch_accumulates_the_same_positions_on_any_number_of_ranks() -> None:
    """Four positions a step: one, two or four ranks take them."""
    settings = StdlibSettings(sequence_lengths=(64,), batch_tokens=64, global_batch_size=4)
    batches = StdlibBatches(settings, seed=0)
    expected = sorted(batches.text.batch(position).flatten().tolist() for position in range(8, 12))
    for world_size in (1, 2, 4):
        ranks = [batches.micro_batches(2, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert {len(mine) for mine in ranks} == {4 // world_size}
        assert sorted(batch.input_ids.flatten().tolist() for mine in ranks for batch in mine) == expected
    with pytest.raises(DataError, match="4 sequences cannot be dealt evenly to 3 ranks"):
        batches.check(3)


def test_stdlib_evaluates_on_rows_that_training_does_not_draw(stdlib: StdlibBatches) -> None:
    """Positions below zero; three of them on two ranks are two batches each, one without labels."""
    ranks = [stdlib.eval_batches(rank, 2) for rank in range(2)]
    assert [[batch.num_supervised > 0 for batch in mine] for mine in ranks] == [[True, True], [True, False]]
    assert torch.equal(ranks[0][1].input_ids, stdlib.text.batch(-3))
