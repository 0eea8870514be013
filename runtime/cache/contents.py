"""What lies in the KV store, as whoever is asked for it sees it, whatever form the store has.

A conversation is named by its session id, by the beginning of its id in lists, or by the id itself.
Everything here belongs to the event loop, and raises StoreUnavailable where there is no store, or
where it fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

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
from runtime.progress import Watch
from runtime.types import ModelSpec, Struct
from store.keyed_names import Whom


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


class Selection(NamedTuple):
    """Conversations that go by a name, by their ids, and who is meant by that."""

    name: str
    ids: Sequence[str]
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
    run: Callable[[], Awaitable[None]]
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

    def jobs(self, is_busy: Callable[[], bool]) -> Sequence[StoreJob]:
        """What is to be done now and then; long work stops when `is_busy` says so."""
        ...
