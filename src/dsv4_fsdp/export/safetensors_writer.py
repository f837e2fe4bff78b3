"""Writing a checkpoint file by file while its tensors arrive one by one, whatever their number and size.

The library's ``save_file`` takes all tensors of a file at once, as torch tensors. Here a file is closed when it is
full, so that no more than one file's data is held; bytes can be passed through without becoming a torch tensor (FP4 has
no dtype in every torch); and a tensor on the meta device becomes a hole: a file of the right length that takes no disk.

Source: the format's description in the safetensors package's README. Like the package, a file holds tensors of wide
dtypes first: each then starts at a multiple of its element size, without which loaders cannot map it into memory.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4_fsdp.errors import ExportError
from dsv4_fsdp.safetensors_headers import BITS_PER_ELEMENT

__all__ = ["DTYPE_NAMES", "SafetensorsWriter"]

DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""safetensors' names of torch's dtypes."""

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Held:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: torch.Tensor | bytes | None  # as uint8; None is a hole

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BITS_PER_ELEMENT[self.dtype] // 8


class SafetensorsWriter:
    """Writes ``model.safetensors``, or numbered files and their index, into a folder.

    Attributes:
        written: name -> (dtype, shape) of everything added so far.
        total_bytes: of their data.
    """

    def __init__(self, folder: Path, *, max_shard_bytes: int) -> None:
        self.written: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.total_bytes = 0
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._held: list[_Held] = []
        self._held_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of the CPU, or of the meta device (a hole)."""
        data = None
        if tensor.device.type != "meta":
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if data.untyped_storage().nbytes() > data.nbytes:
                data = data.clone()  # part of a larger tensor, which would be kept alive
        self._add(_Held(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data))

    def add_bytes(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        """Add bytes as they are in another file."""
        self._add(_Held(name, dtype, shape, data))

    def _add(self, item: _Held) -> None:
        if item.name in self.written:
            raise ExportError(f"two tensors of the export have one name.\ngot: {item.name} twice")
        if self._held and self._held_bytes + item.num_bytes > self._max_shard_bytes:
            self._write_file()
        self.written[item.name] = (item.dtype, item.shape)
        self._held.append(item)
        self._held_bytes += item.num_bytes
        self.total_bytes += item.num_bytes

    def finish(self) -> None:
        """Write what is left, give the files their names and write the index if there are several."""
        if self._held or not self._files:
            self._write_file()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            final = path.with_name(f"model-{number:05}-of-{len(self._files):05}.safetensors")
            path.rename(final)
            weight_map |= dict.fromkeys(names, final.name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write_file(self) -> None:
        items = sorted(self._held, key=lambda item: (-BITS_PER_ELEMENT[item.dtype], item.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for item in items:
            offsets = [end, end := end + item.num_bytes]
            header[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = self._folder / f"part-{len(self._files) + 1:05}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for item in items:
                if item.data is None:
                    file.seek(item.num_bytes, os.SEEK_CUR)
                else:
                    file.write(item.data.numpy().data if isinstance(item.data, torch.Tensor) else item.data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._files.append((path, [item.name for item in items]))
        self._held = []
        self._held_bytes = 0
