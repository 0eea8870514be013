"""What the official Node SDKs and the AI SDK see of a running server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.clients.node_clients import installed
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PACKAGES = (
    "openai@7.55.0",
    "@anthropic-ai/sdk@1.11.0",
    "ai@7.0.173",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/anthropic@4.0.105",
    "@ai-sdk/openai@4.0.118",
    "zod@4.1.12",
)
PROVIDERS = ("openai-compatible", "openai-chat", "openai-responses", "anthropic")
ENDS = ("stop", "length", "end_turn", "max_tokens")


@pytest.fixture(scope="module")
def found(tiny_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each check of the script found."""
    project = installed("sdks", *PACKAGES)
    script = project.folder / "sdks.mjs"
    shutil.copy(Path(__file__).parent / "sdks.mjs", script)
    home = tmp_path_factory.mktemp("node_home")
    ended = project.run(script, tiny_server.url, MODEL, home=home)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def is_forecast(asked: dict[str, Any]) -> bool:
    return isinstance(asked["city"], str) and isinstance(asked["days"], int) and len(asked) == 2


def test_chat_is_the_same_streamed_and_whole(found: dict[str, Any]) -> None:
    chat = found["openai chat"]
    assert chat["same"], chat
    assert chat["reason"] in ENDS
    assert chat["text"]


def test_forced_tools_have_arguments_of_their_schema(found: dict[str, Any]) -> None:
    openai, anthropic = found["openai tools"], found["anthropic tools"]
    assert openai["name"] == anthropic["name"] == "get_weather"
    assert is_forecast(openai["arguments"])
    assert is_forecast(anthropic["input"])
    assert anthropic["reason"] == "tool_use"


def test_responses_are_kept_and_continued(found: dict[str, Any]) -> None:
    expected = {"same": True, "status": "completed", "continued": True}
    assert found["openai responses"] == expected
    assert found["openai models"] == {"listed": True}


def test_messages_are_the_same_streamed_and_whole_and_counted(found: dict[str, Any]) -> None:
    messages = found["anthropic messages"]
    assert (messages["same"], messages["exact"]) == (True, True), messages
    assert messages["reason"] in ENDS


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_ai_sdk_writes_text_calls_tools_and_makes_objects(
    found: dict[str, Any], provider: str
) -> None:
    text, tools, made = (found[f"ai {kind} {provider}"] for kind in ("text", "tools", "object"))
    assert text["same"], text
    assert text["reason"] in ENDS
    assert (tools["name"], tools["invalid"]) == ("get_weather", False), tools
    assert is_forecast(tools["input"])
    assert made.keys() == {"object"}, made
    assert (type(made["object"]["days"]), type(made["object"]["is_wet"])) == (int, bool)
