"""What small schemas allow, said by checking values: an oracle for how bare text is typed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_PYTHON = {"None": None, "True": True, "False": False}


def is_same(one: object, other: object) -> bool:
    """Equal as JSON values: `true` is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def is_valid(value: object, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """The schema allows this value; of `oneOf` several may."""
    if schema.get("nullable") and value is None:
        return True
    kinds = schema.get("type", list(KINDS))
    parts = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    named = [root["$defs"][schema["$ref"].rpartition("/")[2]]] if "$ref" in schema else []
    return (
        any(_is_of(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))
        and any(is_same(value, one) for one in schema.get("enum", [value]))
        and is_same(value, schema.get("const", value))
        and all(is_valid(value, part, root) for part in [*schema.get("allOf", ()), *named])
        and all(any(is_valid(value, part, root) for part in some) for some in parts)
    )


def meanings(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[object]:
    """What this text may mean: itself, or the JSON or Python's name that it is, whichever the
    schema allows.
    """
    readings: list[object] = [text]
    with contextlib.suppress(ValueError):
        readings.insert(0, _PYTHON[text] if text in _PYTHON else json.loads(text))
    return [one for one in readings if is_valid(one, schema, root)]


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    is_whole = kind == "integer" and isinstance(value, float) and value.is_integer()
    return isinstance(value, _TYPES[kind]) or is_whole


def schemas(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of single values that are put together in all ways; `$defs` has each kind."""
    kinds = st.sampled_from(KINDS)
    leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
        kinds.map(lambda kind: {"type": kind}),
        st.lists(kinds, min_size=1, max_size=3, unique=True).map(lambda some: {"type": some}),
        kinds.map(lambda kind: {"type": kind, "nullable": True}),
        kinds.map(lambda kind: {"$ref": f"#/$defs/{kind}"}),
        st.lists(values, min_size=1, max_size=3).map(lambda some: {"enum": some}),
        values.map(lambda one: {"const": one}),
    )
    return st.recursive(
        leaves,
        lambda one: st.one_of(
            *(
                st.lists(one, min_size=1, max_size=3).map(lambda some, key=key: {key: some})
                for key in ("anyOf", "oneOf", "allOf")
            ),
            st.tuples(one, leaves).map(lambda two: {**two[0], **two[1]}),
        ),
        max_leaves=5,
    )
