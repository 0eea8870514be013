"""The prefix tree by exact values, and against a plain list of sequences."""

from array import array
from dataclasses import dataclass
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.kv.prefix_tree import PrefixTree, Run, num_common, part_of, path_to, run_of
from store.block_names import HashChain

SIZE = 4
CHAIN = HashChain(b"s", b"m", block_size=SIZE)


class Tree:
    """A prefix tree whose runs are made from whole sequences."""

    def __init__(self) -> None:
        self.tree = PrefixTree(CHAIN)

    def match(self, ids: list[int]) -> tuple[Run | None, int, tuple[Run, ...]]:
        return self.tree.match(ids, CHAIN.block_hashes(ids))

    def next_loose(self, ids: list[int], position: int) -> list[tuple[Run, int]]:
        return self.tree.next_loose(ids, CHAIN.block_hashes(ids), position)

    def state(self, ids: list[int], limit: int | None = None) -> Run | None:
        limit = len(ids) if limit is None else limit
        return self.tree.state(ids, CHAIN.block_hashes(ids), limit)

    def run(self, ids: list[int], start: int = 0, parent: Run | None = None) -> Run:
        end = len(ids)
        every = CHAIN.block_hashes(ids)
        begun = start - start % SIZE
        before = every[begun // SIZE - 1] if begun else CHAIN.root
        start_hash = CHAIN.end_hash(before, ids[begun:start]) if start else b""
        run = run_of(CHAIN, parent, start, end, (start_hash, *every[start // SIZE :]))
        run.token_ids = array("I", ids[start:])
        run.end_hash = CHAIN.end_hash(run.last_block, ids[end - end % SIZE :])
        return run

    def insert(
        self, ids: list[int], start: int = 0, parent: Run | None = None, *, has_state: bool = False
    ) -> Run:
        run = self.run(ids, start, parent)
        run.has_state = has_state
        self.tree.insert(run)
        return run

    def insert_new(self, ids: list[int]) -> Run | None:
        """What of `ids` is not in the tree yet, on the run that they follow or its last block."""
        run, known, _ = self.match(ids)
        if known == len(ids):
            return None
        if run is not None and known != run.end:
            known -= known % SIZE
            path = path_to(run, known)
            run = path[-1][0] if path else None
        return self.insert(ids, known, run)


def ids_to(end: int, first: int = 1) -> list[int]:
    return list(range(first, first + end))


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_an_empty_tree_knows_nothing(tree: Tree):
    assert tree.match(ids_to(10)) == (None, 0, ())
    assert tree.match([]) == (None, 0, ())
    assert tree.state(ids_to(10)) is None
    assert list(tree.tree) == []


def test_a_prompt_is_followed_token_by_token(tree: Tree):
    run = tree.insert(ids_to(10))
    assert tree.match(ids_to(14)) == (run, 10, ())
    assert tree.match(ids_to(10)) == (run, 10, ())
    for end in range(1, 10):
        assert tree.match(ids_to(end)) == (run, end, ())
        assert tree.match([*ids_to(end), 99, 98, 97, 96, 95]) == (run, end, ())
    assert tree.match([99, *ids_to(10)]) == (None, 0, ())


def test_a_branch_leaves_its_parent_at_any_token(tree: Tree):
    trunk = tree.insert(ids_to(10))
    branch = tree.insert([*ids_to(6), 61, 62, 63], 6, trunk)
    assert (branch.start, branch.num_tokens, branch.block_hashes) == (
        6,
        3,
        tuple(CHAIN.block_hashes([*ids_to(6), 61, 62])[1:]),
    )
    assert tree.match([*ids_to(6), 61, 62, 99]) == (branch, 8, ())
    assert tree.match([*ids_to(6), 61]) == (branch, 7, ())
    assert tree.match(ids_to(7)) == (trunk, 7, ())
    assert path_to(branch, 8) == [(trunk, 6), (branch, 8)]
    assert path_to(branch, 6) == [(trunk, 6)]
    assert path_to(branch, 5) == [(trunk, 5)]
    assert path_to(None, 0) == path_to(branch, 0) == []


def test_a_run_without_a_complete_block_knows_the_block_before_it(tree: Tree):
    trunk = tree.insert(ids_to(9))
    short = tree.insert(ids_to(11), 9, trunk)
    shorter = tree.insert([*ids_to(5), 50], 5, trunk)
    hashes = CHAIN.block_hashes(ids_to(11))
    assert (short.block_hashes, short.last_block) == ((), hashes[1])
    assert shorter.last_block == hashes[0]
    assert tree.insert([70]).last_block == CHAIN.root


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE + 2])
@pytest.mark.parametrize("is_read", [True, False])
def test_what_one_tenant_has_is_not_there_for_another(length: int, is_read: bool):
    tree, ids, roots = PrefixTree(CHAIN), ids_to(length), {}
    for tenant in ("", "alice", "bob"):
        root = CHAIN.root_of(tenant)
        hashes = CHAIN.block_hashes(ids, root=root)
        longer = [*ids, 99]
        longer_hashes = CHAIN.block_hashes(longer, root=root)
        assert tree.match(longer, longer_hashes, root) == (None, 0, ())
        assert tree.state(longer, longer_hashes, length, root) is None
        run = run_of(CHAIN, None, 0, length, (b"", *hashes), root=root)
        run.end_hash = CHAIN.end_hash(run.last_block, ids[length - length % SIZE :])
        run.token_ids = array("I", ids) if is_read else None
        run.has_state = True
        tree.insert(run)
        roots[tenant] = run
    for tenant, run in roots.items():
        root = CHAIN.root_of(tenant)
        hashes = CHAIN.block_hashes(ids, root=root)
        assert tree.match(ids, hashes, root)[:2] == (run, length)
        assert tree.state(ids, hashes, length, root) is run
    tree.remove(roots["alice"])
    assert set(tree) == {roots[""], roots["bob"]}
    alice = CHAIN.root_of("alice")
    assert tree.match(ids, CHAIN.block_hashes(ids, root=alice), alice) == (None, 0, ())


def test_what_continues_a_lost_run_waits_until_it_is_computed_again(tree: Tree):
    trunk = tree.insert(ids_to(6))
    first = tree.insert(ids_to(9), 6, trunk)
    second = tree.insert(ids_to(15), 9, first)
    third = tree.insert(ids_to(22), 15, second)
    other = tree.insert([*ids_to(6), 60], 6, trunk)
    tree.tree.remove(first)
    assert tree.match(ids_to(22)) == (trunk, 6, ())
    assert tree.match([*ids_to(6), 60]) == (other, 7, ())
    assert tree.next_loose(ids_to(22), 6) == [(second, 15), (third, 22)]
    assert tree.next_loose(ids_to(14), 6) == [(second, 12)]
    assert tree.next_loose([*ids_to(8), 99, *ids_to(22)[9:]], 6) == []
    again = tree.insert(ids_to(9), 6, trunk)
    assert tree.match(ids_to(22)) == (third, 22, ())
    assert path_to(third, 22) == [(trunk, 6), (again, 9), (second, 15), (third, 22)]
    for run in (trunk, other, again, second, third):
        tree.tree.remove(run)
    assert (len(tree.tree), list(tree.tree), tree.match(ids_to(15))) == (0, [], (None, 0, ()))


def test_what_ends_within_a_block_between_two_gaps_is_known_as_well(tree: Tree):
    """Nothing in it holds the end of a block."""
    tree.insert(ids_to(4))
    first = tree.insert(ids_to(12), 8)
    short = tree.insert(ids_to(14), 12, first)
    last = tree.insert(ids_to(22), 15)
    assert tree.next_loose(ids_to(22), 4) == [(first, 12), (short, 14)]
    assert tree.next_loose(ids_to(22), 14) == [(last, 22)]
    assert tree.next_loose([*ids_to(13), 99, *ids_to(22)[14:]], 4) == [(first, 12)]
    tree.tree.remove(first)
    assert tree.next_loose(ids_to(22), 4) == [(short, 14)]
    assert tree.next_loose(ids_to(22), 14) == [(last, 22)]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_of_several_that_begin_behind_a_gap_it_is_what_leads_furthest(
    tree: Tree, order: tuple[int, ...]
):
    """As when a conversation was cut and said again before its beginning was damaged."""
    tree.insert(ids_to(6))
    ways = [((9, 10), (10, 12)), ((9, 11),), ((9, 15), (15, 22))]
    ends: dict[int, list[tuple[Run, int]]] = {}
    for number in order:
        parent: Run | None = None
        for start, end in ways[number]:
            parent = tree.insert(ids_to(end), start, parent)
            ends.setdefault(number, []).append((parent, end))
    assert tree.next_loose(ids_to(22), 6) == ends[2]
    tree.insert(ids_to(9), 6)
    assert tree.match(ids_to(22))[1] == 22


def test_slots_may_be_told_of_in_any_order(tree: Tree):
    """Also where none of them has a whole block."""
    spans = [(0, 6), (6, 7), (7, 10), (10, 11), (11, 22)]
    runs = {start: tree.run(ids_to(end), start) for start, end in reversed(spans)}
    for run in runs.values():
        if not run.block_hashes:
            run.last_block = b""
            run.end_hash = CHAIN.end_hash(
                CHAIN.block_hashes(ids_to(run.end))[-1], ids_to(run.end)[run.end - run.end % SIZE :]
            )
        tree.tree.insert(run)
    assert tree.match(ids_to(22)) == (runs[11], 22, ())
    assert tree.match(ids_to(11)) == (runs[10], 11, ())


def test_a_part_of_a_run_is_found_as_the_whole_was(tree: Tree):
    trunk = tree.insert(ids_to(2))
    whole = tree.insert(ids_to(19), 2, trunk)
    below = tree.insert(ids_to(22), 19, whole)
    parts = [part_of(whole, start, end, SIZE) for start, end in ((2, 4), (8, 16), (16, 19))]
    tree.tree.remove(whole)
    for part in parts:
        tree.tree.insert(part)
    assert tree.match(ids_to(22)) == (parts[0], 4, ())
    assert tree.next_loose(ids_to(22), 4) == [(parts[1], 16), (parts[2], 19), (below, 22)]
    tree.insert(ids_to(8), 4, parts[0])
    assert tree.match(ids_to(22)) == (below, 22, ())


def test_of_two_runs_with_the_same_tokens_the_other_is_found_when_one_is_removed(tree: Tree):
    first, second = tree.insert(ids_to(9)), tree.insert(ids_to(9))
    third = tree.insert(ids_to(9))
    below = tree.insert(ids_to(11), 9, second)
    assert tree.match(ids_to(11)) == (below, 11, ())
    tree.tree.remove(first)
    assert tree.match(ids_to(11)) == (below, 11, ())
    tree.tree.remove(second)
    assert tree.match(ids_to(11)) == (below, 11, ())
    assert below.parent is third
    tree.tree.remove(third)
    assert tree.match(ids_to(11)) == (None, 0, ())


def test_what_hangs_on_a_twin_is_found_at_the_border_of_a_block(tree: Tree):
    trunk = tree.insert(ids_to(10))
    twin = tree.insert(ids_to(8), 7, trunk)
    below = tree.insert([*ids_to(8), 80, 81], 8, twin)
    assert tree.match([*ids_to(8), 80, 81]) == (below, 10, ())
    assert tree.match(ids_to(10)) == (trunk, 10, ())
    short = tree.insert(ids_to(6), 5, trunk)
    under = tree.insert([*ids_to(6), 60], 6, short)
    assert tree.match([*ids_to(6), 60]) == (under, 7, ())
    assert tree.match(ids_to(7)) == (trunk, 7, ())


def test_a_run_whose_tokens_are_on_disk_matches_by_blocks_and_by_its_end(tree: Tree):
    run = tree.insert(ids_to(10))
    run.token_ids = None
    assert tree.match(ids_to(7)) == (run, 4, (run,))
    assert tree.match([*ids_to(9), 99, 99, 99]) == (run, 8, (run,))
    assert tree.match(ids_to(10)) == (run, 10, ())
    assert tree.match(ids_to(12)) == (run, 10, ())
    assert tree.match(ids_to(3)) == (None, 0, (run,))
    below = tree.insert(ids_to(14), 10, run)
    below.token_ids = None
    assert tree.match(ids_to(12)) == (below, 12, ())
    assert tree.match(ids_to(11)) == (run, 10, (below,))


def test_the_deepest_state_on_the_way_is_found_wherever_it_hangs(tree: Tree):
    trunk = tree.insert(ids_to(21), has_state=True)
    early = tree.insert(ids_to(6), 5, trunk, has_state=True)
    border = tree.insert(ids_to(12), 11, trunk, has_state=True)
    other = tree.insert([*ids_to(9), 90], 9, trunk, has_state=True)
    assert tree.state(ids_to(30)) is trunk
    assert tree.state(ids_to(21), 20) is border
    assert tree.state(ids_to(30), 12) is border
    assert tree.state(ids_to(30), 11) is early
    assert tree.state(ids_to(6), 5) is None
    assert tree.state([*ids_to(9), 90, 91]) is other
    tree.tree.remove(border)
    assert tree.state(ids_to(20)) is early


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.integers(0, 3))
def test_common_tokens_are_counted(one: list[int], other: list[int], start: int):
    expected = 0
    for a, b in zip(one, other[start:], strict=False):
        if a != b:
            break
        expected += 1
    known = array("I", one)
    assert num_common(known, 0, other, min(start, len(other))) == expected
    assert num_common(other, min(start, len(other)), known, 0) == expected
    assert num_common(known, 0, array("I", other), min(start, len(other))) == expected


@dataclass
class Kept:
    """One run as the model sees it: all tokens up to its end, and on what it was put."""

    ids: list[int]
    run: Run
    parent: Run | None

    def continues(self, other: "Kept") -> bool:
        """The other one has the tokens before this one, and ends there or at a block's border."""
        start = self.run.start
        has_them = other.run.start < start <= len(other.ids)
        has_them = has_them and other.ids[:start] == self.ids[:start]
        is_border = start in (len(other.ids), start - start % SIZE)
        return has_them and (is_border or other.run is self.parent)


SEQUENCE = st.lists(st.integers(0, 1), min_size=1, max_size=22)


def test_of_all_that_begin_in_a_block_the_one_that_says_most_is_found(tree: Tree):
    """Each that leaves a run within a block begins with that block, beside the run's own."""
    first = tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = tree.insert([1, 2, 3, 4, 5, 60, 70, 80], 4, first)
    assert tree.match([1, 2, 3, 4, 5, 60, 71]) == (second, 6, ())
    assert tree.match([1, 2, 3, 4, 5, 6, 71]) == (first, 6, ())


class AgainstLists(RuleBasedStateMachine):
    """Runs come as commits make them, and go; a list of their sequences knows what is right."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.kept: list[Kept] = []

    def keep(self, ids: list[int], run: Run) -> None:
        self.kept.append(Kept(ids, run, run.parent))

    def there(self) -> list[Kept]:
        """What can be taken up: everything before it is there as well."""
        found: list[Kept] = []
        for one in sorted(self.kept, key=lambda one: one.run.start):
            if not one.run.start or any(one.continues(other) for other in found):
                found.append(one)
        return found

    @rule(ids=SEQUENCE)
    def commit(self, ids: list[int]) -> None:
        run = self.tree.insert_new(ids)
        if run is not None:
            self.keep(ids, run)

    @precondition(lambda self: self.there())
    @rule(data=st.data())
    def commit_state(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.there())).ids
        ids = one[: data.draw(st.integers(1, len(one)))]
        start = len(ids) - 1
        parent = self.tree.match(ids[:start])[0] if start else None
        self.keep(ids, self.tree.insert(ids, start, parent, has_state=True))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.kept)).run
        self.tree.tree.remove(gone)
        self.kept = [one for one in self.kept if one.run is not gone]

    @rule(ids=SEQUENCE)
    def look_up(self, ids: list[int]) -> None:
        run, num_tokens, unread = self.tree.match(ids)
        assert unread == ()
        expected = max((num_common(one.ids, 0, ids, 0) for one in self.there()), default=0)
        assert num_tokens == expected
        said = [t for one, end in path_to(run, num_tokens) for t in tokens(one)[: end - one.start]]
        assert said == ids[:num_tokens]

    @rule(ids=SEQUENCE, limit=st.integers(0, 22))
    def look_up_state(self, ids: list[int], limit: int) -> None:
        limit = min(limit, len(ids))
        there = [one for one in self.there() if one.run.has_state and is_prefix(one.ids, ids)]
        ends = [len(one.ids) for one in there]
        expected = max((end for end in ends if end <= limit), default=0)
        run = self.tree.state(ids, limit)
        assert (run.end if run is not None else 0) == expected
        if run is not None:
            assert run.has_state
            assert next(one.ids for one in self.kept if one.run is run) == ids[: run.end]

    @rule(ids=SEQUENCE, data=st.data())
    def look_up_unread(self, ids: list[int], data: st.DataObject) -> None:
        true = self.tree.match(ids)[1]
        hidden = [one.run for one in self.kept if data.draw(st.booleans())]
        known = {run: run.token_ids for run in hidden}
        for run in hidden:
            run.token_ids = None
        _, num_tokens, unread = self.tree.match(ids)
        for run in hidden:
            run.token_ids = known[run]
        assert true - true % SIZE <= num_tokens <= true
        assert set(unread) <= set(hidden)
        assert num_tokens == true or unread

    @invariant()
    def it_holds_what_was_kept(self) -> None:
        assert set(self.tree.tree) == {one.run for one in self.kept}
        assert len(self.tree.tree) == len(self.kept)


def tokens(run: Run) -> list[int]:
    assert run.token_ids is not None
    return run.token_ids.tolist()


def is_prefix(one: list[int], other: list[int]) -> bool:
    return other[: len(one)] == one


TestAgainstLists = AgainstLists.TestCase


def test_a_run_that_goes_on_within_a_block_is_joined_by_the_first_prompt_that_has_it(tree: Tree):
    """Nobody is told what its end within a block is called in a longer run."""
    loose = tree.insert(ids_to(21), 10)
    further = tree.insert(ids_to(30), 21, loose)
    trunk = tree.insert([*ids_to(10), 99])
    assert loose.is_loose
    assert further.is_loose
    assert tree.match([*ids_to(9), 98, *ids_to(30)[10:]]) == (trunk, 9, ())
    assert loose.is_loose
    assert tree.match(ids_to(30)) == (further, 30, ())
    assert path_to(further, 30) == [(trunk, 10), (loose, 21), (further, 30)]
    tree.tree.remove(trunk)
    assert tree.match(ids_to(30)) == (None, 0, ())
    again = tree.insert(ids_to(10))
    assert path_to(further, 30) == [(again, 10), (loose, 21), (further, 30)]
