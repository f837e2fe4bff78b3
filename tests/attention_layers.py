"""One attention layer of Transformers' DeepSeek-V4, eager and windowed, for the attention tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from tiny_models import tiny_transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import create_sliding_window_causal_mask

from dsv4_fsdp.attention import IMPLEMENTATION

LAYER_TYPES = ("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention")
WINDOW, HCA_RATE, CSA_RATE, TOP_K = 16, 32, 4, 4


def attention_layer(kind: str, *, dtype: torch.dtype = torch.float32, **over: Any) -> tuple[nn.Module, nn.Module]:
    """A layer's attention and the model's rotary embedding: ``DeepseekV4Attention`` with its real initial values.

    Sixteen index heads, so that no entry's score is exactly zero in all of them: ties are the business of top-k.
    """
    over = {"index_n_heads": 16, "num_attention_heads": 4} | over
    model = tiny_transformers((kind,), dtype=dtype, **over)
    return model.model.layers[0].self_attn, model.model.rotary_emb


def as_windowed(layer: nn.Module) -> nn.Module:
    """A copy of the layer that attends in windows. Its config is its own."""
    layer = copy.deepcopy(layer)
    layer.config._attn_implementation_internal = IMPLEMENTATION
    return layer


def hidden_for(layer: nn.Module, batch: int, tokens: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    weight = layer.q_a_proj.weight
    hidden = torch.randn(batch, tokens, weight.shape[1], generator=generator, dtype=torch.float64)
    return hidden.to(weight.dtype).requires_grad_()


def attend(
    layer: nn.Module,
    rope: nn.Module,
    hidden: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer's output, with the mask that the model would make."""
    if position_ids is None:
        position_ids = torch.arange(hidden.shape[1]).unsqueeze(0)
    tables = {name: rope(hidden, position_ids=position_ids, layer_type=name) for name in ("main", "compress")}
    mask = create_sliding_window_causal_mask(layer.config, hidden, attention_mask, None, position_ids=position_ids)
    output, _ = layer(hidden, position_embeddings=tables, position_ids=position_ids, attention_mask=mask)
    return output


def gradients(layer: nn.Module, hidden: torch.Tensor, output: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random function of the output, by parameter name, and of ``hidden``; all set to None."""
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    output.backward(cotangent)
    named = {**dict(layer.named_parameters()), "hidden": hidden}
    found = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
    for tensor in named.values():
        tensor.grad = None
    return found


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in fp64; 0 for two empty or zero tensors."""
    value, expected = value.detach().double(), expected.detach().double()
    distance, norm = (value - expected).norm(), expected.norm()
    return 0.0 if distance == 0 else float(distance / norm)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made in storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
