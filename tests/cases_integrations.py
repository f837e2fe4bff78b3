"""Other people's trainers, with our line in them and without; run inside ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases_collectives import EIGHT_BLOCKS
from cases_parity import batches_for
from reference import LockstepResult, lockstep
from tiny_models import VOCAB_SIZE, cpu_stand_ins, island_names, tiny_batch, tiny_nemo, tiny_transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from dsv4_fsdp import ContractError, keep_fp32_islands, read_back
from dsv4_fsdp.alignment import freeze_indexers
from dsv4_fsdp.torch_private import fsdp_state

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def unit_names(model: nn.Module) -> list[str]:
    """Every module that carries a unit's hooks; the members of a list unit each."""
    return [name for name, module in model.named_modules() if fsdp_state(module) is not None]


def watch_compute_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtype of each parameter as the forward of its own module finds it; filled by every forward from now on."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: nn.Module, args: Any) -> None:
        for own, param in module.named_parameters(recurse=False):
            seen[f"{name}.{own}"] = param.dtype

    for name, module in model.named_modules():
        # FSDP2 puts its own pre-forward hook first, so this one sees the gathered parameter.
        module.register_forward_pre_hook(functools.partial(note, name))
    return seen


def island_reduce_dtypes(model: nn.Module) -> set[torch.dtype | None]:
    """What the trainable islands' gradients are reduced in, as the parameter groups have it."""
    islands = set(island_names(model))
    return {row.reduce for row in read_back(model) if row.fqn in islands and model.get_parameter(row.fqn).requires_grad}


# --- transformers, native ---------------------------------------------------------------------------------------------


@dataclass
class ShardedResult:
    units: list[str]
    island_dtypes: set[torch.dtype]
    """What the islands were computed in."""
    trainable_indexer: list[str]
    lockstep: LockstepResult
    storage: set[str] = field(default_factory=set)
    island_reduces: set[torch.dtype | None] = field(default_factory=set)
    """What the islands' gradients are reduced in."""


def load(path: Path, dtype: str = "bfloat16", **distributed: Any) -> Any:
    """``from_pretrained``, sharded if there is anything in ``distributed``; in training mode."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    more = {"distributed_config": DistributedConfig(**distributed)} if distributed else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **EAGER, **more).train()


def native_without_the_line(path: Path, dtype: str, **distributed: Any) -> tuple[list[str], set[torch.dtype], str]:
    """Unit names, what the islands were computed in, and the error of one forward of a stock model."""
    model = load(path, dtype, **distributed)
    seen = watch_compute_dtypes(model)
    error = ""
    try:
        model(input_ids=batches_for("transformers")[0].input_ids)
    except AssertionError as caught:
        error = str(caught)
    return unit_names(model), {seen[name] for name in island_names(model) if name in seen}, error


def native_lockstep(path: Path, dtype: str, **distributed: Any) -> ShardedResult:
    """Two optimizer steps of a natively sharded model beside the unsharded one, ranks' lengths mixed."""
    with keep_fp32_islands("transformers"):
        model = load(path, dtype, **distributed)
    seen = watch_compute_dtypes(model)
    found = lockstep(
        lambda: model,
        lambda _: None,
        batches_for("transformers"),
        build_reference=lambda: load(path),
        steps=2,
        # One parameter at a time: experts and the rest are on two meshes, which one foreach kernel cannot take.
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False),
        resync=True,
    )
    return ShardedResult(
        unit_names(model),
        # A hook on the indexer's modules sees them too: frozen islands are islands.
        {seen[name] for name in island_names(model)},
        [name for name, param in model.named_parameters() if ".indexer." in name and param.requires_grad],
        found,
    )


def native_save(path: Path, out: Path, *, distributed_checkpoint: bool, **distributed: Any) -> None:
    """Load in shards, move every parameter exactly, and save by transformers' own means."""
    with keep_fp32_islands("transformers"):
        model = load(path, **distributed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)  # exact in any floating dtype
    model.save_pretrained(out, distributed_checkpoint=distributed_checkpoint)
    dist.barrier()


