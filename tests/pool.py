"""A pool of warm gloo processes that all multi-rank tests of a session share.

Importing torch costs seconds per process, so a fork server imports it once and forks workers from there, as many as the
largest world size asked for. They live through the session and are sent *cases*: a module-level function by name, with
pickled arguments. A case on `n` ranks runs on the first `n` workers:

    results = run_ranks(2, my_case, "some", "arguments", timeout_s=60)  # one entry per rank, in rank order

Around each case a worker makes the default gloo process group (loopback, a new file store) and destroys it again. It
takes over the caller's environment, working directory and `sys.path`, seeds torch with 0, and uses one thread. What a
case prints is printed by the parent afterwards, so pytest captures it.

When a rank raises, dies or is still running at the time-out, the parent raises `RankFailure` with a report on every
rank (traceback, exit, or the stack it hangs in), kills all workers, and the next case gets new ones. A case that
expects an error on every rank better catches it and returns its text.

The first part of this file runs in the parent, which never touches `torch.distributed`; the second part, from `_serve`
on, in the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any
from unittest import mock

MAX_RANKS = 4
START_TIMEOUT_S = 120.0
# How long the other ranks may still answer once one has failed. They mostly hang in a collective.
GRACE_S = 1.0
# gloo gives up well before the parent does, so that a rank left alone in a collective reports where it was.
GLOO_TIMEOUT_SHARE = 0.5
# What gloo says on the ranks that did nothing wrong. Reported last.
SECONDARY = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting|Application timeout")
# What the fork server imports (FSDP2 imports dynamo at its first forward), and what more where the parent has it
# already. Each worker imports the rest when a case needs it.
PRELOAD = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
PRELOAD_IF_USED = (
    "accelerate",
    "numpy",
    "peft",
    "pydantic",
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
)


class RankFailure(Exception):
    """At least one rank of a case raised, died or did not end in time; the message reports on every rank."""


class _Worker:
    """One worker process as its parent sees it: the pipe to it, and the file that takes what it prints."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.log_path = folder / f"rank{rank}.log"
        self.log_path.touch()
        self.conn, theirs = Pipe()
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([*PRELOAD, *(name for name in PRELOAD_IF_USED if name in sys.modules)])
        self.process = server.Process(target=_serve, args=(theirs, rank, str(self.log_path)))
        # The server keeps the environment that it is started with, and must have no threads when it forks.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
            self.process.start()
        theirs.close()
        assert self.process.pid
        self.pid = self.process.pid

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: the wait for its answer will say so
            self.conn.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple[bytes, str | None]:
        """Return the worker's answer: a pickled result, and the report on an error if there was one."""
        with contextlib.suppress(EOFError, OSError):
            if self.conn.poll():
                return pickle.loads(self.conn.recv_bytes())
        self.process.join(timeout=5)
        code = self.process.exitcode or 0
        return b"", f"died from {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"

    def take_log(self) -> str:
        """Return what the worker wrote since the last call. It appends, so it goes on writing at the new end."""
        text = self.log_path.read_text(errors="replace")
        os.truncate(self.log_path, 0)
        return text

    def kill(self) -> None:
        """End the worker, and the processes that a case started in it: a worker leads its own process group."""
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.conn.close()


class _Pool:
    """The workers, and the cases sent to them one after the other."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self.workers: list[_Worker] = []
        self.num_cases = 0

    def run(self, world_size: int, call: bytes, name: str, timeout_s: float, raise_on_warning: bool) -> list[Any]:
        __tracebackhide__ = True  # here and below: pytest shows the test's line and the report
        new = range(len(self.workers), world_size)
        self.workers += [_Worker(rank, self.folder) for rank in new]
        self._gather(self.workers[new.start : world_size], "start of a worker", START_TIMEOUT_S)

        workers = self.workers[:world_size]
        self.num_cases += 1
        case = {
            "call": call,
            "world_size": world_size,
            "store": str(self.folder / f"store{self.num_cases}"),
            "gloo_timeout": timedelta(seconds=GLOO_TIMEOUT_SHARE * timeout_s),
            "raise_on_warning": raise_on_warning,
            "environ": dict(os.environ),
            "cwd": os.getcwd(),
            "sys_path": sys.path,
        }
        for worker in workers:
            worker.send(case)
        results = self._gather(workers, name, timeout_s)
        # Only now, when no rank needs its peers any more, may they close their connections.
        for worker in workers:
            worker.send({})
        self._gather(workers, f"clean-up after {name}", timeout_s)
        for worker in workers:
            for line in worker.take_log().splitlines():
                print(f"[rank {worker.rank}] {line}")
        return [pickle.loads(result) for result in results]

    def _gather(self, workers: list[_Worker], what: str, timeout_s: float) -> list[bytes]:
        """Return every worker's answer, or raise `RankFailure` soon after one turns out not to have any."""
        __tracebackhide__ = True
        answers: dict[int, bytes] = {}
        errors: dict[int, str] = {}  # in order of arrival
        running = list(workers)
        deadline = time.monotonic() + timeout_s
        while running and (left_s := deadline - time.monotonic()) > 0:
            # The process as well as its pipe: a pipe stays open as long as a process that the case started lives.
            ready = wait([end for worker in running for end in (worker.conn, worker.process.sentinel)], left_s)
            for worker in [w for w in running if w.conn in ready or w.process.sentinel in ready]:
                running.remove(worker)
                result, error = worker.receive()
                if error is None:
                    answers[worker.rank] = result
                else:
                    errors[worker.rank] = error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if running or errors:
            raise RankFailure(_report(workers, what, timeout_s, errors, running))
        return [answers[worker.rank] for worker in workers]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _report(workers: list[_Worker], what: str, timeout_s: float, errors: dict[int, str], running: list[_Worker]) -> str:
    """Write the message of a `RankFailure`: the likely cause first, then the ranks that only suffered from it."""
    logs = {worker.rank: worker.take_log() for worker in workers}
    for worker in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)  # faulthandler writes its stack into its log
    time.sleep(0.3 if running else 0)
    when = f"{GRACE_S:g} s after another rank failed" if errors else f"after timeout_s={timeout_s:g}"
    hangs = {worker.rank: f"still running {when}, in\n{worker.take_log()}" for worker in running}
    causes = {rank: text for rank, text in errors.items() if not SECONDARY.search(text)}
    ordered = causes | hangs | errors
    ordered |= {worker.rank: "returned" for worker in workers if worker.rank not in ordered}
    rank, text = next(iter(ordered.items()))
    lines = [f"{what} on {len(workers)} ranks: rank {rank} {text.splitlines()[0]}"]
    for rank, text in ordered.items():
        lines += ["", f"rank {rank}: {text.rstrip()}"]
        if logs[rank].strip():
            lines += [f"rank {rank} printed:", logs[rank].rstrip()]
    return "\n".join(lines)


