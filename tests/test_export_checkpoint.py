"""Exports of a training checkpoint on disk: what training did not touch keeps its bits, the rest its precision."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import (
    base_fp8_checkpoint,
    edit,
    nemo_release_checkpoint,
    release_checkpoint,
    released_model,
    training_checkpoint,
    transformers_checkpoint,
)
from tiny_models import require_nemo, tiny_transformers

from dsv4_fsdp.checkpoint_audit import audit_checkpoint
from dsv4_fsdp.checkpoint_layout import CheckpointLayout, model_of_folder
from dsv4_fsdp.errors import ExportError
from dsv4_fsdp.export import Exported, export_checkpoint, find_checkpoint
from dsv4_fsdp.export.release_names import ReleaseNames
from dsv4_fsdp.export.source_checkpoint import same_bits
from dsv4_fsdp.export.verify import refuse_what_stock_refuses
from dsv4_fsdp.names import canonical_name, is_adapter_name
from dsv4_fsdp.safetensors_headers import read_header, read_tensor_bytes

ATTENTION = "model.layers.1.self_attn.q_b_proj.weight"  # FP8 of two blocks in the release
EXPERTS = "model.layers.2.mlp.experts.down_proj"  # FP4 in the release
SINKS = "model.layers.0.self_attn.sinks"
NORM = "model.layers.3.input_layernorm.weight"  # bf16 in the release, fp32 in the model
EMBEDDING = "model.embed_tokens.weight"

Raw = dict[str, tuple[str, tuple[int, ...], bytes]]


def raw(folder: Path) -> Raw:
    """Every tensor of a checkpoint as it is on disk: dtype, shape, bytes."""
    found: Raw = {}
    for file in sorted(folder.glob("*.safetensors")):
        header = read_header(file)
        assert header.problem is None, header.problem
        for name, tensor in header.tensors.items():
            assert name not in found
            found[name] = tensor.dtype, tensor.shape, b"".join(read_tensor_bytes(file, tensor))
    return found


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def trained(*names: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The state of ``released_model()`` after training changed one element of each of ``names``; weights in dtype."""
    state = {name: tensor.clone() for name, tensor in released_model().state_dict().items()}
    if dtype is not None:
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    for name in names:
        state[name].view(-1)[5] += 1.25 + 2**-20
    return state


def run_export(tmp_path: Path, source: Path | None, state: dict[str, torch.Tensor], **options: Any) -> Exported:
    run = tmp_path / "run" / "checkpoints" / "step-00000100"
    training_checkpoint(run, released_model(), source=source, state=state)
    return export_checkpoint(run, tmp_path / "export", **{"check": False} | options)


# --- Untouched -------------------------------------------------------------------------------------------------------

RELEASES: dict[str, Callable[[Path], Path]] = {
    "fp4_experts": release_checkpoint,
    "base": base_fp8_checkpoint,
    "base_fp32_scales": lambda folder: base_fp8_checkpoint(folder, scale_dtype=torch.float32),
}


@pytest.mark.parametrize("form", RELEASES)
def test_an_untouched_load_and_export_keeps_every_key_shape_dtype_and_bit(form: str, tmp_path: Path) -> None:
    """FP8 blocks, packed FP4 experts, scales, bf16 norms and MTP tensors come out as they went in."""
    source = RELEASES[form](tmp_path / "source")
    exported = run_export(tmp_path, source, trained(), layout="release")
    assert raw(tmp_path / "export") == raw(source)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "export"))
    for key in ("quantization_config", "expert_dtype", "num_nextn_predict_layers", "architectures"):
        assert after[key] == before[key]
    assert exported.written is not None
    assert exported.written.changed == 0
    assert exported.written.not_loaded == 41


def test_untouched_fp32_master_weights_are_recognised(tmp_path: Path) -> None:
    """A run with fp32 storage holds the source's values in another dtype."""
    source = release_checkpoint(tmp_path / "source")
    run_export(tmp_path, source, trained(dtype=torch.float32), layout="release")
    assert raw(tmp_path / "export") == raw(source)


