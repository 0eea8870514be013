"""Reads calls whose arguments are JSON: objects with a name in them, or a name before each object.

Arguments are said as they are written wherever the name comes first.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, replace

from runtime.worker.output.json_value import JsonObject
from runtime.worker.output.scan import (
    Argued,
    Called,
    NotACall,
    Opened,
    Piece,
    Reading,
    Scan,
    Step,
    Unclosed,
)
from runtime.worker.output.tools import RequestTools
from runtime.worker.output.typed import loaded


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects between `start` and `end`, single, in a list, or one after the other.

    Those of a family that `is_list` are said when the list is whole: all of them or none. With
    `is_strict` no other members than these may be in one: the marks alone do not tell a call
    from an answer that is JSON.
    """

    start: str
    end: str = ""
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ("id", "tool_call_id")
    is_strict: bool = False
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Headed:
    """A head before each object: `head` finds the name and perhaps an id in what stands before
    `head_end`. `call_ends` may close a call, `end` the section; without one, a further call begins
    with a start, or with a name and one of `head_marks`, and the section may be a list of objects.
    """

    starts: tuple[str, ...]
    head: re.Pattern[str]
    head_end: str
    call_ends: tuple[str, ...] = ()
    end: str = ""
    head_marks: tuple[str, ...] = ()
    is_single: bool = False


def read_objects(scan: Scan, form: Objects, tools: RequestTools) -> Reading:
    """The calls of a section whose opening mark is the text's beginning."""
    if form.start:
        yield from scan.take(form.start)
    yield from scan.skip()
    if (yield from scan.peek()) == "[":
        yield from _read_list(scan, form)
    else:
        yield from _read_row(scan, form, None if form.is_list else tools)
    if form.end:
        yield from scan.skip()
        yield from _close(scan, form.end)


def _close(scan: Scan, end: str) -> Step[None]:
    """Go past the mark of the end, without which a whole section is whole all the same."""
    if (yield from scan.take(end)):
        return
    if scan.is_cut and end.startswith(scan.text[scan.at :]):
        raise Unclosed
    if (yield from scan.peek()) and scan.text[scan.at] in "[{,":
        raise NotACall
    scan.is_repaired = True


def _read_list(scan: Scan, form: Objects) -> Reading:
    calls: list[Called] = []
    scan.at += 1
    while True:
        yield from scan.skip()
        if (yield from scan.take("]")):
            break
        if calls:
            yield from scan.expect(",")
            yield from scan.skip()
        start = scan.at
        call = yield from _read_object(scan, form, None)
        assert call is not None
        calls.append(replace(call, text=scan.text[start : scan.at]))
    if not calls:
        raise NotACall
    yield from calls


def _read_row(scan: Scan, form: Objects, tools: RequestTools | None) -> Reading:
    while True:
        call = yield from _read_object(scan, form, tools)
        if call is not None:
            yield call
        while (yield from scan.follows("}")):
            yield from scan.skip()
            yield from scan.take("}")
            scan.is_repaired = True
        if not (yield from scan.follows("{", ";", ",")):
            return
        here = scan.at
        yield from scan.skip()
        yield from scan.take(";", ",")
        yield from scan.skip()
        if (yield from scan.peek()) != "{":
            scan.at = here
            return


def _read_object(
    scan: Scan, form: Objects, tools: RequestTools | None
) -> Generator[Piece | None, None, Called | None]:
    """One call; None where its arguments were said as they were written."""
    yield from scan.expect("{")
    name, call_id, arguments, is_said = "", None, _MISSING, False
    while not (yield from _closes(scan)):
        key = yield from _key(scan)
        if key in form.names:
            name = yield from read_value(scan)
            if not isinstance(name, str):
                raise NotACall
        elif key in form.arguments:
            is_usual = key == form.arguments[0]
            scan.is_repaired |= not is_usual and not form.is_strict
            starts = is_usual and not is_said and (yield from scan.peek()) == "{"
            if starts and tools is not None and name in tools.streamed_names:
                yield Opened(name, call_id)
                yield from read_streamed(scan)
                is_said = True
            else:
                arguments = yield from read_value(scan)
        elif key in form.ids:
            call_id = str((yield from read_value(scan)))
        elif form.is_strict and key != "type":
            raise NotACall
        else:
            yield from read_value(scan)
        if not (yield from _goes_on(scan, form, is_said=is_said or arguments is not _MISSING)):
            break
    if is_said:
        return None
    if not name:
        raise NotACall
    return Called(name, {} if arguments is _MISSING or arguments is None else arguments, call_id)


_MISSING = object()
_OF_NUMBERS = "+-._"


def _closes(scan: Scan) -> Step[bool]:
    yield from scan.skip()
    return bool((yield from scan.take("}")))


def _key(scan: Scan) -> Step[str]:
    key = yield from read_value(scan)
    if not isinstance(key, str):
        raise NotACall
    yield from scan.skip()
    yield from scan.expect(":")
    yield from scan.skip()
    return key


