"""One worker's share of the KV store: what it is told of the disk, what it reports, its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.cache.deletion_log import Models
from runtime.cache.told_deletions import ToldDeletions
from runtime.cache.worker_channel import ChannelServer, Report, WorkerChannel
from runtime.slot_events import (
    AllSlotsTold,
    Attach,
    Forget,
    Forgotten,
    Hint,
    HotAsked,
    HotBudget,
    HotNow,
    KvNews,
    RoomGiven,
)
from runtime.types import ModelSpec
from store.keyed_names import Asker
from store.types import RunFigures, SlotHeader

MAX_SLOTS = 2000
"""Slots in one frame: a worker must not be kept from its requests for long."""

_PATIENCE_S = 1.0
"""A worker answers between two steps; one that takes longer is not worth waiting for."""

_FORGET_PATIENCE_S = 5.0
"""Deleting waits longer; what a worker that is later still stages is refused until it answers."""

Question = tuple[type[HotAsked | Forget], int]
"""What was asked, and its number."""


class ChannelOwner(ChannelServer, Protocol):
    """The store, as such a channel sees it."""

    def join(self, channel: KvChannel) -> None: ...

    def leave(self, channel: KvChannel) -> None: ...

    def hear(self, channel: KvChannel, event: Report) -> None: ...

    def measured(self, channel: KvChannel, run: RunFigures) -> None: ...

    def deletions(self) -> list[tuple[Forget, Models]]: ...


class KvChannel(WorkerChannel):
    """As any channel; the worker is told of all slots of its model."""

    def __init__(
        self, desk: ChannelOwner, spec: ModelSpec, budget: HotBudget | None = None
    ) -> None:
        super().__init__(desk, spec, budget)
        self._service = desk
        self._asked: dict[Question, asyncio.Future[HotNow | Forgotten | None]] = {}
        self._num_asked = 0
        self._deletions = ToldDeletions(self._tell_deletion, self.on_event)

    def on_event(self, event: Report) -> None:
        if isinstance(event, Forgotten):
            self._deletions.answered(event.number)
        if not isinstance(event, HotNow | Forgotten):
            self._service.hear(self, event)
        elif (asked := self._asked.get(_answered(event))) is not None:
            _answer(asked, event)

    def measured(self, run: RunFigures) -> None:
        self._service.measured(self, run)

    def opened(self) -> None:
        """First what was deleted: requests that are to be handed to it may have come before."""
        self._deletions.begin(self._service.deletions())
        self._service.join(self)

    def closed(self) -> None:
        for asked in self._asked.values():
            _answer(asked, None)
        self._service.leave(self)

    # What follows is the store's side.

    def attach(self, names: Attach) -> None:
        """The store is open; what it has is told next, and then that it was all.

        First what was deleted of its model: nothing of that gets the names it has in the store.
        """
        self.model_hash = names.model_hash
        self._deletions.named(names.model_hash)
        self.tell(names)

    def welcomed(self) -> None:
        """All that is on disk was told, or cannot be: what is in memory only may be written."""
        self.tell(AllSlotsTold())
        super().welcomed()

    def try_again(self) -> None:
        """The store may work again: what is in memory only may be written once more."""
        if not self.welcoming.locked():
            self.tell(AllSlotsTold())

    def is_nameless(self) -> None:
        """It stays so: what its memory holds is not for the disk, and may be of any model."""
        self._deletions.named(None)
        super().is_nameless()

    async def hot(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Those of these slots that are in the worker's memory; none if it does not answer."""
        if not self.has_disk:
            return ()
        told = await self._ask(HotAsked(self._next_number(), ids=tuple(ids)))
        return told.ids if isinstance(told, HotNow) else ()

    async def held(self, session_ids: Sequence[str]) -> tuple[tuple[Asker, int], ...]:
        """What of these conversations is in the worker's memory; nothing if it does not answer."""
        told = await self._ask(HotAsked(self._next_number(), sessions=tuple(session_ids)))
        return told.sessions if isinstance(told, HotNow) else ()

    async def forget(self, news: Forget, models: Models = None) -> int | None:
        """Have the worker forget what of a conversation is not published; how many pieces.

        With any model, or with these. None: it has not done it yet, and does it before anything
        that it reads after that.
        """
        if self.send is None:  # it is gone, or is told when it opens
            return 0
        if not self.is_loaded:  # it was handed nothing yet, and reads this before
            self._deletions.tell(news, models)
            return 0
        told = await self._ask(news, _FORGET_PATIENCE_S, lambda: self._deletions.tell(news, models))
        if isinstance(told, Forgotten):
            return told.num_forgotten
        return None if self.send is not None else 0

    def is_forgotten(self, asker: Asker, header: SlotHeader | None = None) -> bool:
        """Whether the worker has yet to forget what was asked so, as in `ToldDeletions.mean`."""
        return self._deletions.mean(asker, self._is_waited_for, header)

    def _tell_deletion(self, news: Forget) -> None:
        """Also to a worker that has no disk."""
        if self.send is not None:
            self.send(news)

    def _is_waited_for(self, number: int) -> bool:
        return (Forget, number) in self._asked

    def _next_number(self) -> int:
        self._num_asked += 1
        return self._num_asked

    async def _ask(
        self,
        question: HotAsked | Forget,
        patience_s: float = _PATIENCE_S,
        say: Callable[[], None] | None = None,
    ) -> HotNow | Forgotten | None:
        """The answer; None from a worker that gives none in time, or is gone.

        What is asked is sent, unless `say` does that in another way.
        """
        if self.send is None:
            return None
        key = type(question), question.number
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        if say is not None:
            say()
        else:
            self.send(question)
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[key]

    def tell(self, news: KvNews) -> None:
        """Say it to a worker that knows the store."""
        if self.send is not None and self.has_disk:
            self.send(news)

    def hint(self, hint: Hint) -> None:
        """Say it to a worker, also to one that has no disk."""
        if self.send is not None:
            self.send(hint)

    def tell_room(self, key: str, *, is_given: bool) -> None:
        """Its writer waits for this, also where the store went away meanwhile."""
        if self.send is not None:
            self.send(RoomGiven(key=key, is_given=is_given))


def _answer(
    asked: asyncio.Future[HotNow | Forgotten | None], event: HotNow | Forgotten | None
) -> None:
    if not asked.done():
        asked.set_result(event)


def _answered(event: HotNow | Forgotten) -> Question:
    return Forget if isinstance(event, Forgotten) else HotAsked, event.number
