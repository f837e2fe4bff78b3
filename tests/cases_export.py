"""Exports of live sharded models; run inside ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases_integrations import load
from cases_train import join_pool
from torch.distributed.tensor import DTensor

from dsv4_fsdp import keep_fp32_islands, parallelize
from dsv4_fsdp.errors import Dsv4FsdpError
from dsv4_fsdp.names import is_adapter_name
from dsv4_fsdp.train import export
from dsv4_fsdp.train.checkpoints import Checkpoints, Contents
from dsv4_fsdp.train.run_folder import RunFolder
from dsv4_fsdp.train.tiny_model import build_tiny_model, byte_tokenizer


def published(path: Path, run: Path, *, reload: bool, **distributed: Any) -> Any:
    """Load ``path`` in shards, change every parameter exactly, publish an export; what was found, and the meshes."""
    with keep_fp32_islands("transformers"):
        model = load(path, **distributed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-1)  # exact in any floating dtype
    meshes = {
        f"{tensor.device_mesh.mesh_dim_names}{tuple(map(str, tensor.placements))}"
        for tensor in model.state_dict().values()
        if isinstance(tensor, DTensor)
    }
    with mock.patch.object(export, "_RELOADED_BYTES", 2**60 if reload else 0):
        found = export.publish_export(
            model,
            RunFolder(run),
            join_pool(),
            tokenizer=byte_tokenizer(),
            tokens=torch.arange(100).unsqueeze(0),
            prompt="",
            seed=0,
        )
    return None if found is None else (found.reloaded, meshes)


def published_adapter(path: Path, run: Path) -> bool | None:
    """Inject adapters into the model at ``path``, shard it, and publish; whether it was reloaded and found equal."""
    from peft import LoraConfig, inject_adapter_in_model

    ranks = join_pool()
    model = load(path)
    for param in model.parameters():
        param.requires_grad_(False)
    config = LoraConfig(
        r=2, target_modules=["q_a_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if is_adapter_name(name):
            param.data = 0.1 * torch.randn(param.shape, generator=generator)
    parallelize(model, ranks.mesh, fp32_params=["lora_A", "lora_B"])
    tokens = torch.arange(100).unsqueeze(0)
    tokenizer = byte_tokenizer()
    export.dry_export(model, RunFolder(run), ranks, tokenizer=tokenizer, source=path)
    found = export.publish_export(
        model, RunFolder(run), ranks, tokenizer=tokenizer, tokens=tokens, prompt="", seed=0, source=path
    )
    return None if found is None else found.reloaded


def saved_by_trainer(path: Path, run: Path) -> None:
    """Load ``path``, change every parameter exactly, shard it and save it after a step at rate 0."""
    ranks = join_pool()
    model = load(path)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-1)
    parallelize(model, ranks.mesh)
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.0)
    model(input_ids=torch.arange(100).unsqueeze(0)).logits.float().square().mean().backward()
    optimizer.step()

    def write_model_files(folder: Path) -> None:
        model.config.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    contents = Contents("", write_model_files, {"shard": ranks.world_size}, "", str(path))
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.save(7, model, optimizer, train={"step": 7}, contents=contents)
    checkpoints.finish()


def failing_on_first(run: Path) -> str:
    """Publish into a run whose folder is a file on rank 0; the error of this rank."""
    ranks = join_pool()
    model = build_tiny_model(seed=0)
    parallelize(model, ranks.mesh)
    try:
        export.dry_export(model, RunFolder(run), ranks, tokenizer=byte_tokenizer())
    except (Dsv4FsdpError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()  # nobody is left behind in a collective
    return "no error"


def dry_export_of_a_large_model(run: Path, *, downcast: bool) -> tuple[str, int, list[str]]:
    """A dry export above the limit: the error, how many tensors were gathered, and what it left behind."""
    ranks = join_pool()
    model = build_tiny_model(seed=0)
    parallelize(model, ranks.mesh)
    if downcast:
        with torch.no_grad():
            sinks = model.get_submodule("model.layers.0.self_attn")
            sinks.sinks = torch.nn.Parameter(sinks.sinks.detach().bfloat16())
    gathered: list[DTensor] = []
    error = ""
    with (
        mock.patch.object(export, "_REAL_DRY_EXPORT_BYTES", 0),
        mock.patch.object(DTensor, "full_tensor", lambda self: gathered.append(self) or self),
    ):
        try:
            export.dry_export(model, RunFolder(run), ranks, tokenizer=byte_tokenizer())
        except Dsv4FsdpError as problem:
            error = str(problem)
    dist.barrier()
    return error, len(gathered), [path.name for path in run.iterdir()]
