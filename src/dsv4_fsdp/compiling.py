"""``torch.compile`` of a model's blocks, with a count of what was compiled.

Each block's ``forward`` is compiled, and nothing around it: FSDP2's hooks, activation checkpointing's wrapper and the
model's own loop stay as they are, so it does not matter whether a block is sharded before or after. Nothing is
compiled at the call. Graphs are made when the blocks first run, and made again when shapes or flags change.

"Compiled" is a claim that torch does not check: past its limit of recompilations, after a step under a dispatch mode,
or where it finds nothing to trace, it runs a block eagerly without an error. :class:`CompileReport` therefore counts:
the graphs that the backend was given, the breaks between them, and per block how many graphs its last forward ran.

The mixers of hyper-connections stay eager: their Sinkhorn chain divides again and again by its own sums, and fused
backwards of it have overflowed elsewhere. Each costs two graph breaks per block. ``mixers="compiled"`` compiles them
too; look at the gradients then.

What was run, on a CPU with torch 2.13: backend ``eager`` (forward bit-equal to the uncompiled model, gradients as
without compiling), ``aot_eager`` (forward bit-equal, gradients within the rounding of bf16 sums in another order), and
by hand inductor (a loss of 5.354 for 5.358, since fused kernels round less; 26 s to compile two tiny blocks). Nothing
was run on a GPU. :func:`dsv4_fsdp.audit` runs its step eagerly, since torch compiles nothing while operations are
watched: it judges what FSDP2 hands to the blocks, not the inside of graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from .errors import ShardingError
from .model_layout import layout_of
from .names import canonical_name
from .torch_private import compile_backend, graph_breaks

__all__ = ["CompileReport", "compile_blocks"]

_MIXER_CLASS_SUFFIX = "HyperConnection"


@dataclass
class CompileReport:
    """What ``torch.compile`` has done so far with the blocks of one model; it goes on counting.

    Attributes:
        backend: name of the backend, or of the function that is one.
        blocks: canonical names of the blocks whose forward was handed to ``torch.compile``.
        eager: canonical names of the modules inside that are kept out (hyper-connection mixers).
        graphs: graphs that the backend was given; recompilations count again.
        operations: calls in these graphs, as traced.
        graphs_run: block -> graphs that its last forward ran. 0: that forward was eager.
    """

    backend: str
    blocks: tuple[str, ...]
    eager: tuple[str, ...]
    graphs: int = 0
    operations: int = 0
    graphs_run: dict[str, int] = field(default_factory=dict)
    _breaks_before: Counter[str] = field(default_factory=Counter, repr=False)
    _running: list[str] = field(default_factory=list, repr=False)

    @property
    def breaks(self) -> dict[str, int]:
        """Reason -> graph breaks since :func:`compile_blocks`, of the whole process: torch counts them per process."""
        return dict(graph_breaks() - self._breaks_before)

    @property
    def eager_blocks(self) -> tuple[str, ...]:
        """The blocks that have run, and whose last forward ran no graph."""
        return tuple(name for name in self.blocks if self.graphs_run.get(name) == 0)

    def text(self) -> str:
        """The counts, one line each."""
        ran = [self.graphs_run[name] for name in self.blocks if name in self.graphs_run]
        if not ran:
            return f"{len(self.blocks)} blocks, none run yet: nothing is compiled before the first forward"
        spread = f"{min(ran)}" if min(ran) == max(ran) else f"{min(ran)} to {max(ran)}"
        lines = [
            f"{len(ran)} of {len(self.blocks)} blocks run, backend {self.backend}",
            f"graphs compiled: {self.graphs}, of {self.operations} operations",
            f"graphs run per block: {spread}",
            f"graph breaks: {sum(self.breaks.values())}",
            *(f"  {count} x {reason}" for reason, count in sorted(self.breaks.items(), key=lambda item: -item[1])),
            f"kept eager: {len(self.eager)} mixers" if self.eager else "kept eager: nothing",
        ]
        if self.eager_blocks:
            lines.append(f"NOT compiled, ran eagerly: {', '.join(self.eager_blocks)}")
        return "\n".join(lines)

    __str__ = text


def compile_blocks(
    model: nn.Module,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mixers: Literal["eager", "compiled"] = "eager",
    dynamic: bool | None = None,
) -> CompileReport:
    """Compile the forward of each block of ``model`` in place, before or after it is sharded.

    Names of parameters stay, so checkpoints do too. The model can no longer be pickled or deep-copied.

    Args:
        model: Transformers' or NeMo AutoModel's DeepSeek-V4, or another model whose blocks
            :func:`dsv4_fsdp.parallelize` finds.
        backend: of ``torch.compile``: a name or a function.
        mixers: whether hyper-connection mixers are compiled with their block. See the module's docstring.
        dynamic: of ``torch.compile``: ``None`` compiles for the first shape, then for any.

    Returns:
        The report. Print it after a training step: before, there is nothing in it.

    Raises:
        ShardingError: no blocks found, or they are compiled already.
        ValueError: ``mixers`` is neither word.
    """
    if mixers not in ("eager", "compiled"):
        raise ValueError(
            f"mixers is neither of its two words.\nexpected: 'eager' or 'compiled'\ngot: {mixers!r}\n"
            "what to do: leave it out to keep hyper-connection mixers out of the graphs."
        )
    blocks = {canonical_name(name): model.get_submodule(name) for name in layout_of(model).blocks}
    if done := [name for name, block in blocks.items() if hasattr(block.forward, "_dsv4_fsdp_compiled")]:
        raise ShardingError(
            "blocks are compiled already.\nexpected: one call of compile_blocks per model\n"
            f"got: {len(done)} compiled blocks, {done[0]} the first\nwhat to do: leave the second call out."
        )
    chains = {
        canonical_name(name): module
        for name, module in model.named_modules()
        if any(cls.__name__.endswith(_MIXER_CLASS_SUFFIX) for cls in type(module).__mro__)
    }
    if mixers == "compiled":
        chains = {}
    for chain in chains.values():
        chain.forward = torch.compiler.disable(chain.forward)

    report = CompileReport(
        backend=backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__),
        blocks=tuple(blocks),
        eager=tuple(chains),
        _breaks_before=graph_breaks(),
    )
    counting = _counting_backend(compile_backend(backend), report)
    for name, block in blocks.items():
        block.forward = _counting_forward(name, torch.compile(block.forward, backend=counting, dynamic=dynamic), report)
    return report


def _counting_backend(backend: Callable[..., Any], report: CompileReport) -> Callable[..., Any]:
    """``backend``, with each graph it is given and each run of one noted in ``report``."""

    def counting(graph: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
        report.graphs += 1
        report.operations += sum(node.op.startswith("call_") for node in graph.graph.nodes)
        compiled = backend(graph, example_inputs, **options)

        def run(*args: Any) -> Any:
            if report._running:
                report.graphs_run[report._running[-1]] += 1
            return compiled(*args)

        return run

    return counting


def _counting_forward(name: str, forward: Callable[..., Any], report: CompileReport) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        report._running.append(name)
        report.graphs_run[name] = 0
        try:
            return forward(*args, **kwargs)
        finally:
            report._running.pop()

    counting._dsv4_fsdp_compiled = True  # type: ignore[attr-defined]
    return counting
