"""Tiny models, real code: DeepSeek-V4 as Transformers and as NeMo AutoModel implement it, at a size for a CPU test.

Each builder is deterministic in ``seed``, leaves the global random state alone, and returns a model in training mode
whose storage is what a user has in hand before sharding: bf16 weights and fp32 islands (or one dtype throughout, if
asked).

Two things are done that the models' own initialisation does not do, because a test would be blind without them:

- Constants are made random. Sinks, position biases, hyper-connection bases and scales, norms and the router bias start
  at exactly 0 or 1, which bf16 holds exactly; a silent downcast of such a tensor would change nothing.
  ``test_reference.py`` proves that rounding any one island to bf16 now changes the logits.
- Hash routers get distinct experts for every token. Transformers leaves the table at zero (both picks are expert 0).

What is not covered: vision towers, multi-token prediction layers, YaRN, quantised weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType
from typing import Any, Literal, NamedTuple, cast
from unittest import mock

import torch
from torch import nn

__all__ = [
    "VOCAB_SIZE",
    "Batch",
    "ModelKind",
    "cpu_stand_ins",
    "island_buffer_names",
    "island_names",
    "model_kind",
    "require_nemo",
    "tiny_batch",
    "tiny_nemo",
    "tiny_transformers",
    "transformers_config",
]

ModelKind = Literal["transformers", "nemo"]

VOCAB_SIZE = 128
_NUM_HEADS = 4
# Attention's own window. Shorter than every test sequence that has an HCA window, so that compressed entries carry
# information that the window does not.
_SLIDING_WINDOW = 16
# Large enough that attention and routing are far from uniform in a model this narrow (the models' own is 0.02).
_INITIALIZER_RANGE = 0.1

_TRANSFORMERS_LAYERS = (
    "sliding_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
# The same four layer types in NeMo's words: 0 sliding, 128 HCA, 4 CSA.
_NEMO_RATIOS = (0, 128, 4, 128)


class Batch(NamedTuple):
    """One sequence of one rank: ``input_ids`` and ``labels``, int64 of shape ``(1, tokens)``, and its loss's factor.

    ``labels`` are already shifted (the label of position t is token t + 1); the last one is -100.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    weight: float = 1.0


def tiny_batch(kind: ModelKind, length: int, seed: int = 0, *, weight: float = 1.0) -> Batch:
    """A random sequence of ``length`` tokens for either kind of model, deterministic in ``seed`` and ``length``."""
    if kind not in ("transformers", "nemo"):
        raise ValueError(f"kind must be 'transformers' or 'nemo', got {kind!r}")
    generator = torch.Generator().manual_seed(1_000_003 * seed + length)
    tokens = torch.randint(0, VOCAB_SIZE, (1, length), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], dim=1)
    return Batch(tokens, labels, weight)


# --- Transformers ----------------------------------------------------------------------------------------------------


def transformers_config(layers: Sequence[str] = _TRANSFORMERS_LAYERS, *, hca_window: int = 32, **over: Any) -> Any:
    """The ``DeepseekV4Config`` of ``tiny_transformers``, for tests that build on meta or save a checkpoint."""
    from transformers import DeepseekV4Config

    num_hash = len(layers) // 2
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(layers),
        "num_attention_heads": _NUM_HEADS,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": list(layers),
        "mlp_layer_types": ["hash_moe"] * num_hash + ["moe"] * (len(layers) - num_hash),
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": hca_window},
        "sliding_window": _SLIDING_WINDOW,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 3,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "max_position_embeddings": 1024,
        "initializer_range": _INITIALIZER_RANGE,
        # With a cache, training takes the compressors' incremental path; activation checkpointing then turns it off.
        # One path for all tests.
        "use_cache": False,
    }
    return DeepseekV4Config(**(values | over))


