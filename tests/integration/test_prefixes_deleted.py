"""The system prompt of a conversation that is deleted stays nowhere, and that of others stays."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_prewarm import (
    CONFIG,
    OTHER,
    SYSTEM,
    asked,
    brought,
    listed,
    on_disk,
    question,
)
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

ALMOST = f"{OTHER} Today is Monday."


def delete(server: RunningServer, name: str) -> None:
    path = "/admin/cache/conversations"
    gone = server.request("DELETE", path, params={"conversation": name})
    assert gone.status_code == 200, gone.text


@pytest.mark.parametrize(
    "how",
    ["by its session id", "by its listed id", "without a session id"],
    ids=["session", "listed", "unnamed"],
)
async def test_a_system_prompt_goes_with_all_that_said_it(
    tmp_path: Path, models_dir: Path, how: str
):
    flags = ("--models-dir", str(models_dir))
    with running(tmp_path, *flags, config=CONFIG) as server:
        for number in range(3):
            given = {} if how == "without a session id" else {"session_id": f"lamps-{number}"}
            asked(server, question(OTHER, f"Question {number}?", **given))
        views = await on_disk(server, 3)
        for number, view in enumerate(views):
            delete(server, f"lamps-{number}" if how == "by its session id" else view["id"])
        assert listed(server) == []
    with running(tmp_path, *flags, config=CONFIG) as server:
        assert asked(server, question(OTHER, "Question 4?"))[0] == 0


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_unnamed_conversations_keep_what_they_said_while_others_are_deleted(
    tmp_path: Path, models_dir: Path, is_restarted: bool
):
    """Also where two prompts differ in their last words only.

    Their ids change while they are written; each is known by its length.
    """
    flags = ("--models-dir", str(models_dir))
    lengths: dict[str, list[int]] = {SYSTEM: [], OTHER: [], ALMOST: []}

    async def ask_all(server: RunningServer) -> None:
        for number, (text, mine) in enumerate(lengths.items()):
            for word in ("Apples", "Bees", "Cranberries"):
                body = question(text, f"{word}? {word} and {word}!" + " Well?" * 5 * number)
                usage = server.post(CHAT, body).json()["usage"]
                mine.append(usage["prompt_tokens"] + usage["completion_tokens"])
        views = await on_disk(server, 9)
        assert {one["num_tokens"] for one in views} == {
            one for mine in lengths.values() for one in mine
        }

    def delete_these(server: RunningServer, *which: int) -> None:
        for one in which:
            (view,) = (view for view in listed(server) if view["num_tokens"] == one)
            delete(server, view["id"])

    def known(server: RunningServer) -> list[bool]:
        """Whether what each of them begins with is; nothing of the question is kept on disk."""
        bodies = (question(text, "Dates?", ttl=0) for text in (SYSTEM, OTHER))
        return [asked(server, body)[0] > 500 for body in bodies]

    with running(tmp_path, *flags, config=CONFIG) as server:
        await ask_all(server)
        if not is_restarted:
            delete_these(server, lengths[OTHER][0], *lengths[ALMOST])
    with running(tmp_path, *flags, config=CONFIG) as server:
        server.wait_for_the_store()
        if is_restarted:
            delete_these(server, lengths[OTHER][0], *lengths[ALMOST])
        assert known(server) == [True, True]
    with running(tmp_path, *flags, config=CONFIG) as server:
        await brought(server)
        delete_these(server, *lengths[OTHER][1:])
        assert known(server) == [True, False]
    with running(tmp_path, *flags, config=CONFIG) as server:
        assert known(server) == [True, False]


async def test_a_prompt_whose_announcement_was_on_its_way_is_not_kept(
    tmp_path: Path, models_dir: Path
):
    """Its body came after everything was deleted, its first bytes before that."""
    with running(tmp_path, "--models-dir", str(models_dir), config=CONFIG) as server:
        body = json.dumps(question(OTHER, session_id="lamps")).encode()
        head = (
            "POST /v1/prewarm HTTP/1.1", f"Host: 127.0.0.1:{server.port}", "Connection: close",
            "Content-Type: application/json", f"Content-Length: {len(body)}",
            "Expect: 100-continue", "", "",
        )  # fmt: skip
        with socket.create_connection(("127.0.0.1", server.port), 30) as client:
            client.sendall("\r\n".join(head).encode())
            assert b" 100 " in client.recv(100), "the server waits for its body"
            assert server.request("DELETE", "/admin/cache/all").status_code == 200
            client.sendall(body)
            said = b"".join(iter(lambda: client.recv(4096), b""))
        prewarm_id = json.loads(said.partition(b"\r\n\r\n")[2])["id"]
        view: dict[str, Any] = {}

        def is_completed() -> bool:
            view.update(server.get(f"/v1/prewarm/{prewarm_id}").json())
            return view["status"] == "completed"

        await until(is_completed, "warm")
        cached, _ = asked(server, question(OTHER, "Something else?"))
        assert cached == 0, "it was kept"
