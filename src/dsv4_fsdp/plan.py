"""The sharding plan: which units there are, what is in them, and what they cost per step. Pure, printable, hashable.

A plan is made from an unsharded model (on the meta device if you like) and a mesh *shape*; it needs no process group
and no device. :func:`dsv4_fsdp.parallelize` applies exactly this object, the trainer compares its hash across ranks
before the first collective, and :mod:`dsv4_fsdp.live_precision` compares it with what ``fully_shard`` really built.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import or_
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import nemo_layout
from .alignment import indexer_parameters
from .contract import Contract, IslandPredicate, contract_of, default_mp_policy, short_dtype
from .errors import ContractError, ShardingError, listing
from .grouped_unit import group_rules
from .model_layout import ModelLayout, layout_of
from .names import canonical_name, named_parameters_all

__all__ = [
    "GroupPlan",
    "IslandUnits",
    "ParamPlan",
    "ShardingPlan",
    "UnitPlan",
    "even_dim",
    "islands_left_to_root",
    "padded_numel",
    "plan_sharding",
]

IslandUnits = Literal["grouped", "root", "nested"]

_PADDING_TAKEN = 0.5  # of a tensor's elements, before another dim is cut


@dataclass(frozen=True)
class ParamPlan:
    """One parameter: canonical name, unsharded shape, compute dtype, and what the contract says of it.

    ``shard_dim`` is the dim along which it is cut (:func:`even_dim`).
    """

    fqn: str
    shape: tuple[int, ...]
    compute: str
    island: bool
    trainable: bool
    reason: str
    shard_dim: int = 0


@dataclass(frozen=True)
class GroupPlan:
    """One parameter group: dtypes (by name, such as ``"bfloat16"``), parameters, and bytes with padding.

    ``shard_bytes`` is what one rank stores. ``all_gather_bytes`` is the size of one all-gather's output,
    ``reduce_scatter_bytes`` that of one reduce-scatter's input (0 if nothing is trainable).
    """

    storage: str
    reduce: str | None
    params: tuple[ParamPlan, ...]
    shard_bytes: int
    all_gather_bytes: int
    reduce_scatter_bytes: int

    @property
    def computes(self) -> tuple[str, ...]:
        """The compute dtypes in the group; more than one only with torch's native override."""
        return tuple(dict.fromkeys(param.compute for param in self.params))

    @property
    def numel(self) -> int:
        """Elements of all parameters, unsharded, without padding."""
        return sum(math.prod(param.shape) for param in self.params)


@dataclass(frozen=True)
class UnitPlan:
    """One ``fully_shard`` call.

    Attributes:
        fqn: canonical name of the module, ``""`` for the root.
        role: ``"embedding"``, ``"block"``, ``"head"``, ``"root"``, ``"experts"`` (dispatched ones, inside the block
            that follows) or ``"island"`` (nested units).
        reshard_after_forward: as in ``fully_shard``; ``None`` leaves the root to torch (kept unsharded).
        unshard_in_backward: ``False`` where backward does not read the weights (a plain embedding).
        reached_in_backward: ``False`` where no gradient arrives: in frozen blocks before the first trainable parameter.
        cast_inputs_to: dtype name the unit casts its floating inputs to, or ``None`` for no cast. The root of a model
            without islands there casts as the caller's policy says, which is not planned.
        groups: its parameter groups.
    """

    fqn: str
    role: str
    reshard_after_forward: bool | int | None
    unshard_in_backward: bool
    reached_in_backward: bool
    cast_inputs_to: str | None
    groups: tuple[GroupPlan, ...]

    @property
    def gathers_in_backward(self) -> bool:
        """Whether the unit's weights were freed after forward and are gathered again."""
        return bool(self.reshard_after_forward) and self.unshard_in_backward and self.reached_in_backward

    @property
    def trainable_fqns(self) -> tuple[str, ...]:
        """Its trainable parameters."""
        return tuple(param.fqn for group in self.groups for param in group.params if param.trainable)


