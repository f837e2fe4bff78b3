"""The contract: which tensors of a model must be stored, computed and reduced in fp32, and why.

An *fp32 island* is a parameter whose compute and reduce dtype must be fp32. Three sources say so, in union:

1. **The model's class.** Transformers models list name patterns in ``_keep_in_fp32_modules_strict``;
   ``from_pretrained`` keeps every tensor whose name one of them matches in fp32 whatever dtype was asked for. The
   match is the one of transformers' loader (``core_model_loading``: a regular-expression *search*, ``*`` for any
   text), because the contract is a promise about what that loader did. NeMo AutoModel's models carry the same
   attribute.
2. **The NeMo AutoModel layout** of DeepSeek-V4 (:mod:`dsv4_fsdp.nemo_layout`): module name suffixes.
3. **The caller**, by names or a predicate.

fp32 *storage* alone makes no island: fp32 master weights and LoRA adapters are stored in fp32 and computed in bf16.
An island whose storage is already below fp32 has lost its bits, and that is an error, not a warning: see
:class:`~dsv4_fsdp.errors.ContractError`.

A contract is pure: building one touches no process group and, unless ``restore_fp32`` is asked for, no tensor.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.weak import WeakIdKeyDictionary

from . import nemo_layout
from .errors import ContractError, listing
from .names import canonical_name, is_adapter_name, matches_components, named_parameters_all
from .torch_private import reduce_dtype

__all__ = ["Contract", "FP32Params", "IslandPredicate", "TensorRule", "contract_of", "default_mp_policy"]

IslandPredicate = Callable[[str, torch.Tensor], bool]
"""``predicate(fqn, tensor)``: whether the parameter or buffer of that canonical name must be fp32."""

FP32Params = "Contract | Iterable[str] | IslandPredicate | None"

_KEEP_LIST = "_keep_in_fp32_modules_strict"
_FLOAT32_OR_WIDER = frozenset({torch.float32, torch.float64})


def default_mp_policy() -> MixedPrecisionPolicy:
    """bf16 compute, fp32 gradient reduction: what DeepSeek-V4 is trained with."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class TensorRule:
    """What the contract says of one parameter or floating buffer.

    Attributes:
        fqn: canonical name from the root of the model the contract was made of.
        kind: ``"parameter"`` or ``"buffer"``.
        storage: dtype of the (sharded) tensor that the optimizer sees.
        compute: dtype inside forward and backward, and on the all-gather wire. A buffer computes as it is stored.
        reduce: dtype of the gradient reduction; ``None`` for buffers and for parameters that are not floating point.
        island: whether the tensor must be fp32.
        reason: who said so, in words.
    """

    fqn: str
    kind: str
    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype | None
    island: bool
    reason: str

    @property
    def group_key(self) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
        """(storage, compute, reduce): parameters of a unit with equal keys share one all-gather and one reduction."""
        return (self.storage, self.compute, self.reduce)


@dataclass(frozen=True)
class Contract:
    """The rules for every parameter and floating buffer of one model, in ``named_parameters`` order.

    A tied parameter has one rule, under its first name. The contract holds no parameter alive.
    """

    rules: tuple[TensorRule, ...]
    _rule_by_tensor: WeakIdKeyDictionary = field(repr=False, compare=False)

    @property
    def islands(self) -> tuple[TensorRule, ...]:
        """The rules of all islands, buffers among them."""
        return tuple(rule for rule in self.rules if rule.island)

    def rule_of(self, tensor: torch.Tensor) -> TensorRule | None:
        """The rule of a live parameter or buffer object, or ``None`` if the contract was not made of it."""
        rule: TensorRule | None = self._rule_by_tensor.get(tensor)
        return rule

    def __iter__(self) -> Iterator[TensorRule]:
        return iter(self.rules)


