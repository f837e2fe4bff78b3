"""Documents that share rows: which go together, what a batch says of them, and that preparing them is as before."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import deepseek_tokenizer

from dsv4_fsdp.data.batches import Batch, RowBatches
from dsv4_fsdp.data.errors import DataError
from dsv4_fsdp.data.packing import OPEN_ROWS, Packer
from dsv4_fsdp.data.prepare import build_cache, prepare
from dsv4_fsdp.data.settings import PretrainSettings, RowSettings, SftSettings
from dsv4_fsdp.data.token_cache import TokenCache
from dsv4_fsdp.train.config import ConfigError, resolve

BOS_ID, EOS_ID, PAD_ID = 256, 257, 257

# --- Which documents go together -------------------------------------------------------------------------------------


def packed(sizes: list[int], *, length: int) -> list[list[tuple[int, int]]]:
    """Rows of (start, number of tokens); a document starts where the one before ends."""
    rows: list[list[tuple[int, int]]] = []
    packer = Packer(length=length, write_row=rows.append)
    start = 0
    for size in sizes:
        packer.add(start, size)
        start += size
    packer.finish()
    return rows


def lengths(kind: str, num: int, *, longest: int) -> list[int]:
    rng = random.Random(f"{kind} {num}")
    draw = {
        "even": lambda: rng.randint(2, longest + 1),
        "short": lambda: min(longest + 1, 2 + int(rng.lognormvariate(4, 1))),
        "whole": lambda: longest + 1,
        "over half": lambda: longest // 2 + 2,
        "single": lambda: 2,
    }[kind]
    return [draw() for _ in range(num)]


@pytest.mark.parametrize("kind", ["even", "short", "whole", "over half", "single"])
@pytest.mark.parametrize("num", [1, 7, 3000])
def test_every_document_is_in_one_row_and_no_row_is_too_long(kind: str, num: int) -> None:
    """Whole, once, and in the order of the data within its row; the same rows every time."""
    sizes = lengths(kind, num, longest=500)
    rows = packed(sizes, length=500)
    found = [document for row in rows for document in row]
    assert Counter(size for _, size in found) == Counter(sizes)
    assert sum(start for start, _ in found) == sum(sum(sizes[:n]) for n in range(num))
    assert len({start for start, _ in found}) == num
    assert all(sum(size - 1 for _, size in row) <= 500 for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert packed(sizes, length=500) == rows


@pytest.mark.parametrize(
    ("kind", "num", "least"), [("short", 3000, 0.995), ("even", 3000, 0.96), ("even", 20_000, 0.98), ("whole", 50, 1.0)]
)
def test_rows_are_nearly_full(kind: str, num: int, least: float) -> None:
    """The best that any packing can reach is 1."""
    sizes = lengths(kind, num, longest=500)
    fill = sum(size - 1 for size in sizes) / (500 * len(packed(sizes, length=500)))
    assert fill >= least


def test_no_more_rows_are_open_than_promised() -> None:
    """Documents of which no two fit into one row: a row is closed for each that comes."""
    rows: list[Any] = []
    packer = Packer(length=100, write_row=rows.append)
    for number in range(3 * OPEN_ROWS):
        packer.add(52 * number, 52 + number % 2)
    assert len(rows) == 2 * OPEN_ROWS
    packer.finish()
    assert len(rows) == 3 * OPEN_ROWS


def test_the_rows_of_given_lengths_are_pinned() -> None:
    """Since a cache is found again by its settings: other rows need another ``prepare._VERSION``."""
    rows = [[size for _, size in row] for row in packed([6, 4, 9, 3, 3, 11, 2, 5, 7], length=10)]
    assert rows == [[6, 4, 3], [9, 3], [11], [7], [2, 5]]


# --- From files to batches -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return deepseek_tokenizer(adds_bos=True)


def json_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TEXTS = ["hello world", "", "ab", "x" * 75, *(chr(97 + n) * (3 * n % 29 + 1) for n in range(26))]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return json_lines(tmp_path_factory.mktemp("texts") / "a.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": chr(97 + n), "completion": chr(65 + n) * (5 * n % 31 + 1)} for n in range(26)]
    rows += [{"prompt": "q" * 99, "completion": "lost"}, {"prompt": "q", "completion": "z" * 99}]
    return json_lines(tmp_path_factory.mktemp("conversations") / "a.jsonl", rows)


def pretrain(path: Path, **values: Any) -> PretrainSettings:
    return PretrainSettings(**{"path": str(path), "sequence_length": 32, "global_batch_size": 4} | values)


def sft(path: Path, **values: Any) -> SftSettings:
    return SftSettings(**{"path": str(path), "sequence_length": 64, "global_batch_size": 4} | values)


def build(settings: RowSettings, tokenizer: Any, folder: Path) -> TokenCache:
    return build_cache(settings, path=settings.path, tokenizer=tokenizer, folder=folder)


def made(settings: RowSettings, tokenizer: Any, cache_dir: Path) -> RowBatches:
    batches = prepare(settings, tokenizer=tokenizer, cache_dir=cache_dir, seed=0, is_maker=True, wait=lambda: None)
    assert isinstance(batches, RowBatches)
    return batches


def documents(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Inputs and labels of each document, taken apart by positions, which must restart at each and nowhere else."""
    assert batch.position_ids is not None
    found = []
    rows = zip(batch.input_ids, batch.labels, batch.position_ids, batch.lengths.tolist(), strict=True)
    for ids, labels, positions, length in rows:
        starts = [place for place in range(length) if positions[place] == 0]
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            assert positions[start:end].tolist() == list(range(end - start))
            found.append((ids[start:end].tolist(), labels[start:end].tolist()))
        # Padding: no token is the successor of another, and none is learned from.
        assert not positions[length:].any()
        assert (ids[length:] == PAD_ID).all()
        assert (labels[length:] == -100).all()
    return found


