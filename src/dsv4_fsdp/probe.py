"""A probe for parameters that are used on some ranks only: names them in place of a hang.

FSDP2 reduces the gradients that exist. If a parameter has one on some ranks only, the reduce-scatter's sizes differ and
NCCL hangs. Within :func:`probe_gradients` each parameter group first exchanges which of its parameters have a gradient,
and raises on every rank if the ranks disagree. If a whole unit's output is unused on some ranks, these are at another
unit by then; the message says which group it is from, so that is found too. That is one more collective per group: run
it for a step when something hangs, or for the first step of a run.

Not covered: ranks that skip several units in a row gather different parameters before any gradient exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .errors import ShardingError, listing
from .names import joined_name
from .torch_private import owners_of, parameter_groups, unreduced_gradient

__all__ = ["probe_gradients"]


@contextmanager
def probe_gradients(model: nn.Module) -> Iterator[None]:
    """Within the context, backward of the sharded ``model`` raises where ranks disagree on which gradients exist.

    Raises:
        ShardingError: from ``backward()``, on every rank of the mesh, with the parameters and the number of ranks that
            have a gradient; or with what this rank and the others are about to reduce, if that is not the same.
    """
    module_names = {id(module): name for name, module in model.named_modules()}
    exchanges: dict[DeviceMesh, _Exchange] = {}
    probed = []
    for _, group in parameter_groups(model):
        exchange = exchanges.setdefault(group.mesh_info.mesh, _Exchange(group.mesh_info.mesh))
        # An instance attribute hides the class's method, and deleting it brings the method back.
        group.post_backward = _probing(group, exchange, module_names)
        probed.append(group)
    try:
        yield
    finally:
        for group in probed:
            del group.post_backward


def _probing(group: Any, exchange: _Exchange, module_names: dict[int, str]) -> Any:
    original = group.post_backward
    params = [fsdp_param for fsdp_param in group.fsdp_params if fsdp_param.sharded_param.requires_grad]
    index = exchange.add([_fqn(fsdp_param, module_names) for fsdp_param in params])

    def post_backward(*unused: Any) -> None:
        # FSDP2 calls this again at the end of backward for groups that no gradient reached.
        if group.reduce_grads:
            exchange.compare(index, [unreduced_gradient(fsdp_param) is not None for fsdp_param in params], group.device)
        original(*unused)

    return post_backward


def _fqn(fsdp_param: Any, module_names: dict[int, str]) -> str:
    module, name = owners_of(fsdp_param)[0]
    return joined_name(module_names[id(module)], name)


class _Exchange:
    """What the ranks of one mesh tell each other: a message of the same size from every parameter group.

    It has one slot per group, 1 for the one that it is about, and then one per parameter, 1 for those of this group
    that have a gradient. The sum over the ranks tells whether all are at the same group, and who has what.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._fqns: list[list[str]] = []

    def add(self, fqns: list[str]) -> int:
        """Make room for a group of parameters; returns the index by which to compare."""
        self._fqns.append(fqns)
        return len(self._fqns) - 1

    def compare(self, index: int, has_gradient: list[bool], device: torch.device) -> None:
        """Raise :class:`ShardingError`, on all ranks, unless they are at the same group with the same gradients."""
        first = len(self._fqns) + sum(map(len, self._fqns[:index]))
        mine = torch.zeros(len(self._fqns) + sum(map(len, self._fqns)), dtype=torch.int32)
        mine[index] = 1
        mine[first : first + len(has_gradient)] = torch.tensor(has_gradient, dtype=torch.int32)
        total = mine.to(device)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(total, group=self._mesh.get_group(axis))
        counts = total.tolist()
        num_ranks, here = self._mesh.size(), f"this rank ({dist.get_rank()})"
        if counts[index] < num_ranks:
            at = [
                f"{count} of {num_ranks} ranks{f', {here} among them' if other == index else ''}: {_brief(fqns)}"
                for other, (fqns, count) in enumerate(zip(self._fqns, counts, strict=False))
                if count
            ]
            raise ShardingError(
                "ranks reduce gradients of different units at the same time; this would hang or mix them up.\n"
                f"expected: the output of each unit used on every rank of the mesh, or on none\ngot:\n{listing(at)}\n"
                f"what to do: {_REMEDY}"
            )
        partial = [
            f"{fqn}: on {count} of {num_ranks} ranks, {here} {'among them' if own else 'not'}"
            for fqn, count, own in zip(self._fqns[index], counts[first:], has_gradient, strict=False)
            if 0 < count < num_ranks
        ]
        if partial:
            raise ShardingError(
                "parameters have a gradient on some ranks only; the reduction would hang or mix up its buffers.\n"
                f"expected: each parameter used on every rank of the mesh, or on none\ngot:\n{listing(partial)}\n"
                f"what to do: {_REMEDY}"
            )


_REMEDY = (
    "tie what a rank may skip to its output with a zero-sized dependency (dsv4_fsdp.tie_compressors does so for "
    "DeepSeek-V4's compressors), or freeze it."
)


def _brief(fqns: list[str]) -> str:
    if not fqns:
        return "(nothing trainable)"
    return fqns[0] + (f" and {len(fqns) - 1} more" if len(fqns) > 1 else "")
