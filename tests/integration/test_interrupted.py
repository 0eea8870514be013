"""An answer that was interrupted is kept as far as it came, and its half goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.running_server import CHAT, RunningServer, running, streaming
from tests.waiting import until

ASKED: dict[str, Any] = {"role": "user", "content": "Tell me of the kettle and the stove. " * 20}
GO_ON: dict[str, Any] = {"role": "user", "content": "go on"}
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "logprobs": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), config="[models.hearth-tiny]\n") as server:
        yield server


async def interrupted(server: RunningServer, num_events: int, **more: Any) -> tuple[str, int]:
    """What a client that leaves after so many events was told, and in how many tokens."""
    text, num_tokens = "", 0
    body = {"messages": [ASKED]} | LONG | more
    async with streaming(server, CHAT, body) as stream:
        for _ in range(num_events):
            event = await stream.next_event()
            choice = event["choices"][0]
            text += choice["delta"].get("content") or ""
            num_tokens += len((choice.get("logprobs") or {}).get("content") or ())
    await until(lambda: server.figure("hearth_running") == 0, "the request has ended")
    return text, num_tokens


@pytest.mark.parametrize("num_events", [3, 40, 150])
async def test_an_answer_that_its_client_left_is_reused(server: RunningServer, num_events: int):
    more = {"seed": num_events, "session_id": f"left-{num_events}"}
    text, num_tokens = await interrupted(server, num_events, **more)
    half = {"role": "assistant", "content": text}
    body = {"messages": [ASKED, half, GO_ON], "max_tokens": 1} | more
    alone = server.post(CHAT, {"messages": [ASKED], "max_tokens": 1}).json()["usage"]
    usage = server.post(CHAT, body).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(text[-200:], num_tokens, usage)
    assert cached >= alone["prompt_tokens"] + num_tokens - 1