def test_an_untouched_transformers_checkpoint_keeps_what_its_own_loader_would_round(tmp_path: Path) -> None:
    """A projection that the source stores in fp32 is bf16 in the model; its bits come from the source (fault 5)."""
    name = "model.layers.1.self_attn.compressor.kv_proj.weight"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].float() + 2**-12

    source = edit(transformers_checkpoint(tmp_path / "source", model=released_model()), widen)
    state = trained()
    state[name] = (state[name].float() + 2**-12).bfloat16()
    run_export(tmp_path, source, state)
    assert raw(tmp_path / "export") == raw(source)


def test_a_release_becomes_a_transformers_checkpoint_without_quantisation(tmp_path: Path) -> None:
    """Fused experts, no scale, no quantization_config, dequantised MTP tensors, norms in the source's bf16."""
    source = release_checkpoint(tmp_path / "source")
    run_export(tmp_path, source, trained(ATTENTION))
    tensors = loaded(tmp_path / "export")
    expected = trained(ATTENTION)
    assert {name for name in tensors if not name.startswith("mtp.")} == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(tensors[name].to(tensor.dtype), tensor), name
    assert tensors[NORM].dtype == torch.bfloat16
    assert tensors[SINKS].dtype == torch.float32
    assert {tensors[name].dtype for name in tensors if name.startswith("mtp.")} == {torch.bfloat16, torch.float32}
    assert tensors["mtp.0.ffn.experts.0.w1.weight"].shape == (32, 64)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "quantization_config" not in config
    assert "expert_dtype" not in config
    assert config["dtype"] == "bfloat16"


def test_a_release_layout_is_made_of_a_transformers_source_too(tmp_path: Path) -> None:
    """Names and un-fusing by Transformers' reverse conversion; values as trained; no MTP, and the config says so."""
    source = transformers_checkpoint(tmp_path / "source", model=released_model())
    run_export(tmp_path, source, trained(EXPERTS), layout="release")
    published = raw(release_checkpoint(tmp_path / "published"))
    wanted = {name for name in published if not name.endswith(".scale") and not name.startswith("mtp.")}
    tensors = loaded(tmp_path / "export")
    assert tensors.keys() == wanted
    assert torch.equal(tensors["layers.2.ffn.experts.3.w2.weight"], trained(EXPERTS)[EXPERTS][3])
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 0


# --- Changed ---------------------------------------------------------------------------------------------------------


def test_only_what_training_changed_leaves_the_sources_format(tmp_path: Path) -> None:
    """Changed modules lose their scales, and the config lists them as not quantised; the rest keeps its bits."""
    source = release_checkpoint(tmp_path / "source")
    run_export(tmp_path, source, trained(ATTENTION, EXPERTS, SINKS, NORM), layout="release", check=True)
    before, after = raw(source), raw(tmp_path / "export")
    changed = {name for name in before if before[name] != after.get(name)}
    experts = {
        f"layers.2.ffn.experts.{i}.w{j}.{leaf}" for i in range(4) for j in (1, 2, 3) for leaf in ("weight", "scale")
    }
    attention = {"layers.1.attn.wq_b.weight", "layers.1.attn.wq_b.scale"}
    assert changed == experts | attention | {"layers.0.attn.attn_sink", "layers.3.attn_norm.weight"}
    assert before.keys() - after.keys() == {name for name in experts | attention if name.endswith("scale")}
    assert after["layers.1.attn.wq_b.weight"][:2] == ("BF16", (256, 32))
    assert after["layers.3.attn_norm.weight"][0] == "F32"
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["layers.1.attn.wq_b", "layers.2.ffn.experts"]


