"""Writes docs/families.md: every family of the installed transformers with fp32 tensors, stock FSDP2 beside ours.

    make families

Two ranks, one training step of a tiny model, four ways (``cases_families.WAYS``): about two minutes.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from cases_families import WAYS, FamilyStep, Way, family_step
from family_models import UNBUILT, Family, declared_families

from pool import RankFailure, close_pool, run_ranks

DOC = Path(__file__).parent.parent / "docs" / "families.md"

HEAD = """\
# Other families

Written by `make families` (`tests/sweep_families.py`), torch {torch}, transformers {transformers}; do not edit.

Each row is a family of transformers in which a model class has `_keep_in_fp32_modules_strict`. A tiny model of it,
bf16 with its fp32 tensors (islands), constants random, makes one training step on two CPU ranks beside the unsharded
model:

- **stock, as loaded**: torch's `fully_shard` on each block and on the model, `param_dtype=bfloat16`;
- **stock, fp32 storage**: the same after upcasting every parameter (master weights, what accelerate does);
- **fully_shard**, **parallelize**: ours, on the model as loaded, nothing said about islands.

*right*: output equal in every bit, islands gathered in fp32, gradients within one bf16 rounding of the ranks' mean.
*silent downcast*: some islands computed in bf16, no error. *wrong*: other numbers, islands in fp32. *crash*: an
exception that is not ours. *refused*: an error of ours that says what to do. Islands are parameters + buffers; "ran"
says how many of the parameters were in this forward: models for pictures and sounds mostly read text only here.
"""


def sweep(family: Family) -> dict[Way, FamilyStep]:
    """What the four ways did, worst rank first where ranks differ."""
    found: dict[Way, FamilyStep] = {}
    for way in WAYS:
        try:
            steps = run_ranks(2, family_step, family.name, way)
        except RankFailure as failure:  # of stock FSDP2 this may be: gloo aborts where sizes differ
            found[way] = FamilyStep("crash", str(failure).splitlines()[0])
            continue
        found[way] = next((step for step in steps if step.outcome != "right"), steps[0])
    return found


def table(rows: dict[Family, dict[Way, FamilyStep]]) -> str:
    """The whole document."""
    lines = [HEAD.format(torch=version("torch").partition("+")[0], transformers=version("transformers"))]
    for way in WAYS:
        counts = Counter(found[way].outcome for found in rows.values())
        lines.append(f"- {way}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    lines += ["", f"| family | model | islands (ran) | {' | '.join(WAYS)} |", f"|---|---|---|{'---|' * len(WAYS)}"]
    for family, found in rows.items():
        known = max(found.values(), key=lambda step: step.islands_seen)
        islands = f"{known.island_params} + {known.island_buffers} ({known.islands_seen})"
        cells = " | ".join(found[way].outcome for way in WAYS)
        lines.append(f"| {family.name} | {family.model} | {islands} | {cells} |")
    lines += ["", "## What was said", ""]
    said: dict[tuple[str, str], list[str]] = {}
    for family, found in rows.items():
        for way, step in found.items():
            if step.outcome not in ("right", "silent downcast"):
                said.setdefault((f"{step.outcome}, {way}", step.detail), []).append(family.name)
    for (what, detail), names in said.items():
        which = ", ".join(names) if len(names) < 6 else f"{len(names)} families"
        lines.append(f"- {what} ({which}): {detail}")
    lines += ["", "## Not tried", ""]
    lines += [f"- {name}: {reason}" for name, reason in UNBUILT.items()]
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    """Sweep all families into the document; with names, print these only."""
    rows = {}
    for family in declared_families():
        if family.name in UNBUILT or (names and family.name not in names):
            continue
        rows[family] = sweep(family)
        print(f"{family.name:<24}" + "".join(f"{step.outcome:<18}" for step in rows[family].values()), flush=True)
    close_pool()
    if names:
        print(table(rows))
    else:
        DOC.write_text(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
