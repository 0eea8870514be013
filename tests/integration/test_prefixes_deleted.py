"""The system prompt of a conversation that is deleted stays nowhere, and that of others stays."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_prewarm import CONFIG, OTHER, SYSTEM, asked, prefix_files, question
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

ALMOST = f"{OTHER} Today is Monday."


def listed(server: RunningServer) -> list[dict[str, Any]]:
    return server.get("/admin/cache").json()["conversations"]


async def on_disk(server: RunningServer, num: int) -> list[dict[str, Any]]:
    await until(
        lambda: len(listed(server)) == num and all(one["is_durable"] for one in listed(server)),
        f"{num} conversations are on disk",
    )
    return listed(server)


def delete(server: RunningServer, name: str) -> None:
    path = "/admin/cache/conversations"
    gone = server.request("DELETE", path, params={"conversation": name})
    assert gone.status_code == 200, gone.text


def learned(server: RunningServer) -> list[str]:
    """Of which system prompts there are files: each by its last words."""
    content = [path.read_bytes() for path in prefix_files(server)]
    texts = (SYSTEM, OTHER, ALMOST)
    held = [one for one in texts if any(_ends(one, said) for said in content)]
    return [one[-20:] for one in held]


def _ends(text: str, content: bytes) -> bool:
    at = content.find(text.encode())
    return at >= 0 and not content[at + len(text) :].startswith(b" Today")


def ends_of(*texts: str) -> list[str]:
    return [one[-20:] for one in texts]


@pytest.mark.parametrize(
    "how",
    ["by its session id", "by its listed id", "without a session id"],
    ids=["session", "listed", "unnamed"],
)
async def test_a_system_prompt_that_was_learned_goes_with_all_that_said_it(
    tmp_path: Path, models_dir: Path, how: str
):
    with running(tmp_path, "--models-dir", str(models_dir), config=CONFIG) as server:
        given = {} if how == "without a session id" else {"session_id": "lamps"}
        for number in range(3):
            asked(server, question(OTHER, f"Question {number}?", **given))
        for view in await on_disk(server, 1 if given else 3):
            delete(server, "lamps" if how == "by its session id" else view["id"])
        assert listed(server) == []
    assert learned(server) == []


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
        await until(
            lambda: (
                {one["num_tokens"] for one in listed(server) if one["is_durable"]}
                == {one for mine in lengths.values() for one in mine}
            ),
            "all are on disk",
        )

    def delete_these(server: RunningServer, *which: int) -> None:
        for one in which:
            (view,) = (view for view in listed(server) if view["num_tokens"] == one)
            delete(server, view["id"])

    with running(tmp_path, *flags, config=CONFIG) as server:
        await ask_all(server)
        if not is_restarted:
            delete_these(server, lengths[OTHER][0], *lengths[ALMOST])
    if is_restarted:
        assert learned(server) == ends_of(SYSTEM, OTHER, ALMOST)
        with running(tmp_path, *flags, config=CONFIG) as server:
            server.wait_for_the_store()
            delete_these(server, lengths[OTHER][0], *lengths[ALMOST])
            assert learned(server) == ends_of(SYSTEM, OTHER)
    assert learned(server) == ends_of(SYSTEM, OTHER)
    with running(tmp_path, *flags, config=CONFIG) as server:
        server.wait_for_the_store()
        delete_these(server, *lengths[OTHER][1:])
        assert learned(server) == ends_of(SYSTEM)
    assert learned(server) == ends_of(SYSTEM)


@pytest.mark.parametrize("session", ["lamps", None])
async def test_what_is_deleted_while_it_is_answered_is_not_learned_again(
    tmp_path: Path, models_dir: Path, session: str | None
):
    with running(tmp_path, "--models-dir", str(models_dir), config=CONFIG) as server:
        given = {"session_id": session} if session else {}
        asked(server, question(OTHER, "Before?", **given))
        (view,) = await on_disk(server, 1)
        body = question(OTHER, "Before?", **given, stream=True, n=2) | {"max_tokens": 600}
        with server.stream("POST", CHAT, json=body) as one:
            lines = one.iter_lines()
            next(lines)
            delete(server, view["id"])
            assert "[DONE]" in "".join(list(lines)[-3:])
    assert learned(server) == []


async def test_what_is_deleted_before_its_client_has_read_its_answer_is_not_learned_again(
    tmp_path: Path, models_dir: Path
):
    with running(tmp_path, "--models-dir", str(models_dir), config=CONFIG) as server:
        for text in ("Before?", "Before too?"):
            asked(server, question(OTHER, text, session_id="lamps"))
        await on_disk(server, 1)
        fields: dict[str, Any] = {"n": 8, "logprobs": True, "top_logprobs": 20, "stream": True}
        body = question(OTHER, "Run?", session_id="lamps", **fields) | {"max_tokens": 1500}
        with server.stream("POST", CHAT, json=body) as one:
            lines = one.iter_lines()
            next(lines)
            # Nobody reads until its worker has nothing to do.
            await until(lambda: not num_running(server), "its worker is done", 120)
            delete(server, "lamps")
            assert "[DONE]" in "".join(list(lines)[-3:])
    assert learned(server) == []


def num_running(server: RunningServer) -> int:
    return sum(one["num_running"] for one in server.get("/running").json()["models"])


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
        await until(
            lambda: server.get(f"/v1/prewarm/{prewarm_id}").json()["status"] == "completed", "warm"
        )
        cached, _ = asked(server, question(OTHER, "Something else?"))
        assert cached == 0, "it was kept"
