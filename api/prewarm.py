"""`/v1/prewarm`: announce a prompt, in any protocol's shape, so that it is warm when it is sent."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import structlog
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, UnsetType
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from api.agents.service import Agents
from api.anthropic.convert import ConversionContext, messages_to_generate
from api.anthropic.schemas import MessagesRequest
from api.http.body import HttpRequest, decoded, decoded_at, decoded_conversation
from api.http.caller import Caller, asker_of, tenant_of
from api.http.errors import documented
from api.http.expansion import Expansion
from api.http.gate import Gate
from api.http.hearth_info import IgnoredInfo, ignored_info
from api.http.kv_access import KvAccess
from api.http.limits import ModelName, bounds_of, check_entries, check_size, narrowed
from api.http.refusal import refuse
from api.http.unused import unused_fields
from api.observe.record import record_of
from api.ollama.convert import chat_request
from api.ollama.schemas import OllamaChatRequest
from api.openai.convert import chat_to_generate
from api.openai.response_schemas import ResponseRequest
from api.openai.schemas import ChatRequest
from api.responses.convert import check, items_of, plan_of
from api.responses.items import stored_weight
from api.responses.service import ResponseService
from runtime.config.settings import PrewarmSettings, Settings
from runtime.errors import HearthError, RequestRejected, UnknownModel, UnknownPrewarm
from runtime.keys import owned, plain
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import Prewarm
from runtime.prewarm.task import PrewarmTask, State
from runtime.types import ChatPrompt, GenerateRequest, ModelSpec

T = TypeVar("T")

Shape = Literal["chat", "messages", "responses", "ollama"]
Fields = dict[str, msgspec.Raw]

_OPENING = msgspec.Raw(b'[{"role":"user","content":"."}]')
_ANTHROPIC_TOOL = b'"input_schema"'
_ANTHROPIC_PARTS = frozenset(
    {"document", "image", "redacted_thinking", "thinking", "tool_result", "tool_use"}
)
_OLLAMA_FIELDS = frozenset({"options", "keep_alive", "think"})
PROMPT_FIELDS = frozenset({"messages", "system", "tools", "instructions", "input"})
_WHOLE = frozenset({"messages", "input", "instructions", "previous_response_id"})
_FILE_NAME = re.compile(r"(?:~|\.\.?)?/\S*|\S+\.[A-Za-z0-9]{1,8}")
_MOST_TOKEN_BYTES = 6
"""Of text, in a token: most prompts have more tokens than this says; they are counted later."""
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
    """Of a message, who says it, and what tells whose words it is in."""

    role: object = None
    content: msgspec.Raw = msgspec.Raw(b"null")
    images: object = None
    tool_name: object = None


class _Part(msgspec.Struct):
    type: str = ""


class _Tool(msgspec.Struct):
    """Of a tool, what tells whose it is."""

    type: object = None
    function: object = None
    input_schema: object = None


class PrewarmOptions(msgspec.Struct):
    """What the body says beside the prompt. `load` has a model loaded that is not."""

    model: ModelName | None = None
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
    hearth: IgnoredInfo | UnsetType = UNSET


@post("/v1/prewarm", status_code=202, tags=["Hearth"], responses=documented(PrewarmView))
async def announce(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    prewarm: NamedDependency[Prewarm],
    responses: NamedDependency[ResponseService],
    agents: NamedDependency[Agents],
) -> Response[PrewarmView]:
    """Have a prompt warm soon: tools and system alone, or with messages, or what went before."""
    body = await request.body()
    fields, options = await request.apart(lambda: _read(body))
    caller = asker_of(request)
    if options.agent_id is not None:
        agent = await agents.desk.kept(owned(caller.tenant, options.agent_id))
        spec = gate.spec(options.model or agent.model)
        unused = await request.unused_fields(PrewarmOptions)
        return _answer(await _bring(cache, agent.session, spec), unused)
    spec, fields = gate.spec(options.model), await request.apart(lambda: spoken(fields))
    unused = await request.apart(lambda: unused_of(fields))
    if fields.keys() & {"input", "previous_response_id"}:
        generate = await response_of(request, fields, spec, gate.settings, caller, responses)
    elif not fields.keys() & PROMPT_FIELDS:
        if options.session_id is None:
            refuse(
                "messages", "is missing: send messages, system, tools, a session_id or an agent_id."
            )
        session = owned(caller.tenant, options.session_id)
        return _answer(await _bring(cache, session, spec), unused)
    else:
        generate = await request.apart(lambda: prompt_of(fields, spec, gate.settings, caller))
    if options.pinned and options.ttl is not None:
        refuse("ttl", "excludes pinned: what is pinned stays until it is deleted.")
    asked = msgspec.structs.replace(generate.cache, pin="" if options.pinned else None)
    generate = msgspec.structs.replace(generate, cache=asked)
    generate = narrowed(generate, bounds_of(request.scope).limits)
    check_size(generate)
    if options.pinned:
        num_tokens = len(body) // _MOST_TOKEN_BYTES
        least_bytes = num_tokens * (spec.kv_bytes_per_token or 0)
        await prewarm.check_pins(caller.tenant, least_bytes)
    received = record_of(request.scope).received
    return _answer(view_of(prewarm.ask(generate, received, loads=bool(options.load))), unused)


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


def view_of(warming: PrewarmTask) -> PrewarmView:
    """What clients are told of it."""
    return PrewarmView(
        id=plain(warming.id),
        model=warming.model,
        status=warming.state,
        message=_STATES[warming.state],
        pinned=warming.is_pinned,
        prompt_tokens=warming.num_tokens,
        cached_tokens=warming.num_cached_tokens,
        tier=warming.tier,
        elapsed_ms=warming.elapsed_ms,
        error=warming.error,
    )


def spoken(fields: Fields) -> Fields:
    """A system text and tools alone, in the shape of the protocol that has such tools.

    Raises:
        InvalidRequest: tools are no list of objects.
    """
    if fields.keys() & _WHOLE or not fields.keys() & {"system", "tools"}:
        return fields
    system = msgspec.json.decode(fields.get("system", b'""'))
    tools = decoded_at(fields.get("tools", msgspec.Raw(b"[]")), list[_Tool], "tools")
    if not isinstance(system, str) or any(one.input_schema is not None for one in tools):
        return fields
    rest = {name: raw for name, raw in fields.items() if name != "system"}
    if any(one.function is not None for one in tools):
        told = [{"role": "system", "content": system}] if system else []
        return rest | _raw({"messages": told})
    if any(one.type == "function" for one in tools):
        return rest | _raw({"instructions": system or None})
    return fields


_BODIES: dict[Shape, type[msgspec.Struct]] = {
    "chat": ChatRequest,
    "messages": MessagesRequest,
    "responses": ResponseRequest,
    "ollama": OllamaChatRequest,
}


def unused_of(fields: Fields) -> list[str]:
    """The fields of an announced prompt that nobody knows, as its protocol has them."""
    own = PrewarmOptions.__struct_fields__
    return unused_fields(msgspec.json.encode(fields), _BODIES[shape_of(fields)], also=own)


def shape_of(fields: Mapping[str, msgspec.Raw]) -> Shape:
    """Whose request it looks like."""
    if fields.keys() & {"input", "instructions", "previous_response_id"}:
        return "responses"
    messages = _said(fields.get("messages", msgspec.Raw(b"[]")))
    kinds = {kind for one in messages for kind in _kinds(one.content)}
    tools = bytes(fields.get("tools", b""))
    if fields.keys() & {"system", "thread"} or _ANTHROPIC_TOOL in tools or kinds & _ANTHROPIC_PARTS:
        return "messages"
    is_ollama = any(one.images or one.tool_name for one in messages)
    return "ollama" if is_ollama or fields.keys() & _OLLAMA_FIELDS else "chat"


def _said(messages: msgspec.Raw) -> list[_Spoken]:
    """The messages, of which one that is no object tells nothing."""
    raws = decoded_at(messages, list[msgspec.Raw], "messages")
    check_entries("messages", len(raws))
    is_object = (bytes(raw).startswith(b"{") for raw in raws)
    return [
        decoded_at(raw, _Spoken, "messages") if known else _Spoken()
        for raw, known in zip(raws, is_object, strict=True)
    ]


def _kinds(content: msgspec.Raw) -> set[str]:
    """The types of a message's parts, where it has any."""
    with suppress(msgspec.ValidationError):
        return {one.type for one in msgspec.json.decode(content, type=list[_Part])}
    return set()


