"""Bytes that each optimizer of the trainer keeps, and most that its step needs besides.

Which parameter is moved how is the trainer's own answer (:data:`Roles`); see :mod:`dsv4_fsdp.train.optimizers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dsv4_fsdp.plan import ParamPlan

__all__ = ["Roles", "algorithm_of", "optimizer_state_bytes", "optimizer_temporaries"]

_AO_BLOCK = 256  # see dsv4_fsdp.train.stochastic_adamw: what is quantised is in blocks of so many elements
_AO_MIN_NUMEL = 4096  # and smaller shards are not quantised
_AO_QMAP_BYTES = 256 * 4
_STEP_BYTES = 4  # AdamW's step count is a scalar fp32 tensor for each parameter

Roles = Mapping[str, tuple[str, str]]
"""Canonical name -> role and algorithm of a parameter in the trainer's groups
(:class:`dsv4_fsdp.train.optimizers.ParameterGroup`)."""


def algorithm_of(optimizer: str, param: ParamPlan, roles: Roles | None, *, num_shards: int) -> str:
    """How ``optimizer`` moves this parameter; see :mod:`dsv4_fsdp.train.optimizers` and its modules for the rules."""
    if optimizer not in ("adamw_8bit", "muon"):
        return optimizer
    assert roles is not None, f"{optimizer} treats parameters by their role"
    role, algorithm = roles[param.fqn]
    if optimizer == "muon":
        return algorithm
    # Experts under expert parallelism are cut as often as everything else, along two axes.
    local_numel = math.prod(param.shape) // num_shards
    in_blocks = param.shape[0] % num_shards == 0 and local_numel >= _AO_MIN_NUMEL and local_numel % _AO_BLOCK == 0
    return "adamw_8bit" if role == "matrices" and in_blocks else "adamw_bf16_sr"


def optimizer_state_bytes(algorithm: str, *, local_numel: int, itemsize: int) -> int:
    """State of one parameter on one rank: ``local_numel`` elements of ``itemsize`` bytes, without padding.

    ``adamw``: two moments like the parameter, and a step count. ``adamw_bf16_sr``: two moments in fp32, and the count.
    ``adamw_8bit``: for each moment a byte per element, an fp32 scale per 256 of them and a table of 256, and the count.
    ``muon``: one momentum in fp32. ``sgd-momentum``: one buffer like the parameter.
    """
    moment = {
        "adamw": 2 * local_numel * itemsize + _STEP_BYTES,
        "adamw_bf16_sr": 2 * local_numel * 4 + _STEP_BYTES,
        "adamw_8bit": 2 * (local_numel + local_numel // _AO_BLOCK * 4 + _AO_QMAP_BYTES) + _STEP_BYTES,
        "muon": local_numel * 4,
        "sgd-momentum": local_numel * itemsize,
        "sgd": 0,
    }
    return moment[algorithm]


def optimizer_temporaries(optimizer: str, *, gradients: int, shards: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    """Most that a step of the optimizer has in memory beside its state.

    Args:
        gradients: bytes of all gradients of the rank.
        shards: elements of the rank's shard, and whole shape, of each trainable parameter.
    """
    if optimizer == "adamw":
        # foreach makes the square roots of all second moments at once: a list as large as the parameters.
        return gradients
    largest = max((numel for numel, _ in shards), default=0)
    if optimizer in ("adamw_8bit", "adamw_bf16_sr"):
        # One parameter at a time; not compiled, five tensors in fp32: gradient, both moments, the weight, the update.
        return 5 * 4 * largest
    if optimizer == "muon":
        # One matrix at a time, gathered whole in bf16: the update, its product, and what the iteration makes of it.
        whole = max((math.prod(shape[-2:]) for _, shape in shards if len(shape) > 1), default=0)
        return 3 * 4 * largest + 4 * 2 * whole
    return 0
