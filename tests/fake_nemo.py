"""Small module trees with the class names of NeMo AutoModel's DeepSeek-V4, for what depends on names and dtypes only.

Every builder makes a module with one parameter ``weight`` of two elements and the submodules given by keyword.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

__all__ = ["Config", "block", "compressor", "holder", "leaf", "norm", "of_class", "plain", "vision_block", "wrap"]


class Leaf(nn.Module):
    """One parameter, and whatever submodules are given."""

    def __init__(self, dtype: torch.dtype = torch.float32, **submodules: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=dtype))
        for name, submodule in submodules.items():
            setattr(self, name, submodule)


class Config:
    """What a model keeps under ``config``."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class DeepseekV4Compressor(Leaf):
    """A compressor that remembers which groups it was told."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **submodules: nn.Module) -> None:
        super().__init__(dtype, **submodules)
        self.groups: list[Any] = []

    def _set_hca_param_sync_group(self, group: Any) -> None:
        self.groups.append(group)


def of_class(name: str, dtype: torch.dtype = torch.float32, **submodules: nn.Module) -> nn.Module:
    """A module whose class is called ``name``."""
    return type(name, (Leaf,), {})(dtype, **submodules)


def leaf(dtype: torch.dtype = torch.float32, **submodules: nn.Module) -> nn.Module:
    """A module of no special class."""
    return Leaf(dtype, **submodules)


def plain(dtype: torch.dtype = torch.bfloat16, **submodules: nn.Module) -> nn.Module:
    """A root that is no DeepSeek-V4 by itself."""
    return of_class("SomeModel", dtype, **submodules)


def block(dtype: torch.dtype = torch.bfloat16, **submodules: nn.Module) -> nn.Module:
    """A ``DeepseekV4Block`` whose own weight is bf16."""
    return of_class("DeepseekV4Block", dtype, **submodules)


def vision_block(dtype: torch.dtype = torch.bfloat16, **submodules: nn.Module) -> nn.Module:
    """A ``DeepseekV4VisionBlock`` whose own weight is bf16."""
    return of_class("DeepseekV4VisionBlock", dtype, **submodules)


def norm(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A self-casting ``DeepseekV4VisionRMSNorm``."""
    return of_class("DeepseekV4VisionRMSNorm", dtype)


def holder(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A ``DeepseekV4FP32Parameter``, whose forward returns its tensor."""
    return of_class("DeepseekV4FP32Parameter", dtype)


def compressor(dtype: torch.dtype = torch.bfloat16, **submodules: nn.Module) -> DeepseekV4Compressor:
    """A compressor with NeMo's group setter."""
    return DeepseekV4Compressor(dtype, **submodules)


def wrap(module: nn.Module) -> nn.Module:
    """``module`` in torch's checkpoint wrapper."""
    return checkpoint_wrapper(module)