_pool: _Pool | None = None


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    /,
    *args: Any,
    timeout_s: float = 120.0,
    raise_on_warning: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world_size` ranks at once and return what each returned, in rank order.

    `fn` is a module-level function of an importable module (any test module is); arguments and results are pickled by
    value, so keep them small. `timeout_s` counts from sending the case and includes the imports of its module.
    `raise_on_warning` turns warnings inside `fn` into errors. Raises `RankFailure`, and `ValueError` for a wrong call.
    """
    __tracebackhide__ = True
    global _pool
    name = f"{fn.__module__}.{fn.__qualname__}"
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"{name}: world_size must be 1 to {MAX_RANKS}, got {world_size}")
    if "<" in name or fn.__module__ == "__main__":
        raise ValueError(f"{name} cannot be sent to a worker by name: make it a module-level function of a test module")
    call = pickle.dumps((fn, args, kwargs))
    if _pool is None:
        _pool = _Pool()
    try:
        return _pool.run(world_size, call, name, timeout_s, raise_on_warning)
    except BaseException:  # Ctrl-C too: whatever state the workers are in, nobody should meet it
        close_pool()
        raise


@atexit.register
def close_pool() -> None:
    """Kill the workers, if there are any. The next case starts new ones."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.kill()


# ---------------------------------------------------------------------------------------------------- in the workers


def _worker_environ(rank: int, world_size: int) -> dict[str, str]:
    """Return what a worker sets over the caller's environment: torchrun's variables, one thread, loopback."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _die_with_parent() -> None:
    """Wait for the end of pytest, however it ends, and kill this worker, which may hang, and what it started."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _serve(conn: Connection, rank: int, log_path: str) -> None:
    """Answer the parent's messages, one case and one clean-up in turn, until it is gone."""
    os.setsid()  # Ctrl-C reaches pytest only
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (by lines: what a dying case printed counts)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)

    import torch

    torch.set_num_threads(1)
    conn.send_bytes(pickle.dumps((b"", None)))
    while True:
        try:
            message = pickle.loads(conn.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        answer: tuple[bytes, str | None]
        try:
            answer = pickle.dumps(_run(message, rank)) if message else _clean_up(), None
        except BaseException as error:  # noqa: BLE001  (the exit of a command line and pytest's outcomes too)
            trace = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            stack = "".join(traceback.format_exception(type(error), error, trace))
            answer = b"", f"raised {type(error).__name__}: {error}\n{stack}"
        conn.send_bytes(pickle.dumps(answer))


def _run(case: dict[str, Any], rank: int) -> Any:
    """Run one case in this worker and return its result."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    world_size = case["world_size"]
    sys.path[:] = case["sys_path"]
    os.chdir(case["cwd"])
    os.environ.clear()
    os.environ.update(case["environ"] | _worker_environ(rank, world_size))
    fn, args, kwargs = pickle.loads(case["call"])  # imports the test's module
    gc.freeze()  # what is here now, stays: not looking through it again saves the clean-up 0.2 s
    store = FileStore(case["store"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=case["gloo_timeout"])
    random.seed(0)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        if case["raise_on_warning"]:
            warnings.simplefilter("error")
        return fn(*args, **kwargs)


def _clean_up() -> bytes:
    """Remove what a case leaves behind in its process. Returns an empty result."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    if dist.is_initialized():  # a case may have destroyed the group itself
        dist.destroy_process_group()
    # DTensor caches its plans by mesh, and meshes of equal shape compare equal: the next case would be served a mesh of
    # a destroyed group. Private; there in torch 2.12 to 2.15.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    torch.set_default_dtype(torch.float32)
    gc.collect()
    return b""
