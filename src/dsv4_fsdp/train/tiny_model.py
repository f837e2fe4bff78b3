"""The tiny preset's model: Transformers' real ``DeepseekV4ForCausalLM``, every kind of layer, small enough for a CPU.

Four layers: sliding-window attention and heavily compressed attention with hash routers, then compressed sparse
attention and heavily compressed attention with top-k routers; hyper-connections around all of them. The windows are the
release's (4 tokens for CSA, 128 for HCA). About 2.2 M parameters.

Storage is what ``from_pretrained(dtype=torch.bfloat16)`` leaves: bf16, with fp32 for what the class lists in
``_keep_in_fp32_modules_strict``. The vocabulary is bytes (:mod:`dsv4_fsdp.data.stdlib_text`), so the tokenizer that
goes with an export is made here too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4_fsdp.data.stdlib_text import BOS, EOS, VOCAB_SIZE
from dsv4_fsdp.initialization import initialize
from dsv4_fsdp.materialize import materialize

__all__ = ["build_tiny_model", "byte_tokenizer", "tiny_model_config"]


def tiny_model_config() -> Any:
    """The ``DeepseekV4Config``. Transformers is imported here, not with the module: it takes seconds."""
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS,
        eos_token_id=EOS,
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=[
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
        # Shorter than an HCA window, so that only compressed entries reach back further.
        sliding_window=64,
        num_attention_heads=4,
        head_dim=32,
        partial_rotary_factor=0.5,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=4,
        index_head_dim=32,
        # Fewer than the compressed entries of a sequence of 64 tokens, so that the indexer has something to choose.
        index_topk=12,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        hc_mult=4,
        # The release's 20 Sinkhorn steps would be half of the time of a model this small.
        hc_sinkhorn_iters=6,
        num_nextn_predict_layers=0,
        max_position_embeddings=1024,
    )


def build_tiny_model(*, seed: int) -> nn.Module:
    """The model on the CPU, unsharded, in training mode: what a run of the preset ``tiny`` starts from, on any number
    of ranks. Leaves the global random state alone.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            tiny_model_config(),
            dtype=torch.bfloat16,
            attn_implementation="eager",
            # One matmul per expert: the same on every machine, and faster than the others on a CPU.
            experts_implementation="eager",
        )
    assert isinstance(model, nn.Module)
    materialize(model, "cpu")
    initialize(model, seed=seed)
    return model.train()


def byte_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast`` whose ids 0 to 255 are bytes, so that exports work with stock Transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
