"""A server that is killed at random moments loses nothing that it told durable.

Conversations go on, branch off, are deleted and damaged, several at a time, when `kill -9` comes;
it also comes while the server starts. Afterwards what was told durable is reused, in whole blocks,
and no deletion that was answered is undone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typing_extensions import override

from tests.oracle.ledger import Talk
from tests.oracle.talking import NUM_SAID, PLAIN, SETTINGS, kill, num_common
from tests.oracle.world import World
from tests.running_server import running, started
from tests.tiny_models import write_model
from tests.waiting import PATIENCE_S

NUM_TALKS = 6
MUCH = 300
"""Tokens that take a while to be written."""
SLICE_S = 0.3
"""A server is killed within so many seconds of what it is killed in."""


class KillLoop(World):
    """Several conversations speak at a time.

    `graves` are talks whose deletion was answered, and were not asked again since.
    """

    max_tokens = 800

    def __init__(self, folder: Path, plain: Any, seed: int) -> None:
        super().__init__(folder, plain, seed)
        self.graves: list[Talk] = []
        self.alone = threading.RLock()
        self.kills_next = False
        self.num_kills = self.num_deleted = self.num_damaged = 0
        self.num_unverified = 0
        """Files that were damaged since all were last read."""

    def run(self, num_kills: int) -> None:
        """Raises AssertionError with all that was done."""
        with self.noted():
            while self.num_kills < num_kills:
                self.told.append(f"server {self.num_kills}")
                if self.chance.random() < 0.2:
                    self.kill_at_start()
                else:
                    with self.served():
                        self.live()
                        self.kill_in_the_midst()
                self.num_kills += 1
                self.ledger.stopped(is_killed=True)
                self.look_at_files()
            with self.served():
                self.look_around()
                for talk in list(self.ledger.talks):
                    self.say(talk)
            self.ledger.stopped(is_killed=False)
            self.look_at_files()
            assert self.ledger.num_reused > self.ledger.num_excused

    def look_around(self) -> None:
        """What holds after each start; a deletion that was not answered is asked again."""
        for talk in [one for one in self.ledger.talks if one.is_going]:
            self.erase(talk)
        for talk in self.graves:
            assert self.entry(talk) is None, f"{talk.name} was deleted"
        self.look_at_files()
        if self.chance.random() < 0.5:
            self.verify()
        probed: list[list[int]] = []
        for grave in self.graves[:3]:
            prompt = [*grave.ids, *self.vocabulary.fresh(self.chance, 9)]
            allowed = self.ledger.allowed(prompt, "", "m")
            allowed = max([allowed, *(num_common(prompt, one) for one in probed)])
            probed.append(prompt)
            answer = self.vocabulary.ask(self.server, prompt, session_id="again", ttl=0)
            assert answer.num_cached <= allowed, f"{grave.name} was deleted: {answer}"
        self.graves.clear()

    def verify(self) -> None:
        """Files are whole or ignored, but for those that were damaged here."""
        answer = self.admin("POST", "verify")
        assert answer.status_code == 200, answer.text
        assert answer.json()["num_damaged"] <= self.num_unverified, answer.text
        self.num_unverified = 0

    def live(self) -> None:
        """What was told durable is reused; some is deleted, damaged, begun."""
        self.look_around()
        for talk in self.some(3):
            self.say(talk)
        for talk in [one for one in self.ledger.talks if len(one.ids) > self.max_tokens]:
            self.erase(talk)
        while len(self.ledger.talks) < NUM_TALKS:
            self.begin()
        if self.chance.random() < 0.4:
            self.erase(self.some(1)[0])
        if self.chance.random() < 0.3:
            self.harm()
        for talk in self.some(3):
            if talk.is_awake and not talk.is_harmed and self.chance.random() < 0.5:
                self.wait_until_listed(talk)
            self.hear(talk)

    def begin(self) -> None:
        """Alone, or as another one began."""
        source = self.chance.choice([None, *self.ledger.talks])
        if source is None or source.is_going:
            self.say(self.begun(is_named=True))
        else:
            cut = self.chance.randrange(1, len(source.ids) - NUM_SAID)
            self.say(self.begun(ids=source.ids[:cut], source=source, is_named=True))

    def harm(self) -> None:
        with self.alone:
            if self.damage():
                self.num_damaged += 1
                self.num_unverified += 1

    def erase(self, talk: Talk) -> None:
        """Delete it; it may be gone by a deletion that was not answered."""
        with self.alone:
            was_going = talk.is_going
            self.ledger.going(talk)
        answer = self.remove_named(self.name_of(talk))
        assert answer.status_code == 200 or (was_going and answer.status_code == 404), answer.text
        with self.alone:
            self.told.append(f"{talk.name} is deleted: {answer.text}")
            self.ledger.deleted(talk)
            self.graves.append(talk)
            self.num_deleted += 1

    def kill_in_the_midst(self) -> None:
        """While some speak, one is deleted, and perhaps a file is damaged."""
        goes, *speak = self.some(4)
        if self.chance.random() < 0.4:
            self.told.append("killed right after an answer")
            self.kill_while(
                [lambda one=one: self.say(one, MUCH) for one in speak[:2]], is_first=True
            )
            return
        deeds: list[Callable[[], Any]] = [lambda one=one: self.say(one) for one in speak]
        if self.chance.random() < 0.6:
            self.ledger.going(goes)  # what is reused of it from now on is not certain
            deeds.append(lambda: self.erase(goes))
        if self.chance.random() < 0.3:
            deeds.append(self.harm)
        self.told.append(f"killed while {len(deeds)} things are done")
        self.kill_while(deeds)

    def kill_while(self, deeds: list[Callable[[], Any]], *, is_first: bool = False) -> None:
        """At any moment of it, or as soon as the first of these is done. Errors count but those
        that a client of a killed server has.
        """
        errors: list[BaseException] = []

        def do(deed: Callable[[], Any]) -> None:
            try:
                deed()
            except httpx.TransportError:
                pass
            except BaseException as error:
                errors.append(error)

        self.kills_next = is_first
        after_s = PATIENCE_S if is_first else self.chance.uniform(0, SLICE_S)
        killer = threading.Timer(after_s, kill, [self.server])
        threads = [threading.Thread(target=do, args=(deed,)) for deed in deeds]
        for thread in (killer, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        if is_first:
            killer.cancel()
        killer.join()
        self.kills_next = False
        assert "Traceback" not in self.server.stderr, self.server.stderr
        for error in errors:
            raise error

    @override
    def answered(self) -> None:
        if self.kills_next:
            kill(self.server)

    def kill_at_start(self) -> None:
        self.told.append("killed while it starts")
        config = f'models_dir = "{self.models}"\ndefault_model = "m"\n{SETTINGS}'
        with started(self.home, config=config) as server:
            killer = threading.Timer(self.chance.uniform(0, 4 * SLICE_S), kill, [server])
            killer.start()
            killer.join()
            assert "Traceback" not in server.stderr, server.stderr

    def some(self, num: int) -> list[Talk]:
        """Different ones that nobody deletes and that may say more."""
        there = [
            one for one in self.ledger.talks if not one.is_going and len(one.ids) <= self.max_tokens
        ]
        return self.chance.sample(there, min(num, len(there)))


@contextmanager
def looped(folder: Path, seed: int) -> Generator[KillLoop]:
    """A loop, and beside it the server that reuses nothing."""
    write_model(folder / "models" / "m")
    config = f'models_dir = "{folder / "models"}"\ndefault_model = "m"\n'
    with running(folder / "plain", config=config + PLAIN) as plain:
        yield KillLoop(folder, plain, seed)


def test_what_was_told_durable_survives_kills_and_what_was_deleted_does_not(tmp_path: Path):
    with looped(tmp_path, seed=1) as loop:
        loop.run(8)
        assert loop.num_deleted
        assert loop.num_damaged


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 20))
def test_what_was_told_durable_survives_many_kills(tmp_path: Path, seed: int):
    with looped(tmp_path, seed) as loop:
        loop.run(60)
