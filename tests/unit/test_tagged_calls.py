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


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"glm47", "laguna", "longcat"}))
def test_a_closing_tag_that_is_missing_before_a_further_call_is_repaired(name: str):
    form = FORMS[name]
    whole = argument(form, "path", "a") + argument(form, "content", "b")
    half = argument(form, "path", "a") + f"{opened(form, 'content')}b\n"
    further = call(form, whole).removeprefix(form.start)
    turn = f"{call(form, half).removesuffix(form.end)}\n{further}"
    if name == "minicpm5":
        turn = call(form, half) + call(form, whole)
    said = read(name, turn)
    assert [one["content"].rstrip() for one in arguments_of(said)] == ["b", "b"]
    assert (said.text, said.notes) == ("", ("repaired_tool_call",))


def texts_about(form: Tags) -> list[str]:
    """Texts that show parts of this very form of a call."""
    return [
        f"# Format\n{argument(form, 'content', 'hi')}End.",
        f"# Format\n{argument(form, 'n', '5')}End.",
        f"# Format\n{opened(form, 'content')}is the tag.",
        f"# Format\n{opened(form, 'n')}is the tag.",
        f"# Format\n{opened(form, 'path')}is the tag.",
        f"Write {opened(form, 'content')} first.",
        f"Write {form.argument.before}n{form.argument.after} first.",
        f"It ends with {form.closing} and that is it.",
        f"It begins {call_opened(form)}\nand so on.",
        f"It begins {call_opened(form)}\n{opened(form, 'path')}a",
        f"It begins {call_opened(form)}\n{argument(form, 'path', 'a')}and so on.",
        f"An example:\n{call(form, argument(form, 'path', 'a'))}\nEnd.",
        f"{call(form, argument(form, 'path', 'a'))}\nor {call_opened(form)}\n{opened(form, 'n')}",
    ]


@pytest.mark.parametrize("num", range(len(texts_about(FORMS["glm47"]))))
@pytest.mark.parametrize("name", FORMS)
def test_a_text_about_the_form_of_calls_is_a_value_from_beginning_to_end(name: str, num: int):
    form = FORMS[name]
    text = texts_about(form)[num]
    path, content = argument(form, "path", "a.md"), argument(form, "content", text)
    for given in (path + content, content + path):
        said = read(name, call(form, given))
        assert arguments_of(said) == [{"path": "a.md", "content": text}]
        assert (said.text, said.notes) == ("", ())
    two = read(name, call(form, path, content) + "\n" + call(form, path, argument(form, "n", "5")))
    assert arguments_of(two) == [{"path": "a.md", "content": text}, {"path": "a.md", "n": 5}]
    assert (two.text, two.notes) == ("", ())


@pytest.mark.parametrize("name", FORMS)
def test_an_argument_that_is_given_twice_is_told(name: str):
    form = FORMS[name]
    twice = argument(form, "content", "first") + argument(form, "content", "second")
    said = read(name, call(form, argument(form, "path", "a"), twice))
    assert arguments_of(said) == [{"path": "a", "content": "second"}]
    assert said.notes == ("repaired_tool_call",)


@pytest.mark.parametrize("name", FORMS)
def test_of_a_call_that_is_cut_off_inside_of_a_value_nothing_is_told(name: str):
    form = FORMS[name]
    shown = f"An example:\n{call(form, argument(form, 'path', 'a'))}\nEnd."
    turn = call(form, argument(form, "path", "a.md"), argument(form, "content", shown))
    for end in range(turn.index("An example"), turn.index("End.")):
        said = read(name, turn[:end], is_cut=True)
        assert (said.calls, said.text, said.notes) == ((), "", ("unclosed_tool_call",))


@pytest.mark.parametrize(
    ("family", "turn"),
    [
        ("json_tools", '{"name": "write", "arguments": {}}\n</tool_call>'),
        ("glm47", "write<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>"),
        ("mistral", 'write[ARGS]{"path": "a"}'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "a"}'),
    ],
)
def test_a_call_without_its_first_mark_is_text_and_told(family: str, turn: str):
    spoken = speaking(FAMILIES[family], Dialect())
    said = told([turn], spoken, WRITE)
    assert told(list(turn), spoken, WRITE) == said
    assert (said.text, said.calls, said.notes) == (turn, (), ("unread_tool_call",))
    assert told(["a word of </tool_call"], spoken, WRITE).notes == ()
