"""What lies in an open store, for people: list it, count it, verify it, delete it for good.

Every call blocks and may come from any thread; all of them raise StoreError when the store fails.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from runtime.cache.compaction import cut_ends
from runtime.cache.contents import MIN_PREFIX, KeptConversation
from runtime.cache.inventory_views import (
    ChainView,
    ConversationView,
    RemovalView,
    StatsView,
    TierView,
    VerifyView,
)
from runtime.cache.owned import INDEX, Merged, OpenStore
from runtime.cache.repair import repair
from runtime.errors import InterchangeFailed, UnknownConversation
from runtime.kv.prefix_tree import num_common
from runtime.progress import Progress, Watch, unwatched
from runtime.ranks import KvForm
from runtime.slot_events import SlotsGone
from runtime.types import ModelSpec
from store import listing, pins, prefixes, removal, sightings, turns, unpublished, upkeep
from store.conversations import Conversations
from store.disk import Reserve
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError, StoreFailed
from store.forks import forks
from store.keyed_names import Chain, Whom, model_key
from store.listing import Entry, SlotLink
from store.slot_file import is_slot_id
from store.slots import read_header, read_token_ids, remove, slot_path, verify
from store.turns import Folders, TurnTokens
from store.types import ConversationRow, SlotPlace

_CHECKPOINT_TRIES = 5
_MAX_FORKS = 64
"""So many of the last ones are read: what is asked often has many, which are as much alike."""


def ignore(news: SlotsGone | Merged) -> None:
    """There is nobody to tell."""
    del news


@dataclass(frozen=True, slots=True)
class Inventory:
    """The store's contents by name."""

    store: OpenStore
    on_gone: Callable[[SlotsGone | Merged], None] = ignore
    """Told what leaves the disk, or takes another's place, before a file does."""

    # Looking

    def conversations(self) -> list[ConversationView]:
        """Everything there is, the latest used first."""
        return [_view(self.store, entry) for entry in self._entries()]

    def views(self, entries: Sequence[Entry]) -> list[ConversationView]:
        """The same as people see it, one by one."""
        return [_view(self.store, entry) for entry in entries]

    def of_sessions(self, names: Sequence[str]) -> dict[str, list[KeptConversation]]:
        """The conversations with these session ids, each with every model it had, by session id."""
        keys = {self.store.conversation_key(name): name for name in names}
        found = self.store.database.read(lambda c: listing.named(c, list(keys)))
        kv: dict[str, list[KeptConversation]] = {name: [] for name in names}
        for entry in found:
            one = KeptConversation(_view(self.store, entry), entry.model, entry.leaf)
            kv[keys[bytes.fromhex(entry.id)]].append(one)
        return kv

    def branch(self, source: str, copy: str, ends: Mapping[str, int]) -> None:
        """Let the session id `copy` share the KV of another, by model up to the token in `ends`.

        What is shared is not deleted with `source`; nothing beyond is shared.
        """
        for one in self.of_sessions([source])[source]:
            links = way_to(self.store, one.end) if one.end is not None else []
            end = ends.get(one.view.model, 0)
            shared = [link for link in links if link.start < end]
            if shared:
                row = ConversationRow(
                    key=self.store.conversation_key(copy),
                    model=one.model,
                    leaf=shared[-1].place.id,
                    num_tokens=min(shared[-1].leave, end),
                    last_used_s=self.store.clock.now_s(),
                    created_s=time.time(),
                    name=one.view.model,
                )
                Conversations(self.store.database).advance(row).result()
            chain, key = tokens_to(self.store, one.end), self.store.conversation_key(copy).hex()
            turns.branch(self.store.root, one.model, one.view.id, key, chain, end)

    def stats(self) -> StatsView:
        """Sums and counters."""
        labels = self.labels()
        root = self.store.root
        tiers = tuple(
            TierView(
                model=labels.get(total.model, ""),
                model_hash=total.model.hex(),
                tier=total.tier,
                num_slots=total.num_slots,
                num_tokens=total.num_tokens,
                disk_bytes=total.disk_bytes,
            )
            for total in self.store.index.totals()
        )
        return StatsView(
            root=str(root),
            tiers=tiers,
            num_conversations=len(self._entries()),
            quarantine_bytes=_bytes_below(root / upkeep.QUARANTINE),
            free_bytes=upkeep.disk_room(root).free_bytes,
            counters=self.store.records.counters(),
        )

    def find(self, name: str) -> Entry:
        """The entry whose session id this is, or whose id begins with it; of the latest use.

        Raises:
            UnknownConversation: there is none, or the beginning fits several.
        """
        return self.find_all(name)[0]

    def find_all(self, name: str) -> list[Entry]:
        """The same with all others of that id: a session with several models, what two names of a
        model were asked alike. Raises as `find`.
        """
        key = self.store.conversation_key(name).hex()
        known = self._entries()
        named = [entry for entry in known if entry.is_named and entry.id == key]
        if named:
            return named
        prefix = name.lower()
        fitting = [e for e in known if len(prefix) >= MIN_PREFIX and e.id.startswith(prefix)]
        ids = {entry.id for entry in fitting}
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

    def chain(self, name: str) -> ChainView:
        """Where a conversation's tokens lie, all on the fast disk; a slot's id names its chain.

        Raises:
            UnknownConversation: there is none, or not all of it is to be had.
        """
        leaf = name if is_slot_id(name) and way_to(self.store, name) else self.find(name).leaf
        links = way_to(self.store, leaf) if leaf is not None else []
        for link in links:
            is_cold = link.place.tier == "cold"
            if links[0].start or (is_cold and not self.store.promote(link.place.id)):
                links = []
                break
        if not links:
            message = f"Nothing of the conversation {name[:64]!r} is on disk any more."
            raise UnknownConversation(message, "conversation")
        paths = [slot_path(self.store.root, link.place.id) for link in links]
        model = read_header(paths[0]).model
        sharers = self.store.database.read(listing.num_conversations)
        return ChainView(
            model=self.labels().get(model, ""),
            model_hash=model.hex(),
            paths=tuple(map(str, paths)),
            leaves=tuple(link.leave for link in links),
            num_conversations=tuple(sharers.get(link.place.id, 0) for link in links),
        )

    def identify(self, spec: ModelSpec, form: KvForm) -> bytes:
        """The model hash of a model as it is now.

        Raises:
            InterchangeFailed: its files cannot be read.
        """
        model = self.store.identify(spec, form)
        if model is None:
            raise InterchangeFailed(f"The files of {spec.id} cannot be read.", "model")
        return model

    # Deleting

    def remove_conversation(self, name: str) -> RemovalView:
        """Delete a conversation with all models, or a chain, and what only it used.

        Its rows go last but for the files: as long as they are there it can be deleted again.

        Raises:
            UnknownConversation: as `find`; then what a deletion that was broken off left is gone.
        """
        try:
            return self.remove(self.find_all(name))
        except UnknownConversation:
            num_lost = _drop_lost(self.store, name)
            done = self._finished(num_lost, 0)
            if num_lost:
                return done
            raise

    def remove(self, entries: Sequence[Entry]) -> RemovalView:
        """The same of those of one id that were found: what a chain went on with since then goes
        as well.

        Raises:
            UnknownConversation: a chain whose end has gone since then.
        """
        chains = [one for one in entries if not one.is_named]
        num_slots = sum(self._unlink(_dropped(self.store, one)) for one in chains or entries[:1])
        return self._finished(1, num_slots)

    def remove_name(self, name: str) -> RemovalView:
        """Delete everything that was asked of a model by this name, with all weights it had.

        What others that share the weights were asked stays as it was.
        """
        store, num_slots = self.store, 0
        num_conversations = sum(entry.name == name for entry in self._entries())
        submit = store.database.submit
        while (places := submit(lambda c: removal.drop_name(c, name)).result()) is not None:
            num_slots += self._unlink(places)
        asked = model_key(store.secret, name)
        turns.drop_folders(store.root, Folders(name=asked))
        prefixes.remove_asked(store.root, asked)
        return self._finished(num_conversations, num_slots)

    def remove_models(self, models: Collection[bytes]) -> RemovalView:
        """Delete everything of these models."""
        num_conversations = sum(entry.model in models for entry in self._entries())
        num_slots = sum(self._remove_slots(model) for model in models)
        return self._finished(num_conversations, num_slots)

    def remove_all(self) -> RemovalView:
        """Delete everything, past requests and indexes that were set aside among it."""
        num_conversations = len(self._entries())
        num_slots = self._remove_slots(None)
        for path in self.store.root.glob(f"{INDEX}.aside-*"):
            path.unlink(missing_ok=True)
        return self._finished(num_conversations, num_slots)

    def _remove_slots(self, model: bytes | None) -> int:
        submit = self.store.database.submit
        num_slots = 0
        while places := submit(lambda c: removal.drop_some(c, model)).result():
            num_slots += self._unlink(places)
        submit(lambda c: removal.forget(c, model)).result()
        turns.drop_turns(self.store.root, model)
        prefixes.remove_model(self.store.root, model)
        return num_slots

    def _unlink(self, places: Sequence[SlotPlace]) -> int:
        self.on_gone(SlotsGone(tuple(place.id for place in places), "deleted"))
        self.store.unlink(places)
        return len(places)

    def _finished(self, num_conversations: int, num_slots: int) -> RemovalView:
        """Clear what else holds a trace: ends of slots, files that were kept, the index's log."""
        for news in cut_ends(self.store):
            self.on_gone(news)
        self.store.under_way.wait()
        _clear_traces(self.store)
        tries = (self.store.database.checkpoint().result() for _ in range(_CHECKPOINT_TRIES))
        return RemovalView(
            num_conversations=num_conversations, num_slots=num_slots, is_cut=any(tries)
        )

    # Verifying and adding

    def verify(
        self, watch: Watch = unwatched, should_stop: Callable[[], bool] = lambda: False
    ) -> VerifyView:
        """Read every slot and compare every checksum; what is not as written goes."""
        sizes: list[int] = []
        num_damaged = num_unread = 0
        places = self.store.index.places()
        for number, place in enumerate(places):
            watch(Progress(step="verify", num_done=number, num_total=len(places)))
            if should_stop():
                break
            try:
                sizes.append(self._verify(place))
            except SlotForeign:
                num_unread += 1
            except (SlotDamaged, SlotMissing):
                num_damaged += self._drop_damaged(place)
            except StoreError:
                num_unread += 1
        return VerifyView(
            num_verified=len(sizes),
            verified_bytes=sum(sizes),
            num_damaged=num_damaged,
            num_unread=num_unread,
        )

    def _verify(self, place: SlotPlace) -> int:
        if place.tier == "warm":
            return verify(slot_path(self.store.root, place.id)).num_bytes
        if self.store.cold is None:
            raise StoreFailed("there is no cold store")
        return self.store.disk.within(place.id, partial(_read_cold, self.store, place))

    def _drop_damaged(self, place: SlotPlace) -> int:
        """Unless it was deleted, moved or written again meanwhile."""
        if place not in self.store.index.places():
            return 0
        news = repair(self.store, place.id)
        self.on_gone(news)
        return int(bool(news.ids))

    def _entries(self) -> list[Entry]:
        return self.store.database.read(listing.entries)

    def labels(self) -> dict[bytes, str]:
        """What the weights of each model hash go by."""
        return {row.hash: row.label for row in self.store.records.models()}


