"""HCA graph alignment: every rank's backward has the same parameters in it, without a collective.

DeepSeek-V4's compressors close one window per ``compress_rate`` tokens (128 for HCA, 4 for CSA). A sequence shorter
than one window gives the compressor's parameters no gradient on that rank, while another rank's longer sequence does.
FSDP2 then reduces buffers of different sizes: NCCL hangs, gloo aborts.

The *tie* is a forward hook on each compressor. When the compressor emitted no window, its (empty) output gets a
zero-sized dependency on its trainable parameters, so that autograd produces exact zero gradients for them. No
communication, any mesh, any torch version.

One difference to a single process remains: if *no* rank had a window, that process would leave those gradients
``None``, and AdamW would neither decay nor move the parameters; the tie leaves zeros, and AdamW would. A trainer that
reduces one number per step anyway sends :meth:`Alignment.window_flags` along and calls
:meth:`Alignment.drop_untouched` with the result to be exact here as well.

Not covered: compressors whose parameters are units of their own (nested units), since a hook on the compressor runs
when those are sharded again. NeMo AutoModel aligns these by a collective of its own; see :mod:`dsv4_fsdp.fsdp`.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn

from .names import canonical_name, joined_name

__all__ = ["COMPRESSOR_CLASS_NAMES", "Alignment", "freeze_indexers", "tie_compressors"]

logger = logging.getLogger("dsv4_fsdp")

# Transformers' two compressors, and NeMo AutoModel's one for both ratios. Each returns a tuple whose first item holds
# the compressed entries, shape [batch, 1, num_windows, head_dim].
COMPRESSOR_CLASS_NAMES = frozenset({"DeepseekV4HCACompressor", "DeepseekV4CSACompressor", "DeepseekV4Compressor"})
_INDEXER_CLASS_NAMES = frozenset({"DeepseekV4Indexer"})
_WINDOW_DIM = 2


def _has_class_name(module: nn.Module, names: frozenset[str]) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


# Whether each tied compressor computed a window of its own since the last reset. Weak, so nothing is kept alive; beside
# the modules and not in them, so that copies and pickles of a model are like the model's.
_saw_window: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _tied_parameters(compressor: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters that a window feeds. The indexer's are not among them: top-k has no gradient."""
    indexer_params = {
        id(param)
        for module in compressor.modules()
        if _has_class_name(module, _INDEXER_CLASS_NAMES)
        for param in module.parameters()
    }
    return [p for p in compressor.parameters() if p.requires_grad and id(p) not in indexer_params]


def _tie(compressor: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The forward hook of a compressor. It gets the module, so a deep copy of a tied model is tied to itself."""
    if not torch.is_grad_enabled():
        return output
    entries, *rest = output
    # With a key-value cache the entries may all be an earlier call's: there are some, and none has a gradient.
    if entries.shape[_WINDOW_DIM] > 0 and entries.requires_grad:
        _saw_window[compressor] = True
        return output
    params = _tied_parameters(compressor)
    if not params:
        return output
    # An empty tensor plus a scalar is the empty tensor; backward sums an empty gradient into an exact zero, and one
    # element per parameter is enough for autograd to return a full-sized zero gradient.
    nothing = entries[:, :, :0]
    for param in params:
        nothing = nothing + param.reshape(-1)[:1].sum().to(entries.dtype)
    tied = torch.cat([entries, nothing], dim=_WINDOW_DIM) if entries.shape[_WINDOW_DIM] > 0 else nothing
    return (tied, *rest)


class Alignment:
    """The ties of one model's compressors.

    Attributes:
        compressor_fqns: canonical names of the compressors, in module order; the order of :meth:`window_flags`.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [(n, m) for n, m in model.named_modules() if _has_class_name(m, COMPRESSOR_CLASS_NAMES)]
        self.compressor_fqns: tuple[str, ...] = tuple(canonical_name(name) for name, _ in found)
        self._compressors = [module for _, module in found]
        for compressor in self._compressors:
            if _tie not in compressor._forward_hooks.values():
                # First among the forward hooks: FSDP2's own frees the parameters if the compressor is a unit itself.
                compressor.register_forward_hook(_tie, prepend=True)

    def window_flags(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """1.0 for each compressor that emitted a window on this rank since the last reset, else 0.0.

        Shape ``(num_compressors,)``, float32. Sum (or max) it over all ranks of the model's mesh, together with
        whatever else the trainer reduces once per optimizer step.
        """
        flags = [float(_saw_window.get(compressor, False)) for compressor in self._compressors]
        return torch.tensor(flags, dtype=torch.float32, device=device)

    def drop_untouched(self, flags_of_all_ranks: torch.Tensor) -> list[str]:
        """Set ``.grad = None`` on the parameters of compressors that had no window on any rank, and reset the flags.

        Call it after the last backward of an optimizer step and before clipping and the step itself.

        Args:
            flags_of_all_ranks: :meth:`window_flags` reduced over all ranks, shape ``(num_compressors,)``; 0 means none.

        Returns:
            The names of the compressors whose gradients were dropped.
        """
        if flags_of_all_ranks.shape != (len(self._compressors),):
            got = tuple(flags_of_all_ranks.shape)
            raise ValueError(f"expected one flag for each of {len(self._compressors)} compressors, got {got}")
        dropped = []
        flags = flags_of_all_ranks.tolist()
        for fqn, compressor, flag in zip(self.compressor_fqns, self._compressors, flags, strict=True):
            if flag == 0:
                for param in _tied_parameters(compressor):
                    param.grad = None
                dropped.append(fqn)
        self.reset()
        return dropped

    def reset(self) -> None:
        """Forget which compressors emitted windows."""
        for compressor in self._compressors:
            _saw_window.pop(compressor, None)


def tie_compressors(model: nn.Module) -> Alignment:
    """Tie every compressor inside ``model`` (Transformers' or NeMo AutoModel's); calling it again adds nothing.

    ``model`` may be a whole model or one block, sharded already or not. A model without compressors gets an
    :class:`Alignment` over nothing.
    """
    return Alignment(model)


def indexer_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all Lightning Indexers inside ``model``, by canonical name."""
    found: dict[str, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        if _has_class_name(module, _INDEXER_CLASS_NAMES):
            for name, param in module.named_parameters():
                found[joined_name(module_name, name)] = param
    return found


def freeze_indexers(model: nn.Module) -> str | None:
    """Freeze the Lightning Indexers, and say so (logger ``dsv4_fsdp``); returns what was said, ``None`` if nothing.

    The indexer reaches the loss only through top-k, which has no gradient. Left trainable it never gets an Adam state,
    and DCP refuses to resume an optimizer with missing states.
    """
    trainable = [param for param in indexer_parameters(model).values() if param.requires_grad]
    if not trainable:
        return None
    for param in trainable:
        param.requires_grad_(False)
    message = (
        f"{len(trainable)} parameters of the Lightning Indexer are frozen: they reach the loss through top-k only and "
        "get no gradient. Pass freeze_indexer=False if an indexer loss of yours trains them."
    )
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(message)
    return message
