"""What JSON schemas mean to one another: whether a value holds, both of two, all but one. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias, cast

SchemaValue: TypeAlias = (
    "Mapping[str, SchemaValue] | Sequence[SchemaValue] | str | int | float | bool | None"
)
Schema: TypeAlias = Mapping[str, SchemaValue]

KINDS = frozenset("null boolean object array number string".split())
IGNORED = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment $schema $id"
    " discriminator".split()
)
"""Keys that assert nothing."""

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
BOUNDS = (*_LOWER, *_UPPER)
_SIZES = {"Length": "string", "Items": "array", "Properties": "object"}
_MAX_VALUES = 64
_MAX_ALTERNATIVES = 64


class Undecided(Exception):
    """A schema says what no grammar here can: where, with which key, and why not."""

    def __init__(self, path: str, key: str, why: str) -> None:
        super().__init__(f"{key!r} at {path}: {why}")


def kind_of(value: object) -> str:
    """The kind of a JSON value; integers are numbers."""
    if value is None:
        return "null"
    names = {bool: "boolean", dict: "object", list: "array", str: "string"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "number")


def key_of(value: object) -> str:
    """The same for equal JSON values only: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        items = cast("Mapping[str, object]", value).items()
        return "{" + ",".join(f"{json.dumps(k)}:{key_of(v)}" for k, v in sorted(items)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(key_of, cast("list[object]", value))) + "]"
    return json.dumps(value)


def kinds_of(schema: SchemaValue) -> frozenset[str]:
    """The kinds of values that a schema may allow."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict):
        return KINDS
    found = KINDS
    if "type" in schema:
        found &= {"number" if one == "integer" else one for one in _types(schema)}
    if "const" in schema:
        found &= {kind_of(schema["const"])}
    if isinstance(listed := schema.get("enum"), list):
        found &= {kind_of(one) for one in listed}
    return found


def _types(schema: Schema) -> set[str]:
    named = schema.get("type", sorted(KINDS))
    return {named} if isinstance(named, str) else set(cast("Sequence[str]", named))


# Whether a value holds


def holds(value: object, schema: SchemaValue, path: str = "#") -> bool:
    """Whether a schema allows a value.

    Raises:
        Undecided: it says something that is not known here.
    """
    if isinstance(schema, bool):
        return schema
    known = cast("Schema", schema)
    is_if = "if" not in known or holds(value, known["if"], path)
    branch = known.get("then" if is_if else "else", True) if "if" in known else True
    return holds(value, branch, path) and all(
        _holds(value, key, known, path) for key in known if key not in ("if", "then", "else")
    )


def _holds(value: object, key: str, schema: Schema, path: str) -> bool:
    wanted = schema[key]
    if key in IGNORED or key in ("$defs", "definitions"):
        return True
    match key, value:
        case "type", _:
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            kind = kind_of(value)
            return kind in _types(schema) or (
                kind == "number" and is_whole and "integer" in _types(schema)
            )
        case "const", _:
            return key_of(value) == key_of(wanted)
        case "enum", _:
            return key_of(value) in map(key_of, cast("Sequence[object]", wanted))
        case "not", _:
            return not holds(value, wanted, path)
        case (("allOf" | "anyOf" | "oneOf"), _):
            num = sum(holds(value, one, path) for one in cast("Sequence[SchemaValue]", wanted))
            most = len(cast("Sequence[SchemaValue]", wanted))
            return {"allOf": num == most, "anyOf": num > 0, "oneOf": num == 1}[key]
        case "required", _:
            return not isinstance(value, dict) or all(
                one in value for one in cast("Sequence[str]", wanted)
            )
        case "properties", _:
            empty: Mapping[str, object] = {}
            members = cast("Mapping[str, object]", value) if isinstance(value, dict) else empty
            named = cast("Schema", wanted)
            return all(holds(members[one], named[one], path) for one in named if one in members)
        case "uniqueItems", list():
            keys = [key_of(one) for one in cast("list[object]", value)]
            return wanted is not True or len(set(keys)) == len(keys)
        case ("pattern", str()):
            # A pattern of a stranger may take for ever, and there is no budget here.
            raise Undecided(path, key, "it cannot be decided beside the others")
        case (("pattern" | "uniqueItems"), _):
            return True
        case _ if key in (*_LOWER, *_UPPER):
            return _is_within(value, key, cast("float", wanted))
        case _:
            raise Undecided(path, key, "it cannot be decided beside the others")


def _is_within(value: object, key: str, bound: float) -> bool:
    size: float
    kind = kind_of(value)
    if (counted := _SIZES.get(key[3:])) is not None:
        if kind != counted:
            return True
        size = len(cast("str | list[object]", value))
    elif kind != "number":
        return True
    else:
        size = cast("float", value)
    if key.startswith("exclusive"):
        return size > bound if key in _LOWER else size < bound
    return size >= bound if key in _LOWER else size <= bound


# Both of two


def both(one: SchemaValue, other: SchemaValue) -> SchemaValue:
    """What both schemas allow, in one where that can be said so, else as `allOf`."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False if False in (one, other) else other if one is True else one
    for left, right in ((one, other), (other, one)):
        if isinstance(values := _listed(left), list):
            return _among(values, left, right)
    if (one.keys() | other.keys()) & {"patternProperties", "prefixItems"} and one and other:
        return {"allOf": [one, other]}
    merged: dict[str, SchemaValue] = {}
    for key in [*one, *(key for key in other if key not in one)]:
        if key in ("properties", "additionalProperties", "patternProperties", "type"):
            continue
        if key in one and key in other and one[key] != other[key] and key not in IGNORED:
            if (value := _one_of_two(key, one[key], other[key])) is None:
                return {"allOf": [one, other]}
            merged[key] = value
        else:
            merged[key] = one.get(key, other.get(key))
    kinds = _common(_types(one), _types(other))
    if not kinds:
        return False
    if "type" in one or "type" in other:
        merged["type"] = kinds[0] if len(kinds) == 1 else cast("SchemaValue", kinds)
    return _with_members(merged, one, other)


