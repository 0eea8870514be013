"""What waits to be warmed, and what was, does not pile up while a server runs for weeks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import Overloaded
from runtime.prewarm.prewarm import Prewarm
from runtime.supervisor.lifecycle import Transition
from runtime.supervisor.supervisor import Supervisor
from runtime.types import ChatPrompt, GenerateRequest, Message
from tests.asking import supervising_with_store
from tests.model_folders import make_model
from tests.waiting import until

pytestmark = pytest.mark.asyncio
SYSTEM = "Be kind to boats. " * 100
DAY_S = 86_400.0
LIMIT = 2
UP = Transition("tiny", "warming", "up", "ready")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Desk:
    """Prewarming for a model that comes up and is never there when its turn comes."""

    def __init__(self, settings: Settings, supervisor: Supervisor, kv: KvStore) -> None:
        self.supervisor = supervisor
        self.clock = Clock()
        self.num_up = 0
        self.prewarm = Prewarm(settings, supervisor, kv, self._pinned, self.clock)

    def _pinned(self, model: str) -> Sequence[GenerateRequest]:
        self.num_up += 1
        return [request(model)]

    async def come_up(self, num_times: int) -> None:
        wanted = self.num_up + num_times
        for _ in range(num_times):
            self.supervisor.news.publish(UP)
        await until(lambda: self.num_up == wanted, "its prefixes are wanted")


def request(model: str = "tiny") -> GenerateRequest:
    prompt = ChatPrompt((Message(role="user", text="Good morning."),))
    return GenerateRequest(request_id="any", model=model, prompt=prompt)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    make_model(tmp_path / "models" / "tiny")
    async with supervising_with_store(tmp_path, max_queue=LIMIT) as (supervisor, kv):
        desk = Desk(Settings(home=tmp_path, max_queue=LIMIT), supervisor, kv)
        desk.prewarm.start()
        yield desk
        await desk.prewarm.stop()


async def test_what_is_wanted_at_each_load_takes_no_room_of_what_clients_announce(desk: Desk):
    await desk.come_up(LIMIT * 5)
    for _ in range(LIMIT):
        desk.prewarm.ask(request(), loads=False)
    with pytest.raises(Overloaded):
        desk.prewarm.ask(request(), loads=False)


async def test_a_prompt_waits_for_its_model_for_a_day(desk: Desk):
    waiting = [desk.prewarm.ask(request(), loads=False) for _ in range(LIMIT)]
    desk.clock.now_s = DAY_S - 1
    await desk.prewarm.sweep()
    assert [one.state for one in waiting] == ["waiting"] * LIMIT
    desk.clock.now_s = DAY_S + 1
    await desk.prewarm.sweep()
    assert [one.state for one in waiting] == ["failed"] * LIMIT
    assert "was not loaded in time" in (waiting[0].error or "")
    desk.prewarm.ask(request(), loads=False)


async def test_of_what_is_over_the_prompt_is_forgotten(desk: Desk):
    warming = desk.prewarm.ask(request(), loads=False)
    assert warming.request.prompt == request().prompt
    await desk.prewarm.cancel(warming.id)
    assert warming.request.prompt == ChatPrompt(())
    assert desk.prewarm.find(warming.id) is warming
