"""``dsv4-fsdp doctor``: what this environment can do, what would go wrong, and how to mend it."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this environment offers and what would go wrong; exit code 1 if the engine cannot work."""
    from dsv4_fsdp.doctor import run

    raise typer.Exit(run(as_json=as_json))
