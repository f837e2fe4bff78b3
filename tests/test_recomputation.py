"""What a recomputed block keeps and does not compute again, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_layers import as_windowed, attend, attention_layer, gradients, hidden_for
from cases_attention import indexer_calls_when_sharded
from tiny_models import tiny_transformers
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dsv4_fsdp import recomputation, use_windowed_attention
from dsv4_fsdp.recomputation import checkpoint, keep
from pool import run_ranks

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def count_calls(layer: nn.Module) -> Counter[str]:
    """Calls by the name of the module, from now on."""
    calls: Counter[str] = Counter()
    for name, module in layer.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


def counted(compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    results: list[torch.Tensor] = []

    def counting() -> torch.Tensor:
        results.append(compute())
        return results[-1]

    return counting, results


# --- `keep` and `checkpoint` alone ------------------------------------------------------------------------------------


class Region(nn.Module):
    """Doubles its input, times an index that is dear to compute."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * x).sin() * keep(self, self.compute)


def test_a_result_is_computed_once_and_without_a_graph() -> None:
    weight = torch.tensor([3.0], requires_grad=True)
    compute, results = counted(lambda: weight + 0)
    x = torch.ones(1, requires_grad=True)
    output = checkpoint(Region(compute), x)
    output.backward(retain_graph=True)
    output.backward()  # the region runs a third time
    assert len(results) == 1
    assert weight.grad is None
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * 6 * torch.cos(torch.tensor([2.0])))


def test_regions_keep_apart() -> None:
    """Three calls of one module in flight, as of micro-batches whose backward is later; and one inside of another."""
    values = iter(range(1, 10))
    compute, results = counted(lambda: torch.tensor([float(next(values))]))
    region = Region(compute)
    inputs = [torch.full((1,), 0.1 * i, requires_grad=True) for i in range(3)]
    outputs = [checkpoint(region, x) for x in inputs]
    for output in reversed(outputs):
        output.backward()
    for i, x in enumerate(inputs):
        torch.testing.assert_close(x.grad, 2 * (i + 1) * torch.cos(2 * x.detach()))
    assert len(results) == 3

    x = torch.ones(1, requires_grad=True)
    nested = checkpoint(lambda y: checkpoint(region, y) * keep(region, compute), x)  # 4 inside, 5 outside
    nested.backward()
    # The inner region is a new one when the outer runs again, and computes again; the outer keeps.
    assert len(results) == 6
    assert [int(r) for r in results] == [1, 2, 3, 4, 5, 6]


def test_what_was_kept_goes_with_the_graph() -> None:
    compute, results = counted(lambda: torch.tensor([3.0]))
    output = checkpoint(Region(compute), torch.ones(1, requires_grad=True))
    kept = weakref.ref(results.pop())
    gc.collect()
    assert kept() is not None, "it was not kept"
    del output
    gc.collect()
    assert kept() is None


