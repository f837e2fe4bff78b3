"""The grouped unit: one ``fully_shard`` call, one parameter group per dtype.

PyTorch's ``fully_shard`` puts all parameters of a unit into one group: one all-gather, one reduce-scatter, one dtype. A
DeepSeek-V4 block mixes bf16 weights with fp32 islands, some of which are bare parameters that no inner unit can
isolate. :func:`fully_shard` here is the same function with the same arguments, but the unit gets one *parameter group
per (storage, compute, reduce) dtype*. Everything else is torch's: one pair of hooks, one mesh, no second process
group, no change to the modules, the same state-dict keys.

How: torch's ``fully_shard`` collects the parameters and hands them to an internal function that appends one group to
the unit's state. We call that function once per dtype (see :mod:`dsv4_fsdp.torch_private`).

On torch >= 2.15 ``MixedPrecisionPolicy.param_dtype_override_fn`` gives parameters of one group different compute
dtypes, provided that they are stored and reduced alike (fp32 master weights); groups are then merged and the extra
collectives go away. It cannot merge bf16 storage with fp32 storage, so bf16-stored models still need two groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from .contract import (
    Contract,
    IslandPredicate,
    IslandReason,
    TensorRule,
    build_contract,
    check_names_match,
    is_part_of_a_block,
    island_reason,
    model_speaks,
    named_tensors,
    policy_dtypes,
    short_dtype,
    unmatched_names,
)
from .errors import ContractError, ShardingError, listing
from .names import is_adapter_name, named_parameters_all
from .torch_private import (
    fsdp_state,
    grouping_hook,
    has_native_override,
    managed_parameters,
    move_to_device,
    require_grouped_units,
    settle_dtypes_of_frozen,
    sharded_before,
)

__all__ = ["ParameterGroup", "fully_shard", "group_rules", "shard_unit"]

_NARROW = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one unit that share one all-gather and one reduce-scatter.

    ``computes`` has one dtype, or two where torch's native override lets islands ride with their master-weight
    siblings. ``reduce`` is ``None`` for parameters that have no gradient dtype (integers). ``indices`` are the places
    of ``rules`` among the rules that were grouped.
    """

    storage: torch.dtype
    computes: tuple[torch.dtype, ...]
    reduce: torch.dtype | None
    rules: tuple[TensorRule, ...]
    indices: tuple[int, ...]


