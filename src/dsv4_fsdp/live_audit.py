"""The audit of a live model: what FSDP2 really does with each parameter, however the model was sharded.

Storage, units and placements are read back (:mod:`dsv4_fsdp.live_precision`); the dtypes on the wire, in forward and in
the gradient reduction are seen during one step that the caller runs (:mod:`dsv4_fsdp.observe`). Without a step they are
what FSDP2 was configured to do, and the report says so. The ranks then exchange what they saw: every rank returns the
same report, so all of them stop, or none.

What must hold:

- an fp32 island is fp32 in storage, on the wire, in forward and in the reduction of its gradient, and no forward casts
  it down (autocast);
- no unit narrows an fp32 tensor that it is given (RoPE tables, a residual) on its border;
- computed tables (``inv_freq``) are fp32 and hold the values that the model would compute, integer tables are integers
  and name experts that exist, the router bias is fp32;
- a pair that the config ties is one parameter; nothing is uninitialised, NaN or infinite;
- all ranks see the same, and replicas of an island hold the same numbers.

Not judged: bf16 reduction of weights that are no islands (a note), optimizer states, values of other weights beyond
NaN.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .audit_report import AuditReport, AuditRow, Violation
from .contract import IslandPredicate, island_reason, short_dtype
from .live_precision import LiveTensor, differences, read_back
from .names import canonical_name, joined_name
from .observe import Observations, observe_step
from .plan import ShardingPlan

__all__ = ["audit_model"]

_WIDE = frozenset({torch.float32, torch.float64})

# Buffers that are integers by meaning, in both implementations.
_INTEGER_TABLES = ("tid2eid",)

_BEFORE_SHARDING = (
    "cast before sharding: model.to(torch.bfloat16), torch_dtype=bfloat16 in a loader without the class list, or a "
    "checkpoint with the tensor in bf16. Its bits are gone; load it again without the cast"
)
_ONE_POLICY = (
    "one mixed-precision policy for the whole unit: fp32 storage with param_dtype=bfloat16, as accelerate's FSDP2 and "
    "stock fully_shard have it. Shard with dsv4_fsdp.parallelize, or give islands units of their own"
)
_REDUCE = (
    "reduce_dtype of the island's unit is bfloat16, or None with bf16 gradients: set reduce_dtype=torch.float32 in its "
    "policy"
)
_AUTOCAST = (
    "autocast around the forward: it casts the operands of matrix products below the modules, islands among them. "
    "FSDP2's policy casts weights already; leave autocast out (Accelerator(mixed_precision='no') with an mp policy)"
)
_BORDER = (
    "FSDP2 casts every floating input of a unit to param_dtype: set cast_forward_inputs=False in its policy, as "
    "dsv4_fsdp.parallelize does for units with islands"
)
_BUFFER_CAST = (
    "model.to(torch.bfloat16) or model.bfloat16() cast buffers with the weights: each RoPE angle is then off by up to "
    "0.4 %. Recompute the table in fp32"
)
_UNINITIALISED = (
    "to_empty or init_empty_weights left memory as it was and nothing filled it (non-persistent buffers are in no "
    "checkpoint): use dsv4_fsdp.materialize, or recompute the buffer on every rank"
)
_TABLE_CAST = "a float cast that did not spare integer tables: ids above 256 are rounded in bf16. Load the table again"
_UNTIED = (
    "to_empty, deepcopy or two units gave each name its own parameter; they drift apart in training and one is lost on "
    "save. Tie them again before sharding, both in one unit"
)
_RANKS = (
    "this rank built, loaded, cast or sharded its model in another way: a branch on the rank, a broadcast that skipped "
    "a tensor, another library version or config"
)
_REPLICAS = "replicas started from other values, or a gradient was not reduced over the replicate axis"
_LOST_BITS = (
    "downcast to bf16 and upcast again on the way here (a checkpoint that was saved in bf16, restore_fp32): fp32 in "
    "name only. Load it from a checkpoint that has it in fp32"
)


def audit_model(
    model: nn.Module,
    *,
    step: Callable[[], object] | None = None,
    plan: ShardingPlan | None = None,
    fp32_params: Iterable[str] | IslandPredicate = (),
    bits: bool = False,
) -> AuditReport:
    """Audit a live model. With a process group, all ranks call it and get the same report.

    Args:
        model: sharded with FSDP2 in any way, or not at all.
        step: runs one forward and backward of ``model``; its gradients stay in ``.grad``. ``None``: dtypes are those
            that FSDP2 was configured with, not seen.
        plan: the plan that was applied, to be compared with what is there; it knows the caller's own islands.
        fp32_params: further islands, as in :func:`dsv4_fsdp.parallelize`.
        bits: also look for islands that hold only bf16 values (were downcast and upcast).
    """
    rows = _rows(model, plan, fp32_params)
    seen = None if step is None else observe_step(model, step)
    mine = _Testimony(
        rows=tuple(rows if seen is None else (_with_seen(row, seen) for row in rows)),
        violations=(
            *_judge_rows(rows, seen),
            *_judge_values(model),
            *_judge_tables(model),
            *_judge_ties(model),
            *(() if plan is None else _judge_plan(model, plan)),
        ),
        digests=_digests(model, {row.fqn for row in rows if row.island}),
        bits=_bits(model, {row.fqn for row in rows if row.island}) if bits else {},
        collectives=Counter() if seen is None else Counter({_name(k, d): n for (k, d), n in seen.collectives.items()}),
    )
    everyone = _exchange(mine)
    return _report(model, everyone, observed=step is not None, bits=bits)


@dataclass(frozen=True)
class _Testimony:
    """What one rank has to say; small, and made of plain values."""

    rows: tuple[_Row, ...]
    violations: tuple[Violation, ...]
    digests: dict[tuple[str, str], str]
    bits: dict[str, tuple[bool, float | None]]
    collectives: Counter[str]


@dataclass(frozen=True)
class _Row:
    """One tensor on one rank: what was read back, then what was seen."""

    fqn: str
    kind: str
    island: bool
    reason: str
    trainable: bool
    storage: torch.dtype
    compute: torch.dtype | None
    reduce: torch.dtype | None
    unit: str | None
    placements: str
    gathered: torch.dtype | None = None
    cast_to: torch.dtype | None = None


def _rows(model: nn.Module, plan: ShardingPlan | None, fp32_params: Iterable[str] | IslandPredicate) -> list[_Row]:
    says = island_reason(model, fp32_params if callable(fp32_params) else tuple(fp32_params))
    trainable = {canonical_name(n): p.requires_grad for n, p in model.named_parameters(remove_duplicate=False)}
    tensors = {canonical_name(n): t for n, t in [*model.named_parameters(), *model.named_buffers()]}

    def row(live: LiveTensor) -> _Row:
        reason = live.reason
        island = live.island
        if not island and live.storage.is_floating_point and (said := says(live.fqn, tensors[live.fqn])) is not None:
            island, reason = True, said
        reduce = live.reduce if trainable.get(live.fqn, False) else None
        return _Row(
            live.fqn,
            live.kind,
            island,
            reason,
            trainable.get(live.fqn, False),
            live.storage,
            live.compute if live.kind == "parameter" else None,
            reduce,
            live.unit,
            live.placements,
        )

    return [row(live) for live in read_back(model, plan)]


def _with_seen(row: _Row, seen: Observations) -> _Row:
    if row.kind != "parameter":
        return row
    return replace(
        row,
        compute=_narrowest(seen.compute.get(row.fqn)),
        gathered=_narrowest(seen.gathered.get(row.fqn)),
        reduce=_narrowest(seen.reduced.get(row.fqn)) if row.trainable else None,
        cast_to=_narrowest(seen.computed_as.get(row.fqn)),
    )


def _narrowest(dtypes: set[torch.dtype] | None) -> torch.dtype | None:
    return min(dtypes, key=lambda dtype: (dtype.itemsize, str(dtype))) if dtypes else None


# --- What one rank can say by itself ----------------------------------------------------------------------------------


def _judge_rows(rows: Iterable[_Row], seen: Observations | None) -> Iterable[Violation]:
    for row in rows:
        if seen is not None:
            row = _with_seen(row, seen)
        if row.island:
            yield from _judge_island(row)
    if seen is not None:
        for (unit, argument), dtype in seen.truncated.items():
            where = f"input {argument} of {unit or '(root)'}"
            yield Violation("input-truncated", where, "fp32, as it was passed", _word(dtype), _BORDER)


def _judge_island(row: _Row) -> Iterable[Violation]:
    must = f"fp32 ({row.reason})"
    if row.storage not in _WIDE:
        # The rest follows from it and would only repeat it.
        yield Violation("island-stored-low", row.fqn, must, f"stored in {_word(row.storage)}", _BEFORE_SHARDING)
        return
    low = {
        what: dtype
        for what, dtype in (("gathered", row.gathered), ("computed", row.compute))
        if dtype is not None and dtype not in _WIDE
    }
    if low:
        yield Violation(
            "island-computed-low",
            row.fqn,
            must,
            f"{' and '.join(low)} in {_word(min(low.values(), key=str))}",
            _ONE_POLICY,
        )
    elif row.cast_to is not None:
        found = f"cast to {_word(row.cast_to)} inside its forward"
        yield Violation("island-autocast", row.fqn, must, found, _AUTOCAST)
    if row.reduce is not None and row.reduce not in _WIDE:
        found = f"gradient reduced in {_word(row.reduce)}"
        yield Violation("island-reduced-low", row.fqn, must, found, _REDUCE)


def _judge_values(model: nn.Module) -> Iterable[Violation]:
    """Uninitialised or broken memory: meta tensors, NaN and infinities; one pass over this rank's shards."""
    for raw_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = _local(tensor)
        fqn = canonical_name(raw_name)
        if local.device.type == "meta":
            yield Violation("uninitialised", fqn, "a value", "on the meta device", _UNINITIALISED)
        elif local.is_floating_point() and local.itemsize > 1 and not bool(local.isfinite().all()):
            bad = int((~local.isfinite()).sum())
            yield Violation("uninitialised", fqn, "finite numbers", f"{bad:,} NaN or infinite", _UNINITIALISED)