def _view(store: OpenStore, entry: Entry) -> ConversationView:
    return ConversationView(
        id=entry.id,
        model=entry.name,
        model_hash=entry.model.hex(),
        num_tokens=entry.num_tokens,
        num_durable=entry.num_durable,
        num_turns=entry.num_turns,
        num_slots=entry.num_slots,
        disk_bytes=entry.disk_bytes,
        own_bytes=entry.own_bytes,
        tier=_tier(entry),
        last_used_s=store.clock.wall_s(entry.last_used_s),
        is_pinned=bool(entry.is_pinned),
        is_durable=0 < entry.num_tokens <= entry.num_durable,
        is_named=bool(entry.is_named),
    )


def _drop_lost(store: OpenStore, session_id: str) -> int:
    """Nothing of a conversation is on disk; 1 if it was noted that something should be, else 0."""
    key = store.conversation_key(session_id)
    return int(store.database.submit(lambda c: unpublished.drop_key(c, key)).result() > 0)


def _read_cold(store: OpenStore, place: SlotPlace, reserve: Reserve) -> int:
    """The bytes of a slot in the cold store, which is unpacked to read all of it."""
    assert store.cold is not None
    with store.moving:  # a slot that is promoted has the same name until it is whole
        staged = store.cold.promote(store.root, place.id, reserve)
        remove(staged.path)
    return staged.num_bytes


