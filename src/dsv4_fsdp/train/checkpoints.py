"""Training checkpoints: written so that a run killed at any moment keeps its last good one, and read with checks first.

**On disk.** One folder a checkpoint::

    RUN/checkpoints/step-00000100/
        manifest.json   written last: format, step, source, base, world_size, mesh, plan_hash, optimizer, torch, files
                        (sizes)
        config.yaml     the run's resolved configuration
        model/          what goes with the weights: config.json, tokenizer, ...
        state/          DCP: weights, optimizer, counters, random states (:mod:`dsv4_fsdp.train.checkpoint_state`)

**Frozen weights** that were read from the model's checkpoint (LoRA's base) are left there: ``manifest.json`` says where
it was (``source``) and by which digests to know it (``base``, :mod:`dsv4_fsdp.checkpoint_digests`; ``null`` if nothing
was left out). A run that resumes reads them from where its own configuration says, before :meth:`Checkpoints.load`.

**Publishing.** All ranks write into ``.tmp-step-...``; every file is on the disk (fsync) before the manifest is, and
the manifest before one rename gives the folder its name. So a name without a dot is a whole checkpoint, unless somebody
or something damaged it later, which its manifest shows: every file's size is in it. Older checkpoints go only after the
new one is published, and lose their name before their files. What a killed run leaves under names with a dot is removed
when the next one starts.

**One decision.** Whatever only one rank can see (a full disk, a broken file, a missing permission) is told to all
before anybody goes on, so that all ranks raise a :class:`CheckpointError`, and none waits for the others forever. This
takes its own gloo group, also beside NCCL: it must not mix with training's collectives, since a checkpoint may be
written in the background.

Not supported: folders that not all ranks share (rank 0 looks for every rank's files and says so); two runs in one
folder at a time; checkpoints of people one does not trust (DCP's format holds pickles).
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dsv4_fsdp.checkpoint_digests import checkpoint_digests, refuse_other_base
from dsv4_fsdp.errors import listing

from .checkpoint_folder import (
    FORMAT,
    MANIFEST,
    SavedCheckpoint,
    folder_name,
    latest_checkpoint,
    published,
    read_checkpoint,
)
from .checkpoint_pieces import CheckpointError, Piece, load_pieces, read_metadata, save_pieces, total_bytes
from .checkpoint_state import (
    OPTIMIZER_GROUPS,
    OptimizerState,
    group_entries,
    group_problems,
    mismatches,
    model_entries,
    optimizer_entries,
    option_notes,
    random_entries,
    restore_random,
    seed_random,
)

__all__ = [
    "Base",
    "CheckpointError",
    "Checkpoints",
    "Contents",
    "SavedCheckpoint",
    "latest_checkpoint",
    "read_checkpoint",
]

_TEMPORARY, _REPLACED, _REMOVING = ".tmp-", ".replaced-", ".removing-"
# Longer than one rank's disk may keep the others waiting. A rank that dies is noticed at once all the same.
_TIMEOUT = timedelta(hours=2)
# A network file system may show a file to other nodes only after a while (NFS caches a folder's names up to a minute).
_VISIBLE_AFTER_S = 90.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Manifest, configuration, tokenizer, DCP's own metadata.
_SMALL_FILES_BYTES = 32 * 2**20

_log = logging.getLogger("dsv4_fsdp")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Base:
    """What a training checkpoint leaves to the checkpoint that the run started from.

    Attributes:
        digests: that checkpoint's (:func:`~dsv4_fsdp.checkpoint_digests.checkpoint_digests`).
        names: of the parameters, which nothing changes.
    """

    digests: Mapping[str, str]
    names: frozenset[str]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says about its run, the same at each save.

    Attributes:
        config_text: ``config.yaml``.
        write_model_files: writes what goes with the weights into the (empty) folder it is given. Rank 0 calls it.
        mesh: axis name -> size.
        plan_hash: of the sharding plan.
        source: path of the model that the run started from; ``None`` if from scratch.
        base: what is left to the files there; ``None`` if nothing is.
    """

    config_text: str
    write_model_files: Callable[[Path], None]
    mesh: Mapping[str, int]
    plan_hash: str
    source: str | None
    base: Base | None = None


