"""KV in memory, by names.

Pure: `K` is the KV of a piece, whatever that is. A *piece* is a block, or an *end*: fewer tokens
than a block, behind one. Its name covers all tokens up to its last one, and `above` is the name of
what is before it. So equal prefixes are one piece, and a prompt is found by its names alone.

What holds, whatever happens:

1. A piece has the tokens that its name says, and of one name there is one piece.
2. A piece that is read, or behind which there is another one, is not evicted.
3. An end that is the beginning of another piece behind the same name is not kept, but for a state.
4. What was dropped is not found, and neither is what is behind it.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right, insort_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from store import eviction
from store.block_names import HashChain, num_common
from store.types import Candidate, TtlClass, decayed_hits

K = TypeVar("K")


class _Referable:
    """`weakref_slot` does nothing for generic classes in Python 3.12.3 (python/cpython#118033)."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Piece(_Referable, Generic[K]):
    """A block or an end in memory.

    `start` is the position of its first token. `has_state` says that `kv` has the state of layers
    that cannot be sliced, as it was behind its last token. With `is_written` a slot has it.
    """

    name: bytes
    above: bytes
    start: int
    token_ids: array[int]
    kv: K
    num_bytes: int
    has_state: bool = False
    is_written: bool = False
    has_slot: bool = False
    """It was written, for a head that is not answered yet."""
    recompute_ms: float = 0.0
    ttl_class: TtlClass = "long"
    last_used_s: float = 0.0
    hits: float = 0.0
    awaited_s: float = 0.0
    is_released: bool = False
    num_readers: int = 0
    beginnings: set[bytes] = field(default_factory=set[bytes])
    """The names of ends that it begins with, which are no pieces of their own."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def _tokens_of(piece: Piece[K]) -> array[int]:
    return piece.token_ids


class Taken(NamedTuple, Generic[K]):
    """The first `num_tokens` tokens of a piece."""

    piece: Piece[K]
    num_tokens: int


class Found(NamedTuple, Generic[K]):
    """The pieces that a prompt begins with, and how many tokens they are.

    `num_known` tokens are in memory; fewer can be taken up where a state is needed and the last one
    is before that. `above` names what was found as whole blocks, without regard to states.
    """

    taken: list[Taken[K]]
    num_tokens: int
    num_known: int
    above: bytes


class BlockMemory(Generic[K]):
    """The pieces of one model. With `needs_state` a prompt is taken up where a state is only."""

    def __init__(
        self,
        chain: HashChain,
        budget_bytes: int,
        *,
        needs_state: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.chain = chain
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self.num_changes = 0
        """How often a piece came or left."""
        self._needs_state = needs_state
        self._clock = clock
        self._pieces: dict[bytes, Piece[K]] = {}
        self._within: dict[bytes, Piece[K]] = {}
        """By the names of ends: the pieces that begin with them."""
        self._behind: defaultdict[bytes, list[Piece[K]]] = defaultdict(list)
        """By the name before them; in the order of their tokens, so that alike ones are neighbours.
        There may be thousands: of all conversations that are shorter than a block.
        """

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Piece[K]]:
        return iter(self._pieces.values())

    def __contains__(self, name: bytes) -> bool:
        return name in self._pieces

    def has_all(self, name: bytes) -> bool:
        """Whether all tokens of this name are in memory that are behind the name before them."""
        return name in self._pieces or name in self._within

    def get(self, name: bytes) -> Piece[K] | None:
        """The piece of this name, if it is in memory."""
        return self._pieces.get(name)

    def find(
        self, token_ids: Sequence[int], names: Sequence[bytes], *, root: bytes = b"", limit: int
    ) -> Found[K]:
        """What of the first `limit` tokens is in memory; `names` are those of their blocks."""
        size, ids = self.chain.block_size, array("I", token_ids[:limit])
        taken: list[Taken[K]] = []
        above = root or self.chain.root
        for number, name in enumerate(names[: limit // size]):
            piece = self._pieces.get(name)
            if piece is None or piece.token_ids != ids[number * size : (number + 1) * size]:
                break
            taken.append(Taken(piece, size))
            above = name
        rest = ids[len(taken) * size :]
        most, piece = self._most_alike(above, rest)
        num_known = len(taken) * size + most
        if self._needs_state:
            taken = self._up_to_a_state(taken, root or self.chain.root, ids)
        elif piece is not None and most:
            taken.append(Taken(piece, most))
        return Found(taken, sum(num for _, num in taken), num_known, above)

    def _most_alike(self, above: bytes, rest: array[int]) -> tuple[int, Piece[K] | None]:
        """The piece behind a name that has most of these tokens first, and how many."""
        beside = self._behind.get(above, [])
        at = bisect_left(beside, rest, key=_tokens_of)
        alike = [(num_common(one.token_ids, rest), one) for one in beside[max(at - 1, 0) : at + 1]]
        return max(alike, key=lambda one: one[0], default=(0, None))

    def _up_to_a_state(self, taken: list[Taken[K]], root: bytes, ids: array[int]) -> list[Taken[K]]:
        """Up to the deepest state, which may be that of an end beside one of these blocks."""
        size = self.chain.block_size
        for num in range(len(taken), -1, -1):
            above = taken[num - 1].piece.name if num else root
            piece = self._longest_with_state(above, ids[num * size : (num + 1) * size])
            if piece is not None:
                return [*taken[:num], Taken(piece, len(piece))]
        return []

    def _longest_with_state(self, above: bytes, rest: array[int]) -> Piece[K] | None:
        """The longest piece behind a name that these tokens begin with, of those with a state."""
        beside = self._behind.get(above, [])
        while rest and (at := bisect_right(beside, rest, key=_tokens_of)):
            piece = beside[at - 1]
            num = num_common(piece.token_ids, rest)
            if num == len(piece):
                if piece.has_state:
                    return piece
                num -= 1
            # Whatever else these tokens begin with comes before it, so it begins as both do.
            rest = rest[:num]
        return None

    def put(self, piece: Piece[K]) -> Piece[K] | None:
        """Have a piece; the one that has its tokens from now on.

        That is another one where they are there already. One with a state takes the place of one
        without, and what waits for an end of its own is not kept where a longer piece has it.
        """
        there = self._pieces.get(piece.name)
        if there is not None:
            if piece.has_state and not there.has_state:
                self.num_bytes += piece.num_bytes - there.num_bytes
                there.kv, there.has_state, there.num_bytes = piece.kv, True, piece.num_bytes
                self.num_changes += 1
            return there
        num, alike = self._most_alike(piece.above, piece.token_ids)
        if alike is not None and num == len(piece.token_ids) and not piece.has_state:
            self._contain(alike, {piece.name})
            return alike
        for one in self._beginnings(piece):
            names = {one.name, *one.beginnings}
            self._remove(one)
            self._contain(piece, names)
        self._pieces[piece.name] = piece
        self.num_changes += 1
        insort_left(self._behind[piece.above], piece, key=_tokens_of)
        self.num_bytes += piece.num_bytes
        return piece

    def _beginnings(self, piece: Piece[K]) -> list[Piece[K]]:
        """Ends that this piece begins with, and that nobody needs any more then. They come right
        before it, the longest one last.
        """
        beside = self._behind.get(piece.above, [])
        found: list[Piece[K]] = []
        for one in reversed(beside[: bisect_left(beside, piece.token_ids, key=_tokens_of)]):
            if num_common(one.token_ids, piece.token_ids) < len(one.token_ids):
                break
            if not one.has_state and not one.num_readers and len(one) < self.chain.block_size:
                found.append(one)
        return found

    def _contain(self, piece: Piece[K], names: Iterable[bytes]) -> None:
        """A piece begins with ends of these names."""
        for name in names:
            self._let_go(name)
            self._within[name] = piece
            piece.beginnings.add(name)

    def _let_go(self, name: bytes) -> None:
        if (piece := self._within.pop(name, None)) is not None:
            piece.beginnings.discard(name)

    def behind(self, name: bytes) -> Sequence[Piece[K]]:
        """The pieces that are right behind this name."""
        return self._behind.get(name, ())

    def goes_on(self, above: bytes, rest: Sequence[int]) -> bool:
        """Whether something behind a name begins with these tokens and goes on from them."""
        return self._going_on(above, array("I", rest)) is not None

    def has_as_beginning(self, name: bytes, above: bytes, rest: array[int]) -> bool:
        """The same of an end, which is known by its name from then on."""
        piece = self._going_on(above, rest)
        if piece is not None:
            self._contain(piece, [name])
        return piece is not None

    def _going_on(self, above: bytes, ids: array[int]) -> Piece[K] | None:
        beside = self._behind.get(above, [])
        at = bisect_right(beside, ids, key=_tokens_of)
        is_longer = at < len(beside) and beside[at].token_ids[: len(ids)] == ids
        return beside[at] if is_longer else None

    def rename(self, chain: HashChain, root_of: Callable[[bytes], bytes | None]) -> None:
        """Take the names of another chain. Pieces go whose root has none, or what is before them.

        `root_of` gives a root of the new chain for one of the old.
        """
        old = self._behind
        names = {one: new for one in old if (new := root_of(one)) is not None}
        for name in [*self._within]:
            self._let_go(name)
        self._pieces, self._behind, self.num_bytes = {}, defaultdict(list), 0
        waiting = list(names)
        while waiting:
            above = waiting.pop()
            for piece in old[above]:
                new = chain.end_hash(names[above], piece.token_ids)
                if piece.name in old:
                    names[piece.name] = new
                    waiting.append(piece.name)
                piece.name, piece.above = new, names[above]
                piece.is_written = piece.has_slot = False
                self.put(piece)
        self.chain = chain

    def use(self, piece: Piece[K]) -> None:
        """It was taken up now."""
        now_s = self._clock()
        piece.hits = decayed_hits(piece.hits, now_s - piece.last_used_s) + 1
        piece.last_used_s, piece.is_released, piece.awaited_s = now_s, False, 0.0

    def without_state(self, piece: Piece[K], kv: K, num_bytes: int) -> None:
        """Have no state of a piece any more; `kv` is what else there is."""
        self.num_bytes += num_bytes - piece.num_bytes
        piece.kv, piece.num_bytes, piece.has_state = kv, num_bytes, False

    def drop(self, names: Iterable[bytes]) -> list[Piece[K]]:
        """Forget these pieces, whoever reads them; those that were there."""
        found: list[Piece[K]] = []
        for name in names:
            self._let_go(name)
            if (piece := self._pieces.get(name)) is not None:
                found.append(piece)
        for piece in found:
            self._remove(piece)
        return found

    def shrink(self) -> list[Piece[K]]:
        """Evict until the budget holds, as far as that can be; these."""
        excess = self.num_bytes - self.budget_bytes
        if excess <= 0:
            return []
        chosen = eviction.choose(self._candidates(), excess, self._clock())
        gone = [self._pieces[bytes.fromhex(one)] for one in chosen]
        for piece in gone:
            self._remove(piece)
        self.num_evicted += len(gone)
        return gone

    def _candidates(self) -> Iterator[Candidate]:
        for piece in self._pieces.values():
            if not piece.num_readers:
                yield Candidate(
                    id=piece.name.hex(),
                    parent=piece.above.hex(),
                    num_children=len(self._behind.get(piece.name, ())),
                    size_bytes=max(piece.num_bytes, 1),
                    recompute_ms=piece.recompute_ms,
                    last_used_s=piece.last_used_s,
                    hits=piece.hits,
                    ttl_class=piece.ttl_class,
                    awaited_s=piece.awaited_s,
                    is_released=piece.is_released,
                )

    def _remove(self, piece: Piece[K]) -> None:
        del self._pieces[piece.name]
        for name in [*piece.beginnings]:
            self._let_go(name)
        self.num_changes += 1
        beside = self._behind[piece.above]
        beside.remove(piece)
        if not beside:
            del self._behind[piece.above]
        self.num_bytes -= piece.num_bytes

    def check(self) -> None:
        """Recount everything. Raises AssertionError where something is not as it should be."""
        assert self.num_bytes == sum(one.num_bytes for one in self)
        behind = [one for pieces in self._behind.values() for one in pieces]
        assert len(behind) == len(self._pieces)
        for name, piece in self._pieces.items():
            assert piece.name == name
            assert piece in self._behind[piece.above]
            assert piece.num_readers >= 0
            assert 0 < len(piece.token_ids) <= self.chain.block_size
            assert self.chain.end_hash(piece.above, piece.token_ids) == name
            assert all(self._within[one] is piece for one in piece.beginnings)
        assert all(self._pieces[one.name] is one for one in self._within.values())
