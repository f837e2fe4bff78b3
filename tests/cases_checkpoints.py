"""Runs that save and resume with ``Checkpoints``; run inside ranks. What is about folders: cases_checkpoint_folders."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_faults import small_windows, step_loss, trainable_of, with_peft_model
from cases_integrations import load as load_with_transformers
from cases_optimizer_and_checkpoint import fingerprint
from cases_parity import mesh_of, whole_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dsv4_fsdp import keep_fp32_islands, parallelize
from dsv4_fsdp.train.checkpoint_pieces import CheckpointError, piece_of
from dsv4_fsdp.train.checkpoints import Checkpoints, Contents
from dsv4_fsdp.train.optimizer_settings import OptimizerSettings
from dsv4_fsdp.train.optimizers import make_optimizer, parameter_groups

MeshShape = tuple[int, ...]
LENGTH = 12


def contents(mesh: Mapping[str, int] | None = None, **over: Any) -> Contents:
    values = {
        "config_text": "steps: 4\n",
        "write_model_files": lambda folder: (folder / "config.json").write_text("{}"),
        "mesh": mesh or {"shard": dist.get_world_size()},
        "plan_hash": "0123",
        "source": None,
    }
    return Contents(**(values | over))


@contextlib.contextmanager
def notes() -> Iterator[list[str]]:
    """What the package logs on this rank."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dsv4_fsdp")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


# --- Whole runs -------------------------------------------------------------------------------------------------------


@dataclass
class Leg:
    """What one process group did of a run."""

    losses: list[float]
    loaded: str
    """Fingerprint of everything right after loading."""
    saved: str
    """The same right before the checkpoint was written."""
    end: str
    train: dict[str, Any]
    notes: list[str]


def build(mesh_shape: MeshShape, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny model in grouped units; position biases of 3 rows leave empty shards, those of 2 are cut along dim 1."""
    model = small_windows(seed)
    parallelize(model, mesh_of(mesh_shape))
    return model, torch.optim.AdamW(trainable_of(model), lr=1e-3, weight_decay=0.1, foreach=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int | None) -> float:
    """One optimizer step of two micro-batches with a schedule; with ``rank``, ranks differ and all generators count."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 + math.cos(step))
    losses = []
    for micro in range(2):
        loss = step_loss(model, "transformers", LENGTH + step, seed=1000 * (rank or 0) + 2 * step + micro)
        if rank is not None:
            loss = loss * (1 + torch.rand(()) + random.random() + float(np.random.rand()))
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses)


def leg(
    mesh_shape: MeshShape,
    folder: Path,
    steps: range,
    *,
    resume: bool,
    save_at: int | None,
    ranks_differ: bool = True,
    asynchronous: bool = False,
) -> Leg:
    """The steps of one process group. ``save_at`` is the step before which it saves and then goes on."""
    rank = dist.get_rank() if ranks_differ else None
    model, optimizer = build(mesh_shape, seed=1 if resume else 0)
    loaded = saved = ""
    found: dict[str, Any] = {}
    losses = []
    with notes() as said, Checkpoints(folder, keep=2, asynchronous=asynchronous) as checkpoints:
        if resume:
            checkpoint = checkpoints.latest()
            assert checkpoint is not None
            found = checkpoints.load(checkpoint, model, optimizer, seed=5)
            assert found["step"] == checkpoint.step == steps.start
            loaded = fingerprint(model, optimizer)
        for step in itertools.chain(steps, [None]):
            if step == save_at or (step is None and save_at == steps.stop):
                saved = fingerprint(model, optimizer)
                train = {"step": save_at, "position": 7 * dist.get_world_size(), "skipped": [1, 2]}
                checkpoints.save(save_at or 0, model, optimizer, train=train, contents=contents())
            if step is not None:
                losses.append(train_step(model, optimizer, step, rank))
    return Leg(losses, loaded, saved, fingerprint(model, optimizer), found, said)


# --- Expert parallelism -----------------------------------------------------------------------------------------------