def tiny_transformers(
    layers: Sequence[str] = _TRANSFORMERS_LAYERS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    hca_window: int = 32,
    seed: int = 0,
    **over: Any,
) -> nn.Module:
    """Transformers' real ``DeepseekV4ForCausalLM`` (about 265 k parameters with the four default layers).

    The first half of the layers has hash routers, the rest top-k routers. ``hca_window`` is the number of tokens that
    one HCA entry compresses; a shorter sequence gives that layer's compressor no gradient. ``over`` overrides fields of
    the config (``tie_word_embeddings=True``, ``n_routed_experts=8``, ...). With ``dtype=torch.bfloat16`` the islands
    are fp32, the same set as ``from_pretrained(dtype=torch.bfloat16)`` leaves.
    """
    from transformers import DeepseekV4ForCausalLM

    config = transformers_config(layers, hca_window=hca_window, **over)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # What `AutoModelForCausalLM.from_config` calls. Eager experts: one matmul each, the same on every machine.
        model = DeepseekV4ForCausalLM._from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
    _finish(model, dtype, seed)
    return model.train()


# --- NeMo AutoModel --------------------------------------------------------------------------------------------------


def require_nemo() -> None:
    """Skip the calling test if nemo-automodel is not installed. For the test itself: a rank cannot skip."""
    import pytest

    if importlib.util.find_spec("nemo_automodel") is None:
        pytest.skip("nemo-automodel is not installed")


@functools.cache
def cpu_stand_ins() -> None:
    """Import NeMo AutoModel so that it is usable on a CPU: quietly, and with ``torch.compile`` doing nothing in it.

    NeMo decorates its fp32 RMSNorm (an opaque custom operator, so nothing is fused) and its expert activations with
    ``torch.compile``. On a CPU the first forward of a process then spends 30 s in inductor, and the import 2 s more.
    The functions under the decorators are NeMo's own, so the numbers are those that its users get.

    Runs once per process. nemo-automodel 0.7.0 needs no stand-in for CUDA streams: its DeepSeek-V4 with
    ``dispatcher="torch"`` opens none.
    """

    def pass_through(model: Any = None, **_: Any) -> Any:
        return model if model is not None else lambda function: function

    with mock.patch("torch.compile", pass_through), _quiet():
        from nemo_automodel.components.models.common import utils
        from nemo_automodel.components.models.deepseek_v4 import model  # noqa: F401
        from nemo_automodel.components.moe import experts
        from nemo_automodel.components.moe.megatron import moe_utils

    # For a process that had imported NeMo before: take the decorators off again.
    for module in (utils, experts, moe_utils):
        for name, value in list(vars(module).items()):
            eager = getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, FunctionType) else None
            if eager is not None:
                setattr(module, name, eager)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what NeMo 0.7.0 says at import and construction (it was written for transformers 5.18)."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def tiny_nemo(
    num_layers: int | None = None,
    compress_ratios: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **over: Any,
) -> nn.Module:
    """NeMo AutoModel's real ``DeepseekV4ForCausalLM`` (about 271 k parameters with four layers).

    ``compress_ratios`` defaults to 0, 128, 4, 128 (sliding, HCA, CSA, HCA), repeated up to ``num_layers`` (default 4).
    The model takes any ratio, and everything but 0 and 4 behaves like HCA; but only at 128 does it run its own graph
    alignment. A sequence shorter than the ratio gives that layer's compressor no gradient. The first half of the layers
    has hash routers. ``over`` overrides fields of NeMo's ``DeepseekV4Config``.

    The unsharded model runs as it is: NeMo 0.7.0 casts the input of its fp32 ``lm_head`` itself.

    Raises ``ImportError`` if NeMo AutoModel is not installed; a test calls ``require_nemo()`` first.
    """
    cpu_stand_ins()
    if compress_ratios is None:
        num_layers = 4 if num_layers is None else num_layers
        compress_ratios = [_NEMO_RATIOS[i % len(_NEMO_RATIOS)] for i in range(num_layers)]
    elif num_layers is not None and num_layers != len(compress_ratios):
        raise ValueError(f"num_layers is {num_layers}, but compress_ratios has {len(compress_ratios)} entries")

    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config
    from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(compress_ratios),
        "num_attention_heads": _NUM_HEADS,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "compress_ratios": list(compress_ratios),
        "num_hash_layers": len(compress_ratios) // 2,
        "sliding_window": _SLIDING_WINDOW,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 3,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1024,
        "initializer_range": _INITIALIZER_RANGE,
        "use_cache": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    # What BackendConfig chooses by itself on a machine with neither CUDA nor TransformerEngine, said in full so that
    # the model is the same on any machine. DeepSeek-V4 runs its eager attention for every `attn` but "tilelang".
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch_fp32",
        rope_fusion=False,
        experts="torch",
        dispatcher="torch",
        enable_hf_state_dict_adapter=False,
    )
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**(values | over)), backend=backend)
        model.initialize_weights(torch.device("cpu"), dtype=dtype)
    _finish(model, dtype, seed)
    return model.train()


