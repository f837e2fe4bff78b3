"""The training loop: what one optimizer step does, all of it, in the order in which it happens.

**What.** A DeepSeek-V4 is built on every rank from the same seed, sharded with :func:`dsv4_fsdp.parallelize`, trained
for ``steps`` steps of AdamW, and exported. Everything before the first step is there to fail early: the ranks compare
plan, settings and data before they depend on each other, and a dry export is written and reloaded before time is spent.

**One reduction a step.** Ranks hold different numbers of tokens. The loss that counts is the mean over all of them, so
each rank's *sum* is divided by the global count and multiplied by the number of ranks, which FSDP2's averaging of
gradients takes out again: the gradient is that of one process on the concatenated batch. The global count takes one
all-reduce of a small vector between forward and backward, and two more things ride in it:

- for each compressor, whether a rank's sequences were long enough to close a window. Where no rank's was, the gradients
  are dropped rather than left at zero, as one process would have it (:mod:`dsv4_fsdp.alignment`);
- whether a rank's loss is not finite. Together with the gradient norm, which is global too, this makes all ranks skip
  the same step; no rank ever decides alone.

**Precision.** Weights are stored in bf16 and the optimizer's moments inherit that, except for the fp32 islands, which
are fp32 in storage, compute, reduction and moments. At bf16, an update below 2**-9 of a weight is lost: good enough for
the learning rates of this demonstration, not for fine-tuning at 1e-5.

**Source.** Loss normalisation: the accumulation fix that Transformers and others made in 2024. Schedule: linear warm-up
and cosine decay, as in most pretraining reports. The rest is FSDP2 as its documentation has it.

**Not supported** here: gradient accumulation, resuming, evaluation, checkpoints to load, meshes with a second axis.
"""

from __future__ import annotations

import math
import platform
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from dsv4_fsdp import __version__
from dsv4_fsdp.alignment import tie_compressors
from dsv4_fsdp.errors import Dsv4FsdpError, listing
from dsv4_fsdp.live_precision import precision_table, read_back
from dsv4_fsdp.parallelize import parallelize
from dsv4_fsdp.plan import plan_sharding

from .config import OptimizerConfig, TrainConfig, flat_settings
from .export import dry_export, publish_export
from .notices import show_notices
from .progress import Progress, StepMetrics, peak_memory_bytes
from .ranks import Ranks
from .run_folder import RunFolder
from .stdlib_text import BOS, StdlibText
from .tiny_model import build_tiny_model, byte_tokenizer

__all__ = ["MissingGradients", "learning_rate", "train"]

_SAMPLE_PROMPT = "def "


class MissingGradients(Dsv4FsdpError, RuntimeError):
    """Trainable parameters got no gradient in the first step."""


