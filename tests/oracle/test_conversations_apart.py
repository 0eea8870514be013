"""No conversation is needed by another, and none sees another's: against plain lists.

Two tenants talk with two models, with session ids and without, branch off, delete, and repeat what
others said. The server is stopped, killed, and has its files damaged in between. A server that
reuses nothing says what each answer must be.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from runtime.keys import digest_of
from tests.oracle.ledger import Ledger, Talk
from tests.oracle.talking import (
    NUM_SAID,
    PLAIN,
    SETTINGS,
    Sightings,
    Vocabulary,
    check_same,
    files_in,
    flip,
    kill,
    whole,
    windows,
)
from tests.running_server import RunningServer, running
from tests.tiny_models import write_model
from tests.waiting import until

ADMIN = "the-admin-key"
TENANTS, MODELS = ("alice", "bob"), ("m", "n")
MAX_TOKENS = 400
KEYS = f"""
admin_key = "{digest_of(ADMIN)}"
[api_keys]
alice = "{digest_of("alice-key")}"
bob = "{digest_of("bob-key")}"
"""
ODDS = {
    "go on": 8,
    "branch": 4,
    "begin": 2,
    "repeat": 3,
    "delete": 4,
    "damage": 2,
    "hear": 3,
}


class Apart:
    """A home, its server, and the lists. Everything but the timing is decided by `seed`."""

    def __init__(self, folder: Path, plain: RunningServer, seed: int) -> None:
        self.home, self.models, self.plain = folder / "home", folder / "models", plain
        self.vocabulary = Vocabulary(self.models / "m")
        self.chance = random.Random(seed)
        self.numbers = count(1)
        self.ledger = Ledger()
        self.sightings = Sightings()
        self.graves: list[Talk] = []
        self.told: list[str] = [f"{seed=}"]
        self.num_deleted = self.num_damaged = 0
        self.server: RunningServer

    def run(self, num_rounds: int, num_steps: int) -> None:
        """Raises AssertionError with all that was done."""
        try:
            for number in range(num_rounds):
                self.told.append(f"server {number}")
                with self.served():
                    for _ in range(num_steps):
                        self.step()
                    if is_killed := self.chance.random() < 0.5:
                        kill(self.server)
                        self.told.append("killed")
                self.look_at_files()
                self.ledger.stopped(is_killed=is_killed)
            with self.served():
                for talk in list(self.ledger.talks):
                    self.say(talk)
                for talk in list(self.ledger.talks):
                    self.delete(talk)
            self.look_at_files()
        except BaseException as error:
            error.add_note("\n".join(self.told[-80:]))
            raise
        assert self.ledger.num_reused > self.ledger.num_excused
        assert self.num_deleted
        assert self.num_damaged

    @contextmanager
    def served(self) -> Generator[None]:
        more = 'default_model = "m"\npreload = ["m", "n"]\nmax_loaded_models = 2\n'
        config = f'models_dir = "{self.models}"\n{more}{SETTINGS}{KEYS}'
        with running(self.home, config=config) as self.server:
            self.server.wait_for_the_store()
            yield
            if self.server.process.poll() is None:
                assert "Traceback" not in self.server.stderr, self.server.stderr

    def step(self) -> None:
        """Something that somebody does, or that happens to the files."""
        [kind] = self.chance.choices(list(ODDS), list(ODDS.values()))
        talk = self.chance.choice(self.ledger.talks) if self.ledger.talks else None
        if kind == "begin" or talk is None:
            model = self.chance.choice(MODELS)
            self.say(self.begun(self.chance.choice(TENANTS), model, []))
        elif kind == "go on":
            self.say(talk)
        elif kind == "branch":
            cut = self.chance.randrange(1, len(talk.ids) - NUM_SAID)
            self.say(self.begun(talk.tenant, talk.model, talk.ids[:cut], talk))
        elif kind == "repeat":
            self.repeat(talk)
        elif kind == "delete":
            self.delete(talk)
        elif kind == "damage":
            self.damage()
        else:
            self.hear(talk)

    # What conversations do

    def begun(self, tenant: str, model: str, ids: list[int], source: Talk | None = None) -> Talk:
        """One that begins with these tokens of another one."""
        name = f"talk-{next(self.numbers)}"
        session = name if self.chance.random() < 0.5 else None
        talk = Talk(name, tenant, model, session, ids)
        talk.is_harmed = any(one.is_harmed for one in self.family(talk)) if ids else False
        if source is not None:
            at = 0  # pieces lie at the places where they were said
            for piece in source.pieces:
                at = self.place(source.ids, piece, at)
                talk.pieces += [piece[: len(ids) - at]] if at < len(ids) else []
        return talk

    @staticmethod
    def place(ids: list[int], piece: tuple[int, ...], start: int) -> int:
        size = len(piece)
        return next(at for at in range(start, len(ids)) if tuple(ids[at : at + size]) == piece)

    def repeat(self, talk: Talk) -> None:
        """Another tenant, or another model, is asked what this one was; or what was deleted is."""
        if self.graves and self.chance.random() < 0.6:
            grave = self.graves.pop(self.chance.randrange(len(self.graves)))
            tenant, model, source = grave.tenant, grave.model, grave
        else:
            others = [(t, m) for t in TENANTS for m in MODELS if not talk.is_beside(t, m)]
            (tenant, model), source = self.chance.choice(others), talk
        cut = max(len(source.ids) - NUM_SAID - 1, 1)
        self.say(self.begun(tenant, model, source.ids[:cut], source))

    def say(self, talk: Talk) -> None:
        """A turn: its answer is right, and of its prompt is reused what must and may be."""
        if len(talk.ids) > MAX_TOKENS:
            return
        piece = self.vocabulary.fresh(self.chance, self.length_for(talk))
        prompt = [*talk.ids, *piece]
        due = self.ledger.due(prompt, talk.tenant, talk.model)
        allowed = self.ledger.allowed(prompt, talk.tenant, talk.model)
        fields = {"model": talk.model, "session_id": talk.session}
        answer = self.vocabulary.ask(self.server, prompt, f"{talk.tenant}-key", **fields)
        self.told.append(
            f"{talk.name} of {talk.tenant} to {talk.model}, {talk.session=}: {due=} {allowed=} "
            f"{answer.num_cached} of {len(prompt)}, {answer.num_durable} durable, {answer.reason}"
        )
        self.ledger.check(answer, due, allowed)
        check_same(answer, self.vocabulary.ask(self.plain, prompt, model=talk.model))
        if talk not in self.ledger.talks:
            self.ledger.talks.append(talk)
        talk.pieces.append(tuple(piece))
        self.ledger.said(talk, prompt, answer)

    def length_for(self, talk: Talk) -> int:
        """So that no two talks without a session are alike in their number of tokens."""
        taken = {len(one.ids) for one in self.ledger.talks if one.session is None}
        while True:
            num = self.chance.randint(6, 60)
            length = len(talk.ids) + num + NUM_SAID
            if not taken & {length - 1, length, length + 1}:
                return num

    # How they are deleted

    def delete(self, talk: Talk) -> None:
        """By its session id, or by its line in the list; afterwards nobody has anything of it.

        What was damaged and has no session id may be listed in several lines: it stays.
        """
        if talk.session is not None:
            name = f"@{talk.tenant}/{talk.session}"
        elif talk.is_harmed:
            return
        else:
            self.wait_until_listed(talk)
            name = self.entry(talk)["id"]
        answer = self.admin("DELETE", "conversations", conversation=name)
        assert answer.status_code == 200, answer.text
        self.told.append(f"{talk.name} is deleted: {answer.text}")
        self.ledger.deleted(talk)
        self.graves.append(talk)
        self.num_deleted += 1
        self.look_at_files()
        assert self.entry(talk) is None

    def admin(self, method: str, what: str, **query: Any) -> Any:
        path = f"/admin/cache/{what}".rstrip("/")
        return self.server.request(method, path, params=query, headers={"x-api-key": ADMIN})

    def entry(self, talk: Talk) -> Any:
        """Its line in the list of conversations, if it has one."""
        if talk.session is not None:
            name = f"@{talk.tenant}/{talk.session}"
            answer = self.admin("GET", "conversation", conversation=name)
            return answer.json()["conversation"] if answer.status_code == 200 else None
        views = self.admin("GET", "", model=talk.model).json()["conversations"]
        lengths = (len(talk.ids), len(talk.ids) - 1)
        mine = [one for one in views if not one["is_named"] and one["num_tokens"] in lengths]
        assert len(mine) <= 1, mine
        return mine[0] if mine else None

    def wait_until_listed(self, talk: Talk) -> None:
        """What it said is on disk, but for what is in no whole block."""

        def is_kept() -> bool:
            entry = self.entry(talk)
            return entry is not None and entry["num_durable"] >= whole(len(talk.ids) - 1)

        if not talk.is_awake:
            is_kept()
            return
        self.until(is_kept, f"{talk.name} is on disk")

    def until(self, condition: Any, what: str) -> None:
        asyncio.run(until(condition, what))

    def hear(self, talk: Talk) -> None:
        """How far it is on disk; sometimes once all of it is."""
        if self.chance.random() < 0.6 and talk.is_awake and not talk.is_harmed:
            self.wait_until_listed(talk)
        entry = self.entry(talk)
        if entry is not None and not talk.is_harmed:
            self.told.append(f"{talk.name} has {entry['num_durable']} tokens on disk")
            self.ledger.heard(talk, entry["num_durable"])

    # What happens to the files

    def damage(self) -> None:
        """One bit of a file: only who said something that is in it may miss anything."""
        files = files_in(self.home / "kv")
        self.chance.shuffle(files)
        for path in files:
            there = self.sightings.of(path)
            whose = [
                talk
                for talk in self.ledger.talks
                if any(not windows(piece).isdisjoint(there) for piece in talk.pieces)
            ]
            if not whose:
                continue
            try:
                at = self.chance.randrange(path.stat().st_size)
                flip(path, at, self.chance.randrange(8))
            except FileNotFoundError:
                continue
            harmed = [one for talk in whose for one in self.family(talk)]
            self.told.append(f"byte {at} of {path}, of {[one.name for one in harmed]}")
            for talk in harmed:
                talk.is_harmed = True
            self.num_damaged += 1
            return

    def family(self, talk: Talk) -> list[Talk]:
        """All talks that begin as this one does, so that they may share files."""
        return [
            one
            for one in self.ledger.talks
            if one.is_beside(talk.tenant, talk.model) and one.ids[0] == talk.ids[0]
        ]

    def look_at_files(self) -> None:
        """Nothing that was deleted is in any file."""
        left = self.sightings.holding(self.home, self.ledger.gone())
        assert not left, f"deleted, and in files: {left}"


@contextmanager
def apart(folder: Path, seed: int) -> Generator[Apart]:
    """A home, and beside it the server that reuses nothing."""
    for number, name in enumerate(MODELS):
        write_model(folder / "models" / name, seed=number)
    config = f'models_dir = "{folder / "models"}"\ndefault_model = "m"\nmax_loaded_models = 2\n'
    with ExitStack() as stack:
        plain = stack.enter_context(running(folder / "plain", config=config + PLAIN))
        yield Apart(folder, plain, seed)


def test_no_conversation_needs_or_sees_another(tmp_path: Path):
    with apart(tmp_path, seed=1) as world:
        world.run(num_rounds=6, num_steps=16)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 20))
def test_no_conversation_needs_or_sees_another_for_long(tmp_path: Path, seed: int):
    with apart(tmp_path, seed) as world:
        world.run(num_rounds=20, num_steps=40)


def test_what_is_said_is_found_in_files_until_it_is_deleted(tmp_path: Path):
    """The negative control: what is looked for after a deletion is seen where there was none."""
    with apart(tmp_path, seed=2) as world, world.served():
        talk = world.begun("alice", "m", [])
        for _ in range(3):
            world.say(talk)
        world.wait_until_listed(talk)
        assert len(world.sightings.holding(world.home / "kv", talk.pieces)) == len(talk.pieces)
        world.delete(talk)
        assert not world.sightings.holding(world.home, talk.pieces)