def _goes_on(scan: Scan, form: Objects, *, is_said: bool) -> Step[bool]:
    """Whether another member follows; a missing end of the object is forgiven."""
    yield from scan.skip()
    if (yield from scan.take(",")):
        return True
    if (yield from scan.take("}")):
        return False
    is_over = not (yield from scan.peek())
    is_end = not is_over and form.end and (yield from scan.follows(form.end))
    if is_said and (is_end or (is_over and not scan.is_cut)):
        scan.is_repaired = True
        return False
    raise Unclosed if is_over else NotACall


def read_streamed(scan: Scan) -> Reading:
    """An object, said piece by piece."""
    value = JsonObject()
    while not value.is_done:
        if not (yield from scan.peek()):
            raise Unclosed
        said, rest = value.feed(scan.text[scan.at :])
        scan.at = len(scan.text) - len(rest)
        scan.is_repaired |= value.is_repaired
        if said or value.is_done:
            yield Argued(said, is_last=value.is_done)
        if value.is_broken:
            raise NotACall


def read_value(scan: Scan) -> Step[object]:
    """Any JSON value."""
    first = yield from scan.peek()
    start = scan.at
    if first == '"':
        yield from _pass_string(scan)
    elif first and first in "{[":
        yield from _pass_container(scan, first)
    else:
        while (one := (yield from scan.peek())) and (one.isalnum() or one in _OF_NUMBERS):
            scan.at += 1
    if scan.at == start:
        raise NotACall if first else Unclosed
    try:
        return loaded(scan.text[start : scan.at])
    except ValueError as error:
        raise NotACall from error


def _pass_string(scan: Scan) -> Step[None]:
    scan.at += 1
    while (character := (yield from scan.peek())) != '"':
        if not character:
            raise Unclosed
        scan.at += 1
        if character == "\\":
            if not (yield from scan.peek()):
                raise Unclosed
            scan.at += 1
    scan.at += 1


def _pass_container(scan: Scan, opens: str) -> Step[None]:
    value = JsonObject(opens)
    while not value.is_done:
        if not (yield from scan.peek()):
            raise Unclosed
        _, rest = value.feed(scan.text[scan.at :])
        scan.at = len(scan.text) - len(rest)
        if value.is_broken:
            raise NotACall


def read_headed(scan: Scan, form: Headed, tools: RequestTools) -> Reading:
    """The calls of a section whose opening mark is the text's beginning."""
    yield from scan.take(*form.starts)
    num_calls = 0
    while True:
        yield from scan.skip()
        if form.end and (yield from scan.take(form.end)):
            return
        if num_calls and not (yield from scan.peek()):
            scan.is_repaired |= bool(form.end) and not form.is_single
            return
        if not num_calls and form.head_marks and (yield from scan.peek()) == "[":
            yield from _read_list(scan, Objects(""))
            return
        yield from _read_headed_call(scan, form, tools)
        num_calls += 1
        if form.is_single or (not form.end and not (yield from _is_another(scan, form))):
            return


def _read_headed_call(scan: Scan, form: Headed, tools: RequestTools) -> Reading:
    start = scan.at
    ends = (form.end,) if form.end else ()
    mark = yield from scan.until(form.head_end, *ends)
    if mark != form.head_end:
        raise NotACall if mark or not scan.is_cut else Unclosed
    found = form.head.fullmatch(scan.text[start : scan.at - len(mark)].strip())
    if found is None:
        raise NotACall
    named = found.groupdict()
    name, call_id = named["name"], named.get("id")
    yield from scan.skip()
    first = yield from scan.peek()
    if first == "{" and name in tools.streamed_names:
        yield Opened(name, call_id)
        yield from read_streamed(scan)
    elif first and first in '{["' and not _is_bare_text(name, first, tools):
        yield Called(name, (yield from read_value(scan)), call_id)
    else:
        yield Called(name, (yield from _read_text(scan, form)), call_id)
    if form.call_ends:
        yield from scan.skip()
        yield from scan.take(*form.call_ends)


def _is_bare_text(name: str, first: str, tools: RequestTools) -> bool:
    """A tool that takes one text may be given it without quotes."""
    tool = tools.by_name.get(name)
    return tool is not None and tool.is_freeform and first == "["


def _read_text(scan: Scan, form: Headed) -> Step[str]:
    """Arguments that are no JSON."""
    start = scan.at
    ends = (*form.call_ends, *((form.end,) if form.end else ()), *form.starts)
    mark = yield from scan.until(*ends)
    if not mark and scan.is_cut:
        raise Unclosed
    scan.at -= len(mark)
    return scan.text[start : scan.at].strip()


def _is_another(scan: Scan, form: Headed) -> Step[bool]:
    """Whether one more call follows a section without end."""
    here = scan.at
    yield from scan.skip()
    if (yield from scan.take(*form.starts)):
        return True
    start = scan.at
    while (character := (yield from scan.peek())) and (character.isalnum() or character in "_-."):
        scan.at += 1
    is_named = scan.at > start and bool((yield from scan.follows(*form.head_marks)))
    scan.at = start if is_named else here
    return is_named
