"""The optimizers of a run, and which parameter is moved how.

**What each costs**, in bytes per parameter for the weight and the optimizer's state (gradients come on top):

=================  ==============  ============================================================================
``adamw``          2 + 2 + 2       bf16 storage: weight and both moments in bf16
``adamw``          4 + 4 + 4       fp32 storage (master weights)
``adamw_bf16_sr``  2 + 4 + 4       bf16 storage, stochastic rounding of the weight, moments in fp32
``adamw_8bit``     2 + 1 + 1       bf16 storage, stochastic rounding of the weight, moments in 8 bits (torchao)
``muon``           2 + 4           bf16 storage; one momentum in fp32; what is not Muon's as ``adamw``
=================  ==============  ============================================================================

**What bf16 storage costs.** bf16 has 8 significant bits: next to a weight ``w`` the representable numbers are between
``|w| * 2**-8`` and ``|w| * 2**-7`` apart, and rounding to the nearest drops every update below half of that. AdamW's
update is about ``lr`` whatever the gradient, so under plain ``adamw`` (and ``muon``) a weight above ``2**9 * lr`` never
moves: at ``lr = 1e-5`` every weight above 0.005, a norm's 1.0 (were it no island) by a factor of 195. Stochastic
rounding goes up or down with the probability that makes the mean exact, so that weight moves by 2**-8 about once in 390
steps. bf16 moments have the same fault: above ``beta2 = 1 - 2**-8 = 0.996`` the second moment may grow but not fall.
fp32 islands are stored, moved and remembered in fp32 under every optimizer. :func:`precision_notes` says which of this
applies to a run.

**Groups.** Weight decay pulls towards zero, which is no neutral value for a norm, a bias, a sink or a mixer: only
matrices that are no islands decay. torch's foreach kernels refuse a list with parameters on two meshes (experts under
expert parallelism live on another mesh than the rest) or with sharded and plain tensors, so these never share a group.

**How**: :mod:`dsv4_fsdp.train.stochastic_adamw` for the two with stochastic rounding, :mod:`dsv4_fsdp.train.muon`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dsv4_fsdp.contract import island_reason, short_dtype
from dsv4_fsdp.errors import listing
from dsv4_fsdp.names import canonical_name, matches_components

from .muon import Muon
from .optimizer_settings import OptimizerSettings
from .stochastic_adamw import OptimizerError, StochasticAdamW

__all__ = [
    "OptimizerError",
    "OptimizerSettings",
    "ParameterGroup",
    "groups_table",
    "make_optimizer",
    "parameter_groups",
    "precision_notes",
    "set_learning_rate",
]

# bf16 keeps 8 significant bits.
_BF16_LARGEST_BETA2 = 1 - 2**-8

Role = Literal["matrices", "embeddings", "no decay", "fp32 islands"]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are moved alike.

    Attributes:
        name: unique in a run: the role, then what sets it apart.
        role: ``matrices`` and ``embeddings`` (with ``lm_head``) decay, ``no decay`` and ``fp32 islands`` do not.
        algorithm: ``adamw`` or ``muon``.
        weight_decay: decoupled, per step and learning rate.
        lr_scale: factor of the learning rate.
        mesh: where the parameters live; ``None`` for plain tensors.
        fqns: canonical names, sorted.
        params: the parameters themselves, in the same order.
    """

    name: str
    role: Role
    algorithm: Literal["adamw", "muon"]
    weight_decay: float
    lr_scale: float
    mesh: DeviceMesh | None = field(repr=False)
    fqns: tuple[str, ...] = field(repr=False)
    params: tuple[nn.Parameter, ...] = field(repr=False, compare=False)