def epoch(batches: RowBatches) -> list[tuple[list[int], list[int]]]:
    return [found for row in range(batches.num_sequences) for found in documents(batches.row(row))]


def alone(batches: RowBatches) -> list[tuple[list[int], list[int]]]:
    """The same of batches whose rows are single documents."""
    rows = [batches.row(row) for row in range(batches.num_sequences)]
    assert all(row.position_ids is None for row in rows)
    return [(row.input_ids[0].tolist(), row.labels[0].tolist()) for row in rows]


def test_packed_documents_are_those_that_would_have_rows_of_their_own(
    tokenizer: Any, texts: Path, tmp_path: Path
) -> None:
    """Long ones in the same pieces; inputs and labels to the token, so no label is another document's BOS."""
    together = made(pretrain(texts, pack=True), tokenizer, tmp_path / "packed")
    apart = made(pretrain(texts, isolate_documents=True), tokenizer, tmp_path / "isolated")
    assert sorted(epoch(together)) == sorted(alone(apart))
    assert all(BOS_ID not in labels for _, labels in epoch(together))
    assert sum(labels[-1] == EOS_ID for _, labels in epoch(together)) == len(TEXTS) - 1
    ours, theirs = together.counts, apart.counts
    assert (ours.read, ours.empty, ours.dropped_tokens, ours.tokens) == (30, 1, 0, theirs.tokens)
    assert (ours.packed, ours.room) == (theirs.rows, 32 * ours.rows)
    assert ours.rows < theirs.rows
    assert ours.fill_rate == ours.tokens / ours.room > 0.9
    assert str(ours).startswith(f"{ours.rows} rows of 30 read, {ours.packed} packed into them, {ours.fill_rate:.1%} ")


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_packed_conversations_are_those_that_would_have_rows_of_their_own(
    tokenizer: Any, conversations: Path, tmp_path: Path, too_long: str
) -> None:
    """With their labels; what is too long or has lost its labels is treated and counted as without packing."""
    together = made(sft(conversations, too_long=too_long, pack=True), tokenizer, tmp_path / "packed")
    apart = made(sft(conversations, too_long=too_long), tokenizer, tmp_path / "apart")
    assert sorted(epoch(together)) == sorted(alone(apart))
    ours, theirs = together.counts, apart.counts
    for name in ("read", "truncated", "dropped_too_long", "dropped_without_labels", "tokens", "supervised"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.packed, theirs.packed, theirs.fill_rate) == (theirs.rows, 0, None)
    assert ours.rows < theirs.rows


def test_a_packed_step_is_the_same_for_every_number_of_ranks(
    tokenizer: Any, conversations: Path, tmp_path: Path
) -> None:
    """And micro-batch, and by length or not: each document once, at its own positions."""
    for step in range(3):
        seen = []
        for world_size, micro_batch_size, balance in [(1, 1, False), (2, 1, True), (4, 1, False), (2, 2, False)]:
            settings = sft(conversations, pack=True, micro_batch_size=micro_batch_size, balance_lengths=balance)
            batches = made(settings, tokenizer, tmp_path)
            ranks = [batches.micro_batches(step, rank=rank, world_size=world_size) for rank in range(world_size)]
            seen.append(sorted(found for mine in ranks for batch in mine for found in documents(batch)))
        assert all(found == seen[0] for found in seen)
    assert len(list(tmp_path.iterdir())) == 1


def test_evaluation_is_packed_too(tokenizer: Any, conversations: Path, tmp_path: Path) -> None:
    """Ranks that have run out keep their positions and lose their labels."""
    settings = sft(conversations, pack=True, eval_path=str(conversations), global_batch_size=8)
    batches = made(settings, tokenizer, tmp_path)
    assert batches.num_sequences % 4
    ranks = [batches.eval_batches(rank, 4) for rank in range(4)]
    counted = [batch for mine in ranks for batch in mine if batch.num_supervised]
    assert sorted(found for batch in counted for found in documents(batch)) == sorted(epoch(batches))
    (idle, *_) = [batch for mine in ranks for batch in mine if not batch.num_supervised]
    assert idle.position_ids is not None
    assert torch.equal(idle.position_ids, ranks[0][0].position_ids)
    moved = idle.to(torch.device("meta"))
    assert moved.position_ids is not None
    assert moved.position_ids.is_meta


