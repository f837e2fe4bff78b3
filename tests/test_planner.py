"""The planner: what it predicts is what a real step then has and sends; its answers, its errors, its speed."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases_plan import LINES
from cases_planner import LiveBytes, kept_by_a_real_forward, train_a_step
from tiny_models import require_nemo, tiny_transformers, transformers_config
from typer.testing import CliRunner

from dsv4_fsdp import plan_sharding
from dsv4_fsdp.cli import app
from dsv4_fsdp.expert_parallel import make_expert_mesh
from dsv4_fsdp.planner.communication import Dispatch, collectives, traffic
from dsv4_fsdp.planner.estimate import Estimate, Estimator
from dsv4_fsdp.planner.fake_mesh import fake_mesh
from dsv4_fsdp.planner.memory import MARGIN_FRACTION, checkpoint_bytes, state_bytes, unit_peaks
from dsv4_fsdp.planner.model_sources import PRESETS, build_on_meta, load_config
from dsv4_fsdp.planner.optimizer_state import algorithm_of
from dsv4_fsdp.planner.search import candidate_settings, search_configurations
from dsv4_fsdp.planner.settings import Cluster, SettingsError, TrainingSettings, resolve
from dsv4_fsdp.train.build_model import shard_on_meta
from dsv4_fsdp.train.config import ModelConfig, read_config_file
from dsv4_fsdp.train.config import resolve as resolve_run
from pool import run_ranks

SETTINGS = TrainingSettings(sequence=64)


@pytest.fixture(scope="module")
def tiny() -> Estimator:
    """Estimates of the tests' tiny DeepSeek-V4."""
    return Estimator("tiny", transformers_config())


@functools.cache
def flash() -> Estimator:
    return Estimator("deepseek-v4-flash", load_config("deepseek-v4-flash"))


# --- Bytes and collectives: equal to the live ones --------------------------------------------------------------------

LIVE_CASES: list[tuple[str, tuple[int, ...], str, int]] = [
    *[("plain", mesh, "adamw", 1) for mesh in [(1,), (2,), (3,), (4,), (2, 2)]],
    ("plain", (3,), "sgd-momentum", 1),
    ("plain", (2,), "sgd", 1),
    ("plain", (2,), "adamw_8bit", 1),
    ("plain", (3,), "adamw_8bit", 1),
    ("plain", (2,), "adamw_bf16_sr", 1),
    ("plain", (2,), "muon", 1),
    ("masters", (3,), "adamw", 1),
    ("masters", (2, 2), "adamw", 1),
    ("no_reshard", (2,), "adamw", 1),
    ("reshard_to_two", (4,), "sgd", 1),
    ("bf16_reduce", (2,), "adamw", 1),
    ("three_blocks_frozen", (3,), "adamw", 1),
    ("embedding_frozen", (2,), "sgd", 1),
    ("tied", (2,), "adamw", 1),
    ("checkpointing", (2, 2), "sgd", 1),
    ("lora", (3,), "adamw", 1),
    ("llama_bf16", (3,), "adamw", 1),
    ("nemo_grouped", (3,), "adamw", 1),
    ("plain", (2,), "adamw", 2),
    ("plain", (4,), "adamw_8bit", 2),
    ("plain", (4,), "muon", 4),
    ("plain", (2, 2), "adamw_8bit", 2),
    ("masters", (4,), "adamw_bf16_sr", 2),
    ("no_reshard", (4,), "sgd", 2),
    ("checkpointing", (4,), "sgd", 2),
    ("embedding_frozen", (4,), "sgd", 2),
    ("three_blocks_frozen", (4,), "sgd", 2),
    ("lora", (4,), "adamw", 2),
    ("tied", (4,), "adamw", 2),
    ("five_experts", (4,), "adamw", 1),
    ("five_experts", (4,), "adamw_8bit", 1),
    ("five_experts", (4,), "muon", 1),
    ("five_experts", (1, 4), "sgd", 1),
    ("two_experts", (4,), "adamw", 2),
    ("two_experts", (4,), "muon", 2),
    ("root_plain", (3,), "adamw", 1),
    ("root_plain", (2, 2), "adamw_8bit", 2),
    ("root_no_reshard", (2,), "sgd", 1),
    ("root_checkpointing", (4,), "sgd", 2),
    ("root_embedding_frozen", (2,), "sgd", 1),
    ("root_three_blocks_frozen", (2,), "sgd", 1),
    ("islands_train", (2,), "sgd", 1),
    ("root_islands_train", (2,), "sgd", 1),
    ("root_tied", (2,), "sgd", 1),
    ("root_lora", (2,), "adamw", 1),
    ("root_masters", (2,), "adamw", 1),
    ("root_nemo", (2,), "adamw", 1),
]
LIVE_IDS = [f"{line}-{'x'.join(map(str, mesh))}-{optimizer}-ep{ep}" for line, mesh, optimizer, ep in LIVE_CASES]


@functools.cache
def live(line: str, mesh: tuple[int, ...], optimizer: str, expert_parallel: int) -> list[LiveBytes]:
    if "nemo" in line:
        require_nemo()
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao.optim")
    return run_ranks(math.prod(mesh), train_a_step, line, mesh, optimizer, expert_parallel)


