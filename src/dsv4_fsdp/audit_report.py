"""What an audit says: one format for a checkpoint, a live model and a training run.

A report is a value: rows (what was found, tensor by tensor), violations (what must not be so, and why it probably is)
and notes (what is allowed and worth knowing). The answer is in the first three lines of its text; its JSON has
everything.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .names import pattern_name

__all__ = ["AuditReport", "AuditRow", "Violation", "shorten"]

COLUMNS = 100
_MAX_LINES = 12


@dataclass(frozen=True)
class Violation:
    """One thing that must not be so.

    Attributes:
        kind: a fixed word for scripts, such as ``"island-downcast"``.
        name: canonical name of the parameter or buffer, or the file, that it is about.
        expected, found: what was checked against what, in words.
        cause: the likely cause and what to do.
        ranks: the ranks on which it was found, empty if that is all of them or there are no ranks.
    """

    kind: str
    name: str
    expected: str
    found: str
    cause: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class AuditRow:
    """One tensor as it was found. A field that the kind of audit cannot know is ``None``.

    Attributes:
        name: canonical name from the root; in a checkpoint, the model's name for the file's tensor where it has one.
        kind: ``"parameter"``, ``"buffer"`` or ``"tensor"`` (of a checkpoint).
        island: whether it must be fp32.
        reason: who says so, or why it need not be.
        storage: dtype as stored.
        gathered: dtype on the all-gather wire, as seen.
        compute: dtype inside the forward of the module that owns it, as seen.
        reduce: dtype of the gradient reduction, as seen.
        unit: name of the FSDP unit that holds it (``""`` is the root).
        placements: of the DTensor.
        bits: what ``--bits`` found: ``"fp32"``, ``"bf16 only"``, ``"constant"`` (inconclusive).
    """

    name: str
    kind: str
    island: bool
    reason: str
    storage: str
    gathered: str | None = None
    compute: str | None = None
    reduce: str | None = None
    unit: str | None = None
    placements: str | None = None
    bits: str | None = None


@dataclass(frozen=True)
class AuditReport:
    """The outcome of one audit.

    Attributes:
        subject: what was audited, such as ``"checkpoint runs/tiny/export"``.
        summary: how much was looked at and how, one sentence.
        rows, violations, notes: see there.
    """

    subject: str
    summary: str
    rows: tuple[AuditRow, ...]
    violations: tuple[Violation, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no violation."""
        return not self.violations

    def to_json(self) -> str:
        """Everything, as one JSON object with ``"ok"`` first."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def table(self) -> str:
        """The report as text of at most 100 columns: the verdict and its first reason, violations, notes, tensors.

        Violations of one kind and cause share a paragraph; tensors that differ in layer numbers alone share a line.
        """
        parts = [self._verdict()]
        parts += [_paragraph(number, same) for number, same in enumerate(_by_cause(self.violations), start=1)]
        if self.notes:
            parts.append("\n".join(_wrap(note, "note  ") for note in self.notes))
        if self.rows:
            parts.append(_rows_text(self.rows))
        return "\n\n".join(parts)

    def _verdict(self) -> str:
        if self.ok:
            islands = sum(row.island for row in self.rows)
            first = self._headline("OK: no violation.")
            counts = f"{islands} fp32 island{'s' * (islands != 1)} among {len(self.rows)} tensors."
            return f"{first}\n{counts}\n{_wrap(self.summary, '')}"
        causes = _by_cause(self.violations)
        worst = causes[0]
        count = len(self.violations)
        others = f", {len(causes)} causes" if len(causes) > 1 else ""
        such_as = f" ×{len(worst)}:" if len(worst) > 1 else ":"
        before = f"{worst[0].kind}{such_as} "
        # Without the reason in brackets, which the paragraph below has.
        after = f": {worst[0].found}, must be {worst[0].expected.partition(' (')[0]}"
        name = shorten(worst[0].name, max(24, COLUMNS - len(before) - len(after)))
        return "\n".join(
            [
                self._headline(f"VIOLATED: {count} violation{'s' * (count != 1)}{others}."),
                _fit(before + name + after),
                _fit(f"likely cause: {worst[0].cause}", "likely cause: "),
                "",
                _wrap(self.summary, ""),
            ]
        )

    def _headline(self, verdict: str) -> str:
        return f"{verdict} {shorten(self.subject, COLUMNS - len(verdict) - 1)}"


def _by_cause(violations: Iterable[Violation]) -> list[list[Violation]]:
    """Violations of one kind, cause and set of ranks together, in order of first appearance."""
    groups: dict[tuple[object, ...], list[Violation]] = {}
    for v in violations:
        groups.setdefault((v.kind, v.cause, v.ranks), []).append(v)
    return list(groups.values())


def _paragraph(number: int, same: list[Violation]) -> str:
    first = same[0]
    on_ranks = f", on rank{'s' * (len(first.ranks) > 1)} {', '.join(map(str, first.ranks))}" if first.ranks else ""
    count = f", {len(same)} times" if len(same) > 1 else ""
    lines = [f"{number:>2}. {first.kind}{count}{on_ranks}", _wrap(first.cause, "    cause: ")]
    names: dict[tuple[str, str, str], list[str]] = {}
    for v in same:
        names.setdefault((pattern_name(v.name), v.found, v.expected), []).append(v.name)
    for (pattern, found, expected), alike in list(names.items())[:_MAX_LINES]:
        name = alike[0] if len(alike) == 1 else f"{pattern} ×{len(alike)}"
        lines.append(_wrap(f"{name}: {found}, must be {expected}", "    - ", indent=8))
    if len(names) > _MAX_LINES:
        lines.append(f"    ... and {len(names) - _MAX_LINES} more lines (--json has all)")
    return "\n".join(lines)


def _rows_text(rows: Iterable[AuditRow]) -> str:
    rows = list(rows)
    fields = ["storage", "gathered", "compute", "reduce", "bits"]
    fields = [f for f in fields if f == "storage" or any(getattr(row, f) is not None for row in rows)]
    counts: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        # Which entry of a list matched is in the rows; the table says which list.
        reason = row.reason.partition(" '")[0]
        values = [getattr(row, f) or "-" for f in fields]
        counts[(pattern_name(row.name), *values, f"island: {reason}" if row.island else reason)] += 1
    widths = [max(len(f), *(len(key[i + 1]) for key in counts)) for i, f in enumerate(fields)]
    reason_width = max(6, *(len(key[-1]) for key in counts))
    fixed = 6 + sum(width + 1 for width in widths)
    longest = max(len(key[0]) for key in counts)
    name_width = max(24, min(longest, COLUMNS - fixed - reason_width - 1))
    reason_width = COLUMNS - fixed - name_width - 1

    def line(name: str, count: object, values: Iterable[str], reason: str) -> str:
        cells = " ".join(f"{value:<{width}}" for value, width in zip(values, widths, strict=True))
        return f"{shorten(name, name_width):<{name_width}} {count:>5} {cells} {shorten(reason, reason_width)}".rstrip()

    return "\n".join(
        [line("name", "count", fields, "why"), *(line(key[0], n, key[1:-1], key[-1]) for key, n in counts.items())]
    )


def _wrap(text: str, label: str, *, indent: int | None = None) -> str:
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=label,
        subsequent_indent=" " * (len(label) if indent is None else indent),
        break_on_hyphens=False,
    )


def _fit(line: str, after: str | None = None) -> str:
    """``line`` in one line: if it is too long, up to the end of the first clause behind ``after``, or cut."""
    start = len(line) if after is None or after not in line else line.index(after) + len(after)
    for end in (": ", ". ", " (", "; ", ", "):
        if len(line) > COLUMNS and end in line[start:]:
            line = line[: line.index(end, start)]
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def shorten(name: str, width: int) -> str:
    """``name`` in at most ``width`` characters: the start and the telling end of it."""
    if len(name) <= width:
        return name
    head = width // 4
    return f"{name[:head]}…{name[len(name) - (width - head - 1) :]}"
