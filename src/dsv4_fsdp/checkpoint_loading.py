"""Load a checkpoint into a model that is sharded already: each rank reads what it keeps, and nothing else.

:func:`load_checkpoint` fills the parameters and buffers of a Transformers model in place, from safetensors files in its
own names or in DeepSeek's (the release: FP8 blocks and packed FP4 experts with their scales). Names come from
Transformers' conversion (:mod:`dsv4_fsdp.checkpoint_layout`), and quantised numbers are read by Transformers'
dequantiser. What is ours is which rows are read, and that everything is accounted for:

- A rank's part of a parameter is a range of rows. Of a quantised matrix it reads the blocks around that range, with
  their scales, and keeps its rows of the result. Transformers 5.24 cuts a weight and its scales apart from each other,
  which pairs rows with other rows' scales, or with none, wherever a shard is no multiple of a block: there a release
  checkpoint does not load sharded at all (docs/log.md).
- Fused experts are read expert by expert, so a rank opens only the experts that it holds.
- Memory beside the shards themselves is one expert, or one rank's part of one matrix, in fp32.
- Before anything is read, :func:`~dsv4_fsdp.checkpoint_audit.audit_checkpoint` goes over all headers: a tensor that is
  missing, unexpected or of the wrong shape, a scale without its tensor, a file cut short, an island stored in bf16.

A parameter that the checkpoint stores in fp32 although the model's class list does not ask for it is an island too
(:func:`fp32_islands`): the contract is the union of both.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from .checkpoint_audit import audit_checkpoint, checkpoint_files, scale_names
from .checkpoint_layout import CheckpointLayout, ExpectedTensor, Source, layout_of_folder
from .errors import CheckpointError, ContractError, listing
from .names import canonical_name, is_adapter_name, joined_name
from .safetensors_headers import FileHeader, TensorHeader, read_header
from .torch_private import local_chunk

__all__ = ["CheckpointReader", "LoadReport", "check_checkpoint", "fp32_islands", "load_checkpoint"]

_QUANTISED = frozenset({"F8_E4M3", "F8_E5M2", "F4", "I8", "U8"})
_PACKED = frozenset({"I8", "U8"})


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_checkpoint` did on this rank.

    Attributes:
        num_tensors: parameters and buffers of the model that were filled.
        bytes_read: from the files, headers not counted.
        not_loaded: names in the files that the model has no place for and may have none (``mtp.*``).
    """

    num_tensors: int
    bytes_read: int
    not_loaded: tuple[str, ...]


def check_checkpoint(
    folder: str | Path, *, allow_downcast_islands: bool = False, layout: CheckpointLayout | None = None
) -> None:
    """Raise ``CheckpointError`` unless the headers in ``folder`` are those of the model in its ``config.json``.

    Reads no weight; one rank may do it for all.

    Args:
        allow_downcast_islands: accept islands that the files hold in bf16. The bits that were cut off stay lost.
        layout: of the same folder, if it is at hand (:attr:`CheckpointReader.layout`).
    """
    try:
        report = audit_checkpoint(folder, layout=layout)
    except ContractError as error:
        raise CheckpointError(str(error)) from error
    found = [v for v in report.violations if not (allow_downcast_islands and v.kind == "island-downcast")]
    if found:
        lines = [f"{v.name}: expected {v.expected}, got {v.found} ({v.kind}); {v.cause}" for v in found]
        hint = (
            ", or accept islands whose low bits are lost (model.allow_downcast_islands)"
            if any(v.kind == "island-downcast" for v in found)
            else ""
        )
        raise CheckpointError(
            f"the checkpoint is not whole, or not this model's: {len(found)} problem{'s' * (len(found) != 1)}.\n"
            f"expected: what config.json describes\ngot:\n{listing(lines)}\nwhere: {folder}\n"
            f"what to do: fetch it again, or see `dsv4-fsdp audit {folder}`{hint}."
        )


