"""The lines of the promise: each way of using the engine, as something that a rank can run against its reference.

A *line* says how the model is built, how it is sharded, and how it is trained. ``parity`` runs one on a mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from reference import LockstepResult, lockstep
from tiny_models import Batch, ModelKind, island_names, tiny_batch, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from dsv4_fsdp import fully_shard, parallelize, tie_compressors
from dsv4_fsdp.alignment import freeze_indexers
from dsv4_fsdp.materialize import materialize, refuse_uninitialized

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
AS_STORED = MixedPrecisionPolicy()

# Rank by rank. One HCA window is 32 tokens in the Transformers model and 128 in NeMo's, one CSA window 4 in both: some
# ranks have HCA windows and some have none, and the last has no window at all.
LENGTHS: dict[str, tuple[int, ...]] = {"transformers": (70, 20, 33, 3), "nemo": (140, 20, 129, 3)}

Build = Callable[[ModelKind], nn.Module]
Shard = Callable[[nn.Module, DeviceMesh], Any]


def whole_model(kind: ModelKind, **over: Any) -> nn.Module:
    """The tiny model of either implementation, in bf16 with its fp32 islands."""
    return tiny_transformers(**over) if kind == "transformers" else tiny_nemo(**over)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of either implementation, in order."""
    layers = model.get_submodule("model.layers")
    return list(layers.children())


def by_hand(model: nn.Module, mesh: DeviceMesh, *, units_of_blocks: int = 1, **kwargs: Any) -> None:
    """Shard bottom-up with the drop-in alone, ``units_of_blocks`` blocks to a unit, head and root by themselves."""
    tie_compressors(model)
    freeze_indexers(model)
    blocks = blocks_of(model)
    for start in range(0, len(blocks), units_of_blocks):
        unit = blocks[start : start + units_of_blocks]
        fully_shard(unit if units_of_blocks > 1 else unit[0], mesh=mesh, mp_policy=BF16, **kwargs)
    head = model.get_submodule("lm_head")
    fp32_head = next(head.parameters()).dtype == torch.float32
    head_policy = MixedPrecisionPolicy(torch.float32, torch.float32) if fp32_head else BF16
    fully_shard(head, mesh=mesh, mp_policy=head_policy, **kwargs)
    fully_shard(model, mesh=mesh, mp_policy=BF16, **kwargs)


# --- Models that differ from the plain one ----------------------------------------------------------------------------


def partly_frozen(kind: ModelKind) -> nn.Module:
    """The embedding, the first block and every second parameter of the second block are frozen."""
    model = whole_model(kind)
    first, second, *_ = blocks_of(model)
    frozen = [
        *model.get_submodule("model.embed_tokens").parameters(),
        *first.parameters(),
        *list(second.parameters())[::2],
    ]
    for param in frozen:
        param.requires_grad_(False)
    return model


def with_lora(kind: ModelKind, *, compute: torch.dtype = torch.float32) -> nn.Module:
    """peft's LoRA on a frozen base, adapters in fp32 (or ``compute``); A and B random, so that both get gradients."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = ["q_b_proj", "o_b_proj"] if kind == "transformers" else ["wq_b", "wo_b"]
    model = whole_model(kind)
    for param in model.parameters():
        param.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, exclude_modules=r".*indexer.*")
        inject_adapter_in_model(config, model)
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.data = torch.randn(param.shape).mul(0.05).to(compute)
                param.requires_grad_(True)
    return model


def with_integer_parameter(kind: ModelKind) -> nn.Module:
    """The hash routers' token tables are integer parameters in place of buffers."""
    model = whole_model(kind)
    for module in model.modules():
        if (table := module._buffers.pop("tid2eid", None)) is not None:
            module.tid2eid = nn.Parameter(table, requires_grad=False)
    if not any(p.dtype == torch.int64 for p in model.parameters()):
        # NeMo keeps the table as a parameter itself, or under another name.
        assert any(not p.is_floating_point() for p in model.parameters()), "no integer table found"
    return model


def with_master_weights(kind: ModelKind) -> nn.Module:
    """fp32 storage throughout; weights that are no islands differ from the bf16 model's by less than rounding."""
    model = whole_model(kind)
    generator = torch.Generator().manual_seed(11)
    for param in model.parameters():
        if param.dtype == torch.bfloat16:
            # Less than half a bf16 step (2**-9 of the value), so that rounding gives the bf16 model's weight back.
            noise = torch.rand(param.shape, generator=generator).sub(0.5) * 2**-10
            param.data = param.data.float() * (1 + noise)
    return model


