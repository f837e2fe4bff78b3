"""What a model's ``config.json`` says that a run must fit to. Read as JSON: no library is imported, no model built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import TrainConfig

__all__ = ["ModelFacts", "facts_of", "model_problems"]

_TINY = {"n_routed_experts": 8, "max_position_embeddings": 1024, "num_hidden_layers": 4}
# The release's windows, and Transformers' defaults where a config does not say.
_HCA = "heavily_compressed_attention"
_HCA_WINDOW = 128


@dataclass(frozen=True)
class ModelFacts:
    """Of one model: ``None`` where its config does not say.

    Attributes:
        num_experts: routed experts of a layer.
        max_positions: the longest sequence it is made for, in tokens.
        hca_window: tokens that heavily compressed attention makes one entry of.
        vocab_size: rows of the embedding.
    """

    num_experts: int | None
    max_positions: int | None
    hca_window: int | None
    vocab_size: int | None


def facts_of(values: dict[str, Any]) -> ModelFacts:
    """What the values of a ``config.json`` say."""

    def number(key: str) -> int | None:
        value = values.get(key)
        return value if isinstance(value, int) else None

    rates = values.get("compress_rates")
    window = rates.get(_HCA, _HCA_WINDOW) if isinstance(rates, dict) else _HCA_WINDOW
    kinds = values.get("layer_types") or values.get("compress_ratios")
    has_hca = not isinstance(kinds, list) or _HCA in kinds or _HCA_WINDOW in kinds
    return ModelFacts(
        number("n_routed_experts"),
        number("max_position_embeddings"),
        window if has_hca and values.get("model_type") == "deepseek_v4" else None,
        number("vocab_size"),
    )


def model_problems(config: TrainConfig) -> list[str]:
    """What is wrong with ``model.path``, and with the settings that its ``config.json`` bounds, one line each."""
    if config.model.path == "tiny":
        facts = facts_of(_TINY | {"model_type": "deepseek_v4"})
    else:
        folder = Path(config.model.path)
        if not folder.is_dir():
            return [f"model.path: there is no folder {config.model.path!r}; if it has moved, name it with --model.path"]
        try:
            values = json.loads((folder / "config.json").read_text())
        except OSError:
            return [f"model.path: {config.model.path} has no config.json; name the folder that holds the model"]
        except ValueError as error:
            return [f"model.path: config.json of {config.model.path} is no JSON: {error}"]
        if not isinstance(values, dict):
            return [f"model.path: config.json of {config.model.path} is no JSON object"]
        if config.model.init == "checkpoint" and not any(folder.glob("*.safetensors")):
            return [f"model.path: {config.model.path} holds no *.safetensors; with --model.init random it needs none"]
        facts = facts_of(values)
    problems = []
    dealt = config.mesh.expert_parallel
    if dealt > 1 and facts.num_experts is not None and facts.num_experts % dealt:
        problems.append(f"mesh.expert_parallel: {dealt} does not divide the model's {facts.num_experts} experts")
    longest = config.data.longest
    setting = "data.sequence_lengths" if config.data.kind == "stdlib" else "data.sequence_length"
    if facts.max_positions is not None and longest > facts.max_positions:
        problems.append(f"{setting}: {longest} tokens are more than the model's {facts.max_positions} positions")
    if facts.hca_window is not None and longest < facts.hca_window:
        problems.append(
            f"{setting}: {longest} tokens never fill a window of heavily compressed attention "
            f"({facts.hca_window}), whose weights would not train; give {facts.hca_window} or more"
        )
    return problems