class CheckpointReader:
    """The tensors of a model as a checkpoint's files hold them, by rows. A context manager: files stay open inside.

    Args:
        folder: the files, with ``config.json``.
        layout: of the same folder, if it is at hand.

    Attributes:
        layout: names, shapes and dtypes of the model.
        sources: name of a model's tensor -> the names in the files that it is made of.
        not_loaded: names in the files that the model has no place for.
        bytes_read: so far.
    """

    def __init__(self, folder: str | Path, *, layout: CheckpointLayout | None = None) -> None:
        self.folder = Path(folder)
        try:
            _, files, _, _ = checkpoint_files(self.folder)
            self.layout = layout_of_folder(self.folder) if layout is None else layout
        except ContractError as error:
            raise CheckpointError(str(error)) from error
        self._headers: dict[str, tuple[FileHeader, TensorHeader]] = {}
        for file in files:
            header = read_header(file)
            self._headers |= {name: (header, tensor) for name, tensor in header.tensors.items()}
        self.sources: dict[str, list[tuple[str, Source]]] = {}
        strangers = []
        for name in self._headers:
            if (source := self.layout.source_of(name)) is not None:
                self.sources.setdefault(source.target, []).append((name, source))
            else:
                strangers.append(name)
        scales = {scale for name in self._headers for scale in scale_names(name)}
        self.not_loaded = tuple(name for name in strangers if name not in scales)
        self._block_size = _block_size_of(self.folder)
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._open.values():
            handle.__exit__(kind, error, trace)
        self._open.clear()

    def dtype_of(self, target: str) -> str | None:
        """The dtype in which the files hold the model's tensor ``target``; ``None`` if they do not."""
        found = self.sources.get(self._stored_name(target))
        return None if not found else self._headers[found[0][0]][1].dtype

    def is_quantised(self, name: str) -> bool:
        """Whether the tensor ``name`` of the files is stored as numbers that need a scale."""
        return self._headers[name][1].dtype in _QUANTISED and self._scale_of(name) is not None

    def parts(self, target: str, rows: range, columns: range) -> Iterator[tuple[int, int, torch.Tensor]]:
        """A part of the model's tensor ``target``, in pieces: ``(row, column, piece)``, where each begins.

        A piece is in the dtype of the file, or in fp32 where it is quantised. Of fused experts it is of one of the
        matrices of one expert, without dim 0: its own rows are what ``columns`` are of the whole.

        Args:
            rows, columns: along dim 0 and dim 1; of a tensor that has not both, what there is not is not looked at.
        """
        expected = self.layout.expected[target]
        found = self.sources[self._stored_name(target)]
        if found[0][1].part is None:
            if rows or not expected.shape:
                yield rows.start, columns.start, self._plain(found[0][0], expected.shape, rows, columns)
            return
        by_place = {(source.part, source.index): name for name, source in found}
        for row in rows:
            offset = 0
            for part in self.layout.parts[str(found[0][1].part)]:
                name = by_place[part, row]
                num_rows = self._headers[name][1].shape[0]
                start, stop = max(columns.start, offset), min(columns.stop, offset + num_rows)
                if start < stop:
                    yield row, start, self._rows(name, range(start - offset, stop - offset))
                offset += num_rows

    def _plain(self, name: str, shape: tuple[int, ...], rows: range, columns: range) -> torch.Tensor:
        """Of a tensor that is one in the files too."""
        if len(shape) < 2 or len(columns) == shape[1]:
            return self._rows(name, rows if shape else None)
        if self.is_quantised(name):
            return self._rows(name, rows)[:, columns.start : columns.stop]
        return self._read(name, rows, columns)

    def _stored_name(self, target: str) -> str:
        """``target``, or the name under which the files hold the tensor that it is tied to."""
        if target in self.sources:
            return target
        return next((name for name in self.layout.tied.get(target, ()) if name in self.sources), target)

    def _rows(self, name: str, rows: range | None) -> torch.Tensor:
        """``rows`` of the tensor ``name`` of the files (``None``: all of it), dequantised to fp32 if need be."""
        scale_name = self._scale_of(name)
        if scale_name is None or self._headers[name][1].dtype not in _QUANTISED:
            return self._read(name, rows)
        (num_rows, num_cols), (num_scale_rows, num_scale_cols) = self._headers[name][1].shape, self._shape(scale_name)
        if self._headers[name][1].dtype in _PACKED:
            num_cols *= 2
        block_rows = _block(num_rows, num_scale_rows, self._block_size[0])
        block_cols = _block(num_cols, num_scale_cols, self._block_size[1])
        wanted = range(num_rows) if rows is None else rows
        scale_rows = range(wanted.start // block_rows, -(-wanted.stop // block_rows))
        whole = range(scale_rows.start * block_rows, min(scale_rows.stop * block_rows, num_rows))
        weight = self._read(name, whole)
        scale = (
            self._read(scale_name, scale_rows) if self._headers[scale_name][1].shape else self._read(scale_name, None)
        )
        # The last block of a dim may be cut; Transformers' dequantiser wants whole ones.
        missing_rows = len(scale_rows) * block_rows - len(whole)
        missing_cols = num_scale_cols * block_cols - num_cols
        if missing_rows or missing_cols:
            cut = missing_cols // 2 if self._headers[name][1].dtype in _PACKED else missing_cols
            weight = F.pad(weight.view(torch.uint8), (0, cut, 0, missing_rows)).view(weight.dtype)
        values = _dequantise(weight, scale)
        first = wanted.start - whole.start
        return values[first : first + len(wanted), :num_cols]

    def _scale_of(self, name: str) -> str | None:
        return next((scale for scale in scale_names(name) if scale in self._headers), None)

    def _shape(self, scale_name: str) -> tuple[int, int]:
        """Of a grid of scales; a single scale is a grid of one."""
        shape = self._headers[scale_name][1].shape
        return (shape[0], shape[1]) if len(shape) == 2 else (1, 1)

    def _read(self, name: str, rows: range | None, columns: range | None = None) -> torch.Tensor:
        header, _ = self._headers[name]
        handle = self._open.get(header.path)
        if handle is None:
            from safetensors import safe_open

            handle = self._open[header.path] = safe_open(header.path, framework="pt").__enter__()
        if rows is None:
            tensor = handle.get_tensor(name)
        elif columns is None:
            tensor = handle.get_slice(name)[rows.start : rows.stop]
        else:
            tensor = handle.get_slice(name)[rows.start : rows.stop, columns.start : columns.stop]
        assert isinstance(tensor, torch.Tensor)
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor


def fp32_islands(reader: CheckpointReader) -> list[str]:
    """Names, in the model's words, of parameters that the checkpoint stores in fp32 and the model's lists do not name.

    A checkpoint that is fp32 throughout (master weights) says nothing by it: then there are none.
    """
    fp32, others = [], 0
    numel_fp32 = numel_others = 0
    for target, expected in reader.layout.expected.items():
        if not expected.is_floating or expected.island_reason is not None:
            continue
        numel = _numel(expected)
        if reader.dtype_of(target) == "F32":
            fp32.append(target)
            numel_fp32 += numel
        else:
            others += 1
            numel_others += numel
    return fp32 if numel_fp32 < numel_others else []


@torch.no_grad()
def load_checkpoint(model: nn.Module, reader: CheckpointReader, *, only: Collection[str] | None = None) -> LoadReport:
    """Fill every parameter and persistent buffer of ``model``, except adapters', from the files of ``reader``.

    Args:
        model: sharded or not, with memory allocated (:func:`~dsv4_fsdp.materialize.materialize`). Values are converted
            to each tensor's own dtype, integers exactly.
        only: names of those to fill, if not all.

    Raises:
        CheckpointError: the files lack a tensor of the model, hold one of another shape, or an integer does not fit.
    """
    before = reader.bytes_read
    missing = []
    count = 0
    for name, tensor in _tensors(model):
        if is_adapter_name(name) or (only is not None and name not in only):
            continue
        expected = reader.layout.expected.get(name)
        if expected is None or reader.dtype_of(name) is None:
            missing.append(name)
            continue
        _fill(tensor, name, expected, reader)
        count += 1
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensor(s) of the model are not in the checkpoint.\nexpected: all of them\n"
            f"got: nothing for\n{listing(missing)}\nwhere: {reader.folder}\n"
            "what to do: check that config.json and the files belong together (`dsv4-fsdp audit`)."
        )
    return LoadReport(count, reader.bytes_read - before, reader.not_loaded)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for raw_name, param in model.named_parameters():
        yield canonical_name(raw_name), param
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield joined_name(module_name, name), buffer


