"""Learned prefixes, purely: what many conversations begin with, by the heads that go through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from store.head_file import KnownHead
from store.slots import BlockKey
from store.tree import Tree
from store.types import decayed_hits


class Prefix(NamedTuple):
    """The first `num_blocks` blocks of a head, up to the block `last`, which other conversations
    have as well.
    """

    head: KnownHead
    last: BlockKey
    num_blocks: int


def learned(tree: Tree, heads: Iterable[KnownHead], now_s: float, limit: int) -> list[Prefix]:
    """What is worth having in memory before somebody asks, the most worth first: uses that are
    expected times the milliseconds that computing takes.

    `heads` are on disk, those used last first. What is only a part of something that is worth more
    is not among them.
    """
    shared = _Shared(tree, now_s)
    for head in heads if limit else ():
        shared.add(head)
    chosen: list[Prefix] = []
    covered: set[BlockKey] = set()
    for one in shared.found():
        if len(chosen) >= limit:
            break
        if one.last not in covered:
            chosen.append(one)
            covered.update(tree.chain(one.last))
    return chosen


class _Shared:
    """Where the ways of heads part, and who goes there."""

    def __init__(self, tree: Tree, now_s: float) -> None:
        self._tree = tree
        self._now_s = now_s
        self._prefixes: dict[BlockKey, Prefix] = {}
        self._worth_ms: dict[BlockKey, float] = {}
        self._conversations: dict[BlockKey, set[bytes | str]] = {}

    def add(self, head: KnownHead) -> None:
        """Count its way. That of the one used last comes first."""
        uses = decayed_hits(1.0 + head.hits, self._now_s - head.last_used_s)
        conversation = head.head.owner.session or head.head.id
        num_ms = 0.0
        for number, key in enumerate([*self._tree.chain(head.last)][::-1]):
            block = self._tree.blocks[key]
            num_ms += block.recompute_ms
            if block.num_behind > 1:
                self._prefixes.setdefault(key, Prefix(head, key, number + 1))
                self._worth_ms[key] = self._worth_ms.get(key, 0.0) + uses * num_ms
                self._conversations.setdefault(key, set()).add(conversation)

    def found(self) -> Iterator[Prefix]:
        """What more than one conversation begins with; a session that comes back to the same
        question again and again is one. Without a session each head is.
        """
        for key in sorted(self._worth_ms, key=lambda one: (-self._worth_ms[one], one.name)):
            if len(self._conversations[key]) > 1:
                yield self._prefixes[key]
