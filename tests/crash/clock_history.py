"""Look after a history in a process whose clock may be wrong, and say which agents are left."""

from __future__ import annotations

import sys
from pathlib import Path

from sqlalchemy import Connection

from runtime.cache.history import OpenHistory
from store.history import agent_rows, expired_rows, quota
from store.history.quota import HistoryCapacity

TTL_S, GRACE_S = 30 * 86_400.0, 7 * 86_400.0


def main() -> None:
    """`python -m tests.crash.clock_history HOME NEW`: adds the agent NEW, and ages all."""
    history = OpenHistory(Path(sys.argv[1]))
    now_s = history.database.clock.now_s()

    def work(connection: Connection) -> list[str]:
        new = agent_rows.AgentRow(sys.argv[2], f"session {sys.argv[2]}", b"{}", now_s, now_s)
        agent_rows.create(connection, new)
        expired_rows.expire_agents(connection, now_s, TTL_S)
        expired_rows.erase(connection, now_s - GRACE_S)
        quota.make_room(connection, HistoryCapacity(1 << 30), now_s)
        living = [row.id for row in agent_rows.listing(connection, None, 100).rows]
        return [*living, *(f"expired-{row.id}" for row in expired_rows.listing(connection))]

    print(" ".join(history.database.submit(work).result()))  # noqa: T201
    history.close()


if __name__ == "__main__":
    main()
