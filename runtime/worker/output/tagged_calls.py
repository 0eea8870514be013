"""Reads calls with a tag for each argument.

A tag inside of a value is part of it: a value ends where what follows is what the form allows next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, cast

from runtime.worker.output.json_calls import Objects, read_objects, read_value
from runtime.worker.output.scan import Called, NotACall, Reading, Scan, Step, Unclosed
from runtime.worker.output.tools import RequestTools, Schema, properties_of, schema_of
from runtime.worker.output.typed import fits, listed, loaded, typed

_MAX_BLANKS = 512
_NAME = re.compile(r"[^\s<>\"']+")
_IS_TEXT = ('string="true"', 'type="string"')


class Tag(NamedTuple):
    """How an element begins: what is before its name and after it; `after` is empty where nothing
    tells the name's end, and attributes may stand between where `before` ends with a quote.
    """

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks of a section, its calls, their arguments and the values of these.

    `call` begins a call and `call_end`, or else the section's `end`, closes it. A key is inside of
    `argument`, or between it and `value`. With `trims` a value has one newline of its own on
    each side, with `cdata` it may be such a section, and with `escapes` names have entities.
    `whole` are the marks around arguments that are one JSON object.
    """

    start: str
    end: str
    call: Tag
    argument: Tag
    value_end: str
    call_end: str = ""
    value: str = ""
    trims: bool = False
    cdata: bool = False
    escapes: bool = False
    whole: tuple[str, str] = ("", "")
    bare: str = ""

    @property
    def closing(self) -> str:
        """What ends a call."""
        return self.call_end or self.end

    @property
    def opening(self) -> str:
        """What begins a call, or else a section with one."""
        return self.call.before or self.start


class _Value(NamedTuple):
    text: str
    attributes: str


def read_tagged(scan: Scan, form: Tags, tools: RequestTools) -> Reading:
    """The calls of a section whose opening mark is the text's beginning."""
    has_start = yield from scan.take(form.start)
    yield from scan.skip()
    if not form.call.before and (yield from scan.peek()) == "{":
        yield from read_objects(scan, Objects("", form.end), tools)
        return
    is_first = True
    while True:
        if form.call.before:
            yield from scan.expect(form.call.before)
        head = yield from _head(scan, form, form.call, form.argument.before, form.closing)
        name = head.text
        if not has_start and is_first and name not in tools.by_name:
            raise NotACall
        if head.attributes == "/":
            yield Called(name, {})
        else:
            yield Called(name, (yield from _arguments(scan, form, name, tools)))
        is_first = False
        if not form.call_end:
            return
        yield from scan.skip()
        if (yield from scan.take(form.end)):
            return
        if scan.is_cut and form.end.startswith(scan.text[scan.at :]):
            return
        if not form.call.before or not (yield from scan.follows(form.call.before)):
            scan.is_repaired = True
            return


def _head(scan: Scan, form: Tags, tag: Tag, *nexts: str) -> Step[_Value]:
    """The name in a tag that has begun, and its attributes."""
    if tag.after:
        inside = yield from scan.taken_until(tag.after)
    else:
        start = scan.at
        mark = yield from scan.until(*nexts, "\n")
        if not mark and scan.is_cut:
            raise Unclosed
        scan.at -= len(mark)
        inside = scan.text[start : scan.at]
    attributes = ""
    if tag.before.endswith('"'):
        inside, _, attributes = inside.partition('"')
    elif tag.before.endswith("="):
        inside = inside.strip().strip("\"'")
    if attributes.rstrip().endswith("/"):
        attributes = "/"
    name = inside.strip() if tag is form.call else inside
    if form.escapes:
        name = name.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">")
        name = name.replace("&amp;", "&")
    if tag is form.call and _NAME.fullmatch(name) is None:
        raise NotACall
    return _Value(name, attributes)


