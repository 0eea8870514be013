"""Agents and their turns in the history, in the transaction of the caller. Bodies are opaque."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from store.history.fitting import fitting
from store.history.history_tables import Agent, LeftSession, Turn, TurnMessage


class AgentRow(NamedTuple):
    """An agent as it is stored. `config` is JSON; `session` names its KV.

    `last_used_s` is trusted time; `created_s`, here and of turns, is the wall clock's.
    """

    id: str
    session: str
    config: bytes
    created_s: float
    last_used_s: float
    ttl_s: float | None = None
    is_pinned: bool = False
    num_turns: int = 0
    num_bytes: int = 0


class TurnRow(NamedTuple):
    """What one generate added, message by message. `number` is from 1."""

    number: int
    request_id: str
    model: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    created_s: float
    bodies: tuple[bytes, ...] = ()


class AgentPage(NamedTuple):
    """Some agents, and whether there are more behind them."""

    rows: list[AgentRow]
    has_more: bool


class Page(NamedTuple):
    """Which turns to read: `limit` of them after the number `after`, the latest first if asked.

    Fewer where their messages have more than `most_bytes`, but one at least.
    """

    after: int | None = None
    limit: int = 20
    is_newest_first: bool = False
    most_bytes: int | None = None


_FORKED_AT_ONCE = 100

_AGENT = [
    Agent.id,
    Agent.session,
    Agent.config,
    Agent.created_s,
    Agent.last_used_s,
    Agent.ttl_s,
    Agent.is_pinned,
    Agent.num_turns,
    Agent.num_bytes,
]
_TURN = [
    Turn.number,
    Turn.request_id,
    Turn.model,
    Turn.finish_reason,
    Turn.num_prompt_tokens,
    Turn.num_cached_tokens,
    Turn.num_output_tokens,
    Turn.created_s,
]


def create(connection: Connection, row: AgentRow) -> bool:
    """Add an agent; False when there is one of that id."""
    added = sqlite_insert(Agent).values(row._asdict()).on_conflict_do_nothing()
    return bool(connection.execute(added).rowcount)


def get(connection: Connection, agent_id: str) -> AgentRow | None:
    """The agent of that id."""
    row = connection.execute(select(*_AGENT).where(Agent.id == agent_id)).first()
    return AgentRow(*row) if row is not None else None


def listing(
    connection: Connection,
    after: str | None,
    limit: int,
    owner: str = "",
    most_bytes: int | None = None,
) -> AgentPage:
    """Agents in the order of their making, the newest first; `after` is the last id seen.

    Their ids begin with `owner`; with "" only those without an owner (`@…`) are listed. They are
    fewer than `limit` where their configs have more than `most_bytes`, but one at least.
    """
    is_mine = func.substr(Agent.id, 1, len(owner)) == owner
    if not owner:
        is_mine = func.substr(Agent.id, 1, 1) != "@"
    newest_first = Agent.number.desc()
    sizes = select(Agent.number, func.length(Agent.config)).where(is_mine).order_by(newest_first)
    if after is not None:
        seen = select(Agent.number).where(Agent.id == after).scalar_subquery()
        sizes = sizes.where(Agent.number < seen)
    found = [(number, size) for number, size in connection.execute(sizes.limit(limit + 1))]
    numbers = fitting(found[:limit], most_bytes)
    rows = select(*_AGENT).where(Agent.number.in_(numbers)).order_by(newest_first)
    page = [AgentRow(*row) for row in connection.execute(rows)]
    return AgentPage(page, has_more=len(found) > len(page))


def change(connection: Connection, row: AgentRow) -> bool:
    """Give the agent of this id the row's config, lifetime and pin; False when it is gone."""
    changed = (
        update(Agent)
        .where(Agent.id == row.id)
        .values(config=row.config, ttl_s=row.ttl_s, is_pinned=row.is_pinned)
    )
    return bool(connection.execute(changed).rowcount)


def bodies(connection: Connection, session: str) -> list[bytes]:
    """All messages of an agent, in order."""
    rows = (
        select(TurnMessage.body)
        .join(Turn, Turn.id == TurnMessage.turn_id)
        .join(Agent, Agent.number == Turn.agent_number)
        .where(Agent.session == session)
        .order_by(Turn.number, TurnMessage.position)
    )
    return list(connection.execute(rows).scalars())


def turns(connection: Connection, session: str, page: Page) -> list[TurnRow]:
    """One page of an agent's turns with their messages."""
    order = Turn.number.desc() if page.is_newest_first else Turn.number
    num_bytes = func.coalesce(func.sum(func.length(TurnMessage.body)), 0)
    sizes = (
        select(Turn.id, num_bytes)
        .join(Agent, Agent.number == Turn.agent_number)
        .outerjoin(TurnMessage, TurnMessage.turn_id == Turn.id)
        .where(Agent.session == session)
        .group_by(Turn.id)
        .order_by(order)
        .limit(page.limit)
    )
    if page.after is not None:
        is_beyond = Turn.number < page.after if page.is_newest_first else Turn.number > page.after
        sizes = sizes.where(is_beyond)
    ids = fitting([(one, size) for one, size in connection.execute(sizes)], page.most_bytes)
    rows = select(Turn.id, *_TURN).where(Turn.id.in_(ids)).order_by(order)
    found = connection.execute(rows).all()
    said: dict[int, list[bytes]] = {row[0]: [] for row in found}
    messages = (
        select(TurnMessage.turn_id, TurnMessage.body)
        .where(TurnMessage.turn_id.in_(said))
        .order_by(TurnMessage.turn_id, TurnMessage.position)
    )
    for turn, body in connection.execute(messages):
        said[turn].append(body)
    return [TurnRow._make((*row[1:], tuple(said[row[0]]))) for row in found]


