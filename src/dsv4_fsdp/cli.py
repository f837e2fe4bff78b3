"""The command ``dsv4-fsdp``. Torch and the rest are imported by the subcommands, so a mistake is answered at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .commands.audit import audit
from .commands.doctor import doctor
from .commands.plan import plan
from .commands.report import report

__all__ = ["main"]

app = typer.Typer(
    name="dsv4-fsdp",
    help="Train DeepSeek-V4 with PyTorch FSDP2 without losing its fp32.",
    no_args_is_help=True,
    add_completion=False,
    # Our errors are one line each, and a traceback is the developer's own, unadorned.
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point of the console command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"dsv4-fsdp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


# The values are taken as text and checked by the configuration, all in one place and with one kind of message.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Every other setting of config.json can be given by its dotted name, such as --optimizer.lr 1e-3.",
)
def train(
    context: typer.Context,
    run_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for all results: new or empty.")] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="Starting point of the settings: tiny.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="Optimizer steps.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Of weights, data and the sample.")] = None,
    nproc: Annotated[str | None, typer.Option(metavar="N", help="Ranks to start on this machine.")] = None,
) -> None:
    """Train a model; starts its own processes unless torchrun did."""
    from .train.config import ConfigError, resolve
    from .train.launch import is_rank, launch, started_by_launch
    from .train.run_folder import RunFolder

    try:
        if run_dir is None:
            raise ConfigError(["--run-dir: missing; give a folder that is new or empty"])
        given = {"preset": preset, "steps": steps, "seed": seed, "nproc": nproc}
        overrides = {name: text for name, text in given.items() if text is not None} | _dotted_options(context.args)
        if is_rank():
            world_size = os.environ["WORLD_SIZE"]
            if overrides.setdefault("nproc", world_size) != world_size:
                raise ConfigError([f"nproc: {nproc} was asked for, but torchrun has started {world_size} ranks"])
        config = resolve(overrides)
        folder = RunFolder(Path(run_dir))
        # Rank 0 makes the folder, perhaps before another rank has come this far.
        if os.environ.get("RANK", "0") == "0":
            folder.check()
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(2) from None

    if not is_rank():
        raise typer.Exit(launch(["train", "--run-dir", run_dir, *_as_options(overrides)], nproc=config.nproc))

    from .train.loop import train as train_rank
    from .train.ranks import join_ranks

    try:
        with join_ranks() as ranks:
            train_rank(config, folder, ranks)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception:
        if started_by_launch():
            raise typer.Exit(1) from None  # the launcher shows the traceback, with the first rank's on top
        raise


def _dotted_options(arguments: list[str]) -> dict[str, str]:
    """``--optimizer.lr 1e-3`` or ``--optimizer.lr=1e-3`` as setting -> text."""
    from .train.config import ConfigError

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


app.command()(plan)
app.command()(audit)
app.command()(report)
app.command()(doctor)

if __name__ == "__main__":
    main()
