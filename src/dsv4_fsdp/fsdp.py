"""``fully_shard_deepseek_v4``: FSDP2 for one DeepSeek-V4 module at a time, with its fp32 islands kept fp32.

The interface is that of NeMo AutoModel's ``components/models/deepseek_v4/fsdp.py``: the same names, public and
underscored, with the same signatures, so that code written for one finds the other. :func:`dsv4_fsdp.parallelize`
shards a whole model; this is the function for those who drive the sharding themselves, bottom-up, as with torch's own.

What one call does to a module, in *nested* units:

1. Each island module (:mod:`dsv4_fsdp.nemo_layout` says which) becomes a unit of its own that gathers, computes and
   reduces in fp32.
2. The module itself becomes a unit over all other parameters, under the caller's policy.
3. Compressors inside are told which process group must agree on taking part in backward (HCA graph alignment).

Three modules need no islands apart and become one unit: one that is all fp32 under a policy that does not lower it, one
that is no DeepSeek-V4, and a list. All-fp32 storage is read as fp32 compute only there. In a DeepSeek-V4 module it may
mean master weights, so a policy that asks for bf16 gets bf16 outside the islands.

Nested units cannot isolate an island that is a bare parameter, as Transformers' DeepSeek-V4 has them. Such a module
gets a *grouped* unit (:mod:`dsv4_fsdp.grouped_unit`), and so does NeMo's on request: ``island_units="grouped"``.

Where this differs from nemo-automodel 0.7.0 on purpose: ``None`` and sharded modules come back untouched, lists are
taken, checkpoint wrappers are seen through wherever they stand (0.7.0 loses the islands behind one around
``self_attn``), what an inner unit owns is left alone, a module that is passed over is named in a warning, and a mesh
with two axes can be aligned.

Units are made through this module's global names ``fully_shard`` and ``fully_shard_grouped``, so a caller can replace
them to watch or change what happens.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import Parameter

from . import nemo_layout
from .alignment import COMPRESSOR_CLASS_NAMES, tie_compressors
from .contract import island_reason, short_dtype
from .errors import ShardingError, listing
from .grouped_unit import fully_shard as fully_shard_grouped
from .names import named_parameters_all
from .torch_private import fsdp_state

__all__ = ["DeepseekV4FSDPKwargs", "fully_shard_deepseek_v4"]

logger = logging.getLogger("dsv4_fsdp")

IslandUnits = Literal["auto", "nested", "grouped"]

# NeMo AutoModel's names for the tables; what they mean stands where they are defined.
_DSV4_CLASS_NAMES = nemo_layout.CLASS_NAMES
_DSV4_FP32_MODULE_SUFFIXES = nemo_layout.FP32_MODULE_SUFFIXES
_DSV4_RETURNED_FP32_PARAMETER_CLASS_NAMES = nemo_layout.RETURNED_FP32_PARAMETER_CLASS_NAMES
_DSV4_SELF_CASTING_FP32_MODULE_CLASS_NAMES = nemo_layout.SELF_CASTING_FP32_MODULE_CLASS_NAMES

_HCA_GROUP_SETTER = "_set_hca_param_sync_group"


class DeepseekV4FSDPKwargs(TypedDict, total=False):
    """Further arguments of :func:`fully_shard_deepseek_v4`; each means what it means in torch's ``fully_shard``.

    Type checkers know these two. Whatever else torch's ``fully_shard`` takes (``shard_placement_fn``, ``dp_mesh_dims``)
    is handed on as well.
    """

    ignored_params: set[Parameter] | None
    reshard_after_forward: bool | int | None


def fully_shard_deepseek_v4(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None = None,
    *,
    island_units: IslandUnits = "auto",
    hca_owner_axis: str | None = None,
    **fsdp_kwargs: Unpack[DeepseekV4FSDPKwargs],
) -> FSDPModule | list[FSDPModule]:
    """Apply FSDP2 to ``module`` such that no unit mixes fp32 islands with the rest; see the module's docstring.

    Args:
        module: a module, sharded in place. A list of modules becomes one unit under exactly ``mp_policy``. ``None``,
            and a module that is sharded already, comes back as it is.
        mesh: one axis, or two as (replicate, shard).
        mp_policy: for everything that is no island. Islands gather, compute and reduce in fp32 and return fp32,
            whatever it says; its ``cast_forward_inputs`` holds for them too. An object that is no
            ``MixedPrecisionPolicy`` is handed on as it is, to the islands as well.
        offload_policy: for every unit of the call.
        island_units: ``"nested"``: each island module is a unit. ``"grouped"``: one unit with one parameter group per
            dtype, its compressors tied (:mod:`dsv4_fsdp.alignment`). ``"auto"``: nested where every island is in a
            module of the NeMo AutoModel layout, else grouped.
        hca_owner_axis: for nested units on a mesh with two axes: the name of the axis along which parameters are
            sharded. Without it HCA graph alignment is off there (see :func:`_hca_param_sync_group_from_1d_mesh`). The
            group that then aligns is *all ranks of both axes*: gradients are reduce-scattered along the shard axis and
            then all-reduced along the replicate axis, so a compressor that takes part in backward on any one rank must
            do so on all of them. The group is the mesh flattened under torch's default name (``"replicate_shard"``);
            making it is a collective of the first call, unless the caller has flattened the mesh before. Where grouped
            units are chosen by ``"auto"`` the name is checked and not used: their tie needs no group.
        **fsdp_kwargs: see :class:`DeepseekV4FSDPKwargs`. Each island gets those of ``ignored_params`` that it has; the
            unit around it gets the whole set. Holders of a bare tensor stay gathered after forward, since what their
            forward returns is the parameter itself.

    Returns:
        ``module``, whose class ``fully_shard`` has made an ``FSDPModule``; a list for a list.

    Warns:
        UserWarning: modules that the layout names are not all fp32, and therefore no islands; one warning names all.

    Raises:
        ShardingError: ``island_units`` is none of the three, or nested although an island is a bare parameter;
            ``hca_owner_axis`` is not the mesh's shard axis, or given for grouped units.
        ContractError: in a grouped unit, an island is stored below fp32.
    """
    _check_island_units(island_units, hca_owner_axis)
    options: dict[str, Any] = dict(fsdp_kwargs)
    reducing_axes: tuple[str, ...] | None = None
    if hca_owner_axis is not None:
        reducing_axes = _reducing_axes(mesh, hca_owner_axis, options.get("dp_mesh_dims"))
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy}

    if module is None:
        return module  # type: ignore[unreachable]  # optional parts of a model, such as a missing vision tower
    if isinstance(module, (list, tuple)):
        _shard_list(module, common, options, island_units, reducing_axes)
        return cast("list[FSDPModule]", module)
    if _has_fsdp_state(module):
        return cast(FSDPModule, module)

    all_fp32 = _floating_param_dtypes(module) == {torch.float32}
    is_deepseek_v4 = _is_deepseek_v4_module(module)
    if all_fp32 and not is_deepseek_v4:
        # Such as `lm_head` handed over by itself: it has no name here that could tell it from a master weight, and an
        # island that is computed in bf16 is the worse mistake.
        return _fully_shard_once(module, **common, fp32_policy=True, **_fp32_module_fsdp_kwargs(module, options))
    if island_units == "grouped":
        return _shard_grouped(module, common, options)
    if not is_deepseek_v4:
        return _fully_shard_once(module, **common, **options)
    if all_fp32 and getattr(mp_policy, "param_dtype", None) in (None, torch.float32):
        _align(module, mesh, reducing_axes)
        return _fully_shard_once(module, **common, fp32_policy=True, **options)
    if bare := _islands_outside_modules(module, options):
        if island_units == "nested":
            raise _nested_units_impossible(module, bare)
        return _shard_grouped(module, common, options)

    _align(module, mesh, reducing_axes)
    _warn_of_modules_passed_over(module)
    inside_units = _modules_of_inner_units(module)
    islands = [island for island in _iter_dsv4_fp32_modules(module) if id(island) not in inside_units]
    _log_mixed_remainder(module, islands, options)
    for island in islands:
        island_options = _fp32_module_fsdp_kwargs(island, _fsdp_kwargs_for_module(island, options))
        _fully_shard_once(island, **common, fp32_policy=True, **island_options)
    return _fully_shard_once(module, **common, **options)


# --- Which modules ----------------------------------------------------------------------------------------------------


def _matches_suffix(name: str, suffix: str) -> bool:
    """Whether the dotted ``name`` is ``suffix`` or ends in ``.suffix``."""
    return nemo_layout.matches_suffix(name, suffix)


def _module_config_model_type(module: nn.Module) -> str | None:
    """``module.config.model_type`` if there is such a string, else ``None``."""
    return nemo_layout.config_model_type(module)


def _is_deepseek_v4_module(module: nn.Module) -> bool:
    """Whether ``module`` is, wraps or contains a module of a DeepSeek-V4 class or config."""
    return nemo_layout.is_deepseek_v4_module(module)


def _floating_param_dtypes(module: nn.Module) -> set[torch.dtype]:
    """The storage dtypes of all floating-point parameters inside ``module``; empty if there are none."""
    return nemo_layout.floating_param_dtypes(module)


def _iter_dsv4_fp32_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The island modules inside ``module`` that nested units isolate, each once; ``module`` itself is never among them.

    Only modules whose floating-point parameters are all fp32. Of a checkpoint wrapper and its inside the *wrapper*
    comes, as for a block that is wrapped first and sharded then (either way the collectives are the same: measured). An
    island inside another island does not come, so the order of sharding does not matter.
    """
    for island in nemo_layout.iter_island_modules(module):
        if island.module is not module:
            yield island.module


