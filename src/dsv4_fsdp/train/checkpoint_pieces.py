"""What a rank holds of each tensor, as DCP (``torch.distributed.checkpoint``) reads and writes it.

**Why.** DCP knows tensors and DTensors. A checkpoint that is written in the background has to be a copy in CPU memory,
and a DTensor on a mesh of accelerators cannot be one. So every tensor becomes a *piece* first: the whole tensor's
shape, where this rank's part begins, and that part as a plain tensor, wherever it lies. What is on disk is DCP's own
format, which any ``dcp.load`` reads, on any number of ranks and any mesh.

**Where a part begins** is DTensor's own answer. It is right for what FSDP2 makes of a tensor that expert parallelism
has cut before (placements ``(_StridedShard(0, split_factor=ep), Shard(0))`` on a mesh ``efsdp x ep``): such a part is
one run of rows, also where the cut is uneven or leaves ranks without rows. A strided part with nothing to its right
(tensor parallelism of fused projections) is several runs, which DCP would write as if it were one; it is refused.

Public interfaces of DCP's planners only. Empty parts are neither written nor read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from dsv4_fsdp.errors import CheckpointError
from dsv4_fsdp.torch_private import first_index_of_shard

__all__ = ["CheckpointError", "Piece", "load_pieces", "piece_of", "read_metadata", "save_pieces", "total_bytes"]


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor.

    Attributes:
        size: shape of the whole tensor.
        offsets: the index, in the whole tensor, at which the part begins; as many as ``size`` has.
        local: the part, a plain tensor. Loading writes into it.
        is_sharded: whether other ranks hold other parts. Of a whole tensor one rank's copy is written.
    """

    size: torch.Size
    offsets: torch.Size
    local: torch.Tensor
    is_sharded: bool

    def copy(self) -> Piece:
        """The same with a copy of the part in CPU memory, which later training steps do not change."""
        local = self.local.detach()
        local = local.clone() if local.device.type == "cpu" else local.to("cpu")
        return Piece(self.size, self.offsets, local, self.is_sharded)

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size())

    @property
    def is_left_out(self) -> bool:
        """Whether the part is empty although the tensor is not: FSDP2 leaves such parts on small tensors."""
        return self.local.numel() == 0 and math.prod(self.size) > 0


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    """This rank's part of ``tensor``, which shares its memory.

    Raises:
        CheckpointError: the tensor is a sum that is not reduced yet, or the part is not one block of it.
    """
    if not isinstance(tensor, DTensor):
        return Piece(tensor.size(), torch.Size([0] * tensor.ndim), tensor.detach(), is_sharded=False)
    if any(placement.is_partial() for placement in tensor.placements) or not _is_one_block(tensor):
        raise CheckpointError(
            f"a checkpoint cannot hold {name}: this rank's part of it is not one block of the whole tensor.\n"
            f"got: placements {tensor.placements} on a mesh of shape {tuple(tensor.device_mesh.shape)}\n"
            "expected: shards as FSDP2, HSDP and expert parallelism make them\n"
            "what to do: redistribute it to Shard() placements first."
        )
    with torch.no_grad():
        local = tensor.to_local()
    return Piece(tensor.size(), torch.Size(first_index_of_shard(tensor)), local, is_sharded=True)


def _is_one_block(tensor: DTensor) -> bool:
    """Whether each strided cut was made after all the cuts to its right in the same dim, so that it divides one run."""
    for axis, placement in enumerate(tensor.placements):
        split_factor = getattr(placement, "split_factor", 1)
        if split_factor > 1:
            right = range(axis + 1, tensor.device_mesh.ndim)
            cuts = [tensor.device_mesh.size(a) for a in right if tensor.placements[a].is_shard(placement.dim)]  # type: ignore[attr-defined]
            if math.prod(cuts) != split_factor:
                return False
    return True


def total_bytes(entries: Mapping[str, Any]) -> int:
    """How many bytes the tensors of ``entries`` take on disk, all ranks together; what else there is is small."""
    pieces = [piece for piece in entries.values() if isinstance(piece, Piece)]
    return sum(math.prod(piece.size) * piece.local.itemsize for piece in pieces)


def save_pieces(entries: Mapping[str, Any], folder: Path, group: dist.ProcessGroup) -> Metadata:
    """Write ``entries`` of all ranks into ``folder`` and see them on the disk. All ranks of ``group`` call it.

    Args:
        entries: name -> :class:`Piece`, or any other value (pickled). What is no piece may differ between ranks by
            name only.

    Raises:
        torch.distributed.checkpoint.CheckpointException: on all ranks, if one could not write its part, or if the parts
            of some tensor do not cover it. A ``BaseException``.
    """
    # One thread a rank: with more, DCP loses the errors of the others.
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1, overwrite=True)
    return save(dict(entries), storage_writer=writer, planner=_SavePlanner(), process_group=group)


def load_pieces(entries: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Read into the pieces of ``entries``, in place, and replace its other values. All ranks of ``group`` call it.

    Raises:
        torch.distributed.checkpoint.CheckpointException: as above.
    """
    load(entries, storage_reader=FileSystemReader(folder), planner=_LoadPlanner(), process_group=group)


def read_metadata(folder: Path) -> dict[str, Any]:
    """What is in a DCP folder: name -> ``TensorStorageMetadata`` (``size``, ``properties.dtype``) or, for what is no
    tensor, ``BytesStorageMetadata``."""
    return dict(FileSystemReader(folder).read_metadata().state_dict_metadata)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, value) for name, value in self.state_dict.items() if _has_data(value)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.local if isinstance(value, Piece) else value


def _has_data(value: Any) -> bool:
    return not (isinstance(value, Piece) and value.is_left_out)


def _write_item(name: str, value: Any) -> WriteItem:
    if not isinstance(value, Piece):
        return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
    return WriteItem(
        index=MetadataIndex(name, value.offsets),
        type=WriteItemType.SHARD if value.is_sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=value._chunk, properties=TensorProperties(dtype=value.local.dtype), size=value.size
        ),
    )


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, Piece):
                items += _read_items(name, value, self.metadata.state_dict_metadata[name])
            else:
                index, zero = MetadataIndex(name), torch.Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        assert isinstance(value, Piece)
        return value.local


def _read_items(name: str, piece: Piece, saved: object) -> list[ReadItem]:
    """What to read from which saved part. DCP itself would leave memory that no saved part covers as it is."""
    assert isinstance(saved, TensorStorageMetadata), f"{name} is saved as {type(saved).__name__}"
    if piece.local.numel() == 0:
        return []
    items = create_read_items_for_chunk_list(name, saved, [piece._chunk])
    covered = sum(math.prod(item.lengths) for item in items)
    if covered != piece.local.numel():
        raise CheckpointError(
            f"{name} is incomplete in the checkpoint: {covered} of the {piece.local.numel()} elements that this rank "
            "needs were saved.\nwhat to do: resume from another checkpoint."
        )
    return items
