"""From the model's names back to those of DeepSeek's release: ``layers.0.attn.wq_a.weight``, one key per expert.

Transformers has the table and the operations (``core_model_loading.revert_weight_conversion``), which its
``save_pretrained`` applies below the model's own ``model.`` prefix. The release has no prefix; with it taken off first,
the patterns that are anchored at the start of a name (``embed.weight``, ``head.weight``, ``hc_head_fn``) apply too.

One name does not come back: the loader makes ``kv_norm`` of a compressor's ``norm`` and leaves the attention's own
``kv_norm`` alone, so that the reverse calls both ``norm``. ``test_export_release.py`` compares all names with those of
NeMo AutoModel's adapter, which was written independently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4_fsdp.checkpoint_layout import CheckpointLayout
from dsv4_fsdp.errors import ExportError

__all__ = ["ReleaseNames"]

_MODEL_TYPE = "deepseek_v4"


class ReleaseNames:
    """Takes the model's tensors apart under the release's names."""

    def __init__(self, model: nn.Module, layout: CheckpointLayout) -> None:
        if not self.serves(model):
            model_type = getattr(getattr(model, "config", None), "model_type", None)
            raise ExportError(
                f"the release layout is DeepSeek-V4's alone.\nexpected: model_type {_MODEL_TYPE}\ngot: {model_type}\n"
                "what to do: export with --layout transformers."
            )
        self._model: Any = model
        self._layout = layout
        self._prefix = f"{self._model.base_model_prefix}."

    @staticmethod
    def serves(model: nn.Module) -> bool:
        """Whether ``model`` has a release layout."""
        return getattr(getattr(model, "config", None), "model_type", None) == _MODEL_TYPE

    def parts(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """``(name in the release, tensor)`` of everything that the model's tensor ``name`` is made of.

        Raises:
            ExportError: the loader would not read such a name as (a part of) ``name``.
        """
        from transformers.core_model_loading import revert_weight_conversion

        reverted = revert_weight_conversion(self._model, {name.removeprefix(self._prefix): tensor})
        parts = [(key.replace(".attn.norm.", ".attn.kv_norm."), part) for key, part in reverted.items()]
        for key, _ in parts:
            meaning = self._layout.source_of(key)
            if meaning is None or meaning.target != name:
                raise ExportError(
                    f"a tensor has no name in the release layout.\nexpected: one that is read as {name}\n"
                    f"got: {key}, read as {meaning.target if meaning else 'nothing'}\n"
                    "what to do: export with --layout transformers; this transformers version names it in another way."
                )
        return parts
