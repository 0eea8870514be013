"""An argument that was written as bare text becomes the value that its tool's schema asks for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from runtime.worker.output.tools import Schema, as_schema

_MAX_DEPTH = 16
_NOTHING = object()
_KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_STRAY = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt]|(?P<stray>.?))', re.DOTALL)
_ERRORS = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError)


def typed(text: str, schema: object, root: Schema) -> object:
    """The value of this text; `root` is the schema in which references are looked up.

    Text stays text where the schema allows no other meaning, and where none is found.
    """
    kinds, constants = _options(schema, root, 0)
    for constant in constants:
        if _is_written(text, constant, is_exact=True):
            return constant
    if (value := _read(text, kinds)) is not _NOTHING:
        return value
    for constant in constants:
        if _is_written(text, constant, is_exact=False):
            return constant
    value = _read(text, frozenset(map(_kind_of, constants)))
    return _or_text(text) if value is _NOTHING else value


def fits(value: object, schema: object, root: Schema) -> bool:
    """It is of a kind that the schema allows, if that allows any."""
    options = _options(schema, root, 0)
    return options.allow(value) or not (options.kinds or options.constants)


def _read(text: str, kinds: frozenset[str]) -> object:
    """The value of this text that is of one of these kinds, if there is one."""
    is_text = "string" in kinds
    for kind, read in _READERS.items():
        if kind in kinds and (value := read(text, is_text)) is not _NOTHING:
            return value
    return text if is_text else _NOTHING


def repaired_json(text: str) -> str:
    r"""JSON in which a backslash that escapes nothing, as in `\d`, is one itself."""

    def mend(found: re.Match[str]) -> str:
        return found[0] if found["stray"] is None else "\\" + found[0]

    return _STRAY.sub(mend, text)


def loaded(text: str) -> object:
    """The JSON value of this text; control characters in strings are no error.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError from error
    except ValueError:
        return json.loads(repaired_json(text), strict=False, parse_constant=_refuse)


