"""Eager attention against windowed attention: one layer's forward and backward, by layer type and sequence length.

    python benchmarks/attention.py                        # 1K to 16K tokens; eager up to 4K
    python benchmarks/attention.py --lengths 1024 4096 --repeats 3

The layer is Transformers' ``DeepseekV4Attention`` in fp32 on one row, with the release's window (128) and compression
rates (4 and 128) and an eighth of its widths: hidden size 512, 8 heads of 64, 8 index heads of 32, top-k 64. Both sides
run in turns in one process. Memory is what the run allocates beyond parameters and inputs.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from measuring import Measured, growth_exponent, keep_memory, measure_alternating, table
from transformers import DeepseekV4Config
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from dsv4_fsdp.attention import IMPLEMENTATION

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


def layer_step(implementation: str, layer_type: str, num_tokens: int, *, dtype: torch.dtype) -> Callable[[], object]:
    """A function that runs the mask, the layer's forward and its backward once; the same weights for all sides."""
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
        output, _ = layer(hidden, position_embeddings=tables, position_ids=positions, attention_mask=mask)
        output.square().mean().backward()
        for tensor in (hidden, *layer.parameters()):
            tensor.grad = None

    return step


def attention_table(
    lengths: Sequence[int], *, eager_up_to: int, repeats: int, dtype: torch.dtype = torch.float32
) -> str:
    """The table as Markdown."""
    rows = []
    for layer_type in LAYER_TYPES:
        before: tuple[int, Measured] | None = None
        for num_tokens in lengths:
            sides = (IMPLEMENTATION, "eager") if num_tokens <= eager_up_to else (IMPLEMENTATION,)
            steps = [layer_step(side, layer_type, num_tokens, dtype=dtype) for side in sides]
            ours, *eager = measure_alternating(steps, repeats=repeats)
            rows.append([layer_type, str(num_tokens), *_cells(num_tokens, ours, eager, before)])
            before = (num_tokens, ours)
    header = ["layer", "tokens", "ours s", "eager s", "faster", "ours MB", "eager MB", "less memory"]
    return table([*header, "time exponent", "memory exponent"], rows)


def _cells(
    num_tokens: int, ours: Measured, eager: Sequence[Measured], before: tuple[int, Measured] | None
) -> list[str]:
    spread = (max(ours.seconds) - min(ours.seconds)) / ours.median_s
    cells = [f"{ours.median_s:.3f} ±{spread / 2:.0%}", "", "", f"{ours.peak_bytes / 2**20:.0f}", "", ""]
    if eager:
        cells[1], cells[2] = f"{eager[0].median_s:.3f}", f"{eager[0].median_s / ours.median_s:.1f}x"
        cells[4], cells[5] = f"{eager[0].peak_bytes / 2**20:.0f}", f"{eager[0].peak_bytes / ours.peak_bytes:.1f}x"
    if before is None:
        return [*cells, "", ""]
    last_tokens, last = before
    time_growth = growth_exponent((last_tokens, last.median_s), (num_tokens, ours.median_s))
    memory_growth = growth_exponent((last_tokens, last.peak_bytes), (num_tokens, ours.peak_bytes))
    return [*cells, f"{time_growth:.2f}", f"{memory_growth:.2f}"]


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
    print(
        attention_table(
            arguments.lengths,
            eager_up_to=arguments.eager_up_to,
            repeats=arguments.repeats,
            dtype=getattr(torch, arguments.dtype),
        )
    )
    print(
        f"\ntorch {torch.__version__}, transformers {transformers.__version__}, {arguments.dtype}, "
        f"{platform.machine()}, {arguments.threads} threads"
    )


if __name__ == "__main__":
    main()
