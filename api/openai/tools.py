"""The tools of a chat request and which of them must be called, in the older form as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from api.http.json_schemas import parameters_text
from api.http.refusal import refuse
from api.http.unused import listed
from api.openai.calls import CallFormat
from api.openai.fields import FunctionDefinition
from api.openai.freeform import freeform_tool, unheld
from api.openai.response_schemas import CustomTool, GrammarFields
from api.openai.schemas import (
    ChatRequest,
    CustomDefinition,
    CustomFormat,
    NamedFunction,
    NamedToolChoice,
    ToolDefinition,
)
from runtime.types import Tool, ToolChoice

_MODES = ("auto", "none", "required")
_TYPES = ("function", "custom")


class Chosen(NamedTuple):
    """The tools that the model is shown, and which of them may or must be called."""

    tools: tuple[Tool, ...]
    choice: ToolChoice


def is_older_form(data: ChatRequest) -> bool:
    """The request has functions and no tools, so its answer speaks of a function call."""
    return bool(data.functions) and not data.tools


def unserved_tools(data: ChatRequest) -> list[str]:
    """The tools that the model is not shown, and the grammars that it is only shown."""
    unserved: list[str] = []
    for i, one in enumerate(data.tools or ()):
        if one.type not in _TYPES:
            unserved.append(f"tools[{i}]: {one.type[:64]}")
        elif one.type == "custom" and one.custom is not None:
            unserved += unheld(_flat(one.custom), f"tools[{i}].custom")
    return listed(iter(unserved))


def form_of(data: ChatRequest) -> CallFormat:
    """How the calls of these tools are told."""
    customs = (one.custom for one in data.tools or () if one.type == "custom")
    names = frozenset(one.name for one in customs if one is not None)
    return CallFormat(names, is_older=is_older_form(data))


def chosen_tools(data: ChatRequest) -> Chosen:
    """What `tools` and `tool_choice` mean, or `functions` and `function_call`.

    Raises:
        InvalidRequest: one of them is malformed, or a tool is asked for that is not there.
    """
    is_parallel = data.parallel_tool_calls is not False
    if is_older_form(data):
        tools = [_tool(one, f"functions[{i}]") for i, one in enumerate(data.functions or ())]
        return _chosen(tools, _older_choice(data.function_call), "function_call", False)
    return _chosen(_tools(data.tools or ()), data.tool_choice, "tool_choice", is_parallel)


def _older_choice(given: str | NamedFunction | None) -> str | NamedToolChoice | None:
    return NamedToolChoice(function=given) if isinstance(given, NamedFunction) else given


def _chosen(
    tools: Sequence[Tool], given: str | NamedToolChoice | None, path: str, is_parallel: bool
) -> Chosen:
    allowed: tuple[str, ...] | None = None
    if isinstance(given, NamedToolChoice) and given.type == "allowed_tools":
        allowed, given = _allowed(tools, given, path)
    if isinstance(given, NamedToolChoice):
        name = _named(tools, given, path)
        return Chosen(tuple(tools), ToolChoice(mode="required", name=name, is_parallel=is_parallel))
    if given == "none":
        return Chosen(tuple(tools), ToolChoice(mode="none", is_parallel=is_parallel))
    if given in (None, "auto"):
        return Chosen(tuple(tools), ToolChoice(is_parallel=is_parallel, allowed=allowed))
    if given != "required":
        refuse(path, f"is {given[:64]!r}: use one of {', '.join(_MODES)}, or name a tool.")
    if not tools or allowed == ():
        refuse(path, "requires a call, but there is no tool to call: send `tools`.")
    choice = ToolChoice(mode="required", is_parallel=is_parallel, allowed=allowed)
    return Chosen(tuple(tools), choice)


def _allowed(
    tools: Sequence[Tool], given: NamedToolChoice, path: str
) -> tuple[tuple[str, ...], str]:
    """The names of those that may be called, and whether one must be."""
    allowed = given.allowed_tools
    if allowed is None:
        refuse(f"{path}.allowed_tools", "is missing: give its mode and tools.")
    places = enumerate(allowed.tools)
    names = {_named(tools, one, f"{path}.allowed_tools.tools[{i}]") for i, one in places}
    return tuple(tool.name for tool in tools if tool.name in names), allowed.mode


def _named(tools: Sequence[Tool], given: NamedToolChoice, path: str) -> str:
    named = given.custom if given.type == "custom" else given.function
    if given.type not in _TYPES or named is None:
        refuse(path, "must name a function or a custom tool: give its type and `function.name`.")
    if named.name not in {tool.name for tool in tools}:
        refuse(path, f"names {named.name[:64]!r}, which is not among the tools.")
    return named.name


def _tools(definitions: Sequence[ToolDefinition]) -> list[Tool]:
    tools: list[Tool] = []
    for i, definition in enumerate(definitions):
        path = f"tools[{i}].{definition.type}"
        if definition.type == "custom":
            if definition.custom is None:
                refuse(path, "is missing: describe the tool by its name.")
            form_path = f"{path}.format"
            custom = _flat(definition.custom)
            tools.append(freeform_tool(custom, form_path, f"{form_path}.grammar"))
        elif definition.type == "function":
            tools.append(_of_function(definition, f"tools[{i}]"))
    return tools


def _of_function(definition: ToolDefinition, path: str) -> Tool:
    if definition.function is not None:
        return _tool(definition.function, f"{path}.function")
    if not definition.name:
        refuse(f"{path}.function", "is missing: describe the function by name and parameters.")
    flat = FunctionDefinition(
        definition.name, definition.description, definition.parameters, definition.strict
    )
    return _tool(flat, path)


def _flat(custom: CustomDefinition) -> CustomTool:
    """The tool as Responses describes it, where the grammar is not an object of its own."""
    form = custom.format or CustomFormat()
    grammar = form.grammar or GrammarFields()
    flat = GrammarFields(form.type, grammar.syntax, grammar.definition)
    return CustomTool(custom.name, custom.description, flat)


def _tool(function: FunctionDefinition, path: str) -> Tool:
    return Tool(
        name=function.name,
        description=function.description,
        parameters=parameters_text(function.parameters, f"{path}.parameters"),
        is_strict=bool(function.strict),
    )
