"""Each rank reads its own part of a checkpoint, in every layout, to the last bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_checkpoint_loading import initialized, load_and_compare, on_meta
from safetensors.torch import save_file
from tiny_checkpoints import (
    base_fp8_checkpoint,
    edit,
    release_checkpoint,
    released_model,
    rewrite,
    transformers_checkpoint,
)
from tiny_models import transformers_config

from dsv4_fsdp.checkpoint_loading import CheckpointReader, check_checkpoint, fp32_islands, load_checkpoint
from dsv4_fsdp.errors import CheckpointError, ShardingError
from dsv4_fsdp.initialization import initialize
from dsv4_fsdp.materialize import materialize, refuse_uninitialized
from pool import run_ranks

WRITERS: dict[str, Callable[[Path], Path]] = {
    "release": release_checkpoint,
    "base": base_fp8_checkpoint,
    "transformers": lambda folder: transformers_checkpoint(folder, sharded=True, model=released_model()),
}
MESHES = [((2,), 1), ((3,), 1), ((2, 2), 1), ((4,), 2)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name) / name) for name, write in WRITERS.items()}


def unsharded(folder: Path) -> Any:
    model = on_meta()
    materialize(model, "cpu")
    with CheckpointReader(folder) as reader:
        load_checkpoint(model, reader)
    return model


@pytest.mark.parametrize(("shape", "expert_parallel"), MESHES, ids=["2", "3", "2x2", "4-ep2"])
@pytest.mark.parametrize("layout", list(WRITERS))
def test_every_tensor_has_the_bits_and_the_dtype_of_the_source(
    layout: str, shape: tuple[int, ...], expert_parallel: int, checkpoints: dict[str, Path]
) -> None:
    """FP8 rows that are no multiple of a block, FP4 experts, islands, integer tables; uneven and dealt shards."""
    for wrong, _, _ in run_ranks(math.prod(shape), load_and_compare, checkpoints[layout], shape, expert_parallel):
        assert wrong == []


@pytest.mark.parametrize(("shape", "expert_parallel", "dim"), [((2,), 1, 1), ((4,), 2, 1), ((2,), 1, 2)])
@pytest.mark.parametrize("layout", list(WRITERS))
def test_a_tensor_sharded_on_another_dim_is_cut_there(
    layout: str, shape: tuple[int, ...], expert_parallel: int, dim: int, checkpoints: dict[str, Path]
) -> None:
    """``Shard(1)``, of which a rank needs all rows and some columns; of experts, some rows of each, or some columns."""
    ranks = run_ranks(math.prod(shape), load_and_compare, checkpoints[layout], shape, expert_parallel, dim=dim)
    for wrong, _, _ in ranks:
        assert wrong == []


@pytest.mark.parametrize("layout", list(WRITERS))
def test_an_unsharded_model_computes_what_stock_transformers_does(layout: str, checkpoints: dict[str, Path]) -> None:
    """The same logits, in every bit, as the model that was written."""
    tokens = torch.arange(70)[None] % 256
    with torch.no_grad():
        assert torch.equal(
            unsharded(checkpoints[layout])(input_ids=tokens).logits, released_model()(input_ids=tokens).logits
        )


def test_a_rank_reads_its_part_and_not_the_rest(checkpoints: dict[str, Path]) -> None:
    """In Transformers' layout exactly what it stores, and the buffers, which every rank has whole; cut along rows, or
    along columns where these divide."""
    buffers = sum(
        buffer.numel() * buffer.element_size()
        for name, buffer in released_model().named_buffers()
        if name in released_model().state_dict()
    )
    for dim in (0, 1):
        for _, read, stored in run_ranks(4, load_and_compare, checkpoints["transformers"], (4,), 2, dim=dim):
            assert read == stored + buffers


def test_a_block_that_is_cut_has_its_own_scale(tmp_path: Path) -> None:
    """192 rows are a block of 128 and one of 64, not two of 96; and 200 columns end inside a block as well."""
    weight = torch.randn(192, 200)
    scale = torch.tensor([[1.0, 0.25], [4.0, 2.0]])
    spread = scale.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :200]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    folder = transformers_checkpoint(tmp_path / "model", model=released_model())
    save_file({"x.weight": stored, "x.scale": scale.to(torch.float8_e8m0fnu)}, folder / "model.safetensors")
    with CheckpointReader(folder) as reader:
        for rows in (range(192), range(100, 150), range(191, 192), range(1), range(128, 192)):
            assert torch.equal(reader._rows("x.weight", rows), (stored.float() * spread)[rows.start : rows.stop])


def test_a_scale_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    """Byte 255 of E8M0 is NaN; byte 120 is 2**-7 and not 120 (FAULTS 14)."""
    folder = transformers_checkpoint(tmp_path / "model", model=released_model())
    scale = torch.full((1, 1), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({"x.weight": weight, "x.scale": scale}, folder / "model.safetensors")
    with CheckpointReader(folder) as reader:
        assert torch.equal(reader._rows("x.weight", None), torch.full((4, 4), 2.0**-7))
    broken = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file({"x.weight": weight, "x.scale": broken}, folder / "model.safetensors")
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError, match="a block scale is not a number"):
        reader._rows("x.weight", None)


def test_multi_token_prediction_is_reported_and_left_in_the_files(checkpoints: dict[str, Path]) -> None:
    """Transformers has no place for it; everything else is loaded, scales are no tensors of their own."""
    with CheckpointReader(checkpoints["release"]) as reader:
        assert reader.not_loaded
        assert all(name.startswith("mtp.") for name in reader.not_loaded)


# --- Islands that the checkpoint knows of -----------------------------------------------------------------------------


def test_what_the_checkpoint_stores_in_fp32_is_an_island(tmp_path: Path) -> None:
    """The union of class list and checkpoint (FAULTS 5); a checkpoint in fp32 throughout says nothing by it."""
    folder = transformers_checkpoint(tmp_path / "model", model=released_model())
    with CheckpointReader(folder) as reader:
        assert fp32_islands(reader) == []

    def widen(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["lm_head.weight"].float()

    edit(folder, widen)
    with CheckpointReader(folder) as reader:
        assert fp32_islands(reader) == ["lm_head.weight"]

    def widen_all(state: dict[str, torch.Tensor]) -> None:
        state |= {name: t.float() for name, t in state.items() if t.is_floating_point()}

    edit(folder, widen_all)
    with CheckpointReader(folder) as reader:
        assert fp32_islands(reader) == []


# --- What is not whole ------------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state[name]

    return change


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[new] = state.pop(old)

    return change


def downcast(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.sinks"] = state["model.layers.0.self_attn.sinks"].bfloat16()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.layers.1.self_attn.q_a_proj.weight"), "model.layers.1.self_attn.q_a_proj.weight: expected in the"),
        (rename("lm_head.weight", "lm_haed.weight"), "lm_haed.weight: expected a tensor of the model"),
        (downcast, "model.layers.0.self_attn.sinks: expected F32"),
    ],
    ids=["missing", "unexpected", "downcast"],
)
def test_a_checkpoint_that_is_not_the_model_is_refused_by_its_headers(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    """Names the tensor, before any weight is read."""
    folder = transformers_checkpoint(tmp_path / "model", model=released_model())
    check_checkpoint(folder)
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(folder)


def test_a_downcast_island_can_be_accepted(tmp_path: Path) -> None:
    """Only that: the weights are somebody's, and the low bits are gone either way."""
    folder = transformers_checkpoint(tmp_path / "model", model=released_model())
    edit(folder, downcast)
    check_checkpoint(folder, allow_downcast_islands=True)
    edit(folder, drop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        check_checkpoint(folder, allow_downcast_islands=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [("layers.0.attn.wq_a.scale", "missing-scale"), ("layers.0.attn.wq_a.weight", "scale-without-tensor")],
)
def test_a_quantised_tensor_and_its_scale_come_together(name: str, message: str, tmp_path: Path) -> None:
    """Either without the other is an error with its name."""
    folder = release_checkpoint(tmp_path / "model")
    check_checkpoint(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    rewrite(folder / index["weight_map"].pop(name), drop(name))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(folder)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    """An interrupted download."""
    folder = transformers_checkpoint(tmp_path / "model", model=released_model())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected .* bytes, as its header says"):
        check_checkpoint(folder)


def test_nan_weights_are_found_after_loading(tmp_path: Path) -> None:
    """By name, on the rank that holds them."""
    folder = transformers_checkpoint(tmp_path / "model", model=released_model())

    def poison(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.2.mlp.experts.down_proj"][1, 2, 3] = float("nan")

    edit(folder, poison)
    check_checkpoint(folder)
    with pytest.raises(ShardingError, match=r"model\.layers\.2\.mlp\.experts\.down_proj"):
        refuse_uninitialized(unsharded(folder))


# --- From scratch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "expert_parallel"), MESHES, ids=["2", "3", "2x2", "4-ep2"])
def test_random_weights_do_not_depend_on_the_number_of_ranks(shape: tuple[int, ...], expert_parallel: int) -> None:
    """Bit by bit those of the unsharded model; every token has distinct experts in the hash tables."""
    model = on_meta()
    materialize(model, "cpu")
    initialize(model, seed=3)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    for dim in (0, 1) if shape != (3,) else (0,):  # nothing else divides by three
        for found in run_ranks(math.prod(shape), initialized, shape, expert_parallel, 3, dim=dim):
            assert found.keys() == expected.keys()
            assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    table = expected["model.layers.0.mlp.gate.tid2eid"]
    assert all(len(set(row.tolist())) == table.shape[1] for row in table)
    assert int(table.min()) >= 0
    assert int(table.max()) < released_model().config.n_routed_experts


def test_random_weights_have_the_distributions_of_the_model() -> None:
    """Standard deviations, zeros and ones as Transformers' own initialisation leaves them; another seed, others."""
    from transformers import DeepseekV4ForCausalLM

    torch.manual_seed(0)
    stock = DeepseekV4ForCausalLM._from_config(transformers_config(initializer_range=0.02), dtype=torch.bfloat16)
    ours = DeepseekV4ForCausalLM._from_config(transformers_config(initializer_range=0.02), dtype=torch.bfloat16)
    initialize(ours, seed=0)
    for (name, first), second in zip(stock.named_parameters(), ours.parameters(), strict=True):
        a, b = first.detach(), second.detach()
        if a.numel() > 500:
            # Of 500 draws the deviation is known to 3 %: 5 of those.
            assert b.float().std() == pytest.approx(a.float().std().item(), rel=0.16), name
        elif bool((a == a.flatten()[0]).all()):
            assert torch.equal(a, b), name
    before = ours.get_parameter("lm_head.weight").clone()
    initialize(ours, seed=1)
    assert not torch.equal(before, ours.get_parameter("lm_head.weight"))


def test_a_model_that_draws_otherwise_is_refused() -> None:
    """Orthogonal matrices cannot be drawn row by row, and neither can what is drawn elsewhere and copied."""
    from transformers import DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM._from_config(transformers_config(), dtype=torch.bfloat16)
    model._init_weights = lambda module: [p.copy_(torch.empty_like(p).normal_()) for p in module.parameters()]
    with pytest.raises(ShardingError, match=r"got: normal_ of a tensor of shape \(128, 64\) that is no parameter"):
        initialize(model, seed=0)
    model._init_weights = lambda module: [p.exponential_() for p in module.parameters()]
    with pytest.raises(ShardingError, match=r"got: exponential_ of model\.embed_tokens\.weight"):
        initialize(model, seed=0)
