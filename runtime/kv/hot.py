"""The hot tier: runs whose KV is in memory, within a byte budget, on the tree of all known runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.kv.pack import RunKv
from runtime.kv.prefix_tree import PrefixTree, Run, path_to, renamed
from store import eviction
from store.block_names import HASH_BYTES, HashChain
from store.keyed_names import NOBODY, Asker
from store.types import DEFAULT_TTL_S, Candidate, PrefixPiece, Tier, TtlClass, decayed_hits

MAX_ASKERS = 32


class Ended(NamedTuple):
    """Up to where a turn says what a run has, and how long that is to be kept."""

    num_tokens: int
    ttl_s: float | None


class ForgottenRuns(NamedTuple):
    """The runs that are forgotten, the ids of those that are not to be written any more, and the
    runs that are longer than what others have of them.
    """

    runs: list[Run]
    unwritten: list[str]
    longer: list[Run]


@dataclass(eq=False, slots=True)
class Held:
    """What is kept of one run, and where.

    `id` names its slot. `ends_turn` says that a whole answer ends with it. With `is_state_hot` the
    state at its end is in memory only, and goes with `kv`. `is_written` says that a file of it
    exists or is being written, `is_saved` that it is published. With `is_queued` the server was
    told that it is to be; `completes` are ends that were lost and that it goes through.
    `num_readers` counts requests that are about to use `kv`. `askers` used it last, each up to a
    position, the latest at the end; those of one name without a session id are one. `ended` are
    those whose turn ended in it, until they are known on disk. Until `awaited_s` somebody is
    expected back, and it is worth as much as if it was used then; whoever used it is not expected
    back where `is_released`.
    """

    id: str
    kv: RunKv | None = None
    hot_bytes: int = 0
    is_state_hot: bool = False
    is_written: bool = False
    is_saved: bool = False
    tier: Tier = "warm"
    disk_bytes: int = 0
    last_used_s: float = 0.0
    hits: float = 0.0
    is_queued: bool = False
    completes: tuple[PrefixPiece, ...] = ()
    num_readers: int = 0
    recompute_ms: float = 0.0
    ends_turn: bool = False
    ttl_class: TtlClass = "long"
    ttl_s: float | None = DEFAULT_TTL_S
    askers: dict[Asker, int] = field(default_factory=dict["Asker", int])
    ended: dict[Asker, Ended] = field(default_factory=dict["Asker", "Ended"])
    noted: dict[Asker, int] = field(default_factory=dict["Asker", "int"])
    awaited_s: float = 0.0
    is_released: bool = False

    def part(self, share: float) -> Held:
        """The same of so much of the run, which is another slot, and as yet not on disk."""
        return Held(
            id=os.urandom(16).hex(),
            last_used_s=self.last_used_s,
            hits=self.hits,
            recompute_ms=self.recompute_ms * share,
            ttl_class=self.ttl_class,
            ttl_s=self.ttl_s,
            askers=dict(self.askers),
        )

    def keep_for(self, ttl_class: TtlClass, ttl_s: float | None) -> float | None:
        """Keep it that long at least; the seconds where that is longer than before.

        What is in memory only, or for ever, stays so; so does what is being written.
        """
        is_underway = self.is_written and not self.is_saved
        if is_underway or not self.ttl_s or ttl_s is None or ttl_s <= self.ttl_s:
            return None
        self.ttl_class, self.ttl_s = ttl_class, ttl_s
        return ttl_s

    def reach(self, *, with_nameless: bool = False) -> int:
        """Up to which position conversations are known to have it; with a session id, or any."""
        askers = self.askers.items()
        return max((end for one, end in askers if with_nameless or one.session_id), default=0)

    def used_by(self, asker: Asker, end: int) -> None:
        """Note who used it up to where. Of many the first are left out: it goes with the last that
        is known.
        """
        _note(self.askers, asker, end)

    def note(self, asker: Asker, end: int) -> bool:
        """The server is told that it is theirs up to there; whether that is new."""
        is_new = self.noted.get(asker, 0) < end
        _note(self.noted, asker, end)
        return is_new

    def ends(self, asker: Asker, ended: Ended) -> None:
        """The same of who ended a turn in it."""
        self.ended[asker] = ended
        while len(self.ended) > MAX_ASKERS:
            del self.ended[next(iter(self.ended))]


def _note(ends: dict[Asker, int], asker: Asker, end: int) -> None:
    """Of many the first are left out."""
    ends[asker] = max(ends.pop(asker, 0), end)
    while len(ends) > MAX_ASKERS:
        del ends[next(iter(ends))]


class HotTier:
    """Runs, what is held of each, and the bytes of it. Belongs to the mlx thread."""

    def __init__(self, tree: PrefixTree, budget_bytes: int) -> None:
        self.tree = tree
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self.num_changes = 0
        """How often a run came into memory or left it."""
        self.left: list[str] = []
        """Slots that were queued and left before they were on disk; whoever tells it clears it."""
        self.others: list[Run] = []
        """Runs that are not on disk and somebody else's now, or others than before; the same."""
        self._held: dict[Run, Held] = {}
        self._in_memory: set[Run] = set()
        self._by_id: dict[str, Run] = {}

    def __getitem__(self, run: Run) -> Held:
        return self._held[run]

    def __contains__(self, run: object) -> bool:
        return run in self._held

    def find(self, slot_id: str) -> Run | None:
        """The run of this id, if it is known."""
        return self._by_id.get(slot_id)

    def add(self, run: Run, held: Held) -> None:
        """A new run, in memory or only on disk."""
        self.tree.insert(run)
        self._held[run] = held
        self._by_id[held.id] = run

    def attach(self, run: Run, kv: RunKv) -> None:
        """The KV of a known run, computed or read from disk."""
        self._detach(run)
        held = self._held[run]
        held.kv, held.hot_bytes = kv, kv.nbytes
        self.num_bytes += held.hot_bytes
        self._in_memory.add(run)

    def give_away(self, run: Run) -> None:
        """Evict a run that is on disk, although somebody reads it, who keeps its arrays."""
        self._detach(run)
        self.num_evicted += 1

    def use(self, run: Run) -> None:
        """The run was reused."""
        held, now_s = self._held[run], time.time()
        held.hits = decayed_hits(held.hits, now_s - held.last_used_s) + 1.0
        held.last_used_s, held.is_released = now_s, False

    def used_by(self, is_meant: Callable[[Asker], bool]) -> list[Run]:
        """The runs that some of these conversations used."""
        return [run for run, held in self._held.items() if any(map(is_meant, held.askers))]

    def await_return(self, runs: Iterable[Run], pause_s: float) -> None:
        """Who used these runs last is back in so many seconds."""
        until_s = time.time() + pause_s
        for run in runs:
            if (held := self._held.get(run)) is not None:
                held.awaited_s, held.is_released = max(held.awaited_s, until_s), False

    def release(self, is_meant: Callable[[Asker], bool]) -> None:
        """These conversations are over: what nobody else is known to use goes first.

        A conversation without a session id is never one of them: it may be any.
        """
        for held in self._held.values():
            if held.askers and all(one.session_id and is_meant(one) for one in held.askers):
                held.awaited_s, held.is_released = 0.0, True
                if not held.is_written and held.ttl_s:
                    held.ttl_class = "short"

    def drop(self, run: Run) -> None:
        """Forget a run. What continues it stays."""
        self.tree.remove(run)
        self._detach(run)
        held = self._held.pop(run)
        del self._by_id[held.id]
        if held.is_queued and not held.is_saved:
            self.left.append(held.id)

    def forget(
        self,
        is_meant: Callable[[Asker], bool],
        is_theirs: Callable[[Run], bool] | None = None,
    ) -> ForgottenRuns:
        """Forget what only these conversations used and is not published.

        What others continue stays. With `is_theirs` those that are meant have others' runs too, and
        of their own what others of them continue.
        """
        known = {one for held in self._held.values() for one in (*held.askers, *held.ended)}
        meant = {one for one in known if is_meant(one)}
        used = [
            run for run, held in self._held.items() if (held.askers | held.ended).keys() & meant
        ]
        used.sort(key=lambda run: -run.end)
        told = ForgottenRuns([], [], [])
        for run in used:
            if (held := self._held.get(run)) is None:
                continue
            if is_theirs is not None and (self._is_continued(run) or not is_theirs(run)):
                continue
            for one in meant:
                for each in (held.askers, held.ended, held.noted):
                    each.pop(one, None)
            if held.askers and not held.is_saved and held.reach() < run.end:
                told.unwritten.append(held.id)
                told.longer.append(run)
            else:
                self._drop_unused(run, told)
        stayed = (run for run in used if run in self._held and run not in told.longer)
        self.others += [run for run in stayed if self._held[run].is_queued]
        return told

    def _drop_unused(self, run: Run, told: ForgottenRuns) -> None:
        """Forget it unless somebody is known to use it, then what stayed for its sake only."""
        above: Run | None = run
        while above is not None:
            run, above, held = above, above.parent, self._held[above]
            if held.askers or held.is_saved or self._is_continued(run):
                break
            if held.is_written:
                told.unwritten.append(held.id)
            self.drop(run)
            told.runs.append(run)

    def _is_continued(self, run: Run) -> bool:
        return any(self._held[child].askers for child in run.children)

    def is_whole(self, slot_id: str) -> bool:
        """In memory, and so is what comes before it, which may be read after it."""
        if (run := self._by_id.get(slot_id)) is None:
            return False
        return not run.is_loose and all(one in self._in_memory for one, _ in path_to(run, run.end))

    def of_sessions(self, session_ids: Collection[str]) -> dict[Asker, int]:
        """How many of their first tokens these conversations have in memory, if any."""
        used = [
            (asker, end, held.id)
            for run, held in self._held.items()
            if run in self._in_memory
            for asker, end in held.askers.items()
            if asker.session_id in session_ids
        ]
        reached: dict[Asker, int] = {}
        for asker, end, slot_id in used:
            if end > reached.get(asker, 0) and self.is_whole(slot_id):
                reached[asker] = end
        return reached

    def num_saved(self, leaf: Run | None, num_tokens: int) -> int:
        """How many of the first tokens on the way to `leaf` are on disk without a gap."""
        num_saved = 0
        for run, leave in path_to(leaf, num_tokens):
            held = self._held.get(run)
            if run.start > num_saved or held is None or not held.is_saved:
                break
            num_saved = leave
        return num_saved

    def apart(self) -> list[Run]:
        """What is only on disk, or has something before it that is."""
        return [
            run
            for run in self.tree
            if run.is_loose or any(one not in self._in_memory for one, _ in path_to(run, run.end))
        ]

    def rename(self, chain: HashChain, root_of: Callable[[bytes], bytes]) -> None:
        """Take other names for everything, which must be in memory, as `prefix.renamed`."""
        self.tree = renamed(self.tree, chain, root_of)
        self._by_id.clear()
        for run, held in self._held.items():
            held.id = os.urandom(16).hex()
            held.is_written = held.is_saved = held.is_queued = False
            held.tier = "warm"
            self._by_id[held.id] = run

    def unwritten(self) -> list[Run]:
        """The runs that are in memory only, parents first."""
        return [run for run in self.tree if not self._held[run].is_written]

    def asker_of(self, run: Run) -> Asker:
        """Who a run is written for: a conversation that ends with it, if there is any.

        One that has all of it: by that name it is deleted.
        """
        further = {one for child in run.children for one in self._held[child].askers}
        askers = [one for one, end in self._held[run].askers.items() if end >= run.end]
        named = [one for one in askers if one.session_id is not None]
        ending = [one for one in named if one not in further]
        return next(iter([*reversed(ending), *reversed(named), *reversed(askers)]), NOBODY)

    def shrink(self) -> list[Run]:
        """Evict from memory until the budget holds; the runs that are now nowhere are forgotten.

        Leaves go first; a run that is read, or below which something is in memory, stays. So does
        one that is being written: the writer holds its bytes, and no file has them yet.
        """
        excess = self.num_bytes - self.budget_bytes
        if excess <= 0:
            return []
        forgotten: list[Run] = []
        for run_id in eviction.choose(self._candidates(), excess, time.time()):
            run = self._by_id.get(run_id)
            if run is None:
                continue
            self._detach(run)
            self.num_evicted += 1
            if not self._held[run].is_written:
                self.drop(run)
                forgotten.append(run)
        return forgotten

    def integrity_check(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: bytes, parents or references are not what they should be.
        """
        runs = set(self.tree)
        assert runs == set(self._held), "the tree and what is held differ"
        assert len(self.tree) == len(runs) == len(self._by_id), "the number of runs is wrong"
        in_memory = {run for run, held in self._held.items() if held.kv is not None}
        assert in_memory == self._in_memory, "what is in memory is not what is noted"
        total = sum(held.kv.nbytes for held in self._held.values() if held.kv is not None)
        assert total == self.num_bytes, f"{self.num_bytes} bytes counted, {total} there"
        for run, held in self._held.items():
            assert self._by_id[held.id] is run
            assert held.num_readers >= 0, f"{held.id} has {held.num_readers} readers"
            assert held.kv is not None or held.is_written, f"{held.id} is nowhere"
            assert held.kv is None or run.token_ids is not None, f"{held.id} has no tokens"
            assert not held.is_state_hot or (run.has_state and held.kv is not None)
            if run.parent is not None:
                assert run.parent in self._held, f"{held.id} has lost its parent"
                assert run in run.parent.children
                assert run.parent.start < run.start <= run.parent.end, f"{held.id} hangs in the air"
            else:
                assert run.start == 0 or len(run.start_hash) == HASH_BYTES

    def _candidates(self) -> list[Candidate]:
        found: list[Candidate] = []
        for run in self._in_memory:
            held = self._held[run]
            if held.num_readers or (held.is_written and not held.is_saved):
                continue
            parent = self._held[run.parent].id if run.parent is not None else None
            num_hot = sum(child in self._in_memory for child in run.children)
            found.append(
                Candidate(
                    id=held.id,
                    parent=parent,
                    num_children=num_hot,
                    size_bytes=max(held.hot_bytes, 1),
                    recompute_ms=held.recompute_ms,
                    last_used_s=held.last_used_s,
                    hits=held.hits,
                    ttl_class=held.ttl_class,
                    awaited_s=held.awaited_s,
                    is_released=held.is_released,
                )
            )
        return found

    def _detach(self, run: Run) -> None:
        self.num_changes += 1
        held = self._held[run]
        self.num_bytes -= held.hot_bytes
        held.kv, held.hot_bytes = None, 0
        self._in_memory.discard(run)
        if held.is_state_hot:
            held.is_state_hot = False
            self.tree.lose_state(run)
