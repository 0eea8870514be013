"""The OpenAPI document, with what the framework does not know of our answers."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, cast

from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin
from typing_extensions import override

_Node = dict[str, Any]

_OPENAI: _Node = {"$ref": "#/components/schemas/ErrorEnvelope"}
_OLLAMA: _Node = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
_FRAMEWORKS = {"status_code", "detail"}
"""What the framework's own errors have, and ours never do."""

_WHOLE = ("/compact", "/input_tokens")
"""They take the body of an answer, and none of them streams."""

_SAID = [{"role": "user", "content": "Say one word."}]
_TINY = "hearth-tiny"
EXAMPLES: dict[str, _Node] = {
    "ChatRequest": {"messages": _SAID, "max_tokens": 8},
    "CompletionRequest": {"prompt": "One word:", "max_tokens": 8},
    "ResponseRequest": {"input": "Say one word.", "max_output_tokens": 16},
    "MessagesRequest": {"model": _TINY, "messages": _SAID, "max_tokens": 8},
    "CountRequest": {"model": _TINY, "messages": _SAID},
    "OllamaChatRequest": {"model": _TINY, "messages": _SAID, "stream": False},
    "GenerateBody": {"model": _TINY, "prompt": "Say one word.", "stream": False},
    "ShowRequest": {"model": _TINY},
    "TokenizeRequest": {"prompt": "A kettle hums."},
    "DetokenizeRequest": {"tokens": [17, 4]},
    "EmbeddingRequest": {"input": "A kettle hums."},
    "AgentCreate": {"name": "reviewer", "system": "You review patches."},
    "AgentGenerate": {"messages": _SAID, "max_tokens": 8},
    "AgentFork": {"name": "another"},
}
"""A body for each kind that requests have, by the name of its schema."""


class SchemaPlugin(JsonRenderPlugin):
    """JSON only: pages that render it would be fetched from somebody else's server."""

    @override
    def render(self, request: Request[Any, Any, Any], openapi_schema: _Node) -> bytes:
        return super().render(request, completed(openapi_schema))


def completed(document: _Node) -> _Node:
    """The document with the body that errors really have, and with those that any route may give.

    What may be anything or null is anything: as `oneOf`, null would be both.
    """
    document = _without_doubts(document)
    for path, item in cast("_Node", document["paths"]).items():
        for method, operation in cast("_Node", item).items():
            if isinstance(operation, dict) and "responses" in operation:
                told = _refusals(path, cast("_Node", operation["responses"]))
                operation["responses"] = told
                _complete_body(path, method, cast("_Node", operation), document)
    return document


def _complete_body(path: str, method: str, operation: _Node, document: _Node) -> None:
    """Show an example of the body, and the answer to who asks for a stream."""
    media = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = media.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if name in EXAMPLES:
        media["example"] = EXAMPLES[name]
    schema = document["components"]["schemas"].get(name, {})
    answer = operation["responses"].get("200", {}).get("content", {})
    asked = {one["name"] for one in operation.get("parameters", [])}
    asked |= schema.get("properties", {}).keys() if method == "post" else set()
    if "stream" in asked and answer and not path.endswith(_WHOLE):
        kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        answer[kind] = {"schema": {}}


def _refusals(path: str, responses: _Node) -> _Node:
    body = _OLLAMA if path.startswith("/api/") else _OPENAI
    known = next((_schema_of(one) for one in responses.values() if _is_ours(one)), body)
    refusal = {
        "description": "The request is refused, or failed",
        "content": {"application/json": {"schema": known}},
    }
    kept = {status: refusal if _is_frameworks(one) else one for status, one in responses.items()}
    return {**kept, "default": refusal}


def _schema_of(response: _Node) -> _Node:
    return response.get("content", {}).get("application/json", {}).get("schema", {})


def _is_ours(response: _Node) -> bool:
    return "Error" in _schema_of(response).get("$ref", "")


def _is_frameworks(response: _Node) -> bool:
    return _schema_of(response).get("properties", {}).keys() >= _FRAMEWORKS


def _without_doubts(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_doubts(one) for one in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    known = cast("_Node", node)
    told = {key: _without_doubts(value) for key, value in known.items()}
    if isinstance(told.get("oneOf"), list) and {} in told["oneOf"]:
        del told["oneOf"]
    return told
