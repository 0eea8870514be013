"""What an operator is told of workers that were lost, and that clients are answered meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.running_server import CHAT, COMPLETIONS, RunningServer, running, streaming
from tests.waiting import until

NUM_STREAMS = 8
NUM_ROUNDS = 2
MAX_PARTED = 1
"""What was said is computed as a prompt for the rest: of two tokens that are as near as rounding
the other one may be said, once in some ten thousand.
"""
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def lasting(number: int) -> dict[str, Any]:
    """A request of its own content: what kills two workers would be suspected."""
    prompt = f"a secret word {number}"
    fixed = {"temperature": 0.9, "seed": number, "ignore_eos": True}
    return {"model": "tiny", "prompt": prompt, "max_tokens": 1000} | fixed


async def texts_of_streams(server: RunningServer, number: int, *, kills: bool) -> list[str]:
    """What each of them says, to whom the worker may be lost."""
    async with AsyncExitStack() as stack:
        asked = [lasting(number * NUM_STREAMS + index) for index in range(NUM_STREAMS)]
        opening = (stack.enter_async_context(streaming(server, COMPLETIONS, one)) for one in asked)
        streams = await asyncio.gather(*opening)
        await asyncio.gather(*(stream.next_event() for stream in streams))
        if kills:
            server.kill_worker()
        events = await asyncio.gather(*(stream.rest() for stream in streams))
        assert [told.pop() for told in events] == ["[DONE]"] * NUM_STREAMS
        choices = [[one["choices"][0] for one in told] for told in events]
        assert {told[-1]["finish_reason"] for told in choices} == {"length"}
        return ["".join(one["text"] for one in told) for told in choices]


async def test_a_worker_killed_under_eight_streams_is_replaced_and_every_stream_goes_on(
    tmp_path: Path, models_dir: Path
):
    config = f'models_dir = "{models_dir}"\ndefault_model = "tiny"\n'
    with running(tmp_path, config=config) as server:
        for number in range(NUM_ROUNDS):
            pid = server.worker_pid()
            undisturbed = await texts_of_streams(server, number, kills=False)
            gone_on = await texts_of_streams(server, number, kills=True)
            parted = [one for one in zip(gone_on, undisturbed, strict=True) if len({*one}) > 1]
            assert len(parted) <= MAX_PARTED, parted
            said = await asyncio.to_thread(server.post, CHAT, HELLO)
            assert said.status_code == 200, said.text
            assert server.worker_pid() != pid
        assert server.process.poll() is None

        def listed() -> list[dict[str, Any]]:
            return server.get("/admin/crashes").json()["crashes"]

        await until(lambda: len(listed()) == NUM_ROUNDS, "the records")
        assert {(one["model"], one["signal"]) for one in listed()} == {("tiny", "SIGKILL")}
        crash_id = listed()[0]["id"]
        record = server.get(f"/admin/crashes/{crash_id}").json()
        assert (record["id"], record["num_running"]) == (crash_id, NUM_STREAMS)
        assert record["phase"] in ("idle", "upkeep", "prefill", "restore", "decode")
        for file in (tmp_path / "crashes").iterdir():
            assert "secret" not in file.read_text()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


MANY: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, MANY | {"messages": HELLO["messages"], "n": 2}),
    "completions": (COMPLETIONS, MANY | {"prompt": ["a", "b c"], "n": 2}),
    "messages": ("/v1/messages", MANY | {"messages": HELLO["messages"]}),
    "responses": ("/v1/responses", MANY | {"input": "hi", "max_output_tokens": 300}),
    "ollama": (
        "/api/generate",
        {
            "prompt": "x",
            "stream": False,
            "options": {"num_predict": 300, "temperature": 0, "ignore_eos": True},
        },
    ),
    "agent": ("/v1/agents/kept/generate", MANY | {"messages": HELLO["messages"]}),
}


async def test_a_worker_killed_under_whole_answers_costs_nobody_anything(
    tmp_path: Path, models_dir: Path
):
    """Tokens had come, but nobody was told of any: all are answered, told and counted once."""
    config = f'models_dir = "{models_dir}"\ndefault_model = "tiny"\nheartbeat_timeout_s = 120\n'
    with running(tmp_path, config=config) as server:
        server.post("/v1/agents", {"id": "kept", "model": "tiny"})

        def figure(name: str) -> float:
            return server.figure(name, model="tiny")

        async with server.client() as client:
            os.kill(server.worker_pid(), signal.SIGSTOP)  # until all are there
            asked = [
                asyncio.create_task(client.post(path, json={"model": "tiny"} | body, timeout=120))
                for path, body in WHOLE.values()
            ]
            num_prompts = len(WHOLE) + 1
            running_now = lambda: figure("hearth_running") == num_prompts  # noqa: E731
            await until(running_now, "all are at work")
            os.kill(server.worker_pid(), signal.SIGCONT)
            # A busy server takes up many tokens at once and counts one step: all may be answered.
            has_come = lambda: (  # noqa: E731
                figure("hearth_inter_token_seconds_count") > 70 or all(one.done() for one in asked)
            )
            await until(has_come, "tokens came")
            os.kill(server.worker_pid(), signal.SIGKILL)
            answers = dict(zip(WHOLE, await asyncio.gather(*asked), strict=True))
        assert {name: one.status_code for name, one in answers.items()} == dict.fromkeys(WHOLE, 200)
        assert figure("hearth_worker_crashes_total") == 1
        told = {name: one.json() for name, one in answers.items()}
        counted = (
            sum(told[name]["usage"]["completion_tokens"] for name in ("chat", "completions"))
            + sum(told[name]["usage"]["output_tokens"] for name in ("messages", "responses"))
            + told["agent"]["usage"]["completion_tokens"]
            + told["ollama"]["eval_count"]
        )
        assert counted == figure("hearth_output_tokens_total")
        assert [one["index"] for one in told["completions"]["choices"]] == [0, 1, 2, 3]
        assert server.get("/v1/agents/kept").json()["turns"] == 1
        for name in ("chat", "completions"):
            path, body = WHOLE[name]
            again = server.post(path, {"model": "tiny"} | body).json()
            assert again["choices"] == told[name]["choices"], name


def test_a_crash_that_nobody_knows_is_not_found(server: RunningServer):
    missing = server.get("/admin/crashes/0123456789ab")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "crash_not_found"
    assert server.get("/admin/crashes").json() == {"crashes": []}


def test_crashes_are_for_this_machine_only(server: RunningServer):
    for path in ("/admin/crashes", "/admin/crashes/0123456789ab"):
        refused = server.request("GET", path, headers={"host": "example.org"})
        assert refused.status_code == 403