def ep_leg(path: Path, folder: Path, steps: range, *, resume: bool, save: bool, **distributed: Any) -> Leg:
    """As :func:`leg`, of a model that transformers loads and distributes (or not at all, without ``distributed``)."""
    with keep_fp32_islands("transformers") if distributed else contextlib.nullcontext():
        model = load_with_transformers(path, **distributed)
    for name, param in model.named_parameters():
        if ".indexer." in name:
            param.requires_grad_(False)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid") and not resume:
                buffer.copy_((buffer + 1) % 6)
            elif name.endswith("e_score_correction_bias") and not resume:
                buffer.add_(2**-20)  # a change that bf16 would not hold
        if resume:
            for param in model.parameters():
                param.mul_(0.5)
    # One parameter at a time: experts and the rest are on two meshes.
    optimizer = torch.optim.AdamW(trainable_of(model), lr=1e-3, foreach=False)
    loaded = saved = ""
    found: dict[str, Any] = {}
    with notes() as said, Checkpoints(folder, keep=2) as checkpoints:
        if resume:
            checkpoint = checkpoints.latest()
            assert checkpoint is not None
            found = checkpoints.load(checkpoint, model, optimizer, seed=5)
            loaded = fingerprint(model, optimizer)
        losses = []
        for step in steps:
            loss = step_loss(model, "transformers", 40 + step, seed=step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if save:
            saved = fingerprint(model, optimizer)
            train = {"step": steps.stop}
            checkpoints.save(steps.stop, model, optimizer, train=train, contents=contents(distributed))
    return Leg(losses, loaded, saved, "", found, said)


def pieces_of_dispatched_experts(num_experts: int, num_efsdp: int, num_ep: int) -> tuple[list[int], int, int, str]:
    """Rows that this rank holds of experts cut by EP and then by FSDP; where its piece says they begin; placements."""
    mesh = init_device_mesh("cpu", (num_efsdp, num_ep), mesh_dim_names=("efsdp", "ep"))
    module = nn.Module()
    rows = torch.arange(num_experts, dtype=torch.float32).unsqueeze(1).repeat(1, 2)
    module.weight = nn.Parameter(distribute_tensor(rows, mesh["ep"], [Shard(0)]))
    torch_fully_shard(module, mesh=mesh["efsdp"])
    assert isinstance(module.weight, DTensor)
    piece = piece_of("weight", module.weight)
    assert piece.size == rows.shape
    return piece.local[:, 0].int().tolist(), piece.offsets[0], piece.offsets[1], str(module.weight.placements)


def refused_entries() -> list[str]:
    """Errors of tensors that no checkpoint can hold."""
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    strided = distribute_tensor(torch.arange(8.0), mesh, [_StridedShard(0, split_factor=2)])
    return [error_of(lambda: piece_of("w", partial)), error_of(lambda: piece_of("w", strided))]


# --- A model of two weights, for everything about folders ------------------------------------------------------------


class Two(nn.Module):
    """Two weights and two buffers of the kinds that get lost."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, 6, bias=False)
        self.second = nn.Linear(6, 1, bias=False, dtype=torch.float32)
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("bias", torch.full((3,), 1 + 2**-20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def two(
    width: int = 4, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[Two, torch.optim.Optimizer]:
    model = Two(width)
    torch_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, optimizer(model.parameters(), lr=0.1)


def train_two(model: Two, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        model(torch.full((2, model.first.in_features), 1.0 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def publish(folder: Path, steps: list[int], *, keep: int = 9) -> None:
    """Checkpoints of a model of two weights."""
    model, optimizer = two()
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            train_two(model, optimizer)
            checkpoints.save(step, model, optimizer, train={"step": step}, contents=contents())


# --- What does not fit ------------------------------------------------------------------------------------------------


def misfits(folder: Path) -> dict[str, str]:
    """Errors of loading a checkpoint of two weights and AdamW into something else; nothing may change by it."""
    publish(folder, [3])
    errors = {}

    def attempt(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = [p.to_local().clone() for p in model.parameters()]
        checkpoints = Checkpoints(folder, keep=1)
        found = checkpoints.latest()
        assert found is not None
        errors[name] = error_of(lambda: checkpoints.load(found, model, optimizer, seed=0))
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True)), name

    attempt("shape", *two(width=8))
    model, optimizer = two(optimizer=torch.optim.RMSprop)
    attempt("optimizer", model, optimizer)
    model, optimizer = two()
    train_two(model, optimizer)
    attempt("stepped", model, optimizer)

    def odd(change: Callable[[Two], Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Two()
        change(model)
        torch_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    attempt("dtype", *odd(lambda model: model.bfloat16()))
    attempt("names", *odd(lambda model: setattr(model, "third", model.__dict__["_modules"].pop("second"))))
    attempt("frozen", *odd(lambda model: model.first.requires_grad_(False)))
    model, _ = two()
    attempt("amsgrad", model, torch.optim.AdamW(model.parameters(), amsgrad=True))
    return errors


def changed_options(folder: Path) -> list[str]:
    """Notes of loading into an AdamW with other options."""
    publish(folder, [3])
    model, _ = two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9), weight_decay=0.25)
    with notes() as said, Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.latest()
        assert found is not None
        checkpoints.load(found, model, optimizer, seed=0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert optimizer.param_groups[0]["lr"] == 0.5
    return said


# --- Optimizers -------------------------------------------------------------------------------------------------------


class WideMoments(torch.optim.Optimizer):
    """Momentum in fp32 whatever the weight's dtype, a step count that is a plain int, and a string."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"count": 0, "kind": "new", "momentum": torch.zeros_like(param, dtype=torch.float32)}
                state["count"] += 1
                state["kind"] = "used"
                state["momentum"].mul_(0.9).add_(param.grad.float() * 1.001)
                param.add_(state["momentum"].to(param.dtype), alpha=-float(group["lr"]))


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """One of the trainer's own by its name, or what it has not."""
    params = list(model.parameters())
    if kind == "two of torch's":
        return [torch.optim.Muon(params[:1], lr=0.1), torch.optim.AdamW(params[1:], lr=0.1)]
    if kind == "sgd":
        return [torch.optim.SGD(params, lr=0.1)]
    if kind == "wide":
        return [WideMoments(params)]
    if kind == "torchao 8 bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(params, lr=0.1, block_size=64)]
    settings = OptimizerSettings.model_validate({"name": kind, "lr": 0.1})
    return [make_optimizer(parameter_groups(model, settings, islands=()), settings, seed=0)]


def with_optimizer(kind: str, folder: Path) -> tuple[list[float], list[float]]:
    """Sums of the weights in the steps after a save, uninterrupted and resumed."""
    # On bf16 DTensors the step of torchao 0.18's own 8-bit optimizer fails.
    dtype = torch.float32 if kind == "torchao 8 bit" else torch.bfloat16
    # It compiles its step, for 18 s.
    eager = torch.compiler.set_stance("force_eager") if kind == "torchao 8 bit" else contextlib.nullcontext()
    with eager:
        return _with_optimizer(kind, folder, dtype)


def _with_optimizer(kind: str, folder: Path, dtype: torch.dtype) -> tuple[list[float], list[float]]:

    def start(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 128, bias=False)).to(dtype)
        torch_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, make_optimizers(kind, model)

    def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], which: range) -> list[float]:
        sums = []
        for step in which:
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 128, generator=generator).to(dtype)).float().square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            sums += [p.full_tensor().double().square().sum().item() for p in model.parameters()]
        return sums

    model, optimizers = start(0)
    steps(model, optimizers, range(2))
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(2, model, optimizers, train={}, contents=contents())
    expected = steps(model, optimizers, range(2, 4))
    model, optimizers = start(1)
    with Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.latest()
        assert found is not None
        checkpoints.load(found, model, optimizers, seed=0)
    if kind == "wide":
        assert {(s["count"], s["kind"], s["momentum"].dtype) for s in optimizers[0].state.values()} == {
            (2, "used", torch.float32)
        }
    return expected, steps(model, optimizers, range(2, 4))


