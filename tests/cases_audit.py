"""Live models to audit, run inside ranks: healthy ones sharded in every way, and ones with a fault put into them.

A *set-up* builds and shards a model on this rank. ``audited`` runs the audit around one real step and returns the
report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases_collectives import shard_blocks_head_root
from cases_parity import (
    AS_STORED,
    BF16,
    LENGTHS,
    all_fp32,
    blocks_of,
    mesh_of,
    on_meta_then_loaded,
    to_meta,
    whole_model,
    with_lora,
    with_master_weights,
)
from reference import logits_of, token_loss
from tiny_models import ModelKind, tiny_batch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from dsv4_fsdp import audit, contract_of, fully_shard, parallelize, plan_sharding
from dsv4_fsdp.audit_report import AuditReport
from dsv4_fsdp.contract import build_contract, island_reason, named_tensors
from dsv4_fsdp.torch_private import fsdp_state

BF = torch.bfloat16
FN = "model.layers.1.attn_hc.fn"


def one_step(model: nn.Module, kind: ModelKind, *, length: int | None = None) -> Callable[[], None]:
    """One forward and backward; each rank has a sequence of another length, the last rank's closes no window."""
    rank = dist.get_rank()
    batch = tiny_batch(kind, LENGTHS[kind][rank] if length is None else length, seed=rank)

    def step() -> None:
        token_loss(logits_of(model(input_ids=batch.input_ids)), batch).backward()

    return step


def audited(setup: str, kind: ModelKind, mesh_shape: tuple[int, ...]) -> AuditReport:
    """The report on a healthy set-up."""
    model, plan = HEALTHY[setup](kind, mesh_shape)
    # Without ties, ranks whose sequences close no window would reduce other gradients than the rest.
    length = 40 if setup == "stock_in_fp32" else None
    return audit(model, step=one_step(model, kind, length=length), plan=plan)


# --- Healthy ----------------------------------------------------------------------------------------------------------

Setup = Callable[[ModelKind, tuple[int, ...]], tuple[nn.Module, Any]]