def _judge_tables(model: nn.Module) -> Iterable[Violation]:
    """Integer tables, and the buffers that the model computes."""
    num_experts = getattr(getattr(model, "config", None), "n_routed_experts", None)
    for raw_name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        fqn = canonical_name(raw_name)
        leaf = fqn.rpartition(".")[2]
        local = _local(tensor)
        if leaf not in _INTEGER_TABLES or local.device.type == "meta":
            continue
        if local.is_floating_point():
            yield Violation("integer-cast", fqn, "integers", _word(local.dtype), _TABLE_CAST)
        elif isinstance(num_experts, int) and local.numel():
            low, high = int(local.min()), int(local.max())
            if low < 0 or high >= num_experts:
                expected = f"expert numbers from 0 to {num_experts - 1}"
                yield Violation("uninitialised", fqn, expected, f"numbers from {low} to {high}", _UNINITIALISED)
    for raw_name, module in model.named_modules():
        for buffer_name in _computed_buffers(module):
            fqn = joined_name(raw_name, buffer_name)
            yield from _judge_computed(model, module, buffer_name, fqn)


def _computed_buffers(module: nn.Module) -> list[str]:
    """The names of RoPE tables that ``module`` holds: floating, in no checkpoint."""
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name in module._non_persistent_buffers_set
        and buffer.is_floating_point()
        and name.endswith("inv_freq")
    ]


