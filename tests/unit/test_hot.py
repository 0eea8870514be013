"""The hot tier: bytes counted, leaves evicted first, readers and disks respected."""

import time
from array import array

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.hot import MAX_ASKERS, Held, HotTier
from runtime.kv.layers import State
from runtime.kv.pack import RunKv
from runtime.kv.prefix_tree import PrefixTree, Run, run_of
from store.block_names import HashChain
from store.keyed_names import NOBODY, Asker

CHAIN = HashChain(b"", b"", block_size=4)
RUN_BYTES = 4 * 10


def kv_of(num_tokens: int = 10) -> RunKv:
    return RunKv([mx.zeros((num_tokens, 1, 1))], None)


class Tier(HotTier):
    """A hot tier of runs of ten tokens and 40 bytes each, told apart by their first token."""

    def __init__(self, num_runs: float) -> None:
        super().__init__(PrefixTree(CHAIN), int(num_runs * RUN_BYTES))

    def put(
        self, name: str, parent: Run | None = None, *, is_written: bool = False, age_s: float = 0.0
    ) -> Run:
        start = parent.end if parent is not None else 0
        hashes = tuple(
            f"{name}{i}".encode().ljust(16) for i in range((start + 10) // 4 - start // 4)
        )
        start_hash = parent.end_hash if parent is not None else b""
        run = run_of(CHAIN, parent, start, start + 10, (start_hash, *hashes))
        run.token_ids = array("I", [ord(name)] * 10)
        last_used_s = time.time() - age_s
        held = Held(id=name, last_used_s=last_used_s, recompute_ms=100.0)
        held.is_written = held.is_saved = is_written
        self.add(run, held)
        self.attach(run, kv_of())
        return run

    @property
    def names(self) -> str:
        return "".join(sorted(self[run].id for run in self.tree))

    @property
    def hot_names(self) -> str:
        return "".join(sorted(self[r].id for r in self.tree if self[r].kv is not None))


def test_bytes_are_counted_as_they_come_and_go():
    tier = Tier(9)
    a = tier.put("a")
    tier.put("b", a)
    assert tier.num_bytes == 2 * RUN_BYTES
    tier.attach(a, kv_of(20))
    assert tier.num_bytes == 3 * RUN_BYTES
    tier.attach(a, RunKv([mx.zeros((10, 1, 1))], State([mx.zeros((5,))], "[]")))
    assert tier.num_bytes == 2 * RUN_BYTES + 20
    tier.integrity_check()
    tier.drop(a)
    assert (tier.num_bytes, tier.names) == (RUN_BYTES, "b")
    tier.integrity_check()


def test_within_the_budget_nothing_leaves():
    tier = Tier(2)
    tier.put("b", tier.put("a"))
    assert tier.shrink() == []
    assert (tier.hot_names, tier.num_evicted) == ("ab", 0)


def test_the_leaf_that_was_used_longest_ago_goes_first_and_is_forgotten():
    tier = Tier(3)
    a = tier.put("a", age_s=9000)
    old = tier.put("b", a, age_s=5000)
    tier.put("c", a, age_s=10)
    tier.put("d", a)
    assert tier.shrink() == [old]
    assert (tier.names, tier.hot_names, tier.num_evicted) == ("acd", "acd", 1)
    assert tier.num_bytes == tier.budget_bytes
    tier.integrity_check()


def test_a_chain_is_evicted_from_its_end():
    tier = Tier(2)
    b = tier.put("b", tier.put("a", age_s=9000), age_s=9000)
    tier.put("c", b, age_s=9000)
    tier.put("z")
    tier.shrink()
    assert tier.hot_names == "az"
    tier.integrity_check()


def test_what_is_on_disk_stays_known():
    tier = Tier(1)
    a = tier.put("a", is_written=True, age_s=50)
    tier.put("b", a, is_written=True, age_s=50)
    tier.put("z")
    assert tier.shrink() == []
    assert (tier.names, tier.hot_names, tier.num_evicted) == ("abz", "z", 2)
    assert tier.find("a") is a
    tier.integrity_check()


def test_what_is_on_disk_stays_known_when_what_is_before_it_is_lost():
    tier = Tier(1)
    a = tier.put("a", age_s=50)
    b = tier.put("b", a, is_written=True, age_s=50)
    tier.put("z")
    assert tier.shrink() == [a]
    assert tier.names == "bz"
    assert (tier.find("a"), tier.find("b")) == (None, b)
    assert b.is_loose
    assert not tier.is_whole("b")
    tier.integrity_check()


def test_a_conversation_larger_than_the_budget_leaves_memory_from_its_end():
    tier = Tier(2)
    run = None
    for name in "abcd":
        run = tier.put(name, run, is_written=True)
    assert tier.shrink() == []
    assert (tier.names, tier.hot_names) == ("abcd", "ab")
    assert tier.num_bytes == tier.budget_bytes
    tier.integrity_check()


def test_what_is_being_written_stays_until_it_is_saved():
    tier = Tier(1)
    a = tier.put("a", is_written=True)
    b = tier.put("b", a, is_written=True)
    tier[b].is_saved = False
    tier.shrink()
    assert tier.hot_names == "ab"
    tier[b].is_saved = True
    tier.shrink()
    assert tier.hot_names == "a"


@given(
    chains=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=5),
    num_runs=st.integers(0, 6),
)
def test_bytes_in_memory_are_within_the_budget_whenever_nothing_is_read_or_written(
    chains: list[tuple[int, bool]], num_runs: int
):
    tier = Tier(num_runs)
    for number, (length, is_written) in enumerate(chains):
        run = None
        for depth in range(length):
            run = tier.put(chr(97 + number * 5 + depth), run, is_written=is_written)
    tier.shrink()
    assert tier.num_bytes <= tier.budget_bytes
    total = sum(length for length, _ in chains)
    assert tier.num_bytes == min(total, num_runs) * RUN_BYTES
    tier.integrity_check()


