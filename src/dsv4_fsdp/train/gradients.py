"""One optimizer step's gradient: scaled as one process would have it, measured over all meshes, judged once for all.

**Scale.** The loss that counts is the mean over all supervised tokens of an optimizer step, whichever rank and
micro-batch they are in. FSDP2 averages gradients over the ranks, so each micro-batch's *sum* of token losses is
multiplied by ``ranks / tokens`` (:func:`loss_scale`) and the rest follows by linearity, also where a rank has no
supervised token. Under HSDP the ranks are all of both axes; under expert parallelism transformers divides expert
gradients by the same number.

``tokens`` is a count of labels, which the host has before any forward. Dividing the finished gradient once at the end
would need no count before, but bf16 gradients would be rounded a second time (2**-9 of each element: the number is no
power of two). So the count comes first, and costs no reduction of its own: a step's one reduction carries the *next*
step's count along, and only the first step of a run (or of a resumed one) pays for its own.

**One reduction a step** (:class:`StepTotals`), after the last backward: squared gradient norm, loss sum, whether a
rank's loss is not finite, whether a rank wants to stop, the next step's tokens, for each compressor whether a rank had
a window (:mod:`dsv4_fsdp.alignment`), and the routers' counts (:mod:`dsv4_fsdp.train.router_bias`). One vector of fp64,
which holds integers up to 2**53 exactly. Every decision (skip, stop, drop, clip) is a function of the reduced vector,
so no rank ever decides alone. Windows are known only after forward, which is early enough: the gradients that they take
back are exact zeros, which add nothing to the norm.

**Norm.** A parameter's shard may be held by several ranks (replicas of HSDP, tensors that are not sharded). Each rank
adds up the squares of its own shards, each divided by the number of its holders, and one sum over the world is the
squared norm of the whole gradient: over any mixture of dtypes and meshes, (shard), (replicate, shard), (efsdp, ep),
(replicate, efsdp, ep) or none, with empty shards, and with one coefficient for all. Squares are added in
fp32 over rows of 1,024 elements and in fp64 from there on. torch's own norm of a tensor adds up all of it in fp32, on a
CPU (so under CPU offload) one after the other: of 2**26 normal numbers it misses 0.5 %, the rows less than 2e-7, at the
same speed (measured on torch 2.13).

**Devices.** The vector is reduced on the mesh's device: gradients offloaded to the CPU are measured there, and the sum
of squares, one number, goes to the device to be sent; NCCL cannot send from a CPU.

**Not covered**: parameters on a mesh that is smaller than the group (pipeline stages), and plain tensors whose
gradients differ between ranks (reduce those first).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dsv4_fsdp.errors import Dsv4FsdpError, listing
from dsv4_fsdp.names import canonical_name, matches_components

__all__ = [
    "GradientError",
    "MissingGradients",
    "SkippedSteps",
    "StepTotal",
    "StepTotals",
    "TooManySkippedSteps",
    "clip_to_norm",
    "loss_scale",
    "refuse_missing_gradients",
    "squared_norm_share",
]


_ROW = 1024


class GradientError(Dsv4FsdpError, ValueError):
    """Gradients that cannot be measured together."""


class MissingGradients(Dsv4FsdpError, RuntimeError):
    """Trainable parameters got no gradient in the first step."""


class TooManySkippedSteps(Dsv4FsdpError, RuntimeError):
    """Gradients stay not finite; the run has come to its end."""


# --- Scale ------------------------------------------------------------------------------------------------------------


def loss_scale(num_tokens: int, num_ranks: int) -> float:
    """The factor of each micro-batch's sum of token losses before ``backward``: ``num_ranks / num_tokens``.

    Args:
        num_tokens: supervised tokens of the whole optimizer step, over all ranks and micro-batches.
        num_ranks: ranks over which gradients are averaged: all of them.

    Returns:
        0.0 if no rank has a supervised token: the gradient is zero, and :class:`SkippedSteps` skips the step.
    """
    return num_ranks / num_tokens if num_tokens else 0.0


# --- Norm and clipping ------------------------------------------------------------------------------------------------


def squared_norm_share(params: Iterable[nn.Parameter], *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's share of the squared norm of all gradients: summed over ``group`` it is the whole.

    Returns:
        A scalar in fp64, on the device of :func:`communication_device`.

    Raises:
        GradientError: a gradient is not reduced yet, or its mesh is not the whole group.
    """
    params = list(params)
    world_size = dist.get_world_size(group)
    squares: dict[torch.device, list[torch.Tensor]] = {}
    weights: dict[torch.device, list[float]] = {}
    for param in params:
        if param.grad is None:
            continue
        grad = param.grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local.numel():
            squares.setdefault(local.device, []).append(_squared_norm(local.detach()))
            weights.setdefault(local.device, []).append(1 / _num_holders(grad, world_size))
    share = torch.zeros((), dtype=torch.float64, device=communication_device(params))
    for device, parts in squares.items():
        share += (torch.stack(parts) @ torch.tensor(weights[device], dtype=torch.float64, device=device)).to(
            share.device
        )
    return share


