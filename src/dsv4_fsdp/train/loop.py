"""A training run from its start to its export, in the order in which things happen.

**Start.** Everything that can fail early does. The ranks meet; data is prepared; the checkpoint's headers are checked;
the model is built on the meta device and sharded as planned; the ranks compare plan, settings and data. Only then is a
weight read. An export is rehearsed and every dtype is observed in one forward and backward
(:func:`dsv4_fsdp.audit`) before the first step is made.

**A step.** Ranks hold different numbers of tokens, and the loss that counts is the mean over all of them, whichever
rank and micro-batch they are in: each micro-batch's *sum* is multiplied by ``ranks / tokens``, which FSDP2's averaging
takes out again, so the gradient is that of one process on the concatenated batch. One all-reduce a step carries all
that ranks must know of each other (:class:`~dsv4_fsdp.train.gradients.StepTotals`): gradient norm, loss, whether one is
not finite, whether somebody wants to stop, which compressors had a window, the routers' counts, and the next step's
tokens. Every decision is made from the reduced numbers, so no rank ever decides alone.

**A checkpoint** is everything that a step depends on: weights, optimizer, counters, random states. What data a step has
is a pure function of its number, and so is the learning rate. So a resumed run makes the same steps, bit by bit on the
same mesh.

**Precision.** See :mod:`dsv4_fsdp.train.optimizers` for what bf16 storage costs. Islands are fp32 in storage, compute,
reduction and moments.
"""

from __future__ import annotations

import hashlib
import json
import logging
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dsv4_fsdp import __version__
from dsv4_fsdp.alignment import Alignment, tie_compressors
from dsv4_fsdp.auditing import audit
from dsv4_fsdp.checkpoint_loading import CheckpointReader, check_checkpoint
from dsv4_fsdp.chunked_loss import with_chunked_loss
from dsv4_fsdp.data.batches import NOT_SUPERVISED, Batch, Batches
from dsv4_fsdp.data.prepare import load_tokenizer, prepare
from dsv4_fsdp.data.settings import StdlibSettings
from dsv4_fsdp.errors import Dsv4FsdpError
from dsv4_fsdp.live_precision import precision_table, read_back
from dsv4_fsdp.materialize import refuse_uninitialized
from dsv4_fsdp.names import canonical_name

from .build_model import ISLANDS_FILE, ShardedModel, fill, frozen_weights, shard_on_meta, source_of
from .checkpoints import Base, Checkpoints, Contents, SavedCheckpoint
from .config import TrainConfig, flat_settings, to_yaml
from .export import dry_export, publish_export
from .gradients import SkippedSteps, StepTotals, clip_to_norm, loss_scale, refuse_missing_gradients
from .notices import show_notices
from .optimizers import groups_table, make_optimizer, parameter_groups, precision_notes, set_learning_rate
from .progress import Progress, StepMetrics, peak_memory_bytes
from .ranks import Ranks
from .router_bias import ROUTER_CLASS_NAMES, RouterBalance
from .run_folder import RunFolder
from .schedule import learning_rate
from .stopping import StopRequests
from .tiny_model import byte_tokenizer
from .trackers import Trackers

__all__ = ["AuditFailed", "make_loss", "train"]

_log = logging.getLogger("dsv4_fsdp")

# Of the batch on which an export's logits are compared.
_LONGEST_CHECK_TOKENS = 512


class AuditFailed(Dsv4FsdpError, RuntimeError):
    """The live model is not what the contract says."""


@dataclass(frozen=True)
class _Run:
    """What all parts of a run work with."""

    config: TrainConfig
    folder: RunFolder
    ranks: Ranks
    batches: Batches
    tokenizer: Any

    def say(self, text: str = "") -> None:
        if self.ranks.is_first:
            print(text, flush=True)


@dataclass(frozen=True)
class _Training:
    """What the steps work with, all of it made before the first."""

    run: _Run
    sharded: ShardedModel
    loss_sum: Callable[[Batch], torch.Tensor]
    trainable: tuple[nn.Parameter, ...]
    optimizer: torch.optim.Optimizer
    alignment: Alignment
    checkpoints: Checkpoints
    contents: Contents


