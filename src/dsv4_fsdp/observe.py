"""Watch one training step: in which dtypes parameters were gathered, computed and reduced, seen and not inferred.

Three kinds of witnesses, all of which leave the step's results alone:

- forward pre-hooks on every module that owns parameters, run last, so they see what that module's forward will see: the
  unsharded parameters of an FSDP unit, in their compute dtype;
- forward pre-hooks on every unit, one that runs before FSDP2's own and one after, so that an input which FSDP2 casts at
  the unit's border is seen on both sides;
- a dispatch mode, which sees each collective (``c10d``) with its dtype, and FSDP2's copy of gradients into the buffer
  that it reduces (``fsdp::chunk_cat``), which is there on one rank too, where nothing goes over a wire.

Not seen: a forward that casts a copy of a parameter, or a value made from one (NeMo AutoModel's attention does so with
its sinks). A cast of the parameter itself or of a view of it, such as autocast's, is.

Which parameter group a collective is for is known because FSDP2 issues it inside that group's ``unshard`` or
``post_backward``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .names import canonical_name, joined_name
from .torch_private import TorchDispatchMode, owners_of, parameter_groups, pytree

__all__ = ["Observations", "observe_step"]

_NARROW = frozenset({torch.bfloat16, torch.float16})

# Where an fp32 parameter that a forward saw has its memory -> its name, its owner, its name there.
_Storages = dict[int, tuple[str, nn.Module, str]]


@dataclass
class Observations:
    """What was seen in one step, by canonical name; filled while the step runs.

    Attributes:
        compute: parameter -> dtypes that its owner's forward saw (recomputation included).
        computed_as: fp32 parameter -> narrower dtypes that it was cast to inside a forward (autocast).
        gathered: parameter -> dtypes of its group's all-gathers.
        reduced: parameter -> dtypes of its group's gradient reductions.
        truncated: (unit, input) -> the dtype that the unit's border made of an fp32 input.
        collectives: (kind, dtype) -> count.
    """

    compute: dict[str, set[torch.dtype]] = field(default_factory=dict)
    computed_as: dict[str, set[torch.dtype]] = field(default_factory=dict)
    gathered: dict[str, set[torch.dtype]] = field(default_factory=dict)
    reduced: dict[str, set[torch.dtype]] = field(default_factory=dict)
    truncated: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    collectives: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)


def observe_step(model: nn.Module, step: Callable[[], object]) -> Observations:
    """Run ``step()`` once under observation. It should do one forward and one backward of ``model``."""
    seen = Observations()
    current: list[tuple[str, list[str]]] = []  # innermost last: ("gather" or "reduce", the group's parameters)
    storages: _Storages = {}
    with _hooks(model, seen, storages), _group_hooks(model, current), _Witness(seen, current, storages):
        # Under a dispatch mode torch.compile runs eagerly anyway, but marks the code as not to be compiled ever again
        # in this process; told so beforehand, it does not (`test_compile.py`).
        with torch.compiler.set_stance("force_eager"):
            step()
    return seen


# --- What forwards see ------------------------------------------------------------------------------------------------


@contextmanager
def _hooks(model: nn.Module, seen: Observations, storages: _Storages) -> Iterator[None]:
    handles = []
    units = {name for name, _ in parameter_groups(model)}
    before: dict[str, list[Any]] = {}
    for raw_name, module in model.named_modules():
        name = canonical_name(raw_name)
        if raw_name in units:
            handles.append(
                module.register_forward_pre_hook(_remember_inputs(name, before), prepend=True, with_kwargs=True)
            )
            handles.append(module.register_forward_pre_hook(_compare_inputs(name, before, seen), with_kwargs=True))
        if any(param is not None for param in module._parameters.values()):
            handles.append(module.register_forward_pre_hook(_look_at_parameters(name, seen, storages)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _look_at_parameters(name: str, seen: Observations, storages: _Storages) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        for param_name, param in module._parameters.items():
            if param is not None:
                fqn = joined_name(name, param_name)
                seen.compute.setdefault(fqn, set()).add(param.dtype)
                if param.dtype == torch.float32 and (address := _address(param)) is not None:
                    storages[address] = (fqn, module, param_name)

    return hook


def _remember_inputs(name: str, before: dict[str, list[Any]]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        before[name] = [
            leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves((args, kwargs))
        ]

    return hook


def _compare_inputs(name: str, before: dict[str, list[Any]], seen: Observations) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
        for (path, leaf), dtype in zip(leaves, before.pop(name, []), strict=False):
            if isinstance(leaf, torch.Tensor) and dtype == torch.float32 and leaf.dtype in _NARROW:
                seen.truncated[name, _argument(path)] = leaf.dtype

    return hook


def _argument(path: Any) -> str:
    """A place in ``(args, kwargs)`` as one would write it: ``position_embeddings['main'][0]``."""
    first, second, *rest = path
    is_keyword = getattr(first, "idx", 0) == 1
    name = str(second.key) if is_keyword else f"args[{second.idx}]"
    return name + "".join(pytree.keystr((key,)) for key in rest)


# --- What goes over the wire ------------------------------------------------------------------------------------------


@contextmanager
def _group_hooks(model: nn.Module, current: list[tuple[str, list[str]]]) -> Iterator[None]:
    module_names = {id(module): name for name, module in model.named_modules()}
    hooked = []
    for _, group in parameter_groups(model):
        names = [
            joined_name(module_names[id(module)], param_name)
            for fsdp_param in group.fsdp_params
            for module, param_name in owners_of(fsdp_param)
        ]
        for method, what in (("unshard", "gather"), ("post_backward", "reduce")):
            # An instance attribute hides the class's method, and deleting it brings the method back. If another tool
            # has put one there (probe_gradients), it is kept and called.
            was = vars(group).get(method)
            setattr(group, method, _within(getattr(group, method), (what, names), current))
            hooked.append((group, method, was))
    try:
        yield
    finally:
        for group, method, was in hooked:
            if was is None:
                delattr(group, method)
            else:
                setattr(group, method, was)


def _within(
    method: Callable[..., Any], entry: tuple[str, list[str]], current: list[tuple[str, list[str]]]
) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        current.append(entry)
        try:
            return method(*args, **kwargs)
        finally:
            current.pop()

    return wrapped


_KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


class _Witness(TorchDispatchMode):
    """Sees every operator of the thread, and of the threads that autograd runs a backward in."""

    def __init__(self, seen: Observations, current: list[tuple[str, list[str]]], storages: _Storages) -> None:
        super().__init__()
        self._seen = seen
        self._current = current
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs it on local tensors, and those come by here
        kwargs = kwargs or {}
        namespace = func.namespace
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._note_collective(func, args)
        elif namespace == "fsdp" and "chunk_cat" in func._schema.name:
            self._note_reduction(kwargs.get("out", args[-1]))
        elif func is torch.ops.aten._to_copy.default:
            self._note_cast(args[0], kwargs.get("dtype"))
        return func(*args, **kwargs)

    def _note_collective(self, func: Any, args: Any) -> None:
        names = [argument.name for argument in func._schema.arguments]
        if not {"process_group", "group_name"} & set(names):
            return
        name = func._schema.name.split("::")[1].replace("_", "")
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        first = next((i for i, n in enumerate(names) if n.startswith(("input", "tensor"))), None)
        if kind is None or first is None:
            return
        leaves = [leaf for leaf in pytree.tree_leaves(args[first]) if isinstance(leaf, torch.Tensor)]
        if not leaves:
            return
        dtype = leaves[0].dtype
        self._seen.collectives[kind, dtype] += 1
        if self._current and dtype.is_floating_point:  # a group of several dtypes travels as bytes
            what, params = self._current[-1]
            target = self._seen.gathered if what == "gather" else self._seen.reduced
            if (what == "gather") == (kind == "all_gather"):
                for fqn in params:
                    target.setdefault(fqn, set()).add(dtype)

    def _note_reduction(self, out: Any) -> None:
        if self._current and isinstance(out, torch.Tensor):
            for fqn in self._current[-1][1]:
                self._seen.reduced.setdefault(fqn, set()).add(out.dtype)

    def _note_cast(self, source: torch.Tensor, dtype: torch.dtype | None) -> None:
        if dtype not in _NARROW or source.dtype != torch.float32 or (address := _address(source)) is None:
            return
        fqn, module, param_name = self._storages.get(address, ("", None, ""))
        param = None if module is None else module._parameters.get(param_name)
        # Freed since, and its memory taken by another tensor: then the parameter is elsewhere, or sharded.
        if param is not None and _address(param) == address:
            self._seen.computed_as.setdefault(fqn, set()).add(dtype)


def _address(tensor: torch.Tensor) -> int | None:
    """Where the memory of ``tensor`` begins; ``None`` if it is none of its own: fake, meta, sharded, freed."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage().data_ptr() or None