def contract_of(
    model: nn.Module,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    fp32_params: Iterable[str] | IslandPredicate | None = None,
    restore_fp32: bool = False,
) -> Contract:
    """Decide storage, compute and reduce dtype of every parameter and floating buffer of ``model``.

    Args:
        model: the unsharded model; its tensors may be on the meta device.
        mp_policy: what tensors that are no islands compute and reduce in; default bf16 and fp32. ``param_dtype=None``
            means as stored, ``reduce_dtype=None`` means as computed, as in FSDP2.
        fp32_params: more islands: names, matched at dot boundaries (``"sinks"``, ``"layers.*.attn_hc"``), or a
            predicate ``(fqn, tensor) -> bool``. ``None`` and an empty collection add none.
        restore_fp32: upcast islands that are stored below fp32, in place, with a warning. The bits that the earlier
            downcast removed do not come back.

    Raises:
        ContractError: an island is stored below fp32; a name in ``fp32_params`` matches nothing; two names of a tied
            parameter want different dtypes.
    """
    tensors = list(named_tensors(model))
    if fp32_params is None:
        fp32_params = ()
    if not callable(fp32_params):
        fp32_params = _as_names(fp32_params)  # read once: it may be a generator
        check_names_match(fp32_params, [name for _, name, _ in tensors], every=True)
    return build_contract(
        tensors,
        mp_policy=default_mp_policy() if mp_policy is None else mp_policy,
        island_reason=island_reason(model, fp32_params),
        restore_fp32=restore_fp32,
    )


NamedTensor = tuple[str, str, torch.Tensor]
"""(``"parameter"`` or ``"buffer"``, canonical name, tensor)."""

IslandReason = Callable[[str, torch.Tensor], str | None]
"""``reason(fqn, tensor)``: why the tensor is an island, in words, or ``None`` if it is none."""


def build_contract(
    tensors: Iterable[NamedTensor],
    *,
    mp_policy: MixedPrecisionPolicy,
    island_reason: IslandReason,
    restore_fp32: bool,
    where: str = "the model",
) -> Contract:
    """The contract over ``tensors``, in which a tied tensor may come several times under several names.

    ``where`` says in errors what the names are relative to.

    Raises:
        ContractError: see :func:`contract_of`.
    """
    named: dict[int, list[NamedTensor]] = {}
    for entry in tensors:
        named.setdefault(id(entry[2]), []).append(entry)

    below_fp32: list[NamedTensor] = []
    verdicts: list[tuple[NamedTensor, str | None]] = []
    for entries in named.values():
        kind, name, tensor = entries[0]
        reasons = {n: island_reason(n, tensor) if tensor.is_floating_point() else None for _, n, _ in entries}
        verdict = _one_verdict(reasons)
        verdicts.append((entries[0], verdict))
        if verdict is not None and tensor.dtype not in _FLOAT32_OR_WIDER:
            below_fp32.append((f"{kind}, {short_dtype(tensor.dtype)}; {verdict}", name, tensor))
    if below_fp32:
        _refuse_or_restore(below_fp32, restore_fp32, where)

    rule_by_tensor: WeakIdKeyDictionary = WeakIdKeyDictionary()
    for (kind, name, tensor), verdict in verdicts:
        rule_by_tensor[tensor] = _rule(kind, name, tensor, verdict, mp_policy)
    return Contract(tuple(rule_by_tensor[tensor] for (_, _, tensor), _ in verdicts), rule_by_tensor)


def _one_verdict(reasons: dict[str, str | None]) -> str | None:
    """The one reason for all names of a tensor; names that disagree are an error."""
    inside = {name: reason for name, reason in reasons.items() if reason is not None}
    outside = [name for name, reason in reasons.items() if reason is None]
    if inside and outside:
        name, reason = next(iter(inside.items()))
        raise ContractError(
            "two names of one tied parameter want two dtypes.\n"
            f"expected: all of {', '.join(reasons)} in fp32, or none\n"
            f"got: {name} must be fp32 ({reason}), {', '.join(outside)} need not\n"
            f"what to do: untie them, or add {outside[0]!r} to fp32_params."
        )
    return next(iter(inside.values()), None)


