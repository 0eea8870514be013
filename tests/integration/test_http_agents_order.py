"""Several requests for one agent: their order, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.agents import Agent, refusal
from tests.running_server import RunningServer, running, streaming
from tests.waiting import until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("agents")) as server:
        yield server
        assert "Traceback" not in server.stderr


async def test_generates_of_one_agent_are_answered_in_the_order_of_their_arrival(
    tiny: RunningServer,
):
    agent = Agent.made(tiny)
    async with tiny.client() as client:

        async def ask(number: int) -> int:
            body = {"messages": [{"role": "user", "content": f"Hello {number}!"}]}
            response = await client.post(f"{agent.path}/generate", json=body)
            return response.json()["agent"]["turn"]

        tasks: list[asyncio.Task[int]] = []
        for number in range(5):
            tasks.append(asyncio.create_task(ask(number)))
            # In this order, so that one that ends in between is not counted twice.
            await until(lambda n=number: len(agent.turns()) + agent.view()["queued"] > n, "queued")
        assert await asyncio.gather(*tasks) == [1, 2, 3, 4, 5]
    contents = [turn["messages"][0]["content"] for turn in agent.turns()]
    assert contents == [f"Hello {number}!" for number in range(5)]


LONG = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "ignore_eos": True,
    "max_tokens": 100_000,
}


async def test_a_stream_whose_client_leaves_is_not_in_the_history(tiny: RunningServer):
    agent = Agent.made(tiny)
    agent.say("Hello!")
    async with streaming(tiny, f"{agent.path}/generate", LONG) as stream:
        for _ in range(5):
            await stream.next_event()
    await until(lambda: agent.view()["queued"] == 0, "the agent is free")
    assert len(agent.turns()) == 1
    assert agent.say().turn == 2


async def test_one_that_waits_can_be_cancelled_and_the_next_goes_on(tiny: RunningServer):
    agent = Agent.made(tiny)
    async with streaming(tiny, f"{agent.path}/generate", LONG) as running_one:
        await running_one.next_event()
        async with tiny.client() as client:
            path = f"{agent.path}/generate"
            body = {"messages": [{"role": "user", "content": "Hello!"}]}
            cancelled = asyncio.create_task(client.post(path, json=body))
            await until(lambda: agent.view()["queued"] == 2, "one waits")
            third = asyncio.create_task(client.post(path, json=body))
            await until(lambda: agent.view()["queued"] == 3, "two wait")
            cancelled.cancel()
            await until(lambda: agent.view()["queued"] == 2, "one has left")
            await running_one.response.aclose()
            answer = await third
            assert answer.json()["agent"]["turn"] == 1
    assert len(agent.turns()) == 1


@pytest.mark.parametrize(
    ("action", "code"), [("delete", "agent_not_found"), ("reset", "agent_changed")]
)
async def test_deleting_and_resetting_end_what_runs_and_what_waits(
    tiny: RunningServer, action: str, code: str
):
    agent = Agent.made(tiny)
    async with tiny.client() as client, streaming(tiny, f"{agent.path}/generate", LONG) as stream:
        await stream.next_event()
        body = {"messages": [{"role": "user", "content": "Hello!"}]}
        waiting = asyncio.create_task(client.post(f"{agent.path}/generate", json=body))
        await until(lambda: agent.view()["queued"] == 2, "one waits")
        if action == "delete":
            done = await client.delete(agent.path)
        else:
            done = await client.post(f"{agent.path}/reset")
        assert done.status_code == 200, done.text
        assert (await stream.rest())[-1]["error"]["code"] == code
        assert refusal(await waiting, 404 if action == "delete" else 409)["code"] == code
    if action == "reset":
        assert agent.turns() == []
        assert agent.say("Hello!").turn == 1


async def test_what_is_changed_during_a_generate_counts_from_the_next_on(tiny: RunningServer):
    agent = Agent.made(tiny, max_tokens=40, ignore_eos=True)
    body = {"messages": [{"role": "user", "content": "Hello!"}]}
    async with streaming(tiny, f"{agent.path}/generate", body) as stream:
        await stream.next_event()
        changed = tiny.request("PATCH", agent.path, json={"max_tokens": 3})
        assert changed.json()["config"]["max_tokens"] == 3
        await stream.rest()
    agent.say("Hello!")
    assert [turn["usage"]["completion_tokens"] for turn in agent.turns()] == [40, 3]
