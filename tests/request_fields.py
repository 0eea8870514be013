"""The fields that the SDKs' types know of each request, and a request that has one of them.

An object is named by the field that holds it and, where there are several kinds, by its type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    get_args,
    get_origin,
    get_type_hints,
)

import anthropic.types.beta.message_count_tokens_params as beta_count
import anthropic.types.beta.message_create_params as beta_messages
import anthropic.types.message_count_tokens_params as count
import anthropic.types.message_create_params as messages
import openai.types.chat.completion_create_params as chat
import openai.types.completion_create_params as completions
import openai.types.embedding_create_params as embeddings
import openai.types.responses.input_token_count_params as input_tokens
import openai.types.responses.response_compact_params as compact
import openai.types.responses.response_create_params as responses
import typing_extensions as te

Kind = Any
"""A TypedDict's class."""

Place = tuple[str, str]
"""An object's name, and one of its fields."""

ROUTES: dict[str, tuple[Kind, ...]] = {
    "/v1/messages": (
        messages.MessageCreateParamsNonStreaming,
        beta_messages.MessageCreateParamsNonStreaming,
        count.MessageCountTokensParams,
        beta_count.MessageCountTokensParams,
    ),
    "/v1/chat/completions": (chat.CompletionCreateParamsNonStreaming,),
    "/v1/completions": (completions.CompletionCreateParamsNonStreaming,),
    "/v1/responses": (
        responses.ResponseCreateParamsNonStreaming,
        input_tokens.InputTokenCountParams,
        compact.ResponseCompactParams,
    ),
    "/v1/embeddings": (embeddings.EmbeddingCreateParams,),
}
"""A route, and the types of what it takes; those of the routes beside it as well."""


class Found(NamedTuple):
    """A field of an object, its type, and the way to the object: each step a field and a kind."""

    hint: Any
    way: tuple[tuple[str, Kind], ...]
    root: Kind


def is_typed_dict(hint: Any) -> bool:
    return isinstance(hint, type) and te.is_typeddict(hint)


def kinds_in(hint: Any) -> Iterator[Kind]:
    """The objects that a value of this type may be, or hold in a list."""
    if is_typed_dict(hint):
        yield hint
    elif get_origin(hint) is not Literal:
        for part in get_args(hint):
            yield from kinds_in(part)


def hints_of(kind: Kind) -> dict[str, Any]:
    return get_type_hints(kind)


def required_in(kind: Kind) -> list[str]:
    """The fields that an object must have; what the annotations are wrapped in says it."""
    extras = get_type_hints(kind, include_extras=True)
    return [name for name, hint in extras.items() if Required in _wrappers(hint)]


def _wrappers(hint: Any) -> Iterator[Any]:
    while (origin := get_origin(hint)) in (Required, NotRequired, Annotated):
        yield origin
        hint = get_args(hint)[0]


def tag_of(kind: Kind) -> str:
    """The word that tells an object's kind: its `type`, else its `role`."""
    for name in ("type", "role"):
        if name in (hints := hints_of(kind)):
            words = [one for one in _literals(hints[name]) if isinstance(one, str)]
            if words:
                return words[0]
    return ""


def _literals(hint: Any) -> Iterator[object]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _literals(part)


def name_of(field: str, kind: Kind) -> str:
    tag = tag_of(kind)
    return f"{field} {tag}" if tag and tag != field else field


def fields_of(roots: tuple[Kind, ...], whole: frozenset[str]) -> dict[Place, Found]:
    """Every field, each once; objects that are `whole` are not looked into, they have `*`."""
    found: dict[Place, Found] = {}
    queue: list[tuple[str, Kind, tuple[tuple[str, Kind], ...], Kind]]
    queue = [("", root, (), root) for root in roots]
    seen: set[tuple[str, Kind]] = set()
    while queue:
        name, kind, way, root = queue.pop(0)
        if (name, kind) in seen:
            continue
        seen.add((name, kind))
        if name in whole:
            found.setdefault((name, "*"), Found(None, way, root))
            continue
        for field, hint in hints_of(kind).items():
            found.setdefault((name, field), Found(hint, way, root))
            for inner in kinds_in(hint):
                step = (*way, (field, inner))
                queue.append((name_of(field, inner), inner, step, root))
    return found


Samples = Mapping[str, Any]
"""Values that make sense: of an object by its name, of a field by `object.field` or by itself."""


class Bodies:
    """Makes requests that have a certain field, and besides it what `base` has."""

    def __init__(self, samples: Samples, base: Samples) -> None:
        self._samples = samples
        self._base = base

    def body(self, field: str, found: Found) -> dict[str, Any]:
        """The smallest request that has this field."""
        asked = self._with(field, found, found.way, "", found.root)
        top = [found.way[0][0]] if found.way else []
        names = (*top, f"{self._name(found)}.{field}".removeprefix("."))
        more = [self._samples.get(f"with {name}", {}) for name in names]
        return {**self._base, **asked, **more[0], **more[-1]}

    def _name(self, found: Found) -> str:
        return name_of(*found.way[-1]) if found.way else ""

    def _with(self, field: str, found: Found, way: Any, name: str, kind: Kind) -> dict[str, Any]:
        value = self._minimal(name, kind)
        if not way:
            return value if field == "*" else value | {field: self._value(name, kind, field)}
        (step, inner), *rest = way
        inside = self._with(field, found, tuple(rest), name_of(step, inner), inner)
        given = {step: _wrapped(hints_of(kind)[step], inner, inside)}
        if str(inside.get("type")) in OF_THE_ASSISTANT and "role" in hints_of(kind):
            given["role"] = "assistant"
        return value | given

    def _minimal(self, name: str, kind: Kind) -> dict[str, Any]:
        """An object with no more than it must have."""
        if name in self._samples:
            return dict(self._samples[name])
        names = [field for field in required_in(kind) if name or field not in self._base]
        return {field: self._value(name, kind, field) for field in names}

    def _value(self, name: str, kind: Kind, field: str) -> Any:
        for key in (f"{name}.{field}", f"*.{field}"):
            if key in self._samples:
                return self._samples[key]
        return self._made(field, hints_of(kind)[field])

    def _made(self, field: str, hint: Any) -> Any:
        if is_typed_dict(hint):
            return self._minimal(name_of(field, hint), hint)
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Literal:
            return parts[0]
        if hint in _SIMPLE:
            return _SIMPLE[hint]
        if _is_list(origin):
            return [self._made(field, parts[0])]
        part = next((part for part in parts if part is not NoneType), None)
        return (
            {}
            if part is None or getattr(origin, "__name__", "") in _MAPS
            else self._made(field, part)
        )


OF_THE_ASSISTANT = frozenset({"thinking", "redacted_thinking", "tool_use", "fallback"})
_MAPS = frozenset({"dict", "Dict", "Mapping"})
_LISTS = frozenset({"list", "Iterable", "Sequence", "SequenceNotStr"})
_SIMPLE: dict[Any, Any] = {str: "text", int: 1, float: 0.5, bool: True, object: {}, Any: {}}


def _is_list(origin: Any) -> bool:
    return getattr(origin, "__name__", "") in _LISTS


def _wrapped(hint: Any, kind: Kind, value: Any) -> Any:
    """The object as that field holds it: alone, in a list, or in a list of lists."""
    if hint is kind:
        return value
    for part in get_args(hint):
        if kind in kinds_in(part):
            inner = _wrapped(part, kind, value)
            return [inner] if _is_list(get_origin(hint)) else inner
    return value