def group_rules(rules: Iterable[TensorRule], *, native_override: bool | None = None) -> tuple[ParameterGroup, ...]:
    """Sort the rules of one unit's parameters into parameter groups, in order of first appearance.

    Args:
        rules: one rule per parameter, in the order in which ``fully_shard`` meets them.
        native_override: whether groups that differ in compute dtype alone may be merged; default: what this torch can.
    """
    merge = has_native_override() if native_override is None else native_override
    groups: dict[tuple[Any, ...], list[tuple[int, TensorRule]]] = {}
    for index, rule in enumerate(rules):
        key: tuple[Any, ...] = rule.group_key
        if merge and rule.storage == torch.float32:
            # The override can only keep a parameter in its storage dtype, so fp32 storage is the one case that merges.
            key = (rule.storage, rule.reduce)
        groups.setdefault(key, []).append((index, rule))
    return tuple(
        ParameterGroup(
            storage=members[0][1].storage,
            computes=tuple(dict.fromkeys(rule.compute for _, rule in members)),
            reduce=members[0][1].reduce,
            rules=tuple(rule for _, rule in members),
            indices=tuple(index for index, _ in members),
        )
        for members in groups.values()
    )


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    fp32_params: Contract | Iterable[str] | IslandPredicate | None = ...,
    restore_fp32: bool = ...,
    **torch_kwargs: Any,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    fp32_params: Contract | Iterable[str] | IslandPredicate | None = ...,
    restore_fp32: bool = ...,
    **torch_kwargs: Any,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen, and torch's own defaults
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    fp32_params: Contract | Iterable[str] | IslandPredicate | None = None,
    restore_fp32: bool = False,
    **torch_kwargs: Any,
) -> FSDPModule | list[FSDPModule]:
    """torch's ``fully_shard``, with one parameter group per (storage, compute, reduce) dtype.

    A drop-in: the arguments it shares with ``torch.distributed.fsdp.fully_shard`` mean what they mean there, later
    torch arguments are passed on, and a unit of a model without islands, stored in one dtype, is exactly torch's.

    Args:
        module: the module to make a unit, or a list of modules that become one unit together.
        mp_policy: what parameters that are no islands compute and reduce in. Islands always compute and reduce in fp32.
            In a unit of a model that has islands ``cast_forward_inputs`` never casts to a dtype below fp32: such a unit
            has no single input dtype, and a truncated RoPE table or residual would reach the islands. Inputs then
            arrive as the caller made them, as in the unsharded model.
        ignored_params: as in torch; islands among them are not this unit's business.
        fp32_params: the islands. ``None``: what the module says itself (its Transformers class's
            ``_keep_in_fp32_modules_strict``, or the NeMo AutoModel layout). A collection of names (matched at dot
            boundaries) or a predicate ``(fqn, tensor) -> bool``, with names relative to ``module``: these as well; an
            empty collection says that there are no others. A :class:`~dsv4_fsdp.contract.Contract`: these exactly.
        restore_fp32: upcast islands that are stored below fp32, with a warning; the lost bits do not come back.

    Returns:
        ``module``, changed in place, as torch does.

    Raises:
        ContractError: an island is stored below fp32, or ``fp32_params`` matches nothing in ``module``.
        ShardingError: the parameters' dtypes are mixed and nothing says which fp32 ones are islands; a parameter is
            already part of another unit (torch raises that at the first forward, and the former never); a module is
            already sharded; this rank is not in the mesh.
        UnsupportedTorch: this torch's FSDP2 cannot hold several parameter groups (torch < 2.12).
    """
    return shard_unit(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        fp32_params=fp32_params,
        restore_fp32=restore_fp32,
        **torch_kwargs,
    )


