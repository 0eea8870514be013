"""System texts that two clients put where they cost the rest, asked of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from runtime.prompt.openclaw import FIRST_LINE
from tests.running_server import CHAT, RunningServer, hearth, running

CONFIG = """
default_model = "hearth-tiny"
prewarm_share = 0

[own_rules.build_stamp]
client = "opencode"
begins = "Build: "
"""
OPENCODE = {"user-agent": "opencode/1.0"}
RULES = " ".join(f"Rule {n}: say what was done, then go on to what is next." for n in range(20))
SKILLS = " ".join(f"Skill {n}: look into the workspace and say what was found." for n in range(40))
CLAUDE_CODE = {"user-agent": "claude-cli/2.1.329 (external, sdk-cli)"}


class Told(NamedTuple):
    """An answer, and what it says of its prompt."""

    text: str
    num_prompt: int
    num_cached: int
    rules: set[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("fields"), config=CONFIG) as server:
        yield server
        assert "Traceback" not in server.stderr


def ask(server: RunningServer, messages: list[dict[str, str]], **headers: str) -> Told:
    body: dict[str, Any] = {"model": "hearth-tiny", "messages": messages}
    fixed = {"temperature": 0, "max_tokens": 8}
    response = server.request("POST", CHAT, json=body | fixed, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    return Told(
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        {one["rule"] for one in answer["hearth"].get("prompt") or ()},
    )


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_new_session_of_claude_code_shares_all_but_its_users_words(server: RunningServer):
    ways = [
        [said("system", RULES), said("user", task), said("system", SKILLS)]
        for task in ("Fix the bug in parse.py.", "Write a page about rivers.")
    ]
    ask(server, ways[0], **CLAUDE_CODE)
    second = ask(server, ways[1], **CLAUDE_CODE)
    assert second.num_cached >= 0.95 * second.num_prompt
    assert "system_first" in second.rules


def test_a_clock_in_openclaws_system_prompt_costs_the_last_answer_and_what_is_new(
    server: RunningServer,
):
    history: list[dict[str, str]] = []
    before = 0
    for number in range(3):
        clock = f"Current date and time: Saturday, November 21, 2026 at 11:2{number} AM"
        history.append(said("user", f"Question {number}: what is next, and why?"))
        told = ask(server, [said("system", f"{FIRST_LINE}\n\n{clock}\n{RULES}"), *history])
        assert "moved_fields" in told.rules
        history.append(said("assistant", told.text))
        if number:
            # All of the prompt before but the clock at its end and what opened the answer.
            assert told.num_cached >= before - 80
        before = told.num_prompt


def test_a_rule_of_the_owners_has_a_line_read_last_for_its_client_alone(server: RunningServer):
    rules = RULES.replace("Rule", "Item")
    asked = [
        [said("system", f"You write code.\nBuild: {number}\n{rules}"), said("user", "Go on.")]
        for number in (7, 8)
    ]
    other = [ask(server, one) for one in asked]
    assert all("own_rules.build_stamp" not in told.rules for told in other)
    assert other[1].num_cached < 100
    first, second = (ask(server, one, **OPENCODE) for one in asked)
    assert "own_rules.build_stamp" in first.rules & second.rules
    assert second.num_cached >= 0.9 * second.num_prompt


def test_a_rule_of_the_owners_is_tried_on_a_recorded_request(server: RunningServer):
    sent = [said("system", "You write code.\nBuild: 7\nBe brief."), said("user", "Go on.")]
    done = hearth(
        *("prompt", "explain", "-", "--client", "opencode", "--json"),
        stdin=json.dumps({"model": "hearth-tiny", "messages": sent}),
        HEARTH_HOME=str(server.home),
        HEARTH_PORT=str(server.port),
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["parts"]
    (moved,) = [part for part in parts if "Build: 7" in part["text"]]
    assert "own_rules.build_stamp" in moved["rules"]
    text = "".join(part["text"] for part in parts)
    places = [text.index(one) for one in ("You write code.\nBe brief.", "Go on.", "Build: 7")]
    assert places == sorted(places)
