"""Raw tables of a configuration to typed values, with errors that say what is wrong and where."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

import msgspec
from msgspec import inspect

from runtime.config.units import Quantity, number_in, quantity_in
from runtime.errors import SettingsError

KeyPath = tuple[str, ...]
Kinds = Mapping[str, object]
"""The allowed keys of a table, each with the type of its value."""

QUANTITY = "quantity"
"""In the `extra` of a type's `Meta`: the `Quantity` that its numbers measure."""

_SHOWN_CHARACTERS = 80
_UNSHOWN = frozenset({"admin_key", "api_keys", "prewarm"})
"""Errors may be logged, and in these there are prompts and what people took for keys."""


class Location(str):
    """A path, absolute once it is read, or an address with `://`."""

    __slots__ = ()


class Origin(NamedTuple):
    """Where a table was written, in words (`in FILE`), and how its keys and values are read.

    `remedy` is how a wrong value is taken back; `spell` writes a key as the user wrote it.
    `is_text` says that all values are strings. Relative paths start at `base`, `~` is `user_home`.
    `file` are the kinds of the whole file, for keys that were written in the wrong table.
    """

    place: str
    remedy: str
    spell: Callable[[KeyPath], str]
    is_text: bool
    base: Path
    user_home: Path
    file: Kinds


def kinds_of(struct: type[msgspec.Struct]) -> dict[str, object]:
    """The types of a struct's fields, with their constraints."""
    return get_type_hints(struct, include_extras=True)


def convert_table(
    table: Mapping[str, object], kinds: Kinds, origin: Origin, path: KeyPath = ()
) -> dict[str, object]:
    """The table with every value converted to the type that `kinds` gives for its key.

    Raises:
        SettingsError: an unknown key, or a value of the wrong type or out of range.
    """
    for key in table:
        if key not in kinds:
            raise _unquoted(table, path, kinds, origin) or _unknown_key((*path, key), kinds, origin)
    return {key: _convert(value, kinds[key], origin, (*path, key)) for key, value in table.items()}


def _convert(value: object, kind: Any, origin: Origin, path: KeyPath) -> object:
    match form_of(kind):
        case inspect.StructType(cls=struct) if (table := as_table(value)) is not None:
            return _build(
                struct, convert_table(table, kinds_of(struct), origin, path), origin, path
            )
        case inspect.DictType(value_type=inspect.StructType(cls=struct)) if (
            table := as_table(value)
        ) is not None:
            return {key: _convert(one, struct, origin, (*path, key)) for key, one in table.items()}
        case inspect.VarTupleType() if origin.is_text:
            value = tuple(item.strip() for item in str(value).split(",") if item.strip())
        case _:
            pass

    def placed(kind: type, given: object) -> object:
        if not issubclass(kind, Path | Location):
            return given  # what may be anything is asked for as well
        if kind is not Location:
            return _absolute(given, origin)
        is_address = isinstance(given, str) and "://" in given
        return Location(given if is_address else _absolute(given, origin))

    quantity, given = quantity_of(kind), value
    if quantity is not None and isinstance(value, str):
        number = number_in(value, quantity)
        given = value if number is None else number
    try:
        return msgspec.convert(given, kind, strict=not origin.is_text, dec_hook=placed)
    except msgspec.ValidationError as error:
        raise _unusable_value(value, kind, origin, path) from error


