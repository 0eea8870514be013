"""Message threads: a turn that is continued by its id is read as if all before it were sent."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, beta_tool

from runtime.cache.history import LOCK
from runtime.keys import digest_of
from store import ownership
from tests.running_server import RunningServer, running

MESSAGES = "/v1/messages"
SESSIONS = "/admin/cache/conversations"
CREATE: dict[str, Any] = {"type": "create"}
LOOK: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {"model": "hearth-tiny", "max_tokens": 8, "temperature": 0}
FIRST: dict[str, Any] = {
    "system": [{"type": "text", "text": "You are a lighthouse keeper."}],
    "tools": [LOOK],
    "messages": [{"role": "user", "content": "My name is Ada."}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server
        assert "Traceback" not in server.stderr


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def continued(message_id: str) -> dict[str, Any]:
    return {"type": "continue", "previous_message_id": message_id}


def ask(server: RunningServer, status: int = 200, **fields: Any) -> dict[str, Any]:
    headers = {"anthropic-version": "2023-06-01"} | fields.pop("headers", {})
    answer = server.request("POST", MESSAGES, json=BODY | fields, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def code_of(answer: dict[str, Any]) -> str:
    assert answer["type"] == "error"
    return answer["error"]["details"]["error_code"]


def num_read(answer: dict[str, Any]) -> int:
    """All tokens of the prompt."""
    return sum(n for name, n in answer["usage"].items() if name.endswith("input_tokens"))


def num_whole(server: RunningServer, said: list[Any], **fields: Any) -> int:
    """Tokens of the prompt where everything is sent at once."""
    body = {"model": "hearth-tiny"} | FIRST | fields | {"messages": said}
    return server.post(f"{MESSAGES}/count_tokens", body).json()["input_tokens"]


def test_a_continued_turn_reads_all_that_was_said_with_system_and_tools(
    server: RunningServer,
) -> None:
    first = ask(server, **FIRST, thread=CREATE)
    said = [*FIRST["messages"], {"role": "assistant", "content": first["content"]}]
    for text in ("What is my name?", "And now?"):
        said.append(user(text))
        thread = continued(first["id"])
        counted = server.post(
            f"{MESSAGES}/count_tokens",
            {"model": "hearth-tiny", "messages": [user(text)], "thread": thread},
        )
        first = ask(server, messages=[user(text)], thread=thread)
        assert num_read(first) == counted.json()["input_tokens"] == num_whole(server, said)
        assert "ignored" not in first["hearth"]
        said.append({"role": "assistant", "content": first["content"]})


def test_a_stream_is_kept_before_its_end_is_told(server: RunningServer) -> None:
    body = BODY | FIRST | {"thread": CREATE, "stream": True}
    with server.stream("POST", MESSAGES, json=body) as events:
        lines = (line[6:] for line in events.iter_lines() if line.startswith("data: "))
        told = map(json.loads, lines)
        first = next(told)["message"]["id"]
        assert any(event["type"] == "message_delta" for event in told)
        then = ask(server, messages=[user("And?")], thread=continued(first), max_tokens=1)
    assert num_read(then) > num_whole(server, FIRST["messages"])


def test_results_of_tools_go_on_from_the_calls_that_are_kept(server: RunningServer) -> None:
    choice = {"type": "tool", "name": "look"}
    first = ask(server, **FIRST, thread=CREATE, tool_choice=choice, max_tokens=60)
    call = first["content"][-1]
    assert call["type"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "A wall."}
    turn = {"role": "user", "content": [result]}
    then = ask(server, messages=[turn], thread=continued(first["id"]))
    said = [*FIRST["messages"], {"role": "assistant", "content": first["content"]}, turn]
    assert num_read(then) == num_whole(server, said)


def test_a_turn_may_be_continued_more_than_once_and_what_is_not_continued_is_not_kept(
    server: RunningServer,
) -> None:
    first = ask(server, **FIRST, thread=CREATE)
    one, other = (ask(server, messages=[user("A?")], thread=continued(first["id"])) for _ in "ab")
    assert one["content"] == other["content"]
    assert num_read(one) == num_read(other)
    plain = ask(server, **FIRST)
    refused = ask(server, 404, messages=[user("?")], thread=continued(plain["id"]))
    assert code_of(refused) == "thread_not_found"


def test_an_id_of_a_response_is_no_thread_and_a_thread_no_response(server: RunningServer) -> None:
    response = server.post("/v1/responses", {"model": "hearth-tiny", "input": "hi"}).json()
    thread = ask(server, **FIRST, thread=CREATE)
    refused = ask(server, 404, messages=[user("?")], thread=continued(response["id"]))
    assert code_of(refused) == "thread_not_found"
    body = {"model": "hearth-tiny", "input": "hi", "previous_response_id": thread["id"]}
    assert server.post("/v1/responses", body).status_code == 400
    for path in ("", "?stream=true", "/input_items"):
        assert server.get(f"/v1/responses/{thread['id']}{path}").status_code == 404
    assert server.request("DELETE", f"/v1/responses/{thread['id']}").status_code == 404
    ask(server, messages=[user("?")], thread=continued(thread["id"]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"system": "Be brief."}, "system"),
        ({"tools": [LOOK]}, "tools"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        ({"thread": {"type": "glow"}}, "thread.type"),
    ],
)
def test_what_a_thread_cannot_take_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    first = ask(server, **FIRST, thread=CREATE)
    asked = {"messages": [user("?")], "thread": continued(first["id"])} | fields
    assert ask(server, 400, **asked)["error"]["details"]["param"] == param


def test_an_error_in_a_new_message_is_named_by_its_place_in_the_request(
    server: RunningServer,
) -> None:
    first = ask(server, **FIRST, thread=CREATE)
    turn = {"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}
    refused = ask(server, 400, messages=[user("a"), turn], thread=continued(first["id"]))
    assert refused["error"]["details"]["param"].startswith("messages[1].content[0]")


def test_deleting_a_turn_deletes_its_whole_thread_and_no_other(
    server: RunningServer,
) -> None:
    first = ask(server, **FIRST, thread=CREATE)
    second = ask(server, messages=[user("A?")], thread=continued(first["id"]))
    other = ask(server, **FIRST, thread=CREATE)
    third = ask(server, messages=[user("B?")], thread=continued(second["id"]))
    gone = server.request("DELETE", f"{MESSAGES}/{second['id']}")
    assert gone.status_code == 200
    assert gone.json() == {"id": second["id"], "type": "message_deleted"}
    assert server.request("DELETE", f"{MESSAGES}/{second['id']}").status_code == 404
    for one in (first, second, third):
        refused = ask(server, 404, messages=[user("?")], thread=continued(one["id"]))
        assert code_of(refused) == "thread_not_found"
    ask(server, messages=[user("?")], thread=continued(other["id"]))


def test_a_thread_survives_a_kill_and_no_byte_of_it_its_deletion(tmp_path: Path) -> None:
    secret = "velvet-onyx-41"
    with running(tmp_path) as server:
        first = ask(server, **FIRST, thread=CREATE)
        turn = ask(server, messages=[user(secret)], thread=continued(first["id"]))
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(tmp_path) as server:
        ask(server, messages=[user("?")], thread=continued(turn["id"]))
        assert secret.encode() in b"".join(one.read_bytes() for one in tmp_path.glob("history.*"))
        assert server.request("DELETE", f"{MESSAGES}/{turn['id']}").status_code == 200
        left = b"".join(one.read_bytes() for one in tmp_path.glob("history.*"))
        assert secret.encode() not in left


def test_a_stranger_does_not_find_it(tmp_path: Path) -> None:
    keys = "\n".join(f'{one} = "{digest_of(one)}"' for one in ("alice", "bob"))
    with running(tmp_path, config=f"[api_keys]\n{keys}\n") as server:
        alice, bob = {"x-api-key": "alice"}, {"x-api-key": "bob"}
        first = ask(server, **FIRST, thread=CREATE, headers=alice)
        asked: dict[str, Any] = {"messages": [user("?")], "thread": continued(first["id"])}
        assert code_of(ask(server, 404, **asked, headers=bob)) == "thread_not_found"
        path = f"{MESSAGES}/{first['id']}"
        assert server.request("DELETE", path, headers=bob).status_code == 404
        ask(server, **asked, headers=alice)


def test_where_nothing_can_be_kept_it_is_refused_in_the_words_after_which_clients_send_all(
    tmp_path: Path,
) -> None:
    with ExitStack() as held:
        lock = ownership.hold(tmp_path / LOCK)
        held.callback(lambda: os.close(lock))
        with running(tmp_path) as server:
            for thread in (CREATE, continued("msg_1")):
                refused = ask(server, 400, messages=[user("?")], thread=thread)
                details = refused["error"]["details"]
                assert details["error_code"] == "thread_unsupported_request"
                assert details["unsupported"] == ["thread"]
            with Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
                assert runs_with_tools(client)


def runs_with_tools(client: Anthropic) -> list[Any]:
    """The answers of the SDK's own loop, which calls the tool and goes on."""

    @beta_tool
    def look(where: str) -> str:
        """Look there."""
        return f"A wall, {where}."

    runner = client.beta.messages.tool_runner(
        model="hearth-tiny",
        max_tokens=80,
        system="You are a lighthouse keeper.",
        tools=[look],
        tool_choice={"type": "tool", "name": "look"},
        messages=[{"role": "user", "content": "My name is Ada."}],
        max_iterations=3,
    )
    return [*runner]


