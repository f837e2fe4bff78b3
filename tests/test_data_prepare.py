"""From files to rows: documents, conversations, the cache, and every mistake with its place."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tiny_tokenizer import ASSISTANT, EOS, USER, chatml_tokenizer, deepseek_tokenizer

from dsv4_fsdp.data.batches import RowBatches
from dsv4_fsdp.data.errors import DataError
from dsv4_fsdp.data.prepare import build_cache, load_tokenizer, prepare
from dsv4_fsdp.data.settings import PretrainSettings, RowSettings, SftSettings
from dsv4_fsdp.data.token_cache import CacheWriter, TokenCache

BOS_ID, EOS_ID = 256, 257


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return deepseek_tokenizer(adds_bos=True)


def pretrain(path: Path | str, **values: Any) -> PretrainSettings:
    return PretrainSettings(**{"path": str(path), "sequence_length": 8, "global_batch_size": 2} | values)


def sft(path: Path | str, **values: Any) -> SftSettings:
    return SftSettings(**{"path": str(path), "sequence_length": 64, "global_batch_size": 2} | values)


def build(settings: RowSettings, tokenizer: Any, folder: Path) -> TokenCache:
    return build_cache(settings, path=settings.path, tokenizer=tokenizer, folder=folder)


def made(settings: RowSettings, tokenizer: Any, cache_dir: Path, **kwargs: Any) -> RowBatches:
    defaults: dict[str, Any] = {"seed": 0, "is_maker": True, "wait": lambda: None}
    batches = prepare(settings, tokenizer=tokenizer, cache_dir=cache_dir, **defaults | kwargs)
    assert isinstance(batches, RowBatches)
    return batches


def json_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def document(text: str) -> list[int]:
    return [BOS_ID, *text.encode(), EOS_ID]


def turns(answer: str, question: str = "q") -> dict[str, Any]:
    return {"prompt": question, "completion": answer}


# --- Documents -------------------------------------------------------------------------------------------------------


def test_documents_are_joined_and_cut_and_every_token_is_predicted_once(tokenizer: Any, tmp_path: Path) -> None:
    """A row's last label is the next row's first input; ends of documents stay; the rest is dropped and counted."""
    path = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in ("hello world", "", "ab", "xyz" * 5)])
    cache = build(pretrain(path), tokenizer, tmp_path / "cache")
    stream = document("hello world") + document("ab") + document("xyz" * 5)
    rows = [cache.row(row)[0].tolist() for row in range(cache.num_rows)]
    assert rows == [stream[start : start + 9] for start in range(0, 25, 8)]
    assert (cache.counts.read, cache.counts.empty, cache.counts.rows) == (4, 1, 4)
    assert cache.counts.tokens == cache.counts.supervised == 32
    assert cache.counts.dropped_tokens == len(stream) - 33
    (batch,) = made(pretrain(path), tokenizer, tmp_path).micro_batches(0, rank=0, world_size=2)
    assert batch.num_supervised == 8


def test_isolated_documents_never_share_a_row(tokenizer: Any, tmp_path: Path) -> None:
    """Long ones are cut, each token is predicted once, and no label is another document's BOS."""
    texts = ["hello world", "ab", "xyz" * 5]
    path = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    cache = build(pretrain(path, isolate_documents=True), tokenizer, tmp_path / "cache")
    expected = [ids[start : start + 9] for ids in map(document, texts) for start in range(0, len(ids) - 1, 8)]
    rows = [cache.row(row)[0].tolist() for row in range(cache.num_rows)]
    assert rows == expected
    assert [cache.length(row) for row in range(cache.num_rows)] == [len(ids) - 1 for ids in rows]
    assert sum(len(ids) - 1 for ids in rows) == cache.counts.tokens == sum(len(document(text)) - 1 for text in texts)
    assert all(BOS_ID not in ids[1:] for ids in rows)


