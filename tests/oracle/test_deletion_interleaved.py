"""What is deleted while something is under way is gone and stays gone, and others miss nothing.

A talk was answered once and is on disk. Its next turn waits, is read, is answered, has just ended,
or waits for another model to leave when it is deleted; or the server is stopped right afterwards.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.oracle.ledger import Talk
from tests.oracle.talking import kill
from tests.oracle.world import World
from tests.running_server import COMPLETIONS
from tests.tiny_models import write_model
from tests.waiting import PATIENCE_S, pause, until

MODELS = ("m", "n")
LONG = 2500
"""Tokens that are read for long enough to be deleted meanwhile."""
ENDLESS = 7000
"""Tokens of an answer that goes on until its client leaves."""
ONE_AT_A_TIME = "max_loaded_models = 1\nmax_batch = 1\n"
PHASES = ("waits", "is read", "streams", "has just ended", "waits for a swap")


class Turn:
    """A turn that is under way, in a thread of its own; what came of it is looked at later."""

    def __init__(self, world: World, talk: Talk, num_new: int, num_said: int) -> None:
        self.prompt = world.prompt_of(talk, num_new)
        self.pieces: list[dict[str, Any]] = []
        self.failures: list[BaseException] = []
        self.has_ended, self.leaves = threading.Event(), threading.Event()
        fields = {"model": talk.model, "session_id": talk.session}
        self._body = world.vocabulary.body(self.prompt, **fields)
        self._body |= {"max_tokens": num_said, "stream": True}
        self._known = world.vocabulary.known
        self._url = world.server.url + COMPLETIONS
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if self.leaves.is_set():
                        return
                    if line == "data: [DONE]":
                        self.has_ended.set()
                    elif line.startswith("data: "):
                        self.pieces.append(json.loads(line.removeprefix("data: ")))
        except BaseException as failure:
            self.failures.append(failure)

    def wait(self, condition: Callable[[], object]) -> None:
        """Until it is so far."""
        for _ in range(int(PATIENCE_S * 50)):
            if condition():
                return
            assert not self.failures, self.failures
            pause()
        raise AssertionError("it never got so far")

    @property
    def ids(self) -> list[int]:
        """The prompt and its answer."""
        choices = [one["choices"][0] for one in self.pieces if one["choices"]]
        said = [text for one in choices for text in (one["logprobs"] or {}).get("tokens", ())]
        return [*self.prompt, *(self._known[text] for text in said)]

    def finish(self, *, is_cut_short: bool = False) -> None:
        """Wait for its end, which no deletion changes; the end of its server may."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if not is_cut_short:
            assert not self.failures, self.failures
            assert self.has_ended.is_set()