def _judge_computed(model: nn.Module, module: nn.Module, name: str, fqn: str) -> Iterable[Violation]:
    buffer = module._buffers[name]
    assert buffer is not None
    if buffer.dtype not in _WIDE:
        yield Violation("buffer-cast", fqn, "fp32", _word(buffer.dtype), _BUFFER_CAST)
        return
    if buffer.device.type == "meta" or not bool(buffer.isfinite().all()):
        return  # said already
    expected = _recomputed(model, module, name)
    if expected is not None and expected.shape == buffer.shape:
        wrong = not torch.allclose(buffer.cpu().float(), expected, rtol=1e-4, atol=0)
        text = "the values that the model computes"
    else:
        # Frequencies: positive and at most 1 (RoPE scaling only lowers them).
        wrong = not bool(((buffer > 0) & (buffer <= 1)).all())
        text = "frequencies in (0, 1]"
    if wrong:
        values = buffer.flatten()[:3].tolist()
        # bf16 keeps 8 bits: a table that came through it is off by up to 2**-9 of each value, more than 1e-4.
        rounded = expected is not None and torch.equal(buffer.cpu().float(), expected.bfloat16().float())
        kind, cause = ("buffer-cast", _BUFFER_CAST) if rounded else ("uninitialised", _UNINITIALISED)
        found = "those rounded to bf16" if rounded else f"{', '.join(f'{v:.4g}' for v in values)}, ..."
        yield Violation(kind, fqn, text, found, cause)


