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
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def endless(number: int) -> dict[str, Any]:
    """A request of its own content: what kills two workers would be suspected."""
    prompt = f"a secret word {number}"
    return {"model": "tiny", "prompt": prompt, "max_tokens": 3000, "ignore_eos": True}


async def killed_under_streams(server: RunningServer, number: int) -> list[list[Any]]:
    """Kill the worker while streams run; all events of each."""
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(
                streaming(server, COMPLETIONS, endless(number * NUM_STREAMS + index))
            )
            for index in range(NUM_STREAMS)
        ]
        for stream in streams:
            await stream.next_event()
        os.kill(server.worker_pid(), signal.SIGKILL)
        return list(await asyncio.gather(*(stream.rest() for stream in streams)))


async def test_a_worker_killed_under_eight_streams_is_replaced_and_every_stream_is_told(
    tmp_path: Path, models_dir: Path
):
    config = f'models_dir = "{models_dir}"\ndefault_model = "tiny"\n'
    with running(tmp_path, config=config) as server:
        for number in range(NUM_ROUNDS):
            pid = server.worker_pid()
            for events in await killed_under_streams(server, number):
                assert events[-1]["error"]["code"] == "model_crashed"
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
        assert record["phase"] in ("idle", "prefill", "decode")
        for file in (tmp_path / "crashes").iterdir():
            assert "secret" not in file.read_text()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_crash_that_nobody_knows_is_not_found(server: RunningServer):
    missing = server.get("/admin/crashes/0123456789ab")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "crash_not_found"
    assert server.get("/admin/crashes").json() == {"crashes": []}


def test_crashes_are_for_this_machine_only(server: RunningServer):
    for path in ("/admin/crashes", "/admin/crashes/0123456789ab"):
        refused = server.request("GET", path, headers={"host": "example.org"})
        assert refused.status_code == 403