@pytest.mark.parametrize(("line", "mesh", "optimizer", "expert_parallel"), LIVE_CASES, ids=LIVE_IDS)
class TestLive:
    """Real ``fully_shard`` on gloo ranks, after one step; one run for both tests of a case."""

    def test_predicted_state_is_live_to_the_byte(
        self, line: str, mesh: tuple[int, ...], optimizer: str, expert_parallel: int
    ) -> None:
        """Parameters, gradients and optimizer state on every rank, islands apart, padding included."""
        for seen in live(line, mesh, optimizer, expert_parallel):
            planned = state_bytes(
                seen.plan, optimizer=optimizer, roles=seen.roles, shard_coordinate=seen.shard_coordinate
            )
            assert seen.parameters == (planned.parameters, planned.island_parameters)
            assert seen.gradients == (planned.gradients, planned.island_gradients)
            assert seen.optimizer == (planned.optimizer, planned.island_optimizer)

    def test_predicted_collectives_are_the_recorded_ones(
        self, line: str, mesh: tuple[int, ...], optimizer: str, expert_parallel: int
    ) -> None:
        """Kind, dtype on the wire, size of the group and payload of each, in order.

        What a rank hands into an all-to-all depends on who chose its experts: there the mean over the ranks is planned.
        """
        ranks = live(line, mesh, optimizer, expert_parallel)
        # 33 tokens, two experts for each.
        num_experts = 2 if line == "two_experts" else 4
        dispatch = Dispatch(rows=66, hidden=64, num_experts=num_experts) if expert_parallel > 1 else None
        for seen in ranks:
            planned = [(c.kind, c.dtype, c.group_size, c.payload_bytes) for c in collectives(seen.plan, dispatch)]
            assert Counter(c[:3] for c in seen.collectives) == Counter(c[:3] for c in planned)
            assert [_without_rows(c) for c in seen.collectives] == [_without_rows(c) for c in planned]
        for place, (kind, _, _, payload) in enumerate(planned):
            if kind == "all_to_all":
                assert sum(seen.collectives[place][3] for seen in ranks) == len(ranks) * payload


def _without_rows(collective: tuple[str, str, int, int]) -> tuple[Any, ...]:
    return collective[:3] if collective[0] == "all_to_all" else collective


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "muon"])
def test_roles_are_those_of_the_trainers_groups(optimizer: str) -> None:
    """From the model on meta as from the sharded one: what is quantised, and what is Muon's."""
    settings = replace(SETTINGS, optimizer=optimizer)
    estimator = Estimator("tiny", transformers_config())
    roles = estimator.roles(settings, estimator.plan(Cluster(2, 2), settings))
    assert roles is not None
    (seen, _) = live("plain", (2,), optimizer, 1)
    assert seen.roles == {name: role for name, role in roles.items() if name in seen.roles}
    trained = {p.fqn for unit in seen.plan.units for group in unit.groups for p in group.params if p.trainable}
    assert seen.roles.keys() == trained


def test_first_rank_has_the_largest_state(tiny: Estimator) -> None:
    """It is the one that is planned."""
    plan = tiny.plan(Cluster(3, 3), SETTINGS)
    sizes = [state_bytes(plan, optimizer="adamw", shard_coordinate=rank).optimizer for rank in range(3)]
    assert sizes[0] == max(sizes) > min(sizes)


@pytest.mark.parametrize("line", ["plain", "masters"])
def test_planner_shows_the_plan_that_parallelize_applies(line: str) -> None:
    """Same hash as on live ranks, from nothing but the config."""
    storage = "fp32" if line == "masters" else "bf16"
    layers = LINES[line].build().config.layer_types  # type: ignore[union-attr]
    plan = Estimator("tiny", transformers_config(layers)).plan(Cluster(3, 3), replace(SETTINGS, storage=storage))
    assert {seen.plan.hash for seen in live(line, (3,), "adamw", 1)} == {plan.hash}


def test_meta_model_is_the_model_that_is_trained() -> None:
    """Names, shapes, dtypes and buffers."""
    built = build_on_meta(transformers_config())
    trained = tiny_transformers()
    for ours, theirs in (
        (built.named_parameters(), trained.named_parameters()),
        (built.named_buffers(), trained.named_buffers()),
    ):
        assert [(n, t.shape, t.dtype) for n, t in ours] == [(n, t.shape, t.dtype) for n, t in theirs]
    assert {tensor.device.type for tensor in built.parameters()} == {"meta"}


