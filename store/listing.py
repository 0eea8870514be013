"""What lies in a store as people see it: conversations, and chains that nobody gave a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Connection, Row, bindparam, text

from store.types import SlotPlace, Struct

_NAMED = """
SELECT lower(hex(c.key)), m.hash, l.name, max(c.num_tokens, coalesce(u.last, 0)), c.num_turns,
  count(s.id), coalesce(sum(s.disk_bytes), 0),
  coalesce(sum(s.disk_bytes * NOT EXISTS (SELECT 1 FROM conversation_slots o
    WHERE o.slot_id = s.id AND o.conversation_id <> c.id)), 0), coalesce(sum(s.tier = 'cold'), 0),
  coalesce(l.is_pinned, 0), max(c.last_used_s, coalesce(l.last_used_s, 0.0)),
  coalesce(u.first, lr.reach, l."end", 0), 1, coalesce(nullif(c.name, ''), m.label)
FROM conversations c JOIN models m ON m.id = c.model_id LEFT JOIN slots l ON l.id = c.leaf_id
  LEFT JOIN conversation_slots lr ON lr.conversation_id = c.id AND lr.slot_id = c.leaf_id
  LEFT JOIN (SELECT key, model_id, name, min(start) AS first, max("end") AS last
    FROM unpublished WHERE NOT is_lost GROUP BY key, model_id, name) u
    ON u.key = c.key AND u.model_id = c.model_id AND u.name = c.name
  LEFT JOIN conversation_slots cs ON cs.conversation_id = c.id
  LEFT JOIN slots s ON s.id = cs.slot_id
WHERE c.key <> x''
"""
_EACH = "GROUP BY c.id"
_NAMELESS_ENDS = """
  SELECT cs.slot_id, c.name FROM conversations c
    JOIN conversation_slots cs ON cs.conversation_id = c.id
  WHERE c.key = x'' AND NOT EXISTS (
    SELECT 1 FROM slots child JOIN conversation_slots further ON further.slot_id = child.id
    WHERE child.parent_id = cs.slot_id AND further.conversation_id = c.id)
"""
_LEAVES = f"""
SELECT name FROM slots WHERE id IN (SELECT leaf_id FROM conversations)
  OR id IN (SELECT slot_id FROM ({_NAMELESS_ENDS}))
"""  # noqa: S608 - of the constant above
_CHAINS = f"""
WITH RECURSIVE ends (slot, name) AS ({_NAMELESS_ENDS}
  UNION ALL
  SELECT id, '' FROM slots WHERE num_children = 0
    AND NOT EXISTS (SELECT 1 FROM conversation_slots WHERE slot_id = slots.id)
), chain (leaf, name, slot) AS (
  SELECT slot, name, slot FROM ends
  UNION ALL
  SELECT chain.leaf, chain.name, slots.parent_id FROM chain JOIN slots ON slots.id = chain.slot
  WHERE slots.parent_id IS NOT NULL
), held (slot, num_chains) AS (SELECT slot, count(*) FROM chain GROUP BY slot)
SELECT l.name, m.hash, l.name, l."end", 0,
  count(s.id), sum(s.disk_bytes),
  sum(s.disk_bytes * (held.num_chains = 1 AND NOT EXISTS (
    SELECT 1 FROM conversation_slots o JOIN conversations c ON c.id = o.conversation_id
    WHERE o.slot_id = s.id AND c.key <> x''))), sum(s.tier = 'cold'), l.is_pinned, l.last_used_s,
  l."end", 0, coalesce(nullif(chain.name, ''), m.label)
FROM chain JOIN slots l ON l.id = chain.leaf JOIN slots s ON s.id = chain.slot
  JOIN held ON held.slot = chain.slot
  JOIN models m ON m.id = l.model_id
GROUP BY chain.leaf, chain.name
"""  # noqa: S608 - of the constant above
_AROUND_HOLES = """
SELECT lower(hex(c.key)) AS id, m.hash AS model, coalesce(nullif(c.name, ''), m.label) AS name,
  s.start, cs.reach
FROM conversations c JOIN models m ON m.id = c.model_id
  JOIN conversation_slots cs ON cs.conversation_id = c.id JOIN slots s ON s.id = cs.slot_id
WHERE c.key <> x'' AND c.id IN (
  SELECT after.conversation_id FROM slots loose
    JOIN conversation_slots after ON after.slot_id = loose.id
  WHERE loose.parent_id IS NULL AND loose.start > 0)
