"""`Generates`: what an agent is asked, planned from its history and kept in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from api.agents import convert
from api.agents.convert import Sent
from api.agents.locks import AgentLocks
from api.agents.repository import AgentRepository
from api.agents.turn import AgentTurn, Steps, TurnPlan
from api.http.answer import Answer
from api.http.body import apart
from api.http.caller import Caller
from api.http.draft import Draft
from api.http.gate import Gate
from api.http.images import shown_images
from api.http.refusal import refuse
from api.http.unused import listed
from api.openai.convert import chat_to_generate
from api.openai.schemas import ChatRequest
from api.openai.tools import form_of, unserved_tools
from runtime.config.settings import Settings
from runtime.errors import AgentChanged, Overloaded, TurnConflict
from runtime.prompt.continuation import begun
from runtime.types import CacheParams, ChatPrompt, GenerateRequest, Message, ModelSpec
from store.history import agent_rows
from store.history.agent_rows import AgentRow, Page, TurnRow

PINNED_TTL_S = 366 * 86_400.0


class GenerateJob(NamedTuple):
    """A generate as it was asked for. `submit` hands the finished request to the engine; what is
    only planned has none.
    """

    request_id: str
    sent: Sent
    expected_turn: int | None
    has_messages: bool
    caller: Caller
    submit: Callable[[GenerateRequest], Answer] | None = None


class Generates:
    """One agent's are done one after the other. Belongs to the event loop."""

    def __init__(self, gate: Gate, book: AgentRepository, locks: AgentLocks) -> None:
        self._gate = gate
        self._settings = gate.settings
        self._book = book
        self._locks = locks

    def begin(self, agent_id: str, wish: GenerateJob) -> AgentTurn:
        """Take the next place in the agent's queue. The turn must be closed.

        Raises:
            Overloaded: too many wait for this agent.
        """
        assert wish.submit is not None
        if self._locks.is_full(agent_id):
            raise Overloaded("Too many requests wait for this agent.")
        steps = Steps(lambda: self.plan(agent_id, wish), wish.submit, self._keep)
        return AgentTurn(self._locks, agent_id, steps, self._settings.deadline_s)

    async def plan(self, agent_id: str, wish: GenerateJob) -> TurnPlan:
        """What the engine is asked. Raises UnknownAgent and what `chat_to_generate` does."""
        found = await self._book.read(lambda c: _found(c, agent_id, has_last=not wish.has_messages))
        if found is None:
            raise self._book.unknown(agent_id)
        row = found.row
        _check_turn(wish.expected_turn, row.num_turns)
        num_bytes = len(row.config) + sum(map(len, (*found.bodies, *wish.sent.given.values())))
        chat = await apart(num_bytes, lambda: convert.chat_of(row.config, wish.sent))
        spec = self._gate.spec(chat.model)
        request, new_messages, history = await apart(
            num_bytes, lambda: _converted(chat, spec, self._settings, wish, found)
        )
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt), "a chat request has a chat prompt"
        cut = found.last if begun(prompt) is not None else None
        if cut is not None:
            new_messages = tuple(history[-len(cut.bodies) :])
        cache = CacheParams(
            mode=chat.cache_mode or "full",
            ttl_s=_kv_ttl_s(row),
            session_id=row.session,
            pause_s=chat.tool_pause_s,
            is_last=bool(chat.release),
            tenant=wish.caller.tenant,
        )
        return TurnPlan(
            agent_id=agent_id,
            session=row.session,
            base=row.num_turns if cut is None else cut.number - 1,
            model=chat.model or spec.id,
            new_messages=new_messages,
            request=msgspec.structs.replace(request, cache=cache, work="generate"),
            cut=cut,
            form=form_of(chat),
            ignored=(*wish.sent.unused, *unserved_tools(chat)),
        )

    async def _keep(self, plan: TurnPlan, draft: Draft) -> None:
        """The turn enters the history, whole.

        Raises:
            AgentChanged: the agent was deleted or reset meanwhile.
        """
        finished = draft.finished
        assert finished is not None, "only a whole answer is kept"
        prompt = plan.request.prompt
        assert isinstance(prompt, ChatPrompt), "a chat request has a chat prompt"
        bodies = await asyncio.to_thread(
            lambda: tuple(map(convert.packed, convert.turn_of(prompt, plan.new_messages, draft)))
        )
        turn = TurnRow(
            number=plan.base + 1,
            request_id=plan.request.request_id,
            model=plan.request.model,
            finish_reason=finished.reason,
            num_prompt_tokens=finished.usage.num_prompt_tokens,
            num_cached_tokens=finished.usage.num_cached_tokens,
            num_output_tokens=finished.usage.num_output_tokens,
            created_s=time.time(),
            bodies=bodies,
        )
        cut = plan.cut
        if cut is not None and cut.model == turn.model:
            turn = turn._replace(
                num_prompt_tokens=cut.num_prompt_tokens,
                num_cached_tokens=cut.num_cached_tokens,
                num_output_tokens=cut.num_output_tokens + turn.num_output_tokens,
            )

        def work(connection: Connection) -> bool:
            now_s = self._book.now_s()
            if cut is not None:
                return agent_rows.replace(connection, plan.session, turn, cut.request_id, now_s)
            return agent_rows.append(connection, plan.session, turn, now_s) == plan.base

        num_bytes = sum(map(len, turn.bodies))
        if not await self._book.add(work, num_bytes, plan.agent_id):
            raise AgentChanged("The agent was changed meanwhile; this answer was not kept.")