def _recomputed(model: nn.Module, module: nn.Module, name: str) -> torch.Tensor | None:
    """What a Transformers model would fill the buffer with (``_init_weights``), or ``None`` if it does not say how."""
    initialize = getattr(model, "_init_weights", None)
    if initialize is None or any(True for _ in module.parameters()):
        return None
    fresh = copy.deepcopy(module)
    for key, buffer in fresh._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            fresh._buffers[key] = torch.full(buffer.shape, torch.nan, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        initialize(fresh)
    value = fresh._buffers[name]
    return None if value is None or bool(value.isnan().any()) else value


def _judge_ties(model: nn.Module) -> Iterable[Violation]:
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    if not getattr(text_config, "tie_word_embeddings", False):
        return
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return
    weights = [getattr(module, "weight", None) for module in (embedding, head)]
    if None not in weights and weights[0] is not weights[1]:
        names = {id(module): canonical_name(n) for n, module in model.named_modules()}
        name = f"{names.get(id(head), 'lm_head')}.weight"
        expected = f"the same parameter as {names.get(id(embedding), 'embed_tokens')}.weight"
        yield Violation("untied", name, expected, "a parameter of its own", _UNTIED)


def _judge_plan(model: nn.Module, plan: ShardingPlan) -> Iterable[Violation]:
    cause = "sharded again or by hand after the plan was made, or parameters were added or replaced since"
    for sentence in differences(read_back(model, plan), plan):
        name, _, rest = sentence.partition(": ")
        expected, is_pair, found = rest.removeprefix("expected (unit, group, storage, compute, reduce) ").partition(
            ", got "
        )
        if is_pair:
            fields = ("unit", "group", "storage", "compute", "reduce")
            pairs = zip(fields, ast.literal_eval(expected), ast.literal_eval(found), strict=True)
            apart = [(f"{what} {want}", f"{what} {got}") for what, want, got in pairs if want != got]
            expected, found = (", ".join(texts) for texts in zip(*apart, strict=True))
            yield Violation("not-as-planned", name, expected, found, cause)
        else:
            yield Violation("not-as-planned", name, "as planned", rest, cause)


# --- What ranks have to compare ---------------------------------------------------------------------------------------


def _digests(model: nn.Module, islands: set[str]) -> dict[tuple[str, str], str]:
    """(name, which part of it) -> digest of this rank's bytes, of all that must be equal wherever the part is held.

    Those are islands (equal shards on the replicate axis) and the small buffers that every rank holds whole.
    """
    found = {}
    for raw_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        fqn = canonical_name(raw_name)
        leaf = fqn.rpartition(".")[2]
        if fqn not in islands and leaf not in _INTEGER_TABLES and not leaf.endswith("inv_freq"):
            continue
        local = _local(tensor)
        if local.device.type != "meta":
            found[fqn, _part(tensor)] = hashlib.blake2b(_bytes(local), digest_size=8).hexdigest()
    return found


def _part(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "whole"
    coordinate = tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim
    at = zip(coordinate, tensor.placements, tensor.device_mesh.shape, strict=True)
    return ",".join(f"{i}/{n}" for i, placement, n in at if isinstance(placement, Shard)) or "whole"


def _bytes(tensor: torch.Tensor) -> bytes:
    # A copy: what numpy has looked at cannot be resized, and that is how FSDP2 frees a gathered parameter.
    copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copy.view(-1).view(torch.uint8).numpy().tobytes()


def _bits(model: nn.Module, islands: set[str]) -> dict[str, tuple[bool, float | None]]:
    """Island -> (needs fp32, its one value if this rank's part is constant else NaN; None if it holds nothing)."""
    found: dict[str, tuple[bool, float | None]] = {}
    for raw_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        fqn = canonical_name(raw_name)
        local = _local(tensor).detach()
        if fqn not in islands or local.dtype != torch.float32 or local.device.type == "meta":
            continue
        if local.numel() == 0:
            found[fqn] = (False, None)
            continue
        values = local.contiguous().view(-1)
        constant = bool((values == values[0]).all())
        found[fqn] = (bool((values.view(torch.int32) & 0xFFFF).any()), float(values[0]) if constant else float("nan"))
    return found


def _exchange(mine: _Testimony) -> list[_Testimony]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _report(model: nn.Module, everyone: list[_Testimony], *, observed: bool, bits: bool) -> AuditReport:
    violations = [*_said_by_ranks(everyone), *_ranks_that_differ(everyone), *_replicas_that_differ(everyone)]
    notes = []
    verdicts: dict[str, str] = {}
    if bits:
        found, bit_notes, verdicts = _judge_bits(everyone)
        violations += found
        notes += bit_notes
    rows = [_merged(same) for same in _by_name(everyone)]
    low = [r for r in rows if not r.island and r.reduce is not None and r.storage.is_floating_point]
    low = [r for r in low if r.reduce not in _WIDE]
    if low:
        notes.append(
            f"{len(low)} weights reduce their gradients in {_short(low[0].reduce)}, such as "
            f"{low[0].fqn}: allowed, but sums over many ranks lose bits; reduce_dtype=torch.float32 is the usual choice"
        )
    unseen = [r.fqn for r in rows if observed and r.kind == "parameter" and r.compute is None]
    if unseen:
        notes.append(f"{len(unseen)} parameters were in no forward of the step, such as {unseen[0]}: not judged there")
    if observed and (counts := everyone[0].collectives):
        text = ", ".join(f"{n} {name}" for name, n in counts.items())
        notes.append(f"collectives of the step on rank 0: {text}")
    units = len({r.unit for r in rows if r.unit is not None})
    name = type(model).__name__.removeprefix("FSDP")
    ranks = f"{len(everyone)} rank{'s' * (len(everyone) != 1)}"
    how = (
        "Gathered, compute and reduce dtypes were seen during one step."
        if observed
        else "Compute and reduce dtypes are as configured: pass step= to see them."
    )
    return AuditReport(
        subject=f"live model {name} on {ranks}",
        summary=f"{units} FSDP units. {how}",
        rows=tuple(
            AuditRow(
                row.fqn,
                row.kind,
                row.island,
                row.reason,
                _word(row.storage),
                _short(row.gathered),
                _short(row.cast_to or row.compute),
                _short(row.reduce),
                row.unit,
                row.placements,
                verdicts.get(row.fqn),
            )
            for row in rows
        ),
        violations=tuple(violations),
        notes=tuple(notes),
    )


def _said_by_ranks(everyone: list[_Testimony]) -> Iterable[Violation]:
    ranks: dict[Violation, list[int]] = {}
    for rank, testimony in enumerate(everyone):
        for violation in testimony.violations:
            ranks.setdefault(violation, []).append(rank)
    for violation, on in ranks.items():
        yield violation if len(on) == len(everyone) else replace(violation, ranks=tuple(on))


def _by_name(everyone: list[_Testimony]) -> Iterable[list[_Row]]:
    rows: dict[str, list[_Row]] = {}
    for testimony in everyone:
        for row in testimony.rows:
            rows.setdefault(row.fqn, []).append(row)
    return rows.values()


_SEEN = ("compute", "gathered", "reduce", "cast_to")


def _merged(same: list[_Row]) -> _Row:
    """One row for all ranks: what was seen is the narrowest of what any of them saw."""
    seen = {f: _narrowest({d for row in same if (d := getattr(row, f)) is not None}) for f in _SEEN}
    return replace(
        same[0],
        compute=seen["compute"],
        gathered=seen["gathered"],
        reduce=seen["reduce"],
        cast_to=seen["cast_to"],
    )


def _ranks_that_differ(everyone: list[_Testimony]) -> Iterable[Violation]:
    by_rank = [{row.fqn: row for row in testimony.rows} for testimony in everyone]
    for fqn in dict.fromkeys(name for rows in by_rank for name in rows):
        rows = [rows.get(fqn) for rows in by_rank]
        fields = ("kind", "storage", "unit", "placements", "trainable", "island", *_SEEN)
        for what in fields:
            values = ["not there" if row is None else _text(getattr(row, what)) for row in rows]
            # What a rank did not see is no contradiction: its sequence may have been too short for a compressor.
            said = [value for value in values if not (value == "-" and what in _SEEN)]
            if len(set(said)) < 2:
                continue
            most = max(Counter(said).values())
            majority = next(value for value in said if said.count(value) == most)
            ranks = tuple(r for r, v in enumerate(values) if v != majority and not (v == "-" and what in _SEEN))
            found = f"{what} {', '.join(dict.fromkeys(values[rank] for rank in ranks))}"
            yield Violation("rank-differs", fqn, f"{what} {majority}, as on the other ranks", found, _RANKS, ranks)
            break


def _replicas_that_differ(everyone: list[_Testimony]) -> Iterable[Violation]:
    keys = dict.fromkeys(key for testimony in everyone for key in testimony.digests)
    for fqn, part in keys:
        values = {r: d for r, t in enumerate(everyone) if (d := t.digests.get((fqn, part))) is not None}
        if len(set(values.values())) > 1:
            most = max(Counter(values.values()).values())
            majority = next(d for d in values.values() if list(values.values()).count(d) == most)
            ranks = tuple(rank for rank, digest in values.items() if digest != majority)
            expected = f"the numbers of the other ranks that hold {'it' if part == 'whole' else 'the same shard'}"
            cause = _REPLICAS if part != "whole" else _RANKS
            yield Violation("rank-differs", fqn, expected, "other numbers", cause, ranks)


def _judge_bits(everyone: list[_Testimony]) -> tuple[list[Violation], list[str], dict[str, str]]:
    verdicts: dict[str, str] = {}
    for fqn in everyone[0].bits:
        parts = [t.bits[fqn] for t in everyone if fqn in t.bits and t.bits[fqn][1] is not None]
        values = {value for _, value in parts}
        if any(needs for needs, _ in parts):
            verdicts[fqn] = "fp32"
        elif len(values) == 1 and values == {v for v in values if v == v}:
            verdicts[fqn] = "constant"
        elif parts:
            verdicts[fqn] = "bf16 only"
    lost = [fqn for fqn, verdict in verdicts.items() if verdict == "bf16 only"]
    norms = [fqn for fqn in lost if fqn.endswith("norm.weight")]
    constants = [fqn for fqn, verdict in verdicts.items() if verdict == "constant"]
    expected, found = "fp32 values", "all numbers exact in bf16"
    violations = [Violation("lost-bits", fqn, expected, found, _LOST_BITS) for fqn in lost if fqn not in norms]
    notes = []
    if norms:
        notes.append(
            f"{len(norms)} fp32 norms hold only bf16 values, such as {norms[0]}: as loaded from the released files; "
            "after training it means that they were downcast"
        )
    if constants:
        notes.append(
            f"inconclusive, each number the same and exact in bf16: {len(constants)} islands, such as {constants[0]}"
        )
    return violations, notes, verdicts


# --- Words ------------------------------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _short(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else _word(dtype)


def _word(dtype: torch.dtype) -> str:
    return short_dtype(dtype).replace("bfloat", "bf").replace("float", "fp")


def _text(value: object) -> str:
    if isinstance(value, torch.dtype):
        return _word(value)
    return "-" if value is None else str(value) or "(root)"


def _name(kind: str, dtype: torch.dtype) -> str:
    return f"{kind} in {_word(dtype)}"
