"""What the tests of ``test_faults.py`` do inside ranks, in the order of the faults' numbers.

Each function is one case. It returns what it found (names, dtypes, texts, small tensors); the test judges.

Longer than 500 lines because it holds one case for each of some 25 faults; they share nothing but the helpers on top.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cases_parity import (
    BF16,
    LINES,
    blocks_of,
    mesh_of,
    whole_model,
    with_lora,
    with_master_weights,
)
from reference import LockstepResult, Recorder, canonical, lockstep, logits_of, token_loss
from tiny_models import (
    ModelKind,
    island_buffer_names,
    island_names,
    tiny_batch,
    tiny_transformers,
    transformers_config,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_fsdp import (
    Dsv4FsdpError,
    ShardingError,
    fully_shard,
    materialize,
    parallelize,
    precision_table,
    probe_gradients,
    read_back,
    refuse_uninitialized,
    tie_compressors,
)
from dsv4_fsdp.checkpoint_headers import fp32_names, header_dtypes
from dsv4_fsdp.torch_private import parameter_groups

BF, FP = torch.bfloat16, torch.float32
FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


# --- Helpers ---------------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    """Square weights, used one after the other, each in the dtype in which it is found: ``computed_in`` says which."""

    def __init__(self, **dtypes: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, dtype in dtypes.items():
            value = torch.randn(6, 6, generator=generator)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))
        self.computed_in: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        for name, weight in self.named_parameters():
            self.computed_in[name] = weight.dtype
            x = x + F.linear(x.to(weight.dtype), weight).float()
        return x


def exact_input(seed: int = 0) -> torch.Tensor:
    """An fp32 input that bf16 holds exactly, so that no cast of it can change a result."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by canonical name (the harness's own notion of it)."""
    return {canonical(name): tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def changed(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """What in ``model`` is not bit for bit, and in the dtype, as expected."""
    found = tensors_of(model)
    assert found.keys() == expected.keys()
    return [
        f"{name}: {expected[name].dtype} to {tensor.dtype}"
        for name, tensor in found.items()
        if not same_bits(full(tensor), expected[name])
    ]


class Watch:
    """Looks at each parameter at the moment at which the module that owns it starts its forward.

    ``dtypes`` has the dtypes in which it was then; ``times`` how often; ``altered`` the names of those whose value was
    not the one in ``values``.
    """

    def __init__(self, model: nn.Module, values: Mapping[str, torch.Tensor] | None = None) -> None:
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.times: Counter[str] = Counter()
        self.altered: set[str] = set()
        self._values = values or {}
        for module_name, module in model.named_modules():
            if module._parameters:
                module.register_forward_pre_hook(functools.partial(self._look, canonical(f"{module_name}.")))

    def _look(self, prefix: str, module: nn.Module, args: Any) -> None:
        for name, param in module._parameters.items():
            if param is not None:
                fqn = prefix.removeprefix(".") + name
                self.dtypes.setdefault(fqn, set()).add(param.dtype)
                self.times[fqn] += 1
                if fqn in self._values and not same_bits(param.detach(), self._values[fqn]):
                    self.altered.add(fqn)


def error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    """``(class, message)`` of the error that ``call`` raises, if it is one of the package's own."""
    try:
        call()
    except Dsv4FsdpError as error:
        return type(error).__name__, str(error)
    return None


def step_loss(model: nn.Module, kind: ModelKind, length: int, seed: int = 0) -> torch.Tensor:
    batch = tiny_batch(kind, length, seed=seed)
    return token_loss(logits_of(model(input_ids=batch.input_ids)), batch)


# --- 1, 3, 7: which dtype each parameter of a unit gets ---------------------------------------------------------------


def unit_of(
    storage: Mapping[str, torch.dtype],
    compute: Mapping[str, torch.dtype],
    mp_policy: MixedPrecisionPolicy,
    islands: list[str],
) -> dict[str, Any]:
    """A unit over weights of ``storage``, its forward and backward against a module whose weights are ``compute``."""
    model = Weights(**storage)
    reference = Weights(**storage)
    for name, dtype in compute.items():
        reference.register_parameter(name, nn.Parameter(reference.get_parameter(name).detach().to(dtype)))
    fully_shard(model, mesh=mesh_of((2,)), mp_policy=mp_policy, fp32_params=islands)
    x = exact_input(seed=dist.get_rank())
    output, expected = model(x), reference(x)
    output.sum().backward()
    return {
        "keys": {row.fqn: (row.storage, row.compute, row.reduce) for row in read_back(model)},
        "computed_in": model.computed_in,
        "bit_equal": torch.equal(output, expected),
        "gradients_in": {name: None if p.grad is None else p.grad.dtype for name, p in model.named_parameters()},
    }


def wrap_without_a_word() -> tuple[str, str] | None:
    """bf16 and fp32 in one unit, and nothing says what the fp32 ones are: the error of the call that wraps."""
    model = Weights(weight=BF, sinks=FP)
    return error_of(lambda: fully_shard(model, mesh=mesh_of((2,)), mp_policy=BF16))


def compute_dtypes(kind: ModelKind, mp_policy: MixedPrecisionPolicy) -> tuple[dict[str, set[torch.dtype]], list[str]]:
    """In which dtypes the parameters of a model that is all fp32 in storage are inside forward; and its islands."""
    model = with_master_weights(kind)
    islands = island_names(model)
    parallelize(model, mesh_of((2,)), mp_policy=mp_policy)
    watch = Watch(model)
    step_loss(model, kind, 40)
    return watch.dtypes, islands


def read_back_of_a_gathered_model() -> bool:
    """Whether an audit reads the same while units are gathered (after a forward without backward) as before it."""
    model = with_master_weights("transformers")
    plan = parallelize(model, mesh_of((2,)), reshard_after_forward=False)
    before = read_back(model, plan)
    with torch.no_grad():
        step_loss(model, "transformers", 8)
    gathered = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert len(gathered) > 50, gathered
    return read_back(model, plan) == before


# --- 2: storage -------------------------------------------------------------------------------------------------------


def storage_changed_by_sharding(kind: ModelKind) -> dict[str, list[str]]:
    """By line of the parity tests: what differs, in dtype or in any bit, after sharding."""
    mesh = mesh_of((2,))
    found = {}
    for name, line in LINES.items():
        if kind in line.kinds and (2,) in line.meshes:
            model = line.build(kind)
            before = {n: t.clone() for n, t in tensors_of(model).items()}
            line.shard(model, mesh)
            found[name] = changed(model, before)
    return found


# --- 4: downcasts -----------------------------------------------------------------------------------------------------


def tables_after_a_step(kind: ModelKind) -> tuple[int, list[str]]:
    """How many integer tensors there are, and which of them a sharded step changed."""
    model = whole_model(kind)
    before = {name: t.clone() for name, t in tensors_of(model).items() if not t.is_floating_point()}
    parallelize(model, mesh_of((2,)))
    step_loss(model, kind, 20).backward()
    after = tensors_of(model)
    return len(before), [name for name, table in before.items() if not same_bits(full(after[name]), table)]


def wrap_with_downcast(kind: ModelKind, names: list[str], how: str) -> tuple[tuple[str, str] | None, int]:
    """The error of wrapping a model in which the named islands were cast to bf16, and the collectives until then."""
    model = whole_model(kind)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name in names:
        tensors[name].data = tensors[name].data.bfloat16()
    mesh = mesh_of((2,))

    def wrap() -> None:
        if how == "parallelize":
            parallelize(model, mesh)
        else:
            fully_shard(blocks_of(model)[-1], mesh=mesh, mp_policy=BF16)

    with Recorder() as recorder:
        error = error_of(wrap)
    return error, len(recorder.collectives)


# --- 5: another library version ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_class_lists(model: nn.Module) -> Iterator[None]:
    """Within the context Transformers' DeepSeek-V4, and ``model``, list no fp32 parameters, as an old version might."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4PreTrainedModel as Owner

    known = Owner._keep_in_fp32_modules_strict
    Owner._keep_in_fp32_modules_strict = None
    for module in model.modules():
        if hasattr(module, "_keep_in_fp32_modules_strict"):
            module._keep_in_fp32_modules_strict = None
    try:
        yield
    finally:
        Owner._keep_in_fp32_modules_strict = known


def save_as_transformers(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    """``save_pretrained`` under Transformers' own names."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder, state_dict=state, save_original_format=False)


def load_and_save_with_an_old_list(source: Path, target: Path) -> dict[str, Any]:
    """Load a checkpoint into a model whose class lists nothing, shard by the checkpoint's own dtypes, save both ways.

    Returns the islands of the plan, the fp32 names seen in forward, and what differs from the source in the files
    written: by ``save_pretrained`` of the gathered state, and by DCP of the sharded one.
    """
    from safetensors.torch import load_file

    stored = load_file(source / "model.safetensors")
    model = whole_model("transformers", seed=5)
    with without_class_lists(model):
        model.load_state_dict(stored, assign=True)
        plan = parallelize(model, mesh_of((2,)), fp32_params=fp32_names(source))
        watch = Watch(model, stored)
        step_loss(model, "transformers", 40)

        state = get_model_state_dict(model, options=FULL_STATE)
        if dist.get_rank() == 0:
            save_as_transformers(model, state, target / "transformers")
        dist.barrier()
        dcp.save(get_model_state_dict(model), checkpoint_id=target / "dcp")
    dcp_dtypes = dtypes_in_dcp(target / "dcp")
    saved = load_file(target / "transformers" / "model.safetensors")
    return {
        "islands": {p.fqn for unit in plan.units for group in unit.groups for p in group.params if p.island},
        "computed_in_fp32": {name for name, dtypes in watch.dtypes.items() if dtypes == {FP}},
        "altered": watch.altered,
        "transformers": [
            n for n in stored.keys() | saved.keys() if n not in saved or not same_bits(saved[n], stored[n])
        ],
        "headers": header_dtypes(target / "transformers") == header_dtypes(source),
        "dcp": [
            n for n in stored.keys() | dcp_dtypes.keys() if n not in stored or dcp_dtypes.get(n) != stored[n].dtype
        ],
    }


def dtypes_in_dcp(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor in a DCP checkpoint, from its metadata."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {name: entry.properties.dtype for name, entry in metadata.state_dict_metadata.items()}


# --- 6: fp32 after build, inside forward, after load, after save ------------------------------------------------------


def fp32_all_along(kind: ModelKind, folder: Path) -> dict[str, list[str]]:
    """Islands that are not fp32, or not bit for bit their source's, at each station of a run with recomputation."""
    source = whole_model(kind)
    expected = {n: t.clone() for n, t in tensors_of(source).items()}
    islands = [*island_names(source), *island_buffer_names(source)]
    wanted = {name: expected[name] for name in islands}
    assert all(t.dtype == FP and not torch.equal(t, t.bfloat16().float()) for t in wanted.values())

    def wrong(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [name for name in islands if not same_bits(full(tensors[name]), wanted[name])]

    # Other values at first, so that "after load" cannot pass without a load.
    model = whole_model(kind, seed=1)
    found = {"built": [n for n, t in tensors_of(model).items() if n in wanted and t.dtype != FP]}
    parallelize(model, mesh_of((2,)), activation_checkpointing=True)
    state = source.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    found["loaded"] = wrong(tensors_of(model))

    watch = Watch(model, expected)
    step_loss(model, kind, 40).backward()
    params = [name for name in islands if name in dict(source.named_parameters())]
    found["computed"] = [n for n in params if watch.dtypes[n] != {FP} or n in watch.altered]
    # Blocks run twice, in forward and recomputation; both were looked at.
    found["looked_at_once"] = [n for n in params if ".layers." in n and watch.times[n] < 2]
    found["gradients"] = [
        n for n, p in model.named_parameters() if canonical(n) in wanted and p.grad is not None and p.grad.dtype != FP
    ]

    whole = get_model_state_dict(model, options=FULL_STATE)
    if dist.get_rank() == 0:
        found["gathered"] = [n for n in islands if not same_bits(whole[n], wanted[n])]
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    in_files = dtypes_in_dcp(folder)
    found["saved"] = [name for name in islands if in_files[name] != FP]
    fresh = whole_model(kind, seed=2)
    parallelize(fresh, mesh_of((2,)))
    reloaded = get_model_state_dict(fresh)
    dcp.load(reloaded, checkpoint_id=folder)
    set_model_state_dict(fresh, reloaded)
    found["reloaded"] = wrong(tensors_of(fresh))
    return found


# --- 8: restoring -----------------------------------------------------------------------------------------------------


def restored(how: str) -> dict[str, Any]:
    """Restore a model that was cast to bf16 whole; read dtypes again, from the module and inside forward."""
    model = whole_model("transformers")
    islands, island_buffers = island_names(model), island_buffer_names(model)
    model.to(BF)
    mesh = mesh_of((2,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "parallelize":
            parallelize(model, mesh, restore_fp32=True)
        else:
            for block in blocks_of(model):
                fully_shard(block, mesh=mesh, mp_policy=BF16, restore_fp32=True)
            # The root has islands of its own: the last norm and the hyper-connection head.
            fully_shard(model, mesh=mesh, mp_policy=BF16, restore_fp32=True)
    watch = Watch(model)
    loss = step_loss(model, "transformers", 40)
    loss.backward()
    now = tensors_of(model)
    return {
        "said": any("do not come back" in str(w.message) for w in caught),
        "stored": {name for name in islands if now[name].dtype == FP},
        "buffers": {name for name in island_buffers if now[name].dtype == FP},
        "computed": {name for name in islands if watch.dtypes[name] == {FP}},
        "islands": set(islands),
        "island_buffers": set(island_buffers),
        "others": {t.dtype for n, t in now.items() if n not in islands and t.dim() > 1 and t.is_floating_point()},
        "loss": loss.item(),
    }


# --- 9: what reaches a unit -------------------------------------------------------------------------------------------


class Receiver(nn.Module):
    """Keeps what its forward was given."""

    def __init__(self, *, island: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).to(BF))
        if island:
            self.island = nn.Parameter(torch.randn(6))
        self.received: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.received = args, kwargs
        return F.linear(args[0].to(self.weight.dtype), self.weight) * getattr(self, "island", 1.0)


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block of DeepSeek-V4 gets: a residual, RoPE tables, masks, ids; in args and kwargs, nested."""
    generator = torch.Generator().manual_seed(2)
    residual, cos, sin, narrow = (torch.randn(5, 6, generator=generator) for _ in range(4))
    positions = torch.arange(2**24, 2**24 + 5)  # an odd one among these does not survive fp32
    int_mask = torch.tensor([[1, 0, 257, 3, 1]], dtype=torch.int32)
    bool_mask = torch.tensor([True, False, True])
    args = (residual, (cos, [sin, bool_mask]), int_mask)
    kwargs = {"rope": {"main": (cos, sin), "compress": {"cos": cos}}, "mask": int_mask, "keep": bool_mask}
    return args, kwargs | {"positions": positions, "narrow": narrow.bfloat16(), "flag": True, "none": None}


def received_by(*, island: bool, ours: bool) -> tuple[list[torch.dtype], list[str], bool]:
    """(dtypes of the tensors that arrived, which differ in a bit, whether the structure is the one that was sent)."""
    model = Receiver(island=island)
    function: Callable[..., Any] = fully_shard if ours else torch_fully_shard
    kwargs: dict[str, Any] = {"fp32_params": ["island"] if island else []} if ours else {}
    function(model, mesh=mesh_of((2,)), mp_policy=BF16, **kwargs)
    sent = arguments()
    model(*sent[0], **sent[1])
    sent_leaves, sent_spec = pytree.tree_flatten_with_path(sent)
    leaves, spec = pytree.tree_flatten_with_path(model.received)
    pairs = list(zip(sent_leaves, leaves, strict=True))
    tensors = [(path, a, b) for (path, a), (_, b) in pairs if isinstance(a, torch.Tensor)]
    return (
        [b.dtype for _, _, b in tensors],
        [pytree.keystr(path) for path, a, b in tensors if not same_bits(a, b)],
        spec == sent_spec and all(a is b for (_, a), (_, b) in pairs if not isinstance(a, torch.Tensor)),
    )


# --- 10: small steps --------------------------------------------------------------------------------------------------


def moves_at_small_lr(storage: torch.dtype) -> tuple[bool, torch.dtype, set[torch.dtype]]:
    """Ten AdamW steps at 1e-5 from a weight of 1: (did it move, compute dtype, dtypes of the moments)."""
    model = Weights(weight=storage)
    with torch.no_grad():
        model.get_parameter("weight").fill_(1.0)
    fully_shard(model, mesh=mesh_of((2,)), mp_policy=BF16, fp32_params=[])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(10):
        model(exact_input()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.get_parameter("weight")
    moments = {t.dtype for t in optimizer.state[weight].values() if t.dim() > 0}
    return bool((full(weight.detach()) != 1.0).any()), model.computed_in["weight"], moments


# --- 11: from the meta device -----------------------------------------------------------------------------------------


def on_meta(**over: Any) -> nn.Module:
    """Transformers' tiny model built on the meta device, its tied weights tied."""
    from transformers import DeepseekV4ForCausalLM

    config = transformers_config(**over)
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM._from_config(
            config, dtype=BF, attn_implementation="eager", experts_implementation="eager"
        )
    return model.train()


def rope_tables_after_meta(*, forget_on_rank: int | None) -> tuple[int, list[str], tuple[str, str] | None]:
    """(how many RoPE tables there are, which differ from those of a model built on the CPU, the final sweep's word)."""
    source = whole_model("transformers")
    model = on_meta()
    parallelize(model, mesh_of((2,)))
    if dist.get_rank() == forget_on_rank:
        model._init_weights = lambda module: None
    materialize(model, "cpu")
    mine = dict(model.named_buffers())
    tables = {name: table for name, table in source.named_buffers() if name.endswith("inv_freq")}
    differ = [name for name, table in tables.items() if not same_bits(mine[name], table)]
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    return len(tables), differ, error_of(lambda: refuse_uninitialized(model))


class Tables(nn.Module):
    """One of each kind of tensor that a model can have; ``short`` has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3, dtype=BF))
        self.island = nn.Parameter(torch.empty(3))
        self.short = nn.Parameter(torch.empty(1))
        self.ids = nn.Parameter(torch.empty(5, 2, dtype=torch.int64), requires_grad=False)
        self.register_buffer("bias", torch.empty(4))
        self.register_buffer("table", torch.empty(4, dtype=torch.int64))
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)


def sweep_after_forgetting(name: str | None, rank: int, *, value: float | None = None) -> tuple[str, str] | None:
    """Load every tensor of ``Tables`` but one on one rank (or give it ``value`` there): what the sweep says here."""
    with torch.device("meta"):
        model = Tables()
    fully_shard(model, mesh=mesh_of((2,)), mp_policy=BF16, fp32_params=["island"])
    materialize(model, "cpu")
    for fqn, tensor in tensors_of(model).items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if fqn != name or dist.get_rank() != rank:
            local.fill_(0)  # the commonest value of all is no sign of a tensor that was forgotten
        elif value is not None and local.numel():
            local.flatten()[0] = value
    return error_of(lambda: refuse_uninitialized(model))


# --- 13: tied embeddings ----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding and a head over the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def tied_in_two_units(*, old_torch: bool, stock: bool) -> tuple[str, str] | None:
    """The error of wrapping the second owner; ``old_torch``: without the mark that torch >= 2.13 leaves."""
    model, mesh = Tied(), mesh_of((2,))
    shared = model.head.weight
    (torch_fully_shard if stock else fully_shard)(model.embedding, mesh=mesh, mp_policy=BF16)
    if old_torch and hasattr(shared, "_fsdp_orig_uid"):
        del shared._fsdp_orig_uid
    return error_of(lambda: fully_shard(model.head, mesh=mesh, mp_policy=BF16))


def tied_in_one_unit() -> tuple[bool, int, int]:
    """Both owners as a list unit: (one parameter object after a step, its parameters, parameters in its groups)."""
    model = Tied()
    fully_shard([model.embedding, model.head], mesh=mesh_of((2,)), mp_policy=BF16)
    fully_shard(model, mesh=mesh_of((2,)), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.arange(8)).float().logsumexp(-1).sum().backward()
    optimizer.step()
    in_groups = sum(len(group.fsdp_params) for _, group in parameter_groups(model))
    return model.head.weight is model.embedding.weight, len(list(model.parameters())), in_groups


def tied_from_meta() -> dict[str, Any]:
    """Meta, shard, materialize, load, train a step: is the pair still one parameter, in model and optimizer?"""
    source = whole_model("transformers", tie_word_embeddings=True)
    model = on_meta(tie_word_embeddings=True)
    parallelize(model, mesh_of((2,)))
    materialize(model, "cpu")
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    refuse_uninitialized(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=True)
    with torch.no_grad():
        before = step_loss(model, "transformers", 40)
        expected = step_loss(source, "transformers", 40)
    step_loss(model, "transformers", 40).backward()
    optimizer.step()

    head, embedding = model.get_parameter("lm_head.weight"), model.get_parameter("model.embed_tokens.weight")
    _, optimizer_state = get_state_dict(model, optimizer, options=FULL_STATE)
    return {
        "loss_equal": torch.equal(before, expected),
        "one_object": head is embedding,
        "moved": not torch.equal(full(head.detach()), source.get_parameter("lm_head.weight")),
        "optimizer_entries": [n for n in optimizer_state.get("state", {}) if "lm_head" in n or "embed_tokens" in n],
        "in_optimizer": sum(p is head for group in optimizer.param_groups for p in group["params"]),
    }


def export_tied(folder: Path) -> tuple[list[str], list[str], bool] | None:
    """The names of the pair in an export, what stock Transformers says on loading it, and whether it ties them."""
    from transformers import DeepseekV4ForCausalLM

    from dsv4_fsdp.train.export import write_checkpoint
    from dsv4_fsdp.train.tiny_model import byte_tokenizer

    model = whole_model("transformers", tie_word_embeddings=True)
    parallelize(model, mesh_of((2,)))
    state = get_model_state_dict(model, options=FULL_STATE)
    if dist.get_rank() > 0:
        return None
    with contextlib.redirect_stderr(io.StringIO()):
        write_checkpoint(model, state, folder, tokenizer=byte_tokenizer())
        again, problems = DeepseekV4ForCausalLM.from_pretrained(folder, output_loading_info=True)
    names = [name for name in header_dtypes(folder) if name in ("lm_head.weight", "model.embed_tokens.weight")]
    return (
        names,
        [kind for kind, found in problems.items() if found],
        again.lm_head.weight is again.model.embed_tokens.weight,
    )


def tied_pair_of_two_dtypes(*, grouped: bool) -> tuple[str, str] | None:
    """A tied pair of which the caller wants the head alone in fp32."""
    if grouped:
        model = Tied()
        return error_of(lambda: fully_shard(model, mesh=mesh_of((2,)), mp_policy=BF16, fp32_params=["head"]))
    whole = whole_model("transformers", tie_word_embeddings=True, dtype=FP)
    return error_of(lambda: parallelize(whole, mesh_of((2,)), fp32_params=["lm_head"]))


# --- 18, 19: ranks that differ ----------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """A weight that every forward uses, and one that only some use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.randn(6, 6).to(BF))
        self.sometimes = nn.Parameter(torch.randn(4, 6).to(BF))
        self.island = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor, *, skip: bool) -> torch.Tensor:
        x = F.linear(x.to(BF), self.always).float() * self.island
        return x if skip else x + F.linear(F.linear(x.to(BF), self.sometimes), self.sometimes.T)


def skipping_unit(mesh_shape: tuple[int, ...]) -> nn.Module:
    model = Skipping()
    fully_shard(model, mesh=mesh_of(mesh_shape), mp_policy=BF16, fp32_params=["island"])
    return model


def probed_backward(mesh_shape: tuple[int, ...], skip_on_ranks: Iterable[int]) -> dict[str, Any]:
    """A backward under the probe in which some ranks skip a weight: the error; and what is left of the probe."""
    model = skipping_unit(mesh_shape)
    loss = model(exact_input(), skip=dist.get_rank() in skip_on_ranks).sum()

    def probe() -> None:
        with probe_gradients(model):
            loss.backward()

    error = error_of(probe)
    left = ["post_backward" in vars(group) for _, group in parameter_groups(model)]
    return {
        "error": error,
        "left": any(left),
        "gradients": [n for n, p in model.named_parameters() if p.grad is not None],
    }


class SkippingUnits(nn.Module):
    """Three units; the output of the second is used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, *, skip: bool) -> torch.Tensor:
        x = self.first(x)
        y = self.second(x)
        return self.third(x if skip else x + y)


def probed_backward_of_units() -> tuple[str, str] | None:
    """The same where rank 1 uses nothing of what a whole unit returns."""
    model, mesh = SkippingUnits(), mesh_of((2,))
    for module in model.children():
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(exact_input(), skip=dist.get_rank() == 1).sum()

    def probe() -> None:
        with probe_gradients(model):
            loss.backward()

    return error_of(probe)


def collectives_around_the_probe() -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Collectives of the real model's backward before, under and after the probe, on ranks of which one is short."""
    model = whole_model("transformers")
    parallelize(model, mesh_of((2,)))
    counts = []
    for probed in (False, True, False):
        loss = step_loss(model, "transformers", 40 if dist.get_rank() == 0 else 3)
        with Recorder() as recorder, probe_gradients(model) if probed else contextlib.nullcontext():
            loss.backward()
        counts.append(Counter(collective.kind for collective in recorder.collectives))
    return counts[0], counts[1], counts[2]


def collectives_of_a_short_and_a_long_rank(kind: ModelKind) -> list[Any]:
    """Everything that one step with a backward sends, in order; rank 0 has windows and rank 1 none of any kind."""
    model = whole_model(kind)
    parallelize(model, mesh_of((2,)))
    with Recorder() as recorder:
        step_loss(model, kind, 130 if dist.get_rank() == 0 else 3).backward()
    return recorder.collectives


def one_micro_batch_without_a_window(sync: str, lengths: tuple[tuple[int, int], tuple[int, int]]) -> LockstepResult:
    """Two micro-batches of ``lengths[rank]`` tokens; HCA windows of 8 tokens, one HCA block."""
    mesh = mesh_of((2,))
    rank = dist.get_rank()
    return lockstep(
        functools.partial(tiny_transformers, ("heavily_compressed_attention",), hca_window=8),
        lambda model: parallelize(model, mesh),
        [tiny_batch("transformers", length, seed=3 * rank + i) for i, length in enumerate(lengths[rank])],
        accumulate=2,
        sync=sync,
        optimizer="sgd",
        lr=1e-2,
    )


def gradient_dtypes_after_accumulation(sync: str) -> dict[str, set[torch.dtype]]:
    """The dtypes in which gradients are held, by storage, after two micro-batches; rank 1 has no window in either."""
    model = tiny_transformers(("heavily_compressed_attention",), hca_window=8)
    parallelize(model, mesh_of((2,)))
    for index, length in enumerate((9, 4) if dist.get_rank() == 0 else (4, 4)):
        model.set_requires_gradient_sync(sync == "every" or index == 1)
        step_loss(model, "transformers", length).backward()
    found: dict[str, set[torch.dtype]] = {}
    for param in model.parameters():
        if param.grad is not None:
            found.setdefault(str(param.dtype), set()).add(param.grad.dtype)
    return found


def trainable_without_gradient(kind: ModelKind) -> tuple[list[str], list[str]]:
    """Trainable parameters that a step with every kind of window leaves with no gradient, or with an all-zero one."""
    model = whole_model(kind)
    plan = parallelize(model, mesh_of((2,)))
    step_loss(model, kind, 140, seed=dist.get_rank()).backward()
    trainable = {canonical(name): param for name, param in model.named_parameters() if param.requires_grad}
    untrained = [name for name, param in trainable.items() if param.grad is None or not full(param.grad).any()]
    return untrained, [name for name in plan.frozen_fqns if name in trainable]


# --- 20: empty shards -------------------------------------------------------------------------------------------------


def small_windows(seed: int = 0) -> nn.Module:
    """Compress rates of 2 and 3, so position biases of 2 and 3 rows; hyper-connection scales of shape (3,) and (1,)."""
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}
    return tiny_transformers(tuple(rates), compress_rates=rates, seed=seed)


def trainable_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def live_with_empty_shards(folder: Path) -> dict[str, Any]:
    """Clip, step, save; load into a fresh model and go on, on ranks of which some hold nothing of some parameters."""
    mesh = mesh_of((4,))
    reference, model = small_windows(), small_windows()
    keys = list(reference.state_dict())
    parallelize(model, mesh)
    empty = {n: tuple(p.shape) for n, p in model.named_parameters() if p.to_local().numel() == 0}
    optimizer = torch.optim.AdamW(trainable_of(model), lr=1e-3, foreach=True)

    # Every rank has the same batch, so one reference is all ranks' mean.
    step_loss(model, "transformers", 12).backward()
    step_loss(reference, "transformers", 12).backward()
    for name, param in reference.named_parameters():
        param.requires_grad_(model.get_parameter(name).requires_grad)  # the indexer is frozen
    norm = full(torch.nn.utils.clip_grad_norm_(trainable_of(model), 0.5)).item()
    exact = torch.stack([p.grad.double().norm() for p in trainable_of(reference) if p.grad is not None]).norm().item()
    clipped = torch.stack([full(p.grad).double().norm() for p in trainable_of(model)]).norm().item()
    optimizer.step()
    optimizer.zero_grad()

    save_training(model, optimizer, folder)
    fresh = small_windows(seed=1)
    parallelize(fresh, mesh)
    fresh_optimizer = torch.optim.AdamW(trainable_of(fresh), lr=1e-3, foreach=True)
    load_training(fresh, fresh_optimizer, folder)
    return {
        "empty": empty,
        "norm": (norm, exact, clipped),
        "keys_equal": list(get_model_state_dict(model)) == keys and list(model.state_dict()) == keys,
        "moments": moments_differ(model, optimizer, fresh, fresh_optimizer),
        "next": [torch.equal(a, b) for a, b in next_losses((model, optimizer), (fresh, fresh_optimizer))],
        "parameters": changed(fresh, {n: full(t) for n, t in tensors_of(model).items()}),
    }


def save_training(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Model and optimizer as DCP saves them, through its getters."""
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_training(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """The reverse, into a model and an optimizer that were just made."""
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)


def moments_differ(
    model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, other_optimizer: torch.optim.Optimizer
) -> list[str]:
    """Trainable parameters whose Adam state is missing, zero throughout, or not the other's bit for bit."""
    wrong = []
    others = dict(other.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            mine, theirs = optimizer.state[param], other_optimizer.state[others[name]]
            for key in ("step", "exp_avg", "exp_avg_sq"):
                a, b = full(mine[key]), full(theirs[key])
                if not same_bits(a, b) or not a.any():
                    wrong.append(f"{name}: {key}")
    return wrong


def next_losses(*runs: tuple[nn.Module, torch.optim.Optimizer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Losses of the next two steps of both runs, in pairs."""
    pairs = []
    for length in (13, 14):
        losses = []
        for model, optimizer in runs:
            loss = step_loss(model, "transformers", length, seed=dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        pairs.append((losses[0], losses[1]))
    return pairs


# --- 26 to 29: wrappers and adapters ----------------------------------------------------------------------------------

WRAPPER_WORDS = ("_checkpoint_wrapped_module", "_orig_mod", "base_model.model.", "base_layer", "_fsdp_wrapped_module")


def with_peft_model() -> nn.Module:
    """The tiny model inside peft's own ``PeftModel``: its names start with ``base_model.model.``."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_b_proj", "o_b_proj"], exclude_modules=r".*indexer.*")
    return get_peft_model(whole_model("transformers"), config)


def names_through_wrappers(wrapped_in: str) -> dict[str, Any]:
    """Every place that names parameters, of a model that is checkpointed and maybe wrapped by peft."""
    build = {"nothing": functools.partial(whole_model, "transformers"), "PeftModel": with_peft_model}[wrapped_in]
    unsharded, model = build(), build()
    plan = parallelize(model, mesh_of((2,)), activation_checkpointing=True)
    rows = read_back(model, plan)
    loss = step_loss(model, "transformers", 40)
    loss.backward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.grad is not None], foreach=True)
    optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer, options=FULL_STATE)
    planned = [p.fqn for unit in plan.units for group in unit.groups for p in group.params]
    ours = [*planned, *(unit.fqn for unit in plan.units), *(row.fqn for row in rows), *plan.frozen_fqns]
    words = [text for text in (*ours, plan.table(), precision_table(rows)) if any(w in text for w in WRAPPER_WORDS)]
    return {
        "wrapper_words": words,
        "base_names": {n for n in planned if "lora_" not in n},
        "state_keys": list(model.state_dict()) == list(unsharded.state_dict()),
        "gathered_keys": dist.get_rank() != 0 or list(state) == list(unsharded.state_dict()),
        "optimizer_words": [n for n in optimizer_state.get("state", {}) if "_checkpoint_wrapped_module" in n],
        "blocks": [unit.fqn for unit in plan.units if unit.role == "block"],
        "recomputed": sum("_checkpoint_wrapped_module" in name for name, _ in model.named_modules()) > 0,
    }


GroupContents = Counter[tuple[torch.dtype, torch.dtype, bool]]


def adapter_groups(kind: ModelKind, *, computed_in_fp32: bool) -> list[list[GroupContents]]:
    """By block and live group: how many parameters there are of each (storage, compute, whether an adapter's)."""
    model = with_lora(kind)
    parallelize(model, mesh_of((2,)), fp32_params=["lora_A", "lora_B"] if computed_in_fp32 else ())
    step_loss(model, kind, 20).backward()
    adapters = {id(p) for name, p in model.named_parameters() if "lora_" in name}
    assert all(p.grad is not None for p in model.parameters() if id(p) in adapters)
    blocks: dict[str, list[GroupContents]] = {}
    for name, group in parameter_groups(model):
        if ".layers." in name:
            contents = Counter(
                (p.sharded_param.dtype, p.unsharded_param.dtype, id(p.sharded_param) in adapters)
                for p in group.fsdp_params
            )
            blocks.setdefault(name, []).append(contents)
    return list(blocks.values())


def frozen_fp32_base(*, train: str) -> tuple[torch.Tensor, dict[str, set[torch.dtype]], torch.Tensor]:
    """(logits, compute dtypes, logits of the bf16 model) of a base stored in fp32 of which almost all is frozen."""
    model = with_master_weights("transformers")
    for name, param in model.named_parameters():
        param.requires_grad_(train in name if train else False)
    reference = whole_model("transformers")
    parallelize(model, mesh_of((dist.get_world_size(),)))
    watch = Watch(model)
    batch = tiny_batch("transformers", 40)
    logits = logits_of(model(input_ids=batch.input_ids))
    if train:
        logits.float().logsumexp(-1).sum().backward()
    return logits.detach(), watch.dtypes, logits_of(reference(input_ids=batch.input_ids)).detach()


def frozen_bytes() -> dict[str, Any]:
    """Bytes of one rank's frozen parameters: as stored before, as sharded, and after a step of the adapters."""
    model = with_lora("transformers")
    ranks = dist.get_world_size()
    # A shard has as many rows as the largest one.
    bytes_of = {
        name: -(-param.shape[0] // ranks) * param.shape[1:].numel() * param.element_size()
        for name, param in model.named_parameters()
    }
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    before = {n: t.clone() for n, t in tensors_of(model).items() if n in frozen}
    plan = parallelize(model, mesh_of((ranks,)))

    def held() -> int:
        params = dict(model.named_parameters())
        return sum(params[name].to_local().untyped_storage().nbytes() for name in frozen)

    sharded = held()
    optimizer = torch.optim.AdamW(trainable_of(model), foreach=True)
    step_loss(model, "transformers", 40).backward()
    optimizer.step()
    after = tensors_of(model)
    return {
        "expected": sum(bytes_of[name] for name in frozen),
        "sharded": sharded,
        "after_step": held(),
        "expected_of_all": sum(bytes_of.values()),
        "planned": sum(group.shard_bytes for unit in plan.units for group in unit.groups),
        "changed": [n for n, t in before.items() if not same_bits(full(after[n]), t)],
        "gradients": [n for n, p in model.named_parameters() if n in frozen and p.grad is not None],
        "optimizer_params": len(optimizer.state),
        "trainable": len(trainable_of(model)),
    }


# --- 35, 36 -----------------------------------------------------------------------------------------------------------


def routes_and_flags(*, checkpointing: bool) -> dict[str, Any]:
    """The experts chosen in forward and in recomputation, and the window flags of a step that some blocks run twice."""
    model = whole_model("transformers")
    parallelize(model, mesh_of((2,)), activation_checkpointing=checkpointing)
    chosen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ in ("DeepseekV4TopKRouter", "DeepseekV4HashRouter"):
            # The output is (logits, weights, indices).
            module.register_forward_hook(
                lambda m, args, output, key=name: chosen.setdefault(canonical(key), []).append(output[2].clone())
            )
    alignment = tie_compressors(model)
    losses = [
        step_loss(model, "transformers", length, seed=dist.get_rank()) for length in (70, 33)[: 1 + checkpointing]
    ]
    flags_before_backward = alignment.window_flags()
    for loss in losses:
        loss.backward()
    # Order of runs: forward 0, forward 1, recomputation 0, recomputation 1.
    half = len(losses)
    return {
        "runs": {name: len(indices) for name, indices in chosen.items()},
        "differ": [
            name
            for name, indices in chosen.items()
            for first, again in zip(indices[:half], indices[half:], strict=checkpointing)
            if not torch.equal(first, again)
        ],
        "flags": (flags_before_backward.tolist(), alignment.window_flags().tolist()),
    }


class RefuseShardedOperands(TorchDispatchMode):
    """Raises where an operator is given a sharded tensor: a weight read outside its unit's forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            raise ShardingError(f"{func} was given a sharded tensor")
        return func(*args, **(kwargs or {}))


class ReadsItsHeadsWeight(nn.Module):
    """A chunked loss that multiplies by the head's weight itself, outside of the head's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([chunk @ self.head.weight.T for chunk in x.chunk(2)])


def operands_of_forward(kind: ModelKind | None) -> tuple[str, str] | None:
    """A forward in which no operator may see a sharded tensor; ``None``: of a module that does so."""
    mesh = mesh_of((2,))
    if kind is None:
        model: nn.Module = ReadsItsHeadsWeight()
        fully_shard(model.get_submodule("head"), mesh=mesh)
        fully_shard(model, mesh=mesh)
        forward = lambda: model(exact_input())
    else:
        model = whole_model(kind)
        parallelize(model, mesh)
        forward = lambda: step_loss(model, kind, 40)
        forward()  # the first forward of FSDP2 sets up its parameters

    def guarded() -> None:
        with RefuseShardedOperands():
            forward()

    return error_of(guarded)