def no_gradient_so_far(folder: Path) -> tuple[list[str], list[str], list[int], float, float]:
    """A weight that gets its first gradient after the save: entries saved, states after load, step counts, results."""

    def start() -> tuple[Two, torch.optim.Optimizer]:
        torch.manual_seed(3)
        return two()

    def first_only(model: Two, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).backward()
        model.second.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = start()
    first_only(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert not isinstance(model.first.weight, DTensor), "an evaluation was to leave the root gathered"
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, model, optimizer, train={}, contents=contents())
    train_two(model, optimizer)
    resumed, resumed_optimizer = start()
    with Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.latest()
        assert found is not None
        checkpoints.load(found, resumed, resumed_optimizer, seed=0)
    with_state = [name for name, param in resumed.named_parameters() if param in resumed_optimizer.state]
    train_two(resumed, resumed_optimizer)
    steps = [int(resumed_optimizer.state[param]["step"]) for param in resumed.parameters()]
    saved = dcp.FileSystemReader(folder / "step-00000001" / "state").read_metadata().state_dict_metadata
    weights = [m.second.weight.full_tensor().sum().item() for m in (model, resumed)]
    return sorted(name for name in saved if name.startswith("optimizer.")), with_state, steps, *weights


def before_the_first_step(folder: Path) -> tuple[int, int, int]:
    """State entries after a save, and after a load, of an optimizer that has not stepped; its count one step on."""
    model, optimizer = two()
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(0, model, optimizer, train={}, contents=contents())
        found = checkpoints.latest()
        assert found is not None
        resumed, resumed_optimizer = two()
        checkpoints.load(found, resumed, resumed_optimizer, seed=0)
    sizes = len(optimizer.state), len(resumed_optimizer.state)
    train_two(resumed, resumed_optimizer)
    return *sizes, int(resumed_optimizer.state[resumed.first.weight]["step"])


