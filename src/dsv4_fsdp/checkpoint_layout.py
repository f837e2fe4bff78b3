"""What a checkpoint of a model should hold: names, shapes and dtypes, and which names in files mean which tensors.

Both come from the installed Transformers library: the names, shapes and class list from the model itself, built on the
meta device; the release's names (DeepSeek's own: ``layers.0.attn.wq_a.weight``) from the conversion that
``from_pretrained`` applies (``transformers.conversion_mapping``). A name in a file is looked up as that loader does it
(``core_model_loading.convert_and_load_state_dict_in_model``), so both layouts, and mixtures, are read by one rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .contract import class_lists, island_reason, short_dtype
from .errors import ContractError

__all__ = ["CheckpointLayout", "ExpectedTensor", "Source", "layout_of_folder", "model_of_folder"]

_NUMBER = re.compile(r"(?:^|\.)\d+\.")
# What is before the last number of a name (with its dot), the number, and what is behind.
_LAST_NUMBER = re.compile(r"^(.*\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor of ``model.state_dict()``: its shape, its dtype as the model builds it, and why it is an island."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_floating: bool
    island_reason: str | None


@dataclass(frozen=True)
class Source:
    """What a name in a file means.

    Attributes:
        target: name of the model's tensor that it becomes (part of).
        part: for a tensor that the loader assembles from several (fused experts), which part; else ``None``.
        index: which of the stacked ones of that part, such as the expert's number.
        renamed: whether the name in the file is not the model's own.
    """

    target: str
    part: str | None = None
    index: int | None = None
    renamed: bool = False


class CheckpointLayout:
    """The names that a checkpoint of one model has. Pure once it is built."""

    def __init__(self, model: torch.nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.class_name = type(model).__name__
        reason = island_reason(model, ())
        state = model.state_dict()
        self.expected: dict[str, ExpectedTensor] = {
            name: ExpectedTensor(
                name,
                tuple(tensor.shape),
                short_dtype(tensor.dtype),
                tensor.is_floating_point(),
                reason(name, tensor) if tensor.is_floating_point() else None,
            )
            for name, tensor in state.items()
        }
        self._state = dict.fromkeys(state, True)
        self._prefix = str(getattr(model, "base_model_prefix", "") or "")
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.parts: dict[str, tuple[str, ...]] = {
            pattern: tuple(converter.source_patterns)
            for converter in self._converters
            for pattern in converter.source_patterns
        }
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self._by_kind: dict[tuple[str, str], Source | None] = {}
        self._lists = [re.compile(p.replace("*", ".*")) for _, patterns in class_lists(model) for p in patterns]
        # Names that share a tensor: any one of them is enough.
        self.tied: dict[str, frozenset[str]] = {}
        by_id: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(param), []).append(name)
        for names in by_id.values():
            if len(names) > 1:
                self.tied |= dict.fromkeys(names, frozenset(names))

    def source_of(self, name: str) -> Source | None:
        """What ``name`` becomes in the model, or ``None`` if nothing.

        The renaming takes 0.1 ms, and a full-size checkpoint has 67 000 names, nearly all of them experts' tensors and
        their scales, which differ in the expert's number only; each such kind is renamed once per layer.
        """
        match = _LAST_NUMBER.match(name)
        if match is None or not _NUMBER.search(match[1]):
            return self._renamed(name)  # no number, or none but the layer's
        kind = (match[1], match[3])
        if kind not in self._by_kind:
            self._by_kind[kind] = self._renamed(name)
        source = self._by_kind[kind]
        if source is None or source.part is not None:
            return None if source is None else replace(source, index=int(match[2]))
        return self._renamed(name)

    def _renamed(self, name: str) -> Source | None:
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if renamed not in self._state and name in self._state:
            renamed, pattern = name, None  # the loader's own second look: the name is the model's already
        if renamed not in self._state:
            renamed, pattern = rename_source_key(name, [], [], self._prefix, self._state)
        if renamed not in self._state:
            return None
        if pattern is None:
            return Source(renamed, renamed=renamed != name)
        numbers = [part for part in name.split(".") if part.isdigit()]
        return Source(renamed, pattern, int(numbers[-1]) if numbers else None, renamed=True)

    def ignored_by_loader(self, name: str) -> bool:
        """Whether the model's class says that a file may hold ``name`` although the model does not (``mtp.*``)."""
        return any(pattern.search(name) for pattern in self._ignored)

    def listed_as_fp32(self, name: str) -> bool:
        """Whether the class list matches ``name`` after the release's words are translated, for ignored tensors."""
        from transformers.core_model_loading import apply_renamings

        renamed = apply_renamings(name, self._renamings)
        return any(pattern.search(renamed) for pattern in self._lists)


def layout_of_folder(folder: Path) -> CheckpointLayout:
    """The layout for the model that ``folder/config.json`` describes.

    Raises:
        ContractError: as ``model_of_folder``.
    """
    return CheckpointLayout(model_of_folder(folder))


def model_of_folder(folder: Path) -> torch.nn.Module:
    """The model that ``folder/config.json`` describes, in bf16 with its class's fp32 islands, on the meta device.

    Raises:
        ContractError: Transformers is missing, does not know the model, or cannot build it.
    """
    try:
        import transformers
    except ImportError as error:
        raise ContractError(
            "auditing a checkpoint needs Transformers, whose model says what must be fp32.\n"
            "expected: transformers >= 5.24\ngot: none installed\nwhat to do: pip install 'dsv4-fsdp[train]'."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        # The scales of a quantised checkpoint are judged apart; the model is built as it will be trained.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        names = config.architectures or []
        cls = next((c for n in names if (c := getattr(transformers, n, None)) is not None), None)
        with torch.device("meta"):
            if cls is not None and hasattr(cls, "_from_config"):
                model = cls._from_config(config, dtype=torch.bfloat16)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(
            "the checkpoint's model cannot be built, so nobody says which of its tensors must be fp32.\n"
            "expected: a config.json of a model that the installed Transformers knows\n"
            f"got: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}\nwhere: {folder}\n"
            "what to do: add the model's config.json, or update Transformers."
        ) from error
    assert isinstance(model, torch.nn.Module)
    return model


def missing_parts(
    expected: Iterable[ExpectedTensor],
    found: Mapping[str, list[tuple[str, Source]]],
    layout: CheckpointLayout,
) -> Iterable[tuple[str, str]]:
    """``(model name, what is missing)`` of each expected tensor that is not, or not wholly, in the checkpoint."""
    for tensor in expected:
        sources = found.get(tensor.name, [])
        if not sources:
            if not any(found.get(other) for other in layout.tied.get(tensor.name, ())):
                yield tensor.name, "nothing"
            continue
        by_part: dict[str, dict[int, str]] = {}
        for name, source in sources:
            if source.part is not None and source.index is not None:
                by_part.setdefault(source.part, {})[source.index] = name
        if not by_part:
            continue
        wanted = tensor.shape[0]
        for part in layout.parts[next(iter(by_part))]:
            if (have := by_part.get(part)) is None:
                yield tensor.name, f"no tensor like {part.replace(chr(92), '')}"
            elif gone := sorted(set(range(wanted)) - have.keys()):
                index, sibling = next(iter(have.items()))
                example = f".{gone[0]}.".join(sibling.rsplit(f".{index}.", 1))
                more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
                yield tensor.name, f"{len(have)} of {wanted}; {example}{more} is not there"
