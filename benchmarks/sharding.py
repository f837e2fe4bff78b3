"""Ways to shard one model with FSDP2: collectives, bytes, exactness, memory and time of a step, side by side.

    python benchmarks/sharding.py                                     # the cases below
    python benchmarks/sharding.py --cases nemo:8:2 transformers:8:2x2 --repeats 5
    python benchmarks/sharding.py --cases nemo:8:2:512                # width 512: more to compute beside the calls

The models are the real ones at tiny size, bf16 with fp32 islands, on gloo processes of one thread; one sequence per
rank. A step is forward and backward. Its collectives and errors come from one step in lock-step with the unsharded
model: the largest logit difference, and the worst relative error of a parameter's gradient. Bytes are payloads of
one rank: outputs of all-gathers, inputs of reductions. Time is the slowest rank's, and CPU time is that of all ranks
together; sides take turns, the first one changing. Median and quartiles; a ratio is the median of those within a turn.
gloo on CPU overlaps nothing, so that times tell what a way costs in calls, copies and casts, not what GPUs would hide.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from measuring import ROOT, Goal, keep_memory, page, paired_ratio, spread, table

sys.path.insert(0, str(ROOT / "tests"))

from sharding_ranks import (
    NATIVE,
    NEMO,
    OURS,
    OURS_FUNCTION,
    OURS_IN_ROOT,
    SIDES,
    UNIFORM,
    Case,
    Side,
    measure,
    save_checkpoint,
)

from pool import run_ranks

# Model, blocks, mesh, width if not 64.
DEFAULT_CASES = (
    "nemo:8:2",
    "nemo:16:2",
    "nemo:8:4",
    "nemo:8:2x2",
    "nemo:8:2:512",
    "transformers:8:2",
    "transformers:8:2x2",
    "transformers:8:2:512",
)
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def run_case(case: Case) -> dict[str, list[Side]]:
    """What each rank found of each side."""
    with tempfile.TemporaryDirectory() as folder:
        if NATIVE in SIDES[case.kind]:
            save_checkpoint(case, Path(folder))
            case = replace(case, folder=folder)
        with contextlib.redirect_stdout(sys.stderr):  # what ranks print is no part of the page
            ranks = run_ranks(math.prod(case.mesh_shape), measure, case, timeout_s=1800)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def case_table(case: Case, found: dict[str, list[Side]]) -> str:
    """The case as Markdown."""
    rows = []
    for name, ranks in found.items():
        first = ranks[0]
        traffic = [f"{first.counts.get(kind, 0)} / {first.payload_bytes.get(kind, 0) / 2**10:.0f}" for kind in KINDS]
        memory = [f"{max(getattr(rank, key) for rank in ranks) / 2**20:.2f}" for key in ("stored_bytes", "peak_bytes")]
        errors = [max(getattr(rank, key) for rank in ranks) for key in ("logit_error", "grad_error")]
        ratio = [statistics.median(paired_ratio(_wall(ranks), _wall(found[other]))) for other in _against(found)]
        cpu_ratio = [statistics.median(paired_ratio(_cpu(ranks), _cpu(found[other]))) for other in _against(found)]
        rows.append(
            [
                name,
                *traffic,
                f"{errors[0]:.4g}",
                f"{errors[1]:.2g}",
                *memory,
                spread(_wall(ranks), unit=1e-3, digits=0),
                " / ".join(f"{value:.2f}" for value in ratio),
                " / ".join(f"{value:.2f}" for value in cpu_ratio),
            ]
        )
    against = " / ".join(_SHORT[name] for name in _against(found))
    header = ["way", *(f"{kind.replace('_', '-')}: number / KiB" for kind in KINDS), "logit difference"]
    header += ["worst gradient error", "shards MiB", "peak beside MiB", "step ms"]
    header += [f"time over {against}", f"CPU time over {against}"]
    mesh = "x".join(map(str, case.mesh_shape))
    model = {"nemo": "NeMo AutoModel's model", "transformers": "Transformers' model"}[case.kind]
    title = f"## {model}, {case.num_blocks} blocks, {mesh} ranks, {case.num_tokens} tokens, width {case.hidden_size}"
    return f"{title}\n\n{table(header, rows)}"


_SHORT = {NEMO: "nemo-automodel", UNIFORM: "lower bound", NATIVE: "native"}


def _against(found: dict[str, list[Side]]) -> list[str]:
    return [name for name in (NEMO, NATIVE, UNIFORM) if name in found]


def _wall(ranks: list[Side]) -> list[float]:
    return [max(values) for values in zip(*(rank.wall_s for rank in ranks), strict=True)]


def _cpu(ranks: list[Side]) -> list[float]:
    return [sum(values) for values in zip(*(rank.cpu_s for rank in ranks), strict=True)]


def goals(results: dict[Case, dict[str, list[Side]]]) -> list[Goal]:
    """The worst case of each ratio that has a goal."""
    lines = []
    labels = {OURS_IN_ROOT: "islands in the root", OURS: "`parallelize`", OURS_FUNCTION: "the function, grouped"}
    for ours, label in labels.items():
        for other, limit in ((NEMO, 0.80), (UNIFORM, 1.05)):
            for what, values in (("step time", _wall), ("CPU time", _cpu)):
                ratios = [
                    statistics.median(paired_ratio(values(found[ours]), values(found[other])))
                    for found in results.values()
                    if ours in found and other in found
                ]
                if ratios:
                    lines.append(Goal(f"{label}: {what} over {_SHORT[other]}, worst case", limit, max(ratios)))
    return lines


def _case(text: str) -> tuple[str, int, tuple[int, ...], int]:
    kind, blocks, mesh, *width = text.split(":")
    if kind not in SIDES or len(width) > 1:
        raise ValueError(text)
    return kind, int(blocks), tuple(int(size) for size in mesh.split("x")), int(width[0]) if width else 64


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=_case, nargs="+", default=[_case(text) for text in DEFAULT_CASES])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    results = {}
    for kind, num_blocks, mesh_shape, width in arguments.cases:
        case = Case(kind, num_blocks, mesh_shape, arguments.tokens, width, arguments.repeats)
        results[case] = run_case(case)
        print(f"{kind} {num_blocks} {mesh_shape} {width}: done", file=sys.stderr)
    tables = [case_table(case, found) for case, found in results.items()]
    packages = ("transformers", "nemo-automodel")
    print(page("Sharding", __doc__, tables, goals=goals(results), packages=packages), end="")


if __name__ == "__main__":
    main()