def train(config: TrainConfig, folder: RunFolder, ranks: Ranks) -> None:
    """Train as ``config`` says, all results in ``folder``; go on if a checkpoint is there. All ranks call it."""
    show_notices(is_first=ranks.is_first)
    with StopRequests(
        time_limit_s=config.checkpoint.time_limit_s, stop_file=folder.stop if ranks.is_first else None
    ) as stop:
        _train(config, folder, ranks, stop)


def _train(config: TrainConfig, folder: RunFolder, ranks: Ranks, stop: StopRequests) -> None:
    versions = f"dsv4-fsdp {__version__}, torch {torch.__version__}"
    ranks.agree({"versions": versions, **flat_settings(config)})
    if ranks.is_first:
        folder.create(config)
    ranks.wait()
    checkpoints = Checkpoints(
        folder.checkpoints, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous
    )
    latest = checkpoints.latest()
    digests = _base_digests(config, checkpoints, latest)
    if ranks.is_first:
        folder.keep_config(config)
    run = _prepare(config, folder, ranks, stop)
    say = run.say
    sharded = _build(run, latest, digests)
    model = sharded.model
    base = None if digests is None else Base(digests, frozen_weights(model))
    alignment = tie_compressors(model)  # the ties that parallelize() made

    islands = {p.fqn for unit in sharded.plan.units for group in unit.groups for p in group.params if p.island}
    groups = parameter_groups(model, config.optimizer, islands=islands)
    optimizer = make_optimizer(groups, config.optimizer, seed=config.seed)
    say(groups_table(groups))
    for note in precision_notes(groups, config.optimizer):
        _log.warning("%s", note)  # shown as a note, by the first rank

    state: dict[str, Any] = {"step": 0, "skipped_steps": 0, "tokens": 0, "data": run.batches.digest}
    if latest is not None:
        state = _resume(run, checkpoints, latest, sharded, optimizer, base)
    if ranks.is_first:
        folder.keep_metrics(state["step"])
        # An export that is there is of a run that ended with fewer steps; it must not pass for what comes out now.
        if state["step"] < config.steps and (aside := folder.set_export_aside(state["step"])) is not None:
            say(f"export of the steps before is now {aside}")
    source = source_of(config.model)
    dry_export(model, folder, ranks, tokenizer=run.tokenizer, source=source, islands=sharded.islands)
    contents = Contents(
        config_text=to_yaml(config),
        write_model_files=lambda target: _write_model_files(sharded, run.tokenizer, target),
        mesh=ranks.axes,
        plan_hash=sharded.plan.hash,
        source=None if source is None else str(source),
        base=base,
    )
    training = _Training(
        run=run,
        sharded=sharded,
        loss_sum=make_loss(model, config),
        trainable=tuple(param for group in groups for param in group.params),
        optimizer=optimizer,
        alignment=alignment,
        checkpoints=checkpoints,
        contents=contents,
    )
    _audit(training)

    reason = _make_steps(training, state, stop)
    if reason is not None:
        say(f"\nstopped: {reason}. To go on, start the same command again.")
    elif config.checkpoint.export and not folder.export.exists():
        _export(run, sharded)


# --- Start ------------------------------------------------------------------------------------------------------------


def _prepare(config: TrainConfig, folder: RunFolder, ranks: Ranks, stop: StopRequests) -> _Run:
    """Tokenizer and data, ready to train on."""
    if isinstance(config.data, StdlibSettings):
        tokenizer = byte_tokenizer()
    else:
        tokenizer = load_tokenizer(config.data.tokenizer or config.model.path)
    cache_dir = getattr(config.data, "cache_dir", None)
    batches = prepare(
        config.data,
        tokenizer=tokenizer,
        cache_dir=folder.data_cache if cache_dir is None else Path(cache_dir),
        seed=config.seed,
        is_maker=ranks.local_rank == 0,
        # Longer than a collective may take: a large corpus is tokenised here.
        wait=lambda: ranks.wait_patiently("data", told_to_stop=stop.requested),
    )
    batches.check(ranks.world_size)
    return _Run(config, folder, ranks, batches, tokenizer)


