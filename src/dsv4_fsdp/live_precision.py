"""Read back what is really there: storage, compute and reduce dtype of every parameter of a live FSDP2 model.

Nothing here trusts the plan: the dtypes come from the parameter groups that ``fully_shard`` built, however the model
was sharded (this package, accelerate, transformers, NeMo AutoModel). :func:`differences` then compares them with the
plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .contract import island_reason, short_dtype
from .names import canonical_name, joined_name, pattern_name
from .plan import ShardingPlan
from .torch_private import owners_of, parameter_groups, reduce_dtype

__all__ = ["LiveTensor", "differences", "precision_table", "read_back"]


@dataclass(frozen=True)
class LiveTensor:
    """One parameter or floating buffer as it is in the live model.

    Attributes:
        fqn: canonical name from the root.
        kind: ``"parameter"`` or ``"buffer"``.
        unit: canonical name of the unit that holds it (``""`` is the root), ``None`` if no unit does.
        group: index of its parameter group inside the unit, ``None`` likewise.
        storage, compute, reduce: dtypes; ``reduce`` is ``None`` where there is no gradient reduction.
        island: whether the contract, as read from the model or the plan, wants it in fp32.
        reason: why, in words.
        placements: the DTensor placements as text, ``""`` for a plain tensor.
    """

    fqn: str
    kind: str
    unit: str | None
    group: int | None
    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype | None
    island: bool
    reason: str
    placements: str


def read_back(model: nn.Module, plan: ShardingPlan | None = None) -> list[LiveTensor]:
    """The live dtypes of every parameter and floating buffer of ``model``, in ``named_parameters`` order.

    Args:
        plan: takes reasons (the caller's own islands among them) from the plan that was applied; without it they come
            from the model's class lists and layout.
    """
    planned = {} if plan is None else {p.fqn: p for unit in plan.units for group in unit.groups for p in group.params}
    says = island_reason(model, ())
    homes = _homes(model)
    rows = []
    for raw_name, param in model.named_parameters():
        fqn = canonical_name(raw_name)
        # A unit that is gathered at the moment has the unsharded parameter registered, in its compute dtype.
        sharded, unit, group, compute, reduce = homes.get(fqn, (param, None, None, param.dtype, None))
        if (known := planned.get(fqn)) is not None:
            island, reason = known.island, known.reason
        else:
            said = says(fqn, param) if param.is_floating_point() else None
            island, reason = said is not None, said or ("mixed-precision policy" if unit is not None else "in no unit")
        placements = str(tuple(sharded.placements)) if isinstance(sharded, DTensor) else ""
        rows.append(
            LiveTensor(fqn, "parameter", unit, group, sharded.dtype, compute, reduce, island, reason, placements)
        )
    for raw_name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            fqn = canonical_name(raw_name)
            said = says(fqn, buffer)
            rows.append(
                LiveTensor(
                    fqn, "buffer", None, None, buffer.dtype, buffer.dtype, None, said is not None, said or "buffer", ""
                )
            )
    return rows


_Home = tuple[nn.Parameter, str, int, torch.dtype, torch.dtype | None]


def _homes(model: nn.Module) -> dict[str, _Home]:
    """Canonical name, each name of a tied one -> (sharded parameter, unit, group index, compute and reduce dtype)."""
    homes: dict[str, _Home] = {}
    num_groups: dict[str, int] = {}
    module_names = {id(module): name for name, module in model.named_modules()}
    for name, group in parameter_groups(model):
        index = num_groups.get(name, 0)
        num_groups[name] = index + 1
        for fsdp_param in group.fsdp_params:
            storage = fsdp_param.sharded_param.dtype
            policy = fsdp_param.mp_policy
            compute = (policy.param_dtype or storage) if storage.is_floating_point else storage
            reduce = reduce_dtype(policy, storage, compute) if storage.is_floating_point else None
            home = (fsdp_param.sharded_param, canonical_name(name), index, compute, reduce)
            for module, param_name in owners_of(fsdp_param):
                homes[joined_name(module_names[id(module)], param_name)] = home
    return homes


def differences(rows: Iterable[LiveTensor], plan: ShardingPlan) -> list[str]:
    """What in the live model is not as planned, one sentence each; empty if everything is.

    Checks for each planned parameter that it is in the planned unit and group with the planned dtypes, and that no
    parameter is live that the plan does not know.
    """
    live = {row.fqn: row for row in rows if row.kind == "parameter"}
    found = []
    for unit in plan.units:
        for index, group in enumerate(unit.groups):
            for param in group.params:
                row = live.pop(param.fqn, None)
                if row is None:
                    found.append(f"{param.fqn}: planned in unit {unit.fqn or '(root)'}, not in the model")
                    continue
                expected = (unit.fqn, index, group.storage, param.compute, group.reduce)
                got = (
                    row.unit,
                    row.group,
                    short_dtype(row.storage),
                    short_dtype(row.compute),
                    None if row.reduce is None else short_dtype(row.reduce),
                )
                if row.placements and f"dim={param.shard_dim}" not in row.placements:
                    found.append(f"{param.fqn}: expected to be cut along dim {param.shard_dim}, got {row.placements}")
                if got != expected:
                    found.append(f"{param.fqn}: expected (unit, group, storage, compute, reduce) {expected}, got {got}")
    found += [f"{fqn}: in the model, not in the plan" for fqn in live]
    return found


def precision_table(rows: Iterable[LiveTensor], *, columns: int = 100) -> str:
    """``rows`` as text: tensors whose names differ in layer numbers alone, and dtypes not at all, share a line.

    Args:
        columns: width to stay within, 80 or more; long names and reasons lose their middle.
    """
    counts: dict[tuple[str, ...], int] = {}
    for row in rows:
        # Which entry of a list matched is in the rows; the table says which list.
        reason = row.reason.partition(" '")[0]
        reason = f"island: {reason}" if row.island else reason
        dtypes = (_brief(row.storage), _brief(row.compute), "-" if row.reduce is None else _brief(row.reduce))
        key = (pattern_name(row.fqn), *dtypes, reason)
        counts[key] = counts.get(key, 0) + 1
    reason_width = min(max((len(key[-1]) for key in counts), default=6), columns - 33 - 24)
    name_width = max(24, min(max((len(key[0]) for key in counts), default=4), columns - reason_width - 33))
    lines = [f"{'name':<{name_width}} {'count':>5}  {'storage':<7} {'compute':<7} {'reduce':<7} reason"]
    for (name, storage, compute, reduce, reason), count in counts.items():
        lines.append(
            f"{_shorten(name, name_width):<{name_width}} {count:>5}  {storage:<7} {compute:<7} {reduce:<7} "
            f"{_shorten(reason, reason_width)}"
        )
    return "\n".join(lines)


def _brief(dtype: torch.dtype) -> str:
    return short_dtype(dtype).replace("bfloat", "bf").replace("float", "fp")


def _shorten(name: str, width: int) -> str:
    """``name`` in at most ``width`` characters: the start and the telling end of it."""
    if len(name) <= width:
        return name
    head = width // 4
    return f"{name[:head]}…{name[len(name) - (width - head - 1) :]}"
