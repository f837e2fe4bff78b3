"""What autograd keeps of a forward, and how much memory comes and goes beside it, per kind of block.

Measured, not derived: the model's own code runs forward and backward on fake tensors (no memory, no arithmetic), one
block of each kind, at the asked batch and sequence. Saved-tensor hooks say which storages autograd keeps; each counts
once, in the first block that keeps it; parameters and buffers do not count, they are there anyway. Blocks are of one
kind if their modules have the same classes, shapes and dtypes.

The fake device is the CPU with Transformers' default expert implementation (``grouped_mm``) and the model's attention
(eager keeps several matrices of heads x tokens x keys, most of what there is at 4,096 tokens). The loss is the one that
the trainer is told to take, over all positions. Where the embedding is frozen, blocks before the first trainable
parameter keep nothing, and the block that holds it less than others of its kind, so it is measured by itself.

With activation checkpointing a block keeps its input and what :mod:`dsv4_fsdp.recomputation` keeps of it, a frozen
indexer's choice above all, and is run again in backward. That the second run makes less of its own is not counted.
Under expert parallelism a rank's experts see as many rows as they would without, on average.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dsv4_fsdp import recomputation
from dsv4_fsdp.alignment import indexer_parameters
from dsv4_fsdp.chunk_sizes import as_on_an_accelerator
from dsv4_fsdp.chunked_loss import with_chunked_loss
from dsv4_fsdp.model_layout import layout_of
from dsv4_fsdp.torch_private import FakeTensorMode, TorchDispatchMode, pytree

__all__ = ["Activations", "BlockActivations", "Part", "measure_activations"]


@dataclass(frozen=True)
class Part:
    """A stretch of the forward, in bytes.

    Attributes:
        saved_bytes: storages that autograd keeps from here and that no earlier part kept.
        forward_peak_bytes: most that was live during its forward, above what was live at its start; what it keeps and
            its output are in it.
        backward_peak_bytes: most that was live during its backward above what was live at its start, without the
            gradients of parameters.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int


@dataclass(frozen=True)
class BlockActivations:
    """Blocks of one kind: its name, which of the model's blocks (by index) are of it, and one block's bytes.

    ``recomputed_bytes`` is what is kept of a block that is run again in backward.
    """

    kind: str
    indices: tuple[int, ...]
    recomputed_bytes: int
    part: Part


@dataclass(frozen=True)
class Activations:
    """A whole forward of ``batch`` sequences of ``sequence`` tokens on one rank.

    ``prelude`` is what comes before the blocks (embedding, RoPE tables, mask), ``epilogue`` what comes after them
    (last norm, head, loss).
    """

    batch: int
    sequence: int
    prelude: Part
    blocks: tuple[BlockActivations, ...]
    epilogue: Part

    def of_block(self, index: int) -> BlockActivations:
        """The kind of the block with that index."""
        return next(block for block in self.blocks if index in block.indices)

    def kept_by_block(self, index: int, *, checkpointing: bool) -> int:
        """Bytes kept between forward and backward of that block."""
        block = self.of_block(index)
        return block.recomputed_bytes if checkpointing else block.part.saved_bytes

    def saved_bytes(self, *, checkpointing: int) -> int:
        """All that is kept at the end of the forward; ``checkpointing`` n: every n-th block is recomputed (0: none)."""
        blocks = sum(
            block.recomputed_bytes if checkpointing and index % checkpointing == 0 else block.part.saved_bytes
            for block in self.blocks
            for index in block.indices
        )
        return self.prelude.saved_bytes + blocks + self.epilogue.saved_bytes


def measure_activations(
    model: nn.Module, *, batch: int, sequence: int, loss: str, names: Sequence[str] | None = None
) -> Activations:
    """Run ``model``, which is on meta and is used up by this, on fake tensors.

    Args:
        loss: ``"chunked"`` (:mod:`dsv4_fsdp.chunked_loss`) or ``"stock"``.
        names: what to call each block, in order; default the names of their classes.
    """
    layout = layout_of(model)
    blocks = [model.get_submodule(name) for name in layout.blocks]
    for param in indexer_parameters(model).values():
        param.requires_grad_(False)  # as the plan does
    first = _first_reached(model, blocks)
    kinds: dict[Hashable, list[int]] = {}
    for index, block in enumerate(blocks):
        kinds.setdefault((min(2, max(0, index - first + 1)), _kind_of(block)), []).append(index)
    chosen = [indices[0] for indices in kinds.values()]
    _keep_blocks(model, layout.blocks, chosen)
    with as_on_an_accelerator():
        run = _run([blocks[index] for index in chosen], model, batch, sequence, loss)
    return Activations(
        batch,
        sequence,
        run[0].part,
        tuple(
            BlockActivations(
                names[indices[0]] if names else type(blocks[indices[0]]).__name__,
                tuple(indices),
                measured.recomputed_bytes,
                measured.part,
            )
            for indices, measured in zip(kinds.values(), run[1:-1], strict=True)
        ),
        run[-1].part,
    )


@dataclass(frozen=True)
class _Measured:
    part: Part
    recomputed_bytes: int


