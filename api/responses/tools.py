"""The tools of a Responses request: which the model is shown, and under which names.

A model knows flat names only, so a tool of a namespace is shown as `namespace__name`; `ToolNames`
leads back. Tools that would run on OpenAI's servers are left out and reported. Tools that a search
of the client's found are shown where it found them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from api.http.body import decoded_at
from api.http.json_schemas import parameters_text
from api.http.refusal import refuse
from api.openai.fields import FunctionDefinition, is_given
from api.openai.freeform import freeform_tool, unheld
from api.openai.response_schemas import (
    ChosenTool,
    CustomTool,
    NamespaceTool,
    ToolChoiceFields,
    ToolHead,
)
from api.responses.client_tools import KINDS, ClientKind, client_tool
from runtime.errors import InvalidRequest
from runtime.types import Tool, ToolChoice

_MODES = ("auto", "none", "required")
_OWN_TYPES = ("function", "custom", "namespace", *KINDS)


class ToolRef(NamedTuple):
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    client: ClientKind | None = None
    """The tool of the API that the client runs, whose calls are items of their own."""


class ToolNames:
    """From the names that the model uses to the client's and back."""

    def __init__(self, by_flat_name: Mapping[str, ToolRef]) -> None:
        self._refs = by_flat_name
        self._flat = {(ref.namespace, ref.name): flat for flat, ref in by_flat_name.items()}

    def ref(self, flat_name: str) -> ToolRef:
        """What the client calls the tool; one that it did not offer keeps its name."""
        return self._refs.get(flat_name) or ToolRef(flat_name)

    def flat(self, name: str, namespace: str | None) -> str:
        """What the model calls it, also where the tool is no longer offered."""
        return self._flat.get((namespace, name)) or _flat_name(name, namespace)


class Offer(NamedTuple):
    """The tools that are served, how the answer repeats them, and which were left out."""

    tools: tuple[Tool, ...]
    names: ToolNames
    echo: tuple[msgspec.Raw, ...]
    ignored: tuple[str, ...]


class Choice(NamedTuple):
    """The tools that are shown, and which of them may or must be called."""

    tools: tuple[Tool, ...]
    choice: ToolChoice


class FunctionEcho(msgspec.Struct, tag_field="type", tag="function"):
    """A function tool in the answer: every field is there."""

    name: str
    description: str | None
    parameters: msgspec.Raw | None
    strict: bool


def offered(raws: Sequence[msgspec.Raw], found: Sequence[tuple[msgspec.Raw, str]] = ()) -> Offer:
    """The tools of a request, and those that its searches `found`, with their paths.

    Raises:
        InvalidRequest: a function or custom tool is described wrongly.
    """
    reader = _Reader()
    for i, raw in enumerate(raws):
        reader.add(raw, f"tools[{i}]")
    num_echoed = len(reader.echo)
    for raw, path in found:
        try:
            reader.add(raw, path, is_found=True)
        except InvalidRequest as error:  # what a call gave is never refused
            reader.ignored.append(error.message)
    del reader.echo[num_echoed:]
    names = ToolNames(reader.refs)
    return Offer(tuple(reader.tools), names, tuple(reader.echo), tuple(reader.ignored))


