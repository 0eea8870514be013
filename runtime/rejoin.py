"""Models that were loaded while there was no store get their disk once it is back."""

from __future__ import annotations

from runtime.errors import HearthError
from runtime.kv_store import KvStore
from runtime.supervisor import Supervisor


class Rejoin:
    """`run` is to be called now and then.

    A worker's hashes are keyed with the store's secret from its start on, so its process is
    replaced, while nobody asks for anything: what it holds in memory is computed once more.
    """

    def __init__(self, supervisor: Supervisor, kv: KvStore) -> None:
        self._supervisor = supervisor
        self._kv = kv

    async def run(self) -> None:
        """Load one such model anew, if it is idle."""
        for model in self._kv.shut_out():
            if self._supervisor.status_of(model).state == "ready":
                try:
                    await self._supervisor.restart(model, "the store is back").granted()
                except HearthError:
                    continue  # why it does not come up its status says