def test_what_is_being_read_stays_with_all_above_it():
    tier = Tier(1)
    b = tier.put("b", tier.put("a", age_s=50), age_s=50)
    tier.put("c", b, age_s=50)
    tier[b].num_readers = 1
    tier.put("z")
    tier.shrink()
    assert tier.hot_names == "ab"
    tier[b].num_readers = 0
    tier.shrink()
    assert tier.hot_names == "a"


def test_a_reuse_makes_a_run_worth_more():
    tier = Tier(2)
    a = tier.put("a", age_s=100)
    tier.put("b", age_s=50)
    tier.use(a)
    assert tier[a].hits == pytest.approx(1.0)
    tier.use(a)
    assert tier[a].hits == pytest.approx(2.0, rel=1e-3)
    tier.put("z")
    tier.shrink()
    assert tier.hot_names == "az"


def test_the_newest_leaf_goes_last_and_stays_only_within_the_budget():
    tier = Tier(1)
    tier.put("a", age_s=50)
    tier.put("z")
    tier.shrink()
    assert tier.hot_names == "z"
    tier.budget_bytes = RUN_BYTES // 2
    tier.shrink()
    assert tier.hot_names == ""


def test_of_many_who_use_a_run_few_are_remembered_and_none_is_kept_after_the_last():
    tier = Tier(10)
    shared = tier.put("a")
    own = tier.put("b", shared)
    tier[own].used_by(Asker("m", "first"), own.end)
    names = ["first", None, *(f"later {number}" for number in range(10 * MAX_ASKERS))]
    for name in names:
        tier[shared].used_by(Asker("m", name), shared.end)
    assert len(tier[shared].askers) == MAX_ASKERS
    assert not tier.forget(lambda one: one.session_id == "later 0").runs
    assert not tier.forget(lambda one: one.session_id != "first").runs
    assert tier.forget(lambda one: one.session_id == "first").runs == [own, shared]
    assert not tier.names


def broken_bytes(tier: Tier, run: Run) -> None:
    tier.num_bytes += 1


def broken_parent(tier: Tier, run: Run) -> None:
    assert run.parent is not None
    run.parent.children.remove(run)


