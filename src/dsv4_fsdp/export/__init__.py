"""Exports: from what training left to checkpoints that others load.

``write_model`` is the one writer; ``trained_tensors`` has where its tensors come from (a live sharded model, a training
checkpoint on disk), ``source_checkpoint`` what training started from, ``adapter`` LoRA, ``verify`` the proof.
"""

from dsv4_fsdp.errors import ExportError

from .from_checkpoint import Exported, TrainingCheckpoint, export_checkpoint, find_checkpoint
from .trained_tensors import CheckpointTensors, LiveTensors, TrainedTensors
from .write_model import WrittenModel, write_model

__all__ = [
    "CheckpointTensors",
    "ExportError",
    "Exported",
    "LiveTensors",
    "TrainedTensors",
    "TrainingCheckpoint",
    "WrittenModel",
    "export_checkpoint",
    "find_checkpoint",
    "write_model",
]
