"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show`, `/api/version`; refusals."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from litestar import MediaType, Response, get, head, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from litestar.types import Scope
from msgspec import UNSET

from api.http.body import HttpRequest
from api.http.cache_header import cache_header
from api.http.caller import asker_of
from api.http.draft import Draft, collect
from api.http.errors import Refusal
from api.http.gate import Gate
from api.http.sse import NDJSON, EventStream, open_stream, unless_left, whole
from api.ollama.convert import chat_request, generate_request
from api.ollama.schemas import (
    Details,
    GenerateBody,
    ModelTag,
    ModelTags,
    OllamaChatRequest,
    OllamaShared,
    OllamaVersion,
    Shown,
    ShowRequest,
    Trouble,
)
from api.ollama.stream import Answer, Clock, Form, LineStream, chat_form, generate_form
from runtime.errors import InvalidRequest
from runtime.supervisor.status import ModelStatus
from runtime.types import GenerateRequest, ModelSpec
from runtime.version import VERSION

OLLAMA_VERSION = "0.14.0"
_LATEST = ":latest"


@post("/api/chat", status_code=200, tags=["Ollama"])
async def chat(
    data: JSONBody[OllamaChatRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> Response[Answer] | EventStream:
    """Continue a conversation; streamed unless `stream` is false."""
    spec = gate.spec(_known_name(data.model))
    caller = asker_of(request)
    asked = await request.apart(lambda: chat_request(data, _new_id(), spec, gate.settings, caller))
    return await _answer(request, gate, asked, _Manner(data, chat_form))


@post("/api/generate", status_code=200, tags=["Ollama"])
async def generate(
    data: JSONBody[GenerateBody], request: HttpRequest, gate: NamedDependency[Gate]
) -> Response[Answer] | EventStream:
    """Answer one prompt; streamed unless `stream` is false."""
    spec = gate.spec(_known_name(data.model))
    asked = generate_request(data, _new_id(), spec, gate.settings, asker_of(request))
    return await _answer(request, gate, asked, _Manner(data, generate_form))


@get("/api/tags", tags=["Ollama"], sync_to_thread=False)
def tags(gate: NamedDependency[Gate]) -> ModelTags:
    """Every model that can be named."""
    return ModelTags(models=[_tag(status.spec) for status in gate.supervisor.status()])


@get("/api/ps", tags=["Ollama"], sync_to_thread=False)
def running(request: HttpRequest, gate: NamedDependency[Gate]) -> ModelTags:
    """The models that are loaded."""
    status = gate.status_for(request.scope)
    return ModelTags(models=[_loaded(one) for one in status if one.is_loaded])


@post("/api/show", status_code=200, tags=["Ollama"], sync_to_thread=False)
def show(data: JSONBody[ShowRequest], gate: NamedDependency[Gate]) -> Shown:
    """What is known of one model."""
    name = data.model or data.name
    if not name:
        message = "model is missing: name the model to be shown."
        raise InvalidRequest(message, "model")
    status = gate.supervisor.status_of(_known_name(name))
    spec = status.spec
    can_do = [one for one in ("tools", "vision") if one in status.capabilities]
    return Shown(
        modelfile="",
        parameters="",
        template="",
        details=_details(spec),
        model_info={
            "general.architecture": spec.model_type,
            "general.basename": spec.id,
            f"{spec.model_type}.context_length": spec.context,
        },
        capabilities=["completion", "thinking", *can_do],
        tools=status.tool_use,
        modified_at=_modified(spec),
    )


@get("/api/version", tags=["Ollama"], sync_to_thread=False)
def version() -> OllamaVersion:
    """The version of the protocol, and our own."""
    return OllamaVersion(version=OLLAMA_VERSION, hearth=VERSION)


@head(["/api/version", "/api/tags"], tags=["Ollama"], sync_to_thread=False)
def version_head() -> None:
    """That there is somebody."""


class _Manner(NamedTuple):
    """How an answer is given: to what, and in which form."""

    data: OllamaShared
    form: Form


async def _answer(
    request: HttpRequest,
    gate: Gate,
    asked: GenerateRequest,
    manner: _Manner,
) -> Response[Answer] | EventStream:
    name, form = manner.data.model, manner.form
    clock = Clock()
    if asked.work == "count":
        said = form(name, "", "", (), done=True)
        return Response(await _loaded_or_left(request, gate, asked, said))
    unused = await request.unused_fields(type(manner.data))
    answer = gate.submit(request.scope, [asked])
    answer.tally.ignored += unused
    if manner.data.stream is not False:
        lines = LineStream(form, name, answer.tally, clock)
        return await open_stream(
            request, answer, lines, gate.settings.keep_alive_s, media_type=NDJSON
        )
    drafts = [Draft()]
    try:
        await unless_left(request.receive, answer.accepted())
        clock.take_up()
        await whole(request, answer, lambda chunk: collect(drafts, chunk))
    finally:
        answer.close()
    (draft,) = drafts
    assert draft.finished is not None
    said = form(name, draft.text, draft.reasoning, draft.calls, done=True)
    settled = clock.settle(said, draft.finished, answer.tally)
    return Response(settled, headers=cache_header(answer.tally.least_cached))


async def _loaded_or_left(
    request: HttpRequest, gate: Gate, asked: GenerateRequest, answer: Answer
) -> Answer:
    """A request without a prompt has its model loaded, and stay or leave."""
    answer.done_reason = "unload" if asked.keep_alive_s == 0 else "load"
    if asked.keep_alive_s != 0 or gate.supervisor.status_of(asked.model).state != "cold":
        await whole(request, gate.submit(request.scope, [asked]), lambda _: None)
    return answer


def _new_id() -> str:
    return f"ollama-{secrets.token_hex(12)}"


def _known_name(name: str) -> str:
    """Ollama's clients add a tag to names that have none."""
    return name.removesuffix(_LATEST)


def _tag(spec: ModelSpec) -> ModelTag:
    return ModelTag(
        name=spec.id,
        model=spec.id,
        modified_at=_modified(spec),
        size=spec.nbytes,
        # Clients only compare it; a model that was replaced has another size or time.
        digest=hashlib.sha256(f"{spec.path}\0{spec.nbytes}\0{spec.created_s}".encode()).hexdigest(),
        details=_details(spec),
    )


def _loaded(status: ModelStatus) -> ModelTag:
    tag = _tag(status.spec)
    tag.size_vram = status.spec.nbytes
    tag.context_length = status.spec.context
    left_s = status.expires_in_s
    tag.expires_at = (
        (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat() if left_s is not None else UNSET
    )
    return tag


def _details(spec: ModelSpec) -> Details:
    return Details(
        parent_model="",
        format="mlx",
        family=spec.model_type,
        families=[spec.model_type],
        parameter_size="",
        quantization_level="",
    )


def _modified(spec: ModelSpec) -> str:
    return datetime.fromtimestamp(spec.created_s, UTC).isoformat()


def speaks_ollama(scope: Scope) -> bool:
    """Whether a request is one of Ollama's clients', by its path."""
    return scope["path"].startswith("/api/") and scope["path"] != "/api/hello"


def ollama_error(refusal: Refusal, _: str) -> Response[Trouble]:
    """The refusal as an HTTP answer."""
    return Response(
        Trouble(error=refusal.message),
        status_code=refusal.status,
        headers=dict(refusal.headers),
        media_type=MediaType.JSON,
    )


GENERATING = [chat, generate]
READING = [tags, running, show, version, version_head]
