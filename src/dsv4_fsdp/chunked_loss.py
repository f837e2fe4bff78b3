"""Head and cross-entropy in chunks: the logits of a whole sequence are never there.

Logits are the largest tensor of a training step: ``[tokens, vocabulary]``, in the head's dtype, in fp32, and again for
their gradient. Here tokens without a label are dropped first, and the rest passes through head and loss a few hundred
at a time. Backward computes each chunk's logits again. Nothing larger than one chunk's logits and the head's own
gradient is held.

**Equal to the stock path** (head, upcast, ``cross_entropy(reduction="sum")``): each logit is the same product, upcast
the same way. What differs is the order of sums over tokens: the loss by fp32 rounding; the head's gradient is added up
in fp32 over chunks that are each rounded to the head's dtype, and rounded once more, so by at most two roundings of
that dtype.

**FSDP2.** A weight may be read only inside the forward of the unit that owns it: before, it is a shard, and only that
unit's hooks gather it again for backward. So :func:`with_chunked_loss` calls the *model*, whose head runs the loop as
its forward for the time of that call: hooks, gathers and casts are those of the stock head, one gather in forward and
one in backward however many chunks there are.

Works with a head stored like its input (Transformers: bf16) and with an fp32 head, whose input is cast to fp32 (NeMo
AutoModel's layout), as long as the head is a ``torch.nn.Linear`` without bias. Plain torch operations; finding the
tokens with labels reads their number from the device once. Nothing of it was run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .errors import Dsv4FsdpError

__all__ = ["IGNORED", "ChunkedLossError", "LossSum", "chunked_cross_entropy", "with_chunked_loss"]

# The label of a token without one, in torch and everywhere else.
IGNORED = -100
_CHUNK_TOKENS = 512


class ChunkedLossError(Dsv4FsdpError, ValueError):
    """This head or these labels are none for the chunked loss."""


class LossSum(NamedTuple):
    """What a forward with chunked loss returns.

    Attributes:
        loss_sum: fp32 scalar, the sum of ``-log p(label)`` over the tokens that have one; call ``backward`` on it, or
            on a multiple (divided by the global number of tokens, say).
        num_tokens: int64 scalar on the same device, how many tokens have one.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor


