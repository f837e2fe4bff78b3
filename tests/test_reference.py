"""The tiny models are what they claim to be, and the lock-step harness and the recorder find what they must find."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import Collective, LockstepResult, Recorder, StepResult, assert_lockstep, lockstep, token_loss
from tiny_models import (
    VOCAB_SIZE,
    Batch,
    cpu_stand_ins,
    island_buffer_names,
    island_names,
    model_kind,
    require_nemo,
    tiny_batch,
    tiny_nemo,
    tiny_transformers,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pool import run_ranks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in the ranks: quicker on models this small, and leaves the other core alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


BUILDERS: dict[str, Callable[..., nn.Module]] = {"transformers": tiny_transformers, "nemo": tiny_nemo}
KINDS = ["transformers", "nemo"]


def build(kind: str, **over: Any) -> nn.Module:
    if kind == "nemo":
        require_nemo()
    return BUILDERS[kind](**over)


# ---------------------------------------------------------------------------------------------------- the tiny models


@pytest.mark.parametrize("kind", KINDS)
def test_builders_are_deterministic_and_leave_the_random_state_alone(kind: str) -> None:
    """Same seed: same bits. Other seed: other weights. The caller's random numbers do not move."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = build(kind), build(kind), build(kind, seed=1)
    assert torch.equal(torch.rand(1), expected)
    same = again.state_dict()
    assert all(torch.equal(value, same[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first.get_parameter("lm_head.weight"), other.get_parameter("lm_head.weight"))
    assert model_kind(first) == kind


@pytest.mark.parametrize("kind", KINDS)
def test_no_float_tensor_is_constant_and_hash_routes_are_distinct(kind: str) -> None:
    """A constant such as 0 or 1 survives bf16 and would hide a downcast; equal picks would hide a routing error."""
    model = build(kind)
    state = model.state_dict()
    assert [n for n, t in state.items() if t.is_floating_point() and t.numel() > 1 and t.unique().numel() == 1] == []
    islands = [*island_names(model), *island_buffer_names(model)]
    assert [n for n in islands if torch.equal(state[n], state[n].bfloat16().float())] == []
    tables = [t for n, t in state.items() if n.endswith("tid2eid")]
    assert len(tables) == 2
    assert all((table[:, 0] != table[:, 1]).all() and table.unique().numel() == 4 for table in tables)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_any_one_island_to_bf16_changes_the_logits(kind: str) -> None:
    """So comparing logits sees a silent downcast of any island."""
    model = build(kind)
    state = model.state_dict()
    unseen = [*island_names(model), *island_buffer_names(model)]
    # What only a top-k choice shows (the indexer, the router bias) may take a longer sequence.
    for length in (64, 256):
        batch = tiny_batch(model_kind(model), length)
        with torch.no_grad():
            expected = model(input_ids=batch.input_ids).logits
            for name in list(unseen):
                kept = state[name].clone()
                state[name].copy_(kept.bfloat16())
                if not torch.equal(model(input_ids=batch.input_ids).logits, expected):
                    unseen.remove(name)
                state[name].copy_(kept)
    # NeMo's attention rounds its fp32 sinks to the dtype of the scores by itself (`eager_attention_with_sink`).
    sinks = [f"model.layers.{i}.self_attn.sinks_param.weight" for i in range(4)] if kind == "nemo" else []
    assert unseen == sinks


def test_transformers_dtypes_are_those_that_from_pretrained_leaves(tmp_path: Any) -> None:
    """Saved and loaded with dtype=bfloat16, every parameter and buffer has the dtype and the bits it was built with."""
    from transformers import AutoModelForCausalLM

    model = tiny_transformers()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    built, read = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, loaded))
    assert {n: t.dtype for n, t in built.items()} == {n: t.dtype for n, t in read.items()}
    assert [n for n, t in built.items() if not torch.equal(t, read[n])] == []
    assert sum(t.dtype == torch.float32 for t in model.parameters()) == len(island_names(model)) == 56


@pytest.mark.parametrize("kind", KINDS)
def test_one_dtype_throughout_is_possible(kind: str) -> None:
    """dtype=float32 gives an all-fp32 model in which the islands still have their names."""
    model = build(kind, dtype=torch.float32)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert island_names(model) == island_names(build(kind))


