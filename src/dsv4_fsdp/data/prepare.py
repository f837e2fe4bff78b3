"""From settings to batches: tokenise what is not prepared yet, once for a node, and open it on every rank.

A cache is found again by its key: the settings that shape rows, the names, sizes and times of change of the files, and
the tokenizer. The digest by which ranks are compared is of the tokens themselves, so nodes whose files differ in
content are told apart, and copies of one file are not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .batches import Batches, RowBatches, StdlibBatches
from .chat import template_text
from .errors import DataError
from .files import find_files
from .pretrain import write_documents
from .settings import PretrainSettings, RowSettings, SftSettings, StdlibSettings
from .sft import write_conversations
from .token_cache import CacheWriter, TokenCache

__all__ = ["build_cache", "load_tokenizer", "prepare", "tokenizer_notices"]

# Part of every key: a new number where the same settings and files give other rows.
_VERSION = 1

# What says how rows are dealt, or where things are, and not what is in them.
_NOT_IN_KEY = {
    "path",
    "tokenizer",
    "global_batch_size",
    "micro_batch_size",
    "balance_lengths",
    "eval_path",
    "eval_sequences",
    "cache_dir",
}


def prepare(
    settings: StdlibSettings | RowSettings,
    *,
    tokenizer: Any,
    cache_dir: Path,
    seed: int,
    is_maker: bool,
    wait: Callable[[], None],
) -> Batches:
    """The batches that ``settings`` describes. All ranks call it.

    Args:
        settings: the ``data`` section.
        tokenizer: of :func:`load_tokenizer`; ``None`` will do for ``stdlib``.
        cache_dir: where prepared tokens are kept; what is there already is used.
        seed: orders the sequences.
        is_maker: whether this process writes what is missing: the first on its node.
        wait: returns once all ranks have called it (a barrier). A maker that fails does not come to it, so whoever
            calls this must see to it that one rank's end is every rank's.

    Raises:
        DataError: what is wrong with the data, and where.
    """
    if isinstance(settings, StdlibSettings):
        return StdlibBatches(settings, seed=seed)
    _refuse_slow(tokenizer)
    paths = [settings.path] + ([settings.eval_path] if settings.eval_path is not None else [])
    folders = [cache_dir / _cache_name(settings, path, tokenizer) for path in paths]
    if is_maker:
        for path, folder in zip(paths, folders, strict=True):
            if not (folder / "about.json").exists():
                build_cache(settings, path=path, tokenizer=tokenizer, folder=folder)
    wait()
    cache, *evaluation = map(TokenCache, folders)
    return RowBatches(
        cache,
        evaluation=evaluation[0] if evaluation else None,
        settings=settings,
        seed=seed,
        pad_id=_pad_id(tokenizer),
        notices=tokenizer_notices(tokenizer),
    )


def build_cache(
    settings: RowSettings, *, path: str, tokenizer: Any, folder: Path, limit: int | None = None
) -> TokenCache:
    """Prepare what ``path`` names (no more than ``limit`` documents or conversations) in ``folder``, a new one."""
    _refuse_slow(tokenizer)
    files = find_files(path, suffixes=settings.suffixes)
    settings = settings.model_copy(update={"path": path})  # the name that errors mention
    with CacheWriter.create(folder) as writer:
        if isinstance(settings, PretrainSettings):
            write_documents(
                files,
                settings=settings,
                tokenizer=tokenizer,
                writer=writer,
                cache_dir=folder.parent / "datasets",
                limit=limit,
            )
        else:
            assert isinstance(settings, SftSettings)
            write_conversations(files, settings=settings, tokenizer=tokenizer, writer=writer, limit=limit)
    return TokenCache(folder)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in ``folder``. Nothing is downloaded. Raises ``DataError`` if there is none."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():  # Transformers would take it for the name of a model to download
        raise DataError(f"data.tokenizer: there is no folder {str(folder)!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the files, the user needs to know which
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"data.tokenizer: cannot read the tokenizer in {str(folder)!r}: {first}") from None
    _refuse_slow(tokenizer)
    return tokenizer


def tokenizer_notices(tokenizer: Any) -> tuple[str, ...]:
    """What a tokenizer asks for and does not get."""
    if tokenizer.padding_side == "right":
        return ()
    notice = (
        "the tokenizer asks for padding on the left; rows are padded on the right all the same, since compressed "
        "windows start at the left end of a row and would take the padding in"
    )
    return (notice,)


def _refuse_slow(tokenizer: Any) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"data.tokenizer: expected a fast tokenizer (with a tokenizer.json), got {type(tokenizer).__name__}"
        )


def _pad_id(tokenizer: Any) -> int:
    found = next((id for id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id is not None), 0)
    return int(found)


def _cache_name(settings: RowSettings, path: str, tokenizer: Any) -> str:
    files = [
        (str(file.resolve()), (found := file.stat()).st_size, found.st_mtime_ns)
        for file in find_files(path, suffixes=settings.suffixes)
    ]
    parts = {
        "version": _VERSION,
        "settings": settings.model_dump(mode="json", exclude=_NOT_IN_KEY),
        "files": files,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special tokens": [str(tokenizer.special_tokens_map), tokenizer.bos_token_id, tokenizer.eos_token_id],
        "template": template_text(settings.template, tokenizer=tokenizer) if isinstance(settings, SftSettings) else "",
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{settings.model_dump()['kind']}-{key[:16]}"