def test_a_loader_that_keeps_fp8_leaves_the_listed_modules_alone(tmp_path: Path) -> None:
    """Transformers' own reading of modules_to_not_convert: these two plain, their like in other layers FP8."""
    from transformers import AutoConfig, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    run_export(tmp_path, release_checkpoint(tmp_path / "source"), trained(ATTENTION, EXPERTS), layout="release")
    model: Any = model_of_folder(tmp_path / "export")
    said = AutoConfig.from_pretrained(tmp_path / "export").quantization_config
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config.from_dict(said), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert not issubclass(kinds["model.layers.1.self_attn.q_b_proj"], FP8Linear)
    assert issubclass(kinds["model.layers.3.self_attn.q_b_proj"], FP8Linear)
    assert not issubclass(kinds["model.layers.2.mlp.experts"], FP8Experts)
    assert issubclass(kinds["model.layers.1.mlp.experts"], FP8Experts)


def test_master_weights_are_rounded_once_unless_fp32_is_asked_for(tmp_path: Path) -> None:
    """To nearest bf16, as the model computes; islands stay fp32; it is counted and said."""
    state = trained(ATTENTION, EMBEDDING, SINKS, dtype=torch.float32)
    exported = run_export(tmp_path, None, state)
    assert exported.written is not None
    assert exported.written.rounded == sum(t.dtype == torch.bfloat16 for t in released_model().state_dict().values())
    tensors = loaded(tmp_path / "export")
    assert same_bits(tensors[ATTENTION], state[ATTENTION].bfloat16())
    assert same_bits(tensors[SINKS], state[SINKS])

    export_checkpoint(tmp_path / "run", tmp_path / "wide", dtype=torch.float32, check=False)
    wide = loaded(tmp_path / "wide")
    assert all(same_bits(wide[name], tensor) for name, tensor in state.items())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_a_runs_own_islands_are_no_master_weights(tmp_path: Path) -> None:
    """``model/islands.json`` of the trainer: these stay fp32, also without a source; the file itself stays out."""
    state = trained(EMBEDDING, ATTENTION, dtype=torch.float32)
    run = training_checkpoint(tmp_path / "run", released_model(), state=state)
    (run / "model" / "islands.json").write_text(json.dumps(["embed_tokens.weight"]))
    export_checkpoint(run, tmp_path / "export", check=False)
    tensors = loaded(tmp_path / "export")
    assert same_bits(tensors[EMBEDDING], state[EMBEDDING])
    assert same_bits(tensors[ATTENTION], state[ATTENTION].bfloat16())
    assert not (tmp_path / "export" / "islands.json").exists()


def test_mtp_tensors_are_left_out_on_request(tmp_path: Path) -> None:
    """And the config no longer promises them."""
    source = release_checkpoint(tmp_path / "source")
    run_export(tmp_path, source, trained(), layout="release", with_mtp=False)
    assert raw(tmp_path / "export") == {k: v for k, v in raw(source).items() if not k.startswith("mtp.")}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_files_are_bounded_and_an_audit_passes(tmp_path: Path) -> None:
    """Shards of at most the size asked for, with an index; the audit of the export finds nothing."""
    run_export(tmp_path, None, trained(), max_shard_bytes=100_000)
    files = sorted((tmp_path / "export").glob("model-*-of-*.safetensors"))
    assert len(files) > 5
    for file in files:
        header = read_header(file)
        assert sum(t.end - t.start for t in header.tensors.values()) <= 100_000
        assert all(t.start % 4 == 0 or t.dtype != "F32" for t in header.tensors.values())
    assert audit_checkpoint(tmp_path / "export").ok
    refuse_what_stock_refuses(tmp_path / "export", onto_meta=True)


def test_a_tied_pair_is_written_once(tmp_path: Path) -> None:
    """A training checkpoint that holds it under both names included (fault 13)."""
    model: Any = tiny_transformers(tie_word_embeddings=True)
    run = training_checkpoint(tmp_path / "run", model)
    export_checkpoint(run, tmp_path / "export", check=False)
    assert "model.embed_tokens.weight" in raw(tmp_path / "export")
    assert "lm_head.weight" not in raw(tmp_path / "export")


# --- Names -----------------------------------------------------------------------------------------------------------


