"""`/admin/prompt/explain`: a request's prompt as its model reads it. For operators only.

The prompt is in the answer and nowhere else: no log has any of it.
"""

from __future__ import annotations

import secrets

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.params import FromQuery
from msgspec import UNSET, UnsetType

from api.admin.cache import operator_only
from api.agents.convert import sent_fields
from api.agents.generate import GenerateJob
from api.agents.schemas import AgentGenerate
from api.agents.service import Agents
from api.http.body import HttpRequest, decoded, decoded_at
from api.http.caller import Caller
from api.http.gate import Gate
from api.http.hearth_info import IgnoredInfo, ignored_info
from api.http.refusal import refuse
from api.http.sse import whole
from api.prewarm import (
    PROMPT_FIELDS,
    Fields,
    named_model,
    prompt_of,
    response_of,
    spoken,
    unused_of,
)
from api.responses.service import ResponseService
from runtime.keys import owned
from runtime.types import Chunk, Explained, Finished, GenerateRequest


class PartView(msgspec.Struct):
    """A piece of the prompt, the places of the request that it is made of, and what touched it."""

    sources: list[str]
    num_tokens: int
    rules: list[str]
    text: str


class RewriteView(msgspec.Struct):
    """A rule, and how many of the request's messages or tools it did not leave alone."""

    rule: str
    num_places: int


class ExplainedView(msgspec.Struct):
    """A prompt as the model reads it: `parts`, which are all of its `tokens` in their order."""

    model: str
    parts: list[PartView]
    rewrites: list[RewriteView]
    tokens: list[int]
    hearth: IgnoredInfo | UnsetType = UNSET


@post("/admin/prompt/explain", tags=["Admin"], guards=[operator_only], status_code=200)
async def explain_prompt(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    agents: NamedDependency[Agents],
    responses: NamedDependency[ResponseService],
    client: FromQuery[str] = "",
    tenant: FromQuery[str] = "",
) -> ExplainedView:
    """The body of a request of any protocol; with an `agent_id`, that of one to an agent.

    It is read as if that `client` (its family, such as `claude-code`) of that `tenant` had sent it.
    """
    caller = Caller(client, None, tenant)
    body = await request.body()
    fields = await request.apart(lambda: decoded(body, Fields))
    unused: list[str] = []
    if "agent_id" in fields:
        unused = await request.unused_fields(AgentGenerate, also={"agent_id"})
        agent = decoded_at(fields["agent_id"], str, "agent_id")
        wish = await request.apart(lambda: _wish_of(body, caller))
        asked = (await agents.generates.plan(owned(caller.tenant, agent), wish)).request
    elif not fields.keys() & (PROMPT_FIELDS | {"previous_response_id"}):
        refuse("messages", "is missing: send the body of a chat, in the shape of any API.")
    else:
        spec = gate.spec(named_model(fields))
        unused = await request.apart(lambda: unused_of(spoken(fields)))
        if fields.keys() & {"input", "previous_response_id"}:
            asked = await response_of(request, fields, spec, gate.settings, caller, responses)
        else:
            asked = await request.apart(lambda: prompt_of(fields, spec, gate.settings, caller))
    asked = msgspec.structs.replace(
        asked, request_id=f"explain-{secrets.token_hex(12)}", work="explain", num_choices=1
    )
    view = await _explained(request, gate, asked)
    view.hearth = ignored_info(unused)
    return view


def _wish_of(body: bytes, caller: Caller) -> GenerateJob:
    data = decoded(body, AgentGenerate)
    return GenerateJob(
        request_id="",
        sent=sent_fields(body, AgentGenerate),
        expected_turn=data.expected_turn,
        has_messages=bool(data.messages),
        caller=caller,
    )


async def _explained(request: HttpRequest, gate: Gate, asked: GenerateRequest) -> ExplainedView:
    view = ExplainedView(asked.model, [], [], [])

    def take(chunk: Chunk) -> None:
        if isinstance(chunk, Explained):
            view.tokens = list(chunk.token_ids)
            view.parts = [
                PartView(list(one.sources), one.num_tokens, list(one.rules), one.text)
                for one in chunk.parts
            ]
        elif isinstance(chunk, Finished):
            changes = chunk.usage.prompt_changes
            view.rewrites = [RewriteView(one.rule, one.num_places) for one in changes]

    await whole(request, gate.submit(request.scope, [asked]), take)
    return view


HANDLERS = [explain_prompt]
