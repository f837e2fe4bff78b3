"""Activation checkpointing that keeps what is small, needs no gradient and is dear to compute again.

A recomputed block runs twice: in forward, and in backward to have what autograd needs. Some of its results get no
gradient and are the same both times, first of all the choice of a frozen indexer, whose scores grow with the square of
the sequence. Whoever computes one does so by :func:`keep`, and :func:`checkpoint` holds it from one run to the other::

    output = checkpoint(block, hidden_states)           # in place of torch.utils.checkpoint.checkpoint

    choice = keep(indexer, lambda: choose(...))         # somewhere inside of the block

``parallelize(..., activation_checkpointing=True)`` does so. Transformers' own checkpointing does with
``model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": dsv4_fsdp.recomputation.contexts})``.

torch has selective checkpointing for this, which sends each operation of both runs through a dispatch mode in Python to
look for the few that are meant. Here nothing is paid where nothing is kept. Under ``torch.compile`` of the whole model
blocks are recomputed as by torch: there the compiler decides what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

__all__ = ["Run", "checkpoint", "contexts", "keep"]


class Run:
    """One run of a recomputed region, to be entered for its duration; a second run may be entered several times."""

    def __init__(self, results: list[tuple[nn.Module, torch.Tensor]], *, second: bool) -> None:
        self._results = results  # in the order in which they are asked for
        self._second = second
        self._position = 0
        self._tokens: list[Token[Run | None]] = []

    def __enter__(self) -> None:
        self._position = 0
        self._tokens.append(_running.set(self))

    def __exit__(self, *_: object) -> None:
        _running.reset(self._tokens.pop())

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept so far."""
        return sum(tensor.untyped_storage().nbytes() for _, tensor in self._results)

    def result(self, module: nn.Module, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See :func:`keep`."""
        if not self._second:
            tensor = compute()
            self._results.append((module, tensor))
            return tensor
        position, self._position = self._position, self._position + 1
        if position < len(self._results):
            owner, kept = self._results[position]
            if owner is module:
                return kept
        return compute()


_running: ContextVar[Run | None] = ContextVar("recomputed region", default=None)


def contexts() -> tuple[Run, Run]:
    """The ``context_fn`` of torch's non-reentrant checkpointing, for one region: contexts of its two runs.

    What is kept lives as long as the region's graph does.
    """
    results: list[tuple[nn.Module, torch.Tensor]] = []
    return Run(results, second=False), Run(results, second=True)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``, not reentrant, with what :func:`keep` is told of kept."""
    if torch.compiler.is_compiling():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@torch.no_grad()
def keep(module: nn.Module, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``compute()``, without a graph; in a recomputed region's second run what it returned in the first.

    Args:
        module: whose result it is. A region whose second run asks in another order than the first computes again.
        compute: a function of the region's inputs, parameters and buffers alone. It must not write anything: it is
            not called in a second run.
    """
    run = None if torch.compiler.is_compiling() else _running.get()
    return compute() if run is None else run.result(module, compute)