def _base_digests(
    config: TrainConfig, checkpoints: Checkpoints, latest: SavedCheckpoint | None
) -> dict[str, str] | None:
    """Digests of the model's checkpoint if this run's checkpoints leave frozen weights to it.

    A run that goes on from one that holds all of them (it did not read the other) writes such again.
    """
    source = source_of(config.model)
    if source is None or not config.model.leaves_out_base or (latest is not None and latest.base is None):
        return None
    return checkpoints.base_digests(source, latest)


def _build(run: _Run, latest: SavedCheckpoint | None, digests: dict[str, str] | None) -> ShardedModel:
    """The model, sharded as all ranks agree, and filled except with what is to be read from ``latest``."""
    config, folder, ranks, say = run.config, run.folder, run.ranks, run.say
    source = source_of(config.model) if latest is None or digests is not None else None
    with nullcontext() if source is None else CheckpointReader(source) as reader:
        if reader is not None:
            # Each rank reads the headers for itself: it needs them, and a file that only one cannot see is found.
            check_checkpoint(
                reader.folder, allow_downcast_islands=config.model.allow_downcast_islands, layout=reader.layout
            )
        sharded = shard_on_meta(
            config,
            ranks.mesh,
            expert_mesh=ranks.expert_mesh,
            reader=reader,
            resumed_from=None if latest is None else latest.path / "model",
        )
        model, plan = sharded.model, sharded.plan
        _refuse_wrong_vocabulary(model, run.batches)
        base = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
        ranks.agree({"sharding plan": plan.hash, "data": run.batches.digest, "digest of frozen weights": base})
        num_parameters = sum(param.numel() for param in model.parameters())
        size = "1 rank" if ranks.world_size == 1 else f"{ranks.world_size} ranks"
        shape = "" if len(ranks.axes) == 1 else f" ({', '.join(f'{n} {s}' for n, s in ranks.axes.items())})"
        say(f"dsv4-fsdp {__version__}, torch {torch.__version__}: {size} on {ranks.device.type}{shape}")
        say(f"run    {folder.path}")
        kind = type(model).__name__.removeprefix("FSDP")
        origin = str(source or f"seed {config.seed}")
        if latest is not None:
            origin = str(latest.path) + (f", frozen weights from {source}" if source is not None else "")
        say(f"model  {kind}, {num_parameters:,} parameters, from {origin}")
        for line in _describe_data(run.batches):
            say(textwrap.fill(f"data   {line}", 100, subsequent_indent=" " * 7))
        say(f"plan   {len(plan.units)} units, the same on all ranks: {plan.hash[:16]}")
        report = fill(sharded, config, ranks.device, reader=reader, later=latest is not None)
    if report is not None:
        left = f", {len(report.not_loaded)} left in the files" if report.not_loaded else ""
        say(f"read   {report.num_tensors} tensors, {report.bytes_read / 2**20:,.1f} MiB on this rank{left}")
    if latest is None:
        ranks.agree(_buffer_digests(model))

    precision = precision_table(read_back(model, plan))
    say(f"\nPrecision, read back from the live units:\n\n{precision}\n")
    if ranks.is_first:
        folder.plan.write_text(plan.table() + "\n")
        folder.plan.with_suffix(".json").write_text(plan.to_json() + "\n")
        folder.precision.write_text(precision + "\n")
    return sharded


def _describe_data(batches: Batches) -> list[str]:
    lines = []
    if batches.num_sequences is not None:
        lines.append(f"{batches.num_sequences:,} sequences, {batches.steps_per_epoch:,} steps to see all of them")
    if batches.counts is not None:
        lines.append(str(batches.counts))
    return [*lines, *batches.notices]


def _refuse_wrong_vocabulary(model: nn.Module, batches: Batches) -> None:
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if batches.vocab_size > rows:
        raise Dsv4FsdpError(
            "the data holds tokens that the model does not know.\n"
            f"expected: token ids below {rows}, the rows of the embedding\ngot: up to {batches.vocab_size - 1}\n"
            "what to do: take the tokenizer that belongs to the model (data.tokenizer)."
        )


