"""Two programs on one model at the same time, as their users install them: each reads, edits and
runs a file, and each of its turns goes on from all of the one before, as when it is alone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.programs import (
    ROOMY,
    SCRIPTED,
    TASK_S,
    Request,
    asked_since,
    claude_program,
    claude_turn,
    codex_home,
    codex_program,
    codex_turn,
    conversations,
    opencode_home,
    opencode_program,
    opencode_turn,
    pi_home,
    pi_program,
    pi_turn,
    qwen_home,
    qwen_program,
    qwen_turn,
    scripted_config,
)
from tests.clients.scripted_model import Step
from tests.running_server import RunningServer, running
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]

NUM_TURNS = 6
NUM_MEETINGS = 3
NUM_TURNS_BEFORE_KILL = 3
"""The last of them calls the second meeting."""
BEFORE, AFTER = "greeting=before", "greeting=after"
PATCH = f"*** Begin Patch\n*** Update File: hello.sh\n@@\n-{BEFORE}\n+{AFTER}\n*** End Patch"
Call = tuple[str, dict[str, Any]]


class Program(NamedTuple):
    """How a program is asked, and how its model reads `hello.sh`, edits it, and runs a command."""

    path: str
    num_side_requests: int
    ask: Callable[[Path, str, str], int]
    read: Callable[[Path], Call]
    edit: Callable[[Path], Call]
    run: Callable[[str], Call]


def ask_claude(home: Path, url: str, text: str) -> int:
    allowed = ("--allowedTools", "Read,Edit,Bash")
    return claude_turn(
        claude_program(), home, url, "-p", text, *allowed, model=SCRIPTED, context=ROOMY
    )


def ask_codex(home: Path, url: str, text: str) -> int:
    return codex_turn(codex_program(), codex_home(home, url, SCRIPTED), text)


def ask_opencode(home: Path, url: str, text: str) -> int:
    opencode_home(home, url, "chat", SCRIPTED)
    return opencode_turn(opencode_program(), home, text, model=SCRIPTED)


def ask_pi(home: Path, url: str, text: str) -> int:
    pi_home(home, url, SCRIPTED)
    return pi_turn(pi_program(), home, "chat", "-p", text, model=SCRIPTED)


def ask_qwen(home: Path, url: str, text: str) -> int:
    return qwen_turn(qwen_program(), qwen_home(home), url, text, model=SCRIPTED)


PROGRAMS = {
    "claude-code": Program(
        "/v1/messages",
        0,
        ask_claude,
        lambda file: ("Read", {"file_path": str(file)}),
        # It sends it back with `"replace_all": false`, as the tool's schema says.
        lambda file: (
            "Edit",
            {
                "file_path": str(file),
                "old_string": BEFORE,
                "new_string": AFTER,
            },
        ),
        lambda command: ("Bash", {"command": command, "timeout": 600_000}),
    ),
    "codex": Program(
        "/v1/responses",
        0,
        ask_codex,
        lambda file: ("exec_command", {"cmd": f"cat {file.name}"}),
        lambda _: ("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"}),
        lambda command: ("exec_command", {"cmd": command, "yield_time_ms": 30_000}),
    ),
    "opencode": Program(
        "/v1/chat/completions",
        1,
        ask_opencode,
        lambda file: ("read", {"filePath": str(file)}),
        lambda file: (
            "edit",
            {"filePath": str(file), "oldString": BEFORE, "newString": AFTER},
        ),
        lambda command: ("bash", {"command": command, "timeout": 600_000}),
    ),
    "pi": Program(
        "/v1/chat/completions",
        0,
        ask_pi,
        lambda file: ("read", {"path": str(file)}),
        lambda file: (
            "edit",
            {"path": str(file), "edits": [{"oldText": BEFORE, "newText": AFTER}]},
        ),
        lambda command: ("bash", {"command": command}),
    ),
    "qwen-code": Program(
        "/v1/chat/completions",
        0,
        ask_qwen,
        lambda file: ("read_file", {"file_path": str(file)}),
        lambda file: (
            "edit",
            {"file_path": str(file), "old_string": BEFORE, "new_string": AFTER},
        ),
        lambda command: ("run_shell_command", {"command": command, "is_background": False}),
    ),
}
PAIRS = (("claude-code", "pi"), ("opencode", "codex"), ("qwen-code", "codex"))


class Desk:
    """Where a program works: `hello.sh`, and places at which it waits for somebody."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.program = PROGRAMS[name]
        self.home = root / name
        self.file = self.home / "hello.sh"

    def script(self) -> list[Step]:
        """What the model says to it; only when the edited file is run there is an end."""
        run, meets = self.program.run, [f"sh meet{i}.sh" for i in range(NUM_MEETINGS)]
        return [
            Step(f"{self.name} begins.\n", (run(meets[0]),), cue=f"@@{self.name}-begin@@"),
            Step(calls=(self.program.read(self.file),)),
            Step(calls=(run(meets[1]),)),
            Step(calls=(self.program.edit(self.file),)),
            Step(calls=(run(f"sh hello.sh; {meets[2]}"),)),
            Step(f"{self.name} is done.", cue=f"@@{self.name}-after@@"),
        ]

    def lay(self, meetings: Sequence[str]) -> None:
        """Everything as it is at the beginning; each meeting is a command."""
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.file.write_text(f'{BEFORE}\necho "@@{self.name}-$greeting@@"\n')
        for number, command in enumerate(meetings):
            (self.home / f"meet{number}.sh").write_text(f"{command}\n")

    def work(self, server: RunningServer) -> None:
        self.program.ask(self.home, server.url, f"Please do @@{self.name}-begin@@.")
        assert self.file.read_text().startswith(AFTER)

    def turns(self, requests: Sequence[Request]) -> list[Request]:
        """Its requests, each of which goes on from all of the one before."""
        own = [one for one in requests if one.path == self.program.path]
        assert {one.status for one in own} == {200}
        found = sorted(conversations(own), key=len)
        assert [len(one) for one in found] == [1] * self.program.num_side_requests + [NUM_TURNS]
        return found[-1]

    @property
    def num_requests(self) -> int:
        return NUM_TURNS + self.program.num_side_requests


