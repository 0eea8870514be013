"""Stored turns, each of which goes on from one before: OpenAI's responses, Anthropic's threads.

`history_max_bytes` and `history_ttl_s` bound all of them together. Whoever keeps turns has a kind,
with which their ids begin; no kind finds what another one keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog
from sqlalchemy import Connection

from api.http.comparisons import Comparisons
from api.http.expansion import Expansion
from api.http.limits import check_entries
from runtime.cache.deletion_log import Receipt
from runtime.cache.history import History
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable
from runtime.keys import owned, plain
from runtime.kv_messages import Forget
from runtime.types import GenerateRequest
from store.history import expired_rows, response_rows
from store.history.quota import HistoryCapacity, make_room
from store.history.response_rows import Chain, ItemRow, ResponseRow
from store.keyed_names import Asker, Whom

IsDeleted = Callable[[Receipt, Callable[[Forget], bool]], bool]
"""Whether a deletion since that receipt is meant."""

log = structlog.stdlib.get_logger("hearth.chains")


class Owner(NamedTuple):
    """Whose a turn is: its tenant, what names its KV ("" for nothing), when it was asked for."""

    tenant: str
    session: str
    received: Receipt | None

    @classmethod
    def of(cls, request: GenerateRequest, received: Receipt | None) -> Owner:
        cache = request.cache
        return cls(cache.tenant, cache.session_id or "", received)


class Chains:
    """The stored turns of a server; ids are as `runtime.keys.owned` makes them.

    Every call may raise StoreUnavailable: the history cannot be read or written.
    """

    def __init__(self, history: History, settings: Settings, is_deleted: IsDeleted) -> None:
        self.history = history
        self.comparisons = Comparisons()
        self._max_bytes = settings.history_max_bytes
        self._ttl_s = settings.history_ttl_s
        self._is_deleted = is_deleted

    async def past(self, last_id: str, kind: str, expansion: Expansion, path: str) -> Chain:
        """Everything that goes on from that turn remembers.

        Raises:
            InvalidRequest: it is more than the request may still come to; `path` names it.
        """
        if not plain(last_id).startswith(kind):
            return Chain([], last_id)

        def read(connection: Connection) -> Chain:
            size = response_rows.chain_size(connection, last_id)
            check_entries(path, size.num_items)
            expansion.count(size.num_bytes, path)
            return response_rows.chain(connection, last_id)

        return await self.history.read(read)

    async def found_items(
        self, kinds: Sequence[str], tenant: str, item_ids: dict[str, str], expansion: Expansion
    ) -> dict[str, bytes]:
        """The items of a tenant by their ids, which `item_ids` has by the paths that name them, in
        turns of these kinds.

        Raises:
            InvalidRequest: they are more than the request may still come to.
        """

        def read(connection: Connection) -> dict[str, bytes]:
            mine = [owned(tenant, kind) for kind in kinds]
            found = response_rows.find_items(connection, item_ids.values(), mine)
            for path, item_id in item_ids.items():
                if item_id in found:
                    expansion.count(found[item_id].num_bytes, path)
            return {
                one: response_rows.item_body(connection, row.number) for one, row in found.items()
            }

        return await self.history.read(read)

    async def keep(
        self,
        row: ResponseRow,
        items: Sequence[ItemRow],
        received: Receipt | None,
        packed_events: bytes = b"",
        conversation: str | None = None,
    ) -> None:
        """Store a turn whole, with its items and the events that told it; a `conversation` gets
        the items as well, if it is still there.

        Raises:
            StoreUnavailable: it was not stored; so too where its conversation was deleted since
                the request for it was received.
        """

        def put(connection: Connection) -> None:
            now_s = self.history.now_s()
            size = len(row.body) + sum(len(one.body) for one in items) + len(packed_events)
            if conversation is not None:
                size += sum(len(one.body) for one in items)
            if row.previous_id is not None:
                response_rows.touch(connection, row.previous_id, now_s)
            keep = row.previous_id or conversation or ""
            make_room(connection, HistoryCapacity(self._max_bytes, size, keep), now_s)
            response_rows.put(connection, row, items, now_s)
            if packed_events:
                response_rows.put_events(connection, row.id, packed_events)
            if conversation is not None:
                response_rows.append(connection, conversation, items, row.session, now_s)

        self._check_deleted(row.session, received)
        await self.history.write(put)

    async def add(
        self, one_id: str, items: Sequence[ItemRow], session: str, received: Receipt | None
    ) -> bool:
        """Store more items behind those of one turn; False where it is not stored.

        Raises:
            StoreUnavailable: they were not stored; so too where the session was deleted since the
                request for them was received.
        """

        def append(connection: Connection) -> bool:
            now_s = self.history.now_s()
            size = sum(len(one.body) for one in items)
            make_room(connection, HistoryCapacity(self._max_bytes, size, one_id), now_s)
            return response_rows.append(connection, one_id, items, session, now_s)

        self._check_deleted(session, received)
        return await self.history.write(append)

    def _check_deleted(self, session: str, received: Receipt | None) -> None:
        """See that a session was not deleted since then. Raises StoreUnavailable."""
        if not session or received is None:
            return
        asker = Asker(session_id=session)

        def is_meant(news: Forget) -> bool:
            return news.whom.names_one and news.whom.means(asker, news.secret)

        if self._is_deleted(received, is_meant):
            raise StoreUnavailable("The conversation was deleted while it was answered.")

    async def remove_item(self, one_id: str, item_id: str) -> bool:
        """Delete an item of a turn, no byte of which is left there; False where there is none."""
        self.comparisons.clear()
        return await self._removed(
            lambda connection: response_rows.remove_item(connection, one_id, item_id)
        )

    async def remove(self, one_id: str, kind: str, *, is_whole_chain: bool = False) -> bool:
        """Delete a turn, or all that is of one conversation with it; no byte of it is left.

        False where there is none of that kind.
        """
        if not plain(one_id).startswith(kind):
            return False
        if is_whole_chain:
            self.comparisons.clear()
        else:
            self.comparisons.forget(one_id)

        def work(connection: Connection) -> bool:
            now_s = self.history.now_s()
            if is_whole_chain:
                return expired_rows.erase_chain(connection, one_id, now_s)
            is_gone = response_rows.remove(connection, one_id, now_s)
            return expired_rows.erase_id(connection, "response", one_id) or is_gone

        return await self._removed(work)

    async def forget(self, whoms: Sequence[Whom], secret: bytes) -> bool:
        """Delete what was asked in the conversations of these session ids; False for nothing."""
        self.comparisons.clear()

        def is_meant(session: str) -> bool:
            asker = Asker(session_id=session)
            return any(one.names_one and one.means(asker, secret) for one in whoms)

        def work(connection: Connection) -> bool:
            gone = [one for one in response_rows.sessions(connection) if is_meant(one)]
            for session in gone:
                response_rows.remove_session(connection, session)
            erased = expired_rows.erase_responses(
                connection, lambda row: bool(row.session) and is_meant(row.session)
            )
            return bool(gone or erased)

        return await self._removed(work)

    async def expire(self) -> None:
        """Put what was not used for too long where only `hearth history restore` finds it; where
        the history fails, next time.
        """

        def work(connection: Connection) -> int:
            return expired_rows.expire_responses(connection, self.history.now_s(), self._ttl_s)

        try:
            if num_expired := await self.history.write(work):
                log.info("responses_expired", num=num_expired)
                await self.history.tidy()
        except StoreUnavailable as error:
            log.debug("expiry_waits", why=error.message)

    async def _removed(self, work: Callable[[Connection], bool]) -> bool:
        is_gone = await self.history.write(work)
        if is_gone:
            await self.history.tidy()
        return is_gone
