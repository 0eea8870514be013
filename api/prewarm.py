"""`/v1/prewarm`: announce a prompt, in any protocol's shape, so that it is warm when it is sent."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import structlog
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from api.agents.open import Agents
from api.anthropic.convert import Door, messages_to_generate
from api.anthropic.schemas import MessagesRequest
from api.body import HttpRequest, decoded, decoded_at
from api.deps import Gate
from api.errors import documented
from api.limits import bounds_of, check_size, narrowed
from api.lineage import Caller, asker_of, tenant_of
from api.openai.convert import chat_to_generate
from api.openai.response_convert import check, items_of, plan_of
from api.openai.response_desk import ResponseDesk
from api.openai.response_schemas import ResponseRequest
from api.openai.schemas import ChatRequest
from api.refusal import refuse
from runtime.catalog import Catalog
from runtime.errors import HearthError, UnknownPrewarm
from runtime.keys import owned, plain
from runtime.prewarm import Prewarm, State, Warming
from runtime.settings import PrewarmSettings, Settings
from runtime.types import ChatPrompt, GenerateRequest, ModelSpec

T = TypeVar("T")

Shape = Literal["chat", "messages", "responses"]
Fields = dict[str, msgspec.Raw]

_OPENING = msgspec.Raw(b'[{"role":"user","content":"."}]')
_ANTHROPIC_TOOL = b'"input_schema"'
_STATES: dict[State, str] = {
    "waiting": "It is warmed when its model is loaded and nothing else is to be done.",
    "queued": "It is warmed when nothing else is to be done.",
    "running": "It is being computed, or read from disk.",
    "completed": "It is in memory.",
    "failed": "It is not warmed; a request computes it as usual.",
    "cancelled": "It is not warmed.",
}
log = structlog.stdlib.get_logger("hearth.prewarm")


class _Spoken(msgspec.Struct):
    """Of a message, who says it."""

    role: object = None


class PrewarmOptions(msgspec.Struct):
    """What the body says beside the prompt. `load` has a model loaded that is not."""

    model: str | None = None
    session_id: str | None = None
    agent_id: str | None = None
    pinned: bool | None = None
    load: bool | None = None
    ttl: float | None = None


class PrewarmView(msgspec.Struct, omit_defaults=True):
    """What becomes of an announced prompt; counts are known when it is warm."""

    id: str
    model: str
    status: State
    message: str
    object: Literal["prewarm"] = msgspec.field(default="prewarm")
    pinned: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tier: str | None = None
    elapsed_ms: float | None = None
    error: str | None = None


@post("/v1/prewarm", status_code=202, tags=["Hearth"], responses=documented(PrewarmView))
async def announce(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    prewarm: NamedDependency[Prewarm],
    responses: NamedDependency[ResponseDesk],
    agents: NamedDependency[Agents],
) -> Response[PrewarmView]:
    """Have a prompt warm soon: tools and system alone, or with messages, or what went before."""
    fields, options = _read(await request.body())
    caller = asker_of(request)
    if options.agent_id is not None:
        agent = await agents.desk.kept(owned(caller.tenant, options.agent_id))
        return _answer(await _bring(gate, agent.session, gate.spec(options.model or agent.model)))
    spec = gate.spec(options.model)
    if "previous_response_id" in fields or shape_of(fields) == "responses":
        generate = await _of_response(fields, spec, gate.settings, caller, responses)
    elif not fields.keys() & {"messages", "system", "tools"}:
        if options.session_id is None:
            refuse(
                "messages", "is missing: send messages, system, tools, a session_id or an agent_id."
            )
        return _answer(await _bring(gate, owned(caller.tenant, options.session_id), spec))
    else:
        generate = prompt_of(fields, spec, gate.settings, caller)
    if options.pinned and options.ttl is not None:
        refuse("ttl", "excludes pinned: what is pinned stays until it is deleted.")
    cache = msgspec.structs.replace(generate.cache, pin="" if options.pinned else None)
    generate = msgspec.structs.replace(generate, cache=cache)
    generate = narrowed(generate, bounds_of(request.scope).limits)
    check_size(generate)
    return _answer(view_of(prewarm.ask(generate, loads=bool(options.load))))


@get("/v1/prewarm/{prewarm_id:str}", tags=["Hearth"])
async def prewarm_state(
    prewarm_id: FromPath[str], request: HttpRequest, prewarm: NamedDependency[Prewarm]
) -> PrewarmView:
    """How far it is."""
    warming = prewarm.find(owned(tenant_of(request.scope), prewarm_id))
    if warming is None:
        raise UnknownPrewarm(prewarm_id)
    return view_of(warming)


@delete("/v1/prewarm/{prewarm_id:str}", status_code=204, tags=["Hearth"])
async def prewarm_cancelled(
    prewarm_id: FromPath[str], request: HttpRequest, prewarm: NamedDependency[Prewarm]
) -> None:
    """Warm it no more and take its pin back, also one from before a restart."""
    if not await prewarm.cancel(owned(tenant_of(request.scope), prewarm_id)):
        raise UnknownPrewarm(prewarm_id)


HANDLERS = [announce, prewarm_state, prewarm_cancelled]


def view_of(warming: Warming) -> PrewarmView:
    """What clients are told of it."""
    return PrewarmView(
        id=plain(warming.id),
        model=warming.model,
        status=warming.state,
        message=_STATES[warming.state],
        pinned=warming.request.cache.pin is not None,
        prompt_tokens=warming.num_tokens,
        cached_tokens=warming.num_cached_tokens,
        tier=warming.tier,
        elapsed_ms=warming.elapsed_ms,
        error=warming.error,
    )


def shape_of(fields: Mapping[str, msgspec.Raw]) -> Shape:
    """Whose request it looks like."""
    if fields.keys() & {"input", "instructions", "previous_response_id"}:
        return "responses"
    tools = bytes(fields.get("tools", b""))
    return "messages" if "system" in fields or _ANTHROPIC_TOOL in tools else "chat"


def prompt_of(
    fields: Fields, spec: ModelSpec, settings: Settings, caller: Caller
) -> GenerateRequest:
    """The request of these fields; without a turn of the user only its prefix is kept.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    fields = {name: raw for name, raw in fields.items() if name not in ("stream", "ttl", "pinned")}
    fields["model"] = msgspec.Raw(msgspec.json.encode(spec.id))
    given = bytes(fields.get("messages", b"[]"))
    if shape_of(fields) == "messages":
        has_turns = given != b"[]"
        fields |= {"max_tokens": msgspec.Raw(b"1")} | ({} if has_turns else {"messages": _OPENING})
        data = _decoded(fields, MessagesRequest)
        generate = messages_to_generate(data, "", Door(spec, settings, caller, fields)).request
    else:
        messages = decoded_at(msgspec.Raw(given), list[msgspec.Raw], "messages")
        roles = [decoded_at(one, _Spoken, "messages").role for one in messages]
        has_turns = any(role not in ("system", "developer") for role in roles)
        if not has_turns:
            messages += msgspec.json.decode(_OPENING, type=list[msgspec.Raw])
            fields["messages"] = msgspec.Raw(msgspec.json.encode(messages))
        data = _decoded(fields, ChatRequest)
        generate = chat_to_generate(data, "", spec, settings, caller)
    if has_turns:
        return generate
    cache = msgspec.structs.replace(generate.cache, mode="prefix")
    return msgspec.structs.replace(generate, cache=cache)