def test_text_files_are_one_document_or_many(tokenizer: Any, tmp_path: Path) -> None:
    """The whole file with its line ends, its paragraphs, or its lines."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\r\n\n \nthree\n\n\nfour")
    expected = {
        "file": ["one\ntwo\r\n\n \nthree\n\n\nfour"],
        "paragraph": ["one\ntwo", "three", "four"],
        "line": ["one", "two", "three", "four"],
    }
    for unit, texts in expected.items():
        settings = pretrain(path, text_unit=unit, isolate_documents=True, sequence_length=99)
        cache = build(settings, tokenizer, tmp_path / unit)
        assert [cache.row(row)[0].tolist() for row in range(cache.num_rows)] == list(map(document, texts))


def test_a_folder_mixes_kinds_of_files_in_the_order_of_their_names(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, JSON lines and Parquet, below each other; hidden folders are left out, and a glob picks."""
    monkeypatch.setenv("HF_DATASETS_CACHE", "/nonexistent")  # nothing is kept outside of the given folder
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / ".hidden").mkdir()
    table = pyarrow.table({"body": ["parquet 1", "parquet 2"], "n": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "data" / "b.parquet")
    json_lines(tmp_path / "data" / "sub" / "c.jsonl", [{"body": "json"}])
    (tmp_path / "data" / "a.txt").write_text("text")
    (tmp_path / "data" / ".hidden" / "d.txt").write_text("hidden")
    (tmp_path / "data" / "readme.md").write_text("no data")

    def texts(path: Path, name: str) -> list[str]:
        settings = pretrain(path, text_field="body", isolate_documents=True, sequence_length=99)
        cache = build(settings, tokenizer, tmp_path / name / "cache")
        return [bytes(cache.row(row)[0].tolist()[1:-1]).decode() for row in range(cache.num_rows)]

    assert texts(tmp_path / "data", "all") == ["text", "parquet 1", "parquet 2", "json"]
    assert texts(tmp_path / "data" / "**" / "*.jsonl", "some") == ["json"]


def test_special_tokens_in_documents_are_letters(tokenizer: Any, tmp_path: Path) -> None:
    """The one EOS of a document is the one at its end."""
    (tmp_path / "a.txt").write_text(f"a{EOS}b")
    cache = build(pretrain(tmp_path / "a.txt", isolate_documents=True, sequence_length=99), tokenizer, tmp_path / "c")
    assert cache.row(0)[0].tolist() == document(f"a{EOS}b")


def test_a_large_corpus_streams(tokenizer: Any, tmp_path: Path) -> None:
    """4 MB of text, 16 MB of token ids, and Python never holds 4 MB of either."""
    line = json.dumps({"text": "x y" * 333})
    path = tmp_path / "big.jsonl"
    path.write_text((line + "\n") * 4000)
    tracemalloc.start()
    try:
        cache = build(pretrain(path, sequence_length=512), tokenizer, tmp_path / "cache")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cache.counts.tokens > 3_900_000
    assert peak < 4_000_000


# --- Conversations ---------------------------------------------------------------------------------------------------


def test_truncation_is_counted_and_rows_without_labels_are_dropped(tokenizer: Any, tmp_path: Path) -> None:
    """Of four conversations one fits, one is cut in its answer, one loses it; or the long ones are left out."""
    path = json_lines(tmp_path / "a.jsonl", [turns("fits"), turns("a" * 99), turns("b", "q" * 99), turns("ok")])
    counts = build(sft(path), tokenizer, tmp_path / "cut").counts
    assert (counts.read, counts.rows, counts.truncated, counts.dropped_without_labels) == (4, 3, 2, 1)
    # "fits" and "ok" with EOS; the cut row is 64 positions, of which BOS, user, "q" and assistant have no label.
    assert counts.supervised == 5 + 3 + 60
    counts = build(sft(path, too_long="drop"), tokenizer, tmp_path / "dropped").counts
    assert (counts.read, counts.rows, counts.truncated, counts.dropped_too_long) == (4, 2, 0, 2)


def test_a_row_of_just_the_length_is_not_cut(tokenizer: Any, tmp_path: Path) -> None:
    """64 positions take 65 tokens: the last one is a label only."""
    path = json_lines(tmp_path / "a.jsonl", [turns("a" * 59)])
    cache = build(sft(path), tokenizer, tmp_path / "cache")
    assert (cache.length(0), cache.counts.truncated) == (64, 0)
    assert cache.row(0)[0][-1] == EOS_ID
    path = json_lines(tmp_path / "b.jsonl", [turns("a" * 60)])
    assert build(sft(path), tokenizer, tmp_path / "cut").counts.truncated == 1


def test_a_padding_token_that_is_eos_hides_no_end(tmp_path: Path) -> None:
    """Padding is known by its position (FAULTS 40)."""
    tokenizer = deepseek_tokenizer(pad_token=EOS)
    path = json_lines(tmp_path / "a.jsonl", [turns("a"), turns("b" * 9)])
    batches = made(sft(path, micro_batch_size=2), tokenizer, tmp_path)
    (batch,) = batches.micro_batches(0, rank=0, world_size=1)
    assert (batch.labels == EOS_ID).sum() == 2
    short = int(batch.lengths.argmin())
    assert (batch.input_ids[short, int(batch.lengths[short]) :] == EOS_ID).all()
    assert (batch.labels[short, int(batch.lengths[short]) :] == -100).all()


def test_left_padding_is_overridden_with_a_message(tmp_path: Path) -> None:
    """The tokenizer asks for it; rows begin with BOS all the same."""
    tokenizer = deepseek_tokenizer(padding_side="left")
    path = json_lines(tmp_path / "a.jsonl", [turns("a"), turns("b" * 9)])
    batches = made(sft(path, micro_batch_size=2), tokenizer, tmp_path)
    assert any("padding on the left; rows are padded on the right" in notice for notice in batches.notices)
    (batch,) = batches.micro_batches(0, rank=0, world_size=1)
    assert (batch.input_ids[:, 0] == BOS_ID).all()
    right = made(sft(path, micro_batch_size=2), deepseek_tokenizer(), tmp_path / "right")
    assert right.notices == ()


# --- Mistakes --------------------------------------------------------------------------------------------------------


GOOD = json.dumps(turns("a")).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (GOOD + b'{"prompt": "a", "compl\n', ":2: not JSON: Unterminated string starting at (column 17)"),
        (GOOD * 2 + b"\n[1]\n", ":4: expected a JSON object, got [1]"),
        (GOOD + b'{"prompt": "\xff"}\n', ":2: not UTF-8: byte 0xff at offset 12"),
        (GOOD + b'{"prompt": "a"}\n', ":2: expected messages, or prompt and completion; got prompt"),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}\n',
            ":1: expected roles: system or not, then user and assistant in turn",
        ),
        (b'{"messages": [{"role": "user", "content": 3}]}\n', ":1: message 1: expected content that is text, got int"),
        (b"[" * 100_000 + b"\n", ":1: nested too deeply"),
    ],
    ids=["json", "object", "utf-8", "fields", "roles", "content", "depth"],
)
def test_a_bad_line_is_one_error_with_file_and_line_and_leaves_nothing(
    tokenizer: Any, tmp_path: Path, content: bytes, problem: str
) -> None:
    """The cache folder stays as it was, so the mended file is prepared anew."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        made(sft(path), tokenizer, tmp_path / "cache")
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"{path}{problem}")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_data_with_nothing_in_it_is_an_error_that_says_what_was_read(tokenizer: Any, tmp_path: Path) -> None:
    """Blank lines only, nothing left after truncation, empty documents, less than a row."""
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"blank\.jsonl' has no conversation in it"):
        build(sft(tmp_path / "blank.jsonl"), tokenizer, tmp_path / "c")
    path = json_lines(tmp_path / "long.jsonl", [turns("a", "q" * 99)] * 2)
    with pytest.raises(DataError, match=r"none of the 2 conversations in .* is left: 0 are longer .*, 2 have nothing"):
        build(sft(path), tokenizer, tmp_path / "c")
    path = json_lines(tmp_path / "empty.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"empty\.jsonl' has no text in it \(1 documents read\)"):
        build(pretrain(path), tokenizer, tmp_path / "c")
    path = json_lines(tmp_path / "short.jsonl", [{"text": "abc"}])
    with pytest.raises(DataError, match=r"has 5 tokens, less than one row of 8 and the token after it"):
        build(pretrain(path), tokenizer, tmp_path / "c")


@pytest.mark.parametrize(
    ("row", "problem"),
    [({"body": "a"}, r":1: has no field 'text'; it has: body"), ({"text": 3}, r":1: expected text in 'text', got int")],
)
def test_a_document_without_text_is_told_with_its_line(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    """The fields that are there are named."""
    path = json_lines(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=problem):
        build(pretrain(path), tokenizer, tmp_path / "c")


def test_parquet_mistakes_name_the_file(tokenizer: Any, tmp_path: Path) -> None:
    """A missing column with those that are there, a null with its row, a file that is none."""
    table = pyarrow.table({"body": ["a", None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"a\.parquet: has no column 'text'; it has: body"):
        build(pretrain(tmp_path / "a.parquet"), tokenizer, tmp_path / "c")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: expected text in 'body', got null"):
        build(pretrain(tmp_path / "a.parquet", text_field="body"), tokenizer, tmp_path / "c")
    with pytest.raises(DataError, match=r"b\.parquet: "):
        build(pretrain(tmp_path / "b.parquet"), tokenizer, tmp_path / "c")


def test_a_full_disk_is_told_and_nothing_is_published(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written so far is removed."""
    path = json_lines(tmp_path / "a.jsonl", [turns("a")] * 3)
    write = CacheWriter.row

    def full(self: CacheWriter, start: int, num_tokens: int) -> None:
        if start:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, start, num_tokens)

    monkeypatch.setattr(CacheWriter, "row", full)
    with pytest.raises(DataError, match=r"cannot write prepared data to .*/cache: No space left on device"):
        made(sft(path), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tokenizer_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """No folder (Transformers would ask its hub), no files in it, no end of documents."""
    with pytest.raises(DataError, match=r"data\.tokenizer: there is no folder 'deepseek-ai/DeepSeek-V4'"):
        load_tokenizer("deepseek-ai/DeepSeek-V4")
    with pytest.raises(DataError, match=r"data\.tokenizer: cannot read the tokenizer in"):
        load_tokenizer(tmp_path)
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = None
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(DataError, match="it has no EOS token, so the ends of documents would be lost"):
        build(pretrain(tmp_path / "a.txt"), tokenizer, tmp_path / "c")


# --- The cache -------------------------------------------------------------------------------------------------------


def test_one_rank_prepares_and_the_others_read_what_it_made(tokenizer: Any, tmp_path: Path) -> None:
    """They come to the barrier before the cache is there, and get the same batches."""
    path = json_lines(tmp_path / "a.jsonl", [turns("a" * n) for n in range(1, 9)])
    settings = sft(path, eval_path=str(path), eval_sequences=4)
    makers: list[RowBatches] = []
    other = made(
        settings,
        tokenizer,
        tmp_path / "cache",
        is_maker=False,
        wait=lambda: makers.append(made(settings, tokenizer, tmp_path / "cache")),
    )
    assert other.digest == makers[0].digest
    assert len(list((tmp_path / "cache").iterdir())) == 1  # training and evaluation on one file are one cache
    for step in range(5):
        ours, theirs = (batches.micro_batches(step, rank=1, world_size=2) for batches in (other, makers[0]))
        assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(DataError, match="no prepared data there"):
        made(settings, tokenizer, tmp_path / "nowhere", is_maker=False)


def test_a_prepared_cache_is_used_again_until_something_changes(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for another batch size; but for other text, another tokenizer, another length or template."""
    path = json_lines(tmp_path / "a.jsonl", [turns("a" * n) for n in range(1, 9)])
    calls = 0

    def counting(*args: Any, **kwargs: Any) -> TokenCache:
        nonlocal calls
        calls += 1
        return build_cache(*args, **kwargs)

    monkeypatch.setattr("dsv4_fsdp.data.prepare.build_cache", counting)

    def builds(settings: SftSettings, tokenizer: Any = tokenizer) -> int:
        before = calls
        made(settings, tokenizer, tmp_path / "cache")
        return calls - before

    assert builds(sft(path)) == 1
    assert builds(sft(path)) == builds(sft(path, global_batch_size=8, micro_batch_size=4, balance_lengths=True)) == 0
    assert builds(sft(path, sequence_length=32)) == 1
    assert builds(sft(path, train_on="last")) == 1
    assert builds(sft(path), deepseek_tokenizer()) == 1
    template = tmp_path / "mine.jinja"
    for text in ("{{ messages[0].content }}", "{{ messages[1].content }}"):
        template.write_text(text + "{% generation %}x{% endgeneration %}")
        assert builds(sft(path, template=str(template))) == 1
    json_lines(path, [turns("other")])
    assert builds(sft(path)) == 1


def test_the_digest_is_of_the_content(tokenizer: Any, tmp_path: Path) -> None:
    """A copy elsewhere has the same, so nodes with local copies agree; one other letter has not."""
    rows = [turns("a" * n) for n in range(1, 9)]
    digests = [
        made(sft(json_lines(tmp_path / f"{name}.jsonl", content)), tokenizer, tmp_path / name).digest
        for name, content in [("a", rows), ("b", rows), ("c", [*rows[:-1], turns("b" * 8)])]
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_run_killed_while_preparing_leaves_nothing_that_counts(tokenizer: Any, tmp_path: Path) -> None:
    """What was half written is under another name; the next run prepares anew."""
    path = json_lines(tmp_path / "a.jsonl", [turns("a")])
    expected = made(sft(path), tokenizer, tmp_path / "whole").digest
    (done,) = (tmp_path / "whole").iterdir()
    half = tmp_path / "cache" / f"{done.name}.partial-00000000"
    half.mkdir(parents=True)
    (half / "tokens.bin").write_bytes(b"\0" * 10)
    assert made(sft(path), tokenizer, tmp_path / "cache").digest == expected


def test_two_writers_of_one_cache_do_no_harm(tokenizer: Any, tmp_path: Path) -> None:
    """Nodes that share a disk: the second finds it done, and leaves nothing behind."""
    path = json_lines(tmp_path / "a.jsonl", [turns("a")])
    first = build(sft(path), tokenizer, tmp_path / "caches" / "one")
    second = build(sft(path), tokenizer, tmp_path / "caches" / "one")
    assert first.digest == second.digest
    assert [found.name for found in (tmp_path / "caches").iterdir()] == ["one"]


def test_the_largest_token_is_known(tokenizer: Any, tmp_path: Path) -> None:
    """So that a model with a smaller vocabulary can be refused before it runs."""
    path = json_lines(tmp_path / "a.jsonl", [turns("a")])
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (USER, ASSISTANT, "</think>")]
    assert made(sft(path), tokenizer, tmp_path / "c").vocab_size == max(ids) + 1
