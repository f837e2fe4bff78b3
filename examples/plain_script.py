"""A plain FSDP2 script, as torchtitan's or yours, with one import changed. Run it with

torchrun --nproc-per-node 2 examples/plain_script.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4_fsdp import fully_shard, tie_compressors  # was: from torch.distributed.fsdp import fully_shard
from dsv4_fsdp.alignment import freeze_indexers

dist.init_process_group()
torch.manual_seed(0)  # every rank builds the same model
config = DeepseekV4Config(
    vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
    q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2, partial_rotary_factor=0.5,
    layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    mlp_layer_types=["hash_moe", "moe", "moe"], index_n_heads=2, index_head_dim=16, index_topk=4, use_cache=False,
)  # fmt: skip
model = DeepseekV4ForCausalLM._from_config(config, dtype=torch.bfloat16).train()  # bf16 weights, fp32 islands

tie_compressors(model)  # sequences shorter than a compressor's window may meet longer ones
freeze_indexers(model)  # they get no gradient
mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # on GPUs "cuda", and model and tokens there too
mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for unit in (*model.model.layers, model.lm_head, model):
    fully_shard(unit, mesh=mesh, mp_policy=mp_policy)

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
tokens = torch.arange(140 if dist.get_rank() == 0 else 20)[None]  # with an HCA window, and without
for step in range(10):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {dist.get_rank()} step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