def test_release_names_are_those_of_an_independent_implementation(tmp_path: Path) -> None:
    """NeMo AutoModel's adapter writes the same keys for the same layers, in every attention and router type."""
    require_nemo()
    from tiny_models import transformers_config

    published = raw(nemo_release_checkpoint(tmp_path))
    model = model_of_folder(tmp_path)
    assert model.config.layer_types == transformers_config().layer_types
    names = ReleaseNames(model, CheckpointLayout(model))
    made = {key for name, tensor in model.state_dict().items() for key, _ in names.parts(name, tensor)}
    assert made == {name for name in published if not name.endswith(".scale")}


def test_the_words_of_wrappers_are_not_in_exported_names(tmp_path: Path) -> None:
    """Checkpointing, compile and FSDP words in a training checkpoint (fault 26)."""
    state = trained()
    state["model.layers.0._checkpoint_wrapped_module.self_attn.sinks"] = state.pop(SINKS)
    state["_orig_mod.lm_head.weight"] = state.pop("lm_head.weight")
    run_export(tmp_path, None, state)
    assert raw(tmp_path / "export").keys() == trained().keys()


# --- What is refused --------------------------------------------------------------------------------------------------


def test_an_island_that_was_trained_in_bf16_is_refused(tmp_path: Path) -> None:
    """Its fp32 bits are gone; an export would hide that."""
    state = trained()
    state[SINKS] = state[SINKS].bfloat16()
    with pytest.raises(ExportError, match=r"(?s)an fp32 island was trained in torch.bfloat16.*layers\.0.*sinks"):
        run_export(tmp_path, None, state)
    assert not (tmp_path / "export").exists()


def test_one_ranks_experts_are_not_taken_for_all(tmp_path: Path) -> None:
    """Two of four experts: the shape is compared with the config's expert count (fault 17)."""
    state = trained()
    state[EXPERTS] = state[EXPERTS][:2].clone()
    with pytest.raises(ExportError, match=r"down_proj: expected \[4, 64, 32\], got \[2, 64, 32\]"):
        run_export(tmp_path, None, state)


def test_an_e8m0_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """Byte 255; as a number it would make every weight of its block nan (fault 14)."""
    source = release_checkpoint(tmp_path / "source")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.attn.wq_b.scale"].view(torch.uint8)[0, 0] = 255

    edit(source, spoil)
    with pytest.raises(ExportError, match=r"(?s)a block scale .* is not a number.*layers\.1\.attn\.wq_b\.scale"):
        run_export(tmp_path, source, trained(), layout="release")


def test_scales_are_powers_of_two_and_not_bytes() -> None:
    """The value that an export is compared with: byte 120 is 2**-7, not 120 (fault 14)."""
    assert torch.tensor([120], dtype=torch.uint8).view(torch.float8_e8m0fnu).float().item() == math.ldexp(1, -7)


def test_a_logit_that_differs_is_found_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last proof: a writer that spoils one element of one tensor."""
    from dsv4_fsdp.export.safetensors_writer import SafetensorsWriter

    add_tensor = SafetensorsWriter.add_tensor

    def spoiling(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.clone()
        if name == "lm_head.weight":
            tensor[3, 3] += 1
        add_tensor(self, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "add_tensor", spoiling)
    with pytest.raises(ExportError, match="does not give the trained model's logits"):
        run_export(tmp_path, None, trained(), check=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


# --- LoRA ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora_model() -> Any:
    """A PeftModel on ``released_model()``: attention, and both tensors of the experts; its adapters are not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_a_proj", "o_b_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers 5.24 for `is_gradient_checkpointing`
        torch.manual_seed(1)
        model = get_peft_model(copy.deepcopy(released_model()), config)
        for name, param in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(param, std=0.05)
    return model


def lora_state(model: Any, *, saves_base: bool) -> dict[str, torch.Tensor]:
    """Under canonical names, as the trainer saves it: everything, or the adapter and the buffers."""
    frozen = {canonical_name(n) for n, _ in model.named_parameters() if not is_adapter_name(n)}
    state = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if saves_base or name not in frozen}