def shard_unit(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy,
    ignored_params: set[nn.Parameter] | None = None,
    fp32_params: Contract | Iterable[str] | IslandPredicate | None = None,
    restore_fp32: bool = False,
    adopted: Sequence[nn.Parameter] = (),
    **torch_kwargs: Any,
) -> Any:
    """:func:`fully_shard`, whose unit also takes ``adopted``: parameters of units inside, which those ignored."""
    require_grouped_units()
    modules = [module] if isinstance(module, nn.Module) else list(module)
    if not modules:
        raise ShardingError(
            "an empty list cannot become a unit.\nexpected: a module, or a list of at least one\ngot: []\n"
            "what to do: leave the call out."
        )
    if mesh is not None:
        refuse_foreign_mesh(mesh)
    refuse_sharded_modules(modules, ignored_params)
    if fp32_params is not None and not callable(fp32_params) and not isinstance(fp32_params, (Contract, str)):
        fp32_params = tuple(fp32_params)  # read once: it may be a generator
    managed = managed_parameters(modules, ignored_params)
    own = {id(param) for param in managed}
    adopted = [param for param in adopted if id(param) not in own]
    managed += adopted
    names = _first_names(modules)
    homes = {id(param): f"{names[id(param)]} of {_describe(modules)}" for param in managed}
    _refuse_shared_parameters(managed, homes)
    _refuse_unshardable_parameters(managed, homes)
    contract = _contract_of_unit(modules, managed, mp_policy, fp32_params, restore_fp32)
    rules = {id(param): rule for param in managed if (rule := contract.rule_of(param)) is not None}
    if unknown := [names[id(param)] for param in managed if id(param) not in rules]:
        raise ContractError(
            "the contract given as fp32_params does not cover this unit.\n"
            f"expected: a contract made of the model that holds {_describe(modules)}\n"
            f"got: one that says nothing of\n{listing(unknown)}\n"
            "what to do: make it with contract_of(model) after every change to the model's parameters, before sharding."
        )

    if isinstance(fp32_params, Contract):
        _refuse_other_policy(managed, rules, mp_policy)
    elif fp32_params is None and mp_policy.param_dtype in _NARROW:
        _refuse_lost_names(modules, rules, names)

    if mp_policy.param_dtype in _NARROW and (
        any(rule.island for rule in rules.values()) or _has_islands_elsewhere(modules, fp32_params)
    ):
        mp_policy = replace(mp_policy, cast_forward_inputs=False)

    def one_group_per_dtype(original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state, params, *rest = args
        params = [*params, *adopted]
        move_to_device(adopted, rest[3])
        for group in group_rules(rules[id(param)] for param in params):
            members = [params[index] for index in group.indices]
            # rest: modules, mesh_info, post_forward_mesh_info, device, shard_placement_fn, mp_policy, offload_policy
            group_args = [*rest[:5], _group_policy(mp_policy, group, members), *rest[6:]]
            original(state, members, *group_args, **kwargs)
            settle_dtypes_of_frozen(state)

    with grouping_hook(one_group_per_dtype):
        sharded = torch_fully_shard(
            module,
            mesh=mesh,
            mp_policy=mp_policy,
            ignored_params=ignored_params,
            **torch_kwargs,
        )
    for param in managed:
        param._dsv4_fsdp_managed = homes[id(param)]  # type: ignore[attr-defined]
    return sharded


def _has_islands_elsewhere(
    modules: list[nn.Module], fp32_params: Contract | Iterable[str] | IslandPredicate | None
) -> bool:
    """Whether the model that the unit is of has islands, here or in other units: what it hands on is fp32 in places.

    A model whose first blocks are dense and whose routers are islands has some blocks with and some without; the RoPE
    tables that all of them are given are the same.
    """
    if isinstance(fp32_params, Contract):
        return bool(fp32_params.islands)
    if callable(fp32_params) or (fp32_params is not None and tuple(fp32_params)):
        return True
    return any(model_speaks(module) for module in modules)


def _contract_of_unit(
    modules: list[nn.Module],
    managed: list[nn.Parameter],
    mp_policy: MixedPrecisionPolicy,
    fp32_params: Contract | Iterable[str] | IslandPredicate | None,
    restore_fp32: bool,
) -> Contract:
    """The contract over the parameters that the unit manages and its modules' buffers, names relative to these."""
    if isinstance(fp32_params, Contract):
        return fp32_params
    said: Iterable[str] | IslandPredicate = () if fp32_params is None else fp32_params
    # Names of inner units and of ignored parameters count as found: the same list may be given to every unit.
    fqns = [name for module in modules for _, name, _ in named_tensors(module)]
    if not callable(said):
        said = said if isinstance(said, str) else tuple(said)
        check_names_match(said, fqns, every=False)
    if fp32_params is None and not any(model_speaks(module) for module in modules):
        refuse_ambiguous_dtypes(modules, managed, mp_policy)
    managed_ids = {id(param) for param in managed}
    reasons = {id(module): island_reason(module, said) for module in modules}
    if not callable(said):
        _refuse_misspelt_names(tuple(said), fqns, modules, managed, reasons)
    tensors, reason_of = [], {}
    for module in modules:
        for kind, name, tensor in named_tensors(module):
            # Buffers are not sharded, but one that must be fp32 and is not (the router bias) is an error all the same.
            if kind == "buffer" or id(tensor) in managed_ids:
                tensors.append((kind, name, tensor))
                reason_of[name, id(tensor)] = reasons[id(module)]
    return build_contract(
        tensors,
        mp_policy=mp_policy,
        island_reason=lambda name, tensor: reason_of[name, id(tensor)](name, tensor),
        restore_fp32=restore_fp32,
        where=_describe(modules),
    )


def _group_policy(
    mp_policy: MixedPrecisionPolicy, group: ParameterGroup, members: list[nn.Parameter]
) -> MixedPrecisionPolicy:
    """The policy that makes torch treat ``group`` as its rules say, whatever this torch derives from ``None``."""
    changes: dict[str, Any] = {"param_dtype": group.computes[0], "reduce_dtype": group.reduce}
    if len(group.computes) > 1:
        compute_of = {id(param): rule.compute for param, rule in zip(members, group.rules, strict=True)}
        changes["param_dtype"] = next(dtype for dtype in group.computes if dtype != group.storage)
        changes["param_dtype_override_fn"] = lambda param: compute_of[id(param)]
    elif has_native_override():
        changes["param_dtype_override_fn"] = None  # what the caller's said is in the rules already
    return replace(mp_policy, **changes)


def refuse_foreign_mesh(mesh: object) -> None:
    """Raise :class:`ShardingError` if this rank is not in ``mesh``, where torch fails with an ``IndexError``."""
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        ranks = mesh.mesh.flatten().tolist()
        raise ShardingError(
            "this rank is not in the mesh.\n"
            f"expected: a mesh that holds rank {dist.get_rank()}\n"
            f"got: a mesh of shape {tuple(mesh.shape)} over "
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}{', ...' if ranks[8:] else ''} "
            f"of {dist.get_world_size()}\n"
            "what to do: make a mesh over all ranks with init_device_mesh, or call this on the ranks of the mesh only."
        )


