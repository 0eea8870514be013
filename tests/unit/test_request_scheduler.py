"""Every event in every state, with processes that do whatever they like and a clock of our own."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from api.http.errors import STATUSES
from runtime.errors import (
    HearthError,
    InvalidRequest,
    LoadFailed,
    NoRoom,
    Overloaded,
    PoisonRequest,
    WorkerDied,
    WorkerWedged,
)
from runtime.supervisor.calls import LoadRequest, QueuedRequest
from runtime.supervisor.failures import FURTHER_TOKENS
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import HAS_PROCESS, RESTING
from runtime.types import (
    Failed,
    Finished,
    GenerateRequest,
    Priority,
    TextDelta,
    TextPrompt,
    Usage,
)
from runtime.wire import SaidToken
from tests.examples import usual
from tests.puppets import (
    MODELS,
    NEEDS,
    ROOM,
    World,
    spec_of,
)

END_CODES = {error.code for error in STATUSES}


class Supervision(RuleBasedStateMachine):
    """Nothing is lost, nothing is granted twice, no more is loaded than fits, nothing sticks."""

    generations = Bundle("generations")

    @initialize(max_loaded=st.sampled_from([None, 1, 2]))
    def begin(self, max_loaded: int | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.world = World(max_loaded)
        self.scheduler = self.world.scheduler
        self.submitted: list[Generation] = []
        self.wishes: list[LoadRequest] = []
        self.numbers = count()

    def made(self, make: Callable[[], object]) -> object:
        async def inside() -> object:
            return make()

        return self.loop.run_until_complete(inside())

    def call(
        self, model: str, job: Generation | LoadRequest, request_id: str, priority: Priority
    ) -> None:
        now_s = self.world.now_s
        self.scheduler.submit(
            QueuedRequest(
                spec_of(model),
                job,
                request_id=request_id,
                priority=priority,
                since_s=now_s,
                until_s=now_s + 600.0,
            )
        )

    @rule(
        target=generations,
        model=st.sampled_from(MODELS),
        priority=st.sampled_from(["interactive", "default", "background"]),
        text=st.sampled_from(["x", "y", "z"]),
        keep_alive_s=st.sampled_from([None, None, 0.0, -1.0]),
        is_held=st.booleans(),
    )
    def submit(
        self,
        model: str,
        priority: Priority,
        text: str,
        keep_alive_s: float | None,
        is_held: bool,
    ) -> Generation:
        request = GenerateRequest(
            request_id=f"r{next(self.numbers)}",
            model=model,
            prompt=TextPrompt(text=text),
            priority=priority,
            keep_alive_s=keep_alive_s,
        )
        generation = self.made(lambda: Generation(request, self.scheduler))
        assert isinstance(generation, Generation)
        if is_held:
            generation.hold(lambda _: None)
        try:
            self.call(model, generation, request.request_id, priority)
        except (Overloaded, PoisonRequest) as error:
            generation.fail(error)
        self.submitted.append(generation)
        return generation

    @rule(model=st.sampled_from(MODELS))
    def wish(self, model: str) -> None:
        wish = self.made(LoadRequest)
        assert isinstance(wish, LoadRequest)
        try:
            self.call(model, wish, f"load-{next(self.numbers)}", "background")
        except HearthError as error:
            wish.fail(error)
        self.wishes.append(wish)

    @rule(generation=consumes(generations))
    def abort(self, generation: Generation) -> None:
        generation.abort()
        assert generation.is_finished

    @rule(seconds=st.sampled_from([0.1, 2.0, 10.0, 40.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(num_bytes=st.sampled_from([0, 0, 30, 70]))
    def ended_processes_keep_memory(self, num_bytes: int) -> None:
        self.world.missing_bytes = num_bytes
        self.scheduler.reconcile()

    @rule(pick=st.integers(0, 5))
    def a_process_goes_on(self, pick: int) -> None:
        if alive := self.world.alive():
            self.world.advance(alive[pick % len(alive)])

    @rule()
    def all_processes_go_on(self) -> None:
        for puppet in self.world.alive():
            self.world.advance(puppet)

    @rule(pick=st.integers(0, 5), is_gone=st.booleans(), kind=st.sampled_from(["died", "stuck"]))
    def a_process_is_lost(self, pick: int, is_gone: bool, kind: str) -> None:
        if alive := self.world.alive():
            puppet = alive[pick % len(alive)]
            error = WorkerDied("It died.") if kind == "died" else WorkerWedged("It is stuck.")
            if kind == "died" and puppet.state == "loading":
                error = LoadFailed("It cannot be loaded.")
            self.world.end(puppet, error, is_gone=is_gone)

    @rule(pick=st.integers(0, 5))
    def a_request_speaks(self, pick: int) -> None:
        busy = [(one, puppet) for puppet in self.world.alive() for one in puppet.open.values()]
        if busy:
            generation, puppet = busy[pick % len(busy)]
            number = self.world.puppets.index(puppet)
            generation.push(TextDelta(index=0, text=f"{number}"))

    @rule(
        model=st.sampled_from(MODELS), order=st.sampled_from(["leave", "pin", "unpin", "forgive"])
    )
    def the_operator_says(self, model: str, order: str) -> None:
        actor = self.scheduler.actor(model)
        match order:
            case "leave":
                actor.leave("the operator says so", self.world.now_s, 5.0)
            case "forgive":
                actor.forgive(self.world.now_s)
            case _:
                actor.pinned = {actor.model} if order == "pin" else set()
        self.scheduler.reconcile()

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        if not hasattr(self, "world"):
            return
        for generation in self.submitted:
            request_id = generation.request.request_id
            waits = sum(call.job is generation for call in self.scheduler.find(request_id))
            runs = sum(request_id in puppet.open for puppet in self.world.puppets)
            granted = sum(request_id in one.running for one in self.scheduler.actors.values())
            if generation.is_finished:
                assert (waits, runs, granted) == (0, 0, 0), request_id
            else:
                assert waits == 1, request_id
                assert runs == granted <= 1, request_id

    @invariant()
    def what_is_loaded_fits(self) -> None:
        if not hasattr(self, "world"):
            return
        held = [a for a in self.scheduler.actors.values() if a.state in HAS_PROCESS]
        models = {actor.model for actor in held}
        assert {puppet.spec.id for puppet in self.world.alive()} >= models - self.given_up()
        abandoned = sum(a.abandoned_bytes for a in self.scheduler.actors.values())
        assert sum(actor.reserved_bytes for actor in held) + abandoned <= ROOM
        limit = self.world.room().num_models
        assert limit is None or len(held) <= limit
        assert all(a.reserved_bytes == 0 for a in self.scheduler.actors.values() if a not in held)

    def given_up(self) -> set[str]:
        """Models whose process is gone, which has yet to be told."""
        return {puppet.spec.id for puppet in self.world.puppets if puppet.is_gone}

    @invariant()
    def nothing_sticks(self) -> None:
        if not hasattr(self, "world"):
            return
        for actor in self.scheduler.actors.values():
            if actor.state not in RESTING:
                assert actor.due_s < math.inf, actor.state
                assert self.world.due_s is not None
                assert self.world.due_s <= actor.due_s

    def teardown(self) -> None:
        """When processes are healthy and nothing is pinned any more, everything ends."""
        if not hasattr(self, "world"):
            return
        for actor in self.scheduler.actors.values():
            actor.pinned.clear()
        self.world.missing_bytes = 0
        self.scheduler.reconcile()
        for _ in range(400):
            if all(one.is_finished for one in self.submitted):
                break
            for puppet in self.world.alive():
                self.world.advance(puppet)
            self.world.pass_time(1.0)
        states = {actor.model: actor.state for actor in self.scheduler.actors.values()}
        assert all(one.is_finished for one in self.submitted), states
        self.assert_documented_ends()
        self.world.pass_time(100.0)
        for _ in range(10):
            for puppet in self.world.alive():
                self.world.advance(puppet)
        self.assert_all_gone_when_closed()
        self.loop.close()

    def assert_documented_ends(self) -> None:
        for generation in self.submitted:
            ended, said_by = self.loop.run_until_complete(_end_of(generation))
            assert isinstance(ended, Finished) or ended.code in END_CODES
            assert len(said_by) <= 1, "what two processes said is not one answer"

    def assert_all_gone_when_closed(self) -> None:
        self.scheduler.close()
        for _ in range(10):
            for puppet in self.world.alive():
                self.world.advance(puppet)
        assert self.world.alive() == []
        assert all(a.state not in HAS_PROCESS for a in self.scheduler.actors.values())
        assert all(a.reserved_bytes == 0 for a in self.scheduler.actors.values())
        assert self.scheduler.num_open == 0


async def _end_of(generation: Generation) -> tuple[Finished | Failed | HearthError, set[str]]:
    """How it ended, and the different texts that were delivered before."""
    try:
        await generation.accepted()
    except HearthError as error:
        return error, set()
    chunks = await generation.next_chunks() or []
    last = chunks[-1] if chunks else None
    assert isinstance(last, Finished | Failed), last
    return last, {one.text for one in chunks if isinstance(one, TextDelta)}


@pytest.mark.parametrize("is_held", [True, False])
async def test_an_answer_that_nobody_was_told_of_begins_again_once(is_held: bool) -> None:
    """Choices that were complete begin again as well, and nothing of the first time is told.

    So it is where no worker can go on: the prompt's scores come with it.
    """
    world = World(None)
    request = GenerateRequest(
        request_id="r",
        model="a",
        prompt=TextPrompt(text="x"),
        num_choices=2,
        scores_prompt=True,
    )
    generation, heard = Generation(request, world.scheduler), list[str]()
    if is_held:
        generation.hold(lambda chunk: heard.append(type(chunk).__name__))
    world.scheduler.submit(
        QueuedRequest(
            spec_of("a"), generation, request_id="r", priority="default", since_s=0.0, until_s=600.0
        )
    )
    brought_up(world)
    generation.push(TextDelta(index=0, text="first"))
    generation.push(Finished(index=0, reason="stop", usage=Usage(num_prompt_tokens=1)))
    told = await generation.next_chunks(0.0)
    assert (told is None) == is_held
    world.end(world.alive()[0], WorkerDied("It died."))
    if not is_held:
        ended, _ = await _end_of(generation)
        assert isinstance(ended, Failed)
        return
    assert not generation.is_finished
    assert generation.usage is None
    brought_up(world)
    for index in range(2):
        generation.push(TextDelta(index=index, text="second"))
        generation.push(Finished(index=index, reason="stop", usage=Usage(num_prompt_tokens=1)))
    chunks = await generation.next_chunks() or []
    assert [one.text for one in chunks if isinstance(one, TextDelta)] == ["second"] * 2
    assert sum(isinstance(one, Finished) for one in chunks) == 2
    assert heard == ["TextDelta", "Finished"] * 3
    assert await generation.next_chunks() == []


async def test_an_answer_does_not_begin_a_third_time() -> None:
    world = World(None)
    request = GenerateRequest(
        request_id="r", model="a", prompt=TextPrompt(text="x"), scores_prompt=True
    )
    generation = Generation(request, world.scheduler)
    generation.hold(lambda _: None)
    world.scheduler.submit(
        QueuedRequest(
            spec_of("a"), generation, request_id="r", priority="default", since_s=0.0, until_s=600.0
        )
    )
    for text in ("first", "second"):
        brought_up(world)
        generation.push(TextDelta(index=0, text=text))
        world.end(world.alive()[0], WorkerDied("It died."))
    ended, said_by = await _end_of(generation)
    assert isinstance(ended, Failed)
    assert "first" not in said_by


def say(generation: Generation, index: int, token_ids: Sequence[int]) -> None:
    """As a worker does: each token, and the text that it makes."""
    for token_id in token_ids:
        generation.note(SaidToken(generation.request.request_id, index, token_id))
        generation.push(TextDelta(index=index, text=f"{token_id} "))


async def test_an_answer_goes_on_twice_from_where_it_was_and_then_fails() -> None:
    """Each worker is told every token so far, and which choices have ended."""
    world = World(None)
    request = GenerateRequest(request_id="r", model="a", prompt=TextPrompt(text="x"), num_choices=2)
    generation = Generation(request, world.scheduler)
    world.scheduler.submit(
        QueuedRequest(
            spec_of("a"), generation, request_id="r", priority="default", since_s=0.0, until_s=600.0
        )
    )
    brought_up(world)
    said = list[int]()
    for number in range(3):
        assert (generation.said is None) == (number == 0)
        more = range(100 * number, 100 * number + FURTHER_TOKENS + 1)
        say(generation, 0, more)
        said += more
        if number == 0:
            say(generation, 1, [7])
            generation.push(Finished(index=1, reason="stop", usage=Usage(num_prompt_tokens=1)))
        world.end(world.alive()[0], WorkerDied("It died."))
        if number < 2:
            brought_up(world)
            assert generation.said is not None
            first, second = generation.said.choices
            assert (list(first.token_ids), first.is_finished) == (said, False)
            assert second.is_finished
    chunks = await generation.next_chunks() or []
    assert isinstance(chunks[-1], Failed)
    assert chunks[-1].code == WorkerDied.code
    texts = [one.text for one in chunks if isinstance(one, TextDelta) and one.index == 0]
    assert texts == [f"{token_id} " for token_id in said]


async def test_an_answer_that_kills_at_the_same_place_again_is_poison() -> None:
    world = World(None)
    request = GenerateRequest(request_id="r", model="a", prompt=TextPrompt(text="x"))
    generation = Generation(request, world.scheduler)
    world.scheduler.submit(
        QueuedRequest(
            spec_of("a"), generation, request_id="r", priority="default", since_s=0.0, until_s=600.0
        )
    )
    for num_tokens in (100, FURTHER_TOKENS):
        brought_up(world)
        say(generation, 0, range(num_tokens))
        world.end(world.alive()[0], WorkerDied("It died."))
    chunks = await generation.next_chunks() or []
    assert isinstance(chunks[-1], Failed)
    assert chunks[-1].code == PoisonRequest.code


def brought_up(world: World) -> None:
    """Until a process works for somebody."""
    while not any(puppet.open for puppet in world.alive()):
        for puppet in world.alive():
            world.advance(puppet)
        world.pass_time(1.0)


@pytest.fixture(autouse=True, scope="module")
def silence() -> Iterator[None]:
    """Thousands of transitions would be thousands of lines."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