def _squared_norm(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares, a scalar in fp64."""
    flat = values.reshape(-1)
    in_rows = flat.numel() // _ROW * _ROW
    rows = flat[:in_rows].view(-1, _ROW)
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in (rows, flat[None, in_rows:])]
    return torch.cat(norms).double().square().sum()


def _num_holders(grad: torch.Tensor, world_size: int) -> int:
    """How many ranks hold the same shard."""
    if not isinstance(grad, DTensor):
        return world_size
    mesh = grad.device_mesh
    if any(placement.is_partial() for placement in grad.placements) or mesh.size() != world_size:
        raise GradientError(
            "the norm of a gradient cannot be taken.\n"
            f"expected: shards or replicas on a mesh of all {world_size} ranks\n"
            f"got: {grad.placements} on a mesh of shape {tuple(mesh.shape)}\n"
            "what to do: reduce partial gradients first; give every parameter a mesh that covers the group."
        )
    # Strided shards (of several axes on one dimension) are shards: what matters is that no two ranks hold an element.
    sharded = [
        size for size, placement in zip(mesh.shape, grad.placements, strict=True) if not placement.is_replicate()
    ]
    return world_size // math.prod(sharded)


def communication_device(params: Iterable[nn.Parameter]) -> torch.device:
    """Where collectives over the parameters' mesh must run; under CPU offload not where the parameters are."""
    device = None
    for param in params:
        if isinstance(param, DTensor):
            kind = param.device_mesh.device_type
            return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
        device = device or param.device
    return device or torch.device("cpu")


def clip_to_norm(params: Iterable[nn.Parameter], norm: float, max_norm: float) -> float:
    """Scale every gradient by ``max_norm / norm`` if ``norm`` exceeds ``max_norm``; return the coefficient.

    ``norm`` is the global norm, the same number on all ranks. Gradients within the limit are not touched (no rounding),
    and neither are gradients of a norm that is not finite: such a step is skipped.
    """
    if not math.isfinite(norm) or norm <= max_norm:
        return 1.0
    coefficient = max_norm / norm
    for param in params:
        if param.grad is not None:
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            local.detach().mul_(coefficient)
    return coefficient


# --- One reduction a step ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTotal:
    """One optimizer step, over all ranks and micro-batches. Equal on every rank.

    Attributes:
        num_tokens: supervised tokens.
        loss: mean over these tokens; nan if there are none or a rank's loss is not finite.
        grad_norm: norm of the whole gradient before clipping.
        bad_ranks: ranks whose loss is not finite.
        stop_ranks: ranks that want the run to stop.
        window_flags: for each compressor, how many ranks had a window; for ``Alignment.drop_untouched``.
        expert_counts: int64, for ``RouterBalance.update``.
    """

    num_tokens: int
    loss: float
    grad_norm: float
    bad_ranks: int
    stop_ranks: int
    window_flags: torch.Tensor
    expert_counts: torch.Tensor

    @property
    def finite(self) -> bool:
        """Whether losses and gradient are, so that the step may be made."""
        return self.bad_ranks == 0 and math.isfinite(self.grad_norm)


class StepTotals:
    """The one reduction of each optimizer step; see the docstring of the module. All ranks make one, alike.

    ::

        totals = StepTotals(trainable, num_windows=len(alignment.compressor_fqns))
        num_tokens = totals.first_tokens(supervised_tokens(micro_batches))       # once
        for step in ...:
            scale = loss_scale(num_tokens, world_size)
            for batch in micro_batches:
                (loss_sum(batch) * scale).backward()
            total = totals.reduce(loss_sum=..., next_tokens=supervised_tokens(next_micro_batches), ...)
            num_tokens = totals.next_tokens

    Args:
        params: the trainable parameters.
        num_windows: length of the window flags; 0 without compressors.
        expert_counts_shape: shape of the routers' counts, ``(0,)`` without.
        group: all ranks by default.
    """

    _HEAD = ("next tokens", "loss sum", "bad loss", "stop", "squared norm")

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        num_windows: int = 0,
        expert_counts_shape: Sequence[int] = (0,),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._params = list(params)
        self._num_windows = num_windows
        self._counts_shape = tuple(expert_counts_shape)
        self._group = group
        self._device = communication_device(self._params)
        self._num_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Supervised tokens, over all ranks, of the step whose :meth:`reduce` comes next."""
        if self._num_tokens is None:
            raise GradientError(
                "the number of tokens of the first step is not known.\nexpected: first_tokens(...) before it\n"
                "got: no call\nwhat to do: call it on all ranks before the first forward, and after resuming."
            )
        return self._num_tokens

    def first_tokens(self, num_tokens: int) -> int:
        """Sum the supervised tokens of the first step over the ranks: the only reduction besides those of the steps."""
        count = torch.tensor(num_tokens, dtype=torch.int64, device=self._device)
        dist.all_reduce(count, group=self._group)
        self._num_tokens = int(count.item())
        return self._num_tokens

    def reduce(
        self,
        *,
        loss_sum: torch.Tensor,
        next_tokens: int,
        window_flags: torch.Tensor | None = None,
        stop: bool = False,
        expert_counts: torch.Tensor | None = None,
    ) -> StepTotal:
        """Reduce what this rank has of the step; call it after the last backward, before clipping.

        Afterwards :attr:`num_tokens` is the next step's.

        Args:
            loss_sum: sum of this rank's token losses over its micro-batches, a scalar, not scaled.
            next_tokens: this rank's supervised tokens in the next optimizer step (0 after the last).
            window_flags: ``Alignment.window_flags()``, shape ``(num_windows,)``.
            stop: whether this rank wants the run to stop (a signal, a time limit).
            expert_counts: ``RouterBalance.counts()``, int64.
        """
        num_tokens = self.num_tokens
        flags = self._part("window_flags", window_flags, (self._num_windows,))
        counts = self._part("expert_counts", expert_counts, self._counts_shape)
        loss = loss_sum.detach().double().to(self._device)
        share = squared_norm_share(self._params, group=self._group)
        known = torch.tensor([float(next_tokens), float(stop)], dtype=torch.float64, device=self._device)
        head = torch.stack([known[0], loss, (~loss.isfinite()).double(), known[1], share])
        vector = torch.cat([head, flags.to(self._device).double(), counts.to(self._device).double().flatten()])
        dist.all_reduce(vector, group=self._group)

        # One copy to the host, on which every decision is made.
        vector = vector.cpu()
        tokens, loss_total, bad, stops, squared = vector[: len(self._HEAD)].tolist()
        windows, experts = vector[len(self._HEAD) :].split([self._num_windows, math.prod(self._counts_shape)])
        self._num_tokens = round(tokens)
        return StepTotal(
            num_tokens=num_tokens,
            loss=loss_total / num_tokens if num_tokens else math.nan,
            grad_norm=math.sqrt(squared),
            bad_ranks=round(bad),
            stop_ranks=round(stops),
            window_flags=windows,
            expert_counts=experts.to(torch.int64).view(self._counts_shape),
        )

    def _part(self, name: str, given: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        part = torch.zeros(shape) if given is None and 0 in shape else given
        if part is None or tuple(part.shape) != shape:
            got = "nothing" if part is None else f"shape {tuple(part.shape)}"
            # A vector of another length than the other ranks' would hang the reduction.
            raise GradientError(f"{name} do not fit.\nexpected: shape {shape}, as StepTotals was made\ngot: {got}")
        return part


# --- Steps that are not finite ----------------------------------------------------------------------------------------


class SkippedSteps:
    """Decides, from a reduced :class:`StepTotal`, whether a step is made; counts those that are not.

    A single step that is not finite happens; many in a row mean that weights or data are broken, and that every further
    hour is wasted. So the limit is on steps *in a row*; the total is counted and shown.

    Attributes:
        total: skipped steps since the start of the run (save it, and give it back when resuming).
        in_a_row: skipped steps since the last one that was made.
    """

    def __init__(self, *, max_in_a_row: int, total: int = 0) -> None:
        self._max = max_in_a_row
        self.total = total
        self.in_a_row = 0

    def may_step(self, step: int, total: StepTotal) -> bool:
        """Whether to make the optimizer step numbered ``step``. The answer, and the error, is the same on all ranks.

        Not for a loss or gradient that is not finite, and not if no rank had a supervised token (momentum and weight
        decay would move the weights without any data).

        Raises:
            TooManySkippedSteps: more than ``max_in_a_row`` steps in a row were skipped.
        """
        if total.finite and total.num_tokens:
            self.in_a_row = 0
            return True
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row > self._max:
            raise TooManySkippedSteps(
                f"{self.in_a_row} optimizer steps in a row were skipped, the last of them step {step}.\n"
                f"expected: at most {self._max} (optimizer.max_skipped_steps)\n"
                f"got: {_why(total)}; {self.total} skipped steps in the whole run\n"
                "what to do: resume from a checkpoint before the first skipped step with a lower learning rate, and "
                "look at the data of that step (dsv4-fsdp data preview)."
            )
        return False


def _why(total: StepTotal) -> str:
    if total.bad_ranks:
        return f"a loss that is not finite on {total.bad_ranks} ranks"
    if not math.isfinite(total.grad_norm):
        return f"finite losses, but a gradient norm of {total.grad_norm}"
    return "no supervised token on any rank"


# --- Missing gradients ------------------------------------------------------------------------------------------------


def refuse_missing_gradients(
    model: nn.Module, *, allow: Iterable[str] = (), group: dist.ProcessGroup | None = None
) -> list[str]:
    """Refuse a model in which a trainable parameter got no gradient on any rank. All ranks call it, and fail alike.

    Call it after the last backward of the first step and before untouched compressors lose their (zero) gradients, so
    that short sequences are no reason. What is listed would never train, and nothing else would tell: its optimizer
    state is just not there.

    Args:
        allow: patterns (runs of whole components of a name) of parameters that may go without.

    Returns:
        The names that ``allow`` excused.

    Raises:
        MissingGradients: with the names.
    """
    patterns = tuple(allow)
    mine = [canonical_name(n) for n, param in model.named_parameters() if param.requires_grad and param.grad is None]
    everyone: list[list[str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    without = [name for name in mine if all(name in (theirs or []) for theirs in everyone)]
    missing = [name for name in without if not any(matches_components(name, pattern) for pattern in patterns)]
    if missing:
        raise MissingGradients(
            f"after the first step {len(missing)} trainable parameters have no gradient on any rank:\n"
            f"{listing(missing)}\n"
            "expected: a gradient for each, or a pattern in optimizer.allow_missing_gradients\n"
            "what to do: connect them to the loss, freeze them (requires_grad_(False)) before the optimizer is made, "
            "or declare them."
        )
    return without
