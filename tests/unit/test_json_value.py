"""JSON, character by character: what is certain is said, what is none is found out."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.output.json_value import JsonObject

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    data=st.data(),
)
def test_a_json_object_is_said_as_it_is(
    value: dict[str, Any], indent: int | None, ascii_only: bool, data: st.DataObject
):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    reader = JsonObject()
    end = data.draw(st.integers(0, len(text)))
    first, nothing = reader.feed(text[:end])
    second, rest = reader.feed(text[end:] + "} rest")
    assert (first + second, nothing, rest) == (text, "", "} rest")
    assert reader.is_done
    assert not reader.is_broken
    assert not reader.is_repaired


@given(
    text=st.text('{}[]:,"\\ua1-+.eE truefalsn\n', max_size=12).map(lambda text: "{" + text),
)
def test_what_is_read_to_its_end_is_json_and_what_is_json_is_read(text: str):
    reader = JsonObject()
    said, rest = reader.feed(text)
    if reader.is_done:
        json.loads(said)
        return
    assert reader.is_broken == bool(rest)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


@pytest.mark.parametrize(
    "text", ['{"a": 01}', '{"a": 1.}', '{"a" 1}', '{"a": 1,}', "{1: 2}", '{"a": [1}']
)
def test_what_is_no_json_breaks(text: str):
    reader = JsonObject()
    reader.feed(text)
    assert reader.is_broken
    assert not reader.is_done


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"a": "\d+ \."}', r"\d+ \."),
        (r'{"a": "C:\users\u00e9"}', "C:\\usersé"),
        (r'{"a": "\u12"}', r"\u12"),
        ('{"a": "\\\n"}', "\\\n"),
        (r'{"a": "\\ \" \/ \t"}', '\\ " / \t'),
    ],
)
def test_a_backslash_that_escapes_nothing_is_one(text: str, value: str):
    for pieces in ([text], list(text)):
        reader = JsonObject()
        said = "".join(reader.feed(piece)[0] for piece in pieces)
        assert json.loads(said) == {"a": value}
        assert reader.is_done
