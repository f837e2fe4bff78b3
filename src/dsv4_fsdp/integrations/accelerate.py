"""accelerate's FSDP2 plugin, and so ``Trainer`` and TRL's ``SFTTrainer``, with fp32 islands. Tested with 1.15.0.

::

    with dsv4_fsdp.keep_fp32_islands():
        model, optimizer = accelerator.prepare(model, optimizer)

    with dsv4_fsdp.keep_fp32_islands():
        trainer.train()  # the Trainer prepares in here

Without the line accelerate stores every trainable parameter in fp32, which torch needs for uniform units, and the
policy then computes all of them in bf16, islands too. ``keep_fp32_islands(accelerate_upcast=False)`` leaves the storage
as loaded: bf16 weights and fp32 islands, half the memory and what :func:`dsv4_fsdp.parallelize` does. Leave the default
for master weights.

What is patched: the name ``fsdp2_prepare_model`` in ``accelerate.accelerator``. While accelerate's own function of that
name runs, ``torch.distributed.fsdp.fully_shard``, which it imports when called, is ours. Which modules become units,
meshes, low-memory loading, CPU offload and activation checkpointing are accelerate's. An ``output_dtype`` in the
plugin's policy is kept for the root alone; between blocks it would cast what the unsharded model does not.

What is accelerate's and stays so: on a CPU it ignores an FSDP plugin (and uses DDP), so our tests put the one line
there that it runs on every accelerator; its default policy reduces in bf16 whatever is no island, and returns logits
and loss in bf16; ``cpu_ram_efficient_loading=True`` fails in 1.15.0 on any model with saved buffers, this one too.

TRL's ``SFTTrainer`` (tested with 1.16.0) prepares as the ``Trainer`` does, so the same line serves it. For a loss that
balances experts TRL asks the model's config for ``num_experts``, which DeepSeek-V4's does not have:
``SFTConfig(router_aux_loss_coef=0.0)`` switches that loss off.

Only ``fsdp_version=2`` passes through that function; FSDP1 is not served. The Lightning Indexers are frozen when the
model is prepared, which is after the optimizer was made: it then holds parameters that never get a gradient. Call
``dsv4_fsdp.alignment.freeze_indexers(model)`` before if that disturbs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from dsv4_fsdp import grouped_unit
from dsv4_fsdp.alignment import freeze_indexers, tie_compressors
from dsv4_fsdp.contract import Contract, contract_of

from . import TESTED_VERSIONS as _ALL_TESTED
from . import UnsupportedLibrary, rebound, refuse_unknown_internals, signature_problem, unpatched

__all__ = ["TESTED_VERSIONS", "prepare_patched"]

TESTED_VERSIONS = _ALL_TESTED["accelerate"]

_PREPARE = "fsdp2_prepare_model"


@contextmanager
def prepare_patched(*, upcast: bool) -> Iterator[None]:
    """The part of :func:`dsv4_fsdp.keep_fp32_islands` that is about accelerate's FSDP2.

    Args:
        upcast: whether accelerate may store trainable parameters in fp32 as it does by itself.

    Raises:
        UnsupportedLibrary: accelerate is missing or its internals are not those known here.
    """

    def make(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def prepare(accelerator: Any, model: nn.Module) -> nn.Module:
            return _prepare(original, accelerator, model, upcast)

        return prepare

    with rebound(_known_internals(), _PREPARE, make):
        yield


def _prepare(original: Callable[..., nn.Module], accelerator: Any, model: nn.Module, upcast: bool) -> nn.Module:
    """accelerate's function with our ``fully_shard``."""
    if isinstance(getattr(model, "_orig_mod", model), FSDPModule):
        return original(accelerator, model)  # it returns a sharded model as it is
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy or MixedPrecisionPolicy()
    contract_of(model, mp_policy=policy)  # the upcast would hide that an island has lost its bits
    freeze_indexers(model)
    tie_compressors(model)
    contract: Contract | None = None

    def fully_shard(module: Any, *, mp_policy: MixedPrecisionPolicy, **kwargs: Any) -> Any:
        nonlocal contract
        if contract is None:
            # Only now: accelerate has changed dtypes, and low-memory loading has put new parameters into the model.
            contract = contract_of(model, mp_policy=mp_policy)
        if module is not model:
            mp_policy = replace(mp_policy, output_dtype=None)
        return grouped_unit.fully_shard(module, mp_policy=mp_policy, **kwargs, fp32_params=contract)

    with rebound(torch.distributed.fsdp, "fully_shard", lambda _: fully_shard):
        return original(accelerator if upcast else _WithoutUpcast(accelerator), model)


class _WithoutUpcast:
    """An ``Accelerator`` that says "no" when ``fsdp2_prepare_model`` asks whether to upcast, else the one it is for.

    In that function ``mixed_precision`` decides on the upcast and on nothing else.
    """

    mixed_precision = "no"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _known_internals() -> Any:
    """accelerate's module ``accelerator``, if it and what it calls are as this file needs them."""
    try:
        import accelerate

        module = importlib.import_module("accelerate.accelerator")
        utils = importlib.import_module("accelerate.utils.fsdp_utils")
    except ImportError as error:
        raise UnsupportedLibrary(
            f"keep_fp32_islands cannot import accelerate.\nexpected: accelerate {', '.join(TESTED_VERSIONS)} or later\n"
            f'got: {error}\nwhat to do: install it, or name the library you use: keep_fp32_islands("transformers").'
        ) from error
    problems = [
        signature_problem(
            utils, _PREPARE, ("accelerator", "model"), uses=("fully_shard", "mixed_precision", "mixed_precision_policy")
        ),
        signature_problem(module.Accelerator, "_prepare_fsdp2", ("self", "args"), uses=(_PREPARE,)),
    ]
    if unpatched(getattr(module, _PREPARE, None)) is not getattr(utils, _PREPARE, None):
        problems.append(f"accelerate.accelerator.{_PREPARE} is not accelerate's own function")
    refuse_unknown_internals("accelerate", accelerate.__version__, TESTED_VERSIONS, [p for p in problems if p])
    return module