@dataclass(frozen=True)
class ShardingPlan:
    """The units in the order in which they are applied: embedding, blocks, head, root.

    Attributes:
        mesh_shape: ``(shard,)`` or ``(replicate, shard)``.
        expert_parallel: ranks that the experts of a layer are dealt to; 1 means that each rank computes all of them.
            What a rank holds is then sharded over ``shard / expert_parallel`` ranks.
        island_units: ``"grouped"``, ``"root"`` or ``"nested"``.
        activation_checkpointing: whether each block is recomputed in backward; a number n: every n-th, from the first.
        frozen_fqns: parameters that applying the plan freezes (the Lightning Indexer's).
    """

    mesh_shape: tuple[int, ...]
    expert_parallel: int
    island_units: IslandUnits
    activation_checkpointing: bool | int
    frozen_fqns: tuple[str, ...]
    units: tuple[UnitPlan, ...]

    @property
    def hash(self) -> str:
        """SHA-256 over everything in the plan, hex. Equal on all ranks, or the ranks would build different
        collectives."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True)

    def shard_size(self, unit: UnitPlan) -> int:
        """How many ranks share the parameters of ``unit``: the shard axis, or what expert parallelism leaves of it."""
        return self.mesh_shape[-1] // (self.expert_parallel if unit.role == "experts" else 1)

    @property
    def stages(self) -> tuple[tuple[UnitPlan, ...], ...]:
        """The units but the root as they run, each with the dispatched experts inside of it behind it."""
        stages: list[tuple[UnitPlan, ...]] = []
        experts: tuple[UnitPlan, ...] = ()
        for unit in self.units[:-1]:
            if unit.role == "experts":  # the plan has them before the block that they are inside of
                experts = (unit, *experts)
            else:
                stages.append((unit, *experts))
                experts = ()
        return tuple(stages)

    def recomputes(self, block: UnitPlan) -> bool:
        """Whether ``block`` is run again in backward."""
        blocks = [unit for unit in self.units if unit.role == "block"]
        return bool(self.activation_checkpointing) and blocks.index(block) % self.activation_checkpointing == 0

    def trains(self, unit: UnitPlan) -> bool:
        """Whether ``unit`` reads a trainable parameter: its own, or an island of a block that the root holds.

        Such an island counts for its block and not for the root.
        """
        return self.units.index(unit) in self._trained

    def gradient_arrives_at(self, unit: UnitPlan) -> bool:
        """Whether backward comes to ``unit``: whether it, or what ran before it, trains.

        One unit further is gathered, which :attr:`UnitPlan.reached_in_backward` is true of.
        """
        last = self.units.index(unit) + (unit.role == "experts")  # the block around them runs first
        return self.embedding_trains_in_root or min(self._trained, default=len(self.units)) <= last

    @cached_property
    def _trained(self) -> set[int]:
        return _that_train(self.units)

    @property
    def embedding_trains_in_root(self) -> bool:
        """Whether the root may hold a trainable embedding: what goes into the first unit then needs a gradient."""
        return self.units[0].role != "embedding" and self.trains(self.units[-1])

    def collectives_per_step(self, *, micro_batches: int = 1) -> dict[str, int]:
        """How many collectives one optimizer step issues for parameters and gradients, by kind.

        Each micro-batch gathers and reduces. A shard axis of size 1 costs nothing, torch copies instead; a replicate
        axis is reduced over whatever its size. Activation checkpointing adds none: the recomputation runs while the
        unit is gathered for backward.

        With expert parallelism, ``all_to_all`` counts how tokens go to their experts and back: three per layer and
        forward (how many, the tokens, the results), run again where the block is recomputed, and two in backward.
        None of the latter where no gradient arrives.
        """
        counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
        for unit in self.units:
            reduces = sum(1 for group in unit.groups if group.reduce_scatter_bytes)
            if self.shard_size(unit) > 1:
                counts["all_gather"] += len(unit.groups) * (1 + unit.gathers_in_backward)
                counts["reduce_scatter"] += reduces
            counts["all_reduce"] += reduces * (len(self.mesh_shape) == 2)
        if self.expert_parallel > 1:
            with_experts = [unit for unit, *experts in self.stages if experts]
            counts["all_to_all"] = sum(
                3 + (2 + 3 * self.recomputes(block)) * self.gradient_arrives_at(block) for block in with_experts
            )
        return {kind: micro_batches * count for kind, count in counts.items()}

    def table(self) -> str:
        """The plan as text, at most 100 columns: one line per kind of unit and group, then the totals per rank."""
        lines = [f"{'unit':<34}{'group: storage / compute / reduce':<38}{'params':>9}{'MiB/rank':>10}{'gathers':>9}"]
        for label, unit in _equal_units_together(self.units):
            for index, group in enumerate(unit.groups):
                dtypes = f"{group.storage} / {'+'.join(group.computes)} / {group.reduce or '-'}"
                params = sum(math.prod(param.shape) for param in group.params)
                lines.append(
                    f"{label if index == 0 else '':<34}{dtypes:<38}{_count(params):>9}"
                    f"{group.shard_bytes / 2**20:>10.2f}{1 + unit.gathers_in_backward:>9}"
                )
        total = sum(group.shard_bytes for unit in self.units for group in unit.groups)
        islands = sum(param.island for unit in self.units for group in unit.groups for param in group.params)
        experts = f", experts dealt to {self.expert_parallel} ranks" if self.expert_parallel > 1 else ""
        counts = ", ".join(f"{n} {kind}" for kind, n in self.collectives_per_step().items() if n) or "none"
        lines += [
            f"mesh {'x'.join(map(str, self.mesh_shape))}{experts}, {len(self.units)} units, {islands} fp32 islands",
            f"parameters per rank: {total / 2**20:.2f} MiB",
            f"collectives per step: {counts}",
            f"hash {self.hash[:16]}",
        ]
        return "\n".join(lines)


def plan_sharding(
    model: nn.Module,
    *,
    mesh_shape: tuple[int, ...],
    mp_policy: MixedPrecisionPolicy | None = None,
    island_units: IslandUnits = "grouped",
    reshard_after_forward: bool | int = True,
    activation_checkpointing: bool | int = False,
    fp32_params: Iterable[str] | IslandPredicate | None = None,
    freeze_indexer: bool = True,
    expert_parallel: int = 1,
    contract: Contract | None = None,
) -> ShardingPlan:
    """Plan the units of a whole model; changes nothing and needs no process group.

    Args:
        model: the unsharded model (meta device allowed).
        mesh_shape: ``(shard,)``, or ``(replicate, shard)`` for HSDP.
        expert_parallel: over how many ranks the experts of a layer are dealt.
        contract: the model's contract if it is made already; then ``fp32_params`` must be empty.
        others: see :func:`dsv4_fsdp.parallelize`.

    Raises:
        ContractError: see :func:`~dsv4_fsdp.contract.contract_of`; or ``contract`` is another model's.
        ShardingError: no blocks found, an impossible mesh shape or ``reshard_after_forward``, unknown
            ``island_units``, or nested units asked for where islands are bare parameters.
    """
    _refuse_wrong_arguments(mesh_shape, island_units, reshard_after_forward, activation_checkpointing)
    if activation_checkpointing in (0, 1):
        activation_checkpointing = bool(activation_checkpointing)
    if contract is None:
        policy = default_mp_policy() if mp_policy is None else mp_policy
        contract = contract_of(model, mp_policy=policy, fp32_params=fp32_params)
    elif callable(fp32_params) or tuple(fp32_params or ()):
        raise ContractError(
            "fp32_params and a contract were both given, and the contract is made already.\n"
            "expected: one of them\ngot: both\n"
            "what to do: pass fp32_params to contract_of, which makes the contract."
        )
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward in (1, mesh_shape[-1]):
        # As torch reads these two: one rank keeps everything, all ranks keep a shard.
        reshard_after_forward = reshard_after_forward != 1
    layout = layout_of(model)
    if expert_parallel != 1:
        _refuse_wrong_expert_parallel(model, layout, mesh_shape[-1], expert_parallel, island_units)
    frozen = indexer_parameters(model) if freeze_indexer else {}
    frozen_ids = {id(param) for param in frozen.values()}
    # Nested units are made by NeMo AutoModel's function and cut as that does. And what a number of ranks share after
    # forward, torch gathers along dim 0 alone.
    even = island_units != "nested" and isinstance(reshard_after_forward, bool)
    planner = _Planner(model, contract, mesh_shape[-1], frozen_ids, even=even)

    units: list[UnitPlan] = []

    def add(name: str, role: str, reshard: bool | int | None, *, unshard_in_backward: bool = True) -> None:
        if island_units == "nested" and role in ("block", "root"):
            units.extend(planner.island_units(name, reshard))
        cast_inputs_to = "float32" if role == "head" and layout.head_needs_fp32_input else None
        groups = planner.groups_inside(name, role=role, expert_parallel=expert_parallel if role == "experts" else 1)
        if groups or role == "root":
            units.append(
                UnitPlan(canonical_name(name), role, reshard, unshard_in_backward, True, cast_inputs_to, groups)
            )

    if island_units == "nested":
        _refuse_bare_islands(model, contract)
    if island_units == "root":
        planner.leave_to_root(islands_left_to_root(model, contract, expert_parallel=expert_parallel))
    if layout.embedding is not None:
        # The gradient of a plain lookup does not read its weight, so backward need not gather it.
        lookup = _is_plain_lookup(model.get_submodule(layout.embedding))
        add(layout.embedding, "embedding", reshard_after_forward, unshard_in_backward=not lookup)
    for block in layout.blocks:
        for experts in layout.experts if expert_parallel > 1 else ():
            if experts.startswith(f"{block}."):
                add(experts, "experts", bool(reshard_after_forward))
        add(block, "block", reshard_after_forward)
    if layout.head is not None:
        # Backward starts here: freeing the head after forward would only gather it again at once.
        add(layout.head, "head", False)
    add("", "root", None)
    return ShardingPlan(
        mesh_shape=tuple(mesh_shape),
        expert_parallel=expert_parallel,
        island_units=island_units,
        activation_checkpointing=activation_checkpointing,
        frozen_fqns=tuple(name for name, param in frozen.items() if param.requires_grad),
        units=_mark_reached(units),
    )


def islands_left_to_root(model: nn.Module, contract: Contract, *, expert_parallel: int) -> list[nn.Parameter]:
    """The islands inside the blocks, each once, in the order of ``parameters()``; not those of dealt experts, which are
    sharded over other ranks."""
    layout = layout_of(model)
    params = {id(param): param for block in layout.blocks for param in model.get_submodule(block).parameters()}
    for experts in layout.experts if expert_parallel > 1 else ():
        for param in model.get_submodule(experts).parameters():
            params.pop(id(param), None)
    return [param for param in params.values() if (rule := contract.rule_of(param)) is not None and rule.island]


def _is_plain_lookup(embedding: nn.Module) -> bool:
    """Whether ``embedding`` is torch's own and nothing more: a norm or an adapter in it reads weights in backward."""
    plain = type(embedding).forward is nn.Embedding.forward and next(embedding.children(), None) is None
    return plain and embedding.max_norm is None


