"""The history's tables: what clients asked the server to keep, text included.

A file of its own, so that the index stays free of text. Bodies are JSON texts whose shape belongs
to whoever writes them; here they are opaque. `migrations/history/` makes these tables.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

APPLICATION_ID = 0x48525459
"""What SQLite's header says of the file: `HRTY`."""

SCHEMA_VERSION = 5
"""SQLite's user_version; it goes up with every migration."""


class HistoryTable(DeclarativeBase):
    """What all tables of the history hang on."""


class Agent(HistoryTable):
    """An agent. `session` names its KV; it is another one after every reset.

    `num_bytes` is what its turns take; `config` is JSON. `last_used_s` is trusted time.
    """

    __tablename__ = "agents"
    __table_args__ = (Index("agents_by_use", "last_used_s"),)

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    session: Mapped[str] = mapped_column(unique=True)
    config: Mapped[bytes]
    created_s: Mapped[float]
    last_used_s: Mapped[float]
    ttl_s: Mapped[float | None]
    is_pinned: Mapped[bool]
    num_turns: Mapped[int]
    num_bytes: Mapped[int]


class Turn(HistoryTable):
    """What one generate added: the client's new messages and the answer. `number` is from 1."""

    __tablename__ = "turns"
    __table_args__ = (Index("turns_by_agent", "agent_number", "number", unique=True),)

    id: Mapped[int] = mapped_column(primary_key=True)
    agent_number: Mapped[int] = mapped_column(ForeignKey("agents.number", ondelete="CASCADE"))
    number: Mapped[int]
    request_id: Mapped[str]
    model: Mapped[str]
    finish_reason: Mapped[str]
    num_prompt_tokens: Mapped[int]
    num_cached_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    num_bytes: Mapped[int]
    created_s: Mapped[float]


class TurnMessage(HistoryTable):
    """One message of a turn, in order from 0; `body` is JSON."""

    __tablename__ = "turn_messages"
    __table_args__ = (Index("turn_messages_by_turn", "turn_id", "position", unique=True),)

    id: Mapped[int] = mapped_column(primary_key=True)
    turn_id: Mapped[int] = mapped_column(ForeignKey("turns.id", ondelete="CASCADE"))
    position: Mapped[int]
    body: Mapped[bytes]


class LeftSession(HistoryTable):
    """A session whose history is gone and whose KV must follow: what is deleted stays deleted."""

    __tablename__ = "left_sessions"
    __table_args__ = ({"sqlite_with_rowid": False},)

    session: Mapped[str] = mapped_column(primary_key=True)
    left_s: Mapped[float]


class Response(HistoryTable):
    """A stored response, or turn of a thread, without its items.

    `previous_id` is the one it goes on from, `session` names its KV, "" where nothing does.
    """

    __tablename__ = "responses"
    __table_args__ = (
        Index("responses_by_use", "last_used_s"),
        Index("responses_by_previous", "previous_id"),
        Index("responses_by_session", "session"),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    previous_id: Mapped[str | None]
    body: Mapped[bytes]
    created_s: Mapped[float]
    last_used_s: Mapped[float]
    session: Mapped[str] = mapped_column(server_default="")


class ResponseItem(HistoryTable):
    """One item that went into a response or came out of it, in order from 0; `body` is JSON."""

    __tablename__ = "response_items"
    __table_args__ = (
        Index("response_items_by_id", "id"),
        Index("response_items_by_response", "response_number", "position", unique=True),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    response_number: Mapped[int] = mapped_column(ForeignKey("responses.number", ondelete="CASCADE"))
    position: Mapped[int]
    id: Mapped[str]
    is_output: Mapped[bool]
    body: Mapped[bytes]


class ResponseEvents(HistoryTable):
    """The events by which a response was told, packed by whoever writes them."""

    __tablename__ = "response_events"

    response_number: Mapped[int] = mapped_column(
        ForeignKey("responses.number", ondelete="CASCADE"), primary_key=True
    )
    body: Mapped[bytes]


class Expired(HistoryTable):
    """An agent or a stored response whose time is over, kept a while longer: nobody finds it.

    `kind` is `agent` or `response`; times are trusted time.
    """

    __tablename__ = "expired"
    __table_args__ = (Index("expired_by_id", "kind", "id"),)

    number: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    id: Mapped[str]
    num_bytes: Mapped[int]
    last_used_s: Mapped[float]
    expired_s: Mapped[float]


class ExpiredPart(HistoryTable):
    """A piece of what expired, in order from 0; `body` is a row, packed."""

    __tablename__ = "expired_parts"
    __table_args__ = (Index("expired_parts_in_order", "expired_number", "position", unique=True),)

    id: Mapped[int] = mapped_column(primary_key=True)
    expired_number: Mapped[int] = mapped_column(ForeignKey("expired.number", ondelete="CASCADE"))
    position: Mapped[int]
    body: Mapped[bytes]


class SetAside(HistoryTable):
    """A file of this database that was damaged, and what could be taken over from it.

    It is kept, and said, until the operator has acknowledged it. `at_s` is wall time, for people.
    """

    __tablename__ = "set_aside"
    __table_args__ = ({"sqlite_with_rowid": False},)

    name: Mapped[str] = mapped_column(primary_key=True)
    at_s: Mapped[float]
    found_s: Mapped[float]
    num_agents: Mapped[int]
    num_responses: Mapped[int]
    is_whole: Mapped[bool]
    is_acknowledged: Mapped[bool]


class HistoryState(HistoryTable):
    """One row: whether a server has this file open, and the last trusted instant."""

    __tablename__ = "store_state"
    __table_args__ = (CheckConstraint("id = 1", name="store_state_single"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    is_open: Mapped[bool]
    trusted_s: Mapped[float]
    monotonic_s: Mapped[float]
    boot_id: Mapped[str]
