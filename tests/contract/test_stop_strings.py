"""Stop strings of a model that thinks, where a request can tell a model what to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.calm_model import END, saying
from tests.running_server import CHAT, RunningServer

SAID = f"let me</think>\nsee the fox{END}"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "What do you see?"}]}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, TALK | {"stop": ["\n"], "reasoning_effort": "high"}),
    "responses": (
        "/v1/responses",
        {"input": "What do you see?", "stop": ["\n"], "reasoning": {"effort": "high"}},
    ),
}


def said(protocol: str, answer: Any) -> str:
    if protocol == "chat":
        return answer["choices"][0]["message"]["content"]
    (message,) = [one for one in answer["output"] if one["type"] == "message"]
    return message["content"][0]["text"]


@pytest.mark.parametrize("protocol", ASKED)
def test_the_blank_lines_behind_thoughts_do_not_end_an_answer(
    calm_server: RunningServer, calm: Path, protocol: str
) -> None:
    path, body = ASKED[protocol]
    response = calm_server.post(path, {"model": "calm"} | body | saying(calm, SAID))
    assert response.status_code == 200, response.text
    assert said(protocol, response.json()) == "see the fox"
