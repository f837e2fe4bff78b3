"""From a conversation to tokens, and which of them the assistant said.

**DeepSeek-V4's format** is built in (``deepseek_v4.jinja``), since its tokenizer ships no chat template:

    <｜begin▁of▁sentence｜>{system}<｜User｜>{question}<｜Assistant｜></think>{answer}<｜end▁of▁sentence｜>
    <｜begin▁of▁sentence｜>{system}<｜User｜>{question}<｜Assistant｜><think>{reasoning}</think>{answer}<｜end▁of▁sentence｜>

The first is an answer without reasoning, the second one with it (``reasoning_content``, or a ``<think>...</think>`` at
the start of ``content``, which is taken apart first). Learned from is what the model would write itself: all that
follows ``</think>`` or ``<think>`` behind ``<｜Assistant｜>``, the end of the sentence included. Reasoning before the
last user message is left out, as it is when the release's own encoder builds a prompt, so those turns become answers
without reasoning and are learned from as such; ``keep_reasoning`` keeps it, ``train_on: last`` looks at the last turn
only. *Not verified*, for want of the release's encoder at hand: that V4 differs in nothing from this, the format that
DeepSeek documents since V3.1 (white space, markers of reasoning effort). Tools are not written: conversations with
tool calls are refused, and need a template of the user's own.

**Labels come from rendering**, never from a search in the text. A template that marks what the assistant says with
``{% generation %}`` is taken at its word (the built-in one does). Any other is rendered turn by turn: what it makes of
the messages before a turn, with the generation prompt, must be the beginning of what it makes of the whole
conversation; what follows until the end of the turn is the assistant's. A template that changes earlier turns once
later ones follow fails that test and is refused.

**Each piece is tokenised by itself**, prompt and answer, so no token lies across a border, and prompts have the tokens
that they have at inference. No special tokens are added: those that count are in the template.

**Special tokens in messages** are text. Whoever writes ``<｜Assistant｜>`` in a message gets the letters, tokenised one
by one, and not the token. With a template other than the built-in one this holds for all roles but the assistant,
since such templates may look for ``</think>`` in what the assistant says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DataError

__all__ = ["DEEPSEEK_V4_TEMPLATE", "ChatFormat", "Piece", "encode_text", "template_text"]

DEEPSEEK_V4_TEMPLATE = Path(__file__).with_name("deepseek_v4.jinja")
"""The built-in template. It works as a tokenizer's ``chat_template`` too."""

_DEEPSEEK_V4_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)

# Put between the letters of a special token in a message. Unicode keeps this code point free for use inside programs.
_SEPARATOR = "\ufdd0"

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Piece:
    """A part of a rendered conversation, and whether the assistant said it."""

    text: str
    supervised: bool


def template_text(name: str, *, tokenizer: Any) -> str:
    """The Jinja text that ``data.template`` names. Raises ``DataError`` if there is none."""
    if name == "tokenizer":
        if not isinstance(tokenizer.chat_template, str):
            raise DataError(
                "data.template: the tokenizer has no chat template; use deepseek_v4 or give a .jinja file"
                if not tokenizer.chat_template
                else f"data.template: the tokenizer has several chat templates ({', '.join(tokenizer.chat_template)}); "
                "write the one you mean to a .jinja file"
            )
        return tokenizer.chat_template
    path = DEEPSEEK_V4_TEMPLATE if name == "deepseek_v4" else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.template: cannot read {name!r}: {error}") from None


