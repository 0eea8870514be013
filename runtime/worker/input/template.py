"""Messages to token ids: the model's chat template and tokenizer, without mlx.

Knows mlx-lm's `TokenizerWrapper` by the few attributes below.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from runtime.errors import InvalidRequest
from runtime.prompt.rewriting import WrittenPrompt
from runtime.prompt.shown import LOST, THOUGHTS, Loss, Shown
from runtime.prompt.thinking import switches
from runtime.prompt.tools_as_text import (
    CALLS,
    DEFINITIONS,
    GENERIC,
    OURS,
    SPLIT,
    CallForm,
    ToolForms,
    split,
    with_definitions,
    written_out,
)
from runtime.types import (
    ChatPrompt,
    Message,
    Prompt,
    PromptChange,
    TemplateForms,
    TextPrompt,
    TokenPrompt,
)
from runtime.worker.input.infill import infilled
from runtime.worker.input.preparer import TEMPLATE_ERRORS, Bench, Marked, PromptPreparer
from runtime.worker.input.probe import (
    Probe,
    content_forms_of,
    definition_of,
    forms_told,
    tool_forms_of,
)
from runtime.worker.input.template_input import (
    ContentForms,
    defused,
    has_odd_arguments,
    num_changed,
    shown_tools,
    template_kwargs,
    template_message,
    template_tool,
    with_wrapped_arguments,
)
from runtime.worker.output.detokenizer import (
    Detokenizer,
    PlainDetokenizer,
    StreamDetokenizer,
    token_bytes,
)
from runtime.worker.output.dialect import Dialect, ReasoningBlock, with_generic_calls
from runtime.worker.vision.images import Markup

DEFERRED = "deferred_tools"
SPELLED_OUT = "picture_words"
TOOLS_FIRST = "tools_first"
_THINK_TAIL_TOKENS = 64
_THINK_END_TAIL_TOKENS = 8
_LONG_CHARACTERS = 8
"""Characters per token of the context beyond which a text is looked at piece by piece."""
_PIECE_CHARACTERS = 1 << 16
_NUM_SIZES = 1 << 14
"""Of so many texts it is remembered how many tokens they have."""
_HALF = re.compile("[\ud800-\udfff]")
_SEAM_TOKENS = 64
"""By which cutting a piece out might have raised the count of its tokens, generously."""


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
    """Renders and tokenizes prompts for one model, and makes its detokenizers.

    With `tools_first` tools that a template writes right after the system text are written before
    it: they change less often than what names directories and dates. Without a `markup` the model
    reads text only. Where nobody `reads_calls` in the template's own form, that form is not used;
    `own_calls` is how the model writes them, if it can be told so by a template without tools.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        tools_first: bool = True,
        markup: Markup | None = None,
        bench: Bench | None = None,
        reads_calls: bool = True,
        own_calls: CallForm | None = None,
    ) -> None:
        self.markup = markup
        self._reads_calls = reads_calls
        self._own_calls = own_calls
        self._tokenizer = tokenizer
        self._bench = bench or PromptPreparer(inner_tokenizer(tokenizer))
        self._tools_first = tools_first
        self._other: Template | None = None
        self.sizes = TextSizes(self)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend
        self._is_byte_level = backend is not None and _is_byte_level(backend)
        self.probe = Probe(
            lambda prompt, opens: self._rendered(
                self._written_out(defused(prompt, self.picture_words))[0],
                template_kwargs(prompt),
                opens_answer=opens,
            ),
            markup.spelled if markup is not None else "",
        )

    def arranged(self, *, tools_first: bool) -> Template:
        """The same with tools first or not; there is one of each."""
        if tools_first == self._tools_first:
            return self
        if self._other is None:
            self._other = Template(
                self._tokenizer,
                tools_first=tools_first,
                markup=self.markup,
                bench=self._bench,
                reads_calls=self._reads_calls,
                own_calls=self._own_calls,
            )
        return self._other

    @cached_property
    def fingerprint(self) -> bytes:
        """Names tokenizer and template: with others the same messages are other tokens."""
        vocabulary = self._backend.to_str() if self._backend is not None else repr(self._tokenizer)
        template = str(getattr(self._tokenizer, "chat_template", None))
        return blake2b(f"{vocabulary}\0{template}".encode(), digest_size=16).digest()

    def num_tokens_at_least(self, text: str, limit: int) -> int:
        """A count of tokens that this text exceeds or meets; soon known where it exceeds `limit`.

        A text far too long need not be tokenized whole, which takes a second for each megabyte.
        """
        if self._backend is None or len(text) <= limit * _LONG_CHARACTERS:
            return 0
        normalizer = self._backend.normalizer
        is_as_long = normalizer is None or (type(normalizer).__name__ == "NFC" and text.isascii())
        if is_as_long and (least := len(text) // self._max_token_characters) > limit:
            return least
        num_tokens = start = 0
        while start < len(text) and num_tokens <= limit:
            end = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1
            end = end if end > start else start + _PIECE_CHARACTERS
            piece = self.encode(text[start:end]).token_ids
            num_tokens += max(len(piece) - _SEAM_TOKENS, 0)
            start = end
        return num_tokens

    @cached_property
    def _max_token_characters(self) -> int:
        """No token stands for more characters than this."""
        assert self._backend is not None
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses these messages, or it
                cannot fill in the middle.
        """
        match prompt:
            case TokenPrompt(token_ids=token_ids):
                return list(token_ids)
            case TextPrompt(text=text, suffix=suffix):
                if suffix:
                    text = infilled(text, suffix, self._is_special)
                return self._bench.encode(text, (), adds_special=True).token_ids
            case ChatPrompt():
                return self.encode(self.render(prompt)).token_ids

    def _is_special(self, text: str) -> bool:
        """Whether this is one token of the vocabulary."""
        return self._backend is not None and self._backend.token_to_id(text) is not None

    def encode(self, text: str, at: Sequence[int] = ()) -> Marked:
        """A rendered text, with marks at these characters."""
        return self._bench.encode(whole_characters(text), at, adds_special=False)

    def predicted_ids(self, text: str) -> list[int]:
        """The tokens of an answer that is expected."""
        return self.encode(text).token_ids

    def render(self, prompt: ChatPrompt, *, opens_answer: bool = True) -> str:
        """The conversation as the text that the model reads, up to where it is to answer.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses these messages.
        """
        return self._write(prompt, opens_answer=opens_answer)[0].text

    def write(
        self, prompt: ChatPrompt, *, opens_answer: bool = True, first: int = 0
    ) -> WrittenPrompt:
        """The same, and what was done to it that the template alone does not. Raises as well.

        What the template left out is looked for in the messages from number `first` on.
        """
        written, given = self._write(prompt, opens_answer=opens_answer)
        shown = Shown(written.text)
        found = [shown.look_for(message) for message in given[first:]]
        counts = {
            LOST: sum(loss is not Loss.NOTHING for loss, _ in found),
            THOUGHTS: sum(lacks_thoughts for _, lacks_thoughts in found),
        }
        changes = [PromptChange(rule=rule, num_places=num) for rule, num in counts.items() if num]
        lost = tuple(n for n, (loss, _) in enumerate(found, first) if loss is Loss.ALL)
        return written._replace(changes=(*written.changes, *changes), lost=lost)

    def _write(
        self, prompt: ChatPrompt, *, opens_answer: bool
    ) -> tuple[WrittenPrompt, Sequence[Message]]:
        """What is written, and the messages with the very words that are given to the template."""
        kwargs = template_kwargs(prompt)
        kwargs |= switches(prompt.thinking, self.probe.responds, frozenset(kwargs))
        words = self.picture_words
        harmless = defused(prompt, words) if words else prompt
        whole, as_text = self._written_out(harmless)
        plain = self._rendered(whole, kwargs, opens_answer=opens_answer)
        text = self._with_tools_first(plain, prompt) if self._tools_first else plain
        counts = {
            DEFERRED: len(prompt.tools) - len(shown_tools(prompt)),
            SPELLED_OUT: num_changed(prompt, harmless) if words else 0,
            **as_text,
            TOOLS_FIRST: int(text != plain),
        }
        changes = [PromptChange(rule=rule, num_places=num) for rule, num in counts.items() if num]
        return WrittenPrompt(text, tuple(changes)), harmless.messages

    @cached_property
    def content_forms(self) -> ContentForms:
        """In which form the template shows what messages say."""

        def render(prompt: ChatPrompt, forms: ContentForms) -> str | None:
            try:
                return self._rendered(prompt, {}, opens_answer=False, forms=forms)
            except InvalidRequest:
                return None

        picture = self.markup.spelled if self.markup is not None else ""
        mark = self.markup.mark if self.markup is not None else ""
        return content_forms_of(render, picture, mark)

    @cached_property
    def tool_forms(self) -> ToolForms:
        """What of tools the template has a form for, in which calls can be read."""
        if not self._reads_calls:
            return GENERIC
        return tool_forms_of(
            lambda prompt, opens: self._rendered(prompt, {}, opens_answer=opens), self._own_calls
        )

    def spoken(self, dialect: Dialect) -> Dialect:
        """How a model of this dialect writes: calls as its prompt tells it, where that is ours."""
        forms = self.tool_forms
        return dialect if forms.tools or forms.calls else with_generic_calls(dialect)

    @cached_property
    def forms(self) -> TemplateForms:
        """All that was found of the template, for people."""
        return forms_told(self.content_forms, self.tool_forms, self.probe)

    @property
    def known_forms(self) -> TemplateForms | None:
        """The same, if it was found out already."""
        return self.__dict__.get("forms")

    def _written_out(self, prompt: ChatPrompt) -> tuple[ChatPrompt, dict[str, int]]:
        """The prompt with nothing of tools that the template would lose, and by which rules how
        many tools or messages are in it as text for that.
        """
        if not (prompt.tools or any(m.tool_calls or m.role == "tool" for m in prompt.messages)):
            return prompt, {}
        forms, tools = self.tool_forms, prompt.tools
        messages, num_changed = written_out(
            prompt.messages, forms, lambda: self.probe.users_in_a_row
        )
        if tools and not forms.tools:
            shown = [definition_of(tool) for tool in shown_tools(prompt)]
            form = self._own_calls if forms.calls and self._own_calls is not None else OURS
            messages = with_definitions(messages, shown, form, has_system=self.probe.system)
            tools = ()
        num_split = 0
        if forms.splits:
            messages, num_split = split(messages)
        counts = {
            DEFINITIONS: len(prompt.tools) - len(tools),
            CALLS: num_changed,
            SPLIT: num_split,
        }
        return msgspec.structs.replace(prompt, messages=messages, tools=tools), counts

    def _rendered(
        self,
        prompt: ChatPrompt,
        kwargs: Mapping[str, object],
        *,
        opens_answer: bool,
        forms: ContentForms | None = None,
    ) -> str:
        """As the template alone writes it; in the forms that it shows, unless others are tried."""
        if not self._tokenizer.has_chat_template:
            message = "This model has no chat template; use /v1/completions instead."
            raise InvalidRequest(message, "messages")
        forms = self.content_forms if forms is None else forms
        kwargs = {**kwargs, "tokenize": False, "add_generation_prompt": opens_answer}
        messages = [template_message(message, forms) for message in prompt.messages]
        tools = [template_tool(tool) for tool in shown_tools(prompt)] or None
        try:
            try:
                text = self._written(messages, tools, kwargs)
            except TEMPLATE_ERRORS:
                if not any(map(has_odd_arguments, prompt.messages)):
                    raise
                wrapped = [with_wrapped_arguments(message, forms) for message in prompt.messages]
                text = self._written(wrapped, tools, kwargs)
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from error
        return text.replace(self.markup.mark, self.markup.spelled) if self.markup else text

    @cached_property
    def picture_words(self) -> tuple[str, ...]:
        """What no text may hold, as it would be taken for a picture's."""
        if self.markup is None:
            return ()
        token, _ = self.token_text(self.markup.placeholder)
        return tuple({self.markup.mark, token})

    def _with_tools_first(self, text: str, prompt: ChatPrompt) -> str:
        tools, first = shown_tools(prompt), next(iter(prompt.messages), None)
        if not tools or not self.tool_forms.tools or first is None or first.role != "system":
            return text
        head = self.probe.tools_after_system(tools, prompt.template_kwargs)
        if head is None or not text.startswith(head.before):
            return text
        start = len(head.before)
        end = text.find(head.tools, start)
        system = text[start:end]
        if end < 0 or system.strip() != first.text.strip():
            return text
        after = text[end + len(head.tools) :]
        return f"{head.before}{head.tools.strip()}\n\n{system}{after}"

    def _written(
        self, messages: list[dict[str, object]], tools: object, kwargs: dict[str, object]
    ) -> str:
        wrapper = self._tokenizer
        is_said = bool({"enable_thinking", "thinking"} & kwargs.keys())
        if getattr(wrapper, "chat_template", None) is None or (is_said and is_own_code(wrapper)):
            return wrapper.apply_chat_template(messages, tools=tools, **kwargs)
        # Upstream's wrapper turns thinking on when nobody asked; the template's default is better.
        if is_said:
            kwargs = {"enable_thinking": wrapper.has_thinking, **kwargs}
        return self._bench.render(messages, tools, kwargs)

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

    def reasoning_block(self, token_ids: list[int]) -> ReasoningBlock:
        """How these tokens, of which the end is enough, leave the thinking block of an answer."""
        if self.starts_in_reasoning(token_ids):
            return "open"
        return "closed" if self.has_closed_reasoning(token_ids) else "unsaid"

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """A fresh detokenizer for text that follows `context`."""
        if self._backend is None:
            return PlainDetokenizer(self._tokenizer)
        return StreamDetokenizer(self._backend, context)

    def text_of(self, token_ids: list[int]) -> str:
        """What these tokens say, markers included."""
        return self._tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One vocabulary entry: its text, U+FFFD where it is no whole character, and its bytes."""
        (piece,) = self._tokenizer.convert_ids_to_tokens([token_id])
        text = self._tokenizer.decode([token_id])
        return text, token_bytes(piece or "", is_byte_level=self._is_byte_level)


class TextSizes:
    """How many tokens texts have, each by itself.

    Those of a conversation are asked for again and again, so it is remembered, under names from
    which no text can be guessed.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._secret = secrets.token_bytes(16)

    def of(self, text: str) -> int:
        """The tokens of a text."""
        data = text.encode("utf-8", "surrogatepass")
        name = blake2b(data, digest_size=16, key=self._secret).digest()
        if (known := self._known.get(name)) is not None:
            return known
        num_tokens = len(self._template.encode(text).token_ids) if text else 0
        self._known[name] = num_tokens
        while len(self._known) > _NUM_SIZES:
            self._known.popitem(last=False)
        return num_tokens

    @cached_property
    def markers(self) -> int:
        """Those around a message, about. Raises InvalidRequest as `Template.render` does."""
        asked, answer = Message(role="user", text="a"), Message(role="assistant", text="a")

        def num_tokens(num_answers: int) -> int:
            prompt = ChatPrompt(messages=(asked, *(answer, asked) * num_answers))
            return len(self._template.encode(self._template.render(prompt)).token_ids)

        return max(0, (num_tokens(2) - num_tokens(1)) // 2 - self.of("a"))


def inner_tokenizer(wrapper: Any) -> Any:
    """Hugging Face's tokenizer inside of mlx-lm's wrapper."""
    return wrapper.get_chat_template.__self__


def is_own_code(wrapper: Any) -> bool:
    """A module of mlx-lm's writes the conversation, and no template."""
    return getattr(wrapper, "_chat_template", None) is not None


def whole_characters(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which JSON inside of JSON may escape
    where the door does not see it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub("\ufffd", text)
    return text


def _is_byte_level(backend: Any) -> bool:
    decoder: Any = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return False
    parts: list[Mapping[str, object]] = [decoder, *decoder.get("decoders", [])]
    return any(part.get("type") == "ByteLevel" for part in parts)
