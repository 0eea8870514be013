"""What the workers have in memory of conversations: asked for, brought, and awaited.

It belongs to the event loop; heads are read in the store's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from runtime.cache.channel import WorkerChannel
from runtime.cache.lifecycle import StoreLife
from runtime.cache.opened import BlockStore
from runtime.config.settings import Settings
from runtime.kv_messages import Awaited, Recall
from store.block_names import pack_ids
from store.errors import SlotDamaged, SlotMissing
from store.head_file import HeadFile, KnownHead
from store.heads import Heads
from store.learned import learned
from store.slots import BlockKey

_MOST_WARMED = 64
"""So many conversations are brought back with a model."""

_MOST_COMPARED = 256
"""Of so many that were used last it is looked at what they share: others wait meanwhile."""


class HeadPath(NamedTuple):
    """The names of the blocks of a head, and that of its end, in their order; so many tokens each
    but the last.
    """

    model: bytes
    names: tuple[bytes, ...]
    num_tokens: int


def path_of(heads: Heads, head_id: str) -> HeadPath | None:
    """By what a head is found in memory; None once it is gone."""
    with heads.lock:
        known = heads.known.get(head_id)
        if known is None:
            return None
        tree = heads.kept if known.path else heads.told
        names = [key.name for key in tree.chain(known.last)][::-1]
        if not names or known.end != names[-1]:
            names.append(known.end)
        return HeadPath(known.head.model, tuple(names), known.head.num_tokens)


def _read(heads: Heads, head_id: str) -> HeadFile | None:
    """A head with its tokens, if it is to be had. Raises StoreFailed."""
    with heads.lock, suppress(SlotDamaged, SlotMissing):
        return heads.read(head_id) if head_id in heads.known else None
    return None


class _Warmed(NamedTuple):
    """The tokens of a head up to and with the block `last`, or with its end all of them. What is
    not `is_wanted` is brought only as far as there is room for it.
    """

    known: KnownHead
    last: BlockKey | None
    num_tokens: int | None = None
    is_wanted: bool = False


def _worth_warming(store: BlockStore, model: bytes, num_learned: int) -> list[_Warmed]:
    """What is pinned, what many conversations begin with, and then what was used last."""
    heads = store.heads
    with heads.lock:
        known = [one for one in heads.known.values() if one.head.model == model and one.path]
        known.sort(key=lambda one: one.last_used_s, reverse=True)
        shared = learned(heads.kept, known[:_MOST_COMPARED], heads.now_s(), num_learned)
    size = store.block_size
    pinned = [_Warmed(one, one.last, is_wanted=True) for one in known if one.head.is_pinned]
    begun = [_Warmed(one.head, one.last, one.num_blocks * size, True) for one in shared]
    return [*pinned, *begun, *(_Warmed(one, one.last) for one in known if not one.head.is_pinned)]


def _to_warm(
    store: BlockStore, channel: WorkerChannel, num_bytes: int, num_learned: int
) -> list[Recall]:
    heads = store.heads
    told: list[Recall] = []
    seen: set[BlockKey] = set()
    for known, last, num_tokens, is_wanted in _worth_warming(
        store, channel.model_hash, num_learned
    ):
        if len(told) >= _MOST_WARMED or (num_bytes <= 0 and not is_wanted):
            break
        with heads.lock:
            is_known = known.head.id in heads.known
            keys = [*heads.kept.chain(last)] if is_known else []
            sizes = {key: heads.kept.blocks[key].sizes.warm for key in keys if key not in seen}
        read = _read(heads, known.head.id)
        if read is None:
            continue
        seen.update(sizes)
        num_bytes -= sum(sizes.values()) + (known.num_bytes if num_tokens is None else 0)
        token_ids = pack_ids(read.token_ids[:num_tokens])
        told.append(Recall(token_ids, read.head.owner.root, is_wanted=is_wanted))
    return told


class WorkersMemory:
    """`channels` are those of the workers there are, and `all_heads` the stores of heads."""

    def __init__(
        self,
        life: StoreLife,
        channels: Collection[WorkerChannel],
        all_heads: Callable[[], Sequence[Heads]],
        settings: Settings,
    ) -> None:
        self._life = life
        self._channels = channels
        self._all_heads = all_heads
        self._block_size = settings.block_size
        self._num_learned = settings.prewarm_learned if settings.prewarm else 0

    def hint(self, head_ids: Collection[str], pause_s: float | None, *, is_over: bool) -> None:
        """Conversations that end with these heads go on in so many seconds, or not at all."""
        if pause_s is not None or is_over:
            self._life.spawn(self._hint(head_ids, None if is_over else pause_s))

    async def _hint(self, head_ids: Collection[str], pause_s: float | None) -> None:
        for path in await self._paths(head_ids):
            for channel in self._of(path.model):
                channel.tell(Awaited(path.names, pause_s))

    async def num_held(self, head_ids: Collection[str]) -> dict[str, int]:
        """How many first tokens of these heads a worker has in memory; none of those that are not
        here.
        """
        paths = {one: await self._paths([one]) for one in head_ids}
        names: dict[bytes, dict[bytes, None]] = {}
        for path in (path for every in paths.values() for path in every):
            names.setdefault(path.model, {}).update(dict.fromkeys(path.names))
        asked = [(model, channel) for model in names for channel in self._of(model)]
        told = await asyncio.gather(*(channel.in_memory(names[model]) for model, channel in asked))
        there: dict[bytes, list[frozenset[bytes]]] = {}
        for (model, _), held in zip(asked, told, strict=True):
            there.setdefault(model, []).append(held)
        found: dict[str, int] = {}
        for head_id, every in paths.items():
            nums = (
                self._num_first(path, held) for path in every for held in there.get(path.model, ())
            )
            if num := max(nums, default=0):
                found[head_id] = num
        return found

    async def bring(self, head_id: str) -> int:
        """Have a conversation that ends with this head in memory soon; its tokens, 0 where nobody
        could.
        """
        paths = await self._paths([head_id])
        channels = [channel for path in paths for channel in self._of(path.model)]
        if not channels:
            return 0
        read = await self._life.attempt(lambda store: _read(store.heads, head_id))
        if read is None:
            return 0
        for channel in channels:
            channel.tell(Recall(pack_ids(read.token_ids), read.head.owner.root, is_wanted=True))
        return read.head.num_tokens

    async def warm(self, channel: WorkerChannel, num_bytes: int) -> None:
        """Have in a new worker's memory what is pinned of its model, what many conversations begin
        with, and then so much of what was used last.
        """
        num = self._num_learned
        for told in await self._life.attempt(lambda s: _to_warm(s, channel, num_bytes, num)) or []:
            channel.tell(told)

    def _of(self, model: bytes) -> list[WorkerChannel]:
        return [one for one in self._channels if one.model_key == model]

    async def _paths(self, head_ids: Collection[str]) -> list[HeadPath]:
        """Each in the store that has it; a thread waits for who has that."""
        every = self._all_heads()

        def find() -> list[HeadPath]:
            found = (path_of(heads, one) for one in head_ids for heads in every)
            return [path for path in found if path is not None]

        return await asyncio.to_thread(find)

    def _num_first(self, path: HeadPath, there: Collection[bytes]) -> int:
        for number, name in enumerate(path.names):
            if name not in there:
                return number * self._block_size
        return path.num_tokens
