"""`AgentService`: making, changing, forking, resetting and deleting agents, and looking at them.

`open_agents` puts the parts of the API together.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import Connection

from api.agents import convert
from api.agents.convert import Sent, ShownConfig
from api.agents.expiry import ExpiryJob
from api.agents.generate import Generates
from api.agents.kv import AgentKv
from api.agents.locks import AgentActivity, AgentLocks
from api.agents.repository import AgentRepository, new_session
from api.agents.schemas import AgentDeleted, AgentList, AgentView, HistoryPage, KvView
from api.http.body import apart
from api.http.gate import Gate
from api.http.kv_access import KvAccess
from api.http.refusal import refuse
from api.openai.convert import chat_to_generate
from runtime.cache.history import History
from runtime.errors import AgentChanged, AgentExists, UnknownModel
from runtime.keys import owned, owner, plain
from store.history import agent_rows, expired_rows
from store.history.agent_rows import AgentRow, Page
from store.history.fitting import PAGE_BYTES


class Kept(NamedTuple):
    """The conversation of an agent, and the name of its model if it was given one."""

    session: str
    model: str | None


class AgentService:
    """All agents of this server. Every call may raise StoreUnavailable.

    Ids are as `runtime.keys.owned` makes them, so that nobody finds another tenant's.
    """

    def __init__(self, gate: Gate, book: AgentRepository, locks: AgentLocks, kv: AgentKv) -> None:
        self._gate = gate
        self._settings = gate.settings
        self._book = book
        self._locks = locks
        self._kv = kv

    async def create(self, tenant: str, agent_id: str | None, sent: Sent) -> AgentView:
        """Make an agent of a tenant; `agent_id` is as it was given.

        Raises:
            AgentExists: there is one of that id.
            InvalidRequest, UnknownModel: it could never generate.
        """
        row = await self._new_row(_key_of(tenant, agent_id), convert.config_of(sent))
        is_new = await self._book.add(
            lambda connection: agent_rows.create(connection, self._used(row)),
            len(row.config),
            row.id,
        )
        if not is_new:
            raise _exists(row.id)
        return await self.view(row.id)

    async def listing(self, tenant: str, after: str | None, limit: int) -> AgentList:
        """A page of a tenant's agents, the newest first; `after` is as it was given.

        It is shorter where their configs are long.
        """
        seen = owned(tenant, after) if after is not None else None
        page = await self._book.read(
            lambda c: agent_rows.listing(c, seen, limit, owned(tenant, ""), PAGE_BYTES)
        )
        rows = page.rows
        kv = await self._kv.views([row.session for row in rows])
        configs = await apart(
            sum(len(row.config) for row in rows),
            lambda: [convert.read_shown(row.config) for row in rows],
        )
        views = [
            self._seen(row, kv[row.session], config)
            for row, config in zip(rows, configs, strict=True)
        ]
        return AgentList(views, [*map(convert.in_brief, views)], has_more=page.has_more)

    async def view(self, agent_id: str) -> AgentView:
        """One agent, with its config. Raises UnknownAgent."""
        return await self._view(await self._book.row(agent_id))

    async def kept(self, agent_id: str) -> Kept:
        """Where an agent's KV is found. Raises UnknownAgent."""
        row = await self._book.row(agent_id)
        config = await apart(len(row.config), lambda: convert.read_shown(row.config))
        return Kept(row.session, config.model)

    async def change(self, agent_id: str, sent: Sent) -> AgentView:
        """Give an agent other fields; what runs goes on as it began.

        Raises:
            UnknownAgent: there is none.
            InvalidRequest, UnknownModel: it could never generate.
        """
        before = await self._book.row(agent_id)
        wanted = await self._new_row(agent_id, convert.config_of(sent, before.config))

        def work(connection: Connection) -> AgentRow | None:
            known = agent_rows.get(connection, agent_id)
            if known is None:
                return None
            row = _described(known._replace(config=convert.config_of(sent, known.config)))
            return row if agent_rows.change(connection, row) else None

        row = await self._book.add(work, len(wanted.config), agent_id)
        if row is None:
            raise self._book.unknown(agent_id)
        return await self._view(row)

    async def remove(self, agent_id: str) -> AgentDeleted:
        """Delete an agent, its history and its KV; what runs or waits for it ends.

        Raises UnknownAgent; then what former deletions could not finish is deleted as well.
        """
        self._locks.end_all(agent_id, self._book.unknown(agent_id))

        def work(connection: Connection) -> tuple[AgentRow | None, bool]:
            row = agent_rows.remove(connection, agent_id, self._book.now_s())
            return row, expired_rows.erase_id(connection, "agent", agent_id)

        row, had_expired = await self._book.write(work)
        if row is None and not had_expired:
            for session, _ in await self._book.read(agent_rows.left_sessions):
                await self._kv.remove(session)
            raise self._book.unknown(agent_id)
        await self._book.tidy()
        is_gone = row is None or await self._kv.remove(row.session)
        return AgentDeleted(plain(agent_id), "deleted" if is_gone else "pending")

    async def reset(self, agent_id: str) -> AgentView:
        """Delete an agent's history and KV and keep the agent; what runs or waits ends.

        Raises UnknownAgent.
        """
        self._locks.end_all(agent_id, AgentChanged("The agent was reset; nothing was kept."))
        session = new_session(agent_id)
        left = await self._book.write(
            lambda c: agent_rows.reset(c, agent_id, session, self._book.now_s())
        )
        if left is None:
            raise self._book.unknown(agent_id)
        await self._book.tidy()
        await self._kv.remove(left)
        return await self.view(agent_id)

    async def fork(
        self, agent_id: str, copy_id: str | None, turn: int | None, sent: Sent
    ) -> AgentView:
        """Make an agent that has the first turns of another: all of them, unless `turn` says.

        Raises:
            UnknownAgent, AgentExists, InvalidRequest, UnknownModel: as they say.
        """
        source = await self._book.row(agent_id)
        num_turns = source.num_turns if turn is None else turn
        if num_turns > source.num_turns:
            refuse("turn", f"is {num_turns}, but the agent has {source.num_turns} turns.")
        row = await self._new_row(
            _key_of(owner(agent_id), copy_id), convert.config_of(sent, source.config)
        )
        is_new = await self._book.add(
            lambda connection: agent_rows.fork(
                connection, source.session, self._used(row), num_turns
            ),
            source.num_bytes + len(row.config),
            agent_id,
        )
        if not is_new:
            raise _exists(row.id)
        ends = await self._book.read(lambda c: agent_rows.num_tokens(c, row.session))
        await self._kv.branch(source.session, row.session, ends)
        return await self.view(row.id)

    async def history(self, agent_id: str, page: Page) -> HistoryPage:
        """A page of an agent's turns, shorter where these are long. Raises UnknownAgent."""
        row = await self._book.row(agent_id)
        page = page._replace(most_bytes=PAGE_BYTES)
        found = await self._book.read(lambda c: agent_rows.turns(c, row.session, page))
        views = await apart(
            sum(len(body) for turn in found for body in turn.bodies),
            lambda: [convert.turn_view(turn) for turn in found],
        )
        end = 1 if page.is_newest_first else row.num_turns
        return HistoryPage(views, has_more=bool(found) and found[-1].number != end)

    # Rows and views

    def _used(self, row: AgentRow) -> AgentRow:
        """The row as of now, in the transaction that it is written in."""
        return row._replace(last_used_s=self._book.now_s())

    async def _new_row(self, agent_id: str, config: bytes) -> AgentRow:
        """Raises InvalidRequest, UnknownModel where an agent of this config could not generate."""
        chat = await apart(len(config), lambda: convert.probe_of(config))
        spec, settings = self._gate.spec(chat.model), self._settings
        await apart(len(config), lambda: chat_to_generate(chat, "probe", spec, settings))
        row = AgentRow(agent_id, new_session(agent_id), config, time.time(), last_used_s=0.0)
        return await apart(len(config), lambda: _described(row))

    async def _view(self, row: AgentRow) -> AgentView:
        kv = await self._kv.views([row.session])
        config = await apart(len(row.config), lambda: convert.read_shown(row.config))
        view = self._seen(row, kv[row.session], config)
        view.config = await apart(len(row.config), lambda: convert.shown_config(row.config))
        return view

    def _seen(self, row: AgentRow, kv: list[KvView], config: ShownConfig) -> AgentView:
        model = self._model(config.model)
        current = next((one for one in kv if one.model == model), KvView(model, "none", 0))
        ttl_s = row.ttl_s or self._settings.history_ttl_s
        used_s = self._book.wall_s(row.last_used_s)
        return AgentView(
            id=plain(row.id),
            agent_id=plain(row.id),
            name=config.name,
            model=model,
            status=current.status,
            tokens=current.tokens,
            context_tokens=current.tokens,
            turns=row.num_turns,
            bytes=row.num_bytes,
            created_at=row.created_s,
            last_used_at=used_s,
            last_accessed=convert.utc(used_s),
            ttl=ttl_s,
            expires_at=None if row.is_pinned else used_s + ttl_s,
            pinned=row.is_pinned,
            queued=self._locks.num_places(row.id),
            session=row.session,
            models=kv,
            max_context=config.max_context,
            metadata=config.metadata if bytes(config.metadata) else None,
        )

    def _model(self, name: str | None) -> str:
        """The model an agent would use; the name it was given where there is none of it now."""
        try:
            return self._gate.spec(name).id
        except UnknownModel:
            return name or ""


class Agents(NamedTuple):
    """What the handlers need. `activity` is of a tenant's agents, or of all."""

    desk: AgentService
    generates: Generates
    activity: Callable[[str], AgentActivity]


def open_agents(gate: Gate, cache: KvAccess, history: History) -> tuple[Agents, ExpiryJob]:
    """The agents of a server, and who tidies up after them."""
    settings = gate.settings
    book = AgentRepository(history, settings.history_max_bytes)
    locks = AgentLocks(settings.max_queue)
    kv = AgentKv(cache)
    desk = AgentService(gate, book, locks, kv)
    agents = Agents(desk, Generates(gate, book, locks), locks.activity)
    return agents, ExpiryJob(book, kv, settings)


def _described(row: AgentRow) -> AgentRow:
    """The row with what its config says of lifetime and pin."""
    config = convert.read_config(row.config)
    return row._replace(ttl_s=config.ttl, is_pinned=bool(config.pinned))


def _key_of(tenant: str, agent_id: str | None) -> str:
    return owned(tenant, agent_id or f"agent-{secrets.token_hex(12)}")


def _exists(agent_id: str) -> AgentExists:
    return AgentExists(f"There is an agent {plain(agent_id)!r} already: choose another id.", "id")
