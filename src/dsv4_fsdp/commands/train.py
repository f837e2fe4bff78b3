"""``dsv4-fsdp train``: settings to a run, in processes of its own or as one of torchrun's ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dsv4_fsdp.train.config import TrainConfig

__all__ = ["train"]

# The values are taken as text and checked by the configuration, all in one place and with one kind of message.


def train(
    context: typer.Context,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder for all results: new, empty, or a run to continue.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of settings.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Starting point of the settings: tiny, flash-sft, flash-lora, ..."),
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="Optimizer steps.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Of weights, data and the sample.")] = None,
    nproc: Annotated[str | None, typer.Option(metavar="N", help="Ranks to start on this machine.")] = None,
) -> None:
    """Train a model; starts its own processes unless torchrun did."""
    from dsv4_fsdp.train.config import ConfigError, read_config_file, resolve
    from dsv4_fsdp.train.launch import is_rank, launch, started_by_launch
    from dsv4_fsdp.train.run_folder import RunFolder

    try:
        if run_dir is None:
            raise ConfigError(["--run-dir: missing; give a folder that is new, empty, or of a run to continue"])
        folder = RunFolder(Path(run_dir))
        given = {"preset": preset, "steps": steps, "seed": seed, "nproc": nproc}
        overrides = {name: text for name, text in given.items() if text is not None} | _dotted_options(context.args)
        if is_rank():
            world_size = os.environ["WORLD_SIZE"]
            if overrides.setdefault("nproc", world_size) != world_size:
                raise ConfigError([f"nproc: {nproc} was asked for, but torchrun has started {world_size} ranks"])
        base = None if config is None else read_config_file(config)
        if base is None and preset is None and folder.path.is_dir():
            # A run that is continued has its settings with it.
            former = folder.former_config()
            base = None if former is None else former.model_dump(mode="json")
        settings = resolve(overrides, base=base)
        # Rank 0 makes the folder, perhaps before another rank has come this far.
        problems = _problems(settings)
        if os.environ.get("RANK", "0") == "0":
            try:
                folder.check(settings)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(2) from None

    if not is_rank():
        options = ["train", "--run-dir", run_dir, *([] if config is None else ["--config", config])]
        raise typer.Exit(launch([*options, *_as_options(overrides)], nproc=settings.nproc))

    from dsv4_fsdp.errors import Dsv4FsdpError, wrapped
    from dsv4_fsdp.train.loop import train as train_rank
    from dsv4_fsdp.train.ranks import join_ranks

    try:
        with join_ranks(settings.mesh) as ranks:
            train_rank(settings, folder, ranks)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        if started_by_launch():
            raise typer.Exit(1) from None  # the launcher shows the traceback, with the first rank's on top
        if isinstance(error, Dsv4FsdpError):
            # It says itself what to do; where in our code it was raised helps nobody.
            print(wrapped(f"rank {os.environ['RANK']}: {error}"), file=sys.stderr, flush=True)
            raise typer.Exit(1) from None
        raise


def _problems(settings: TrainConfig) -> list[str]:
    """What is wrong with the settings on this machine: folders, files, the model's config, what is installed."""
    from dsv4_fsdp.data.errors import DataError
    from dsv4_fsdp.train.model_facts import model_problems
    from dsv4_fsdp.train.trackers import tracker_problems

    problems = [*model_problems(settings), *settings.data.problems(), *tracker_problems(settings.logging)]
    try:
        settings.data.accumulation(settings.nproc)
    except DataError as error:
        problems += str(error).splitlines()
    return problems


def _dotted_options(arguments: list[str]) -> dict[str, str]:
    """``--optimizer.lr 1e-3`` or ``--optimizer.lr=1e-3`` as setting -> text."""
    from dsv4_fsdp.train.config import ConfigError

    overrides = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise ConfigError([f"{argument!r} is not an option; settings look like --optimizer.lr 1e-3"])
        setting, has_value, text = argument.removeprefix("--").partition("=")
        if not has_value and (text := next(rest, "--")).startswith("--"):
            raise ConfigError([f"{setting}: no value given"])
        overrides[setting] = text
    return overrides


def _as_options(overrides: dict[str, str]) -> list[str]:
    return [part for setting, text in overrides.items() for part in (f"--{setting}", text)]