def _buffer_digests(model: nn.Module) -> dict[str, str]:
    """Dtype, shape and SHA-256 of every buffer: ranks whose buffers differ compute different models."""
    digests = {}
    for name, buffer in model.named_buffers():
        values = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(values.numpy().data).hexdigest()[:16]
        digests[f"buffer {canonical_name(name)}"] = f"{buffer.dtype} {tuple(buffer.shape)} {digest}"
    return digests


def _resume(
    run: _Run,
    checkpoints: Checkpoints,
    latest: SavedCheckpoint,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    base: Base | None,
) -> dict[str, Any]:
    """Read ``latest`` into the model and its optimizer; the run's counters.

    Raises:
        CheckpointError: it is of another model or optimizer.
        Dsv4FsdpError: it was trained on other data.
    """
    filled = frozenset() if base is None else base.names
    state = checkpoints.load(latest, sharded.model, optimizer, seed=run.config.seed, filled=filled)
    refuse_uninitialized(sharded.model)
    run.ranks.agree(_buffer_digests(sharded.model))
    if state["data"] != run.batches.digest:
        raise Dsv4FsdpError(
            "the run cannot be continued on other data, or on the same in another order.\n"
            f"expected: data with digest {state['data'][:16]}\ngot: {run.batches.digest[:16]}\n"
            f"where: {latest.path}\nwhat to do: give the data and the global batch of the run, or a new --run-dir."
        )
    run.say(f"resume {latest.path}: step {latest.step} of {run.config.steps}")
    return state


def _balance(model: nn.Module, config: TrainConfig) -> RouterBalance | None:
    """Counts what the routers choose, and moves their biases if asked to; ``None`` without top-k routers."""
    has_routers = any(cls.__name__ in ROUTER_CLASS_NAMES for m in model.modules() for cls in type(m).__mro__)
    return RouterBalance(model, rate=config.router_bias_rate) if has_routers else None


def _audit(training: _Training) -> None:
    """Observe every dtype in one forward and backward, which leaves nothing behind; keep the report with the run.

    Raises:
        AuditFailed: on all ranks alike, if something is not as the contract says and the run is to stop then.
    """
    run, sharded, model = training.run, training.sharded, training.sharded.model
    mode = run.config.logging.audit
    if mode == "off":
        return
    batch = run.batches.micro_batches(0, rank=run.ranks.rank, world_size=run.ranks.world_size)[0].to(run.ranks.device)
    report = audit(model, plan=sharded.plan, fp32_params=sharded.islands)
    if report.ok:
        with _random_state_kept(run.ranks.device):
            report = audit(
                model, plan=sharded.plan, fp32_params=sharded.islands, step=lambda: training.loss_sum(batch).backward()
            )
        for param in model.parameters():
            param.grad = None
        training.alignment.reset()
    if run.ranks.is_first:
        run.folder.audit.write_text(report.to_json() + "\n")
        run.folder.audit.with_suffix(".txt").write_text(report.table() + "\n")
    run.say(f"audit  {report.table().splitlines()[0]}")
    if not report.ok:
        lines = [f"{v.name}: expected {v.expected}, got {v.found}; {v.cause}" for v in report.violations[:8]]
        text = "\n".join(lines)
        if mode == "stop":
            raise AuditFailed(
                f"the live model breaks its fp32 contract in {len(report.violations)} places:\n{text}\n"
                f"where: {run.folder.audit}\n"
                "what to do: mend the cause, or train all the same with --logging.audit warn."
            )
        run.say(text)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside (dropout) are drawn again outside."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        yield


# --- Steps ------------------------------------------------------------------------------------------------------------