def _dropped(store: OpenStore, entry: Entry) -> tuple[SlotPlace, ...]:
    """Remove all of a conversation but its slots, which nobody needs now.

    Raises:
        UnknownConversation: a chain whose end has gone.
    """
    tokens: TurnTokens | None = None
    if not entry.is_named:
        leaf = store.redirects.of(entry.id, entry.num_tokens) or entry.id
        if not way_to(store, leaf):
            message = f"The conversation {entry.id} has gone meanwhile."
            raise UnknownConversation(message, "conversation")
        entry = replace(entry, id=leaf, leaf=leaf)
        tokens = tokens_to(store, leaf)
    source = pins.source_of(entry.id)
    store.database.submit(lambda c: pins.drop(c, source)).result()
    if tokens is None:
        turns.drop_folders(store.root, Folders(conversation=entry.id))
        prefixes.remove_session(store.root, entry.id)
    else:
        asked, tenant = model_key(store.secret, entry.name), None
        with suppress(StoreError):
            tenant = read_header(slot_path(store.root, entry.id)).root
        chain = _chain_of(store, entry, tokens)
        turns.drop_chain(store.root, entry.model, asked, tokens, tenant)
        prefixes.remove_chain(store.root, entry.model, asked, chain)
    if entry.is_named:
        return Conversations(store.database).drop(bytes.fromhex(entry.id)).result()
    whose = entry.id, entry.name
    return store.database.submit(lambda c: removal.drop_chain(c, *whose)).result()