def test_gathered_and_reduced_sizes_of_a_unit_by_hand() -> None:
    """A (5, 3) bf16 weight on 4 ranks: 8 rows gathered and reduced, in fp32, and 5 rows of gradient in between."""
    import torch
    from cases_plan import tiny_llama

    model = tiny_llama()
    before = unit_peaks(plan_sharding(model, mesh_shape=(4,)))[1]
    model.model.layers[0].odd = torch.nn.Parameter(torch.rand(5, 3, dtype=torch.bfloat16))  # type: ignore[union-attr, index]
    after = unit_peaks(plan_sharding(model, mesh_shape=(4,)))[1]
    assert after.gathered - before.gathered == 8 * 3 * 2
    assert after.unsharded_gradients - before.unsharded_gradients == 5 * 3 * 2
    assert after.reduce_scatter_input - before.reduce_scatter_input == 8 * 3 * 4
    assert after.reduce_scatter_output - before.reduce_scatter_output == 2 * 3 * 4


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_moments_are_quantised_by_the_trainers_rule(ranks: int) -> None:
    """Shards that are even, large enough and whole blocks; asked of the trainer with a sharded parameter."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from dsv4_fsdp.plan import ParamPlan
    from dsv4_fsdp.train.stochastic_adamw import _shards_are_blocks

    answers = set()
    with fake_mesh((ranks,)) as mesh:
        for shape in ((48, 1024), (49, 1024), (50, 1024), (48, 1000), (12, 256), (16, 1024, 3)):
            local = torch.empty(-(-shape[0] // ranks), *shape[1:], device="meta")
            stride = torch.empty(shape, device="meta").stride()
            param = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
            planned = ParamPlan("w", shape, "bfloat16", False, True, "")
            found = algorithm_of("adamw_8bit", planned, {"w": ("matrices", "adamw")}, num_shards=ranks)
            assert (found == "adamw_8bit") == _shards_are_blocks(param)
            answers.add(found)
            assert algorithm_of("adamw_8bit", planned, {"w": ("no decay", "adamw")}, num_shards=ranks) != "adamw_8bit"
    assert len(answers) == 2


def test_checkpoint_is_as_large_as_the_saved_file(tiny: Estimator, tmp_path: Path) -> None:
    """Weights and saved buffers, without padding; the file has a header besides, and the RoPE tables are not saved."""
    from safetensors import safe_open

    tiny_transformers().save_pretrained(tmp_path)  # type: ignore[operator]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    estimate = tiny.estimate(Cluster(3, 3), SETTINGS)
    unsaved = {n: b for n, b in tiny_transformers().named_buffers() if n not in tiny_transformers().state_dict()}
    assert estimate.export_bytes == saved + sum(buffer.nbytes for buffer in unsaved.values())
    assert checkpoint_bytes(estimate.plan, optimizer="sgd", buffers=0)[0] < saved


# --- Activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "windowed"])
@pytest.mark.parametrize(("batch", "length", "checkpointing"), [(1, 64, 0), (2, 96, 0), (2, 96, 1), (1, 64, 2)])
def test_predicted_activations_are_what_a_real_step_keeps(
    batch: int, length: int, checkpointing: int, attention: str, tiny: Estimator
) -> None:
    """Of the unsharded model with the same experts, within 1 %: the same code, on real tensors."""
    planned = _planned(tiny, batch, length, checkpointing, attention)
    real = kept_by_a_real_forward(batch=batch, length=length, checkpointing=checkpointing, attention=attention)
    assert planned == pytest.approx(real, rel=0.01)


def test_a_recomputed_block_keeps_its_input_and_a_frozen_indexers_choice(tiny: Estimator) -> None:
    """Input: 64 tokens of 64 numbers in 4 streams of bf16. Choice: 4 of the 16 entries for each token, in int32."""
    settings = replace(SETTINGS, batch=2, sequence=64, attention="windowed")
    blocks = tiny.estimate(Cluster(2, 2), settings).activations.blocks
    kept = {block.kind.split(",")[0]: block.recomputed_bytes for block in blocks}
    config = transformers_config()
    block_input = 2 * 64 * config.hidden_size * config.hc_mult * 2
    choice = 2 * 64 * config.index_topk * 4
    assert kept == {"sliding": block_input, "HCA": block_input, "CSA": block_input + choice}


@pytest.mark.parametrize(
    ("checkpointing", "attention", "expert_parallel"),
    [(0, "eager", 1), (0, "windowed", 1), (1, "windowed", 1), (0, "windowed", 2)],
)
def test_predicted_activations_hold_for_sharded_ranks(
    checkpointing: int, attention: str, expert_parallel: int, tiny: Estimator
) -> None:
    """Ranks under FSDP2 keep no more: 5 % is what is promised. With experts dealt to ranks, on average over these."""
    real = run_ranks(2, _kept_sharded, checkpointing, attention, expert_parallel)
    planned = _planned(tiny, 1, 64, checkpointing, attention)
    if expert_parallel == 1:
        assert [planned] * 2 == pytest.approx(real, rel=0.05)
    assert planned == pytest.approx(sum(real) / 2, rel=0.05)


def _kept_sharded(checkpointing: int, attention: str, expert_parallel: int) -> int:
    return kept_by_a_real_forward(
        batch=1,
        length=64,
        checkpointing=checkpointing,
        attention=attention,
        sharded=True,
        expert_parallel=expert_parallel,
    )


def _planned(tiny: Estimator, batch: int, length: int, checkpointing: int, attention: str) -> int:
    settings = replace(SETTINGS, batch=batch, sequence=length, attention=attention)
    activations = tiny.estimate(Cluster(2, 2), settings).activations
    return activations.saved_bytes(checkpointing=checkpointing)


def test_predicted_activations_hold_for_the_stock_loss() -> None:
    """Which keeps the logits of all tokens, in the head's dtype and in fp32."""
    estimator = Estimator("tiny", transformers_config(), trained=ModelConfig(path="-", loss="stock"))
    real = kept_by_a_real_forward(batch=2, length=64, attention="windowed", chunked=False)
    assert _planned(estimator, 2, 64, 0, "windowed") == pytest.approx(real, rel=0.01)


TRAINED = {
    "adapters": ModelConfig(path="-", train="lora"),
    "last blocks": ModelConfig(path="-", freeze=("embed_tokens", "layers.0", "layers.1")),
}


@pytest.mark.parametrize("attention", ["eager", "windowed"])
@pytest.mark.parametrize("checkpointing", [0, 1])
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
def test_predicted_activations_hold_for_frozen_weights(
    trained: ModelConfig, checkpointing: int, attention: str
) -> None:
    """Nothing is kept before the first trainable parameter, and no inputs of frozen products: within 5 %."""
    estimator = Estimator("tiny", transformers_config(), trained=trained)
    planned = _planned(estimator, 1, 64, checkpointing, attention)
    real = kept_by_a_real_forward(batch=1, length=64, checkpointing=checkpointing, attention=attention, trained=trained)
    assert planned == pytest.approx(real, rel=0.05)


