"""Constraints compiled for one model's vocabulary, and kept for the next request with the same.

Knows llguidance. It works on the host alone: nothing here calls mlx.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runtime.errors import InvalidRequest
from runtime.types import Constraint
from runtime.worker.closed_schema import asserted, closed

_MAX_KEPT = 128
_MAX_BYTES = 1 << 20
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
_LISTING = re.compile(r"\n\s*\d+ \| |\n<state>")
# A row holds four items for each optional member; with 8,000 the slowest mask took 30 ms.
_LIMITS = LLParserLimits(max_items_in_row=8000)
_NUM_TRIED = 2
# JSON on one line: with blanks wherever JSON allows them small models write nothing else.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Grammars:
    """Makes matchers for constraints. May be used from one thread at a time."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._special = _special_tokens(tokenizer)

    @property
    def is_possible(self) -> bool:
        """The tokenizer is of a kind that constraints can work with."""
        return self._backend is not None

    def of_constraint(self, constraint: Constraint) -> LLMatcher:
        """A matcher for an answer; every call gives one of its own.

        Raises:
            InvalidRequest: it cannot be enforced; the message says why.
        """
        field = constraint.field
        match constraint.kind:
            case "json_object":
                return self.of_lark(f"start: {json_rule({'type': 'object'})}", field)
            case "json_schema":
                return self.of_lark(
                    f"start: {json_rule(closed(_schema(constraint.text, field)))}", field
                )
            case "regex":
                return self._matcher(LLMatcher.grammar_from_regex(constraint.text), field)
            case "lark":
                return self.of_lark(constraint.text, field)

    def of_lark(self, text: str, field: str) -> LLMatcher:
        """A matcher for a grammar in llguidance's dialect of Lark.

        Raises:
            InvalidRequest: it cannot be enforced; the message says why, `field` is named.
        """
        return self._matcher(LLMatcher.grammar_from_lark(text), field)

    def literal(self, text: str) -> str:
        """Lark for exactly this text, special tokens being the tokens they are."""
        parts = self._special.split(text) if self._special is not None else [text]
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: str) -> str:
        token_id = self._tokenizer.convert_tokens_to_ids(part)
        is_special = self._special is not None and self._special.fullmatch(part) is not None
        return f"<[{token_id}]>" if is_special else json.dumps(part, ensure_ascii=False)

    def _matcher(self, grammar: str, field: str) -> LLMatcher:
        if not self.is_possible:
            message = f"{field} cannot be enforced: this model's tokenizer is of no known kind."
            raise InvalidRequest(message, field)
        if len(grammar) > _MAX_BYTES:
            raise InvalidRequest(
                f"{field} is larger than {_MAX_BYTES} bytes: send a smaller one.", field
            )
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is None:
                kept = self._compile(grammar, field)
                self._kept[grammar] = kept
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return kept.deep_copy()

    def _compile(self, grammar: str, field: str) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._new_vocabulary(field)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            reason = _reason(matcher.get_error())
            raise InvalidRequest(f"{field} cannot be enforced: {reason}.", field)
        tried = self._tried(matcher)
        if tried.is_error():
            reason = _reason(tried.get_error())
            if reason.startswith("NoExtension"):
                raise InvalidRequest(f"{field} cannot be enforced: nothing satisfies it.", field)
            raise InvalidRequest(
                f"{field} is too heavy to enforce: {reason}. Send one with fewer optional members "
                "and alternatives, and smaller repetitions.",
                field,
            )
        return matcher

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

    def _new_vocabulary(self, field: str) -> LLTokenizer:
        backend = copy(self._backend)
        backend.no_padding()
        backend.no_truncation()
        eos = sorted(self.eos_token_ids)
        try:
            return LLTokenizer(backend.to_str(), n_vocab=self.vocab_size, eos_token=eos)
        except (RuntimeError, ValueError) as error:
            message = f"{field} cannot be enforced with this model's tokenizer: {error}"
            raise InvalidRequest(message, field) from error


def _reason(error: str) -> str:
    """Why a grammar is none, on one line, without where in ours that is: nobody wrote that."""
    said = _LISTING.split(_PLACE.sub("", error.strip()), maxsplit=1)[0]
    return " ".join(said.split())[:500].rstrip(".")


def json_rule(schema: object) -> str:
    """Lark for a JSON value of this schema, on one line."""
    schema = asserted({} if schema is True else schema)
    if not isinstance(schema, dict):
        return f"%json {json.dumps({'anyOf': [schema]})}"
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _schema(text: str, field: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{field} has a schema that is not JSON: {error}.", field) from error


def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """All added tokens, longest first: text that contains one is that token to the model."""
    added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, added)) + ")") if added else None