def native_load_and_compare(path: Path, saved: Path, **distributed: Any) -> list[str]:
    """Names of parameters that are not twice those of ``path``, or of another dtype, after loading ``saved``."""
    line = keep_fp32_islands("transformers") if distributed else contextlib.nullcontext()
    with line:
        model = load(saved, **distributed)
    wrong = []
    expected = dict(load(path).named_parameters())
    for name, param in model.named_parameters():
        value = param.full_tensor() if distributed else param
        if value.dtype != expected[name].dtype or not torch.equal(value, expected[name] * 2):
            wrong.append(name)
    return wrong


def native_patch_after_a_crash(path: Path) -> list[bool]:
    """Whether transformers' two names are its own again after sharding crashed while both were replaced."""
    import transformers.distributed.fsdp as fsdp
    import transformers.distributed.mixin as mixin

    names = lambda: (mixin.apply_fully_sharded_data_parallelism, fsdp.fully_shard)
    before, during = names(), []

    def crash(*args: Any, **kwargs: Any) -> None:
        during.extend(names())
        raise KeyError("crash")

    with contextlib.suppress(KeyError), mock.patch("dsv4_fsdp.grouped_unit.fully_shard", crash):
        with keep_fp32_islands("transformers"):
            load(path, fsdp_size=2)
    assert all(old is not new for old, new in zip(before, during, strict=True))
    return [old is new for old, new in zip(before, names(), strict=True)]