def _refuse_wrong_arguments(
    mesh_shape: tuple[int, ...],
    island_units: str,
    reshard_after_forward: bool | int,
    activation_checkpointing: bool | int,
) -> None:
    if len(mesh_shape) not in (1, 2) or any(size < 1 for size in mesh_shape):
        raise ShardingError(
            "units cannot be sharded over a mesh of this shape.\n"
            "expected: one axis (shard) or two (replicate, shard), each of size 1 or more\n"
            f"got: shape {tuple(mesh_shape)}\n"
            "what to do: pass a sub-mesh of your mesh, such as mesh['replicate', 'shard']."
        )
    if island_units not in get_args(IslandUnits):
        raise ShardingError(
            "island_units, how fp32 islands are isolated, is none of the known ways.\n"
            f"expected: {' or '.join(map(repr, get_args(IslandUnits)))}\ngot: {island_units!r}\n"
            "what to do: leave it out for the default."
        )
    if activation_checkpointing < 0:
        raise ShardingError(
            "activation_checkpointing as a number says that every n-th block is recomputed.\n"
            f"expected: True, False, or 1 or more\ngot: {activation_checkpointing}\nwhat to do: pass one of these."
        )
    if not isinstance(reshard_after_forward, bool):
        if reshard_after_forward < 1 or mesh_shape[-1] % reshard_after_forward:
            raise ShardingError(
                "reshard_after_forward as a number is the count of ranks that share the parameters after forward.\n"
                f"expected: True, False, or a divisor of the shard axis' size {mesh_shape[-1]}\n"
                f"got: {reshard_after_forward}\nwhat to do: use True, or the number of ranks of one machine."
            )