class _How(NamedTuple):
    """A way to read a call: calls inside of values are gone past, or else only what ends the whole
    call ends its values; with `repairs` another argument may begin before a value's closing tag.
    """

    nests: bool = True
    repairs: bool = False


_WAYS = (_How(), _How(repairs=True), _How(nests=False))


def _arguments(scan: Scan, form: Tags, name: str, tools: RequestTools) -> Step[object]:
    """All arguments of a call, and its end: of the first way in which they fit its tool."""
    tool = tools.by_name.get(name)
    schema: Schema = {} if tool is None else schema_of(tool)
    start, was_repaired = scan.at, scan.is_repaired
    found: tuple[object, int, bool] | None = None
    failure: NotACall | Unclosed = NotACall()
    for how in _WAYS:
        if found is not None and not how.nests:
            break
        scan.at, scan.is_repaired = start, was_repaired
        try:
            arguments = yield from _read_arguments(scan, form, schema, how)
        except (NotACall, Unclosed) as error:
            failure = error if how is _WAYS[0] else failure
            if scan.is_cut:
                break
            continue
        is_fit = _fit(arguments, schema)
        if is_fit or found is None:
            found = arguments, scan.at, scan.is_repaired
        if is_fit:
            break
    if found is None:
        raise failure
    arguments, scan.at, scan.is_repaired = found
    return arguments


def _fit(arguments: object, schema: Schema) -> bool:
    """All are there that the tool needs, and what is none of its texts is not one."""
    if not isinstance(arguments, dict):
        return True
    given, known = cast("dict[str, object]", arguments), properties_of(schema)
    return all(key in [*given] for key in listed(schema, "required")) and all(
        fits(value, known.get(key), schema) for key, value in given.items()
    )


def _read_arguments(scan: Scan, form: Tags, schema: Schema, how: _How) -> Step[object]:
    known = properties_of(schema)
    arguments: dict[str, object] = {}
    marks = [m for m in (form.argument.before, form.closing, form.whole[0]) if m]
    while True:
        yield from scan.skip()
        mark = yield from scan.take(*marks)
        if mark == form.closing:
            return arguments
        if mark and mark == form.whole[0]:
            whole = yield from read_value(scan)
            yield from scan.expect(form.whole[1])
            yield from scan.skip()
            yield from scan.expect(form.closing)
            return whole
        if not mark:
            return (yield from _unclosed(scan, form, arguments))
        key, attributes = yield from _key(scan, form)
        scan.is_repaired |= key in arguments
        missing = [one for one in known if one not in arguments and one != key]
        written = yield from _value(scan, form, missing, how)
        arguments[key] = _typed(written, attributes, known.get(key), schema)


def _unclosed(scan: Scan, form: Tags, arguments: dict[str, object]) -> Step[object]:
    """A whole call whose end is missing before that of the section or of the text."""
    if not (yield from scan.peek()):
        if arguments and not scan.is_cut:
            scan.is_repaired = True
            return arguments
        raise Unclosed
    if arguments and (yield from scan.follows(form.end)):
        scan.is_repaired = True
        return arguments
    is_cut = scan.is_over and scan.is_cut
    tail = scan.text[scan.at :]
    if is_cut and (form.argument.before.startswith(tail) or form.closing.startswith(tail)):
        raise Unclosed
    raise NotACall


def _key(scan: Scan, form: Tags) -> Step[_Value]:
    head = yield from _head(scan, form, form.argument)
    if form.value:
        yield from scan.skip()
        yield from scan.expect(form.value)
    return head


