"""Optimizers whose state keeps its own dtype when it is loaded.

``torch.optim.Optimizer.load_state_dict`` casts every state of a floating-point parameter to the parameter's dtype,
except ``step``: fp32 moments of a bf16 weight come back from a checkpoint as bf16, without a word (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["ExactStateOptimizer", "local_values"]


class ExactStateOptimizer(torch.optim.Optimizer):
    """A base for optimizers whose states are wider, or narrower, than the parameter."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, then put the states back that it cast."""
        super().load_state_dict(state_dict)
        saved_ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype != self.state[param][key].dtype:
                    self.state[param][key] = value.to(param.device)


def local_values(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of a tensor that exists."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
