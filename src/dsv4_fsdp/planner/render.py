"""An estimate as text for a terminal of 100 columns. The answer is in the first three lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .estimate import Estimate
from .memory import MARGIN_FRACTION

__all__ = ["answer", "estimate_text", "gib", "section"]

_STAYS = ("parameters", "fp32 islands", "optimizer state", "buffers")


def gib(num_bytes: float) -> str:
    """Bytes as GiB with a precision that fits the size, smaller ones as MiB."""
    if abs(num_bytes) < 2**30 / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    value = num_bytes / 2**30
    return f"{value:,.0f} GiB" if abs(value) >= 1000 else f"{value:.1f} GiB"


def answer(estimate: Estimate, hint: str | None = None) -> list[str]:
    """Three lines: fits or not and by how much, what dominates, and what helps (or what a step sends)."""
    needs = f"needs {gib(estimate.needed_bytes)} per device"
    margin = f"({gib(estimate.margin_bytes)} of it margin)"
    device = estimate.cluster.device_memory_bytes
    if estimate.spare_bytes is None or device is None:
        verdict = f"{needs[0].upper()}{needs[1:]} {margin}; --device-memory-gib gives a verdict"
    elif estimate.spare_bytes >= 0:
        verdict = f"FITS: {needs} of {gib(device)}, {gib(estimate.spare_bytes)} to spare {margin}"
    else:
        verdict = f"DOES NOT FIT: {needs} of {gib(device)}, {gib(-estimate.spare_bytes)} too much {margin}"
    largest = sorted(estimate.peak.terms.items(), key=lambda term: -term[1])[:3]
    shares = ", ".join(f"{name} {gib(size)}" for name, size in largest)
    return [verdict, f"Largest: {shares}", hint or sends(estimate)]


def sends(estimate: Estimate) -> str:
    """What one rank sends in a step, in one line."""
    inter = estimate.inter_node_bytes
    intra = estimate.moved_bytes - inter
    text = f"One step moves {gib(intra + inter)} per rank: {gib(intra)} inside nodes, {gib(inter)} between nodes"
    return text if not estimate.host_copy_bytes else f"{text}; {gib(estimate.host_copy_bytes)} host copies"


def estimate_text(
    estimate: Estimate, hint: str | None = None, *, checked: bool = False, sources: Sequence[str] = ()
) -> RenderableType:
    """Everything, top down: answer, memory, units, activations, traffic, host memory and files.

    Args:
        hint: the third line, in place of what a step sends.
        checked: whether the plan was compared with the real ``fully_shard``.
        sources: where the settings are from, a line each.
    """
    spare = estimate.spare_bytes
    style = "bold" if spare is None else "bold green" if spare >= 0 else "bold red"
    first, *others = answer(estimate, hint)
    cluster, settings = estimate.cluster, estimate.settings
    parts: list[RenderableType] = [Text(first, style=style), *map(Text, others), Text("")]
    parts += [
        Text(
            f"{estimate.model}, {estimate.num_parameters / 1e9:,.2f} B parameters; {cluster.ranks} ranks, "
            f"{cluster.ranks_per_node} per node; {settings.batch} x {settings.sequence:,} tokens per rank"
        ),
        Text(f"{settings.describe(cluster)}; {settings.optimizer}{_micro_batches(settings.micro_batches)}"),
        *(Text(line, style="dim") for line in sources),
    ]
    for title, table in _sections(estimate):
        parts += [Text(""), Text(title, style="bold"), table]
    parts.append(Text(""))
    parts += [Text(line) for line in _notes(estimate, checked)]
    return Group(*parts)


def _micro_batches(count: int) -> str:
    return f"; {count} micro-batches per step" if count > 1 else ""


def section(columns: Sequence[str]) -> Table:
    """An empty table: the first column to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(columns[0], no_wrap=True, overflow="ellipsis")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _sections(estimate: Estimate) -> Iterator[tuple[str, Table]]:
    yield f"Device memory per rank (peak: {estimate.peak.label})", _memory_table(estimate)
    yield "Units, one at a time", _unit_table(estimate)
    every = estimate.settings.activation_checkpointing
    what = "all kept" if not every else "recomputed in backward" if every == 1 else f"1 block in {every} recomputed"
    yield f"Activations, {what} ({estimate.settings.attention} attention, grouped experts)", _activation_table(estimate)
    yield "Collectives of one step, bytes per rank", _traffic_table(estimate)
    yield "Host memory per node, and files", _host_table(estimate)


