"""What an answer says of the cache, and what a request may wish of it."""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from tests.running_server import CHAT, COMPLETIONS, RunningServer, events_of
from tests.waiting import until


def said_once(num_words: int = 120) -> list[dict[str, str]]:
    """Messages that nobody sent before."""
    return [{"role": "user", "content": " ".join(secrets.token_hex(3) for _ in range(num_words))}]


def is_new(cache: dict[str, Any]) -> bool:
    """Nothing was reused but what the template puts before every message."""
    return cache["reason"] in ("first_seen", "diverged") and cache["cached_tokens"] < 16


def body_of(messages: Any, **changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **changes}


def test_a_first_prompt_is_computed_and_a_retry_takes_all_but_its_last_token(server: RunningServer):
    body = body_of(said_once())
    first, again = server.post(CHAT, body).json(), server.post(CHAT, body).json()
    assert is_new(first["hearth"]["cache"])
    num_tokens = again["usage"]["prompt_tokens"]
    cache = again["hearth"]["cache"]
    assert (cache["tier"], cache["cached_tokens"]) == ("hot", num_tokens - 1)
    assert (cache["reason"], cache["at"]) == (None, num_tokens - 1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens - 1
    assert again["choices"] == first["choices"]


async def test_an_answer_says_how_much_of_its_conversation_no_crash_can_lose(
    server: RunningServer,
):
    body = body_of(said_once(), session_id=secrets.token_hex(8))
    before = {one["id"] for one in server.get("/admin/cache").json()["conversations"]}
    first = server.post(CHAT, body).json()
    num_tokens = first["usage"]["prompt_tokens"]
    # Whole blocks are written while the answer is computed: how many of them is a race.
    assert 0 <= first["hearth"]["cache"]["durable_tokens"] <= num_tokens

    def is_durable() -> bool:
        listed = server.get("/admin/cache").json()["conversations"]
        mine = [one for one in listed if one["id"] not in before]
        return any(one["is_durable"] and one["num_durable"] > num_tokens for one in mine)

    await until(is_durable, "the conversation's row says that it is durable")

    def is_said() -> bool:
        again = server.post(CHAT, body).json()["hearth"]["cache"]
        return again["durable_tokens"] >= num_tokens - 1

    # Its row is there a moment before the worker hears of it.
    await until(is_said, "the answer says so as well")


async def test_a_finished_request_becomes_a_row(server: RunningServer):
    rules = [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Rhyme."}]
    answer = server.post(CHAT, body_of([*rules, *said_once()]))
    own_id, said = answer.headers["x-request-id"], answer.json()
    rows: list[tuple[str | int, ...]] = []

    def is_there() -> bool:
        with closing(sqlite3.connect(f"file:{server.home}/kv/index.db?mode=ro", uri=True)) as index:
            rows[:] = index.execute("SELECT * FROM requests WHERE id = ?", (own_id,))
        return bool(rows)

    await until(is_there, "the row is there")
    named = {"tiny", said["usage"]["prompt_tokens"], said["choices"][0]["finish_reason"]}
    assert named <= set(rows[0])
    told = ",".join(f"{one['rule']}={one['num_places']}" for one in said["hearth"]["prompt"])
    assert "joined=2" in told
    assert told in rows[0]


def test_the_next_turn_computes_only_what_is_new(server: RunningServer):
    messages = said_once()
    first = server.post(CHAT, body_of(messages)).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = server.post(CHAT, body_of(messages)).json()
    assert second["hearth"]["cache"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 4


def test_an_edit_reuses_everything_before_it_and_says_where_it_diverged(server: RunningServer):
    words = said_once()[0]["content"].split()
    server.post(CHAT, body_of([{"role": "user", "content": " ".join(words)}]))
    words[60] = "EDITED"
    edited = server.post(CHAT, body_of([{"role": "user", "content": " ".join(words)}])).json()
    cache = edited["hearth"]["cache"]
    assert cache["reason"] == "diverged"
    share = cache["cached_tokens"] / edited["usage"]["prompt_tokens"]
    assert cache["at"] == cache["cached_tokens"]
    assert 0.3 < share < 0.7


def test_the_header_says_the_same_as_the_body(server: RunningServer):
    body = body_of(said_once())
    server.post(CHAT, body)
    answer = server.post(CHAT, body)
    cache = answer.json()["hearth"]["cache"]
    facts = dict(part.split("=") for part in answer.headers["x-hearth-cache"].split("; "))
    assert facts["tier"] == cache["tier"]
    assert int(facts["cached"]) == cache["cached_tokens"]
    assert {"restore_ms", "prefill_ms"} <= facts.keys()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_it_in_its_header_and_in_its_last_piece(server: RunningServer, path: str):
    asked = {"prompt": said_once()[0]["content"]} if path == COMPLETIONS else body_of(said_once())
    body = {"model": "tiny", "max_tokens": 4, **asked, "stream": True}
    server.post(path, body)
    response = server.post(path, body)
    *pieces, done = events_of(response.text)
    assert done == "[DONE]"
    assert [("hearth" in piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    cache = pieces[-1]["hearth"]["cache"]
    assert cache["cached_tokens"] > 0
    planned = f"tier=hot; cached={cache['cached_tokens']}"
    assert response.headers["x-hearth-cache"].startswith(planned)


def test_with_the_cache_off_nothing_is_read_or_kept(server: RunningServer):
    body = body_of(said_once())
    for _ in range(2):
        cache = server.post(CHAT, body | {"cache_mode": "off"}).json()["hearth"]["cache"]
        assert (cache["tier"], cache["cached_tokens"], cache["reason"]) == ("none", 0, "off")
    assert is_new(server.post(CHAT, body).json()["hearth"]["cache"])


def test_prefix_mode_keeps_what_precedes_the_first_turn_and_no_more(server: RunningServer):
    system = {"role": "system", "content": said_once()[0]["content"]}
    for name in ("one", "two"):
        messages = [system, {"role": "user", "content": f"{name} {said_once()[0]['content']}"}]
        body = body_of(messages, cache_mode="prefix")
        cache = server.post(CHAT, body).json()["hearth"]["cache"]
    again = server.post(CHAT, body).json()["hearth"]["cache"]
    assert 0 < cache["cached_tokens"] == again["cached_tokens"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("cache_mode", "sometimes"), ("ttl", -1), ("ttl", "long"), ("session_id", "")],
)
def test_a_wish_that_is_not_understood_is_refused_by_name(
    server: RunningServer, field: str, value: Any
):
    response = server.post(CHAT, body_of(said_once(4), **{field: value}))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
