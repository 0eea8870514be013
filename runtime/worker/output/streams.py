"""Tool calls whose arguments are JSON: their pieces, as soon as they are certain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.worker.output.json_value import JsonObject


@dataclass(frozen=True, slots=True)
class StreamForm:
    """`opening` matches all before the arguments, with groups `name` and perhaps `id`; `closing`
    matches what may follow the arguments of a whole call.
    """

    opening: re.Pattern[str]
    closing: re.Pattern[str]


_FORMS: Mapping[str, StreamForm] = {
    "json_tools": StreamForm(
        re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'),
        re.compile(r"\s*\}\s*"),
    ),
    "mistral": StreamForm(
        re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"),
        re.compile(r"\s*"),
    ),
    "kimi_k2": StreamForm(
        re.compile(
            r"\s*(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[^:\s]+):\d+)\s*"
            r"<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        re.compile(r"\s*(?:<\|tool_call_end\|>)?\s*"),
    ),
    "harmony": StreamForm(
        re.compile(r"(?:functions\.)?(?P<name>[^\s<{]+)[^{]*?<\|message\|>\s*(?=\{)"),
        re.compile(r"\s*"),
    ),
}


@dataclass(frozen=True, slots=True)
class Opened:
    """A call has begun: its name and, where the dialect has them, its own id."""

    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class Argued:
    """More of the open call's arguments."""

    text: str


Piece = Opened | Argued


class CallStream:
    """One section of tool calls. What it does not understand stays in `rest`.

    It begins no call whose name is not in `names`: such a section is judged as a whole.
    """

    def __init__(self, form: StreamForm, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._value: JsonObject | None = None
        self.rest = ""
        self.num_calls = 0
        self.is_repaired = False

    @property
    def is_open(self) -> bool:
        """A call has begun and its arguments have not ended."""
        return self._value is not None

    @property
    def is_broken(self) -> bool:
        """The open call's arguments are no JSON."""
        return self._value is not None and self._value.is_broken

    @property
    def in_string(self) -> bool:
        """The text so far ends inside a string of the arguments."""
        return self._value is not None and not self.is_broken and self._value.in_string

    @property
    def is_whole(self) -> bool:
        """Every call is complete, and nothing but what closes it follows."""
        return not self.is_open and self._form.closing.fullmatch(self.rest) is not None

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain."""
        pieces: list[Piece] = []
        self.rest += text
        while self.rest:
            if self._value is not None:
                pieces += self._argue(self._value)
            elif not self._open(pieces):
                break
        return pieces

    def _argue(self, value: JsonObject) -> list[Piece]:
        if value.is_broken:
            said, self.rest = self.rest, ""
            return [Argued(said)]
        said, self.rest = value.feed(self.rest)
        self.is_repaired |= value.is_repaired
        if value.is_done:
            self._value = None
        return [Argued(said)] if said else []

    def _open(self, pieces: list[Piece]) -> bool:
        start = 0
        if self.num_calls:
            closing = self._form.closing.match(self.rest)
            start = closing.end() if closing is not None else 0
        found = self._form.opening.match(self.rest, start)
        if found is None:
            return False
        named = found.groupdict()
        name = named["name"]
        if name not in self._names:
            return False
        self.rest = self.rest[found.end() :]
        self.num_calls += 1
        self._value = JsonObject()
        pieces.append(Opened(name, named.get("id")))
        return True


def form_of(dialect_name: str) -> StreamForm | None:
    """How calls of this dialect are streamed; None where they are said whole."""
    return _FORMS.get(dialect_name)