def test_one_block_of_a_kind_stands_for_all(tiny: Estimator) -> None:
    """The tiny model's second and fourth block differ in their router; doubled layers add their kind's bytes."""
    activations = tiny.estimate(Cluster(2, 2), SETTINGS).activations
    assert {block.kind: block.indices for block in activations.blocks} == {
        "sliding, hash router": (0,),
        "HCA, hash router": (1,),
        "CSA, top-k router": (2,),
        "HCA, top-k router": (3,),
    }
    kinds = flash().estimate(Cluster(128, 8), TrainingSettings()).activations.blocks
    assert sorted(index for block in kinds for index in block.indices) == list(range(43))


# --- Traffic ----------------------------------------------------------------------------------------------------------


def test_traffic_between_nodes_by_hand(tiny: Estimator) -> None:
    """A ring over 4 ranks on 2 nodes: 3/4 of the payload moves, half of the hops leave a node; on one node none do."""
    plan = tiny.plan(Cluster(4, 2), SETTINGS)
    for two_nodes, one_node in zip(traffic(plan, Cluster(4, 2)), traffic(plan, Cluster(4, 4)), strict=True):
        assert (
            two_nodes.moved_bytes == one_node.intra_node_bytes == pytest.approx(0.75 * one_node.payload_bytes, abs=99)
        )
        assert two_nodes.inter_node_bytes == pytest.approx(0.5 * two_nodes.moved_bytes, abs=99)
        assert one_node.inter_node_bytes == 0


def test_hsdp_within_a_node_sends_only_gradients_between_nodes(tiny: Estimator) -> None:
    """Shards of a node, replicas over nodes: the all-reduce leaves it, twice the payload of a ring of 2."""
    rows = traffic(tiny.plan(Cluster(4, 2), replace(SETTINGS, replicate=2)), Cluster(4, 2))
    assert {row.kind for row in rows if row.inter_node_bytes} == {"all_reduce"}
    for row in rows:
        if row.kind == "all_reduce":
            assert (row.axis, row.intra_node_bytes) == ("replicate", 0)
            assert row.inter_node_bytes == pytest.approx(row.payload_bytes, abs=99)


@pytest.mark.parametrize("changes", [{}, {"replicate": 2}, {"expert_parallel": 2, "activation_checkpointing": 2}])
def test_traffic_counts_are_the_plans(changes: dict[str, int], tiny: Estimator) -> None:
    """And micro-batches multiply them."""
    settings = replace(SETTINGS, **changes)
    plan = tiny.plan(Cluster(4, 2), settings)
    for micro_batches in (1, 3):
        counts: Counter[str] = Counter()
        for row in tiny.estimate(Cluster(4, 2), replace(settings, micro_batches=micro_batches)).traffic:
            counts[row.kind] += row.count
        assert counts == Counter(plan.collectives_per_step(micro_batches=micro_batches))


@pytest.mark.parametrize("expert_parallel", [1, 2])
@pytest.mark.parametrize("line", ["embedding_frozen", "one_block_frozen", "three_blocks_frozen", "lora"])
def test_counts_are_the_plans_where_backward_does_not_come_by(line: str, expert_parallel: int) -> None:
    """Frozen blocks are gathered once, the last of them partly again; their tokens travel in forward alone."""
    plan = plan_sharding(LINES[line].build(), mesh_shape=(4,), expert_parallel=expert_parallel)
    dispatch = Dispatch(rows=1, hidden=1, num_experts=4) if expert_parallel > 1 else None
    assert Counter(c.kind for c in collectives(plan, dispatch)) == Counter(plan.collectives_per_step())


@pytest.mark.parametrize(("ranks_per_node", "inter"), [(8, 0.0), (4, 4 / 7), (2, 6 / 7)])
def test_tokens_go_to_other_nodes_as_often_as_experts_lie_there(
    ranks_per_node: int, inter: float, tiny: Estimator
) -> None:
    """By hand: experts over 8 ranks; of the 7 others of a rank, 4 or 6 are on other nodes. 128 pairs of 64 in bf16."""
    config = transformers_config(n_routed_experts=8)
    estimator = Estimator("tiny", config)
    settings = replace(SETTINGS, expert_parallel=8)
    estimate = estimator.estimate(Cluster(8, ranks_per_node), settings)
    (row,) = [r for r in estimate.traffic if (r.kind, r.dtype) == ("all_to_all", "bfloat16")]
    assert (row.axis, row.count, row.payload_bytes) == ("expert", 16, 16 * 64 * 2 * 64 * 2)
    assert row.moved_bytes == row.payload_bytes * 7 // 8
    assert row.inter_node_bytes == pytest.approx(inter * row.moved_bytes, abs=16)


# --- A step, moment by moment -----------------------------------------------------------------------------------------


def estimates(tiny: Estimator, **changes: Any) -> Estimate:
    return tiny.estimate(Cluster(4, 2, device_memory_gib=1), replace(SETTINGS, **changes))


