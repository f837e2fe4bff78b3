"""The layout of DeepSeek-V4 in NVIDIA NeMo AutoModel: which of its modules are fp32 islands.

NeMo AutoModel puts every fp32 tensor of DeepSeek-V4 into a module of its own, so there an island is a *module*, found
by the end of its name or by its class. The tables below are its documented data (nemo-automodel 0.7.0,
``components/models/deepseek_v4``); the functions read them for a module tree, through checkpoint wrappers.

Pure: nothing here needs ``torch.distributed``. :mod:`dsv4_fsdp.contract` turns the tables into rules per parameter,
:mod:`dsv4_fsdp.fsdp` turns them into sharding units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .names import canonical_name

__all__ = [
    "CLASS_NAMES",
    "FP32_MODULE_SUFFIXES",
    "MODEL_TYPE",
    "RETURNED_FP32_PARAMETER_CLASS_NAMES",
    "SELF_CASTING_FP32_MODULE_CLASS_NAMES",
    "IslandModule",
    "config_model_type",
    "floating_param_dtypes",
    "has_class_name",
    "has_nemo_layout",
    "is_deepseek_v4_module",
    "is_holder",
    "is_self_casting",
    "iter_candidate_modules",
    "iter_island_modules",
    "matches_suffix",
    "named_island_modules",
    "unwrap",
]

MODEL_TYPE = "deepseek_v4"
"""``config.model_type`` of DeepSeek-V4, the same in NeMo AutoModel and in Transformers."""

CLASS_NAMES = {
    "DeepseekV4ForCausalLM",
    "DeepseekV4Model",
    "DeepseekV4Block",
    "DeepseekV4VisionBlock",
    "DeepseekV4VisionTransformer",
}
"""Classes whose instances, or holders of instances, count as DeepSeek-V4."""

FP32_MODULE_SUFFIXES = (
    # hyper-connection mixers and the final head that collapses their streams
    "attn_hc",
    "ffn_hc",
    "hc_head",
    # fp32 logits
    "lm_head",
    # attention sinks
    "self_attn.sinks_param",
    # KV compressor: projections and position bias
    "self_attn.compressor.wkv",
    "self_attn.compressor.wgate",
    "self_attn.compressor.ape_param",
    # the Lightning Indexer's own compressor
    "self_attn.compressor.indexer.wkv",
    "self_attn.compressor.indexer.wgate",
    "self_attn.compressor.indexer.ape_param",
    # vision tower
    "norm1",
    "norm2",
    "vision.norm",
)
"""Ends of module names that mark fp32 islands. See :func:`matches_suffix` for what counts as an end."""

RETURNED_FP32_PARAMETER_CLASS_NAMES = {"DeepseekV4FP32Parameter"}
"""Holders: their forward returns the parameter itself, so it must outlive that forward."""

SELF_CASTING_FP32_MODULE_CLASS_NAMES = {"DeepseekV4VisionRMSNorm"}
"""Modules that compute in fp32 and return the dtype they were given; islands wherever they stand."""

# Classes that no other implementation of DeepSeek-V4 has. Transformers shares the names `DeepseekV4Model` and
# `DeepseekV4ForCausalLM`, and its `lm_head` is bf16: reading the table above into it would be wrong.
_CLASS_NAMES_OF_NEMO_ONLY = (
    {"DeepseekV4Block", "DeepseekV4VisionBlock", "DeepseekV4VisionTransformer"}
    | RETURNED_FP32_PARAMETER_CLASS_NAMES
    | SELF_CASTING_FP32_MODULE_CLASS_NAMES
)

# The attributes under which checkpoint_wrapper and torch.compile keep the module they wrap.
_WRAPPED_MODULE_ATTRIBUTES = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class IslandModule:
    """A module that the tables name.

    Attributes:
        name: name from the module that was searched, as ``get_submodule`` takes it; ``""`` for that module itself.
        module: the outermost wrapper, where a checkpoint wrapper stands around it.
        label: the table entry that names it: a suffix, or a class name.
        dtypes: the dtypes of its floating-point parameters, never empty.
    """

    name: str
    module: nn.Module
    label: str
    dtypes: frozenset[torch.dtype]

    @property
    def fqn(self) -> str:
        """The canonical name: ``name`` without the words that wrappers add."""
        return canonical_name(self.name)

    @property
    def is_fp32(self) -> bool:
        """Whether every floating-point parameter is stored in fp32."""
        return self.dtypes == {torch.float32}


def matches_suffix(name: str, suffix: str) -> bool:
    """Whether ``name`` is ``suffix`` or ends in it at a dot: ``layers.0.attn_hc`` ends so, ``my_attn_hc`` not."""
    return name == suffix or name.endswith(f".{suffix}")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any number of checkpoint or ``torch.compile`` wrappers; ``module`` itself without any."""
    # Through `_modules`: a checkpoint wrapper forwards unknown attributes, so `getattr` would find the inner module's.
    while True:
        inner = next((m for a in _WRAPPED_MODULE_ATTRIBUTES if (m := module._modules.get(a)) is not None), None)
        if inner is None:
            return module
        module = inner


