"""Putting the parts of the agents API together."""

from __future__ import annotations

from typing import NamedTuple

from api.agents.book import AgentBook
from api.agents.desk import AgentDesk
from api.agents.generates import Generates
from api.agents.janitor import Janitor
from api.agents.kv import AgentKv
from api.agents.lanes import Lanes
from api.deps import Gate
from runtime.history import History


class Agents(NamedTuple):
    """What the handlers need."""

    desk: AgentDesk
    generates: Generates


def open_agents(gate: Gate, history: History) -> tuple[Agents, Janitor]:
    """The agents of a server, and who tidies up after them."""
    settings = gate.settings
    book = AgentBook(history, settings.history_max_bytes)
    lanes = Lanes(settings.max_queue)
    kv = AgentKv(gate)
    agents = Agents(AgentDesk(gate, book, lanes, kv), Generates(gate, book, lanes))
    return agents, Janitor(book, kv, settings)
