"""Conversations and pins say by which name their model was asked, and how far they reach.

Until now that name was the label of the weights: what is there keeps it.
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

_PINS = """CREATE TABLE pins (
        model_id INTEGER NOT NULL,
        end_hash BLOB NOT NULL,
        source VARCHAR NOT NULL,
        {name}PRIMARY KEY (model_id, end_hash, source{key}),
        FOREIGN KEY(model_id) REFERENCES models (id)
    )
 WITHOUT ROWID"""


def upgrade() -> None:
    op.execute("ALTER TABLE conversations ADD COLUMN name VARCHAR DEFAULT '' NOT NULL")
    op.execute("DROP INDEX conversations_by_key")
    op.execute('CREATE UNIQUE INDEX conversations_by_key ON conversations ("key", model_id, name)')
    op.execute("UPDATE conversations SET name = (SELECT label FROM models WHERE id = model_id)")
    _name_what_has_no_session()
    op.execute("ALTER TABLE conversation_slots ADD COLUMN reach INTEGER DEFAULT 0 NOT NULL")
    op.execute("""
        UPDATE conversation_slots SET reach = coalesce(
          (SELECT max(child.start) FROM slots child JOIN conversation_slots further
             ON further.slot_id = child.id AND
                further.conversation_id = conversation_slots.conversation_id
           WHERE child.parent_id = conversation_slots.slot_id
             AND NOT EXISTS (SELECT 1 FROM conversations c
               WHERE c.id = conversation_slots.conversation_id
                 AND c.leaf_id = conversation_slots.slot_id)),
          (SELECT "end" FROM slots WHERE id = conversation_slots.slot_id))
    """)
    op.execute("CREATE TABLE old_pins AS SELECT * FROM pins")
    op.execute("DROP TABLE pins")
    named = "name VARCHAR DEFAULT '' NOT NULL,\n        "
    op.execute(_PINS.format(name=named, key=", name"))
    op.execute(
        "INSERT INTO pins SELECT o.model_id, o.end_hash, o.source, m.label"
        " FROM old_pins o JOIN models m ON m.id = o.model_id"
    )
    op.execute("DROP TABLE old_pins")
    op.execute("""CREATE TABLE cuts (
        slot_id INTEGER NOT NULL,
        PRIMARY KEY (slot_id),
        FOREIGN KEY(slot_id) REFERENCES slots (id) ON DELETE CASCADE
    )""")


def _name_what_has_no_session() -> None:
    op.execute("""
        CREATE TABLE unnamed AS SELECT id, model_id FROM slots WHERE num_children = 0
          AND NOT EXISTS (SELECT 1 FROM conversation_slots WHERE slot_id = slots.id)
    """)
    op.execute("""
        INSERT INTO conversations
          ("key", model_id, num_tokens, num_turns, created_s, last_used_s, name)
        SELECT x'', id, 0, 0, last_used_s, last_used_s, label FROM models
        WHERE label <> '' AND id IN (SELECT model_id FROM unnamed)
    """)
    op.execute("""
        INSERT INTO conversation_slots (conversation_id, slot_id)
        WITH RECURSIVE chain (slot) AS (
          SELECT id FROM unnamed
          UNION
          SELECT slots.parent_id FROM chain JOIN slots ON slots.id = chain.slot
          WHERE slots.parent_id IS NOT NULL
        )
        SELECT c.id, chain.slot FROM chain JOIN slots s ON s.id = chain.slot
          JOIN conversations c ON c."key" = x'' AND c.model_id = s.model_id
    """)
    op.execute("DROP TABLE unnamed")


def downgrade() -> None:
    """What several names shared is one again; a slot that was to be cut goes, with what follows."""
    op.execute("""
        CREATE TABLE cut_slots AS WITH RECURSIVE gone (slot) AS (
          SELECT slot_id FROM cuts UNION
          SELECT slots.id FROM gone JOIN slots ON slots.parent_id = gone.slot
        ) SELECT slot FROM gone
    """)
    op.execute(
        "INSERT OR IGNORE INTO condemned SELECT name, tier FROM slots"
        " WHERE id IN (SELECT slot FROM cut_slots)"
    )
    op.execute(
        "UPDATE slots SET num_children = num_children -"
        " (SELECT count(*) FROM cut_slots JOIN slots c ON c.id = slot WHERE c.parent_id = slots.id)"
    )
    op.execute("UPDATE slots SET parent_id = NULL WHERE id IN (SELECT slot FROM cut_slots)")
    op.execute("DELETE FROM slots WHERE id IN (SELECT slot FROM cut_slots)")
    op.execute("DROP TABLE cut_slots")
    op.execute("DROP TABLE cuts")
    op.execute("DELETE FROM conversations WHERE \"key\" = x''")
    op.execute("""
        INSERT OR IGNORE INTO conversation_slots (conversation_id, slot_id)
        SELECT one.id, held.slot_id FROM conversations one
          JOIN conversations other ON other."key" = one."key" AND other.model_id = one.model_id
          JOIN conversation_slots held ON held.conversation_id = other.id
    """)
    op.execute("""
        DELETE FROM conversations WHERE EXISTS (
          SELECT 1 FROM conversations later WHERE later."key" = conversations."key"
            AND later.model_id = conversations.model_id
            AND (later.last_used_s, later.id) > (conversations.last_used_s, conversations.id)
        )
    """)
    op.execute("ALTER TABLE conversation_slots DROP COLUMN reach")
    op.execute("DROP INDEX conversations_by_key")
    op.execute("ALTER TABLE conversations DROP COLUMN name")
    op.execute('CREATE UNIQUE INDEX conversations_by_key ON conversations ("key", model_id)')
    op.execute("CREATE TABLE old_pins AS SELECT DISTINCT model_id, end_hash, source FROM pins")
    op.execute("DROP TABLE pins")
    op.execute(_PINS.format(name="", key=""))
    op.execute("INSERT INTO pins SELECT * FROM old_pins")
    op.execute("DROP TABLE old_pins")