def train(config: TrainConfig, folder: RunFolder, ranks: Ranks) -> None:
    """Train as ``config`` says and leave everything in ``folder``. All ranks call it."""

    def say(text: str = "") -> None:
        if ranks.is_first:
            print(text, flush=True)

    show_notices(is_first=ranks.is_first)
    data = StdlibText(
        seed=config.seed,
        sequence_lengths=config.data.sequence_lengths,
        batch_tokens=config.data.batch_tokens,
    )
    model = build_tiny_model(seed=config.seed)
    plan = plan_sharding(model, mesh_shape=tuple(ranks.mesh.shape))
    ranks.agree({"sharding plan": plan.hash, "training text": data.digest, **flat_settings(config)})

    num_parameters = sum(param.numel() for param in model.parameters())
    size = "1 rank" if ranks.world_size == 1 else f"{ranks.world_size} ranks"
    say(f"dsv4-fsdp {__version__}, torch {torch.__version__}: {size} on {ranks.device.type}")
    say(f"run    {folder.path}")
    say(f"model  {type(model).__name__}, {num_parameters:,} parameters")
    say(f"data   {len(data.tokens):,} bytes of Python {platform.python_version()}'s library, {data.num_files} files")
    say(f"plan   {len(plan.units)} units, the same on all ranks: {plan.hash[:16]}")

    model.to(ranks.device)
    plan = parallelize(model, ranks.mesh)
    alignment = tie_compressors(model)  # the ties that parallelize() made
    precision = precision_table(read_back(model, plan))
    say(f"\nPrecision, read back from the live units:\n\n{precision}\n")
    if ranks.is_first:
        folder.create(config)
        folder.plan.write_text(plan.table() + "\n")
        folder.plan.with_suffix(".json").write_text(plan.to_json() + "\n")
        folder.precision.write_text(precision + "\n")
    tokenizer = byte_tokenizer()
    dry_export(model, folder, ranks, tokenizer=tokenizer)

    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = make_optimizer(trainable, config.optimizer)
    losses: list[float] = []
    skipped_steps = short_steps = 0
    started = time.perf_counter()
    with Progress(steps=config.steps, metrics=folder.metrics) if ranks.is_first else _Silence() as progress:
        for step in range(config.steps):
            step_started = time.perf_counter()
            lr = learning_rate(step, steps=config.steps, optimizer=config.optimizer)
            for group in optimizer.param_groups:
                group["lr"] = lr

            tokens = data.batch(step * ranks.world_size + ranks.rank).to(ranks.device)
            labels = tokens[:, 1:].flatten()
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss_sum = F.cross_entropy(logits.float(), labels, reduction="sum")

            # The one reduction: [tokens, loss sum, ranks whose loss is not finite, windows of each compressor].
            mine = torch.stack([loss_sum.new_tensor(labels.numel()), loss_sum.detach(), ~loss_sum.detach().isfinite()])
            shared = torch.cat([mine, alignment.window_flags(ranks.device)]).double()
            dist.all_reduce(shared)
            (loss_sum * (ranks.world_size / shared[0]).float()).backward()

            num_tokens, global_loss_sum, bad_ranks, *windows = shared.tolist()
            if step == 0:
                refuse_missing_gradients(model, ranks)
            alignment.drop_untouched(shared[3:])
            norm = torch.nn.utils.clip_grad_norm_(trainable, config.optimizer.clip_grad_norm)
            grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            if bad_ranks or not math.isfinite(grad_norm):
                skipped_steps += 1
            else:
                optimizer.step()
            optimizer.zero_grad()

            ranks_without_window = ranks.world_size - round(min(windows, default=ranks.world_size))
            short_steps += ranks_without_window > 0
            losses.append(global_loss_sum / num_tokens)
            now = time.perf_counter()
            progress.record(
                StepMetrics(
                    step=step + 1,
                    loss=losses[-1],
                    grad_norm=grad_norm,
                    lr=lr,
                    tokens=round(num_tokens),
                    tokens_per_s=num_tokens / (now - step_started),
                    ranks_without_window=ranks_without_window,
                    skipped_steps=skipped_steps,
                    elapsed_s=now - started,
                    memory_bytes=peak_memory_bytes(ranks.device),
                )
            )

    last = losses[-10:]
    say(f"\nloss   {losses[0]:.3f} at the first step, {sum(last) / len(last):.3f} over the last {len(last)}")
    say(
        f"steps  {len(losses)} in {time.perf_counter() - started:.0f} s, {skipped_steps} of them skipped as not finite;"
    )
    say(f"       in {short_steps} some rank's sequences were too short for a compressor's window")
    check = torch.cat([torch.tensor([BOS]), data.tokens[: max(config.data.sequence_lengths) - 1].long()])
    export = publish_export(
        model,
        folder,
        ranks,
        tokenizer=tokenizer,
        tokens=check.unsqueeze(0).to(ranks.device),
        prompt=_SAMPLE_PROMPT,
        seed=config.seed,
    )
    if export is not None:
        dtypes = ", ".join(f"{count} {dtype.removeprefix('torch.')}" for dtype, count in export.dtypes.items())
        say(f"export {folder.export}: {sum(export.dtypes.values())} tensors ({dtypes}),")
        say("       reloaded by stock Transformers in a fresh process: logits equal in every bit")
        say(f"\nWhat it writes after {_SAMPLE_PROMPT!r}:\n")
        say("\n".join(f"    {line}" for line in export.sample.splitlines()))


def make_optimizer(trainable: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only: zero, where decay pulls, is no neutral value for a norm or a scale."""
    groups = [
        {"params": [param for param in trainable if param.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [param for param in trainable if param.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), foreach=True)


def learning_rate(step: int, *, steps: int, optimizer: OptimizerConfig) -> float:
    """The rate of ``step`` (from 0): up in a line over ``warmup_fraction``, then down a cosine until the last step."""
    warmup_steps = round(optimizer.warmup_fraction * steps)
    if step < warmup_steps:
        return optimizer.lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    low = optimizer.final_lr_fraction
    return optimizer.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def refuse_missing_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Raise ``MissingGradients``, on all ranks alike, if a trainable parameter got no gradient on any rank.

    Called after the first backward and before untouched compressors lose their (zero) gradients, so short sequences are
    no reason. What is listed would never train, and nothing else would tell: its optimizer state is just not there.
    """
    mine = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    everyone: list[list[str] | None] = [None] * ranks.world_size
    dist.all_gather_object(everyone, mine)
    missing = [name for name in mine if all(name in (theirs or []) for theirs in everyone)]
    if missing:
        raise MissingGradients(
            f"after the first step {len(missing)} trainable parameters have no gradient on any rank:\n"
            f"{listing(missing)}\n"
            "what to do: connect them to the loss, or freeze them (requires_grad_(False)) before the optimizer is made."
        )


class _Silence:
    """Stands for the progress on ranks other than 0."""

    def __enter__(self) -> _Silence:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record(self, row: StepMetrics) -> None:
        """Show nothing."""