def test_some_rows_to_evaluate_on_are_a_sample(tokenizer: Any, tmp_path: Path) -> None:
    """The first ones would be the longest documents alone. The same for every seed."""
    texts = [{"text": "a" * (40 if i % 2 else 5)} for i in range(80)]
    path = json_lines(tmp_path / "a.jsonl", texts)
    settings = pretrain(path, pack=True, sequence_length=41, eval_path=str(path), eval_sequences=6)
    batches = made(settings, tokenizer, tmp_path / "cache")
    evaluated = [found for batch in batches.eval_batches(0, 1) for found in documents(batch)]
    assert any(len(tokens) < 10 for tokens, _ in evaluated)
    assert max(len(documents(batches.row(row))) for row in range(6)) == 1
    other = RowBatches(batches._cache, evaluation=batches._evaluation, settings=settings, seed=7, pad_id=0)
    assert [b.input_ids.tolist() for b in other.eval_batches(0, 1)] == [
        b.input_ids.tolist() for b in batches.eval_batches(0, 1)
    ]


def test_a_cache_without_packing_is_not_taken_for_a_packed_one(
    tokenizer: Any, texts: Path, conversations: Path, tmp_path: Path
) -> None:
    """Another folder, another digest; and the same one again for the same settings."""
    pairs: list[tuple[RowSettings, RowSettings]] = [
        (pretrain(texts), pretrain(texts, pack=True)),
        (pretrain(texts, isolate_documents=True), pretrain(texts, pack=True)),
        (sft(conversations), sft(conversations, pack=True)),
    ]
    for number, (plain, packs) in enumerate(pairs):
        cache_dir = tmp_path / str(number)
        first, *others = [made(each, tokenizer, cache_dir) for each in (plain, packs, plain, packs)]
        assert [each.digest == first.digest for each in others] == [False, True, False]
        assert len(list(cache_dir.iterdir())) == 2
        assert first.row(0).position_ids is None
        assert others[0].row(0).position_ids is not None


def test_which_documents_share_a_row_is_in_the_digest(tokenizer: Any, tmp_path: Path) -> None:
    """The same tokens in the same order, cut into other rows."""
    path = json_lines(tmp_path / "a.jsonl", [{"text": "a" * 9}] * 6)
    digests = {
        length: build(pretrain(path, pack=True, sequence_length=length), tokenizer, tmp_path / str(length)).digest
        for length in (10, 20, 30)
    }
    assert len(set(digests.values())) == 3


def test_a_damaged_packed_cache_is_refused(tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    """Without its file of packed rows, its documents must not pass for rows."""
    build(pretrain(texts, pack=True), tokenizer, tmp_path / "cache")
    (tmp_path / "cache" / "packed.bin").unlink()
    with pytest.raises(DataError, match=r"damaged: \d+ rows where \d+ were written; remove it"):
        TokenCache(tmp_path / "cache")
    os.truncate(tmp_path / "cache" / "tokens.bin", 400)
    with pytest.raises(DataError, match=r"damaged: tokens.bin has not the [\d,]+ bytes written; remove it"):
        TokenCache(tmp_path / "cache")


def test_a_large_corpus_streams_into_packed_rows(tokenizer: Any, tmp_path: Path) -> None:
    """4 MB of text, 16 MB of token ids, and Python never holds 4 MB of either."""
    lines = [json.dumps({"text": "x y" * (1 + 97 * n % 333)}) for n in range(4000)]
    path = tmp_path / "big.jsonl"
    path.write_text("\n".join(lines * 2))
    tracemalloc.start()
    try:
        cache = build(pretrain(path, pack=True, sequence_length=512), tokenizer, tmp_path / "cache")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cache.counts.tokens > 3_900_000
    assert cache.counts.fill_rate is not None
    assert cache.counts.fill_rate > 0.98
    assert peak < 4_000_000


# --- What is refused -------------------------------------------------------------------------------------------------


def test_packing_with_eager_attention_is_refused_before_anything_is_read() -> None:
    """Neither model nor data are there; with windowed attention the settings are fine."""
    values = {
        "model.path": "/no/model",
        "data.kind": "sft",
        "data.path": "/no/data.jsonl",
        "data.sequence_length": "64",
        "data.global_batch_size": "4",
        "data.pack": "true",
    }
    assert resolve(values).data.pack
    with pytest.raises(ConfigError) as caught:
        resolve(values | {"model.attention": "eager"})
    (problem,) = caught.value.problems
    assert problem == (
        "data.pack: only model.attention windowed keeps the documents of a row apart, not eager, whose compressed "
        "entries reach from one into the next; give windowed, or data.pack false"
    )
    assert not resolve(values | {"model.attention": "eager", "data.pack": "false"}).data.pack
