"""What a run's section ``optimizer`` may say. Nothing here imports torch, so a typing mistake is answered at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dsv4_fsdp.settings_section import Section

__all__ = ["OptimizerName", "OptimizerSettings", "ScheduleName"]

OptimizerName = Literal["adamw", "adamw_8bit", "adamw_bf16_sr", "muon"]
ScheduleName = Literal["cosine", "linear", "constant", "wsd"]


def _split_commas(value: Any) -> Any:
    """The command line gives a list as ``norm,bias``."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _split_pairs(value: Any) -> Any:
    """The command line gives a mapping as ``lm_head=0.5,embed_tokens=0.1``."""
    if not isinstance(value, str):
        return value
    parts = [part.partition("=") for part in value.split(",") if part.strip()]
    return {name.strip(): number.strip() for name, _, number in parts}


_Pattern = Annotated[str, Field(min_length=1)]
Patterns = Annotated[tuple[_Pattern, ...], BeforeValidator(_split_commas)]
Scales = Annotated[dict[_Pattern, Annotated[float, Field(gt=0)]], BeforeValidator(_split_pairs)]


class OptimizerSettings(Section):
    """Optimizer, schedule, clipping, and what to do about steps that are not finite.

    A *pattern* is a run of whole components of a parameter's name, with ``*`` for any text inside a component:
    ``norm``, ``self_attn.sinks``, ``layers.*.mlp.gate``. One that matches no trainable parameter is an error when the
    optimizer is made.

    Attributes:
        name: see :mod:`dsv4_fsdp.train.optimizers`.
        lr: the highest learning rate.
        schedule, warmup_fraction, warmup_steps, final_lr_fraction, decay_fraction: see
            :func:`~dsv4_fsdp.train.schedule.learning_rate`. ``warmup_steps`` counts in steps what ``warmup_fraction``
            counts as a share of the run; ``decay_fraction`` is the falling part of ``wsd``.
        beta1, beta2, eps: of AdamW (with ``muon``: of the parameters that are not Muon's).
        weight_decay: decoupled, of matrices; see ``no_decay`` and ``decay_embeddings``.
        kernel: how AdamW of torch runs: ``fused``, ``foreach``, one parameter at a time (``single``), or ``auto``:
            fused on CUDA, foreach elsewhere.
        no_decay: patterns of further parameters without weight decay. Norms, biases, tensors of one dimension and fp32
            islands have none anyway.
        decay_embeddings: whether embedding and ``lm_head`` have weight decay.
        lr_scale: pattern -> factor of the learning rate; the first that matches counts.
        muon_momentum, muon_ns_steps: of Muon.
        clip_grad_norm: the norm to which the gradient of all parameters together is cut.
        max_skipped_steps: how many steps in a row may be skipped because their gradient is not finite.
        allow_missing_gradients: patterns of trainable parameters that may get no gradient.
    """

    name: OptimizerName = "adamw"
    lr: float = Field(gt=0)
    schedule: ScheduleName = "cosine"
    warmup_fraction: float = Field(default=0.0, ge=0, le=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    kernel: Literal["auto", "fused", "foreach", "single"] = "auto"
    no_decay: Patterns = ()
    decay_embeddings: bool = True
    lr_scale: Scales = Field(default_factory=dict)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    muon_ns_steps: int = Field(default=5, gt=0, lt=100)
    clip_grad_norm: float = Field(default=1.0, gt=0)
    max_skipped_steps: int = Field(default=10, ge=0)
    allow_missing_gradients: Patterns = ()

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> OptimizerSettings:
        # All of them in one line: pydantic reports one error of a section's validator.
        if problems := list(self._problems()):
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        defaults = type(self).model_fields
        changed = {key for key in defaults if getattr(self, key) != defaults[key].default}
        if self.warmup_steps is not None and self.warmup_fraction:
            yield (
                f"warmup_steps ({self.warmup_steps}) and warmup_fraction ({self.warmup_fraction}) both say how long "
                "warm-up is; set warmup_fraction to 0 to count in steps"
            )
        if self.schedule != "wsd" and "decay_fraction" in changed:
            yield f"decay_fraction is of schedule wsd and has no effect on {self.schedule}"
        if self.name not in ("adamw", "muon") and "kernel" in changed:
            yield f"kernel is of torch's AdamW and has no effect on {self.name}"
        if self.name != "muon" and (lost := sorted(changed & {"muon_momentum", "muon_ns_steps"})):
            yield f"{' and '.join(lost)}: of muon, without effect on {self.name}"
