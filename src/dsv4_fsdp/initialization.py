"""Random weights for a model that is sharded already: each rank draws its own part, and the whole is the same for any
number of ranks.

The distributions are the model's own: Transformers' ``_init_weights`` is run on every module, under a mode that takes
the random fills out of its hands. Each parameter is cut into blocks of whole rows, a function of its shape alone, and a
block's values are drawn in fp32 on the CPU from a generator seeded by (seed, parameter's name, block). A rank draws the
blocks that its rows touch. So 1, 2 and 128 ranks, FSDP, HSDP and dealt experts, CPU and GPU all start from the same
model, bit by bit.

Not supported: models that draw otherwise than by normal, truncated normal and uniform fills of whole parameters (an
error names the function).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .errors import ShardingError
from .names import canonical_name, is_adapter_name
from .torch_private import local_chunk

__all__ = ["fill_hash_routers", "initialize"]

# A block is as many rows as make about this many values: large enough that seeding costs nothing beside drawing.
_BLOCK_NUMEL = 1 << 14

_Draw = Callable[[torch.Tensor, torch.Generator], Any]


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int) -> None:
    """Give every parameter and buffer of ``model`` the value that its Transformers class starts from.

    Args:
        model: a Transformers model, perhaps with peft adapters inside, sharded or not, with memory allocated
            (:func:`~dsv4_fsdp.materialize.materialize`).
        seed: of all weights.

    Raises:
        ShardingError: the model draws its weights in a way that cannot be cut into rows.
    """
    initialize_module = getattr(model, "_init_weights", None)
    if initialize_module is None:
        raise ShardingError(
            "only a Transformers model says how its weights start.\nexpected: a model with `_init_weights`\n"
            f"got: {type(model).__name__}\nwhat to do: initialise it yourself, or load a checkpoint."
        )
    with _RowwiseRandom(model, seed):
        for module in model.modules():
            initialize_module(module)
        initialize_adapters(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            _zero_row(module.weight, module.padding_idx)
    fill_hash_routers(model, seed=seed)


@torch.no_grad()
def initialize_adapters(model: nn.Module, *, seed: int | None = None) -> None:
    """peft's LoRA layers start as peft starts them: A drawn, B zero.

    Args:
        seed: for a call of its own, where the rest of the model comes from a checkpoint.
    """
    if seed is not None:
        with _RowwiseRandom(model, seed):
            initialize_adapters(model)
        return
    if not any(is_adapter_name(name) for name, _ in model.named_parameters()):
        return
    from peft.tuners.lora.layer import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            for adapter in module.lora_A:
                module.reset_lora_parameters(adapter, True)


@torch.no_grad()
def fill_hash_routers(model: nn.Module, *, seed: int) -> None:
    """Give every token distinct experts in the hash routers' tables. Transformers leaves them at zero: expert 0, for
    every token as often as it may choose."""
    for name, table in model.named_buffers():
        if name.endswith(".tid2eid"):
            num_experts = model.get_submodule(name.rpartition(".")[0]).num_experts
            assert isinstance(num_experts, int)
            generator = torch.Generator().manual_seed(_seed_of(seed, canonical_name(name), 0))
            # The places of the smallest of `num_experts` random numbers are a random choice without repetition.
            drawn = torch.rand(table.shape[0], num_experts, generator=generator)
            table.copy_(drawn.topk(table.shape[1], dim=1, largest=False).indices)


class _RowwiseRandom(TorchFunctionMode):
    """Random fills of the model's parameters become row-wise draws; everything else is as it was."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._names = {id(param): canonical_name(name) for name, param in model.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        make_draw = _DRAWS.get(name)
        target = args[0] if args else kwargs.get("tensor")
        if make_draw is not None and isinstance(target, torch.Tensor):
            if (fqn := self._names.get(id(target))) is None:
                self._refuse(f"{name} of a tensor of shape {tuple(target.shape)} that is no parameter")
            _fill_by_rows(target, fqn, self._seed, make_draw(target, *args[1:], **_without_tensor(kwargs)))
            return target
        if name in _UNSUPPORTED and isinstance(target, torch.Tensor):
            self._refuse(f"{name} of {self._names.get(id(target), 'a tensor')}")
        return func(*args, **kwargs)

    def _refuse(self, got: str) -> NoReturn:
        raise ShardingError(
            "a parameter is drawn in a way that cannot be cut into rows.\n"
            f"expected: a normal, truncated normal or uniform fill of a whole parameter\ngot: {got}\n"
            "what to do: load a checkpoint, or report the model."
        )


def _without_tensor(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("tensor", "generator")}


def _normal(target: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> _Draw:
    return lambda values, generator: values.normal_(mean, std, generator=generator)


def _uniform(target: torch.Tensor, a: float = 0.0, b: float = 1.0, **_: Any) -> _Draw:
    return lambda values, generator: values.uniform_(a, b, generator=generator)


def _trunc_normal(
    target: torch.Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any
) -> _Draw:
    return lambda values, generator: nn.init.trunc_normal_(values, mean, std, a, b, generator=generator)


def _kaiming_uniform(
    target: torch.Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", **_: Any
) -> _Draw:
    fan_in, fan_out = target.shape[1] * math.prod(target.shape[2:]), target.shape[0] * math.prod(target.shape[2:])
    bound = math.sqrt(3.0 / (fan_in if mode == "fan_in" else fan_out)) * nn.init.calculate_gain(nonlinearity, a)
    return _uniform(target, -bound, bound)


_DRAWS: dict[str, Callable[..., _Draw]] = {
    "normal_": _normal,
    "uniform_": _uniform,
    "trunc_normal_": _trunc_normal,
    "kaiming_uniform_": _kaiming_uniform,
}
_UNSUPPORTED = frozenset({"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "random_"})


def _fill_by_rows(target: torch.Tensor, fqn: str, seed: int, draw: _Draw) -> None:
    shape = tuple(target.shape) or (1,)
    if isinstance(target, DTensor):
        offsets, sizes = local_chunk(target)
        local = target.to_local()
    else:
        offsets, sizes, local = (0,) * len(shape), shape, target.reshape(shape) if not target.ndim else target
    if not local.numel():
        return
    rows_per_block = max(1, _BLOCK_NUMEL // max(1, math.prod(shape[1:])))
    inner = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
    first, last = offsets[0], offsets[0] + sizes[0]
    for block in range(first // rows_per_block, -(-last // rows_per_block)):
        start = block * rows_per_block
        stop = min(start + rows_per_block, shape[0])
        values = torch.empty((stop - start, *shape[1:]), dtype=torch.float32)
        draw(values, torch.Generator().manual_seed(_seed_of(seed, fqn, block)))
        low, high = max(start, first), min(stop, last)
        local[low - first : high - first].copy_(values[(slice(low - start, high - start), *inner)])


def _zero_row(weight: torch.Tensor, row: int) -> None:
    if isinstance(weight, DTensor):
        offsets, sizes = local_chunk(weight)
        if offsets[0] <= row < offsets[0] + sizes[0]:
            weight.to_local()[row - offsets[0]].zero_()
    else:
        weight[row].zero_()


def _seed_of(seed: int, fqn: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed} {fqn} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
