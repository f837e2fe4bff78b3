"""Which single change of the settings makes a run that does not fit smallest."""

from __future__ import annotations

from dataclasses import replace

from .estimate import Estimate, Estimator
from .render import gib

__all__ = ["hint"]


def hint(estimator: Estimator, estimate: Estimate) -> str | None:
    """One sentence for an estimate that does not fit, ``None`` for others. Tries each change."""
    if estimate.spare_bytes is None or estimate.spare_bytes >= 0:
        return None
    settings, cluster = estimate.settings, estimate.cluster
    if not isinstance(settings.reshard_after_forward, bool):
        # A number of ranks need not divide another shard axis.
        settings = replace(settings, reshard_after_forward=True)
    changes = {
        "--activation-checkpointing 1": replace(settings, activation_checkpointing=1),
        "--offload": replace(settings, offload=True),
        "--reshard-after-forward true": replace(settings, reshard_after_forward=True),
        **{
            f"--replicate {n}": replace(settings, replicate=n)
            for n in cluster.replica_counts
            if cluster.ranks // n % settings.expert_parallel == 0
        },
        **{
            f"--expert-parallel {n}": replace(settings, expert_parallel=n)
            for n in cluster.expert_parallel_sizes(settings.replicate, estimator.num_experts)
        },
        "--storage bf16": replace(settings, storage="bf16"),
        "--optimizer adamw_8bit": replace(settings, optimizer="adamw_8bit"),
        "--attention windowed": replace(settings, attention="windowed"),
    }
    tried = {flag: estimator.estimate(cluster, changed) for flag, changed in changes.items() if changed != settings}
    if not settings.optimizer.startswith("adamw"):
        tried.pop("--optimizer adamw_8bit", None)
    if not tried:
        return "Nothing left to change but more ranks or shorter sequences"
    flag, best = min(tried.items(), key=lambda item: item[1].needed_bytes)
    saved = estimate.needed_bytes - best.needed_bytes
    if saved <= 0:
        return "No single setting makes it smaller: shorter sequences or more ranks would"
    fits = "then it fits" if best.spare_bytes is not None and best.spare_bytes >= 0 else "which is not enough alone"
    return f"What helps most: {flag} saves {gib(saved)}, {fits}"
