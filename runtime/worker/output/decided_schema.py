"""JSON schemas without `not`, `if`, `dependent…` and `uniqueItems`, where that can be said in words
that a grammar has: alternatives (`anyOf`) of narrower schemas. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import permutations, product
from typing import cast

from runtime.worker.output.schema_algebra import (
    BOUNDS,
    IGNORED,
    Schema,
    SchemaValue,
    Undecided,
    both,
    bounded,
    holds,
    key_of,
    kinds_of,
    negations,
)

_NAMED = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
_IN_ALTERNATIVES = frozenset({"not", "if", "then", "else", "dependentRequired", "dependentSchemas"})
_REWRITTEN = _IN_ALTERNATIVES | {"uniqueItems"}
_UNKNOWN = (
    *("contains", "minContains", "maxContains", "propertyNames", "unevaluatedProperties"),
    *("unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)
_OF_SCHEMAS = (*_NAMED, *_DEFINITIONS, "dependentSchemas")
_FORMS = {
    **dict.fromkeys((*_OF_SCHEMAS, "dependentRequired"), "object"),
    **dict.fromkeys((*_LISTED, "enum"), "list"),
    **dict.fromkeys(BOUNDS, "number"),
    "required": "names",
    "type": "type",
}
_MAX_ORDERS = 720
_MAX_RANGE = 16


def decided(schema: object) -> object:
    """The same values in words that a grammar has; a schema that has only such is left as it is.

    Raises:
        Undecided: that is not possible; it names the place.
    """
    told = cast("SchemaValue", schema)
    found = _decided(told, "#")
    if found != told:
        _check_references(found, "#")
    return found


def _check_references(schema: SchemaValue, path: str) -> None:
    """Only definitions stay where they were. Raises Undecided."""
    if isinstance(schema, list):
        for i, one in enumerate(schema):
            _check_references(one, f"{path}/{i}")
    elif isinstance(schema, dict):
        to = schema.get("$ref")
        if isinstance(to, str) and not to.startswith(("#/$defs/", "#/definitions/")) and to != "#":
            raise Undecided(path, "$ref", "it leads into what is said by alternatives")
        for key, one in schema.items():
            if key not in ("const", "enum", "default", "examples"):
                _check_references(one, f"{path}/{key}")


def _decided(schema: SchemaValue, path: str) -> SchemaValue:
    if not isinstance(schema, dict):
        return schema
    known = dict(schema)
    for key in _UNKNOWN:
        if key in known:
            raise Undecided(path, key, "no grammar can hold an answer to it")
    _decide_parts(known, path)
    if not known.keys() & _REWRITTEN:
        return known
    _check_form(known, path)
    if (values := _values(known)) is not None:
        with suppress(Undecided):
            return _enumerated(known, values)
    alternatives = _alternatives(known, path)
    if known.get("uniqueItems") is True:
        orders = (_in_orders(one, path) for one in alternatives)
        alternatives = [one for some in orders for one in some]
    return _either(known, alternatives)


def _check_form(schema: SchemaValue, path: str) -> None:
    """Refuse keys whose values are none, before anything is worked out of them."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise Undecided(path, path.rpartition("/")[2], "it is no schema")
    for key, value in schema.items():
        if key in _FORMS and not _has_form(value, _FORMS[key]):
            raise Undecided(path, key, "its value is none that this key may have")
        place = f"{path}/{key}"
        if key in _OF_SCHEMAS:
            for name, one in cast("Schema", value).items():
                _check_form(one, f"{place}/{name}")
        elif key in _LISTED:
            for i, one in enumerate(cast("Sequence[SchemaValue]", value)):
                _check_form(one, f"{place}/{i}")
        elif key in (*_ALONE, "not", "if", "then", "else"):
            _check_form(value, place)


def _has_form(value: SchemaValue, form: str) -> bool:
    is_names = isinstance(value, list) and all(isinstance(one, str) for one in value)
    match form:
        case "names":
            return is_names
        case "type":
            return is_names or isinstance(value, str)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "list":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)


def _decide_parts(known: dict[str, SchemaValue], path: str) -> None:
    """Put decided schemas in place of all those inside, but for those that are rewritten."""
    for key in (*_NAMED, *_DEFINITIONS):
        if isinstance(members := known.get(key), dict):
            named = {name: _decided(one, f"{path}/{key}/{name}") for name, one in members.items()}
            known[key] = named
    for key in _LISTED:
        if isinstance(parts := known.get(key), list):
            known[key] = [_decided(one, f"{path}/{key}/{i}") for i, one in enumerate(parts)]
    for key in _ALONE:
        if key in known:
            known[key] = _decided(known[key], f"{path}/{key}")


def _alternatives(known: Schema, path: str) -> list[SchemaValue]:
    """What it says in `not`, `if` and the like, as schemas of which one must hold."""
    base: SchemaValue = {k: v for k, v in known.items() if k not in _REWRITTEN}
    found: list[SchemaValue] = [base]
    if "not" in known:
        found = _without(found, known["not"], f"{path}/not")
    if "if" in known and known.keys() & {"then", "else"}:
        then, other = known.get("then", True), known.get("else", True)
        found = _branches(found, known["if"], then, other, f"{path}/if")
    for name, then in _dependencies(known):
        found = _branches(
            found, {"required": [name]}, then, True, f"{path}/dependentSchemas/{name}"
        )
    return found