def _rule(
    kind: str, name: str, tensor: torch.Tensor, verdict: str | None, mp_policy: MixedPrecisionPolicy
) -> TensorRule:
    storage = tensor.dtype
    if verdict is not None:
        return TensorRule(name, kind, storage, storage, storage if kind == "parameter" else None, True, verdict)
    if kind == "buffer":
        return TensorRule(name, kind, storage, storage, None, False, "buffer, kept as built")
    if not storage.is_floating_point:
        return TensorRule(name, kind, storage, storage, None, False, "not floating point, never cast")
    compute, reduce = policy_dtypes(tensor, mp_policy)
    if storage == compute:
        reason = "mixed-precision policy"
    elif is_adapter_name(name):
        reason = f"{short_dtype(storage)} adapter"
    else:
        reason = f"{short_dtype(storage)} master weight"
    return TensorRule(name, kind, storage, compute, reduce, False, reason)


def policy_dtypes(tensor: torch.Tensor, mp_policy: MixedPrecisionPolicy) -> tuple[torch.dtype, torch.dtype]:
    """(compute, reduce) of a floating parameter that is no island."""
    storage = tensor.dtype
    # torch >= 2.15 lets the caller's policy speak per parameter.
    override = getattr(mp_policy, "param_dtype_override_fn", None)
    compute = (override(tensor) if override is not None else None) or mp_policy.param_dtype or storage
    return compute, reduce_dtype(mp_policy, storage, compute)


def _refuse_or_restore(below_fp32: list[NamedTensor], restore_fp32: bool, where: str) -> None:
    names = listing([f"{name} ({what})" for what, name, _ in below_fp32])
    count = len(below_fp32)
    if not restore_fp32:
        raise ContractError(
            f"{count} {'tensor that must be fp32 is' if count == 1 else 'tensors that must be fp32 are'} stored in a "
            f"narrower dtype: the bits are already lost.\nexpected: float32 storage\ngot:\n{names}\nwhere: {where}\n"
            "what to do: load the checkpoint again without casting these (`from_pretrained(dtype=torch.bfloat16)` of "
            "transformers keeps them; `model.to(torch.bfloat16)` does not). If no better copy exists, pass "
            "restore_fp32=True: they are stored in fp32 from then on, but the lost bits do not come back."
        )
    warnings.warn(
        f"restore_fp32: {count} {'tensor was' if count == 1 else 'tensors were'} stored below fp32 and upcast now. "
        f"Training is in fp32 from here on, but the bits that the earlier downcast removed do not come back:\n{names}",
        stacklevel=4,
    )
    for _, _, tensor in below_fp32:
        tensor.data = tensor.data.float()


def named_tensors(model: nn.Module) -> Iterator[NamedTensor]:
    """Every parameter and floating buffer of ``model`` under every canonical name it has."""
    for name, param in named_parameters_all(model):
        yield "parameter", name, param
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point():
            yield "buffer", canonical_name(name), buffer


# --- Who says that a tensor is an island ------------------------------------------------------------------------------


def island_reason(model: nn.Module, fp32_params: Iterable[str] | IslandPredicate) -> IslandReason:
    """The three sources as one function; the first that speaks gives the reason."""
    sources = [_class_list_reason(model), _nemo_layout_reason(model), _caller_reason(fp32_params)]

    def reason(fqn: str, tensor: torch.Tensor) -> str | None:
        return next((said for source in sources if (said := source(fqn, tensor)) is not None), None)

    return reason


def model_speaks(module: nn.Module) -> bool:
    """Whether ``module`` itself says which of its tensors are islands (sources 1 and 2)."""
    return bool(class_lists(module)) or nemo_layout.has_nemo_layout(module)


def _caller_reason(fp32_params: Iterable[str] | IslandPredicate) -> IslandReason:
    if callable(fp32_params):
        predicate = fp32_params
        return lambda fqn, tensor: "fp32_params predicate" if predicate(fqn, tensor) else None
    names = _as_names(fp32_params)

    def reason(fqn: str, tensor: torch.Tensor) -> str | None:
        hit = next((name for name in names if matches_components(fqn, name)), None)
        return None if hit is None else f"fp32_params {hit!r}"

    return reason


