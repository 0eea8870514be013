"""Which beginnings are worth being in memory before somebody asks."""

from __future__ import annotations

from store.head_file import Head, KnownHead, Owner
from store.learned import learned
from store.slots import BlockKey
from store.tree import Tree
from store.types import HIT_HALF_LIFE_S

MODEL = b"m" * 16
NOW_S = 1000.0


def key(name: str) -> BlockKey:
    return BlockKey(MODEL, name.encode())


class Said:
    """Conversations, each by what its blocks say, a letter each."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.heads: list[KnownHead] = []

    def add(
        self,
        names: str,
        session: str = "",
        *,
        hits: float = 0.0,
        age_s: float = 0.0,
        block_ms: float = 10.0,
    ) -> None:
        keys = [key(names[: number + 1]) for number in range(len(names))]
        self.tree.own(keys, block_ms)
        owner = Owner(b"asked", session.encode(), b"")
        head = Head(str(len(self.heads)), MODEL, owner, num_tokens=4 * len(keys))
        known = KnownHead(
            head, keys[-1] if keys else None, b"end", last_used_s=NOW_S - age_s, hits=hits
        )
        self.heads.append(known)

    def learned(self, limit: int = 9) -> list[str]:
        """Their blocks, and by whose tokens they are known."""
        heads = sorted(self.heads, key=lambda one: -one.last_used_s)
        found = learned(self.tree, heads, NOW_S, limit)
        assert all(one.num_blocks == len(one.last.name) for one in found)
        return [f"{one.last.name.decode()} of {one.head.head.id}" for one in found]


def said(*conversations: str) -> Said:
    made = Said()
    for one in conversations:
        made.add(one)
    return made


def test_it_ends_where_conversations_part():
    assert said("ab", "cd").learned() == []
    assert said("abc", "abd").learned() == ["ab of 0"]
    assert said("ab", "abd").learned() == ["ab of 0"], "one goes on from the other's end"
    assert said("", "").learned() == []


def test_what_a_longer_one_begins_with_is_no_other():
    both = said("abcde", "abcdf", "abx")
    assert both.learned() == ["abcd of 0"], "two that are twice as long are worth more than three"
    assert said("abcde", "abcdf", *(f"ab{one}" for one in "tuvwxyz")).learned() == [
        "ab of 0",
        "abcd of 0",
    ]


def test_one_conversation_that_is_asked_again_otherwise_is_not_enough():
    both = Said()
    both.add("abc", "boats")
    both.add("abd", "boats")
    assert both.learned() == []
    both.add("abe", "lamps")
    assert both.learned() == ["ab of 0"]


def two(both: Said, names: str, *, hits: float = 0.0, age_s: float = 0.0, block_ms: float = 10.0):
    for last in names[-2:]:
        both.add(names[:-2] + last, hits=hits, age_s=age_s, block_ms=block_ms)


def test_what_was_used_often_and_lately_and_takes_long_comes_first():
    both = Said()
    two(both, "axy")
    two(both, "bxy", hits=1.0)
    assert both.learned() == ["b of 2", "a of 0"]
    two(both, "cxy", hits=5.0, age_s=2 * HIT_HALF_LIFE_S)
    assert both.learned() == ["b of 2", "c of 4", "a of 0"]
    two(both, "dxy", block_ms=25.0)
    assert both.learned() == ["d of 6", "b of 2", "c of 4", "a of 0"]
    assert both.learned(limit=2) == ["d of 6", "b of 2"]


def test_the_tokens_are_those_of_who_used_it_last():
    both = Said()
    both.add("abc", age_s=20.0)
    both.add("abd", age_s=10.0)
    assert both.learned() == ["ab of 1"]
