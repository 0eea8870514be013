"""Messages to token ids: the model's chat template and tokenizer, without mlx.

Knows mlx-lm's `TokenizerWrapper` by the few attributes below.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jinja2
import msgspec

from runtime.errors import InvalidRequest
from runtime.kv.prefix import num_common
from runtime.types import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt, Tool
from runtime.worker.detokenizer import (
    Detokenizer,
    PlainDetokenizer,
    StreamDetokenizer,
    token_bytes,
)

_THINK_TAIL_TOKENS = 64
_THINK_END_TAIL_TOKENS = 8
_OWN_KWARGS = frozenset(
    {"chat_template", "continue_final_message", "conversation", "documents", "tools"}
)
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTokenizer(Protocol):
    """What is used of `mlx_lm.tokenizer_utils.TokenizerWrapper`."""

    has_chat_template: bool
    has_thinking: bool
    think_start_tokens: tuple[int, ...] | None
    think_end_tokens: tuple[int, ...] | None

    @property
    def get_chat_template(self) -> Any: ...

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, token_ids: list[int], **kwargs: Any) -> str: ...
    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]: ...
    def rfind_think_start(self, tokens: Sequence[int], start: int | None = None) -> int: ...
    def rfind_think_end(self, tokens: Sequence[int], start: int | None = None) -> int: ...


class Template:
    """Renders and tokenizes prompts for one model, and makes its detokenizers."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend
        self._is_byte_level = backend is not None and _is_byte_level(backend)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses these messages.
        """
        match prompt:
            case TokenPrompt(token_ids=token_ids):
                return list(token_ids)
            case TextPrompt(text=text):
                return self._tokenizer.encode(text)
            case ChatPrompt():
                text = self.render(prompt)
                if not _is_encodable(text):
                    message = "The messages contain half a surrogate pair, which is no character."
                    raise InvalidRequest(message, "messages")
                return self._tokenizer.encode(text, add_special_tokens=False)

    def render(self, prompt: ChatPrompt, *, opens_answer: bool = True) -> str:
        """The conversation as the text that the model reads, up to where it is to answer."""
        if not self._tokenizer.has_chat_template:
            message = "This model has no chat template; use /v1/completions instead."
            raise InvalidRequest(message, "messages")
        kwargs = _template_kwargs(prompt) | {"add_generation_prompt": opens_answer}
        try:
            return self._renderer(kwargs)(
                [_template_message(message) for message in prompt.messages],
                tools=[_template_tool(tool) for tool in prompt.tools] or None,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from error

    def boundaries(self, prompt: ChatPrompt, token_ids: list[int]) -> tuple[int, int]:
        """Where tools and system prompt end in these tokens, and where the last turn ends before
        the answer is opened; 0 where the template does not say.
        """
        head = tuple(itertools.takewhile(lambda m: m.role == "system", prompt.messages))
        prefix = msgspec.structs.replace(prompt, messages=head)
        return self._agreeing(prefix, token_ids), self._agreeing(prompt, token_ids)

    def _agreeing(self, prompt: ChatPrompt, token_ids: list[int]) -> int:
        """How many of the tokens this shorter prompt, in which no answer is opened, renders to."""
        try:
            text = self.render(prompt, opens_answer=False)
        except InvalidRequest:
            return 0
        shorter = self._tokenizer.encode(text, add_special_tokens=False)
        return num_common(shorter, 0, token_ids, 0)

    def _renderer(self, kwargs: dict[str, object]) -> Callable[..., str]:
        wrapper = self._tokenizer
        # Upstream's wrapper turns thinking on when nobody asked; the template's default is better.
        has_jinja = getattr(wrapper, "chat_template", None) is not None
        if has_jinja and not {"enable_thinking", "thinking"} & kwargs.keys():
            return wrapper.get_chat_template.__self__.apply_chat_template
        return wrapper.apply_chat_template

    def starts_in_reasoning(self, token_ids: list[int]) -> bool:
        """The prompt ends inside an open thinking block."""
        tokenizer = self._tokenizer
        if not tokenizer.has_thinking:
            return False
        tail = token_ids[-_THINK_TAIL_TOKENS:]
        return tokenizer.rfind_think_start(tail) > tokenizer.rfind_think_end(tail)

    def has_closed_reasoning(self, token_ids: list[int]) -> bool:
        """The prompt ends with a thinking block that is closed already."""
        tokenizer = self._tokenizer
        tail = token_ids[-_THINK_END_TAIL_TOKENS:]
        return tokenizer.has_thinking and tokenizer.rfind_think_end(tail) >= 0

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """A fresh detokenizer for text that follows `context`."""
        if self._backend is None:
            return PlainDetokenizer(self._tokenizer)
        return StreamDetokenizer(self._backend, context)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One vocabulary entry: its text, U+FFFD where it is no whole character, and its bytes."""
        (piece,) = self._tokenizer.convert_ids_to_tokens([token_id])
        text = self._tokenizer.decode([token_id])
        return text, token_bytes(piece or "", is_byte_level=self._is_byte_level)


def _is_encodable(text: str) -> bool:
    """Not so where JSON inside of JSON (a tool call's arguments) escapes half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_byte_level(backend: Any) -> bool:
    decoder: Any = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return False
    parts: list[Mapping[str, object]] = [decoder, *decoder.get("decoders", [])]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _template_kwargs(prompt: ChatPrompt) -> dict[str, object]:
    given: dict[str, object] = json.loads(prompt.template_kwargs)
    if reserved := _OWN_KWARGS & given.keys():
        name = min(reserved)
        raise InvalidRequest(f"{name!r} is not yours to set.", f"chat_template_kwargs.{name}")
    if prompt.thinking.is_enabled is not None:
        given["enable_thinking"] = prompt.thinking.is_enabled
    if prompt.thinking.effort is not None:
        given.setdefault("reasoning_effort", prompt.thinking.effort)
    return given | {"tokenize": False}


def _template_message(message: Message) -> dict[str, object]:
    rendered: dict[str, object] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _arguments(text: str) -> Any:
    # Most templates iterate over a mapping; text that is none is shown as it is.
    try:
        return json.loads(text)
    except ValueError:
        return text


def _template_tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "parameters": json.loads(tool.parameters)}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