async def test_a_process_that_cannot_be_ended_keeps_its_memory_until_it_has_ended() -> None:
    world = World(None)
    world.scheduler.submit(call_for(world, "c"))
    (stuck,) = world.alive()
    world.pass_time(200.0)  # it never comes up, and no signal ends it
    assert stuck.is_killed
    assert world.scheduler.actor("c").state not in HAS_PROCESS
    assert world.scheduler.actor("c").abandoned_bytes == NEEDS["c"]
    wish = call_for(world, "b")
    world.scheduler.submit(wish)
    with pytest.raises(NoRoom, match="did not come back"):
        await granted(wish)
    world.end(stuck, None)
    assert world.scheduler.fits(spec_of("b"))


async def test_a_model_that_a_request_has_loaded_needs_no_further_room_at_boot() -> None:
    """The first request can come before what is to be loaded at boot; that was said to fail."""
    world = World(1)
    world.scheduler.submit(call_for(world, "a"))
    assert world.scheduler.fits(spec_of("a"))
    assert not world.scheduler.fits(spec_of("b"))


def call_for(world: World, model: str) -> QueuedRequest:
    return QueuedRequest(
        spec_of(model),
        LoadRequest(),
        request_id=f"wish-{model}",
        priority="default",
        since_s=world.now_s,
        until_s=world.now_s + 100.0,
    )


