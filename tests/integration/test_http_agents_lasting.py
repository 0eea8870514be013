"""Agents over restarts and models, within their bounds, and when the history fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from tests.agents import AGENTS, FILLER, SLACK, Agent, refusal
from tests.conversation import CODE
from tests.running_server import running, streaming
from tests.waiting import until


async def test_after_a_restart_an_agent_goes_on_where_it_was(tmp_path: Path):
    config = "prewarm_share = 0.0\n"
    with running(tmp_path, config=config) as server:
        agent = Agent.made(server, id="lasting", name="Lasting", pinned=True)
        agent.say(FILLER)
        before = agent.say()
        await until(lambda: agent.view()["status"] == "hot", "the worker has it")
        fork = agent.fork()
        turns = agent.turns()
    with running(tmp_path, config=config) as server:
        agent, fork = agent.on(server), fork.on(server)
        assert agent.turns() == turns
        view = agent.view()
        assert (view["name"], view["pinned"], view["turns"]) == ("Lasting", True, 2)
        assert view["status"] == "warm"
        known = before.num_prompt_tokens + before.num_output_tokens
        for one in (agent, fork):
            answer = one.say()
            assert CODE in answer.text
            assert answer.num_computed_tokens <= answer.num_prompt_tokens - known + SLACK
            await until(lambda one=one: one.view()["status"] == "hot", "the worker has it")
        listed = server.get(AGENTS).json()["data"]
        assert [one["status"] for one in listed] == ["hot", "hot"]


async def test_an_agent_whose_kv_lies_in_the_cold_store_is_cold_until_it_is_asked(tmp_path: Path):
    config = f'prewarm_share = 0.0\nkv_ttl_s = 0.1\ncold_store = "{tmp_path / "cold"}"\n'
    with running(tmp_path / "home", config=config) as server:
        agent = Agent.made(server)
        before = agent.say(FILLER * 6)  # computing it takes longer than reading it
        await until(lambda: agent.view()["tokens"] > 0, "the turn is on disk")
    with running(tmp_path / "home", config=config) as server:
        agent = agent.on(server)
        await until(lambda: agent.view()["status"] == "cold", "it moved", timeout_s=90)
        answer = agent.say()
        assert CODE in answer.text
        assert answer.num_cached_tokens >= before.num_prompt_tokens - SLACK


def test_a_model_can_be_changed_and_changed_back_and_each_keeps_its_kv(
    tmp_path: Path, models_dir: Path
):
    config = f'models_dir = "{models_dir}"\ndefault_model = "hearth-tiny"\n'
    with running(tmp_path, config=config) as server:
        agent = Agent.made(server)
        agent.say(FILLER)
        before = agent.say()
        assert server.request("PATCH", agent.path, json={"model": "tiny"}).json()["model"] == "tiny"
        agent.say("Hello!", max_tokens=4)
        view = agent.view()
        assert {one["model"] for one in view["models"]} <= {"tiny", "hearth-tiny"}
        server.request("PATCH", agent.path, json={"model": "hearth-tiny"})
        answer = agent.say()
        known = before.num_prompt_tokens + before.num_output_tokens
        assert CODE in answer.text
        assert answer.num_cached_tokens >= known - SLACK
        assert [turn["model"] for turn in agent.turns()] == [
            "hearth-tiny",
            "hearth-tiny",
            "tiny",
            "hearth-tiny",
        ]
        once = agent.say("Hello!", model="tiny", max_tokens=4)
        assert once.turn == 5
        assert agent.view()["model"] == "hearth-tiny"


def test_without_a_history_only_agents_are_refused(tmp_path: Path):
    home = tmp_path / "home"
    (home / "history.sqlite3").mkdir(parents=True)
    with running(home) as server:
        error = refusal(server.post(AGENTS, {}), 503)
        assert error["code"] == "store_unavailable"
        body = {"messages": [{"role": "user", "content": "?"}], "stream": True}
        assert refusal(server.post(f"{AGENTS}/x/generate", body), 503)["code"] == error["code"]
        ready = server.get("/health/ready")
        assert ready.status_code == 200
        assert (ready.json()["history"], ready.json()["cache"]) == ("degraded", "ok")
        chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", chat).status_code == 200


def note(num_bytes: int) -> dict[str, Any]:
    return {"metadata": {"note": "x" * num_bytes}}


async def test_what_is_old_or_too_much_goes_and_what_is_pinned_stays(tmp_path: Path):
    with running(tmp_path, config="history_max_bytes = 500000\n") as server:

        def ids() -> set[str]:
            return {one["id"] for one in server.get(AGENTS).json()["data"]}

        pinned = Agent.made(server, pinned=True, ttl=0.2, **note(100_000))
        old, new = Agent.made(server, **note(200_000)), Agent.made(server)
        short = Agent.made(server, ttl=0.2)
        pinned.say("Hello!", max_tokens=1)
        assert server.request("PATCH", new.path, json=note(200_000)).status_code == 200
        assert old.id not in ids()
        assert {pinned.id, new.id} <= ids()
        error = refusal(server.post(AGENTS, note(450_000)), 503)
        assert error["code"] == "store_unavailable"
        assert "history_max_bytes" in error["message"]
        assert {pinned.id, new.id} <= ids()
        assert len(pinned.turns()) == 1
        await until(lambda: short.id not in ids(), "the janitor came", timeout_s=90)
        assert pinned.id in ids()


async def test_an_answer_that_cannot_be_kept_is_not_said_to_be_complete(tmp_path: Path):
    with running(tmp_path, config="keep_alive_s = 0.2\n") as server:
        agent = Agent.made(server, ignore_eos=True, max_tokens=20)
        body = {"messages": [{"role": "user", "content": "Hello!"}]}
        worker = psutil.Process(server.worker_pid())
        worker.suspend()  # so that nothing has been said when the history goes
        async with streaming(server, f"{agent.path}/generate", body) as stream:
            (tmp_path / "history.sqlite3").unlink()
            worker.resume()
            *events, last = await stream.rest()
        # The second when somebody else noticed first, and the new history knows no such agent.
        assert last["error"]["code"] in ("store_unavailable", "agent_changed")
        choices = [choice for event in events for choice in event["choices"]]
        assert all(choice["finish_reason"] is None for choice in choices)
        await until(
            lambda: server.get("/health/ready").json()["history"] == "ok", "it was made anew"
        )
        assert server.get(AGENTS).json()["data"] == []
        assert Agent.made(server).say().turn == 1
