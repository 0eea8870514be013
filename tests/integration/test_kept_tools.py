"""A conversation that was begun with tools is read on by requests that leave them out."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conversation import CODE, wait_until_saved
from tests.running_server import CHAT, RunningServer, running

CONFIG = 'default_model = "hearth-tiny"\nprewarm_share = 0\n'
RULES = f"You are an agent. The code word is {CODE}. " + " ".join(
    f"Rule {number}: say what was done, then go on to what is next." for number in range(20)
)
AGENTS = "# AGENTS.md\nBe brief.\n<environment_context>\n  <cwd>/p</cwd>\n</environment_context>"
TASK = "What is the code word?"
COMPACT = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."
SEAM_TOKENS = 4
"""How much of the end of what was said before may be computed again."""


def schema(*, turned: bool = False) -> dict[str, Any]:
    """A tool's schema, with its keys in one order or the other."""
    pairs = [("type", "object"), ("properties", {"at": {"type": "integer"}}), ("required", ["at"])]
    return dict(reversed(pairs) if turned else pairs)


def functions(*, turned: bool = False) -> list[dict[str, Any]]:
    return [
        {"name": name, "description": f"{name} something.", "parameters": schema(turned=turned)}
        for name in ("shell", "read", "write")
    ]


class Told(NamedTuple):
    """What an answer says of its prompt."""

    text: str
    num_prompt: int
    num_cached: int
    num_output: int
    rules: dict[str, int]
    reason: str | None
    calls: int


class Codex:
    """A session in the shape of Codex: everything in `input`, one `prompt_cache_key`."""

    def __init__(self, thread: str | None = "thread-1") -> None:
        self.thread = thread
        self.items: list[dict[str, Any]] = [
            item("developer", RULES),
            item("developer", "The sandbox is open."),
            item("user", AGENTS),
        ]

    def ask(self, server: RunningServer, text: str, *, tools: bool = True, **fields: Any) -> Told:
        """One request; its answer is what the next one carries, unless it had no tools."""
        asked = [*self.items, item("user", text)]
        body = {
            "input": asked,
            "tools": [{"type": "function", **one} for one in functions()] if tools else [],
            "tool_choice": "auto",
            "store": False,
            "reasoning": {"summary": "auto"},
            "prompt_cache_key": self.thread,
            "temperature": 0,
            "max_output_tokens": 40,
        }
        answer = post(server, "/v1/responses", body | fields)
        texts = [one for one in answer["output"] if one["type"] == "message"]
        said = "".join(part["text"] for one in texts for part in one["content"])
        if tools:
            self.items = [*asked, *answer["output"]]
        usage = answer["usage"]
        return Told(
            said,
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            rules_of(answer),
            answer["hearth"]["cache"]["reason"],
            sum(one["type"] == "function_call" for one in answer["output"]),
        )


def item(role: str, text: str) -> dict[str, Any]:
    kind = "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def post(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, {"model": "hearth-tiny"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def rules_of(answer: dict[str, Any]) -> dict[str, int]:
    return {one["rule"]: one["num_places"] for one in answer["hearth"]["prompt"]}


def check_continued(told: Told, before: Told) -> None:
    """All that was said before is read as it was, tools included."""
    assert told.num_cached >= before.num_prompt + before.num_output - SEAM_TOKENS
    assert told.rules["kept_tools"] == 3
    assert told.calls == 0
    assert told.text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("kept"), config=CONFIG) as server:
        yield server
        assert "Traceback" not in server.stderr


def test_codex_compaction_is_computed_from_its_own_words_on_also_after_a_kill(tmp_path: Path):
    codex = Codex()
    with running(tmp_path, config=CONFIG) as server:
        codex.ask(server, TASK)
        before = codex.ask(server, "Say it again.")
        check_continued(codex.ask(server, COMPACT, tools=False), before)
        wait_until_saved(server, before.num_prompt + before.num_output - SEAM_TOKENS)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(tmp_path, config=CONFIG) as server:
        check_continued(codex.ask(server, COMPACT, tools=False), before)
        after = codex.ask(server, "And again.")
        assert after.num_cached >= before.num_prompt + before.num_output - SEAM_TOKENS
        assert "kept_tools" not in after.rules


RAIN = "Say it again, and say how the rain falls on the hearth."


@pytest.mark.parametrize(
    ("context", "more", "usual"),
    [
        pytest.param(1024, "How does the rain fall?", "", id="small"),
        (2048, RAIN, ""),
        (2048, RAIN, "max_tokens = 1024\n"),
        (2048, RAIN, "[limits.generate]\noutput_tokens = 1024\n"),
    ],
)
def test_codex_compaction_near_the_full_window_is_computed_from_its_own_words_on(
    tmp_path: Path, context: int, more: str, usual: str
):
    """Codex compacts when nine tenths of the window are used, and says no `max_output_tokens`."""
    config = f"{CONFIG}[models.hearth-tiny]\ncontext = {context}\n{usual}"
    with running(tmp_path, config=config) as server:
        codex = Codex()
        before = codex.ask(server, TASK)
        while before.num_prompt + before.num_output <= 0.87 * context:
            before = codex.ask(server, more)
        told = codex.ask(server, COMPACT, tools=False, max_output_tokens=None)
        assert told.num_prompt > 7 * context // 8
        check_continued(told, before)


def test_another_thread_that_says_the_same_has_no_tools_and_is_told_why(server: RunningServer):
    codex = Codex("mine")
    codex.ask(server, TASK)
    another = Codex("another")
    another.items = codex.items
    told = another.ask(server, COMPACT, tools=False)
    assert told.num_cached < 16
    assert told.reason == "tools_removed"
    assert "kept_tools" not in told.rules


def test_a_title_that_is_asked_for_behind_the_conversation_reuses_it(server: RunningServer):
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": one} for one in functions()]
    fixed = {"temperature": 0, "max_tokens": 40}
    first = post(server, CHAT, {"messages": messages, "tools": tools} | fixed)
    said = first["choices"][0]["message"]
    title = {"role": "user", "content": "Give this conversation a title."}
    answer = post(server, CHAT, {"messages": [*messages, said, title]} | fixed)
    usage = first["usage"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - SEAM_TOKENS
    assert rules_of(answer)["kept_tools"] == 3
    assert answer["choices"][0]["finish_reason"] != "tool_calls"


def test_a_conversation_goes_on_in_another_protocol_with_its_tools_spelled_anew(
    server: RunningServer,
):
    rules = f"{RULES} You speak two protocols."
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": one} for one in functions()]
    asked = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 40}
    first = post(server, CHAT, asked)
    text = first["choices"][0]["message"]["content"]
    spelled = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in reversed(functions(turned=True))
    ]
    body = {
        "system": rules,
        "messages": [
            {"role": "user", "content": TASK},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Say it again."},
        ],
        "tools": spelled,
        "temperature": 0,
        "max_tokens": 20,
    }
    answer = post(server, "/v1/messages", body)
    usage = first["usage"]
    cached = answer["usage"]["cache_read_input_tokens"]
    assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - SEAM_TOKENS
    assert rules_of(answer)["tool_spelling"] == 3
    assert json.dumps(functions()) != json.dumps(functions(turned=True))