@pytest.mark.parametrize(("kind", "window"), [("transformers", 32), ("nemo", 128)])
def test_only_the_indexer_and_short_hca_layers_have_no_gradient(kind: str, window: int) -> None:
    """With a whole window everything but the indexer trains; with a shorter sequence the HCA compressors drop out."""

    def without_gradient(length: int) -> set[str]:
        model = build(kind)
        batch = tiny_batch(model_kind(model), length)
        model(input_ids=batch.input_ids).logits.float().square().mean().backward()
        return {name for name, param in model.named_parameters() if param.grad is None}

    indexer = without_gradient(window)
    assert len(indexer) == 6
    assert all(".compressor.indexer." in name for name in indexer)
    short = without_gradient(window - 1) - indexer
    assert {name.split(".")[2] for name in short} == {"1", "3"}
    assert all(".self_attn.compressor." in name for name in short)


def test_nemo_runs_eagerly() -> None:
    """No torch.compile on a CPU: the fp32 RMSNorm is NeMo's plain function, and nothing went through dynamo."""
    require_nemo()
    model = tiny_nemo(1)
    model(input_ids=tiny_batch("nemo", 8).input_ids).logits.sum().backward()
    utils = sys.modules["nemo_automodel.components.models.common.utils"]
    assert not hasattr(utils._float32_rms_norm_fwd, "_torchdynamo_orig_callable")


def test_nemo_that_was_imported_before_runs_eagerly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that were already compiled at import are put back to NeMo's own."""
    require_nemo()
    cpu_stand_ins()
    utils = sys.modules["nemo_automodel.components.models.common.utils"]
    eager = utils._float32_rms_norm_fwd
    monkeypatch.setattr(utils, "_float32_rms_norm_fwd", torch.compile(eager, backend="eager"))
    cpu_stand_ins.__wrapped__()
    assert utils._float32_rms_norm_fwd is eager


# ------------------------------------------------------------------------------------ lock-step: what must be equal

HCA = "heavily_compressed_attention"
FULL_LENGTHS = (40, 64, 70, 33)  # by rank; all with an HCA window, so that plain FSDP2 can reduce


def fp32_model() -> nn.Module:
    return tiny_transformers(dtype=torch.float32)


def one_layer() -> nn.Module:
    return tiny_transformers((HCA,), dtype=torch.float32)


def shard_layers(model: nn.Module, **kwargs: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)


def batches_of_this_rank(num: int = 1) -> list[Batch]:
    rank = dist.get_rank()
    return [
        tiny_batch("transformers", FULL_LENGTHS[rank] + 3 * i, seed=10 * rank + i, weight=1 + rank / 2)
        for i in range(num)
    ]


def plain_fsdp(**options: Any) -> LockstepResult:
    return lockstep(fp32_model, shard_layers, batches_of_this_rank(2), **options)


# fp32 throughout: the sharded run sums the ranks' gradients in fp32 and the reference in fp64, so they differ by
# roundings of 2**-24 = 6e-8. 1e-5 leaves room for sums that nearly cancel, and is far below a bf16 rounding (4e-3).
FP32_GRAD_TOL = 1e-5


def test_plain_fsdp_in_fp32_follows_its_reference() -> None:
    """Four layers, two ranks, sequences of different lengths: bit-equal forward and equal gradients."""
    results = run_ranks(2, plain_fsdp)
    assert_lockstep(results, grad_tol=FP32_GRAD_TOL)
    assert [result.rank for result in results] == [0, 1]
    assert [result.bit_equal for result in results] == [[True], [True]]
    # Not vacuous: the ranks saw different losses, and something was rounded.
    assert results[0].steps[0].loss != results[1].steps[0].loss
    assert 0 < results[0].worst_grad_error == results[1].worst_grad_error


@pytest.mark.parametrize("sync", ["every", "last"])
def test_accumulation_and_adamw_follow_the_reference(sync: str) -> None:
    """Two micro-batches a step, three AdamW steps; with resync every forward is bit-equal."""
    results = run_ranks(2, plain_fsdp, steps=3, accumulate=2, sync=sync, optimizer="adamw", resync=True)
    # The two micro-batches' gradients of the one-element `hc_head.hc_scale` cancel to a thousandth: 6e-8 becomes 8e-5.
    # AdamW divides each gradient by its own size, so an element that is rounding noise can move its parameter by up to
    # lr = 1e-2 either way. Few are: 1e-3 of a norm, 1e-2 of a step.
    assert_lockstep(results, grad_tol=1e-3, param_tol=1e-3, update_tol=1e-2)
    assert len(results[0].bit_equal) == 6
    assert results[0].worst_update_error > 0


def hybrid_shard() -> LockstepResult:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return lockstep(one_layer, lambda model: shard_layers(model, mesh=mesh), batches_of_this_rank())