def beyond(turns: Sequence[Request]) -> list[int]:
    """What each turn from the second on had to compute of the turn before it."""
    return [before.known - after.cached for before, after in pairwise(turns)]


def both_work(desks: Sequence[Desk], server: RunningServer) -> None:
    with ThreadPoolExecutor(len(desks)) as threads:
        for one in [threads.submit(desk.work, server) for desk in desks]:
            one.result()


def model_for(folder: Path, desks: Sequence[Desk]) -> str:
    """Writes the model that all of them ask; the server's configuration."""
    steps = [Step("Nothing."), *(step for desk in desks for step in desk.script())]
    title = Step("A file is changed", cue="You are a title generator")
    return scripted_config(folder, [*steps, title])


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_programs_that_work_at_once_reuse_what_they_reuse_alone(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    desks = [Desk(tmp_path / "work", name) for name in names]
    config = model_for(tmp_path / "models", desks)
    num_requests = sum(desk.num_requests for desk in desks)
    with running(tmp_path / "alone", config=config) as server:
        for desk in desks:
            desk.lay(["true"] * NUM_MEETINGS)
            desk.work(server)
        alone = asked_since(server, 0, num_requests)
    meetings = [tmp_path / f"meeting{i}" for i in range(NUM_MEETINGS)]
    for meeting in meetings:
        os.mkfifo(meeting)
    # A pipe is opened for writing when somebody reads it, and the other way round.
    for desk, does in zip(desks, ("echo >", "cat > /dev/null <"), strict=True):
        desk.lay([f"{does} {meeting}" for meeting in meetings])
    with running(tmp_path / "at-once", config=config) as server:
        both_work(desks, server)
        at_once = asked_since(server, 0, num_requests)
        assert "Traceback" not in server.stderr
    assert len(alone) == len(at_once) == num_requests
    first, second = ([at_once.index(turn) for turn in desk.turns(at_once)] for desk in desks)
    # They met after the first, third and fifth turns of both.
    for turn in (0, 2, 4):
        assert max(first[turn], second[turn]) < min(first[turn + 1], second[turn + 1])
    for desk in desks:
        assert beyond(desk.turns(at_once)) == beyond(desk.turns(alone)) == [0] * (NUM_TURNS - 1)


def test_programs_at_once_go_on_where_they_were_when_the_server_is_killed(tmp_path: Path) -> None:
    desks = [Desk(tmp_path / "work", name) for name in ("codex", "pi")]
    config = model_for(tmp_path / "models", desks)
    arrived = [tmp_path / f"{desk.name}-is-there" for desk in desks]
    gates = [tmp_path / f"{desk.name}-may-go-on" for desk in desks]
    for desk, mark, gate in zip(desks, arrived, gates, strict=True):
        os.mkfifo(gate)
        desk.lay(["true", f"touch {mark}; cat {gate} > /dev/null", "true"])
    num_before = NUM_TURNS_BEFORE_KILL * len(desks)
    with ThreadPoolExecutor(len(desks)) as threads:
        with running(tmp_path / "home", config=config) as server:
            port = str(server.port)
            working = [threads.submit(desk.work, server) for desk in desks]
            there = until(lambda: all(map(Path.exists, arrived)), "both are at a tool", TASK_S)
            asyncio.run(there)
            before = asked_since(server, 0, num_before)
            asyncio.run(until(lambda: are_durable(desks, before, server), "all is on disk"))
            server.process.kill()
            server.process.wait()
        with running(tmp_path / "home", config=config, HEARTH_PORT=port) as again:
            for gate in gates:
                gate.write_text("")
            for one in working:
                one.result()
            after = asked_since(again, 0, NUM_TURNS * len(desks) - num_before)
    for desk in desks:
        assert beyond(desk.turns([*before, *after])) == [0] * (NUM_TURNS - 1)


def are_durable(desks: Sequence[Desk], asked: Sequence[Request], server: RunningServer) -> bool:
    """All that each of them may go on from is on disk, but for the token that was said last."""
    kept = [one["num_durable"] for one in server.get("/admin/cache").json()["conversations"]]
    ends = [max(one.known for one in asked if one.path == desk.program.path) for desk in desks]
    return all(any(num_durable >= end - 1 for num_durable in kept) for end in ends)
