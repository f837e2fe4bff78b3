"""``dsv4-fsdp plan``: what a training run will need, before it is started. Needs no GPU and no other process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from dsv4_fsdp.planner.run_config import RunConfig

__all__ = ["plan"]


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="deepseek-v4-flash, deepseek-v4-pro, a config.json, or a checkpoint folder. With --config: default "
            "its model.path."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file of a training run; flags win over it.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(metavar="N", help="Devices in all.")] = None,
    ranks_per_node: Annotated[str | None, typer.Option(metavar="N", help="Devices per machine. Default 8.")] = None,
    device_memory_gib: Annotated[
        str | None, typer.Option(metavar="GIB", help="Memory of one device, for a verdict.")
    ] = None,
    replicate: Annotated[str | None, typer.Option(metavar="N", help="Replicas (HSDP). Default 1: FSDP.")] = None,
    expert_parallel: Annotated[
        str | None, typer.Option(metavar="N", help="Ranks that the experts of a layer are dealt to. Default 1.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="bf16, or fp32 for master weights. Default bf16.")
    ] = None,
    island_units: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="grouped, or root: fewer collectives, more memory. Default grouped."),
    ] = None,
    reshard_after_forward: Annotated[
        str | None, typer.Option(metavar="true|false|N", help="As in fully_shard. Default true.")
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="Shards and optimizer in host memory.")
    ] = None,
    activation_checkpointing: Annotated[
        str | None, typer.Option(metavar="N", help="0 none, 1 every block, N every N-th is recomputed. Default 0.")
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N", help="Sequences per rank. Default 1.")] = None,
    sequence: Annotated[str | None, typer.Option(metavar="TOKENS", help="Tokens per sequence. Default 4096.")] = None,
    micro_batches: Annotated[
        str | None, typer.Option(metavar="N", help="Forwards and backwards per step. Default 1.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="adamw, adamw_8bit, adamw_bf16_sr, muon, sgd, sgd-momentum. Default adamw."),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="NAME", help="windowed (ours) or eager. Default windowed.")
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
    from dsv4_fsdp.planner.model_sources import PRESETS, TINY
    from dsv4_fsdp.planner.settings import SettingsError, find_model, resolve

    texts: dict[str, Any] = {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "device_memory_gib": device_memory_gib,
        "replicate": replicate,
        "expert_parallel": expert_parallel,
        "storage": storage,
        "island_units": island_units,
        "reshard_after_forward": reshard_after_forward,
        "offload": offload,
        "activation_checkpointing": activation_checkpointing,
        "batch": batch,
        "sequence": sequence,
        "micro_batches": micro_batches,
        "optimizer": optimizer,
        "attention": attention,
    }
    try:
        problems: list[str] = []
        run = _read(config, model, texts)
        name = model if run is None or model is not None else run.model.path
        source = None
        if name is not None:
            source = find_model(name, problems=problems, presets=(*PRESETS, TINY))
        elif config is None:
            problems.append("MODEL: missing; give deepseek-v4-flash, a config.json, a checkpoint folder, or --config")
        if png is not None:
            problems += _picture_problems(png)
        if search and device_memory_gib is None:
            problems.append("--search: needs --device-memory-gib, to tell what fits")
        if search and verify:
            problems.append("--verify: checks one configuration; leave out --search")
        request = resolve(texts, configured=None if run is None else run.settings, problems=problems)
        assert source is not None
        assert name is not None

        from dsv4_fsdp.planner.model_sources import load_config, more_islands

        model_config = load_config(source)
        _check_sequence(model_config, request.settings.sequence)
    except SettingsError as error:
        _fail(error.problems)

    from dsv4_fsdp.errors import Dsv4FsdpError
    from dsv4_fsdp.planner.estimate import Estimator
    from dsv4_fsdp.planner.hints import hint
    from dsv4_fsdp.planner.render import estimate_text

    if run is None:
        estimator = Estimator(name, model_config)
    else:
        starts_from = source.parent if isinstance(source, Path) and run.model.init == "checkpoint" else None
        estimator = Estimator(
            name,
            model_config,
            trained=run.model,
            optimizer=run.optimizer,
            islands=more_islands(starts_from) if starts_from is not None else (),
        )

    from rich.console import Console

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
            estimate = estimator.estimate(request.cluster, request.settings, compare_attention=True)
            estimates = [estimate]
            differences = estimator.verify(estimate.plan, request.settings) if verify else []
            if differences:
                _fail([f"fully_shard built something else: {text}" for text in differences], code=1)
            if as_json:
                sources = None if run is None else run.sources
                print(json.dumps(estimate.as_dict() | {"verified": True if verify else None, "sources": sources}))
            else:
                lines = [] if run is None else run.describe()
                console.print(estimate_text(estimate, hint(estimator, estimate), checked=verify, sources=lines))
    except Dsv4FsdpError as error:
        _fail([str(error)])
    if png is not None:
        if not estimates:
            _fail(["--png: nothing fits, so there is nothing to draw"], code=1)
        from dsv4_fsdp.planner.picture import draw

        draw(estimates, png)


def _read(config: Path | None, model: str | None, texts: dict[str, Any]) -> RunConfig | None:
    """What ``--config`` says, if it was given."""
    if config is None:
        return None
    from dsv4_fsdp.planner.run_config import read_run_config

    return read_run_config(config, model=model, given={k: v for k, v in texts.items() if v is not None})


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
