"""An argument that was written as bare text becomes the value that its tool's schema asks for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any, cast

from runtime.worker.output.tools import Schema, as_schema

_MAX_DEPTH = 16
_NOTHING = object()
_TRUE, _FALSE, _NULL = ("true", "1"), ("false", "0"), ("null", "none")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_STRAY = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt]|(?P<stray>.?))', re.DOTALL)
_ERRORS = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError)


def typed(text: str, schema: object, root: Schema) -> object:
    """The value of this text; `root` is the schema in which references are looked up.

    Text stays text where the schema allows no other meaning, and where none is found.
    """
    kinds, constants = _options(schema, root, 0)
    for constant in constants:
        if _is_written(text, constant):
            return constant
    if constants and not kinds:
        kinds = {_kind_of(constant) for constant in constants}
    if kinds == {"string"}:
        return text
    is_text = "string" in kinds or not kinds
    for kind, read in _READERS.items():
        if (kind in kinds or not kinds) and (value := read(text, is_text)) is not _NOTHING:
            return value
    return text if is_text else _or_text(text)


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


def _options(schema: object, root: Schema, depth: int) -> tuple[set[str], list[object]]:
    """The kinds of values, and the single values, that a schema names."""
    known = as_schema(schema)
    if depth > _MAX_DEPTH:
        return set(), []
    if isinstance(reference := known.get("$ref"), str):
        return _options(_resolved(reference, root), root, depth + 1)
    given = known.get("type")
    kinds = set(cast("list[str]", given)) if isinstance(given, list) else set[str]()
    if isinstance(given, str):
        kinds = {given}
    if known.get("nullable") is True:
        kinds |= {"null"} if kinds else set()
    constants = list(cast("list[object]", known["enum"])) if _has_list(known, "enum") else []
    constants += [known["const"]] if "const" in known else []
    if not kinds and not constants:
        kinds = {kind for key, kind in _IMPLIED.items() if key in known}
    for key in ("anyOf", "oneOf", "allOf"):
        if _has_list(known, key):
            parts = cast("list[object]", known[key])
            found = [_options(part, root, depth + 1) for part in parts]
            kinds |= {kind for more, _ in found for kind in more}
            constants += [value for _, more in found for value in more]
    return kinds, constants


_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array"}


def _has_list(schema: Schema, key: str) -> bool:
    return isinstance(schema.get(key), list)


def _resolved(reference: str, root: Schema) -> object:
    if not reference.startswith("#"):
        return {}
    part: object = root
    for step in reference.removeprefix("#").removeprefix("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        part = as_schema(part).get(name, {}) if step else part
    return part


def _is_written(text: str, constant: object) -> bool:
    if isinstance(constant, str):
        return text == constant or text.strip() == constant
    plain = text.strip().lower()
    if isinstance(constant, bool) or constant is None:
        return plain == str(constant).lower() or plain == json.dumps(constant)
    try:
        value = loaded(text)
    except ValueError:
        return False
    return value == constant and not isinstance(value, bool)


def _kind_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "null"


def _null(text: str, is_text: bool) -> object:
    names = _NULL[:1] if is_text else _NULL
    plain = text if is_text else text.strip()
    return None if plain.lower() in names or plain == "None" else _NOTHING


def _boolean(text: str, is_text: bool) -> object:
    plain = text if is_text else text.strip()
    num = 1 if is_text else 2
    for value, names in ((True, _TRUE), (False, _FALSE)):
        if plain.lower() in names[:num]:
            return value
    return _NOTHING


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
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "array": _array,
    "object": _object,
}
