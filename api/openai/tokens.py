"""`POST /tokenize` and `/detokenize`: what a prompt is to a model, and back."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody
from msgspec import UNSET, Meta, UnsetType

from api.http.body import HttpRequest
from api.http.caller import asker_of
from api.http.errors import documented
from api.http.gate import Gate
from api.http.hearth_info import IgnoredInfo, ignored_info
from api.http.limits import ModelName
from api.http.refusal import refuse
from api.http.sse import whole
from api.openai.convert import chat_to_generate
from api.openai.fields import Body
from api.openai.schemas import ChatMessage, ChatRequest, ToolDefinition
from runtime.errors import UnknownModel
from runtime.models.files import tokenizer_info as info_of
from runtime.models.folder import BrokenModel
from runtime.types import (
    Chunk,
    GenerateRequest,
    ModelSpec,
    TextDelta,
    TextPrompt,
    TokenPrompt,
    Tokens,
)


class TokenizeRequest(Body):
    """A `prompt` as it is, or `messages` as the model's chat template writes them."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None


class Tokenized(Body):
    tokens: list[int]
    count: int
    max_model_len: int
    hearth: IgnoredInfo | UnsetType = UNSET


TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class DetokenizeRequest(Body):
    tokens: list[TokenId]
    model: ModelName | None = None


class Detokenized(Body):
    prompt: str
    hearth: IgnoredInfo | UnsetType = UNSET


@post(
    ["/tokenize", "/v1/tokenize"], status_code=200, tags=["Tokens"], responses=documented(Tokenized)
)
async def tokenize(
    data: JSONBody[TokenizeRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> Tokenized:
    """The token ids of a prompt."""
    spec = gate.spec(data.model)
    if data.messages is not None:
        asked = ChatRequest(messages=data.messages, tools=data.tools)
        caller = asker_of(request)
        chat = await request.apart(
            lambda: chat_to_generate(asked, _new_id(), spec, gate.settings, caller)
        )
        generate = msgspec.structs.replace(chat, work="tokenize")
    elif data.prompt:
        generate = _work(spec, gate, TextPrompt(text=data.prompt), is_back=False)
    else:
        refuse("prompt", "is missing: send text, or `messages`.")
    found: list[int] = []

    def take(chunk: Chunk) -> None:
        if isinstance(chunk, Tokens):
            found.extend(chunk.token_ids)

    await whole(request, gate.submit(request.scope, [generate]), take)
    ignored = ignored_info(await request.unused_fields(TokenizeRequest))
    return Tokenized(tokens=found, count=len(found), max_model_len=spec.context, hearth=ignored)


@post(
    ["/detokenize", "/v1/detokenize"],
    status_code=200,
    tags=["Tokens"],
    responses=documented(Detokenized),
)
async def detokenize(
    data: JSONBody[DetokenizeRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> Detokenized:
    """What these token ids say, markers included."""
    spec = gate.spec(data.model)
    ignored = ignored_info(await request.unused_fields(DetokenizeRequest))
    if not data.tokens:
        return Detokenized(prompt="", hearth=ignored)
    pieces: list[str] = []

    def take(chunk: Chunk) -> None:
        if isinstance(chunk, TextDelta):
            pieces.append(chunk.text)

    generate = _work(spec, gate, TokenPrompt(token_ids=tuple(data.tokens)), is_back=True)
    await whole(request, gate.submit(request.scope, [generate]), take)
    return Detokenized(prompt="".join(pieces), hearth=ignored)


@get(["/tokenizer_info", "/v1/tokenizer_info"], tags=["Tokens"])
async def tokenizer_info(
    gate: NamedDependency[Gate], model: FromQuery[str | None] = None
) -> dict[str, Any]:
    """The settings of a model's tokenizer as in its files, its chat template among them."""
    spec = gate.spec(model)
    try:
        return dict(await asyncio.to_thread(info_of, Path(spec.path)))
    except BrokenModel as error:
        raise UnknownModel(spec.id, (), str(error), "its files cannot be read") from error


def _work(
    spec: ModelSpec, gate: Gate, prompt: TextPrompt | TokenPrompt, *, is_back: bool
) -> GenerateRequest:
    return GenerateRequest(
        request_id=_new_id(),
        model=spec.id,
        prompt=prompt,
        work="detokenize" if is_back else "tokenize",
        deadline_s=gate.settings.deadline_s,
    )


def _new_id() -> str:
    return f"tok-{secrets.token_hex(12)}"
