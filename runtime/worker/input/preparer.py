"""What a prompt or a grammar has done to it: rendered, tokenized, compiled.

How long that takes is up to whoever wrote the template, the text or the grammar: see `sandbox`.
Knows llguidance and the `tokenizers` behind a Hugging Face tokenizer; nothing here calls mlx.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import jinja2
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runtime.worker.input import gbnf

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a chat template raises that cannot show the messages it was given."""

# A row holds four items for each optional member; with 8,000 the slowest mask took 30 ms.
_LIMITS = LLParserLimits(max_items_in_row=8000)
_NUM_TRIED = 2


class Marked(NamedTuple):
    """Text as tokens, and for each marked character how many tokens end at or before it."""

    token_ids: list[int]
    positions: list[int]


Complaint = Literal["invalid", "heavy", "vocabulary"]


class GrammarRefused(Exception):
    """A grammar that is none, that is too heavy to follow, or that this vocabulary cannot have."""

    def __init__(self, complaint: Complaint, reason: str) -> None:
        super().__init__(reason)
        self.complaint: Complaint = complaint
        self.reason = reason


class Compiled(NamedTuple):
    """A grammar, and the seconds of processor time that it took to compile."""

    matcher: LLMatcher
    cpu_s: float


class OverBudget(Exception):
    """A job took more of the processor's time or of memory than it may.

    `is_alone`: it would take as much whatever else its request had done before.
    """

    def __init__(self, job: str, why: str, *, is_alone: bool = False) -> None:
        super().__init__(why)
        self.job = job
        self.why = why
        self.is_alone = is_alone


class Bench(Protocol):
    """Where the work is done: here, or in a process that can be ended."""

    def render(
        self, messages: list[dict[str, object]], tools: object, kwargs: dict[str, object]
    ) -> str:
        """A conversation as the chat template writes it. Raises one of `TEMPLATE_ERRORS`."""
        ...

    def encode(self, text: str, at: Sequence[int], *, adds_special: bool) -> Marked:
        """A text as tokens, with marks at these characters."""
        ...

    def matcher(self, grammar: str) -> Compiled:
        """A grammar, compiled and tried. Raises GrammarRefused."""
        ...


class PromptPreparer:
    """The work itself, with one tokenizer and without any limit on time."""

    def __init__(
        self, tokenizer: Any, vocab_size: int = 0, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    def render(
        self, messages: list[dict[str, object]], tools: object, kwargs: dict[str, object]
    ) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, **kwargs)

    def encode(self, text: str, at: Sequence[int], *, adds_special: bool) -> Marked:
        if self._backend is None or not at:
            token_ids = self._ids(text, adds_special=adds_special)
            return Marked(token_ids, [self._num_agreeing(token_ids, text[:mark]) for mark in at])
        self._backend.no_truncation()
        self._backend.no_padding()
        encoding = self._backend.encode(text, add_special_tokens=adds_special)
        found = (encoding.char_to_token(mark) if mark < len(text) else None for mark in at)
        return Marked(encoding.ids, [len(encoding.ids) if n is None else n for n in found])

    def prepare(self) -> None:
        """Do what the first grammar would have to wait for. Raises GrammarRefused."""
        _ = self._vocabulary

    def matcher(self, grammar: str) -> Compiled:
        made = self.compiled(grammar)
        tried = self._tried(made.matcher)
        if tried.is_error():
            raise GrammarRefused("heavy", tried.get_error())
        return made

    def compiled(self, grammar: str) -> Compiled:
        """A grammar that was not tried. Raises GrammarRefused."""
        vocabulary, start_s = self._vocabulary, time.thread_time()
        try:
            readable = gbnf.readable(grammar)
        except ValueError as error:
            raise GrammarRefused("invalid", str(error)) from error
        matcher = LLMatcher(vocabulary, readable, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarRefused("invalid", matcher.get_error())
        return Compiled(matcher, time.thread_time() - start_s)

    def _tried(self, matcher: LLMatcher) -> LLMatcher:
        """A copy some tokens on: the cost of a grammar is counted only when it is followed."""
        tried = matcher.deep_copy()
        for _ in range(_NUM_TRIED):
            allowed = int.from_bytes(tried.compute_bitmask(), "little")
            for token_id in self.eos_token_ids:
                allowed &= ~(1 << token_id)
            # With nothing else allowed the end is taken, which says what the mask kept quiet.
            end = min(self.eos_token_ids, default=0)
            token_id = (allowed & -allowed).bit_length() - 1 if allowed else end
            if tried.is_error() or tried.try_consume_tokens([token_id]) != 1:
                break
        return tried

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        backend = copy(self._backend)
        backend.no_padding()
        backend.no_truncation()
        eos = sorted(self.eos_token_ids)
        try:
            written = _without_unwritten(backend, self.vocab_size)
            return LLTokenizer(written, n_vocab=self.vocab_size, eos_token=eos)
        except (RuntimeError, ValueError) as error:
            raise GrammarRefused("vocabulary", str(error)) from error

    def _ids(self, text: str, *, adds_special: bool) -> list[int]:
        if adds_special:
            return self.tokenizer.encode(text)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _num_agreeing(self, token_ids: list[int], text: str) -> int:
        shorter = self._ids(text, adds_special=False)
        pairs = zip(shorter, token_ids, strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), len(shorter))


def _without_unwritten(backend: Any, vocab_size: int) -> str:
    """The tokenizer as JSON, without added tokens that the model has no logits for.

    Families that can see have them, and share their tokenizer with models that cannot (Gemma 3).
    """
    text: str = backend.to_str()
    if all(token_id < vocab_size for token_id in backend.get_added_tokens_decoder()):
        return text
    parts = msgspec.json.decode(text)
    parts["added_tokens"] = [one for one in parts["added_tokens"] if one["id"] < vocab_size]
    return msgspec.json.encode(parts).decode()
