"""Calls with a tag for each argument: with their own marks in values, and with marks missing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.types import Tool
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.families import FAMILIES, speaking
from runtime.worker.output.tagged_calls import Tags
from tests.unit.test_dialects import Told, told

FORMS = {name: row.form for name, row in FAMILIES.items() if isinstance(row.form, Tags)}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "n": {"type": "integer"},
    },
    "required": ["path", "content"],
}
WRITE = Tool(name="write", parameters=json.dumps(SCHEMA))


def opened(form: Tags, key: str) -> str:
    """The beginning of an argument."""
    quote = '"' if form.argument.before.endswith('"') else ""
    line = "\n" if form.trims else ""
    return form.argument.before + key + quote + form.argument.after + form.value + line


def closed(form: Tags) -> str:
    """The end of a value."""
    return ("\n" if form.trims else "") + form.value_end + "\n"


def argument(form: Tags, key: str, value: str) -> str:
    """A whole argument."""
    return opened(form, key) + value + closed(form)


def call_opened(form: Tags) -> str:
    """The beginning of a section with a call of `write`."""
    quote = '"' if form.call.before.endswith('"') else ""
    return form.start + form.call.before + "write" + quote + form.call.after


def call(form: Tags, *arguments: str) -> str:
    """A section with one call of `write`."""
    return call_opened(form) + "\n" + "".join(arguments) + form.call_end + form.end


def read(name: str, turn: str, **more: Any) -> Told:
    """What is told of a turn, which is the same of its characters one by one."""
    spoken = speaking(FAMILIES[name], Dialect())
    said = told([turn], spoken, WRITE, **more)
    assert told(list(turn), spoken, WRITE, **more) == said
    return said


def arguments_of(said: Told) -> list[dict[str, Any]]:
    return [json.loads(arguments) for _, arguments in said.calls]


@pytest.mark.parametrize("name", FORMS)
def test_a_closing_tag_that_is_missing_before_the_next_argument_is_repaired(name: str):
    form = FORMS[name]
    line = "" if form.trims else "\n"
    first = f"{opened(form, 'path')}a\n"
    said = read(name, call(form, first, argument(form, "content", "b")))
    assert arguments_of(said) == [{"path": f"a{line}", "content": "b"}]
    assert (said.text, said.notes) == ("", ("repaired_tool_call",))


@pytest.mark.parametrize("name", FORMS)
def test_a_closing_tag_that_is_missing_at_the_end_of_the_call_is_repaired(name: str):
    form = FORMS[name]
    last = f"{opened(form, 'content')}b\n"
    said = read(name, call(form, argument(form, "path", "a"), last))
    assert [one["path"] for one in arguments_of(said)] == ["a"]
    assert [one["content"].rstrip() for one in arguments_of(said)] == ["b"]
    assert (said.text, said.notes) == ("", ("repaired_tool_call",))
