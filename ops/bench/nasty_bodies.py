"""Bodies that are made to take long: shapes that JSON can have, each as large as it may be.

A shape is a value in which one piece is repeated. In the bodies of a route it stands in a field
that nobody knows, and in each field of the route's own type that it is meant for. Where a route can
answer as a stream or in the background, these are asked for as well, as they repeat what they were
sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, cast

import msgspec
from litestar.handlers import HTTPRouteHandler

from api.app import ROUTES
from api.http.limits import BodyCheck, Bounds
from api.openai.schemas import ChatRequest
from runtime.config.limits import RouteKind
from runtime.config.settings import Settings

_METHODS = {"POST", "PATCH"}
_IN_PATHS = {"{agent_id:str}": "nobody", "{target:path}": "/nobody/load"}
_UNTYPED = {"/v1/prewarm", "/admin/prompt/explain"}
"""They are sent what other routes are, and find out what it is."""
_TEXTS = ("prompt", "input", "system", "instructions", "user", "session_id", "model", "suffix")
_LISTS = ("prompt", "input", "stop", "stop_sequences", "include", "tokens", "documents")
_TURNS = ("messages", "input", "items")
_ENTRIES = (*dict.fromkeys((*_TURNS, *_LISTS)), "tools")
_OBJECTS = ("metadata", "logit_bias", "chat_template_kwargs", "options", "extra_body", "format")


WAYS: Mapping[str, Mapping[str, object]] = {
    "": {},
    "streamed": {"stream": True},
    "in the background": {"background": True, "store": True},
}
"""How an answer is asked for; most of them repeat fields of the request."""


class Shape(NamedTuple):
    """A piece between two ends; `%d` in it is its number. `fields` are those it is meant for."""

    begin: str
    piece: str
    end: str
    fields: tuple[str, ...] = ()

    def within(self, num_bytes: int, parts: int) -> bytes:
        """The largest of so many bytes and parts at most: what is slowest to read and is read."""
        sample = self._repeated(1000)
        check = BodyCheck(1 << 30, 1 << 40)
        check.feed(sample)
        check.feed(b"", is_last=True)
        widest = len(sample) / 1000 + (4 if "%d" in self.piece else 0)
        return self._repeated(int(min(num_bytes / widest, 1000 * parts / (check.num_parts + 1))))

    def _repeated(self, count: int) -> bytes:
        if "%d" in self.piece:
            middle = "".join([self.piece % number for number in range(count)])
        else:
            middle = self.piece * count
        return f"{self.begin}{middle.removesuffix(',')}{self.end}".encode()


_NAMED = '{"type":"string","description":"d"}'
SHAPES: dict[str, Shape] = {
    "unknown fields": Shape("{", '"k%d":1,', "}", _OBJECTS),
    "fields with texts": Shape("{", '"k%d":"v",', "}", _OBJECTS),
    "the same field": Shape("{", '"k":1,', "}", _OBJECTS),
    "long names": Shape("{", '"' + "k" * 4000 + '%d":1,', "}", _OBJECTS),
    "texts": Shape("[", '"a",', "]", _ENTRIES),
    "longer texts": Shape("[", '"' + "a" * 60 + '",', "]", _LISTS),
    "lists": Shape("[", "[],", "]", _ENTRIES),
    "lists of a number": Shape("[", "[1],", "]", _LISTS),
    "objects": Shape("[", '{"a":1},', "]", ("messages", "tools", "input", "items", "documents")),
    "numbers": Shape("[", "1,", "]", _ENTRIES),
    "longer numbers": Shape("[", "100000,", "]", _LISTS),
    "large exponents": Shape("[", "1.2345678901234567e-300,", "]", _LISTS),
    "biases with large exponents": Shape("{", '"%d":1.7976931348623157e308,', "}", _OBJECTS),
    "long numbers": Shape("[", "9" * 1000 + ",", "]", _LISTS),
    "one number": Shape("", "9", "", ("max_tokens", "temperature", "seed", "keep_alive")),
    "a text": Shape('"', "word ", '"', _TEXTS),
    "Chinese": Shape('"', "請把燈", '"', _TEXTS),
    "emoji": Shape('"', "😀", '"', _TEXTS),
    "line ends": Shape('"', r"\n", '"', _TEXTS),
    "escapes": Shape('"', r"\u8acb", '"', _TEXTS),
    "pairs of escapes": Shape('"', r"\ud83d\ude00", '"', _TEXTS),
    "halves of pairs": Shape('"', r"\ud83d", '"', _TEXTS),
    "blanks": Shape("[", " ", "1]"),
    "messages": Shape(
        "[",
        '{"role":"user","content":"a"},',
        ',{"role":"user","content":"b"}]',
        ("messages", "input", "items"),
    ),
    "numbers in an old message": Shape(
        '[{"role":"user","content":[', "1,", ']},{"role":"user","content":"a"}]', _TURNS
    ),
    "objects in an old message": Shape(
        '[{"role":"user","content":[', "{},", ']},{"role":"user","content":"a"}]', _TURNS
    ),
    "parts of a message": Shape(
        '[{"role":"user","content":[',
        '{"type":"text","text":"a"},',
        "]}]",
        ("messages",),
    ),
    "parts of an item": Shape(
        '[{"role":"user","content":[', '{"type":"input_text","text":"a"},', "]}]", ("input",)
    ),
    "parts of a system prompt": Shape("[", '{"type":"text","text":"a"},', "]", ("system",)),
    "calls": Shape(
        '[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":[',
        '{"id":"c%d","type":"function","function":{"name":"f","arguments":"{}"}},',
        ']},{"role":"user","content":"a"}]',
        ("messages",),
    ),
    "a long message": Shape('[{"role":"user","content":"', "word ", '"}]', _TURNS),
    "a long message in Chinese": Shape('[{"role":"user","content":"', "請把燈", '"}]', _TURNS),
    "unknown fields in a message": Shape(
        '[{"role":"user","content":"a",', '"k%d":1,', "}]", _TURNS
    ),
    "an image": Shape(
        '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,',
        "iVBORw0KGgo",
        '"}}]}]',
        ("messages",),
    ),
    "tools": Shape(
        "[",
        '{"type":"function","function":{"name":"t%d","parameters":{"type":"object"}}},',
        "]",
        ("tools",),
    ),
    "tools of other protocols": Shape(
        "[",
        '{"type":"function","name":"t%d","input_schema":{"type":"object"},"parameters":{}},',
        "]",
        ("tools",),
    ),
    "properties of a tool": Shape(
        '[{"type":"function","name":"t","function":{"name":"t","parameters":'
        '{"type":"object","properties":{',
        f'"p%d":{_NAMED},',
        '}}},"input_schema":{}}]',
        ("tools",),
    ),
    "choices of a schema": Shape(
        '{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[',
        '"e%d",',
        "]}}}",
        ("response_format",),
    ),
}


class Route(NamedTuple):
    """One that is sent a body: `fields` are those of its type, and so much of one is read."""

    method: str
    path: str
    fields: frozenset[str]
    model: str
    body_bytes: int
    parts: int


class Nasty(NamedTuple):
    """A body, and in which field of it is what."""

    shape: str
    field: str
    body: bytes
    way: str = ""
    """How it is to be answered, if not at once."""


def routes(settings: Settings, model: str) -> list[Route]:
    """All that the application has and that are sent a body, which names this model."""
    return [
        _route(kind, handler, settings, model)
        for kind, handlers in ROUTES.items()
        for handler in handlers
        if isinstance(handler, HTTPRouteHandler) and _METHODS & set(handler.http_methods)
    ]


def _route(kind: RouteKind, handler: HTTPRouteHandler, settings: Settings, model: str) -> Route:
    path = min(handler.paths, key=lambda one: (not one.startswith("/v1"), one))
    for part, value in _IN_PATHS.items():
        path = path.replace(part, value.removeprefix("/"))
    name = handler.fn.__annotations__.get("data", "").removeprefix("JSONBody[").removesuffix("]")
    struct = ChatRequest if path in _UNTYPED else handler.fn.__globals__.get(name)
    known = () if struct is None else msgspec.structs.fields(cast("type[msgspec.Struct]", struct))
    fields = frozenset(one.encode_name for one in known)
    bounds, method = Bounds.of(kind, settings), min(_METHODS & set(handler.http_methods))
    return Route(method, path, fields, model, bounds.body_bytes, bounds.limits.parts)


def one_of_each(
    route: Route,
    names: Collection[str] = SHAPES.keys(),
    ways: Collection[str] = WAYS.keys(),
    is_drawn: Callable[[], bool] = lambda: True,
) -> Iterator[Nasty]:
    """These shapes, each the largest that is read, in each of their fields, in each of the ways;
    of all of these those that are drawn.
    """
    for way in ways:
        asks = WAYS[way]
        if not asks.keys() <= route.fields:
            continue
        for name in names:
            shape = SHAPES[name]
            for field in (*(one for one in shape.fields if one in route.fields), "unknown"):
                if is_drawn():
                    yield Nasty(name, field, _body(route, shape, field, asks), way)


def _body(route: Route, shape: Shape, field: str, asks: Mapping[str, object]) -> bytes:
    base = {key: value for key, value in {**_base(route), **asks}.items() if key != field}
    begin = json.dumps({**base, field: None}).encode().removesuffix(b"null}")
    return begin + shape.within(route.body_bytes - len(begin) - 1, route.parts - 200) + b"}"


def _base(route: Route) -> dict[str, object]:
    """What makes the rest of the body one that is answered."""
    said = {
        "messages": [{"role": "user", "content": "Hi"}],
        "input": "Hi",
        "prompt": "Hi",
        "tokens": [5],
    }
    base: dict[str, object] = {"max_tokens": 1, "max_output_tokens": 16, "store": False}
    base |= {"stream": False, "options": {"num_predict": 1}, "model": route.model}
    base = {name: value for name, value in base.items() if name in route.fields}
    asked = next((name for name in said if name in route.fields), None)
    return base if asked is None else {**base, asked: said[asked]}
