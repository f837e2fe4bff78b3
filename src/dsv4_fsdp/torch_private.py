"""Every private torch name that this package uses, in one place.

Checked on torch 2.12.1, 2.13.0, 2.14.1 and 2.15.0; ``tests/test_torch_private.py`` imports each name and compares the
signatures that the engine relies on, so a torch that moved one fails there and not in somebody's training run.

What the engine stands on: since torch 2.12 an FSDP2 state holds a *list* of parameter groups
(``FSDPState._fsdp_param_groups``), and ``fully_shard`` fills it through the module-level function
``_init_param_group``, which appends. Upstream uses this for per-parameter meshes; we use it for one group per dtype.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import UnsupportedTorch

__all__ = [
    "CHECKED_TORCH_VERSIONS",
    "FakeTensorMode",
    "TorchDispatchMode",
    "compile_backend",
    "fake_store",
    "first_index_of_shard",
    "fsdp_state",
    "graph_breaks",
    "grouping_hook",
    "has_native_override",
    "local_chunk",
    "managed_parameters",
    "move_to_device",
    "owners_of",
    "parameter_groups",
    "pytree",
    "reduce_dtype",
    "require_grouped_units",
    "settle_dtypes_of_frozen",
    "sharded_before",
    "unreduced_gradient",
]

CHECKED_TORCH_VERSIONS = ("2.12.1", "2.13.0", "2.14.1", "2.15.0")

# The parameters of `_init_param_group` that the engine passes on, in order, on every checked version.
_INIT_PARAM_GROUP_PARAMETERS = (
    "state",
    "params",
    "modules",
    "mesh_info",
    "post_forward_mesh_info",
    "device",
    "shard_placement_fn",
    "mp_policy",
    "offload_policy",
    "reshard_after_forward",
)

# One `fully_shard` call at a time may have the module-level function replaced.
_patch_lock = threading.RLock()


def _fully_shard_module() -> Any:
    return importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")


def _init_module() -> Any:
    return importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")


def fake_store() -> Any:
    """The store of torch's fake process group, in which collectives return at once: for plans, never for training."""
    return importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