class Checkpoints:
    """The checkpoints of one run. All ranks make it, and call each method together.

    Args:
        folder: ``RUN/checkpoints``; made if it is not there.
        keep: how many of the newest to keep.
        asynchronous: copy the state to CPU memory and write it while training goes on. What goes wrong then is raised
            by the next :meth:`save` or :meth:`finish`.

    Raises:
        CheckpointError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, *, keep: int, asynchronous: bool = False) -> None:
        if keep < 1:
            raise CheckpointError(f"keep must be at least 1, got {keep}")
        self.folder = folder
        self._keep = keep
        self._asynchronous = asynchronous
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._step_on_disk: int | None = None
        self._on_first(f"prepare {folder}", self._remove_leftovers)

    # --- Finding ------------------------------------------------------------------------------------------------------

    def latest(self) -> SavedCheckpoint | None:
        """The newest whole checkpoint, the same on all ranks; ``None`` if there is none at all.

        A newer one that is damaged is reported (on rank 0) and left alone.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """

        def find() -> SavedCheckpoint | None:
            found, problems = latest_checkpoint(self.folder)
            for problem in problems:
                _log.warning("skipped: %s", problem)
            return found

        self.finish()
        return self._on_first("find the newest checkpoint", find)

    def base_digests(self, folder: Path, checkpoint: SavedCheckpoint | None) -> dict[str, str]:
        """Digests of the model's checkpoint in ``folder``, from which the frozen weights are going to be read.

        Args:
            checkpoint: that the run resumes from, if it does.

        Raises:
            CheckpointError: on all ranks alike. There is none, or not the one that ``checkpoint`` needs.
        """
        with self._alike(f"read the checkpoint {folder}"):
            if checkpoint is None or checkpoint.base is None:
                return checkpoint_digests(folder)
            remedy = (
                f"name its folder with --model.path (it was {checkpoint.manifest.get('source')}), or fetch the same "
                "files again. The training checkpoint is as it was."
            )
            refuse_other_base(folder, checkpoint.base, held_by=checkpoint.path, remedy=remedy)
            return checkpoint.base

    # --- Writing ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizers,
        *,
        train: Mapping[str, Any],
        contents: Contents,
    ) -> None:
        """Write the checkpoint of ``step`` and publish it; with ``asynchronous``, begin to. Nothing if it is there.

        Call it between steps: gradients are not saved.

        Args:
            step: optimizer steps done.
            optimizers: one, or all that train ``model``.
            train: small values that a resumed run needs (position of the data, counters), the same on all ranks.

        Raises:
            CheckpointError: on all ranks alike. Nothing was published, and what was is untouched.
        """
        self.finish()
        if step == self._step_on_disk:
            return
        optimizers = _as_list(optimizers)
        with self._alike(f"collect the state of step {step}"):
            entries = model_entries(model)
            for name in frozenset() if contents.base is None else contents.base.names:
                del entries[f"model.{name}"]
            entries |= optimizer_entries(model, optimizers)
            groups = group_entries(model, optimizers)
            entries[OPTIMIZER_GROUPS] = groups
            entries |= {f"train.{key}": copy.deepcopy(value) for key, value in train.items()}
            entries |= random_entries(self._rank)
            if self._asynchronous:
                entries = {name: e.copy() if isinstance(e, Piece) else e for name, e in entries.items()}
        manifest = {
            "format": FORMAT,
            "step": step,
            "source": contents.source,
            "base": None if contents.base is None else dict(contents.base.digests),
            "world_size": self._world_size,
            "mesh": dict(contents.mesh),
            "plan_hash": contents.plan_hash,
            "optimizer": sorted({group["kind"] for group in groups}),
            "torch": torch.__version__,
        }
        if not self._asynchronous:
            self._write(entries, manifest, contents)
            return

        def write() -> None:
            try:
                self._write(entries, manifest, contents)
            except CheckpointError as error:
                self._failure = error
            except BaseException as error:  # noqa: BLE001  (of a thread nobody else would hear)
                self._failure = CheckpointError(f"writing the checkpoint of step {step} failed: {_named(error)}")
                self._failure.__cause__ = error

        # A daemon: it can only be left over when this rank dies of another error, and must not keep it from dying.
        self._thread = threading.Thread(target=write, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for a checkpoint that is still being written. Call it before the process group is destroyed.

        Raises:
            CheckpointError: writing it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()

    def _write(self, entries: Mapping[str, Any], manifest: dict[str, Any], contents: Contents) -> None:
        """Write, publish, and remove what is too old. All ranks, in the main thread or in another."""
        step = manifest["step"]
        target = self.folder / folder_name(step)
        temporary = self.folder / f"{_TEMPORARY}{folder_name(step)}"
        needed_bytes = total_bytes(entries) + _SMALL_FILES_BYTES
        what = f"write the checkpoint of step {step}"

        def begin() -> None:
            _refuse_full_disk(self.folder, needed_bytes)
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "model").mkdir(parents=True)
            (temporary / "state").mkdir()
            (temporary / "config.yaml").write_text(contents.config_text)
            contents.write_model_files(temporary / "model")

        def publish() -> None:
            written = {info.relative_path for info in metadata.storage_data.values()}
            deadline = time.monotonic() + _VISIBLE_AFTER_S
            while missing := sorted(written - set(os.listdir(temporary / "state"))):
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                raise CheckpointError(
                    f"rank 0 does not see what other ranks wrote into {temporary / 'state'}:\n{listing(missing)}\n"
                    "what to do: put the run folder on a file system that all nodes share."
                )
            for path in [temporary / "config.yaml", *(p for p in (temporary / "model").rglob("*") if p.is_file())]:
                _sync(path)
            files = {str(p.relative_to(temporary)): p.stat().st_size for p in temporary.rglob("*") if p.is_file()}
            _write_synced(temporary / MANIFEST, json.dumps(manifest | {"files": dict(sorted(files.items()))}, indent=1))
            for path in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
                _sync(path)
            replaced = self.folder / f"{_REPLACED}{folder_name(step)}"
            if target.exists():  # damaged, or it would have been the latest and `save` would not have come here
                target.rename(replaced)
            temporary.rename(target)
            _sync(self.folder)
            shutil.rmtree(replaced, ignore_errors=True)
            self._remove_old(target)

        try:
            self._on_first(what, begin, needed_bytes=needed_bytes)
            try:
                metadata = save_pieces(entries, temporary / "state", self._group)
            except CheckpointException as failures:
                raise self._of_ranks(what, failures, temporary, needed_bytes) from failures
            self._on_first(what, publish, needed_bytes=needed_bytes)
        except CheckpointError:
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._step_on_disk = step

    def _remove_leftovers(self) -> None:
        """Of runs that were killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _sync(self.folder.parent)
        for path in self.folder.iterdir():
            if path.name.startswith(_REPLACED) and not (target := path.with_name(path.name[len(_REPLACED) :])).exists():
                path.rename(target)
            elif path.name.startswith((_TEMPORARY, _REPLACED, _REMOVING)):
                shutil.rmtree(path)
        # Writing is tried now, not after an hour of training.
        probe = self.folder / f"{_TEMPORARY}probe"
        probe.mkdir()
        probe.rmdir()

    def _remove_old(self, newest: Path) -> None:
        """All whole checkpoints but the last ``keep``; a failure costs space and is no reason to end a run."""
        whole = [path for path in published(self.folder) if (path / MANIFEST).exists()]
        for path in whole[: -self._keep]:
            if path == newest:
                continue
            removing = path.with_name(f"{_REMOVING}{path.name}")
            try:
                path.rename(removing)
                shutil.rmtree(removing)
            except OSError as error:
                _log.warning("cannot remove the old checkpoint %s: %s", path, error)

    # --- Reading ------------------------------------------------------------------------------------------------------

    def load(
        self,
        checkpoint: SavedCheckpoint,
        model: nn.Module,
        optimizers: Optimizers,
        *,
        seed: int,
        filled: Collection[str] = (),
    ) -> dict[str, Any]:
        """Read ``checkpoint`` into ``model`` and the freshly made ``optimizers``; return the ``train`` values of
        its :meth:`save`.

        The number of ranks and the mesh may be others. Random states are restored on the same number of ranks; on
        another, the generators are seeded from (``seed``, step, rank), which is said in a note.

        Args:
            filled: names of parameters that have their values already: the checkpoint may have left them out.

        Raises:
            CheckpointError: on all ranks alike, before anything was changed: the checkpoint is of another model or
                optimizer. Or after it: what was read is not what a training run leaves.
        """
        self.finish()
        optimizers = _as_list(optimizers)
        state = checkpoint.path / "state"
        where = f"the checkpoint {checkpoint.path} does not fit this run"
        with self._alike(where):
            saved = read_metadata(state)
            left_out = {f"model.{name}" for name in filled} - saved.keys()
            weights = {name: entry for name, entry in model_entries(model).items() if name not in left_out}
            self._refuse(where, mismatches(weights, saved, prefix="model.", owner="model"))
            groups = group_entries(model, optimizers)
            kinds = sorted({group["kind"] for group in groups})
            if kinds != checkpoint.manifest.get("optimizer"):
                was = ", ".join(checkpoint.manifest.get("optimizer", []))
                self._refuse(where, [f"it was trained with {was}, and this run uses {', '.join(kinds)}"])

        # Small values first: they say for what the optimizer's state was saved.
        small: dict[str, Any] = dict.fromkeys(name for name in saved if name.startswith("train."))
        small[OPTIMIZER_GROUPS] = None
        self._read(small, state)
        with self._alike(where):
            self._refuse(where, group_problems(small[OPTIMIZER_GROUPS], groups))
            optimizer_state = OptimizerState(model, optimizers, saved)
            self._refuse(where, optimizer_state.problems)
            entries = weights | optimizer_state.entries
            same_ranks = checkpoint.world_size == self._world_size
            if same_ranks:
                entries |= {name: e for name, e in random_entries(self._rank).items() if name in saved}
        self._read(entries, state)
        optimizer_state.finish(entries)

        train = {name.removeprefix("train."): value for name, value in small.items() if name.startswith("train.")}
        self._refuse_empty_moments(checkpoint, optimizer_state)
        if same_ranks:
            restore_random(self._rank, entries)
        else:
            seed_random(seed=seed, step=checkpoint.step, rank=self._rank)
        if self._rank == 0:
            if not same_ranks:
                _log.warning(
                    "resumed on %d ranks a run of %d: random generators are seeded anew from seed, step and rank",
                    self._world_size,
                    checkpoint.world_size,
                )
            for note in option_notes(small[OPTIMIZER_GROUPS], groups):
                _log.warning("%s", note)
        self._step_on_disk = checkpoint.step if checkpoint.path.parent == self.folder else None
        return train

    def _read(self, entries: dict[str, Any], state: Path) -> None:
        try:
            load_pieces(entries, state, self._group)
        except CheckpointException as failures:
            raise self._of_ranks("read the checkpoint", failures, state, None) from failures

    def _refuse_empty_moments(self, checkpoint: SavedCheckpoint, state: OptimizerState) -> None:
        """Step counts or moments that are zero on all ranks were dropped on the way."""
        found: list[bool | None] = [None] * self._world_size
        dist.all_gather_object(found, state.was_trained(), group=self._group)
        if state.entries and not any(found):
            raise CheckpointError(
                f"the optimizer's state in {checkpoint.path} is empty, after {checkpoint.step} steps.\n"
                "expected: step counts above 0, and moments that are not all zero\n"
                "what to do: resume from another checkpoint."
            )

    def _refuse(self, where: str, problems: list[str]) -> None:
        if problems:
            text = "\n".join(problems)
            raise CheckpointError(
                f"{where}:\n{text}\n"
                "what to do: resume with the configuration it was written with (config.yaml beside it), or give a new "
                "run folder to start another run."
            )

    # --- One decision -------------------------------------------------------------------------------------------------

    def _on_first(self, what: str, action: Callable[[], Any], *, needed_bytes: int | None = None) -> Any:
        """Run ``action`` on rank 0 and give its result, or its error, to all."""
        outcome: list[Any] = [None, None]
        cause: Exception | None = None
        if self._rank == 0:
            try:
                outcome[0] = action()
            except Exception as error:  # noqa: BLE001  (raised below, on all ranks)
                cause = error
                outcome[1] = self._words(what, error, self.folder, needed_bytes, rank=0)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise CheckpointError(outcome[1]) from cause
        return outcome[0]

    def _alike(self, what: str) -> _Alike:
        return _Alike(what, self._group)

    def _of_ranks(
        self, what: str, failures: CheckpointException, path: Path, needed_bytes: int | None
    ) -> CheckpointError:
        """The error of DCP in words, the same on all ranks: that of the lowest rank that had one."""
        rank, (error, _) = min(failures.failures.items())
        return CheckpointError(self._on_first(what, lambda: self._words(what, error, path, needed_bytes, rank=rank)))

    def _words(self, what: str, error: BaseException, path: Path, needed_bytes: int | None, *, rank: int) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        at = getattr(error, "filename", None) or path
        lines = [f"could not {what}.", f"got: {_named(error)}", f"where: {at}, on rank {rank}"]
        if needed_bytes is not None:
            is_full = getattr(error, "errno", None) in _FULL
            # torch's archive writer forgets why a write fell short, and fails on what it says next.
            if "unexpected pos" in str(error):
                is_full = True
                lines.append("that is: a file could not be written to its end (disk, quota or file size limit)")
            mend = "free space, lower checkpoint.keep" if is_full else "mend what is said above"
            lines.append(f"needed: about {_size(needed_bytes)}; free there: {_free_in_words(self.folder)}")
            lines.append(
                f"what to do: {mend}, or put the run folder elsewhere; then start the run again.\n"
                "Nothing was published, and earlier checkpoints are as they were."
            )
        return "\n".join(lines)


class _Alike:
    """Within it ranks work apart; on leaving, the error of any becomes a ``CheckpointError`` on all."""

    def __init__(self, what: str, group: dist.ProcessGroup) -> None:
        self._what, self._group = what, group

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an exit that was asked for
        mine = None if error is None else str(error) if isinstance(error, CheckpointError) else _named(error)
        everyone: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        if all(theirs is None for theirs in everyone) or isinstance(error, CheckpointError):
            return
        rank, text = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs is not None)
        raise CheckpointError(f"{self._what}: rank {rank} failed.\ngot: {text}") from error


def _as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Have the file, or the names in the folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_full_disk(folder: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _free_in_words(folder: Path) -> str:
    try:
        return _size(shutil.disk_usage(folder).free)
    except OSError as error:
        return f"unknown ({error})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
