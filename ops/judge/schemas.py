"""Sixty JSON schemas: twelve kinds of values, each in five surroundings."""

from __future__ import annotations

Schema = dict[str, object]

VALUES: dict[str, Schema] = {
    "short string": {"type": "string", "maxLength": 12},
    "string of some length": {"type": "string", "minLength": 3, "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "words to choose from": {"enum": ["red", "green", "größer", "日本", "🎉"]},
    "constant": {"const": {"a": [1, None], "b": "x"}},
    "integer": {"type": "integer", "minimum": -5, "maximum": 120},
    "one of three numbers": {"enum": [1, 2.5, -30]},
    "boolean": {"type": "boolean"},
    "number or nothing": {
        "anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]
    },
    "list": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 2,
        "maxItems": 4,
    },
    "pair": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 5}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "date": {"type": "string", "format": "date"},
}


def _object(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _surrounded(value: Schema) -> dict[str, Schema]:
    inner = _object({"value": value}, ["value"])
    note: Schema = {"type": "string", "maxLength": 6}
    return {
        "alone": inner,
        "beside another": _object({"note": note, "value": value}, ["note", "value"]),
        "optional": _object({"value": value, "done": {"type": "boolean"}}, ["done"]),
        "within": _object({"first": inner, "second": inner}, ["first", "second"]),
        "by reference": {
            "$defs": {"part": inner},
            **_object(
                {"parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}},
                ["parts"],
            ),
        },
    }


def schemas() -> dict[str, Schema]:
    """Each by its name."""
    return {
        f"{value}, {place}": schema
        for value, given in VALUES.items()
        for place, schema in _surrounded(given).items()
    }