def first_index_of_shard(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part of ``tensor`` begins in the whole tensor: one index for each dim.

    DTensor's own answer to DCP. An empty part begins at the end of its dim.
    """
    (chunk,) = tensor.__create_chunk_list__()
    assert chunk.sizes == tensor.to_local().size(), f"{chunk} is not the part of shape {tensor.to_local().size()}"
    return tuple(chunk.offsets)


def require_grouped_units() -> None:
    """Raise :class:`UnsupportedTorch` unless this torch's FSDP2 state can hold several parameter groups.

    Found by looking at the functions, not at the version: nightly builds and vendor builds count too.
    """
    try:
        found = tuple(inspect.signature(_fully_shard_module()._init_param_group).parameters)
    except (ImportError, AttributeError):
        found = ()
    if found[: len(_INIT_PARAM_GROUP_PARAMETERS)] != _INIT_PARAM_GROUP_PARAMETERS:
        raise UnsupportedTorch(
            "dsv4-fsdp needs an FSDP2 whose units can hold several parameter groups.\n"
            f"expected: torch >= 2.12 (checked on {', '.join(CHECKED_TORCH_VERSIONS)})\n"
            f"got: torch {torch.__version__}, whose FSDP2 "
            + ("has no `_init_param_group`" if not found else f"has `_init_param_group({', '.join(found)})`")
            + "\nwhat to do: install one of the versions above; if yours is newer, please report it."
        )


def has_native_override() -> bool:
    """Whether ``MixedPrecisionPolicy`` has ``param_dtype_override_fn`` (torch >= 2.15)."""
    return "param_dtype_override_fn" in {field.name for field in fields(MixedPrecisionPolicy)}


def reduce_dtype(mp_policy: MixedPrecisionPolicy, storage: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype in which this torch reduces gradients under ``mp_policy``: what it says, else the storage dtype on
    torch >= 2.15 and the compute dtype before."""
    return mp_policy.reduce_dtype or (storage if has_native_override() else compute)


def fsdp_state(module: nn.Module) -> Any | None:
    """The FSDP2 state of the unit whose forward hooks ``module`` carries, or ``None`` if it is no unit."""
    state_module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state")
    return state_module._get_module_fsdp_state(module)


def managed_parameters(modules: Sequence[nn.Module], ignored_params: set[nn.Parameter] | None) -> list[nn.Parameter]:
    """The parameters that ``fully_shard(list(modules))`` would put into a unit, in its order; changes nothing.

    That is each parameter of ``modules`` that is not ignored and not inside an inner unit, once.
    """
    init = _init_module()
    managed_modules = init._get_managed_modules(tuple(modules), ignored_params)
    params, _ = init._get_managed_states(managed_modules, ignored_params)
    return list(params)


def move_to_device(params: Sequence[nn.Parameter], device: torch.device) -> None:
    """Do with ``params`` what ``fully_shard`` does with a unit's parameters before it shards them."""
    _init_module()._move_states_to_device(list(params), [], device)


def sharded_before(modules: Sequence[nn.Module], ignored_params: set[nn.Parameter] | None) -> list[nn.Module]:
    """The modules with parameters of their own that ``fully_shard(list(modules))`` would manage although an earlier
    call, of this package or of torch, manages them already."""
    ignored = ignored_params or set()
    return [
        module
        for module in _init_module()._get_managed_modules(tuple(modules), ignored_params)
        if getattr(module, "_is_fsdp_managed_module", False)
        and any(param not in ignored for param in module.parameters(recurse=False))
    ]


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """``(module name, parameter group)`` of every unit inside ``model``; a list unit comes once, under its first
    module."""
    for name, module in model.named_modules():
        state = fsdp_state(module)
        if state is not None and state._modules[0] is module:
            for group in state._fsdp_param_groups:
                yield name, group


def settle_dtypes_of_frozen(state: Any) -> None:
    """Make the unit's newest parameter group reduce as its policy says also if it is thawed after its first forward.

    At its first forward a group takes its dtypes from its trainable parameters. Before torch 2.15 a group without any
    takes none, and then reduces in the dtype of the gradients, which is the compute dtype.
    """
    group = state._fsdp_param_groups[-1]
    original = group._init_mp_dtypes

    def init_mp_dtypes() -> None:
        original()
        if group.fsdp_params and getattr(group, "_orig_dtype", True) is None:
            first = group.fsdp_params[0]  # a group of ours is of one storage and one reduce dtype
            group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype

    group._init_mp_dtypes = init_mp_dtypes  # the instance's hides the class's


def owners_of(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """Each module that holds the parameter of one ``FSDPParam``, with its name there; several if it is tied.

    While a unit is gathered the registered parameter is another object than ``fsdp_param.sharded_param``, so that one
    cannot be looked up by identity. A root stays gathered after its forward.
    """
    info = fsdp_param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def local_chunk(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of ``tensor`` begins in the whole, and its sizes, per dim; without padding.

    This is what distributed checkpoints go by. A tensor that is sharded twice on a dim (dealt experts under FSDP2) has
    one contiguous part too.
    """
    chunks = tensor.__create_chunk_list__()
    if not chunks:
        return (0,) * tensor.ndim, (0,) * tensor.ndim
    (chunk,) = chunks
    return tuple(chunk.offsets), tuple(chunk.sizes)


def unreduced_gradient(fsdp_param: Any) -> torch.Tensor | None:
    """The gradient that backward left on this rank for one ``FSDPParam``, before its reduction."""
    if fsdp_param.unsharded_accumulated_grad is not None:
        return fsdp_param.unsharded_accumulated_grad
    if not hasattr(fsdp_param, "_unsharded_param"):
        return None  # never gathered
    return fsdp_param._unsharded_param.grad


def compile_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function behind the name of a ``torch.compile`` backend; a function as it is."""
    if callable(backend):
        return backend
    found: Callable[..., Any] = importlib.import_module("torch._dynamo").lookup_backend(backend)
    return found


def graph_breaks() -> Counter[str]:
    """Reason -> graph breaks of ``torch.compile`` in this process so far. Of a reason only its first line counts: the
    rest has addresses in it."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    breaks: Counter[str] = Counter()
    for reason, count in counters["graph_break"].items():
        breaks[reason.partition("\n")[0]] += count
    return breaks


@contextmanager
def grouping_hook(hook: Callable[[Callable[..., None], tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Within the context, ``fully_shard`` calls ``hook(original, args, kwargs)`` in place of ``_init_param_group``.

    The patch is process-wide, so it is held under a lock, and restored on any exit.
    """
    module = _fully_shard_module()
    with _patch_lock:
        original = module._init_param_group

        def replacement(*args: Any, **kwargs: Any) -> None:
            hook(original, args, kwargs)

        module._init_param_group = replacement
        try:
            yield
        finally:
            module._init_param_group = original
