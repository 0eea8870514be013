"""What is looked at, and done, in a store by blocks: by the server, or by whoever has it alone.

Every call blocks, may come from any thread unless it says otherwise, and raises StoreError when the
store fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from runtime import kv_sizes
from runtime.cache.conversations import KeptConversation, KnownModels, models_beginning
from runtime.cache.inventory import Conversation, Inventory, conversation_of, gone_meanwhile
from runtime.cache.opened import BlockStore, Terms
from runtime.cache.verification import Verified
from runtime.cache.views import (
    ChainView,
    ShownView,
    SlotNode,
    SlotView,
    StatsView,
    TierView,
    VerifyView,
)
from runtime.config.settings import Settings
from runtime.errors import InterchangeFailed, UnknownConversation
from runtime.models import identified
from runtime.ranks import KvForm
from runtime.types import ModelSpec
from store import earlier, upkeep
from store.errors import SlotDamaged, SlotMissing
from store.head_file import HEAD, KnownHead
from store.heads import Heads, Whom
from store.keyed_names import Whom as Named
from store.keyed_names import conversation_key, keyed_hash
from store.kv_file import open_file
from store.room import Limits
from store.slots import BlockKey
from store.types import Tier

_CHECKPOINT_TRIES = 5
_NAME_CHARS = 32


def terms_of(settings: Settings) -> Terms:
    """How the store of these settings is opened."""
    return Terms(settings.block_size, settings.cold_store, _limits_of(settings))


def _limits_of(settings: Settings) -> Limits:
    cap_bytes = settings.cache_max_bytes
    if cap_bytes is None:
        with suppress(OSError):
            free_bytes = psutil.disk_usage(str(settings.home)).free
            cap_bytes = kv_sizes.cache_budget(free_bytes, 0)
    return Limits(
        warm_bytes=cap_bytes or 0,
        cold_bytes=settings.cold_max_bytes,
        cold_ttl_s=settings.cold_ttl_s,
        day_bytes=settings.kv_daily_write_bytes,
    )


def inventory_of(store: BlockStore, *, on_disk: bool = True) -> Inventory:
    """What is in a store, or only what of that is on disk."""
    wall_s = store.clock.wall_s
    return Inventory(store.heads, store.block_size, store.secret, wall_s, on_disk=on_disk)


def all_kept(inventory: Inventory, found: Iterable[Conversation]) -> list[KeptConversation]:
    """These as `KvContents` says them, without what has gone meanwhile."""
    kept: list[KeptConversation] = []
    for one in found:
        with suppress(UnknownConversation):
            kept.append(as_kept(inventory, one))
    return kept


def as_kept(inventory: Inventory, one: Conversation) -> KeptConversation:
    """A conversation as `KvContents` says it. Raises UnknownConversation: it has gone meanwhile."""
    with inventory.lock:
        one = inventory.current(one)
        view, head = inventory.view(one), one.last.head
    return KeptConversation(view, head.model, head.id, head.ttl_s, view.is_pinned)


def shown(inventory: Inventory, name: str, block_size: int) -> tuple[KeptConversation, ShownView]:
    """A conversation with its slots. Raises UnknownConversation."""
    with inventory.lock:
        one = inventory.find(name)
        kept, blocks = as_kept(inventory, one), inventory.blocks(one)
    slots = tuple(
        SlotView(node.key.name.hex(), tier, node.start, node.start + block_size)
        for node in blocks
        if (tier := _tier(node.block.sizes.tier)) is not None
    )
    start, end = len(blocks) * block_size, one.last.head.num_tokens
    if start < end <= kept.view.num_durable:
        slots = (*slots, SlotView(one.last.head.id, "warm", start, end))
    return kept, ShownView(kept.view, kept.is_pinned, kept.ttl_s, slots)


def slots_of(store: BlockStore, model: str) -> list[SlotNode]:
    """Every slot of a model by its name or hash, parents before children."""
    known = labels(store)
    with store.heads.lock:
        named = {one.head.model for one in _on_disk(store.heads) if one.head.name == model}
        named |= {one for one, label in known.items() if label == model}
        named |= models_beginning(known, model)
        return _nodes(store.heads, named, store.block_size)


def stats(store: BlockStore, inventory: Inventory) -> StatsView:
    """Sums and counters."""
    known = labels(store)
    tiers = tuple(
        TierView(known.get(model, ""), model.hex(), tier, *sums)
        for (model, tier), sums in store.totals().items()
    )
    return StatsView(
        root=str(store.root),
        tiers=tiers,
        num_conversations=len(inventory.conversations()),
        free_bytes=upkeep.disk_room(store.root).free_bytes,
        counters=store.records.counters(),
    )


def known_models(store: BlockStore) -> KnownModels:
    """See `KvContents.known_models`."""
    with store.heads.lock:
        asked = {one.head.name for one in store.heads.known.values()}
    return KnownModels(asked, labels(store))


def labels(store: BlockStore) -> dict[bytes, str]:
    """What the weights of each model hash go by."""
    return {row.hash: row.label for row in store.records.models()}


def identify(store: BlockStore, spec: ModelSpec, form: KvForm) -> bytes:
    """The model hash of a model as it is now. Raises InterchangeFailed: it cannot be read."""
    model = identified.identify(store.records, store.clock.now_s, spec, form)
    if model is None:
        raise InterchangeFailed(f"The files of {spec.id} cannot be read.", "model")
    return model


def branch(
    store: BlockStore, inventory: Inventory, source: str, copy: str, ends: Mapping[str, int]
) -> None:
    """See `KvContents.branch`."""
    session = conversation_key(store.secret, copy)
    with inventory.lock:
        for one in inventory.of_sessions([source])[source]:
            head, end = one.last.head, ends.get(one.last.head.name, 0)
            if (end := min(end, head.num_tokens)) > 0:
                store.branch(one.last, session, end)


# Exchange


def chain(store: BlockStore, inventory: Inventory, name: str) -> ChainView:
    """Where a conversation's tokens lie, all on the fast disk; a block's name names what leads to
    it. Where the head has not what is behind its last whole block, all before that are there.

    It touches the cold store, so that it has to be called by the thread that does.

    Raises:
        UnknownConversation: there is none, or not all of it is to be had.
    """
    last, head = _block_named(store.heads, name), None
    if last is None:
        head = inventory.find(name).last
        last = head.last
    with store.heads.lock:
        keys = _chain_to(store.heads, last)
        wanted = [one for one in keys if _is_away(store, one)]
    if wanted:
        store.bring(keys)
    paths: list[tuple[str, int, int]] = []
    state: tuple[str, int, int] | None = None
    with store.heads.lock:
        sharers = _sharers(store.heads)
        for number, key in enumerate(keys, 1):
            if not store.slots.has(key):
                raise _gone(name)
            end, num_sharers = number * store.block_size, len(sharers.get(key, ()))
            paths.append((str(store.slots.path(key)), end, num_sharers))
            if store.slots.has_state(key):
                state = str(store.slots.state_path(key)), end, num_sharers
    if head is not None and _has_end(head):
        paths.append((str(head.path), head.head.num_tokens, 1))
    elif state is not None:
        paths.insert(state[1] // store.block_size, state)
    if not paths:
        raise _gone(name)
    model = head.head.model if head is not None else keys[0].model
    return ChainView(
        model=labels(store).get(model, ""),
        model_hash=model.hex(),
        paths=tuple(path for path, _, _ in paths),
        leaves=tuple(end for _, end, _ in paths),
        num_conversations=tuple(num for _, _, num in paths),
    )


def _gone(name: str) -> UnknownConversation:
    message = f"Nothing of the conversation {name[:64]!r} is on disk any more."
    return UnknownConversation(message, "conversation")


def _block_named(heads: Heads, name: str) -> BlockKey | None:
    """The block on disk of this name, in hex."""
    if len(name) != _NAME_CHARS:
        return None
    with heads.lock:
        return next((one for one in heads.kept.blocks if one.name.hex() == name), None)


def _chain_to(heads: Heads, last: BlockKey | None) -> list[BlockKey]:
    """This block and all before it, the first one first."""
    try:
        return [*heads.kept.chain(last)][::-1]
    except KeyError:  # it left meanwhile
        return []


def _is_away(store: BlockStore, key: BlockKey) -> bool:
    sizes = store.heads.kept.blocks[key].sizes
    return not sizes.slot or (sizes.cold_state > 0 and not sizes.state)


def _has_end(head: KnownHead) -> bool:
    """Its file has the KV behind its last whole block, or the states there."""
    if head.path is None:
        return False
    try:
        with open_file(head.path, HEAD) as file:
            return len(file.front.entries) > 1
    except (SlotDamaged, SlotMissing):
        return False


def _sharers(heads: Heads) -> dict[BlockKey, set[object]]:
    """The conversations that go through each block on disk."""
    sharers: dict[BlockKey, set[object]] = {}
    for one in _on_disk(heads):
        for key in heads.kept.chain(one.last):
            sharers.setdefault(key, set()).add(conversation_of(one.head))
    return sharers


# Deleting


class Gone(NamedTuple):
    """The blocks and ends that nobody has any more, and what left with them."""

    keys: list[BlockKey]
    conversations: Collection[object] = ()
    num_slots: int = 0


def heads_meant(secret: bytes, whom: Named, models: Collection[bytes] | None) -> Whom:
    """These heads, by the keys that stand for names and session ids."""
    asked = None if whom.model is None else keyed_hash(secret, "model", whom.model.encode())
    session = whom.key  # the store's key; without a store it is nobody's
    if whom.session_id is not None and not (secret and whom.key):
        session = conversation_key(secret, whom.session_id)
    return Whom(asked, session, models)


def deleted(heads: Heads, whom: Whom, number: int | None = None) -> Gone:
    """Delete these heads, and say what left with them; raises as `Heads.delete`."""
    with heads.lock:
        meant = [one.head for one in heads.known.values() if whom.means(one.head)]
        whose = {conversation_of(one) for one in meant}
        num_before = _num_slots(heads)
        keys = heads.delete(whom, number)
        return Gone(keys, whose, num_before - _num_slots(heads))


def deleted_head(heads: Heads, head_id: str, number: int | None = None) -> Gone:
    """The same of a head without a session; raises as `Heads.delete_head`."""
    with heads.lock:
        num_before = _num_slots(heads)
        keys = heads.delete_head(head_id, number)
        return Gone(keys, [head_id], num_before - _num_slots(heads))


def _num_slots(heads: Heads) -> int:
    """Blocks on disk, and what heads have behind their last whole block."""
    return len(heads.kept.blocks) + sum(
        bool(one.head.num_tokens) and (one.last is None or one.end != one.last.name)
        for one in _on_disk(heads)
    )


def delete(
    store: BlockStore, whom: Named, models: Collection[bytes] | None, number: int | None = None
) -> Gone:
    """Delete the heads that are meant, and first what may be of their text beside them.

    Raises as `Heads.delete`.
    """
    _clear_traces(store)
    return deleted(store.heads, heads_meant(store.secret, whom, models), number)


def delete_head(store: BlockStore, head_id: str, number: int | None = None) -> Gone:
    """The same of a head without a session.

    Raises as `Heads.delete_head`, and UnknownConversation where there is no such head.
    """
    _clear_traces(store)
    with store.heads.lock:
        if head_id not in store.heads.known:
            raise gone_meanwhile(head_id)
        return deleted_head(store.heads, head_id, number)


def _clear_traces(store: BlockStore) -> None:
    """What is deleted may be in what dead processes left unfinished, or an earlier release left:
    nobody can tell.
    """
    upkeep.sweep_temp(store.root)
    upkeep.sweep_staged(store.staging_folders, before_s=0.0)
    earlier.remove(store.root)


# Work


def is_cut(store: BlockStore) -> bool:
    """Have the log of the index hold no trace of what was deleted; whether it does not."""
    return any(store.database.checkpoint().result() for _ in range(_CHECKPOINT_TRIES))


def verified(done: Sequence[Verified]) -> VerifyView:
    """What reading these files showed."""
    found = Counter(one.found for one in done)
    return VerifyView(
        num_verified=found["whole"],
        verified_bytes=sum(one.num_bytes for one in done),
        num_damaged=found["damaged"],
        num_unread=found["unread"],
    )


def _on_disk(heads: Heads) -> list[KnownHead]:
    return [one for one in heads.known.values() if one.path is not None]


def _tier(tier: str) -> Tier | None:
    """None where there are no files of a block."""
    return "warm" if tier == "warm" else "cold" if tier == "cold" else None


def _nodes(heads: Heads, models: Collection[bytes], block_size: int) -> list[SlotNode]:
    """The blocks of these models of which there are files, those before others first."""
    sharers: dict[BlockKey, set[object]] = {}
    pinned: set[BlockKey] = set()
    starts: dict[BlockKey, int] = {}
    for one in _on_disk(heads):
        if one.head.model in models:
            chain = [*heads.kept.chain(one.last)][::-1]
            for number, key in enumerate(chain):
                sharers.setdefault(key, set()).add(conversation_of(one.head))
                starts[key] = number * block_size
            if one.head.is_pinned:
                pinned.update(chain)
    nodes: list[SlotNode] = []
    blocks = heads.kept.blocks
    for key in sorted(starts, key=lambda key: starts[key]):
        sizes = blocks[key].sizes
        if (tier := _tier(sizes.tier)) is not None:
            node = SlotNode(
                id=key.name.hex(),
                parent=_before(heads, blocks[key].above),
                start=starts[key],
                end=starts[key] + block_size,
                tier=tier,
                disk_bytes=sizes.warm if tier == "warm" else sizes.cold,
                is_pinned=key in pinned,
                num_conversations=len(sharers[key]),
            )
            nodes.append(node)
    return [*nodes, *_ends(heads, models, starts, block_size)]


def _before(heads: Heads, key: BlockKey | None) -> str | None:
    """This block or the last one before it of which there are files."""
    blocks = heads.kept.blocks
    while key is not None and _tier(blocks[key].sizes.tier) is None:
        key = blocks[key].above
    return key.name.hex() if key is not None else None


def _ends(
    heads: Heads, models: Collection[bytes], starts: Mapping[BlockKey, int], block_size: int
) -> Iterator[SlotNode]:
    """The heads of these models that have the KV behind their last whole blocks."""
    for one in _on_disk(heads):
        if one.head.model not in models:
            continue
        start = starts[one.last] + block_size if one.last is not None else 0
        if one.head.layout and start < one.head.num_tokens:
            yield SlotNode(
                id=one.head.id,
                parent=_before(heads, one.last),
                start=start,
                end=one.head.num_tokens,
                tier="warm",
                disk_bytes=one.num_bytes,
                is_pinned=one.head.is_pinned,
                num_conversations=1,
            )
