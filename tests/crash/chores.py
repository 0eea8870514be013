"""Chores of a store, each in a process of its own that is made to be killed.

The KV of a token is a hash of where it stands, so what is left of it after a kill can be checked
without the store.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import structlog

from runtime.cache.opened import INDEX, BlockStore, Terms, open_blocks
from runtime.cache.upkeep import keep, scrub, tidy
from store.disk import make_directory
from store.heads import Whom
from store.room import Limits
from tests.store_samples import Said, head_of, held, say

BLOCK = 4
LOOSE = Limits(1 << 40, 1 << 40, 1e9)

LONG = Said(1, 40, b"a" * 16)
THINNED = Said(2, 34, b"b" * 16, has_state=True)
SHORT = Said(3, 19, b"c" * 16)
LATE = Said(4, 22, b"c" * 16)
"""What one of the chores adds."""
ALL = (LONG, THINNED, SHORT, LATE)


def cold_of(root: Path) -> Path:
    """The cold store lies on another disk, as it would be."""
    return root.with_name("elsewhere")


def opened(root: Path, limits: Limits = LOOSE, *, has_cold: bool = True) -> BlockStore:
    return open_blocks(root, Terms(BLOCK, str(cold_of(root)) if has_cold else None, limits))


def fill(root: Path) -> None:
    """Make a store of all but what is added later, closed as it should be."""
    make_directory(cold_of(root))
    store = opened(root)
    for said in ALL[:-1]:
        say(store, said, ttl_s=3600.0)
    store.close()


def left_in(root: Path) -> dict[Said, set[int]]:
    """Which tokens of each are to be had."""
    store = opened(root)
    try:
        return {said: held(store, said) for said in ALL if head_of(store, said) is not None}
    finally:
        store.close()


def _rest(store: BlockStore) -> None:
    """Nobody uses any of it any more."""
    for known in list(store.heads.known.values()):
        store.heads.mark(known.head.id, pins=(), ttl_s=0.0)


def _cool(root: Path) -> None:
    """All of it lies in the cold store, and some of that here as well."""
    store = opened(root)
    _rest(store)
    keep(store)
    store.bring(THINNED.keys(store)[:4])
    store.close()


def _lose_index(root: Path) -> None:
    for path in root.glob(f"{INDEX}*"):
        path.unlink()


def _cool_and_lose_index(root: Path) -> None:
    _cool(root)
    _lose_index(root)


def _spoil_index(root: Path) -> None:
    with (root / INDEX).open("r+b") as file:
        file.write(bytes(200))


def _spoil_slot(root: Path) -> None:
    store = opened(root)
    path = store.slots.path(SHORT.keys(store)[1])
    store.close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _bring(store: BlockStore) -> None:
    for said in ALL[:-1]:
        store.bring(said.keys(store))


def _delete(store: BlockStore) -> None:
    store.heads.delete(Whom(session=LONG.session))
    assert store.finish_cold()


def _scrub(store: BlockStore) -> None:
    scrub(store, 7 * 86_400.0, lambda: False)
    tidy(store)


def _tight(store: BlockStore) -> Limits:
    """Half of it has to go from here."""
    slot_bytes = store.heads.kept.warm_bytes
    return LOOSE._replace(warm_bytes=store.room.used_bytes() - slot_bytes // 2)


def _tight_there(store: BlockStore) -> Limits:
    return LOOSE._replace(cold_bytes=store.heads.kept.cold_bytes // 2)


def _nothing(_: object) -> None:
    pass


class Chore(NamedTuple):
    """What is done to a store that `prepare` made ready, within `limits`.

    `is_opening`: opening it is part of it; `finds_damage`, so before it was done some is there;
    what it `adds` is there when it was done.
    """

    run: Callable[[BlockStore], object]
    prepare: Callable[[Path], None] = _nothing
    limits: Callable[[BlockStore], Limits] = lambda _: LOOSE
    has_cold: bool = True
    is_opening: bool = False
    finds_damage: bool = False
    adds: bool = False


CHORES = {
    "publish": Chore(lambda store: say(store, LATE, ttl_s=3600.0), adds=True),
    "delete": Chore(_delete, _cool),
    "evict": Chore(keep, limits=_tight, has_cold=False),
    "demote": Chore(keep, limits=_tight),
    "promote": Chore(_bring, _cool),
    "expire": Chore(keep, _cool, lambda _: LOOSE._replace(cold_ttl_s=0.0)),
    "evict_cold": Chore(keep, _cool, _tight_there),
    "scrub": Chore(_scrub, _spoil_slot, finds_damage=True),
    "open_lost": Chore(_nothing, _lose_index, is_opening=True),
    "open_spoilt": Chore(_nothing, _spoil_index, is_opening=True),
    "rebuild": Chore(keep, _cool_and_lose_index),
}


def copied(original: Path, folder: Path) -> Path:
    """A copy of a store with its cold store, in a folder of its own."""
    root = folder / original.name
    shutil.copytree(original, root)
    shutil.copytree(cold_of(original), cold_of(root))
    return root


def perform(name: str, root: Path, on_ready: Callable[[], None] = lambda: None) -> None:
    """Do a chore from the beginning to the end."""
    chore = CHORES[name]
    if chore.is_opening:
        on_ready()
        opened(root).close()
        return
    store = opened(root)
    limits = chore.limits(store)
    store.close()
    store = opened(root, limits, has_cold=chore.has_cold)
    on_ready()
    chore.run(store)
    store.close()


def main(name: str, root: Path, parent: Connection) -> None:
    """As a process: say which threads there are, and begin when told."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    def ready() -> None:
        parent.send({thread.name: thread.native_id for thread in threading.enumerate()})
        parent.recv()

    perform(name, root, ready)
