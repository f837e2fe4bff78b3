"""Head and cross-entropy in chunks against the stock head and loss."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from attention_layers import LargestTensor, relative_error
from cases_attention import chunked_loss_parity
from tiny_models import ModelKind, require_nemo, tiny_batch, tiny_transformers
from torch import nn

from dsv4_fsdp import with_chunked_loss
from dsv4_fsdp.chunked_loss import ChunkedLossError, chunked_cross_entropy
from pool import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HIDDEN, VOCABULARY = 150, 24, 90


def inputs(hidden_dtype: torch.dtype, head_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head and labels, a third of them -100."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator).to(hidden_dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(head_dtype)
    labels = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.33] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def stock(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden.to(weight.dtype), weight)
    logits = logits.to(torch.promote_types(weight.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


# Loss: sums of 100 fp32 terms in another order. Gradients in fp32: sums over chunks, likewise. In bf16 the head's is
# rounded once per chunk and once more: two roundings of 2**-9, against the stock's one.
@pytest.mark.parametrize(
    ("hidden_dtype", "head_dtype", "loss_tol", "grad_tol"),
    [
        (torch.float64, torch.float64, 1e-14, 1e-13),
        (torch.float32, torch.float32, 1e-6, 1e-5),
        (torch.bfloat16, torch.bfloat16, 1e-6, 2 * 2**-9),
        (torch.bfloat16, torch.float32, 1e-6, 2**-9),  # NeMo's: only the gradient of its input is bf16
    ],
)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
def test_loss_and_gradients_equal_the_stock_ones(
    hidden_dtype: torch.dtype, head_dtype: torch.dtype, loss_tol: float, grad_tol: float, chunk_tokens: int
) -> None:
    """For every chunk size, and through a factor on the loss."""
    hidden, weight, labels = inputs(hidden_dtype, head_dtype)
    expected = stock(hidden, weight, labels)
    wanted = torch.autograd.grad(expected / 97, (hidden, weight))
    found = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    grads = torch.autograd.grad(found / 97, (hidden, weight))
    assert found.dtype == expected.dtype
    assert relative_error(found, expected) <= loss_tol
    for grad, value in zip(grads, wanted, strict=True):
        assert grad.dtype == value.dtype
        assert relative_error(grad, value) <= grad_tol


def test_without_a_label_everything_is_zero_and_nothing_is_missing() -> None:
    """A rank without labels runs the same backward: zeros, not ``None`` and not NaN."""
    hidden, weight, labels = inputs(torch.bfloat16, torch.bfloat16)
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_frozen_sides_get_no_gradient_and_no_work() -> None:
    """A frozen head (LoRA) makes no gradient of its size; a frozen body none of the hidden states."""
    hidden, weight, labels = inputs(torch.float32, torch.float32)
    for frozen, trained in ((weight, hidden), (hidden, weight)):
        wanted = torch.autograd.grad(stock(hidden, weight, labels), trained)[0]
        loss = chunked_cross_entropy(
            hidden.detach() if frozen is hidden else hidden, weight.detach() if frozen is weight else weight, labels
        )
        assert relative_error(torch.autograd.grad(loss, trained)[0], wanted) < 1e-5


def test_logits_of_the_whole_sequence_are_never_there() -> None:
    """Forward and backward: no tensor larger than a chunk's logits, the head or the hidden states."""
    hidden, weight, labels = inputs(torch.bfloat16, torch.bfloat16)
    with LargestTensor() as ours:
        chunked_cross_entropy(hidden, weight, labels, chunk_tokens=8).backward()
    with LargestTensor() as theirs:
        stock(hidden, weight, labels).backward()
    assert ours.numel == max(8 * VOCABULARY, weight.numel(), hidden.numel())
    assert theirs.numel == TOKENS * VOCABULARY


