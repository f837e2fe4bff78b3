"""The checkpoint that training started from: what its tensors are worth to an export.

A tensor that training did not touch is written as it was: same bits, same dtype, and where it was quantised the same
FP8 or FP4 bytes with their scales. So each exported tensor is compared with what the source holds, dequantised by
Transformers' own code one tensor at a time. Tensors that Transformers never loads (multi-token prediction) come from
here too.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from dsv4_fsdp.checkpoint_audit import scale_names
from dsv4_fsdp.checkpoint_layout import CheckpointLayout, Source
from dsv4_fsdp.errors import ExportError
from dsv4_fsdp.safetensors_headers import TensorHeader, read_header, read_tensor_bytes

from .trained_tensors import Spec, TrainedTensors

__all__ = ["SourceCheckpoint", "WithFrozen", "same_bits"]

_INDEX = "model.safetensors.index.json"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal: a zero's sign counts, and a nan equals itself."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    as_integer = _INTEGERS[first.element_size()]
    return torch.equal(first.contiguous().view(as_integer), second.contiguous().view(as_integer))


@dataclass(frozen=True)
class _Entry:
    path: Path
    header: TensorHeader


class SourceCheckpoint:
    """A safetensors checkpoint in either layout.

    Attributes:
        folder: where it is.
        names_of: the model's name -> the names in the files that it is made of, in the order of the loader.
        not_loaded: names that belong to no tensor of the model (multi-token prediction, with its scales).
        config: its ``config.json``.
    """

    def __init__(self, folder: Path, layout: CheckpointLayout) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.names_of: dict[str, list[str]] = {}
        self.not_loaded: list[str] = []
        self._meaning: dict[str, Source] = {}
        self._entries: dict[str, _Entry] = {}
        self._opened: dict[Path, Any] = {}
        for path in _files(folder):
            header = read_header(path)
            if header.problem is not None:
                kind, expected, found = header.problem
                raise ExportError(
                    f"the source checkpoint has a damaged file ({kind}).\nexpected: {expected}\ngot: {found}\n"
                    f"where: {path}\nwhat to do: fetch the file again."
                )
            self._entries |= {name: _Entry(path, tensor) for name, tensor in header.tensors.items()}
        for name in self._entries:
            if (meaning := layout.source_of(name)) is not None:
                self._meaning[name] = meaning
                self.names_of.setdefault(meaning.target, []).append(name)
            elif layout.ignored_by_loader(name):
                self.not_loaded.append(name)
        order = {part: place for parts in layout.parts.values() for place, part in enumerate(parts)}
        for names in self.names_of.values():
            # Numbers as numbers: expert 10 comes after expert 9.
            names.sort(key=lambda name: (order.get(self._meaning[name].part or "", 0), self._meaning[name].index or 0))

    @property
    def has_release_names(self) -> bool:
        """Whether its names are DeepSeek's rather than the model's."""
        renamed = sum(meaning.renamed for meaning in self._meaning.values())
        return 2 * renamed > len(self._meaning)

    def meaning_of(self, name: str) -> Source:
        """What the name in the file means."""
        return self._meaning[name]

    def dtype_of(self, name: str) -> str:
        """The dtype of ``name`` in its file, as safetensors names it."""
        return self._entries[name].header.dtype

    def num_bytes_of(self, name: str) -> int:
        """The size of ``name`` in its file, with its scale."""
        entries = [self._entries[name], *(self._entries[s] for s in [self.scale_of(name)] if s)]
        return sum(entry.header.end - entry.header.start for entry in entries)

    def scale_of(self, name: str) -> str | None:
        """The name of the block scales of ``name``; ``None`` if it is not quantised."""
        return next((scale for scale in scale_names(name) if scale in self._entries), None)

    def is_quantised(self, target: str) -> bool:
        """Whether the model's tensor ``target`` is stored quantised."""
        return any(self.scale_of(name) is not None for name in self.names_of.get(target, ()))

    def raw(self, name: str) -> tuple[str, tuple[int, ...], bytes]:
        """Dtype, shape and bytes of ``name`` as they are in the file."""
        entry = self._entries[name]
        return entry.header.dtype, entry.header.shape, b"".join(read_tensor_bytes(entry.path, entry.header))

    def value(self, name: str) -> torch.Tensor:
        """The tensor ``name``: as stored, or dequantised to fp32."""
        if (scale := self.scale_of(name)) is None:
            return self._stored(name)
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        scales = self._stored(scale)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        if not bool((scales := scales.float()).isfinite().all()):
            raise ExportError(
                "a block scale of the source checkpoint is not a number.\nexpected: powers of two (E8M0 bytes 0 to 254)"
                f"\ngot: nan or infinity\nwhere: {scale} in {self._entries[scale].path}\n"
                "what to do: fetch the file again; what was trained from it is not what was published."
            )
        pair = {"weight": [self._stored(name)], "weight_scale_inv": [scales]}
        value = Fp8Dequantize(None).convert(pair)["weight"]
        assert isinstance(value, torch.Tensor)
        return value

    def tensor(self, target: str, model: nn.Module) -> torch.Tensor:
        """The model's tensor ``target``, put together by Transformers' own conversion; quantised ones in fp32."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        names = self.names_of[target]
        if (part := self._meaning[names[0]].part) is None:
            return self.value(names[0])
        mapping: Any = get_model_conversion_mapping(model)
        converter = next(c for c in mapping if isinstance(c, WeightConverter) and part in c.source_patterns)
        converter = deepcopy(converter)
        for name in names:
            converter.add_tensor(target, name, self._meaning[name].part, lambda name=name: self.value(name))
        value = converter.convert(target, model=model, config=model.config)[target]
        assert isinstance(value, torch.Tensor)
        return value

    def _stored(self, name: str) -> torch.Tensor:
        path = self._entries[name].path
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        tensor = self._opened[path].get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor


class WithFrozen:
    """What a training checkpoint holds, and the frozen weights that it left to the source, as training read them.

    Args:
        model: on the meta device, in the dtypes of the run.
    """

    def __init__(self, trained: TrainedTensors, source: SourceCheckpoint, model: nn.Module, layout: CheckpointLayout):
        self._trained = trained
        self._source = source
        self._model = model
        self.specs: dict[str, Spec] = {}  # in the model's order, which the writer goes by
        for name, tensor in model.state_dict().items():
            if name in trained.specs:
                self.specs[name] = trained.specs[name]
            elif name in source.names_of and not layout.tied.get(name, frozenset()) & trained.specs.keys():
                self.specs[name] = tensor.dtype, tuple(tensor.shape)
        self.specs |= trained.specs  # adapters too

    def read(self, name: str) -> torch.Tensor:
        if name in self._trained.specs:
            return self._trained.read(name)
        return self._source.tensor(name, self._model).to(self.specs[name][0])


def _files(folder: Path) -> list[Path]:
    if (index := folder / _INDEX).is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if gone := [name for name in names if not (folder / name).is_file()]:
            raise ExportError(
                f"the source checkpoint is not whole.\nexpected: {len(names)} files, as its index says\n"
                f"got: {len(names) - len(gone)}; not there: {gone[0]}\nwhere: {folder}\nwhat to do: fetch it again."
            )
        return [folder / name for name in names]
    paths = sorted(folder.glob("*.safetensors"))
    if (single := folder / "model.safetensors") in paths:
        paths = [single]
    if not paths:
        raise ExportError(
            f"there is no source checkpoint.\nexpected: *.safetensors files\ngot: none\nwhere: {folder}\n"
            "what to do: name the folder that training started from."
        )
    return paths
