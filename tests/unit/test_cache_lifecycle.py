"""What the store says of itself: never that it works while what it was asked last had failed."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.lifecycle import KvStatus, StoreLife
from runtime.cache.opened import BlockStore, open_blocks
from runtime.cache.tending import terms_of
from runtime.config.settings import Settings
from store.errors import StoreFailed, StoreFull

SPEED = 200.0
"""Seconds of the store's life in one of ours."""

DEADLINE_S = 20_000.0


class Hurry(selectors.DefaultSelector):
    """Waits a fraction of what it is told."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout / SPEED if timeout else timeout)


class FastLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(Hurry())

    def time(self) -> float:
        return super().time() * SPEED


class World:
    """A disk, a worker that has something to write, and what became of its last try."""

    def __init__(self, home: Path) -> None:
        self.life = StoreLife(self, has_disk=True)
        self.root = home / "kv"
        self.slots = self.root / "slots"
        self.can_stage = self.can_publish = True
        self.has_failed = False
        self.num_unwritten = 0
        self.num_tries = 0

    def on_opened(self) -> None: ...

    def open(self, secret: bytes | None) -> BlockStore:
        return open_blocks(self.root, terms_of(Settings(home=self.root.parent)), secret)

    def on_opening(self, store: BlockStore) -> None: ...

    def on_full(self) -> None: ...

    def on_probed(self) -> None:
        if self.num_unwritten:
            self.life.spawn(self.write())

    async def write(self) -> None:
        """As a worker and the publisher do it."""
        self.num_tries += 1
        if not self.can_stage:
            self.has_failed = True
            self.life.fail("full", "a worker could not write a slot")
            return
        await self.life.attempt(self._publish)

    def _publish(self, store: BlockStore) -> None:
        assert store.root == self.slots.parent
        self.has_failed = not self.can_publish
        if not self.can_publish:
            raise StoreFailed("rename: Input/output error")
        self.num_unwritten = 0

    def break_probe(self) -> None:
        if self.slots.is_dir():
            self.slots.rename(self.slots.with_name("elsewhere"))
            self.slots.write_text("in its place")

    def mend_probe(self) -> None:
        if not self.slots.is_dir():
            self.slots.unlink()
            self.slots.with_name("elsewhere").rename(self.slots)

    def mend(self) -> None:
        self.can_stage = self.can_publish = True
        self.mend_probe()

    def check(self) -> None:
        assert not (self.has_failed and self.life.status.state == "ok")


async def begun(home: Path) -> World:
    world = World(home)
    world.life.start()
    await world.life.settled.wait()
    assert world.life.status == KvStatus("ok")
    return world


async def until_ok(world: World) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while world.life.status.state != "ok":
            world.check()
            await asyncio.sleep(0.5)


async def random_days(home: Path, seed: int) -> None:
    chance = random.Random(seed)
    world = await begun(home)
    for _ in range(40):
        match chance.randrange(8):
            case 0:
                world.can_publish = not world.can_publish
            case 1:
                world.can_stage = not world.can_stage
            case 2:
                world.break_probe()
            case 3:
                world.mend_probe()
            case 4 | 5:
                world.num_unwritten += 1
                await world.write()
            case _:
                for _ in range(chance.randrange(60)):
                    await asyncio.sleep(0.5)
                    world.check()
        world.check()
    world.mend()
    if world.has_failed:
        assert world.life.status.state == "degraded"
    await until_ok(world)
    assert not world.num_unwritten or not world.has_failed
    await world.life.close()


async def only_renames_fail(home: Path) -> None:
    world = await begun(home)
    world.can_publish, world.num_unwritten = False, 1
    await world.write()
    async with asyncio.timeout(DEADLINE_S):
        while world.num_tries < 5:
            assert world.life.status == KvStatus("degraded", "failed", "rename: Input/output error")
            await asyncio.sleep(0.5)
    world.can_publish = True
    await until_ok(world)
    assert world.num_unwritten == 0
    await world.life.close()


async def nothing_is_left_to_write(home: Path) -> None:
    world = await begun(home)
    world.life.fail(StoreFull.reason, "a worker could not write a slot")
    assert world.life.status.state == "degraded"
    await until_ok(world)
    assert world.num_tries == 0
    await world.life.close()


def lived(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        runner.run(work)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_and_is_mended_it_never_says_ok_after_a_failure(tmp_path: Path, seed: int):
    lived(random_days(tmp_path, seed))


def test_renames_that_fail_are_one_trouble_and_not_one_after_the_other(tmp_path: Path):
    lived(only_renames_fail(tmp_path))


def test_without_anything_left_to_write_two_probes_are_enough(tmp_path: Path):
    lived(nothing_is_left_to_write(tmp_path))
