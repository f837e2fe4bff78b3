"""What a model makes of packed batches: for each document what it makes of the document alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_layers import relative_error
from tiny_models import tiny_transformers
from tiny_tokenizer import deepseek_tokenizer
from torch import nn

from dsv4_fsdp import tie_compressors, use_windowed_attention
from dsv4_fsdp.data.batches import Batch, RowBatches
from dsv4_fsdp.data.prepare import prepare
from dsv4_fsdp.data.settings import SftSettings
from dsv4_fsdp.train.config import resolve
from dsv4_fsdp.train.loop import make_loss

pytestmark = pytest.mark.usefixtures("one_thread")

# The lengths in tokens of the answers: documents longer than an HCA window of 32, and shorter than a CSA one's of 4.
ANSWERS = (41, 3, 50, 13, 1, 33, 27, 8)
PAD_ID = 257  # EOS, which is no input here: the last token of a document is a label only


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """Two packed rows of conversations, one of them shorter than the other."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": chr(97 + n), "completion": chr(65 + n) * length} for n, length in enumerate(ANSWERS)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SftSettings(
        path=str(folder / "a.jsonl"), sequence_length=125, global_batch_size=2, micro_batch_size=2, pack=True
    )
    batches = prepare(
        settings, tokenizer=deepseek_tokenizer(), cache_dir=folder, seed=0, is_maker=True, wait=lambda: None
    )
    assert isinstance(batches, RowBatches)
    (found,) = batches.micro_batches(0, rank=0, world_size=1)
    assert found.input_ids.shape[0] == batches.num_sequences == 2
    assert int(found.lengths.min()) < int(found.lengths.max())
    return found


def places(batch: Batch) -> list[tuple[int, slice]]:
    """Row and span of each document."""
    assert batch.position_ids is not None
    found = []
    for row, (positions, length) in enumerate(zip(batch.position_ids, batch.lengths.tolist(), strict=True)):
        starts = [place for place in range(length) if positions[place] == 0]
        found += [(row, slice(start, end)) for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return found


def make_model() -> nn.Module:
    model = tiny_transformers(dtype=torch.float32, index_n_heads=16, vocab_size=264)
    use_windowed_attention(model)
    return model


def loss_and_gradients(model: nn.Module, batch: Batch, *, loss: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    value = make_loss(model, resolve({"model.loss": loss}))(batch)
    value.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return value.detach(), grads


@pytest.mark.parametrize("length", [3, 20])
def test_a_compressor_whose_window_no_document_fills_has_no_gradient(length: int) -> None:
    """As for each document alone, though the row is long enough; so no weight decay moves what was not used."""
    model = make_model()
    alignment = tie_compressors(model)
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, 256, (2, 2, 5 * length), generator=generator)
    positions = torch.arange(length).repeat(2, 5)
    found, grads = loss_and_gradients(
        model, Batch(ids, labels, torch.tensor([5 * length] * 2), positions), loss="stock"
    )
    filled = [1.0 if "layers.2." in fqn and length > 4 else 0.0 for fqn in alignment.compressor_fqns]
    assert alignment.window_flags().tolist() == filled  # layer 2 is CSA with windows of 4, layers 1 and 3 are HCA
    alignment.reset()
    single = Batch(ids.reshape(-1, length), labels.reshape(-1, length), torch.tensor([length] * 10))
    expected, alone = loss_and_gradients(model, single, loss="stock")
    assert alignment.window_flags().tolist() == filled
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        assert bool(grad.any()) == bool(alone[name].any()), name


@pytest.mark.parametrize("loss", ["chunked", "stock"])
def test_each_packed_document_has_the_loss_and_gradients_that_it_has_alone(batch: Batch, loss: str) -> None:
    """Each by itself: the labels of the others are taken out, so that what one leaks into another would show."""
    model = make_model()
    total = torch.zeros(())
    documents = places(batch)
    assert len(documents) == len(ANSWERS)
    for row, span in documents:
        wanted = torch.full_like(batch.labels, -100)
        wanted[row, span] = batch.labels[row, span]
        found, grads = loss_and_gradients(model, replace(batch, labels=wanted), loss=loss)
        own = Batch(batch.input_ids[row : row + 1, span], batch.labels[row : row + 1, span], torch.tensor([0]))
        expected, alone = loss_and_gradients(model, own, loss=loss)
        total += found
        # Sums of the same fp32 terms, in blocks that begin elsewhere.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        whole = torch.stack([grad.double().norm() for grad in alone.values()]).norm()
        for name, grad in grads.items():
            if name not in alone:  # a compressor of which no window was complete
                assert not grad.any(), name
            elif "hc" in name:  # scalars whose gradient is a sum that all but cancels
                assert (grad - alone[name]).double().norm() < 1e-5 * whole, name
            else:
                assert relative_error(grad, alone[name]) < 1e-4, name
        assert alone.keys() <= grads.keys()
    torch.testing.assert_close(loss_and_gradients(model, batch, loss=loss)[0], total, rtol=1e-5, atol=0)


def test_padding_behind_packed_documents_changes_nothing_of_them(batch: Batch) -> None:
    """Another padding token, or none in a batch of its own: the same loss; and nothing flows into padding."""
    model = make_model()
    found, grads = loss_and_gradients(model, batch, loss="chunked")
    assert not grads["model.embed_tokens.weight"][PAD_ID].any()
    padded = batch.input_ids == PAD_ID
    assert padded.sum() == batch.input_ids.numel() - batch.num_tokens
    other = replace(batch, input_ids=torch.where(padded, 5, batch.input_ids))
    # The experts' matrix products get other padding rows, and so other shapes.
    torch.testing.assert_close(loss_and_gradients(model, other, loss="chunked")[0], found, rtol=1e-6, atol=0)
    total = torch.zeros(())
    for row, length in enumerate(batch.lengths.tolist()):
        tensors = (batch.input_ids, batch.labels, batch.position_ids)
        ids, labels, positions = (each[row : row + 1, :length] for each in tensors if each is not None)
        alone = Batch(ids, labels, torch.tensor([length]), positions)
        total += loss_and_gradients(model, alone, loss="chunked")[0]
    torch.testing.assert_close(total, found, rtol=1e-6, atol=0)


def test_a_packed_batch_without_labels_gives_zero_and_gradients_of_zero(batch: Batch) -> None:
    """What a rank runs through while others still have something."""
    for loss in ("chunked", "stock"):
        value, grads = loss_and_gradients(make_model(), batch.without_labels(), loss=loss)
        assert value == 0
        assert grads
        assert not any(grad.any() for grad in grads.values())


def test_documents_that_are_not_told_apart_are_computed_otherwise(batch: Batch) -> None:
    """The tests above can fail: without position ids the loss is another in its third digit."""
    model = make_model()
    apart: Any = loss_and_gradients(model, batch, loss="chunked")[0]
    joined: Any = loss_and_gradients(model, replace(batch, position_ids=None), loss="chunked")[0]
    assert abs(joined / apart - 1) > 1e-3
