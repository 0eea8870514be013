"""The log of a server: enough to follow a request, nothing of what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from runtime.keys import digest_of, read_admin_token
from tests.running_server import CHAT, COMPLETIONS, RunningServer, running
from tests.waiting import until

CANARY = "zebraharbour7351"
KEY, SESSION = f"key-{CANARY}", f"session-{CANARY}"
CONFIG = f"""
log_level = "debug"
log_format = "json"
[api_keys]
alice = "{digest_of(KEY)}"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), config=CONFIG) as server:
        yield server


def send(
    server: RunningServer, path: str, body: Any, key: str = KEY, request_id: str = "req-mine"
) -> int:
    headers = {"x-api-key": key, "session-id": SESSION, "x-request-id": request_id}
    return server.request("POST", path, json=body, headers=headers).status_code


def lines_of(server: RunningServer) -> list[dict[str, Any]]:
    whole, _, _ = server.stderr.rpartition("\n")  # the last one may still be written
    lines = [line for line in whole.splitlines() if line.startswith("{")]
    return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]


def line_of(server: RunningServer, request_id: str) -> dict[str, Any] | None:
    """The one that a request leaves behind, which is written when it is answered."""
    ends = (one for one in lines_of(server) if one["event"].startswith("POST "))
    return next((one for one in ends if one["request_id"] == request_id), None)


def test_no_request_leaves_its_words_in_the_log_whether_served_or_refused(server: RunningServer):
    said = [{"role": "user", "content": CANARY}]
    chat = {"model": "hearth-tiny", "messages": said, "max_tokens": 2}
    statuses = {
        send(server, CHAT, chat),
        send(server, CHAT, chat | {"session_id": SESSION, "stream": True}),
        send(server, COMPLETIONS, {"model": "hearth-tiny", "prompt": CANARY, "max_tokens": 2}),
        send(server, "/v1/messages", chat),
        send(server, "/v1/responses", {"model": "hearth-tiny", "input": CANARY}),
        send(server, "/api/chat", chat),
        send(server, CHAT, chat | {"temperature": CANARY}),
        send(server, CHAT, chat | {"stop": [CANARY], "tools": [{"type": CANARY}]}),
        send(server, CHAT, [CANARY]),
        send(server, CHAT, chat, key=f"wrong-{CANARY}"),
    }
    assert statuses == {200, 400, 401}
    assert len(lines_of(server)) > len(statuses)
    assert CANARY not in server.stderr


async def test_a_line_names_request_model_and_worker(server: RunningServer):
    said = [{"role": "user", "content": "Hi"}]
    body = {"model": "hearth-tiny", "messages": said, "max_tokens": 2}
    send(server, CHAT, body, request_id="req-named")
    await until(lambda: line_of(server, "req-named"), "its line")
    line = line_of(server, "req-named")
    assert line is not None
    assert (line["event"], line["model"]) == (f"POST {CHAT}", "hearth-tiny")
    running = server.request("GET", "/running", headers={"x-api-key": KEY}).json()
    assert line["worker"] in {str(one["pid"]) for one in running["models"]}


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_line_of_who_left_says_what_was_computed_until_then(
    server: RunningServer, is_streamed: bool
):
    said = [{"role": "user", "content": "a kettle " * 100}]
    body = {"model": "hearth-tiny", "messages": said, "max_tokens": 7000, "ignore_eos": True}
    name = f"req-left-{is_streamed}"
    headers = {"x-api-key": KEY, "x-request-id": name}

    def num_pieces() -> int:
        now = server.request("GET", "/admin/dashboard", headers=_admin(server)).json()
        return sum(one["num_pieces"] for one in now["requests"] if one["id"] == name)

    async with server.client() as client:
        asking = client.post(CHAT, json=body | {"stream": is_streamed}, headers=headers)
        answer = asyncio.create_task(asking)
        await until(lambda: num_pieces() > 5, "some of it is there")
        answer.cancel()
    await until(lambda: line_of(server, name), "its line")
    line = line_of(server, name)
    assert line is not None
    assert line["error"] == "client_left"
    assert line["prompt_tokens"] > 200
    assert line["prompt_tokens"] == line["cached_tokens"] + line["computed_tokens"]
    assert 5 < line["output_tokens"] < 7000


async def test_a_line_of_what_no_worker_took_counts_nothing(server: RunningServer):
    name = "req-refused"
    body = {"model": "hearth-tiny", "messages": [{"role": "user", "content": "a " * 40_000}]}
    assert send(server, CHAT, body, request_id=name) == 400
    await until(lambda: line_of(server, name), "its line")
    line = line_of(server, name)
    assert line is not None
    assert line["error"] == "context_length_exceeded"
    assert "prompt_tokens" not in line


def _admin(server: RunningServer) -> dict[str, str]:
    return {"x-api-key": read_admin_token(server.home) or ""}
