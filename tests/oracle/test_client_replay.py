"""Agent clients' conversations over HTTP: each turn reuses what it did when the table was written.

`expected_reuse.json` has, by family of model and client, how many tokens of each turn's prompt were
reused. `HEARTH_TEST_WRITE_REUSE=1` has the test write it instead. A little may be missing; where a
client changed what it had said, or the server was restarted, a block more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load_file, save_file

from runtime.types import ChatPrompt, Message, ToolCall
from tests.calm_model import END, saying
from tests.client_shapes import (
    LAST_OF_ITS_DAY,
    SHAPES,
    Conversation,
    Said,
    prompt_after_summary,
    summary_prompt,
    with_clock,
)
from tests.oracle.talking import BLOCK, SETTINGS, TOO_SLOW
from tests.running_server import CHAT, RunningServer, running
from tests.tiny_models import TOOL_CALL, write_model

TABLE = Path(__file__).parent / "expected_reuse.json"
IS_WRITTEN = os.environ.get("HEARTH_TEST_WRITE_REUSE") == "1"
SHARE = 0.005
"""Of a prompt so much may be missing."""
THOUGHT = "let me see"
CALLS = f"{THOUGHT}</think><tool_call>{TOOL_CALL}</tool_call>{END}"
SAYS = f"{THOUGHT}</think>while rain falls{END}"
NUM_TURNS, NUM_STARTS = LAST_OF_ITS_DAY + 4, 3


class Turn(msgspec.Struct):
    """How much of a prompt was reused. A client that `branches` changed what it had said."""

    num_prompt: int
    num_reused: int
    branches: bool


Table = dict[str, dict[str, list[Turn]]]


def message_of(one: Message) -> dict[str, Any]:
    """As the Chat Completions API has it."""
    body: dict[str, Any] = {"role": one.role, "content": one.text}
    if one.reasoning:
        body["reasoning_content"] = one.reasoning
    if one.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in one.tool_calls
        ]
    if one.tool_call_id:
        body["tool_call_id"] = one.tool_call_id
    return body


def body_of(prompt: ChatPrompt) -> dict[str, Any]:
    """A request, but for what is to be said."""
    body: dict[str, Any] = {"messages": [message_of(one) for one in prompt.messages]}
    body["chat_template_kwargs"] = {"enable_thinking": True}
    tools = [one for one in prompt.tools if not one.is_deferred]
    if tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": one.name,
                    "description": one.description,
                    "parameters": json.loads(one.parameters),
                },
            }
            for one in tools
        ]
    return body


class Replay:
    """All clients talk with one model, turn by turn."""

    def __init__(self, folder: Path, family: str) -> None:
        self.home, self.model = folder / "home", folder / "models" / "m"
        write_model(self.model, family)
        weights = load_file(self.model / "model.safetensors")
        weights["lm_head.weight"] *= 1e-3  # its own opinion is weak: it says what it is told to
        save_file(weights, self.model / "model.safetensors", {"format": "mlx"})
        self.conversations = [Conversation(shape) for shape in (*SHAPES, with_clock())]
        self.turns: dict[str, list[Turn]] = {one.shape.client: [] for one in self.conversations}
        self.excused: set[tuple[str, int]] = set()
        self.server: RunningServer

    @contextmanager
    def served(self) -> Generator[None]:
        config = f'models_dir = "{self.model.parent}"\ndefault_model = "m"\n{SETTINGS}'
        config += "[models.m]\ncontext = 16384\n"
        with running(self.home, config=config) as self.server:
            self.server.wait_for_the_store()
            yield
            assert "Traceback" not in self.server.stderr, self.server.stderr

    def run(self) -> dict[str, list[Turn]]:
        for start in range(NUM_STARTS):
            with self.served():
                for number in range(NUM_TURNS // NUM_STARTS):
                    for one in self.conversations:
                        self.turn(one, is_first=start > 0 and number == 0)
                if start == NUM_STARTS - 1:
                    for one in self.conversations:
                        self.summarise(one)
        return self.turns

    def turn(self, conversation: Conversation, *, is_first: bool) -> None:
        number = conversation.num_turns
        is_call = number % 5 < 4
        said = self.ask(
            conversation,
            conversation.prompt(),
            CALLS if is_call else SAYS,
            branches=is_first
            or number == LAST_OF_ITS_DAY + 1
            or conversation.shape.client == "openclaw",
        )
        assert said.calls if is_call else said.text == "while rain falls"
        conversation.answered(said)

    def summarise(self, conversation: Conversation) -> None:
        """The client asks for a summary, and goes on with it in place of what was said."""
        said = self.ask(conversation, summary_prompt(conversation), SAYS, branches=True)
        self.ask(conversation, prompt_after_summary(conversation, said.text), SAYS, branches=True)

    def ask(
        self, conversation: Conversation, prompt: ChatPrompt, words: str, *, branches: bool
    ) -> Said:
        client = conversation.shape.client
        body = body_of(prompt) | saying(self.model, words) | {"max_tokens": 60}
        body["session_id"] = conversation.session_id
        headers = {"user-agent": f"{client}/1.0"}
        response = self.server.request("POST", CHAT, json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        usage, turns = answer["usage"], self.turns[client]
        if answer["hearth"]["cache"]["reason"] == TOO_SLOW:
            self.excused.add((client, len(turns)))
        num_reused = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append(Turn(usage["prompt_tokens"], num_reused, branches))
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == THOUGHT, message
        calls = [
            ToolCall(one["id"], one["function"]["name"], one["function"]["arguments"])
            for one in message.get("tool_calls") or ()
        ]
        return Said(message["content"] or "", THOUGHT, calls)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "qwen3_next",
        *(
            pytest.param(one, marks=pytest.mark.soak)
            for one in ("gemma3_text", "gpt_oss", "falcon_h1")
        ),
    ],
)
def test_each_turn_of_a_client_reuses_what_it_did(tmp_path: Path, family: str):
    replay = Replay(tmp_path, family)
    turns = replay.run()
    table: Table = msgspec.json.decode(TABLE.read_bytes(), type=Table) if TABLE.exists() else {}
    if IS_WRITTEN:
        table[family] = turns
        TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    for client, expected in table[family].items():
        assert len(turns[client]) == len(expected)
        for number, (turn, before) in enumerate(zip(turns[client], expected, strict=True)):
            assert turn.num_prompt == before.num_prompt, (client, number)
            missing = before.num_reused - turn.num_reused
            allowed = SHARE * turn.num_prompt + BLOCK * before.branches
            is_excused = (client, number) in replay.excused
            assert missing <= allowed or is_excused, (client, number, turn, before)
    assert len(replay.excused) < NUM_TURNS
