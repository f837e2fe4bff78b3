"""Tokenizers of 256 bytes and a few added tokens, made by the real ``tokenizers`` library; ids below 256 are bytes."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def deepseek_tokenizer(*, adds_bos: bool = False, **kwargs: Any) -> Any:
    """With the special tokens of DeepSeek's tokenizers, where those of roles and thinking are not marked as special.

    ``adds_bos`` puts a BOS before every text that is tokenised with special tokens, as the release's does.
    """
    tokenizer = _bytes()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (USER, ASSISTANT, "<think>", "</think>")])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, **kwargs)


def chatml_tokenizer(*, merges: tuple[tuple[str, str], ...] = (), chat_template: str | None = CHATML) -> Any:
    """With ChatML's tokens and no BOS. ``merges`` are pairs of letters, in byte-level BPE's alphabet."""
    tokenizer = _bytes(merges)
    tokenizer.add_special_tokens([IM_START, IM_END])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END)
    made.chat_template = chat_template
    return made


def _bytes(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab |= {left + right: 256 + number for number, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
