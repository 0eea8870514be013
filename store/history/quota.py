"""Room in the history: what it takes, and what goes first when it may take no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import Connection

from store.errors import HistoryFull
from store.history import agent_rows, expired_rows, response_rows


class Evictable(NamedTuple):
    """A kind of thing that can go: its least recently used (id, last use), and its removal.

    What has expired already goes before anything that lives.

    `oldest` knows the parameter `keep`, the id of one that must stay.
    """

    oldest: str
    remove: Callable[[Connection, str, float], object]
    is_expired: bool = False


FAMILIES = (
    Evictable(
        "SELECT number, expired_s FROM expired WHERE id != :keep ORDER BY number LIMIT 1",
        expired_rows.erase_number,
        is_expired=True,
    ),
    Evictable(
        "SELECT id, last_used_s FROM agents WHERE NOT is_pinned AND id != :keep"
        " ORDER BY last_used_s LIMIT 1",
        agent_rows.remove,
    ),
    Evictable(
        "SELECT id, last_used_s FROM responses WHERE id != :keep"
        " ORDER BY last_used_s, number DESC LIMIT 1",
        response_rows.remove,
    ),
)


class HistoryCapacity(NamedTuple):
    """What the history may take, and what is to be added to it."""

    max_bytes: int
    needed_bytes: int = 0
    keep: str = ""


def used_bytes(connection: Connection) -> int:
    """Bytes of the file that hold something."""
    num_pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    num_free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    page_bytes = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    return (num_pages - num_free) * page_bytes


def make_room(connection: Connection, room: HistoryCapacity, now_s: float) -> int:
    """Remove what was used least recently until the rest fits; how many had to go.

    Raises:
        HistoryFull: only what must stay is left, and there is no room for more.
    """
    num_removed = 0
    while used_bytes(connection) + room.needed_bytes > room.max_bytes:
        found = [
            (last_used_s, one_id, family)
            for family in FAMILIES
            for one_id, last_used_s in connection.exec_driver_sql(
                family.oldest, {"keep": room.keep}
            )
        ]
        if not found:
            if room.needed_bytes:
                raise HistoryFull(
                    f"history_max_bytes ({room.max_bytes}) is reached and nothing can go"
                )
            break
        _, one_id, family = min(found, key=lambda one: (not one[2].is_expired, *one[:2]))
        family.remove(connection, str(one_id), now_s)
        num_removed += 1
    return num_removed
