"""What planning costs: CPU seconds and memory of ``dsv4-fsdp plan``, and of checking it with the real ``fully_shard``.

    python benchmarks/planner.py
    python benchmarks/planner.py --cases deepseek-v4-flash:16 --repeats 1

Each run is a fresh process, imports included; the ways take turns. ``--verify`` shards the model on the meta device in
a fake process group and compares what ``fully_shard`` built with the plan. "Import alone" is what torch and
Transformers cost before anything is planned. CPU seconds are those of the process (all threads): median and quartiles.
Memory is the highest resident size of the process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from measuring import page, spread, table

DEFAULT_CASES = ("deepseek-v4-flash:128", "deepseek-v4-pro:1024")
IMPORT_ALONE = "import torch, transformers.models.deepseek_v4.modeling_deepseek_v4, dsv4_fsdp.planner.estimate"


def run(command: Sequence[str]) -> tuple[float, int]:
    """CPU seconds and peak resident bytes of ``command``.

    Raises:
        CalledProcessError: it failed.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def planner_table(cases: Sequence[tuple[str, int]], *, repeats: int) -> str:
    """The table as Markdown; ``cases`` are (model, ranks)."""
    ways: dict[tuple[str, str, str], list[str]] = {("import alone", "", ""): [sys.executable, "-c", IMPORT_ALONE]}
    for model, ranks in cases:
        plan = [sys.executable, "-m", "dsv4_fsdp", "plan", model, "--ranks", str(ranks), "--json"]
        ways["plan", model, str(ranks)] = plan
        ways["plan --verify", model, str(ranks)] = [*plan, "--verify"]
    runs: dict[tuple[str, str, str], list[tuple[float, int]]] = {key: [] for key in ways}
    for _ in range(repeats):
        for key, command in ways.items():
            runs[key].append(run(command))
    imports = statistics.median(seconds for seconds, _ in runs["import alone", "", ""])
    rows = []
    for key, found in runs.items():
        seconds = [value for value, _ in found]
        above = statistics.median(seconds) - imports
        peak = max(size for _, size in found) / 2**20
        rows.append([*key, spread(seconds, digits=1), f"{above:.1f}", f"{peak:.0f}"])
    return table(["command", "model", "ranks", "CPU s", "above imports", "peak resident MiB"], rows)


def _case(text: str) -> tuple[str, int]:
    model, ranks = text.rsplit(":", 1)
    return model, int(ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=_case, nargs="+", default=[_case(text) for text in DEFAULT_CASES])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    text = planner_table(arguments.cases, repeats=arguments.repeats)
    print(page("Planner", __doc__, [text], packages=("transformers",)), end="")


if __name__ == "__main__":
    main()
