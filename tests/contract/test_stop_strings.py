"""Stop strings end an answer from its first character on, in every protocol that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from tests.calm_model import END, write_model_that_says
from tests.running_server import CHAT, RunningServer, running

SAID = f"<think>let me</think>\nsee the fox{END}"
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_start|><think>{% if not enable_thinking %}</think>{% endif %}\
{% endif %}"""
"""Opens the thoughts of an answer, or has them closed."""
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "What do you see?"}]}


class Protocol(NamedTuple):
    """Where it is asked, with a stop string and thinking or not, and the text of its answer."""

    path: str
    body: Callable[[str, bool], dict[str, Any]]
    text: Callable[[Any], str]


def _messages(stop: str, thinks: bool) -> dict[str, Any]:
    on = {"type": "enabled", "budget_tokens": 1024}
    thinking = on if thinks else {"type": "disabled"}
    return TALK | {"stop_sequences": [stop], "thinking": thinking, "max_tokens": 2048}


def _said_in_blocks(answer: Any) -> str:
    return "".join(one["text"] for one in answer["content"] if one["type"] == "text")


PROTOCOLS: Mapping[str, Protocol] = {
    "chat": Protocol(
        CHAT,
        lambda stop, thinks: (
            TALK | {"stop": [stop], "reasoning_effort": "high" if thinks else "none"}
        ),
        lambda answer: answer["choices"][0]["message"]["content"] or "",
    ),
    "messages": Protocol("/v1/messages", _messages, _said_in_blocks),
    "ollama": Protocol(
        "/api/chat",
        lambda stop, thinks: TALK | {"options": {"stop": [stop]}, "think": thinks, "stream": False},
        lambda answer: answer["message"]["content"],
    ),
    "ollama's generate": Protocol(
        "/api/generate",
        lambda stop, thinks: {
            "prompt": "What do you see?",
            "options": {"stop": [stop]},
            "think": thinks,
            "stream": False,
        },
        lambda answer: answer["response"],
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model_that_says(folder / "says", SAID, TEMPLATE)
    config = f'models_dir = "{folder}"\ndefault_model = "says"\n'
    with running(tmp_path_factory.mktemp("home"), config=config) as server:
        yield server


def asked(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, {"model": "says"} | body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("thinks", [True, False], ids=["behind thoughts", "thoughts closed"])
@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("s", ""),
        ("see t", ""),
        ("e f", "see th"),
        ("fox", "see the "),
        ("\n", "see the fox"),
        ("\nsee", "see the fox"),
        ("me", "see the fox"),
    ],
)
def test_a_stop_string_ends_the_answer_and_nothing_that_is_before_it(
    server: RunningServer, name: str, thinks: bool, stop: str, said: str
) -> None:
    protocol = PROTOCOLS[name]
    answer = asked(server, protocol.path, protocol.body(stop, thinks))
    assert protocol.text(answer).lstrip() == said
    if name == "messages":
        reason = ("end_turn", None) if said == "see the fox" else ("stop_sequence", stop)
        assert (answer["stop_reason"], answer["stop_sequence"]) == reason


@pytest.mark.parametrize(
    ("stop", "said"), [(" ", ""), (" the f", ""), ("e f", " th"), ("x", " the fo"), ("see", None)]
)
def test_a_stop_string_ends_a_completion_from_its_first_character_on(
    server: RunningServer, stop: str, said: str | None
) -> None:
    answer = asked(server, "/v1/completions", {"prompt": "let me\nsee", "stop": stop})
    assert answer["choices"][0]["text"] == (" the fox" if said is None else said)