def num_tokens(connection: Connection, session: str) -> dict[str, int]:
    """By model, how many tokens the agent's last turn with it had, its answer included."""
    rows = (
        select(Turn.model, Turn.num_prompt_tokens + Turn.num_output_tokens)
        .join(Agent, Agent.number == Turn.agent_number)
        .where(Agent.session == session)
        .order_by(Turn.number)
    )
    return {row[0]: row[1] for row in connection.execute(rows)}


def append(connection: Connection, session: str, row: TurnRow, now_s: float) -> int:
    """Add a turn to an agent, of which it must be the next; how many turns there were before.

    Nothing is added when that is not `row.number - 1`; -1 says that the agent is gone or was reset.
    """
    agent = connection.execute(
        select(Agent.number, Agent.num_turns).where(Agent.session == session)
    ).first()
    if agent is None:
        return -1
    number, num_turns = agent
    if num_turns == row.number - 1:
        _insert_turn(connection, number, row)
        _count(connection, number, now_s)
    return num_turns


def replace(
    connection: Connection, session: str, row: TurnRow, request_id: str, now_s: float
) -> bool:
    """Put a turn in the place of an agent's last one, which must be that of this request.

    False, and nothing is changed, when it is not; the agent may be gone or was reset.
    """
    last = connection.execute(
        select(Turn.id, Agent.number)
        .join(Agent, Agent.number == Turn.agent_number)
        .where(Agent.session == session, Agent.num_turns == row.number)
        .where(Turn.number == row.number, Turn.request_id == request_id)
    ).first()
    if last is None:
        return False
    turn_id, number = last
    connection.execute(delete(Turn).where(Turn.id == turn_id))
    _insert_turn(connection, number, row)
    _count(connection, number, now_s)
    return True


def fork(connection: Connection, session: str, row: AgentRow, num_turns: int) -> bool:
    """Add an agent with the first turns of another; False when there is one of that id."""
    if not create(connection, row._replace(num_turns=0, num_bytes=0)):
        return False
    number = connection.execute(
        select(Agent.number).where(Agent.session == row.session)
    ).scalar_one()
    for after in range(0, num_turns, _FORKED_AT_ONCE):
        limit = min(_FORKED_AT_ONCE, num_turns - after)
        for turn in turns(connection, session, Page(after, limit)):
            _insert_turn(connection, number, turn)
    _count(connection, number, row.last_used_s)
    return True


def put_turns(connection: Connection, session: str, rows: Iterable[TurnRow], now_s: float) -> None:
    """Give an agent without turns these, with the numbers that they have."""
    mine = select(Agent.number).where(Agent.session == session)
    number = connection.execute(mine).scalar_one()
    for row in rows:
        _insert_turn(connection, number, row)
    _count(connection, number, now_s)


def reset(connection: Connection, agent_id: str, session: str, now_s: float) -> str | None:
    """Delete all turns of an agent, whose session becomes another.

    The session it leaves, None when there is no such agent.
    """
    row = get(connection, agent_id)
    if row is None:
        return None
    number = connection.execute(select(Agent.number).where(Agent.id == agent_id)).scalar_one()
    connection.execute(delete(Turn).where(Turn.agent_number == number))
    connection.execute(update(Agent).where(Agent.number == number).values(session=session))
    _count(connection, number, now_s)
    leave(connection, row.session, now_s)
    return row.session


def remove(connection: Connection, agent_id: str, now_s: float) -> AgentRow | None:
    """Delete an agent and its turns; what it was, None when there was none."""
    row = get(connection, agent_id)
    if row is not None:
        connection.execute(delete(Agent).where(Agent.id == agent_id))
        leave(connection, row.session, now_s)
    return row


def leave(connection: Connection, session: str, now_s: float) -> None:
    """The KV of a session is to be deleted."""
    left = {"session": session, "left_s": now_s}
    connection.execute(sqlite_insert(LeftSession).values(left).on_conflict_do_nothing())


def left_sessions(connection: Connection) -> list[tuple[str, float]]:
    """Sessions whose KV is to be deleted, and since when."""
    rows = connection.execute(select(LeftSession.session, LeftSession.left_s))
    return [(session, left_s) for session, left_s in rows]


def forget_left(connection: Connection, sessions: Sequence[str]) -> None:
    """Nothing is left of these sessions."""
    connection.execute(delete(LeftSession).where(LeftSession.session.in_(sessions)))


def expired(connection: Connection, now_s: float, ttl_s: float) -> list[str]:
    """Ids of agents that were not used for as long as they live; `ttl_s` where they do not say."""
    life_s = func.coalesce(Agent.ttl_s, ttl_s)
    rows = select(Agent.id).where(~Agent.is_pinned, Agent.last_used_s + life_s < now_s)
    return list(connection.execute(rows).scalars())


def _insert_turn(connection: Connection, agent_number: int, row: TurnRow) -> None:
    values = row._asdict()
    said: tuple[bytes, ...] = values.pop("bodies")
    values |= {"agent_number": agent_number, "num_bytes": sum(map(len, said))}
    turn_id = connection.execute(insert(Turn).values(values).returning(Turn.id)).scalar_one()
    for position, body in enumerate(said):
        message = {"turn_id": turn_id, "position": position, "body": body}
        connection.execute(insert(TurnMessage).values(message))


def _count(connection: Connection, agent_number: int, used_s: float) -> None:
    mine = select(func.count(), func.coalesce(func.sum(Turn.num_bytes), 0))
    num_turns, num_bytes = connection.execute(mine.where(Turn.agent_number == agent_number)).one()
    connection.execute(
        update(Agent)
        .where(Agent.number == agent_number)
        .values(num_turns=num_turns, num_bytes=num_bytes, last_used_s=used_s)
    )
