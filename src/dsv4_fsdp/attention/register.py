"""The place of windowed attention in transformers: ``attn_implementation="dsv4_windowed"``.

Two functions go into transformers' public interfaces. The mask function returns a :class:`Tokens`, which knows which
tokens are padding, in place of a mask. The attention function calls :func:`~.windowed.windowed_attention`.

What there is no interface for: in this model the compressors and the indexer build tensors of the size of a mask
themselves, and position ids, which tell packed documents apart, do not reach the attention function. So the ``forward``
of four classes first looks whether it is meant, and otherwise is transformers' own:

- ``DeepseekV4Attention``: under this implementation it runs transformers' forward with a :class:`Call` in place of
  ``position_ids`` (which only the compressor reads) and of the mask;
- the two compressors and the indexer: given a :class:`Call`, they compute what :mod:`.compressors` says and leave in
  the call who sees which entries.

All of it is done once, when this module is imported, and changes no model that runs another implementation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dsv4_fsdp.errors import AttentionError

from .compressors import Entries, choose_entries, compress_heavily, compress_sparsely
from .documents import Documents, starts_a_document
from .windowed import Sight, windowed_attention

__all__ = ["IMPLEMENTATION", "TESTED_VERSIONS", "use_windowed_attention"]

IMPLEMENTATION = "dsv4_windowed"
TESTED_VERSIONS = ("5.24.0",)


class Tokens:
    """What a forward knows of its tokens: in place of a mask, one for all layers.

    Attributes:
        real: bool ``[B, L]`` over the local keys (cached ones first), false for padding; ``None``: no padding.
    """

    def __init__(self, real: torch.Tensor | None = None) -> None:
        self.real = real
        self._documents: tuple[torch.Tensor, Documents | None] | None = None

    def documents(self, position_ids: torch.Tensor, batch: int) -> Documents | None:
        """The documents that ``position_ids`` tell apart; ``None`` if every row is one, from position 0 on.

        Looked up once per forward: it reads a number from the device. A compiled graph cannot branch on it and always
        gets the documents, to the same effect; each layer its own, since a graph that finds those of another is another
        graph, and a recomputed block would run it the second time.
        """
        if torch.compiler.is_compiling():
            return Documents(position_ids.expand(batch, -1))
        if self._documents is None or self._documents[0] is not position_ids:
            found = None
            if bool(starts_a_document(position_ids).any() | (position_ids[:, :1] != 0).any()):
                found = Documents(position_ids.expand(batch, -1))
            self._documents = (position_ids, found)
        return self._documents[1]

    def refuse_documents(self, position_ids: torch.Tensor) -> None:
        """Raise if there are documents to tell apart, among tokens that are no padding. Looked up once likewise."""
        if torch.compiler.is_compiling() or (self._documents is not None and self._documents[0] is position_ids):
            return
        begins = starts_a_document(position_ids)
        if self.real is not None:
            real = self.real[:, self.real.shape[1] - position_ids.shape[1] :]
            begins = begins & real[:, 1:] & real[:, :-1]
        if bool(begins.any()):
            raise AttentionError(
                "position_ids restart within a row, and there is a key-value cache.\n"
                "expected: packed documents without a cache, whose compressed windows know no documents\n"
                f"got: {int(begins.sum())} restarts in position_ids of shape {tuple(position_ids.shape)}\n"
                "what to do: pass use_cache=False to train on packed documents (model.config.use_cache = False)."
            )
        self._documents = (position_ids, None)


class Call:
    """One call of one attention layer; stands for its position ids and its mask."""

    def __init__(self, tokens: Tokens, position_ids: torch.Tensor, batch: int, *, cached: bool) -> None:
        self.tokens = tokens
        self.position_ids = position_ids
        self.documents: Documents | None = None
        if cached:
            tokens.refuse_documents(position_ids)
        else:
            self.documents = tokens.documents(position_ids, batch)
        self.entries: Entries | None = None

    def sight(self, window: int) -> Sight:
        """What the queries see."""
        start = None if self.documents is None else self.documents.start
        if self.entries is None:
            return Sight(window, real=self.tokens.real, start=start)
        num_entries, rate, first, visible, choice = self.entries
        return Sight(window, num_entries, rate, self.tokens.real, start, first, visible, choice)


def use_windowed_attention(model: nn.Module) -> None:
    """Make ``model``, Transformers' DeepSeek-V4 or something that holds one (a PEFT model), attend in windows.

    Only the attention's own computation changes, not its parameters or their names. May be called before or after
    sharding. ``model.set_attn_implementation("eager")`` takes it back. The same from the start: import
    ``dsv4_fsdp.attention`` and pass ``attn_implementation="dsv4_windowed"`` to ``from_pretrained``.

    Raises:
        AttentionError: there is no Transformers DeepSeek-V4 in ``model``.
        UnsupportedLibrary: transformers' model is not the one this was written for.
    """
    found = [module for module in model.modules() if isinstance(module, modeling.DeepseekV4PreTrainedModel)]
    if not found:
        raise AttentionError(
            "use_windowed_attention found no model to change.\n"
            "expected: Transformers' DeepseekV4ForCausalLM or DeepseekV4Model, or a module that holds one\n"
            f"got: {type(model).__module__}.{type(model).__qualname__}\n"
            "what to do: leave other models alone; NeMo AutoModel's DeepSeek-V4 chooses its attention by its backend."
        )
    for module in found:
        module.set_attn_implementation(IMPLEMENTATION)


# --- The two interfaces ----------------------------------------------------------------------------------------------


def _tokens_in_place_of_a_mask(
    *, kv_length: int, kv_offset: int = 0, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **_: Any
) -> Tokens:
    """Transformers' mask interface. ``attention_mask`` is bool ``[B, all tokens so far]``."""
    if use_vmap:
        raise AttentionError(
            f"{IMPLEMENTATION} cannot add a mask function of the caller's to its window.\n"
            "expected: no or_mask_function or and_mask_function\ngot: one of them\n"
            'what to do: use attn_implementation="eager" for such a mask.'
        )
    if attention_mask is None:
        return Tokens()
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing), value=False)
    return Tokens(attention_mask[:, kv_offset : kv_offset + kv_length].bool())


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface. ``key`` ``[B, 1, L + T, D]`` is ``value`` too; returns no weights."""
    if not isinstance(attention_mask, Call) or sliding_window is None or s_aux is None:
        raise AttentionError(
            f"{IMPLEMENTATION} is attention for Transformers' DeepSeek-V4 and nothing else.\n"
            f"expected: a call from its DeepseekV4Attention\ngot: one from {type(module).__qualname__}\n"
            "what to do: set attn_implementation for the DeepSeek-V4 part of the model only."
        )
    if dropout:
        raise AttentionError(
            f"{IMPLEMENTATION} has no dropout.\nexpected: attention_dropout=0.0 in the config\ngot: {dropout}\n"
            'what to do: set it to 0.0, as the released models have it, or use attn_implementation="eager".'
        )
    output = windowed_attention(query, key.squeeze(1), s_aux, scale=scaling, sight=attention_mask.sight(sliding_window))
    return output, None


# --- Four classes that look whether they are meant -------------------------------------------------------------------


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        position_ids: torch.Tensor,
        attention_mask: Any,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        if self.config._attn_implementation != IMPLEMENTATION:
            return original(
                self, hidden_states, position_embeddings, position_ids, attention_mask, cache=cache, **kwargs
            )
        if kwargs.get("output_attentions"):
            raise AttentionError(
                f"{IMPLEMENTATION} has no attention weights to return.\nexpected: output_attentions=False\ngot: True\n"
                'what to do: use attn_implementation="eager" to look at weights.'
            )
        cached = cache is not None or kwargs.get("past_key_values") is not None
        call = Call(_tokens_of(attention_mask), position_ids, hidden_states.shape[0], cached=cached)
        return original(self, hidden_states, position_embeddings, call, call, cache=cache, **kwargs)

    return forward


def _tokens_of(attention_mask: Any) -> Tokens:
    if attention_mask is None:
        return Tokens()
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return Tokens(attention_mask.bool())
    if isinstance(attention_mask, Tokens):
        return attention_mask
    shape = getattr(attention_mask, "shape", None)
    raise AttentionError(
        f"{IMPLEMENTATION} cannot follow a mask of its caller's.\n"
        "expected: attention_mask of shape [batch, tokens] (1 for tokens, 0 for padding), or None\n"
        f"got: {type(attention_mask).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}") + "\n"
        "what to do: tell packed documents apart by position_ids that restart, or use eager attention."
    )


def _compressor(original: Callable[..., Any], compress: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: Any,
        cache: Any = None,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(position_ids, Call):
            return original(self, hidden_states, q_residual, position_ids, cache, layer_idx, **kwargs)
        return compress(self, hidden_states, q_residual, position_ids, cache, layer_idx)

    return forward


def _layer_of(cache: Any, layer_idx: int) -> Any:
    return None if cache is None else cache.layers[layer_idx]


def _hca(
    self: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, call: Call, cache: Any, layer_idx: int
) -> tuple[torch.Tensor, None]:
    layer = _layer_of(cache, layer_idx)
    entries, seen = compress_heavily(self, hidden_states, call.position_ids, call.documents, layer)
    if layer is not None and hidden_states.shape[1] == 1:  # eager: a single query sees all entries, padded or not
        seen = seen._replace(visible=torch.full_like(seen.visible, seen.num_entries))
    call.entries = seen
    return entries, None


def _csa(
    self: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, call: Call, cache: Any, layer_idx: int
) -> tuple[torch.Tensor, None]:
    entries, call.entries = compress_sparsely(
        self,
        hidden_states,
        call.position_ids,
        call.documents,
        _layer_of(cache, layer_idx),
        run_indexer=lambda: self.indexer(hidden_states, q_residual, call, cache, layer_idx),
    )
    return entries, None


def _indexer(
    self: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, call: Call, cache: Any, layer_idx: int
) -> torch.Tensor:
    layer = _layer_of(cache, layer_idx)
    return choose_entries(self, hidden_states, q_residual, call.position_ids, call.documents, layer)


# --- Registration ----------------------------------------------------------------------------------------------------

_COMPRESSOR_PARAMETERS = ("self", "hidden_states", "q_residual", "position_ids", "cache", "layer_idx")
_PARAMETERS = {
    "DeepseekV4Attention": (
        *("self", "hidden_states", "position_embeddings", "position_ids", "attention_mask", "cache", "kwargs"),
    ),
    "DeepseekV4HCACompressor": _COMPRESSOR_PARAMETERS,
    "DeepseekV4CSACompressor": _COMPRESSOR_PARAMETERS,
    "DeepseekV4Indexer": _COMPRESSOR_PARAMETERS,
}


def _register() -> None:
    """Put everything in its place; a second call finds it there.

    Raises:
        UnsupportedLibrary: transformers' four classes do not take the arguments that this module knows.
    """
    from dsv4_fsdp.integrations import UnsupportedLibrary, mark_replacement, signature_problem, unpatched

    problems = [
        problem
        for name, parameters in _PARAMETERS.items()
        if (problem := signature_problem(getattr(modeling, name, None), "forward", parameters)) is not None
    ]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UnsupportedLibrary(
            "dsv4-fsdp does not know this transformers' DeepSeek-V4 attention, so it registers nothing.\n"
            f"expected: transformers {', '.join(TESTED_VERSIONS)}, or another with the same classes\n"
            f"got: transformers {transformers.__version__}, in which\n{listed}\n"
            "what to do: install one of the versions above, or train with eager attention; please report it."
        )
    makers: dict[type, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        modeling.DeepseekV4Attention: _attention,
        modeling.DeepseekV4HCACompressor: functools.partial(_compressor, compress=_hca),
        modeling.DeepseekV4CSACompressor: functools.partial(_compressor, compress=_csa),
        modeling.DeepseekV4Indexer: functools.partial(_compressor, compress=_indexer),
    }
    for cls, make in makers.items():
        original = unpatched(inspect.getattr_static(cls, "forward"))
        cls.forward = mark_replacement(make(original), original)  # type: ignore[attr-defined]
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _tokens_in_place_of_a_mask)


_register()
