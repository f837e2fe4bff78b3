"""A probe for parameters that are used on some ranks only: names them in place of a hang.

FSDP2 reduces the gradients that exist. If a parameter has one on some ranks only, the reduce-scatter's sizes differ and
NCCL hangs. Within :func:`probe_gradients` each parameter group first exchanges which of its parameters have a gradient,
and raises on every rank if the ranks disagree. That is one more collective per group: run it for a step when something
hangs, or for the first step of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import ShardingError, listing
from .names import canonical_name
from .torch_private import owners_of, parameter_groups, unreduced_gradient

__all__ = ["probe_gradients"]


@contextmanager
def probe_gradients(model: nn.Module) -> Iterator[None]:
    """Within the context, backward of the sharded ``model`` raises where ranks disagree on which gradients exist.

    Raises:
        ShardingError: from ``backward()``, on every rank of the mesh, with the parameters and the ranks without a
            gradient.
    """
    names = {id(module): name for name, module in model.named_modules()}
    probed = []
    for _, group in parameter_groups(model):
        # An instance attribute hides the class's method, and deleting it brings the method back.
        group.post_backward = _probing(group, names)
        probed.append(group)
    try:
        yield
    finally:
        for group in probed:
            del group.post_backward


def _probing(group: Any, module_names: dict[int, str]) -> Any:
    original = group.post_backward

    def fqn(fsdp_param: Any) -> str:
        module, name = owners_of(fsdp_param)[0]
        return canonical_name(f"{module_names[id(module)]}.{name}".removeprefix("."))

    def post_backward(*unused: Any) -> None:
        # FSDP2 calls this again at the end of backward for groups that are done; the ranks agree on when.
        if group.reduce_grads:
            params = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            has_gradient = torch.tensor([unreduced_gradient(p) is not None for p in params], dtype=torch.int32)
            _compare(group, [fqn(p) for p in params], has_gradient.to(group.device))
        original(*unused)

    return post_backward


def _compare(group: Any, fqns: list[str], has_gradient: torch.Tensor) -> None:
    mesh = group.mesh_info.mesh
    counts = has_gradient.clone()
    for axis in range(mesh.ndim):
        dist.all_reduce(counts, group=mesh.get_group(axis))
    num_ranks = mesh.size()
    here = f"this rank ({dist.get_rank()})"
    partial = [
        f"{fqn}: on {count} of {num_ranks} ranks, {here} {'among them' if own else 'not'}"
        for fqn, count, own in zip(fqns, counts.tolist(), has_gradient.tolist(), strict=True)
        if 0 < count < num_ranks
    ]
    if partial:
        raise ShardingError(
            "parameters have a gradient on some ranks only; the reduction would hang or mix up its buffers.\n"
            f"expected: each parameter used on every rank of the mesh, or on none\ngot:\n{listing(partial)}\n"
            "what to do: tie what a rank may skip to its output with a zero-sized dependency "
            "(dsv4_fsdp.tie_compressors does so for DeepSeek-V4's compressors), or freeze it."
        )
