"""What lies in the KV store, as whoever is asked for it sees it, whatever form the store has.

A conversation is named by its session id, by the beginning of its id in lists, or by the id itself.
Everything here belongs to the event loop, and raises StoreUnavailable where there is no store, or
where it fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from runtime.cache.inventory_views import (
    ChainView,
    CollectedView,
    ConversationView,
    RemovalView,
    ShownView,
    SlotNode,
    StatsView,
    VerifyView,
)
from runtime.errors import NothingKept, UnknownModel
from runtime.progress import Watch
from runtime.types import ModelSpec, Struct
from store.keyed_names import Whom

MIN_PREFIX = 4
"""A name in lists is recognised by so many of its first letters."""


class KeptConversation(NamedTuple):
    """A conversation, and how long it stays unused: None is for ever.

    `end` is where it ends, in terms of the store. `is_pinned` says that somebody pinned the
    conversation itself.
    """

    view: ConversationView
    model: bytes
    end: str | None
    ttl_s: float | None = None
    is_pinned: bool = False


class Pinned(Struct, frozen=True):
    """Whether a conversation stays; `num_tokens` of it are on disk now."""

    id: str
    is_pinned: bool
    num_tokens: int


class ImportRequest(Struct, frozen=True):
    """What is to be taken in: a file on this machine, by its absolute path, for a model.

    Where the file does not say its tokens, they or the text they come from are given.
    """

    file: str
    model: str
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None


class Exchanged(Struct, frozen=True):
    """What went to a file or came from it; slots that were here already are not new."""

    file: str
    model: str
    num_tokens: int
    num_new_slots: int = 0


class Selection(NamedTuple):
    """Conversations that go by a name, in terms of the store, and who is meant by that."""

    name: str
    found: Sequence[Any]
    whoms: Sequence[Whom]


class ModelSelection(NamedTuple):
    """What somebody means who names a model: names that were asked, or else weights by hash."""

    names: frozenset[str]
    hashes: frozenset[bytes] = frozenset()

    def has(self, view: ConversationView) -> bool:
        """Whether a conversation is one of these."""
        return view.model in self.names or bytes.fromhex(view.model_hash) in self.hashes


class KnownModels(NamedTuple):
    """Names of models that the store has, and what the weights of each model hash go by."""

    asked: Collection[str]
    labels: Mapping[bytes, str]


class StoreJob(NamedTuple):
    """Work on the store that is done now and then; some waits until no request is open."""

    name: str
    every_s: float
    run: Callable[[], Awaitable[object]]
    is_for_idle: bool = False


class KvContents(Protocol):
    """The conversations of a store, and what may be done to them."""

    # Looking

    async def kept(self) -> list[KeptConversation]:
        """Every conversation, the latest used first."""
        ...

    async def of_sessions(self, names: Sequence[str]) -> dict[str, list[KeptConversation]]:
        """Those with these session ids, each with every model it had, by session id."""
        ...

    async def find(self, name: str) -> KeptConversation:
        """The one that goes by this name; of the latest use.

        Raises:
            UnknownConversation: there is none, or the beginning fits several.
        """
        ...

    async def seen(self, kept: Sequence[KeptConversation]) -> list[ConversationView]:
        """The same as people see them: the tier of what ends in the memory of a worker is hot."""
        ...

    async def held(self, sessions: Sequence[str]) -> dict[str, dict[str, int]]:
        """How many first tokens are in workers' memory, by session id and name of the model; also
        of what is never on disk.
        """
        ...

    async def shown(self, name: str) -> ShownView:
        """One conversation with its slots. Raises as `find`."""
        ...

    async def chain(self, name: str) -> ChainView:
        """Where a conversation's tokens lie, all on the fast disk. Raises as `find`."""
        ...

    async def tree(self, model: str) -> list[SlotNode]:
        """Every slot of a model by its name or hash, parents before children."""
        ...

    async def stats(self) -> StatsView:
        """Sums and counters."""
        ...

    async def known_models(self) -> KnownModels:
        """By what names and hashes models can be meant."""
        ...

    async def counters(self) -> tuple[dict[str, float], dict[str, float]]:
        """The counters of today and of all time."""
        ...

    async def count(self, values: Mapping[str, float]) -> None:
        """Add to these counters."""
        ...

    # Using

    async def bring(self, one: KeptConversation) -> int:
        """Have a conversation in memory soon; its tokens, 0 where there is nothing to bring."""
        ...

    async def branch(self, source: str, copy: str, ends: Mapping[str, int]) -> None:
        """Let the session id `copy` share the KV of another, by model up to the token in `ends`.

        What is shared is not deleted with `source`; nothing beyond is shared.
        """
        ...

    def hint(self, whom: Whom, pause_s: float | None, *, is_over: bool) -> None:
        """Tell the workers when a conversation goes on, or that it does not."""
        ...

    async def pin(self, name: str) -> Pinned:
        """Keep a conversation, and what it becomes, until it is unpinned. Raises as `find`."""
        ...

    async def pin_ahead(self, session_id: str, spec: ModelSpec) -> Pinned:
        """The same of one of which nothing may be on disk yet.

        Raises:
            InterchangeFailed: the files of the model cannot be read.
        """
        ...

    async def unpin(self, name: str) -> Pinned:
        """Take back the pins of a conversation. Raises as `find`, if none was pinned ahead."""
        ...

    # Deleting

    async def named(self, name: str) -> Selection:
        """Who goes by a name; what the store does not know may be in a worker's memory."""
        ...

    async def remove(self, selection: Selection) -> RemovalView:
        """Delete these, on disk and in memory.

        Raises:
            UnknownConversation: nothing goes by that name, and every worker has looked.
        """
        ...

    async def remove_name(self, name: str) -> RemovalView:
        """Delete what was asked of a model by this name, with all weights it had."""
        ...

    async def remove_weights(self, models: Collection[bytes]) -> RemovalView:
        """Delete everything of these weights."""
        ...

    async def remove_all(self) -> RemovalView:
        """Delete everything."""
        ...

    # Work

    async def verify(self, watch: Watch, should_stop: Callable[[], bool]) -> VerifyView:
        """Read every slot and compare every checksum; what is not as written goes."""
        ...

    async def collect(self, watch: Watch, should_stop: Callable[[], bool]) -> CollectedView:
        """Do now what is done now and then."""
        ...

    async def take_in(self, spec: ModelSpec, wanted: ImportRequest, watch: Watch) -> Exchanged:
        """Have a prompt-cache file of stock mlx-lm as slots.

        Raises:
            InterchangeFailed: it cannot be read, does not belong to the model, or has no room.
        """
        ...

    def jobs(self, is_busy: Callable[[], bool]) -> Sequence[StoreJob]:
        """What is to be done now and then; long work stops when `is_busy` says so."""
        ...


