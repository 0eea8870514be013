"""Reads calls in Gemma's notation: `call:NAME{key:value,…}`, texts between marks of their own."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.worker.output.scan import Called, NotACall, Reading, Scan, Step, Unclosed
from runtime.worker.output.tools import RequestTools, Schema, as_schema, properties_of, schema_of
from runtime.worker.output.typed import typed

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Braces:
    """Calls between `start` and `end`; `quote` is before and after each text."""

    start: str
    end: str
    quote: str


def read_braced(scan: Scan, form: Braces, tools: RequestTools) -> Reading:
    """The call of a section whose opening mark is the text's beginning."""
    yield from scan.take(form.start)
    yield from scan.skip()
    while True:
        yield from scan.expect("call:")
        name = (yield from scan.taken_until("{")).strip()
        if not name or any(character.isspace() for character in name):
            raise NotACall
        tool = tools.by_name.get(name)
        schema: Schema = {} if tool is None else schema_of(tool)
        members = yield from _Reader(scan, form.quote, schema).members(schema, 0)
        yield Called(name, members)
        yield from scan.skip()
        if (yield from scan.take(form.end)):
            return
        if scan.is_cut and form.end.startswith(scan.text[scan.at :]):
            return
        if not (yield from scan.follows("call:")):
            scan.is_repaired = True
            return


class _Reader:
    """Reads the values of one call."""

    def __init__(self, scan: Scan, quote: str, root: object) -> None:
        self._scan = scan
        self._quote = quote
        self._root = as_schema(root)

    def members(self, schema: object, depth: int) -> Step[dict[str, object]]:
        """What stands between braces, the first of which was read."""
        scan, found = self._scan, dict[str, object]()
        known, others = properties_of(as_schema(schema)), as_schema(schema)
        while True:
            yield from scan.skip()
            if (yield from scan.take("}")):
                return found
            if (yield from scan.take(self._quote)):
                key = yield from scan.taken_until(self._quote)
                yield from scan.skip()
                yield from scan.expect(":")
            else:
                key = (yield from scan.taken_until(":")).strip()
            one = known.get(key, others.get("additionalProperties", {}))
            found[key] = yield from self._value(one, depth)
            yield from scan.skip()
            yield from scan.take(",")

    def _value(self, schema: object, depth: int) -> Step[object]:
        if depth > _MAX_DEPTH:
            raise NotACall
        scan = self._scan
        yield from scan.skip()
        match (yield from scan.take(self._quote, "{", "[")):
            case "{":
                return (yield from self.members(schema, depth + 1))
            case "[":
                return (yield from self._items(as_schema(schema).get("items", {}), depth + 1))
            case "":
                start = scan.at
                while (character := (yield from scan.peek())) not in (",", "}", "]", ""):
                    scan.at += 1
                if not character or scan.at == start:
                    raise NotACall if character else Unclosed
                return typed(scan.text[start : scan.at].strip(), schema, self._root)
            case _:
                return (yield from scan.taken_until(self._quote))

    def _items(self, schema: object, depth: int) -> Step[list[object]]:
        scan, found = self._scan, list[object]()
        while True:
            yield from scan.skip()
            if (yield from scan.take("]")):
                return found
            found.append((yield from self._value(schema, depth)))
            yield from scan.skip()
            yield from scan.take(",")
