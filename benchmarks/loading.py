"""Ways to load a checkpoint into a sharded model: peak memory per rank against its shards, and seconds per GB.

    python benchmarks/loading.py
    python benchmarks/loading.py --ranks 4 --repeats 1 --hidden-size 256

The checkpoint is a random Transformers DeepSeek-V4 in bf16 with fp32 islands, written by ``save_pretrained`` a moment
before (so the files are in the page cache: reading them costs copies, not a disk). Each run has fresh processes; the
ways take turns. Memory is anonymous resident memory beyond what a rank held before, the highest of a watch every 2 ms
and of all runs and ranks; pages of mapped files do not count. Seconds are the slowest rank's, median and quartiles, over
the size of the whole checkpoint. All ways end with the same parameters, as a checksum over all ranks confirms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import ROOT, page, spread, table

sys.path.insert(0, str(ROOT / "tests"))

import transformers.models.deepseek_v4.modeling_deepseek_v4  # noqa: F401  (here, so that ranks are forked with it)
from loading_ranks import NATIVE, OURS, WHOLE, Loaded, load
from tiny_models import tiny_transformers

from pool import close_pool, run_ranks

WAYS = (OURS, WHOLE, NATIVE)


def write_checkpoint(folder: Path, *, hidden_size: int) -> int:
    """A checkpoint of four blocks with 16 experts each (230 MB at width 512); returns the bytes of its weights."""
    model: Any = tiny_transformers(
        vocab_size=64 * hidden_size,
        hidden_size=hidden_size,
        moe_intermediate_size=3 * hidden_size // 2,
        n_routed_experts=16,
        q_lora_rank=hidden_size // 4,
    )
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def loading_table(ranks: Sequence[int], *, hidden_size: int, repeats: int) -> str:
    """The table as Markdown."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), hidden_size=hidden_size)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for world_size in ranks:
            runs: dict[str, list[list[Loaded]]] = {way: [] for way in WAYS}
            for _ in range(repeats):
                for way in WAYS:
                    runs[way].append(run_ranks(world_size, load, way, folder, timeout_s=600))
                    close_pool()
            sums = {rank.checksum for found in runs.values() for run in found for rank in run}
            if max(sums) - min(sums) > 1e-6 * max(1.0, abs(max(sums))):
                raise SystemExit(f"the ways do not load the same parameters: sums {sorted(sums)}")
            seconds = {way: [max(rank.seconds for rank in run) for run in found] for way, found in runs.items()}
            for way, found in runs.items():
                shards = max(rank.shard_bytes for run in found for rank in run)
                peak = max(rank.peak_bytes for run in found for rank in run)
                row = [str(world_size), way, f"{size / 1e6:.0f}", f"{shards / 1e6:.0f}", f"{peak / 1e6:.0f}"]
                ratio = statistics.median(seconds[way]) / statistics.median(seconds[WHOLE])
                row += [f"{peak / shards:.2f}", spread(seconds[way], unit=size / 1e9, digits=1), f"{ratio:.2f}"]
                rows.append(row)
    header = ["ranks", "way", "checkpoint MB", "shards MB", "peak MB", "peak over shards", "s per GB"]
    return table([*header, "time over whole-then-shard"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    text = loading_table(arguments.ranks, hidden_size=arguments.hidden_size, repeats=arguments.repeats)
    print(page("Loading", __doc__, [text], packages=("transformers", "safetensors")), end="")


if __name__ == "__main__":
    main()