def _make_steps(training: _Training, state: dict[str, Any], stop: StopRequests) -> str | None:
    """Every step from ``state`` on; why it stopped before the last one, or ``None``."""
    run, model, optimizer, alignment = training.run, training.sharded.model, training.optimizer, training.alignment
    config, folder, ranks, batches, say = run.config, run.folder, run.ranks, run.batches, run.say
    balance = _balance(model, config)
    totals = StepTotals(
        training.trainable,
        num_windows=len(alignment.compressor_fqns),
        expert_counts_shape=(0,) if balance is None else tuple(balance.counts().shape),
    )
    skipped = SkippedSteps(max_in_a_row=config.optimizer.max_skipped_steps, total=state["skipped_steps"])
    losses: list[float] = []
    short_steps = 0
    first_step = state["step"]
    reason = None
    with ExitStack() as stack:
        recorders: list[Progress | Trackers] = []
        if ranks.is_first:
            progress = Progress(steps=config.steps, metrics=folder.metrics, done=first_step)
            trackers = Trackers(config, tensorboard=folder.tensorboard, name=folder.path.name)
            recorders = [stack.enter_context(progress), stack.enter_context(trackers)]
        mine = batches.micro_batches(first_step, rank=ranks.rank, world_size=ranks.world_size)
        totals.first_tokens(sum(batch.num_supervised for batch in mine))
        checkpoint_s = 0.0
        started = time.perf_counter()
        for step in range(first_step, config.steps):
            clock = _Clock()
            lr = learning_rate(step, steps=config.steps, settings=config.optimizer)
            set_learning_rate(optimizer, lr)
            scale = loss_scale(totals.num_tokens, ranks.world_size)
            total_loss = torch.zeros((), dtype=torch.float64, device=ranks.device)
            for batch in mine:
                batch = batch.to(ranks.device)
                if balance is not None:
                    balance.use_mask(_mask(batch))
                loss = training.loss_sum(batch)
                (loss * scale).backward()
                total_loss += loss.detach()
            clock.lap("compute_s")

            is_last = step + 1 == config.steps
            if not is_last:
                mine = batches.micro_batches(step + 1, rank=ranks.rank, world_size=ranks.world_size)
            clock.lap("data_s")
            total = totals.reduce(
                loss_sum=total_loss,
                next_tokens=0 if is_last else sum(batch.num_supervised for batch in mine),
                window_flags=alignment.window_flags(ranks.device),
                stop=stop.requested(),
                expert_counts=None if balance is None else balance.counts(),
            )
            clock.lap("reduce_s")

            if step == first_step:
                refuse_missing_gradients(model, allow=config.optimizer.allow_missing_gradients)
            alignment.drop_untouched(total.window_flags)
            may_step = skipped.may_step(step + 1, total)
            if may_step:
                clip_to_norm(training.trainable, total.grad_norm, config.optimizer.clip_grad_norm)
                optimizer.step()
            load = (
                None if balance is None or not total.num_tokens else balance.update(total.expert_counts, move=may_step)
            )
            optimizer.zero_grad()
            clock.lap("optimizer_s")

            eval_loss = None
            if config.evaluation.every and ((step + 1) % config.evaluation.every == 0 or is_last):
                eval_loss = _evaluate(training)
            state |= {"step": step + 1, "skipped_steps": skipped.total, "tokens": state["tokens"] + total.num_tokens}

            windows = total.window_flags.tolist()
            ranks_without_window = ranks.world_size - round(min(windows, default=ranks.world_size))
            short_steps += ranks_without_window > 0
            losses.append(total.loss)
            row = StepMetrics(
                step=step + 1,
                loss=total.loss,
                grad_norm=total.grad_norm,
                lr=lr,
                tokens=total.num_tokens,
                tokens_per_s=total.num_tokens / clock.total_s,
                ranks_without_window=ranks_without_window,
                skipped_steps=skipped.total,
                elapsed_s=time.perf_counter() - started,
                memory_bytes=peak_memory_bytes(ranks.device),
                eval_loss=eval_loss,
                expert_load=None if load is None else load.worst,
                checkpoint_s=checkpoint_s,
                **clock.laps,
            )
            for recorder in recorders:
                recorder.record(row)
            # After the step's line: a run killed in between makes the step again and writes the line again.
            stops = total.stop_ranks > 0
            every = config.checkpoint.every
            save_started = time.perf_counter()
            if stops or (every and ((step + 1) % every == 0 or is_last)):
                training.checkpoints.save(step + 1, model, optimizer, train=state, contents=training.contents)
            checkpoint_s = time.perf_counter() - save_started
            if stops and not is_last:
                reason = f"{stop.reason or 'another rank was told to'}, after step {step + 1} of {config.steps}"
                break
        training.checkpoints.finish()

    if losses:
        last = losses[-10:]
        say(f"\nloss   {losses[0]:.3f} at the first step, {sum(last) / len(last):.3f} over the last {len(last)}")
        say(
            f"steps  {len(losses)} in {time.perf_counter() - started:.0f} s, "
            f"{skipped.total} of them skipped as not finite;"
        )
        say(f"       in {short_steps} some rank's sequences were too short for a compressor's window")
    return reason


