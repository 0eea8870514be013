"""What clients say of their prefixes holds: where they end, how long they stay, what is counted."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.running_server import CHAT, COMPLETIONS, RunningServer, running
from tests.tiny_models import write_model
from tests.waiting import until

FAMILIES = {"plain": "qwen3", "hybrid": "qwen3_5", "sliding": "gemma3_text"}
"""Models whose layers can be cut, and two that are taken up at boundaries only."""
HOUR = {"type": "ephemeral", "ttl": "1h"}
MINUTES = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    for name, family in FAMILIES.items():
        write_model(folder / name, family, seed=5)
    home = tmp_path_factory.mktemp("home")
    with running(home, HEARTH_MODELS_DIR=str(folder), HEARTH_KV_TTL_S="60") as server:
        yield server


def words(num_words: int = 60) -> str:
    """What nobody said before."""
    return " ".join(secrets.token_hex(3) for _ in range(num_words))


def asked(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, {"model": "plain", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def num_tokens(server: RunningServer, model: str, messages: list[dict[str, Any]]) -> int:
    return server.post("/tokenize", {"model": model, "messages": messages}).json()["count"]


POINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


@pytest.mark.parametrize("model", FAMILIES)
def test_another_request_takes_up_what_precedes_a_breakpoint_amid_a_message(
    server: RunningServer, model: str
) -> None:
    shared = words(200)

    def ask(tail: str, **fields: Any) -> dict[str, Any]:
        content = [part(shared, **fields), part(tail)]
        messages = [{"role": "user", "content": content}]
        return asked(server, CHAT, {"model": model, "messages": messages, "max_tokens": 2})

    empty = num_tokens(server, model, [{"role": "user", "content": ""}])
    whole = num_tokens(server, model, [{"role": "user", "content": shared}])
    ask(words(100), **POINT)
    cached = ask(words(100))["hearth"]["cache"]["cached_tokens"]
    # All but what the template puts behind a message, and at most one token at the seam.
    assert whole - empty - 1 <= cached <= whole


def test_usage_adds_up_and_says_how_long_what_was_written_stays(server: RunningServer) -> None:
    system = [part(words(), cache_control=HOUR)]
    content = [part(words(), cache_control=MINUTES), part(words())]
    body = {"system": system, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    first, again = (asked(server, "/v1/messages", body)["usage"] for _ in range(2))
    count = asked(server, "/v1/messages/count_tokens", body)["input_tokens"]
    for usage in (first, again):
        written, by_ttl = usage["cache_creation_input_tokens"], usage["cache_creation"]
        assert sum(by_ttl.values()) == written
        assert usage["input_tokens"] + written + usage["cache_read_input_tokens"] == count
    assert 60 < first["cache_creation"]["ephemeral_1h_input_tokens"] < count / 2
    assert first["cache_creation"]["ephemeral_5m_input_tokens"] > count / 2
    assert again["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body_of"),
    [
        (CHAT, lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        (COMPLETIONS, lambda text: {"prompt": text, "max_tokens": 1}),
        (
            "/v1/responses",
            lambda text: {"input": text, "max_output_tokens": 1, "store": False},
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"mode": "implicit", "ttl": "12h"}])
def test_a_prewarmed_prompt_is_read_and_nothing_is_said_until_it_is_asked(
    server: RunningServer,
    path: str,
    body_of: Callable[[str], dict[str, Any]],
    options: dict[str, Any],
) -> None:
    body = body_of(words())
    warmed = asked(server, path, body | {"prompt_cache_options": options | {"prewarm": True}})
    usage = warmed["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    num_prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    assert details["cached_tokens"] + details["cache_write_tokens"] == num_prompt
    if "output" in warmed:
        assert (warmed["status"], warmed["output"]) == ("completed", [])
        Response.model_validate(warmed)
    cached = asked(server, path, body)["hearth"]["cache"]["cached_tokens"]
    assert cached == num_prompt - 1


def test_explicit_mode_keeps_what_precedes_a_breakpoint_and_nothing_without_one(
    server: RunningServer,
) -> None:
    options = {"prompt_cache_options": {"mode": "explicit"}}
    content = [part(words(), **POINT), part(words())]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **options}
    first, again = (asked(server, CHAT, body)["usage"]["prompt_tokens_details"] for _ in range(2))
    assert first["cached_tokens"] + first["cache_write_tokens"] == again["cached_tokens"]
    assert first["cache_write_tokens"] > 60
    assert again["cache_write_tokens"] == 0
    bare = {"messages": [{"role": "user", "content": words()}], "max_tokens": 1, **options}
    for _ in range(2):
        details = asked(server, CHAT, bare)["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"], details["cache_write_tokens"]) == (0, 0)


async def test_a_prefix_stays_on_disk_as_long_as_its_breakpoint_says(
    server: RunningServer,
) -> None:
    system = {"role": "system", "content": words(400)}
    turn = {"role": "user", "content": [part("Hi", **POINT)]}
    body = {"messages": [system, turn], "max_tokens": 1}
    options = {"prompt_cache_options": {"ttl": "12h"}}

    def lives() -> list[float | None]:
        with closing(sqlite3.connect(f"file:{server.home}/kv/index.db?mode=ro", uri=True)) as index:
            return [life for (life,) in index.execute("SELECT ttl_s FROM heads")]

    asked(server, CHAT, body | options)
    await until(lambda: 43_200.0 in lives(), "the prefix is on disk for twelve hours")
    bare = {"messages": [{"role": "user", "content": words(400)}], "max_tokens": 1}
    before = set(lives())
    asked(server, CHAT, bare | {"prompt_cache_retention": "in_memory"})
    asked(server, CHAT, bare | {"prompt_cache_retention": "24h", "seed": 1})
    await until(lambda: 86_400.0 in lives(), "the other is there for a day")
    assert set(lives()) - before <= {86_400.0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        (
            {"messages": [{"role": "user", "content": [part("a", prompt_cache_breakpoint={})]}]},
            "messages[0].content[0].prompt_cache_breakpoint.mode",
        ),
    ],
)
def test_a_control_that_is_not_known_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "plain", "messages": [{"role": "user", "content": "Hi"}], **fields}
    response = server.post(CHAT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_openais_own_client_sends_and_reads_all_of_it(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    text = words()
    response = client.responses.create(
        model="plain",
        input=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": text,
                        "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"},
                    }
                ],
            }
        ],
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        prompt_cache_retention="24h",
        max_output_tokens=1,
        store=False,
    )
    assert response.prompt_cache_options is not None
    assert (response.prompt_cache_options.mode, response.prompt_cache_options.ttl) == (
        "explicit",
        "30m",
    )
    assert response.prompt_cache_retention == "24h"
    assert response.usage is not None
    details = response.usage.input_tokens_details
    by_ttl = details.cache_write_tokens_details
    assert by_ttl is not None
    assert by_ttl.ttl_12h_tokens == details.cache_write_tokens > 60
    assert by_ttl.ttl_30m_tokens == 0
