"""The audit of a checkpoint, by its safetensors headers alone: did somebody's framework silently break it?

No weight is read, so a folder of hundreds of gigabytes takes seconds. With ``bits`` the fp32 islands, integer tables
and block scales are read as well: an island whose values all fit into bf16 was downcast and upcast on its way, and the
header cannot tell.

**Layouts.** Transformers' names and the release's (DeepSeek's own), told apart tensor by tensor, see
:mod:`dsv4_fsdp.checkpoint_layout`. Quantised tensors are FP8 (``F8_E4M3``) or FP4, two to an ``I8`` byte, each with
block scales (``F8_E8M0``, or ``F32``) under ``<name>.scale``, ``<name>.weight_scale_inv`` or ``<name>_scale_inv``.

**Norms in the release's names** may be bf16: the released files store them so, and both loaders take them into fp32,
which loses nothing. For the same reason an fp32 norm with bf16 values proves nothing.

Not judged: the values of weights that are no islands, adapters, optimizer states.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .audit_report import AuditReport, AuditRow, Violation
from .checkpoint_layout import CheckpointLayout, ExpectedTensor, Source, layout_of_folder, missing_parts
from .errors import ContractError
from .safetensors_headers import FileHeader, TensorHeader, read_header, read_tensor_bytes

__all__ = ["audit_checkpoint", "checkpoint_files", "scale_names"]

_QUANTISED = frozenset({"F8_E4M3", "F8_E5M2", "F4", "I8", "U8"})
_PACKED = frozenset({"I8", "U8"})  # two FP4 values to a byte
_SCALE_DTYPES = frozenset({"F8_E8M0", "F32", "U8"})
_INTEGERS = frozenset({"I64", "I32", "I16", "U16", "U32", "U64", "I8", "U8"})
_WIDE = frozenset({"F32", "F64"})
_INDEX = "model.safetensors.index.json"

_DOWNCAST = (
    "saved by code that casts every tensor to one dtype (model.to(torch.bfloat16), a full state dict gathered in the "
    "compute dtype, a merge or convert script). Take this tensor from an earlier checkpoint: its bits are gone here"
)
_LOST_BITS = (
    "was downcast to bf16 and upcast again on the way (a conversion, or compute-dtype gathering before saving): fp32 "
    "in name only. Take it from an earlier checkpoint"
)
_CUT = "an interrupted download or a full disk: fetch or save the file again"
_INDEX_CAUSE = (
    "files of two saves in one folder, or a file renamed, re-sharded or edited without its index: save again into "
    "an empty folder"
)
_MISSING = (
    "lost on save (a rank or an expert shard that was not gathered, a tied pair saved once and untied since, a shard "
    "not copied); a loader would fill it with random values"
)


def audit_checkpoint(path: str | Path, *, bits: bool = False, layout: CheckpointLayout | None = None) -> AuditReport:
    """Audit a safetensors file, or a folder of them with or without an index.

    Args:
        path: the folder that holds ``config.json`` and the weights, or one of its files.
        bits: read islands, integer tables and scales, and judge their values too.
        layout: of the same folder, if it is at hand: making one builds the model on the meta device.

    Raises:
        ContractError: ``path`` is not there, holds no safetensors file, or its model is not known.
    """
    folder, paths, index, problems = checkpoint_files(Path(path))
    layout = layout_of_folder(folder) if layout is None else layout
    headers = [read_header(file) for file in paths]
    violations = list(problems)
    for header in headers:
        if header.problem is not None:
            kind, expected, found = header.problem
            cause = _CUT if kind == "truncated-file" else "not written by safetensors, or damaged since: save it again"
            violations.append(Violation(kind, header.path.name, expected, found, cause))
    if index is not None:
        violations += _against_index(headers, index)
    violations += _duplicates(headers)

    tensors = {name: _Found(file, tensor) for file in headers for name, tensor in file.tensors.items()}
    judge = _Judge(layout, tensors)
    # One shard by itself, or files that cannot be read, cannot say what the others hold.
    whole = folder == Path(path) and all(file.problem is None for file in headers) and not problems
    rows, found_violations, notes = judge.verdict(whole=whole)
    violations += found_violations
    violations += _against_config(folder, tensors)
    bytes_read = sum(file.bytes_read for file in headers)
    if bits:
        rows, bit_violations, bit_notes, extra = _read_bits(rows, judge)
        violations += bit_violations
        notes += bit_notes
        bytes_read += extra
    if not whole:
        notes.append("missing tensors were not looked for: this is one file of a checkpoint, or files are damaged")
    total = sum(file.size_bytes for file in headers)
    how = "headers, fp32 islands, integer tables and scales" if bits else "headers only"
    hint = "" if bits else "; --bits reads the islands too"
    return AuditReport(
        subject=f"checkpoint {path}",
        summary=f"{layout.class_name}, {_layout_name(judge)}: {len(tensors)} tensors in {len(headers)} "
        f"file{'s' * (len(headers) != 1)}, {_size(total)}. Read {_size(bytes_read)} ({how}{hint}).",
        rows=tuple(rows),
        violations=tuple(violations),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Found:
    file: FileHeader
    tensor: TensorHeader


def checkpoint_files(path: Path) -> tuple[Path, list[Path], dict[str, Any] | None, list[Violation]]:
    """(folder, files, index, what is wrong with the set of files)."""
    if not path.exists():
        raise ContractError(
            f"there is nothing to audit.\nexpected: a folder or a .safetensors file\ngot: nothing\nwhere: {path}\n"
            "what to do: correct the path."
        )
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ContractError(
                f"not a checkpoint.\nexpected: a .safetensors file\ngot: {path.name}\nwhere: {path}\n"
                "what to do: name the folder that holds the model, or one of its .safetensors files."
            )
        return path.parent, [path], None, []
    there = sorted(path.glob("*.safetensors"))
    index_path = path / _INDEX
    problems: list[Violation] = []
    if index_path.exists():
        try:
            index = json.loads(index_path.read_text())
            wanted = sorted({str(file) for file in index["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            found = "something else"
            problems.append(Violation("index-mismatch", _INDEX, "JSON with a weight_map", found, _INDEX_CAUSE))
            return path, there, None, problems
        for name in wanted:
            if not (path / name).is_file():
                cause = "not copied or not written; a loader would stop here"
                problems.append(Violation("missing-file", name, "a file, the index names it", "no such file", cause))
        return path, [path / name for name in wanted if (path / name).is_file()], index, problems
    if not there:
        raise ContractError(
            f"no checkpoint found.\nexpected: *.safetensors files\ngot: none\nwhere: {path}\n"
            "what to do: name the folder that holds the model's safetensors files."
        )
    if (single := path / "model.safetensors") in there:
        return path, [single], None, problems
    if len(there) > 1:
        cause = "not copied; Transformers loads a sharded checkpoint through its index only"
        problems.append(Violation("missing-file", _INDEX, f"an index over {len(there)} files", "no such file", cause))
    return path, there, None, problems


def _against_index(headers: list[FileHeader], index: dict[str, Any]) -> Iterable[Violation]:
    in_file = {header.path.name: header.tensors for header in headers if header.problem is None}
    for name, file in index["weight_map"].items():
        if file in in_file and name not in in_file[file]:
            elsewhere = [other for other, tensors in in_file.items() if name in tensors]
            found = f"it is in {elsewhere[0]}" if elsewhere else f"{file} does not hold it"
            yield Violation("index-mismatch", name, f"in {file}, as the index says", found, _INDEX_CAUSE)
    for file, tensors in in_file.items():
        for name in tensors:
            if name not in index["weight_map"]:
                found = f"in {file} only: a loader never reads it"
                yield Violation("index-mismatch", name, "an entry in the index", found, _INDEX_CAUSE)


def _duplicates(headers: list[FileHeader]) -> Iterable[Violation]:
    homes: dict[str, list[str]] = {}
    for header in headers:
        for name in header.tensors:
            homes.setdefault(name, []).append(header.path.name)
    for name, files in homes.items():
        if len(files) > 1:
            yield Violation("duplicate-tensor", name, "in one file", f"in {', '.join(files)}", _INDEX_CAUSE)


def _against_config(folder: Path, tensors: dict[str, _Found]) -> Iterable[Violation]:
    config = json.loads((folder / "config.json").read_text())
    says = config.get("quantization_config") is not None
    quantised = sorted(n for n, f in tensors.items() if f.tensor.dtype in ("F8_E4M3", "F8_E5M2", "F4"))
    if says and not quantised and tensors:
        cause = "an export of dequantised weights that kept the quantised model's config: remove quantization_config"
        yield Violation("config-mismatch", "config.json", "no quantization_config", "one, and no such tensor", cause)
    if quantised and not says:
        cause = "a config of another export: a loader would read the quantised bytes as weights"
        found = f"none, and {len(quantised)} quantised tensors such as {quantised[0]}"
        yield Violation("config-mismatch", "config.json", "a quantization_config", found, cause)


class _Judge:
    """Sorts the names in the files into weights, scales and strangers, and judges their dtypes and shapes."""

    def __init__(self, layout: CheckpointLayout, tensors: dict[str, _Found]) -> None:
        self.layout = layout
        self.tensors = tensors
        self.sources: dict[str, Source] = {}
        self.found: dict[str, list[tuple[str, Source]]] = {}
        self.scale_of: dict[str, str] = {}
        self.others: list[str] = []
        for name in tensors:
            if (source := layout.source_of(name)) is not None:
                self.sources[name] = source
                self.found.setdefault(source.target, []).append((name, source))
        for name in tensors:
            if name not in self.sources:
                weight = _weight_of_scale(name)
                if weight is not None:
                    self.scale_of[name] = weight
                else:
                    self.others.append(name)

    @property
    def is_release_layout(self) -> bool:
        """Whether names are the release's rather than the model's."""
        renamed = sum(source.renamed for source in self.sources.values())
        return renamed > len(self.sources) / 2

    def expected_of(self, name: str) -> ExpectedTensor | None:
        source = self.sources.get(name)
        return None if source is None else self.layout.expected[source.target]

    def verdict(self, *, whole: bool) -> tuple[list[AuditRow], list[Violation], list[str]]:
        """Rows, violations and notes."""
        rows: list[AuditRow] = []
        violations: list[Violation] = []
        notes: list[str] = []
        norms = Counter(
            self.tensors[name].tensor.dtype
            for name in self.sources
            if _is_norm(name) and self.layout.expected[self.sources[name].target].island_reason
        )
        bf16_norms = self.is_release_layout and set(norms) == {"BF16"}
        if bf16_norms:
            notes.append(f"{norms['BF16']} norms are BF16, as in the released files; loaders take them into fp32")
        for name, found in self.tensors.items():
            expected = self.expected_of(name)
            if expected is None:
                rows.append(self._row_of_other(name, violations))
                continue
            dtype = found.tensor.dtype
            may_be_bf16 = bf16_norms and _is_norm(name)
            island = expected.island_reason is not None and not may_be_bf16
            reason = expected.island_reason or ("weight" if expected.is_floating else "integer table")
            rows.append(AuditRow(name, "tensor", island, "norm, bf16 in the release" if may_be_bf16 else reason, dtype))
            if island and dtype not in _WIDE:
                reason = f"F32 ({expected.island_reason})"
                violations.append(Violation("island-downcast", name, reason, dtype, _DOWNCAST))
            elif not expected.is_floating and dtype not in _INTEGERS:
                cause = "a float cast that did not spare integer tables: ids above 256 are rounded in bf16"
                violations.append(Violation("integer-cast", name, expected.dtype, dtype, cause))
            elif expected.is_floating and dtype in _INTEGERS and dtype not in _PACKED:
                cause = "weights written as integers: raw bytes copied without their dtype"
                violations.append(Violation("weight-dtype", name, "a floating-point dtype", dtype, cause))
            violations += self._shape(name, expected, found.tensor)
            violations += self._quantisation(name, expected, found.tensor)
        if whole:
            for target, what in missing_parts(self.layout.expected.values(), self.found, self.layout):
                violations.append(Violation("missing-tensor", target, "in the checkpoint", what, _MISSING))
        return rows, violations, notes

    def _row_of_other(self, name: str, violations: list[Violation]) -> AuditRow:
        tensor = self.tensors[name].tensor
        if (weight := self.scale_of.get(name)) is not None:
            violations += self._scale(name, weight, tensor)
            return AuditRow(name, "tensor", False, "block scales", tensor.dtype)
        if self.layout.ignored_by_loader(name):
            # Not part of this model (multi-token prediction), but its islands are islands wherever it is loaded.
            island = self.layout.listed_as_fp32(name) and not _is_norm(name)
            if island and tensor.dtype not in _WIDE:
                violations.append(Violation("island-downcast", name, "F32 (class list)", tensor.dtype, _DOWNCAST))
            return AuditRow(name, "tensor", island, "class list" if island else "not loaded", tensor.dtype)
        cause = _cause_of_stranger(name)
        violations.append(Violation("unexpected-tensor", name, "a tensor of the model", "no such tensor in it", cause))
        return AuditRow(name, "tensor", False, "not the model's", tensor.dtype)

    def _shape(self, name: str, expected: ExpectedTensor, tensor: TensorHeader) -> Iterable[Violation]:
        index = self.sources[name].index
        if index is not None and index >= expected.shape[0]:
            cause = "the config is another model's, with fewer experts"
            found = f"number {index} of {expected.shape[0]}"
            yield Violation("unexpected-tensor", name, "a tensor of the model", found, cause)
        shape = list(tensor.shape)
        if tensor.dtype in _PACKED and expected.is_floating and shape:
            shape[-1] *= 2
        if self.sources[name].part is None:
            wanted, ok = list(expected.shape), shape == list(expected.shape)
        else:
            # One of the tensors that are stacked: all dims but one are the model's, and the parts add up.
            siblings = self.layout.parts[self.sources[name].part or ""]
            wanted = list(expected.shape[1:])
            if len(siblings) > 1:
                wanted[0] //= len(siblings)
            ok = shape == wanted
        if not ok:
            cause = "the config is another model's, or a rank's shard was saved as if it were the whole tensor"
            yield Violation("wrong-shape", name, str(wanted), str(shape), cause)

    def _quantisation(self, name: str, expected: ExpectedTensor, tensor: TensorHeader) -> Iterable[Violation]:
        if not expected.is_floating or tensor.dtype not in _QUANTISED or expected.island_reason is not None:
            return
        if not any(scale in self.tensors for scale in scale_names(name)):
            cause = "scales dropped on save or conversion: the stored numbers mean nothing without them"
            wanted = f"a scale, {scale_names(name)[0]}"
            yield Violation("missing-scale", name, wanted, f"{tensor.dtype} without one", cause)

    def _scale(self, name: str, weight: str, scale: TensorHeader) -> Iterable[Violation]:
        found = self.tensors.get(weight)
        if found is None:
            cause = "its tensor was dropped or renamed and the scale left behind"
            yield Violation("scale-without-tensor", name, f"{weight} beside it", "no such tensor", cause)
            return
        if found.tensor.dtype not in _QUANTISED:
            cause = "dequantised weights exported with their scales: a loader would apply them a second time"
            wanted = f"no scale, {weight} is {found.tensor.dtype}"
            yield Violation("scale-without-tensor", name, wanted, f"{scale.dtype} {list(scale.shape)}", cause)
            return
        if scale.dtype not in _SCALE_DTYPES:
            cause = "scales cast with the weights; an E8M0 byte read as a number is off by powers of two"
            yield Violation("scale-dtype", name, "F8_E8M0 or F32", scale.dtype, cause)
        shape = list(found.tensor.shape)
        if found.tensor.dtype in _PACKED:
            shape[-1] *= 2
        if not _grid_fits(shape, list(scale.shape)):
            cause = "the scale is another tensor's, or one of the two was resharded without the other"
            yield Violation("scale-shape", name, f"a grid over {shape}", str(list(scale.shape)), cause)


def _grid_fits(shape: list[int], grid: list[int]) -> bool:
    """Whether ``grid`` can be block scales of a tensor of ``shape``: equal blocks, or 128 with a short last one."""
    if grid in ([], [1]):
        return True
    return len(grid) == len(shape) and all(
        0 < blocks <= dim and (dim % blocks == 0 or blocks == -(-dim // 128))
        for dim, blocks in zip(shape, grid, strict=True)
    )


def _weight_of_scale(name: str) -> str | None:
    if name.endswith("_scale_inv"):
        return name.removesuffix("_scale_inv")
    if name.endswith(".scale"):
        return f"{name.removesuffix('.scale')}.weight"
    return None


def scale_names(weight: str) -> list[str]:
    names = [f"{weight}_scale_inv"]
    return [f"{weight.removesuffix('.weight')}.scale", *names] if weight.endswith(".weight") else names


def _is_norm(name: str) -> bool:
    """Whether ``name`` is the weight of a norm: ``norm``, ``attn_norm``, ``input_layernorm``, ``enorm``, ..."""
    return re.search(r"norm\.weight$", name) is not None


def _cause_of_stranger(name: str) -> str:
    parts = name.split(".")
    if {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"} & set(parts):
        return "saved from a wrapped model: strip the wrapper's word from the names (dsv4_fsdp.names.canonical_name)"
    if "base_layer" in parts or name.startswith("base_model.") or any(p.startswith("lora_") for p in parts):
        return "a peft model saved without merging: merge_and_unload() before saving, or save the adapter alone"
    if "inv_freq" in name:
        return "a computed table saved as if it were a weight; loaders ignore it"
    return "a key that the loader drops: another model's, a renamed one, or one of another library's layout"


def _read_bits(rows: list[AuditRow], judge: _Judge) -> tuple[list[AuditRow], list[Violation], list[str], int]:
    """Look into islands, integer tables and scales; returns rows with ``bits``, violations, notes and bytes read."""
    violations: list[Violation] = []
    notes: list[str] = []
    bytes_read = 0
    bf16_norms: list[str] = []
    constants: list[str] = []
    out = []
    for row in rows:
        found = judge.tensors[row.name]
        is_scale = row.name in judge.scale_of
        expected = judge.expected_of(row.name)
        is_table = expected is not None and not expected.is_floating
        readable = found.file.size_bytes >= found.tensor.end
        if not readable or not (row.island or is_scale or is_table):
            out.append(row)
            continue
        values = _read_values(found)
        bytes_read += found.tensor.end - found.tensor.start
        if is_scale:
            violations += _judge_scale_values(row.name, found.tensor, values)
        elif is_table:
            violations += _judge_table_values(row.name, values)
        elif found.tensor.dtype == "F32":
            verdict = _bits_verdict(values.view(torch.float32))
            if verdict == "not finite":
                violations.append(_not_finite(row.name, values.view(torch.float32)))
            elif verdict == "bf16 only" and _is_norm(row.name):
                bf16_norms.append(row.name)
            elif verdict == "bf16 only":
                found_text = f"{values.numel() // 4:,} numbers, all exact in bf16"
                violations.append(Violation("lost-bits", row.name, "fp32 values", found_text, _LOST_BITS))
            elif verdict == "constant":
                constants.append(row.name)
            row = replace(row, bits=verdict)
        out.append(row)
    if bf16_norms:
        notes.append(
            f"{len(bf16_norms)} fp32 norms hold only bf16 values, such as {bf16_norms[0]}: as loaded from the released "
            "files; after training it means that they were downcast"
        )
    if constants:
        notes.append(
            f"inconclusive, each number the same and exact in bf16: {len(constants)} islands, such as {constants[0]}"
        )
    return out, violations, notes, bytes_read


def _read_values(found: _Found) -> torch.Tensor:
    """The bytes of one tensor, as uint8."""
    chunks = read_tensor_bytes(found.file.path, found.tensor)
    parts = [torch.frombuffer(bytearray(chunk), dtype=torch.uint8) for chunk in chunks]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _bits_verdict(values: torch.Tensor) -> str | None:
    """``"fp32"``, ``"bf16 only"``, ``"constant"`` (says nothing), ``"not finite"``; ``None`` for an empty tensor."""
    if values.numel() == 0:
        return None
    if not bool(values.isfinite().all()):
        return "not finite"
    if bool((values.view(torch.int32) & 0xFFFF).any()):
        return "fp32"
    return "constant" if bool((values == values[0]).all()) else "bf16 only"


def _not_finite(name: str, values: torch.Tensor) -> Violation:
    count = int((~values.isfinite()).sum())
    cause = "memory that nobody initialised before saving, or training that diverged"
    return Violation("not-finite", name, "finite numbers", f"{count:,} of {values.numel():,} NaN or infinite", cause)


def _judge_scale_values(name: str, tensor: TensorHeader, values: torch.Tensor) -> Iterable[Violation]:
    if tensor.dtype == "F8_E8M0" or (tensor.dtype == "U8"):
        if bad := int((values == 255).sum()):
            cause = "memory that nobody initialised, or a zero block quantised without a guard"
            yield Violation("not-finite", name, "E8M0 bytes below 255 (255 is NaN)", f"{bad:,} bytes of 255", cause)
    elif tensor.dtype == "F32":
        numbers = values.view(torch.float32)
        if not bool(numbers.isfinite().all()):
            yield _not_finite(name, numbers)
        elif bool((numbers > 64).all()) and bool((numbers == numbers.round()).all()):
            cause = "E8M0 bytes cast to numbers: byte 120 became 120.0 where 2**-7 was meant; decode as 2**(byte - 127)"
            yield Violation("scale-dtype", name, "scales", f"whole numbers around {numbers[0]:g}", cause)


def _judge_table_values(name: str, values: torch.Tensor) -> Iterable[Violation]:
    if bool((values.view(-1) == 0).all()) and values.numel():
        cause = "never loaded: Transformers starts the table at zero, and every token would go to expert 0"
        yield Violation("empty-table", name, "expert numbers", "zeros only", cause)


def _layout_name(judge: _Judge) -> str:
    if not judge.sources:
        return "no tensor of it"
    return "the release's names" if judge.is_release_layout else "Transformers' names"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