def _value(scan: Scan, form: Tags, missing: list[str], how: _How) -> Step[str]:
    """The text of a value whose opening tag was read. `missing` are the keys that may follow."""
    start = scan.at
    marks = {form.value_end, form.argument.before, form.closing, form.opening}
    while True:
        mark = yield from scan.until(*marks)
        end = scan.at - len(mark)
        if not mark:
            raise Unclosed
        if mark == form.value_end and (yield from _ends_value(scan, form, missing, how)):
            return _trimmed(scan.text[start:end], form)
        is_line = not form.trims or scan.text[start:end].endswith("\n")
        is_next = how.repairs and mark == form.argument.before and is_line
        if (is_next and (yield from _names(scan, form, missing))) or (
            mark == form.closing and (yield from _ends_call(scan, form))
        ):
            scan.at = end
            scan.is_repaired = True
            return _trimmed(scan.text[start:end], form)
        if how.nests and mark == form.opening and (yield from _opens_call(scan, form)):
            yield from _pass_call(scan, form)


def _ends_value(scan: Scan, form: Tags, missing: list[str], how: _How) -> Step[bool]:
    """What follows may follow a value."""
    here = scan.at
    yield from scan.skip()
    if scan.at - here > _MAX_BLANKS:
        scan.at = here
        return False
    found = yield from scan.take(form.argument.before, form.closing, form.end)
    is_end = bool(found)
    if found and not how.nests:
        is_next = found == form.argument.before
        is_end = yield from (_names(scan, form, missing) if is_next else _ends_call(scan, form))
    elif not found:
        is_end = not (yield from scan.peek())
    scan.at = here
    if is_end and not found and scan.is_cut:
        raise Unclosed
    return is_end


def _names(scan: Scan, form: Tags, missing: list[str]) -> Step[bool]:
    """An argument that the call still lacks begins here."""
    here = scan.at
    after = '"' if form.argument.before.endswith('"') else form.argument.after[:1]
    found = yield from scan.take(*(f"{key}{after}" for key in missing), "\0")
    scan.at = here
    return bool(found)


def _ends_call(scan: Scan, form: Tags) -> Step[bool]:
    """The call ends here: another begins, or the section ends and with it the text."""
    here = scan.at
    if form.call_end:
        yield from scan.skip()
        mark = yield from scan.take(form.end, form.call.before)
        if mark != form.end:
            is_over = not (yield from scan.peek())
            scan.at = here
            return bool(mark) or (is_over and not scan.is_cut)
    yield from scan.skip()
    is_another = yield from scan.take(form.start)
    is_over = not (yield from scan.peek())
    scan.at = here
    return bool(is_another) or (is_over and not scan.is_cut)


def _opens_call(scan: Scan, form: Tags) -> Step[bool]:
    """A whole call is written in the value: what follows its opening is a name and an argument."""
    here = scan.at
    if not form.call.before:
        yield from scan.skip()
    while (character := (yield from scan.peek())) and (character.isalnum() or character in "_-."):
        scan.at += 1
        if scan.at - here > 256:
            break
    is_named = scan.at > here
    if form.call.after:
        is_named = is_named and bool((yield from scan.take(form.call.after, '"' + form.call.after)))
    is_call = is_named and bool((yield from scan.follows(form.argument.before, form.closing)))
    scan.at = here
    return is_call


def _pass_call(scan: Scan, form: Tags) -> Step[None]:
    """Go past a call inside of a value.

    Raises:
        Unclosed: it has no end.
    """
    depth = 1
    while depth:
        mark = yield from scan.until(form.closing, form.opening)
        if not mark:
            raise Unclosed
        if mark == form.closing:
            depth -= 1
        elif (yield from _opens_call(scan, form)):
            depth += 1


def _trimmed(text: str, form: Tags) -> str:
    if form.trims:
        text = text.removeprefix("\n").removesuffix("\n")
    if form.cdata and text.strip().startswith("<![CDATA[") and text.strip().endswith("]]>"):
        return text.strip()[len("<![CDATA[") : -len("]]>")]
    return text


def _typed(text: str, attributes: str, schema: object, root: Schema) -> object:
    if any(mark in attributes for mark in _IS_TEXT):
        return text
    if 'string="false"' in attributes or 'type="' in attributes:
        try:
            return loaded(text)
        except ValueError:
            pass
    return typed(text, {} if schema is None else schema, root)
