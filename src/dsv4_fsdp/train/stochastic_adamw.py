"""AdamW for weights stored in bf16: computed in fp32, rounded stochastically, moments in fp32 or 8 bits.

**What.** The update is computed in fp32 and written back to a bf16 weight by stochastic rounding: up or down, with the
probability that makes the mean exact, so updates far below a bf16 step add up. Weights in fp32 (islands, master
weights) are written back as they are.

**Moments** are fp32, or torchao's 8-bit tensors (a code per element, an fp32 scale per block of 256) in groups with
``quantised``. Embeddings are in none, as Dettmers et al. keep theirs in 32 bits: tokens' gradients differ by orders of
magnitude, and where a block spans several tokens a rare one's second moment rounds to 0 and its update explodes.

Of the others a moment is quantised where it pays and where every rank does the same: dimension 0 divides evenly over
the shards, and each shard has at least 4,096 elements and is a multiple of 256. torchao's own optimizer looks at the
local shard only, so with an uneven split one rank's moment is quantised and another's is not: two kinds of state for
one tensor. What is quantised depends on the number of shards, so a checkpoint that is loaded on another number of ranks
has some moments quantised anew (within what 8 bits keep) or no longer. Rows must then be cut at blocks: always so where
columns are a multiple of 256, as in DeepSeek-V4; otherwise torchao says "Invalid start or end".

**Random numbers.** Each group's draws are seeded with (run's seed, step, group, shard). Replicas of a shard under HSDP
draw the same and so stay equal; shards draw differently, or their errors would add up; the run's own random state is
left alone; and a resumed run draws what the uninterrupted one would have.

**How.** Everything is elementwise or in blocks, so it runs on local shards. On CUDA the update of a tensor goes through
``torch.compile`` (one compilation per shape and dtype), which saves the temporaries; elsewhere it runs eagerly.

**Source.** Loshchilov and Hutter, arXiv 1711.05101; stochastic rounding of bf16 weights: Zamirai et al., arXiv
2010.06192; 8-bit moments: Dettmers et al., arXiv 2110.02861, as torchao 0.18 has them, to whose ``AdamW8bit`` this is
equal on fp32 weights, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from dsv4_fsdp.errors import Dsv4FsdpError

from .exact_state import ExactStateOptimizer, local_values

__all__ = ["OptimizerError", "StochasticAdamW"]

_BLOCK = 256
_MIN_NUMEL = 4096  # torchao's rule, and bitsandbytes' before it


class OptimizerError(Dsv4FsdpError, ValueError):
    """The optimizer cannot be made as asked of this model."""


class StochasticAdamW(ExactStateOptimizer):
    """AdamW with stochastic rounding of bf16 weights; see the docstring of the module.

    Args:
        params: groups; ``"quantised": True`` in one for 8-bit moments.
        seed: of the rounding; the same on all ranks.

    Raises:
        OptimizerError: a group is to be quantised, and torchao is not installed.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "quantised": False}
        super().__init__(params, defaults)
        self._seed = seed
        if any(group["quantised"] for group in self.param_groups) and importlib.util.find_spec("torchao") is None:
            raise OptimizerError(
                "8-bit moments are torchao's, which is not installed.\nexpected: torchao >= 0.18\ngot: none\n"
                "what to do: pip install 'dsv4-fsdp[torchao]', or take optimizer.name adamw_bf16_sr."
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step. Parameters whose gradient is ``None`` are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self._start(param, quantised=group["quantised"])
            steps = max(int(self.state[param]["step"]) for param in params)
            # A tensor: the compiled update would be compiled again for every new number.
            lr = torch.tensor(group["lr"], dtype=torch.float32)
            with _seeded(params, _mix(self._seed, steps, index, _shard_index(params[0]))):
                for param in params:
                    self._move(param, group, lr)
        return loss

    def _start(self, param: torch.Tensor, *, quantised: bool) -> None:
        quantised = quantised and _shards_are_blocks(param)
        self.state[param] = {
            "step": torch.tensor(0.0),
            "exp_avg": _zeros(param, signed=True) if quantised else torch.zeros_like(param, dtype=torch.float32),
            "exp_avg_sq": _zeros(param, signed=False) if quantised else torch.zeros_like(param, dtype=torch.float32),
        }

    def _move(self, param: torch.Tensor, group: dict[str, Any], lr: torch.Tensor) -> None:
        state = self.state[param]
        state["step"] += 1
        weight = local_values(param)
        if weight.numel() == 0:
            return
        update = _compiled_update() if weight.device.type == "cuda" else _update
        beta1, beta2 = group["betas"]
        update(
            weight,
            local_values(param.grad),
            local_values(state["exp_avg"]),
            local_values(state["exp_avg_sq"]),
            state["step"],
            lr,
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
        )


def _update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One tensor's step on local values; ``step`` and ``lr`` are scalars on the CPU."""
    grad = grad.float()
    first = _whole(exp_avg).lerp(grad, 1 - beta1)
    second = _whole(exp_avg_sq).lerp(grad.square(), 1 - beta2)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    moved = weight.float()
    moved = moved - lr * weight_decay * moved
    size = (second.sqrt() / (1 - beta2**step).sqrt()) + eps
    moved = moved - lr * (first / (1 - beta1**step)) / size
    weight.copy_(_round_stochastically(moved) if weight.dtype == torch.bfloat16 else moved)


@functools.cache
def _compiled_update() -> Callable[..., None]:
    # The number of shapes of a model is fixed, so compilations are.
    return cast(Callable[..., None], torch.compile(_update, fullgraph=True, dynamic=False))


def _round_stochastically(values: torch.Tensor) -> torch.Tensor:
    """``values`` (fp32) as bf16, rounded up in magnitude with the probability of the part that is cut off.

    bf16 is the upper half of an fp32. Adding 16 random bits to the lower half carries into the upper one with just that
    probability, across powers of two as well. Values that bf16 holds exactly, inf among them, stay; so does nan.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


# --- 8-bit moments ----------------------------------------------------------------------------------------------------


def _zeros(param: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """A quantised moment of zeros, sharded like ``param``."""
    from torchao.optim.subclass_8bit import OptimState8bit

    local = local_values(param)
    # It says fp32 of itself: its views forget any other dtype.
    moment = OptimState8bit.zeros(local.shape, signed, _BLOCK, local.device, dtype=torch.float32)
    if not isinstance(param, DTensor):
        return cast(torch.Tensor, moment)
    sharded = DTensor.from_local(
        moment, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    # from_local() moves to the mesh's device; under CPU offload the parameter is elsewhere.
    return sharded.to(param.device)


def _whole(moment: torch.Tensor) -> torch.Tensor:
    return moment.dequantize() if hasattr(moment, "codes") else moment


def _shards_are_blocks(param: torch.Tensor) -> bool:
    """Whether every rank's shard is a whole number of blocks and large enough."""
    num_shards = 1
    if isinstance(param, DTensor):
        for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                if dim != 0:  # torchao cuts quantised tensors along dimension 0 only
                    return False
                num_shards *= size
    local_numel = param.numel() // num_shards
    return param.shape[0] % num_shards == 0 and local_numel >= _MIN_NUMEL and local_numel % _BLOCK == 0


# --- Random numbers ---------------------------------------------------------------------------------------------------


def _shard_index(param: torch.Tensor) -> int:
    """Which shard this rank holds: equal on replicas, different between shards."""
    index = 0
    if isinstance(param, DTensor):
        coordinate = param.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of its parameter's mesh"
        for at, size, placement in zip(coordinate, param.device_mesh.shape, param.placements, strict=True):
            if getattr(placement, "dim", None) is not None:
                index = index * size + at
    return index


def _mix(*numbers: int) -> int:
    """One seed of several numbers, the same on every machine; neighbours give unrelated seeds (Knuth's LCG)."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) * 6364136223846793005 + 1442695040888963407) % 2**63
        mixed ^= mixed >> 29
    return mixed


@contextlib.contextmanager
def _seeded(params: Sequence[torch.Tensor], seed: int) -> Iterator[None]:
    cuda = sorted({param.device.index or 0 for param in params if param.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield
