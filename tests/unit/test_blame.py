"""Whoever kills workers is refused, and nobody else, in whatever company it does that."""

import random
from itertools import count

import pytest

from runtime.errors import HearthError, PoisonRequest, WorkerDied, WorkerError
from runtime.supervisor.calls import QueuedRequest
from runtime.supervisor.generation import Generation
from runtime.types import Failed, GenerateRequest, TextDelta, TextPrompt
from tests.puppets import Puppet, World, spec_of

NUM_INNOCENTS = 5


class Client:
    """Asks one thing again and again until it is answered, or told that it is poison."""

    def __init__(self, world: World, text: str, numbers: "count[int]") -> None:
        self.world = world
        self.text = text
        self.numbers = numbers
        self.generation: Generation | None = None
        self.verdict = ""

    def ask(self) -> Generation:
        request_id = f"r{next(self.numbers)}"
        prompt = TextPrompt(text=self.text)
        request = GenerateRequest(request_id=request_id, model="a", prompt=prompt)
        self.generation = Generation(request, self.world.scheduler)
        now_s = self.world.now_s
        call = QueuedRequest(
            spec_of("a"),
            self.generation,
            request_id=request_id,
            priority="default",
            since_s=now_s,
            until_s=now_s + 600.0,
        )
        try:
            self.world.scheduler.submit(call)
        except HearthError as error:
            self.generation.fail(error)
        return self.generation

    async def look(self) -> None:
        """Learn how it went, and ask again where that is worth it."""
        if self.generation is None:
            self.ask()
        elif self.generation.is_finished and not self.verdict:
            said = await outcome(self.generation)
            if said in ("answered", PoisonRequest.code):
                self.verdict = said
            else:
                self.ask()


async def outcome(generation: Generation) -> str:
    try:
        await generation.accepted()
    except (WorkerError, PoisonRequest) as error:
        return error.code
    last = (await generation.next_chunks() or [None])[-1]
    return last.code if isinstance(last, Failed) else "answered"


def text_of(generation: Generation) -> str:
    assert isinstance(generation.request.prompt, TextPrompt)
    return generation.request.prompt.text


def go_on(world: World, puppet: Puppet, rng: random.Random) -> None:
    """Die of a guilty one, alone or beside others; or say something, or come to an end."""
    if puppet.state != "ready" or not puppet.open:
        world.advance(puppet)
        return
    guilty = [key for key, one in puppet.open.items() if text_of(one).startswith("guilty")]
    if guilty and rng.random() < 0.5:
        others = [key for key in puppet.open if key != guilty[0]]
        beside = rng.sample(others, rng.randint(0, len(others)))
        world.end(puppet, WorkerDied("It died."), lost_on=[guilty[0], *beside])
        return
    key = rng.choice(list(puppet.open))
    if rng.random() < 0.5:
        puppet.open[key].push(TextDelta(index=0, text="hm"))
    elif key not in guilty:
        world.finish(puppet, key)


@pytest.mark.parametrize("seed", range(40))
async def test_only_the_guilty_is_refused_and_everybody_else_is_answered(seed: int):
    rng, world, numbers = random.Random(seed), World(None), count()
    innocents = [Client(world, f"innocent {i}", numbers) for i in range(NUM_INNOCENTS)]
    clients = [*(Client(world, f"guilty {i}", numbers) for i in range(2)), *innocents]
    for _ in range(5000):
        if all(client.verdict for client in clients):
            break
        for client in rng.sample(clients, rng.randint(0, len(clients))):
            await client.look()
        for puppet in world.alive():
            go_on(world, puppet, rng)
        world.pass_time(rng.choice([0.0, 0.1, 1.5]))
        assert world.scheduler.actor("a").state != "failed"
    said = [client.verdict for client in clients]
    assert said == [*[PoisonRequest.code] * 2, *["answered"] * NUM_INNOCENTS]


def taken(world: World) -> Puppet:
    """The process that has requests."""
    while not world.puppets or not world.puppets[-1].open:
        world.pass_time(1.5)
        if alive := world.alive():
            world.advance(alive[-1])
    return world.puppets[-1]


async def test_whoever_left_is_blamed_all_the_same_and_not_who_waited_behind_it():
    """It was given up, and the worker still worked on it when it was lost: twice."""
    world, numbers = World(None), count()
    for number in range(2):
        guilty = Client(world, "guilty", numbers).ask()
        bystander = Client(world, "innocent", numbers)
        bystander.ask()
        puppet = taken(world)
        guilty.abort()
        puppet.left = [guilty.request]
        world.end(puppet, WorkerDied("It died."), lost_on=[])
        puppet = taken(world)
        world.finish(puppet, next(iter(puppet.open)))
        await bystander.look()
        assert bystander.verdict == "answered", number
    with pytest.raises(PoisonRequest):
        await Client(world, "guilty", numbers).ask().accepted()