def test_another_order_in_the_second_run_computes_again() -> None:
    first, second = Region(lambda: torch.zeros(1)), Region(lambda: torch.zeros(1))
    order = [(first, 2.0), (second, 3.0)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for module, value in order:
            x = x.sin() * keep(module, lambda value=value: torch.tensor([value]))
        order.reverse()
        return x

    x = torch.ones(1, requires_grad=True)
    checkpoint(run, x).backward()
    # Whatever the second run multiplied by, it was never the other's: d/dx sin(3 sin x) * 2.
    sin, cos = torch.sin(torch.ones(1)), torch.cos(torch.ones(1))
    torch.testing.assert_close(x.grad, 2 * torch.cos(3 * sin) * 3 * cos)


def test_outside_of_regions_and_without_grad_nothing_is_kept() -> None:
    compute, results = counted(lambda: torch.tensor([3.0]))
    region = Region(compute)
    region(torch.ones(1, requires_grad=True)).backward()
    assert len(results) == 1
    with torch.no_grad():
        checkpoint(region, torch.ones(1))
    kept = weakref.ref(results[-1])
    results.clear()
    gc.collect()
    assert kept() is None


def test_a_failing_run_leaves_no_region_behind() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        checkpoint(Region(fail), torch.ones(1, requires_grad=True))
    compute, results = counted(lambda: torch.tensor([3.0]))
    region = Region(compute)
    region(torch.ones(1))
    region(torch.ones(1))
    assert len(results) == 2


def test_a_compiled_caller_recomputes_as_with_torch() -> None:
    """torch refuses a ``context_fn`` of this kind when it compiles checkpointing itself; it must get none."""
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: layer(y).sin() * keep(layer, lambda: torch.ones(1)), x)

    run(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.compile(run, backend="aot_eager", fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, expected)


# --- Attention --------------------------------------------------------------------------------------------------------


def run_layer(
    kind: str, how: Callable[..., Any] | None, *, prepare: Callable[[nn.Module], None], inputs_grad: bool
) -> Any:
    """Output, gradients and calls by module of one windowed layer; ``how`` recomputes it."""
    layer, rope = attention_layer(kind, q_lora_rank=32)
    layer = as_windowed(layer)
    prepare(layer)
    hidden = hidden_for(layer, 2, 70).detach().requires_grad_(inputs_grad)
    calls = count_calls(layer)
    if how is None:
        output = attend(layer, rope, hidden)
    elif how is torch_checkpoint:
        output = torch_checkpoint(lambda: attend(layer, rope, hidden), use_reentrant=False)
    else:
        output = how(lambda: attend(layer, rope, hidden))
    found = gradients(layer, hidden, output)
    return output.detach(), found, calls


def freeze(*words: str) -> Callable[[nn.Module], None]:
    def prepare(layer: nn.Module) -> None:
        for name, param in layer.named_parameters():
            param.requires_grad_(not any(word in name for word in words))

    return prepare


@pytest.mark.parametrize(
    ("kind", "frozen", "inputs_grad", "module", "times"),
    [
        (CSA, ("indexer",), True, "compressor.indexer", 1),
        (CSA, ("indexer",), True, "compressor.kv_proj", 2),  # the gradient of its input goes through it
        (CSA, ("nothing",), True, "compressor.indexer", 2),  # a loss of the caller's may hang on a trained indexer
        (HCA, ("compressor",), True, "compressor.kv_proj", 2),
        (HCA, ("compressor",), False, "compressor.kv_proj", 1),
        (CSA, ("compressor",), False, "compressor.kv_proj", 1),
        (HCA, ("nothing",), False, "compressor.kv_proj", 2),
    ],
)
def test_what_runs_again_and_what_does_not(
    kind: str, frozen: tuple[str, ...], inputs_grad: bool, module: str, times: int
) -> None:
    """And outputs and gradients are those of torch's checkpointing in every bit."""
    prepare = freeze(*frozen)
    plain, theirs, ours = (
        run_layer(kind, how, prepare=prepare, inputs_grad=inputs_grad) for how in (None, torch_checkpoint, checkpoint)
    )
    assert plain[2][module] == 1
    assert theirs[2][module] == 2, "torch recomputes it, or this test says nothing"
    assert ours[2][module] == times
    for other in (plain, theirs):
        assert torch.equal(ours[0], other[0])
        assert ours[1].keys() == other[1].keys()
        for name, grad in ours[1].items():
            assert torch.equal(grad, other[1][name]), name


def test_transformers_own_checkpointing_takes_the_contexts() -> None:
    """The line of the docstring, on a whole model; gradients equal in every bit."""
    model = tiny_transformers(dtype=torch.float32)
    use_windowed_attention(model)
    for name, param in model.named_parameters():
        param.requires_grad_("indexer" not in name)
    ours = copy.deepcopy(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    ours.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recomputation.contexts})
    tokens = torch.randint(0, 128, (2, 70), generator=torch.Generator().manual_seed(0))
    runs = []
    for each in (model, ours):
        calls = count_calls(each.train())
        each(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        runs.append({name: times for name, times in calls.items() if name.endswith("indexer")})
    assert set(runs[0].values()) == {2}
    assert set(runs[1].values()) == {1}
    for (name, expected), param in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert (expected.grad is None) == (param.grad is None), name
        assert param.grad is None or torch.equal(param.grad, expected.grad), name


def test_parallelize_keeps_the_choice() -> None:
    """Sharded on two ranks, one of which has no complete HCA window; two micro-batches before their backward."""
    for calls in run_ranks(2, indexer_calls_when_sharded):
        assert set(calls.values()) == {2}, "one per micro-batch"
