"""What all tests share: the pool of ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pool


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`pool.run_ranks`: run a module-level function on 1 to 4 gloo ranks."""
    return pool.run_ranks


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors in one thread: on a busy machine a second one costs thirty times what it saves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_sessionfinish() -> None:
    pool.close_pool()
