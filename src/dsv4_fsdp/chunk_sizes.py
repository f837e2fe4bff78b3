"""Whether blocks of attention scores have the size for a CPU, whose cache they should fit, or for an accelerator.

What is planned on fake CPU tensors will run on an accelerator: :func:`as_on_an_accelerator` makes it run as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["are_for_cpu", "as_on_an_accelerator"]

_pretending = False


def are_for_cpu(device: torch.device) -> bool:
    """Whether tensors on ``device`` are cut for a CPU."""
    return device.type == "cpu" and not _pretending


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Cut tensors on the CPU as if they were on an accelerator. In all threads: autograd has some of its own."""
    global _pretending
    before, _pretending = _pretending, True
    try:
        yield
    finally:
        _pretending = before
