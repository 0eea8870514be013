"""What lies in a store by blocks, for people: conversations, what they take, and what is theirs.

A conversation is what one session said to one model by one name; without a session id each head is
one. Every call blocks and may come from any thread; all of them raise StoreError when the store
fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from runtime.cache.conversations import MIN_PREFIX
from runtime.cache.views import ConversationView
from runtime.errors import UnknownConversation
from store.block_names import pack_ids
from store.head_file import Head, KnownHead
from store.heads import Heads
from store.keyed_names import Chain, Whom, conversation_key
from store.slots import BlockKey
from store.tree import Block
from store.turns import unpacked


def conversation_of(head: Head) -> object:
    """The same for all heads of a conversation, and for no others."""
    owner = head.owner
    return (owner.session, owner.asked, head.model) if owner.session else head.id


class Conversation(NamedTuple):
    """Heads of one conversation, the one used last first."""

    id: str
    heads: Sequence[KnownHead]

    @property
    def last(self) -> KnownHead:
        return self.heads[0]

    @property
    def is_named(self) -> bool:
        """It has a session id."""
        return bool(self.last.head.owner.session)


class BlockNode(NamedTuple):
    """A block of a conversation, its files, and how many blocks and heads are right behind it."""

    key: BlockKey
    start: int
    block: Block


class Inventory:
    """What `heads` has, or only what of that is on disk. `secret` keys session ids; `wall_s` turns
    trusted time into wall time.
    """

    def __init__(
        self,
        heads: Heads,
        block_size: int,
        secret: bytes,
        wall_s: Callable[[float], float],
        *,
        on_disk: bool = False,
    ) -> None:
        self._on_disk = on_disk
        self._heads = heads
        self._block_size = block_size
        self._secret = secret
        self._wall_s = wall_s

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Nothing comes or leaves as long as somebody has it."""
        return self._heads.lock

    def current(self, one: Conversation) -> Conversation:
        """The same as it is now; while somebody has the `lock` it stays so.

        Raises:
            UnknownConversation: it has gone meanwhile.
        """
        with self.lock:
            if all(head.head.id in self._heads.known for head in one.heads):
                return one
            whose = conversation_of(one.last.head)
            for other in self.conversations():
                if conversation_of(other.last.head) == whose:
                    return other
        raise gone_meanwhile(one.id)

    def conversations(self) -> list[Conversation]:
        """Everything there is, the latest used first."""
        with self._heads.lock:
            there = (one for one in self._heads.known.values() if one.path or not self._on_disk)
            said = (one for one in there if one.head.num_tokens)
            known = sorted(said, key=lambda one: -one.last_used_s)
        found: dict[object, list[KnownHead]] = {}
        for one in known:
            found.setdefault(conversation_of(one.head), []).append(one)
        return [
            Conversation(heads[0].head.owner.session.hex() or heads[0].head.id, heads)
            for heads in found.values()
        ]

    def of_sessions(self, names: Sequence[str]) -> dict[str, list[Conversation]]:
        """The conversations with these session ids, one for each model, by session id."""
        keys = {conversation_key(self._secret, name).hex(): name for name in names}
        found: dict[str, list[Conversation]] = {name: [] for name in names}
        for one in self.conversations():
            if one.id in keys:
                found[keys[one.id]].append(one)
        return found

    def find(self, name: str) -> Conversation:
        """The conversation whose session id this is, or whose id begins with it; of the latest use.

        Raises:
            UnknownConversation: there is none, or the beginning fits several.
        """
        return self.find_all(name)[0]

    def find_all(self, name: str) -> list[Conversation]:
        """The same with all others of that id, as a session with several models has. Raises as
        `find`.
        """
        known, key = self.conversations(), conversation_key(self._secret, name).hex()
        if named := [one for one in known if one.id == key]:
            return named
        prefix = name.lower()
        fitting = [one for one in known if len(prefix) >= MIN_PREFIX and one.id.startswith(prefix)]
        ids = {one.id for one in fitting}
        if len(ids) == 1:
            return fitting
        if ids:
            shown = ", ".join(sorted(ids)[:5])
            message = (
                f"{len(ids)} conversations begin with {name[:64]!r}: {shown}. Give more of it."
            )
        else:
            message = (
                f"No conversation has the session id {name[:64]!r} or an id that begins with it. "
                "`hearth cache ls` lists them."
            )
        raise UnknownConversation(message, "conversation")

    def view(self, one: Conversation) -> ConversationView:
        """As people see it."""
        with self._heads.lock:
            chains = [self._chain(head) for head in one.heads]
            blocks = {node.key: node for chain in chains for node in chain}
            own = self._own(one, blocks)
            sizes = [node.block.sizes for node in blocks.values()]
            head_bytes = sum(head.num_bytes for head in one.heads)
            num_durable = self._num_durable(one.last, chains[0])
        num_tokens = one.last.head.num_tokens
        num_cold = sum(size.tier == "cold" for size in sizes)
        tier = "cold" if num_cold == len(sizes) > 0 else "mixed" if num_cold else "warm"
        return ConversationView(
            id=one.id,
            model=one.last.head.name,
            model_hash=one.last.head.model.hex(),
            num_tokens=num_tokens,
            num_durable=num_durable,
            num_turns=one.last.num_turns,
            num_slots=len(blocks),
            disk_bytes=head_bytes + sum(size.warm + size.cold for size in sizes),
            own_bytes=head_bytes + sum(blocks[key].block.sizes.warm for key in own),
            tier=tier,
            last_used_s=self._wall_s(one.last.last_used_s),
            is_pinned=any(head.head.is_pinned for head in one.heads),
            is_durable=num_durable == num_tokens,
            is_named=one.is_named,
        )

    def whom_of(self, head_id: str) -> Whom:
        """As `whom_of`."""
        return whom_of(self._heads, head_id, self._block_size)

    def blocks(self, one: Conversation) -> list[BlockNode]:
        """The blocks of its last head, the first one first."""
        with self._heads.lock:
            return self._chain(one.last)

    def _chain(self, known: KnownHead) -> list[BlockNode]:
        tree = self._heads.kept if known.path else self._heads.told
        keys = [*tree.chain(known.last)][::-1]
        size = self._block_size
        return [BlockNode(key, n * size, tree.blocks[key]) for n, key in enumerate(keys)]

    def _own(self, one: Conversation, blocks: dict[BlockKey, BlockNode]) -> Iterator[BlockKey]:
        """Those behind which only heads and blocks of this conversation are, the last first."""
        num_own = Counter(head.last for head in one.heads)
        for node in sorted(blocks.values(), key=lambda node: -node.start):
            if num_own[node.key] == node.block.num_behind:
                num_own[node.block.above] += 1
                yield node.key

    def _num_durable(self, known: KnownHead, chain: Sequence[BlockNode]) -> int:
        """How many of its first tokens are on disk, here or in the cold store."""
        if known.path is None:
            return 0
        for node in chain:
            if node.block.sizes.tier == "missing":
                return node.start
        has_end = known.end_bytes or known.head.num_tokens == len(chain) * self._block_size
        return known.head.num_tokens if has_end else len(chain) * self._block_size


def whom_of(heads: Heads, head_id: str, block_size: int) -> Whom:
    """By what a conversation without a session id is recognised: the tokens of its head.

    Raises:
        UnknownConversation: there is no such head any more.
        SlotMissing, SlotDamaged, StoreFailed: it cannot be read.
    """
    with heads.lock:
        if head_id not in heads.known:
            raise gone_meanwhile(head_id)
        head, token_ids, said = heads.read(head_id)
        shared = heads.num_shared(head_id, token_ids)
    known = unpacked(said, token_ids)
    turns = tuple(one.id for one in known.turns)
    root, beginning = head.owner.root, known.beginning
    chain = Chain(pack_ids(token_ids), shared, root, block_size, beginning, turns)
    return Whom(model=head.name, chain=chain)


def gone_meanwhile(name: str) -> UnknownConversation:
    """It was there when it was looked up."""
    return UnknownConversation(f"The conversation {name} has gone meanwhile.", "conversation")
