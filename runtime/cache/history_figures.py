"""What the history holds, in numbers, as of when it was last looked at."""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import Connection, text

from runtime.cache.history import History
from runtime.errors import StoreUnavailable
from runtime.types import Struct
from store.history.quota import used_bytes

_COUNTS = """
SELECT (SELECT count(*) FROM agents), (SELECT count(*) FROM turns),
  (SELECT count(*) FROM responses), (SELECT count(*) FROM left_sessions)
"""


class HistoryCounts(Struct, frozen=True):
    """`num_leaving` sessions were deleted and their KV is still to follow."""

    num_bytes: int = 0
    num_agents: int = 0
    num_turns: int = 0
    num_responses: int = 0
    num_leaving: int = 0


class HistoryFigures:
    """Belongs to the event loop. What cannot be read now stays as it was."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.counts = HistoryCounts()

    @property
    def is_working(self) -> bool:
        """Whether the history can be used."""
        return self._history.status.state == "ok"

    @property
    def is_degraded(self) -> bool:
        """Whether it cannot be used, or lost something that nobody acknowledged."""
        return self._history.health.state == "degraded"

    async def refresh(self) -> None:
        """Look again."""
        if self.is_working:
            with suppress(StoreUnavailable):
                self.counts = await self._history.read(_counted)


def _counted(connection: Connection) -> HistoryCounts:
    agents, turns, responses, leaving = connection.execute(text(_COUNTS)).one()
    return HistoryCounts(
        num_bytes=used_bytes(connection),
        num_agents=agents,
        num_turns=turns,
        num_responses=responses,
        num_leaving=leaving,
    )
