"""The blocks that heads go through, as a tree in memory: which is behind which, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from store.slots import BlockKey


class Sizes(NamedTuple):
    """Bytes of disk that the files of a block take: its slot and its states, here and packed in the
    cold store. 0 is for none; a cold file may be missing all the same.
    """

    slot: int = 0
    state: int = 0
    cold_slot: int = 0
    cold_state: int = 0

    @property
    def warm(self) -> int:
        return self.slot + self.state

    @property
    def cold(self) -> int:
        return self.cold_slot + self.cold_state

    @property
    def tier(self) -> str:
        """Where the block is to be had: `warm`, `cold` or `missing`."""
        return "warm" if self.slot else "cold" if self.cold_slot else "missing"


NO_FILES = Sizes()


class Block(msgspec.Struct, gc=False):
    """A block that heads go through: the one before it, and how many blocks and heads are right
    behind it. Its name stays known when its files are gone.
    """

    above: BlockKey | None
    recompute_ms: float = 1.0
    sizes: Sizes = NO_FILES
    num_behind: int = 0


NO_BLOCK = Block(None)


class Tree:
    """Blocks by their keys. `warm_bytes` and `cold_bytes` are the sums over all of them."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, Block] = {}
        self.warm_bytes = 0
        self.cold_bytes = 0

    def fill(self, blocks: dict[BlockKey, Block]) -> None:
        """Have these blocks, and no others."""
        self.blocks = blocks
        self.warm_bytes = sum(one.sizes.warm for one in blocks.values())
        self.cold_bytes = sum(one.sizes.cold for one in blocks.values())

    def measure(self, key: BlockKey, sizes: Sizes) -> bool:
        """Its files take so much from now on; whether that is news."""
        block = self.blocks[key]
        is_news = sizes != block.sizes
        self._count(block.sizes, sizes)
        block.sizes = sizes
        return is_news

    def own(self, keys: Sequence[BlockKey], block_ms: float) -> list[BlockKey]:
        """One more head goes through these, each behind the one before it; the new ones."""
        new = [number for number, key in enumerate(keys) if key not in self.blocks]
        for number in new:
            self.blocks[keys[number]] = Block(keys[number - 1] if number else None, block_ms)
        self.join(keys[-1] if keys else None)
        return [keys[number] for number in new]

    def join(self, last: BlockKey | None) -> None:
        """One more head ends behind this block. All before it are there."""
        for key in self.chain(last):
            block = self.blocks[key]
            block.num_behind += 1
            if block.num_behind > 1:
                break

    def leave(self, last: BlockKey | None) -> list[tuple[BlockKey, Block]]:
        """A head is behind this block no more; those through which none goes now, the last first.
        They are here no longer.
        """
        gone: list[tuple[BlockKey, Block]] = []
        for key in self.chain(last):
            block = self.blocks[key]
            block.num_behind -= 1
            if block.num_behind:
                break
            gone.append((key, block))
        for key, _ in gone:
            self.remove(key)
        return gone

    def remove(self, key: BlockKey) -> None:
        """Forget a block."""
        self._count(self.blocks.pop(key).sizes, NO_FILES)

    def chain(self, last: BlockKey | None) -> Iterator[BlockKey]:
        """This block and all before it, the last first. Raises KeyError where one is unknown."""
        while last is not None:
            above = self.blocks[last].above
            yield last
            last = above

    def is_whole(self, last: BlockKey | None) -> bool:
        """Whether this block and all before it are there."""
        while last is not None and (block := self.blocks.get(last)) is not None:
            if block.num_behind:
                return True
            last = block.above
        return last is None

    def _count(self, before: Sizes, after: Sizes) -> None:
        self.warm_bytes += after.warm - before.warm
        self.cold_bytes += after.cold - before.cold