def _as_names(fp32_params: Iterable[str]) -> tuple[str, ...]:
    if isinstance(fp32_params, str):
        raise ContractError(
            "fp32_params is one string.\n"
            "expected: a collection of names, or a predicate (fqn, tensor) -> bool\n"
            f"got: {fp32_params!r}\nwhat to do: write fp32_params=[{fp32_params!r}]."
        )
    names = tuple(fp32_params)
    found: tuple[object, ...] = names
    if (wrong := next((name for name in found if not isinstance(name, str)), None)) is not None:
        raise ContractError(
            "fp32_params holds what is not a name.\n"
            "expected: a collection of names, or a predicate (fqn, tensor) -> bool\n"
            f"got: {type(fp32_params).__name__} with a {type(wrong).__name__} in it\n"
            "what to do: pass names here; only fully_shard, which makes one unit, takes a Contract."
        )
    return names


def unmatched_names(names: Iterable[str], fqns: list[str]) -> list[str]:
    """Those of ``names`` that match none of ``fqns``."""
    return [name for name in names if not any(matches_components(fqn, name) for fqn in fqns)]


def check_names_match(fp32_params: Iterable[str], fqns: list[str], *, every: bool) -> None:
    """Raise :class:`ContractError` if a name matches none of ``fqns``: any name if ``every``, else all of them."""
    names = _as_names(fp32_params)
    silent = unmatched_names(names, fqns)
    if silent and (every or len(silent) == len(names)):
        raise ContractError(
            "fp32_params names what does not exist here.\n"
            "expected: a run of whole components of a name, such as 'self_attn.sinks' or 'layers.*.attn_hc'\n"
            f"got, matching nothing:\n{listing(silent)}\n"
            f"where: a module with {len(fqns)} tensors, the first of them:\n{listing(fqns, limit=4)}\n"
            "what to do: correct the name, or leave it out."
        )


def _class_list_reason(model: nn.Module) -> IslandReason:
    # By tensor and not by prefix: what a wrapper around the model is called must not matter. A tied tensor has several
    # names below its owner, and each is judged by itself. A tensor that is not the model's (a checkpoint's, or a shard)
    # goes by the name that it comes with.
    known = {id(tensor) for _, _, tensor in named_tensors(model)}
    lists = []
    for owner, patterns in class_lists(model):
        below: dict[int, list[str]] = {}
        for _, name, tensor in named_tensors(owner):
            below.setdefault(id(tensor), []).append(name)
        lists.append((below, [(pattern, re.compile(pattern.replace("*", ".*"))) for pattern in patterns]))

    def reason(fqn: str, tensor: torch.Tensor) -> str | None:
        # An adapter is new: no checkpoint kept it in fp32, so its name inside a listed module binds nobody.
        if is_adapter_name(fqn):
            return None
        for below, patterns in lists:
            names = below.get(id(tensor), []) if id(tensor) in known else [fqn]
            for name in [name for name in names if fqn == name or fqn.endswith(f".{name}")] or names:
                for pattern, compiled in patterns:
                    if compiled.search(name):
                        return f"class list {pattern!r}"
        return None

    return reason


