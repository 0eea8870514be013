"""JSON schemas as those who write them mean them: an object has the members that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

_Schema = Mapping[str, object]
_BY_NAME = ("properties", "$defs", "definitions")
# Their values are what a text is compared with, and no schemas.
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
"""Those that llguidance knows."""
_ALONE = ("items", "additionalProperties")
# A schema of several parts that each know some members only is left as it is.
_SHARING = frozenset({"anyOf", "oneOf", "$ref", "if", "dependentSchemas"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref"})


def closed(schema: object) -> object:
    """The schema with `additionalProperties: false` wherever an object names its members and says
    nothing of others; a grammar that allows any would have small models write them without end.
    """
    return schema if _has_parts(schema) else _closed(schema)


def _closed(schema: object) -> object:
    if isinstance(schema, list):
        return [_closed(one) for one in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    known = dict(cast("_Schema", schema))
    for key in _BY_NAME:
        members = known.get(key)
        if isinstance(members, dict):
            named = cast("_Schema", members)
            known[key] = {name: _closed(one) for name, one in named.items()}
    for key in (*_ALONE, "anyOf", "oneOf"):
        if key in known:
            known[key] = _closed(known[key])
    named = known.get("properties")
    members = list(cast("_Schema", named).values()) if isinstance(named, dict) else [False]
    is_named = not members or any(one is not False for one in members)
    if is_named and not known.keys() & _OPEN:
        known["additionalProperties"] = False
    return known


def _has_parts(schema: object) -> bool:
    """Anywhere in it several schemas must hold for the same object."""
    if isinstance(schema, list):
        return any(_has_parts(one) for one in cast("list[object]", schema))
    if not isinstance(schema, dict):
        return False
    known = cast("_Schema", schema)
    is_shared = "properties" in known and bool(known.keys() & _SHARING)
    return "allOf" in known or is_shared or any(_has_parts(one) for one in known.values())


def asserted(schema: object) -> object:
    """The schema without what asserts nothing: formats that nobody here knows, which JSON Schema
    has pass for remarks, and `uniqueItems: false`.
    """
    if isinstance(schema, list):
        return [asserted(one) for one in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in cast("_Schema", schema).items() if _asserts(key, value)}
    return {key: _asserted_at(key, value) for key, value in kept.items()}


def _asserts(key: str, value: object) -> bool:
    if key == "format" and isinstance(value, str):
        return value in _FORMATS
    return key != "uniqueItems" or value is not False


def _asserted_at(key: str, value: object) -> object:
    if key in _DATA:
        return value
    named = value if key in (*_BY_NAME, "patternProperties") else None
    if isinstance(named, dict):
        return {name: asserted(one) for name, one in cast("_Schema", named).items()}
    return asserted(value)