def test_the_loop_of_the_sdk_reads_more_with_every_turn(server: RunningServer) -> None:
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        answers = [one.to_dict() for one in runs_with_tools(client)]
    lengths = [num_read(one) for one in answers]
    assert len(lengths) == 3
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_prompt_that_is_announced_says_that_it_cannot_continue_one(server: RunningServer) -> None:
    body = {"model": "hearth-tiny", "messages": [user("?")], "thread": continued("msg_1")}
    refused = server.post("/v1/prewarm", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thread"


def test_a_stream_that_continues_nothing_is_a_404(server: RunningServer) -> None:
    body = BODY | {"messages": [user("?")], "thread": continued("msg_0"), "stream": True}
    assert code_of(server.post(MESSAGES, body).json()) == "thread_not_found"


@pytest.mark.parametrize("kind", ["thread", "response"])
def test_deleting_a_session_deletes_the_text_that_is_kept_of_it(
    server: RunningServer, kind: str
) -> None:
    def keep(session: str) -> tuple[str, dict[str, Any]]:
        if kind == "thread":
            made = ask(server, **FIRST, thread=CREATE, session_id=session)
            return MESSAGES, BODY | {"messages": [user("?")], "thread": continued(made["id"])}
        body = {"model": "hearth-tiny", "max_output_tokens": 4, "session_id": session}
        made = server.post("/v1/responses", body | {"input": "My name is Ada."}).json()
        return "/v1/responses", body | {"input": "?", "previous_response_id": made["id"]}

    ours, others = keep(f"{kind}-ours"), keep(f"{kind}-others")
    query = {"conversation": f"{kind}-ours"}
    assert server.request("DELETE", SESSIONS, params=query).status_code == 200
    assert server.post(*ours).status_code in (400, 404)
    assert server.post(*others).status_code == 200
    unknown = {"conversation": f"{kind}-nobody"}
    assert server.request("DELETE", SESSIONS, params=unknown).status_code == 404


def test_of_what_is_deleted_while_it_is_answered_nothing_is_kept(server: RunningServer) -> None:
    body = BODY | FIRST | {"thread": CREATE, "stream": True, "session_id": "gone"}
    with server.stream("POST", MESSAGES, json=body | {"max_tokens": 400}) as events:
        lines = (line[6:] for line in events.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines))["message"]["id"]
        server.request("DELETE", SESSIONS, params={"conversation": "gone"})
        assert any(one["type"] == "message_delta" for one in map(json.loads, lines))
    refused = ask(server, 404, messages=[user("?")], thread=continued(first))
    assert code_of(refused) == "thread_not_found"