class Named(NamedTuple):
    """What goes by a name, and who is meant by that."""

    entries: list[Entry]
    whoms: list[Whom]


def named(inventory: Inventory, name: str) -> Named:
    """Who goes by that name: a session id, or the beginning of what stands for one, or a chain.

    Raises:
        UnknownConversation: as `Inventory.find`.
    """
    entries = inventory.find_all(name)
    if entries[0].is_named:
        return Named(entries, [Whom(session_id=name, key=bytes.fromhex(entries[0].id))])
    store = inventory.store
    chains = [_chain_of(store, entry, tokens_to(store, entry.leaf)) for entry in entries]
    whoms = [Whom(model=one.name, chain=of) for one, of in zip(entries, chains, strict=True)]
    return Named(entries, whoms)


def _chain_of(store: OpenStore, entry: Entry, tokens: TurnTokens) -> Chain:
    """By what a conversation without a session id is recognised."""
    chain = Chain(tokens.token_ids.tobytes())
    with suppress(StoreError):
        header = read_header(slot_path(store.root, entry.id))
        asked = model_key(store.secret, entry.name)
        chain = Chain(
            chain.token_ids,
            num_shared=store.database.read(lambda c: removal.num_shared(c, entry.id, entry.name)),
            num_alike=_num_alike(store, entry, tokens.token_ids),
            root=header.root,
            block_size=header.block_size,
            folders=turns.folders_of(store.root, entry.model, asked, tokens, header.root),
        )
    return chain


def _num_alike(store: OpenStore, entry: Entry, token_ids: array[int]) -> int:
    """How many of a chain's first tokens another one begins with, asked by the same name and
    without a session id either; less where that cannot be read.

    Slots are parted between blocks, so the last ones that they have in common are compared.
    """
    found = store.database.read(lambda c: forks(c, entry.id, entry.name))
    num_alike = 0
    for fork in found[:_MAX_FORKS]:
        with suppress(StoreError):
            said = read_token_ids(slot_path(store.root, fork.slot))[fork.at - fork.start :]
            num_same = num_common(token_ids, fork.at, said, 0)
            if fork.goes_on or num_same < len(said):
                num_alike = max(num_alike, fork.at + num_same)
    return num_alike


def way_to(store: OpenStore, leaf: str) -> list[SlotLink]:
    """The slots of a chain, the first one first."""
    return store.database.read(lambda c: listing.way_to(c, leaf))


def tokens_to(store: OpenStore, leaf: str | None) -> TurnTokens:
    """The tokens of a chain, as far as they can be read."""
    token_ids = array("I")
    for link in way_to(store, leaf) if leaf is not None else []:
        place = link.place
        if link.start > len(token_ids):
            return TurnTokens(token_ids, is_whole=False)
        try:
            if place.tier == "cold" and not store.promote(place.id):
                return TurnTokens(token_ids, is_whole=False)
            said = read_token_ids(slot_path(store.root, place.id))
        except StoreError:
            return TurnTokens(token_ids, is_whole=False)
        token_ids += said[: link.leave - len(token_ids)]
    return TurnTokens(token_ids)


def _clear_traces(store: OpenStore) -> None:
    """Remove files that hold, or once held, what is deleted, and what was noted of them."""
    store.unlink_replaced()
    upkeep.sweep_temp(store.root)
    upkeep.trim_quarantine(store.root, max_bytes=0)
    store.database.submit(lambda c: sightings.forget_gone(c, store.root)).result()


def _tier(entry: Entry) -> str:
    if not entry.num_slots:
        return "none"
    if not entry.num_cold_slots:
        return "warm"
    return "cold" if entry.num_cold_slots == entry.num_slots else "mixed"


def _bytes_below(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))