def broken_readers(tier: Tier, run: Run) -> None:
    tier[run].num_readers = -1


def broken_kv(tier: Tier, run: Run) -> None:
    tier[run].kv = None


def broken_tokens(tier: Tier, run: Run) -> None:
    run.token_ids = None


def broken_place(tier: Tier, run: Run) -> None:
    run.start = 99


def broken_tree(tier: Tier, run: Run) -> None:
    tier.tree.remove(run)


@pytest.mark.parametrize(
    "break_it",
    [
        broken_bytes,
        broken_parent,
        broken_readers,
        broken_kv,
        broken_tokens,
        broken_place,
        broken_tree,
    ],
)
def test_the_integrity_check_finds_what_is_wrong(break_it):
    tier = Tier(9)
    run = tier.put("b", tier.put("a"))
    tier.integrity_check()
    break_it(tier, run)
    with pytest.raises(AssertionError):
        tier.integrity_check()


# Hints

MINE, OTHERS = Asker("m", "mine"), Asker("m", "theirs")


def used(tier: Tier, run: Run, *askers: Asker) -> Run:
    for asker in askers:
        tier[run].used_by(asker, run.end)
    return run


def test_a_conversation_that_is_over_goes_first_and_what_it_shares_stays():
    tier = Tier(2)
    shared = used(tier, tier.put("a", age_s=9000), MINE, OTHERS)
    used(tier, tier.put("b", shared, age_s=8000), OTHERS)
    own = used(tier, tier.put("c", shared), MINE)
    tier.release(MINE.__eq__)
    assert [tier[run].is_released for run in (shared, own)] == [False, True]
    assert tier.shrink() == [own]
    assert tier.hot_names == "ab"


def test_a_conversation_that_is_over_is_as_others_once_it_goes_on():
    tier = Tier(1)
    own = used(tier, tier.put("a"), MINE)
    used(tier, tier.put("b", age_s=9000), OTHERS)
    tier.release(MINE.__eq__)
    tier.use(own)
    tier.shrink()
    assert tier.hot_names == "a"


def test_a_conversation_without_a_name_is_not_released():
    tier = Tier(9)
    run = used(tier, tier.put("a"), Asker("m"))
    tier.release(lambda _: True)
    assert not tier[run].is_released


def test_who_is_awaited_is_worth_as_much_as_who_was_just_there():
    tier = Tier(2)
    own = used(tier, tier.put("a", age_s=3 * 3600), MINE)
    used(tier, tier.put("b", age_s=3600), OTHERS)
    used(tier, tier.put("c"), OTHERS)
    tier.await_return([own], 60.0)
    tier.shrink()
    assert tier.hot_names == "ac"


def test_who_did_not_come_back_was_there_last_when_it_was_expected():
    tier = Tier(1)
    own = used(tier, tier.put("a", age_s=3 * 3600), MINE)
    used(tier, tier.put("b", age_s=60), OTHERS)
    tier[own].awaited_s = time.time() - 3600
    tier.shrink()
    assert tier.hot_names == "b"


@given(
    uses=st.lists(st.sets(st.sampled_from([MINE, OTHERS, Asker("m"), NOBODY])), max_size=9),
    pause_s=st.none() | st.floats(0, 3600),
)
def test_a_hint_changes_nothing_of_what_another_conversation_is_known_to_use(
    uses: list[set[Asker]], pause_s: float | None
):
    tier = Tier(99)
    runs = [used(tier, tier.put(chr(97 + i)), *who) for i, who in enumerate(uses)]
    before = {run: (tier[run].last_used_s, tier[run].ttl_class) for run in runs}
    if pause_s is None:
        tier.release(MINE.__eq__)
    else:
        tier.await_return(tier.used_by(MINE.__eq__), pause_s)
    for run, who in zip(runs, uses, strict=True):
        held = tier[run]
        assert held.is_released == (pause_s is None and who == {MINE})
        assert (held.awaited_s > 0) == (pause_s is not None and MINE in who)
        if who != {MINE}:
            assert (held.last_used_s, held.ttl_class) == before[run]
