"""A training run's state as entries of a checkpoint, and back: weights, optimizer state, random states.

**Names.** Each entry's name is made of canonical names (:func:`dsv4_fsdp.names.canonical_name`), so what wraps a module
when it is saved (activation checkpointing, ``torch.compile``, peft) need not wrap it when it is loaded::

    model.<name>                    every parameter (a tied one under its first name) and every persistent buffer
    optimizer.state.<name>.<key>    what the optimizer keeps for a parameter: exp_avg, step, ...
    optimizer.groups                kind of optimizer, options and names of each parameter group
    train.<key>                     the caller's own values
    rng.<rank>.<kind>               random states of each rank: cpu, the accelerator's, python, numpy

**Optimizer.** Names come from DCP's getter (an optimizer's own ``state_dict`` numbers its parameters, in an order that
nothing guarantees). Loading writes *into* the tensors that the optimizer makes for itself, for
``Optimizer.load_state_dict`` would cast each moment to its parameter's dtype, and round fp32 moments of bf16 weights. A
parameter that had no state when the checkpoint was written (no gradient so far: a compressor without a window) has none
afterwards. Options (``weight_decay``, ...) are not restored: the run's configuration says what they are; differences
are reported.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from dsv4_fsdp.errors import listing
from dsv4_fsdp.names import canonical_name

from .checkpoint_pieces import CheckpointError, Piece, piece_of

__all__ = [
    "OPTIMIZER_GROUPS",
    "OptimizerState",
    "group_entries",
    "group_problems",
    "mismatches",
    "model_entries",
    "optimizer_entries",
    "option_notes",
    "random_entries",
    "restore_random",
    "seed_random",
]

OPTIMIZER_GROUPS = "optimizer.groups"
_STATE = "optimizer.state."
# The loop sets the rate anew at each step, a group's name may say its mesh, and the others say how a step is computed,
# not what it is.
_NOT_COMPARED = frozenset({"params", "lr", "initial_lr", "name", "foreach", "fused", "capturable"})


# --- Weights ----------------------------------------------------------------------------------------------------------


def model_entries(model: nn.Module) -> dict[str, Any]:
    """``model.<name>`` -> piece, sharing the model's memory.

    Call it before anything else here: DCP's getter has FSDP2 reshard what the last forward left gathered, and the
    optimizer knows the sharded parameters only.
    """
    once = {canonical_name(name) for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    entries: dict[str, Any] = {}
    for fqn, tensor in get_model_state_dict(model).items():
        name = canonical_name(fqn)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"a checkpoint cannot hold {name}: it is no tensor, but {type(tensor).__name__}")
        if f"model.{name}" in entries:
            raise CheckpointError(f"two tensors of the model have the canonical name {name}; one of them is {fqn}")
        if name in once:
            entries[f"model.{name}"] = piece_of(name, tensor)
    return entries


def mismatches(wanted: Mapping[str, Any], saved: Mapping[str, Any], *, prefix: str, owner: str) -> list[str]:
    """In words, what of ``wanted`` (name -> piece or value) is not as ``saved`` (DCP's metadata) has it.

    Args:
        prefix: only names that begin with it, and without it in the words.
        owner: whose they are, for the words.
    """
    problems = []
    if missing := [name.removeprefix(prefix) for name in wanted if name not in saved]:
        problems.append(f"{len(missing)} tensors of the {owner} are not in the checkpoint:\n{listing(missing)}")
    if extra := [name.removeprefix(prefix) for name in saved if name.startswith(prefix) and name not in wanted]:
        problems.append(f"{len(extra)} tensors of the checkpoint are not in the {owner}:\n{listing(sorted(extra))}")
    shapes, dtypes = [], []
    for name, piece in wanted.items():
        there, short = saved.get(name), name.removeprefix(prefix)
        if there is None or isinstance(there, TensorStorageMetadata) != isinstance(piece, Piece):
            if there is not None:
                shapes.append(f"{short}: a tensor on one side, a plain value on the other")
        elif isinstance(there, TensorStorageMetadata):
            if there.size != piece.size:
                shapes.append(f"{short}: {tuple(there.size)} saved, {tuple(piece.size)} here")
            elif there.properties.dtype != piece.local.dtype:
                dtypes.append(f"{short}: {there.properties.dtype} saved, {piece.local.dtype} here")
    if shapes:
        problems.append(f"{len(shapes)} tensors of the {owner} have another shape:\n{listing(shapes)}")
    if dtypes:
        problems.append(f"{len(dtypes)} tensors of the {owner} have another dtype:\n{listing(dtypes)}")
    return problems


# --- Optimizer --------------------------------------------------------------------------------------------------------


def group_entries(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """What ``optimizer.groups`` holds: of each parameter group ``kind``, ``options`` and ``params`` (names)."""
    names = {param: canonical_name(name) for name, param in model.named_parameters()}
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if strange := [param for param in group["params"] if param not in names]:
                raise CheckpointError(
                    f"{len(strange)} parameters of the optimizer are not the model's, the first of shape "
                    f"{tuple(strange[0].shape)}.\nwhat to do: make the optimizer after sharding the model."
                )
            options = {key: _plain(value) for key, value in group.items() if key != "params"}
            params = [names[param] for param in group["params"]]
            groups.append({"kind": type(optimizer).__name__, "options": options, "params": params})
    return groups


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def optimizer_entries(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """``optimizer.state.<name>.<key>`` -> piece or value, for the parameters that have state.

    An optimizer that has not stepped yet has no entries: DCP's getter would make state by a step without gradients,
    which AdamW counts.
    """
    return {
        f"{_STATE}{canonical_name(fqn)}.{key}": _entry(f"{key} of {fqn}", value)
        for fqn, state in _state_by_name(model, [optimizer for optimizer in optimizers if optimizer.state]).items()
        for key, value in state.items()
    }


def _state_by_name(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """The optimizers' state by parameter, as DCP's getter names it; it makes state where there is none."""
    return dict(cast(Any, get_optimizer_state_dict(model, optimizers)["state"])) if optimizers else {}


def _entry(what: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return piece_of(what, value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"a checkpoint cannot hold the optimizer's {what}: it is a {type(value).__name__}.\n"
        "expected: tensors, numbers, strings\nwhat to do: use another optimizer."
    )


class OptimizerState:
    """The state of freshly made optimizers, as something to load into.

    Args:
        saved: DCP's metadata of the checkpoint.

    Attributes:
        entries: ``optimizer.state.<name>.<key>`` -> piece of the live state, for the parameters whose state was saved.
            Give them to :func:`~.checkpoint_pieces.load_pieces`, then to :meth:`finish`.
        problems: in words, what of it was not saved, or would not find its place.

    Raises:
        CheckpointError: an optimizer has stepped already.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Mapping[str, Any]) -> None:
        self._names = {param: canonical_name(name) for name, param in model.named_parameters()}
        self._stateful = {_param_of(name) for name in saved if name.startswith(_STATE)}
        for optimizer in optimizers:
            if optimizer.state:
                raise CheckpointError(
                    f"the {type(optimizer).__name__} to load a checkpoint into has stepped already.\n"
                    "what to do: load the checkpoint right after making the optimizer."
                )
            optimizer.zero_grad()  # with gradients there, DCP's getter would not make the state
        # One whose parameters all had no state yet must not get any.
        self._optimizers = [o for o in optimizers if any(self._names[p] in self._stateful for p in _params_of(o))]
        self.entries = {
            f"{_STATE}{canonical_name(fqn)}.{key}": _entry(f"{key} of {fqn}", value)
            # The getter lets each optimizer make its state, by a step with lr 0 and gradients of zero.
            for fqn, state in _state_by_name(model, self._optimizers).items()
            if canonical_name(fqn) in self._stateful
            for key, value in state.items()
        }
        self.problems = mismatches(self.entries, saved, prefix=_STATE, owner="optimizer")

    def finish(self, loaded: Mapping[str, Any]) -> None:
        """After loading: put values that are no tensors into their place; take away state that was not saved."""
        for optimizer in self._optimizers:
            for param in _params_of(optimizer):
                name = self._names[param]
                if name not in self._stateful:
                    optimizer.state.pop(param, None)
                    continue
                for key in optimizer.state[param]:
                    value = loaded[f"{_STATE}{name}.{key}"]
                    if not isinstance(value, Piece):
                        optimizer.state[param][key] = value

    def was_trained(self) -> bool:
        """Whether what was loaded on this rank looks like it: every step count above 0, and some moment not zero."""
        tensors = {name: entry.local for name, entry in self.entries.items() if isinstance(entry, Piece)}
        steps = [tensor for name, tensor in tensors.items() if name.endswith(".step")]
        moments = (
            # Moments in 8 bits (torchao) can become plain ones, and little else.
            tensor if type(tensor) is torch.Tensor else tensor.dequantize()
            for name, tensor in tensors.items()
            if not name.endswith(".step")
        )
        return all(bool((step > 0).all()) for step in steps) and any(bool(tensor.any()) for tensor in moments)


