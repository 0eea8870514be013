"""What may wait for idle time is served when nobody else is, or when its time is over."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from runtime.supervisor.calls import QueuedRequest
from runtime.supervisor.generation import Generation
from runtime.supervisor.queue import RequestQueue
from runtime.types import GenerateRequest, Priority, TextPrompt
from tests.puppets import World, spec_of
from tests.unit.test_request_scheduler import asked, brought_up

WINDOW_S = 28_200.0


class Waiting(NamedTuple):
    """Something in the queue, which came at 100 s."""

    request_id: str
    idle_until_s: float = 100.0
    yields: bool = False
    since_s: float = 100.0
    until_s: float = 30_000.0
    model: str = "a"
    priority: Priority = "default"


PATIENT = Waiting("patient", 100.0 + WINDOW_S)
OTHER = Waiting("other")
WARMING = Waiting("warming", yields=True)


@pytest.mark.parametrize(
    ("waiting", "running", "now_s", "due"),
    [
        ([PATIENT], [], 100.0, ["patient"]),
        ([PATIENT], [OTHER], 100.0, []),
        ([PATIENT, OTHER], [], 200.0, ["other"]),
        ([PATIENT], [OTHER], 28_299.9, []),
        ([PATIENT], [OTHER], 28_300.0, ["patient"]),
        ([PATIENT], [WARMING], 100.0, ["patient"]),
        ([PATIENT], [PATIENT._replace(request_id="earlier")], 100.0, ["patient"]),
        ([OTHER], [PATIENT], 100.0, ["other"]),
    ],
)
def test_everybody_else_goes_before_who_has_hours(
    waiting: list[Waiting], running: list[Waiting], now_s: float, due: list[str]
) -> None:
    queue: RequestQueue[Waiting] = RequestQueue()
    for one in waiting:
        queue.add(one)
    assert [one.request_id for one in queue.due(running, now_s)] == due


def test_the_end_of_the_hours_is_a_time_to_wake() -> None:
    queue: RequestQueue[Waiting] = RequestQueue()
    queue.add(PATIENT)
    assert queue.due_s(100.0) == 28_300.0
    assert queue.due_s(28_300.0) == 30_000.0


def wait_for_idle_time(world: World, model: str) -> Generation:
    request = GenerateRequest(
        request_id="patient", model=model, prompt=TextPrompt(text="x"), idle_s=WINDOW_S
    )
    generation = Generation(request, world.scheduler)
    call = QueuedRequest(
        spec_of(model),
        generation,
        request_id="patient",
        priority="background",
        since_s=world.now_s,
        until_s=world.now_s + WINDOW_S + 600.0,
    )
    world.scheduler.submit(call)
    return generation


async def test_it_begins_when_the_last_other_answer_ends() -> None:
    world = World(None)
    asked(world, "a", "first")
    brought_up(world)
    (puppet,) = world.alive()
    wait_for_idle_time(world, "a")
    world.pass_time(3600.0)
    asked(world, "a", "second")
    world.finish(puppet, "first")
    assert set(puppet.open) == {"second"}
    world.finish(puppet, "second")
    assert set(puppet.open) == {"patient"}


async def test_its_model_is_not_even_loaded_before() -> None:
    world = World(None)
    asked(world, "a", "first")
    brought_up(world)
    (puppet,) = world.alive()
    wait_for_idle_time(world, "b")
    assert len(world.alive()) == 1
    world.finish(puppet, "first")
    assert len(world.alive()) == 2


async def test_it_begins_beside_others_at_the_end_of_its_time() -> None:
    world = World(None)
    asked(world, "a", "first")
    brought_up(world)
    (puppet,) = world.alive()
    wait_for_idle_time(world, "a")
    world.pass_time(WINDOW_S - 1.0)
    assert set(puppet.open) == {"first"}
    world.pass_time(1.0)
    assert set(puppet.open) == {"first", "patient"}
