"""`AgentRepository`: agents in the history, as the service, generates and expiry jobs need it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from runtime.cache.history import History
from runtime.errors import UnknownAgent
from runtime.keys import plain
from store.history import agent_rows, quota
from store.history.agent_rows import AgentRow
from store.history.quota import HistoryCapacity

T = TypeVar("T")


class AgentRepository:
    """Ids are as `runtime.keys.owned` makes them. Every call may raise StoreUnavailable."""

    def __init__(self, history: History, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.read = history.read
        self.write = history.write
        self.tidy = history.tidy
        self.now_s = history.now_s
        self.wall_s = history.wall_s
        self.keep_time = history.keep_time
        self.drop_asides = history.drop_asides
        self._history = history

    def unknown(self, agent_id: str) -> UnknownAgent:
        """There is none of that id, or it is another tenant's."""
        return UnknownAgent(plain(agent_id), self._history.note)

    async def row(self, agent_id: str) -> AgentRow:
        """One agent. Raises UnknownAgent."""
        row = await self.read(lambda connection: agent_rows.get(connection, agent_id))
        if row is None:
            raise self.unknown(agent_id)
        return row

    async def add(self, work: Callable[[Connection], T], num_bytes: int, keep: str) -> T:
        """Write what takes about `num_bytes`; for that others may go, but not the agent `keep`."""
        room = HistoryCapacity(self._max_bytes, num_bytes, keep)

        def run(connection: Connection) -> T:
            quota.make_room(connection, room, self.now_s())
            return work(connection)

        return await self.write(run)


def new_session(agent_id: str) -> str:
    """What names an agent's KV from now on: never used before, so that nothing old is found."""
    return f"agent:{agent_id}:{secrets.token_hex(8)}"