def test_a_step_ends_with_what_stays_and_the_gradients(tiny: Estimator) -> None:
    """The optimizer's moment has parameters, state and all gradients, and nothing is gathered or kept."""
    for changes in (
        {},
        {"replicate": 2, "expert_parallel": 2},
        {"reshard_after_forward": False, "expert_parallel": 4},
        {"activation_checkpointing": 2, "micro_batches": 3},
    ):
        estimate = estimates(tiny, **changes)
        terms = dict(estimate.moments[-1].terms)
        state = estimate.state
        assert terms.pop("gradients") == terms.pop("working memory") == state.gradients + state.island_gradients
        assert terms == {
            "parameters": state.parameters,
            "fp32 islands": state.island_parameters,
            "optimizer state": state.optimizer + state.island_optimizer,
            "buffers": state.buffers,
        }


def test_kept_activations_grow_and_go_with_the_blocks(tiny: Estimator) -> None:
    """All of them are there when backward begins, but for none of a rank at its end."""
    for checkpointing in (0, 1, 2):
        estimate = estimates(tiny, activation_checkpointing=checkpointing)
        start = next(m for m in estimate.moments if m.label == "backward of lm_head")
        assert start.terms["saved activations"] == estimate.activations.saved_bytes(checkpointing=checkpointing)
        reduced = next(m for m in estimate.moments if m.label == "gradient reduction of model.embed_tokens")
        assert reduced.terms["saved activations"] == estimate.activations.prelude.saved_bytes


def test_each_setting_moves_its_own_terms(tiny: Estimator) -> None:
    """Offload empties the device of what stays; no resharding keeps everything gathered; recomputing keeps inputs."""
    base = estimates(tiny)
    offloaded = estimates(tiny, offload=True)
    assert not {"parameters", "optimizer state", "gradients", "fp32 islands"} & set(offloaded.peak.terms)
    assert offloaded.host.offload == 2 * sum(
        getattr(base.state, name) + getattr(base.state, f"island_{name}")
        for name in ("parameters", "gradients", "optimizer")
    )
    kept = estimates(tiny, reshard_after_forward=False)
    everything = sum(peak.gathered for peak in kept.unit_peaks)
    assert kept.moments[4].terms["gathered parameters"] < everything
    assert max(m.terms.get("gathered parameters", 0) for m in kept.moments) == everything
    assert max(m.terms.get("gathered parameters", 0) for m in base.moments) < everything
    recomputed = estimates(tiny, activation_checkpointing=1)
    assert max(m.terms["saved activations"] for m in recomputed.moments if "saved activations" in m.terms) < max(
        m.terms["saved activations"] for m in base.moments if "saved activations" in m.terms
    )


def test_dealt_experts_are_reduced_inside_their_block(tiny: Estimator) -> None:
    """Their weights and gradients are gone when the block's own gradients are reduced; a rank has half of them."""
    whole, dealt = estimates(tiny), estimates(tiny, expert_parallel=2)
    labels = [moment.label for moment in dealt.moments]
    block = "model.layers.3"
    at = labels.index(f"backward of {block}")
    assert labels[at : at + 4] == [
        f"backward of {block}",
        f"gradient reduction of {block}.mlp.experts",
        f"backward of {block}, after its experts",
        f"gradient reduction of {block}",
    ]
    (experts,) = [peak for peak in dealt.unit_peaks if peak.unit.fqn == f"{block}.mlp.experts"]
    # (4 experts, 2 x 32, 64) and (4, 64, 32) in bf16, two experts of each.
    assert experts.gathered == experts.unsharded_gradients == 2 * 2 * (64 * 64 + 64 * 32)
    before, _, after, _ = dealt.moments[at : at + 4]
    assert before.terms["gathered parameters"] - after.terms["gathered parameters"] == experts.gathered
    assert before.terms["unsharded gradients"] - after.terms["unsharded gradients"] == experts.unsharded_gradients
    most = [max(moment.terms.get("gathered parameters", 0) for moment in e.moments) for e in (whole, dealt)]
    assert most[0] - most[1] == experts.gathered


def test_of_several_micro_batches_the_last_finds_all_gradients_there(tiny: Estimator) -> None:
    """From its first moment on; collectives are as many times as many."""
    one, three = estimates(tiny), estimates(tiny, micro_batches=3)
    assert {m.terms["gradients"] for m in three.moments} == {one.moments[-1].terms["gradients"]}
    assert "gradients" not in one.moments[0].terms
    assert three.moved_bytes == 3 * one.moved_bytes


# --- Against the real fully_shard, at full size -----------------------------------------------------------------------


def test_real_fully_shard_builds_the_plan_of_flash_on_128_ranks() -> None:
    """On meta, with torch's fake process group: bytes of each group's shards and of its all-gather."""
    settings = TrainingSettings(replicate=2, expert_parallel=8, activation_checkpointing=2)
    plan = flash().plan(Cluster(128, 8), settings)
    assert flash().verify(plan, settings) == []


def test_verify_sees_a_plan_of_other_bytes(tiny: Estimator) -> None:
    """It names the unit, and that the plan as a whole is another."""
    plan = tiny.plan(Cluster(4, 2), SETTINGS)
    embedding, *others = plan.units
    group = replace(embedding.groups[0], shard_bytes=embedding.groups[0].shard_bytes + 2)
    wrong = replace(plan, units=(replace(embedding, groups=(group,)), *others))
    another, unit = tiny.verify(wrong, SETTINGS)
    assert "another plan" in another
    assert unit.startswith("unit model.embed_tokens: planned")


# --- Search -----------------------------------------------------------------------------------------------------------


