"""Muon for sharded matrices: every update is computed from the whole matrix, whatever a rank holds of it.

**What.** Muon replaces a matrix's momentum by the nearest orthogonal matrix (all singular values about 1) and steps in
that direction. The matrix is found by five steps of a Newton-Schulz iteration, which multiplies the *whole* matrix with
itself: run on a shard of rows, it orthogonalises the shard, which is another and wrong update, without any error. So
``torch.optim.Muon`` must not be given FSDP2's parameters as they are.

**How.** The momentum is a shard like the parameter, in fp32. For each matrix that is cut across ranks, the update is
gathered in bf16, the dtype in which the iteration runs anyway, so the gather loses nothing and each rank computes, bit
for bit, what one process would; it then keeps its own rows. Cost: one all-gather of two bytes per element, a whole
matrix of memory at a time, and an iteration that every rank repeats. Fused experts, ``(experts, out, in)``, are a stack
of matrices. Where the stack is cut between experts nothing is gathered and nothing repeated. Where it is cut through
them (ranks that outnumber experts, :func:`dsv4_fsdp.plan.even_dim`), the ranks exchange their parts for whole matrices,
and back.

**Scale.** The update is multiplied by ``0.2 * sqrt(max(rows, columns))``, which gives it the root mean square that
AdamW's usually has, so learning rate and weight decay are AdamW's.

**Everything else** (embeddings, ``lm_head``, norms, islands) is AdamW's, in the same optimizer: one state dict, one
learning rate. The groups say which: ``algorithm`` is ``"muon"`` or ``"adamw"``.

**Source.** K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), for the iteration and
its coefficients; Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982, for the scale. Equality with
``torch.optim.Muon`` on whole matrices is tested.

**Not covered**: a concatenation of several maps in one matrix (gate and up, the groups of ``o_a_proj``) is treated as
the one matrix that it is stored as. Weights in bf16 are rounded to the nearest.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dsv4_fsdp.errors import Dsv4FsdpError

from .exact_state import ExactStateOptimizer, local_values

__all__ = ["Muon", "MuonError", "orthogonalized"]

# Chosen by K. Jordan to raise small singular values as fast as possible; the limit is only about 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_TINY = 1e-7
_RMS_OF_ADAMW = 0.2


class MuonError(Dsv4FsdpError, ValueError):
    """A parameter that Muon cannot take."""


class Muon(ExactStateOptimizer):
    """Muon and AdamW in one optimizer; see the docstring of the module.

    Args:
        params: groups with ``"algorithm"``: ``"muon"`` (tensors of two dimensions, or three: a stack of matrices), with
            options ``lr``, ``weight_decay``, ``momentum`` (Nesterov's) and ``ns_steps`` (of the iteration); or
            ``"adamw"``, with the options of ``torch.optim.AdamW``.
        lr: where a group has none of its own.

    Raises:
        MuonError: a group without algorithm, a tensor that is no matrix, or a gradient that is not reduced.
    """

    def __init__(self, params: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "momentum": 0.95, "ns_steps": 5})
        for group in self.param_groups:
            if group.get("algorithm") not in ("muon", "adamw"):
                raise MuonError(
                    "a group of parameters does not say how it is moved.\nexpected: algorithm='muon' or 'adamw'\n"
                    f"got: {group.get('algorithm')!r}\nwhere: group {group.get('name', '?')!r}"
                )
            for param in group["params"]:
                if group["algorithm"] == "muon" and param.ndim not in (2, 3):
                    raise MuonError(
                        "Muon takes matrices.\nexpected: 2 dimensions, or 3 for a stack of matrices\n"
                        f"got: shape {tuple(param.shape)}\nwhere: group {group.get('name', '?')!r}\n"
                        "what to do: give it to AdamW."
                    )
        theirs = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        # It holds the same group dicts and, from the first step on, the same states.
        self._adamw = torch.optim.AdamW(theirs, lr=lr) if theirs else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step. Parameters whose gradient is ``None`` (on all ranks alike) are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                for param in group["params"]:
                    if param.grad is not None:
                        self._move(param, group)
        if self._adamw is not None:
            # Loading a state dict replaces groups and states.
            self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _move(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
        grad = local_values(param.grad).float()
        momentum = local_values(state["momentum_buffer"]).lerp_(grad, 1 - group["momentum"])
        direction = orthogonalized(grad.lerp(momentum, group["momentum"]), like=param, steps=group["ns_steps"])

        rows, columns = param.shape[-2:]
        weight = local_values(param)
        # In fp32 with one rounding at the end, for weights in bf16.
        moved = weight.float() * (1 - group["lr"] * group["weight_decay"])
        moved -= direction.float() * (group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(rows, columns)))
        weight.copy_(moved)


def orthogonalized(update: torch.Tensor, *, like: torch.Tensor, steps: int) -> torch.Tensor:
    """This rank's part, in bf16, of the orthogonal matrix nearest to the whole of which ``update`` is this rank's part.

    Args:
        update: local values; in a stack of matrices, shape ``(local matrices, rows, columns)``.
        like: the parameter: its placements say what of the whole ``update`` is. If any cuts the last two dimensions,
            this is a collective over its mesh, on the mesh's device (shards that are offloaded to the CPU go there).
    """
    update = update.bfloat16()
    if not isinstance(like, DTensor):
        return _newton_schulz(update, steps)
    if any(placement.is_partial() for placement in like.placements):
        raise MuonError(f"Muon needs reduced gradients.\nexpected: shards or replicas\ngot: {like.placements}")
    dims = [getattr(placement, "dim", -1) for placement in like.placements]
    through = [axis for axis, dim in enumerate(dims) if dim >= like.ndim - 2]
    if not through:
        return _newton_schulz(update, steps)
    mesh = like.device_mesh
    if like.ndim == 3 and len(through) == 1 and like.shape[dims[through[0]]] % mesh.size(through[0]) == 0:
        return _exchanging(update, mesh, through[0], dims[through[0]], steps)
    shards = DTensor.from_local(update, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    whole = _newton_schulz(shards.full_tensor(), steps)
    # From replicas to shards: each rank cuts its own part, nothing is sent.
    parts = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return parts.redistribute(placements=like.placements).to_local().to(update.device)


def _exchanging(update: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, steps: int) -> torch.Tensor:
    """Of a stack that one axis of ``mesh`` cuts evenly along ``dim``: exchanged for whole matrices, and back."""
    if mesh.ndim > 1:
        assert mesh.mesh_dim_names is not None
        mesh = mesh[mesh.mesh_dim_names[axis]]
    part = DTensor.from_local(update.contiguous(), mesh, [Shard(dim)], run_check=False)
    dealt = part.redistribute(placements=[Shard(0)])
    moved = _newton_schulz(dealt.to_local(), steps).contiguous()
    whole = DTensor.from_local(moved, mesh, [Shard(0)], run_check=False, shape=dealt.shape, stride=dealt.stride())
    return whole.redistribute(placements=[Shard(dim)]).to_local().to(update.device)


def _newton_schulz(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """The iteration, in bf16, on one matrix or on each of a stack; the stack may be empty."""
    if matrices.numel() == 0:
        return matrices
    stack = matrices if matrices.ndim == 3 else matrices[None]
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack  # the product of the short sides is the smaller one
    # No singular value above 1, where the iteration would diverge.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_TINY)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).reshape(matrices.shape)
