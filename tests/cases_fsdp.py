"""The cases of ``test_fsdp_behaviour.py`` that run in ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fake_nemo import Config
from reference import LockstepResult, Recorder, lockstep, logits_of, token_loss
from tiny_models import tiny_batch, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dsv4_fsdp import fsdp
from dsv4_fsdp.fsdp import fully_shard_deepseek_v4
from dsv4_fsdp.names import canonical_name
from dsv4_fsdp.torch_private import fsdp_state

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_mesh(shape: tuple[int, ...], names: list[str]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))


def nested_step(
    mesh_shape: tuple[int, ...],
    names: list[str],
    lengths: list[int],
    owner_axis: str | None = None,
    storage: str = "bfloat16",
) -> dict[str, Any]:
    """One forward and backward of NeMo's model in nested units; rank r has ``lengths[r]`` tokens."""
    mesh = make_mesh(mesh_shape, names)
    model = tiny_nemo(compress_ratios=[0, 128])
    if storage == "float32":
        model.float()  # exact: master weights of the bf16 values
    islands = [canonical_name(n) for n, m in model.named_modules() if m in set(fsdp._iter_dsv4_fp32_modules(model))]
    for module in [*model.model.layers.values(), model]:
        fully_shard_deepseek_v4(module, mesh, POLICY, hca_owner_axis=owner_axis)

    compute: dict[str, str] = {}
    for module_name, module in model.named_modules():
        if params := list(module.named_parameters(recurse=False)):

            def note(module: nn.Module, args: Any, name: str = module_name, params: Any = params) -> None:
                for param_name, _ in params:
                    compute[f"{name}.{param_name}"] = short(getattr(module, param_name).dtype)

            module.register_forward_pre_hook(note)

    batch = tiny_batch("nemo", lengths[dist.get_rank()], seed=dist.get_rank())
    with Recorder() as recorder:
        token_loss(logits_of(model(input_ids=batch.input_ids)), batch).backward()
    wire: dict[str, set[str]] = {}
    for collective in recorder.collectives:
        wire.setdefault(collective.kind, set()).add(short(collective.dtype))

    compressors = [m for m in model.modules() if hasattr(m, "_set_hca_param_sync_group")]
    groups = [m._hca_param_sync_group for m in compressors]
    grads = {name: param.grad for name, param in model.named_parameters()}
    compressor_grad = grads["model.layers.1.self_attn.compressor.wkv.weight"]
    return {
        "island_modules": islands,
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "compute": compute,
        "grad": {name: None if grad is None else short(grad.dtype) for name, grad in grads.items()},
        "wire": wire,
        "groups": [None if group is None else dist.get_process_group_ranks(group) for group in groups],
        "compressor_grad": 0.0 if compressor_grad is None else compressor_grad.full_tensor().norm().item(),
    }


def owner_groups() -> dict[str, Any]:
    """The ranks of the alignment group for meshes of several shapes."""

    def ranks(mesh: DeviceMesh, axis: str, dims: Any = None) -> list[int] | None:
        group = fsdp._group_over(mesh, fsdp._reducing_axes(mesh, axis, dims))
        return None if group is None else sorted(dist.get_process_group_ranks(group))

    hsdp = make_mesh((2, 2), ["replicate", "shard"])
    with_tp = make_mesh((1, 2, 2), ["replicate", "shard", "tp"])
    flattened = with_tp["replicate", "shard"]._flatten().get_group()
    dp_tp = make_mesh((2, 2), ["dp", "tp"])
    return {
        "replicate_shard": ranks(hsdp, "shard"),
        "slice": ranks(with_tp["replicate", "shard"], "shard"),
        "dp_of_dp_tp": ranks(dp_tp, "dp", SimpleNamespace(shard="dp", replicate=None)),
        "one_axis": ranks(make_mesh((4,), ["dp"]), "dp"),
        "one_rank": ranks(make_mesh((4, 1), ["tp", "dp"]), "dp", SimpleNamespace(shard="dp", replicate=None)),
        "flattened_by_the_caller_is_reused": flattened
        is fsdp._group_over(with_tp["replicate", "shard"], ("replicate", "shard")),
    }


def transformers_auto(lengths: list[int]) -> LockstepResult:
    """Transformers' model, block by block and then the root, as ``auto`` decides."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # unnamed

    def shard(model: nn.Module) -> None:
        for module in [*model.model.layers, model]:
            fully_shard_deepseek_v4(module, mesh, POLICY)

    rank = dist.get_rank()
    return lockstep(tiny_transformers, shard, [tiny_batch("transformers", lengths[rank], seed=rank)])


def nemo_grouped(lengths: list[int]) -> LockstepResult:
    """NeMo's model in grouped units on replicate x shard."""
    mesh = make_mesh((2, 2), ["replicate", "shard"])

    def shard(model: nn.Module) -> None:
        for module in [*model.model.layers.values(), model]:
            fully_shard_deepseek_v4(module, mesh, POLICY, island_units="grouped")

    rank = dist.get_rank()
    batch = tiny_batch("nemo", lengths[rank], seed=rank)
    return lockstep(lambda: tiny_nemo(compress_ratios=[0, 128]), shard, [batch])