def search(tiny: Estimator, gib: float, **texts: str) -> Any:
    said = {"ranks": "8", "ranks_per_node": "2", "device_memory_gib": str(gib), "sequence": "64"} | texts
    return search_configurations(tiny, resolve(said))


def test_search_ranks_what_fits_by_bytes_moved_between_nodes_and_in_all(tiny: Estimator) -> None:
    """And the rejected ones say by how much and of what."""
    peaks = sorted(c.estimate.peak.total_bytes for c in search(tiny, 1).fitting)
    found = search(tiny, peaks[len(peaks) // 2] / (1 - MARGIN_FRACTION) / 2**30)
    assert found.fitting
    assert found.rejected
    costs = [
        (sum(r.inter_node_bytes for r in e.traffic) + e.host_copy_bytes, e.moved_bytes)
        for e in (candidate.estimate for candidate in found.fitting)
    ]
    assert costs == sorted(costs)
    for candidate in found.rejected:
        assert candidate.estimate.spare_bytes < 0
        assert "too much: " in candidate.reason
        assert any(term in candidate.reason for term in candidate.estimate.peak.terms)
    assert all(candidate.estimate.spare_bytes >= 0 for candidate in found.fitting)


def test_offload_copies_shards_for_each_gather_and_gradients_back(tiny: Estimator) -> None:
    """By hand: forward and backward gather the blocks, forward alone the embedding, the head and the root."""
    base, offloaded = estimates(tiny), estimates(tiny, offload=True)
    blocks = sum(g.shard_bytes for unit in base.plan.units if unit.role == "block" for g in unit.groups)
    state = base.state
    parameters, gradients = (getattr(state, n) + getattr(state, f"island_{n}") for n in ("parameters", "gradients"))
    assert base.host_copy_bytes == 0
    assert offloaded.host_copy_bytes == parameters + blocks + gradients


def test_search_leaves_alone_what_was_said(tiny: Estimator) -> None:
    """All combinations of the rest, each once."""
    everything = list(candidate_settings(resolve({"ranks": "8", "ranks_per_node": "2"})))
    assert len(everything) == len(set(everything)) == 3 * 2 * 2 * 2 * 2
    assert {settings.replicate for settings in everything} == {1, 2, 4}
    dealt = list(candidate_settings(resolve({"ranks": "8", "ranks_per_node": "2"}), num_experts=12))
    # Within a node, as wide as 12 experts and the ranks of a replica allow, and none.
    assert Counter((s.replicate, s.expert_parallel) for s in dealt) == dict.fromkeys(
        [(1, 2), (1, 4), (1, 1), (2, 2), (2, 4), (2, 1), (4, 2), (4, 1)], 16
    )
    fixed = list(
        candidate_settings(resolve({"ranks": "8", "ranks_per_node": "2", "storage": "fp32", "offload": False}))
    )
    assert {(s.storage, s.offload) for s in fixed} == {("fp32", False)}
    assert len(fixed) == 3 * 2 * 2


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    transformers_config().save_pretrained(folder)
    return str(folder / "config.json")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


TINY = ("--ranks", "4", "--ranks-per-node", "2", "--sequence", "64")


def test_answer_is_in_the_first_three_lines(config_json: str) -> None:
    """Fits or not and by how much; what is largest; what helps, or what a step sends. No line over 100 columns."""
    fits = run(config_json, *TINY, "--device-memory-gib", "80")
    assert fits.exit_code == 0, fits.output
    lines = fits.stdout.splitlines()
    assert lines[0].startswith("FITS: needs ")
    assert "to spare" in lines[0]
    assert lines[1].startswith("Largest: ")
    assert lines[2].startswith("One step moves ")
    assert max(map(len, lines)) <= 100
    tight = run(config_json, *TINY, "--device-memory-gib", "0.001")
    assert tight.exit_code == 0
    assert tight.stdout.startswith("DOES NOT FIT: needs ")
    assert "too much" in tight.stdout.splitlines()[0]
    assert tight.stdout.splitlines()[2].startswith("What helps most: --")
    assert run(config_json, *TINY).stdout.startswith("Needs ")


def test_json_has_the_verdict_the_terms_and_the_plan(config_json: str) -> None:
    """The very plan, by its hash, and a verdict that adds up."""
    shown = json.loads(run(config_json, *TINY, "--device-memory-gib", "80", "--json", "--verify").stdout)
    plan = plan_sharding(tiny_transformers(), mesh_shape=(4,))
    assert shown["plan_hash"] == plan.hash
    assert shown["plan"] == json.loads(plan.to_json())
    verdict = shown["verdict"]
    assert verdict["fits"] is True
    assert verdict["needed_bytes"] == sum(verdict["peak"]["terms"].values()) + verdict["margin_bytes"]
    assert verdict["spare_bytes"] == 80 * 2**30 - verdict["needed_bytes"]
    assert shown["verified"] is True


def test_search_and_picture_from_the_command_line(config_json: str, tmp_path: Path) -> None:
    """The table says how many fit; the picture is a PNG of some size."""
    picture = tmp_path / "plan.png"
    shown = run(config_json, *TINY, "--device-memory-gib", "80", "--search", "--png", str(picture))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("80 of 80 configurations fit 80.0 GiB per device (")
    assert max(map(len, shown.stdout.splitlines())) <= 100
    from PIL import Image

    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.width > 1000
        assert len(image.convert("RGB").resize((64, 64)).getcolors(4096) or ()) > 20


def test_a_checkpoint_folder_is_planned_as_its_config(config_json: str) -> None:
    """The folder, or the file in it."""
    folder = str(Path(config_json).parent)
    a, b = (json.loads(run(model, *TINY, "--json").stdout)["plan_hash"] for model in (folder, config_json))
    assert a == b


RUN = """
steps: 10
nproc: 4
model: {path: PATH, init: random, storage: fp32}
data: {kind: pretrain, sequence_length: 64, micro_batch_size: 2, global_batch_size: 16, path: somewhere}
optimizer: {lr: 1.0e-3, name: muon}
mesh: {expert_parallel: 2, activation_checkpointing: 2, reshard_after_forward: false, island_units: root}
"""


def write_run(config_json: str, tmp_path: Path, **sections: str) -> str:
    """A configuration file of a run on the tiny model; ``sections`` replace lines of it."""
    lines = RUN.replace("PATH", str(Path(config_json).parent)).strip().splitlines()
    lines = [sections.pop(line.partition(":")[0], line) for line in lines]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, *sections.values()]) + "\n")
    return str(tmp_path / "run.yaml")


