"""The whole idea of Hearth's KV cache in one file: no arrays, no files, no processes.

A *prefix* is all tokens from the beginning of a prompt up to some position. The KV of a token
depends on the prefix that ends with it and on nothing else, so equal prefixes have equal KV. Tokens
are taken in *blocks*; a block's hash covers its own tokens and the hash of the block before it
(`store.block_names`), and so it names the prefix that ends with the block.

Everything follows from that:

- *found*: hash the prompt block by block, and look each hash up until one is not there;
- *shared*: who keeps the same prefix keeps the same hashes, so it is there once, for all owners;
- *deleted*: an owner leaves; a block goes with its last one, and nobody else notices;
- *evicted*: the block that was used longest ago goes, and later ones of a prefix before earlier
  ones, as those are of no use without. What is behind a gap stays: when the gap is computed again,
  it is found again;
- *restored*: what memory lost is read from disk, if it was written before.

`python -m runtime.kv.theory` tells a short story. The real parts compare themselves with this file
(`tests/unit/test_kv_theory.py`): `runtime.kv.prefix_tree` finds what is found here, with runs of
many blocks where this has single ones, and with parts of blocks at their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from store.block_names import HashChain


@dataclass
class Block:
    """One block's KV: whose it is, how far into its prefix it ends, and when it was used."""

    end: int
    owners: set[str] = field(default_factory=set[str])
    last_used: int = 0
    on_disk: bool = False


class Blocks:
    """All KV there is, by the hashes of blocks. `chain` says how long a block is, in tokens."""

    def __init__(self, chain: HashChain) -> None:
        self.chain = chain
        self.blocks: dict[bytes, Block] = {}
        self._clock = 0

    def find(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens have KV, in memory or on disk."""
        return len(self._known(prompt)) * self.chain.block_size

    def answer(self, prompt: Sequence[int], owner: str) -> int:
        """Restore what is known of a prompt and compute the rest; how many tokens were computed."""
        self._clock += 1
        num_known = self.find(prompt)
        for number, name in enumerate(self.chain.block_hashes(prompt), 1):
            block = self.blocks.setdefault(name, Block(number * self.chain.block_size))
            block.owners.add(owner)
            block.last_used = self._clock
        return len(prompt) - num_known

    def write(self) -> None:
        """Put everything on disk that is not there."""
        for block in self.blocks.values():
            block.on_disk = True

    def crash(self) -> None:
        """Memory is lost, and with it what was not written."""
        self.blocks = {name: block for name, block in self.blocks.items() if block.on_disk}

    def delete(self, owner: str) -> None:
        """Forget one owner: what nobody else has goes, wherever it is."""
        for name, block in list(self.blocks.items()):
            block.owners.discard(owner)
            if not block.owners:
                del self.blocks[name]

    def evict(self, num_blocks: int) -> None:
        """Give up so many blocks: the longest unused ones, of one prefix the last ones first."""
        by_worth = sorted(self.blocks, key=lambda name: self._worth(self.blocks[name]))
        self.lose(by_worth[:num_blocks])

    def lose(self, names: Iterable[bytes]) -> None:
        """These blocks are gone. Those that come after them stay."""
        for name in names:
            self.blocks.pop(name, None)

    def _worth(self, block: Block) -> tuple[int, int]:
        return block.last_used, -block.end

    def _known(self, prompt: Sequence[int]) -> list[Block]:
        found: list[Block] = []
        for name in self.chain.block_hashes(prompt):
            if name not in self.blocks:
                break
            found.append(self.blocks[name])
        return found


def story() -> list[str]:
    """Two agents with one system prompt, a crash, a deletion and an eviction; a line for each."""
    store = Blocks(HashChain(b"secret", b"model", block_size=4))
    system, first, second = list(range(8)), list(range(100, 108)), list(range(200, 204))
    lines = [f"alice computes {store.answer(system + first, 'alice')} tokens"]
    lines += [f"bob, with the same system prompt, {store.answer(system + second, 'bob')}"]
    store.write()
    store.crash()
    lines += [f"after a crash alice computes {store.answer(system + first, 'alice')}"]
    store.delete("alice")
    lines += [f"alice is deleted; of bob's 12 tokens {store.find(system + second)} are there"]
    store.evict(1)
    lines += [f"one block is evicted; {store.find(system + second)} are there"]
    return lines


if __name__ == "__main__":
    print("\n".join(story()))  # noqa: T201
