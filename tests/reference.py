"""Lock-step training of a sharded model and its unsharded reference, inside the ranks of one test case.

``lockstep`` builds a model twice from the same seed. One copy stays whole on every rank: the reference. The other is
sharded. Both run forward and backward on the rank's own batches; the reference's gradients are then averaged over ranks
in fp64, which is what FSDP would do with unlimited precision, and everything is compared:

- logits and loss bit by bit: an all-gather copies, so nothing excuses a difference;
- gradients by relative error (norm of the difference over norm of the reference, fp64), because FSDP sums in fp32 and
  rounds the result to the storage dtype (in a parameter of one element, ranks' gradients may all but cancel: the
  roundings of a sum are then large beside it);
- which gradients are ``None``;
- after each optimizer step, the parameters.

It returns findings and asserts nothing; ``assert_lockstep`` in the test's own process does, for all ranks at once:

    def a_case():                                      # a module-level function, run in each rank
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        batch = tiny_batch("transformers", 64, seed=dist.get_rank())
        return lockstep(tiny_transformers, lambda model: parallelize(model, mesh), [batch])

    assert_lockstep(run_ranks(2, a_case))

``Recorder`` records the collectives of a region of code, with the dtype that is on the wire.

Not supported: pipeline stages, several losses, models whose forward draws random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_models import Batch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Collective",
    "LockstepResult",
    "Recorder",
    "StepResult",
    "assert_lockstep",
    "canonical",
    "lockstep",
    "logits_of",
    "token_loss",
]

OptimizerSpec = Literal["sgd", "adamw"] | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


# --- What a run shows ------------------------------------------------------------------------------------------------


@dataclass
class StepResult:
    """What one step showed on one rank. An error is relative; ``inf`` stands for a value that is not finite."""

    step: int
    bit_equal: list[bool] = field(default_factory=list)
    """Per micro-batch: logits and loss equal bit by bit."""
    logit_error: float = 0.0
    """Largest absolute difference between logits (sharded and reference), over the micro-batches."""
    loss: float = 0.0
    """Sum of the reference's losses on this rank, over the micro-batches."""
    grad_error: float = 0.0
    grad_name: str = ""
    none_mismatch: list[str] = field(default_factory=list)
    """``name: what each model has``, where one gradient is ``None`` and the other is not."""
    zero_for_none: list[str] = field(default_factory=list)
    """Names whose gradient is ``None`` in the reference and exactly zero in the sharded model."""
    param_error: float = 0.0
    """Norm of the difference between the parameters over the norm of the reference's, after the optimizer step."""
    param_name: str = ""
    update_error: float = 0.0
    """The same difference over the norm of the reference's move in this step: 1 if a parameter did not move at all."""
    update_name: str = ""
    collectives: list[Collective] = field(default_factory=list)
    """What the sharded model's forward and backward sent, if ``lockstep(record=True)``."""


@dataclass
class LockstepResult:
    """One rank's findings over all steps."""

    rank: int
    stepped: bool
    """Whether an optimizer ran."""
    unsharded: list[str]
    """Parameters that ``shard`` left whole (``ignored_params``). Their gradients are compared with this rank's own."""
    steps: list[StepResult] = field(default_factory=list)

    @property
    def bit_equal(self) -> list[bool]:
        return [equal for step in self.steps for equal in step.bit_equal]

    @property
    def none_mismatch(self) -> list[str]:
        return [text for step in self.steps for text in step.none_mismatch]

    @property
    def worst_logit_error(self) -> float:
        return max(step.logit_error for step in self.steps)

    @property
    def worst_grad_error(self) -> float:
        return max(step.grad_error for step in self.steps)

    @property
    def worst_grad_name(self) -> str:
        return max(self.steps, key=lambda step: step.grad_error).grad_name

    @property
    def worst_param_error(self) -> float:
        return max(step.param_error for step in self.steps)

    @property
    def worst_param_name(self) -> str:
        return max(self.steps, key=lambda step: step.param_error).param_name

    @property
    def worst_update_error(self) -> float:
        return max(step.update_error for step in self.steps)


