"""``dsv4_fsdp.audit``: one name for the audits of a live model and of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from .audit_report import AuditReport
from .contract import IslandPredicate

if TYPE_CHECKING:
    from .plan import ShardingPlan

__all__ = ["audit"]


def audit(
    subject: nn.Module | str | Path,
    *,
    step: Callable[[], object] | None = None,
    plan: ShardingPlan | None = None,
    fp32_params: Iterable[str] | IslandPredicate = (),
    bits: bool = False,
) -> AuditReport:
    """Say whether every tensor that must be fp32 is, in a live model or in a checkpoint, and what else is wrong.

    Args:
        subject: a model, sharded with FSDP2 in any way or not at all (all ranks call this), or a checkpoint's path.
        step: for a model: runs one forward and backward, during which dtypes are observed
            (``lambda: model(**batch).loss.backward()``). See :func:`dsv4_fsdp.live_audit.audit_model`.
        plan: for a model: what :func:`dsv4_fsdp.parallelize` returned, to be compared with what is there.
        fp32_params: for a model: further islands.
        bits: look into islands for numbers that only bf16 could have made. For a checkpoint that reads the islands.

    Returns:
        A report: ``report.ok``, ``report.violations``, ``print(report.table())``, ``report.to_json()``.

    Raises:
        ContractError: there is no checkpoint at the path, or its model is not known.
        TypeError: ``step``, ``plan`` or ``fp32_params`` was given with a path.
    """
    if isinstance(subject, nn.Module):
        from .live_audit import audit_model

        return audit_model(subject, step=step, plan=plan, fp32_params=fp32_params, bits=bits)
    if step is not None or plan is not None or callable(fp32_params) or tuple(fp32_params):
        raise TypeError("step, plan and fp32_params are for live models; a checkpoint takes bits only")
    from .checkpoint_audit import audit_checkpoint

    return audit_checkpoint(subject, bits=bits)