def _param_of(entry_name: str) -> str:
    """The parameter's name in ``optimizer.state.<name>.<key>``; a key has no dot."""
    return entry_name.removeprefix(_STATE).rpartition(".")[0]


def _params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def group_problems(saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, why optimizers with the groups ``here`` cannot go on where those with the groups ``saved`` stopped."""
    kinds_saved, kinds_here = _by_param(saved, "kind"), _by_param(here, "kind")
    problems = []
    if missing := sorted(kinds_saved.keys() - kinds_here.keys()):
        problems.append(
            f"{len(missing)} parameters were trained and now are not (frozen, or left out):\n{listing(missing)}"
        )
    if new := sorted(kinds_here.keys() - kinds_saved.keys()):
        problems.append(f"{len(new)} parameters are trained now and were not:\n{listing(new)}")
    changed = {(kinds_saved[name], kind) for name, kind in kinds_here.items() if kinds_saved.get(name, kind) != kind}
    problems += [f"the optimizer was {old} and is {new} now" for old, new in sorted(changed)]
    return problems


def option_notes(saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, which options of the optimizer differ. Those ``here`` count."""
    before, now = _by_param(saved, "options"), _by_param(here, "options")
    differences: dict[tuple[str, str, str], int] = {}
    for name, options in now.items():
        old = before.get(name, {})
        for key in options.keys() & old.keys() - _NOT_COMPARED:
            if _comparable(old[key]) != _comparable(options[key]):
                what = (key, str(old[key]), str(options[key]))
                differences[what] = differences.get(what, 0) + 1
    return [
        f"the optimizer's {key} was {old} in the checkpoint and is {new} now, for {count} parameters"
        for (key, old, new), count in sorted(differences.items())
    ]


def _by_param(groups: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    return {name: group[what] for group in groups for name in group["params"]}


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- Random states ----------------------------------------------------------------------------------------------------


def random_entries(rank: int) -> dict[str, Any]:
    """``rng.<rank>.<kind>`` -> the state of each random generator that this process has in use."""
    prefix = f"rng.{rank}."
    entries: dict[str, Any] = {f"{prefix}cpu": piece_of("rng", torch.get_rng_state())}
    if (accelerator := _accelerator()) is not None:
        state = torch.get_device_module(accelerator).get_rng_state()
        entries[f"{prefix}{accelerator.type}"] = piece_of("rng", state)
    entries[f"{prefix}python"] = json.dumps(random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        entries[f"{prefix}numpy"] = json.dumps([kind, keys.tolist(), *rest])
    return entries


def restore_random(rank: int, loaded: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`random_entries` of the same rank found."""
    prefix = f"rng.{rank}."
    torch.set_rng_state(loaded[f"{prefix}cpu"].local)
    accelerator = _accelerator()
    if accelerator is not None and f"{prefix}{accelerator.type}" in loaded:
        torch.get_device_module(accelerator).set_rng_state(loaded[f"{prefix}{accelerator.type}"].local)
    version, internal, gauss = json.loads(loaded[f"{prefix}python"])
    random.setstate((version, tuple(internal), gauss))
    if f"{prefix}numpy" in loaded and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = json.loads(loaded[f"{prefix}numpy"])
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def seed_random(*, seed: int, step: int, rank: int) -> None:
    """Seed the generators by (seed, step, rank): for a number of ranks that no states were saved for."""
    drawn = random.Random(f"dsv4_fsdp resume: seed {seed}, step {step}, rank {rank}").getrandbits(32)
    torch.manual_seed(drawn)  # the accelerators' too
    random.seed(drawn)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(drawn)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)