def parameter_groups(
    model: nn.Module, settings: OptimizerSettings, *, islands: Collection[str] | None = None
) -> list[ParameterGroup]:
    """The trainable parameters of ``model`` in groups, in an order that depends on names only.

    Args:
        model: sharded or not.
        islands: canonical names of the fp32 islands; by default what the model itself says (its class's list, or NeMo
            AutoModel's layout). Pass the plan's if the caller named further ones.

    Raises:
        OptimizerError: nothing is trainable, or a pattern of the settings matches no trainable parameter.
    """
    trainable = {canonical_name(name): param for name, param in model.named_parameters() if param.requires_grad}
    if not trainable:
        raise OptimizerError(
            "the optimizer has nothing to train.\nexpected: parameters with requires_grad=True\ngot: none\n"
            f"where: a {type(model).__name__}\nwhat to do: unfreeze some, or leave the optimizer out."
        )
    _refuse_silent_patterns(settings, list(trainable))
    if islands is None:
        says = island_reason(model, ())
        islands = {name for name, param in trainable.items() if param.is_floating_point() and says(name, param)}
    embeddings = _embedding_ids(model)
    sharded = any(isinstance(param, DTensor) for param in trainable.values())

    buckets: dict[tuple[Any, ...], list[str]] = {}
    for name, param in sorted(trainable.items()):
        role = _role(name, param, settings, island=name in islands, embedding=id(param) in embeddings)
        algorithm = "muon" if settings.name == "muon" and role == "matrices" and param.ndim in (2, 3) else "adamw"
        decays = role == "matrices" or (role == "embeddings" and settings.decay_embeddings)
        scale = next((s for pattern, s in settings.lr_scale.items() if matches_components(name, pattern)), 1.0)
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        key = (role, algorithm, settings.weight_decay if decays else 0.0, scale, mesh)
        buckets.setdefault(key, []).append(name)

    main_mesh = _most_common_mesh(trainable.values())
    groups = []
    for (role, algorithm, decay, scale, mesh), names in buckets.items():
        words = [role]
        if settings.name == "muon" and role == "matrices":
            words.append(algorithm)
        if scale != 1:
            words.append(f"lr × {scale:g}")
        if mesh is None and sharded:
            words.append("not sharded")
        elif mesh is not None and mesh != main_mesh:
            words.append(f"on {_mesh_label(mesh)}")
        params = tuple(trainable[name] for name in names)
        groups.append(ParameterGroup(", ".join(words), role, algorithm, decay, scale, mesh, tuple(names), params))
    return sorted(groups, key=lambda group: (group.name, group.fqns))