# --- Names ------------------------------------------------------------------------------------------------------------


def wrapped(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model by canonical names: as it is, inside activation checkpointing, compiled, or inside peft's own."""
    if "peft" in how:
        model = with_peft_model()
    else:
        model = whole_model("transformers", tie_word_embeddings="tied" in how)
    parallelize(model, mesh_of((2,)), activation_checkpointing="recomputed" in how)
    return model, torch.optim.AdamW(trainable_of(model), lr=1e-3, foreach=True)


def names_in_checkpoint(how: str, folder: Path, load_as: str) -> tuple[list[str], bool]:
    """Names that a wrapped model's checkpoint has, and whether it loads into a model that is wrapped otherwise."""
    model, optimizer = wrapped(how)
    step_loss(model, "transformers", 40).backward()
    optimizer.step()
    optimizer.zero_grad()
    outer: nn.Module = torch.compile(model) if "compiled" in how else model  # type: ignore[assignment]
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, outer, optimizer, train={"step": 1}, contents=contents())
        found = checkpoints.latest()
        assert found is not None
        other, other_optimizer = wrapped(load_as)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        checkpoints.load(found, other, other_optimizer, seed=0)
    metadata = dcp.FileSystemReader(found.path / "state").read_metadata().state_dict_metadata
    same = all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    return sorted(metadata), same


def read_with_plain_dcp(folder: Path) -> dict[str, tuple[str, list[float]]]:
    """What torch's own ``dcp.load`` reads of a checkpoint, into plain tensors."""
    publish(folder, [1])
    state = folder / "step-00000001" / "state"
    saved = dcp.FileSystemReader(state).read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith("model.")
    }
    dcp.load(found, checkpoint_id=state)
    return {name: (str(t.dtype), t.flatten()[:5].tolist()) for name, t in found.items()}
