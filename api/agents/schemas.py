"""What is sent to and from `/v1/agents`. Unknown fields are ignored, null means not given."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.http.hearth_info import IgnoredInfo
from api.openai.fields import Body, Raws
from api.openai.schemas import CalledTool, ChatCompletion, ChatMessage, ChatRequest

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$(?!\n)"
"""In Python `$` alone also matches before a last line break."""
AgentId = Annotated[str, Meta(pattern=ID_PATTERN)]
KvStatus = Literal["hot", "warm", "cold", "none"]


class AgentConfig(ChatRequest, kw_only=True):
    """What an agent is: fields of a chat request that count wherever a generate does not say.

    `ttl` is how many seconds it is kept unused, history and KV; a pinned agent is kept for ever.
    `system_prompt` is another name of `system`. With `persist: false` the KV is kept in memory
    only; the history is on disk all the same. Messages, `stream` and `n` are of a generate and have
    no effect here.
    """

    messages: list[ChatMessage] = msgspec.field(default_factory=list[ChatMessage])
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    system: str | None = None
    system_prompt: str | None = None
    persist: bool | None = None
    ttl: Annotated[float, Meta(gt=0, le=366 * 86_400)] | None = None
    pinned: bool | None = None
    metadata: Raws | None = None


class AgentCreate(AgentConfig, kw_only=True):
    """The body of `POST /v1/agents`. Without an `id`, or `agent_id`, the server makes one."""

    id: AgentId | None = None
    agent_id: AgentId | None = None


class AgentGenerate(ChatRequest, kw_only=True):
    """The body of `POST /v1/agents/{id}/generate`: new messages only, and what is to differ.

    Without any the last answer is gone on with, and its turn becomes longer. With `expected_turn`
    it is refused unless the agent has that many turns when it begins.
    """

    messages: list[ChatMessage] = msgspec.field(default_factory=list[ChatMessage])
    expected_turn: Annotated[int, Meta(ge=0)] | None = None


class AgentFork(AgentConfig, kw_only=True):
    """The body of `POST /v1/agents/{id}/fork`: the copy's id, its first turns, what differs."""

    id: AgentId | None = None
    agent_id: AgentId | None = None
    turn: Annotated[int, Meta(ge=0)] | None = None


class KvView(Body):
    """An agent's KV with one model: where the slowest of it is. Times are Unix seconds.

    The first `durable_tokens` of its `tokens` are on disk: no crash loses them.
    """

    model: str
    status: KvStatus
    tokens: int
    durable_tokens: int = 0
    disk_bytes: int = 0
    last_used_at: float | None = None


class AgentView(Body):
    """An agent. `status` and `tokens` are of its KV with the model it would use next. `agent_id`,
    `context_tokens` and `last_accessed` (in UTC) are other names of `id`, `tokens` and
    `last_used_at`, here and in brief.

    `models` lists its KV with every model; `session` names it to `hearth cache`. `expires_at` is
    null when it is pinned; `queued` counts generates that run or wait. `max_context` is how many
    tokens it may have if that is less than the model's context, null where it was not given.
    `config` is what it was made with and is not in listings. `hearth` is there when something that
    was sent was ignored.
    """

    id: str
    agent_id: str
    name: str | None
    model: str
    status: KvStatus
    tokens: int
    context_tokens: int
    turns: int
    bytes: int
    created_at: float
    last_used_at: float
    last_accessed: datetime
    ttl: float
    expires_at: float | None
    pinned: bool
    queued: int
    session: str
    models: list[KvView]
    max_context: int | None = None
    metadata: msgspec.Raw | None = None
    config: Raws | UnsetType = UNSET
    hearth: IgnoredInfo | UnsetType = UNSET
    object: Literal["agent"] = "agent"


class AgentSummary(Body):
    """An agent in brief, with the names of an `AgentView`."""

    id: str
    agent_id: str
    model: str
    status: KvStatus
    tokens: int
    context_tokens: int
    last_used_at: float
    last_accessed: datetime


class AgentList(Body):
    """Agents, the newest first; the next page begins `after` the last id.

    `agents` are those of `data`, in brief.
    """

    data: list[AgentView]
    agents: list[AgentSummary]
    has_more: bool
    object: Literal["list"] = "list"


class AgentDeleted(Body):
    """`kv` is `pending` when the store or a worker cannot do it now; the server does it later."""

    id: str
    kv: Literal["deleted", "pending"]
    deleted: Literal[True] = True
    object: Literal["agent.deleted"] = "agent.deleted"


class HistoryMessage(Body):
    """A message as it was sent, or generated: reasoning and arguments to the letter."""

    role: str
    content: str | list[Raws]
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class TurnUsage(Body):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class TurnView(Body):
    """One generate: what was sent, then the answer."""

    turn: int
    request_id: str
    model: str
    created_at: float
    finish_reason: str
    usage: TurnUsage
    messages: list[HistoryMessage]


class HistoryPage(Body):
    """Turns in order; the next page begins `after` the last of them."""

    data: list[TurnView]
    has_more: bool
    object: Literal["list"] = "list"


class AgentMark(Body):
    """Which turn of which agent an answer became."""

    id: str
    turn: int


class AgentCompletion(ChatCompletion, kw_only=True):
    """A chat completion that is in the agent's history."""

    agent: AgentMark
