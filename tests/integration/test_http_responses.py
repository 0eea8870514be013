"""Responses over HTTP: what is kept, what is waited for, what is refused and what is tolerated."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from runtime.cache.history import LOCK
from store import ownership
from tests.integration.test_http_errors import error_in
from tests.running_server import COMPLETIONS, RunningServer, running, streaming
from tests.waiting import until

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi 😀", "max_output_tokens": 4}
ENDLESS: dict[str, Any] = {"model": "tiny", "input": "the fox", "ignore_eos": True}
FUNCTION: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
AGENTS_TOOL: dict[str, Any] = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Work beside others",
    "tools": [FUNCTION | {"name": "wait_agent"}, FUNCTION | {"name": "spawn_agent"}],
}


def made(server: RunningServer, **changes: Any) -> dict[str, Any]:
    response = server.post(RESPONSES, BODY | changes)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block]
    return [json.loads(block.split("\ndata: ", 1)[1]) for block in blocks]


def num_tokens(server: RunningServer, **changes: Any) -> int:
    body = {name: value for name, value in (BODY | changes).items() if value is not None}
    response = server.post(f"{RESPONSES}/input_tokens", body)
    assert response.status_code == 200, response.text
    return response.json()["input_tokens"]


# What is kept


def config_of(models_dir: Path, more: str = "") -> str:
    return f'models_dir = "{models_dir}"\ndefault_model = "tiny"\n{more}'


def test_a_stored_conversation_survives_a_kill(tmp_path: Path, models_dir: Path) -> None:
    config = config_of(models_dir)
    with running(tmp_path, config=config) as server:
        first = made(server, input="one")
        second = made(server, input="two", previous_response_id=first["id"])
        before = num_tokens(server, input="three", previous_response_id=second["id"])
        later = server.post(RESPONSES, BODY | {"background": True, "stream": True})
        told = events_of(later.text)
        underway = server.post(RESPONSES, ENDLESS | {"background": True}).json()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(tmp_path, config=config) as server:
        assert server.get(f"{RESPONSES}/{second['id']}").json() == second
        after = num_tokens(server, input="three", previous_response_id=second["id"])
        assert after == before > num_tokens(server, input="three")
        left = server.get(f"{RESPONSES}/{underway['id']}").json()
        assert (left["status"], left["error"]["code"]) == ("failed", "interrupted")
        end = server.get(f"{RESPONSES}/{underway['id']}?stream=true&starting_after=7").text
        (last,) = events_of(end)
        assert (last["type"], last["sequence_number"]) == ("response.failed", 8)
        assert last["response"] == left
        again = f"{RESPONSES}/{told[0]['response']['id']}?stream=true&starting_after=2"
        assert events_of(server.get(again).text) == told[3:]
        assert server.request("DELETE", f"{RESPONSES}/{first['id']}").status_code == 200
        refused = server.post(RESPONSES, BODY | {"previous_response_id": second["id"]})
        assert error_in(refused)["code"] == "previous_response_not_found"
        assert server.get(f"{RESPONSES}/{second['id']}").json() == second


def test_the_oldest_conversation_makes_room_from_its_end(tmp_path: Path, models_dir: Path) -> None:
    config = config_of(models_dir, "history_max_bytes = 450000\n")
    with running(tmp_path, config=config) as server:
        long = {"safety_identifier": "x" * 100_000}
        old = made(server, **long)
        end = made(server, **long, previous_response_id=old["id"])
        other = made(server, **long)
        made(server, previous_response_id=old["id"])
        last = made(server, **long)
        kept = [
            server.get(f"{RESPONSES}/{one['id']}").status_code for one in (old, end, other, last)
        ]
        assert kept == [200, 404, 200, 200]


def test_without_a_history_answers_are_given_and_say_that_they_were_not_kept(
    tmp_path: Path, models_dir: Path
) -> None:
    tmp_path.chmod(0o700)
    lock = ownership.hold(tmp_path / LOCK)
    try:
        with running(tmp_path, config=config_of(models_dir)) as server:
            answer = made(server)
            assert answer["store"] is False
            assert answer["hearth"]["ignored"] == ["store: store_unavailable"]
            stream = events_of(server.post(RESPONSES, BODY | {"stream": True}).text)
            assert stream[-1]["response"]["store"] is False
            assert "ignored" not in made(server, store=False)["hearth"]
            later = server.post(RESPONSES, BODY | {"background": True})
            assert (later.status_code, error_in(later)["code"]) == (503, "store_unavailable")
    finally:
        os.close(lock)


async def test_a_stream_that_breaks_is_not_kept(server: RunningServer) -> None:
    async with (
        server.client() as client,
        client.stream("POST", RESPONSES, json=ENDLESS | {"stream": True}) as response,
    ):
        response_id = ""
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if event["type"] == "response.output_text.delta":
                    break
                response_id = event.get("response", {}).get("id", response_id)
    await until(lambda: server.figure("hearth_running") == 0, "the generation ended")
    assert server.get(f"{RESPONSES}/{response_id}").status_code == 404


async def test_a_stream_is_cancelled_from_elsewhere(server: RunningServer) -> None:
    async with (
        server.client() as client,
        client.stream("POST", RESPONSES, json=ENDLESS | {"stream": True}) as response,
    ):
        events: list[dict[str, Any]] = []
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 5:
                response_id = events[0]["response"]["id"]
                cancelled = await client.post(f"{RESPONSES}/{response_id}/cancel")
                assert cancelled.json()["status"] == "cancelled"
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "cancelled"


async def test_what_has_hours_waits_while_others_are_answered_and_then_begins(
    tmp_path: Path, models_dir: Path
) -> None:
    patient = {"background": True, "background_options": {"completion_window": "8h"}}
    endless = {"model": "tiny", "prompt": "the fox", "ignore_eos": True, "max_tokens": 1500}
    with running(tmp_path, config=config_of(models_dir)) as server:
        async with streaming(server, COMPLETIONS, endless) as other:
            await other.next_event()
            os.kill(server.worker_pid(), signal.SIGSTOP)  # the other one is not over before this is
            waiting = await asyncio.to_thread(made, server, **patient)
            (loaded,) = server.get("/running").json()["models"]
            os.kill(server.worker_pid(), signal.SIGCONT)
            assert (loaded["num_running"], loaded["num_waiting"]) == (1, 1)
        where = f"{RESPONSES}/{waiting['id']}"
        await until(lambda: server.get(where).json()["status"] == "incomplete", "it is answered")


# What is waited for


def num_open(server: RunningServer) -> float:
    return server.figure("hearth_running") + server.figure("hearth_waiting")


async def test_life_is_signed_after_the_beginning_and_before_anything_else(
    narrow_server: RunningServer,
) -> None:
    async with narrow_server.client() as client:
        first = asyncio.create_task(client.post(RESPONSES, json=ENDLESS | {"store": False}))
        await until(lambda: narrow_server.figure("hearth_running") == 1, "another one is computed")
        pid = narrow_server.worker_pid()
        os.kill(pid, signal.SIGSTOP)  # the other one is not over before three signs were given
        events: list[dict[str, Any]] = []
        body = BODY | {"stream": True, "store": False}
        async with client.stream("POST", RESPONSES, json=body) as response:
            async for line in response.aiter_lines():
                assert not line.startswith(":")
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 4 and not first.done():
                    os.kill(pid, signal.SIGCONT)
                    first.cancel()
        kinds = [event["type"] for event in events]
        assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
        assert kinds.count("response.created") == 1
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_model_that_fails_after_the_beginning_is_told_by_its_code(
    tmp_path: Path, models_dir: Path
) -> None:
    async def data() -> list[str]:
        async with (
            server.client() as client,
            client.stream("POST", RESPONSES, json=ENDLESS | {"stream": True}) as response,
        ):
            return [line async for line in response.aiter_lines() if line.startswith("data: ")]

    with running(tmp_path, config=config_of(models_dir)) as server:
        rest = asyncio.create_task(data())
        await server.lose_workers()
        last = json.loads((await rest)[-1].removeprefix("data: "))
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "model_crashed"
        assert last["response"]["status"] == "failed"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(server: RunningServer) -> None:
    long = "fox " * 5000
    count = num_tokens(server, input=long)
    for stream in (False, True):
        response = server.post(RESPONSES, BODY | {"input": long, "stream": stream})
        error = error_in(response)
        assert (response.status_code, error["param"]) == (400, "input")
        assert error["code"] == "context_length_exceeded"
        assert f"{count} tokens" in error["message"]
        assert "4096 tokens" in error["message"]


def turns(number: int) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": f"{i} " + "fox " * 400} for i in range(number)]
    said = [{"role": "assistant", "content": f"answer {i}"} for i in range(number)]
    return [item for pair in zip(asked, said, strict=True) for item in pair]


def test_truncation_drops_whole_old_turns_keeps_what_stands_first_and_says_so(
    server: RunningServer,
) -> None:
    head = {"role": "developer", "content": "Be brief."}
    question = {"role": "user", "content": "And now?"}
    history = turns(20)
    refused = server.post(RESPONSES, BODY | {"input": [head, *history, question]})
    assert error_in(refused)["code"] == "context_length_exceeded"
    answer = made(server, input=[head, *history, question], truncation="auto")
    (told,) = answer["hearth"]["prompt"]
    assert told["rule"] == "dropped_turns"
    num_dropped = told["num_turns"]
    assert told["num_places"] == 2 * num_dropped > 0
    kept = [head, *history[2 * num_dropped :], question]
    assert answer["usage"]["input_tokens"] == num_tokens(server, input=kept) <= 4096 * 7 // 8
    # It is cut behind a line, one every half window, so that the next requests find their prefix.
    assert told["num_tokens"] > 2048
    assert told["num_tokens"] % 2048 < num_tokens(server, input=turns(1))
    fits = made(server, input=[head, *turns(2), question], truncation="auto")
    assert "prompt" not in fits["hearth"]


# What is tolerated


def test_the_warm_up_of_a_client_without_configuration_succeeds(server: RunningServer) -> None:
    body = {"model": "tiny", "input": "", "max_output_tokens": 1}
    answer = server.post(RESPONSES, body).json()
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_request_as_codex_sends_it_is_answered(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "input": [
            {"type": "message", "role": "developer", "content": [text("You write code.")]},
            {"type": "message", "role": "developer", "content": [text("Ask nothing.")]},
            {"type": "message", "role": "user", "content": [text("<cwd>/src</cwd>"), text("go")]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "foreign"},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "call_1",
                "name": "wait_agent",
                "namespace": "multi_agent_v1",
                "arguments": '{"ids": [1]}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "Wall time: 0.1 s"},
        ],
        "tools": [FUNCTION, AGENTS_TOOL, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "client_metadata": {"turn": {"id": 7}},
        "max_output_tokens": 4,
    }
    headers = {"thread-id": "thread", "session-id": "session", "originator": "codex_exec"}
    response = server.request("POST", RESPONSES, json=body, headers=headers)
    assert response.status_code == 200, response.text
    last = events_of(response.text)[-1]["response"]
    assert [tool["type"] for tool in last["tools"]] == ["function", "namespace"]
    assert last["hearth"]["ignored"] == [
        "tools[2]: web_search",
        "input[3].encrypted_content: not written by this server",
    ]
    volatile = [dict(item, id="other") for item in body["input"]]
    changed = body | {"input": volatile, "client_metadata": {"turn": {"id": 8}}}
    assert num_tokens(server, **changed) == last["usage"]["input_tokens"]


def text(content: str) -> dict[str, str]:
    return {"type": "input_text", "text": content}


def test_a_websocket_is_declined_so_that_clients_fall_back(server: RunningServer) -> None:
    headers = {"upgrade": "websocket", "connection": "upgrade"}
    declined = server.request("GET", RESPONSES, headers=headers)
    assert declined.status_code == 426
    assert error_in(declined)["code"] == "upgrade_not_supported"
    plain = server.get(RESPONSES)
    assert (plain.status_code, plain.headers["allow"]) == (405, "POST")