LORA = "model: {path: PATH, init: random, train: lora, lora: {rank: 4}}"
PLANS = {
    "masters": {},
    "lora": {"model": LORA, "optimizer": "optimizer: {lr: 1.0e-3}"},
    "lora in bf16": {"model": LORA.replace("rank: 4", "rank: 4, dtype: bf16")},
    "frozen": {"model": "model: {path: PATH, init: random, freeze: [embed_tokens, layers.0]}", "mesh": "mesh: {}"},
    "hsdp": {"mesh": "mesh: {replicate: 2, expert_parallel: 2, activation_checkpointing: 1}"},
}


@pytest.mark.parametrize("sections", PLANS.values(), ids=PLANS)
def test_plan_of_a_configuration_is_the_one_that_the_trainer_applies(
    sections: dict[str, str], config_json: str, tmp_path: Path
) -> None:
    """By its hash, from the trainer's own code on a fake process group: masters, adapters, frozen weights, experts."""
    folder = str(Path(config_json).parent)
    file = write_run(config_json, tmp_path, **{k: v.replace("PATH", folder) for k, v in sections.items()})
    shown = run("--config", file, "--ranks-per-node", "2", "--json", "--verify")
    assert shown.exit_code == 0, shown.output
    config = resolve_run({}, base=read_config_file(file))
    with fake_mesh(config.mesh_shape) as mesh:
        dealt = config.mesh.expert_parallel
        expert_mesh = make_expert_mesh(mesh, dealt) if dealt > 1 else None
        applied = shard_on_meta(config, mesh, expert_mesh=expert_mesh, reader=None).plan
    assert json.loads(shown.stdout)["plan_hash"] == applied.hash


def test_settings_are_the_configurations_and_flags_win(config_json: str, tmp_path: Path) -> None:
    """And what is from where is said."""
    file = write_run(config_json, tmp_path)
    shown = json.loads(run("--config", file, "--json").stdout)
    assert shown["cluster"]["ranks"] == 4
    assert shown["settings"] == {
        "replicate": 1,
        "expert_parallel": 2,
        "storage": "fp32",
        "island_units": "root",
        "reshard_after_forward": False,
        "offload": False,
        "activation_checkpointing": 2,
        "batch": 2,
        "sequence": 64,
        "micro_batches": 2,
        "optimizer": "muon",
        "attention": ModelConfig(path="x").attention,
    }
    changed = run("--config", file, "--ranks", "8", "--expert-parallel", "1", "--optimizer", "sgd", "--batch", "1")
    assert changed.exit_code == 0, changed.output
    lines = changed.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(lines)
    assert "8 ranks" in text
    assert "reshard, recompute 1 in 2; sgd; 2 micro-batches per step" in text
    assert "From the command line: --ranks, --expert-parallel, --batch, --optimizer" in text
    assert "mesh.activation_checkpointing 2" in text
    assert "From preset tiny: " not in text  # nothing of it is left
    assert "mesh.replicate 1" in text[text.index("From defaults: ") :]


def test_model_of_the_command_line_wins_over_the_configurations(config_json: str, tmp_path: Path) -> None:
    """The file's path is then not looked at."""
    model = "model: {path: /nowhere, init: random}"
    file = write_run(config_json, tmp_path, model=model)
    shown = run(config_json, "--config", file, "--json")
    assert shown.exit_code == 0, shown.output
    missing = run("--config", file)
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
    assert "/nowhere" in missing.stderr


@pytest.mark.parametrize(
    ("sections", "flags", "message"),
    [
        ({"mesh": "mesh: {expert_paralel: 2}"}, (), "did you mean mesh.expert_parallel?"),
        ({"steps": "steps: 0"}, (), "steps: "),
        ({"mesh": "mesh: {expert_parallel: 3}"}, (), "mesh.expert_parallel: 3 does not divide the 4 ranks"),
        ({}, ("--ranks", "3"), "mesh.expert_parallel: 2 does not divide the 3 ranks"),
        ({}, ("--ranks", "32"), "global_batch_size"),
        ({"model": LORA}, ("--storage", "fp32"), "fp32 is for weights that are trained"),
        ({}, ("--attention", "flash"), "--attention: expected one of windowed, eager"),
    ],
)
def test_mistakes_in_a_configuration_are_the_trainers(
    sections: dict[str, str], flags: tuple[str, ...], message: str, config_json: str, tmp_path: Path
) -> None:
    """One line each, exit code 2."""
    shown = run("--config", write_run(config_json, tmp_path, **sections), *flags)
    assert (shown.exit_code, len(shown.stderr.splitlines())) == (2, 1), shown.output
    assert message in shown.stderr


