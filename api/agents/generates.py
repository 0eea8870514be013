"""`Generates`: what an agent is asked, planned from its history and kept in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from api.agents import convert
from api.agents.book import AgentBook, unknown
from api.agents.convert import Sent
from api.agents.lanes import Lanes
from api.agents.turns import AgentTurn, Plan, Steps
from api.answer import Answer
from api.deps import Gate
from api.draft import Draft
from api.images import check_images
from api.lineage import Caller
from api.openai.convert import chat_to_generate
from runtime.errors import AgentChanged, Overloaded, TurnConflict
from runtime.types import CacheParams, ChatPrompt, GenerateRequest
from store import agent_rows
from store.agent_rows import AgentRow, TurnRow

PINNED_TTL_S = 366 * 86_400.0


class Wish(NamedTuple):
    """A generate as it was asked for. `submit` hands the finished request to the engine."""

    request_id: str
    sent: Sent
    expected_turn: int | None
    caller: Caller
    submit: Callable[[GenerateRequest], Answer]


class Generates:
    """One agent's are done one after the other. Belongs to the event loop."""

    def __init__(self, gate: Gate, book: AgentBook, lanes: Lanes) -> None:
        self._gate = gate
        self._settings = gate.settings
        self._book = book
        self._lanes = lanes

    def begin(self, agent_id: str, wish: Wish) -> AgentTurn:
        """Take the next place in the agent's lane. The turn must be closed.

        Raises:
            Overloaded: too many wait for this agent.
        """
        if self._lanes.is_full(agent_id):
            raise Overloaded("Too many requests wait for this agent.")
        steps = Steps(lambda: self._plan(agent_id, wish), wish.submit, self._keep)
        return AgentTurn(self._lanes, agent_id, steps, self._settings.request_deadline_s)

    async def _plan(self, agent_id: str, wish: Wish) -> Plan:
        def look(connection: Connection) -> tuple[AgentRow | None, list[bytes]]:
            row = agent_rows.get(connection, agent_id)
            return row, agent_rows.bodies(connection, row.session) if row is not None else []

        row, bodies = await self._book.read(look)
        if row is None:
            raise unknown(agent_id)
        _check_turn(wish.expected_turn, row.num_turns)
        chat = convert.chat_of(row.config, wish.sent)
        spec = self._gate.spec(chat.model)
        request = chat_to_generate(chat, wish.request_id, spec, self._settings, wish.caller)
        system = convert.read_config(row.config).system
        history = [convert.unpacked(body) for body in bodies]
        request, new_messages = convert.with_history(request, system, history)
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt), "a chat request has a chat prompt"
        check_images(prompt.messages, spec, self._settings)
        cache = CacheParams(
            mode=chat.cache_mode or "full",
            ttl_s=PINNED_TTL_S if row.is_pinned else row.ttl_s,
            session_id=row.session,
            tenant=wish.caller.tenant,
        )
        return Plan(
            agent_id=agent_id,
            session=row.session,
            base=row.num_turns,
            model=chat.model or spec.id,
            new_messages=new_messages,
            request=msgspec.structs.replace(request, cache=cache),
        )

    async def _keep(self, plan: Plan, draft: Draft) -> None:
        """The turn enters the history, whole.

        Raises:
            AgentChanged: the agent was deleted or reset meanwhile.
        """
        finished = draft.finished
        assert finished is not None, "only a whole answer is kept"
        prompt = plan.request.prompt
        assert isinstance(prompt, ChatPrompt), "a chat request has a chat prompt"
        messages = convert.turn_of(prompt, plan.new_messages, draft)
        turn = TurnRow(
            number=plan.base + 1,
            request_id=plan.request.request_id,
            model=plan.request.model,
            finish_reason=finished.reason,
            num_prompt_tokens=finished.usage.num_prompt_tokens,
            num_cached_tokens=finished.usage.num_cached_tokens,
            num_output_tokens=finished.usage.num_output_tokens,
            created_s=time.time(),
            bodies=tuple(convert.packed(message) for message in messages),
        )
        base = await self._book.add(
            lambda connection: agent_rows.append(connection, plan.session, turn),
            sum(map(len, turn.bodies)),
            plan.agent_id,
        )
        if base != plan.base:
            raise AgentChanged("The agent was changed meanwhile; this answer was not kept.")


def _check_turn(expected: int | None, found: int) -> None:
    if expected is not None and expected != found:
        raise TurnConflict(
            f"expected_turn is {expected}, but the agent has {found} turns. "
            "Read its history and ask again.",
            "expected_turn",
        )
