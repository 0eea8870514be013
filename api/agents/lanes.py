"""Lanes: the generates of one agent go one after the other, in the order of their arrival."""

from __future__ import annotations

import asyncio
from typing import Protocol

from runtime.errors import HearthError


class Passenger(Protocol):
    """What stands in a lane."""

    def end(self, error: HearthError) -> None:
        """Give up at once, with this error."""
        ...


class Place:
    """A place in a lane; `is_first` is set when it is this one's turn."""

    def __init__(self, passenger: Passenger) -> None:
        self.passenger = passenger
        self.is_first = asyncio.Event()


class Lanes:
    """One lane for each agent that has something to do. Belongs to the event loop."""

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._lanes: dict[str, list[Place]] = {}

    def is_full(self, agent_id: str) -> bool:
        """Whether no more may wait for this agent."""
        return self.num_places(agent_id) >= self._max_places

    def num_places(self, agent_id: str) -> int:
        """How many run or wait."""
        return len(self._lanes.get(agent_id, ()))

    def num_before(self, agent_id: str, place: Place) -> int:
        """How many must end before this one begins."""
        lane = self._lanes.get(agent_id, [])
        return lane.index(place) if place in lane else 0

    def join(self, agent_id: str, passenger: Passenger) -> Place:
        """Take the last place."""
        place = Place(passenger)
        lane = self._lanes.setdefault(agent_id, [])
        lane.append(place)
        lane[0].is_first.set()
        return place

    def leave(self, agent_id: str, place: Place) -> None:
        """Make room for the next; nothing happens when it has left already."""
        lane = self._lanes.get(agent_id, [])
        if place in lane:
            lane.remove(place)
        if lane:
            lane[0].is_first.set()
        else:
            self._lanes.pop(agent_id, None)

    def end_all(self, agent_id: str, error: HearthError) -> None:
        """Whoever runs or waits gives up with this error."""
        for place in list(self._lanes.get(agent_id, ())):
            place.passenger.end(error)
