"""Row 2: what looks after a store is killed at any of its system calls and spoils nothing."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

import pytest

from runtime.cache.owned import OpenStore
from store.conversations import Conversations
from store.disk import opened
from store.slots import read_contents, read_token_ids, slot_path
from store.types import SlotRow
from tests.crash import chores
from tests.crash.chores import ALL, CHORES, Told
from tests.crash.server_store import check_store
from tests.crash.tracing import Call, calls_of, needs_strace

pytestmark = needs_strace

CHANGES = (
    "mkdir,openat,fallocate,ftruncate,pwrite64,write,fdatasync,fsync,rename,unlink,chmod,fchmod"
)
HAS_NO_INDEX = {"open_lost", "open_spoilt"}
"""What is lost there comes back with a recovery, but for conversations."""

LOSES_NOTHING = {"merge", "continue", "demote", "promote", "rebuild", *HAS_NO_INDEX}


class Held(NamedTuple):
    """Which tokens of a conversation can be restored, and where its last slot ends."""

    tokens: set[int]
    end: int


class Site(NamedTuple):
    """The last call of a process: the `nth` of its name that this thread makes."""

    thread: str
    name: str
    nth: int


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "tests.crash.chores"])
    return context


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("original").resolve() / "kv"
    chores.fill(root)
    return root


class Harness:
    """One chore on copies of one store."""

    def __init__(
        self,
        processes: ForkServerContext,
        original: Path,
        chore: str,
        folder: Path,
    ) -> None:
        self._processes = processes
        self._alone = threading.Lock()
        self.chore = chore
        self.folder = folder
        self.ready = chores.copied(original, folder / "ready")
        CHORES[chore].prepare(self.ready)
        self.whole = chores.copied(self.ready, folder / "whole")
        chores.perform(chore, self.whole)
        self.left = self.check(self.whole)
        self.kept = self.check(self.ready) if CHORES[chore].adds else self.left

    def run(self, folder: Path, site: Site | None) -> tuple[dict[str, int], int]:
        """The chore in a copy of its own, traced; its threads and how the process ended."""
        root = chores.copied(self.ready, folder)
        ours, theirs = self._processes.Pipe()
        process = self._processes.Process(target=chores.main, args=(self.chore, root, theirs))
        process.start()
        threads: dict[str, int] = ours.recv()
        command = ["strace", "-y", "-o", str(folder / "calls"), "-e", f"trace={CHANGES}"]
        if site is None:
            command += ["-ff", "-p", str(process.pid)]
        else:
            command += ["-e", f"inject={site.name}:signal=SIGKILL:when={site.nth}"]
            command += ["-p", str(threads[site.thread])]
        with self._alone:  # between fork and exec it would hold a store's lock as well
            strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        with strace:
            assert strace.stderr is not None
            assert "attached" in strace.stderr.readline()
            ours.send("begin")
            process.join()
        assert process.exitcode is not None
        return threads, process.exitcode

    def sites(self) -> list[Site]:
        """Every call by which the chore changes something."""
        folder = self.folder / "traced"
        threads, exitcode = self.run(folder, None)
        assert exitcode == 0
        return [
            Site(thread, call.name, call.nth)
            for thread, number in threads.items()
            for call in calls_of(folder / f"calls.{number}")
            if changes(call) and f"{folder}/" in call.arguments
        ]

    def kill_at(self, site: Site) -> bool:
        """Whether the chore was killed there; whatever it left has to be right, and go on."""
        folder = self.folder / "-".join(map(str, site))
        _, exitcode = self.run(folder, site)
        root = folder / self.ready.name
        with self._alone:
            if not CHORES[self.chore].finds_damage:
                self.check_kept(root)
            chores.perform(self.chore, root)
            self.check(root)
        shutil.rmtree(folder)
        return exitcode != 0

    def check_kept(self, root: Path) -> None:
        """At least what the whole chore leaves is there, but for what it adds."""
        held = self.check(root)
        for told, kept in self.kept.items():
            assert kept.tokens <= held[told].tokens
            assert kept.end <= held[told].end

    def check(self, root: Path) -> dict[Told, Held]:
        """The store opens and is in order, every byte is right; what is held."""
        check_store(root, chores.cold_of(root))
        if self.chore not in HAS_NO_INDEX:
            assert not list(root.glob("*.aside-*"))
        store = chores.opened(root)
        try:
            return {told: held_by(store, told) for told in ALL}
        finally:
            store.close()


@pytest.fixture
def make(processes: ForkServerContext, original: Path, tmp_path: Path) -> Callable[[str], Harness]:
    return lambda chore: Harness(processes, original, chore, tmp_path.resolve())


def changes(call: Call) -> bool:
    makes = call.name != "openat" or "O_CREAT" in call.arguments
    return makes and not call.result.startswith("-1")


def held_by(store: OpenStore, told: Told) -> Held:
    """What is visible, after a look at every byte of it."""
    rows = {row.header.id: row for row in store.index.slots_of(told.model)}
    tokens: set[int] = set()
    for row in rows.values():
        check_bytes(store, told, row)
        if reaches_beginning(rows, row):
            tokens |= set(range(row.header.start, row.header.end))
    mine = (chores.key_of(store, told), told.model)
    talks = {(one.key, one.model): one for one in Conversations(store.database).listing()}
    talk = talks.get(mine)
    leaf = rows.get(talk.leaf or "") if talk else None
    return Held(tokens, leaf.header.end if leaf else 0)


def reaches_beginning(rows: dict[str, SlotRow], row: SlotRow) -> bool:
    while row.parent is not None:
        start, row = row.header.start, rows[row.parent]
        assert start <= row.header.end
    return row.header.start == 0


def check_bytes(store: OpenStore, told: Told, row: SlotRow) -> None:
    header = row.header
    path = slot_path(store.root, header.id)
    if row.tier == "cold":
        assert store.cold is not None
        path = store.cold.promote(store.root, header.id).path
    assert list(read_token_ids(path)) == told.token_ids(header.start, header.end)
    expected = told.tensors(header.start, header.end)
    if not header.has_state:
        expected.pop("state", None)
    assert tensors_in(path) == expected
    if row.tier == "cold":
        path.unlink()


def tensors_in(path: Path) -> dict[str, bytes]:
    with opened(path) as fd:
        contents = read_contents(fd)
    data = path.read_bytes()[contents.payload_start :]
    return {one.name: data[one.start : one.end] for one in contents.tensors[1:]}


def spread(sites: list[Site], num: int) -> list[Site]:
    """Some of them, from the first to the last."""
    return [sites[at * (len(sites) - 1) // (num - 1)] for at in range(num)]


def kill_at_each(harness: Harness, sites: list[Site]) -> None:
    with ThreadPoolExecutor(4) as pool:
        killed = list(pool.map(harness.kill_at, sites))
    assert sum(killed) >= 0.9 * len(killed), "its calls are others each time"


@pytest.mark.parametrize("chore", ["merge", "demote", "open_lost"])
def test_a_chore_that_is_killed_spoils_nothing(make: Callable[[str], Harness], chore: str):
    harness = make(chore)
    sites = harness.sites()
    assert len(sites) > 20
    kill_at_each(harness, spread(sites, 3))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chore", CHORES)
def test_a_chore_that_is_killed_at_every_system_call_spoils_nothing(
    make: Callable[[str], Harness], chore: str
):
    harness = make(chore)
    has_all = all(len(held.tokens) == told.num_tokens for told, held in harness.left.items())
    assert has_all == (chore in LOSES_NOTHING)
    kill_at_each(harness, harness.sites())


def test_a_slot_that_is_lost_is_noticed(make: Callable[[str], Harness]):
    """The negative control."""
    harness = make("merge")
    harness.check_kept(harness.ready)
    slot_path(harness.ready, chores.slot_name(chores.SHORT, 2)).unlink()
    with pytest.raises(AssertionError):
        harness.check_kept(harness.ready)
