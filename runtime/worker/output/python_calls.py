"""Reads calls that are written as Python: in a list, or one a line."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.worker.output.scan import BLANKS, Called, NotACall, Reading, Scan, Step, Unclosed
from runtime.worker.output.tools import RequestTools
from runtime.worker.output.typed import literal

_CLOSES = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls between `start` and `end`; with `is_list` they are in brackets, else one a line."""

    start: str
    end: str = ""
    is_list: bool = True


def read_python(scan: Scan, form: Calls, tools: RequestTools) -> Reading:
    """The calls of a section whose opening mark is the text's beginning; all of them or none."""
    has_start = yield from scan.take(form.start)
    yield from scan.skip()
    in_list = yield from scan.take("[")
    if form.is_list and not in_list:
        raise NotACall if (yield from scan.peek()) else Unclosed
    calls: list[Called] = []
    while True:
        yield from scan.skip()
        if calls and (yield from scan.take("]" if in_list else form.end)):
            break
        if calls and in_list:
            yield from scan.expect(",")
            yield from scan.skip()
        calls.append((yield from _call(scan, tools, needs_name=not has_start)))
        if not in_list and not (yield from _has_more(scan, form)):
            break
    yield from calls
    if in_list and form.end:
        yield from scan.skip()
        if not (yield from scan.take(form.end)):
            scan.is_repaired = bool(has_start)


def _has_more(scan: Scan, form: Calls) -> Step[bool]:
    yield from scan.skip()
    if (yield from scan.peek()):
        return True
    if scan.is_cut:
        raise Unclosed
    scan.is_repaired = bool(form.end)
    return False


def _call(scan: Scan, tools: RequestTools, *, needs_name: bool) -> Step[Called]:
    start = scan.at
    name = yield from _name(scan)
    yield from scan.expect("(")
    if needs_name and name not in tools.by_name:
        raise NotACall
    arguments: dict[str, object] = {}
    while True:
        yield from scan.skip()
        if (yield from scan.take(")")):
            return Called(name, arguments, text=scan.text[start : scan.at])
        key = yield from _name(scan)
        yield from scan.skip()
        yield from scan.expect("=")
        arguments[key] = yield from _value(scan)
        yield from scan.skip()
        yield from scan.take(",")


def _name(scan: Scan) -> Step[str]:
    start = scan.at
    while (character := (yield from scan.peek())) and (character.isalnum() or character in "_-."):
        scan.at += 1
    if scan.at == start:
        raise NotACall if character else Unclosed
    return scan.text[start : scan.at]


def _value(scan: Scan) -> Step[object]:
    """A literal, which ends before the comma or bracket that is not inside of it."""
    start, open_brackets = scan.at, list[str]()
    while True:
        character = yield from scan.peek()
        if not character:
            raise Unclosed
        if character in "'\"":
            yield from _pass_string(scan, character)
            continue
        if not open_brackets and character in ",)":
            break
        if open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character in _CLOSES:
            open_brackets.append(_CLOSES[character])
        scan.at += 1
    try:
        return literal(scan.text[start : scan.at].strip(BLANKS))
    except ValueError as error:
        raise NotACall from error


def _pass_string(scan: Scan, quote: str) -> Step[None]:
    mark = (yield from scan.take(quote * 3)) or (yield from scan.take(quote))
    while True:
        found = yield from scan.until(mark, "\\")
        if not found:
            raise Unclosed
        if found == mark:
            return
        if not (yield from scan.peek()):
            raise Unclosed
        scan.at += 1
