"""Text of one section of tool calls while it is still being generated, read from left to right.

A reader is a generator that yields None where it needs more text. So it reads the same however
the text is cut, and nothing is read twice but what it looks ahead at.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

BLANKS = " \t\r\n"
_MAX_LOOK = 512


class NotACall(ValueError):
    """The text is no call from here on."""


class Unclosed(ValueError):
    """The text ended inside of a call."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A call has begun whose arguments follow in pieces."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Argued:
    """More of the open call's arguments, as JSON text."""

    text: str
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """A whole call; one that is told later than it was read has its own `text`."""

    name: str
    arguments: object
    id: str | None = None
    text: str = ""


Piece = Opened | Argued | Called
T = TypeVar("T")
Step = Generator[None, None, T]
Reading = Generator[Piece | None, None, None]


class Scan:
    """The text so far and how far it was read.

    `is_over` says that no more will come, `is_cut` that this was not the model's own end. A reader
    sets `is_repaired` where the text had an error with only one possible meaning.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.at = 0
        self.is_over = False
        self.is_cut = False
        self.is_repaired = False

    def peek(self) -> Step[str]:
        """The next character; empty where the text is over."""
        while self.at >= len(self.text):
            if self.is_over:
                return ""
            yield
        return self.text[self.at]

    def skip(self) -> Step[None]:
        """Go past blanks."""
        while (character := (yield from self.peek())) and character in BLANKS:
            self.at += 1

    def take(self, *marks: str) -> Step[str]:
        """Go past the mark that comes next, and tell which; empty where none of them does."""
        while True:
            coming = self.text[self.at : self.at + max(map(len, marks))]
            found = max((m for m in marks if coming.startswith(m)), key=len, default="")
            is_open = any(len(m) > len(coming) and m.startswith(coming) for m in marks)
            if self.is_over or not is_open:
                self.at += len(found)
                return found
            yield

    def expect(self, mark: str) -> Step[None]:
        """Go past this mark.

        Raises:
            NotACall: it does not come next.
            Unclosed: the text is over.
        """
        if not (yield from self.take(mark)):
            raise Unclosed if mark.startswith(self.text[self.at :]) else NotACall

    def follows(self, *marks: str) -> Step[str]:
        """Which of the marks comes after blanks, without going there."""
        here = self.at
        while (character := (yield from self.peek())) and character in BLANKS:
            self.at += 1
            if self.at - here > _MAX_LOOK:
                break
        found = yield from self.take(*marks)
        self.at = here
        return found

    def until(self, *marks: str) -> Step[str]:
        """Go past the first of the marks, and tell which; to the end where none of them comes."""
        longest = max(map(len, marks))
        start = self.at
        while True:
            places = [(place, m) for m in marks if (place := self.text.find(m, start)) >= 0]
            place, _ = min(places, default=(len(self.text), ""))
            mark = max((m for there, m in places if there == place), key=len, default="")
            tail = self.text[place : place + longest]
            may_grow = any(len(m) > len(tail) and m.startswith(tail) for m in marks)
            if self.is_over or (mark and not may_grow):
                self.at = place + len(mark)
                return mark
            start = max(start, min(place, len(self.text) - longest + 1))
            yield

    def taken_until(self, *marks: str) -> Step[str]:
        """The text before the first of the marks, which is gone past.

        Raises:
            Unclosed: none of them comes.
        """
        start = self.at
        mark = yield from self.until(*marks)
        if not mark:
            raise Unclosed
        return self.text[start : self.at - len(mark)]