def named_model(fields: Fields) -> str | None:
    """The model that a body names. Raises InvalidRequest."""
    raw = fields.get("model", msgspec.Raw(b"null"))
    return decoded_at(raw, str, "model") if bytes(raw) != b"null" else None


def prompt_of(
    fields: Fields, spec: ModelSpec, settings: Settings, caller: Caller
) -> GenerateRequest:
    """The request of these fields; without a turn of the user only its prefix is kept.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    fields = {name: raw for name, raw in fields.items() if name not in ("stream", "ttl", "pinned")}
    fields = spoken(fields) | _raw({"model": spec.id})
    shape = shape_of(fields)
    given = bytes(fields.get("input" if shape == "responses" else "messages", b"[]"))
    has_turns = given != b"[]"
    if shape == "responses":
        data = _decoded({"input": _OPENING} | fields, ResponseRequest)
        check(data)
        if data.previous_response_id is not None:
            refuse("previous_response_id", "cannot be used here: send the whole prompt.")
        generate = plan_of(data, items_of(data), "", spec, caller, settings).request
    elif shape == "messages":
        fields |= {"max_tokens": msgspec.Raw(b"1")} | ({} if has_turns else {"messages": _OPENING})
        data = _decoded(fields, MessagesRequest)
        if data.thread is not None and data.thread.type != "create":
            refuse("thread", "cannot be continued here: send the whole prompt.")
        generate = messages_to_generate(data, "", ConversionContext(spec, settings, caller)).request
    else:
        said = _said(msgspec.Raw(given))
        has_turns = any(one.role not in ("system", "developer") for one in said)
        if not has_turns:
            messages = msgspec.json.decode(given, type=list[msgspec.Raw])
            messages += msgspec.json.decode(_OPENING, type=list[msgspec.Raw])
            fields["messages"] = msgspec.Raw(msgspec.json.encode(messages))
        if shape == "ollama":
            asked = _decoded(fields, OllamaChatRequest)
            generate = chat_request(asked, "", spec, settings, caller)
        else:
            data = _decoded(fields, ChatRequest)
            generate = chat_to_generate(data, "", spec, settings, caller)
    if has_turns:
        return generate
    cache = msgspec.structs.replace(generate.cache, mode="prefix")
    return msgspec.structs.replace(generate, cache=cache)


class PinnedPrompts:
    """What the configuration wants warm, by model: texts, files, tables of system and tools.

    What is of no use is told by its place, never by what it says: a log has no prompts.
    """

    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self._settings = settings
        self._catalog = catalog

    def __call__(self, model: str) -> list[GenerateRequest]:
        """The requests of a model, for each tenant. What cannot be used is logged and left out."""
        found: list[GenerateRequest] = []
        for name, wanted in self._wanted(model):
            try:
                requests = self._requests(model, wanted)
            except HearthError as error:
                is_ours = isinstance(error, PromptUnusable)
                param = error.param if isinstance(error, RequestRejected) else None
                why = error.message if is_ours else f"{error.code} in {param or 'it'}"
                log.warning("prewarm_unusable", model=model, entry=name, why=why)
                continue
            found += (msgspec.structs.replace(one, request_id=name) for one in requests)
        return found

    def problems(self) -> dict[str, str]:
        """Why entries are of no use, by where they stand, of all models that can be named."""
        found: dict[str, str] = {}
        for model in self._settings.named_models:
            for name, wanted in self._wanted(model):
                try:
                    self._requests(model, wanted)
                except UnknownModel:
                    break  # which is told of the model itself
                except HearthError as error:
                    found[f"models.{model}.{name}"] = error.message
        return found

    def _wanted(self, model: str) -> list[tuple[str, str | PrewarmSettings]]:
        entries = self._settings.model(model).prewarm
        return [(f"prewarm[{number}]", one) for number, one in enumerate(entries)]

    def _requests(self, model: str, wanted: str | PrewarmSettings) -> list[GenerateRequest]:
        spec, fields = self._catalog.resolve(model), self._fields(wanted)
        tenants = self._settings.api_keys or ("",)
        return [prompt_of(fields, spec, self._settings, Caller(tenant=one)) for one in tenants]

    def _fields(self, wanted: str | PrewarmSettings) -> Fields:
        if not isinstance(wanted, str):
            if not wanted.tools:
                return _of_text(wanted.system)
            system = {"system": wanted.system} if wanted.system else {}
            return _raw({**system, "tools": wanted.tools})
        if not self._is_file(wanted):
            return _of_text(wanted)
        content = self._read(self._settings.home / Path(wanted).expanduser())
        if content is None:
            raise PromptUnusable(
                "it names a file, and there is none that can be read in home; a text that looks "
                'like the name of a file is written { system = "…" }'
            )
        return _of_file(content, is_json=wanted.endswith(".json"))

    def _is_file(self, wanted: str) -> bool:
        if _FILE_NAME.fullmatch(wanted):
            return True
        with suppress(OSError, ValueError):  # a text is too long for a name, or is none
            return (self._settings.home / wanted).is_file()
        return False

    def _read(self, path: Path) -> bytes | None:
        most = self._settings.max_body_bytes
        with suppress(OSError, ValueError, RuntimeError):
            if path.is_file():
                with path.open("rb") as file:
                    content = file.read(most + 1)
                if len(content) > most:
                    raise PromptUnusable(f"its file is too long: at most {most} bytes are read")
                return content
        return None


class PromptUnusable(RequestRejected):
    """An entry of `prewarm` is no prompt; the message quotes nothing of it."""


def _of_file(content: bytes, *, is_json: bool) -> Fields:
    """The body of a request, in JSON, or a text: a system prompt.

    Raises:
        PromptUnusable: it is neither.
    """
    try:
        fields = msgspec.json.decode(content, type=Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = {}
    if fields.keys() & PROMPT_FIELDS:
        return fields
    if is_json:
        raise PromptUnusable("its file is not the body of a request, a JSON object with a prompt")
    try:
        return _of_text(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PromptUnusable(f"its file is not UTF-8 at byte {error.start}") from error


def _of_text(text: str) -> Fields:
    if not text.strip():
        raise PromptUnusable("it is empty")
    return _raw({"system": text})


def _raw(fields: Mapping[str, object]) -> Fields:
    return msgspec.json.decode(msgspec.json.encode(fields), type=Fields)


class PrewarmCollector(Collector):
    """Figures of prewarming, taken when they are asked for."""

    def __init__(self, prewarm: Prewarm) -> None:
        self._prewarm = prewarm

    @override
    def collect(self) -> Iterator[Metric]:
        text = "Prewarmed prompts, by outcome and by who asked for them"
        outcomes = CounterMetricFamily("hearth_prewarm", text, labels=["outcome", "source"])
        for labels, number in self._prewarm.counts.items():
            outcomes.add_metric(labels, number)
        text = "Tokens of prewarmed prompts"
        tokens = CounterMetricFamily("hearth_prewarm_tokens", text, labels=["source"])
        for source, number in self._prewarm.tokens.items():
            tokens.add_metric([source], number)
        yield from (outcomes, tokens)


def _read(body: bytes) -> tuple[Fields, PrewarmOptions]:
    fields, options = decoded(body, Fields), decoded(body, PrewarmOptions)
    return {name: raw for name, raw in fields.items() if bytes(raw) != b"null"}, options


def _decoded(fields: Fields, kind: type[T]) -> T:
    return decoded_conversation(msgspec.json.encode(fields), kind)[0]


async def response_of(
    request: HttpRequest,
    fields: Fields,
    spec: ModelSpec,
    settings: Settings,
    caller: Caller,
    desk: ResponseService,
) -> GenerateRequest:
    """A request of OpenAI's Responses, with what went before it. Raises HearthError."""
    data = _decoded(fields, ResponseRequest)
    check(data)
    stored = Expansion.allowed(spec, settings)
    new = await desk.archive.resolved(items_of(data), caller.tenant, stored)
    given = owned(caller.tenant, data.previous_response_id) if data.previous_response_id else None
    items = [*await desk.archive.past(given, stored), *new]
    plan = await request.apart(
        lambda: plan_of(data, items, "", spec, caller, settings), stored_weight(items)
    )
    assert isinstance(plan.request.prompt, ChatPrompt)
    return plan.request


async def _bring(cache: KvAccess, session_id: str, spec: ModelSpec) -> PrewarmView:
    """A conversation's KV, from disk, into the memory of its model if that is loaded."""
    num_tokens = await cache.bring(session_id, spec)
    state: State = "queued" if num_tokens else "failed"
    return PrewarmView(
        id=f"prewarm-{secrets.token_hex(8)}",
        model=spec.id,
        status=state,
        message=_STATES[state],
        prompt_tokens=num_tokens,
        error=None if num_tokens else "Nothing of it is on disk, or its model is not loaded.",
    )


def _answer(view: PrewarmView, unused: Sequence[str]) -> Response[PrewarmView]:
    view.hearth = ignored_info(unused)
    return Response(view, status_code=202)