def _fill(tensor: torch.Tensor, name: str, expected: ExpectedTensor, reader: CheckpointReader) -> None:
    if tuple(tensor.shape) != expected.shape:
        raise CheckpointError(
            f"a tensor of the model has another shape than its config says.\nexpected: {list(expected.shape)}\n"
            f"got: {list(tensor.shape)}\nwhere: {name}\nwhat to do: load the config of the same folder."
        )
    if isinstance(tensor, DTensor):
        offsets, sizes = local_chunk(tensor)
        local = tensor.to_local()
    else:
        offsets, sizes = (0,) * tensor.ndim, tuple(tensor.shape)
        local = tensor
    if not local.numel():
        return
    rows, columns, *_ = [
        *(range(start, start + size) for start, size in zip(offsets, sizes, strict=True)),
        range(1),
        range(1),
    ]
    # Of the dims after the second: all, unless the caller cuts one.
    inner = tuple(slice(start, start + size) for start, size in zip(offsets[2:], sizes[2:], strict=True))
    for row, column, piece in reader.parts(name, rows, columns):
        if piece.ndim == len(expected.shape):
            _copy(local, piece[(slice(None), slice(None), *inner)] if inner else piece, name)
        else:
            into = local[row - rows.start].narrow(0, column - columns.start, piece.shape[0])
            _copy(into, piece[(slice(None), *inner)], name)