class ChatFormat:
    """Turns the objects of a JSON lines file into tokens.

    Args:
        tokenizer: a fast tokenizer of Transformers.
        template: as in :class:`~dsv4_fsdp.data.settings.SftSettings`, like the two that follow.

    Raises:
        DataError: no such template, one that Jinja cannot read, or a tokenizer without the tokens that it needs.
    """

    def __init__(self, tokenizer: Any, *, template: str, train_on: str = "all", keep_reasoning: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_built_in = template == "deepseek_v4"
        self._template = template_text(template, tokenizer=tokenizer)
        self._train_on = train_on
        self._keep_reasoning = keep_reasoning
        self._has_marks = _GENERATION.search(self._template) is not None
        self._refuse_broken_template(template)
        if self._is_built_in:
            self._refuse_missing_tokens()
        control = [
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            # Tokens of white space, as some tokenizers have them, are in every template.
            if token.special or (token.content in self._template and not token.content.isspace())
        ]
        # Longest first, so that none is taken for another that it starts with.
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")

    def encode(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids, and for each 1 if it is learned from, else 0.

        Raises:
            DataError: one line, without the place, on what is wrong with the row or what the template makes of it.
        """
        ids: list[int] = []
        supervised: list[int] = []
        for piece in self.render(row):
            tokens = encode_text(self._tokenizer, piece.text, follows=bool(ids))
            ids += tokens
            supervised += [int(piece.supervised)] * len(tokens)
        if not ids:
            raise DataError("the template makes nothing of it")
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise DataError(f"the template starts with {self._tokenizer.bos_token} twice")
        return ids, supervised

    def render(self, row: dict[str, Any]) -> list[Piece]:
        """The text of a row, in pieces. Special tokens that come from messages are broken up by a separator."""
        messages = self._messages(row)
        marked = [self._marked(message) for message in messages]
        tools = row.get("tools")
        text, spans = self._render(marked, tools=tools)
        if not self._has_marks:
            spans = self._spans_by_prefix(marked, whole=text, tools=tools)
        elif self._train_on == "last":
            spans = spans[-1:]
        pieces = []
        end = 0
        for start, stop in spans:
            pieces += [Piece(text[end:start], False), Piece(text[start:stop], True)]
            end = stop
        pieces.append(Piece(text[end:], False))
        return [piece for piece in pieces if piece.text]

    def notices(self, ids: Sequence[int], supervised: Sequence[int]) -> tuple[str, ...]:
        """What is odd about an encoded row, and should be told once."""
        tokenizer = self._tokenizer
        notices = []
        bos = tokenizer.bos_token_id
        if bos is not None and ids[0] != bos and tokenizer("a")["input_ids"][0] == bos:
            notices.append(f"the tokenizer starts texts with {tokenizer.bos_token}, but the template does not")
        learned = [token for token, flag in zip(ids, supervised, strict=True) if flag]
        if not any(token in tokenizer.added_tokens_decoder for token in learned[-3:]):
            notices.append(
                "what is learned from does not end with a special token: the model will not learn when to stop"
            )
        return tuple(notices)

    # --- Rendering ---

    def _render(
        self, messages: list[dict[str, Any]], *, tools: Any = None, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans that the template marks as the assistant's."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = dict(self._tokenizer.special_tokens_map)
        if self._is_built_in:
            variables["keep_reasoning"] = self._keep_reasoning
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=self._has_marks,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the template refuses it: {type(error).__name__}: {_first_line(error)}") from None
        return texts[0], spans[0] if self._has_marks else []

    def _spans_by_prefix(self, messages: list[dict[str, Any]], *, whole: str, tools: Any) -> list[tuple[int, int]]:
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for index in turns if self._train_on == "all" else turns[-1:]:
            prompt, _ = self._render(messages[:index], tools=tools, generation_prompt=True)
            is_last = index == len(messages) - 1
            answered = whole if is_last else self._render(messages[: index + 1], tools=tools)[0]
            if not answered.startswith(prompt) or not whole.startswith(answered):
                raise DataError(
                    f"message {index + 1}: what the template makes of the messages up to here is not the beginning of "
                    "what it makes of all; mark the assistant's words in it with {% generation %}"
                    + (", or use train_on: last" if self._train_on == "all" and not is_last else "")
                )
            spans.append((len(prompt), len(answered)))
        return spans

    def _refuse_broken_template(self, name: str) -> None:
        import jinja2

        try:
            self._render([{"role": "user", "content": "a"}])
        except DataError as error:
            # A template may well refuse a made-up conversation; only what Jinja cannot parse is certain to be wrong.
            if error.problems[0].startswith(f"the template refuses it: {jinja2.TemplateSyntaxError.__name__}"):
                raise DataError(f"data.template: {name}: {error}") from None

    def _refuse_missing_tokens(self) -> None:
        missing = [
            token
            for token in _DEEPSEEK_V4_TOKENS
            if self._tokenizer.encode(token, add_special_tokens=False) != [self._tokenizer.get_vocab().get(token)]
        ]
        if missing:
            raise DataError(
                f"data.template: deepseek_v4 needs tokens that the tokenizer does not have: {', '.join(missing)}; "
                "use another template"
            )

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "assistant" and not self._is_built_in:
            return message
        marked: dict[str, Any] = _mark(message, self._control)
        return marked | {"role": message["role"]}

    # --- What a row may look like ---

    def _messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        messages = _conversation(row)
        for number, message in enumerate(messages, 1):
            problem = self._message_problem(message) or (self._built_in_problem(message) if self._is_built_in else None)
            if problem:
                raise DataError(f"message {number}: {problem}")
        roles = [message["role"] for message in messages]
        if self._is_built_in:
            turns = roles[1:] if roles[0] == "system" else roles
            if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
                raise DataError(
                    "expected roles: system or not, then user and assistant in turn, the assistant last; "
                    f"got {_listed(roles)}"
                )
            if row.get("tools"):
                raise DataError("template deepseek_v4 does not write tools; give a template of your own")
        elif roles[0] == "assistant" or roles[-1] != "assistant":
            raise DataError(f"expected roles that end with assistant, and do not start with it; got {_listed(roles)}")
        return [_reasoning_apart(message) for message in messages] if self._is_built_in else messages

    def _message_problem(self, message: Any) -> str | None:
        if not isinstance(message, dict):
            return f"expected an object with role and content, got {type(message).__name__}"
        if not isinstance(message.get("role"), str):
            return "has no role"
        content = message.get("content")
        if not isinstance(content, str) and not (message.get("tool_calls") and content is None):
            return f"expected content that is text, got {'none' if content is None else type(content).__name__}"
        if any(_SEPARATOR in value for value in message.values() if isinstance(value, str)):
            return "has the code point U+FDD0, which Unicode keeps out of texts"
        return None

    def _built_in_problem(self, message: dict[str, Any]) -> str | None:
        role = message["role"]
        if role not in ("system", "user", "assistant"):
            return f"role {role!r}; template deepseek_v4 knows system, user and assistant"
        allowed = {"role", "content"} | ({"reasoning_content"} if role == "assistant" else set())
        others = sorted(key for key, value in message.items() if key not in allowed and value not in (None, "", []))
        if others:
            return f"template deepseek_v4 does not write {', '.join(others)}; give a template of your own"
        if not isinstance(message.get("reasoning_content") or "", str):
            return "expected reasoning_content that is text"
        return None


def encode_text(tokenizer: Any, text: str, *, follows: bool) -> list[int]:
    """The token ids of ``text``, in which separators break up what would be a special token; none are added.

    ``follows`` says that other text came before: some tokenizers put a space before the first word of a text.
    """
    ids: list[int] = []
    for part in text.split(_SEPARATOR):
        if part:
            ids += _encode_following(tokenizer, part) if follows or ids else _encode(tokenizer, part)
    return ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Quiet about lengths beyond `model_max_length`: the caller cuts.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _encode_following(tokenizer: Any, text: str) -> list[int]:
    # After a line's end, so that no space is put before; unless the tokenizer joins it with what follows.
    before = _encode(tokenizer, "\n")
    ids = _encode(tokenizer, "\n" + text)
    return ids[len(before) :] if ids[: len(before)] == before else _encode(tokenizer, text)


def _mark(value: Any, control: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return control.sub(lambda match: _SEPARATOR + _SEPARATOR.join(match[0]) + _SEPARATOR, value)
    if isinstance(value, dict):
        return {key: _mark(inner, control) for key, inner in value.items()}
    return [_mark(inner, control) for inner in value] if isinstance(value, list) else value


def _conversation(row: dict[str, Any]) -> list[Any]:
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise DataError("expected messages that are a list with something in it")
        return messages
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        if isinstance(prompt, list) and isinstance(completion, list) and prompt and completion:
            return [*prompt, *completion]
        raise DataError("expected prompt and completion that are both text, or both lists of messages")
    raise DataError(f"expected messages, or prompt and completion; got {_listed(list(row)) or 'nothing'}")


def _reasoning_apart(message: dict[str, Any]) -> dict[str, Any]:
    """Many data sets write an assistant's reasoning into its content; a template must know the two apart."""
    content = message["content"]
    if message["role"] != "assistant" or message.get("reasoning_content") or not content.startswith("<think>"):
        return message
    reasoning, end, answer = content.removeprefix("<think>").partition("</think>")
    return message | {"reasoning_content": reasoning, "content": answer} if end else message


def _listed(words: list[str]) -> str:
    return ", ".join(map(str, words[:8])) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
