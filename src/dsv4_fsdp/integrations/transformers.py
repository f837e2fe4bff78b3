"""transformers' native distributed loading, with fp32 islands in grouped units. Tested with transformers 5.24.0.

::

    with dsv4_fsdp.keep_fp32_islands():
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype="bfloat16",
            distributed_config=DistributedConfig(fsdp_size=8, dp_replicate_size=2, ep_size=8),
        )

Without the line, a bf16 model stops at its first forward ("FSDP expects uniform original parameter dtype"), and one
loaded in fp32 with ``fsdp_mixed_precision=True`` computes its islands in bf16 and says nothing.

What is patched: the name ``apply_fully_sharded_data_parallelism`` in ``transformers.distributed.mixin``. While
transformers' own function of that name runs, ``fully_shard`` in ``transformers.distributed.fsdp`` is ours, and the
sharding plan it is given lacks the entries that transformers adds for single modules kept in fp32. Meshes, the plan's
other entries (also the user's ``fsdp_plan``), the policy, CPU offload and expert parallelism are transformers'.

- Blocks, embedding, norm with head, and the root are one unit each, of one parameter group per dtype.
- Dispatched experts (``ep_size > 1``) keep the unit that transformers gives them, on its ``efsdp`` mesh and with its
  gradient divide factor; they hold no islands. The rest of the block is one unit around them.
- Each rank still reads its own shard from the checkpoint, and ``save_pretrained`` works as before, with
  ``distributed_checkpoint=True`` too.
- Without ``fsdp_mixed_precision`` transformers reduces bf16 gradients in bf16. With it they are reduced in fp32, which
  we advise; islands are reduced in fp32 either way.

With the ``Trainer``: leave ``bf16=False`` in its arguments, the storage dtype has decided already. ``bf16=True`` runs
such a model under ``torch.autocast``, which computes the hyper-connection mixers' product in bf16 whatever they are
stored in. (A model that the Trainer shards itself, through accelerate, is not run under autocast.)

Not tested: tensor parallelism beside FSDP (``tp_size > 1``), quantised checkpoints, models with adapters.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dsv4_fsdp import grouped_unit
from dsv4_fsdp.alignment import freeze_indexers, tie_compressors
from dsv4_fsdp.contract import contract_of, widen_meta_islands

from . import TESTED_VERSIONS as _ALL_TESTED
from . import UnsupportedLibrary, rebound, refuse_unknown_internals, signature_problem, unpatched

__all__ = ["TESTED_VERSIONS", "native_sharding_patched"]

TESTED_VERSIONS = _ALL_TESTED["transformers"]

_APPLY = "apply_fully_sharded_data_parallelism"


@contextmanager
def native_sharding_patched() -> Iterator[None]:
    """The part of :func:`dsv4_fsdp.keep_fp32_islands` that is about transformers' ``distributed_config``.

    On leaving, every model that was sharded inside is checked once more: loading must not have stored an island below
    fp32.

    Raises:
        UnsupportedLibrary: transformers is missing or its internals are not those known here.
        ContractError: see above.
    """
    mixin, fsdp = _known_internals()
    sharded: list[weakref.ref[nn.Module]] = []

    def make(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def apply(model: Any, mesh_manager: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> nn.Module:
            sharded.append(weakref.ref(model))
            return _shard(original, fsdp, model, mesh_manager, fsdp_plan, ep_plan)

        return apply

    with rebound(mixin, _APPLY, make):
        yield
    for reference in sharded:
        if (model := reference()) is not None:
            contract_of(model)


def _shard(
    original: Callable[..., nn.Module],
    fsdp: Any,
    model: Any,
    mesh_manager: Any,
    fsdp_plan: dict[str, str],
    ep_plan: dict[str, str],
) -> nn.Module:
    """transformers' function on a plan without units for single islands, with our ``fully_shard``."""
    # The model's and the user's own rules, without what `_resolve_parallel_plans` put on top for modules kept in fp32.
    rules = fsdp._resolve_tied_embed_lm_head_plan(dict(model.fsdp_plan), model)
    wanted = model._expand_parallel_plan(rules)
    plan = {name: style for name, style in fsdp_plan.items() if name in wanted}

    widen_meta_islands(model)
    policy_kwargs = fsdp._get_fsdp_policy_kwargs(getattr(model.config, "distributed_config", None))
    contract = contract_of(model, mp_policy=policy_kwargs.get("mp_policy", MixedPrecisionPolicy()))
    freeze_indexers(model)  # loading keeps `requires_grad` as it finds it
    tie_compressors(model)

    def fully_shard(module: Any, **kwargs: Any) -> Any:
        return grouped_unit.fully_shard(module, **kwargs, fp32_params=contract)

    with rebound(fsdp, "fully_shard", lambda _: fully_shard):
        return original(model, mesh_manager, plan, ep_plan)


def _known_internals() -> tuple[Any, Any]:
    """transformers' modules ``distributed.mixin`` and ``distributed.fsdp``, if they are as this file needs them."""
    try:
        import transformers

        mixin = importlib.import_module("transformers.distributed.mixin")
        fsdp = importlib.import_module("transformers.distributed.fsdp")
    except ImportError as error:
        raise UnsupportedLibrary(
            "keep_fp32_islands cannot import transformers' native sharding.\n"
            f"expected: transformers {', '.join(TESTED_VERSIONS)} or later\ngot: {error}\n"
            "what to do: install it, or shard with dsv4_fsdp.parallelize."
        ) from error
    problems = [
        signature_problem(fsdp, _APPLY, ("model", "mesh_manager", "fsdp_plan", "ep_plan"), uses=("fully_shard",)),
        signature_problem(fsdp, "_resolve_tied_embed_lm_head_plan", ("fsdp_plan", "model")),
        signature_problem(fsdp, "_get_fsdp_policy_kwargs", ("distributed_config",)),
    ]
    owner = getattr(mixin, "DistributedMixin", None)
    if owner is None:
        problems.append("transformers.distributed.mixin.DistributedMixin is missing")
    else:
        problems += [
            signature_problem(
                owner, "maybe_distribute_model", ("model", "distributed_config", "mesh_manager"), uses=(_APPLY,)
            ),
            signature_problem(owner, "_expand_parallel_plan", ("self", "plan")),
            None if isinstance(getattr(owner, "fsdp_plan", None), property) else "the model has no fsdp_plan property",
        ]
    if unpatched(getattr(mixin, _APPLY, None)) is not getattr(fsdp, _APPLY, None):
        problems.append(f"transformers.distributed.mixin.{_APPLY} is not transformers' own function")
    if not callable(getattr(fsdp, "fully_shard", None)):
        problems.append("transformers.distributed.fsdp.fully_shard is missing")
    refuse_unknown_internals("transformers", transformers.__version__, TESTED_VERSIONS, [p for p in problems if p])
    return mixin, fsdp