def _branches(
    found: Sequence[SchemaValue],
    test: SchemaValue,
    then: SchemaValue,
    other: SchemaValue,
    path: str,
) -> list[SchemaValue]:
    """Each of them with the test and what follows then, or without it and with the other."""
    place = path.removesuffix("/if")
    then, other = _decided(then, f"{place}/then"), _decided(other, f"{place}/else")
    held = [both(one, both(_decided(test, path), then)) for one in found]
    failed = [both(one, other) for one in _without(found, test, path)]
    return bounded([one for one in (*held, *failed) if one is not False], place, "if")


def _without(found: Sequence[SchemaValue], test: SchemaValue, path: str) -> list[SchemaValue]:
    """The schemas without the values of another one."""
    test = _decided(test, path)
    pairs = ((one, no) for one in found for no in negations(test, kinds_of(one), path))
    narrowed = (both(one, no) for one, no in pairs)
    return bounded([one for one in narrowed if one is not False], path, "not")


def _dependencies(known: Schema) -> Iterator[tuple[str, SchemaValue]]:
    """Each name, and what must hold where an object has it."""
    required = cast("Schema", known.get("dependentRequired", {}))
    for name, names in required.items():
        if not _has_form(names, "names"):
            raise Undecided("#", "dependentRequired", "its values are lists of names")
        yield name, {"required": names}
    yield from cast("Schema", known.get("dependentSchemas", {})).items()


def _either(known: Schema, alternatives: Sequence[SchemaValue]) -> SchemaValue:
    """A schema of these alternatives; definitions and remarks stay where references find them."""
    kept = {key: value for key, value in known.items() if key in IGNORED or key in _DEFINITIONS}
    bare: list[SchemaValue] = [
        {k: v for k, v in one.items() if k not in kept} if isinstance(one, dict) else one
        for one in alternatives
    ]
    if not bare:
        return False
    if len(bare) == 1:
        return {**kept, **bare[0]} if isinstance(bare[0], dict) else bare[0]
    return {**kept, "anyOf": bare}


# What has few values


def _values(schema: SchemaValue) -> list[object] | None:
    """All values that may be allowed, where they can be counted; None where they cannot."""
    if schema is False:
        return []
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(listed := schema.get("enum"), list):
        return list(cast("list[object]", listed))
    if isinstance(parts := schema.get("anyOf"), list):
        found = [_values(one) for one in parts]
        return None if None in found else [one for some in found for one in some or ()]
    kinds = schema.get("type")
    names = cast("list[object]", kinds) if isinstance(kinds, list) else [kinds]
    counted = {"null": [None], "boolean": [False, True], "integer": _range(schema)}
    several = [counted.get(cast("str", name)) for name in names]
    return None if None in several else [one for some in several for one in some or ()]


def _range(schema: Schema) -> list[object] | None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    span = range(math.ceil(low), math.floor(high) + 1)
    return list(span) if len(span) <= _MAX_RANGE else None


def _enumerated(known: Schema, values: Iterable[object]) -> SchemaValue:
    held = [one for one in values if holds(one, known)]
    kept = {key: value for key, value in known.items() if key in IGNORED or key in _DEFINITIONS}
    return {**kept, "enum": cast("SchemaValue", held)} if held else False


# Arrays without equal items


def _in_orders(schema: SchemaValue, path: str) -> list[SchemaValue]:
    """The arrays of a schema without equal items, one schema for each order of the values.

    Raises:
        Undecided: its items have too many values.
    """
    if not isinstance(schema, dict) or "array" not in kinds_of(schema):
        return [schema]
    others = kinds_of(schema) - {"array"}
    rest = [both(schema, {"type": cast("SchemaValue", sorted(others))})] if others else []
    prefix = cast("list[SchemaValue]", schema.get("prefixItems", []))
    most = cast("float", schema.get("maxItems", math.inf))
    if most <= 1:
        return [schema]
    following = _values(schema.get("items", True))
    fixed = [_values(one) for one in prefix[: int(min(most, len(prefix)))]]
    if following is None or None in fixed:
        raise Undecided(path, "uniqueItems", "its items have no short list of values (`enum`)")
    orders = list(_orders(cast("list[list[object]]", fixed), _distinct(following), most, path))
    least = cast("float", schema.get("minItems", 0))
    plain = {k: v for k, v in schema.items() if k not in ("items", "prefixItems", "maxItems")}
    lists: list[SchemaValue] = [
        {
            **plain,
            "type": "array",
            "prefixItems": [{"const": cast("SchemaValue", one)} for one in order],
            "items": False,
        }
        for order in orders
        if len(order) >= least
    ]
    return [*rest, *lists]


def _orders(
    fixed: Sequence[Sequence[object]], following: Sequence[object], most: float, path: str
) -> Iterator[tuple[object, ...]]:
    """The longest rows of different values; each beginning of one is allowed as well."""
    length = int(min(most - len(fixed), len(following)))
    if len(following) > _MAX_RANGE:
        raise Undecided(path, "uniqueItems", f"its items have more than {_MAX_RANGE} values")
    num = math.prod(map(len, fixed)) * math.perm(len(following), length)
    if num > _MAX_ORDERS:
        raise Undecided(path, "uniqueItems", f"its items have more than {_MAX_ORDERS} orders")
    beginnings = set[str]()
    for first in product(*fixed):
        rows = (first + rest for rest in permutations(following, length))
        for row in map(_until_twice, rows):
            if (told := json.dumps(row)) not in beginnings:
                beginnings.add(told)
                yield row


def _until_twice(row: tuple[object, ...]) -> tuple[object, ...]:
    """A row up to the first value that it had already."""
    had = set[str]()
    for number, one in enumerate(row):
        if key_of(one) in had:
            return row[:number]
        had.add(key_of(one))
    return row


def _distinct(values: Iterable[object]) -> list[object]:
    return list({key_of(one): one for one in values}.values())
