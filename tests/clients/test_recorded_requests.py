"""Requests in the shape in which heavier clients were seen to send them: aider, Open WebUI,
qwen-code, and the probes of Claude Code and of Codex.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, OTHER_NAME
from tests.running_server import CHAT, RunningServer, events_of

RULES = "Act as an expert software developer. " + " ".join(
    f"Rule {number}: say what was done, then go on to what is next." for number in range(20)
)
FILE = "the file\nhello.py\n```\nprint('{}')\n```"


def streamed(server: RunningServer, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of a streamed answer, and the chunk that ends it."""
    response = server.post(CHAT, {"model": MODEL, "stream": True} | body)
    assert response.status_code == 200, response.text
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["stop"]
    return "".join(one["delta"].get("content") or "" for one in choices), chunks[-1]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("path", ["/", "/api/hello"])
def test_claude_code_finds_somebody_at_home(tiny_server: RunningServer, path: str) -> None:
    assert tiny_server.request("HEAD", path).status_code == 200


def test_codex_and_ollamas_clients_find_the_model(tiny_server: RunningServer) -> None:
    assert tiny_server.get("/api/version").json()["version"]
    listed = [
        one["name"].removesuffix(":latest") for one in tiny_server.get("/api/tags").json()["models"]
    ]
    assert MODEL in listed
    assert {one["id"] for one in tiny_server.get("/v1/models").json()["data"]} >= {MODEL}


def test_aider_rewrites_files_behind_the_history_and_has_commits_named_by_a_small_model(
    tiny_server: RunningServer,
) -> None:
    head = [
        said("system", RULES),
        said("user", "Change get_factorial() to use math.factorial"),
        said("assistant", "To make this change we need to modify the file."),
        said("user", "I switched to a new code base."),
        said("assistant", "Ok."),
    ]
    history: list[dict[str, str]] = []
    cached = 0
    for number in range(3):
        files = [said("user", FILE.format(number)), said("assistant", "Ok, I will use them.")]
        question = said("user", f"Say hello for step {number}.")
        body = {"messages": [*head, *history, *files, question], "temperature": 0, "max_tokens": 60}
        text, last = streamed(tiny_server, body)
        cached = last["hearth"]["cache"]["cached_tokens"]
        history += [question, said("assistant", text)]
        commit = [said("system", "Write a one-line commit message."), said("user", "# diff --git")]
        named = tiny_server.post(
            CHAT, {"model": OTHER_NAME, "messages": commit, "temperature": 0, "max_tokens": 20}
        )
        assert named.json()["choices"][0]["message"]["content"]
    # What stands before the files is found again, and the small model has displaced nothing.
    counted = tiny_server.post(
        "/v1/messages/count_tokens", {"model": MODEL, "messages": head[1:], "system": RULES}
    )
    assert cached >= counted.json()["input_tokens"] - 8
    assert [one["id"] for one in tiny_server.get("/running").json()["models"]] == [MODEL]


def test_open_webui_streams_without_usage_and_asks_for_a_title(tiny_server: RunningServer) -> None:
    question = said("user", "Hello!")
    text, last = streamed(tiny_server, {"messages": [question]})
    assert "usage" not in last or last["usage"] is None
    task = "### Task:\nGenerate a concise, 3-5 word title with an emoji.\n### Output:\nJSON"
    body = {"model": MODEL, "messages": [said("user", task)], "stream": False, "max_tokens": 30}
    title = tiny_server.post(CHAT, body | {"max_completion_tokens": 30})
    assert title.json()["choices"][0]["message"]["content"]
    # "Continue response" sends the answer so far as the last message.
    half = text[: len(text) // 2]
    rest, _ = streamed(
        tiny_server, {"messages": [question, said("assistant", half)], "temperature": 0}
    )
    assert rest
    assert not rest.startswith(half)


def test_qwen_code_sends_a_tools_result_as_a_list(tiny_server: RunningServer) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": "{}"},
    }
    messages: list[dict[str, Any]] = [
        said("system", RULES),
        said("user", "The current date is: Saturday, November 21, 2026.\nWhat is the weather?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "Light rain, 9 degrees"}],
        },
    ]
    text, _ = streamed(tiny_server, {"messages": messages, "temperature": 0, "max_tokens": 60})
    assert text