def literal(text: str) -> object:
    """The value of a Python literal, in which JSON's names may stand.

    Raises:
        ValueError: it is none.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return ast.literal_eval(_JsonNames().visit(tree))
    except _ERRORS as error:
        raise ValueError from error


class _JsonNames(ast.NodeTransformer):
    _values: dict[str, bool | None] = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._values:
            return node
        return ast.copy_location(ast.Constant(self._values[node.id]), node)


def _refuse(constant: str) -> object:
    raise ValueError(constant)


class _Options(NamedTuple):
    """The kinds of values that a schema allows, and single values beside them."""

    kinds: frozenset[str]
    constants: list[object]

    def allow(self, value: object) -> bool:
        return _kind_of(value) in self.kinds or any(_is_same(value, one) for one in self.constants)


def _options(schema: object, root: Schema, depth: int) -> _Options:
    """What a schema allows, as far as kinds and single values tell it."""
    known = as_schema(schema)
    if depth > _MAX_DEPTH:
        return _Options(frozenset(), [])
    given = known.get("type")
    kinds = {one for one in listed(known, "type") or [given] if isinstance(one, str)}
    kinds |= {"integer"} if "number" in kinds else set()
    found = _Options(frozenset(kinds) or _KINDS, [])
    if values := listed(known, "enum"):
        found = _both(found, _Options(frozenset(), values))
    if "const" in known:
        found = _both(found, _Options(frozenset(), [known["const"]]))
    if isinstance(reference := known.get("$ref"), str):
        found = _both(found, _options(_resolved(reference, root), root, depth + 1))
    for part in listed(known, "allOf"):
        found = _both(found, _options(part, root, depth + 1))
    for key in ("anyOf", "oneOf"):
        if parts := [_options(part, root, depth + 1) for part in listed(known, key)]:
            found = _both(found, _any(parts))
    if found.kinds == _KINDS:
        implied = frozenset(kind for key, kind in _IMPLIED.items() if key in known)
        found = found._replace(kinds=implied or _KINDS)
    if known.get("nullable") is True:
        return found._replace(kinds=found.kinds | {"null"})
    return found


def _both(one: _Options, other: _Options) -> _Options:
    """What both of them allow."""
    kinds = one.kinds & other.kinds
    values = [value for value in one.constants if other.allow(value)]
    values += [value for value in other.constants if one.allow(value)]
    return _Options(kinds, values)


def _any(parts: list[_Options]) -> _Options:
    """What any of them allows."""
    kinds = frozenset(kind for part in parts for kind in part.kinds)
    return _Options(kinds, [value for part in parts for value in part.constants])


_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array"}


def listed(schema: Schema, key: str) -> list[object]:
    """A list in a schema; empty where it has none."""
    given = schema.get(key)
    return cast("list[object]", given) if isinstance(given, list) else []


def _resolved(reference: str, root: Schema) -> object:
    if not reference.startswith("#"):
        return {}
    part: object = root
    for step in reference.removeprefix("#").removeprefix("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        part = as_schema(part).get(name, {}) if step else part
    return part


def _is_written(text: str, constant: object, *, is_exact: bool) -> bool:
    is_text = isinstance(constant, str)
    plain, name = text if is_exact else text.strip(), str(constant)
    if plain == name or (not is_exact and not is_text and plain.lower() == name.lower()):
        return True
    try:
        return not (is_text and is_exact) and _is_same(loaded(text), constant)
    except ValueError:
        return False


def _is_same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _kind_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "null"


def _null(text: str, is_text: bool) -> object:
    names = ("null", "None") if is_text else ("null", "none")
    return None if (text if is_text else text.strip().lower()) in names else _NOTHING


def _boolean(text: str, is_text: bool) -> object:
    plain = text if is_text else text.strip().lower()
    if plain in (("true", "True") if is_text else ("true", "1")):
        return True
    return False if plain in (("false", "False") if is_text else ("false", "0")) else _NOTHING


def _integer(text: str, is_text: bool) -> object:
    value = _number(text, is_text)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    return value if isinstance(value, int) else _NOTHING


def _number(text: str, is_text: bool) -> object:
    plain = text if is_text else text.strip()
    if _NUMBER.fullmatch(plain):
        return _loaded(plain, (int, float))
    if is_text:
        return _NOTHING
    try:
        value = float(plain)
    except ValueError:
        return _NOTHING
    if "_" in plain or value != value or abs(value) == float("inf"):
        return _NOTHING
    return int(value) if value.is_integer() and re.fullmatch(r"[+-]?\d+", plain) else value


def _array(text: str, is_text: bool) -> object:
    return _container(text, list) if text.lstrip().startswith("[") or not is_text else _NOTHING


def _object(text: str, is_text: bool) -> object:
    return _container(text, dict) if text.lstrip().startswith("{") or not is_text else _NOTHING


def _container(text: str, kind: type) -> object:
    value = _loaded(text, (kind,))
    if value is not _NOTHING:
        return value
    try:
        value = literal(text)
    except ValueError:
        return _NOTHING
    return value if isinstance(value, kind) and _is_json(value) else _NOTHING


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except _ERRORS:
        return False
    return True


def _loaded(text: str, kinds: tuple[type, ...]) -> object:
    try:
        value: Any = loaded(text)
    except ValueError:
        return _NOTHING
    if isinstance(value, bool) or not isinstance(value, kinds):
        return _NOTHING
    return _NOTHING if isinstance(value, float) and abs(value) == float("inf") else value


def _or_text(text: str) -> object:
    """Its own meaning, where it is none of the kinds that were asked for."""
    for read in (_boolean, _number, _array, _object):
        if (value := read(text, True)) is not _NOTHING:
            return value
    return text


_READERS: dict[str, Callable[[str, bool], object]] = {
    "null": _null,
    "number": _number,
    "integer": _integer,
    "boolean": _boolean,
    "array": _array,
    "object": _object,
}
