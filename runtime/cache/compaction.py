"""Compaction: the many small slots at the end of a long chain become one; old states are thinned.

And what is deleted of a slot is cut off, where others need what comes before it.

Tensors lie token by token, so those of a chain are the bytes of its slots one after the other; no
mlx is needed. New slots are durable before rows change places, and old files go last: where a
worker knows them, only with the next compaction, so that whoever reads one gets to its end.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec
import structlog

from runtime.cache.owned import Merged, News, OpenStore
from runtime.cache.redirects import SlotRedirect
from runtime.cache.repair import repair
from runtime.cache.slot_pieces import cut, form_of, put, rewriting, stateless, tensors_of
from runtime.progress import Progress, Watch, unwatched
from runtime.slot_events import SlotsGone
from store import listing, upkeep
from store.block_names import HASH_BYTES, HashChain
from store.disk import opened
from store.errors import OverCap, SlotDamaged, SlotMissing, StoreError
from store.eviction import densest
from store.slot_file import Damage, bounds
from store.slots import CheckedSlot, check, read_contents, slot_path
from store.types import MediaSpan, SlotHeader, SlotPlace, SlotRow, TensorData

MAX_CHAIN = 16
"""More slots than these in a row, all small, are merged."""

MAX_STATES = 4
"""So many states of layers that cannot be sliced are left of a chain: dense at its end."""

SMALL_TOKENS = 2048
SMALL_BYTES = 4 << 20
"""Opening a file takes less than reading so much of it: larger ones are not written again."""

MAX_LOST_TOKENS = 64
"""An end that its only child left may be cut off if it is that short."""

MAX_MERGED_BYTES = 256 << 20
_CUT_TRIES = 8

_log = structlog.stdlib.get_logger("hearth.store")


class ChainLink(NamedTuple):
    """A slot of a chain, the position at which the chain leaves it, and whether a state that it
    has there is to stay.
    """

    row: SlotRow
    leave: int
    keeps_state: bool = True

    @property
    def has_state(self) -> bool:
        """It keeps a state, and that is where the next slot begins."""
        is_there = self.row.header.has_state and self.leave == self.row.header.end
        return is_there and self.keeps_state


Segments = list[list[ChainLink]]
"""What is to become of parts of a chain: one slot of each."""


def plans(rows: Sequence[SlotRow], ends: Collection[str]) -> Iterator[Segments]:
    """What there is to merge; `rows` has parents first, `ends` are where conversations end.

    Pure. Nothing else continues what is in a chain, and no conversation ends inside it.
    """
    by_id = {row.header.id: row for row in rows}
    num_children = Counter(row.parent for row in rows)
    for leaf in rows:
        if num_children[leaf.header.id] or leaf.tier != "warm" or leaf.is_pinned:
            continue
        chain = [ChainLink(leaf, leaf.header.end)]
        while parent := by_id.get(chain[-1].row.parent or ""):
            link = ChainLink(parent, chain[-1].row.header.start)
            is_only = num_children[parent.header.id] == 1 and parent.header.id not in ends
            is_free = parent.tier == "warm" and not parent.is_pinned
            if not (is_only and is_free) or parent.header.end - link.leave > MAX_LOST_TOKENS:
                break
            chain.append(link)
        chain.reverse()
        if segments := _segments(_bared(chain)):
            yield segments


def _segments(chain: list[ChainLink]) -> Segments:
    """What is rewritten of a chain: small slots in a row that are too many, the last such row, and
    what loses its state.
    """
    joint = next((some for some in _small(chain) if len(some) > MAX_CHAIN), None) or []
    bare = [[link] for link in chain if not link.keeps_state and link not in joint]
    segments = [*bare, joint] if joint else bare
    return sorted(segments, key=lambda segment: segment[0].row.header.start)


def _small(chain: list[ChainLink]) -> Iterator[list[ChainLink]]:
    """The small slots of one form in a row of a chain, between states, from the end on.

    The very first is in none: it is what others begin with as well, and what keeps rewriting below
    one.
    """
    some: list[ChainLink] = []
    num_bytes = 0
    for link in reversed(chain):
        row, header = link.row, link.row.header
        is_small = header.num_tokens <= SMALL_TOKENS and row.disk_bytes <= SMALL_BYTES
        is_small = is_small and header.start > 0
        is_small = is_small and (link is chain[-1] or not link.has_state)
        is_other = bool(some) and not _are_alike(row, some[-1].row)
        if some and (is_other or not is_small or num_bytes + row.disk_bytes > MAX_MERGED_BYTES):
            yield some[::-1]
            some, num_bytes = [], 0
        if is_small:
            some.append(link)
            num_bytes += row.disk_bytes
    if some:
        yield some[::-1]


def _are_alike(row: SlotRow, other: SlotRow) -> bool:
    """Their KV has the same form: where a conversation is quantised it has another one."""
    one, two = row.header.layout, other.header.layout
    return one == two or form_of(one) == form_of(two)


def _bared(chain: list[ChainLink]) -> list[ChainLink]:
    """The chain, of which some are to lose their states if there are too many."""
    kept = [number for number, link in enumerate(chain) if link.has_state]
    chain = list(chain)
    while len(kept) > MAX_STATES:
        number = kept.pop(densest([chain[number].leave for number in kept]))
        chain[number] = chain[number]._replace(keeps_state=False)
    return chain


def compact(
    store: OpenStore,
    loaded: Callable[[], Collection[bytes]],
    should_stop: Callable[[], bool],
    watch: Watch = unwatched,
) -> Iterator[News]:
    """Merge what is too long, chain by chain; workers of the `loaded` models are told."""
    store.unlink_replaced()
    yield from cut_ends(store)
    ends = store.database.read(listing.leaves)
    for model in store.records.models():
        long = list(plans(store.index.slots_of(model.hash), ends))
        for number, segments in enumerate(long):
            watch(Progress(step="merge", num_done=number, num_total=len(long)))
            if should_stop():
                return
            try:
                news, places = merge(store, segments)
            except OverCap:
                return  # what would be merged lies there twice for a while
            except (SlotDamaged, SlotMissing) as error:
                leaf = segments[-1][-1].row.header.id
                _log.warning("chain_not_merged", leaf=leaf, why=str(error))
                continue
            yield news
            if model.hash not in loaded():
                store.unlink(places)


def merge(store: OpenStore, segments: Segments) -> tuple[Merged, tuple[SlotPlace, ...]]:
    """Put one slot in the place of each segment; the files of the old ones are still there.

    Raises:
        SlotDamaged, SlotMissing: one of them cannot be read, they do not fit together, or the
            chain was continued meanwhile.
        StoreError: the store fails.
    """
    old = [link.row.header.id for segment in segments for link in segment]
    try:
        with rewriting(store) as rows:
            redirects: dict[str | None, str] = {}
            for segment in segments:
                parent = segment[0].row.parent
                rows.append(_written(store, segment, redirects.get(parent, parent)))
                redirects |= {link.row.header.id: rows[-1].header.id for link in segment}
            with store.replacing:
                places = store.index.replace(rows, old).result()
                store.replaced += places
                store.redirects.note(
                    (link.row.header.id, SlotRedirect(row.header.id, link.leave))
                    for segment, row in zip(segments, rows, strict=True)
                    for link in segment
                )
    except StoreError as error:
        if type(error) is StoreError:
            raise SlotDamaged(str(error)) from error
        raise
    store.counts["compacted"] += len(old)
    return Merged.of(old, rows), places


def cut_ends(store: OpenStore) -> Iterator[Merged | SlotsGone]:
    """Cut off what was deleted of slots whose beginning somebody needs.

    What becomes another slot meanwhile, or is needed further, is looked at again. What cannot be
    cut now, as its file is away, is cut by a later call. Raises StoreError when the store fails.
    """
    for _ in range(_CUT_TRIES):
        has_changed = False
        for row, needed in store.index.to_cut():
            header = row.header
            if not header.start < needed < header.end:
                store.unlink(store.index.not_cut(header.id).result())
                continue
            try:
                yield from _cut_end(store, row, needed)
            except SlotMissing:
                has_changed = True
            except SlotDamaged:
                # What cannot be cut must not stay either: it has what was deleted.
                yield repair(store, header.id, end=needed)
                upkeep.trim_quarantine(store.root, max_bytes=0)
                has_changed = True  # who read it may have repaired it first, with a longer end
            except StoreError as error:
                _log.warning("slot_not_cut", slot=header.id, why=str(error))
        if not has_changed:
            return


def _cut_end(store: OpenStore, row: SlotRow, end: int) -> Iterator[Merged | SlotsGone]:
    """Raises SlotMissing where it is not what it was, StoreError where it cannot be done now."""
    old = row.header.id
    if row.tier == "cold" and (reason := store.fetch(old)):
        yield SlotsGone(store.drop([old]), reason)
        return
    with rewriting(store) as rows:
        rows.append(new := _written(store, [ChainLink(row, end)], row.parent))
        with store.replacing:
            place = store.index.cut(old, new).result()
            if place is None:
                raise SlotMissing(f"{old} is not what it was")
            store.redirects.note([(old, SlotRedirect(new.header.id, end))])
    yield Merged.of([old], [new])
    store.counts["cut"] += 1
    store.unlink([place])


def _written(store: OpenStore, segment: Sequence[ChainLink], parent: str | None) -> SlotRow:
    """Publish one slot for a segment."""
    first, last = segment[0].row.header, segment[-1]
    token_ids, tensors, files = _joined(store, segment)
    header = msgspec.structs.replace(
        last.row.header,
        id=os.urandom(16).hex(),
        start_hash=first.start_hash,
        start=first.start,
        block_hashes=tuple(
            one
            for link in segment
            for one in link.row.header.block_hashes[: _num_blocks(link.row, link.leave)]
        ),
        recompute_ms=sum(link.row.header.recompute_ms for link in segment),
        created_s=store.clock.now_s(),
        media=_pictures(segment, files),
        rope_delta=files[-1].rope_delta - _turned_later(files[-1], last.leave),
    )
    if last.leave < last.row.header.end:
        header = _ended(store.secret, header, token_ids, last.leave)
    elif not last.keeps_state:
        header = msgspec.structs.replace(header, layout=stateless(header.layout), has_state=False)
    if not header.has_state:
        tensors = [one for one in tensors if one.name.startswith("kv.")]
    size = put(store, header, token_ids, tensors)
    return msgspec.structs.replace(last.row, header=header, disk_bytes=size, parent=parent)


def _ended(secret: bytes, header: SlotHeader, token_ids: array[int], end: int) -> SlotHeader:
    """The header of a slot that has these of another one's tokens, without the state at its end.

    Raises:
        SlotDamaged: a picture would be divided.
    """
    if any(span.end > end for span in header.media):
        raise SlotDamaged("a picture goes on beyond the cut")
    chain = HashChain(secret, header.model, block_size=header.block_size)
    block_start = end - end % header.block_size
    # Where not all of the last block's tokens are here no prompt's end is found: that costs little.
    end_hash = os.urandom(HASH_BYTES)
    if block_start >= header.start:
        above = header.block_hashes[-1] if header.block_hashes else header.start_hash
        parent = above if block_start else header.root or chain.root
        end_hash = chain.end_hash(parent, token_ids[block_start - header.start :])
    num_tokens = header.end - header.start
    return msgspec.structs.replace(
        header,
        end=end,
        end_hash=end_hash,
        layout=stateless(header.layout),
        has_state=False,
        recompute_ms=header.recompute_ms * len(token_ids) / num_tokens,
    )


def _pictures(segment: Sequence[ChainLink], files: Sequence[SlotHeader]) -> tuple[MediaSpan, ...]:
    """The index does not know them: what the files say, each once."""
    spans = (
        span
        for link, header in zip(segment, files, strict=True)
        for span in header.media
        if span.start < link.leave
    )
    return tuple(dict.fromkeys(spans))


def _turned_later(header: SlotHeader, end: int) -> int:
    """By how much the pictures after a position change the model's position at the slot's end."""
    if end == header.end or not header.media:
        return 0
    from runtime.kv.media import rope_delta  # noqa: PLC0415 - numpy, which few servers need

    return rope_delta(header.media, header.end) - rope_delta(header.media, end)


def _num_blocks(row: SlotRow, end: int) -> int:
    """How many blocks end inside `(start, end]`."""
    size = row.header.block_size
    return end // size - row.header.start // size


def _joined(
    store: OpenStore, segment: Sequence[ChainLink]
) -> tuple[array[int], list[TensorData], list[SlotHeader]]:
    """Token ids and slices one after the other, the last slot's state; and all their headers."""
    token_ids: array[int] = array("I")
    parts: list[list[TensorData]] = []
    slices: list[list[TensorData]] = []
    headers: list[SlotHeader] = []
    for row, end, _ in segment:
        path = slot_path(store.root, row.header.id)
        num_tokens = end - row.header.start
        slot = check(path)
        if damage := _damage_before(slot, num_tokens):
            raise SlotDamaged(str(damage))
        headers.append(slot.header)
        token_ids += slot.token_ids[:num_tokens]
        with opened(path) as fd:
            parts.append(tensors_of(fd, read_contents(fd)))
        slices.append([cut(one, num_tokens) for one in parts[-1] if one.name.startswith("kv.")])
    if len({tuple((one.name, one.dtype, one.shape[1:]) for one in part) for part in slices}) != 1:
        raise SlotDamaged("the slots of a chain do not have the same tensors")
    state = [one for one in parts[-1] if not one.name.startswith("kv.")]
    joined = [_concatenated(column) for column in zip(*slices, strict=True)]
    return token_ids, joined + state, headers


def _damage_before(slot: CheckedSlot, num_tokens: int) -> Damage | None:
    """What is damaged of the first tokens of a slot, or of the state at its end."""
    header, damage = slot.header, slot.damage
    if num_tokens == header.num_tokens:
        return damage or None
    starts = bounds(header)
    blocks = tuple(one for one in damage.blocks if starts[one] < num_tokens)
    return Damage(blocks) if blocks else None


def _concatenated(column: Sequence[TensorData]) -> TensorData:
    first = column[0]
    data = b"".join(one.data for one in column)
    num_tokens = sum(one.shape[0] for one in column)
    return TensorData(first.name, first.dtype, (num_tokens, *first.shape[1:]), memoryview(data))
