"""A run folder, read and checked: everything that the report shows, as frozen values.

``metrics.jsonl`` must be there and whole. The other files of a run (``config.yaml``, ``precision.txt``, ``plan.txt``,
``plan.json``, ``export/``, ``audit*.json``) may be missing, a run that died early has not written them; but a file that
is there and cannot be read is an error, not a gap. Nothing here writes.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dsv4_fsdp.errors import Dsv4FsdpError
from dsv4_fsdp.plan import GroupPlan, ParamPlan, ShardingPlan, UnitPlan
from dsv4_fsdp.train.progress import StepMetrics

__all__ = ["AuditSummary", "Column", "PrecisionRow", "RunData", "RunDataError", "planned_dtypes", "read_run"]

_PRECISION_HEADER = ["name", "count", "storage", "compute", "reduce", "reason"]
_NUMBERS = frozenset(field.name for field in fields(StepMetrics)) - {"step"}
"""Fields of a step: here anything but a number or null is a mistake."""

_NOT_IN_EACH_STEP = frozenset({"eval_loss", "expert_load"})
"""Fields in which null means that there was nothing to measure."""


class RunDataError(Dsv4FsdpError, ValueError):
    """A run folder cannot be read as one."""


@dataclass(frozen=True)
class Column:
    """One field of ``metrics.jsonl``: ``values[i]`` belongs to ``steps[i]``; ``None`` was not finite."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> tuple[float, ...]:
        """The values that are numbers."""
        return tuple(value for value in self.values if value is not None)


@dataclass(frozen=True)
class PrecisionRow:
    """One line of ``precision.txt``: ``count`` live tensors that differ in layer numbers alone."""

    name: str
    count: int
    storage: str
    compute: str
    reduce: str
    reason: str

    @property
    def dtypes(self) -> tuple[str, str, str]:
        return self.storage, self.compute, self.reduce

    @property
    def is_buffer(self) -> bool:
        """Whether it has no gradient to reduce."""
        return self.reduce == "-"

    @property
    def is_island(self) -> bool:
        return self.reason.startswith("island")

    @property
    def is_broken_island(self) -> bool:
        """Whether it must be fp32 and something of it is not."""
        return self.is_island and any(dtype not in ("fp32", "-") for dtype in self.dtypes)


@dataclass(frozen=True)
class AuditSummary:
    """One audit report saved with the run. A violation is ``(kind and name, what is wrong, likely cause)``."""

    file: str
    ok: bool
    summary: str
    violations: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class RunData:
    """What one run folder holds.

    Attributes:
        name: of the folder, without the path.
        steps: as recorded, increasing.
        columns: field -> column, in the order in which the fields appear.
        not_numbers: recorded fields that no chart can show.
        config: the settings by dotted name, ``None`` without ``config.yaml``.
        precision: rows of ``precision.txt``, ``None`` without it.
        plan: the sharding plan, ``None`` without ``plan.json`` or if ``plan_problem`` says why not.
        plan_text: ``plan.txt``.
        audits: the audit reports.
        export_bytes: size of the files in ``export/``, ``None`` without it.
    """

    name: str
    steps: tuple[int, ...]
    columns: Mapping[str, Column]
    not_numbers: tuple[str, ...]
    config: Mapping[str, str] | None
    precision: tuple[PrecisionRow, ...] | None
    plan: ShardingPlan | None
    plan_problem: str | None
    plan_text: str | None
    audits: tuple[AuditSummary, ...]
    export_bytes: int | None

    def last(self, field: str) -> float | None:
        """The last value of ``field``; ``None`` if it was not finite or never recorded."""
        column = self.columns.get(field)
        return None if column is None else column.values[-1]