def _listed(schema: Schema) -> Sequence[object] | None:
    return [schema["const"]] if "const" in schema else cast("Sequence[object]", schema.get("enum"))


def _among(values: Sequence[object], listing: Schema, other: Schema) -> SchemaValue:
    try:
        held = [one for one in values if holds(one, other) and holds(one, listing)]
    except Undecided:
        return {"allOf": [listing, other]}
    kept = {key: value for key, value in listing.items() if key in IGNORED}
    return {**kept, "enum": cast("SchemaValue", held)} if held else False


def _common(one: set[str], other: set[str]) -> list[str]:
    """The types of both; an integer is a number."""
    whole: set[str] = {"integer"}
    wide = [types | whole if "number" in types else types for types in (one, other)]
    found = wide[0] & wide[1]
    return sorted(found - {"integer"} if "number" in found else found)


def _one_of_two(key: str, one: SchemaValue, other: SchemaValue) -> SchemaValue:
    """The value of a key that means both values of it; None where there is none."""
    if key in _LOWER:
        return max(cast("float", one), cast("float", other))
    if key in _UPPER:
        return min(cast("float", one), cast("float", other))
    if key == "required":
        return list(dict.fromkeys([*cast("list[str]", one), *cast("list[str]", other)]))
    return both(one, other) if key == "items" else None


def _with_members(merged: dict[str, SchemaValue], one: Schema, other: Schema) -> SchemaValue:
    """With the members of both: who does not name one has it under `additionalProperties`."""
    named = [cast("Schema", schema.get("properties", {})) for schema in (one, other)]
    more = [schema.get("additionalProperties", True) for schema in (one, other)]
    is_said = "additionalProperties" in one or "additionalProperties" in other
    rest = both(*more)
    members = {
        name: both(named[0].get(name, more[0]), named[1].get(name, more[1]))
        for name in dict.fromkeys([*named[0], *named[1]])
    }
    required = cast("Sequence[str]", merged.get("required", ()))
    is_object = _types(merged) == {"object"}
    impossible = {name for name in required if members.get(name, rest) is False}
    if impossible and is_object:
        return False
    if "properties" in one or "properties" in other:
        is_closed = is_said and rest is False
        merged["properties"] = {
            name: member
            for name, member in members.items()
            if member is not False or not is_closed or name in impossible
        }
    if is_said:
        merged["additionalProperties"] = rest
    return merged


# All but one


def negations(schema: SchemaValue, kinds: Collection[str], path: str) -> list[SchemaValue]:
    """Schemas of which one holds for each value of these kinds that `schema` does not allow.

    Raises:
        Undecided: no schema says that.
    """
    if not isinstance(schema, dict):
        return [] if schema is True else [True]
    found: list[SchemaValue] = []
    for key in schema:
        if key not in IGNORED and key not in ("$defs", "definitions"):
            found = bounded([*found, *_negated(key, schema, kinds, path)], path, key)
    return found


def bounded(found: list[SchemaValue], path: str, key: str) -> list[SchemaValue]:
    """The same, if there are not too many for a grammar. Raises Undecided."""
    if len(found) > _MAX_ALTERNATIVES:
        raise Undecided(path, key, f"it has more than {_MAX_ALTERNATIVES} alternatives")
    return found


