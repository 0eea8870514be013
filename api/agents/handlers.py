"""`/v1/agents`: histories on the server, to which clients send new messages only."""

from __future__ import annotations

from functools import partial
from typing import Literal

from litestar import Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from api.agents import convert
from api.agents.convert import Sent, sent_fields
from api.agents.generate import GenerateJob
from api.agents.schemas import (
    AgentCompletion,
    AgentCreate,
    AgentDeleted,
    AgentFork,
    AgentGenerate,
    AgentList,
    AgentMark,
    AgentView,
    HistoryPage,
)
from api.agents.service import Agents
from api.agents.stream import AgentStream
from api.http.answer import Answer
from api.http.body import HttpRequest
from api.http.cache_header import cache_header
from api.http.caller import asker_of, tenant_of
from api.http.errors import documented
from api.http.gate import Gate
from api.http.hearth_info import hearth_of, ignored_info
from api.http.refusal import refuse
from api.http.sse import EventStream, open_stream, whole
from api.openai.frame import FINGERPRINT, CompletionEnvelope, usage_of
from runtime.keys import owned
from runtime.types import GenerateRequest
from store.history.agent_rows import Page

MAX_PAGE = 1000
TAGS = ["Agents"]


@post("/v1/agents", status_code=201, tags=TAGS)
async def create_agent(
    data: JSONBody[AgentCreate], request: HttpRequest, agents: NamedDependency[Agents]
) -> AgentView:
    """Make an agent."""
    body = await request.body()
    sent = await request.apart(lambda: sent_fields(body, AgentCreate))
    return _told(
        await agents.desk.create(tenant_of(request.scope), convert.wanted_id(data), sent), sent
    )


@get("/v1/agents", tags=TAGS)
async def list_agents(
    request: HttpRequest,
    agents: NamedDependency[Agents],
    after: FromQuery[str | None] = None,
    limit: FromQuery[int] = 20,
) -> AgentList:
    """Agents, the newest first, each with the state of its KV."""
    return await agents.desk.listing(tenant_of(request.scope), after, _checked(limit))


@get("/v1/agents/{agent_id:str}", tags=TAGS)
async def get_agent(
    agent_id: FromPath[str], request: HttpRequest, agents: NamedDependency[Agents]
) -> AgentView:
    """One agent."""
    return await agents.desk.view(_mine(request, agent_id))


@patch("/v1/agents/{agent_id:str}", tags=TAGS)
async def change_agent(
    agent_id: FromPath[str],
    data: JSONBody[AgentCreate],
    request: HttpRequest,
    agents: NamedDependency[Agents],
) -> AgentView:
    """Change the fields that are sent; null takes one away. What runs goes on as it began."""
    if convert.wanted_id(data) not in (None, agent_id):
        refuse("id", "cannot be changed: fork the agent, the copy has the id that is sent there.")
    body = await request.body()
    sent = await request.apart(lambda: sent_fields(body, AgentCreate))
    return _told(await agents.desk.change(_mine(request, agent_id), sent), sent)


@delete("/v1/agents/{agent_id:str}", status_code=200, tags=TAGS)
async def delete_agent(
    agent_id: FromPath[str], request: HttpRequest, agents: NamedDependency[Agents]
) -> AgentDeleted:
    """Delete an agent with its history and its KV. What runs or waits for it ends with 404."""
    return await agents.desk.remove(_mine(request, agent_id))


@post("/v1/agents/{agent_id:str}/reset", status_code=200, tags=TAGS)
async def reset_agent(
    agent_id: FromPath[str], request: HttpRequest, agents: NamedDependency[Agents]
) -> AgentView:
    """Delete an agent's history and KV, keep the agent. What runs or waits ends with 409."""
    return await agents.desk.reset(_mine(request, agent_id))


@post("/v1/agents/{agent_id:str}/fork", status_code=201, tags=TAGS)
async def fork_agent(
    agent_id: FromPath[str],
    data: JSONBody[AgentFork],
    request: HttpRequest,
    agents: NamedDependency[Agents],
) -> AgentView:
    """Make another agent with this one's turns, or its first `turn` of them."""
    body = await request.body()
    sent = await request.apart(lambda: sent_fields(body, AgentFork))
    fork = await agents.desk.fork(
        _mine(request, agent_id), convert.wanted_id(data), data.turn, sent
    )
    return _told(fork, sent)


@get("/v1/agents/{agent_id:str}/history", tags=TAGS)
async def agent_history(
    agent_id: FromPath[str],
    request: HttpRequest,
    agents: NamedDependency[Agents],
    after: FromQuery[int | None] = None,
    limit: FromQuery[int] = 20,
    order: FromQuery[Literal["asc", "desc"]] = "asc",
) -> HistoryPage:
    """An agent's turns, a page at a time."""
    page = Page(after, _checked(limit), is_newest_first=order == "desc")
    return await agents.desk.history(_mine(request, agent_id), page)


@post(
    ["/v1/agents/{agent_id:str}/generate", "/v1/agents/{agent_id:str}/chat/completions"],
    status_code=200,
    tags=TAGS,
    responses=documented(AgentCompletion),
)
async def generate(
    agent_id: FromPath[str],
    data: JSONBody[AgentGenerate],
    request: HttpRequest,
    agents: NamedDependency[Agents],
    gate: NamedDependency[Gate],
) -> Response[AgentCompletion] | EventStream:
    """Answer new messages and keep both; with `stream`, as server-sent events.

    Without messages the last answer is gone on with, as after one that was cut off.
    The second path is for OpenAI's clients: the agent's own is their base URL.
    """
    frame, body = CompletionEnvelope("agentcmpl", ""), await request.body()
    sent = await request.apart(lambda: sent_fields(body, AgentGenerate))
    turn = agents.generates.begin(
        _mine(request, agent_id),
        GenerateJob(
            request_id=frame.id,
            sent=sent,
            expected_turn=data.expected_turn,
            has_messages=bool(data.messages),
            caller=asker_of(request),
            submit=partial(_submit, gate, request),
        ),
    )
    if data.stream:
        has_usage = data.stream_options is not None and bool(data.stream_options.include_usage)
        stream = AgentStream(turn, frame, has_usage=has_usage)
        return await open_stream(request, turn, stream, gate.settings.keep_alive_s)
    await whole(request, turn, lambda _: None)
    tally = turn.answer.tally
    return Response(
        AgentCompletion(
            id=frame.id,
            created=frame.created,
            model=turn.plan.model,
            choices=[convert.choice_of(turn.draft)],
            usage=usage_of(tally),
            system_fingerprint=FINGERPRINT,
            hearth=hearth_of(tally),
            agent=AgentMark(agent_id, turn.plan.base + 1),
        ),
        headers=cache_header(tally.least_cached),
    )


def _told(view: AgentView, sent: Sent) -> AgentView:
    """The agent, and what had no effect on it."""
    view.hearth = ignored_info(sent.unused)
    return view


def _mine(request: HttpRequest, agent_id: str) -> str:
    return owned(tenant_of(request.scope), agent_id)


def _submit(gate: Gate, request: HttpRequest, wanted: GenerateRequest) -> Answer:
    return gate.submit(request.scope, [wanted])


def _checked(limit: int) -> int:
    if not 1 <= limit <= MAX_PAGE:
        refuse("limit", f"is {limit}: it must be from 1 to {MAX_PAGE}.")
    return limit


GENERATING = [generate]
KEEPING = [
    create_agent,
    list_agents,
    get_agent,
    change_agent,
    delete_agent,
    reset_agent,
    fork_agent,
    agent_history,
]