def all_fp32(kind: ModelKind) -> nn.Module:
    return whole_model(kind, dtype=torch.float32)


def on_meta_then_loaded(model: nn.Module, mesh: DeviceMesh, *, kind: ModelKind) -> nn.Module:
    """Shard on the meta device, materialise, load; every value comes from a model that was built on the CPU."""
    source = whole_model(kind)
    state = source.state_dict() if dist.get_rank() == 0 else {}
    parallelize(model, mesh)
    # Transformers' model recomputes its RoPE tables; NeMo's cannot.
    materialize(model, "cpu", buffers=dict(source.named_buffers()) if kind == "nemo" else None)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    refuse_uninitialized(model)
    return model


def to_meta(kind: ModelKind) -> nn.Module:
    return whole_model(kind).to("meta")


def ignoring(model: nn.Module, mesh: DeviceMesh) -> None:
    """One bf16 weight and one island of the second block stay whole on every rank."""
    by_hand(model, mesh, ignored_params=set(ignored_by_name(model).values()))


def ignored_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    islands = set(island_names(model))
    inside = [(n, p) for n, p in model.named_parameters() if ".layers.1." in n]
    island = next((n, p) for n, p in inside if n in islands and "hc" in n)
    weight = next((n, p) for n, p in inside if n not in islands and "shared_experts" in n)
    return dict([island, weight])


