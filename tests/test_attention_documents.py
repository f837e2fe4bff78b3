"""Packed documents: nothing of one reaches another, in windows, compressed entries or the indexer's choice."""

from __future__ import annotations

import copy

import pytest
import torch
from attention_layers import LAYER_TYPES, as_windowed, attend, attention_layer, gradients, hidden_for, relative_error
from tiny_models import tiny_transformers

from dsv4_fsdp import use_windowed_attention

pytestmark = pytest.mark.usefixtures("one_thread")

# None of them a multiple of a window; one shorter than any; the last two longer than an HCA window of 32.
DOCUMENTS = (13, 3, 50, 41)


def positions_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_each_document_is_as_if_alone(kind: str) -> None:
    """One layer: output and gradients of every document in the pack equal those of the document by itself."""
    layer, rope = attention_layer(kind)
    layer = as_windowed(layer)
    hidden = hidden_for(layer, 1, sum(DOCUMENTS))
    packed = attend(layer, rope, hidden, position_ids=positions_of(DOCUMENTS))
    for part, own in zip(packed.split(DOCUMENTS, dim=1), hidden.detach().split(DOCUMENTS, dim=1), strict=True):
        own = own.clone().requires_grad_()
        alone = attend(layer, rope, own)
        # Sums of the same terms, in blocks that begin elsewhere.
        assert relative_error(part, alone) < 1e-5
        expected = gradients(layer, own, alone)
        kept = torch.zeros_like(packed)
        position = int((hidden.detach() == own[:, :1]).all(-1).nonzero()[0, 1])
        kept[:, position : position + own.shape[1]] = 1
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(alone.shape, generator=generator, dtype=torch.float64).to(packed.dtype)
        full = torch.zeros_like(packed)
        full[:, position : position + own.shape[1]] = cotangent
        named = {**dict(layer.named_parameters()), "hidden": hidden}
        grads = torch.autograd.grad(packed, list(named.values()), full, retain_graph=True, allow_unused=True)
        found = dict(zip(named, grads, strict=True))
        outside = found["hidden"].clone()
        outside[:, position : position + own.shape[1]] = 0
        assert not outside.any(), "a gradient left the document"
        found["hidden"] = found["hidden"][:, position : position + own.shape[1]]
        for name, grad in expected.items():
            assert relative_error(found[name], grad) < 1e-5, name


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_another_document_in_front_changes_no_bit(kind: str) -> None:
    """Nor do two rows with different documents disturb each other; eager's compressed entries leak."""
    layer, rope = attention_layer(kind)
    ours = as_windowed(layer)
    rows = torch.cat([positions_of((37, 63)), positions_of((50, 9, 41))])
    hidden = hidden_for(layer, 2, 100).detach()
    changed = hidden.clone()
    changed[0, :37] = hidden_for(layer, 1, 100, seed=1).detach()[0, :37]
    changed[1, 50:59] = hidden_for(layer, 1, 100, seed=2).detach()[0, 50:59]
    before, after = (attend(ours, rope, each, position_ids=rows) for each in (hidden, changed))
    assert torch.equal(after[0, 37:], before[0, 37:])
    assert torch.equal(after[1, :50], before[1, :50])
    assert torch.equal(after[1, 59:], before[1, 59:])
    if kind != "sliding_attention":
        before, after = (attend(layer, rope, each, position_ids=rows) for each in (hidden, changed))
        assert not torch.equal(after[0, 37:], before[0, 37:]), "eager is expected to leak; if not, say so in the README"


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_positions_in_one_run_are_no_documents(kind: str) -> None:
    """The path for documents, taken for a row that is one document, gives the bits of the path without."""
    layer, rope = attention_layer(kind)
    layer = as_windowed(layer)
    hidden = hidden_for(layer, 1, 70).detach()
    both = torch.cat([hidden, hidden])
    rows = torch.cat([torch.arange(70).unsqueeze(0), positions_of((30, 40))])  # the second row makes it take that path
    with_documents = attend(layer, rope, both, position_ids=rows)[0]
    torch.testing.assert_close(with_documents, attend(layer, rope, hidden)[0], rtol=0, atol=1e-6)


def test_a_packed_model_gives_each_documents_logits_and_gradients() -> None:
    """The whole model, fp32: logits, and parameter gradients that are the sum of the documents' own."""
    model = tiny_transformers(dtype=torch.float32, index_n_heads=16)
    use_windowed_attention(model)
    lengths = (37, 3, 50)
    tokens = torch.randint(0, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    cotangent = torch.randn(1, sum(lengths), 128, generator=torch.Generator().manual_seed(1))
    packed = model(input_ids=tokens, position_ids=positions_of(lengths), attention_mask=mask).logits
    packed.backward(cotangent)
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    parts = zip(*(each.split(lengths, dim=1) for each in (tokens, packed.detach(), cotangent)), strict=True)
    for own, logits, own_cotangent in parts:
        alone = model(input_ids=own).logits
        torch.testing.assert_close(logits, alone.detach(), rtol=0, atol=1e-5)
        alone.backward(own_cotangent)
    for name, param in model.named_parameters():
        if param.grad is None:
            assert name not in found
        elif "hc" not in name:  # scalars whose gradient is a sum that all but cancels
            assert relative_error(found[name], param.grad) < 1e-4, name


def test_packing_needs_no_mask_and_takes_one() -> None:
    """With and without an attention mask, and with padding behind the last document."""
    model = tiny_transformers(dtype=torch.float32, index_n_heads=16)
    use_windowed_attention(model)
    tokens = torch.randint(0, 128, (1, 60), generator=torch.Generator().manual_seed(0))
    positions = positions_of((20, 40))
    plain = model(input_ids=tokens, position_ids=positions).logits
    mask = torch.ones_like(tokens)
    assert torch.equal(model(input_ids=tokens, position_ids=positions, attention_mask=mask).logits, plain)
    mask[:, 52:] = 0
    padded = model(input_ids=tokens, position_ids=positions, attention_mask=mask).logits
    torch.testing.assert_close(padded[:, :52], plain[:, :52], rtol=0, atol=1e-6)


def test_deep_copies_and_layers_share_nothing() -> None:
    """Two models, one packed and one not, in turns: what one forward found out about its tokens stays in it."""
    model = tiny_transformers(dtype=torch.float32, index_n_heads=16)
    use_windowed_attention(model)
    other = copy.deepcopy(model)
    tokens = torch.randint(0, 128, (1, 60), generator=torch.Generator().manual_seed(0))
    plain, packed = model(input_ids=tokens).logits, model(input_ids=tokens, position_ids=positions_of((20, 40))).logits
    assert not torch.allclose(plain, packed, atol=1e-3)
    assert torch.equal(other(input_ids=tokens, position_ids=positions_of((20, 40))).logits, packed)
    assert torch.equal(model(input_ids=tokens).logits, plain)
