"""Custom tools: a tool of one text, which a model calls as a function with that one argument."""

from __future__ import annotations

import re

import msgspec

from api.http.refusal import refuse
from api.openai.fields import Body
from api.openai.response_schemas import CustomTool, GrammarFields
from runtime.types import Tool

INPUT = "input"
"""The one argument by which a model is asked for the text."""

_HALF_ESCAPE = re.compile(r"(?:\\u[dD][89abAB][\da-fA-F]{2})?(?:\\(?:u[\da-fA-F]{0,3})?)?\Z")


class FreeformArguments(Body):
    """How a model writes the call of a custom tool."""

    input: str


def freeform_arguments(text: str) -> str:
    """The text of a custom tool as the arguments that a model writes."""
    return msgspec.json.encode(FreeformArguments(text)).decode()


def freeform_input(arguments: str) -> str:
    """The text that arguments carry, also where they were cut; they themselves where the model
    wrote something else.
    """
    for text in (arguments, arguments + '"}', _HALF_ESCAPE.sub("", arguments) + '"}'):
        try:
            return msgspec.json.decode(text, type=FreeformArguments).input
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return arguments


def freeform_tool(custom: CustomTool, path: str, grammar_path: str) -> Tool:
    """A tool of one text. A regular expression goes into a strict schema, which holds the model
    to it; a grammar is only described. `path` is where its form stands, the other the grammar.

    Raises:
        InvalidRequest: its form is none that is known.
    """
    text: dict[str, str] = {"type": "string"}
    description = custom.description
    form = custom.format or GrammarFields()
    if form.type == "grammar":
        definition = _definition(form, grammar_path)
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            about = f"The {INPUT} must follow this Lark grammar:\n{definition}"
            description = "\n\n".join(part for part in (description, about) if part)
    elif form.type != "text":
        refuse(f"{path}.type", f"is {form.type[:64]!r}: use text or grammar.")
    schema = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Tool(
        name=custom.name,
        description=description,
        parameters=msgspec.json.encode(schema).decode(),
        is_strict="pattern" in text,
        is_freeform="pattern" not in text,
    )


def unheld(custom: CustomTool, path: str) -> list[str]:
    """What of a custom tool's form has no effect but to be read by the model."""
    if custom.format is None or custom.format.syntax != "lark":
        return []
    return [f"{path}.format: the grammar is shown to the model, not enforced"]


def _definition(form: GrammarFields, path: str) -> str:
    if form.syntax not in ("lark", "regex"):
        refuse(f"{path}.syntax", 'must be "lark" or "regex".')
    if not form.definition:
        refuse(f"{path}.definition", "is missing: give the grammar.")
    return form.definition