def groups_table(groups: Sequence[ParameterGroup]) -> str:
    """One line a group: name, parameters, elements, storage dtypes, weight decay, factor of the learning rate."""
    rows = [("group", "tensors", "elements", "storage", "decay", "lr ×", "by")]
    for group in groups:
        dtypes = sorted({short_dtype(param.dtype) for param in group.params})
        numel = sum(param.numel() for param in group.params)
        rows.append(
            (
                group.name,
                f"{len(group.params):,}",
                f"{numel:,}",
                "+".join(dtypes),
                f"{group.weight_decay:g}",
                f"{group.lr_scale:g}",
                group.algorithm,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 3, 6)
    return "\n".join(
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    )  # fmt: skip


def precision_notes(groups: Sequence[ParameterGroup], settings: OptimizerSettings) -> list[str]:
    """What bf16 storage costs this run, in words; empty if nothing. See the module's docstring for the figures."""
    in_bf16 = {
        algorithm: sum(p.numel() for g in groups if g.algorithm == algorithm for p in g.params if _is_bf16(p))
        for algorithm in ("adamw", "muon")
    }
    notes = []
    numel = sum(in_bf16.values())
    if numel and settings.name in ("adamw", "muon"):
        notes.append(
            f"{numel:,} parameters are stored in bf16 and rounded to the nearest: at lr {settings.lr:g} weights above "
            f"{settings.lr * 2**9:.2g} do not move. Store in fp32, or use adamw_bf16_sr or adamw_8bit."
        )
    if in_bf16["adamw"] and settings.name in ("adamw", "muon") and settings.beta2 > _BF16_LARGEST_BETA2:
        notes.append(
            f"beta2 is {settings.beta2:g} and {in_bf16['adamw']:,} parameters have moments in bf16: above "
            f"{_BF16_LARGEST_BETA2:.3f} their second moment may grow but not fall. Lower beta2, or store in fp32."
        )
    if not numel and settings.name == "adamw_bf16_sr":
        notes.append("no parameter is stored in bf16, so adamw_bf16_sr has nothing to round: it is adamw.")
    return notes


def make_optimizer(
    groups: Sequence[ParameterGroup], settings: OptimizerSettings, *, seed: int
) -> torch.optim.Optimizer:
    """The optimizer that ``settings`` name, over ``groups`` (:func:`parameter_groups`), in their order.

    Each of its ``param_groups`` carries the group's ``name`` and ``lr_scale``. States are shards like the parameters,
    and go through DCP's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``.

    Args:
        seed: of stochastic rounding; the same on all ranks.

    Raises:
        OptimizerError: ``adamw_8bit`` without torchao.
    """
    entries = [{"params": list(group.params)} | _options(groups, group, settings) for group in groups]
    if settings.name == "adamw":
        return torch.optim.AdamW(entries, lr=settings.lr)
    if settings.name == "muon":
        return Muon(entries, lr=settings.lr)
    return StochasticAdamW(entries, lr=settings.lr, seed=seed)


def _options(groups: Sequence[ParameterGroup], group: ParameterGroup, settings: OptimizerSettings) -> dict[str, Any]:
    """Everything of one of the optimizer's groups but its parameters."""
    options: dict[str, Any] = {"name": group.name, "lr_scale": group.lr_scale, "lr": settings.lr * group.lr_scale}
    options |= {"weight_decay": group.weight_decay, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.name == "muon":
        options |= {"algorithm": group.algorithm}
    if group.algorithm == "muon":
        options |= {"momentum": settings.muon_momentum, "ns_steps": settings.muon_ns_steps}
    elif settings.name in ("adamw", "muon"):
        on_cuda = all(param.device.type == "cuda" for each in groups for param in each.params)
        kernel = settings.kernel if settings.kernel != "auto" else ("fused" if on_cuda else "foreach")
        options |= {"fused": kernel == "fused", "foreach": kernel == "foreach"}
    else:
        options |= {"quantised": settings.name == "adamw_8bit" and group.role == "matrices"}
    return options


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group to ``lr`` times its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


# --- Who belongs where ------------------------------------------------------------------------------------------------


def _role(name: str, param: nn.Parameter, settings: OptimizerSettings, *, island: bool, embedding: bool) -> Role:
    if island:
        return "fp32 islands"
    leaf = name.rpartition(".")[2]
    if param.ndim < 2 or leaf == "bias" or leaf.endswith("_bias"):
        return "no decay"
    if any(matches_components(name, pattern) for pattern in settings.no_decay):
        return "no decay"
    return "embeddings" if embedding else "matrices"


def _embedding_ids(model: nn.Module) -> set[int]:
    """The parameters that look a token up or score it: one vector per token, no map between hidden states."""
    found = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        found |= {id(param) for param in head.parameters()}
    return found | {
        id(p) for name, p in model.named_parameters() if matches_components(canonical_name(name), "lm_head")
    }


def _refuse_silent_patterns(settings: OptimizerSettings, names: list[str]) -> None:
    silent = [
        f"optimizer.{key}: {pattern}"
        for key, patterns in (
            ("no_decay", settings.no_decay),
            ("lr_scale", tuple(settings.lr_scale)),
            ("allow_missing_gradients", settings.allow_missing_gradients),
        )
        for pattern in patterns
        if not any(matches_components(name, pattern) for name in names)
    ]
    if silent:
        raise OptimizerError(
            "patterns of the optimizer match no trainable parameter.\n"
            "expected: a run of whole components of a name, such as 'self_attn.sinks' or 'layers.*.mlp.gate'\n"
            f"got:\n{listing(silent)}\nwhere: {len(names)} trainable parameters, the first of them:\n"
            f"{listing(sorted(names), limit=4)}\nwhat to do: correct the pattern, or leave it out."
        )


def _most_common_mesh(params: Iterable[nn.Parameter]) -> DeviceMesh | None:
    count: dict[DeviceMesh, int] = {}
    for param in params:
        if isinstance(param, DTensor):
            count[param.device_mesh] = count.get(param.device_mesh, 0) + 1
    return max(count, key=lambda mesh: count[mesh], default=None)


def _mesh_label(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    return " × ".join(f"{names[i]} {size}" if names else str(size) for i, size in enumerate(mesh.shape))


def _is_bf16(param: nn.Parameter) -> bool:
    return param.dtype == torch.bfloat16