def _first_reached(model: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """The first block that backward reaches, if that is not the embedding: then -1."""
    if any(param.requires_grad for param in _embedding(model).parameters()):
        return -1
    trains = (i for i, block in enumerate(blocks) if any(param.requires_grad for param in block.parameters()))
    return next(trains, len(blocks))


def _embedding(model: nn.Module) -> nn.Module:
    found = model.get_input_embeddings()  # type: ignore[operator]
    assert isinstance(found, nn.Module)
    return found


def _kind_of(block: nn.Module) -> Hashable:
    return tuple(
        (
            name,
            type(module),
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
        )
        for name, module in block.named_modules()
    )


def _keep_blocks(model: nn.Module, names: Sequence[str], chosen: Sequence[int]) -> None:
    """Take the other blocks out of their list, which the model's forward walks."""
    parent_name = names[0].rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    if not isinstance(parent, nn.ModuleList) or any(name.rpartition(".")[0] != parent_name for name in names):
        return  # every block is run then, each a kind of its own or not: slower, and as true
    owner_name, _, attribute = parent_name.rpartition(".")
    setattr(model.get_submodule(owner_name), attribute, nn.ModuleList(parent[index] for index in chosen))


class _Ledger(TorchDispatchMode):
    """Every storage that is made inside, when it comes and when it goes; and marks between."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []  # (storage number, bytes: positive when made, negative when freed)
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, which is noted if it is new."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            self._count += 1
            number = self._numbers[storage] = self._count
            num_bytes = storage.nbytes()
            self.changes.append((number, num_bytes))
            weakref.finalize(storage, self.changes.append, (number, -num_bytes)).atexit = False
        return number

    def mark(self) -> int:
        return len(self.changes)

    def peak(self, start: int, end: int, *, without: frozenset[int] = frozenset()) -> int:
        """Most that was live between two marks, above what was live at the first."""
        live = peak = 0
        for number, change in self.changes[start:end]:
            if number not in without:
                live += change
                peak = max(peak, live)
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False  # "Does a position restart?", asks windowed attention: not in rows of one document
        if func is torch.ops.aten.nonzero.default:
            # "Which tokens have a label?", asks the chunked loss: all of them.
            return torch.arange(args[0].numel(), device=args[0].device).unsqueeze(1)
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.number_of(leaf)
        return out


def _run(blocks: Sequence[nn.Module], model: nn.Module, batch: int, sequence: int, loss_kind: str) -> list[_Measured]:
    """Prelude, the blocks, epilogue."""
    num_parts = len(blocks) + 2
    saved: list[dict[int, int]] = [{} for _ in range(num_parts)]
    recomputed = [0] * num_parts
    running: list[recomputation.Run] = []
    forward_marks: list[int] = []
    backward_marks: dict[int, int] = {}  # part -> when its backward begins
    ledger = _Ledger()

    with FakeTensorMode(), ledger:
        _make_fake(model)
        own = {ledger.number_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        known = set(own)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            number = ledger.number_of(tensor)
            if number not in known:
                known.add(number)
                saved[len(forward_marks) - 1][number] = tensor.untyped_storage().nbytes()
            return tensor

        def begins_in_backward(part: int) -> Callable[[torch.Tensor], None]:
            def note(_: torch.Tensor) -> None:
                backward_marks.setdefault(part, ledger.mark())

            return note

        def before(part: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
                tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                # What all blocks are handed (RoPE tables, mask, ids) was made by the prelude and stays for all of them.
                for tensor in tensors:
                    number = ledger.number_of(tensor)
                    if tensor is tensors[0]:  # hidden states
                        recomputed[part] += tensor.untyped_storage().nbytes()
                        if tensor.requires_grad:
                            tensor.register_hook(begins_in_backward(part - 1))
                    elif number not in known:
                        known.add(number)
                        saved[0][number] = tensor.untyped_storage().nbytes()
                forward_marks.append(ledger.mark())
                running.append(recomputation.contexts()[0])
                running[-1].__enter__()

            return hook

        def after(part: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, output: Any) -> None:
                running[-1].__exit__()
                recomputed[part] += running.pop().kept_bytes
                if part == num_parts - 2:
                    for leaf in pytree.tree_leaves(output):
                        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                            leaf.register_hook(begins_in_backward(part))
                    forward_marks.append(ledger.mark())

            return hook

        handles = [h for i, b in enumerate(blocks, 1) for h in _hook(b, before(i), after(i))]
        try:
            forward_marks.append(ledger.mark())
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = _loss(model, torch.zeros(batch, sequence, dtype=torch.int64), loss_kind)
            forward_marks.append(ledger.mark())
            backward_marks[num_parts - 1] = ledger.mark()
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        backward_end = ledger.mark()
        gradients = frozenset(ledger.number_of(p.grad) for p in model.parameters() if p.grad is not None)

    measured = []
    for part in range(num_parts):
        start = backward_marks.get(part, backward_end)  # it may have none
        end = backward_marks.get(part - 1, backward_end)
        measured.append(
            _Measured(
                Part(
                    sum(saved[part].values()),
                    ledger.peak(forward_marks[part], forward_marks[part + 1]),
                    ledger.peak(start, end, without=gradients),
                ),
                recomputed[part] if part in backward_marks else 0,
            )
        )
    return measured


def _hook(block: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    return [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]


def _make_fake(model: nn.Module) -> None:
    """Put fake CPU tensors in place of the meta ones."""
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in made:
                    fake = torch.empty(param.shape, dtype=param.dtype, device="cpu")
                    made[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
                module._parameters[name] = made[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _loss(model: nn.Module, input_ids: torch.Tensor, kind: str) -> torch.Tensor:
    """The trainer's: see ``dsv4_fsdp.train.loop``. Every position has a label."""
    if kind == "chunked":
        return with_chunked_loss(model)(input_ids, input_ids).loss_sum
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), input_ids.flatten(), reduction="sum")
