"""Calls whose arguments stand in a row with commas: Gemma's and Python's notation, as Lark."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import cast

from runtime.worker.output.tools import Schema, as_schema, properties_of

Literal = Callable[[str], str]
"""Text to Lark that matches exactly this text."""
JsonRule = Callable[[object], str]
"""A JSON schema to Lark."""

_PLAIN = frozenset({"integer", "number", "boolean", "null"})
_PARTS = frozenset({"anyOf", "oneOf", "allOf", "$ref", "patternProperties"})


@dataclass(frozen=True, slots=True)
class Notation:
    """How arguments are written: `{key}` and what assigns, what joins two, what stands around texts
    of which any matches `text`. Without a mark every value is JSON; `nests` says that lists and
    objects can be written.
    """

    argument: str
    joint: str
    mark: str = ""
    text: str = "(?s:.*)"
    name: str = r"[A-Za-z_]\w*"
    nests: bool = True

    def can_write(self, name: str, schema: Schema) -> bool:
        """A call of this tool can be written."""
        is_named = re.fullmatch(self.name, name) is not None and not keyword.iskeyword(name)
        return is_named and self._can_write_object(schema)

    def _can_write_object(self, schema: Schema) -> bool:
        if _PARTS & schema.keys() or schema.get("additionalProperties") not in (None, False):
            return False
        return all(
            key.isidentifier() and not keyword.iskeyword(key) and self._can_write_value(value)
            for key, value in properties_of(schema).items()
        )

    def _can_write_value(self, schema: object) -> bool:
        if not self.mark:
            return True
        known = as_schema(schema)
        if isinstance(values := known.get("enum"), list):
            return all(isinstance(one, str | int | None) for one in cast("list[object]", values))
        match known.get("type"):
            case "string":
                return "pattern" not in known
            case "object":
                return self.nests and "properties" in known and self._can_write_object(known)
            case "array":
                return self.nests and self._can_write_value(known.get("items"))
            case kind:
                return kind in _PLAIN and not _PARTS & known.keys()


class RuleWriter:
    """Writes rules; the name of each begins with `prefix`."""

    def __init__(
        self, notation: Notation, prefix: str, literal: Literal, json_rule: JsonRule
    ) -> None:
        self.rules: list[str] = []
        self._notation = notation
        self._prefix = prefix
        self._literal = literal
        self._json_rule = json_rule
        self._numbers = count()

    def arguments(self, schema: Schema) -> str:
        """The name of a rule for the members of an object, those that it requires among them."""
        required = schema.get("required")
        needed = set(cast("list[str]", required)) if isinstance(required, list) else set[str]()
        first = rest = self._rule('""')
        for key, value in reversed(list(properties_of(schema).items())):
            head = self._literal(self._notation.argument.format(key=key))
            one = self._rule(f"{head} {self._value(value, schema)}")
            skips = "" if key in needed else " | {}"
            joint = self._literal(self._notation.joint)
            first, rest = (
                self._rule(f"{one} {rest}" + skips.format(first)),
                self._rule(f"{joint} {one} {rest}" + skips.format(rest)),
            )
        return first

    def _value(self, schema: object, whole: Schema) -> str:
        mark = self._notation.mark
        known = as_schema(schema)
        if not mark:
            return self._rule(self._json_rule(with_definitions(schema, whole)))
        if isinstance(values := known.get("enum"), list):
            options = (self._constant(one) for one in cast("list[object]", values))
            return self._rule(" | ".join(options))
        match known.get("type"):
            case "string":
                around = self._literal(mark)
                text = self._rule(f"/{self._notation.text}/")
                return self._rule(f"{around} {text} {around}")
            case "object":
                return self._rule(f'"{{" {self.arguments(known)} "}}"')
            case "array":
                return self._list(known, self._value(known.get("items"), whole))
            case _:
                return self._rule(self._json_rule(schema))

    def _list(self, schema: Schema, one: str) -> str:
        least, most = schema.get("minItems"), schema.get("maxItems")
        fewest = least if isinstance(least, int) else 0
        more = f"{max(fewest - 1, 0)}," + (str(max(most - 1, 0)) if isinstance(most, int) else "")
        joint = self._literal(self._notation.joint)
        members = f"{one} ({joint} {one}){{{more}}}"
        return self._rule(f'"[" {members if fewest else f"({members})?"} "]"')

    def _constant(self, value: object) -> str:
        mark = self._notation.mark if isinstance(value, str) else ""
        text = value if isinstance(value, str) else json.dumps(value)
        return self._literal(f"{mark}{text}{mark}")

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_{next(self._numbers)}"
        self.rules.append(f"{name}: {body}")
        return name


def with_definitions(value: object, schema: Schema) -> object:
    """A member's schema with what the whole one defines for all."""
    if not isinstance(value, dict):
        return value
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **cast("dict[str, object]", value)}