# --- The run ---------------------------------------------------------------------------------------------------------


def lockstep(
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Any],
    batches: Sequence[Batch],
    *,
    build_reference: Callable[[], nn.Module] | None = None,
    steps: int = 1,
    accumulate: int = 1,
    sync: Literal["every", "last"] = "every",
    optimizer: OptimizerSpec | None = None,
    lr: float = 1e-2,
    resync: bool = False,
    after_backward: Callable[[nn.Module], Any] | None = None,
    record: bool = False,
) -> LockstepResult:
    """Train a sharded model and its reference side by side; call it on every rank of the default group.

    Args:
        build: returns the model, with the same values on every call and every rank.
        shard: shards the model it is given, in place; what it returns is not used.
        batches: this rank's micro-batches, used in turn and from the start again: micro-batch ``i`` of step ``s`` is
            ``batches[(s * accumulate + i) % len(batches)]``. Lengths may differ between ranks.
        build_reference: builds the reference if it must differ (fp32 master weights against bf16 weights).
        steps: optimizer steps; without an optimizer the gradients are dropped and the parameters stay.
        accumulate: micro-batches per step; their gradients add up.
        sync: whether FSDP reduces gradients after every micro-batch or after the last of a step only.
        optimizer: ``"sgd"`` (momentum 0.9), ``"adamw"`` (weight decay 0.1), or a function of the trainable parameters.
        lr: learning rate of the two named optimizers.
        resync: copy the sharded parameters into the reference after each optimizer step, once they are compared, so
            that rounding cannot grow and every step's forward must be bit-equal.
        after_backward: called with the sharded model after the last backward of a step, before gradients are compared.
        record: record the collectives of the sharded model's forward and backward in each step's ``collectives``.

    Raises:
        ValueError: the two models do not have the same parameters, or ``sync="last"`` on a root that is no FSDP unit.
    """
    if not batches or steps < 1 or accumulate < 1:
        raise ValueError("lockstep needs at least one batch, one step and one micro-batch per step")
    sharded = build()
    shard(sharded)
    reference = (build_reference or build)()
    if sync == "last" and not isinstance(sharded, FSDPModule):
        raise ValueError(f"sync='last' needs the root to be an FSDP unit, but it is a {type(sharded).__name__}")
    pairs = _pair(reference, sharded)
    whole = [name for name, (_, param) in pairs.items() if not isinstance(param, DTensor)]
    result = LockstepResult(dist.get_rank(), stepped=optimizer is not None, unsharded=whole)
    optimizers = [_optimizer(optimizer, model, lr) for model in (reference, sharded)] if optimizer else []

    for step in range(steps):
        found = StepResult(step)
        own: dict[str, torch.Tensor] = {}  # this rank's gradients of the reference, fp64, summed over micro-batches
        for micro in range(accumulate):
            batch = batches[(step * accumulate + micro) % len(batches)]
            expected_logits, expected_loss = _forward(reference, batch)
            expected_loss.backward()
            _take_grads(pairs, into=own)

            if sync == "last":
                cast(FSDPModule, sharded).set_requires_gradient_sync(micro == accumulate - 1)
            recorder = Recorder() if record else contextlib.nullcontext()
            with recorder:
                logits, loss = _forward(sharded, batch)
                loss.backward()
            if isinstance(recorder, Recorder):
                found.collectives += recorder.collectives
            found.bit_equal.append(_bit_equal(logits, expected_logits) and _bit_equal(loss, expected_loss))
            found.logit_error = max(found.logit_error, _max_difference(logits, expected_logits))
            found.loss += expected_loss.item()
        if after_backward is not None:
            after_backward(sharded)

        expected_grads = _mean_over_ranks(pairs, own)
        expected_grads.update({name: own.get(name) for name in whole})
        _compare_grads(pairs, expected_grads, found)
        if optimizers:
            for name, (param, _) in pairs.items():
                grad = expected_grads[name]
                # FSDP too hands the optimizer the reduced gradient in the storage dtype.
                param.grad = None if grad is None else grad.to(param.dtype)
            before = {name: param.detach().clone() for name, (param, _) in pairs.items()}
            for each in optimizers:
                each.step()
            _compare_params(pairs, before, found, resync=resync)
        for model in (reference, sharded):
            model.zero_grad(set_to_none=True)
        result.steps.append(found)
    return result


