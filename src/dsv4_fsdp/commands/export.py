"""``dsv4-fsdp export``: make of a training checkpoint a model that others load. One process; needs no GPU."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dsv4_fsdp.export import Exported

__all__ = ["export"]


class _Layout(StrEnum):
    transformers = "transformers"
    release = "release"


class _Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run (its newest checkpoint), or one.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the export: new or empty.")],
    layout: Annotated[
        _Layout, typer.Option(help="Transformers' names, or DeepSeek's own with what was untouched still quantised.")
    ] = _Layout.transformers,
    without_mtp: Annotated[
        bool, typer.Option("--without-mtp", help="Leave out the source's multi-token prediction tensors.")
    ] = False,
    dtype: Annotated[
        _Dtype | None, typer.Option(help="Of changed weights that are no fp32 islands; float32 keeps master weights.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Of a LoRA run: the merged model, not the adapter.")] = False,
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the checkpoint that training started from is now.")
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Reload it with stock Transformers in a fresh process and compare logits. Default: up to 2 GB.",
        ),
    ] = None,
) -> None:
    """Write a run's model, or its LoRA adapter, as a checkpoint that stock Transformers, or peft, loads."""
    import torch

    from dsv4_fsdp.errors import Dsv4FsdpError
    from dsv4_fsdp.export import export_checkpoint

    try:
        exported = export_checkpoint(
            path,
            to,
            layout=layout.value,
            source=source,
            dtype=None if dtype is None else getattr(torch, dtype.value),
            with_mtp=not without_mtp,
            merge=merge,
            check=verify,
        )
    except (Dsv4FsdpError, OSError) as error:
        print(f"error: {_one_line(str(error))}", file=sys.stderr)
        raise typer.Exit(2) from None
    print("\n".join(_report(exported, to)))


def _one_line(message: str) -> str:
    """What was checked, expected, got, where and what to do, after one another; a list with commas."""
    first, *others = (line.strip() for line in message.splitlines())
    text = first.removesuffix(".")
    for line in others:
        item = line.removeprefix("- ")
        text += f" {item}" if text.endswith(":") else f", {item}" if item != line else f"; {line}"
    return text


def _report(exported: Exported, target: Path) -> list[str]:
    lines = [f"from    step {exported.checkpoint.step}, {exported.checkpoint.folder}"]
    written = exported.written
    if written is None:
        lines.append(f"export  {target}: a peft adapter, {exported.adapter_tensors} tensors")
        lines.append(f"base    {exported.source or 'not known: give it to peft yourself'}")
    else:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(written.dtypes.items()))
        count = sum(written.dtypes.values())
        lines.append(f"export  {target}: {count} tensors ({dtypes}), {_size(written.total_bytes)}")
        if exported.source is not None:
            quantised = f", {written.quantised} of them quantised" if written.quantised else ""
            lines.append(f"source  {exported.source}")
            lines.append(f"        {written.untouched} tensors as they are there{quantised}; {written.changed} changed")
        if written.rounded:
            lines.append(f"dtype   {written.rounded} fp32 master weights rounded to bf16; --dtype float32 keeps them")
        if written.not_loaded:
            lines.append(f"mtp     {written.not_loaded} tensors carried over")
    if exported.reloaded is None:
        lines.append("checked by its headers; not reloaded (--verify)")
    else:
        lines.append("checked reloaded in a fresh process by stock libraries: logits equal in every bit")
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
