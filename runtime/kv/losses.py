"""What was computed before this process and lost with its memory, as the store noted it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runtime.kv.cursor import CacheCursor
from store.block_names import HashChain
from store.keyed_names import Whom
from store.types import LostRow, PrefixPiece

Owner = tuple[str, bytes]
"""The name that was asked, and the key of the conversation."""


class Losses:
    """Belongs to the mlx thread. What is on disk again is lost no more."""

    def __init__(self) -> None:
        self._owners: dict[bytes, set[Owner]] = {}
        self._ends: dict[bytes, list[PrefixPiece]] = {}

    def tell(self, rows: Iterable[LostRow]) -> None:
        """These are lost."""
        for row in rows:
            for piece in row.pieces:
                owners = self._owners.setdefault(piece.hash, set())
                if piece.above and not owners:
                    self._ends.setdefault(piece.above, []).append(piece)
                owners.add((row.name, row.key))

    def clear(self) -> None:
        """Everything has other names now."""
        self._owners.clear()
        self._ends.clear()

    def forget(self, whom: Whom, secret: bytes) -> None:
        """Know nothing of theirs: it is deleted."""
        for found, owners in list(self._owners.items()):
            owners -= {one for one in owners if whom.means_key(*one, secret)}
            if not owners:
                del self._owners[found]
        self._drop_ends()

    def found(self, hashes: Iterable[bytes]) -> None:
        """These are on disk."""
        if self._owners:
            num_known = len(self._owners)
            for one in hashes:
                self._owners.pop(one, None)
            if len(self._owners) < num_known:
                self._drop_ends()

    def has(self, chain: HashChain, cursor: CacheCursor, position: int) -> bool:
        """Whether what comes at this position of a prompt was lost."""
        if not self._owners:
            return False
        number = position // chain.block_size
        if cursor.block_hashes[number : number + 1] and cursor.block_hashes[number] in self._owners:
            return True
        size = chain.block_size
        last = min((number + 1) * size, len(cursor.token_ids))
        return any(True for _ in self.ends_of(chain, cursor, position, last))

    def ends_of(
        self, chain: HashChain, cursor: CacheCursor, start: int, end: int
    ) -> Iterator[PrefixPiece]:
        """The lost ends inside of blocks that a prompt goes through from `start` up to `end`."""
        size = chain.block_size
        for number in range(start // size, end // size + 1) if self._ends else ():
            above = cursor.block_hashes[number - 1] if number else cursor.root or chain.root
            for piece in self._ends.get(above, ()):
                token_ids = cursor.token_ids[number * size : piece.end]
                if start < piece.end <= end and chain.end_hash(above, token_ids) == piece.hash:
                    yield piece

    def ends_between(self, start: int, end: int) -> list[PrefixPiece]:
        """All that a slot of these positions may go through, whoever said it."""
        return [one for ends in self._ends.values() for one in ends if start < one.end <= end]

    def _drop_ends(self) -> None:
        self._ends = {
            above: left
            for above, ends in self._ends.items()
            if (left := [one for one in ends if one.hash in self._owners])
        }