def class_lists(module: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The fp32 keep-lists that apply inside ``module``: ``(owner, patterns)``, the patterns for names below the owner.

    ``module`` may be a whole model, a wrapper around one, or a single block: the list of a block that has none itself
    is taken from the ``PreTrainedModel`` subclass that the block's source file defines (each Transformers modeling
    file has one, and it is already imported if the block exists).
    """
    found: list[tuple[nn.Module, tuple[str, ...]]] = []
    inside_an_owner: set[nn.Module] = set()
    holds_model = False
    for submodule in module.modules():
        # Own attributes only: peft's model and a checkpoint wrapper hand on those of the model inside.
        holds_model = holds_model or hasattr(type(submodule), _KEEP_LIST)
        patterns = vars(submodule).get(_KEEP_LIST, getattr(type(submodule), _KEEP_LIST, None))
        # A Transformers model's own list already contains its submodels' lists (`post_init` merges them).
        if patterns and submodule not in inside_an_owner:
            found.append((submodule, tuple(sorted(patterns))))
            inside_an_owner.update(submodule.modules())
    # A model that lists nothing has answered; another model's list in its file is not its own.
    return found or ([] if holds_model else _list_of_defining_file(module))


def _list_of_defining_file(module: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    for submodule in module.modules():
        for cls in _own_classes(submodule):
            owners = _listing_classes_beside(cls)
            # A file with several models (text and vision) says in `_no_split_modules` whose block this is.
            owners = [owner for owner in owners if cls.__name__ in _block_names(owner)] or owners
            if owners:
                patterns = {p for owner in owners for p in owner.__dict__[_KEEP_LIST]}
                return [(module, tuple(sorted(patterns)))]
    return []


def _own_classes(module: nn.Module) -> list[type]:
    """The classes of ``module`` but torch's own; ``fully_shard`` puts some of these first."""
    return [cls for cls in type(module).__mro__ if not cls.__module__.startswith(("torch.", "builtins"))]


def _listing_classes_beside(cls: type) -> list[type]:
    """The classes in the source file of ``cls`` that list fp32 modules."""
    return [
        candidate
        for candidate in vars(sys.modules.get(cls.__module__, object)).values()
        if isinstance(candidate, type) and candidate.__module__ == cls.__module__ and candidate.__dict__.get(_KEEP_LIST)
    ]


def _block_names(model_class: type) -> frozenset[str]:
    return frozenset(getattr(model_class, "_no_split_modules", None) or ())


def is_part_of_a_block(module: nn.Module) -> bool:
    """Whether ``module`` is a piece of a model whose fp32 list speaks of longer names than the piece knows.

    Inside ``attn_hc`` the parameter ``attn_hc.fn`` is just ``fn``, which no entry of the list matches. A block, and
    what holds one, is no piece, since lists speak of names below the block.
    """
    for submodule in module.modules():
        for cls in _own_classes(submodule):
            if hasattr(cls, _KEEP_LIST) or cls.__name__ in nemo_layout.CLASS_NAMES:
                return False
            if any(cls.__name__ in _block_names(owner) for owner in _listing_classes_beside(cls)):
                return False
    classes = _own_classes(module)
    return any(_listing_classes_beside(cls) or cls.__name__.startswith("DeepseekV4") for cls in classes)


def _nemo_layout_reason(model: nn.Module) -> IslandReason:
    if not nemo_layout.has_nemo_layout(model):
        return lambda fqn, tensor: None
    island_prefixes = {
        canonical_name(name): label for name, label in nemo_layout.named_island_modules(model, require_fp32=False)
    }

    def reason(fqn: str, tensor: torch.Tensor) -> str | None:
        if is_adapter_name(fqn):
            return None
        parts = fqn.split(".")
        for end in range(len(parts), -1, -1):
            if (label := island_prefixes.get(".".join(parts[:end]))) is not None:
                return f"NeMo layout {label!r}"
        return None

    return reason


def short_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def widen_meta_islands(model: nn.Module, more: Iterable[str] = ()) -> None:
    """Give islands on the meta device the dtype that loading, or initialising, will give them.

    A class may build a parameter in the default dtype although its list says fp32. Meta tensors hold no bits, so
    nothing is lost or gained here, but a unit's groups are made by dtype when the model is sharded.

    Args:
        more: further islands by name, as in :func:`contract_of`.
    """
    reason = island_reason(model, more)
    for _, name, tensor in named_tensors(model):
        if tensor.is_meta and tensor.is_floating_point() and tensor.itemsize < 4 and reason(name, tensor) is not None:
            tensor.data = tensor.data.float()
