"""What goes wrong before and while a run starts: one clear message, an exit code that is not 0, and nothing lost.

The settings themselves are in ``test_train.py``; here is the world around them: files, checkpoints, data, disks.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tiny_checkpoints import edit, release_checkpoint, released_model, rewrite, transformers_checkpoint
from typer.testing import CliRunner

from dsv4_fsdp.cli import app
from dsv4_fsdp.train.tiny_model import byte_tokenizer

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "examples" / "sft" / "chat.jinja"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = transformers_checkpoint(tmp_path_factory.mktemp("model") / "model", model=released_model())
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data and a configuration that are all right."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    row = {"messages": [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 40}]}
    Path("data.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    settings = {
        "steps": 2,
        "nproc": 1,
        "model": {"path": "model", "init": "checkpoint"},
        "data": {
            "kind": "sft",
            "path": "data.jsonl",
            "template": str(TEMPLATE),
            "sequence_length": 64,
            "global_batch_size": 2,
        },
        "checkpoint": {"export": False},
    }
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def command(*more: str) -> list[str]:
    return ["train", "--config", "run.yaml", "--run-dir", "run", *more]


def no_change() -> None:
    pass


def write(name: str, text: str) -> Callable[[], object]:
    return lambda: Path(name).write_text(text)


def remove(name: str) -> Callable[[], object]:
    return lambda: Path(name).unlink()


def set_config(**values: object) -> Callable[[], object]:
    def change() -> None:
        path = Path("model/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


# --- Found before any process is started: exit code 2, nothing written ------------------------------------------------

BEFORE_START: dict[str, tuple[Callable[[], object], list[str], str]] = {
    "no config file": (remove("run.yaml"), [], "--config: run.yaml cannot be read: No such file or directory"),
    "config is no YAML": (write("run.yaml", "steps: [1"), [], "--config: run.yaml is no YAML: "),
    "config is a list": (write("run.yaml", "- 1"), [], "--config: run.yaml holds no settings"),
    "unknown key": (
        no_change,
        ["--mesh.replicas", "2"],
        "mesh.replicas: no such setting; did you mean ",
    ),
    "no model": (no_change, ["--model.path", "modell"], "model.path: there is no folder 'modell'"),
    "model without config": (remove("model/config.json"), [], "model.path: model has no config.json"),
    "model config is no JSON": (write("model/config.json", "{"), [], "model.path: config.json of model is no JSON"),
    "model without weights": (remove("model/model.safetensors"), [], "model.path: model holds no *.safetensors"),
    "no data": (remove("data.jsonl"), [], "data.path: there is no file 'data.jsonl'"),
    "empty data": (write("data.jsonl", ""), [], "data.path: 'data.jsonl' is empty"),
    "data of another kind": (no_change, ["--data.path", "run.yaml"], "data.path: "),
    "no template": (no_change, ["--data.template", "no.jinja"], "data.template: there is no file 'no.jinja'"),
    "no tokenizer": (no_change, ["--data.tokenizer", "tok"], "data.tokenizer: there is no folder 'tok'"),
    "batch cannot be dealt": (
        no_change,
        ["--nproc", "3"],
        "data.global_batch_size: 2 sequences cannot be dealt evenly to 3 ranks; give a multiple of 3",
    ),
    "replicas do not fit": (no_change, ["--mesh.replicate", "2"], "mesh.replicate: 2 replicas cannot share 1 ranks"),
    "experts do not fit": (
        no_change,
        ["--nproc", "6", "--mesh.expert_parallel", "3", "--data.global_batch_size", "6"],
        "mesh.expert_parallel: 3 does not divide the model's 4 experts",
    ),
    "shorter than a window": (
        no_change,
        ["--data.sequence_length", "20"],
        "data.sequence_length: 20 tokens never fill a window of heavily compressed attention (32)",
    ),
    "longer than the model": (
        set_config(max_position_embeddings=50),
        [],
        "data.sequence_length: 64 tokens are more than the model's 50 positions",
    ),
    "tracker is not installed": (
        no_change,
        ["--logging.tracker", "trackio"],
        "logging.tracker: trackio is not installed; pip install trackio",
    ),
    "nothing to evaluate on": (
        no_change,
        ["--evaluation.every", "1"],
        "evaluation.every: there is nothing",
    ),
    "LoRA with masters": (
        no_change,
        ["--model.train", "lora", "--model.storage", "fp32"],
        "model.storage: fp32 is for weights that are trained",
    ),
}


@pytest.mark.parametrize("case", list(BEFORE_START))
def test_settings_that_do_not_fit_the_world_start_nothing(
    case: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and a line that names the setting; no rank is started and nothing is written."""
    change, more, message = BEFORE_START[case]
    change()
    monkeypatch.setattr("dsv4_fsdp.train.launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    result = CliRunner().invoke(app, command(*more))
    assert result.exit_code == 2
    assert any(line.startswith(f"error: {message}") for line in result.stderr.splitlines()), result.stderr
    assert not Path("run").exists()


# --- Found by the ranks, before a weight is read ----------------------------------------------------------------------


def append(text: str) -> Callable[[], object]:
    return lambda: Path("data.jsonl").write_text(Path("data.jsonl").read_text() + text)


def cut() -> None:
    file = Path("model/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[], object]:
    return lambda: edit(Path("model"), change)


def drop_tensor(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.self_attn.q_a_proj.weight"]


def downcast(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.attn_hc.fn"] = state["model.layers.0.attn_hc.fn"].bfloat16()


def poison(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.2.self_attn.q_a_proj.weight"][3, 4] = float("nan")


def half_a_scale() -> None:
    shutil.rmtree("model")
    folder = release_checkpoint(Path("model"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].pop("layers.0.attn.wq_a.scale")

    def drop(state: dict[str, torch.Tensor]) -> None:
        del state["layers.0.attn.wq_a.scale"]

    rewrite(file, drop)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def small_vocabulary() -> None:
    """The embedding has fewer rows than the tokenizer has tokens."""
    set_config(vocab_size=80)()

    def shrink(state: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = state[name][:80].clone()
        for name in list(state):
            if name.endswith("tid2eid"):
                state[name] = state[name][:80].clone()

    edit(Path("model"), shrink)


IN_RANKS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "JSON broken at a line": (append('{"messages": [\n'), ["data.jsonl:9: "]),
    "roles in the wrong order": (
        append('{"messages": [{"role": "assistant", "content": "x"}]}\n'),
        ["data.jsonl:9: "],
    ),
    "a file cut short": (cut, ["model.safetensors: expected", "(truncated-file)"]),
    "a tensor missing": (change_weights(drop_tensor), ["model.layers.1.self_attn.q_a_proj.weight", "(missing-tensor)"]),
    "an island downcast": (change_weights(downcast), ["model.layers.0.attn_hc.fn", "(island-downcast)"]),
    "NaN weights": (change_weights(poison), ["hold NaN", "model.layers.2.self_attn.q_a_proj.weight"]),
    "a scale missing": (half_a_scale, ["layers.0.attn.wq_a.weight", "(missing-scale)"]),
    "a vocabulary too small": (small_vocabulary, ["the data holds tokens that the model does not know", "below 80"]),
    "nothing is trained": (
        lambda: Path("run.yaml").write_text(Path("run.yaml").read_text() + "\n"),
        ["model.freeze: no parameter has nonsense in its name"],
    ),
}


@pytest.mark.parametrize("case", list(IN_RANKS))
def test_what_only_a_rank_can_see_ends_the_run_with_its_words(case: str, place: Path) -> None:
    """The message without a traceback, an exit code that is not 0, no checkpoint, and the input as it was."""
    change, words = IN_RANKS[case]
    change()
    more = ["--model.freeze", "nonsense"] if case == "nothing is trained" else []
    inputs = {path: path.read_bytes() for path in [*Path("model").iterdir(), Path("data.jsonl")]}
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_fsdp.cli", *command(*more)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    message = " ".join(done.stderr.split())  # lines are broken for a terminal
    for word in words:
        assert word in message
    assert "Traceback" not in done.stderr
    assert not list(Path("run").glob("checkpoints/step-*"))
    assert {path: path.read_bytes() for path in inputs} == inputs


# --- Ranks that do not come -------------------------------------------------------------------------------------------


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("0", ["1 of 2 ranks did not come within 2 s.", "got: nothing from rank 1\n"]),
        ("1", ["the ranks' meeting point 127.0.0.1:", "cannot be reached.", "where: rank 1 on "]),
    ],
    ids=["rank 1 is missing", "rank 0 is missing"],
)
def test_a_rank_that_does_not_come_is_named_in_time(rank: str, words: list[str], tmp_path: Path) -> None:
    """FAULTS 41: within ``mesh.start_timeout_s`` and not torch's half an hour, before anything is read or written."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    settings = ["--run-dir", str(tmp_path / "run"), "--nproc", "2", "--mesh.start_timeout_s", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_fsdp.cli", "train", *settings],
        env={**os.environ, **address, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