class DeepseekV4VisionRMSNorm(nn.Module):
    """What NeMo's class of this name does: fp32 inside, the input's dtype outside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.float()).to(x.dtype)


class DeepseekV4Block(nn.Module):
    """A block that runs on the real ``fully_shard``: two islands, wrapped or not, and a bf16 layer."""

    def __init__(self, *, wrapped: bool = False) -> None:
        super().__init__()
        # A plain linear layer in fp32 under bf16 activations: it runs only because its unit casts.
        attn_hc, norm1 = nn.Linear(8, 8, bias=False), DeepseekV4VisionRMSNorm()
        self.attn_hc = checkpoint_wrapper(attn_hc) if wrapped else attn_hc
        self.norm1 = checkpoint_wrapper(norm1) if wrapped else norm1
        self.mlp = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        assert normed.dtype == x.dtype
        return self.mlp(normed + self.attn_hc(x).to(x.dtype))


def units_are_made_once() -> dict[str, Any]:
    """What the real ``fully_shard`` leaves behind after calls that must not shard anything twice."""
    mesh = make_mesh((2,), ["dp"])
    found: dict[str, Any] = {}

    modules: list[Any] = [nn.Linear(8, 8), nn.Linear(8, 8)]
    found["list_is_returned"] = fully_shard_deepseek_v4(modules, mesh, POLICY) is modules
    found["list_shares_one_state"] = fsdp_state(modules[0]) is fsdp_state(modules[1]) is not None

    block = DeepseekV4Block()
    fully_shard_deepseek_v4(block, mesh, POLICY)
    state = fsdp_state(block)
    found["second_call_same_module"] = fully_shard_deepseek_v4(block, mesh, POLICY) is block
    found["second_call_same_state"] = fsdp_state(block) is state is not None
    wrapper = checkpoint_wrapper(block)
    fully_shard_deepseek_v4(wrapper, mesh, POLICY)
    found["wrapper_of_sharded_has_no_state"] = fsdp_state(wrapper) is None
    sharded_wrapper = checkpoint_wrapper(DeepseekV4Block())
    fully_shard_deepseek_v4(sharded_wrapper, mesh, POLICY)
    state_of_wrapper = fsdp_state(sharded_wrapper)
    fully_shard_deepseek_v4(sharded_wrapper, mesh, POLICY)
    found["sharded_wrapper_keeps_its_state"] = fsdp_state(sharded_wrapper) is state_of_wrapper is not None
    late = nn.Linear(8, 8)
    fully_shard_deepseek_v4([block, late], mesh, POLICY)
    found["sharded_members_are_left_out"] = fsdp_state(block) is state is not fsdp_state(late) is not None
    found["none"] = fully_shard_deepseek_v4(None, mesh, POLICY)  # type: ignore[arg-type]

    wrapped = DeepseekV4Block(wrapped=True)
    ignored = {wrapped.mlp.weight, *wrapped.attn_hc.parameters()}
    fully_shard_deepseek_v4(wrapped, mesh, POLICY, ignored_params=ignored)
    found["wrapped_island_units"] = [name for name, m in wrapped.named_modules() if isinstance(m, FSDPModule)]
    found["ignored_is_whole"] = [canonical_name(n) for n, p in wrapped.named_parameters() if not isinstance(p, DTensor)]
    output = wrapped(torch.ones(2, 8, dtype=torch.bfloat16))
    output.sum().backward()
    found["forward_is_finite"] = bool(output.isfinite().all())
    return found


def vision_tower() -> dict[str, Any]:
    """NeMo's vision transformer, sharded block by block, against the unsharded one; fp32 RoPE tables are not cast."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = make_mesh((2,), ["dp"])
    reference, sharded = tiny_vision_tower(), tiny_vision_tower()
    for module in [*sharded.blocks, sharded]:
        fully_shard_deepseek_v4(module, mesh, policy)
    outputs = []
    norm_dtypes: set[str] = set()
    for module in sharded.modules():
        if type(module).__name__.endswith("DeepseekV4VisionRMSNorm"):
            module.register_forward_pre_hook(lambda m, args: norm_dtypes.add(short(m.weight.dtype)))
    patches = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    for model in (reference, sharded):
        outputs.append(model(patches, 2, 3))
        outputs[-1].float().square().sum().backward()
    grads = {
        name: (param.grad, other.grad.full_tensor())
        for (name, param), other in zip(reference.named_parameters(), sharded.parameters(), strict=True)
    }
    return {
        "bit_equal": torch.equal(*outputs) and outputs[0].dtype == outputs[1].dtype == torch.bfloat16,
        "norm_dtypes": norm_dtypes,
        "units": [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)],
        "grads_equal": all(torch.equal(a, b) for a, b in grads.values()),
    }


def tiny_vision_tower() -> nn.Module:
    """NeMo AutoModel's ``DeepseekV4VisionTransformer`` with one block, bf16 with fp32 norms that are not all ones."""
    from nemo_automodel.components.models.deepseek_v4.vision import DeepseekV4VisionTransformer

    # The tower reads these fields only; NeMo's own config class warns when it is built under transformers 5.24.
    config = Config(
        vision_dim=32,
        vision_n_heads=2,
        vision_inter_dim=16,
        vision_n_layers=1,
        vision_patch_size=4,
        vision_rope_theta=10000.0,
        torch_dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = DeepseekV4VisionTransformer(config)
        with torch.no_grad():
            for param in tower.parameters():
                param.copy_(torch.randn(param.shape) * 0.1 + (param.ndim == 1))
    return tower


def offload() -> dict[str, list[str]]:
    """What policy torch's units hold after a step with and without CPU offload, units in module order."""
    found = {}
    for policy in (None, CPUOffloadPolicy(pin_memory=False)):
        block = DeepseekV4Block()
        fully_shard_deepseek_v4(block, make_mesh((2,), ["dp"]), POLICY, policy)
        block(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        assert all(param.grad is not None for param in block.parameters())
        states = [fsdp_state(module) for module in block.modules() if isinstance(module, FSDPModule)]
        groups = [group for state in states for group in state._fsdp_param_groups]
        found[type(policy).__name__] = [type(group.offload_policy).__name__ for group in groups]
    return found
