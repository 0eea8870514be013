"""Responses in the background over a real history; when the model says what is up to the test."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from api.http.answer import Answer
from api.http.caller import Caller
from api.http.chains import Chains
from api.http.expansion import Expansion
from api.observe.metrics import Meter, Metrics
from api.openai.response_schemas import ItemHead, ResponseRequest
from api.responses.archive import Archive
from api.responses.convert import items_of, plan_of
from api.responses.items import Item
from api.responses.output import ResponseResource
from api.responses.service import ResponseService
from api.responses.stream import ResponseDraft, new_response_id
from runtime.cache.figures import DiskFigures, KvFigures
from runtime.cache.history import History
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest, UnknownResponse, WorkerError
from runtime.supervisor.generation import Generation
from runtime.types import CacheUse, Chunk, Finished, ModelSpec, TextDelta, Usage
from tests.living_history import living
from tests.waiting import until

SPEC = ModelSpec(
    id="m", path="/m", context=4096, model_type="qwen3", nbytes=1, created_s=1, aliases=()
)
REQUEST = msgspec.json.decode(b'{"input": "hi", "background": true}', type=ResponseRequest)
END = Finished(index=0, reason="stop", usage=Usage(num_prompt_tokens=1))
LONG_S = 60.0


class Nobody:
    """Owns generations that have no worker."""

    def aborted(self, generation: Generation) -> None: ...
    def lost(self, generation: Generation, error: WorkerError) -> bool:
        return False

    def spoke(self, generation: Generation) -> None: ...
    def ended(self, generation: Generation) -> None: ...


def chains_of(history: History, home: Path) -> Chains:
    settings = Settings(home=home)
    return Chains(history, settings, KvStore(settings).is_deleted)


class HeldArchive(Archive):
    """Tells what it has read only when it may."""

    def __init__(self, chains: Chains) -> None:
        super().__init__(chains)
        self.num_read = 0
        self.may_tell = asyncio.Event()

    @override
    async def find(self, response_id: str) -> ResponseResource:
        found = await super().find(response_id)
        self.num_read += 1
        await self.may_tell.wait()
        return found


class Made:
    """A response that is made in the background."""

    def __init__(self, home: Path) -> None:
        items = items_of(REQUEST)
        plan = plan_of(REQUEST, items, new_response_id(), SPEC, Caller(), Settings(home=home))
        self.generation = Generation(plan.request, Nobody())
        metrics = Metrics(list, lambda: KvFigures({}, {}, DiskFigures()))
        self.reply = ResponseDraft(
            REQUEST, plan, SPEC, Answer([self.generation], Meter(metrics, SPEC.id))
        )
        self.id = self.reply.id

    async def begin(self, desk: ResponseService, keep_alive_s: float = LONG_S) -> None:
        desk.begin(self.reply)
        await desk.start(self.reply, items_of(REQUEST), keep_alive_s)

    def say(self, *chunks: Chunk) -> None:
        self.generation.accept(1, CacheUse())
        for chunk in chunks:
            self.generation.push(chunk)

    async def finish(self, desk: ResponseService) -> None:
        self.say(TextDelta(index=0, text="let "), TextDelta(index=0, text="me"), END)
        await until(lambda: not desk.is_underway(self.id), "it is complete")


async def events(desk: ResponseService, response_id: str, after: int = -1) -> list[Any]:
    """What a stream of the response's events tells, to its end."""
    log = await desk.events_of(response_id)
    assert log is not None
    told = b"".join([event async for event in log.follow(after)])
    return [json.loads(block.split(b"data: ", 1)[1]) for block in told.split(b"\n\n") if block]


async def test_who_asks_while_it_ends_is_not_told_that_it_was_interrupted(tmp_path: Path) -> None:
    async with living(tmp_path) as history:
        archive = HeldArchive(chains_of(history, tmp_path))
        desk = ResponseService(archive)
        made = Made(tmp_path)
        await made.begin(desk)
        asked = asyncio.create_task(desk.find(made.id))
        await until(lambda: archive.num_read, "the history was read")
        await made.finish(desk)
        archive.may_tell.set()
        assert (await asked).status == "in_progress"
        assert (await desk.find(made.id)).status == "completed"


async def test_events_are_the_same_after_a_restart_and_go_with_the_response(tmp_path: Path) -> None:
    made = Made(tmp_path)
    async with living(tmp_path) as history:
        desk = ResponseService(Archive(chains_of(history, tmp_path)))
        await made.begin(desk)
        following = asyncio.create_task(events(desk, made.id))
        await made.finish(desk)
        told = await following
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["type"] == "response.completed"
    async with living(tmp_path) as history:
        desk = ResponseService(Archive(chains_of(history, tmp_path)))
        assert await events(desk, made.id) == told
        assert await events(desk, made.id, after=3) == told[4:]
        await desk.remove(made.id)
        assert await desk.events_of(made.id) is None
        with pytest.raises(UnknownResponse):
            await desk.find(made.id)


async def test_what_is_stored_is_not_read_when_it_is_more_than_a_request_may_have(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path)
    async with living(tmp_path) as history:
        archive = Archive(chains_of(history, tmp_path))
        desk = ResponseService(archive)
        await made.begin(desk)
        await made.finish(desk)
        past = await archive.past(made.id, Expansion(1000))
        size = sum(len(item.raw) for item in past)
        assert await archive.past(made.id, Expansion(size)) == past
        assert all(item.is_stored for item in past)
        with pytest.raises(InvalidRequest) as refused:
            await archive.past(made.id, Expansion(size - 1))
        assert refused.value.param == "previous_response_id"
        said = msgspec.json.decode(past[0].raw, type=ItemHead).id
        reference = msgspec.Raw(json.dumps({"type": "item_reference", "id": said}).encode())
        many = [Item(reference, f"input[{i}]") for i in range(200)]
        length = len(past[0].raw)
        found = await archive.resolved(many, "", Expansion(200 * length))
        assert [item.raw for item in found] == [past[0].raw] * 200
        with pytest.raises(InvalidRequest) as refused:
            await archive.resolved(many, "", Expansion(150 * length))
        assert refused.value.param == "input[150]"


async def test_a_response_that_waits_says_so_in_its_events(tmp_path: Path) -> None:
    async with living(tmp_path) as history:
        desk = ResponseService(Archive(chains_of(history, tmp_path)))
        made = Made(tmp_path)
        await made.begin(desk, keep_alive_s=0.01)
        log = await desk.events_of(made.id)
        assert log is not None
        await until(lambda: log.whole.count(b"event: response.in_progress") > 2, "it lives")
        await made.finish(desk)
        told = await events(desk, made.id)
        assert [event["type"] for event in told[:3]] == [
            "response.created",
            "response.in_progress",
            "response.in_progress",
        ]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
