"""The streaming export of a whole model: one tensor comes, is compared with the source, and goes into a file.

**Layouts.** ``transformers``: the model's own names, experts fused. ``release``: DeepSeek's names, one key per expert.

**Which bits and dtype.** A tensor that is bit-equal to what the source checkpoint gives is written as it is there: in
the release layout with its FP8 or FP4 bytes and scales, in the Transformers layout in its dtype there if it was not
quantised. What training changed, or has no source:

- integers stay as they are;
- fp32 islands (the model's class list, the run's own, and what the source stores in fp32) are written in fp32;
- the others in the dtype asked for, or else their storage dtype, except that fp32 master weights of a parameter that
  computes in bf16 are rounded to bf16 (to nearest, ties to even): what the model computed with.

A module is written quantised as a whole or not at all: loaders swap whole modules.

**Memory.** The tensors of one module (of experts: two), their parts, and one file.

**Files** are written into a folder of another name, checked by their headers, and the folder gets its name only then;
what fails leaves nothing behind.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dsv4_fsdp.checkpoint_layout import CheckpointLayout, Source, missing_parts, model_of_folder
from dsv4_fsdp.errors import ContractError, ExportError, listing
from dsv4_fsdp.names import matches_components
from dsv4_fsdp.safetensors_headers import read_header

from .release_names import ReleaseNames
from .safetensors_writer import SafetensorsWriter
from .source_checkpoint import SourceCheckpoint, same_bits
from .trained_tensors import HeadersOnly, TrainedTensors

__all__ = ["DEFAULT_SHARD_BYTES", "Layout", "WrittenModel", "folder_published_at_end", "write_model"]

Layout = Literal["transformers", "release"]

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass
class WrittenModel:
    """What an export consists of.

    Attributes:
        dtypes: safetensors' dtype -> number of tensors.
        total_bytes: of all tensors.
        untouched, changed: tensors of the model that are, and are not, bit-equal to the source's.
        quantised: untouched tensors of the model written in the source's FP8 or FP4.
        rounded: fp32 master weights written in bf16.
        not_loaded: tensors carried over that Transformers does not load (multi-token prediction).
        parts: the model's name -> the names in the files.
    """

    dtypes: dict[str, int] = field(default_factory=dict)
    total_bytes: int = 0
    untouched: int = 0
    changed: int = 0
    quantised: int = 0
    rounded: int = 0
    not_loaded: int = 0
    parts: dict[str, list[str]] = field(default_factory=dict)


@contextmanager
def folder_published_at_end(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that is renamed to it at the end, or removed if the block raises.

    Raises:
        ExportError: ``target`` is there and not an empty folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "a folder that is not empty" if target.is_dir() else "a file"
        raise ExportError(
            f"the export would overwrite something.\nexpected: a new or empty folder\ngot: {what}\nwhere: {target}\n"
            "what to do: name another folder."
        )
    partial = target.parent / f".{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_model(
    trained: TrainedTensors,
    folder: Path,
    *,
    prepare: Callable[[Path], None],
    layout: Layout = "transformers",
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    with_mtp: bool = True,
    islands: Collection[str] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> WrittenModel:
    """Write a checkpoint into the empty ``folder`` and check it by its headers. On one rank.

    Args:
        trained: what training left. Its tensors are read at most once each, in the order of ``trained.specs``.
        prepare: puts ``config.json`` of the model, and what else is to be there (tokenizer), into the folder. What the
            config says about dtypes and quantisation is made to fit afterwards.
        source: the checkpoint that training started from, if it is known.
        dtype: for weights that are neither islands nor untouched, bf16 or fp32.
        islands: names, or whole parts of names, of fp32 islands beyond the model's class list.
        with_mtp: carry over what Transformers does not load (multi-token prediction).

    Raises:
        ExportError: nothing that could be loaded as this model comes out, or there is no room for it.
    """
    prepare(folder)
    try:
        model = model_of_folder(folder)
    except ContractError as error:
        raise ExportError(str(error)) from error
    known = CheckpointLayout(model)
    _refuse_another_model(trained, known)
    origin = SourceCheckpoint(source, known) if source is not None else None
    export = _Export(trained, folder, model, known, layout, origin, dtype, tuple(islands), max_shard_bytes)
    export.refuse_full_disk()
    for _, names in groupby(export.names(), key=lambda name: name.rpartition(".")[0]):
        export.write_module(list(names))
    if origin is not None and with_mtp:
        export.write_not_loaded(origin)
    export.writer.finish()
    export.write_config()
    _check_headers(folder, export.writer.written, known)
    return export.result()


class _Export:
    """One export on its way."""

    def __init__(
        self,
        trained: TrainedTensors,
        folder: Path,
        model: nn.Module,
        known: CheckpointLayout,
        layout: Layout,
        origin: SourceCheckpoint | None,
        dtype: torch.dtype | None,
        islands: tuple[str, ...],
        max_shard_bytes: int,
    ) -> None:
        self.trained = trained
        self.folder = folder
        self.known = known
        self.layout = layout
        self.origin = origin
        self.dtype = dtype
        self.islands = islands
        self.model = model
        self.writer = SafetensorsWriter(folder, max_shard_bytes=max_shard_bytes)
        is_release_possible = layout == "release" or ReleaseNames.serves(model)
        self.release_names = ReleaseNames(model, known) if is_release_possible else None
        self.no_longer_quantised: list[str] = []
        self.counts = WrittenModel()

    def result(self) -> WrittenModel:
        self.counts.total_bytes = self.writer.total_bytes
        for dtype, _ in self.writer.written.values():
            self.counts.dtypes[dtype] = self.counts.dtypes.get(dtype, 0) + 1
        return self.counts

    def refuse_full_disk(self) -> None:
        """Raise if there is less room than the smallest export that can come out of this."""
        if isinstance(self.trained, HeadersOnly):
            return
        needed = 0
        for name, (dtype, shape) in self.trained.specs.items():
            as_changed = torch.Size(shape).numel() * self._dtype_if_changed(name, dtype).itemsize
            origin = self.origin
            if origin is not None and self.layout == "release" and name in origin.names_of:
                as_changed = min(as_changed, sum(map(origin.num_bytes_of, origin.names_of[name])))
            needed += as_changed
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ExportError(
                f"the disk is too full for the export.\nexpected: at least {needed / 1e9:,.3f} GB\n"
                f"got: {free / 1e9:,.3f} GB free\nwhere: {self.folder.parent}\n"
                "what to do: make room, or export to another disk."
            )

    def names(self) -> Iterator[str]:
        """The model's tensors to write: of a tied parameter the first name, and others that the source has too."""
        seen: set[str] = set()
        for name in self.trained.specs:
            is_again = not seen.isdisjoint(self.known.tied.get(name, ()))
            if not is_again or (self.origin is not None and name in self.origin.names_of):
                seen.add(name)
                yield name

    # --- One module ---------------------------------------------------------------------------------------------------

    def write_module(self, names: list[str]) -> None:
        """Write the tensors of one module, which are quantised all or none."""
        tensors = {name: self.trained.read(name) for name in names}
        untouched = {name: self._is_untouched(name, tensor) for name, tensor in tensors.items()}
        quantised = [name for name in names if self.origin is not None and self.origin.is_quantised(name)]
        keep_quantised = self.layout == "release" and all(untouched[name] for name in quantised)
        if quantised and not keep_quantised:
            self.no_longer_quantised.append(names[0].rpartition(".")[0])
        for name in names:
            tensor = tensors.pop(name)
            self.counts.untouched += untouched[name]
            self.counts.changed += not untouched[name]
            before = len(self.writer.written)
            if name in quantised and keep_quantised:
                self._copy_from_source(name)
                self.counts.quantised += 1
            elif untouched[name] and name not in quantised:
                self._write_as_in_source(name)
            else:
                target_dtype = self._dtype_if_changed(name, tensor.dtype)
                self.counts.rounded += tensor.dtype == torch.float32 and target_dtype == torch.bfloat16
                self._write(name, tensor.to(target_dtype))
            self.counts.parts[name] = list(self.writer.written)[before:]

    def _is_untouched(self, name: str, tensor: torch.Tensor) -> bool:
        origin = self.origin
        if origin is None or name not in origin.names_of or tensor.is_meta:
            return False
        names = origin.names_of[name]
        is_island = self.known.expected[name].island_reason is not None
        if origin.meaning_of(names[0]).part is None or self.release_names is None:
            return _came_from(origin.tensor(name, self.model), tensor, is_island=is_island)
        by_meaning = {_part(origin.meaning_of(source_name)): source_name for source_name in names}
        for key, piece in self.release_names.parts(name, tensor):
            meaning = self.known.source_of(key)
            assert meaning is not None
            source_name = by_meaning.get(_part(meaning))
            if source_name is None or not _came_from(origin.value(source_name), piece, is_island=is_island):
                return False
        return True

    def _copy_from_source(self, name: str) -> None:
        origin = self.origin
        assert origin is not None
        for source_name in origin.names_of[name]:
            for key in (source_name, origin.scale_of(source_name)):
                if key is not None:
                    self.writer.add_bytes(key, *origin.raw(key))

    def _write_as_in_source(self, name: str) -> None:
        """An untouched tensor that the source does not quantise: its bits, which loading may have rounded."""
        origin = self.origin
        assert origin is not None
        if origin.has_release_names and self.layout == "release":
            self._copy_from_source(name)
        else:
            self._write(name, origin.tensor(name, self.model))

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        if self.layout == "transformers":
            self.writer.add_tensor(name, tensor)
            return
        assert self.release_names is not None
        own = self._source_spelling(name)
        for key, part in self.release_names.parts(name, tensor):
            self.writer.add_tensor(own.get(key, key), part)

    def _source_spelling(self, name: str) -> dict[str, str]:
        """Name by Transformers' reverse -> the source's own, where that release spells it in another way."""
        origin = self.origin
        if origin is None or not origin.has_release_names or len(origin.names_of.get(name, ())) != 1:
            return {}
        assert self.release_names is not None
        meta = torch.empty(self.known.expected[name].shape, device="meta")
        return {key: origin.names_of[name][0] for key, _ in self.release_names.parts(name, meta)}

    def _dtype_if_changed(self, name: str, stored: torch.dtype) -> torch.dtype:
        expected = self.known.expected[name]
        if not stored.is_floating_point:
            return stored
        if expected.island_reason is not None:
            if stored != torch.float32:
                raise ExportError(
                    f"an fp32 island was trained in {stored}; its bits are gone.\n"
                    f"expected: torch.float32 ({expected.island_reason})\ngot: {stored}\nwhere: {name}\n"
                    "what to do: train it in fp32; nothing that this run saved can restore it."
                )
            return torch.float32
        if stored == torch.float32 and any(matches_components(name, pattern) for pattern in self.islands):
            return torch.float32
        origin = self.origin
        if origin is not None and name in origin.names_of and not origin.is_quantised(name):
            if all(origin.dtype_of(source_name) == "F32" for source_name in origin.names_of[name]):
                return torch.float32
        if self.dtype is not None:
            return self.dtype
        return torch.bfloat16 if stored == torch.float32 else stored

    # --- What is not the model's --------------------------------------------------------------------------------------

    def write_not_loaded(self, origin: SourceCheckpoint) -> None:
        """Carry over multi-token prediction: raw in the release layout, dequantised in the Transformers layout."""
        scales = {scale for name in origin.not_loaded if (scale := origin.scale_of(name)) is not None}
        for name in origin.not_loaded:
            if self.layout == "release" or (name not in scales and origin.scale_of(name) is None):
                self.writer.add_bytes(name, *origin.raw(name))
            elif name not in scales:
                self.writer.add_tensor(name, origin.value(name).to(self._main_dtype()))
            self.counts.not_loaded += name not in scales

    def write_config(self) -> None:
        """Make ``config.json`` describe the weights that were written."""
        path = self.folder / "config.json"
        config: dict[str, Any] = json.loads(path.read_text())
        config["dtype"] = str(self._main_dtype()).removeprefix("torch.")
        config.pop("torch_dtype", None)
        config.setdefault("architectures", [type(self.model).__name__])
        config.pop("quantization_config", None)
        config.pop("expert_dtype", None)
        if not self.counts.not_loaded and "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0
        if self.counts.quantised:
            assert self.origin is not None
            quantisation = dict(self.origin.config["quantization_config"])
            if plain := [self._module_in_release(name) for name in self.no_longer_quantised]:
                before = quantisation.get("modules_to_not_convert") or []
                quantisation["modules_to_not_convert"] = [*before, *plain]
            config["quantization_config"] = quantisation
            if "expert_dtype" in self.origin.config:
                config["expert_dtype"] = self.origin.config["expert_dtype"]
        path.write_text(json.dumps(config, indent=2) + "\n")

    def _main_dtype(self) -> torch.dtype:
        """What most elements that are no islands have once they are in a model again."""
        elements: Counter[torch.dtype] = Counter()
        for name, (dtype, shape) in self.trained.specs.items():
            if dtype.is_floating_point and self.known.expected[name].island_reason is None:
                elements[self._dtype_if_changed(name, dtype)] += torch.Size(shape).numel()
        return elements.most_common(1)[0][0] if elements else torch.bfloat16

    def _module_in_release(self, module: str) -> str:
        name = next(name for name in self.counts.parts if name.rpartition(".")[0] == module)
        key = self.counts.parts[name][0].rpartition(".")[0]
        return key.partition(".experts.")[0] + ".experts" if ".experts." in key else key