async def granted(call: QueuedRequest) -> None:
    assert isinstance(call.job, LoadRequest)
    await call.job.granted()


async def test_a_request_that_is_refused_for_its_id_takes_nobody_out_of_the_queue() -> None:
    world = World(None)
    requests = [
        GenerateRequest(request_id="same", model="a", prompt=TextPrompt(text=text))
        for text in ("first", "second")
    ]
    first, second = (Generation(one, world.scheduler) for one in requests)

    def submit(generation: Generation) -> None:
        world.scheduler.submit(
            QueuedRequest(
                spec_of("a"),
                generation,
                request_id="same",
                priority="default",
                since_s=world.now_s,
                until_s=world.now_s + 600.0,
            )
        )

    submit(first)
    with pytest.raises(InvalidRequest):
        submit(second)
    second.abort()
    for _ in range(5):
        for puppet in world.alive():
            world.advance(puppet)
    assert first.is_finished
    assert isinstance((await _end_of(first))[0], Finished)


def asked(world: World, model: str, name: str) -> None:
    request = GenerateRequest(request_id=name, model=model, prompt=TextPrompt(text=name))
    world.scheduler.submit(
        QueuedRequest(
            spec_of(model),
            Generation(request, world.scheduler),
            request_id=name,
            priority="default",
            since_s=world.now_s,
            until_s=world.now_s + 600.0,
        )
    )