def read_run(path: Path) -> RunData:
    """Read the run in folder ``path``.

    Raises:
        RunDataError: there is no folder, no ``metrics.jsonl``, no step in it, or a file is broken; says where.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise RunDataError(f"{path} {what}; give the folder of a run, the --run-dir of dsv4-fsdp train")
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise RunDataError(f"{path} has no metrics.jsonl; give the folder of a run that has begun to train")
    steps, columns, not_numbers = _read_metrics(metrics)
    plan, plan_problem = _read_plan(path / "plan.json")
    export = path / "export"
    return RunData(
        name=path.resolve().name,
        steps=steps,
        columns=columns,
        not_numbers=not_numbers,
        config=_read_config(path / "config.yaml"),
        precision=_read_precision(path / "precision.txt"),
        plan=plan,
        plan_problem=plan_problem,
        plan_text=_text(path / "plan.txt"),
        audits=tuple(_read_audit(file) for file in sorted(path.glob("audit*.json"))),
        export_bytes=sum(f.stat().st_size for f in export.rglob("*") if f.is_file()) if export.is_dir() else None,
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``(dotted name, text)``."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def _read_metrics(path: Path) -> tuple[tuple[int, ...], dict[str, Column], tuple[str, ...]]:
    text = _text(path) or ""
    steps: list[int] = []
    columns: dict[str, tuple[list[int], list[float | None]]] = {}
    not_numbers: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            cut = number == text.count("\n") + 1
            hint = "; the line has no end: the run is still writing, or was cut off" if cut else ""
            raise RunDataError(f"{where}: not JSON: {error}{hint}") from None
        step = row.pop("step", None) if isinstance(row, dict) else None
        if type(step) is not int or not 0 <= step < 2**53:
            raise RunDataError(f'{where}: expected an object with a whole "step", got {_short(line)}')
        if steps and step <= steps[-1]:
            raise RunDataError(f"{where}: step {step} comes after step {steps[-1]}; steps must increase")
        steps.append(step)
        for name, value in row.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not _is_finite(value):
                raise RunDataError(f"{where}: {name} is not finite; what is not is written as null")
            if value is None and name in _NOT_IN_EACH_STEP:
                continue
            if is_number or value is None:
                column = columns.setdefault(name, ([], []))
                column[0].append(step)
                column[1].append(None if value is None else float(value))
            elif name in _NUMBERS:
                raise RunDataError(f"{where}: {name}: expected a number or null, got {_short(json.dumps(value))}")
            else:
                not_numbers[name] = None
    if not steps:
        raise RunDataError(f"{path} is empty: the run has not finished a step")
    if "loss" not in columns:
        raise RunDataError(f'{path}: no line has a "loss"; is it the metrics.jsonl of a training run?')
    done = {name: Column(name, tuple(at), tuple(values)) for name, (at, values) in columns.items()}
    return tuple(steps), done, tuple(not_numbers)


def _read_config(path: Path) -> dict[str, str] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RunDataError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise RunDataError(f"{path}: expected settings by name, got {_short(str(values))}")
    return dict(_flat(values))


def _read_precision(path: Path) -> tuple[PrecisionRow, ...] | None:
    text = _text(path)
    if text is None:
        return None
    lines = text.splitlines()
    if not lines or lines[0].split() != _PRECISION_HEADER:
        raise RunDataError(f"{path}, line 1: expected the columns {' '.join(_PRECISION_HEADER)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        match = re.fullmatch(r"(\S+) +(\d+) +(\S+) +(\S+) +(\S+) +(.+)", line)
        if match is None:
            raise RunDataError(f"{path}, line {number}: expected {len(_PRECISION_HEADER)} columns, got {_short(line)}")
        name, count, storage, compute, reduce, reason = match.groups()
        rows.append(PrecisionRow(name, int(count), storage, compute, reduce, reason.strip()))
    return tuple(rows)


def _read_plan(path: Path) -> tuple[ShardingPlan | None, str | None]:
    """The plan, or why it cannot be shown: another version's plan has other fields, and the rest is worth showing."""
    values = _json(path)
    if values is None:
        return None, None
    try:
        units = []
        for unit in values["units"]:
            groups = []
            for group in unit["groups"]:
                params = tuple(ParamPlan(**{**param, "shape": tuple(param["shape"])}) for param in group["params"])
                groups.append(GroupPlan(**{**group, "params": params}))
            units.append(UnitPlan(**{**unit, "groups": tuple(groups)}))
        frozen, mesh = tuple(values["frozen_fqns"]), tuple(values["mesh_shape"])
        plan = ShardingPlan(**{**values, "units": tuple(units), "frozen_fqns": frozen, "mesh_shape": mesh})
        plan.table()  # touches every field
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        return None, f"plan.json is not a plan as this version writes it ({type(error).__name__}: {error})"
    return plan, None


def _read_audit(path: Path) -> AuditSummary:
    values = _json(path)
    try:
        violations = tuple(
            (f"{v['kind']}: {v['name']}", f"{v['found']}, must be {v['expected']}", str(v["cause"]))
            for v in values["violations"]
        )
        return AuditSummary(path.name, bool(values["ok"]), str(values["summary"]), violations)
    except (TypeError, KeyError) as error:
        raise RunDataError(f"{path}: not an audit report ({type(error).__name__}: {error})") from None


def _json(path: Path) -> Any:
    text = _text(path)
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunDataError(f"{path}: not JSON: {error}") from None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunDataError(f"{path}: cannot be read: {error}") from None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON; what is not finite is written as null")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def planned_dtypes(plan: ShardingPlan) -> Counter[tuple[str, str, str]]:
    """How many parameters are planned with each (storage, compute, reduce), named as in ``precision.txt``."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for unit in plan.units:
        for group in unit.groups:
            for param in group.params:
                counts[_brief(group.storage), _brief(param.compute), _brief(group.reduce or "-")] += 1
    return counts


def _brief(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")
