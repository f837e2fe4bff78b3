"""One run, or two, as one HTML page that needs nothing else: no network, no script, no file beside it.

The answer is in the first lines; charts, precision, plan and settings follow. Everything that comes from a file is
escaped, and the page's own policy (``default-src 'none'``) lets a browser load nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape

from dsv4_fsdp import __version__
from dsv4_fsdp.planner.communication import collectives

from .breakdown import Breakdown, breakdown_svg, breakdowns_of
from .charts import Chart, charts_of, number, svg
from .run_data import PrecisionRow, RunData, planned_dtypes
from .verdict import verdict

__all__ = ["labels_of", "page"]

_STYLE = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#15191f;--dim:#566070;--edge:#dde1e7;--a:#0072b2;
--b:#c65500;--s0:#e69f00;--s1:#0072b2;--s2:#cc79a7;--s3:#009e73;--s4:#999;--good:#087443;--warn:#8f5a00;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--bg:#0e1116;--card:#171b22;--ink:#e8ebf0;--dim:#9ba5b4;--edge:#2b323c;
--a:#56b4e9;--b:#f0a030;--good:#4cc38a;--warn:#e8b13a;--bad:#ff8177}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:16px;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere;
-webkit-text-size-adjust:100%}
h2{font-size:19px;margin:32px 0 10px}
h3{font-size:15px;margin:0}
p{margin:6px 0}
.two{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 14px;min-width:0}
.gap{margin-bottom:12px}
.answer{margin:0 0 8px}
.answer:last-child{margin:0}
.answer b{display:block;font-size:20px;line-height:1.25}
.answer:first-child b{font-size:26px}
.answer .name{font-weight:500}
.dim,.answer small{color:var(--dim);font-size:14px}
.run{border-top:5px solid var(--a)}.run.b{border-top-color:var(--b)}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.chart .last{font-size:14px}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;background:var(--a);margin-right:6px}
.key.b{background:var(--b)}
.s0{fill:var(--s0)}.key.s0{background:var(--s0)}
.s1{fill:var(--s1)}.key.s1{background:var(--s1)}
.s2{fill:var(--s2)}.key.s2{background:var(--s2)}
.s3{fill:var(--s3)}.key.s3{background:var(--s3)}
.s4{fill:var(--s4)}.key.s4{background:var(--s4)}
.part{display:inline-block;margin-right:12px;white-space:nowrap}
svg{display:block;width:100%;height:auto;margin-top:6px}
.axis{font-size:13px;fill:var(--dim)}
.grid{stroke:var(--edge);stroke-width:1}
.ref{stroke:var(--dim);stroke-width:1;stroke-dasharray:5 4}
.lost{stroke:var(--bad);stroke-width:2;opacity:.75}
.line{fill:none;stroke:var(--a);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.line.b{stroke:var(--b)}
.dot{fill:var(--a)}.dot.b{fill:var(--b)}
.range{fill:var(--a);opacity:.22}.range.b{fill:var(--b)}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--dim);font-weight:500;padding:4px 12px 4px 0;vertical-align:bottom}
td{padding:5px 12px 5px 0;border-top:1px solid var(--edge);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre,td.name{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
table.rows td.name{width:46%}
pre{margin:8px 0 0;overflow-x:auto}
details{margin-top:12px}
summary{cursor:pointer;color:var(--dim);padding:4px 0}
tr.differs td{font-weight:600}
tr.differs td:first-child::before{content:"≠ ";color:var(--warn)}
ul{margin:6px 0;padding-left:20px}
footer{margin:32px 0 8px;color:var(--dim);font-size:13px}
@media (max-width:640px){
body{padding:10px}
table.rows thead{display:none}
table.rows tr{display:flex;flex-wrap:wrap;gap:0 10px;border-top:1px solid var(--edge);padding:6px 0}
table.rows td{border:0;padding:0;text-align:left;white-space:normal;font-size:13px}
table.rows td.name,table.rows td.why{flex-basis:100%}
table.rows td[data-l]::before{content:attr(data-l) " ";color:var(--dim)}
}
"""

# What people look for in a report, and the words in a field's name that would mean that a run recorded it.
_SOUGHT = {
    "evaluation": ("eval", "valid"),
    "expert load": ("expert",),
    "step-time breakdown": ("compute_s", "time", "_ms"),
}


def labels_of(runs: Sequence[RunData]) -> tuple[str, ...]:
    """What each run is called: its folder's name, with A and B before it where there are two."""
    if len(runs) == 1:
        return (runs[0].name,)
    return tuple(f"{letter} {run.name}" for letter, run in zip("AB", runs, strict=True))