class PinnedPrompts:
    """What the configuration wants warm, by model: files with bodies of requests, or texts."""

    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self._settings = settings
        self._catalog = catalog

    def __call__(self, model: str) -> list[GenerateRequest]:
        """The requests of a model, for each tenant. What cannot be read is logged and left out."""
        own = self._settings.models.get(model)
        found: list[GenerateRequest] = []
        for number, wanted in enumerate(own.prewarm if own is not None else ()):
            name = wanted if isinstance(wanted, str) else f"prewarm[{number}]"
            try:
                fields = msgspec.json.decode(self._body(wanted), type=Fields)
                spec = self._catalog.resolve(model)
                requests = [
                    prompt_of(fields, spec, self._settings, Caller(tenant=tenant))
                    for tenant in self._settings.api_keys or ("",)
                ]
            except (OSError, msgspec.MsgspecError, HearthError) as error:
                log.warning("prewarm_file_unusable", model=model, name=name, why=str(error))
                continue
            found += (msgspec.structs.replace(one, request_id=name) for one in requests)
        return found

    def _body(self, wanted: str | PrewarmSettings) -> bytes:
        """A request's body. Raises OSError."""
        if isinstance(wanted, str):
            return (self._settings.home / Path(wanted).expanduser()).read_bytes()
        return msgspec.json.encode({"system": wanted.system, "tools": wanted.tools})


class PrewarmCollector(Collector):
    """Figures of prewarming, taken when they are asked for."""

    def __init__(self, prewarm: Prewarm) -> None:
        self._prewarm = prewarm

    @override
    def collect(self) -> Iterator[Metric]:
        text = "Prompts that were made warm, by outcome and by who wanted it"
        outcomes = CounterMetricFamily("hearth_prewarm", text, labels=["outcome", "source"])
        for labels, number in self._prewarm.counts.items():
            outcomes.add_metric(labels, number)
        text = "Tokens of prompts that were made warm"
        tokens = CounterMetricFamily("hearth_prewarm_tokens", text, labels=["source"])
        for source, number in self._prewarm.tokens.items():
            tokens.add_metric([source], number)
        text = "Requests that begin with a learned prefix which was warm, and reused KV"
        hits = CounterMetricFamily("hearth_prewarm_hits", text, value=self._prewarm.num_hits)
        yield from (outcomes, tokens, hits)


def _read(body: bytes) -> tuple[Fields, PrewarmOptions]:
    fields, options = decoded(body, Fields), decoded(body, PrewarmOptions)
    return {name: raw for name, raw in fields.items() if bytes(raw) != b"null"}, options


def _decoded(fields: Fields, kind: type[T]) -> T:
    return decoded(msgspec.json.encode(fields), kind)


async def _of_response(
    fields: Fields, spec: ModelSpec, settings: Settings, caller: Caller, desk: ResponseDesk
) -> GenerateRequest:
    data = _decoded(fields, ResponseRequest)
    check(data)
    new = await desk.archive.resolved(items_of(data), caller.tenant)
    given = data.previous_response_id
    past = await desk.archive.past(owned(caller.tenant, given) if given is not None else None)
    request = plan_of(data, [*past, *new], "", spec, caller, settings).request
    assert isinstance(request.prompt, ChatPrompt)
    return request


async def _bring(gate: Gate, session_id: str, spec: ModelSpec) -> PrewarmView:
    """A conversation's KV, from disk, into the memory of its model if that is loaded."""
    num_tokens = await gate.bring(session_id, spec)
    state: State = "queued" if num_tokens else "failed"
    return PrewarmView(
        id=f"prewarm-{secrets.token_hex(8)}",
        model=spec.id,
        status=state,
        message=_STATES[state],
        prompt_tokens=num_tokens,
        error=None if num_tokens else "Nothing of it is on disk, or its model is not loaded.",
    )


def _answer(view: PrewarmView) -> Response[PrewarmView]:
    return Response(view, status_code=202)
