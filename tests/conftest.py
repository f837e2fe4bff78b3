"""What all tests share: the pool of ranks."""

from collections.abc import Callable
from typing import Any

import pytest

import pool


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`pool.run_ranks`: run a module-level function on 1 to 4 gloo ranks."""
    return pool.run_ranks


def pytest_sessionfinish() -> None:
    pool.close_pool()
