"""One training step of a tiny model of any family, unsharded and sharded in four ways; run inside ranks."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from family_models import declared_families, family_inputs, tiny_family_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dsv4_fsdp import Dsv4FsdpError, ShardingError, contract_of, fully_shard, parallelize
from dsv4_fsdp.model_layout import layout_of
from dsv4_fsdp.names import joined_name

Way = Literal["stock, as loaded", "stock, fp32 storage", "fully_shard", "parallelize"]
WAYS: tuple[Way, ...] = get_args(Way)

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class FamilyStep:
    """What one way of sharding did to one family, on one rank.

    ``outcome`` is ``"right"`` (forward bit-equal, islands in fp32, gradients close), ``"silent downcast"`` (islands
    computed in bf16), ``"wrong"`` (other numbers), ``"crash"``, ``"refused"`` (by this package, with a reason) or
    ``"unsharded fails"``; ``detail`` says more.
    """

    outcome: str
    detail: str = ""
    island_params: int = 0
    island_buffers: int = 0
    islands_seen: int = 0
    """Islands that were gathered in this forward; the towers of a model for pictures rest if it reads only text."""
    worst_grad_error: float = 0.0


def family_step(name: str, way: Way) -> FamilyStep:
    """Forward and backward of ``name`` on this rank's own input, the reference beside the sharded model."""
    logging.getLogger("dsv4_fsdp").setLevel(logging.ERROR)  # that indexers are frozen
    family = next(family for family in declared_families() if family.name == name)
    reference = tiny_family_model(family)
    contract = contract_of(reference)
    islands = {rule.fqn for rule in contract.islands if rule.kind == "parameter"}
    counts = {"island_params": len(islands), "island_buffers": len(contract.islands) - len(islands)}
    inputs = family_inputs(family, reference, seed=dist.get_rank())
    try:
        expected = _outputs(reference, inputs)
        _backward(expected)
    except (RuntimeError, ValueError, TypeError) as error:
        return FamilyStep("unsharded fails", _first_line(error), **counts)

    model = tiny_family_model(family)
    if way == "stock, fp32 storage":
        for param in model.parameters():
            param.data = param.data.float()
    try:
        _shard(model, way)
        seen = _watch_compute_dtypes(model)
        outputs = _outputs(model, inputs)
        _backward(outputs)
    except Dsv4FsdpError as error:
        return FamilyStep("refused", _first_line(error), **counts)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        return FamilyStep("crash", _first_line(error), **counts)

    counts["islands_seen"] = len(islands & seen.keys())
    narrow = sorted(fqn for fqn in islands & seen.keys() if seen[fqn] != torch.float32)
    if narrow:
        return FamilyStep("silent downcast", f"{len(narrow)} islands in bf16, {narrow[0]} among them", **counts)
    differ = max(
        (
            float((a.detach().double() - b.detach().double()).abs().max())
            for a, b in zip(outputs, expected, strict=True)
        ),
        default=0.0,
    )
    error, worst = _worst_gradient(reference, model)
    counts["worst_grad_error"] = error
    if differ:
        return FamilyStep("wrong", f"output off by {differ:.2g}", **counts)
    # Two ranks' gradients are each rounded to bf16 by the unsharded model too; FSDP adds in fp32 and rounds the mean
    # once, which is at most 2**-9 of its addends.
    if not error < 5e-3:
        return FamilyStep("wrong", f"gradient of {worst} off by {error:.2g}", **counts)
    return FamilyStep("right", **counts)


def _shard(model: nn.Module, way: Way) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "parallelize":
        parallelize(model, mesh)
        return
    function: Any = fully_shard if way == "fully_shard" else torch_fully_shard
    try:
        blocks = layout_of(model).blocks
    except ShardingError:
        blocks = ()  # the model names no block: one unit
    for block in blocks:
        function(model.get_submodule(block), mesh=mesh, mp_policy=_BF16)
    function(model, mesh=mesh, mp_policy=_BF16)


def _watch_compute_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtype of each parameter that is gathered while a module around it runs; filled by every forward from now on.

    Modules above the owner count too: some models read a part's weight without calling the part.
    """
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: nn.Module, *call: Any) -> None:
        for below, param in module.named_parameters():
            if not isinstance(param, DTensor):
                seen[joined_name(name, below)] = param.dtype

    for name, module in model.named_modules():
        # FSDP2 puts its own pre-forward hook first, so this one sees the gathered parameters.
        module.register_forward_pre_hook(functools.partial(note, name))
    return seen


def _outputs(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Every differentiable tensor in the model's output, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about what a tiny configuration leaves out
        out = model(**inputs)
    leaves = pytree.tree_leaves(dict(out))
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad]


def _backward(outputs: list[torch.Tensor]) -> None:
    """From a random gradient for each output, the same on each call."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    weights = [torch.randn(out.shape, generator=generator) / out.numel() ** 0.5 for out in outputs]
    torch.stack([(out.float() * weight).sum() for out, weight in zip(outputs, weights, strict=True)]).sum().backward()


def _worst_gradient(reference: nn.Module, model: nn.Module) -> tuple[float, str]:
    """The largest distance of a sharded gradient to the mean of all ranks' unsharded ones, over the addends' norm."""
    sharded = dict(model.named_parameters())
    worst = (0.0, "")
    for name, param in reference.named_parameters():
        grad = sharded[name].grad
        have = torch.tensor(float(param.grad is not None))
        dist.all_reduce(have)
        if not have:
            if grad is not None and bool(grad.full_tensor().any()):
                worst = max(worst, (float("inf"), name))
            continue
        own = torch.zeros_like(param, dtype=torch.float64) if param.grad is None else param.grad.double()
        norm = own.norm()
        dist.all_reduce(norm)
        dist.all_reduce(own)
        if grad is None:
            if norm:
                worst = max(worst, (float("inf"), name))
            continue
        assert isinstance(grad, DTensor)
        n = dist.get_world_size()
        error = float((grad.full_tensor().double() - own / n).norm() / (norm / n)) if norm else 0.0
        worst = max(worst, (error, name))
    return worst


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    # torch prints sets, in any order.
    return re.sub(r"\{([^}]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", line)