def _refuse_wrong_expert_parallel(
    model: nn.Module, layout: ModelLayout, shard_size: int, expert_parallel: int, island_units: str
) -> None:
    problem = None
    if expert_parallel < 1 or shard_size % expert_parallel:
        problem = f"a divisor of the shard axis' size {shard_size}", str(expert_parallel)
    elif island_units == "nested":
        problem = "island_units='grouped' or 'root'", repr(island_units)
    elif not layout.experts:
        problem = "a model with an `ep_plan` (Transformers' mixture-of-experts models)", type(model).__name__
    else:
        for name in layout.experts:
            for param_name, param in model.get_submodule(name).named_parameters():
                if param.shape[0] % expert_parallel:
                    got = f"{param.shape[0]} in {name}.{param_name}"
                    problem = f"a number of experts that {expert_parallel} divides", got
    if problem is not None:
        raise ShardingError(
            "experts cannot be dealt to ranks like this.\n"
            f"expected: {problem[0]}\ngot: {problem[1]}\nwhere: expert_parallel\n"
            "what to do: choose a number that divides both the ranks that share a model and its routed experts, or 1."
        )


def _mark_reached(units: list[UnitPlan]) -> tuple[UnitPlan, ...]:
    """Clear ``reached_in_backward`` where backward never comes by: before the first unit that trains.

    One block further is still gathered, since each unit prefetches the one that ran before it.
    """
    that_train = _that_train(units)
    # A root without an embedding unit in front may hold a tied embedding, which runs first.
    reached = units[0].role != "embedding" and len(units) - 1 in that_train
    # Which block a unit is or runs before: the embedding counts into the first, head and root come after the last.
    block_of = [0] * len(units)
    for index, unit in enumerate(units[:-1]):
        block_of[index + 1] = block_of[index] + (unit.role == "block")
    trains = [False] * (block_of[-1] + 1)
    for index, block in enumerate(block_of):
        trains[block] = trains[block] or index in that_train
    is_reached = list(accumulate(trains, or_, initial=reached))[1:]
    return tuple(
        replace(
            unit,
            reached_in_backward=unit.reached_in_backward
            and (is_reached[block] or (unit.role == "block" and is_reached[block + 1])),
        )
        for block, unit in zip(block_of, units, strict=True)
    )


