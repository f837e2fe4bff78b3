"""Stock head and loss against the chunked one: peak memory and time of forward and backward.

    python benchmarks/loss.py
    python benchmarks/loss.py --tokens 8192 --vocabulary 32768 --dtype bfloat16

Stock is what Transformers does: ``nn.Linear``, logits upcast to fp32, ``cross_entropy``. Memory is what the run
allocates beyond the weight and the hidden states, the weight's gradient included.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from measuring import keep_memory, measure_alternating, table

from dsv4_fsdp.chunked_loss import chunked_cross_entropy


def loss_table(
    sizes: Sequence[tuple[int, int]], *, hidden_size: int, dtypes: Sequence[torch.dtype], masked: float, repeats: int
) -> str:
    """The table as Markdown; ``sizes`` are (tokens, vocabulary), ``masked`` the share of tokens without a label."""
    rows = []
    for dtype in dtypes:
        for tokens, vocabulary in sizes:
            stock, ours = measure_alternating(_steps(tokens, vocabulary, hidden_size, dtype, masked), repeats=repeats)
            cells = [str(dtype).removeprefix("torch."), str(tokens), str(vocabulary)]
            cells += [f"{stock.peak_bytes / 2**20:.0f}", f"{ours.peak_bytes / 2**20:.0f}"]
            cells += [f"{ours.peak_bytes / stock.peak_bytes:.2f}", f"{stock.median_s:.2f}", f"{ours.median_s:.2f}"]
            rows.append([*cells, f"{ours.median_s / stock.median_s:.2f}"])
    header = ["head", "tokens", "vocabulary", "stock MB", "ours MB", "memory ratio", "stock s", "ours s", "time ratio"]
    return table(header, rows)


def _steps(
    tokens: int, vocabulary: int, hidden_size: int, dtype: torch.dtype, masked: float
) -> list[Callable[[], object]]:
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, hidden_size, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) / hidden_size**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens))
    labels[torch.rand(1, tokens) < masked] = -100

    def stock() -> None:
        logits = F.linear(hidden, weight).float()
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        hidden.grad = weight.grad = None

    def ours() -> None:
        chunked_cross_entropy(hidden, weight, labels).backward()
        hidden.grad = weight.grad = None

    return [stock, ours]


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"])
    parser.add_argument("--masked", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        loss_table(
            [(tokens, arguments.vocabulary) for tokens in arguments.tokens],
            hidden_size=arguments.hidden_size,
            dtypes=[getattr(torch, name) for name in arguments.dtypes],
            masked=arguments.masked,
            repeats=arguments.repeats,
        )
    )
    print(f"\ntorch {torch.__version__}, {platform.machine()}, {arguments.threads} threads")


if __name__ == "__main__":
    main()