def test_tokens_without_a_label_do_not_reach_the_head() -> None:
    """They may hold anything: not even an infinity gets into loss or gradient."""
    hidden, weight, labels = inputs(torch.float32, torch.float32)
    expected = chunked_cross_entropy(hidden, weight, labels)
    spoiled = hidden.detach().masked_fill((labels == -100).unsqueeze(-1), torch.inf).requires_grad_()
    found = chunked_cross_entropy(spoiled, weight, labels)
    assert torch.equal(found, expected)
    found.backward()
    assert spoiled.grad is not None
    assert spoiled.grad.isfinite().all()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_models_loss_and_gradients_equal_its_own_loss(dtype: torch.dtype) -> None:
    """Transformers' model by itself, with labels, padding and all; its head returns logits again afterwards."""
    model = tiny_transformers(("sliding_attention", "compressed_sparse_attention"), dtype=dtype)
    ours = copy.deepcopy(model)
    tokens = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 30:] = 0
    targets = tokens.masked_fill(mask == 0, -100)
    shifted = F.pad(targets[:, 1:], (0, 1), value=-100)
    output = model(input_ids=tokens, attention_mask=mask, labels=targets, use_cache=False)
    output.loss.backward()
    loss, num_tokens = with_chunked_loss(ours, chunk_tokens=16)(tokens, shifted, mask)
    (loss / num_tokens).backward()
    assert num_tokens.item() == 39 + 29
    assert loss.dtype == torch.float32
    assert relative_error(loss / num_tokens, output.loss) < 1e-6
    theirs = dict(model.named_parameters())
    for name, param in ours.named_parameters():
        if theirs[name].grad is None:
            assert param.grad is None, name
        else:
            # bf16: the gradient of the hidden states is the same in every bit; what differs is the order of sums.
            tolerance = 2 * 2**-9 if name == "lm_head.weight" and dtype == torch.bfloat16 else 1e-4
            assert relative_error(param.grad, theirs[name].grad) < tolerance, name
    assert torch.equal(ours(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize(("kind", "tied"), [("transformers", False), ("transformers", True), ("nemo", False)])
def test_sharded_loss_is_bit_equal_and_costs_no_collective_more(kind: ModelKind, tied: bool) -> None:
    """FSDP2 on 2 ranks, one without labels: the unsharded loss in every bit, its gradients, the stock collectives."""
    if kind == "nemo":
        require_nemo()
    first, second = run_ranks(2, chunked_loss_parity, kind, tied=tied)
    for result in (first, second):
        assert result["bit_equal"]
        assert result["missing"] == []
        # A reduced bf16 gradient is rounded once (see test_parity.py).
        worst = max(result["errors"], key=result["errors"].get)
        assert result["errors"][worst] < 5e-3, worst
        assert "lm_head.weight" in result["errors"] or tied
        assert result["collectives"] == result["stock_collectives"]
    assert first["num_tokens"] == 39
    assert first["loss"] > 0
    assert second["num_tokens"] == 0
    assert second["loss"] == 0


def test_what_does_not_fit_is_refused() -> None:
    """Shapes, heads and models that the chunked loss does not serve, each with a message."""
    hidden, weight, labels = inputs(torch.float32, torch.float32)
    with pytest.raises(ChunkedLossError, match="do not fit together"):
        chunked_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ChunkedLossError, match="chunk_tokens must be at least 1"):
        chunked_cross_entropy(hidden, weight, labels, chunk_tokens=0)
    with pytest.raises(ChunkedLossError, match="no head"):
        with_chunked_loss(nn.Linear(2, 2))
    model = tiny_transformers(("sliding_attention",))
    batch = tiny_batch("transformers", 8)
    loss_sum = with_chunked_loss(model)
    with pytest.raises(ChunkedLossError, match="another shape"):
        loss_sum(batch.input_ids, batch.labels[:, 1:])
    with pytest.raises(ChunkedLossError, match="do not fit together"):
        loss_sum(batch.input_ids, batch.labels, logits_to_keep=1)
    assert model(input_ids=batch.input_ids).logits.shape == (1, 8, 128), "an error must not leave the head changed"
