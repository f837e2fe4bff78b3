"""The command ``dsv4-fsdp``. Torch and the rest are imported by the subcommands, so a mistake is answered at once."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from .commands.audit import audit
from .commands.data import data_app
from .commands.doctor import doctor
from .commands.export import export
from .commands.plan import plan
from .commands.report import report
from .commands.train import train

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
    # torchao is imported by Transformers wherever it is installed, and says then which of its CUDA libraries this
    # machine cannot load and what torch thinks of its enums.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
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


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Every other setting of config.yaml can be given by its dotted name, such as --optimizer.lr 1e-3.",
)(train)
app.add_typer(data_app)
app.command()(plan)
app.command()(audit)
app.command()(report)
app.command()(export)
app.command()(doctor)

if __name__ == "__main__":
    main()