def has_class_name(module: nn.Module, names: set[str]) -> bool:
    """Whether the class of ``module``, or a base class, is called one of ``names``.

    Base classes count because ``fully_shard`` swaps the class for a subclass of another name. Wrappers are not looked
    through: see :func:`unwrap`.
    """
    return any(cls.__name__ in names for cls in type(module).__mro__)


def is_holder(module: nn.Module) -> bool:
    """Whether ``module``, or what it wraps, returns its raw parameter from its forward."""
    return has_class_name(unwrap(module), RETURNED_FP32_PARAMETER_CLASS_NAMES)


def is_self_casting(module: nn.Module) -> bool:
    """Whether ``module``, or what it wraps, computes in fp32 and returns the dtype it was given."""
    return has_class_name(unwrap(module), SELF_CASTING_FP32_MODULE_CLASS_NAMES)


def config_model_type(module: nn.Module) -> str | None:
    """``module.config.model_type``, or ``None`` where there is no such string."""
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return model_type if isinstance(model_type, str) else None


def is_deepseek_v4_module(module: nn.Module) -> bool:
    """Whether ``module`` is, wraps or contains a DeepSeek-V4 module, told by class name or ``config.model_type``."""
    return any(has_class_name(m, CLASS_NAMES) or config_model_type(m) == MODEL_TYPE for m in module.modules())


def has_nemo_layout(module: nn.Module) -> bool:
    """Whether ``module`` is or contains a class that only NeMo AutoModel's DeepSeek-V4 has."""
    return any(has_class_name(m, _CLASS_NAMES_OF_NEMO_ONLY) for m in module.modules())


def floating_param_dtypes(module: nn.Module) -> set[torch.dtype]:
    """The dtypes of the floating-point parameters of ``module`` and its submodules; integer parameters do not count."""
    return {param.dtype for param in module.parameters() if param.is_floating_point()}


def iter_candidate_modules(module: nn.Module) -> Iterator[IslandModule]:
    """Every module inside ``module`` (itself among them) that the tables name and that has a floating-point parameter.

    In ``named_modules`` order, each once, whatever dtypes it holds. A wrapper and the module it wraps share a canonical
    name, so both come, the wrapper first. A module registered under several names comes under the first that matches.
    """
    seen: set[int] = set()
    for name, submodule in module.named_modules(remove_duplicate=False):
        if id(submodule) in seen or (label := _label(canonical_name(name), submodule)) is None:
            continue
        seen.add(id(submodule))
        if dtypes := floating_param_dtypes(submodule):
            yield IslandModule(name, submodule, label, frozenset(dtypes))


def iter_island_modules(module: nn.Module, *, require_fp32: bool = True) -> Iterator[IslandModule]:
    """The outermost modules inside ``module`` (itself among them) that the tables name, each once.

    A module inside another one is part of it and does not come: the inside of a checkpoint wrapper, a self-casting norm
    within a hyper-connection. With ``require_fp32`` a module that also holds other dtypes is passed over, and modules
    inside it stand for themselves.
    """
    found = [c for c in iter_candidate_modules(module) if c.is_fp32 or not require_fp32]
    inside = {id(inner) for c in found for inner in c.module.modules() if inner is not c.module}
    for candidate in found:
        if id(candidate.module) not in inside:
            yield candidate


def named_island_modules(module: nn.Module, *, require_fp32: bool = True) -> Iterator[tuple[str, str]]:
    """``(name, table entry)`` of each module of :func:`iter_island_modules`."""
    for island in iter_island_modules(module, require_fp32=require_fp32):
        yield island.name, island.label


def _label(fqn: str, module: nn.Module) -> str | None:
    for suffix in FP32_MODULE_SUFFIXES:
        if matches_suffix(fqn, suffix):
            return suffix
    return next((n for n in sorted(SELF_CASTING_FP32_MODULE_CLASS_NAMES) if has_class_name(unwrap(module), {n})), None)