def make_loss(model: nn.Module, config: TrainConfig) -> Callable[[Batch], torch.Tensor]:
    """A function that runs one batch and returns the sum of its token losses: an fp32 scalar, zero with a graph if
    nothing in the batch is supervised."""
    if config.model.loss == "chunked":
        chunked = with_chunked_loss(model)
        return lambda batch: chunked(batch.input_ids, batch.labels, position_ids=batch.position_ids).loss_sum

    def stock(batch: Batch) -> torch.Tensor:
        positions = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        logits = model(input_ids=batch.input_ids, use_cache=False, **positions).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=NOT_SUPERVISED, reduction="sum"
        )

    return stock


def _mask(batch: Batch) -> torch.Tensor:
    """1 for real tokens, 0 for padding: int64, shape ``(rows, length)``."""
    positions = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    return (positions < batch.lengths.to(positions.device)[:, None]).long()


@torch.no_grad()
def _evaluate(training: _Training) -> float:
    """Mean loss over the evaluation's tokens of all ranks, each of which runs the same number of batches."""
    run, model = training.run, training.sharded.model
    totals = torch.zeros(2, dtype=torch.float64, device=run.ranks.device)
    model.eval()
    for batch in run.batches.eval_batches(run.ranks.rank, run.ranks.world_size):
        on_device = batch.to(run.ranks.device)
        totals[0] += training.loss_sum(on_device)
        totals[1] += batch.num_supervised
    model.train()
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


class _Clock:
    """Times the parts of a step, in seconds of the host."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._started = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What passed since the last lap was ``name``."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        """Of all laps."""
        return sum(self.laps.values())


# --- What is left -----------------------------------------------------------------------------------------------------


def _write_model_files(sharded: ShardedModel, tokenizer: Any, target: Path) -> None:
    """What goes with the weights, so that a checkpoint can be exported without the model that it came from."""
    config = sharded.model.config
    config.save_pretrained(target)  # type: ignore[operator, union-attr]
    generation = getattr(sharded.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if sharded.adapter is not None:
        sharded.adapter.save_pretrained(target)
    (target / ISLANDS_FILE).write_text(json.dumps(sharded.islands))


def _export(run: _Run, sharded: ShardedModel) -> None:
    batch = run.batches.micro_batches(0, rank=0, world_size=run.ranks.world_size)[0]
    tokens = batch.input_ids[:1, : min(int(batch.lengths[0]), _LONGEST_CHECK_TOKENS)]
    prompt = "def " if isinstance(run.config.data, StdlibSettings) else run.tokenizer.decode(tokens[0, :16])
    # Whoever loads the export computes with Transformers' attention, and must get these bits.
    sharded.model.set_attn_implementation("eager")  # type: ignore[operator]
    export = publish_export(
        sharded.model,
        run.folder,
        run.ranks,
        tokenizer=run.tokenizer,
        tokens=tokens.to(run.ranks.device),
        prompt=prompt,
        seed=run.config.seed,
        source=source_of(run.config.model),
        islands=sharded.islands,
    )
    if export is not None:
        dtypes = ", ".join(f"{count} {dtype.removeprefix('torch.')}" for dtype, count in export.dtypes.items())
        kind = "" if sharded.adapter is None else "a peft adapter, "
        run.say(f"export {run.folder.export}: {kind}{sum(export.dtypes.values())} tensors ({dtypes}),")
        if export.reloaded:
            run.say("       reloaded by stock Transformers in a fresh process: logits equal in every bit")
            run.say(f"\nWhat it writes after {prompt!r}:\n")
            run.say("\n".join(f"    {line}" for line in export.sample.splitlines()))
