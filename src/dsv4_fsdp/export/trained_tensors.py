"""Where an export's tensors come from: a live sharded model, or a training checkpoint on disk, one tensor at a time.

Every kind has the same two members: what there is (``specs``, no data), and ``read``, which gives one full tensor on
the CPU. Names are canonical: those of ``model.state_dict()`` without the words of wrappers; the parameters of peft's
adapters keep peft's own names.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from dsv4_fsdp.errors import ExportError
from dsv4_fsdp.names import canonical_name

__all__ = [
    "CheckpointTensors",
    "GivenTensors",
    "HeadersOnly",
    "LiveTensors",
    "Only",
    "Spec",
    "TrainedTensors",
]

Spec = tuple[torch.dtype, tuple[int, ...]]

_MODEL_KEY = "model."


class TrainedTensors(Protocol):
    """Tensors by canonical name; of a tied parameter's names only the first is there."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Name -> (dtype, full shape), in the model's order."""

    def read(self, name: str) -> torch.Tensor:
        """The full tensor on the CPU."""


class GivenTensors:
    """Tensors that are in memory already, named as in ``model.state_dict()``."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = {canonical_name(name): tensor for name, tensor in state.items()}
        self.specs: dict[str, Spec] = {name: (t.dtype, tuple(t.shape)) for name, t in self._state.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._state[name].detach().cpu()


class LiveTensors:
    """The tensors of a model that is sharded in any way: FSDP, HSDP, expert parallelism beside it.

    All ranks call ``read`` for the same names in the same order (that of ``specs``). A rank's device needs room for one
    full tensor besides its shards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._state: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self._state[canonical_name(name)] = tensor
        # The shape of a DTensor is that of the whole, over all axes of its mesh.
        self.specs: dict[str, Spec] = {name: (t.dtype, tuple(t.shape)) for name, t in self._state.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor = self._state[name].detach()
        if isinstance(tensor, DTensor):
            # Offloaded shards are on the CPU, their mesh's backend perhaps not.
            on_mesh = tensor.to(tensor.device_mesh.device_type)
            assert isinstance(on_mesh, DTensor)
            tensor = on_mesh.full_tensor()
        return tensor.cpu()


class Only:
    """Some of the tensors of others."""

    def __init__(self, others: TrainedTensors, names: Callable[[str], bool]) -> None:
        self.specs = {name: spec for name, spec in others.specs.items() if names(name)}
        self.read = others.read


class HeadersOnly:
    """The names, dtypes and shapes of others, and meta tensors in place of data."""

    def __init__(self, others: TrainedTensors) -> None:
        self.specs = dict(others.specs)

    def read(self, name: str) -> torch.Tensor:
        dtype, shape = self.specs[name]
        return torch.empty(shape, dtype=dtype, device="meta")


class _Reader(FileSystemReader):
    """Reads the metadata once: it describes every shard of every rank, and each tensor's load would read it again."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


class CheckpointTensors:
    """The model's tensors in the ``state/`` folder of a training checkpoint (``torch.distributed.checkpoint``).

    Keys are ``model.<name>``; the optimizer's and others are passed over. Needs no process group.

    Raises:
        ExportError: there is no readable checkpoint, a file is missing or short, or the shards of a tensor do not make
            up the whole.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = _Reader(folder)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
            raise ExportError(
                "the training checkpoint cannot be read.\nexpected: .metadata, as torch.distributed.checkpoint "
                f"writes it\ngot: {type(error).__name__}\nwhere: {folder}\nwhat to do: export an earlier checkpoint."
            ) from error
        self._refuse_short_files(metadata)
        self._keys: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if key.startswith(_MODEL_KEY) and isinstance(entry, TensorStorageMetadata):
                name = canonical_name(key.removeprefix(_MODEL_KEY))
                self._refuse_missing_shards(key, entry)
                self._keys[name] = key
                self.specs[name] = (entry.properties.dtype, tuple(entry.size))
        if not self.specs:
            raise ExportError(
                f"the training checkpoint holds no model.\nexpected: keys {_MODEL_KEY}<name>\n"
                f"got: {', '.join(list(metadata.state_dict_metadata)[:3]) or 'none'}\nwhere: {folder}\n"
                "what to do: name a checkpoint that the trainer wrote."
            )

    def read(self, name: str) -> torch.Tensor:
        dtype, shape = self.specs[name]
        target = {self._keys[name]: torch.empty(shape, dtype=dtype)}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(target, storage_reader=self._reader, no_dist=True)
        except (OSError, EOFError, RuntimeError, ValueError, CheckpointException) as error:
            raise ExportError(
                f"a tensor of the training checkpoint cannot be read.\nexpected: {dtype} {list(shape)}\n"
                f"got: {type(error).__name__}\nwhere: {name} in {self._folder}\n"
                "what to do: export an earlier checkpoint."
            ) from error
        return target[self._keys[name]]

    def _refuse_short_files(self, metadata: Metadata) -> None:
        ends: dict[str, int] = {}
        for place in (metadata.storage_data or {}).values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            path = self._folder / name
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < end:
                raise ExportError(
                    f"the training checkpoint is cut short.\nexpected: {end:,} bytes\n"
                    f"got: {'no such file' if size is None else f'{size:,} bytes'}\nwhere: {path}\n"
                    "what to do: export an earlier checkpoint."
                )

    def _refuse_missing_shards(self, key: str, entry: TensorStorageMetadata) -> None:
        saved = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if saved < entry.size.numel():
            raise ExportError(
                f"the training checkpoint holds a part of a tensor only.\nexpected: {entry.size.numel():,} elements\n"
                f"got: {saved:,}\nwhere: {key} in {self._folder}\n"
                "what to do: export an earlier checkpoint; some ranks' shards were not saved."
            )