def even_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dim along which a tensor of ``shape`` is cut for ``num_ranks`` ranks: the first, if that wastes little.

    FSDP2 pads dim 0 to a multiple of the ranks: 48 experts on 128 ranks are stored, gathered and reduced as 128, and 80
    ranks have no optimizer state. Other dims it takes if they divide evenly, and copies once more when it gathers and
    before it reduces. So where padding would be more than half of the tensor, and the copy is the smaller of the two,
    it is the first dim that divides evenly, if there is one.
    """
    if padded_numel(shape, 0, num_ranks) * num_ranks <= math.prod(shape) * (1 + _PADDING_TAKEN):
        return 0
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), 0)


def padded_numel(shape: Sequence[int], dim: int, num_ranks: int) -> int:
    """Elements of one rank's shard, with padding."""
    return math.prod(shape[:dim]) * math.ceil(shape[dim] / num_ranks) * math.prod(shape[dim + 1 :])


def _that_train(units: Sequence[UnitPlan]) -> set[int]:
    """The indices of units whose modules read trainable parameters.

    Islands of a block that the root holds count for the block: there backward must come to have their gradient.
    """
    found = {index for index, unit in enumerate(units[:-1]) if unit.trainable_fqns}
    blocks = {unit.fqn: index for index, unit in enumerate(units) if unit.role == "block"}
    for fqn in units[-1].trainable_fqns:
        parts = fqn.split(".")
        around = (blocks.get(".".join(parts[:end])) for end in range(1, len(parts)))
        found.add(next((index for index in around if index is not None), len(units) - 1))
    return found