def _part(meaning: Source) -> tuple[str | None, int | None]:
    return meaning.part, meaning.index


def _came_from(stored: torch.Tensor, trained: torch.Tensor, *, is_island: bool) -> bool:
    """Whether ``trained`` is what loading made of ``stored``: cast to its dtype, for master weights perhaps by bf16."""
    if same_bits(stored.to(trained.dtype), trained):
        return True
    by_bf16 = not is_island and stored.dtype == trained.dtype == torch.float32
    return by_bf16 and same_bits(stored.bfloat16().float(), trained)


# --- Checks ----------------------------------------------------------------------------------------------------------


def _refuse_another_model(trained: TrainedTensors, known: CheckpointLayout) -> None:
    problems = []
    have = trained.specs
    for name, expected in known.expected.items():
        if name not in have:
            if not any(other in have for other in known.tied.get(name, ())):
                problems.append(f"{name}: expected {list(expected.shape)}, got no such tensor")
        elif have[name][1] != expected.shape:
            problems.append(f"{name}: expected {list(expected.shape)}, got {list(have[name][1])}")
    problems += [f"{name}: not a tensor of the model" for name in have if name not in known.expected]
    if problems:
        raise ExportError(
            f"what was trained is not the model that its config describes, in {len(problems)} tensors:\n"
            f"{listing(problems)}\nwhat to do: export with the config.json of the trained model."
        )