# --- What a model's class says about its islands ---------------------------------------------------------------------


def model_kind(model: nn.Module) -> ModelKind:
    """Which of the two implementations ``model`` is."""
    return "nemo" if type(model).__module__.startswith("nemo_automodel.") else "transformers"


def _is_island(model: nn.Module) -> Callable[[str], bool]:
    """The class's own rule: ``_keep_in_fp32_modules_strict``, matched as its own loader matches it.

    Transformers searches the name for the patterns as regular expressions in which ``*`` means any text
    (``core_model_loading.build_glob_alternation``); NeMo looks for each as a substring
    (``cast_model_to_dtype``).
    """
    patterns = sorted(cast(Collection[str], model._keep_in_fp32_modules_strict))
    if model_kind(model) == "nemo":
        return lambda name: any(pattern in name for pattern in patterns)
    search = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns)).search
    return lambda name: search(name) is not None


def island_names(model: nn.Module) -> list[str]:
    """The parameters that the model's class wants in fp32, whatever dtype they have now, in the model's order."""
    is_island = _is_island(model)
    return [name for name, _ in model.named_parameters() if is_island(name)]


def island_buffer_names(model: nn.Module) -> list[str]:
    """The saved floating buffers that the model's class wants in fp32 (the router biases)."""
    is_island = _is_island(model)
    saved = model.state_dict().keys()
    return [name for name, b in model.named_buffers() if b.is_floating_point() and name in saved and is_island(name)]


# --- After construction ----------------------------------------------------------------------------------------------


def _finish(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Fill what initialisation left constant, then check that every dtype is what the class's rule says."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                scores = torch.rand(tensor.shape[0], _num_experts(model), generator=generator)
                tensor.copy_(scores.argsort(dim=1)[:, : tensor.shape[1]])
            elif name.endswith("inv_freq") or not tensor.is_floating_point():
                continue
            elif bool((tensor == tensor.flatten()[0]).all()):
                # Only differences between the router biases matter. An offset of 4 makes a bf16 rounding (up to 2**-6)
                # large beside the differences between scores, so that it changes routes even in a short sequence.
                offset = 4.0 if name.endswith("e_score_correction_bias") else 0.0
                noise = torch.rand(tensor.shape, generator=generator) - 0.5
                tensor.copy_(tensor.float() + offset + noise)

    # Islands are built in fp32 by both classes, so this is a check and not a cast: nothing was rounded on the way.
    is_island = _is_island(model)
    wrong = [
        f"{name}: {param.dtype}"
        for name, param in model.named_parameters()
        if param.dtype != (torch.float32 if is_island(name) else dtype)
    ]
    if wrong:
        raise AssertionError(f"{type(model).__name__} was not built with the dtypes that its class asks for: {wrong}")


def _num_experts(model: nn.Module) -> int:
    return int(cast(Any, model).config.n_routed_experts)
