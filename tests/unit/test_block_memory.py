"""KV in memory by names: exact values, and random sequences beside a plain dictionary."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.kv.block_memory import BlockMemory, Found, Piece
from store.block_names import HashChain, num_common

BLOCK = 4
CHAIN = HashChain(b"secret", b"model", block_size=BLOCK)
BYTES = 10


def pieces_of(
    token_ids: Sequence[int], *, has_state: bool = False, root: bytes = b""
) -> list[Piece[str]]:
    """Those of a sequence: its blocks, and what is behind them. Their KV tells their tokens."""
    names = CHAIN.block_hashes(token_ids, root=root)
    above, pieces = root or CHAIN.root, list[Piece[str]]()
    for start in range(0, len(token_ids), BLOCK):
        ids = array("I", token_ids[start : start + BLOCK])
        name = CHAIN.end_hash(above, ids)
        assert len(ids) < BLOCK or name == names[start // BLOCK]
        text = ",".join(map(str, token_ids[: start + len(ids)]))
        pieces.append(Piece(name, above, start, ids, text, BYTES * len(ids)))
        above = name
    if has_state:
        pieces[-1].has_state = True
    return pieces


def kept(
    memory: BlockMemory[str], token_ids: Sequence[int], *, has_state: bool = False
) -> list[Piece[str] | None]:
    return [memory.put(one) for one in pieces_of(token_ids, has_state=has_state)]


def found(memory: BlockMemory[str], prompt: Sequence[int], root: bytes = b"") -> Found[str]:
    names = CHAIN.block_hashes(prompt, root=root)
    return memory.find(prompt, names, root=root, limit=len(prompt))


@pytest.fixture
def memory() -> BlockMemory[str]:
    times = iter(range(1_000_000))
    return BlockMemory(CHAIN, 10**6, clock=lambda: float(next(times)))


def test_a_prompt_is_found_to_the_token(memory: BlockMemory[str]):
    kept(memory, range(10))
    assert found(memory, [*range(9), 99]).num_tokens == 9
    assert found(memory, range(10)).num_tokens == 10
    assert found(memory, [*range(6), 99, 98]).num_tokens == 6, "within a block"
    assert found(memory, [99]).taken == []


def test_the_limit_may_be_inside_of_a_block(memory: BlockMemory[str]):
    kept(memory, range(8))
    names = CHAIN.block_hashes(range(8))
    assert memory.find(range(8), names, limit=7).num_tokens == 7


def test_nothing_of_another_tenant_is_found(memory: BlockMemory[str]):
    root = CHAIN.root_of("other")
    for one in pieces_of(range(6), root=root):
        memory.put(one)
    assert found(memory, range(6)).num_tokens == 0
    assert found(memory, range(6), root).num_tokens == 6
    for one in pieces_of([7, 8], root=root):
        memory.put(one)
    assert found(memory, [7, 8]).num_tokens == 0
    assert found(memory, [7, 8], root).num_tokens == 2


def test_a_name_that_other_tokens_have_as_well_finds_nothing(memory: BlockMemory[str]):
    (block,) = pieces_of(range(4))
    block.token_ids = array("I", [9, 9, 9, 9])
    memory.put(block)
    assert found(memory, range(4)).num_tokens == 0


def test_an_end_that_is_read_stays_when_it_goes_on(memory: BlockMemory[str]):
    (end,) = kept(memory, range(2))
    assert end is not None
    end.num_readers = 1
    kept(memory, range(3))
    assert end.name in memory


def test_what_is_said_twice_is_there_once(memory: BlockMemory[str]):
    first, again = kept(memory, range(10)), kept(memory, range(10))
    assert first == again
    assert memory.num_bytes == 10 * BYTES


def test_an_end_that_goes_on_is_there_once(memory: BlockMemory[str]):
    kept(memory, range(6))
    longer = kept(memory, range(7))
    assert len(memory) == 2
    assert kept(memory, range(6))[1] is longer[1]
    kept(memory, range(8))
    assert [len(one.token_ids) for one in memory] == [4, 4]


def test_ends_that_part_are_both_there(memory: BlockMemory[str]):
    kept(memory, [0, 1, 2, 3, 4, 5])
    kept(memory, [0, 1, 2, 3, 4, 6])
    assert found(memory, [0, 1, 2, 3, 4, 5]).num_tokens == 6
    assert found(memory, [0, 1, 2, 3, 4, 6]).num_tokens == 6


def test_where_states_are_needed_only_they_are_taken_up():
    memory = BlockMemory[str](CHAIN, 10**6, needs_state=True)
    kept(memory, range(8), has_state=True)
    kept(memory, range(14), has_state=True)
    assert found(memory, range(20)).num_tokens == 14
    short = found(memory, range(13))
    assert (short.num_tokens, short.num_known) == (8, 13)
    assert found(memory, range(7)).num_tokens == 0
    kept(memory, range(13), has_state=True)
    assert found(memory, range(20)).num_tokens == 14, "both ends stay, for their states"
    assert found(memory, range(13)).num_tokens == 13


def test_a_state_beside_a_block_without_one_is_taken_up():
    memory = BlockMemory[str](CHAIN, 10**6, needs_state=True)
    kept(memory, range(5), has_state=True)
    kept(memory, range(6), has_state=False)
    kept(memory, range(12))
    it = found(memory, range(12))
    assert (it.num_tokens, it.num_known) == (5, 12)


def test_a_state_comes_to_a_block_that_is_there():
    memory = BlockMemory[str](CHAIN, 10**6, needs_state=True)
    kept(memory, range(4))
    assert found(memory, range(6)).num_tokens == 0
    (last,) = pieces_of(range(4), has_state=True)
    last.num_bytes += 5
    memory.put(last)
    assert found(memory, range(6)).num_tokens == 4
    assert memory.num_bytes == 4 * BYTES + 5
    block = memory.get(last.name)
    assert block is not None
    memory.without_state(block, block.kv, 4 * BYTES)
    assert found(memory, range(6)).num_tokens == 0
    assert memory.num_bytes == 4 * BYTES


def test_what_was_dropped_is_not_found_nor_what_is_behind_it(memory: BlockMemory[str]):
    pieces = kept(memory, range(10))
    assert pieces[1] is not None
    assert memory.drop([pieces[1].name, b"unknown"]) == [pieces[1]]
    assert found(memory, range(10)).num_tokens == 4
    memory.put(pieces[1])
    assert found(memory, range(10)).num_tokens == 10, "it is found again behind what is there"


def test_the_last_pieces_leave_first_and_what_is_read_stays(memory: BlockMemory[str]):
    old, new = kept(memory, range(10)), kept(memory, range(100, 108))
    for one in [*old, *new]:
        assert one is not None
        one.recompute_ms = 1.0
    for one in new:
        assert one is not None
        memory.use(one)
    memory.budget_bytes = 15 * BYTES
    assert memory.shrink() == [old[2], old[1]]
    assert old[0] is not None
    old[0].num_readers = 1
    memory.budget_bytes = 0
    assert memory.shrink() == [new[1], new[0]]
    assert memory.num_bytes == 4 * BYTES


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=12), TOKENS)
def test_the_deepest_state_that_a_prompt_goes_through_is_found(
    said: list[tuple[list[int], bool]], prompt: list[int]
):
    memory = BlockMemory[str](CHAIN, 10**6, needs_state=True)
    for token_ids, has_state in said:
        kept(memory, token_ids, has_state=has_state)
    memory.check()
    states = [one for one, has_state in said if has_state]
    passed = [len(one) for one in states if num_common(one, prompt) == len(one)]
    it = found(memory, prompt)
    assert it.num_tokens == max(passed, default=0)
    assert it.num_known == max((num_common(one, prompt) for one, _ in said), default=0)


class Machine(RuleBasedStateMachine):
    """`heads` are sequences that were not deleted, `whole` those of which nothing was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = BlockMemory[str](CHAIN, 10**6)
        self.heads: list[list[int]] = []
        self.whole: list[list[int]] = []

    @rule(token_ids=TOKENS)
    def keep(self, token_ids: list[int]) -> None:
        kept(self.memory, token_ids)
        self.heads.append(token_ids)
        self.whole.append(token_ids)
        assert found(self.memory, token_ids).num_tokens == len(token_ids)

    @rule(prompt=TOKENS)
    def find(self, prompt: list[int]) -> None:
        it = found(self.memory, prompt)
        assert it.num_tokens >= max((num_common(one, prompt) for one in self.whole), default=0)
        at = 0
        for piece, num in it.taken:
            assert piece.kv.split(",")[: at + num] == [*map(str, prompt[: at + num])]
            assert piece.start == at
            at += num
        assert at == it.num_tokens

    @precondition(lambda self: self.heads)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """As the server says it: the names of one head that no other one has."""
        gone = self.heads.pop(data.draw(st.integers(0, len(self.heads) - 1)))
        mine = {one.name for one in pieces_of(gone)}
        theirs = {one.name for other in self.heads for one in pieces_of(other)}
        self.memory.drop(mine - theirs)
        for piece in self.memory:
            said = [*map(int, piece.kv.split(","))]
            assert any(num_common(one, said) == len(said) for one in self.heads), "nobody has it"
        # The end of another one may have been the beginning of what left.
        self.look_again()

    @rule(share=st.integers(0, 4))
    def evict(self, share: int) -> None:
        self.memory.budget_bytes = self.memory.num_bytes * share // 4
        self.memory.shrink()
        assert self.memory.num_bytes <= self.memory.budget_bytes
        self.memory.budget_bytes = 10**6
        self.look_again()

    def look_again(self) -> None:
        there = (one for one in self.whole if one in self.heads)
        self.whole = [one for one in there if found(self.memory, one).num_tokens == len(one)]

    @invariant()
    def adds_up(self) -> None:
        self.memory.check()


TestMemory = Machine.TestCase
TestMemory.settings = settings(stateful_step_count=30)