# --- The lines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One way of using the engine.

    ``grad_tol`` is 5e-3 unless argued: a reduced bf16 gradient is rounded once, 2**-8 of an element at most.
    """

    shard: Shard = parallelize
    build: Build = whole_model
    reference: Build | None = None
    lockstep: dict[str, Any] = field(default_factory=dict)
    grad_tol: float = 5e-3
    kinds: tuple[ModelKind, ...] = ("transformers", "nemo")
    meshes: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (4,), (2, 2))


def _parallelize(**kwargs: Any) -> Shard:
    return lambda model, mesh: parallelize(model, mesh, **kwargs)


def _shard_with_transformers_checkpointing(model: nn.Module, mesh: DeviceMesh) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parallelize(model, mesh)


_in_root = functools.partial(_parallelize, island_units="root")
_some = {"meshes": ((3,), (2, 2))}

LINES: dict[str, Line] = {
    "plain": Line(),
    "by_hand": Line(shard=by_hand),
    "list_of_blocks": Line(shard=lambda model, mesh: by_hand(model, mesh, units_of_blocks=2)),
    "ignored_params": Line(shard=ignoring),
    "no_reshard": Line(shard=_parallelize(reshard_after_forward=False)),
    "reshard_to_two_ranks": Line(shard=_parallelize(reshard_after_forward=2), meshes=((4,),)),
    "cpu_offload": Line(shard=_parallelize(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "torch_checkpointing": Line(shard=_parallelize(activation_checkpointing=True)),
    "transformers_checkpointing": Line(shard=_shard_with_transformers_checkpointing, kinds=("transformers",)),
    # Three gradients are each rounded to bf16 and then added in bf16: up to three roundings in place of one.
    "accumulate_and_sync_each": Line(lockstep={"accumulate": 3}, grad_tol=1.2e-2),
    "accumulate_and_sync_last": Line(lockstep={"accumulate": 3, "sync": "last"}),
    "partly_frozen": Line(build=partly_frozen),
    "lora_computed_in_fp32": Line(
        build=with_lora,
        shard=_parallelize(fp32_params=["lora_A", "lora_B"]),
        lockstep={"accumulate": 2, "sync": "last"},
    ),
    "lora_computed_in_bf16": Line(
        build=with_lora, reference=functools.partial(with_lora, compute=torch.bfloat16), shard=_parallelize()
    ),
    "tied_embeddings": Line(
        build=functools.partial(whole_model, tie_word_embeddings=True), kinds=("transformers",)
    ),  # NeMo AutoModel refuses to build a tied DeepSeek-V4.
    "integer_parameters": Line(build=with_integer_parameter),
    "master_weights": Line(build=with_master_weights, reference=whole_model),
    "all_fp32": Line(build=all_fp32, shard=_parallelize(mp_policy=AS_STORED)),
    "experts_cut_evenly": Line(
        build=functools.partial(whole_model, n_routed_experts=5), kinds=("transformers",), meshes=((4,), (1, 4))
    ),
    "experts_cut_evenly_checkpointing": Line(
        build=functools.partial(whole_model, n_routed_experts=5),
        shard=_parallelize(activation_checkpointing=True, island_units="root"),
        kinds=("transformers",),
        meshes=((4,),),
    ),
    "experts_cut_evenly_accumulate": Line(
        build=functools.partial(whole_model, n_routed_experts=5),
        lockstep={"accumulate": 3, "sync": "last"},
        kinds=("transformers",),
        meshes=((4,),),
    ),
    "experts_cut_evenly_offload": Line(
        build=functools.partial(whole_model, n_routed_experts=5),
        shard=_parallelize(offload_policy=CPUOffloadPolicy(pin_memory=False), reshard_after_forward=False),
        kinds=("transformers",),
        meshes=((4,),),
    ),
    "islands_in_root": Line(shard=_in_root()),
    "islands_in_root_no_reshard": Line(shard=_in_root(reshard_after_forward=False), **_some),
    "islands_in_root_cpu_offload": Line(shard=_in_root(offload_policy=CPUOffloadPolicy(pin_memory=False)), **_some),
    "islands_in_root_checkpointing": Line(shard=_in_root(activation_checkpointing=True), **_some),
    "islands_in_root_accumulate_and_sync_each": Line(
        shard=_in_root(), lockstep={"accumulate": 3}, grad_tol=1.2e-2, **_some
    ),
    "islands_in_root_accumulate_and_sync_last": Line(
        shard=_in_root(), lockstep={"accumulate": 3, "sync": "last"}, **_some
    ),
    "islands_in_root_partly_frozen": Line(shard=_in_root(), build=partly_frozen, **_some),
    "islands_in_root_lora": Line(shard=_in_root(fp32_params=["lora_A", "lora_B"]), build=with_lora, **_some),
    "islands_in_root_tied_embeddings": Line(
        shard=_in_root(),
        build=functools.partial(whole_model, tie_word_embeddings=True),
        kinds=("transformers",),
        **_some,
    ),
    "islands_in_root_master_weights": Line(shard=_in_root(), build=with_master_weights, reference=whole_model, **_some),
}


def batches_for(kind: ModelKind, count: int = 3) -> list[Batch]:
    """This rank's micro-batches: lengths rotate, so that each rank is long in one micro-batch and short in another."""
    rank = dist.get_rank()
    lengths = LENGTHS[kind]
    return [tiny_batch(kind, lengths[(rank + i) % len(lengths)], seed=10 * rank + i) for i in range(count)]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def parity(line_name: str, kind: ModelKind, mesh_shape: tuple[int, ...]) -> LockstepResult:
    """Run one line against its reference on this rank."""
    line = LINES[line_name]
    mesh = mesh_of(mesh_shape)
    return lockstep(
        functools.partial(line.build, kind),
        lambda model: line.shard(model, mesh),
        batches_for(kind),
        build_reference=None if line.reference is None else functools.partial(line.reference, kind),
        **line.lockstep,
    )


def ignored_names(kind: ModelKind) -> list[str]:
    return list(ignored_by_name(whole_model(kind)))


def meta_parity(kind: ModelKind, mesh_shape: tuple[int, ...]) -> LockstepResult:
    """A model that was sharded on the meta device and loaded afterwards, against one that was built on the CPU."""
    mesh = mesh_of(mesh_shape)
    return lockstep(
        functools.partial(to_meta, kind),
        lambda model: on_meta_then_loaded(model, mesh, kind=kind),
        batches_for(kind),
        build_reference=functools.partial(whole_model, kind),
    )


def five_adamw_steps(kind: ModelKind, mesh_shape: tuple[int, ...]) -> LockstepResult:
    mesh = mesh_of(mesh_shape)
    return lockstep(
        functools.partial(whole_model, kind),
        lambda model: parallelize(model, mesh),
        batches_for(kind),
        steps=5,
        optimizer="adamw",
        lr=1e-3,
    )
