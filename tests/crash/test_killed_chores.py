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

from tests.crash import chores
from tests.crash.chores import CHORES, SHORT
from tests.crash.server_store import check_store
from tests.crash.tracing import Call, calls_of, needs_strace
from tests.store_samples import Said

pytestmark = needs_strace

CHANGES = (
    "mkdir,openat,fallocate,ftruncate,pwrite64,write,fdatasync,fsync,rename,unlink,chmod,fchmod"
)
IS_REPLACED = {"open_lost", "open_spoilt", "rebuild"}
"""The index is made anew."""

LOSES_NOTHING = {"publish", "demote", "promote", *IS_REPLACED}


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
        left = self.check(root)
        for said, kept in self.kept.items():
            assert kept <= left.get(said, set())

    def check(self, root: Path) -> dict[Said, set[int]]:
        """The store opens and is in order, every byte is right; what is held."""
        if not CHORES[self.chore].finds_damage or root != self.ready:
            check_store(root, chores.cold_of(root), chores.BLOCK)
        if self.chore not in IS_REPLACED:
            assert not list(root.glob("*.aside-*"))
        return chores.left_in(root)


@pytest.fixture
def make(processes: ForkServerContext, original: Path, tmp_path: Path) -> Callable[[str], Harness]:
    return lambda chore: Harness(processes, original, chore, tmp_path.resolve())


def changes(call: Call) -> bool:
    makes = call.name != "openat" or "O_CREAT" in call.arguments
    return makes and not call.result.startswith("-1")


def spread(sites: list[Site], num: int) -> list[Site]:
    """Some of them, from the first to the last."""
    return [sites[at * (len(sites) - 1) // (num - 1)] for at in range(num)]


def kill_at_each(harness: Harness, sites: list[Site]) -> None:
    with ThreadPoolExecutor(4) as pool:
        killed = list(pool.map(harness.kill_at, sites))
    assert sum(killed) >= 0.9 * len(killed), "its calls are others each time"


@pytest.mark.parametrize("chore", ["publish", "demote", "delete", "open_lost"])
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
    has_all = all(len(left) == said.num_tokens for said, left in harness.left.items())
    has_all = has_all and len(harness.left) >= 3
    assert has_all == (chore in LOSES_NOTHING)
    kill_at_each(harness, harness.sites())


def test_a_slot_that_is_lost_is_noticed(make: Callable[[str], Harness]):
    """The negative control."""
    harness = make("demote")
    harness.check_kept(harness.ready)
    store = chores.opened(harness.ready)
    path = store.slots.path(SHORT.keys(store)[2])
    store.close()
    path.unlink()
    with pytest.raises(AssertionError):
        harness.check_kept(harness.ready)