@pytest.mark.parametrize(("pauses_s", "lingers"), [((), True), ((50.0,), False), ((50, 1), True)])
async def test_a_model_waits_for_its_next_request_unless_such_have_come_late(
    pauses_s: tuple[float, ...], lingers: bool
) -> None:
    world = World(1)
    asked(world, "a", "first")
    brought_up(world)
    (puppet,) = world.alive()
    world.finish(puppet, "first")
    for pause_s in pauses_s:
        world.pass_time(pause_s)
        asked(world, "a", f"after {pause_s}")
        asked(world, "a", f"beside {pause_s}")
        for request_id in list(puppet.open):
            world.finish(puppet, request_id)
    world.pass_time(0.5)
    asked(world, "b", "other")
    world.pass_time(0.4)  # the grace is 0.3 s, the linger 1 s
    assert puppet.is_dismissed == (not lingers)
    world.pass_time(0.2)
    assert puppet.is_dismissed


@pytest.mark.parametrize("end", ["answered", "lost", "left", "stopped"])
async def test_what_becomes_of_many_requests_in_one_event_is_reconciled_once(end: str) -> None:
    world = World(None)
    generations: list[Generation] = []
    for number in range(4):
        request = GenerateRequest(
            request_id=f"r{number}", model="a", prompt=TextPrompt(text=f"{number}")
        )
        generations.append(Generation(request, world.scheduler))
        before = world.num_reconciled
        world.scheduler.submit(
            QueuedRequest(
                spec_of("a"),
                generations[-1],
                request_id=request.request_id,
                priority="default",
                since_s=0.0,
                until_s=600.0,
            )
        )
        assert world.num_reconciled == before + 1
    brought_up(world)
    (puppet,) = world.alive()
    assert len(puppet.open) == 4
    before = world.num_reconciled
    match end:
        case "answered":
            with world.scheduler.reconcile:
                for request_id in list(puppet.open):
                    world.finish(puppet, request_id)
        case "lost":
            with world.scheduler.reconcile:
                world.end(puppet, WorkerDied("It died."), is_gone=False)
        case "left":
            with world.scheduler.reconcile:
                for generation in generations:
                    generation.abort()
        case _:
            world.scheduler.close()
    assert world.num_reconciled == before + 1
    assert world.scheduler.num_open == (4 if end == "lost" else 0)


TestSupervision = Supervision.TestCase
TestSupervision.settings = settings(max_examples=usual(60), stateful_step_count=50, deadline=None)


@pytest.mark.soak
def test_nothing_is_lost_however_long_one_tries() -> None:
    run_state_machine_as_test(
        Supervision,
        settings=settings(
            max_examples=3000, stateful_step_count=80, derandomize=False, deadline=None
        ),
    )
