"""Where a causal language model keeps what gets a unit of its own: embedding, blocks, head.

Serves Transformers models (any with ``_no_split_modules``) and NeMo AutoModel's DeepSeek-V4. Names only; nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from . import nemo_layout
from .errors import ShardingError
from .names import canonical_name, pattern_name

__all__ = ["ModelLayout", "layout_of"]

# NeMo AutoModel's blocks: Transformers models name theirs in `_no_split_modules`, NeMo's do not.
_NEMO_BLOCK_CLASS_NAMES = frozenset({"DeepseekV4Block", "DeepseekV4VisionBlock", "DeepseekV4MTPBlock"})


@dataclass(frozen=True)
class ModelLayout:
    """Raw module names (as ``named_modules`` gives them) of the parts of a model.

    Attributes:
        embedding: the input embedding, or ``None`` if the model has none or it is tied to the head.
        blocks: the blocks in ``named_modules`` order, outermost ones only.
        head: the output head, or ``None`` likewise.
        head_needs_fp32_input: whether the head is an fp32 layer fed by the model with bf16 (NeMo AutoModel's), so that
            its unit must cast its input.
        tied: whether embedding and head share their weight; it then belongs to the root unit.
        experts: the modules inside blocks whose experts can be dealt to ranks (the model's ``ep_plan``, Transformers').
    """

    embedding: str | None
    blocks: tuple[str, ...]
    head: str | None
    head_needs_fp32_input: bool
    tied: bool
    experts: tuple[str, ...] = ()


def layout_of(model: nn.Module) -> ModelLayout:
    """Find embedding, blocks and head of ``model``.

    Raises:
        ShardingError: no module is of a class that the model declares as its block.
    """
    names = {module: name for name, module in model.named_modules()}
    embedding = _accessor(model, "get_input_embeddings")
    head = _accessor(model, "get_output_embeddings")
    block_classes = set(_NEMO_BLOCK_CLASS_NAMES) | {
        cls for module in names for cls in (getattr(module, "_no_split_modules", None) or ())
    }
    blocks: list[str] = []
    for module, name in names.items():
        is_block = any(cls.__name__ in block_classes for cls in type(module).__mro__)
        if is_block and module is not model and not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks.append(name)
    if not blocks:
        raise ShardingError(
            "no blocks found to shard.\n"
            f"expected: modules of a class in {sorted(block_classes)}\n"
            f"got: {type(model).__name__}, whose modules are of "
            f"{sorted({type(module).__name__ for module in names})[:12]}\n"
            "what to do: call dsv4_fsdp.fully_shard on the modules of your choice, bottom-up, instead of parallelize."
        )
    tied = (
        embedding is not None
        and head is not None
        and bool({id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()})
    )

    def name_outside_blocks(module: nn.Module | None) -> str | None:
        name = names.get(module) if module is not None else None
        if tied or not name or any(name == block or name.startswith(f"{block}.") for block in blocks):
            return None
        return name

    return ModelLayout(
        embedding=name_outside_blocks(embedding),
        blocks=tuple(blocks),
        head=name_outside_blocks(head),
        head_needs_fp32_input=nemo_layout.has_nemo_layout(model),
        tied=tied,
        experts=tuple(_dispatched_experts(model, blocks)),
    )


def _dispatched_experts(model: nn.Module, blocks: list[str]) -> Iterator[str]:
    """What a Transformers model's ``ep_plan`` names for dispatch, such as ``model.layers.*.mlp.experts``."""
    plan = getattr(model, "ep_plan", None)
    rules = (
        {name for name, style in plan.items() if style == "ep_dispatch_experts"} if isinstance(plan, dict) else set()
    )
    for name, _ in model.named_modules():
        if pattern_name(canonical_name(name)) in rules and any(name.startswith(f"{block}.") for block in blocks):
            yield name


def _accessor(model: nn.Module, method: str) -> nn.Module | None:
    # Transformers' interface, which NeMo AutoModel implements too. Models without an embedding raise.
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None