def refuse_sharded_modules(modules: list[nn.Module], ignored_params: set[nn.Parameter] | None) -> None:
    """Raise :class:`ShardingError` where an earlier call made a unit of these modules or of modules inside them."""
    units = [module for module in modules if fsdp_state(module) is not None]
    sharded = {id(module) for module in [*units, *sharded_before(modules, ignored_params)]}
    if sharded:
        inside = [name or "(itself)" for m in modules for name, sub in m.named_modules() if id(sub) in sharded]
        raise ShardingError(
            "an earlier fully_shard call has sharded parameters of this unit already.\n"
            "expected: each module in one unit, and units made bottom-up, blocks before the model around them\n"
            f"got, sharded before, in {_describe(modules)}:\n{listing(inside)}\n"
            "what to do: call fully_shard once per module and inner modules first; where two modules share a third, "
            "make them one unit, fully_shard([a, b])."
        )


def _refuse_misspelt_names(
    said: tuple[str, ...],
    fqns: list[str],
    modules: list[nn.Module],
    managed: list[nn.Parameter],
    reasons: dict[int, IslandReason],
) -> None:
    """A name may match nothing where one list serves every unit, but not beside fp32 parameters that nobody named."""
    if not any(param.dtype in _NARROW for param in managed):
        return  # stored in fp32 throughout: the unnamed ones are master weights
    silent = unmatched_names(said, fqns)
    if not silent:
        return
    unnamed = [
        name
        for module in modules
        for name, param in named_parameters_all(module)
        if param.dtype == torch.float32 and not is_adapter_name(name) and reasons[id(module)](name, param) is None
    ]
    if unnamed:
        raise ContractError(
            "fp32_params holds names that match nothing here, beside fp32 parameters that no name matches.\n"
            f"expected: each fp32 parameter named, or each name found\ngot, matching nothing:\n{listing(silent)}\n"
            f"stored in float32 and not named:\n{listing(unnamed)}\nwhere: {_describe(modules)}\n"
            "what to do: correct the name."
        )


def _refuse_unshardable_parameters(managed: list[nn.Parameter], homes: dict[int, str]) -> None:
    """What torch refuses without a name, or at the first backward only: found before anything is changed."""
    wrong = []
    for param in managed:
        local = param.to_local() if isinstance(param, DTensor) else param
        if param.numel() == 0:
            wrong.append(f"{homes[id(param)]}: shape {tuple(param.shape)} holds nothing; put it into ignored_params")
        elif not local.is_contiguous():
            wrong.append(f"{homes[id(param)]}: not contiguous; assign param.data = param.data.contiguous()")
    if wrong:
        raise ShardingError(
            "parameters that FSDP2 cannot shard.\nexpected: contiguous, with at least one element\n"
            f"got:\n{listing(wrong)}\nwhat to do: mend each as said beside it."
        )


def _refuse_other_policy(
    managed: list[nn.Parameter], rules: dict[int, TensorRule], mp_policy: MixedPrecisionPolicy
) -> None:
    """A contract has the dtypes of the policy it was made under; a unit under another would follow neither."""
    for param in managed:
        rule = rules[id(param)]
        if rule.island or not param.is_floating_point():
            continue
        if (wanted := policy_dtypes(param, mp_policy)) != (rule.compute, rule.reduce):
            raise ShardingError(
                "mp_policy and the contract given as fp32_params disagree.\n"
                f"expected: {rule.fqn} to compute and reduce in {short_dtype(rule.compute)} and "
                f"{short_dtype(rule.reduce or rule.compute)}, as the contract says\n"
                f"got: a policy that wants {short_dtype(wanted[0])} and {short_dtype(wanted[1])}\n"
                "what to do: pass the same mp_policy to contract_of and to fully_shard."
            )


