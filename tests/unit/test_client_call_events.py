"""Calls of tools that the client runs, told as they are written: at every split the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.responses.events import OutputWriter, Shape
from api.responses.json_texts import JsonTexts
from api.responses.tools import ToolNames, ToolRef
from runtime.types import Finished, FinishReason, ToolCallDelta, Usage
from tests.unit.test_responses_output import plain

NAMES = ToolNames(
    {
        "shell": ToolRef("shell", client="shell"),
        "local_shell": ToolRef("local_shell", client="local_shell"),
        "apply_patch": ToolRef("apply_patch", client="apply_patch"),
        "note": ToolRef("note", is_custom=True),
    }
)
DIFF = "response.apply_patch_call_operation_diff"
COMMAND = "response.shell_call_command"
INPUT = "response.custom_tool_call_input"
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["", 'a "b"\\', "😀 é\u2028\n", "\\ud83d", "}],{["]
)


def told(
    name: str, arguments: str, cuts: list[int], reason: FinishReason = "tool_calls"
) -> tuple[list[Any], dict[str, Any]]:
    """The events and the item of a call that comes in pieces cut there."""
    ends = sorted({cut % (len(arguments) + 1) for cut in cuts} | {len(arguments)})
    starts = [0, *ends]
    pieces = [arguments[start:end] for start, end in zip(starts, ends, strict=False)]
    writer = OutputWriter(Shape(NAMES))
    chunks = [
        ToolCallDelta(0, 0, piece, id=None if i else "call_0", name=None if i else name)
        for i, piece in enumerate(pieces)
    ]
    end = Finished(index=0, reason=reason, usage=Usage(num_prompt_tokens=1))
    events = [plain(event) for chunk in [*chunks, end] for event in writer.add(chunk)]
    assert [one["type"] for one in events].count("response.output_item.added") == 1
    assert events[0]["type"] == "response.output_item.added"
    assert events[-1]["type"] == "response.output_item.done"
    return events[1:-1], plain(writer.items[0])


def joined(events: list[Any], kind: str, **where: Any) -> str:
    return "".join(
        one["delta"]
        for one in events
        if one["type"] == f"{kind}.delta" and where.items() <= one.items()
    )


def of_type(events: list[Any], kind: str) -> list[Any]:
    return [one for one in events if one["type"] == kind]


CUTS = st.lists(st.integers(0, 400), max_size=30)


@given(st.lists(TEXTS, max_size=4), CUTS, st.booleans())
def test_commands_are_told_as_they_are_written(
    commands: list[str], cuts: list[int], is_ascii: bool
) -> None:
    action = {"commands": commands, "timeout_ms": 5}
    events, item = told("shell", json.dumps(action, ensure_ascii=is_ascii), cuts)
    assert item["action"] == action | {"max_output_length": None}
    assert item["status"] == "completed"
    for number, command in enumerate(commands):
        where = {"output_index": 0, "command_index": number}
        assert joined(events, COMMAND, **where) == command
        mine = [one for one in events if one["command_index"] == number]
        assert mine[0] == {"type": f"{COMMAND}.added", **where, "command": ""}
        assert mine[-1] == {"type": f"{COMMAND}.done", **where, "command": command}
        assert {one["type"] for one in mine[1:-1]} <= {f"{COMMAND}.delta"}
    numbers = [one["command_index"] for one in events]
    assert numbers == sorted(numbers)
    assert len(of_type(events, f"{COMMAND}.done")) == len(commands)


@given(
    st.sampled_from(["create_file", "update_file"]), TEXTS, TEXTS, CUTS, st.permutations([0, 1, 2])
)
def test_a_patch_is_told_once_its_file_is_known_and_its_diff_as_it_is_written(
    kind: str, path: str, diff: str, cuts: list[int], order: list[int]
) -> None:
    members = [("type", kind), ("path", path), ("diff", diff)]
    operation = dict(members[i] for i in order)
    events, item = told("apply_patch", json.dumps(operation), cuts)
    assert (item["status"], item["operation"]) == ("completed", operation)
    assert joined(events, DIFF, output_index=0) == diff
    assert events[-1] == {"type": f"{DIFF}.done", "output_index": 0, "diff": diff}
    assert len(of_type(events, f"{DIFF}.done")) == 1


def test_a_patch_is_announced_with_its_file() -> None:
    writer = OutputWriter(Shape(NAMES))

    def add(piece: str, name: str | None = None) -> list[str]:
        chunk = ToolCallDelta(0, 0, piece, id="c" if name else None, name=name)
        events = [plain(event) for event in writer.add(chunk)]
        for one in of_type(events, "response.output_item.added"):
            known = {"type": "create_file", "path": "a.py", "diff": ""}
            assert one["item"]["operation"] == known
            assert one["item"]["status"] == "in_progress"
        return [one["type"] for one in events]

    assert add("", "apply_patch") == []
    assert add('{"type": "create_file", "path": "a.p') == []
    assert add('y"') == ["response.output_item.added"]
    assert add(', "diff": "+a') == [f"{DIFF}.delta"]


@given(CUTS, st.booleans())
def test_deleting_a_file_has_no_diff(cuts: list[int], says_one: bool) -> None:
    operation = {"type": "delete_file", "path": "a"}
    said = operation | ({"diff": "x"} if says_one else {})
    events, item = told("apply_patch", json.dumps(said), cuts)
    assert (events, item["operation"], item["status"]) == ([], operation, "completed")


@given(TEXTS, CUTS, st.booleans())
def test_the_text_of_a_custom_tool_is_told_as_it_is_written(
    text: str, cuts: list[int], is_ascii: bool
) -> None:
    events, item = told("note", json.dumps({"input": text}, ensure_ascii=is_ascii), cuts)
    assert item["input"] == joined(events, INPUT, output_index=0) == text
    assert events[-1] == {"type": f"{INPUT}.done", "output_index": 0, "input": text}


@pytest.mark.parametrize("text", ["a\nb", "[1]", '{"input": 5}', '{"inp', ""])
@given(cuts=CUTS)
def test_what_is_no_argument_is_all_of_the_text(text: str, cuts: list[int]) -> None:
    events, item = told("note", text, cuts)
    assert item["input"] == joined(events, INPUT) == events[-1]["input"] == text


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(TEXTS, one, max_size=3),
)


@given(
    st.sampled_from(["shell", "apply_patch", "note"]),
    st.lists(TEXTS, min_size=1, max_size=3),
    st.integers(0, 300),
    CUTS,
)
def test_of_a_call_that_was_cut_the_item_has_what_was_finished(
    name: str, texts: list[str], end: int, cuts: list[int]
) -> None:
    whole: dict[str, Any] = {
        "shell": {"commands": texts},
        "apply_patch": {"type": "create_file", "path": texts[0], "diff": texts[-1]},
        "note": {"input": texts[0]},
    }[name]
    arguments = json.dumps(whole)[:end]
    events, item = told(name, arguments, cuts, "length")
    if name == "note":
        assert item["input"] == joined(events, INPUT)
        assert item["status"] == "incomplete"
    elif name == "shell":
        done = [one["command"] for one in of_type(events, f"{COMMAND}.done")]
        assert item["action"]["commands"] == done == texts[: len(done)]
        for number, command in enumerate(done):
            assert joined(events, COMMAND, command_index=number) == command
        assert item["status"] == "incomplete"
    else:
        done = [one["diff"] for one in of_type(events, f"{DIFF}.done")]
        assert item["operation"]["diff"] == (done or [""])[0]
        assert done in ([], [joined(events, DIFF)])
        assert item["status"] == "in_progress"


@given(ANY, CUTS, st.booleans())
def test_every_text_of_any_json_is_read_at_every_split(
    value: Any, cuts: list[int], is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    reader, found = JsonTexts(), dict[Any, str]()
    at = 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        for piece in reader.read(text[at:end]):
            found[piece.path] = found.get(piece.path, "") + piece.text
        at = end
    assert found == texts_in(value)
    assert all(reader.is_whole(*path) and reader.text(*path) == found[path] for path in found)


def texts_in(value: Any, path: tuple[Any, ...] = ()) -> dict[Any, str]:
    if isinstance(value, str):
        return {path: value}
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return {at: text for key, one in inner for at, text in texts_in(one, (*path, key)).items()}


@pytest.mark.parametrize(
    ("written", "said"),
    [(r"\ud83d", "�"), (r"\ud83d\u0041", "�A"), (r"\ude00x", "�x"), (r"\q", "�"), (r"\uzzzz", "�")],
)
def test_half_a_pair_and_what_is_no_escape_read_as_a_replacement(written: str, said: str) -> None:
    for cut in range(len(written) + 2):
        reader, text = JsonTexts(), f'"{written}"'
        reader.read(text[:cut])
        reader.read(text[cut:])
        assert (reader.text(), reader.is_whole()) == (said, True)
