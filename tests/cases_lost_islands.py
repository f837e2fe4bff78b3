"""Ways of sharding in which an island could be lost on the way; run inside ranks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from cases_alignment import drop_gradients_nobody_computed
from cases_parity import BF16, batches_for, mesh_of
from reference import LockstepResult, lockstep
from tiny_models import tiny_batch, tiny_transformers
from torch import nn

from dsv4_fsdp import contract_of, fully_shard, parallelize, tie_compressors
from dsv4_fsdp.alignment import freeze_indexers


def below_blocks_with_a_contract() -> LockstepResult:
    """Hyper-connections and norms as units of their own, final norm and head as one list, under one contract."""
    mesh = mesh_of((2,))

    def shard(model: nn.Module) -> None:
        contract = contract_of(model, mp_policy=BF16)
        tie_compressors(model)
        freeze_indexers(model)
        kwargs = {"mesh": mesh, "mp_policy": BF16, "fp32_params": contract}
        for layer in model.model.layers:
            fully_shard(layer.attn_hc, **kwargs)
            fully_shard(layer.input_layernorm, **kwargs)
            fully_shard(layer, **kwargs)
        fully_shard([model.model.norm, model.lm_head], **kwargs)
        fully_shard(model, **kwargs)

    return lockstep(tiny_transformers, shard, batches_for("transformers"))


class Reward(nn.Module):
    """A wrapper as reward models have it: the model is called ``base_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = tiny_transformers()

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.base_model.get_output_embeddings()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.base_model(input_ids=input_ids).logits


def in_a_wrapper_called_base_model() -> LockstepResult:
    mesh = mesh_of((2,))
    return lockstep(Reward, lambda model: parallelize(model, mesh), batches_for("transformers"))


def tiny_ernie() -> nn.Module:
    """Another family: the first block is dense and holds no island."""
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    config = Ernie4_5_MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        use_cache=False,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Ernie4_5_MoeForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
        )
    for name, param in model.named_parameters():
        if "gate.weight" in name:
            param.data = param.data.float() * (1 + 2**-12)
    return model.train()


def another_family() -> LockstepResult:
    mesh = mesh_of((2,))
    return lockstep(tiny_ernie, lambda model: parallelize(model, mesh), batches_for("transformers"))


def deep_copy_of_a_tied_model() -> LockstepResult:
    """The copy is tied to itself: its original neither gets its gradients nor needs to live on."""
    mesh = mesh_of((2,))

    def build_copy() -> nn.Module:
        original = tiny_transformers()
        tie_compressors(original)
        return copy.deepcopy(original)

    length = 70 if dist.get_rank() == 0 else 3
    return lockstep(
        build_copy,
        lambda model: parallelize(model, mesh),
        [tiny_batch("transformers", length, seed=dist.get_rank())],
        build_reference=tiny_transformers,
        after_backward=drop_gradients_nobody_computed,
    )


def with_windows_from_a_cache() -> tuple[bool, list[float]]:
    """Rank 0 has cached windows and rank 1 none, and the part that is trained on closes no window on either."""
    model = tiny_transformers(hca_window=32)
    alignment = tie_compressors(model)
    parallelize(model, mesh_of((2,)))
    length = 67 if dist.get_rank() == 0 else 30
    batch = tiny_batch("transformers", length + 1, seed=dist.get_rank())
    with torch.no_grad():
        cache = model(input_ids=batch.input_ids[:, :length], use_cache=True).cache
    output = model(input_ids=batch.input_ids[:, length:], cache=cache, use_cache=True)
    output.logits.float().logsumexp(-1).sum().backward()
    hca = [p for n, p in model.named_parameters() if "layers.1.self_attn.compressor" in n]
    return all(p.grad is not None and not p.grad.full_tensor().any() for p in hca), alignment.window_flags().tolist()