def _refuse_lost_names(modules: list[nn.Module], rules: dict[int, TensorRule], names: dict[int, str]) -> None:
    """fp32 parameters of a unit below a block, whose names there are too short for the model's list to match."""
    lost = [
        f"{names[id(param)]} of {type(module).__name__}"
        for module in modules
        if is_part_of_a_block(module)
        for param in module.parameters()
        if (rule := rules.get(id(param))) is not None
        and not rule.island
        and rule.storage == torch.float32
        and not is_adapter_name(rule.fqn)
    ]
    if lost:
        raise ShardingError(
            "nothing says whether the fp32 parameters of this unit are islands.\n"
            "expected: fp32_params, because the unit is smaller than a block: the model's list speaks of longer names\n"
            f"got, stored in float32:\n{listing(lost)}\n"
            "what to do: make the contract of the whole model before sharding, contract = contract_of(model), and pass "
            "fp32_params=contract to each call; or fp32_params=[] if they are master weights."
        )


def refuse_ambiguous_dtypes(
    modules: list[nn.Module], managed: list[nn.Parameter], mp_policy: MixedPrecisionPolicy
) -> None:
    """Raise :class:`ShardingError` where fp32 stands beside a narrower dtype and nothing says what it is."""
    floating = {param.dtype for param in managed if param.is_floating_point()}
    if len(floating) < 2 or torch.float32 not in floating or mp_policy.param_dtype not in _NARROW:
        return
    names = _first_names(modules)
    in_fp32 = [names[id(param)] for param in managed if param.dtype == torch.float32]
    raise ShardingError(
        "parameters of different dtypes in one unit, and nothing says what the fp32 ones are.\n"
        f"expected: fp32_params, or a model class that lists its fp32 parameters\n"
        f"got: storage {', '.join(sorted(short_dtype(dtype) for dtype in floating))} under a policy that computes in "
        f"{short_dtype(mp_policy.param_dtype)}; stored in float32:\n{listing(in_fp32)}\n"
        f"where: {_describe(modules)}\n"
        "what to do: pass fp32_params=[...] with the names that must compute in fp32, or fp32_params=[] if all of them "
        f"are master weights or adapters that may compute in {short_dtype(mp_policy.param_dtype)}."
    )


def _refuse_shared_parameters(managed: list[nn.Parameter], homes: dict[int, str]) -> None:
    """Tied parameters in two units: torch >= 2.13 raises at the first forward, older ones silently untie."""
    shared = [f"{homes[id(param)]}, {home}" for param in managed if (home := _home_elsewhere(param)) is not None]
    if shared:
        raise ShardingError(
            "a parameter of this unit is tied to one that another unit already shards.\n"
            "expected: all names of a tied parameter in one unit\n"
            f"got:\n{listing(shared)}\n"
            "what to do: shard both owners as one unit, fully_shard([embedding, head]), or leave both to the root unit."
        )


def _home_elsewhere(param: nn.Parameter) -> str | None:
    """Where ``param`` is sharded already, in words, or ``None``."""
    if (home := getattr(param, "_dsv4_fsdp_managed", None)) is not None:
        return f"sharded before as {home}"
    # torch's own mark (>= 2.13), so units made by stock `fully_shard` count too.
    return "sharded before by torch's own fully_shard" if hasattr(param, "_fsdp_orig_uid") else None


def _first_names(modules: list[nn.Module]) -> dict[int, str]:
    names: dict[int, str] = {}
    for module in modules:
        for name, param in named_parameters_all(module):
            names.setdefault(id(param), name)
    return names


def _describe(modules: list[nn.Module]) -> str:
    kinds = ", ".join(type(module).__name__ for module in modules)
    return kinds if len(modules) == 1 else f"[{kinds}]"