ORDER BY s.start
"""
_SHARERS = """
SELECT s.name, count(DISTINCT cs.conversation_id) AS num_conversations
FROM slots s JOIN conversation_slots cs ON cs.slot_id = s.id GROUP BY s.id
"""
_WAY = """
WITH RECURSIVE way (slot, depth) AS (
  SELECT id, 0 FROM slots WHERE name = :leaf
  UNION ALL
  SELECT slots.parent_id, depth + 1 FROM way JOIN slots ON slots.id = way.slot
  WHERE slots.parent_id IS NOT NULL
)
SELECT slots.name, slots.tier, slots.start, slots."end"
FROM way JOIN slots ON slots.id = way.slot ORDER BY depth DESC
"""


class Entry(Struct, frozen=True):
    """One conversation with one model, or a chain of slots without a session id.

    `name` is the model's that was asked; what two names asked is there twice. `id` is the hex of a
    conversation's key, else the id of the chain's last slot. `num_durable` is how many of its
    tokens are on disk now, `num_tokens` counts what is being written as well. Slots and bytes that
    are shared count in each; `own_bytes` are those of slots that nothing else here has.
    """

    id: str
    model: bytes
    leaf: str | None
    num_tokens: int
    num_turns: int
    num_slots: int
    disk_bytes: int
    own_bytes: int
    num_cold_slots: int
    is_pinned: bool
    last_used_s: float
    num_durable: int
    is_named: bool
    name: str


class SlotLink(Struct, frozen=True):
    """One slot of a chain, and the position at which the chain leaves it for the next."""

    place: SlotPlace
    start: int
    leave: int


class End(Struct, frozen=True):
    """How the prefix up to a slot's end is known; `ttl_s` is None for ever."""

    end_hash: bytes
    ttl_s: float | None


def ends(connection: Connection) -> dict[str, End]:
    """The ends of all slots, by slot."""
    rows = connection.execute(text("SELECT name, end_hash, ttl_s FROM slots"))
    return {row.name: End(end_hash=row.end_hash, ttl_s=row.ttl_s) for row in rows}


def leaves(connection: Connection) -> set[str]:
    """The slots where conversations end."""
    return set(connection.execute(text(_LEAVES)).scalars())


def num_conversations(connection: Connection) -> dict[str, int]:
    """How many conversations are part of each slot; what has no session id is one for each name."""
    rows = connection.execute(text(_SHARERS))
    return {row.name: row.num_conversations for row in rows}


def entries(connection: Connection) -> list[Entry]:
    """Everything there is, the latest used first."""
    found = [
        _entry(row)
        for query in (_NAMED + _EACH, _CHAINS)
        for row in connection.execute(text(query))
    ]
    found = _up_to_holes(connection, found)
    return sorted(found, key=lambda one: (-one.last_used_s, one.id))


def named(connection: Connection, keys: Sequence[bytes]) -> list[Entry]:
    """The conversations of these keys with all their models, the latest used first."""
    query = text(f"{_NAMED} AND c.key IN :keys {_EACH}")
    query = query.bindparams(bindparam("keys", expanding=True))
    found = [_entry(row) for row in connection.execute(query, {"keys": list(keys)})]
    found = _up_to_holes(connection, found)
    return sorted(found, key=lambda one: -one.last_used_s)


def _up_to_holes(connection: Connection, found: list[Entry]) -> list[Entry]:
    """Of conversations that have lost a piece the tokens before it are what is on disk."""
    reached: dict[tuple[str, bytes, str], int] = {}
    for row in connection.execute(text(_AROUND_HOLES)):
        one = (row.id, row.model, row.name)
        end = reached.setdefault(one, 0)
        if row.start <= end:
            reached[one] = max(end, row.reach)
    ends = (reached.get((one.id, one.model, one.name), one.num_durable) for one in found)
    return [
        replace(one, num_durable=end) if end < one.num_durable else one
        for one, end in zip(found, ends, strict=True)
    ]


def _entry(row: Row[Any]) -> Entry:
    return Entry(**dict(zip(Entry.__struct_fields__, row, strict=True)))


def way_to(connection: Connection, leaf: str) -> list[SlotLink]:
    """The slots that hold the tokens up to the end of `leaf`, in order; none if it is unknown."""
    rows = list(connection.execute(text(_WAY), {"leaf": leaf}))
    leaves = [row.start for row in rows[1:]] + [row.end for row in rows[-1:]]
    return [
        SlotLink(place=SlotPlace(row.name, row.tier), start=row.start, leave=leave)
        for row, leave in zip(rows, leaves, strict=True)
    ]
