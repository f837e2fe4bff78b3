"""Starting the ranks: what torchrun does, and a report that begins with the traceback of the rank that failed first.

The command line is run again in each rank, by torchrun's own code (``torch.distributed.run``), on this machine, without
an address to give. If one rank fails the others are ended within a second. All of them may have left a traceback by
then, since a rank that dies breaks its neighbours' collectives; the report shows the one that came first in full, and
the last line of each other.

Several nodes: start the same command line under torchrun itself (``torchrun ... -m dsv4_fsdp.cli train ...``).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dsv4_fsdp.errors import wrapped

from .stopping import TORCHRUN_ARGUMENTS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["is_rank", "launch", "started_by_launch"]

_STARTED_BY_LAUNCH = "DSV4_FSDP_STARTED_BY_LAUNCH"
# The last entry of a traceback, if it is one of our errors: "dsv4_fsdp.errors.ContractError: what was found".
_OUR_ERROR = re.compile(r"(?ms)^dsv4_fsdp\.[\w.]+: (.*)\Z")


def is_rank() -> bool:
    """Whether this process is one of the ranks already: torchrun (or another starter) has set its environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_launch() -> bool:
    """Whether :func:`launch` started this rank, and so reports its failure."""
    return _STARTED_BY_LAUNCH in os.environ


def launch(arguments: Sequence[str], *, nproc: int) -> int:
    """Run ``dsv4-fsdp`` with ``arguments`` in ``nproc`` ranks on this machine; return the exit code to leave with."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What torchrun would log about a failed rank is in the report, and more readable.
    logging.disable(logging.ERROR)
    os.environ[_STARTED_BY_LAUNCH] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    torchrun_arguments = ["--standalone", f"--nproc-per-node={nproc}", *TORCHRUN_ARGUMENTS]
    torchrun_arguments += ["--module", "dsv4_fsdp.cli"]
    try:
        parsed = torchrun.parse_args(torchrun_arguments)
        # Given on torchrun's own line, ours would be taken for abbreviations of its options (--nproc).
        parsed.training_script_args = list(arguments)
        torchrun.run(parsed)
    except ChildFailedError as error:
        _show_cursor()
        report, exit_code = failure_report(error.failures)
        print(report, file=sys.stderr)
        return exit_code
    except SignalException as error:
        _show_cursor()
        # The ranks had time to save; whether they did is in what they printed.
        print(f"\nstopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def failure_report(failures: Mapping[int, ProcessFailure]) -> tuple[str, int]:
    """The report, with the rank that failed first on top, and the exit code: that rank's own, or 128 + signal."""
    first, *later = sorted(failures, key=lambda rank: _failed_at(failures[rank]))
    failure = failures[first]
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        why = " (often the system's answer to a lack of memory)" if name == "SIGKILL" else ""
        lines = [f"rank {first} was killed by {name}{why}"]
    elif traceback := _traceback(failure):
        # What went wrong on purpose says itself what to do; where in our code it was raised helps nobody.
        ours = _OUR_ERROR.search(traceback)
        lines = [wrapped(f"rank {first}: {ours[1]}")] if ours else [f"rank {first} failed:", "", traceback]
    else:
        lines = [f"rank {first} ended with exit code {failure.exitcode}; what it said is above"]
    lines += [
        f"rank {rank} failed after that: {_last_words(failures[rank])}"
        for rank in later
        if failures[rank].exitcode != -signal.SIGTERM  # torchrun ended it
    ]
    return "\n".join(lines), failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _last_words(failure: ProcessFailure) -> str:
    traceback = _traceback(failure)
    if traceback is None:
        return "no traceback"
    ours = _OUR_ERROR.search(traceback)
    return (ours[1] if ours else traceback).splitlines()[0 if ours else -1]


def _failed_at(failure: ProcessFailure) -> tuple[int, float]:
    """Sorts failures in the order of cause and effect.

    A killed rank comes first, since the others' errors follow from it; but one ended by SIGTERM comes last, since that
    is how torchrun ends the others. Its own time stamps are whole seconds, too coarse to tell a failure from what it
    causes in the others, so the time of writing the error file counts.
    """
    if failure.exitcode < 0:
        return (2 if failure.exitcode == -signal.SIGTERM else 0, failure.timestamp)
    try:
        return (1, os.stat(failure.error_file).st_mtime_ns / 1e9)
    except OSError:
        return (1, failure.timestamp)


def _traceback(failure: ProcessFailure) -> str | None:
    message: object = failure.message  # annotated as str, but it is what the error file holds
    if not isinstance(message, dict):
        return None
    found = message.get("extraInfo", {}).get("py_callstack")
    return found.rstrip() if isinstance(found, str) else None


def _show_cursor() -> None:
    """A rank that was ended in the middle of its progress bar has left the terminal without a cursor."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)