class Deleting(World):
    """`gone` are prompts of what was deleted; `others` are talks that must not miss anything."""

    config = ONE_AT_A_TIME
    max_tokens = 4000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None, seed=3)
        self.gone: list[list[int]] = []
        self.others: list[Talk] = []

    def requests(self) -> list[Any]:
        return self.server.get("/admin/dashboard").json()["requests"]

    def is_being_read(self) -> bool:
        return any(one["num_prompt_tokens"] > LONG for one in self.requests())

    def kept(self, *, is_named: bool, source: Talk | None = None, model: str = "m") -> Talk:
        """A talk that was answered once, and is on disk."""
        ids = source.ids[: len(source.ids) // 2] if source is not None else []
        talk = self.begun(model=model, ids=ids, source=source, is_named=is_named)
        self.say(talk, None if source is not None else 48 + 3 * len(self.ledger.talks))
        self.wait_until_listed(talk)
        return talk

    def deleted_in(self, phase: str, talk: Talk) -> None:
        """Its next turn is so far when it is deleted, and goes on to its end."""
        others = {one["id"] for one in self.unnamed()} - {self.entry(talk)["id"]}
        before: list[Turn] = []
        if phase == "waits":
            busy = self.kept(is_named=True)
            before = [Turn(self, busy, 20, ENDLESS)]
            before[0].wait(lambda: before[0].pieces)
        elif phase == "waits for a swap":
            busy = self.kept(is_named=True, model="n")
            before = [Turn(self, busy, 20, ENDLESS)]
            before[0].wait(lambda: before[0].pieces)
            # The other model wrote all ends as it left, with which each is listed anew.
            others = {one["id"] for one in self.unnamed()} - {self.entry(talk)["id"]}
        is_long = phase == "is read"
        turn = Turn(self, talk, LONG if is_long else 40, 200 if phase == "streams" else 12)
        if phase == "streams":
            turn.wait(lambda: len(turn.pieces) > 3)
        elif phase == "has just ended":
            turn.has_ended.wait(PATIENCE_S)
        else:
            turn.wait(lambda: len(self.requests()) > len(before) or turn.pieces)
        if is_long:
            turn.wait(lambda: turn.pieces or self.is_being_read())
        if phase in ("waits", "waits for a swap"):
            assert not turn.pieces, f"it was to be deleted while it {phase}"
        self.remove_going_on(talk, others)
        talk.pieces.append(tuple(turn.prompt[len(talk.ids) :]))
        self.ledger.buried |= set(talk.pieces)
        self.gone.append(turn.prompt)
        for one in before:
            one.leaves.set()
            one.finish(is_cut_short=True)
        turn.finish()

    def remove_going_on(self, talk: Talk, others: set[str]) -> None:
        """Without a session id it is what is listed beside the others, under whichever id; one that
        went on since it was looked at is listed otherwise.
        """
        if talk.session is not None:
            self.remove(talk)
            return
        for _ in range(100):
            names = {one["id"] for one in self.unnamed()} - others
            answers = [self.remove_named(name) for name in names]
            if any(one.status_code == 200 for one in answers):
                self.told.append(f"{talk.name} is deleted: {[one.text for one in answers]}")
                self.ledger.deleted(talk)
                return
            pause()
        raise AssertionError(f"{talk.name} is not listed")

    def check(self, talk: Talk) -> None:
        """Nothing of it is there, and the others have everything."""
        self.wait_until_listed(self.kept(is_named=True))  # what was on its way has arrived
        self.look_at_files()
        assert self.entry(talk) is None
        for other in self.others:
            self.say(other)

    def check_not_reused(self, prompt: list[int]) -> None:
        """By whoever asks what was deleted once more, of which nothing comes to the disk."""
        shared = self.ledger.allowed(prompt, "", "m")
        answer = self.vocabulary.ask(self.server, prompt, session_id="again", ttl=0, model="m")
        assert answer.num_cached <= shared, answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deleting")
    for number, name in enumerate(MODELS):
        write_model(folder / "models" / name, seed=number, max_position_embeddings=8192)
    return folder


@contextmanager
def deleting(folder: Path) -> Generator[Deleting]:
    world = Deleting(folder)
    with world.noted():
        yield world


@pytest.fixture(scope="module")
def world(folder: Path) -> Generator[Deleting]:
    """A server for all phases; what was deleted in any of them is looked for after a restart."""
    with deleting(folder) as world:
        with world.served():
            world.others = [world.kept(is_named=one) for one in (True, False)]
            yield world
        world.ledger.stopped(is_killed=False)
        with world.served():
            world.look_at_files()
            for other in world.others:
                world.say(other)
            for prompt in world.gone:
                world.check_not_reused(prompt)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_what_is_deleted_while_its_turn_is_under_way_is_gone(
    world: Deleting, phase: str, is_named: bool
):
    with world.noted():
        talk = world.kept(is_named=is_named)
        sibling = world.kept(is_named=is_named, source=talk)
        world.others.append(sibling)
        world.deleted_in(phase, talk)
        for other in world.others:
            other.is_awake = other.is_awake and phase != "waits for a swap"
        world.check(talk)
        world.check_not_reused(world.gone[-1])


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_is_deleted_right_before_its_server_ends_is_gone(tmp_path: Path, is_killed: bool):
    write_model(tmp_path / "models" / "m", max_position_embeddings=8192)
    with deleting(tmp_path) as world:
        others: list[Talk] = []
        for is_named in (True, False):
            with world.served() as server:
                for other in others:
                    world.say(other)
                talk = world.kept(is_named=is_named)
                sibling = world.kept(is_named=is_named, source=talk)
                others.append(sibling)
                for other in others:
                    world.wait_until_listed(other)
                    world.hear(other)
                listed = {one["id"] for one in world.unnamed()} - {world.entry(talk)["id"]}
                turn = Turn(world, talk, 40, 700)
                turn.wait(lambda turn=turn: len(turn.pieces) > 3)
                world.remove_going_on(talk, listed)
                world.ledger.buried.add(tuple(turn.prompt[len(talk.ids) :]))
                kill(server) if is_killed else server.stop()
                turn.finish(is_cut_short=True)
            world.ledger.stopped(is_killed=is_killed)
            world.look_at_files()
            with world.served():
                world.look_at_files()
                assert world.entry(talk) is None
                world.check_not_reused(turn.prompt)
                for other in others:
                    world.say(other)
            world.ledger.stopped(is_killed=False)
        world.look_at_files()


class Interleaved(Deleting):
    """Talks with session ids, of which each has a turn under way, or none. What is deleted begins
    anew under another name.
    """

    config = "max_loaded_models = 1\nmax_batch = 4\n"

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder)
        self.chance.seed(seed)
        self.turns: dict[Talk, Turn] = {}

    def run(self, num_steps: int) -> None:
        with self.noted():
            with self.served():
                for _ in range(num_steps):
                    self.step()
                for talk in list(self.turns):
                    self.end(talk)
                self.wait_until_listed(self.kept(is_named=True))
                self.look_at_files()
                for talk in self.ledger.talks:
                    self.say(talk)
                for prompt in self.gone:
                    self.check_not_reused(prompt)
                    self.ledger.talks.append(Talk("probed", "", "m", "again", prompt))
                self.ledger.talks = [one for one in self.ledger.talks if one.name != "probed"]
            self.ledger.stopped(is_killed=False)
            with self.served():
                self.look_at_files()
                for talk in self.ledger.talks:
                    self.say(talk)
            assert self.gone

    def step(self) -> None:
        talks = self.ledger.talks
        if len(talks) < 5:
            source = self.chance.choice([None, *talks])
            if source in self.turns or source is None:
                self.kept(is_named=True)
            else:
                self.kept(is_named=True, source=source)
            return
        talk = self.chance.choice(talks)
        if self.chance.random() < 0.25:
            self.delete_now(talk)
        elif talk in self.turns:
            self.end(talk)
        else:
            self.begin_turn(talk)

    def begin_turn(self, talk: Talk) -> None:
        """It was received, it is answered, or it is over; what was not received is not deleted."""
        is_alone = not self.turns
        if is_alone:
            self.wait_until(lambda: not self.requests())
        num_new = self.chance.choice((10, 30, 30, 600))
        turn = self.turns[talk] = Turn(self, talk, num_new, self.chance.choice((4, 12, 100)))
        phase = self.chance.choice(("received", "answered", "over"))
        self.told.append(f"{talk.name} asks {num_new} tokens, until it is {phase}")
        if phase == "over":
            self.end(talk)
        elif phase == "received" and is_alone:
            turn.wait(lambda: turn.pieces or self.requests())
        else:
            turn.wait(lambda: turn.pieces)

    @staticmethod
    def wait_until(condition: Callable[[], object]) -> None:
        asyncio.run(until(condition, "it is so far"))

    def end(self, talk: Talk) -> None:
        """Its turn is over: what is in it counts."""
        turn = self.turns.pop(talk)
        turn.finish()
        if talk in self.ledger.talks:
            talk.pieces.append(tuple(turn.prompt[len(talk.ids) :]))
            talk.ids = turn.ids

    def delete_now(self, talk: Talk) -> None:
        """Whatever it is at."""
        self.remove(talk)
        if (turn := self.turns.pop(talk, None)) is not None:
            self.ledger.buried.add(tuple(turn.prompt[len(talk.ids) :]))
            turn.finish()
        self.gone.append(turn.prompt if turn is not None else talk.ids)


def interleave(folder: Path, seed: int, num_steps: int) -> None:
    write_model(folder / "models" / "m", max_position_embeddings=8192)
    Interleaved(folder, seed).run(num_steps)


def test_what_is_deleted_among_turns_under_way_is_gone_and_the_others_are_not(tmp_path: Path):
    interleave(tmp_path, seed=1, num_steps=40)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10, 20))
def test_what_is_deleted_among_many_turns_under_way_is_gone(tmp_path: Path, seed: int):
    interleave(tmp_path, seed, num_steps=400)
