"""From the meta device to memory, so that what nobody loaded afterwards is found and not trained on.

``Module.to_empty`` leaves whatever was in memory: a non-persistent buffer (RoPE's ``inv_freq``; DeepSeek-V4 has two
bases) is in no checkpoint and stays garbage, often on ranks above 0 only, and tied parameters come out untied.
:func:`materialize` fills what it allocates with NaN (integers: the smallest), keeps ties, leaves tensors that already
have memory alone, and recomputes non-persistent buffers where the model says how. :func:`refuse_uninitialized` then
looks for what is left of the fill, on each rank by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .errors import ShardingError, listing
from .names import canonical_name, joined_name

__all__ = ["materialize", "refuse_uninitialized"]


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device | str,
    *,
    buffer_device: torch.device | str | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Give every meta tensor of ``model`` memory on ``device``; call it after sharding and before loading.

    Args:
        device: where parameters go. With ``CPUOffloadPolicy`` that is ``"cpu"``.
        buffer_device: where buffers go, if elsewhere.
        buffers: values for buffers by canonical name, for models that cannot recompute theirs (NeMo AutoModel's):
            for example ``dict(small_model.named_buffers())`` of a model whose RoPE settings are the same.
    """
    replaced: dict[int, nn.Parameter] = {}
    recompute: list[nn.Module] = []
    for module_name, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and param.device.type == "meta":
                # Tied parameters are one object under several names, and stay one.
                if id(param) not in replaced:
                    replaced[id(param)] = nn.Parameter(_allocate(param, device), requires_grad=param.requires_grad)
                module._parameters[name] = replaced[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = _allocate(buffer, buffer_device or device)
                value = (buffers or {}).get(joined_name(module_name, name))
                if value is not None:
                    module._buffers[name].copy_(value)
                elif name in module._non_persistent_buffers_set and not any(True for _ in module.parameters()):
                    recompute.append(module)
    # Transformers models recompute RoPE tables in `_init_weights`. Only modules without parameters are sent there.
    initialize = getattr(model, "_init_weights", None)
    if initialize is not None:
        for module in dict.fromkeys(recompute):
            initialize(module)


def refuse_uninitialized(model: nn.Module) -> None:
    """Raise if a parameter or buffer of ``model`` on this rank still holds what :func:`materialize` filled it with.

    A NaN that a checkpoint brought along is found too. Costs one pass over this rank's memory, no collective.

    Raises:
        ShardingError: names the tensors.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [canonical_name(name) for name, tensor in tensors if _holds_fill(tensor)]
    if left:
        raise ShardingError(
            f"{len(left)} tensor(s) were never given a value, or hold NaN.\n"
            "expected: every parameter and buffer loaded, initialised or recomputed\n"
            f"got, still as allocated:\n{listing(left)}\n"
            "what to do: load them from the checkpoint; a non-persistent buffer (inv_freq) is in none: pass its value "
            "in materialize(..., buffers=...)."
        )


def _allocate(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    fresh = torch.empty_like(tensor, device=device)
    local = fresh.to_local() if isinstance(fresh, DTensor) else fresh
    fill = _fill_value(local.dtype)
    if fill is not None:
        local.fill_(fill)
    return fresh


def _holds_fill(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.device.type == "meta":
        return True
    if local.is_floating_point():
        return bool(local.isnan().any())
    fill = _fill_value(local.dtype)
    return fill is not None and bool((local == fill).any())


def _fill_value(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point:
        return float("nan")
    # A bool has no value to spare, and 0 is a fair value of an unsigned integer.
    return torch.iinfo(dtype).min if dtype in (torch.int64, torch.int32, torch.int16, torch.int8) else None
