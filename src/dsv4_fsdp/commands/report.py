"""``dsv4-fsdp report``: a run, or two side by side, as one HTML page. Reads the run folder; writes what it is told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run (--run-dir of dsv4-fsdp train).")],
    run_b: Annotated[Path | None, typer.Argument(help="A second run, to compare.", show_default=False)] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write: one .html file, no network needed.")
    ] = None,
    png_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each chart as a PNG too, into this folder.")
    ] = None,
) -> None:
    """Show what a run recorded as one self-contained HTML page; give two runs to compare them."""
    problems = _output_problems(html, png_dir)
    if problems:
        _fail(problems)
    assert html is not None

    from dsv4_fsdp.report.breakdown import breakdown_png, breakdowns_of
    from dsv4_fsdp.report.charts import charts_of, png
    from dsv4_fsdp.report.page import labels_of, page
    from dsv4_fsdp.report.run_data import RunDataError, read_run
    from dsv4_fsdp.report.verdict import verdict

    try:
        runs = [read_run(path) for path in (run, run_b) if path is not None]
    except RunDataError as error:
        _fail([str(error)])
    labels = labels_of(runs)
    # All of it is made before the first file is written: a mistake leaves nothing behind.
    text = page(runs)
    pictures = {}
    if png_dir is not None:
        pictures = {f"{c.key}.png": png(c) for c in charts_of(runs, labels)}
        pictures |= {f"{b.chart.key}.png": breakdown_png(b) for b in breakdowns_of(runs, labels)}
    try:
        html.write_text(text, encoding="utf-8")
        if png_dir is not None:
            png_dir.mkdir(exist_ok=True)
            for name, picture in pictures.items():
                (png_dir / _file_name(name)).write_bytes(picture)
    except OSError as error:
        _fail([f"cannot write: {error}"])
    for one, label in zip(runs, labels, strict=True):
        for answer in verdict(one):
            prefix = f"{label}: " if len(runs) > 1 else ""
            print(f"{prefix}{answer.headline}" + (f"; {answer.detail}" if answer.detail else ""))
    print(f"page {html}" + (f", {len(pictures)} pictures in {png_dir}" if png_dir is not None else ""))


def _output_problems(html: Path | None, png_dir: Path | None) -> list[str]:
    problems = []
    if html is None:
        problems.append("--html: missing; give the name of the page to write, such as --html report.html")
    elif html.suffix.lower() not in (".html", ".htm"):
        problems.append(f"--html: expected a name that ends in .html, got {str(html)!r}")
    elif html.is_dir():
        problems.append(f"--html: {str(html)!r} is a folder")
    elif not html.parent.is_dir():
        problems.append(f"--html: there is no folder {str(html.parent)!r}")
    if png_dir is not None:
        if importlib.util.find_spec("matplotlib") is None:
            problems.append('--png-dir: needs matplotlib; install it with pip install "dsv4-fsdp[report]"')
        if not (png_dir.is_dir() or (not png_dir.exists() and png_dir.parent.is_dir())):
            problems.append(f"--png-dir: {str(png_dir)!r} is no folder and cannot be made one")
    return problems


def _file_name(name: str) -> str:
    """A field's name comes from a file; it must not lead out of the folder."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "_"


def _fail(problems: list[str]) -> NoReturn:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    raise typer.Exit(2)