def test_all_mistakes_are_reported_at_once() -> None:
    """One line each, exit code 2."""
    shown = run("deepsek-v4-flash", "--ranks", "12x", "--batch", "0", "--storage", "fp16", "--png", "a.jpg")
    assert shown.exit_code == 2
    errors = shown.stderr.splitlines()
    assert all(line.startswith("error: ") for line in errors)
    for part in ("did you mean deepseek-v4-flash?", "--ranks: ", "--batch: ", "did you mean bf16?", "ends in .png"):
        assert sum(part in line for line in errors) == 1, (part, errors)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "--ranks: missing"),
        ({"ranks": "8", "replicate": "3"}, "cannot be split into 3 equal replicas"),
        ({"ranks": "8", "replicate": "2", "reshard_after_forward": "3"}, "a divisor of the 4 ranks"),
        ({"ranks": "8", "reshard_after_forward": "maybe"}, "true, false or a number of ranks, got 'maybe'"),
        ({"ranks": "12", "ranks_per_node": "8"}, "do not fill nodes of 8"),
        ({"ranks": "8", "device_memory_gib": "nan"}, "a number above 0"),
        ({"ranks": "8", "device_memory_gib": "-1"}, "a number above 0"),
        ({"ranks": "8", "sequence": "1"}, "a whole number of 2 or more"),
        ({"ranks": "8", "optimizer": "adamw-8bit"}, "did you mean adamw_8bit?"),
        ({"ranks": "8", "attention": "flash"}, "expected one of windowed, eager, got 'flash'"),
        ({"ranks": "8", "expert_parallel": "3"}, "a divisor of the 8 ranks of a replica, got 3"),
        ({"ranks": "8", "replicate": "2", "expert_parallel": "8"}, "a divisor of the 4 ranks of a replica, got 8"),
        ({"ranks": "8", "activation_checkpointing": "-1"}, "a whole number of 0 or more"),
    ],
)
def test_impossible_settings_are_refused_in_the_words_of_the_command_line(texts: dict[str, str], message: str) -> None:
    """Before anything is built."""
    with pytest.raises(SettingsError) as caught:
        resolve(texts)
    assert [message in problem for problem in caught.value.problems] == [True]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as a config"),
        ("[]", "no model's config.json"),
        ('{"model_type": "no_such_model"}', "cannot be read as a config"),
        ('{"model_type": "vit"}', "no causal language model"),
        (
            '{"model_type": "deepseek_v4", "num_hidden_layers": 2, "layer_types": ["x", "y"]}',
            "cannot be read as a config",
        ),
    ],
)
def test_a_bad_config_is_one_error(content: str, message: str, tmp_path: Path) -> None:
    """Exit code 2 and one line, with what is wrong in the file."""
    (tmp_path / "config.json").write_text(content)
    shown = run(str(tmp_path), *TINY)
    assert (shown.exit_code, len(shown.stderr.splitlines())) == (2, 1), shown.output
    assert message in shown.stderr


def test_a_sequence_beyond_the_model_is_refused(config_json: str) -> None:
    """The tiny model has 1,024 positions."""
    shown = run(config_json, "--ranks", "2", "--sequence", "2048")
    assert (shown.exit_code, shown.stderr) == (2, "error: --sequence: the model has 1024 positions, got 2048\n")


def test_bad_flags_are_answered_before_transformers_is_imported() -> None:
    """A mistake costs no waiting for a model library."""
    code = (
        "import sys\nfrom dsv4_fsdp.cli import main\nsys.argv = ['dsv4-fsdp', 'plan', 'x', '--ranks', 'y']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    print(e.code, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


# --- Size and speed ---------------------------------------------------------------------------------------------------


def test_presets_have_the_known_number_of_parameters() -> None:
    """284.33 B, and 1.573 T (see the module for what of Pro is an assumption)."""
    totals = {name: sum(p.numel() for p in build_on_meta(load_config(name)).parameters()) for name in PRESETS}
    assert totals == {"deepseek-v4-flash": 284_325_869_015, "deepseek-v4-pro": 1_572_973_188_067}


@pytest.mark.parametrize(
    ("model", "ranks", "most_s"), [("deepseek-v4-flash", 128, 5.0), ("deepseek-v4-pro", 1024, 15.0)]
)
def test_planning_is_fast_and_small(model: str, ranks: int, most_s: float) -> None:
    """Seconds of CPU from config to finished estimate, imports aside, and the whole process's memory: 500 MB.

    The better of two: what else runs on the same core costs CPU time too.
    """
    code = (
        "import time, transformers.models.deepseek_v4.modeling_deepseek_v4\n"
        "from dsv4_fsdp.planner.estimate import Estimator\nfrom dsv4_fsdp.planner.model_sources import load_config\n"
        "from dsv4_fsdp.planner.settings import Cluster, TrainingSettings\n"
        "def seconds():\n"
        "    start = time.process_time()\n"
        f"    estimate = Estimator('x', load_config({model!r})).estimate(Cluster({ranks}, 8), TrainingSettings())\n"
        "    assert estimate.needed_bytes\n"
        "    return time.process_time() - start\n"
        "print(min(seconds(), seconds()))\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cpu_s, peak_kib = map(float, done.stdout.split())
    assert cpu_s < most_s
    assert peak_kib * 1024 < 500e6
