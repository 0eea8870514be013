"""What is done to agents while nobody asks: expiry, the cap, and KV that must follow."""

from __future__ import annotations

import structlog
from sqlalchemy import Connection

from api.agents.kv import AgentKv
from api.agents.repository import AgentRepository
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable
from store.history import agent_rows, expired_rows, quota
from store.history.quota import HistoryCapacity

LINGER_S = 120.0
"""A worker may still write KV of a session that was just left: look once more after this."""

log = structlog.stdlib.get_logger("hearth.agents")


class ExpiryJob:
    """Its chore is done every minute; where the history fails the next one goes on."""

    def __init__(self, book: AgentRepository, kv: AgentKv, settings: Settings) -> None:
        self._book = book
        self._kv = kv
        self._settings = settings

    async def run(self) -> None:
        """Move what expired, erase what did so long ago, hold the cap, delete KV that must follow.

        What expired is found by nobody but `hearth history restore` for `history_grace_s`.
        """
        try:
            if num_gone := await self._book.write(self._age):
                log.info("history_aged", num_agents_expired=num_gone[0], num_erased=num_gone[1])
                await self._book.tidy()
            await self._settle()
            await self._book.drop_asides(self._settings.history_ttl_s)
        except StoreUnavailable as error:
            log.debug("janitor_waits", why=error.message)

    def _age(self, connection: Connection) -> tuple[int, int] | None:
        settings, now_s = self._settings, self._book.now_s()
        self._book.keep_time(connection)
        num_expired = expired_rows.expire_agents(connection, now_s, settings.history_ttl_s)
        num_erased = expired_rows.erase(connection, now_s - settings.history_grace_s)
        room = HistoryCapacity(settings.history_max_bytes)
        num_erased += quota.make_room(connection, room, now_s)
        return (num_expired, num_erased) if num_expired or num_erased else None

    async def _settle(self) -> None:
        before_s = self._book.now_s() - LINGER_S
        left = await self._book.read(agent_rows.left_sessions)
        gone = [session for session, _ in left if await self._kv.remove(session)]
        settled = [session for session, left_s in left if session in gone and left_s < before_s]
        if settled:
            await self._book.write(lambda c: agent_rows.forget_left(c, settled))
