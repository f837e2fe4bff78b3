"""Experts kept busy without an auxiliary loss: the router's bias is moved against the load, once per optimizer step.

**What.** A top-k router of DeepSeek-V4 chooses experts by ``score + e_score_correction_bias`` and weighs them by the
score alone, so the bias steers the choice and has no gradient. After each optimizer step the bias of every expert that
got fewer tokens than the mean rises by ``rate``, and that of every expert that got more falls by it.

**How.** A forward hook on each router counts its choices as integers, while the root's forward runs: what activation
checkpointing computes again runs in backward, outside of it, and counts nothing. Nor does a model in ``eval()``. Counts
add up over micro-batches; :meth:`RouterBalance.counts` gives them to the step's one reduction
(:class:`dsv4_fsdp.train.gradients.StepTotals`), :meth:`RouterBalance.update` takes the sums. Every rank moves its copy
of the bias by the same numbers, so the copies stay equal bit for bit. The bias is a buffer in fp32 and is saved with
the model; the counts are of the running step only, so there is nothing else to save.

**Source.** DeepSeek-V3's report (arXiv 2412.19437), section 2.1.2: the sign rule, and a rate of 0.001 that it sets to 0
for the last part of pretraining. Hash routers choose by table and have no bias.

**Not covered**: NeMo AutoModel's gate, which has an update of its own; routers whose choices differ between the ranks
of a tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsv4_fsdp.errors import Dsv4FsdpError
from dsv4_fsdp.names import canonical_name

__all__ = ["ROUTER_CLASS_NAMES", "RouterBalance", "RouterBiasError", "RouterLoad"]

# Its forward returns (logits, weights, indices), indices int64 of shape (tokens, top_k).
ROUTER_CLASS_NAMES = frozenset({"DeepseekV4TopKRouter"})
_BIAS = "e_score_correction_bias"


class RouterBiasError(Dsv4FsdpError, ValueError):
    """Routers whose load cannot be balanced this way."""


@dataclass(frozen=True)
class RouterLoad:
    """How evenly one optimizer step's tokens fell, over all ranks.

    Attributes:
        busiest: router's canonical name -> choices of its busiest expert over the mean; 1.0 is perfect, the number of
            experts over top-k is the worst.
    """

    busiest: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest of ``busiest``."""
        return max(self.busiest.values())


class RouterBalance:
    """Counts and moves the biases of one model's top-k routers.

    Attributes:
        router_fqns: canonical names of the routers, in module order: the rows of :meth:`counts`.
        num_experts: columns of :meth:`counts`.

    Args:
        model: the module whose ``forward`` the trainer calls, sharded or not. Hooks stay until :meth:`remove`.
        rate: what a bias moves by in a step, in units of the router's scores; 0 only counts.

    Raises:
        RouterBiasError: no top-k routers, biases that are not fp32, routers of different sizes, or ``rate`` below 0.
    """

    def __init__(self, model: nn.Module, *, rate: float) -> None:
        routers = [
            (canonical_name(name), module)
            for name, module in model.named_modules()
            if any(cls.__name__ in ROUTER_CLASS_NAMES for cls in type(module).__mro__)
        ]
        self.router_fqns = tuple(name for name, _ in routers)
        self._rate = rate
        self._biases = [module.get_buffer(_BIAS) for _, module in routers]
        sizes = {bias.numel() for bias in self._biases}
        dtypes = {str(bias.dtype) for bias in self._biases}
        if len(sizes) != 1 or dtypes != {"torch.float32"} or not rate >= 0:
            raise RouterBiasError(
                "the load of the routers cannot be balanced by their biases.\n"
                f"expected: {' or '.join(sorted(ROUTER_CLASS_NAMES))} modules with {_BIAS} in float32, one number of "
                f"experts, and a rate of 0 or more\n"
                f"got: {len(routers)} routers, dtypes {sorted(dtypes)}, experts {sorted(sizes)}, rate {rate}\n"
                f"where: a {type(model).__name__}\nwhat to do: leave the bias update out, or load the biases in fp32."
            )
        (self.num_experts,) = sizes
        self._counts: list[torch.Tensor | None] = [None] * len(routers)
        self._running = False
        self._given_mask: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._start, with_kwargs=True),
            # Also after an exception: what runs next must not count as part of this forward.
            model.register_forward_hook(self._end, always_call=True),
            *(m.register_forward_hook(self._counter(i)) for i, (_, m) in enumerate(routers)),
        ]

    def use_mask(self, mask: torch.Tensor) -> None:
        """Count, in the next forward, only tokens where ``mask`` (shape of ``input_ids``) is not 0.

        Without it an ``attention_mask`` of two dimensions that the forward is given serves as the mask.
        """
        self._given_mask = mask

    def counts(self) -> torch.Tensor:
        """This rank's choices since the last :meth:`update`: int64, shape ``(routers, experts)``."""
        device = self._biases[0].device
        zero = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        return torch.stack([zero if count is None else count for count in self._counts])

    @torch.no_grad()
    def update(self, counts: torch.Tensor, *, move: bool = True) -> RouterLoad:
        """Move every bias by ``rate`` against its load, and start counting anew.

        Args:
            counts: :meth:`counts` summed over all ranks: int64, ``(routers, experts)``.
            move: ``False`` for a step that the optimizer skips: the biases stay.

        Raises:
            RouterBiasError: nothing was counted, so the hooks are not where the model runs.
        """
        expected = (len(self._biases), self.num_experts)
        if tuple(counts.shape) != expected or counts.is_floating_point() or not counts.sum(1).gt(0).all():
            raise RouterBiasError(
                "the routers' counts are not those of a step.\n"
                f"expected: integers of shape {expected}, at least one token for each router\n"
                f"got: {counts.dtype} of shape {tuple(counts.shape)}, tokens per router {counts.sum(-1).tolist()}\n"
                "what to do: call the module that RouterBalance was made of, in training mode, and sum counts() over "
                "all ranks once per optimizer step."
            )
        totals = counts.sum(1, keepdim=True)
        # mean - count, times the number of experts: in integers, so that "equal to the mean" is exact.
        directions = (totals - counts * self.num_experts).sign()
        if move:
            for bias, direction in zip(self._biases, directions, strict=True):
                bias.add_(direction.to(bias.device, bias.dtype), alpha=self._rate)
        self._counts = [None] * len(self._biases)
        busiest = (counts.amax(1).double() * self.num_experts / totals.squeeze(1)).tolist()
        return RouterLoad(dict(zip(self.router_fqns, busiest, strict=True)))

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _start(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = model.training
        mask = self._given_mask if self._given_mask is not None else kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        self._given_mask = None

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._running = False
        self._mask = None

    def _counter(self, index: int) -> Any:
        def count(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._running:
                return
            chosen = output[2].detach()
            weight = torch.ones_like(chosen)
            if self._mask is not None:
                if self._mask.numel() != chosen.shape[0]:
                    raise RouterBiasError(
                        "the mask of the tokens does not fit.\n"
                        f"expected: one entry for each of {chosen.shape[0]} tokens\n"
                        f"got: shape {tuple(self._mask.shape)}\nwhere: {self.router_fqns[index]}"
                    )
                weight *= (self._mask.to(chosen.device).reshape(-1, 1) != 0).to(weight.dtype)
            so_far = self._counts[index]
            if so_far is None:
                so_far = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
            # Sums of integers: exact and the same in any order.
            self._counts[index] = so_far.scatter_add(0, chosen.flatten(), weight.flatten())

        return count