def meant(
    kept: KnownModels, name: str, configured: str | UnknownModel, known: Collection[str]
) -> ModelSelection:
    """What `name` means: a name that was asked, a model, or the beginning of a hash.

    `configured` is the id that the catalog has for it, or why it has none; `known` are its models.

    Raises:
        UnknownModel: neither is there such a model, nor was there.
    """
    named = {*kept.asked, *kept.labels.values()}
    names = {name} & named
    if isinstance(configured, str):
        names.add(configured)
    if names:
        return ModelSelection(frozenset(names))
    if hashes := models_beginning(kept.labels, name):
        return ModelSelection(frozenset(), frozenset(hashes))
    assert isinstance(configured, UnknownModel)
    raise configured if configured.reason else NothingKept(name, sorted({*known, *named} - {""}))


def models_beginning(models: Iterable[bytes], prefix: str) -> set[bytes]:
    """Those whose hash begins like that, if it is long enough."""
    is_prefix = len(prefix) >= MIN_PREFIX
    return {one for one in models if is_prefix and one.hex().startswith(prefix.lower())}


def total(views: Sequence[RemovalView]) -> RemovalView:
    """What several removals did together."""
    return RemovalView(
        num_conversations=sum(one.num_conversations for one in views),
        num_slots=sum(one.num_slots for one in views),
        is_cut=all(one.is_cut for one in views),
        is_pending=any(one.is_pending for one in views),
    )
