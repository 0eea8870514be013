"""No conversation is needed by another, and none sees another's: against plain lists.

Two tenants talk with two models, with session ids and without, branch off, delete, and repeat what
others said. The server is stopped, killed, and has its files damaged in between. A server that
reuses nothing says what each answer must be.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.keys import digest_of
from tests.oracle.ledger import Talk
from tests.oracle.talking import NUM_SAID, PLAIN, flip, kill
from tests.oracle.world import ADMIN, World
from tests.running_server import RunningServer, running
from tests.tiny_models import write_model

TENANTS, MODELS = ("alice", "bob"), ("m", "n")
BOTH_LOADED = 'preload = ["m", "n"]\nmax_loaded_models = 2\n'
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


class Apart(World):
    """`graves` are talks that were deleted, and may be said again."""

    config = BOTH_LOADED + KEYS
    has_keys = True

    def __init__(self, folder: Path, plain: RunningServer, seed: int) -> None:
        super().__init__(folder, plain, seed)
        self.graves: list[Talk] = []
        self.num_deleted = self.num_damaged = 0

    def run(self, num_rounds: int, num_steps: int) -> None:
        """Raises AssertionError with all that was done."""
        with self.noted():
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
                    self.bury(talk)
            self.look_at_files()
            assert self.ledger.num_reused > self.ledger.num_excused
            assert self.num_deleted
            assert self.num_damaged

    def step(self) -> None:
        """Something that somebody does, or that happens to the files."""
        [kind] = self.chance.choices(list(ODDS), list(ODDS.values()))
        talk = self.chance.choice(self.ledger.talks) if self.ledger.talks else None
        if kind == "begin" or talk is None:
            self.say(self.begun(self.chance.choice(TENANTS), self.chance.choice(MODELS)))
        elif kind == "go on":
            self.say(talk)
        elif kind == "branch":
            cut = self.chance.randrange(1, len(talk.ids) - NUM_SAID)
            self.say(self.begun(talk.tenant, talk.model, talk.ids[:cut], talk))
        elif kind == "repeat":
            self.repeat(talk)
        elif kind == "delete":
            self.bury(talk)
        elif kind == "damage":
            self.num_damaged += self.damage()
        else:
            if self.chance.random() < 0.6 and talk.is_awake and not talk.is_harmed:
                self.wait_until_listed(talk)
            self.hear(talk)

    def repeat(self, talk: Talk) -> None:
        """Another tenant, or another model, is asked what this one was; or what was deleted is."""
        if self.graves and self.chance.random() < 0.6:
            self.say_again(self.graves.pop(self.chance.randrange(len(self.graves))))
            return
        others = [(t, m) for t in TENANTS for m in MODELS if not talk.is_beside(t, m)]
        tenant, model = self.chance.choice(others)
        self.say(self.begun(tenant, model, talk.ids[: -NUM_SAID - 1], talk))

    def say_again(self, grave: Talk) -> None:
        self.say(self.begun(grave.tenant, grave.model, grave.ids[: -NUM_SAID - 1], grave))

    def bury(self, talk: Talk) -> None:
        """Delete it. What was damaged and has no session id may be listed in several lines, of
        which nobody knows whose they are: it stays. Others of that kind are known by their length.
        """
        if talk.session is None and not talk.is_awake:
            self.say(talk)
        if talk.session is None and (talk.is_harmed or not talk.is_awake):
            return
        self.delete(talk)
        self.num_deleted += 1
        if self.chance.random() < 0.3:
            self.say_again(talk)
        else:
            self.graves.append(talk)


@contextmanager
def apart(folder: Path, seed: int) -> Generator[Apart]:
    """A home, and beside it the server that reuses nothing."""
    for number, name in enumerate(MODELS):
        write_model(folder / "models" / name, seed=number)
    config = f'models_dir = "{folder / "models"}"\ndefault_model = "m"\n{BOTH_LOADED}'
    with running(folder / "plain", config=config + PLAIN) as plain:
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
        talk = world.begun("alice")
        for _ in range(3):
            world.say(talk)
        world.wait_until_listed(talk)
        assert len(world.sightings.holding(world.home / "kv", talk.pieces)) == len(talk.pieces)
        world.delete(talk)
        assert not world.sightings.holding(world.home, talk.pieces)


@pytest.mark.xfail(
    strict=True, reason="what was whole before the damage is another line, and stays"
)
def test_what_is_damaged_and_has_no_session_id_is_deleted_whole_by_its_line(tmp_path: Path):
    with apart(tmp_path, seed=3) as world:
        talk = world.begun("alice", is_named=False)
        with world.served():
            world.say(talk, 120)
            world.wait_until_listed(talk)
            [paths] = world.sightings.holding(world.home / "kv", talk.pieces).values()
            for path in paths:
                flip(path, path.stat().st_size * 3 // 4)
            for _ in range(2):
                world.say(talk)
            world.wait_until_listed(talk)
        world.ledger.stopped(is_killed=False)
        with world.served():
            world.delete(talk)
