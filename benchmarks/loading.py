"""Ways to load a checkpoint into a sharded model: peak memory per rank against its shards, and seconds per GB.

    python benchmarks/loading.py
    python benchmarks/loading.py --ranks 2 4 --repeats 1 --hidden-size 256

Two checkpoints of a random Transformers DeepSeek-V4, written a moment before (so the files are in the page cache:
reading them costs copies, not a disk): ``save_pretrained``'s, bf16 with fp32 islands, and the release's layout, FP8
blocks and packed FP4 experts, which become bf16 in memory (transformers 5.24 does not load that one sharded by itself,
docs/log.md). Each run has fresh processes; the ways take turns. Memory is anonymous resident memory beyond what a rank
held before, the highest of a watch every 2 ms and of all runs and ranks; pages of mapped files do not count. Seconds
are the slowest rank's, median and quartiles, over the size that the whole model has in memory; ratios are medians of
those within a turn. All ways end with the same parameters, as a checksum over all ranks confirms.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from measuring import ROOT, page, paired_ratio, spread, table

sys.path.insert(0, str(ROOT / "tests"))

import tiny_checkpoints
import transformers.models.deepseek_v4.modeling_deepseek_v4  # noqa: F401  (here, so that ranks are forked with it)
from loading_ranks import NATIVE, OURS, WHOLE, Loaded, load
from tiny_models import tiny_transformers

from pool import close_pool, run_ranks

WAYS = (OURS, WHOLE, NATIVE)


def write_checkpoints(folder: Path, *, hidden_size: int) -> dict[str, Path]:
    """Four blocks with 16 experts each (230 MB in bf16 at width 512), as Transformers saves it and as DeepSeek does."""
    build: Any = functools.partial(
        tiny_transformers,
        hidden_size=hidden_size,
        moe_intermediate_size=3 * hidden_size // 2,
        n_routed_experts=16,
        q_lora_rank=hidden_size // 4,
    )
    build(vocab_size=64 * hidden_size).save_pretrained(folder / "bf16", max_shard_size="100MB")
    tiny_checkpoints.released_model.cache_clear()
    with mock.patch.object(tiny_checkpoints, "tiny_transformers", build):
        tiny_checkpoints.release_checkpoint(folder / "release")
    tiny_checkpoints.released_model.cache_clear()
    return {"bf16": folder / "bf16", "release, FP8 and FP4": folder / "release"}


def loading_table(ranks: Sequence[int], *, hidden_size: int, repeats: int) -> str:
    """The table as Markdown."""
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for form, folder in write_checkpoints(Path(root), hidden_size=hidden_size).items():
            for world_size in ranks:
                rows += _rows(form, folder, world_size, repeats)
    header = ["checkpoint", "MB in files", "ranks", "way", "shards MB", "peak MB", "peak over shards", "s per GB"]
    return table([*header, "time over whole-then-shard"], rows)


def _rows(form: str, folder: Path, world_size: int, repeats: int) -> list[list[str]]:
    quantised = form != "bf16"
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    runs: dict[str, list[list[Loaded]]] = {way: [] for way in WAYS if way != NATIVE or not quantised}
    for _ in range(repeats):
        for way, found in runs.items():
            with contextlib.redirect_stdout(sys.stderr):  # what ranks print is no part of the page
                found.append(run_ranks(world_size, load, way, str(folder), quantised=quantised, timeout_s=600))
            close_pool()
    everything = [rank for found in runs.values() for run in found for rank in run]
    sums = {rank.checksum for rank in everything}
    if max(sums) - min(sums) > 1e-6 * max(1.0, abs(max(sums))):
        raise SystemExit(f"{form}: the ways do not load the same parameters: sums {sorted(sums)}")
    in_memory = sum(rank.shard_bytes for rank in runs[OURS][0])
    seconds = {way: [max(rank.seconds for rank in run) for run in found] for way, found in runs.items()}
    rows = []
    for way, found in runs.items():
        shards = max(rank.shard_bytes for run in found for rank in run)
        peak = max(rank.peak_bytes for run in found for rank in run)
        ratio = statistics.median(paired_ratio(seconds[way], seconds[WHOLE]))
        row = [form, f"{size / 1e6:.0f}", str(world_size), way, f"{shards / 1e6:.0f}", f"{peak / 1e6:.0f}"]
        per_gb = spread(seconds[way], unit=in_memory / 1e9, digits=1)
        rows.append([*row, f"{peak / shards:.2f}", per_gb, f"{ratio:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    text = loading_table(arguments.ranks, hidden_size=arguments.hidden_size, repeats=arguments.repeats)
    print(page("Loading", __doc__, [text], packages=("transformers", "safetensors")), end="")


if __name__ == "__main__":
    main()
