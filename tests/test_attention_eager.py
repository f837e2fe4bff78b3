"""Windowed attention against Transformers' eager attention: the same numbers, for every layer type."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_layers import (
    CSA_RATE,
    HCA_RATE,
    LAYER_TYPES,
    TOP_K,
    WINDOW,
    LargestTensor,
    as_windowed,
    attend,
    attention_layer,
    gradients,
    hidden_for,
    relative_error,
)
from tiny_models import tiny_transformers
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dsv4_fsdp import use_windowed_attention
from dsv4_fsdp.attention import compressors, windowed
from dsv4_fsdp.errors import AttentionError
from dsv4_fsdp.integrations import unpatched

pytestmark = pytest.mark.usefixtures("one_thread")

# One token; around a CSA window (4), the top-k's first choice (16, 20), the window (16) and HCA windows (32, 64).
LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 19, 20, 21, 31, 32, 33, 63, 64, 65, 150]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, chunks and score blocks small enough that these lengths have several of each."""
    monkeypatch.setattr(windowed, "_BLOCK", 8)
    monkeypatch.setattr(windowed, "_CHUNK_ELEMENTS_ON_CPU", 4000)
    monkeypatch.setattr(compressors, "_SCORE_ELEMENTS_ON_CPU", 2000)


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_forward_and_gradients_equal_eager_in_fp32(kind: str) -> None:
    """1e-5, and the same gradients ``None``, at every edge of a window, on batches of one and two rows."""
    layer, rope = attention_layer(kind)
    ours = as_windowed(layer)
    for tokens in LENGTHS:
        hidden = hidden_for(layer, 2 if tokens % 2 else 1, tokens)
        expected = attend(layer, rope, hidden)
        expected_grads = gradients(layer, hidden, expected)
        found = attend(ours, rope, hidden)
        grads = gradients(ours, hidden, found)
        # Sums of up to 200 terms in another order, a few roundings (6e-8) each of the terms' size.
        assert relative_error(found, expected) < 1e-5, tokens
        assert grads.keys() == expected_grads.keys(), tokens
        errors = {name: relative_error(grads[name], grad) for name, grad in expected_grads.items()}
        assert max(errors.values()) < 1e-5, (tokens, errors)


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_bf16_is_no_farther_from_fp64_than_eager(kind: str) -> None:
    """Both layers in bf16 with fp32 islands, against the same values in fp64; errors of all lengths added up."""
    layer, rope = attention_layer(kind, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    sides = {"eager": layer, "ours": as_windowed(layer)}
    errors, grad_errors = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0.0)
    for tokens in (16, 33, 64, 150):
        hidden = hidden_for(layer, 1, tokens)
        precise = hidden.detach().double().requires_grad_()
        expected = attend(exact, rope, precise)
        expected_grads = gradients(exact, precise, expected)
        for name, side in sides.items():
            output = attend(side, rope, hidden)
            errors[name] += relative_error(output, expected) ** 2
            grads = gradients(side, hidden, output)
            grad_errors[name] += sum(relative_error(grads[k], g) ** 2 for k, g in expected_grads.items())
    # Of CSA most is the indexer's: in bf16 it chooses other entries here and there, on both sides the same.
    assert errors["ours"] <= errors["eager"], errors
    assert grad_errors["ours"] <= grad_errors["eager"], grad_errors


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_right_padding_is_as_if_it_were_not_there(kind: str) -> None:
    """Rows of 33 and 50 tokens: equal to eager with the same mask, and to each row without its padding."""
    layer, rope = attention_layer(kind)
    ours = as_windowed(layer)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, 33:] = 0
    hidden = hidden_for(layer, 2, 50)
    real = mask.bool().unsqueeze(-1)
    outputs, grads = [], []
    for side in (layer, ours):
        output = attend(side, rope, hidden, attention_mask=mask)
        outputs.append(output)
        grads.append(gradients(side, hidden, output * real))
    assert relative_error(outputs[1] * real, outputs[0] * real) < 1e-5
    for name, grad in grads[0].items():
        assert relative_error(grads[1][name], grad) < 1e-5, name
    alone = attend(ours, rope, hidden[:1, :33].detach())
    torch.testing.assert_close(outputs[1][:1, :33], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_the_future_changes_nothing(kind: str) -> None:
    """Other tokens from ``t`` on leave every bit of the outputs before ``t``, at each edge of a window."""
    layer, rope = attention_layer(kind)
    ours = as_windowed(layer)
    hidden = hidden_for(layer, 1, 70).detach()
    before = attend(ours, rope, hidden)
    for t in (1, CSA_RATE - 1, CSA_RATE, CSA_RATE + 1, WINDOW, 20, HCA_RATE - 1, HCA_RATE, HCA_RATE + 1, 64, 69):
        changed = hidden.clone()
        changed[:, t:] = hidden_for(layer, 1, 70, seed=1).detach()[:, t:]
        after = attend(ours, rope, changed)
        assert torch.equal(after[:, :t], before[:, :t]), t
        assert not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_no_tensor_grows_with_the_square_of_the_sequence(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: four times the tokens, at most four times the largest tensor."""
    monkeypatch.setattr(windowed, "_CHUNK_ELEMENTS_ON_CPU", 2**16)
    monkeypatch.setattr(compressors, "_SCORE_ELEMENTS_ON_CPU", 2**16)
    layer, rope = attention_layer(kind)
    ours = as_windowed(layer)
    largest = {}
    for tokens in (256, 1024):
        hidden = hidden_for(layer, 1, tokens)
        with LargestTensor() as seen:
            gradients(ours, hidden, attend(ours, rope, hidden))
        largest[tokens] = seen.numel
    heads, dim = layer.num_heads, layer.head_dim
    # The queries, [4, 1024, 32]; the indexer's queries and CSA's two series of windows are no larger.
    assert largest[1024] <= max(4 * largest[256], heads * 1024 * dim)
    assert largest[1024] <= 2 * heads * 1024 * dim
    with LargestTensor() as seen:
        attend(layer, rope, hidden)
    assert seen.numel >= heads * 1024 * 1024, "eager makes the scores, so this test would see them"


def test_the_indexer_chooses_what_eager_chooses_and_rests_where_there_is_no_choice() -> None:
    """Equal sets, block by block; not called while all entries may be chosen, nor given a graph."""
    layer, rope = attention_layer("compressed_sparse_attention", index_n_heads=2)  # two heads: scores tie at zero
    ours = as_windowed(layer)
    chosen: dict[str, list[torch.Tensor]] = {"eager": [], "ours": []}
    for name, side in (("eager", layer), ("ours", ours)):
        side.compressor.indexer.register_forward_hook(lambda _m, _a, out, name=name: chosen[name].append(out))
    for tokens in (4 * TOP_K + 3, 4 * TOP_K + 4, 33, 64, 150):
        hidden = hidden_for(layer, 2, tokens)
        for side in (layer, ours):
            attend(side, rope, hidden)
    assert len(chosen["eager"]) == 5
    assert len(chosen["ours"]) == 4
    for expected, found in zip(chosen["eager"][1:], chosen["ours"], strict=True):
        assert not found.requires_grad
        assert torch.equal(found.sort(-1).values.long(), expected.sort(-1).values)


def test_sinks_are_read_in_fp32() -> None:
    """In a bf16 layer, rounding the sinks to bf16 shows: they are not rounded on the way."""
    layer, rope = attention_layer("sliding_attention", dtype=torch.bfloat16)
    ours = as_windowed(layer)
    assert ours.sinks.dtype == torch.float32
    query, keys = torch.randn(1, 4, 20, 8), torch.randn(1, 20, 8)
    sight = windowed.Sight(WINDOW)
    exact = windowed.windowed_attention(query, keys, ours.sinks, scale=1.0, sight=sight)
    rounded = windowed.windowed_attention(query, keys, ours.sinks.bfloat16(), scale=1.0, sight=sight)
    assert not torch.equal(exact, rounded)
    output = attend(ours, rope, hidden_for(ours, 1, 20))
    output.float().sum().backward()
    assert ours.sinks.grad is not None
    assert ours.sinks.grad.dtype == torch.float32


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_whole_model_trains_as_with_eager(checkpointing: bool) -> None:
    """All layer types in one model, fp32, with and without (non-reentrant) activation checkpointing."""
    model = tiny_transformers(dtype=torch.float32)
    ours = copy.deepcopy(model)
    use_windowed_attention(ours)
    if checkpointing:
        ours.activation_checkpointing_enable()
    tokens = torch.randint(0, 128, (2, 70), generator=torch.Generator().manual_seed(0))
    losses, logits = [], []
    for each in (model, ours):
        output = each(input_ids=tokens, labels=tokens)
        output.loss.backward()
        losses.append(output.loss.detach())
        logits.append(output.logits.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    theirs = dict(model.named_parameters())
    for name, param in ours.named_parameters():
        grad = theirs[name].grad
        if grad is None:
            assert param.grad is None, name
        elif "hc" not in name:  # scalars whose gradient is a sum that all but cancels
            assert relative_error(param.grad, grad) < 1e-4, name


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_forward_with_a_cache_that_is_empty_is_no_other(use_cache: bool) -> None:
    """Transformers' default in training is to fill a cache."""
    model = tiny_transformers(dtype=torch.float32)
    tokens = torch.randint(0, 128, (2, 70), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=tokens, use_cache=use_cache).logits
    use_windowed_attention(model)
    torch.testing.assert_close(model(input_ids=tokens, use_cache=use_cache).logits, expected, rtol=0, atol=1e-5)


def test_generation_with_a_cache_is_eagers() -> None:
    """Greedy, past the window, CSA and HCA windows; two prompts, one padded on the left; and a prompt in two parts."""
    model = tiny_transformers(dtype=torch.float32, pad_token_id=0, eos_token_id=None).eval()
    ours = copy.deepcopy(model)
    use_windowed_attention(ours)
    prompts = torch.randint(1, 128, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)
    mask[1, :7] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "use_cache": True}
    results = [
        each.generate(prompts, **arguments, return_dict_in_generate=True, output_logits=True) for each in (model, ours)
    ]
    assert torch.equal(results[0].sequences, results[1].sequences)
    for theirs, found in zip(results[0].logits, results[1].logits, strict=True):
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-4)
    with torch.no_grad():
        pairs = []
        for each in (model, ours):
            first = each(input_ids=prompts[:, :21], use_cache=True)
            pairs.append(each(input_ids=prompts[:, 21:], cache=first.cache, use_cache=True).logits)
        whole = ours(input_ids=prompts, use_cache=False).logits[:, 21:]
    torch.testing.assert_close(pairs[1], pairs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(pairs[1], whole, rtol=0, atol=1e-5)


def test_eager_models_run_transformers_own_code() -> None:
    """The four classes fall through to their own forward; taking the implementation back gives the same bits."""
    for name in ("Attention", "HCACompressor", "CSACompressor", "Indexer"):
        original = unpatched(getattr(modeling, f"DeepseekV4{name}").forward)
        assert original.__module__ == modeling.__name__
        assert unpatched(original) is original
    model = tiny_transformers()
    tokens = torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    before = model(input_ids=tokens).logits
    use_windowed_attention(model)
    model.set_attn_implementation("eager")
    assert torch.equal(model(input_ids=tokens).logits, before)


def test_from_the_start_is_the_same_as_afterwards() -> None:
    """``attn_implementation="dsv4_windowed"`` at construction."""
    from tiny_models import transformers_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(transformers_config(), attn_implementation="dsv4_windowed").eval()
    tokens = torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    first = model(input_ids=tokens).logits
    use_windowed_attention(model)
    assert torch.equal(model(input_ids=tokens).logits, first)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "4-D mask": ({"attention_mask": torch.zeros(1, 1, 40, 40)}, "cannot follow a mask"),
    "weights": ({"output_attentions": True}, "no attention weights"),
    "documents with a cache": (
        {"position_ids": torch.arange(40).remainder(25).unsqueeze(0), "use_cache": True},
        "use_cache=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name: str) -> None:
    """With a message that says what to do instead."""
    arguments, message = REFUSED[name]
    model = tiny_transformers()
    use_windowed_attention(model)
    with pytest.raises(AttentionError, match=message):
        model(input_ids=torch.zeros(1, 40, dtype=torch.long), **arguments)


def test_dropout_and_other_models_are_refused() -> None:
    """Attention dropout in training; a model that is no DeepSeek-V4."""
    model = tiny_transformers(attention_dropout=0.1)
    use_windowed_attention(model)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(AttentionError, match="no dropout"):
        model(input_ids=tokens)
    model.eval()(input_ids=tokens)
    with pytest.raises(AttentionError, match="found no model"):
        use_windowed_attention(nn.Linear(2, 2))