def _has_fsdp_state(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was already applied to ``module``, or to what it wraps; its submodules do not count."""
    return fsdp_state(module) is not None or fsdp_state(nemo_layout.unwrap(module)) is not None


def _modules_of_inner_units(module: nn.Module) -> set[int]:
    """``id`` of every module that belongs to a unit inside ``module``, no unit itself: what is there has an owner."""
    inside: set[int] = set()
    for submodule in module.modules():
        if id(submodule) not in inside and _has_fsdp_state(submodule):
            inside.update(id(m) for m in submodule.modules())
    return inside


def _own_parameters(module: nn.Module, options: dict[str, Any]) -> Iterator[tuple[str, Parameter]]:
    """The parameters that a unit around ``module`` would own: all but those of inner units and the ignored ones."""
    inside_units = _modules_of_inner_units(module)
    not_own = {id(param) for param in options.get("ignored_params") or ()}
    not_own |= {id(p) for m in module.modules() if id(m) in inside_units for p in m.parameters(recurse=False)}
    for name, param in named_parameters_all(module):
        if id(param) not in not_own:
            yield name, param


def _islands_outside_modules(module: nn.Module, options: dict[str, Any]) -> list[str]:
    """Names of the island parameters of this unit that no module of the layout isolates: nested units cannot keep them.

    A named module that is not all fp32 counts as isolating here: nested units pass it over with a warning, and that is
    no reason to change the kind of unit.
    """
    isolated = {id(p) for c in nemo_layout.iter_candidate_modules(module) for p in c.module.parameters()}
    reason = island_reason(module, ())
    return [
        name
        for name, param in _own_parameters(module, options)
        if param.is_floating_point() and id(param) not in isolated and reason(name, param) is not None
    ]


# --- Under which policy and arguments ---------------------------------------------------------------------------------


def _fp32_mp_policy(mp_policy: Any, *, preserve_activation_dtype: bool = False) -> Any:
    """The policy of an island unit: parameters, reduction and output in fp32, every other field as in ``mp_policy``.

    With ``preserve_activation_dtype`` neither inputs nor outputs are cast. That is for modules that cast by themselves
    and promise to return the dtype they were given. Anything but a ``MixedPrecisionPolicy`` is returned unchanged.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        return mp_policy
    policy = dataclasses.replace(
        mp_policy, param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    if hasattr(policy, "param_dtype_override_fn"):
        # torch >= 2.15: a function of the caller's that sends other parameters to bf16 must not reach islands.
        without_override: dict[str, Any] = {"param_dtype_override_fn": None}
        policy = dataclasses.replace(policy, **without_override)
    if preserve_activation_dtype:
        policy = dataclasses.replace(policy, output_dtype=None, cast_forward_inputs=False)
    return policy


def _fsdp_kwargs_for_module(module: nn.Module, fsdp_kwargs: dict[str, Any]) -> dict[str, Any]:
    """``fsdp_kwargs`` with ``ignored_params`` cut to the parameters of ``module``, and left out if none remain.

    The same object where there is nothing to cut; the caller's dict and set are never changed.
    """
    ignored = fsdp_kwargs.get("ignored_params") or ()
    own_ids = {id(param) for param in module.parameters()}
    own = {param for param in ignored if id(param) in own_ids}
    if len(own) == len(ignored):
        return fsdp_kwargs
    others = {key: value for key, value in fsdp_kwargs.items() if key != "ignored_params"}
    return {**others, "ignored_params": own} if own else others


def _fp32_module_fsdp_kwargs(module: nn.Module, fsdp_kwargs: dict[str, Any]) -> dict[str, Any]:
    """``fsdp_kwargs`` for an island unit: a holder never reshards after forward; anything else gets the same object.

    The forward of a holder returns its parameter, which the caller uses after that forward. Resharding would free it.
    """
    if not nemo_layout.is_holder(module) or fsdp_kwargs.get("reshard_after_forward") is False:
        return fsdp_kwargs
    return {**fsdp_kwargs, "reshard_after_forward": False}


def _fully_shard_once(
    module: nn.Module,
    *,
    mesh: Any,
    mp_policy: Any,
    offload_policy: OffloadPolicy | None,
    fp32_policy: bool = False,
    **fsdp_kwargs: Any,
) -> FSDPModule:
    """Make ``module`` a unit unless it is one; with ``fp32_policy`` under the island version of the policy.

    ``offload_policy=None`` is handed on as it is: torch offloads for a ``CPUOffloadPolicy`` and nothing else.
    """
    if _has_fsdp_state(module):
        return cast(FSDPModule, module)
    if fp32_policy:
        mp_policy = _fp32_mp_policy(mp_policy, preserve_activation_dtype=nemo_layout.is_self_casting(module))
    unit_kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy}
    return fully_shard(module, **unit_kwargs, **fsdp_kwargs)


# --- Units other than nested ones -------------------------------------------------------------------------------------


def _shard_list(
    modules: list[nn.Module] | tuple[nn.Module, ...],
    common: dict[str, Any],
    options: dict[str, Any],
    island_units: IslandUnits,
    reducing_axes: tuple[str, ...] | None,
) -> None:
    """One unit over those of ``modules`` that are not sharded yet, under exactly the caller's policy."""
    unit = [module for module in cast("list[Any]", modules) if module is not None and not _has_fsdp_state(module)]
    if not unit:
        return
    if isinstance(modules, list) and len(unit) == len(modules):
        unit = modules  # whoever intercepts `fully_shard` sees the object that was passed
    of_deepseek_v4 = [module for module in unit if _is_deepseek_v4_module(module)]
    needs_groups = any(_islands_outside_modules(module, options) for module in of_deepseek_v4)
    if island_units == "grouped" or (island_units == "auto" and needs_groups):
        _shard_grouped(unit, common, options)
        return
    for module in of_deepseek_v4:
        _align(module, common["mesh"], reducing_axes)
    fully_shard(unit, **common, **options)


def _shard_grouped(unit: Any, common: dict[str, Any], options: dict[str, Any]) -> Any:
    """One grouped unit over a module or a list of modules, their compressors tied first."""
    modules = unit if isinstance(unit, list) else [unit]
    if not isinstance(common["mp_policy"], MixedPrecisionPolicy):
        raise ShardingError(
            "a grouped unit needs a policy that it can divide by dtype.\n"
            "expected: mp_policy, a torch.distributed.fsdp.MixedPrecisionPolicy\n"
            f"got: {common['mp_policy']!r}\nwhere: {_describe(*modules)}\n"
            "what to do: pass MixedPrecisionPolicy(), which computes in the storage dtype, or one with a param_dtype."
        )
    for module in modules:
        tie_compressors(module)
    if common["offload_policy"] is None:
        common = {key: value for key, value in common.items() if key != "offload_policy"}
    return fully_shard_grouped(unit, **common, **options)


# --- HCA graph alignment ----------------------------------------------------------------------------------------------


def _hca_param_sync_group_from_1d_mesh(mesh: Any) -> Any | None:
    """The process group of a one-axis mesh with more than one rank, else ``None``: alignment off.

    Ranks that reduce the gradients of one compressor must agree on whether it takes part in backward. On a mesh with
    one axis those are the ranks of that axis, named or not. On a mesh with more axes this function cannot know which of
    them share parameters, and a wrong group would reduce across unrelated ones; there the caller names the axis
    (``hca_owner_axis`` of :func:`fully_shard_deepseek_v4`).

    Args:
        mesh: a ``DeviceMesh``, ``None``, or an object that looks like one: the number of axes is read from ``ndim``,
            ``shape`` or ``mesh_dim_names``, the number of ranks from ``size()``, ``shape`` or the group, the group from
            ``get_group()``. Where one of the three cannot be read the result is ``None``.
    """
    if mesh is None or _num_mesh_axes(mesh) != 1:
        return None
    get_group = getattr(mesh, "get_group", None)
    if not callable(get_group):
        return None
    num_ranks = _num_mesh_ranks(mesh)
    if num_ranks is not None:
        return get_group() if num_ranks > 1 else None
    group = get_group()
    num_ranks = _as_int(getattr(group, "size", None))
    return group if num_ranks is not None and num_ranks > 1 else None


def _attach_hca_param_sync_group(module: nn.Module, mesh: Any) -> None:
    """Tell every compressor inside ``module`` the group of a one-axis ``mesh``; ``None`` on other meshes turns it off.

    A compressor is what has NeMo AutoModel's setter ``_set_hca_param_sync_group(group)``. It is called with ``None``
    too, so that a group of an earlier mesh does not stay behind.
    """
    _attach_group(module, _hca_param_sync_group_from_1d_mesh(mesh))


def _attach_group(module: nn.Module, group: Any | None) -> None:
    for submodule in module.modules():
        # A checkpoint wrapper forwards the attribute; the module inside comes by itself.
        if nemo_layout.unwrap(submodule) is submodule and hasattr(submodule, _HCA_GROUP_SETTER):
            getattr(submodule, _HCA_GROUP_SETTER)(group)


def _align(module: nn.Module, mesh: Any, reducing_axes: tuple[str, ...] | None) -> None:
    """Align the compressors inside ``module``: over ``reducing_axes`` of ``mesh``, or as a one-axis mesh says."""
    if reducing_axes is None:
        _attach_hca_param_sync_group(module, mesh)
        if (_num_mesh_axes(mesh) or 0) > 1 and any(hasattr(m, _HCA_GROUP_SETTER) for m in module.modules()):
            _log_alignment_is_off(str(mesh))
    else:
        _attach_group(module, _group_over(mesh, reducing_axes))
    # Transformers' compressors have no setter. They come here only as part of one plain unit, where the tie works.
    if any(
        nemo_layout.has_class_name(m, set(COMPRESSOR_CLASS_NAMES)) and not hasattr(m, _HCA_GROUP_SETTER)
        for m in module.modules()
    ):
        tie_compressors(module)


def _reducing_axes(mesh: DeviceMesh, owner_axis: str, dp_mesh_dims: Any | None) -> tuple[str, ...]:
    """The axes whose ranks together reduce the gradient of a parameter that is sharded along ``owner_axis``.

    ``dp_mesh_dims`` is torch's argument of that name, for a mesh that has other axes (tensor parallel) as well.

    Raises:
        ShardingError: ``owner_axis`` is no axis of ``mesh``, or not one that parameters are sharded along.
    """
    names: tuple[str, ...] = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if dp_mesh_dims is None:
        replicate_axes, shard_axes = names[:-1], names[-1:]
    else:
        replicate_axes, shard_axes = _axis_names(dp_mesh_dims.replicate), _axis_names(dp_mesh_dims.shard)
    if owner_axis in shard_axes:
        return tuple(name for name in names if name in replicate_axes or name in shard_axes)
    raise ShardingError(
        "hca_owner_axis must name the axis along which parameters are sharded.\n"
        f"expected: {' or '.join(map(repr, shard_axes)) or 'the name of an axis'}\n"
        f"got: {owner_axis!r}"
        + (", along which parameters are replicated" if owner_axis in replicate_axes else "")
        + f"\nwhere: a mesh of shape {tuple(getattr(mesh, 'shape', ()))} "
        + (f"with axes {names}\n" if names else "whose axes have no names\n")
        + "what to do: "
        + ("name the shard axis; the ranks of the replicate axis are included by themselves." if names else "")
        + ("" if names else "build the mesh with mesh_dim_names.")
    )


def _group_over(mesh: DeviceMesh, axes: tuple[str, ...]) -> Any | None:
    """The process group of all ranks of ``axes`` together; ``None`` if that is one rank."""
    submesh = mesh if axes == mesh.mesh_dim_names else mesh[axes]
    if submesh.size() <= 1:
        return None
    # torch keeps the flattened mesh under its name in the root mesh, so all blocks share one group.
    return (submesh if submesh.ndim == 1 else submesh._flatten()).get_group()


def _axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _num_mesh_axes(mesh: Any) -> int | None:
    ndim = getattr(mesh, "ndim", None)
    if isinstance(ndim, int):
        return ndim
    for attribute in ("shape", "mesh_dim_names"):
        value = getattr(mesh, attribute, None)
        if isinstance(value, (tuple, list)):
            return len(value)
    return None


def _num_mesh_ranks(mesh: Any) -> int | None:
    num_ranks = _as_int(getattr(mesh, "size", None))
    shape = getattr(mesh, "shape", None)
    if num_ranks is None and isinstance(shape, (tuple, list)):
        return math.prod(shape)
    return num_ranks


def _as_int(size: Any) -> int | None:
    value = size() if callable(size) else size
    return value if isinstance(value, int) else None


# --- Checks and messages ----------------------------------------------------------------------------------------------


def _check_island_units(island_units: str, hca_owner_axis: str | None) -> None:
    if island_units not in get_args(IslandUnits):
        raise ShardingError(
            "island_units has no such kind.\n"
            f"expected: {' or '.join(map(repr, get_args(IslandUnits)))}\ngot: {island_units!r}\n"
            'what to do: leave it out, or ask for "grouped" for fewer collectives.'
        )
    if island_units == "grouped" and hca_owner_axis is not None:
        raise ShardingError(
            "hca_owner_axis has no effect in grouped units.\n"
            f"expected: no hca_owner_axis with island_units='grouped'\ngot: {hca_owner_axis!r}\n"
            "what to do: leave it out. Grouped units are aligned by a tie that needs no group, on any mesh."
        )


def _nested_units_impossible(module: nn.Module, bare: list[str]) -> ShardingError:
    return ShardingError(
        "nested units cannot keep these islands in fp32: no module of the NeMo AutoModel layout holds them apart.\n"
        "expected: every fp32 island inside a module that consists of islands only\n"
        f"got:\n{listing(bare)}\nwhere: {_describe(module)}\n"
        'what to do: use island_units="grouped" (or "auto"), which keeps bare parameters apart too.'
    )


def _warn_of_modules_passed_over(module: nn.Module) -> None:
    inside_units = _modules_of_inner_units(module)
    # A wrapper and its inside are two candidates with one name.
    passed_over = {
        candidate.fqn: " and ".join(sorted(map(short_dtype, candidate.dtypes)))
        for candidate in nemo_layout.iter_candidate_modules(module)
        if not candidate.is_fp32 and candidate.module is not module and id(candidate.module) not in inside_units
    }
    if passed_over:
        warnings.warn(
            f"{_describe(module)}: the DeepSeek-V4 layout keeps these modules in fp32, but they are not all fp32, so "
            f"they are no islands and go with the rest of the unit:\n"
            f"{listing([f'{fqn}: {dtypes}' for fqn, dtypes in passed_over.items()])}\n"
            "If that is not meant, load the checkpoint without casting them; bits already lost do not come back.",
            stacklevel=3,
        )


@functools.cache
def _log_alignment_is_off(mesh: str) -> None:
    """Once per mesh and process: what would otherwise be found out as a hang."""
    logger.warning(
        "HCA graph alignment is off on %s, which has several axes: a step in which only some ranks have a sequence of "
        'a whole HCA window will hang. Name the shard axis with hca_owner_axis, or use island_units="grouped".',
        mesh,
    )


def _log_mixed_remainder(module: nn.Module, islands: list[nn.Module], options: dict[str, Any]) -> None:
    """Say with names, in the log, what torch will refuse without them at the first forward."""
    in_islands = {id(param) for island in islands for param in island.parameters()}
    names: dict[torch.dtype, list[str]] = {}
    for name, param in _own_parameters(module, options):
        if id(param) not in in_islands and param.requires_grad:
            names.setdefault(param.dtype, []).append(name)
    if len(names) > 1:
        logger.warning(
            "%s: outside its islands this unit has parameters of more than one dtype, which torch refuses at the first "
            'forward. island_units="grouped" shards them together.\n%s',
            _describe(module),
            "\n".join(f"{short_dtype(dtype)}:\n{listing(found, limit=4)}" for dtype, found in names.items()),
        )


def _describe(*modules: nn.Module) -> str:
    return ", ".join(type(nemo_layout.unwrap(module)).__name__ for module in modules)