def wrapped_in_checkpoints() -> LockstepResult:
    def shard(model: nn.Module) -> None:
        model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        shard_layers(model)

    return lockstep(one_layer, shard, batches_of_this_rank())


def tied_and_partly_frozen() -> LockstepResult:
    def model() -> nn.Module:
        tied = tiny_transformers((HCA,), dtype=torch.float32, tie_word_embeddings=True)
        tied.model.layers[0].mlp.requires_grad_(False)
        return tied

    return lockstep(model, shard_layers, batches_of_this_rank(), optimizer="sgd", lr=0.1)


def bf16_with_uneven_shards() -> LockstepResult:
    """All weights bf16 (no islands), fp32 reduction, three ranks: few dims divide by three."""

    def model() -> nn.Module:
        return one_layer().bfloat16()

    def shard(model: nn.Module) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard_layers(model, mp_policy=policy)

    return lockstep(model, shard, batches_of_this_rank())


def fp32_masters() -> LockstepResult:
    """fp32 storage and bf16 compute: the reference is the same model with bf16 weights (and its fp32 buffers)."""

    def reference() -> nn.Module:
        model = one_layer()
        for param in model.parameters():
            param.data = param.data.bfloat16()
        return model

    def shard(model: nn.Module) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard_layers(model, mp_policy=policy)

    return lockstep(one_layer, shard, batches_of_this_rank(), build_reference=reference)