def _check_headers(folder: Path, written: dict[str, tuple[str, tuple[int, ...]]], known: CheckpointLayout) -> None:
    """Read the files' headers back: everything that was written is there, and it is the whole model."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    problems = []
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        if header.problem is not None:
            problems.append(f"{path.name}: {header.problem[0]}")
        found |= {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}
    problems += [
        f"{name}: expected {written.get(name, 'no such tensor')}, got {found.get(name, 'no such tensor')}"
        for name in sorted(written.keys() | found.keys())
        if written.get(name) != found.get(name)
    ]
    sources: dict[str, list[tuple[str, Source]]] = {}
    for name in found:
        if (meaning := known.source_of(name)) is not None:
            sources.setdefault(meaning.target, []).append((name, meaning))
    problems += [f"{name}: {what}" for name, what in missing_parts(known.expected.values(), sources, known)]
    for name, parts in sources.items():
        expected = known.expected[name]
        if expected.island_reason is None:
            continue
        for key, _ in parts:
            # The release stores norms in bf16; what came from there untouched stays so.
            if found[key][0] != "F32" and not key.endswith("norm.weight"):
                problems.append(f"{key}: expected ('F32', {expected.shape}), got {found[key]}")
    if problems:
        raise ExportError(
            f"the written checkpoint differs from the model in {len(problems)} tensors:\n{listing(problems)}\n"
            f"what to do: do not use {folder}; if its disk is sound, this is a bug."
        )