def as_table(value: object) -> dict[str, object] | None:
    """The value if it is a table."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def _build(
    struct: type[msgspec.Struct], fields: dict[str, object], origin: Origin, path: KeyPath
) -> msgspec.Struct:
    try:
        return struct(**fields)
    except ValueError as error:
        raise SettingsError(f"{origin.spell(path)} {origin.place}: {error}") from error


def _absolute(text: object, origin: Origin) -> Path:
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("not a path")
    first, *rest = Path(text).parts or (".",)
    start = origin.user_home if first == "~" else origin.base / first
    return start.joinpath(*rest)


def form_of(kind: object) -> inspect.Type:
    """The type as data; of an optional one, the type that is not None."""
    form = _annotated_form(kind)
    return form.type if isinstance(form, inspect.Metadata) else form


def quantity_of(kind: object) -> Quantity | None:
    """What numbers of this type measure, where they do."""
    form = _annotated_form(kind)
    if not isinstance(form, inspect.Metadata):
        return None
    extra = cast("Mapping[str, Quantity]", form.extra or {})
    return extra.get(QUANTITY)


def _annotated_form(kind: Any) -> inspect.Type:
    form = inspect.type_info(kind)
    if isinstance(form, inspect.UnionType):
        return next(one for one in form.types if not isinstance(one, inspect.NoneType))
    return form


def places_of(key: str, kinds: Kinds, table: KeyPath = ()) -> Iterator[str]:
    """Where in a file of these kinds a key of that name can be, as the rest of `belongs …`."""
    if key in kinds:
        yield f"in [{'.'.join(table)}]" if table else "at the top, before the first [table]"
    for name, kind in kinds.items():
        match form_of(kind):
            case inspect.StructType(cls=struct):
                yield from places_of(key, kinds_of(struct), (*table, name))
            case inspect.DictType(value_type=inspect.StructType(cls=struct)):
                yield from places_of(key, kinds_of(struct), (*table, name, "NAME"))
            case _:
                pass


def _unquoted(
    table: Mapping[str, object], path: KeyPath, kinds: Kinds, origin: Origin
) -> SettingsError | None:
    """`[models.qwen2.5]` is a table `5` in a table `qwen2`: TOML has names with dots in quotes."""
    if len(path) != 2 or origin.is_text:
        return None
    parent, *names = path
    inner: Mapping[str, object] | None = table
    while inner is not None and inner.keys() - kinds.keys():
        name = next(iter(inner.keys() - kinds.keys()))
        inner = as_table(inner[name])
        names.append(name)
    if inner is None:
        return None
    dotted = ".".join(names)
    return SettingsError(
        f"[{parent}.{dotted}] {origin.place} names a table in a table: a name with a dot in it "
        f'needs quotes, [{parent}."{dotted}"].'
    )


def _unknown_key(path: KeyPath, kinds: Kinds, origin: Origin) -> SettingsError:
    *parents, key = path
    shown = f"{origin.spell(path)} {origin.place} is no setting"
    by_lower = {name.lower(): name for name in kinds}
    places = " or ".join(places_of(key.lower(), origin.file))
    if places and key.lower() not in by_lower:
        file = " of the file" if origin.is_text else ""
        return SettingsError(f"{shown} there: {key.lower()} belongs {places}{file}.")
    nearest = difflib.get_close_matches(key.lower(), by_lower, n=1, cutoff=0.0)
    names = [origin.spell((*parents, by_lower[name])) for name in nearest]
    hint = f" The nearest is {names[0]}." if names else ""
    return SettingsError(f"{shown}.{hint}")


def _unusable_value(value: object, kind: Any, origin: Origin, path: KeyPath) -> SettingsError:
    shown = repr(value) if path[-1] not in _UNSHOWN else f"a {type(value).__name__}"
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 1] + "…"
    form, quantity = form_of(kind), quantity_of(kind)
    is_number = isinstance(form, inspect.IntType | inspect.FloatType)
    if is_number and isinstance(value, str) and (measured := quantity_in(value)) is not None:
        shown += f", {measured}"
    with_unit = f", or {quantity.expected}" if quantity is not None else ""
    return SettingsError(
        f"{origin.spell(path)} {origin.place} is {shown}, but must be "
        f"{_expected(form, origin)}{with_unit}. "
        f"Correct it, or {origin.remedy} for the default."
    )


def _expected(form: inspect.Type, origin: Origin) -> str:
    match form:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=int(low), le=int(high), multiple_of=int(step)):
            return "one of " + ", ".join(map(str, range(low, high + 1, step)))
        case inspect.IntType():
            return f"a whole number{_range(form)}"
        case inspect.FloatType():
            return f"a number{_range(form)}"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.CustomType(cls=kind):
            return "a path or an address" if kind is Location else "a path"
        case inspect.StrType(pattern=pattern):
            return "a text" if pattern is None else f"a text that matches {pattern}"
        case inspect.VarTupleType(item_type=item):
            return f"a list, each item {_expected(item, origin)}"
        case inspect.DictType(value_type=item) if not origin.is_text:
            return f"a table, each value {_expected(item, origin)}"
        case inspect.StructType():
            return "a table"
        case _:
            return "a table, which only the file can give"


def _range(form: inspect.IntType | inspect.FloatType) -> str:
    match form.gt, form.ge, form.le:
        case None, None, None:
            return ""
        case None, low, high:
            return f" from {low:.15g} to {high:.15g}"
        case low, None, high:
            return f" above {low:.15g} and at most {high:.15g}"
        case _:
            return ""
