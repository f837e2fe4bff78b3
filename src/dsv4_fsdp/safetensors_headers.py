"""The headers of safetensors files: every tensor's dtype, shape and place, without reading a weight.

A safetensors file is eight bytes (the header's length, little endian), the header (JSON: name -> dtype, shape,
data_offsets) and the data. What is wrong with a file is a value here, not an exception, so that one broken file of a
hundred does not hide the others.

Source: the format's description in the safetensors package's README; dtype names as safetensors 0.8 writes them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["BITS_PER_ELEMENT", "FileHeader", "TensorHeader", "read_header", "read_tensor_bytes"]

BITS_PER_ELEMENT = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

# The format's own limit; a longer "length" is no header but noise.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorHeader:
    """One tensor: dtype as safetensors names it, shape, and where its bytes are in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Elements, as the shape says (a packed FP4 pair of an ``I8`` tensor counts as one)."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileHeader:
    """One file.

    Attributes:
        path: the file.
        size_bytes: its size on disk.
        bytes_read: how much of it was read.
        problem: ``(kind, expected, found)`` if it is damaged; what its header says may still be in ``tensors``.
        tensors: name -> header, in file order.
    """

    path: Path
    size_bytes: int
    bytes_read: int
    problem: tuple[str, str, str] | None
    tensors: dict[str, TensorHeader] = field(default_factory=dict)


def read_header(path: Path) -> FileHeader:
    """Read the first bytes of ``path`` and nothing else. Never raises for what is in the file."""
    size = path.stat().st_size
    # Unbuffered: a buffered file would read on into the weights.
    with path.open("rb", buffering=0) as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if length is None or 8 + length > size:
            expected = "at least 8 bytes" if length is None else f"a header of {length:,} bytes"
            return FileHeader(path, size, len(prefix), ("truncated-file", expected, f"{size:,} bytes in all"))
        if length > _MAX_HEADER_BYTES:
            problem = ("damaged-file", "a safetensors header", f"a header length of {length:,} bytes")
            return FileHeader(path, size, 8, problem)
        header = _read_exactly(handle, length)
    bytes_read = 8 + length
    try:
        entries = json.loads(header)
        tensors = {
            name: TensorHeader(
                str(entry["dtype"]),
                tuple(int(dim) for dim in entry["shape"]),
                8 + length + int(entry["data_offsets"][0]),
                8 + length + int(entry["data_offsets"][1]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        problem = ("damaged-file", "a JSON header of dtype, shape and data_offsets", "something else")
        return FileHeader(path, size, bytes_read, problem)
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].start))
    return FileHeader(path, size, bytes_read, _problem(tensors, 8 + length, size), tensors)


def _problem(tensors: dict[str, TensorHeader], data_start: int, size: int) -> tuple[str, str, str] | None:
    position = data_start
    for name, tensor in tensors.items():
        bits = BITS_PER_ELEMENT.get(tensor.dtype)
        wrong_size = bits is not None and (tensor.end - tensor.start) * 8 != tensor.numel * bits
        if wrong_size or tensor.start != position:
            expected = f"{name} to take the bytes that {tensor.dtype} {list(tensor.shape)} needs, after its neighbour"
            return "damaged-file", expected, f"bytes {tensor.start:,} to {tensor.end:,}"
        position = tensor.end
    if position > size:
        return "truncated-file", f"{position:,} bytes, as its header says", f"{size:,} bytes"
    if position < size:
        return "damaged-file", f"{position:,} bytes, as its header says", f"{size:,} bytes"
    return None


def read_tensor_bytes(path: Path, tensor: TensorHeader, *, chunk_bytes: int = 1 << 26) -> Iterator[bytes]:
    """The bytes of one tensor in chunks; a multiple of 8 long each, except the last."""
    with path.open("rb", buffering=0) as handle:
        handle.seek(tensor.start)
        left = tensor.end - tensor.start
        while left > 0:
            chunk = _read_exactly(handle, min(chunk_bytes, left))
            if not chunk:
                return  # the file is cut short, which its header check has said
            left -= len(chunk)
            yield chunk


def _read_exactly(handle: object, count: int) -> bytes:
    """Up to ``count`` bytes; fewer only at the end of the file (an unbuffered read may return fewer before)."""
    parts = []
    while count > 0 and (part := handle.read(count)):  # type: ignore[attr-defined]
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
