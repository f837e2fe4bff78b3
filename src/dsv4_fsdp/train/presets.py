"""Named starting points of a run. Each is a nested mapping of settings, checked when a run is made of it.

``tiny`` runs as it is. The others lack what only their user knows: ``model.path`` and ``data.path``; the number of
ranks and the mesh are for the cluster that they name, see ``dsv4-fsdp plan``. None of the large ones has been trained
by us: no such cluster was at hand.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

_SFT_DATA = {"kind": "sft", "sequence_length": 8192, "global_batch_size": 128, "balance_lengths": True}
_PRETRAIN_DATA = {"kind": "pretrain", "sequence_length": 8192, "global_batch_size": 512}
# bf16 weights move at small learning rates only if rounding is stochastic.
_FINE_TUNE = {
    "name": "adamw_bf16_sr",
    "lr": 1e-5,
    "warmup_fraction": 0.03,
    "final_lr_fraction": 0.1,
    "beta2": 0.95,
    "weight_decay": 0.0,
}
_LORA = {"name": "adamw", "lr": 2e-4, "warmup_fraction": 0.03, "beta2": 0.99, "weight_decay": 0.0}
_OVERNIGHT = {"every": 100, "keep": 3}
_ON_ONE_NODE = {
    "steps": 1000,
    "seed": 0,
    "nproc": 8,
    "mesh": {"expert_parallel": 8, "activation_checkpointing": 1},
    "checkpoint": _OVERNIGHT,
}
# Flash and Pro differ in how many nodes they take, which is not a preset's to say.
_SFT = _ON_ONE_NODE | {"model": {}, "data": _SFT_DATA, "optimizer": _FINE_TUNE}
_SFT_LORA = _ON_ONE_NODE | {"model": {"train": "lora"}, "data": _SFT_DATA, "optimizer": _LORA}

PRESETS: dict[str, dict[str, Any]] = {
    # A quarter of the sequences is shorter than one HCA window (128 tokens), so most steps have ranks that differ.
    "tiny": {
        "steps": 120,
        "seed": 0,
        "nproc": 2,
        "model": {"path": "tiny", "init": "random"},
        "data": {"kind": "stdlib", "sequence_lengths": [64, 192, 256, 512], "batch_tokens": 512},
        "optimizer": {
            "lr": 2e-3,
            "warmup_fraction": 0.1,
            "final_lr_fraction": 0.1,
            # bf16 storage means bf16 moments: 0.999 would change the second one by less than its last bit.
            "beta2": 0.95,
        },
    },
    "flash-sft": _SFT,
    "flash-lora": _SFT_LORA,
    "flash-pretrain": _ON_ONE_NODE
    | {
        "steps": 10000,
        "model": {},
        "data": _PRETRAIN_DATA,
        "optimizer": _FINE_TUNE | {"lr": 2e-5, "weight_decay": 0.1},
        "router_bias_rate": 1e-4,
        "checkpoint": _OVERNIGHT | {"every": 500},
    },
    "pro-sft": _SFT,
    "pro-lora": _SFT_LORA,
}
