"""``torch.compile`` of blocks: the numbers stay, the dtypes stay, and what was compiled is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases_compile import CompiledResult, compiled_lockstep, recomputed_windowed_gradients
from reference import assert_lockstep
from tiny_models import tiny_batch, tiny_transformers

from dsv4_fsdp import ShardingError, audit, compile_blocks

HCA_AND_SLIDING = ("heavily_compressed_attention", "sliding_attention")


def _assert_compiled(result: CompiledResult) -> None:
    """Every block ran graphs, the breaks are those that we make and torch's own, the islands are fp32."""
    assert result.graphs_run.keys() == set(result.blocks)
    assert min(result.graphs_run.values()) > 0
    assert result.graphs > 0
    assert "NOT compiled" not in result.text
    # The mixers that are kept out, and the loop over experts that got a token.
    assert set(result.breaks) == {"Skip calling `torch.compiler.disable()`d function", "Dynamic shape operator"}
    assert f"graphs compiled: {result.graphs}, of " in result.text
    assert f"kept eager: {2 * len(result.blocks)} mixers" in result.text
    assert result.island_dtypes == {torch.float32}
    assert result.audit_ok


@pytest.mark.parametrize(("layers", "first"), [(HCA_AND_SLIDING, "shard"), (HCA_AND_SLIDING[:1], "compile")])
def test_graphs_run_by_torch_itself_change_no_bit(run_ranks: Any, layers: tuple[str, ...], first: str) -> None:
    """Backend ``eager``, two ranks of different lengths, compiled after sharding and before."""
    results = run_ranks(2, compiled_lockstep, layers, "eager", first=first)
    assert_lockstep([result.lockstep for result in results])
    for result in results:
        _assert_compiled(result)


def test_graphs_with_their_own_backward_keep_the_forward_bit_equal(run_ranks: Any) -> None:
    """Backend ``aot_eager``, one block: forward bit-equal, gradients as near as sums of bf16 in another order are."""
    results = run_ranks(2, compiled_lockstep, ("sliding_attention",), "aot_eager", first="shard")
    # Backward is traced as one graph, which adds the bf16 gradients of the streams in another order. A rounding is
    # 2**-9 of an addend; in the mixers' biases, where addends cancel, up to ten times that is left.
    assert_lockstep([result.lockstep for result in results], grad_tol=4e-2)
    for result in results:
        _assert_compiled(result)


def test_a_block_that_ran_eagerly_is_not_called_compiled() -> None:
    """torch runs eagerly without an error, for many reasons; here it was told to. The report names the blocks."""
    model = tiny_transformers(HCA_AND_SLIDING)
    report = compile_blocks(model, backend="eager")
    assert report.text() == "2 blocks, none run yet: nothing is compiled before the first forward"
    assert report.eager_blocks == ()
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        model(input_ids=tiny_batch("transformers", 8).input_ids)
    assert report.graphs == 0
    assert report.eager_blocks == report.blocks == ("model.layers.0", "model.layers.1")
    assert str(report).endswith("NOT compiled, ran eagerly: model.layers.0, model.layers.1")


def test_an_audit_before_the_first_step_does_not_keep_torch_from_compiling() -> None:
    """Its step runs under a dispatch mode, after which torch would never compile these functions in this process."""
    torch._dynamo.reset()
    model = tiny_transformers(("sliding_attention",))
    tokens = tiny_batch("transformers", 8).input_ids
    report = compile_blocks(model, backend="eager")
    audit(model, step=lambda: model(input_ids=tokens).logits.float().sum().backward())
    assert report.eager_blocks == ("model.layers.0",)
    with torch.no_grad():
        model(input_ids=tokens)
    assert report.eager_blocks == ()
    assert report.graphs > 0


def test_mixers_are_kept_eager_unless_asked_for() -> None:
    """Two per block by default; none with ``mixers="compiled"``."""
    kept = compile_blocks(tiny_transformers(HCA_AND_SLIDING), backend="eager").eager
    assert kept == tuple(f"model.layers.{i}.{mixer}" for i in (0, 1) for mixer in ("attn_hc", "ffn_hc"))
    assert compile_blocks(tiny_transformers(HCA_AND_SLIDING), backend="eager", mixers="compiled").eager == ()


def test_wrong_calls_are_refused() -> None:
    """A second call would compile the compiled; a misspelt word would be ignored."""
    model = tiny_transformers(HCA_AND_SLIDING)
    with pytest.raises(ValueError, match="expected: 'eager' or 'compiled'\ngot: 'both'"):
        compile_blocks(model, mixers="both")  # type: ignore[arg-type]
    compile_blocks(model, backend="eager")
    with pytest.raises(ShardingError, match=r"got: 2 compiled blocks, model.layers.0 the first"):
        compile_blocks(model, backend="eager")


@pytest.mark.parametrize("layer", ["heavily_compressed_attention", "compressed_sparse_attention"])
def test_compiled_blocks_attend_in_windows_and_run_again(run_ranks: Any, layer: str) -> None:
    """Both runs of a recomputed block are of one graph: nothing of the first may be found by the second."""
    layers = ("sliding_attention", layer)
    (eager,), (compiled,) = (run_ranks(1, recomputed_windowed_gradients, layers, compiled=way) for way in (False, True))
    assert eager.keys() == compiled.keys()
    for name, grad in eager.items():
        torch.testing.assert_close(compiled[name], grad, rtol=2e-2, atol=2e-2 * float(grad.abs().max()), msg=name)
