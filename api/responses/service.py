"""Responses that are being made, and what becomes of them: made later, stored, cancelled."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence

import msgspec
import structlog

from api.http.body import apart
from api.http.event_log import EventLog
from api.http.sse import told
from api.responses.archive import Archive
from api.responses.items import Item
from api.responses.output import ResponseErrorBody, ResponseResource
from api.responses.stream import ResponseDraft, ResponsesStream
from runtime.errors import Aborted, HearthError, StoreUnavailable

log = structlog.stdlib.get_logger("hearth.responses")

UNDERWAY = ("queued", "in_progress")
INTERRUPTED = ResponseErrorBody("interrupted", "The server was stopped while it was being made.")


class ResponseService:
    """Knows every reply while somebody still works on it; ids are as `runtime.keys.owned` says."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._replies: weakref.WeakValueDictionary[str, ResponseDraft] = (
            weakref.WeakValueDictionary()
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, EventLog] = {}

    def begin(self, reply: ResponseDraft) -> None:
        """A reply is being made; it can be cancelled for as long as somebody holds it."""
        self._replies[reply.key] = reply

    async def settle(self, reply: ResponseDraft, items: Sequence[Item]) -> None:
        """Store a complete reply with its own input. One that cannot be stored says so itself."""
        await reply.look_ahead()
        await apart(reply.num_said, lambda: reply.compare(self.archive.comparisons))
        try:
            if reply.is_to_be_stored:
                await self.archive.keep(reply.ended(), items, reply.owner)
            else:
                await self.archive.add_to_conversation(reply.ended(), items, reply.owner)
        except StoreUnavailable as error:
            log.warning("response_not_stored", reason=error.message)
            reply.unstored(error.code)

    async def start(
        self, reply: ResponseDraft, items: Sequence[Item], keep_alive_s: float
    ) -> ResponseResource:
        """Make a reply in the background. Its events say at least so often that it lives.

        Raises:
            StoreUnavailable: it could not be found later, so it is not begun.
        """
        queued = reply.begun("queued")
        try:
            await self.archive.keep(queued, items, reply.owner)
        except StoreUnavailable:
            reply.answer.close()
            raise
        self._logs[reply.key] = events = EventLog()
        task = asyncio.create_task(self._make(reply, items, events, keep_alive_s))
        self._tasks[reply.key] = task
        task.add_done_callback(lambda _: self._forget(reply.key))
        return queued

    def _forget(self, response_id: str) -> None:
        del self._tasks[response_id]
        self._logs.pop(response_id).complete()

    async def events_of(self, response_id: str) -> EventLog | None:
        """The events of a response in the background, also while it is made.

        Raises:
            StoreUnavailable: the history cannot be read.
        """
        if (made := self._logs.get(response_id)) is not None:
            return made
        stored = await self.archive.events(response_id)
        return None if stored is None else EventLog(stored, is_complete=True)

    async def find(self, response_id: str) -> ResponseResource:
        """A stored response as it is now.

        Raises:
            UnknownResponse: it is not stored.
            StoreUnavailable: the history cannot be read.
        """
        was_underway = self.is_underway(response_id)
        stored = await self.archive.find(response_id)
        if stored.status not in UNDERWAY:
            return stored
        # It may have ended while the history was read, which then still says that it is queued.
        if was_underway or self.is_underway(response_id):
            return msgspec.structs.replace(stored, status="in_progress")
        return msgspec.structs.replace(stored, status="failed", error=INTERRUPTED)

    async def cancel(self, response_id: str) -> ResponseResource:
        """End a response that is being made; one that is complete stays as it is.

        Raises:
            UnknownResponse: it is neither being made nor stored.
            StoreUnavailable: the history cannot be read.
        """
        is_made_later = self.is_underway(response_id)
        reply = await self._end(response_id)
        if reply is not None and not is_made_later:
            return reply.failed(Aborted("The response was cancelled."))
        return await self.find(response_id)

    async def remove(self, response_id: str) -> None:
        """Delete a stored response, which is ended first if it is still being made.

        Raises:
            UnknownResponse: it is not stored.
            StoreUnavailable: it could not be deleted.
        """
        await self._end(response_id)
        await self.archive.remove(response_id)

    def is_underway(self, response_id: str | None) -> bool:
        """It is being made in the background."""
        return response_id in self._tasks

    async def _end(self, response_id: str) -> ResponseDraft | None:
        """The reply that was ended before its time; what is made later has been stored by then."""
        reply = self._replies.get(response_id)
        task = self._tasks.get(response_id)
        is_open = reply is not None and reply.writer.finished is None
        if reply is not None and is_open:
            reply.answer.close()
        if task is not None:
            await asyncio.wait((task,))
        return reply if is_open else None

    async def close(self) -> None:
        """Wait for what is made in the background, which has been ended by now."""
        while tasks := list(self._tasks.values()):
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(
        self, reply: ResponseDraft, items: Sequence[Item], events: EventLog, keep_alive_s: float
    ) -> None:
        stream = ResponsesStream(reply)
        try:
            async for one in told(reply.answer, stream, keep_alive_s):
                events.add(one)
            await reply.look_ahead()
            await apart(reply.num_said, lambda: reply.compare(self.archive.comparisons))
            resource, last = reply.ended(), stream.closing()
        except HearthError as error:
            resource, last = reply.failed(error), stream.failure(error)
        finally:
            reply.answer.close()
        try:
            await self.archive.keep(resource, items, reply.owner, events.whole + last)
        except StoreUnavailable as error:
            log.warning("response_not_stored", reason=error.message)
        events.add(last)