@pytest.mark.parametrize(
    ("world_size", "case", "tolerances"),
    [
        (4, hybrid_shard, {"grad_tol": FP32_GRAD_TOL}),
        (2, wrapped_in_checkpoints, {"grad_tol": FP32_GRAD_TOL}),
        # SGD: the update is lr times the gradient, so its error is the gradient's.
        (2, tied_and_partly_frozen, {"grad_tol": FP32_GRAD_TOL, "param_tol": 1e-6, "update_tol": FP32_GRAD_TOL}),
        (3, bf16_with_uneven_shards, {}),
        (2, fp32_masters, {"grad_tol": FP32_GRAD_TOL}),
        (1, plain_fsdp, {"grad_tol": 0.0}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_other_layouts_follow_the_reference(
    world_size: int, case: Callable[[], LockstepResult], tolerances: dict[str, Any]
) -> None:
    """Two mesh axes, checkpoint wrappers, tied and frozen parameters, bf16, fp32 masters, and a single rank."""
    assert_lockstep(run_ranks(world_size, case), **tolerances)


def with_ignored_parameters() -> LockstepResult:
    def shard(model: nn.Module) -> None:
        shard_layers(model, ignored_params=set(model.model.layers[0].mlp.experts.parameters()))

    return lockstep(one_layer, shard, batches_of_this_rank(), optimizer="sgd")


def test_ignored_parameters_are_compared_with_the_ranks_own_gradient_and_must_be_expected() -> None:
    """FSDP leaves their gradients alone; a parameter that was left whole by mistake is named."""
    results = run_ranks(2, with_ignored_parameters)
    experts = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert_lockstep(results, grad_tol=FP32_GRAD_TOL, param_tol=1e-6, unsharded=experts)
    with pytest.raises(AssertionError, match=r"rank 0: these parameters are whole .*experts\.gate_up_proj.*down_proj"):
        assert_lockstep(results, grad_tol=FP32_GRAD_TOL, param_tol=1e-6)


def test_the_loss_is_the_weighted_mean_over_labelled_tokens() -> None:
    """Unlabelled tokens count neither above nor below the line; without any label loss and gradient are 0, not nan."""
    batch = tiny_batch("transformers", 8, weight=3.0)
    logits = torch.randn(1, 8, VOCAB_SIZE, requires_grad=True)
    expected = 3.0 * F.cross_entropy(logits[0, :-1], batch.input_ids[0, 1:])
    torch.testing.assert_close(token_loss(logits, batch), expected)
    loss = token_loss(logits, tiny_batch("transformers", 8)._replace(labels=torch.full((1, 8), -100)))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


# ------------------------------------------------------------------------------------- lock-step: what must be found

NAME = "model.layers.0.self_attn.q_a_proj.weight"


def faulty(fault: str) -> LockstepResult:
    """A sharded model with one fault, of which nothing else should be reported."""

    def shard(model: nn.Module) -> None:
        if fault == "island rounded to bf16":
            island = model.get_parameter("model.layers.0.attn_hc.base")
            island.data.copy_(island.data.bfloat16())
        if fault == "weights in another dtype":
            model.bfloat16()
        if fault == "left whole":
            return
        shard_layers(model)

    def after_backward(model: nn.Module) -> None:
        param = model.get_parameter(NAME)
        assert param.grad is not None
        if fault == "gradient scaled":
            param.grad.mul_(1.01)
        elif fault == "gradient not finite":
            param.grad.fill_(float("nan"))
        elif fault == "gradient missing" or (fault == "gradient missing on rank 1" and dist.get_rank() == 1):
            param.grad = None
        elif fault == "gradients summed":
            for each in model.parameters():
                each.grad.mul_(dist.get_world_size())

    return lockstep(one_layer, shard, batches_of_this_rank(), after_backward=after_backward)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("island rounded to bf16", r"rank 0, step 0: the forward of micro-batch 0 is not bit-equal \(.* 0\.0"),
        ("weights in another dtype", r"rank 1, step 0: the forward of micro-batch 0 is not bit-equal"),
        ("gradient scaled", rf"rank 1, step 0: gradient of {NAME}: relative error 0\.01, allowed 1e-05"),
        ("gradient not finite", rf"rank 0, step 0: gradient of {NAME}: relative error inf, allowed 1e-05"),
        ("gradient missing", rf"rank 0, step 0: gradient of {NAME}: reference has a gradient, sharded None"),
        ("gradient missing on rank 1", rf"rank 0, step 0: gradient of {NAME}: a gradient on 1 of 2 ranks only"),
        ("gradients summed", r"rank 0, step 0: gradient of \S+: relative error 1, allowed 1e-05"),
        ("left whole", r"rank 0: these parameters are whole on this rank: \['model\.embed_tokens\.weight'"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, message: str) -> None:
    """Each injected fault fails the assertion with the rank, the step and the parameter, and faults do not hide."""
    results = run_ranks(2, faulty, fault)
    with pytest.raises(AssertionError, match=message) as caught:
        assert_lockstep(results, grad_tol=FP32_GRAD_TOL)
    if fault.startswith("gradient "):
        assert str(caught.value).count("\n") == 2, "one line for each rank, and nothing else"


def lazy_optimizer() -> LockstepResult:
    """The sharded model's optimizer leaves one parameter out."""

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        sharded = hasattr(params[0], "full_tensor")
        return torch.optim.SGD(params[1:] if sharded else params, lr=0.1)

    return lockstep(one_layer, shard_layers, batches_of_this_rank(), optimizer=optimizer, steps=2)


def test_a_parameter_that_does_not_move_is_found() -> None:
    """Its update error is 1, even where the parameter error is small; and the second forward is no longer equal."""
    results = run_ranks(2, lazy_optimizer)
    anything = {"grad_tol": math.inf, "param_tol": math.inf}
    unmoved = r"rank 1, step 0: update of model\.embed_tokens\.weight: relative error 1,"
    with pytest.raises(AssertionError, match=unmoved):
        assert_lockstep(results, update_tol=0.5, **anything)
    with pytest.raises(AssertionError, match=r"rank 0, step 1: the forward of micro-batch 0 is not bit-equal"):
        assert_lockstep(results, **anything)
    assert_lockstep(results, drift_tol=math.inf, **anything)


def silent_reference() -> LockstepResult:
    """No rank has an HCA window, so the reference's compressor has no gradient; the sharded one is given some."""

    def after_backward(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            if ".compressor." in name:
                assert param.grad is None
                param.grad = torch.ones_like(param) if name.endswith("position_bias") else torch.zeros_like(param)

    return lockstep(one_layer, shard_layers, [tiny_batch("transformers", 20)], after_backward=after_backward)


def test_a_zero_where_the_reference_has_none_passes_only_if_named() -> None:
    """A zero gradient instead of None lets AdamW decay the parameter, so a test must say that it expects one."""
    results = run_ranks(2, silent_reference)
    assert len(results[0].steps[0].zero_for_none) == 3
    nonzero = r"rank 1, step 0: gradient of \S+compressor\.position_bias: reference None, sharded has a gradient"
    zero = r"gradient of \S+compressor\.kv_proj\.weight: reference None, sharded zero"
    with pytest.raises(AssertionError, match=zero):
        assert_lockstep(results)
    with pytest.raises(AssertionError, match=nonzero) as caught:
        assert_lockstep(results, zero_for_none="any")
    assert "kv_proj" not in str(caught.value)


def test_wrong_use_of_the_harness_is_refused() -> None:
    """No results, an optimizer without a tolerance, no batch, models of different shape, a root that cannot defer."""
    with pytest.raises(ValueError, match="no results"):
        assert_lockstep([])
    stepped = LockstepResult(0, stepped=True, unsharded=[], steps=[StepResult(0, bit_equal=[True])])
    with pytest.raises(ValueError, match="param_tol"):
        assert_lockstep([stepped])
    assert_lockstep([replace(stepped, stepped=False)])
    with pytest.raises(ValueError, match="at least one batch"):
        lockstep(one_layer, shard_layers, [])
    batch = [tiny_batch("transformers", 8)]
    with pytest.raises(ValueError, match=r"only in the reference: \['model\.layers\.1\.attn_hc\.base'"):
        lockstep(one_layer, lambda model: None, batch, build_reference=fp32_model)
    with pytest.raises(ValueError, match="to be an FSDP unit, but it is a DeepseekV4ForCausalLM"):
        lockstep(one_layer, lambda model: None, batch, sync="last")


# ----------------------------------------------------------------------------------------------------- the recorder


class TwoLayers(nn.Module):
    """An embedding and a linear layer: two units, 128 * 6 and 128 * 6 + 128 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 6)
        self.head = nn.Linear(6, VOCAB_SIZE)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))


def record_two_layers(policy: MixedPrecisionPolicy) -> Sequence[Collective]:
    torch.manual_seed(0)
    model = TwoLayers()
    for module in (model.embed, model.head, model):
        fully_shard(module, mp_policy=policy)
    with Recorder() as recorder:
        model(tiny_batch("transformers", 8).input_ids).float().sum().backward()
    assert recorder.count("all_gather") == recorder.count("all_gather", policy.param_dtype or torch.float32)
    assert recorder.numel("reduce_scatter", torch.float32) == 1664
    assert recorder.counts().total() == len(recorder.collectives)
    model.head.weight.grad.full_tensor()  # after the block: not recorded
    return recorder.collectives


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_the_recorder_sees_what_plain_fsdp_sends_and_in_which_dtype(param_dtype: torch.dtype | None) -> None:
    """Each unit gathers in forward and again in backward, in the compute dtype, and reduces once, in fp32."""
    wire = param_dtype or torch.float32
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    embed, head = 768, 896
    expected = [
        *(Collective("all_gather", wire, numel // 2, 2) for numel in (embed, head, embed, head)),
        *(Collective("reduce_scatter", torch.float32, numel, 2) for numel in (embed, head)),
    ]
    for collectives in run_ranks(2, record_two_layers, policy):
        assert Counter(collectives) == Counter(expected)
        assert collectives[:2] == expected[:2], "in forward: the embedding, then the head"


def record_everything_else() -> Sequence[Collective]:
    group = dist.new_group([0, 1])
    model = TwoLayers()
    fully_shard(model)
    with Recorder() as recorder:
        dist.all_reduce(torch.ones(3, dtype=torch.int32), group=group)
        dist.broadcast(torch.ones(5), 0)
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        dist.barrier()
        model.head.bias.full_tensor()  # a functional collective, inside a DTensor's method
        nn.utils.get_total_norm([model.head.bias]).full_tensor()
    return recorder.collectives


def test_the_recorder_sees_plain_and_functional_collectives() -> None:
    """c10d, functional collectives and those inside DTensor operations, with the size of their group."""
    for collectives in run_ranks(2, record_everything_else):
        assert [(c.kind, c.dtype, c.numel, c.group_size) for c in collectives] == [
            ("all_reduce", torch.int32, 3, 2),
            ("broadcast", torch.float32, 5, 2),
            ("all_to_all", torch.float32, 4, 2),
            ("barrier", torch.uint8, 1, 2),  # torch sends one byte
            ("all_gather", torch.float32, 64, 2),
            ("all_reduce", torch.float32, 1, 2),
        ]


def recorded_lockstep(sync: Literal["every", "last"]) -> LockstepResult:
    return lockstep(one_layer, shard_layers, batches_of_this_rank(2), steps=2, accumulate=2, sync=sync, record=True)


@pytest.mark.parametrize(("sync", "num_reductions"), [("every", 4), ("last", 2)])
def test_lockstep_records_the_sharded_models_collectives_only(sync: str, num_reductions: int) -> None:
    """Layer and root, two micro-batches a step: the root gathers once each, the layer twice; both reduce as asked."""
    results = run_ranks(2, recorded_lockstep, sync)
    assert_lockstep(results, grad_tol=FP32_GRAD_TOL)
    for result in results:
        for step in result.steps:
            assert Counter(c.kind for c in step.collectives) == {"all_gather": 6, "reduce_scatter": num_reductions}
