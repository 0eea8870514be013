"""What is done to agents while nobody asks: expiry, the cap, and KV that must follow."""

from __future__ import annotations

import time

import structlog
from sqlalchemy import Connection

from api.agents.book import AgentBook
from api.agents.kv import AgentKv
from runtime.errors import StoreUnavailable
from runtime.settings import Settings
from store import agent_rows, history_room
from store.history_room import Room

LINGER_S = 120.0
"""A worker may still write KV of a session that was just left: look once more after this."""

log = structlog.stdlib.get_logger("hearth.agents")


class Janitor:
    """Its chore is done every minute; where the history fails the next one goes on."""

    def __init__(self, book: AgentBook, kv: AgentKv, settings: Settings) -> None:
        self._book = book
        self._kv = kv
        self._settings = settings

    async def run(self) -> None:
        """Let go what was not used for long, hold the cap, delete KV whose history is gone."""
        try:
            if num_removed := await self._book.write(self._remove_old):
                log.info("agents_removed", num=num_removed)
                await self._book.tidy()
            await self._settle()
            await self._book.drop_old_asides(self._settings.history_ttl_s)
        except StoreUnavailable as error:
            log.debug("janitor_waits", why=error.message)

    def _remove_old(self, connection: Connection) -> int:
        now_s = time.time()
        ids = agent_rows.expired(connection, now_s, self._settings.history_ttl_s)
        for agent_id in ids:
            agent_rows.remove(connection, agent_id, now_s)
        room = Room(self._settings.history_max_bytes)
        return len(ids) + history_room.make_room(connection, room, now_s)

    async def _settle(self) -> None:
        before_s = time.time() - LINGER_S
        left = await self._book.read(agent_rows.left_sessions)
        gone = [session for session, _ in left if await self._kv.remove(session)]
        settled = [session for session, left_s in left if session in gone and left_s < before_s]
        if settled:
            await self._book.write(lambda c: agent_rows.forget_left(c, settled))
