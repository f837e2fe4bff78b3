"""The errors that this package raises for its user's mistakes.

    Dsv4FsdpError
    ├── ContractError    which tensors must be fp32, and whether they still are (also a ValueError)
    ├── CheckpointError  a checkpoint that cannot be read as the model it should be (also a ValueError)
    ├── ShardingError    a unit that cannot be built or would compute something else (also a ValueError)
    ├── ExportError      an export that cannot be made, or is not the trained model (also a RuntimeError)
    ├── UnsupportedTorch the installed torch lacks what the engine stands on (also a RuntimeError)
    └── UnsupportedLibrary (in integrations) a library whose internals are not those that a patch knows (likewise)

Each message says what was checked, what was expected, what was found, where, and what to do. An ``AssertionError`` from
this package is a bug of the package.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CheckpointError", "ContractError", "Dsv4FsdpError", "ExportError", "ShardingError", "UnsupportedTorch"]


class Dsv4FsdpError(Exception):
    """The base of every error this package raises on purpose."""


class ContractError(Dsv4FsdpError, ValueError):
    """The fp32 contract is broken, empty, or contradicts itself."""


class CheckpointError(Dsv4FsdpError, ValueError):
    """A checkpoint is damaged, incomplete, or another model's."""


class ShardingError(Dsv4FsdpError, ValueError):
    """A sharding unit cannot be built as asked."""


class ExportError(Dsv4FsdpError, RuntimeError):
    """An export cannot be made, or what was written is not the trained model."""


class UnsupportedTorch(Dsv4FsdpError, RuntimeError):
    """The installed torch is too old, or lacks an internal that the engine needs."""


def listing(names: Sequence[str], *, limit: int = 8) -> str:
    """``names`` as an indented list, one per line, cut after ``limit`` with the number left out."""
    lines = [f"  - {name}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"  ... and {len(names) - limit} more")
    return "\n".join(lines)