def _copy(target: torch.Tensor, values: torch.Tensor, name: str) -> None:
    target.copy_(values)
    if not target.is_floating_point() and not torch.equal(target.to(values.device, values.dtype), values):
        raise CheckpointError(
            f"an integer of the checkpoint does not fit into the model's tensor.\nexpected: {target.dtype}\n"
            f"got: {values.dtype} with larger values\nwhere: {name}\nwhat to do: check the file with `dsv4-fsdp audit`."
        )


def _numel(expected: ExpectedTensor) -> int:
    numel = 1
    for dim in expected.shape:
        numel *= dim
    return numel


def _block(size: int, num_blocks: int, usual: int) -> int:
    """Rows, or columns, that share a scale: the config's number, whose last block may be cut, or what divides evenly.

    Packed FP4 has blocks of its own (one row, 32 columns) that the config does not name.
    """
    return usual if -(-size // usual) == num_blocks else -(-size // num_blocks)


def _block_size_of(folder: Path) -> tuple[int, int]:
    """Rows and columns of an FP8 block, as ``config.json`` says; 128 each in everything that DeepSeek has published."""
    quantised = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    rows, cols = quantised.get("weight_block_size") or (128, 128)
    return int(rows), int(cols)


def _dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 values, by Transformers' own rule: FP8 or packed FP4 times a grid of fp32 or E8M0 scales."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8) and bool((scale.view(torch.uint8) == 255).any()):
        raise CheckpointError(
            "a block scale is not a number.\nexpected: E8M0 bytes from 0 to 254\ngot: 255\n"
            "what to do: fetch the checkpoint again."
        )
    values = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.float32)
    assert isinstance(values, torch.Tensor)
    return values
