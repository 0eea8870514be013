"""vLLM's fields for the form of an answer, and files that are text."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Generator
from typing import Any

import pytest

from tests.running_server import RunningServer, running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"enum": [1, 2]}},
    "required": ["at"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[Any, str]] = {
    "json": (SCHEMA, r"\{.*\}"),
    "regex": ("[0-9]{3}-[0-9]{2}", "[0-9]{3}-[0-9]{2}"),
    "choice": (['le "phare"\n', "the lamp"], r'le "phare"\n|the lamp'),
    "grammar": ('start: "a" b\nb: "x" | "y"', "ax|ay"),
    "grammar-of-GBNF": ('root ::= "caf\\u00e9 " b{,2}\nb ::= [x-y]\n  | "z"', "café [xyz]{0,2}"),
}
NOTE = base64.b64encode("Über alles: 42".encode()).decode()
PDF = base64.b64encode(b"%PDF-1.7").decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server
        assert "Traceback" not in server.stderr


def chat(server: RunningServer, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": "hearth-tiny", "max_tokens": 60, "messages": [said("hi")]} | fields
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == status, answer.text
    return answer.json()


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("kind", FORMS)
def test_an_answer_has_the_form_that_any_of_vllms_fields_says(
    server: RunningServer, kind: str
) -> None:
    value, pattern = FORMS[kind]
    kind = kind.partition("-")[0]
    ways: list[dict[str, Any]] = [{f"guided_{kind}": value}, {"structured_outputs": {kind: value}}]
    if kind == "json":
        ways.append({"guided_json": json.dumps(value)})
    for way in ways:
        answer = chat(server, **way)
        text = answer["choices"][0]["message"]["content"]
        assert re.fullmatch(pattern, text, re.DOTALL), (way, text)
        assert "ignored" not in answer["hearth"]
    body = {"model": "hearth-tiny", "max_tokens": 60, "prompt": "hi"} | ways[0]
    plain = server.post("/v1/completions", body).json()
    assert re.fullmatch(pattern, plain["choices"][0]["text"], re.DOTALL)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"grammar": "root ::= b"}}, "structured_outputs.grammar"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar"),
        ({"guided_grammar": "start: b"}, "guided_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 20_000}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "' + "a" * (1 << 20) + '"'}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_a_form_that_cannot_be_held_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    assert chat(server, 400, **fields)["error"]["param"] == param


def num_tokens(server: RunningServer, part: dict[str, Any]) -> int:
    answer = server.post(
        "/v1/responses/input_tokens", {"model": "hearth-tiny", "input": [said([part])]}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


@pytest.mark.parametrize(
    "file",
    [
        {"file_data": f"data:text/markdown;base64,{NOTE}"},
        {"file_data": f"data:application/json;base64,{NOTE}"},
        {"file_data": NOTE, "filename": "a.txt"},
    ],
)
def test_a_file_that_is_text_is_read_as_its_name_and_text(
    server: RunningServer, file: dict[str, str]
) -> None:
    text = "\n".join([*([file["filename"]] if "filename" in file else ()), "Über alles: 42"])
    wanted = num_tokens(server, {"type": "input_text", "text": text})
    assert num_tokens(server, {"type": "input_file", **file}) == wanted
    answer = chat(server, messages=[said([{"type": "file", "file": file}])], max_tokens=1)
    same = chat(server, messages=[said(text)], max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("file", "param"),
    [
        ({"file_data": f"data:application/pdf;base64,{PDF}"}, "messages[0].content[0]"),
        ({"file_data": PDF}, "messages[0].content[0]"),
        ({"file_data": "data:text/plain;base64,%%"}, "messages[0].content[0].file.file_data"),
        ({"file_data": "data:text/plain;base64,/w=="}, "messages[0].content[0].file.file_data"),
        ({"file_id": "file-1"}, "messages[0].content[0]"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_its_place(
    server: RunningServer, file: dict[str, str], param: str
) -> None:
    answer = chat(server, 400, messages=[said([{"type": "file", "file": file}])])
    assert answer["error"]["param"] == param
