"""Which fields of a body nobody here knows, at any depth: what `hearth.ignored` names.

The types at the door say what is known. A struct may say more, in class variables: `INNER` is the
type of a field that is decoded later (`Kinds` where an object's own type decides, in a list of one
for a list of them), `REFUSED` says of fields that would change what the model reads why they cannot
be served and what to do instead, `SILENT` are fields that change nothing in an answer by
themselves, what an `IS_OPEN` one does not know is the client's own, `HISTORY` is the field
of what was said, where only the newest input is refused, and `ENTRIES` another one that has as many
entries as a conversation at most, where `REMEDY` helps if it has more.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, NamedTuple, Union, cast, get_args, get_origin

import msgspec

from api.http.past import is_result
from api.http.refusal import refuse
from api.http.uncollected import uncollected
from runtime.prompt.past import is_newest

MAX_NAMED = 32
"""So many are named, the rest is counted."""
MAX_NAME = 64
"""Characters of one name."""
MAX_PATH = 256

JsonObject = Mapping[str, object]


def _always_that(_: JsonObject) -> object:
    return ""


class Kinds(NamedTuple):
    """Objects of several types; one that `kind_of` gives no known name is not looked into.

    Fields of `common` are known in all of them.
    """

    types: Mapping[str, type[msgspec.Struct]]
    kind_of: Callable[[JsonObject], object] = lambda given: given.get("type")
    common: frozenset[str] = frozenset({"type"})


NOTHING: Mapping[str, str] = types.MappingProxyType({})


class _Known(NamedTuple):
    """What is known of a value: as an object, and of its parts if it is a list."""

    members: Mapping[str, _Known] | None = None
    kinds: Kinds | None = None
    part: _Known | None = None
    silent: frozenset[str] = frozenset()
    refused: Mapping[str, str] = NOTHING
    is_open: bool = False


_ANYTHING = _Known()


def unused_fields(
    body: bytes | msgspec.Raw,
    kind: type[msgspec.Struct],
    but: Collection[str] = (),
    also: Collection[str] = (),
) -> list[str]:
    """The paths of fields that are not known. At the top those in `but` are not, those in `also`
    are.

    What is null or false asks for nothing. A body that is no JSON has none.

    Raises:
        InvalidRequest: one of the request itself or of its newest input would change what the model
            reads, and cannot be served.
    """
    try:
        with uncollected():
            given: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    known = _of_struct(kind)
    if but and known.members is not None:
        known = known._replace(members={n: k for n, k in known.members.items() if n not in but})
    known = known._replace(silent=known.silent.union(also))
    history: str = getattr(kind, "HISTORY", "")
    newest = _newest(given, history)

    def paths() -> Iterator[str]:
        for found in _found(given, known, ""):
            is_past = history and found.path.startswith(f"{history}[")
            if found.why and not (is_past and not found.path.startswith(newest)):
                refuse(found.path, found.why)
            yield found.path

    return listed(paths())


def _newest(body: object, history: str) -> str:
    """How paths begin that are in the newest input."""
    given = cast("dict[str, object]", body).get(history) if isinstance(body, dict) else None
    if not isinstance(given, list):
        return history
    turns = cast("list[object]", given)
    last = len(turns) - 1
    is_refusable = last >= 0 and is_newest(last, len(turns), is_result=is_result(turns[last]))
    return f"{history}[{last}]" if is_refusable else "/"


class _Found(NamedTuple):
    """A field that is not known; `why` it cannot be left out."""

    path: str
    why: str = ""


def listed(paths: Iterator[str]) -> list[str]:
    """The first paths, and how many more there are."""
    named = list(islice(paths, MAX_NAMED))
    num_more = sum(1 for _ in paths)
    return [*named, f"{num_more} more"] if num_more else named


def _found(value: object, known: _Known, path: str) -> Iterator[_Found]:
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        if known.kinds is not None:
            known = _of_kind(members, known.kinds)
        if known.members is not None:
            yield from _found_in(members, known, path)
    elif isinstance(value, list) and known.part is not None:
        for number, part in enumerate(cast("list[object]", value)):
            yield from _found(part, known.part, f"{path}[{number}]")


def _found_in(given: JsonObject, known: _Known, path: str) -> Iterator[_Found]:
    assert known.members is not None
    if not known.is_open:
        for name, value in given.items():
            if name in known.members or name in known.silent or value is None or value is False:
                continue
            named = f"{path}.{name[:MAX_NAME]}".removeprefix(".")[:MAX_PATH]
            yield _Found(named, known.refused.get(name, "") if value not in ([], "") else "")
    for name, inner in known.members.items():
        if inner is not _ANYTHING and name in given:
            yield from _found(given[name], inner, f"{path}.{name}".removeprefix("."))


def _of_kind(given: JsonObject, kinds: Kinds) -> _Known:
    name = kinds.kind_of(given)
    kind = kinds.types.get(name) if isinstance(name, str) else None
    if kind is None:
        return _ANYTHING
    known = _of_struct(kind)
    return known._replace(silent=known.silent | kinds.common)


@lru_cache(maxsize=256)
def _of_struct(kind: type[msgspec.Struct]) -> _Known:
    inner: Mapping[str, object] = getattr(kind, "INNER", {})
    members = {
        one.encode_name: _of(inner.get(one.name, one.type)) for one in msgspec.structs.fields(kind)
    }
    silent: frozenset[str] = getattr(kind, "SILENT", frozenset())
    return _Known(
        members,
        silent=silent,
        refused=getattr(kind, "REFUSED", NOTHING),
        is_open=getattr(kind, "IS_OPEN", False),
    )


def _of(kind: object) -> _Known:
    """What a field's type says; a type that holds itself is found by way of its kinds."""
    if isinstance(kind, Kinds):
        return _Known(kinds=kind)
    if isinstance(kind, list):
        return _Known(part=_of(cast("list[object]", kind)[0]))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _Known(kinds=Kinds({"": kind}, _always_that, frozenset()))
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _of(parts[0])
    if origin in (Union, types.UnionType):
        return _either([_of(part) for part in parts])
    if origin in (list, tuple) and parts:
        part = _of(parts[0])
        return _ANYTHING if part is _ANYTHING else _Known(part=part)
    return _ANYTHING


def _either(ways: list[_Known]) -> _Known:
    """Whichever of them a value is: an object of one type at most, a list of one type at most."""
    kinds = next((way.kinds for way in ways if way.kinds is not None), None)
    part = next((way.part for way in ways if way.part is not None), None)
    return _ANYTHING if kinds is None and part is None else _Known(kinds=kinds, part=part)
