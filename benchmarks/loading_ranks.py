"""What ``loading.py`` runs in each rank: a checkpoint into a sharded model, and the memory that this took."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dsv4_fsdp import keep_fp32_islands, parallelize
from dsv4_fsdp.checkpoint_loading import CheckpointReader, load_checkpoint
from dsv4_fsdp.materialize import materialize, refuse_uninitialized

OURS = "dsv4-fsdp: shard on meta, each rank reads its rows"
WHOLE = "`from_pretrained` on every rank, then shard"
NATIVE = "transformers native (`distributed_config`), with `keep_fp32_islands`"


@dataclass
class Loaded:
    """What one rank found. Memory is anonymous resident memory beyond what was there before."""

    seconds: float
    peak_bytes: int
    shard_bytes: int
    checksum: float
    """Sum over all parameters of the whole model, fp64: the ways must agree."""


def load(way: str, folder: str, *, quantised: bool) -> Loaded:
    """Load ``folder`` in one of the three ways; collective. ``quantised``: FP8 and FP4 in the files, bf16 in memory."""
    from transformers import AutoConfig, DeepseekV4ForCausalLM, FineGrainedFP8Config
    from transformers.distributed import DistributedConfig

    more = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if quantised else {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gc.collect()
    dist.barrier()
    with _watch_memory() as peak:
        started = time.perf_counter()
        model: nn.Module
        if way == OURS:
            with torch.device("meta"):
                model = DeepseekV4ForCausalLM._from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
            parallelize(model, mesh)
            materialize(model, "cpu")
            with CheckpointReader(Path(folder)) as reader:
                load_checkpoint(model, reader)
            refuse_uninitialized(model)
        elif way == WHOLE:
            model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)
            parallelize(model, mesh)
        else:
            with keep_fp32_islands("transformers"):
                model = DeepseekV4ForCausalLM.from_pretrained(
                    folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=mesh.size()), **more
                )
        seconds = time.perf_counter() - started
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    checksum = torch.stack([shard.detach().double().sum() for shard in shards]).sum()
    dist.all_reduce(checksum)
    return Loaded(seconds, peak[0], sum(shard.nbytes for shard in shards), checksum.item())


@contextmanager
def _watch_memory(*, every_s: float = 0.002) -> Iterator[list[int]]:
    """A list whose one number is, in the end, by how many bytes anonymous resident memory rose at most.

    Pages of mapped files are not in it: the system takes them back when it needs them.
    """
    before = _anonymous_bytes()
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            peak[0] = max(peak[0], _anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        peak[0] = max(peak[0], _anonymous_bytes() - before)
        done.set()
        thread.join()


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status: this benchmark needs Linux")