def page(runs: Sequence[RunData]) -> str:
    """The page of one run or of two to compare."""
    labels = labels_of(runs)
    charts = charts_of(runs, labels)
    cards = [_chart(chart, len(runs)) for chart in charts]
    cards += [_breakdown(breakdown, len(runs)) for breakdown in breakdowns_of(runs, labels)]
    title = escape(" and ".join(labels))
    sections = [
        _answers(runs, labels),
        _section("Training", f'<div class="two">{"".join(cards)}</div>'),
        _section("Precision", _precision(runs, labels)),
        _section("Plan against reality", _each(runs, labels, _plan)),
    ]
    if any(run.audits for run in runs):
        sections.append(_section("Audit", _each(runs, labels, _audits)))
    sections += [
        _section("Configuration", _configuration(runs, labels)),
        _section("Left out", _left_out(runs, labels)),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{title}: dsv4-fsdp report</title><style>{_STYLE}</style></head><body>",
            *sections,
            f"<footer>dsv4-fsdp {escape(__version__)}, from the files of the run alone</footer>",
            "</body></html>",
            "",
        ]
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _each(runs: Sequence[RunData], labels: Sequence[str], card: Callable[[RunData], str]) -> str:
    cards = []
    for place, (run, label) in enumerate(zip(runs, labels, strict=True)):
        heading = _heading(place, label) if len(runs) > 1 else ""
        cards.append(f'<div class="card">{heading}{card(run)}</div>')
    return f'<div class="two">{"".join(cards)}</div>'


def _heading(place: int, label: str) -> str:
    return f"<h3>{_key(place)}{escape(label)}</h3>"


def _key(place: int) -> str:
    return f'<span class="key {"ab"[place]}"></span>'


