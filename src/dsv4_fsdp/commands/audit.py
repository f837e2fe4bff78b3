"""``dsv4-fsdp audit``: does a checkpoint still hold its fp32? Reads headers; needs no GPU and no other process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["audit"]


def audit(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, or one .safetensors file.")],
    bits: Annotated[
        bool, typer.Option("--bits", help="Read the fp32 tensors too: were they downcast and upcast on the way?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every tensor and violation.")] = False,
) -> None:
    """Check by its headers that a checkpoint's fp32 is still fp32; exit code 1 if not."""
    from dsv4_fsdp.checkpoint_audit import audit_checkpoint
    from dsv4_fsdp.errors import ContractError

    try:
        report = audit_checkpoint(path, bits=bits)
    except (ContractError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(report.to_json() if as_json else report.table())
    raise typer.Exit(0 if report.ok else 1)
