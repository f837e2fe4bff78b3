"""Being told to stop: a signal, a time limit or a file becomes a flag, and all ranks stop after the same step.

A rank never stops by itself, because the others would wait for it in the next collective. The loop puts
:meth:`StopRequests.requested` into the reduction that it makes once a step anyway; if any rank's flag is up, all ranks
save and leave after that step. So it is enough that *one* process of the run hears of it.

**Signals**: SIGTERM, SIGUSR1 and SIGINT (Ctrl-C). A second SIGINT interrupts at once, for the user who means it.

**Under torchrun**, and under ``dsv4-fsdp train`` which starts its ranks by torchrun's code, whoever sends the signal
mostly knows torchrun's process only. torchrun passes SIGTERM and SIGINT on to its ranks and gives them
``--shutdown-timeout`` seconds (30) to leave before it kills them: make it longer than a step and a save take. SIGUSR1
it passes on only if told so, and dies of it otherwise, so start it with :data:`TORCHRUN_ARGUMENTS` (torch 2.13 has
both). It ends with an error then, even if all ranks saved and left in peace. Ranks are in sessions of their own, so
Ctrl-C in a terminal comes to them once, from torchrun. On several nodes it is enough that one of them hears of it.

**SLURM**::

    #SBATCH --signal=USR1@300
    srun torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 280 ... \\
        -m dsv4_fsdp.cli train ...

sends SIGUSR1 to the tasks of ``srun`` (each node's torchrun) 300 seconds before the time is up. Where signals do not
arrive (containers, another launcher), the time limit needs none: ``checkpoint.time_limit_s`` somewhat below the job's
time, counted from when the rank began. And ``touch RUN/stop`` asks a run to stop from any machine that sees its folder.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SIGNALS", "TORCHRUN_ARGUMENTS", "StopRequests", "process_started_at"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Each of them asks a run to save and stop."""

TORCHRUN_ARGUMENTS = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "300")
"""What makes torchrun pass all of them on, and leave five minutes for a step and a save."""

_started = time.monotonic()


def process_started_at() -> float:
    """About when this process began, on ``time.monotonic()``'s clock: when this module was imported."""
    return _started


class StopRequests:
    """Listens between ``with`` and its end, and restores the signals' former handlers then. Main thread only.

    Args:
        time_limit_s: stop when this many seconds have passed since ``started_at``; ``None`` for no limit. The step that
            runs then, and the save, come on top.
        stop_file: stop when this file appears; one that is left from an earlier stop is removed on entering. It is
            looked for on every call of :meth:`requested`, so give it to one rank only.
        started_at: on ``time.monotonic()``'s clock; by default when the process began.
    """

    def __init__(
        self, *, time_limit_s: float | None = None, stop_file: Path | None = None, started_at: float | None = None
    ) -> None:
        self._deadline = None
        if time_limit_s is not None:
            self._deadline = (process_started_at() if started_at is None else started_at) + time_limit_s
        self._stop_file = stop_file
        self._reason: str | None = None
        self._interrupted = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)
        for number in SIGNALS:
            former = signal.signal(number, self._heard)
            # None: a handler that Python did not install, and cannot restore.
            self._former[number] = signal.SIG_DFL if former is None else former
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        # Nothing but the flag: a handler runs between any two instructions, also inside a save.
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self._reason is None:
            self._reason = signal.Signals(number).name

    def requested(self) -> bool:
        """Whether *this* rank was told to stop. Once true it stays so."""
        if self._reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._reason = "the time limit"
        if self._reason is None and self._stop_file is not None and self._stop_file.exists():
            self._reason = f"the file {self._stop_file}"
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """What told this rank to stop (``SIGTERM``, ``the time limit``, ...); ``None`` if nothing did."""
        return self._reason