def _answers(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    cards = []
    for place, (run, label) in enumerate(zip(runs, labels, strict=True)):
        lines = []
        for index, answer in enumerate(verdict(run)):
            name = f'<span class="name">{escape(label)}:</span> ' if index == 0 else ""
            lines.append(
                f'<p class="answer"><b>{name}<span class="{answer.state}">{escape(answer.headline)}</span></b>'
                f"<small>{escape(answer.detail)}</small></p>"
            )
        cards.append(f'<div class="card run {"ab"[place]}">{"".join(lines)}</div>')
    return f'<header class="two">{"".join(cards)}</header>'


def _chart(chart: Chart, num_runs: int) -> str:
    lines = []
    for line in chart.lines:
        finite = line.finite
        if not finite:
            text = "never finite"
        elif not any(finite) and len(finite) == len(line.values):
            text = f"0 in all {len(finite)} steps"
        else:
            last = "not finite" if line.values[-1] is None else number(line.values[-1])
            text = f"last <b>{last}</b>, from {number(min(finite))} to {number(max(finite))}"
            if len(finite) < len(line.values):
                text += f", {len(line.values) - len(finite)} not finite"
        key = f"{_key(line.place)}{escape(line.label)}: " if num_runs > 1 else ""
        lines.append(f'<p class="last">{key}{text}</p>')
    note = f"{chart.note}; log scale" if chart.is_log else chart.note
    picture = "" if chart.is_zero else svg(chart)
    return (
        f'<div class="card chart"><h3>{escape(chart.title)}</h3><p class="dim">{escape(note)}</p>'
        f"{''.join(lines)}{picture}</div>\n"
    )


def _breakdown(breakdown: Breakdown, num_runs: int) -> str:
    key = f"{_key(breakdown.place)}{escape(breakdown.label)}: " if num_runs > 1 else ""
    shares = " ".join(
        f'<span class="part"><span class="key s{index}"></span>{escape(name)} <b>{share:.0%}</b></span>'
        for index, (name, share) in enumerate(breakdown.shares)
    )
    mean = breakdown.total_s / len(breakdown.steps)
    chart = breakdown.chart
    picture = "" if chart.is_zero else breakdown_svg(breakdown)
    return (
        f'<div class="card chart"><h3>{escape(chart.title)}</h3><p class="dim">{escape(chart.note)}</p>'
        f'<p class="last">{key}mean <b>{number(mean)} s</b></p><p class="last">{shares}</p>{picture}</div>\n'
    )


def _precision(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    known = [run.precision for run in runs]
    if len(runs) == 2 and known[0] is not None and known[0] == known[1]:
        return f'<div class="card"><p>The same in both runs, row by row.</p>{_precision_table(known[0])}</div>'
    differing = _precision_differences(*known) if len(known) == 2 else ""
    return differing + _each(runs, labels, _precision_card)


def _precision_card(run: RunData) -> str:
    return "<p>The run has no precision.txt.</p>" if run.precision is None else _precision_table(run.precision)


def _precision_differences(a: Sequence[PrecisionRow] | None, b: Sequence[PrecisionRow] | None) -> str:
    """What differs between two runs, name by name."""
    if a is None or b is None:
        return ""

    def by_name(rows: Sequence[PrecisionRow]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in rows:
            found.setdefault(row.name, []).append(f"{row.count} × {' / '.join(row.dtypes)} ({row.reason})")
        return found

    left, right = by_name(a), by_name(b)
    names = [name for name in dict.fromkeys([*left, *right]) if left.get(name) != right.get(name)]
    lines = []
    for name in names:
        cells = "".join(f"<td>{escape('; '.join(side.get(name, ['-'])))}</td>" for side in (left, right))
        lines.append(f'<tr class="differs"><td class="name">{_name(name)}</td>{cells}</tr>')
    head = f"<th>name</th><th>{_key(0)}A</th><th>{_key(1)}B</th>"
    count = f"{len(names)} name{'s differ' if len(names) != 1 else ' differs'}"
    return (
        f'<div class="card gap"><p>{count}: count × storage / compute / reduce.</p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _precision_table(rows: Sequence[PrecisionRow]) -> str:
    """What is broken first, then the islands, and the rest folded away."""
    broken = [row for row in rows if row.is_broken_island]
    islands = [row for row in rows if row.is_island and not row.is_broken_island]
    others = [row for row in rows if not row.is_island]
    note = "Read back from the live model before the first step. One row: names that differ in layer numbers alone."
    parts = [f'<p class="dim">{note}</p>']
    if broken:
        parts.append(f'<p class="bad"><b>{_tensors(broken)} must be fp32 and are not:</b></p>{_rows(broken)}')
    parts.append(f"<details open><summary>fp32 islands: {_tensors(islands)}</summary>{_rows(islands)}</details>")
    parts.append(f"<details><summary>everything else: {_tensors(others)}</summary>{_rows(others)}</details>")
    return "".join(parts)


def _tensors(rows: Iterable[PrecisionRow]) -> str:
    count = sum(row.count for row in rows)
    return f"{count} tensor{'s' * (count != 1)}"


def _rows(rows: Iterable[PrecisionRow]) -> str:
    lines = [
        f'<tr><td class="name">{_name(row.name)}</td><td class="n" data-l="count">{row.count}</td>'
        f'<td data-l="storage">{escape(row.storage)}</td><td data-l="compute">{escape(row.compute)}</td>'
        f'<td data-l="reduce">{escape(row.reduce)}</td><td class="why dim">{escape(row.reason)}</td></tr>'
        for row in rows
    ]
    head = "<th>name</th><th class='n'>count</th><th>storage</th><th>compute</th><th>reduce</th><th>reason</th>"
    return f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _plan(run: RunData) -> str:
    if run.plan is None:
        why = run.plan_problem or "the run has no plan.json"
        text = "" if run.plan_text is None else f"<pre>{escape(run.plan_text)}</pre>"
        return f"<p>Nothing to compare: {escape(why)}.</p>{text}"
    plan = run.plan
    rows: list[tuple[str, str, str, bool]] = []
    ranks = 1
    for size in plan.mesh_shape:
        ranks *= size
    nproc = (run.config or {}).get("nproc")
    mesh = "×".join(map(str, plan.mesh_shape))
    rows.append((f"ranks (mesh {mesh})", str(ranks), nproc or "not recorded", nproc not in (None, str(ranks))))
    planned = planned_dtypes(plan)
    if run.precision is not None:
        live: Counter[tuple[str, str, str]] = Counter()
        for row in run.precision:
            if not row.is_buffer:
                live[row.dtypes] += row.count
        for dtypes in dict.fromkeys([*planned, *live]):
            what = f"parameters in {' / '.join(dtypes)}"
            rows.append((what, str(planned[dtypes]), str(live[dtypes]), planned[dtypes] != live[dtypes]))
    else:
        rows += [(f"parameters in {' / '.join(d)}", str(n), "not recorded", False) for d, n in planned.items()]
    shard_bytes = sum(group.shard_bytes for unit in plan.units for group in unit.groups)
    rows.append(("parameters on a rank", _size(shard_bytes), "not recorded", False))
    sums: dict[tuple[str, str], list[int]] = {}
    for collective in collectives(plan):
        total = sums.setdefault((collective.kind, collective.dtype), [0, 0])
        total[0] += 1
        total[1] += collective.payload_bytes
    if tokens := plan.collectives_per_step().get("all_to_all"):
        rows.append(("all_to_all, a step", f"{tokens}, as large as the routers say", "not recorded", False))
    rows += [
        (f"{kind}, {dtype}, a step", f"{count}, in all {_size(size)}", "not recorded", False)
        for (kind, dtype), (count, size) in sums.items()
    ]
    memory = run.last("memory_bytes")
    rows.append(("peak memory, rank 0", "not planned", "not recorded" if memory is None else _size(memory), False))
    wrong = sum(differs for *_, differs in rows)
    if wrong:
        verdict_text = f'<p class="bad"><b>{wrong} of the recorded figures differ from the plan.</b></p>'
    elif run.precision is not None:
        verdict_text = '<p class="good"><b>All that was recorded is as planned.</b></p>'
    else:
        verdict_text = ""
    lines = [
        f"<tr{_mark(differs)}><td>{escape(what)}</td><td>{escape(plan_says)}</td><td>{escape(got)}</td></tr>"
        for what, plan_says, got, differs in rows
    ]
    return (
        f'{verdict_text}<p class="dim">This run recorded no collectives; their planned number and size stand alone. '
        "Dtypes are storage / compute / reduce.</p>"
        "<table><thead><tr><th></th><th>planned</th><th>recorded</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
        f"<details><summary>the plan, unit by unit</summary><pre>{escape(plan.table())}</pre></details>"
    )


def _audits(run: RunData) -> str:
    if not run.audits:
        return "<p>The run has no audit report.</p>"
    parts = []
    for audit in run.audits:
        state = "good" if audit.ok else "bad"
        parts.append(
            f'<p><b class="{state}">{"OK" if audit.ok else "VIOLATED"}</b> <code>{escape(audit.file)}</code>: '
            f"{escape(audit.summary)}</p>"
        )
        items = [
            f'<li><code>{escape(name)}</code>: {escape(wrong)}<br><span class="dim">{escape(cause)}</span></li>'
            for name, wrong, cause in audit.violations
        ]
        parts.append(f"<ul>{''.join(items)}</ul>" if items else "")
    return "".join(parts)


def _configuration(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    if all(run.config is None for run in runs):
        return '<div class="card"><p>No config.yaml.</p></div>'
    settings = dict.fromkeys(key for run in runs for key in run.config or {})
    lines, num_different = [], 0
    for key in settings:
        values = [(run.config or {}).get(key, "-") for run in runs]
        differs = len(set(values)) > 1
        num_different += differs
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(f'<tr{_mark(differs)}><td class="name">{_name(key)}</td>{cells}</tr>')
    names = labels if len(runs) > 1 else ("value",)
    head = "".join(f"<th>{_key(i) if len(runs) > 1 else ''}{escape(name)}</th>" for i, name in enumerate(names))
    text = ""
    if len(runs) > 1:
        missing = [label for run, label in zip(runs, labels, strict=True) if run.config is None]
        text = (
            f"<p>{num_different} of the {len(settings)} settings differ.</p>" if num_different else "<p>All equal.</p>"
        )
        text = f"<p>{escape(missing[0])} has no config.yaml.</p>" if missing else text
    return (
        f'<div class="card">{text}<table><thead><tr><th>setting</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _left_out(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    items = []
    for run, label in zip(runs, labels, strict=True):
        whose = f"{label}: " if len(runs) > 1 else ""
        fields = [*run.columns, *run.not_numbers]
        names = [
            what
            for what, words in _SOUGHT.items()
            if not any(word in field.lower() for field in fields for word in words)
        ]
        names += ["collectives as issued"]
        names += [
            what
            for what, field in (("gradient norm", "grad_norm"), ("learning rate", "lr"), ("memory", "memory_bytes"))
            if field not in run.columns
        ]
        names += ["skipped steps"] if "skipped_steps" not in run.columns else []
        items.append(f"{whose}not recorded by the run: {', '.join(names)}")
        files = [
            name
            for name, value in (
                ("config.yaml", run.config),
                ("precision.txt", run.precision),
                ("plan.json", run.plan if run.plan_problem is None else ""),
                ("export/", run.export_bytes),
                ("an audit report", run.audits or None),
            )
            if value is None
        ]
        if files:
            items.append(f"{whose}not in the folder: {', '.join(files)}")
        if run.export_bytes is not None:
            items.append(f"{whose}export/ holds {_size(run.export_bytes)}; its weights are not looked into here")
        if run.not_numbers:
            items.append(f"{whose}recorded, but no numbers to draw: {', '.join(run.not_numbers)}")
    return f'<div class="card"><ul>{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul></div>'


def _mark(differs: bool) -> str:
    return ' class="differs"' if differs else ""


def _name(dotted: str) -> str:
    """A dotted name that may break behind a dot or an underscore, and copies as it was."""
    return escape(dotted).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _size(num_bytes: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes:.0f} bytes"
