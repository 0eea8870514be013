"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import secrets
import struct
from math import sqrt
from typing import Annotated, Literal

from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import UNSET, Meta, UnsetType

from api.http.answer import Answer
from api.http.body import HttpRequest
from api.http.errors import documented
from api.http.gate import Gate
from api.http.hearth_info import IgnoredInfo, ignored_info
from api.http.limits import ModelName
from api.http.refusal import refuse
from api.http.sse import whole
from api.openai.fields import Body
from api.openai.prompts import PromptField, listed_prompts
from runtime.types import Chunk, Embedding, GenerateRequest

MAX_INPUTS = 2048


class EmbeddingRequest(Body):
    """`dimensions` cuts vectors of models that were trained for it, and makes them length 1."""

    SILENT = frozenset({"safety_identifier"})

    input: PromptField
    model: ModelName | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class EmbeddingObject(Body):
    embedding: list[float] | str
    index: int
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Body):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Body):
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
    hearth: IgnoredInfo | UnsetType = UNSET


@post(
    ["/v1/embeddings", "/embeddings"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(EmbeddingList),
)
async def embeddings(
    data: JSONBody[EmbeddingRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> Response[EmbeddingList]:
    """One vector for each input, in their order."""
    spec = gate.spec(data.model)
    if spec.pooling is None:
        refuse("model", f"{spec.id} is no embedding model: it has no modules.json that says how.")
    prompts = listed_prompts(data.input, needs_text=False, field="input")
    if len(prompts) > MAX_INPUTS:
        refuse("input", f"has {len(prompts)} entries, at most {MAX_INPUTS} are embedded at once.")
    request_id = f"embd-{secrets.token_hex(12)}"
    vectors: list[bytes] = []
    num_tokens = 0
    # A window of them, so that a long list does not fill the queue that others wait in.
    size = max(1, gate.settings.max_queue // 4)
    for start in range(0, len(prompts), size):
        batch = [
            GenerateRequest(
                request_id=f"{request_id}-{start + i}",
                model=spec.id,
                prompt=prompt,
                work="embed",
                deadline_s=gate.settings.deadline_s,
            )
            for i, prompt in enumerate(prompts[start : start + size])
        ]
        answer = gate.submit(request.scope, batch)
        vectors += await _vectors(request, answer, len(batch))
        num_tokens += answer.tally.num_prompt_tokens
    form = data.encoding_format or "float"
    return Response(
        EmbeddingList(
            data=[
                EmbeddingObject(_written(_cut(vector, data.dimensions), form), index)
                for index, vector in enumerate(vectors)
            ],
            model=data.model or spec.id,
            usage=EmbeddingUsage(num_tokens, num_tokens),
            hearth=ignored_info(await request.unused_fields(EmbeddingRequest)),
        )
    )


async def _vectors(request: HttpRequest, answer: Answer, count: int) -> list[bytes]:
    found: dict[int, bytes] = {}

    def take(chunk: Chunk) -> None:
        if isinstance(chunk, Embedding):
            found[chunk.index] = chunk.values

    await whole(request, answer, take)
    return [found[index] for index in range(count)]


def _cut(vector: bytes, dimensions: int | None) -> bytes:
    size = len(vector) // 4
    if dimensions is None or dimensions == size:
        return vector
    if dimensions > size:
        refuse("dimensions", f"is {dimensions}, but the model's vectors have {size}.")
    values = struct.unpack(f"<{dimensions}f", vector[: 4 * dimensions])
    length = sqrt(sum(value * value for value in values)) or 1.0
    return struct.pack(f"<{dimensions}f", *(value / length for value in values))


def _written(vector: bytes, form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector).decode()
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
