"""Eager attention against windowed attention: one layer's forward and backward, by layer type and sequence length.

The second table is of a layer that activation checkpointing runs again: torch's, and ours, which keeps the choice.

    python benchmarks/attention.py                        # 1K to 16K tokens; eager up to 4K
    python benchmarks/attention.py --lengths 1024 4096 --repeats 3

The layer is Transformers' ``DeepseekV4Attention`` in fp32 on one row, with the release's window (128) and compression
rates (4 and 128) and an eighth of its widths: hidden size 512, 8 heads of 64, 8 index heads of 32, top-k 64. Both sides
run in turns in one process. Seconds are CPU seconds, median and quartiles; "faster" is the median ratio within a turn,
and an exponent is the growth since the length in the row above. Memory is what the run allocates beyond parameters and
inputs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measuring import (
    Goal,
    Measured,
    growth_exponent,
    keep_memory,
    measure_alternating,
    page,
    paired_ratio,
    spread,
    table,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import DeepseekV4Config
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from dsv4_fsdp.attention import IMPLEMENTATION
from dsv4_fsdp.recomputation import checkpoint

LAYER_TYPES = ("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention")


def config_of(implementation: str, **over: Any) -> Any:
    values: dict[str, Any] = {
        "hidden_size": 512,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": list(LAYER_TYPES),
        "mlp_layer_types": ["moe"] * len(LAYER_TYPES),
        "num_attention_heads": 8,
        "head_dim": 64,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 128,
        "o_groups": 4,
        "o_lora_rank": 64,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 64,
        "sliding_window": 128,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "max_position_embeddings": 65536,
        "attn_implementation": implementation,
    }
    return DeepseekV4Config(**(values | over))


def layer_step(
    implementation: str,
    layer_type: str,
    num_tokens: int,
    *,
    dtype: torch.dtype,
    run: Callable[..., Any] = lambda layer, **kwargs: layer(**kwargs),
) -> Callable[[], object]:
    """A function that runs the mask, the layer's forward and its backward once; the same weights for all sides.

    ``run`` calls the layer: by a checkpointing function, if it is one.
    """
    torch.manual_seed(0)
    config = config_of(implementation)
    layer = DeepseekV4Attention(config, LAYER_TYPES.index(layer_type)).to(dtype)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.05)
        parameter.requires_grad_("indexer" not in name)
    rope = DeepseekV4RotaryEmbedding(config)
    hidden = torch.randn(1, num_tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    positions = torch.arange(num_tokens).unsqueeze(0)
    tables = {kind: rope(hidden, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}

    def step() -> None:
        mask = create_sliding_window_causal_mask(config, hidden, None, None, position_ids=positions)
        output, _ = run(
            layer, hidden_states=hidden, position_embeddings=tables, position_ids=positions, attention_mask=mask
        )
        output.square().mean().backward()
        for tensor in (hidden, *layer.parameters()):
            tensor.grad = None

    return step


Results = dict[tuple[str, int], tuple[Measured, Measured | None]]
"""(layer type, tokens) -> ours, and eager where it was run."""


def measure_layers(
    lengths: Sequence[int], *, eager_up_to: int, repeats: int, dtype: torch.dtype = torch.float32
) -> Results:
    """Both sides of each layer type at each length."""
    results: Results = {}
    for layer_type in LAYER_TYPES:
        for num_tokens in lengths:
            sides = (IMPLEMENTATION, "eager") if num_tokens <= eager_up_to else (IMPLEMENTATION,)
            steps = [layer_step(side, layer_type, num_tokens, dtype=dtype) for side in sides]
            ours, *eager = measure_alternating(steps, repeats=repeats)
            results[layer_type, num_tokens] = ours, (eager[0] if eager else None)
    return results


def attention_table(results: Results) -> str:
    """The table as Markdown."""
    rows = []
    before: tuple[str, int] | None = None
    for (layer_type, num_tokens), (ours, eager) in results.items():
        cells = [spread(ours.seconds), "", "", f"{ours.peak_bytes / 2**20:.0f}", "", "", "", ""]
        if eager is not None:
            cells[1], cells[2] = spread(eager.seconds), f"{_times_faster(ours, eager):.1f}x"
            cells[4], cells[5] = f"{eager.peak_bytes / 2**20:.0f}", f"{eager.peak_bytes / ours.peak_bytes:.1f}x"
        if before is not None and before[0] == layer_type:
            cells[6:] = [f"{growth:.2f}" for growth in _growth(results, layer_type, before[1], num_tokens)]
        rows.append([layer_type, str(num_tokens), *cells])
        before = layer_type, num_tokens
    header = ["layer", "tokens", "ours s", "eager s", "faster", "ours MB", "eager MB", "less memory"]
    return table([*header, "time exponent", "memory exponent"], rows)


def recomputation_table(lengths: Sequence[int], *, repeats: int, dtype: torch.dtype = torch.float32) -> str:
    """The table as Markdown: a layer with a frozen indexer that runs again in backward."""
    layer_type = "compressed_sparse_attention"
    rows = []
    for num_tokens in lengths:
        ways = (checkpoint, functools.partial(torch_checkpoint, use_reentrant=False))
        steps = [layer_step(IMPLEMENTATION, layer_type, num_tokens, dtype=dtype, run=way) for way in ways]
        ours, theirs = measure_alternating(steps, repeats=repeats)
        ratio = statistics.median(paired_ratio(ours.seconds, theirs.seconds))
        rows.append([layer_type, str(num_tokens), spread(ours.seconds), spread(theirs.seconds), f"{ratio:.2f}"])
    return table(["recomputed layer", "tokens", "ours s", "torch s", "ours over torch"], rows)


def goals(results: Results) -> list[Goal]:
    """The goals at 4,096 tokens, and for the growth up to 16,384, per layer type, as far as they were measured."""
    lines = []
    for layer_type in LAYER_TYPES:
        ours, eager = results.get((layer_type, 4096), (None, None))
        if ours is not None and eager is not None:
            lines.append(Goal(f"{layer_type}: times faster at 4K", 8, _times_faster(ours, eager), at_least=True))
            less = eager.peak_bytes / ours.peak_bytes
            lines.append(Goal(f"{layer_type}: times less memory at 4K", 6, less, at_least=True))
        if layer_type != "compressed_sparse_attention" and {(layer_type, 4096), (layer_type, 16384)} <= results.keys():
            time_growth, memory_growth = _growth(results, layer_type, 4096, 16384)
            lines.append(Goal(f"{layer_type}: exponent of time, 4K to 16K", 1.1, time_growth))
            lines.append(Goal(f"{layer_type}: exponent of memory, 4K to 16K", 1.1, memory_growth))
    return lines


def _times_faster(ours: Measured, eager: Measured) -> float:
    return statistics.median(paired_ratio(eager.seconds, ours.seconds))


def _growth(results: Results, layer_type: str, shorter: int, longer: int) -> tuple[float, float]:
    """Exponents of time and of memory."""
    (small, _), (large, _) = results[layer_type, shorter], results[layer_type, longer]
    return (
        growth_exponent((shorter, small.median_s), (longer, large.median_s)),
        growth_exponent((shorter, small.peak_bytes), (longer, large.peak_bytes)),
    )


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--eager-up-to", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    results = measure_layers(
        arguments.lengths, eager_up_to=arguments.eager_up_to, repeats=arguments.repeats, dtype=dtype
    )
    packages = ("transformers",)
    tables = [attention_table(results), recomputation_table(arguments.lengths, repeats=arguments.repeats, dtype=dtype)]
    print(page("Attention", __doc__, tables, goals=goals(results), packages=packages), end="")


if __name__ == "__main__":
    main()
