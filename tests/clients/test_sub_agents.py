"""Programs that start agents of their own, as their users install them: each conversation goes on
from all that was computed for it, whatever the others of the program ask in between.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.programs import (
    RECOMPUTED,
    ROOMY,
    SCRIPTED,
    Request,
    asked_since,
    claude_program,
    claude_turn,
    conversations,
    opencode_home,
    opencode_program,
    opencode_turn,
    scripted_config,
)
from tests.clients.scripted_model import Step
from tests.running_server import running

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

TASKS = ("first", "second", "third", "fourth")
"""The first two one after the other, then two at once."""
NUM_TURNS = 4
"""Of the program itself: one that begins, two after one agent each, one after two."""
Call = tuple[str, dict[str, Any]]


class Program(NamedTuple):
    """A program with agents: how it is asked, and how its model calls its tools."""

    ask: Callable[[Path, str, str], None]
    start: Callable[[str], Call]
    read: Callable[[Path], Call]
    path: str
    num_side_requests: int


def ask_opencode(home: Path, url: str, text: str) -> None:
    program = opencode_program()
    opencode_turn(program, opencode_home(home, url, "chat", SCRIPTED), text, model=SCRIPTED)


def ask_claude(home: Path, url: str, text: str) -> None:
    claude_turn(claude_program(), home, url, "-p", text, model=SCRIPTED, context=ROOMY)


PROGRAMS = {
    "opencode": Program(
        ask_opencode,
        lambda prompt: (
            "task",
            {"description": "Look for it", "prompt": prompt, "subagent_type": "general"},
        ),
        lambda file: ("read", {"filePath": str(file)}),
        "/v1/chat/completions",
        num_side_requests=1,
    ),
    "claude-code": Program(
        ask_claude,
        lambda prompt: (
            "Agent",
            {"description": "Look for it", "prompt": prompt, "run_in_background": False},
        ),
        lambda file: ("Read", {"file_path": str(file)}),
        "/v1/messages",
        num_side_requests=0,
    ),
}


def script(program: Program, home: Path) -> list[Step]:
    """Four agents read a file each; what it says is their answer, and by that the program goes on.

    An agent begins at `@@task@@`, and ends with what it has read: `@@task-read@@`.
    """
    answers = {task: f"The file of the {task} was read." for task in TASKS}

    def started(*tasks: str) -> tuple[Call, ...]:
        return tuple(program.start(f"Read the file of @@{task}@@") for task in tasks)

    def agent(task: str) -> list[Step]:
        file = home / f"{task}.txt"
        return [
            Step(calls=(program.read(file),), cue=f"@@{task}@@"),
            Step(answers[task], cue=f"@@{task}-read@@"),
        ]

    return [
        Step("Nothing."),
        Step("Let us look.\n", started("first"), cue="@@begin@@"),
        *agent("first"),
        Step(calls=started("second"), cue=answers["first"]),
        *agent("second"),
        Step(calls=started("third", "fourth"), cue=answers["second"]),
        *agent("third"),
        *agent("fourth"),
        Step("Nobody can know before both answered.", cue=answers["third"]),
        Step("All of them have answered.", cue=answers["fourth"]),
        Step("Files that say something", cue="You are a title generator"),
    ]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where a program works: the files that its agents read."""
    folder = tmp_path / "work"
    folder.mkdir()
    for task in TASKS:
        (folder / f"{task}.txt").write_text(f"@@{task}-read@@\n")
    return folder


@pytest.mark.parametrize("name", PROGRAMS)
def test_agents_of_a_program_and_the_program_itself_lose_nothing_to_one_another(
    tmp_path: Path, home: Path, name: str
) -> None:
    program = PROGRAMS[name]
    config = scripted_config(tmp_path / "models", script(program, home))
    num_asked = NUM_TURNS + 2 * len(TASKS) + program.num_side_requests
    with running(tmp_path / "home", config=config) as server:
        program.ask(home, server.url, "Find out what @@begin@@ is about.")
        asked = asked_since(server, 0, num_asked)
        assert "Traceback" not in server.stderr
    assert len(asked) == num_asked
    assert {(one.path, one.status) for one in asked} == {(program.path, 200)}
    check(conversations(asked), program.num_side_requests)


def check(found: list[list[Request]], num_side_requests: int) -> None:
    """Every turn finds all of the one before, and an agent what is the same in another's prompt."""
    agents = [one for one in found if len(one) == 2]
    assert len(agents) == len(TASKS)
    assert sorted(map(len, found)) == [1] * num_side_requests + [2] * len(TASKS) + [NUM_TURNS]
    for turn, _ in agents[1:]:
        assert turn.prompt - turn.cached <= RECOMPUTED, agents
