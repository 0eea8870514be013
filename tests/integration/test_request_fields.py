"""Every field of the SDKs' types becomes what docs/request-fields.md says of it."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_http_embeddings import write_pooling
from tests.request_fields import ROUTES, Bodies, Found, Place, fields_of
from tests.running_server import RunningServer, running
from tests.tiny_models import write_model

PAGE = Path(__file__).parents[2] / "docs" / "request-fields.md"
VERDICTS = frozenset(
    {"used", "no effect", "ignored", "a line", "refused", "needs sight", "needs marks"}
)
HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "look", "parameters": SCHEMA}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "say"}
FILE = "data:text/plain;base64,T25jZS4="
PICTURE = "data:image/png;base64,iVBORw0KGgo="
TEXT_SOURCE: dict[str, Any] = {"type": "text", "media_type": "text/plain", "data": "Once."}
NAMED_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
NAMED: dict[str, Any] = {"type": "function", "name": "look"}
BASE: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 1,
        "messages": HI,
        "tools": [{"name": "look", "input_schema": SCHEMA}],
    },
    "/v1/chat/completions": {
        "messages": HI,
        "max_tokens": 1,
        "tools": [TOOL, {"type": "custom", "custom": {"name": "say"}}],
    },
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {
        "input": "hi",
        "max_output_tokens": 1,
        "tools": [FUNCTION, CUSTOM, {"type": "shell"}, {"type": "apply_patch"}],
    },
    "/v1/embeddings": {"input": "hi"},
}
SAMPLES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "content document": {"type": "document", "source": TEXT_SOURCE},
        "content compaction": {"type": "compaction", "content": "We met."},
        "content tool_use": {"type": "tool_use", "id": "c", "name": "look", "input": {}},
        "messages system": {"role": "system", "content": "Be brief."},
        "tool_choice tool.name": "look",
        "context_management.edits": [{"type": "clear_thinking_20251015", "keep": "all"}],
        "edits clear_thinking_20251015": {"type": "clear_thinking_20251015", "keep": "all"},
        "edits clear_thinking_20251015.keep": "all",
        "content compaction.tool_changes": [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
        ],
        "tool tool_reference": {"type": "tool_reference", "name": "look"},
        "tool tool_reference.name": "look",
        "tool tool_definition": {
            "type": "tool_definition",
            "definition": {"name": "hear", "input_schema": SCHEMA},
        },
        "tool tool_definition.definition": {"name": "hear", "input_schema": SCHEMA},
        "tool_changes tool_addition.tool": {"type": "tool_reference", "name": "look"},
        "tool_changes tool_removal.tool": {"type": "tool_reference", "name": "look"},
        "content tool_addition.tool": {"type": "tool_reference", "name": "look"},
        "content tool_removal.tool": {"type": "tool_reference", "name": "look"},
        "definition custom.input_examples": [{"at": 1}],
        "tools custom.input_examples": [{"at": 1}],
        ".container": "c",
        "container": {"id": "c"},
        "content document.source": TEXT_SOURCE,
        "source url.url": "https://example.com/a.png",
        "output_config.effort": "low",
        "with output_config.effort": {"thinking": {"type": "adaptive"}},
        "with compaction": {"max_tokens": 20},
        ".output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "format json_schema.schema": SCHEMA,
    },
    "/v1/chat/completions": {
        "*.logit_bias": {"1": 0.5},
        ".top_logprobs": None,
        "function.name": "look",
        "custom.name": "say",
        "tool_choice allowed_tools": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [NAMED_TOOL]},
        },
        "allowed_tools": {"mode": "auto", "tools": [NAMED_TOOL]},
        "allowed_tools.tools": [NAMED_TOOL],
        "response_format json_schema": {
            "type": "json_schema",
            "json_schema": {"name": "at", "schema": SCHEMA},
        },
        "json_schema": {"name": "at", "schema": SCHEMA},
        "json_schema.schema": SCHEMA,
        "content file": {"type": "file", "file": {"file_data": FILE}},
        "file": {"file_data": FILE},
        "file.file_data": FILE,
        "content file.file": {"file_data": FILE},
        ".functions": [{"name": "look", "parameters": SCHEMA}],
        "image_url": {"url": PICTURE},
        "image_url.url": PICTURE,
        "messages assistant": {"role": "assistant", "content": "Yes."},
        "grammar": {"syntax": "regex", "definition": "[a-z]+"},
        "grammar.syntax": "regex",
        "grammar.definition": "[a-z]+",
    },
    "/v1/completions": {"*.logit_bias": {"1": 0.5}, ".best_of": 1},
    "/v1/responses": {
        "context_management": {"type": "compaction", "compact_threshold": 5000},
        "context_management.type": "compaction",
        "context_management.compact_threshold": 5000,
        "input function_call_output": {
            "type": "function_call_output",
            "call_id": "c",
            "output": "A wall.",
        },
        "input function_call": {
            "type": "function_call",
            "call_id": "c",
            "name": "look",
            "arguments": "{}",
        },
        "tool_choice allowed_tools": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [NAMED],
        },
        "tool_choice allowed_tools.tools": [NAMED],
        "tool_choice function.name": "look",
        "tool_choice custom.name": "say",
        "content input_file": {"type": "input_file", "file_data": FILE},
        "output input_file": {"type": "input_file", "file_data": FILE},
        "content input_file.file_data": FILE,
        "output input_file.file_data": FILE,
        "content input_image.image_url": PICTURE,
        "output input_image.image_url": PICTURE,
        "content input_image": {"type": "input_image", "detail": "auto", "image_url": PICTURE},
        "output input_image": {"type": "input_image", "detail": "auto", "image_url": PICTURE},
        "format json_schema": {"type": "json_schema", "name": "at", "schema": SCHEMA},
        "format json_schema.schema": SCHEMA,
        "format grammar": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"},
        "format grammar.syntax": "regex",
        "format grammar.definition": "[a-z]+",
        "tools tool_search": {"type": "tool_search", "execution": "client"},
        "tools tool_search.execution": "client",
        "tools tool_search.parameters": SCHEMA,
        "input tool_search_output.tools": [FUNCTION],
        "input tool_search_output": {"type": "tool_search_output", "tools": [FUNCTION]},
        "environment": {"type": "local"},
        "tools shell.environment": {"type": "local"},
        "tool_choice shell": {"type": "shell"},
        "tool_choice apply_patch": {"type": "apply_patch"},
        ".background": False,
        "with background_options.completion_window": {"background": True},
        ".include": ["reasoning.encrypted_content"],
        ".top_logprobs": None,
        ".metadata": {"key": "text"},
    },
    "/v1/embeddings": {".dimensions": 8},
}


def tables() -> dict[str, dict[Place, str]]:
    """The rows of the page, by route; an object that is not looked into has the one field `*`."""
    found: dict[str, dict[Place, str]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        route = re.search(r"`(/v1/[^`]+)`", part.partition("\n")[0])
        if route is None:
            continue
        rows = found[route[1]] = {}
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) < 3 or cells[2] not in VERDICTS:
                continue
            name = "" if cells[0] == "the request" else cells[0].strip("`")
            for field in re.findall(r"`([^`]+)`", cells[1]):
                assert (name, field) not in rows, f"{route[1]}: {name} {field} is there twice"
                rows[name, field] = cells[2]
    return found


TABLES = tables()


def kept(server: RunningServer, route: str) -> dict[str, Any]:
    """Samples of what refers to something that is stored or was written by this server."""

    def ask(path: str, **more: Any) -> Any:
        return server.post(path, BASE[route] | {"model": "hearth-tiny"} | more).json()

    if route == "/v1/messages":
        made = ask(route, thread={"type": "create"})
        return {"thread continue.previous_message_id": made["id"]}
    if route == "/v1/responses":
        made, summed = ask(route), ask(f"{route}/compact", max_output_tokens=20)["output"][-1]
        return {
            ".previous_response_id": made["id"],
            ".conversation": (talk := server.post("/v1/conversations", {}).json()["id"]),
            "conversation.id": talk,
            "input item_reference.id": made["output"][0]["id"],
            "input compaction": summed,
            "input compaction.encrypted_content": summed["encrypted_content"],
        }
    return {}


def known(route: str) -> dict[Place, Found]:
    whole = frozenset(name for name, field in TABLES[route] if field == "*")
    return fields_of(ROUTES[route], whole)


@pytest.mark.parametrize("route", ROUTES)
def test_the_page_has_every_field_of_the_types_and_no_other(route: str) -> None:
    fields, rows = set(known(route)), set(TABLES[route])
    assert (fields - rows, rows - fields) == (set(), set())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    path = write_model(folder / "mean", seed=3)
    write_pooling(path, {"pooling_mode_mean_tokens": True}, is_normalised=False)
    with running(tmp_path_factory.mktemp("home"), HEARTH_MODELS_DIR=str(folder)) as server:
        yield server
        assert "Traceback" not in server.stderr


def told(entry: str, place: Place) -> bool:
    """Whether `hearth.ignored` speaks of this field, or of the object that it is in."""
    name, field = place
    words = set(re.findall(r"\w+", entry))
    holder, _, kind = name.partition(" ")
    return field in words or kind in words or entry.rpartition(".")[2] == holder


def became(server: RunningServer, route: str, place: Place, found: Found, bodies: Bodies) -> str:
    """The page's word for what became of a field; one without effect counts as used, and what
    became a line of text as ignored.
    """
    body = bodies.body(place[1], found)
    if route == "/v1/responses" and isinstance(body["input"], list):
        body["input"] = [*HI, *body["input"]]
    if "thread" in body and body["thread"]["type"] == "continue":
        body.pop("tools")
    model = "mean" if route == "/v1/embeddings" else "hearth-tiny"
    answer = server.post(route, body | {"model": model})
    if answer.status_code == 200:
        ignored = (answer.json().get("hearth") or {}).get("ignored", [])
        is_told = any(told(one, place) or "reads text only" in one for one in ignored)
        return "ignored" if is_told else "used"
    assert answer.status_code == 400, (place, body, answer.text)
    error = answer.json()["error"]
    param, message = error.get("param") or error["details"]["param"], error["message"]
    if "reads text only" in message:
        return "needs sight"
    if "fill in the middle" in message:
        return "needs marks"
    steps = {place[1], *(step for step, _ in found.way)}
    assert steps & set(re.findall(r"\w+", param)), (place, body, message)
    return "refused"


@pytest.mark.parametrize("route", ROUTES)
def test_what_the_page_says_of_a_field_is_what_happens(server: RunningServer, route: str) -> None:
    bodies = Bodies({**SAMPLES[route], **kept(server, route)}, BASE[route])
    wrong: dict[Place, tuple[str, str]] = {}
    for place, found in known(route).items():
        wanted = TABLES[route].get(place, "")
        happened = became(server, route, place, found, bodies)
        if happened != wanted.replace("no effect", "used").replace("a line", "ignored"):
            wrong[place] = (wanted, happened)
    assert wrong == {}