class _Planner:
    """Hands each parameter of the model to the first unit that asks for it, as ``fully_shard`` does bottom-up."""

    def __init__(
        self, model: nn.Module, contract: Contract, shard_size: int, frozen_ids: set[int], *, even: bool
    ) -> None:
        self._model = model
        self._contract = contract
        self._shard_size = shard_size
        self._frozen_ids = frozen_ids
        self._even = even
        self._names: dict[int, list[str]] = {}
        for name, param in named_parameters_all(model):
            self._names.setdefault(id(param), []).append(name)
        self._unit_modules: set[nn.Module] = set()
        self._unit_of: dict[int, str] = {}
        self._left_to_root: dict[int, nn.Parameter] = {}

    def leave_to_root(self, params: Iterable[nn.Parameter]) -> None:
        """Give ``params``, of blocks, to the root, behind its own parameters."""
        self._left_to_root = {id(param): param for param in params}
        self._unit_of |= dict.fromkeys(self._left_to_root, "")

    def groups_inside(self, module_name: str, *, role: str, expert_parallel: int = 1) -> tuple[GroupPlan, ...]:
        unit_module = self._model.get_submodule(module_name)
        params: dict[int, nn.Parameter] = {}
        # `fully_shard` walks children before their parent, and each module's own parameters in order.
        for module in _post_order(unit_module, stop_at=self._unit_modules):
            params |= {id(param): param for param in module.parameters(recurse=False)}
        if role == "block":
            params = {key: param for key, param in params.items() if key not in self._left_to_root}
        self._unit_modules.add(unit_module)
        self._refuse_shared(key for key in params if role != "root" or key not in self._left_to_root)
        if role == "root":
            params |= self._left_to_root
        self._unit_of |= dict.fromkeys(params, canonical_name(module_name))
        return self._grouped(list(params.values()), expert_parallel)

    def _refuse_shared(self, params: Iterable[int]) -> None:
        shared = [
            f"{', '.join(self._names[p])}: {self._unit_of[p] or 'the root'}" for p in params if p in self._unit_of
        ]
        if shared:
            raise ShardingError(
                "a parameter would be in two units.\nexpected: all names of a tied parameter in one unit\n"
                f"got, with the unit that takes it first:\n{listing(shared)}\n"
                "what to do: untie them, or shard by hand, with both owners as one unit: fully_shard([a, b])."
            )

    def _grouped(self, params: list[nn.Parameter], expert_parallel: int) -> tuple[GroupPlan, ...]:
        rules = [self._contract.rule_of(param) for param in params]
        if None in rules:
            unknown = [self._names[id(param)][0] for param, rule in zip(params, rules, strict=True) if rule is None]
            raise ContractError(
                "the contract does not cover this model.\n"
                "expected: a rule for each parameter\n"
                f"got: none for\n{listing(unknown)}\n"
                "what to do: make it with contract_of(model), after every change to the model's parameters."
            )
        return tuple(
            self._group(
                group.storage, group.reduce, [(params[index], rules[index]) for index in group.indices], expert_parallel
            )
            for group in group_rules(rule for rule in rules if rule is not None)
        )

    def island_units(self, module_name: str, reshard: bool | int | None) -> list[UnitPlan]:
        units = []
        root = self._model.get_submodule(module_name)
        for island in nemo_layout.iter_island_modules(root):
            full_name = f"{module_name}.{island.fqn}" if module_name else island.fqn
            in_earlier_unit = all(id(param) in self._unit_of for param in island.module.parameters())
            if (
                island.module is not root
                and not in_earlier_unit
                and (groups := self.groups_inside(full_name, role="island"))
            ):
                # A holder hands out the parameter itself, so it must stay gathered after its forward.
                holder = nemo_layout.has_class_name(
                    nemo_layout.unwrap(island.module), nemo_layout.RETURNED_FP32_PARAMETER_CLASS_NAMES
                )
                # The root itself stays gathered by torch's default, but units inside it do not.
                reshard_island = not holder and (True if reshard is None else reshard)
                # Frozen by the plan is the Lightning Indexer, whose top-k passes no gradient on.
                reached = not all(id(param) in self._frozen_ids for param in island.module.parameters())
                units.append(UnitPlan(full_name, "island", reshard_island, True, reached, "float32", groups))
        return units

    def _group(
        self,
        storage: torch.dtype,
        reduce: torch.dtype | None,
        members: list[tuple[Any, Any]],
        expert_parallel: int,
    ) -> GroupPlan:
        params, shard_bytes, gathered, reduced = [], 0, 0, 0
        shard_size = self._shard_size // expert_parallel
        for param, rule in members:
            if not param.shape:
                raise ShardingError(
                    "a parameter without a dim cannot be sharded.\nexpected: shape (1,) or larger\n"
                    f"got: shape () for {rule.fqn}\nwhat to do: register it with shape (1,), or as a buffer."
                )
            trainable = param.requires_grad and id(param) not in self._frozen_ids
            held = (param.shape[0] // expert_parallel, *param.shape[1:])
            shard_dim = even_dim(held, shard_size) if self._even else 0
            padded_shard_numel = padded_numel(held, shard_dim, shard_size)
            shard_bytes += padded_shard_numel * storage.itemsize
            gathered += padded_shard_numel * shard_size * rule.compute.itemsize
            if trainable and reduce is not None:
                reduced += padded_shard_numel * shard_size * reduce.itemsize
            params.append(
                ParamPlan(
                    rule.fqn,
                    tuple(param.shape),
                    short_dtype(rule.compute),
                    rule.island,
                    trainable,
                    rule.reason,
                    shard_dim,
                )
            )
        reduce_name = None if reduce is None else short_dtype(reduce)
        return GroupPlan(short_dtype(storage), reduce_name, tuple(params), shard_bytes, gathered, reduced)


def _post_order(module: nn.Module, *, stop_at: set[nn.Module]) -> list[nn.Module]:
    """The modules of ``module``, children first, without those in ``stop_at`` and what is inside them."""
    seen: set[nn.Module] = set()
    order: list[nn.Module] = []

    def visit(current: nn.Module) -> None:
        seen.add(current)
        for child in current.children():
            if child not in seen and child not in stop_at:
                visit(child)
        order.append(current)

    visit(module)
    return order


def _refuse_bare_islands(model: nn.Module, contract: Contract) -> None:
    inside = {
        id(param)
        for name, _ in nemo_layout.named_island_modules(model)
        for param in model.get_submodule(name).parameters()
    }
    bare = [
        rule.fqn
        for param in model.parameters()
        if (rule := contract.rule_of(param)) is not None and rule.island and id(param) not in inside
    ]
    if bare:
        raise ShardingError(
            "nested units were asked for, but an island is no module of the NeMo AutoModel layout.\n"
            "expected: each island inside a module that consists of islands only\n"
            f"got: {len(bare)} such parameters, the first of them {', '.join(bare[:4])}\n"
            'what to do: use island_units="grouped", which isolates bare parameters too.'
        )


def _equal_units_together(units: tuple[UnitPlan, ...]) -> list[tuple[str, UnitPlan]]:
    """Units that differ in their names only, as one entry with a count, in order of first appearance."""
    alike: dict[Any, list[UnitPlan]] = {}
    for unit in units:
        groups = tuple((g.storage, g.computes, g.reduce, g.numel) for g in unit.groups)
        alike.setdefault((unit.role, unit.reshard_after_forward, groups), []).append(unit)
    return [
        ((members[0].fqn or "(root)") + (f" (x{len(members)})" if len(members) > 1 else ""), members[0])
        for members in alike.values()
    ]


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)