class _Found(NamedTuple):
    """An agent, all of its messages, and its last turn if that was asked for and there is one."""

    row: AgentRow
    bodies: list[bytes]
    last: TurnRow | None


def _found(connection: Connection, agent_id: str, *, has_last: bool) -> _Found | None:
    row = agent_rows.get(connection, agent_id)
    if row is None:
        return None
    page = Page(limit=int(has_last), is_newest_first=True)
    last = next(iter(agent_rows.turns(connection, row.session, page)), None)
    return _Found(row, agent_rows.bodies(connection, row.session), last)


def _converted(
    chat: ChatRequest, spec: ModelSpec, settings: Settings, wish: GenerateJob, found: _Found
) -> tuple[GenerateRequest, tuple[Message, ...], list[Message]]:
    """The request with all that was said before, its new messages, and what was said before."""
    request = chat_to_generate(
        chat, wish.request_id, spec, settings, wish.caller, needs_messages=False
    )
    system = convert.read_config(found.row.config).system
    history = [convert.unpacked(body) for body in found.bodies]
    if not wish.has_messages:
        _check_rest(history)
    request, new_messages = convert.with_history(request, system, history)
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt), "a chat request has a chat prompt"
    ignored: list[str] = []
    messages = shown_images(prompt.messages, spec, settings, ignored)
    request = msgspec.structs.replace(
        request,
        prompt=msgspec.structs.replace(prompt, messages=messages),
        ignored=(*request.ignored, *listed(iter(ignored))),
    )
    return request, new_messages, history


def _kv_ttl_s(row: AgentRow) -> float | None:
    """How long the agent's KV stays on disk: 0.0 where it is to be in memory only."""
    if convert.read_config(row.config).persist is False:
        return 0.0
    return PINNED_TTL_S if row.is_pinned else row.ttl_s


def _check_rest(history: Sequence[Message]) -> None:
    """Without new messages there must be an answer that can be gone on with."""
    if not history:
        refuse("messages", "must not be empty: the agent has no answer yet to go on with.")
    if history[-1].tool_calls:
        refuse("messages", "must not be empty: the last answer called tools, send their results.")


def _check_turn(expected: int | None, found: int) -> None:
    if expected is not None and expected != found:
        raise TurnConflict(
            f"expected_turn is {expected}, but the agent has {found} turns. "
            "Read its history and ask again.",
            "expected_turn",
        )