def mixers_under_trainer(path: Path, folder: Path, *, bf16: bool) -> set[torch.dtype]:
    """What dtype the mixers' matrix product has while the Trainer trains a natively sharded model."""
    from transformers import Trainer, TrainingArguments

    with keep_fp32_islands("transformers"):
        model = load(path, fsdp_size=2)
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=bf16,
        per_device_train_batch_size=1,
        max_steps=1,
        save_strategy="no",  # the Trainer of 5.24.0 resumes no model that was sharded when it was loaded
        report_to=[],
        disable_tqdm=True,
    )
    texts = [tiny_batch("transformers", 40, seed=i).input_ids[0] for i in range(2)]
    trainer = Trainer(model, args, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
    width = model.get_parameter("model.layers.0.attn_hc.fn").shape[0]
    linear, seen = torch.nn.functional.linear, set()

    def watched(*args: Any) -> torch.Tensor:
        out = linear(*args)
        if out.shape[-1] == width:  # of no other matrix in this model
            seen.add(out.dtype)
        return out

    with mock.patch("torch.nn.functional.linear", watched):
        trainer.train()
    return seen


# --- NeMo AutoModel ---------------------------------------------------------------------------------------------------


def shard_with_nemo(model: Any, driver: str) -> None:
    """By NeMo AutoModel's own parallelizer of DeepSeek-V4, over all ranks.

    ``driver`` is ``"fsdp2"`` (what its recipes do without expert parallelism) or ``"moe"`` (what they do with it, here
    on a mesh without an expert axis).
    """
    from nemo_automodel.components.models.deepseek_v4.parallelization import PARALLELIZER

    num_ranks = dist.get_world_size()
    freeze_indexers(model)  # NeMo's infrastructure does so too
    if driver == "moe":
        from nemo_automodel.components.moe.parallelizer import apply_fsdp

        apply_fsdp(
            model,
            init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",)),
            ep_enabled=False,
            ep_shard_enabled=False,
            reshard_after_forward=True,
            model_parallelizer=PARALLELIZER,
        )
        return
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.mesh import MeshContext
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

    mesh = init_device_mesh(
        "cpu", (1, 1, num_ranks, 1, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp")
    )
    # NeMo makes these three views when it builds its mesh.
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
    with mock.patch.object(type(model), "parallelizer", PARALLELIZER, create=True):
        parallelize_model(model, MeshContext(device_mesh=mesh, strategy_config=FSDP2Config()))


def nemo_lockstep(driver: str, units: str, *, eight_blocks: bool) -> LockstepResult:
    """One recorded step of eight blocks at 256 tokens, or of four blocks with ranks' lengths mixed.

    ``units`` is what ``install`` is given, or ``"stock"``.
    """
    cpu_stand_ins()
    import dsv4_fsdp.integrations.nemo

    def shard(model: nn.Module) -> None:
        if units != "stock":
            dsv4_fsdp.integrations.nemo.install(units)  # type: ignore[arg-type]
        try:
            shard_with_nemo(model, driver)
        finally:
            dsv4_fsdp.integrations.nemo.uninstall()

    build = functools.partial(tiny_nemo, compress_ratios=EIGHT_BLOCKS) if eight_blocks else tiny_nemo
    batches = [tiny_batch("nemo", 256, seed=dist.get_rank())] if eight_blocks else batches_for("nemo")
    return lockstep(build, shard, batches, record=True)


# --- accelerate and Trainer -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def accelerate_takes_cpu_for_fsdp() -> Iterator[None]:
    """accelerate 1.15.0 shards on no CPU: ``AcceleratorState`` ignores an FSDP plugin if the backend is ``MULTI_CPU``.

    Within the context it does there what it does on every accelerator. All that comes after is accelerate's own code.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    def reset() -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._reset_state()

    reset()  # they are singletons of the process, which the next case shares
    try:
        with mock.patch.object(AcceleratorState, "__init__", init):
            yield
    finally:
        reset()


def prepare(model: nn.Module, *, line: bool, upcast: bool = True, low_memory: bool = False) -> None:
    """``Accelerator.prepare`` with a bf16 FSDP2 plugin that wraps blocks, inside ``keep_fp32_islands`` if ``line``."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=low_memory
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with keep_fp32_islands("accelerate", accelerate_upcast=upcast) if line else contextlib.nullcontext():
        prepared, _ = accelerator.prepare(model, optimizer)
    assert prepared is model


def accelerate_lockstep(*, line: bool, upcast: bool = True) -> ShardedResult:
    """Steps of a model that accelerate prepared beside the unsharded bf16 model."""
    kept: list[Any] = []

    def shard(model: nn.Module) -> None:
        prepare(model, line=line, upcast=upcast)
        kept.extend((model, watch_compute_dtypes(model)))

    with accelerate_takes_cpu_for_fsdp():
        # Without the line nothing ties the compressors, so all ranks get whole windows.
        batches = batches_for("transformers") if line else [tiny_batch("transformers", 40, seed=dist.get_rank())]
        found = lockstep(tiny_transformers, shard, batches, steps=len(batches))
    model, seen = kept
    return ShardedResult(
        unit_names(model),
        {seen[name] for name in island_names(model)},
        [name for name, param in model.named_parameters() if ".indexer." in name and param.requires_grad],
        found,
        {str(param.dtype) for name, param in model.named_parameters() if ".indexer." not in name},
        island_reduce_dtypes(model),
    )


def accelerate_low_memory() -> str:
    """The error of stock accelerate with ``cpu_ram_efficient_loading``."""
    with accelerate_takes_cpu_for_fsdp():
        try:
            prepare(tiny_transformers(), line=False, low_memory=True)
        except AttributeError as error:
            return str(error)
    return ""


def accelerate_lost_bits() -> str:
    """The error on a model one of whose islands was cast to bf16."""
    model = tiny_transformers()
    island = model.get_parameter("model.layers.0.attn_hc.fn")
    island.data = island.data.bfloat16()
    with accelerate_takes_cpu_for_fsdp():
        try:
            prepare(model, line=True)
        except ContractError as error:
            return str(error)
    return ""


def train_with_trainer(folder: Path, *, resume: bool, upcast: bool = True) -> dict[str, Any]:
    """Four steps of transformers' ``Trainer`` over FSDP2, checkpoint after two; or the last two, resumed from there."""
    from transformers import Trainer, TrainingArguments

    with accelerate_takes_cpu_for_fsdp():
        args = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            bf16=True,
            fsdp=True,
            fsdp_config={
                "fsdp_version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "state_dict_type": "SHARDED_STATE_DICT",
                "cpu_ram_efficient_loading": False,
            },
            per_device_train_batch_size=1,
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            report_to=[],
            disable_tqdm=True,
        )
        texts = [
            tiny_batch("transformers", length, seed=i).input_ids[0] for i, length in enumerate((70, 20, 33, 3) * 2)
        ]
        trainer = Trainer(tiny_transformers(), args, train_dataset=[{"input_ids": t, "labels": t} for t in texts])
        with keep_fp32_islands("accelerate", accelerate_upcast=upcast):
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        model = trainer.model
        seen = watch_compute_dtypes(model)
        model(input_ids=texts[0][None])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {
            "units": unit_names(model),
            "island_dtypes": {seen[name] for name in island_names(model)},
            "losses": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
            "sums": {name: param.full_tensor().double().sum().item() for name, param in model.named_parameters()},
        }


# --- TRL --------------------------------------------------------------------------------------------------------------


def word_tokenizer() -> Any:
    """A tokenizer of as many words as the tiny models know, made here: TRL insists on one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1")


def sft_trainer(folder: Path, lengths: tuple[int, ...], **over: Any) -> Any:
    """TRL's ``SFTTrainer`` over FSDP2 on sequences of these lengths in turn; call it where accelerate shards."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": True,
        "fsdp": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        },
        "activation_checkpointing": False,
        "per_device_train_batch_size": 1,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "router_aux_loss_coef": 0.0,
    }
    texts = [tiny_batch("transformers", length, seed=i).input_ids[0].tolist() for i, length in enumerate(lengths)]
    return SFTTrainer(
        tiny_transformers(),
        SFTConfig(**(given | over)),
        train_dataset=Dataset.from_list([{"input_ids": text} for text in texts]),
        processing_class=word_tokenizer(),
    )


