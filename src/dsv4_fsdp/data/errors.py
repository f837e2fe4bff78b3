"""The error of this package's users' mistakes."""

from __future__ import annotations

from dsv4_fsdp.errors import Dsv4FsdpError

__all__ = ["DataError"]


class DataError(Dsv4FsdpError, ValueError):
    """Data that cannot be trained on, or settings that do not fit it. ``problems`` has one line for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)
