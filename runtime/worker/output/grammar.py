"""Constraints compiled for one model's vocabulary, and kept for the next request with the same.

Knows llguidance. It works on the host alone: nothing here calls mlx.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from llguidance import LLMatcher

from runtime.errors import InvalidRequest
from runtime.types import Constraint
from runtime.worker.input import gbnf
from runtime.worker.input.preparer import (
    Bench,
    Compiled,
    GrammarRefused,
    OverBudget,
    PromptPreparer,
)
from runtime.worker.output.closed_schema import asserted, closed
from runtime.worker.output.decided_schema import decided
from runtime.worker.output.schema_algebra import Undecided

_MAX_KEPT = 128
_MAX_BYTES = 1 << 20
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
_LISTING = re.compile(r"\n\s*\d+ \| |\n<state>")
_MAX_KEPT_S = 4.0
_MAX_HEAVY = 1024
# JSON on one line: with blanks wherever JSON allows them small models write nothing else.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Grammars:
    """Makes matchers for constraints, and knows those that were too heavy."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        bench: Bench | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._bench = bench or PromptPreparer(tokenizer, vocab_size, self.eos_token_ids)
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._kept_s = 0.0
        self._heavy: OrderedDict[bytes, str] = OrderedDict()
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
                return self.of_lark(f"start: {_answer_rule(constraint.text, field)}", field)
            case "regex":
                return self._matcher(LLMatcher.grammar_from_regex(constraint.text), field)
            case "lark":
                return self.of_lark(constraint.text, field)
            case "gbnf":
                return self._matcher(gbnf.marked(constraint.text), field)

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
        kept = self._known(grammar)
        if kept is None:
            kept = self._compiled(grammar, field)
        return kept.deep_copy()

    def _known(self, grammar: str) -> LLMatcher | None:
        with self._lock:
            if grammar not in self._kept:
                return None
            self._kept.move_to_end(grammar)
            return self._kept[grammar].matcher

    def _compiled(self, grammar: str, field: str) -> LLMatcher:
        digest = blake2b(grammar.encode("utf-8", "replace"), digest_size=16).digest()
        if digest in self._heavy:
            raise _too_heavy(field, self._heavy[digest])
        try:
            made = self._bench.matcher(grammar)
        except GrammarRefused as error:
            raise _refusal(field, error) from error
        except OverBudget as error:
            if error.is_alone:
                self._note_heavy(digest, error.why)
            raise _too_heavy(field, error.why) from error
        with self._lock:
            self._keep(grammar, made)
        return made.matcher

    def _note_heavy(self, digest: bytes, why: str) -> None:
        with self._lock:
            self._heavy[digest] = why
            if len(self._heavy) > _MAX_HEAVY:
                self._heavy.popitem(last=False)

    def _keep(self, grammar: str, made: Compiled) -> None:
        """What takes long to compile takes much memory, up to 70 MB for each second."""
        if (before := self._kept.pop(grammar, None)) is not None:
            self._kept_s -= before.cpu_s
        self._kept[grammar] = made
        self._kept_s += made.cpu_s
        while len(self._kept) > _MAX_KEPT or (self._kept_s > _MAX_KEPT_S and len(self._kept) > 1):
            _, dropped = self._kept.popitem(last=False)
            self._kept_s -= dropped.cpu_s


def _too_heavy(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} is too heavy to enforce: {why}. Send one with fewer optional members and "
        "alternatives, and smaller repetitions.",
        field,
    )


def _refusal(field: str, error: GrammarRefused) -> InvalidRequest:
    if error.complaint == "vocabulary":
        message = f"{field} cannot be enforced with this model's tokenizer: {error.reason}"
        return InvalidRequest(message, field)
    reason = _reason(error.reason)
    if error.complaint == "invalid":
        return InvalidRequest(f"{field} cannot be enforced: {reason}.", field)
    if reason.startswith("NoExtension"):
        return InvalidRequest(f"{field} cannot be enforced: nothing satisfies it.", field)
    return _too_heavy(field, reason)


def _reason(error: str) -> str:
    """Why a grammar is none, on one line, without where in ours that is: nobody wrote that."""
    said = _LISTING.split(_PLACE.sub("", error.strip()), maxsplit=1)[0]
    return " ".join(said.split())[:500].rstrip(".")


def json_rule(schema: object) -> str:
    """Lark for a JSON value of this schema, on one line.

    Raises:
        Undecided: it says what no grammar can hold a value to; where, and why.
    """
    schema = decided(asserted({} if schema is True else schema))
    if not isinstance(schema, dict):
        return f"%json {json.dumps({'anyOf': [schema]})}"
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _answer_rule(text: str, field: str) -> str:
    try:
        return json_rule(closed(decided(asserted(_schema(text, field)))))
    except Undecided as error:
        raise InvalidRequest(f"{field} cannot be enforced: {error}.", field) from error


def _schema(text: str, field: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{field} has a schema that is not JSON: {error}.", field) from error


def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """All added tokens, longest first: text that contains one is that token to the model."""
    added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, added)) + ")") if added else None
