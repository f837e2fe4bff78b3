"""The cases of ``test_live_precision.py`` that run in ranks: shard a model, and read back what is there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from tiny_models import tiny_batch, tiny_transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from dsv4_fsdp import contract_of, fully_shard, parallelize, plan_sharding, precision_table, read_back
from dsv4_fsdp.live_precision import LiveTensor, differences
from dsv4_fsdp.names import canonical_name

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYERS = ("sliding_attention", "heavily_compressed_attention")


@dataclass
class Seen:
    """What one rank found."""

    rows: list[LiveTensor]
    in_forward: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype of each parameter while its module ran, read from the module itself."""
    grads: dict[str, torch.dtype] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


def _run(model: nn.Module) -> dict[str, torch.dtype]:
    """One forward and backward; the dtype of every parameter as its own module's forward sees it."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: nn.Module) -> None:
        for param_name, param in module.named_parameters(recurse=False):
            seen[canonical_name(f"{name}.{param_name}")] = param.dtype

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: note(name, module))
    batch = tiny_batch("transformers", 33)
    model(input_ids=batch.input_ids).logits.float().sum().backward()
    return seen


def _per_block(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        stock_fully_shard(block, mesh=mesh, mp_policy=policy)
    stock_fully_shard(model, mesh=mesh, mp_policy=policy)


def stock(policy: MixedPrecisionPolicy) -> Seen:
    """torch's own ``fully_shard`` on a model stored in fp32: what accelerate does, with its bf16 policy."""
    model = tiny_transformers(LAYERS, dtype=torch.float32)
    _per_block(model, policy)
    rows = read_back(model)
    in_forward = _run(model)
    grads = {canonical_name(n): p.grad.dtype for n, p in model.named_parameters() if p.grad is not None}
    return Seen(rows, in_forward, grads)


def planned() -> Seen:
    """``parallelize``, read back with its plan, before and after a step."""
    model = tiny_transformers(LAYERS)
    plan = parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    rows = read_back(model, plan)
    in_forward = _run(model)
    assert read_back(model, plan) == rows, "a step must not change what is read back"
    return Seen(rows, in_forward, differences=differences(rows, plan))


def with_an_island_of_the_callers() -> Seen:
    """An fp32 head that only the caller calls an island; read back, not run."""
    model = tiny_transformers(LAYERS)
    model.lm_head.float()
    plan = parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)), fp32_params=["lm_head"])
    return Seen(read_back(model, plan))


def with_fault(fault: str) -> list[str]:
    """Shard by hand, with one thing done wrong, and compare with the plan of the right way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = tiny_transformers(LAYERS)
    plan = plan_sharding(model, mesh_shape=tuple(mesh.shape))
    contract = contract_of(model)
    policies = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", ""], BF16)
    ignored: set[nn.Parameter] = set()
    if fault == "island in the bf16 group":
        # A contract that has lost one island: it counts as a master weight.
        wrong = {
            rule.fqn: replace(rule, compute=torch.bfloat16, island=False)
            for rule in contract
            if rule.fqn == "model.layers.1.self_attn.sinks"
        }
        contract = replace(contract, rules=tuple(wrong.get(rule.fqn, rule) for rule in contract.rules))
        for name, param in model.named_parameters():
            if name in wrong:
                contract._rule_by_tensor[param] = wrong[name]
    elif fault == "a unit left out":
        del policies["lm_head"]
    elif fault == "parameter in another unit":
        policies = {"model.layers.1.mlp": BF16} | policies
    elif fault == "reduced in bf16":
        policies["model.layers.0"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    elif fault == "ignored parameter":
        ignored = {model.lm_head.weight}
        del policies["lm_head"]
    elif fault == "new parameter":
        model.model.layers[0].extra = nn.Parameter(torch.rand(4, dtype=torch.bfloat16))
        contract = contract_of(model)
    elif fault == "cast afterwards":
        pass
    else:
        assert fault == "none", fault
    for name, policy in policies.items():
        module = model.get_submodule(name)
        if fault == "reduced in bf16" and name == "model.layers.0":
            fully_shard(module, mesh=mesh, mp_policy=policy)
        else:
            fully_shard(module, mesh=mesh, mp_policy=policy, fp32_params=contract, ignored_params=ignored)
    if fault == "cast afterwards":
        model.model.layers[0].to(torch.bfloat16)
    return differences(read_back(model, plan), plan)


def full_size_table(mesh_shape: tuple[int, ...]) -> tuple[str, str, int]:
    """The precision table and plan table of DeepSeek-V4 at its default size, really sharded on fake ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(mesh_shape))
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM._from_config(DeepseekV4Config(), dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    plan = parallelize(model, mesh)
    rows = read_back(model, plan)
    assert not differences(rows, plan)
    return precision_table(rows), plan.table(), len(rows)
