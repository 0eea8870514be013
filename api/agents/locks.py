"""Locks: the generates of one agent go one after the other, in the order of their arrival."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

from runtime.errors import HearthError
from runtime.keys import owner


class LockWaiter(Protocol):
    """What waits for an agent."""

    def end(self, error: HearthError) -> None:
        """Give up at once, with this error."""
        ...


class LockPlace:
    """A place in the queue; `is_first` is set when it is this one's turn."""

    def __init__(self, lock_waiter: LockWaiter) -> None:
        self.lock_waiter = lock_waiter
        self.is_first = asyncio.Event()


class AgentActivity(NamedTuple):
    """So many agents are being answered; so many generates wait behind these."""

    num_active: int
    num_waiting: int


class AgentLocks:
    """One queue for each agent that has something to do. Belongs to the event loop."""

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._queues: dict[str, list[LockPlace]] = {}

    def is_full(self, agent_id: str) -> bool:
        """Whether no more may wait for this agent."""
        return self.num_places(agent_id) >= self._max_places

    def num_places(self, agent_id: str) -> int:
        """How many run or wait."""
        return len(self._queues.get(agent_id, ()))

    def activity(self, tenant: str = "") -> AgentActivity:
        """What goes on with a tenant's agents, or with all agents."""
        queues = [q for agent, q in self._queues.items() if not tenant or owner(agent) == tenant]
        return AgentActivity(len(queues), sum(map(len, queues)) - len(queues))

    def num_before(self, agent_id: str, place: LockPlace) -> int:
        """How many must end before this one begins."""
        queue = self._queues.get(agent_id, [])
        return queue.index(place) if place in queue else 0

    def join(self, agent_id: str, lock_waiter: LockWaiter) -> LockPlace:
        """Take the last place."""
        place = LockPlace(lock_waiter)
        queue = self._queues.setdefault(agent_id, [])
        queue.append(place)
        queue[0].is_first.set()
        return place

    def leave(self, agent_id: str, place: LockPlace) -> None:
        """Make room for the next; nothing happens when it has left already."""
        queue = self._queues.get(agent_id, [])
        if place in queue:
            queue.remove(place)
        if queue:
            queue[0].is_first.set()
        else:
            self._queues.pop(agent_id, None)

    def end_all(self, agent_id: str, error: HearthError) -> None:
        """Whoever runs or waits gives up with this error."""
        for place in list(self._queues.get(agent_id, ())):
            place.lock_waiter.end(error)
