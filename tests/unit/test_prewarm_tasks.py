"""What is foreseen after a compaction: whose it is, and when it is given up."""

from __future__ import annotations

import pytest

from runtime.errors import Overloaded
from runtime.keys import owned, plain
from runtime.prewarm.task import Source, TaskTable
from runtime.types import CacheParams, ChatPrompt, GenerateRequest, Message


def request(session: str | None = "s", model: str = "m") -> GenerateRequest:
    prompt = ChatPrompt(messages=(Message(role="user", text="a secret"),))
    cache = CacheParams(session_id=session, tenant="t")
    return GenerateRequest(request_id="r", model=model, prompt=prompt, cache=cache)


def test_it_is_a_background_prefill_under_an_id_of_its_tenants() -> None:
    task = TaskTable().add(request(), "compaction", now_s=0.0)
    asked = task.request
    assert (asked.work, asked.priority, asked.request_id) == ("prefill", "background", task.id)
    assert task.id == owned("t", plain(task.id))
    assert not task.is_pinned


def test_only_what_is_foreseen_of_a_named_conversation_goes_with_it() -> None:
    tasks = TaskTable()
    mine = tasks.add(request("s"), "compaction", now_s=0.0)
    tasks.add(request("other"), "compaction", now_s=0.0)
    tasks.add(request(None), "compaction", now_s=0.0)
    tasks.add(request("s"), "request", now_s=0.0)
    assert tasks.foreseen_of("s") == [mine]
    assert tasks.foreseen_of(None) == []
    assert len(tasks.foreseen()) == 3
    mine.end("completed")
    assert tasks.foreseen_of("s") == []


def test_it_is_not_tried_again_after_it_made_way_and_its_prompt_is_not_remembered() -> None:
    tasks = TaskTable()
    foreseen = tasks.add(request(), "compaction", now_s=0.0)
    asked = tasks.add(request(), "request", now_s=0.0)
    foreseen.put_off()
    asked.put_off()
    assert (foreseen.state, asked.state) == ("cancelled", "waiting")
    assert foreseen.request.prompt == ChatPrompt(())


@pytest.mark.parametrize(("source", "state"), [("compaction", "cancelled"), ("request", "queued")])
def test_it_has_a_minute_to_begin(source: Source, state: str) -> None:
    task = TaskTable().add(request(), source, now_s=10.0)
    task.end_if_late(now_s=70.0)
    assert task.state == "queued"
    task.end_if_late(now_s=70.1)
    assert task.state == state


def test_it_takes_no_room_of_what_clients_ask_for() -> None:
    tasks = TaskTable()
    for _ in range(4):
        tasks.add(request(), "compaction", now_s=0.0)
    tasks.check_room(limit=1)
    tasks.add(request(), "request", now_s=0.0)
    with pytest.raises(Overloaded):
        tasks.check_room(limit=1)


def test_a_model_that_comes_up_anew_wants_its_own_anew_and_nothing_foreseen() -> None:
    tasks = TaskTable()
    foreseen = tasks.add(request(), "compaction", now_s=0.0)
    configured = tasks.add(request(), "config", now_s=0.0)
    tasks.take_back("m")
    assert list(tasks) == [foreseen]
    assert configured.state == "cancelled"
