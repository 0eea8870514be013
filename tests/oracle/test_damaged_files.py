"""Whatever happens to a file of the KV folder: answers are right, nobody gets an error, and who has
nothing in that file misses nothing.

The server has next to no memory for KV, so that each answer comes from the files; or it starts with
a file that was damaged before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.ledger import Ledger, Talk
from tests.oracle.talking import PLAIN, TOO_SLOW, Answer, check_same, files_in, flip, whole, windows
from tests.oracle.world import World
from tests.running_server import RunningServer, running
from tests.tiny_models import write_model

TINY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
"""A token of it has 64 bytes of KV."""
NO_MEMORY = "hot_bytes = 1\nprewarm = false\n"
NUM_FRONT = 1024
"""Bytes at the beginning of a file, where it says what it is."""


class Damaged(World):
    """`one` is damaged, `other` has nothing to do with it. Both ask the same prompts again and
    again.
    """

    config = NO_MEMORY

    def __init__(self, folder: Path, plain: RunningServer) -> None:
        super().__init__(folder, plain, seed=5)
        self.ledger = Ledger(has_memory=False)
        self.one, self.other = (self.begun(is_named=True) for _ in range(2))
        self.right: dict[str, Answer] = {}
        self.num_missed = 0

    def keep(self) -> None:
        """Both talk for some turns, and are on disk."""
        for talk in (self.one, self.other):
            for _ in range(3):
                self.say(talk, 20)
            self.ask(talk)
            self.wait_until_listed(talk)

    def ask(self, talk: Talk) -> Answer:
        """The right answer to what it asks all the time."""
        assert self.plain is not None
        if talk.name not in self.right:
            self.right[talk.name] = self.vocabulary.ask(self.plain, talk.ids)
        answer = self.vocabulary.ask(self.server, talk.ids, session_id=talk.session)
        check_same(answer, self.right[talk.name])
        return answer

    def check(self, what: str, *, is_others: bool = False) -> None:
        """After something happened to a file; it may be of the other one as well."""
        self.told.append(what)
        self.num_missed += self.ask(self.one).num_cached < whole(len(self.one.ids) - 1)
        answer = self.ask(self.other)
        is_there = answer.num_cached >= whole(len(self.other.ids) - 1)
        assert is_there or is_others or answer.reason == TOO_SLOW, (what, answer)
        assert "Traceback" not in self.server.stderr, self.server.stderr
        for talk in (self.one, self.other):
            self.wait_until_listed(talk)

    def files_of(self, talk: Talk) -> list[Path]:
        """Files that have something of what it said."""
        said = windows(talk.ids)
        paths = files_in(self.home / "kv")
        return [path for path in paths if not said.isdisjoint(self.sightings.of(path))]

    def file_of_one(self) -> Path | None:
        """One of its files. There is none while all are cut so that nothing of it is to be seen."""
        files = self.files_of(self.one)
        return self.chance.choice(files) if files else None


@contextmanager
def kept(folder: Path) -> Generator[Damaged]:
    """Two talks on disk, and a server that reuses nothing."""
    write_model(folder / "models" / "m", **TINY)
    config = f'models_dir = "{folder / "models"}"\ndefault_model = "m"\n'
    with running(folder / "plain", config=config + PLAIN) as plain:
        world = Damaged(folder, plain)
        with world.noted():
            with world.served():
                world.keep()
            yield world


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Generator[Damaged]:
    with kept(tmp_path_factory.mktemp("damaged")) as world:
        yield world


def offset_in(world: World, size: int) -> int:
    """At the front as often as anywhere."""
    if world.chance.random() < 0.5:
        return world.chance.randrange(min(size, NUM_FRONT))
    return world.chance.randrange(size)


def test_a_flipped_bit_anywhere_costs_only_who_has_it_in_his_files(home: Damaged):
    with home.noted(), home.served():
        for _ in range(50):
            path = home.file_of_one()
            assert path is not None
            at, bit = offset_in(home, path.stat().st_size), home.chance.randrange(8)
            flip(path, at, bit)
            home.check(f"bit {bit} of byte {at} of {path}")
        assert home.num_missed, "damage is noticed"


@pytest.mark.soak
def test_a_file_that_was_cut_anywhere_costs_only_who_has_it(home: Damaged):
    with home.noted(), home.served():
        files = home.files_of(home.one)
        assert files
        first = home.chance.choice(files)
        first.unlink()
        home.check(f"{first} is gone")
        for _ in range(20):
            if (path := home.file_of_one()) is None:
                break
            size = offset_in(home, path.stat().st_size)
            os.truncate(path, size)
            home.check(f"{path} is cut to {size} bytes")


def changes(world: Damaged, num_flips: int) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """What may happen to a file while no server runs."""
    yield "it is gone", lambda path: path.unlink()
    yield "it is empty", lambda path: os.truncate(path, 0)
    yield "it is half", lambda path: os.truncate(path, path.stat().st_size // 2)
    yield "it is longer", lambda path: path.write_bytes(path.read_bytes() + b"\xff" * 99)
    for _ in range(num_flips):
        share = world.chance.random()
        yield (
            f"a byte at {share} of it",
            lambda path, share=share: flip(path, int(share * path.stat().st_size), 3),
        )


def check_starts(world: Damaged, num: int | None, num_flips: int) -> None:
    """A server starts with each file changed in each way, or with so many of them."""
    kv, kept = world.home / "kv", world.home.parent / "kept"
    shutil.copytree(kv, kept)
    relative = [path.relative_to(kv) for path in files_in(kv)]
    cases = [(path, *change) for path in relative for change in changes(world, num_flips)]
    cases = [one for one in cases if (kept / one[0]).stat().st_size]
    for path, what, change in cases if num is None else world.chance.sample(cases, num):
        shutil.rmtree(kv)
        shutil.copytree(kept, kv)
        is_its_own = kv / path in world.files_of(world.one)
        is_its_own &= kv / path not in world.files_of(world.other)
        change(kv / path)
        world.told.append(f"{path}: {what}")
        with ExitStack() as stack:
            stack.enter_context(world.served())
            world.check(f"{path}: {what}", is_others=not is_its_own)


def test_a_server_starts_with_any_file_damaged_and_answers_rightly(tmp_path: Path):
    with kept(tmp_path) as world:
        check_starts(world, num=10, num_flips=2)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_server_starts_with_every_file_damaged_in_every_way(tmp_path: Path):
    with kept(tmp_path) as world:
        check_starts(world, num=None, num_flips=10)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_flipped_bit_at_every_byte_costs_only_who_has_it_in_his_files(tmp_path: Path):
    with kept(tmp_path) as world, world.served():
        sizes = sorted(path.stat().st_size for path in world.files_of(world.one))
        for number in range(len(sizes)):
            for at in range(sizes[number]):
                paths = sorted(world.files_of(world.one), key=lambda path: path.stat().st_size)
                path = paths[min(number, len(paths) - 1)]
                flip(path, at % path.stat().st_size, world.chance.randrange(8))
                world.check(f"byte {at} of {path}")
