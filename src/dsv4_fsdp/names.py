"""Parameter names: one canonical form, and one way to match a pattern against them.

Wrappers put words of their own into a parameter's fully qualified name (``fqn``): activation checkpointing,
``torch.compile`` and peft each do. Everything that this package prints, compares, saves or looks up is the canonical
name, without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

__all__ = [
    "canonical_name",
    "is_adapter_name",
    "joined_name",
    "matches_components",
    "named_parameters_all",
    "pattern_name",
]

# Each of these is an attribute under which a wrapper keeps the module it wraps.
_WRAPPER_COMPONENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "base_layer"})
_PEFT_NESTING = frozenset({"base_layer"})
# peft's PeftModel holds the user's model as `base_model.model`.
_PEFT_PREFIX = "base_model.model."


def canonical_name(fqn: str) -> str:
    """``fqn`` without the words that wrappers add.

    ``base_model.model.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.base_layer.weight`` becomes
    ``model.layers.0.self_attn.q_proj.weight``. peft's own parameters (``lora_A.default.weight``) keep their names; in
    these ``base_layer`` stays, for it tells apart the adapters of two parameters of one module, which peft nests.
    """
    kept = _PEFT_NESTING if is_adapter_name(fqn) else frozenset()
    fqn = ".".join(part for part in fqn.split(".") if part not in _WRAPPER_COMPONENTS - kept)
    return fqn.removeprefix(_PEFT_PREFIX)


def joined_name(module_name: str, name: str) -> str:
    """The canonical name of what the module ``module_name`` (``""`` for the root) calls ``name``."""
    return canonical_name(f"{module_name}.{name}" if module_name else name)


def is_adapter_name(fqn: str) -> bool:
    """Whether ``fqn`` names a peft adapter's parameter (``lora_A``, ``lora_B``, ``lora_magnitude_vector``, ...)."""
    return any(part.startswith("lora_") for part in fqn.split("."))


def matches_components(fqn: str, pattern: str) -> bool:
    """Whether ``pattern`` is a run of whole dot-separated components of ``fqn``.

    ``sinks`` matches ``self_attn.sinks`` and ``sinks.weight`` but not ``self_attn.sinks_param.weight``.
    A ``*`` in a component of the pattern stands for any text within that component.
    """
    wanted = [re.escape(part).replace(r"\*", r"[^.]*") for part in pattern.split(".")]
    return re.search(r"(?:^|\.)" + r"\.".join(wanted) + r"(?:$|\.)", fqn) is not None


def pattern_name(fqn: str) -> str:
    """``fqn`` with each number component as ``*``, so that the layers of a model fall together in a table."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def named_parameters_all(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every canonical name of every parameter: a tied parameter comes once for each of its names."""
    for name, param in module.named_parameters(remove_duplicate=False):
        yield canonical_name(name), param