def sft_one_step(folder: Path, *, line: bool, upcast: bool = True, **over: Any) -> dict[str, Any]:
    """One step, both ranks 40 tokens: what the islands were computed in, and how far the step is from TRL's own
    without sharding."""
    from transformers import TrainerCallback
    from trl.trainer.utils import add_fused_lm_head

    grads: dict[str, torch.Tensor] = {}
    hidden: list[torch.Tensor] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            found["seen"] = watch_compute_dtypes(model)
            model.get_submodule("model.norm").register_forward_hook(lambda *call: hidden.append(call[-1].detach()))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            for name, param in model.named_parameters():
                if param.grad is not None:
                    grads[name] = param.grad.full_tensor().double()

    found: dict[str, Any] = {}
    with accelerate_takes_cpu_for_fsdp():
        trainer = sft_trainer(folder, (40, 40), max_steps=1, save_strategy="no", max_grad_norm=0, **over)
        trainer.add_callback(Watch)
        with keep_fp32_islands("accelerate", accelerate_upcast=upcast) if line else contextlib.nullcontext():
            trainer.train()

    reference = tiny_transformers()
    expected: list[torch.Tensor] = []
    reference.get_submodule("model.norm").register_forward_hook(lambda *call: expected.append(call[-1].detach()))
    add_fused_lm_head(reference)  # type: ignore[arg-type]
    for rank in range(2):
        tokens = tiny_batch("transformers", 40, seed=rank).input_ids
        log_probs = reference(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
        # accelerate's policy returns bf16, so TRL divides by the number of tokens of both ranks in bf16.
        (-log_probs.bfloat16().sum() / (2 * 39)).backward()
    errors = {
        name: ((grads[name] - param.grad).norm() / param.grad.double().norm()).item()
        for name, param in reference.named_parameters()
        if param.grad is not None
    }
    return {
        "island_dtypes": {found["seen"][name] for name in island_names(trainer.model)},
        "island_reduces": island_reduce_dtypes(trainer.model),
        "bit_equal": any(torch.equal(hidden[0], each) for each in expected),  # whichever of the two this rank was given
        "head_error": errors["lm_head.weight"],
        "worst": max(zip(errors.values(), errors, strict=True)),
    }


def sft_without_the_switch(folder: Path) -> str:
    """The error of ``SFTTrainer`` with the line of ours, but without the switch that TRL needs for this model."""
    with accelerate_takes_cpu_for_fsdp():
        trainer = sft_trainer(folder, (40, 40), max_steps=1, save_strategy="no", router_aux_loss_coef=None)
        with keep_fp32_islands("accelerate"):
            try:
                trainer.train()
            except AttributeError as error:
                return str(error)
    return ""


def train_with_sft(folder: Path, *, resume: bool) -> dict[str, Any]:
    """Four steps of mixed lengths, checkpoint after two; or the last two, resumed. Recomputing is TRL's own default."""
    with accelerate_takes_cpu_for_fsdp():
        trainer = sft_trainer(folder, (70, 20, 33, 3) * 2, activation_checkpointing=True)
        with keep_fp32_islands("accelerate"):
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return {
            "units": unit_names(trainer.model),
            "losses": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
            "sums": {name: p.full_tensor().double().sum().item() for name, p in trainer.model.named_parameters()},
        }
