"""``dsv4-fsdp plan``: what a training run will need, before it is started. Needs no GPU and no other process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

__all__ = ["plan"]


def plan(
    model: Annotated[
        str, typer.Argument(help="deepseek-v4-flash, deepseek-v4-pro, a config.json, or a checkpoint folder.")
    ],
    ranks: Annotated[str | None, typer.Option(metavar="N", help="Devices in all.")] = None,
    ranks_per_node: Annotated[str | None, typer.Option(metavar="N", help="Devices per machine. Default 8.")] = None,
    device_memory_gib: Annotated[
        str | None, typer.Option(metavar="GIB", help="Memory of one device, for a verdict.")
    ] = None,
    replicate: Annotated[str | None, typer.Option(metavar="N", help="Replicas (HSDP). Default 1: FSDP.")] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="bf16, or fp32 for master weights. Default bf16.")
    ] = None,
    reshard_after_forward: Annotated[
        str | None, typer.Option(metavar="true|false|N", help="As in fully_shard. Default true.")
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="Shards and optimizer in host memory.")
    ] = None,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option("--activation-checkpointing/--no-activation-checkpointing", help="Recompute each block."),
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N", help="Sequences per rank. Default 1.")] = None,
    sequence: Annotated[str | None, typer.Option(metavar="TOKENS", help="Tokens per sequence. Default 4096.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="adamw, adamw-8bit, sgd, sgd-momentum. Default adamw.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Try all settings that were not given; rank those that fit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the whole sharding plan.")] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory per configuration and over a step.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the real fully_shard on a fake process group and compare.")
    ] = False,
) -> None:
    """Predict memory, collectives and activations of a training run, and whether it fits."""
    from dsv4_fsdp.planner.model_sources import PRESETS
    from dsv4_fsdp.planner.settings import SettingsError, find_model, resolve

    texts: dict[str, Any] = {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "device_memory_gib": device_memory_gib,
        "replicate": replicate,
        "storage": storage,
        "reshard_after_forward": reshard_after_forward,
        "offload": offload,
        "activation_checkpointing": activation_checkpointing,
        "batch": batch,
        "sequence": sequence,
        "optimizer": optimizer,
    }
    try:
        problems: list[str] = []
        source = find_model(model, problems=problems, presets=tuple(PRESETS))
        if png is not None:
            problems += _picture_problems(png)
        if search and device_memory_gib is None:
            problems.append("--search: needs --device-memory-gib, to tell what fits")
        if search and verify:
            problems.append("--verify: checks one configuration; leave out --search")
        request = resolve(texts, problems=problems)
        assert source is not None

        from dsv4_fsdp.planner.estimate import Estimator
        from dsv4_fsdp.planner.model_sources import load_config

        estimator = Estimator(model, load_config(source))
        _check_sequence(estimator.config, request.settings.sequence)
    except SettingsError as error:
        _fail(error.problems)

    from rich.console import Console

    from dsv4_fsdp.errors import Dsv4FsdpError
    from dsv4_fsdp.planner.hints import hint
    from dsv4_fsdp.planner.render import estimate_text

    console = Console(width=None if sys.stdout.isatty() else 100, soft_wrap=False, highlight=False)
    try:
        if search:
            from dsv4_fsdp.planner.search import search_configurations, search_text

            found = search_configurations(estimator, request)
            estimates = [candidate.estimate for candidate in found.fitting][:8]
            if as_json:
                print(json.dumps(found.as_dict()))
            else:
                console.print(search_text(found))
        else:
            estimate = estimator.estimate(request.cluster, request.settings)
            estimates = [estimate]
            differences = estimator.verify(estimate.plan, request.settings) if verify else []
            if differences:
                _fail([f"fully_shard built something else: {text}" for text in differences], code=1)
            if as_json:
                print(json.dumps(estimate.as_dict() | {"verified": True if verify else None}))
            else:
                console.print(estimate_text(estimate, hint(estimator, estimate), checked=verify))
    except Dsv4FsdpError as error:
        _fail([str(error)])
    if png is not None:
        if not estimates:
            _fail(["--png: nothing fits, so there is nothing to draw"], code=1)
        from dsv4_fsdp.planner.picture import draw

        draw(estimates, png)


def _picture_problems(png: Path) -> list[str]:
    problems = []
    if importlib.util.find_spec("matplotlib") is None:
        problems.append('--png: needs matplotlib; install it with pip install "dsv4-fsdp[report]"')
    if png.suffix.lower() != ".png":
        problems.append(f"--png: expected a name that ends in .png, got {str(png)!r}")
    if not png.parent.is_dir():
        problems.append(f"--png: there is no folder {str(png.parent)!r}")
    return problems


def _check_sequence(config: Any, sequence: int) -> None:
    from dsv4_fsdp.planner.settings import SettingsError

    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and sequence > longest:
        raise SettingsError([f"--sequence: the model has {longest} positions, got {sequence}"])


def _fail(problems: list[str], *, code: int = 2) -> NoReturn:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    raise typer.Exit(code)