class _Reader:
    """Collects tools, namespaces opened."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.refs: dict[str, ToolRef] = {}
        self.echo: list[msgspec.Raw] = []
        self.ignored: list[str] = []
        self._is_found = False

    def add(self, raw: msgspec.Raw, path: str, *, is_found: bool = False) -> None:
        self._is_found = is_found
        head = decoded_at(raw, ToolHead, path)
        kind = head.type
        match kind:
            case "function":
                if is_given(head.function):  # as in chat
                    raw, path = head.function, f"{path}.function"
                function = decoded_at(raw, FunctionDefinition, path)
                self._keep(_function(function, path), ToolRef(function.name))
                self.echo.append(_function_echo(function))
            case "custom":
                custom = decoded_at(raw, CustomTool, path)
                self._keep_custom(custom, None, path)
                self.echo.append(raw)
            case "namespace":
                self._open(decoded_at(raw, NamespaceTool, path), path)
                self.echo.append(raw)
            case _:
                self._keep_client(client_tool(kind, raw, path), raw)

    def _keep_client(self, tool: Tool | str, raw: msgspec.Raw) -> None:
        if isinstance(tool, str):
            self.ignored.append(tool)
            return
        client: ClientKind = next(one for one in KINDS if one == tool.name)
        self._keep(tool, ToolRef(tool.name, client=client))
        self.echo.append(raw)

    def _open(self, space: NamespaceTool, path: str) -> None:
        """Keep the tools of a namespace; the first one carries the description of all."""
        about = space.description
        for i, raw in enumerate(space.tools):
            where = f"{path}.tools[{i}]"
            kind = decoded_at(raw, ToolHead, where).type
            if kind == "function":
                function = decoded_at(raw, FunctionDefinition, where)
                tool = _described(_function(function, where), about)
                self._keep(tool, ToolRef(function.name, space.name))
            elif kind == "custom":
                self._keep_custom(decoded_at(raw, CustomTool, where), space, where, about)
            else:
                self.ignored.append(f"{where}: {kind[:64]}")
                continue
            about = None

    def _keep_custom(
        self, custom: CustomTool, space: NamespaceTool | None, path: str, about: str | None = None
    ) -> None:
        form_path = f"{path}.format"
        tool = _described(freeform_tool(custom, form_path, form_path), about)
        namespace = space.name if space is not None else None
        self._keep(tool, ToolRef(custom.name, namespace, is_custom=True))
        self.ignored += unheld(custom, path)

    def _keep(self, tool: Tool, ref: ToolRef) -> None:
        flat = _flat_name(ref.name, ref.namespace)
        if self._is_found and flat in self.refs:
            return
        number = 1
        while flat in self.refs:
            number += 1
            flat = f"{_flat_name(ref.name, ref.namespace)}_{number}"
        self.refs[flat] = ref
        self.tools.append(msgspec.structs.replace(tool, name=flat, is_deferred=self._is_found))


def flat_names(raws: Sequence[msgspec.Raw]) -> Iterator[str]:
    """What the model calls these tools."""
    for raw in raws:
        yield from (tool.name for tool in offered((), [(raw, "")]).tools)


def _flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _described(tool: Tool, about: str | None) -> Tool:
    if not about:
        return tool
    description = "\n\n".join(text for text in (about, tool.description) if text)
    return msgspec.structs.replace(tool, description=description)


def _function(function: FunctionDefinition, path: str) -> Tool:
    return Tool(
        name=function.name,
        description=function.description,
        parameters=parameters_text(function.parameters, f"{path}.parameters"),
        is_strict=bool(function.strict),
    )


def _function_echo(function: FunctionDefinition) -> msgspec.Raw:
    parameters = None if bytes(function.parameters) == b"null" else function.parameters
    echo = FunctionEcho(function.name, function.description, parameters, bool(function.strict))
    return msgspec.Raw(msgspec.json.encode(echo))


# The choice


def chosen(field: str | ToolChoiceFields | None, offer: Offer, *, is_parallel: bool) -> Choice:
    """What `tool_choice` means for these tools.

    Raises:
        InvalidRequest: it is of no known form, or asks for a tool that is not served.
    """
    if field is None or isinstance(field, str):
        mode = _mode(field or "auto", offer.tools, "tool_choice")
        return Choice(offer.tools, ToolChoice(mode=mode, is_parallel=is_parallel))
    if field.type == "allowed_tools":
        return _allowed(field, offer, is_parallel=is_parallel)
    name = _served(ChosenTool(field.type, field.name, field.namespace), offer, "tool_choice")
    return Choice(offer.tools, ToolChoice(mode="required", name=name, is_parallel=is_parallel))


def _allowed(field: ToolChoiceFields, offer: Offer, *, is_parallel: bool) -> Choice:
    """Only some of the tools may be called; all are shown, so that the prompt stays the same."""
    names = {
        _served(one, offer, f"tool_choice.tools[{i}]")
        for i, one in enumerate(field.tools or ())
        if one.type in _OWN_TYPES or field.mode == "required"
    }
    tools = tuple(tool for tool in offer.tools if tool.name in names)
    mode = _mode(field.mode or "auto", tools, "tool_choice.mode")
    allowed = tuple(tool.name for tool in tools)
    choice = ToolChoice(mode=mode, is_parallel=is_parallel, allowed=allowed)
    return Choice(offer.tools, choice)


def _served(tool: ChosenTool, offer: Offer, path: str) -> str:
    """The flat name of a tool that is asked for."""
    if tool.type not in _OWN_TYPES:
        refuse(
            path,
            f"asks for the hosted tool {tool.type[:64]!r}, which does not exist here: "
            "choose a function or a custom tool.",
        )
    own = tool.type if tool.type in KINDS else ""
    flat = offer.names.flat(tool.name or own, tool.namespace)
    if flat not in {one.name for one in offer.tools}:
        refuse(path, f"names {(tool.name or own)[:64]!r}, which is not among the tools.")
    return flat


def _mode(mode: str, tools: Sequence[Tool], path: str) -> Literal["auto", "none", "required"]:
    if mode == "auto" or mode == "none":
        return mode
    if mode != "required":
        refuse(path, f"is {mode[:64]!r}: use one of {', '.join(_MODES)}, or name a tool.")
    if not tools:
        refuse(path, "requires a call, but there is no tool that can be called here.")
    return mode
