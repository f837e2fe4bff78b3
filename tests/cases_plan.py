"""The cases of ``test_plan.py`` that run in ranks: apply a plan, and read off what is live and what was sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import Collective, Recorder, logits_of, token_loss
from tiny_models import ModelKind, tiny_batch, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import ShardingPlan, parallelize
from dsv4_fsdp.names import canonical_name
from dsv4_fsdp.torch_private import parameter_groups

# The shortest sequence with a window for every compressor.
LENGTHS: dict[ModelKind, int] = {"transformers": 33, "nemo": 129}


def frozen_up_to(num_blocks: int, model: nn.Module) -> nn.Module:
    """Freeze the embedding and the first blocks, as fine-tuning of the last layers does."""
    blocks = list(model.get_submodule("model.layers").children())[:num_blocks]
    for module in [model.get_submodule("model.embed_tokens"), *blocks]:
        module.requires_grad_(False)
    return model


def islands_of_third_block_train() -> nn.Module:
    """Nothing trains but islands of the third block: backward must come as far as that."""
    model = tiny_transformers().requires_grad_(False)
    for name, param in model.named_parameters():
        param.requires_grad_(".layers.2." in name and param.dtype == torch.float32)
    return model


def tiny_llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model without islands, in one dtype throughout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM._from_config(config, dtype=dtype)


def with_lora() -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    model = tiny_transformers().requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_b_proj"]), model)
    return model


@dataclass(frozen=True)
class Line:
    """How a model is built and what :func:`~dsv4_fsdp.parallelize` is told."""

    build: Callable[[], nn.Module] = tiny_transformers
    kind: ModelKind = "transformers"
    kwargs: dict[str, Any] = field(default_factory=dict)


TWO_BLOCKS = ("sliding_attention", "heavily_compressed_attention")

LINES: dict[str, Line] = {
    "plain": Line(),
    "no_reshard": Line(kwargs={"reshard_after_forward": False}),
    "reshard_to_one": Line(kwargs={"reshard_after_forward": 1}),
    "reshard_to_two": Line(kwargs={"reshard_after_forward": 2}),
    "checkpointing": Line(kwargs={"activation_checkpointing": True}),
    "bf16_reduce": Line(kwargs={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}),
    "as_stored": Line(kwargs={"mp_policy": MixedPrecisionPolicy()}),
    "embedding_frozen": Line(build=lambda: frozen_up_to(0, tiny_transformers())),
    "one_block_frozen": Line(build=lambda: frozen_up_to(1, tiny_transformers())),
    "three_blocks_frozen": Line(build=lambda: frozen_up_to(3, tiny_transformers())),
    "tied": Line(build=functools.partial(tiny_transformers, TWO_BLOCKS, tie_word_embeddings=True)),
    "lora": Line(build=with_lora),
    "masters": Line(build=functools.partial(tiny_transformers, TWO_BLOCKS, dtype=torch.float32)),
    "nemo_grouped": Line(build=tiny_nemo, kind="nemo"),
    "nemo_nested": Line(build=tiny_nemo, kind="nemo", kwargs={"island_units": "nested"}),
    **{
        f"root_{name}": Line(build=build, kwargs={"island_units": "root", **kwargs})
        for name, build, kwargs in [
            ("plain", tiny_transformers, {}),
            ("no_reshard", tiny_transformers, {"reshard_after_forward": False}),
            ("checkpointing", tiny_transformers, {"activation_checkpointing": True}),
            ("embedding_frozen", lambda: frozen_up_to(0, tiny_transformers()), {}),
            ("three_blocks_frozen", lambda: frozen_up_to(3, tiny_transformers()), {}),
            ("islands_train", islands_of_third_block_train, {}),
            ("tied", functools.partial(tiny_transformers, TWO_BLOCKS, tie_word_embeddings=True), {}),
            ("lora", with_lora, {}),
            ("masters", functools.partial(tiny_transformers, TWO_BLOCKS, dtype=torch.float32), {}),
        ]
    },
    "islands_train": Line(build=islands_of_third_block_train),
    # On four ranks padding would be 60 % of five experts, and of two that are dealt to two ranks as much again.
    "five_experts": Line(build=functools.partial(tiny_transformers, n_routed_experts=5)),
    "two_experts": Line(build=functools.partial(tiny_transformers, n_routed_experts=2)),
    "root_nemo": Line(build=tiny_nemo, kind="nemo", kwargs={"island_units": "root"}),
    "root_llama": Line(build=tiny_llama, kwargs={"island_units": "root"}),
    "llama_bf16": Line(build=tiny_llama),
    "llama_fp32": Line(build=functools.partial(tiny_llama, torch.float32)),
}


@dataclass
class Live:
    """What one rank found after applying a plan and running one step."""

    plan: ShardingPlan
    shard_bytes: dict[str, list[int]]
    """Bytes with padding of each parameter group, by canonical name of its unit."""
    collectives: list[Collective]
    hash_of_a_word: int
    """What this process's hash seed makes of a word."""


def apply_and_step(line_name: str, mesh_shape: tuple[int, ...]) -> Live:
    """Parallelize the line's model, read the groups' padded sizes, and record one forward and backward."""
    line = LINES[line_name]
    model = line.build()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    plan = parallelize(model, mesh, **line.kwargs)
    shard_bytes: dict[str, list[int]] = {}
    for name, group in parameter_groups(model):
        padded = sum(p.padded_sharded_param_size.numel() * p.sharded_param.dtype.itemsize for p in group.fsdp_params)
        shard_bytes.setdefault(canonical_name(name), []).append(padded)
    batch = tiny_batch(line.kind, LENGTHS[line.kind])
    with Recorder() as recorder:
        token_loss(logits_of(model(input_ids=batch.input_ids)), batch).backward()
    return Live(plan, shard_bytes, recorder.collectives, hash("word"))