def _negated(key: str, schema: Schema, kinds: Collection[str], path: str) -> list[SchemaValue]:
    wanted = schema[key]
    match key:
        case "type":
            return _other_types(_types(schema), kinds, path)
        case "const" | "enum":
            return _other_values(cast("Sequence[object]", _listed({key: wanted})), kinds, path)
        case "required" if "object" in kinds:
            names = cast("Sequence[str]", wanted)
            return [{"type": "object", "properties": {name: False}} for name in names]
        case "properties" if "object" in kinds:
            return [
                {"type": "object", "properties": {name: no}, "required": [name]}
                for name, one in cast("Schema", wanted).items()
                for no in negations(one, KINDS, f"{path}/properties/{name}")
            ]
        case "anyOf":
            found: list[SchemaValue] = [True]
            for i, one in enumerate(cast("Sequence[SchemaValue]", wanted)):
                others = negations(one, kinds, f"{path}/anyOf/{i}")
                found = [both(had, no) for had in found for no in others]
                found = bounded([one for one in found if one is not False], path, key)
            return found
        case "allOf":
            parts = enumerate(cast("Sequence[SchemaValue]", wanted))
            return [no for i, one in parts for no in negations(one, kinds, f"{path}/allOf/{i}")]
        case "required" | "properties":
            return []
        case _ if key in (*_LOWER, *_UPPER):
            return _beyond(key, cast("float", wanted), kinds)
        case _:
            raise Undecided(path, key, "what does not follow it cannot be said in a grammar")


def _other_types(types: set[str], kinds: Collection[str], path: str) -> list[SchemaValue]:
    if "integer" in types and "number" not in types and "number" in kinds:
        raise Undecided(path, "type", "numbers that are no integers cannot be told apart")
    others = sorted(set(kinds) - {"number" if one == "integer" else one for one in types})
    return [{"type": cast("SchemaValue", others)}] if others else []


def _other_values(values: Sequence[object], kinds: Collection[str], path: str) -> list[SchemaValue]:
    if len(values) > _MAX_VALUES:
        raise Undecided(path, "enum", f"it has more than {_MAX_VALUES} values")
    by_kind: dict[str, list[object]] = {}
    for one in values:
        by_kind.setdefault(kind_of(one), []).append(one)
    if not_told := by_kind.keys() & {"object", "array"} & set(kinds):
        raise Undecided(path, "enum", f"all but one {min(not_told)} cannot be said in a grammar")
    others = sorted(set(kinds) - by_kind.keys())
    found: list[SchemaValue] = [{"type": cast("SchemaValue", others)}] if others else []
    if "boolean" in by_kind and "boolean" in kinds:
        left = [one for one in (False, True) if one not in by_kind["boolean"]]
        found += [{"enum": cast("SchemaValue", left)}] if left else []
    if "number" in by_kind and "number" in kinds:
        found += _between(sorted({cast("float", one) for one in by_kind["number"]}))
    if "string" in by_kind and "string" in kinds:
        strings = cast("list[str]", by_kind["string"])
        found.append({"type": "string", "pattern": f"^(?:{_other_strings(strings)})$"})
    return found


def _between(values: Sequence[float]) -> list[SchemaValue]:
    """The numbers beside these."""
    inner: list[SchemaValue] = [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in pairwise(values)
    ]
    below: SchemaValue = {"type": "number", "exclusiveMaximum": values[0]}
    return [below, *inner, {"type": "number", "exclusiveMinimum": values[-1]}]


def _other_strings(words: Iterable[str]) -> str:
    """A regular expression for all strings but these."""
    ends: dict[str, list[str]] = {word[0]: [] for word in words if word}
    for word in words:
        if word:
            ends[word[0]].append(word[1:])
    branches = [f"{_character(first)}(?:{_other_strings(rest)})" for first, rest in ends.items()]
    no_first = "".join(map(_in_class, ends))
    any_other = f"[^{no_first}]" if no_first else r"[\s\S]"
    return "|".join([*([] if "" in words else [""]), rf"{any_other}[\s\S]*", *branches])


def _character(one: str) -> str:
    return f"[{_in_class(one)}]" if one != "^" else r"\^"


def _in_class(one: str) -> str:
    return "\\" + one if one in "\\]^-[&~" else one


def _beyond(key: str, bound: float, kinds: Collection[str]) -> list[SchemaValue]:
    """What a bound keeps out."""
    if (kind := _SIZES.get(key[3:])) is not None:
        other = ("max" if key in _LOWER else "min") + key[3:]
        edge = bound - 1 if key in _LOWER else bound + 1
        return [{"type": kind, other: int(edge)}] if kind in kinds and edge >= 0 else []
    flipped = {
        "minimum": "exclusiveMaximum",
        "maximum": "exclusiveMinimum",
        "exclusiveMinimum": "maximum",
        "exclusiveMaximum": "minimum",
    }
    return [{"type": "number", flipped[key]: bound}] if "number" in kinds else []