def chunked_cross_entropy(
    hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, chunk_tokens: int = _CHUNK_TOKENS
) -> torch.Tensor:
    """The sum over tokens of the cross-entropy of ``hidden_states @ weight.T``: an fp32 scalar.

    Args:
        hidden_states: ``[..., hidden]``, floating. Cast to the weight's dtype chunk by chunk if it is another.
        weight: ``[vocabulary, hidden]``, a plain tensor: call this inside the forward of the module that owns it.
        labels: int64 ``[...]``, one for each hidden state; -100 for none. *Not* shifted here: the label of a position
            is the token that it shall predict.
        chunk_tokens: tokens whose logits are there at a time. Chunks of fewer than some hundred make slow products.

    Returns:
        The loss. Without a single label it is 0 and its gradients are zeros, so that every rank of a sharded model runs
        the same backward. It has a first derivative only.

    Raises:
        ChunkedLossError: shapes that do not fit, or a sharded weight.
    """
    if isinstance(weight, DTensor):
        raise ChunkedLossError(
            "the head's weight is sharded where the loss reads it.\nexpected: a plain tensor, as inside the forward of "
            f"its FSDP unit\ngot: a DTensor of shape {tuple(weight.shape)}, {weight.placements}\n"
            "what to do: use with_chunked_loss(model), which reads it there."
        )
    if labels.shape != hidden_states.shape[:-1] or weight.ndim != 2 or weight.shape[1] != hidden_states.shape[-1]:
        raise ChunkedLossError(
            "hidden states, weight and labels do not fit together.\n"
            "expected: [..., hidden], [vocabulary, hidden] and [...]\n"
            f"got: {tuple(hidden_states.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}\n"
            "what to do: give one label for each hidden state, -100 where there is none."
        )
    if chunk_tokens < 1:
        raise ChunkedLossError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")
    loss = _ChunkedCrossEntropy.apply(
        hidden_states.reshape(-1, hidden_states.shape[-1]), weight, labels.reshape(-1), chunk_tokens
    )
    assert isinstance(loss, torch.Tensor)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int
    ) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            labelled = (labels != IGNORED).nonzero().squeeze(1)
            loss = torch.zeros((), dtype=_loss_dtype(weight), device=hidden.device)
            for index in labelled.split(chunk_tokens):
                logits = _logits(hidden[index], weight)
                loss += F.cross_entropy(logits, labels[index], reduction="sum")
        ctx.save_for_backward(hidden, weight, labels, labelled)
        ctx.chunk_tokens = chunk_tokens
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, labelled = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=_loss_dtype(weight)) if needs_weight else None
            for index in labelled.split(ctx.chunk_tokens):
                rows = hidden[index]
                grad = torch.softmax(_logits(rows, weight), dim=-1)
                grad[torch.arange(len(index), device=grad.device), labels[index]] -= 1
                # Rounded where stock autograd rounds it: at the upcast of the logits.
                grad = grad.mul_(grad_loss).to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden.index_copy_(0, index, (grad @ weight).to(hidden.dtype))
                if grad_weight is not None:
                    _add_product(grad_weight, grad, rows.to(weight.dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _loss_dtype(weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _logits(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The logits of one chunk, rounded to the weight's dtype as the head rounds them, then upcast as the loss does."""
    return F.linear(rows.to(weight.dtype), weight).to(_loss_dtype(weight))


def _add_product(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    """``total += grad.T @ rows``, without a second matrix of that size where the dtypes are the same."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, rows)
    else:
        total += grad.T @ rows


def with_chunked_loss(model: nn.Module, *, chunk_tokens: int = _CHUNK_TOKENS) -> Callable[..., LossSum]:
    """Return ``loss_sum(input_ids, labels, attention_mask=None, position_ids=None, **kwargs) -> LossSum``.

    ::

        loss_sum = with_chunked_loss(model)                 # sharded or not, before sharding or after
        loss, num_tokens = loss_sum(input_ids, labels)      # labels shifted already, -100 for none
        (loss / num_tokens).backward()

    ``input_ids`` and ``labels`` are int64 ``[B, S]``; further keyword arguments go to the model. ``use_cache`` is off
    unless given. The model itself stays as it was: between calls its head returns logits.

    The model must call its head (``get_output_embeddings()``) exactly once, on all positions, and not take apart what
    it returns: Transformers' causal models do so when they get no labels.

    Raises:
        ChunkedLossError: the head is no ``nn.Linear`` without bias, or the model did not call it as above.
    """
    head = _head_of(model)

    def loss_sum(
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> LossSum:
        if labels.shape != input_ids.shape:
            raise ChunkedLossError(
                f"labels have another shape than input_ids.\nexpected: {tuple(input_ids.shape)}\n"
                f"got: {tuple(labels.shape)}\nwhat to do: shift labels by one and fill up with {IGNORED}."
            )
        losses: list[torch.Tensor] = []

        def head_and_loss(hidden_states: torch.Tensor) -> torch.Tensor:
            losses.append(chunked_cross_entropy(hidden_states, head.weight, labels, chunk_tokens=chunk_tokens))
            return losses[-1]

        arguments = {"attention_mask": attention_mask, "position_ids": position_ids}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        with _forward_of(head, head_and_loss):
            output = model(input_ids=input_ids, **arguments, **({"use_cache": False} | kwargs))
        returned = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if len(losses) != 1 or not isinstance(returned, torch.Tensor) or returned.ndim != 0:
            raise ChunkedLossError(
                "the model did not pass on what its head returned.\n"
                "expected: one call of the head, whose result is the model's logits\n"
                f"got: {len(losses)} calls, and logits of type {type(returned).__name__}"
                f"{f' and shape {tuple(returned.shape)}' if isinstance(returned, torch.Tensor) else ''}\n"
                "what to do: leave labels and logits_to_keep out of the arguments, or use the model's own loss."
            )
        if returned.dtype != losses[0].dtype:
            # The model (or the root unit's output_dtype) rounded its logits. The loss is the one from before, but
            # backward must still begin at the model's output: FSDP2's hooks of the root are there.
            return LossSum(losses[0] + 0 * returned, (labels != IGNORED).sum())
        return LossSum(returned, (labels != IGNORED).sum())

    return loss_sum


def _head_of(model: nn.Module) -> nn.Linear:
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head: Any = get_head() if callable(get_head) else None
    if isinstance(head, nn.Linear) and getattr(head, "bias", None) is None:
        return head
    raise ChunkedLossError(
        f"{type(model).__name__} has no head for the chunked loss.\n"
        "expected: get_output_embeddings() to return a torch.nn.Linear without bias\n"
        f"got: {head}\nwhat to do: use the model's own loss; an adapter on the head is not served either."
    )


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the context ``module`` runs ``forward`` in place of its own, between the hooks that it has."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