def _memory_table(estimate: Estimate) -> Table:
    terms = estimate.peak.terms
    stays = {name: size for name, size in estimate.moments[-1].terms.items() if name in _STAYS}
    table = section(["", "at the peak", "between steps"])
    for name in dict.fromkeys((*stays, *terms)):
        table.add_row(name, gib(terms.get(name, 0)), gib(stays[name]) if name in stays else "-")
    table.add_row(f"margin ({MARGIN_FRACTION:.0%}, an assumption)", gib(estimate.margin_bytes), "-")
    table.add_row("total", gib(estimate.needed_bytes), gib(sum(stays.values())), style="bold")
    return table


def _unit_table(estimate: Estimate) -> Table:
    table = section(["unit", "all-gather output", "gathered", "gradients", "reduce-scatter input"])
    alike: dict[tuple[str, tuple[int, int, int, int]], list[str]] = {}
    for peak in estimate.unit_peaks:
        sizes = (peak.all_gather, peak.gathered, peak.unsharded_gradients, peak.reduce_scatter_input)
        alike.setdefault((peak.unit.role, sizes), []).append(peak.unit.fqn or "(root)")
    for (_, sizes), names in alike.items():
        table.add_row(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), *map(gib, sizes))
    return table


def _activation_table(estimate: Estimate) -> Table:
    activations = estimate.activations
    checkpointing = estimate.settings.activation_checkpointing
    table = section(["", "number", "kept by one", "kept by all", "forward needs", "backward needs"])

    def add(label: str, count: int, kept: int, forward: int, backward: int) -> None:
        table.add_row(label, str(count), *map(gib, (kept, count * kept, forward, backward)))

    before, after = activations.prelude, activations.epilogue
    add("before the blocks", 1, before.saved_bytes, before.forward_peak_bytes, before.backward_peak_bytes)
    for block in activations.blocks:
        peaks = block.part.forward_peak_bytes, block.part.backward_peak_bytes
        recomputed = [i for i in block.indices if checkpointing and i % checkpointing == 0]
        if recomputed:
            add(block.kind, len(recomputed), block.recomputed_bytes, *peaks)
        if len(recomputed) < len(block.indices):
            label = f"{block.kind}, kept" if checkpointing else block.kind
            add(label, len(block.indices) - len(recomputed), block.part.saved_bytes, *peaks)
    add("head and loss", 1, after.saved_bytes, after.forward_peak_bytes, after.backward_peak_bytes)
    table.add_row("total", "", "", gib(activations.saved_bytes(checkpointing=checkpointing)), "", "", style="bold")
    for name, size in estimate.attention_bytes.items():
        if name != estimate.settings.attention:
            table.add_row(f"with {name} attention", "", "", gib(size), "", "", style="dim")
    return table


def _traffic_table(estimate: Estimate) -> Table:
    table = section(["kind", "axis", "dtype", "count", "payload", "inside nodes", "between nodes"])
    for row in estimate.traffic:
        table.add_row(
            row.kind.replace("_", "-"),
            row.axis.replace("_", " "),
            row.dtype.replace("bfloat", "bf").replace("float", "fp"),
            str(row.count),
            *map(gib, (row.payload_bytes, row.intra_node_bytes, row.inter_node_bytes)),
        )
    inter = estimate.inter_node_bytes
    intra = estimate.moved_bytes - inter
    count = sum(row.count for row in estimate.traffic)
    table.add_row("total", "", "", str(count), "", gib(intra), gib(inter), style="bold")
    return table


def _host_table(estimate: Estimate) -> Table:
    host = estimate.host
    table = section(["", "size"])
    if host.offload:
        table.add_row("offloaded parameters, gradients and optimizer state", gib(host.offload))
    table.add_row("load: from_pretrained on every rank", gib(host.load_whole))
    table.add_row("load: built on meta, tensor by tensor", gib(host.load_streamed))
    table.add_row("save: a copy of every rank's shards", gib(host.save_sharded))
    table.add_row("export: the whole model on the first rank", gib(host.export))
    table.add_row("on disk: weights", gib(estimate.export_bytes))
    table.add_row("on disk: weights and optimizer state", gib(estimate.checkpoint_bytes))
    return table


def _notes(estimate: Estimate, checked: bool) -> list[str]:
    plan = estimate.plan
    notes = [f"Plan {plan.hash[:16]}: {len(plan.units)} units, {len(plan.frozen_fqns)} indexer parameters frozen."]
    if plan.expert_parallel > 1:
        notes.append("All-to-alls are an estimate: as many tokens to each expert. Real ones depend on the routers.")
    if estimate.padding_fraction > 0.05:
        notes.append(
            f"Padding is {estimate.padding_fraction:.0%} of what is gathered: no dim of some weights divides by "
            f"{plan.mesh_shape[-1]} ranks."
        )
        notes.append("A shard axis that divides it (--replicate) moves and holds less.")
    if checked:
        notes.append("Verified: fully_shard on a fake process group built exactly this plan.")
    return notes
