"""A signal, a time limit or a file asks a run to stop; all ranks do so after the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsv4_fsdp.train.stopping import SIGNALS, TORCHRUN_ARGUMENTS, StopRequests


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_makes_a_flag_and_handlers_come_back(number: signal.Signals) -> None:
    """Nothing else happens, and the reason is told."""
    former = {each: signal.getsignal(each) for each in SIGNALS}
    with StopRequests() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested()
        assert stop.reason == number.name
        assert stop.requested()
    assert {each: signal.getsignal(each) for each in SIGNALS} == former


def test_handlers_come_back_after_an_error() -> None:
    """As on any exit."""
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), StopRequests():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) == former


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    """The first one asks to save, however long that takes; SIGTERM never interrupts."""
    with StopRequests() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_time_limit_counts_from_the_start_that_is_given() -> None:
    """By default that of the process."""
    now = time.monotonic()
    assert not StopRequests(time_limit_s=60, started_at=now).requested()
    stop = StopRequests(time_limit_s=60, started_at=now - 61)
    assert stop.requested()
    assert stop.reason == "the time limit"
    assert StopRequests(time_limit_s=1e-6).requested()
    assert not StopRequests(time_limit_s=1e6).requested()


def test_a_file_asks_too_but_not_one_of_an_earlier_stop(tmp_path: Path) -> None:
    """The old one is removed on entering."""
    path = tmp_path / "stop"
    path.touch()
    with StopRequests(stop_file=path) as stop:
        assert not stop.requested()
        path.touch()
        assert stop.requested()
        assert stop.reason == f"the file {path}"


# A run in small: the flags of all ranks ride in one reduction a step. Only rank 1 also has a time limit far off.
_RUN = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from dsv4_fsdp.train.stopping import StopRequests

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
with StopRequests() as stop:
    for step in range(10_000):
        flag = torch.tensor([float(stop.requested())])
        dist.all_reduce(flag)
        if flag:
            break
        (folder / f"running{rank}").touch()
        time.sleep(0.01)
    time.sleep(0.5)  # a save
    (folder / f"saved{rank}").write_text(f"{step} {flag.item():.0f} {stop.reason}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("to", ["torchrun", "one rank"])
def test_under_torchrun_all_ranks_stop_after_the_same_step(tmp_path: Path, to: str) -> None:
    """torchrun passes SIGUSR1 on with the arguments we advise; a signal to a single rank is enough, too."""
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*command, *TORCHRUN_ARGUMENTS, str(script), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        while not all((tmp_path / f"running{rank}").exists() for rank in range(2)):
            assert process.poll() is None, process.stdout and process.stdout.read().decode()
            time.sleep(0.05)
        if to == "torchrun":
            process.send_signal(signal.SIGUSR1)
        else:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGUSR1)
        output, _ = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
    saved = [(tmp_path / f"saved{rank}").read_text().split() for rank in range(2)]
    assert saved[0][:2] == saved[1][:2], output.decode()
    assert int(saved[0][0]) < 9_999
    heard = [reason for *_, reason in saved]
    if to == "torchrun":
        assert heard == ["SIGUSR1"] * 2
        # torchrun itself ends as one that was stopped, whatever its ranks return.
        assert process.returncode != 0
    else:
        assert sorted(heard) == ["None", "SIGUSR1"]
        assert process.returncode == 0, output.decode()