def token_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of ``batch``'s labelled tokens, in fp32, times its weight; 0 if no token has a label."""
    total = F.cross_entropy(logits.float().flatten(0, -2), batch.labels.flatten(), reduction="sum", ignore_index=-100)
    return total / max(int((batch.labels != -100).sum()), 1) * batch.weight


def logits_of(output: Any) -> torch.Tensor:
    """The logits in a model's output: the output itself, or its ``logits``."""
    return output if isinstance(output, torch.Tensor) else output.logits


def canonical(name: str) -> str:
    """``name`` without what activation checkpointing and ``torch.compile`` put into it.

    Written here a second time (the package has its own), so that a mistake there cannot hide from the comparison.
    """
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


_Pairs = dict[str, tuple[nn.Parameter, nn.Parameter]]


def _pair(reference: nn.Module, sharded: nn.Module) -> _Pairs:
    """Parameters of both models by name, in the reference's order. A tied parameter comes once, as torch names it."""
    ours, theirs = ({canonical(n): p for n, p in model.named_parameters()} for model in (reference, sharded))
    if ours.keys() != theirs.keys():
        raise ValueError(
            "the sharded model and the reference do not have the same parameters.\n"
            f"  only in the reference: {sorted(ours.keys() - theirs.keys())}\n"
            f"  only in the sharded model: {sorted(theirs.keys() - ours.keys())}"
        )
    return {name: (param, theirs[name]) for name, param in ours.items()}


