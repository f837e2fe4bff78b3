"""The console command ``dsv4-fsdp``, and ``python -m dsv4_fsdp``: says what is missing where the commands cannot run.

The commands are made with typer, which only the extra ``train`` brings. Without it ``doctor`` still runs, since it is
there to tell what is missing; everything else ends with one line and exit code 2.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> None:
    """The entry point of the console command."""
    if importlib.util.find_spec("typer") is not None:
        from .cli import main as commands

        commands()
    elif sys.argv[1:] in (["doctor"], ["doctor", "--json"]):
        from .doctor import run

        sys.exit(run(as_json="--json" in sys.argv))
    else:
        print('error: the commands need more than the engine: pip install "dsv4-fsdp[train]"', file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
