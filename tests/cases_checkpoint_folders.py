"""Folders of checkpoints: what is left over, saves that fail, runs that are killed; run inside ranks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases_checkpoints import Two, contents, error_of, notes, publish, train_two, two
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from dsv4_fsdp.train.checkpoints import Checkpoints


def leftovers(folder: Path) -> list[str]:
    """Names in ``folder`` after a start, when a killed run has left something."""
    publish(folder, [1])
    if dist.get_rank() == 0:
        for name in (".tmp-step-00000002", ".removing-step-00000000", ".replaced-step-00000001"):
            (folder / name / "state").mkdir(parents=True)
        (folder / "step-00000001").rename(folder / "moved")
        (folder / ".replaced-step-00000001" / "state").rmdir()
        (folder / ".replaced-step-00000001").rmdir()
        (folder / "moved").rename(folder / ".replaced-step-00000001")
    dist.barrier()
    Checkpoints(folder, keep=1)
    return sorted(path.name for path in folder.iterdir())


def latest_of(folder: Path) -> tuple[int | None, list[str], str]:
    """(step of the newest, notes, error) as this rank learns it."""
    step = None
    with notes() as said:

        def find() -> None:
            nonlocal step
            found = Checkpoints(folder, keep=1).latest()
            step = None if found is None else found.step

        error = error_of(find)
    return step, said, error


def replace_a_damaged_one(folder: Path) -> tuple[list[str], int]:
    """Save step 2 where a damaged checkpoint of step 2 lies; names and the newest step then."""
    publish(folder, [1, 2])
    if dist.get_rank() == 0:
        (folder / "step-00000002" / "config.yaml").unlink()
    dist.barrier()
    model, optimizer = two()
    with Checkpoints(folder, keep=9) as checkpoints:
        first = checkpoints.latest()
        assert first is not None
        assert first.step == 1
        checkpoints.load(first, model, optimizer, seed=0)
        train_two(model, optimizer)
        checkpoints.save(2, model, optimizer, train={"step": 2}, contents=contents())
        newest = checkpoints.latest()
    assert newest is not None
    return sorted(path.name for path in folder.iterdir()), newest.step


def save_twice(folder: Path) -> tuple[float, float]:
    """When the checkpoint of one step was written, and after a second save of that step; resumed from it in between."""
    model, optimizer = two()
    train_two(model, optimizer)
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, model, optimizer, train={}, contents=contents())
        before = (folder / "step-00000001").stat().st_mtime_ns
        checkpoints.save(1, model, optimizer, train={}, contents=contents())
    model, optimizer = two()
    with Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.latest()
        assert found is not None
        checkpoints.load(found, model, optimizer, seed=0)
        checkpoints.save(1, model, optimizer, train={}, contents=contents())
    return before, (folder / "step-00000001").stat().st_mtime_ns


# --- Saves that fail --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(on_rank: int) -> Iterator[None]:
    """DCP cannot write on one rank: the disk is full after the first bytes."""
    if dist.get_rank() != on_rank:
        yield
        return
    create_stream = FileSystem.create_stream

    class Full:
        def __init__(self, stream: Any, path: Any) -> None:
            self._stream, self._path = stream, path

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    @contextlib.contextmanager
    def limited(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as stream:
            yield Full(stream, path) if "w" in mode else stream

    with mock.patch.object(FileSystem, "create_stream", limited):
        yield


@contextlib.contextmanager
def own_disk(elsewhere: Path, *, on_rank: int) -> Iterator[None]:
    """What DCP writes on one rank the others do not see."""
    create_stream = FileSystem.create_stream

    def redirected(self: FileSystem, path: Any, mode: str) -> Any:
        return create_stream(self, elsewhere / Path(path).name, mode)

    if dist.get_rank() != on_rank:
        yield
        return
    with mock.patch.object(FileSystem, "create_stream", redirected):
        yield


def failing_saves(folder: Path, *, asynchronous: bool) -> dict[str, Any]:
    """Errors of saves that fail on one rank, what is in the folder after each, and the newest step in the end."""
    model, optimizer = two()
    found: dict[str, Any] = {}
    checkpoints = Checkpoints(folder, keep=2, asynchronous=asynchronous)

    def save(step: int, **over: Any) -> str:
        def call() -> None:
            train_two(model, optimizer)
            checkpoints.save(step, model, optimizer, train={"step": step}, contents=contents(**over))
            checkpoints.finish()

        error = error_of(call)
        dist.barrier()
        names = sorted(path.name for path in folder.iterdir())
        dist.barrier()
        found[f"names after {step}"] = names
        return error

    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / "config.json"))

    found["fine"] = save(1)
    with full_disk(on_rank=1):
        found["one rank"] = save(2)
    with full_disk(on_rank=0):
        found["rank 0"] = save(3)
    found["model files"] = save(4, write_model_files=refuse)
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10)):
        found["no space"] = save(5)
    with mock.patch("os.fsync", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
        found["no sync"] = save(6)
    elsewhere = folder.parent / f"node{dist.get_rank()}"
    elsewhere.mkdir()
    with own_disk(elsewhere, on_rank=1), mock.patch("dsv4_fsdp.train.checkpoints._VISIBLE_AFTER_S", 0.2):
        found["not shared"] = save(7)
    found["fine again"] = save(8)
    newest = checkpoints.latest()
    assert newest is not None
    found["newest"] = newest.step
    return found


def saved_in_the_background(folder: Path) -> tuple[bool, list[str], bool]:
    """Train on while a checkpoint is written: (was it still being written, names then, are the old weights in it)."""
    model, optimizer = two()
    train_two(model, optimizer)
    before = [p.full_tensor().clone() for p in model.parameters()]
    release = threading.Event()
    contents_that_wait = contents(write_model_files=lambda folder: release.wait())
    with Checkpoints(folder, keep=1, asynchronous=True) as checkpoints:
        checkpoints.save(1, model, optimizer, train={}, contents=contents_that_wait)
        train_two(model, optimizer, steps=2)
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.zero_()
        names = sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))
        still_writing = any(thread.name == "checkpoint of step 1" for thread in threading.enumerate())
        dist.barrier()
        release.set()
        found = checkpoints.latest()
        assert found is not None
        resumed, resumed_optimizer = two()
        with torch.no_grad():
            for buffer in resumed.buffers():
                buffer.zero_()
        checkpoints.load(found, resumed, resumed_optimizer, seed=0)
    same = all(torch.equal(a, b.full_tensor()) for a, b in zip(before, resumed.parameters(), strict=True))
    same = same and resumed.table.tolist() == [0, 1, 2, 3, 4] and bool((resumed.bias == 1 + 2**-20).all())
    return still_writing, names, same and int(resumed_optimizer.state[resumed.first.weight]["step"]) == 1


def bad_folder(path: Path) -> str:
    """The error of checkpoints in a folder that cannot be made."""
    return error_of(lambda: Checkpoints(path, keep=1))


# --- Killed runs ------------------------------------------------------------------------------------------------------


def killed_run(rank: int, world_size: int, store: str, folder: str, progress: Any) -> None:
    """A process of its own: resume, check what was loaded, then save after every step until it is killed.

    The weights say which step they are of, so that a checkpoint of mixed steps is seen. Rank 0 sends each step before
    it saves it.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    model = Two(width=64)
    torch_fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    checkpoints = Checkpoints(Path(folder), keep=2)
    found = checkpoints.latest()
    step = 0
    if found is not None:
        step = checkpoints.load(found, model, optimizer, seed=0)["step"]
        assert step == found.step
        for param in model.parameters():
            assert bool((param.to_local() == step).all()), f"step {step}"
            assert bool((optimizer.state[param]["momentum_buffer"].to_local() == step).all()), f"step {step}"
    if rank == 0:
        progress.send(("loaded", step))
    while True:
        step += 1
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
                optimizer.state[param]["momentum_buffer"] = torch.full_like(param, step)
        if rank == 0:
            progress.send(("saving", step))
        checkpoints.save(step, model, optimizer, train={"step": step}, contents=contents())


def manifest_of(path: Path) -> dict[str, Any]:
    found = json.loads((path / "manifest.json").read_text())
    assert isinstance(found, dict)
    return found