def ours(build: Callable[..., nn.Module] = whole_model, **kwargs: Any) -> Setup:
    def setup(kind: ModelKind, mesh_shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
        model = build(kind)
        return model, parallelize(model, mesh_of(mesh_shape), **kwargs)

    return setup


def nemos_own_nested_units(kind: ModelKind, mesh_shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    model = whole_model("nemo")
    from nemo_automodel.components.models.deepseek_v4.fsdp import fully_shard_deepseek_v4

    shard_blocks_head_root(fully_shard_deepseek_v4, model, mesh_of(mesh_shape))
    return model, None


def stock_in_fp32(kind: ModelKind, mesh_shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """torch's own ``fully_shard`` on a model that is fp32 throughout, without mixed precision."""
    model = all_fp32(kind)
    stock(model, mesh_shape, AS_STORED)
    return model, None


def stock(model: nn.Module, mesh_shape: tuple[int, ...], policy: MixedPrecisionPolicy) -> None:
    mesh = mesh_of(mesh_shape)
    for block in blocks_of(model):
        torch_fully_shard(block, mesh=mesh, mp_policy=policy)
    torch_fully_shard(model, mesh=mesh, mp_policy=policy)


def unsharded(kind: ModelKind, mesh_shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    return whole_model(kind), None


def from_meta(kind: ModelKind, mesh_shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    model = to_meta(kind)
    on_meta_then_loaded(model, mesh_of(mesh_shape), kind=kind)
    return model, None


HEALTHY: dict[str, Setup] = {
    "ours": ours(),
    "ours_with_master_weights": ours(with_master_weights),
    "ours_with_lora": ours(with_lora),
    "ours_with_cpu_offload": ours(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "ours_with_checkpointing": ours(activation_checkpointing=True),
    "ours_with_islands_in_root": ours(island_units="root"),
    "ours_in_fp32": ours(all_fp32, mp_policy=AS_STORED),
    "ours_from_meta": from_meta,
    "ours_tied": lambda kind, mesh: ours(lambda k: whole_model(k, tie_word_embeddings=True))(kind, mesh),
    "nested_units_of_nemo_automodel": nemos_own_nested_units,
    "stock_in_fp32": stock_in_fp32,
    "unsharded": unsharded,
}


# --- Faults -----------------------------------------------------------------------------------------------------------


def island_downcast(rank: int) -> AuditReport:
    """One island is bf16 before anybody shards."""
    model = whole_model("transformers")
    _downcast(model, FN)
    return audit(model, step=one_step(model, "transformers"))


def everything_bf16(rank: int) -> AuditReport:
    """``model.to(torch.bfloat16)``, then stock ``fully_shard``."""
    model = whole_model("transformers").to(BF)
    stock(model, (2,), BF16)
    return audit(model, step=one_step(model, "transformers", length=40))


def fp32_storage_and_one_policy(rank: int) -> AuditReport:
    """What accelerate's FSDP2 does, by the same calls: everything stored in fp32, ``param_dtype=bfloat16``."""
    model = all_fp32("transformers")
    stock(model, (2,), BF16)
    return audit(model, step=one_step(model, "transformers", length=40))


def real_accelerate(rank: int) -> AuditReport:
    """The real ``Accelerator.prepare`` with its FSDP2 plugin, on CPU ranks.

    accelerate 1.15 takes CPU processes for DDP whatever plugin they are given, so its state is told that this is FSDP;
    everything after that is its own: the upcast of every parameter to fp32, the policy, the wrapping.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    model = whole_model("transformers")
    try:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["DeepseekV4DecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        plugin.set_mixed_precision("bf16")
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, _ = accelerator.prepare(model, optimizer)
        return audit(model, step=one_step(model, "transformers", length=40))
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def reduced_in_bf16(rank: int) -> AuditReport:
    """Everything computes in fp32, and gradients are summed in bf16."""
    model = all_fp32("transformers")
    stock(model, (2,), MixedPrecisionPolicy(reduce_dtype=BF))
    return audit(model, step=one_step(model, "transformers", length=40))


def island_in_a_bf16_group(rank: int) -> AuditReport:
    """A contract that forgot one island of a model with master weights."""
    model = with_master_weights("transformers")
    says = island_reason(model, ())
    forgetful = build_contract(
        list(named_tensors(model)),
        mp_policy=BF16,
        island_reason=lambda fqn, tensor: None if fqn == FN else says(fqn, tensor),
        restore_fp32=False,
    )
    assert len(forgetful.islands) == len(contract_of(model).islands) - 1
    for module in [*blocks_of(model), model]:
        fully_shard(module, mesh=mesh_of((2,)), mp_policy=BF16, fp32_params=forgetful)
    return audit(model, step=one_step(model, "transformers", length=40))


def under_autocast(rank: int) -> AuditReport:
    """Sharded well, and called under autocast."""
    model, _ = ours()("transformers", (2,))
    step = one_step(model, "transformers", length=40)

    def wrapped() -> None:
        with torch.autocast("cpu", BF):
            step()

    return audit(model, step=wrapped)


def rope_truncated(rank: int) -> AuditReport:
    """An fp32 root around bf16 blocks whose units cast their inputs, as FSDP2 does by default.

    Both implementations make their tables in the dtype of the embedding; here that is fp32.
    """
    model = with_master_weights("transformers")
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh_of((2,)), mp_policy=BF16)
        state = fsdp_state(block)
        assert state is not None
        state._mp_policy = dataclasses.replace(BF16, cast_forward_inputs=True)
    fully_shard(model.get_submodule("lm_head"), mesh=mesh_of((2,)), mp_policy=BF16)
    fully_shard(model, mesh=mesh_of((2,)), mp_policy=AS_STORED)
    return audit(model, step=one_step(model, "transformers", length=40))


def buffer_cast(rank: int) -> AuditReport:
    """One RoPE table in bf16."""
    model, _ = ours()("transformers", (2,))
    rotary = model.get_submodule("model.rotary_emb")
    rotary.compress_inv_freq = rotary.compress_inv_freq.to(BF)
    return audit(model)


def buffer_rounded(rank: int) -> AuditReport:
    """One RoPE table that went through bf16 and is fp32 again."""
    model, _ = ours()("transformers", (2,))
    rotary = model.get_submodule("model.rotary_emb")
    rotary.compress_inv_freq = rotary.compress_inv_freq.to(BF).float()
    return audit(model)


def router_bias_cast(rank: int) -> AuditReport:
    """An island that is a buffer."""
    model, _ = ours()("transformers", (2,))
    gate = model.get_submodule("model.layers.2.mlp.gate")
    gate.e_score_correction_bias = gate.e_score_correction_bias.to(BF)
    return audit(model)


def integer_table_cast(rank: int) -> AuditReport:
    """A float cast that took the hash router's table along."""
    model, _ = ours()("transformers", (2,))
    gate = model.get_submodule("model.layers.0.mlp.gate")
    gate.tid2eid = gate.tid2eid.to(BF)
    return audit(model)


def integer_table_out_of_range(rank: int) -> AuditReport:
    """A table of another model, or memory as it was."""
    model, _ = ours()("nemo", (2,))
    model.get_submodule("model.layers.0.mlp.gate").tid2eid[3, 0] = 9
    return audit(model)


def buffer_uninitialised(rank: int) -> AuditReport:
    """Zeros where frequencies should be, on rank 1 only: the usual case after a broadcast that skips buffers."""
    model, _ = ours()("transformers", (2,))
    if rank == 1:
        model.get_submodule("model.rotary_emb").main_inv_freq.zero_()
    return audit(model)


def buffer_uninitialised_in_nemo(rank: int) -> AuditReport:
    """NeMo's model cannot recompute its table; numbers that no frequency has are found all the same."""
    model, _ = ours()("nemo", (2,))
    model.get_submodule("model.rotary_emb").inv_freq.fill_(1e9)
    return audit(model)


def parameter_never_loaded(rank: int) -> AuditReport:
    """NaN in one shard, on rank 1."""
    model, _ = ours()("transformers", (2,))
    if rank == 1:
        with torch.no_grad():
            weight = model.get_submodule("model.layers.3.self_attn.q_a_proj").weight
            assert isinstance(weight, DTensor)
            weight.to_local()[0] = torch.nan
    return audit(model)


def left_on_meta(rank: int) -> AuditReport:
    """Sharded on the meta device and forgotten."""
    model = to_meta("transformers")
    parallelize(model, mesh_of((2,)))
    return audit(model)


def untied(rank: int) -> AuditReport:
    """The config ties embedding and head; each has its own parameter."""
    model = whole_model("transformers", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    parallelize(model, mesh_of((2,)))
    return audit(model, step=one_step(model, "transformers"))


def rank_with_another_dtype(rank: int) -> AuditReport:
    """Rank 1 has one router's bias in bf16."""
    model, _ = ours()("transformers", (2,))
    if rank == 1:
        gate = model.get_submodule("model.layers.2.mlp.gate")
        gate.e_score_correction_bias = gate.e_score_correction_bias.to(BF)
    return audit(model)


def rank_with_another_model(rank: int) -> AuditReport:
    """Rank 1 left one block out when it sharded."""
    model = whole_model("transformers")
    for index, block in enumerate(blocks_of(model)):
        if not (rank == 1 and index == 1):
            fully_shard(block, mesh=mesh_of((2,)), mp_policy=BF16)
    fully_shard(model, mesh=mesh_of((2,)), mp_policy=BF16)
    return audit(model)


def replica_that_drifted(rank: int) -> AuditReport:
    """Two replicas; on one of them an island has moved."""
    model, _ = ours()("transformers", (2, 1))
    if rank == 1:
        with torch.no_grad():
            fn = dict(model.named_parameters())[FN]
            assert isinstance(fn, DTensor)
            fn.to_local()[0] += 1e-6
    return audit(model)


def lost_bits(rank: int) -> AuditReport:
    """An island that was downcast and upcast before sharding; one that is constant; a norm."""
    model = whole_model("transformers")
    params = dict(model.named_parameters())
    for name in (FN, "model.norm.weight"):
        params[name].data = params[name].data.to(BF).float()
    params["model.layers.0.self_attn.sinks"].data.zero_()
    parallelize(model, mesh_of((2,)))
    return audit(model, bits=True)


def not_as_planned(rank: int) -> AuditReport:
    """Sharded with another policy than the plan's."""
    model = whole_model("transformers")
    plan = plan_sharding(model, mesh_shape=(2,))
    parallelize(model, mesh_of((2,)), mp_policy=MixedPrecisionPolicy(BF, BF))
    return audit(model, plan=plan)


FAULTS: dict[str, Callable[[int], AuditReport]] = {
    function.__name__: function
    for function in (
        island_downcast,
        everything_bf16,
        fp32_storage_and_one_policy,
        real_accelerate,
        reduced_in_bf16,
        island_in_a_bf16_group,
        under_autocast,
        rope_truncated,
        buffer_cast,
        buffer_rounded,
        router_bias_cast,
        integer_table_cast,
        integer_table_out_of_range,
        buffer_uninitialised,
        buffer_uninitialised_in_nemo,
        parameter_never_loaded,
        left_on_meta,
        untied,
        rank_with_another_dtype,
        rank_with_another_model,
        replica_that_drifted,
        lost_bits,
        not_as_planned,
    )
}


def faulty(name: str) -> AuditReport:
    """The report on a model with one fault."""
    return FAULTS[name](dist.get_rank())


def _downcast(model: nn.Module, name: str) -> None:
    param = dict(model.named_parameters())[name]
    param.data = param.data.to(BF)


def step_left_alone(kind: ModelKind) -> tuple[bool, list[str]]:
    """Whether an audited step gives the gradients of one that nobody watched, and which hooks are left."""
    gradients = []
    left: list[str] = []
    for watched in (False, True):
        model, _ = ours()(kind, (2,))
        step = one_step(model, kind)
        hooks = {n: len(m._forward_pre_hooks) for n, m in model.named_modules()}
        if watched:
            assert audit(model, step=step).ok
            left = [n for n, m in model.named_modules() if len(m._forward_pre_hooks) != hooks[n]]
        else:
            step()
        gradients.append([None if p.grad is None else p.grad.to_local() for p in model.parameters()])
    equal = all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(*gradients, strict=True)
    )
    return equal, left