@pytest.mark.parametrize("saves_base", [True, False], ids=["whole_state", "without_base"])
def test_a_lora_run_exports_an_adapter_that_stock_peft_loads(saves_base: bool, lora_model: Any, tmp_path: Path) -> None:
    """Its keys and dtypes are those of peft's own save; reloaded on the release it gives equal logits."""
    source = release_checkpoint(tmp_path / "source")
    state = lora_state(lora_model, saves_base=saves_base)
    run = training_checkpoint(tmp_path / "run", lora_model, source=source, state=state, leaves_out_base=not saves_base)
    exported = export_checkpoint(run, tmp_path / "export", check=saves_base)
    assert (exported.reloaded is not None) == saves_base
    lora_model.save_pretrained(tmp_path / "by_peft", save_embedding_layers=False)
    ours, peft = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("export", "by_peft"))
    assert ours.keys() == peft.keys()
    assert all(same_bits(ours[key], peft[key]) for key in peft)
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(source)


@pytest.mark.parametrize("saves_base", [True, False], ids=["whole_state", "without_base"])
def test_a_merge_is_pefts_own_and_leaves_other_tensors_alone(saves_base: bool, lora_model: Any, tmp_path: Path) -> None:
    """Equal to peft's merge of the fp32 model, rounded once; what has no adapter keeps the release's bits."""
    source = release_checkpoint(tmp_path / "source")
    state = lora_state(lora_model, saves_base=saves_base)
    run = training_checkpoint(tmp_path / "run", lora_model, source=source, state=state, leaves_out_base=not saves_base)
    export_checkpoint(run, tmp_path / "export", merge=True, check=False)
    merged = copy.deepcopy(lora_model).float().merge_and_unload().state_dict()
    tensors = loaded(tmp_path / "export")
    for name, tensor in released_model().state_dict().items():
        assert torch.equal(tensors[name].to(tensor.dtype), merged[name].to(tensor.dtype)), name
    assert not torch.equal(tensors[EXPERTS], released_model().state_dict()[EXPERTS])

    export_checkpoint(run, tmp_path / "release", merge=True, layout="release", check=False)
    after, before = raw(tmp_path / "release"), raw(source)
    same = {name for name in before if before[name] == after.get(name)}
    assert {"layers.1.attn.wq_b.weight", "layers.1.attn.wq_b.scale", "mtp.0.e_proj.weight"} <= same
    assert not any(".wq_a." in n or ".wo_b." in n or ".ffn.experts." in n for n in same if not n.startswith("mtp."))


def test_a_merge_into_a_frozen_island_of_the_run_is_not_rounded(lora_model: Any, tmp_path: Path) -> None:
    """A weight that the source stores in fp32 and the class does not list: read from there as the run held it."""
    name = "model.layers.1.self_attn.q_a_proj.weight"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].float() + 2**-20

    source = edit(transformers_checkpoint(tmp_path / "source", model=released_model()), widen)
    for saves_base in (True, False):
        state = lora_state(lora_model, saves_base=saves_base)
        if saves_base:
            state[name] = state[name].float() + 2**-20
        run = tmp_path / f"run {saves_base}"
        training_checkpoint(run, lora_model, source=source, state=state, leaves_out_base=not saves_base)
        (run / "model" / "islands.json").write_text(json.dumps([name]))
        export_checkpoint(run, tmp_path / f"export {saves_base}", merge=True, check=False)
    assert raw(tmp_path / "export False")[name][0] == "F32"
    assert raw(tmp_path / "export False") == raw(tmp_path / "export True")


# --- Finding it -------------------------------------------------------------------------------------------------------


def test_a_run_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    """By step number; what has no manifest was not written to its end."""
    for step, complete in ((90, True), (100, True), (110, False)):
        folder = tmp_path / "checkpoints" / f"step-{step:08}"
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        if complete:
            (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "source": None}))
    assert find_checkpoint(tmp_path).step == 100
    assert find_checkpoint(tmp_path / "checkpoints" / "step-00000090").step == 90
