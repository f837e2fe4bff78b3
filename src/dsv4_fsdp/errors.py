"""The errors that this package raises for its user's mistakes.

    Dsv4FsdpError
    ├── ContractError        which tensors must be fp32, and whether they still are
    ├── CheckpointError      a checkpoint, of a model or of a run, that is damaged, another's, or cannot be written
    ├── ShardingError        a unit that cannot be built or would compute something else
    ├── AttentionError       windowed attention was asked for what it cannot compute
    ├── ChunkedLossError     (chunked_loss) a head or labels that the chunked loss does not serve
    ├── UnsupportedTorch     the installed torch lacks what the engine stands on
    ├── UnsupportedLibrary   (integrations) a library whose internals are not those that a patch knows
    ├── DataError            (data) what is wrong with training data, with file and line
    ├── ConfigError          (train.config) settings that cannot be, all of them at once
    ├── ModelError           (train.build_model) a model that cannot be built as the settings say
    ├── OptimizerError, MuonError, RouterBiasError, GradientError      (train) parts of a step that do not fit together
    ├── MissingGradients, TooManySkippedSteps, AuditFailed             (train) a run that must not go on
    ├── RanksDiffer, RanksMissing                                      (train.ranks) ranks that are not one run
    ├── ExportError          an export that cannot be made, or is not the trained model
    ├── SettingsError        (planner) a cluster or settings that cannot be planned
    └── RunDataError         (report) a run's folder that cannot be read

Each message says what was checked, what was expected, what was found, where, and what to do. An ``AssertionError`` from
this package is a bug of the package.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

__all__ = [
    "AttentionError",
    "CheckpointError",
    "ContractError",
    "Dsv4FsdpError",
    "ExportError",
    "ShardingError",
    "UnsupportedTorch",
]


class Dsv4FsdpError(Exception):
    """The base of every error this package raises on purpose."""


class ContractError(Dsv4FsdpError, ValueError):
    """The fp32 contract is broken, empty, or contradicts itself."""


class CheckpointError(Dsv4FsdpError, ValueError):
    """A checkpoint is damaged, incomplete, or another model's, or it cannot be written."""


class ShardingError(Dsv4FsdpError, ValueError):
    """A sharding unit cannot be built as asked."""


class AttentionError(Dsv4FsdpError, ValueError):
    """Windowed attention cannot compute what it is asked for."""


class ExportError(Dsv4FsdpError, RuntimeError):
    """An export cannot be made, or what was written is not the trained model."""


class UnsupportedTorch(Dsv4FsdpError, RuntimeError):
    """The installed torch is too old, or lacks an internal that the engine needs."""


def wrapped(message: str, *, columns: int = 100) -> str:
    """``message`` for a terminal: long lines broken at spaces, what follows of them set in by two."""
    # Neither inside a word nor at a hyphen: paths and commands are there to be copied.
    fill = textwrap.TextWrapper(columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(map(fill, message.splitlines()))


def listing(names: Sequence[str], *, limit: int = 8) -> str:
    """``names`` as an indented list, one per line, cut after ``limit`` with the number left out."""
    lines = [f"  - {name}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"  ... and {len(names) - limit} more")
    return "\n".join(lines)