def _forward(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits_of(model(input_ids=batch.input_ids))
    return logits.detach(), token_loss(logits, batch)


def _take_grads(pairs: _Pairs, *, into: dict[str, torch.Tensor]) -> None:
    """Move the reference's gradients into fp64 sums, so that micro-batches add up without rounding."""
    for name, (param, _) in pairs.items():
        if param.grad is not None:
            grad = param.grad.double()
            into[name] = into[name] + grad if name in into else grad
            param.grad = None


def _mean_over_ranks(pairs: _Pairs, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Average gradients over all ranks in fp64; no gradient counts as zero, unless no rank has one: ``None``."""
    missing = [torch.zeros(param.numel(), dtype=torch.float64) for param, _ in pairs.values()]
    flat = torch.cat([own[n].flatten() if n in own else zero for n, zero in zip(pairs, missing, strict=True)])
    has_grad = torch.tensor([name in own for name in pairs], dtype=torch.int32)
    dist.all_reduce(flat)
    dist.all_reduce(has_grad)
    parts = (flat / dist.get_world_size()).split([param.numel() for param, _ in pairs.values()])
    return {
        name: part.view(param.shape) if count else None
        for (name, (param, _)), part, count in zip(pairs.items(), parts, has_grad.tolist(), strict=True)
    }


def _compare_grads(pairs: _Pairs, expected: dict[str, torch.Tensor | None], found: StepResult) -> None:
    ranks_with_grad = torch.tensor([param.grad is not None for _, param in pairs.values()], dtype=torch.int32)
    dist.all_reduce(ranks_with_grad)
    for (name, (_, param)), count in zip(pairs.items(), ranks_with_grad.tolist(), strict=True):
        wanted = expected[name]
        if isinstance(param, DTensor) and 0 < count < dist.get_world_size():
            # Gathering it would hang: the ranks without a gradient have nothing to send.
            found.none_mismatch.append(f"{name}: a gradient on {count} of {dist.get_world_size()} ranks only")
        elif param.grad is None:
            if wanted is not None:
                found.none_mismatch.append(f"{name}: reference has a gradient, sharded None")
        else:
            grad = _full(param.grad)
            if wanted is None and not grad.any():
                found.zero_for_none.append(name)
            elif wanted is None:
                found.none_mismatch.append(f"{name}: reference None, sharded has a gradient")
            else:
                _note_worst(found, "grad", name, _relative(_distance(grad, wanted), wanted.norm()))


def _compare_params(pairs: _Pairs, before: dict[str, torch.Tensor], found: StepResult, *, resync: bool) -> None:
    for name, (expected, param) in pairs.items():
        value = _full(param.detach())
        wanted = expected.detach().double()
        distance = _distance(value, wanted)
        _note_worst(found, "param", name, _relative(distance, wanted.norm()))
        _note_worst(found, "update", name, _relative(distance, _distance(before[name], wanted)))
        if resync:
            with torch.no_grad():
                expected.copy_(value)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. A collective if it is sharded, so every rank calls it in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _distance(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if value.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(value.shape)} and {tuple(expected.shape)}")
    return (value.double() - expected.double()).norm()


def _relative(distance: torch.Tensor, norm: torch.Tensor) -> float:
    """``distance / norm``, with nothing to divide by if both are zero, and ``inf`` for what is not finite."""
    if distance == 0 and norm == 0:
        return 0.0
    error = (distance / norm).item()
    return error if math.isfinite(error) else math.inf


def _bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    difference = (a.double() - b.double()).abs().max().item()
    return difference if math.isfinite(difference) else math.inf


def _note_worst(found: StepResult, what: Literal["grad", "param", "update"], name: str, error: float) -> None:
    if error > getattr(found, f"{what}_error"):
        setattr(found, f"{what}_error", error)
        setattr(found, f"{what}_name", name)


def _optimizer(spec: OptimizerSpec, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    if callable(spec):
        return spec(params)
    # A foreach kernel takes either DTensors or plain tensors (`ignored_params`), so each has its own optimizer group.
    kinds = [[p for p in params if isinstance(p, DTensor)], [p for p in params if not isinstance(p, DTensor)]]
    groups = [{"params": kind} for kind in kinds if kind]
    if spec == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=True)
    if spec == "adamw":
        return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1, foreach=True)
    raise ValueError(f"optimizer must be 'sgd', 'adamw' or a function, got {spec!r}")


# --- The verdict -----------------------------------------------------------------------------------------------------


def assert_lockstep(
    results: Sequence[LockstepResult],
    *,
    grad_tol: float = 5e-3,
    param_tol: float | None = None,
    update_tol: float | None = None,
    drift_tol: float = 0.0,
    zero_for_none: Collection[str] | Literal["any"] = (),
    unsharded: Collection[str] = (),
) -> None:
    """Raise ``AssertionError`` unless every rank's sharded model did what the reference did.

    Args:
        results: what ``lockstep`` returned on each rank.
        grad_tol: largest relative gradient error. The default is the project's promise: a bf16 gradient carries 8 bits,
            so one rounding costs at most 2**-8 = 3.9e-3 per element.
        param_tol: largest ``param_error``; must be given if an optimizer ran, and argued where it is given.
        update_tol: largest ``update_error``, if it is to be checked.
        drift_tol: largest ``logit_error`` after the first step. The first step's forward must always be bit-equal, and
            later ones too, unless an optimizer ran without ``resync`` and the test allows for its rounding here.
        zero_for_none: parameters that may have a zero gradient where the reference has none (a tie's price), or "any".
        unsharded: the parameters that were to stay whole; exactly these must have.
    """
    if not results:
        raise ValueError("no results to judge")
    faults = functools.partial(
        _faults,
        grad_tol=grad_tol,
        param_tol=param_tol,
        update_tol=update_tol,
        drift_tol=drift_tol,
        zero_for_none=zero_for_none,
    )
    problems: list[str] = []
    for result in results:
        if result.stepped and param_tol is None:
            raise ValueError("an optimizer ran: say how far parameters may differ with param_tol")
        if set(result.unsharded) != set(unsharded):
            problems.append(
                f"rank {result.rank}: these parameters are whole on this rank: {result.unsharded}, "
                f"but these were to be: {sorted(unsharded)}"
            )
        for step in result.steps:
            problems += [f"rank {result.rank}, step {step.step}: {text}" for text in faults(step)]
    if problems:
        raise AssertionError("the sharded model does not follow its reference:\n" + "\n".join(problems))


def _faults(
    step: StepResult,
    *,
    grad_tol: float,
    param_tol: float | None,
    update_tol: float | None,
    drift_tol: float,
    zero_for_none: Collection[str] | Literal["any"],
) -> list[str]:
    faults = []
    unequal = [i for i, equal in enumerate(step.bit_equal) if not equal]
    if unequal and not (step.step > 0 and step.logit_error <= drift_tol):
        faults.append(
            f"the forward of micro-batch {', '.join(map(str, unequal))} is not bit-equal "
            f"(largest logit difference {step.logit_error:.3g})"
        )
    for what, error, name, tol in (
        ("gradient", step.grad_error, step.grad_name, grad_tol),
        ("parameter", step.param_error, step.param_name, param_tol),
        ("update", step.update_error, step.update_name, update_tol),
    ):
        if tol is not None and not error <= tol:
            faults.append(f"{what} of {name}: relative error {error:.3g}, allowed {tol:.3g}")
    faults += [f"gradient of {text}" for text in step.none_mismatch]
    if zero_for_none != "any":
        faults += [
            f"gradient of {name}: reference None, sharded zero"
            for name in step.zero_for_none
            if name not in zero_for_none
        ]
    return faults


# --- What is on the wire ---------------------------------------------------------------------------------------------

_KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
}


@dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it: what it is, and the tensor that this rank put in.

    ``kind`` is ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``barrier``, or the
    operator's own name. ``numel`` and ``dtype`` are those on the wire: FSDP sends a parameter group of several dtypes
    as ``uint8``, and pads dim 0 to a multiple of the ranks.
    """

    kind: str
    dtype: torch.dtype
    numel: int
    group_size: int


class Recorder(TorchDispatchMode):
    """Records every collective of a ``with`` block, in order, from FSDP, DTensor and plain ``torch.distributed`` alike.

    It reads the operators of the ``c10d`` and functional-collective namespaces from torch's dispatcher, in the thread
    that entered the block (on CPU, autograd runs a backward there).
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def count(self, kind: str, dtype: torch.dtype | None = None) -> int:
        """How many collectives of ``kind`` (and ``dtype``) there were."""
        return len(self._select(kind, dtype))

    def numel(self, kind: str, dtype: torch.dtype | None = None) -> int:
        """How many elements this rank put into them."""
        return sum(collective.numel for collective in self._select(kind, dtype))

    def counts(self) -> Counter[tuple[str, torch.dtype]]:
        """The number of collectives by kind and dtype."""
        return Counter((collective.kind, collective.dtype) for collective in self.collectives)

    def _select(self, kind: str, dtype: torch.dtype | None) -> list[Collective]:
        return [c for c in self.collectives if c.kind == kind and dtype in (None, c.dtype)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs it on local tensors, and its collectives come by here
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            names = [argument.name for argument in func._schema.arguments]
            group = next((i for i, name in enumerate(names) if name in ("process_group", "group_name")), None)
            if group is not None:
                first = next(i for i, name in enumerate(names) if name.startswith(("input", "tensor")))
                self._note(func._schema.name, args[first], args[group])
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, tensors: Any, group: Any) -> None:
        name = operator.split("::")[1].replace("_", "")
        kind = next((kind for part, kind in _KINDS.items() if part in name), operator)
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        elif isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
        flat = _flatten(tensors)
        self.collectives.append(Collective(kind, flat[0].dtype, sum(t.numel() for t in flat), group.size()))


def _flatten(tensors: Any) -> list[torch.Tensor]:
    """The tensors in an operator's argument: one, a list, or a list of lists."""
    return [tensors] if isinstance(tensors, torch.Tensor) else [leaf for part in tensors for leaf in _flatten(part)]
