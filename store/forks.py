"""Where others leave a chain of slots that nobody gave a name."""

from __future__ import annotations

import json

from sqlalchemy import Connection, text

from store.listing import way_to
from store.removal import STRAY_TOKENS
from store.types import Struct

_SIBLINGS = """
WITH way AS (
  SELECT id, name, start_hash FROM slots WHERE name IN (SELECT value FROM json_each(:way)))
SELECT p.name AS parent, c.name, c.start, c.num_children FROM slots c
  LEFT JOIN slots p ON p.id = c.parent_id
WHERE c.id NOT IN (SELECT id FROM way)
  AND (c.parent_id IN (SELECT id FROM way)
    OR (c.parent_id IS NULL AND c.start = 0 AND c.start_hash IN (
      SELECT start_hash FROM way WHERE name = :first)))
  AND EXISTS (SELECT 1 FROM conversation_slots o JOIN conversations n ON n.id = o.conversation_id
    WHERE o.slot_id = c.id AND n.key = x'' AND n.name = :asked)
"""


class Fork(Struct, frozen=True):
    """What somebody else said from the position `at` on is in a slot that begins at `start`.

    With `goes_on` that somebody said something else after all of it.
    """

    slot: str
    start: int
    at: int
    goes_on: bool


def forks(connection: Connection, leaf: str, asked: str) -> list[Fork]:
    """Where others that a model was asked by the same name, without a session id, leave the chain
    that ends in `leaf`; the last ones first.
    """
    way = {link.place.id: link for link in way_to(connection, leaf)}
    values = {"way": json.dumps(list(way)), "first": next(iter(way), ""), "asked": asked}
    found: list[Fork] = []
    for row in connection.execute(text(_SIBLINGS), values):
        before = way.get(row.parent)
        if before is None or row.start <= before.leave:
            goes_on = row.num_children > 0
            found.append(Fork(slot=row.name, start=row.start, at=row.start, goes_on=goes_on))
        else:  # beyond where the chain leaves that slot, so what is different is in it
            at = before.leave
            found.append(Fork(slot=row.parent, start=before.start, at=at, goes_on=True))
    for link in way.values():
        at, end = link.leave, _end_of(connection, link.place.id)
        if at + STRAY_TOKENS < end:
            found.append(Fork(slot=link.place.id, start=link.start, at=at, goes_on=True))
    return sorted(found, key=lambda one: -one.at)


def _end_of(connection: Connection, slot: str) -> int:
    found = text('SELECT "end" FROM slots WHERE name = :slot')
    return int(connection.execute(found, {"slot": slot}).scalar() or 0)
