"""The page at `/`, its files, and the figures behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from store.types import DEFAULT_TTL_S
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

HTML = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
BASE = "/admin/dashboard"
PREWARM = f"{BASE}/conversations/prewarm"
PIN, KEPT = "/admin/cache/pin", "/admin/cache/conversations"
SYSTEM = {"role": "system", "content": "kettle " * 400}


@pytest.fixture(scope="module")
def hearth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of its own, of which every count is known."""
    with running(tmp_path_factory.mktemp("dashboard")) as server:
        yield server


def say(server: RunningServer, session: str, text: str = "one") -> Any:
    messages = [SYSTEM, {"role": "user", "content": f"{session} {text}"}]
    body = {"model": "hearth-tiny", "messages": messages, "max_tokens": 4, "session_id": session}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def listed(server: RunningServer, search: str = "") -> list[Any]:
    answer = server.request("GET", f"{BASE}/conversations", params={"search": search})
    return [one for one in answer.json()["conversations"] if one["is_named"]]


def act(server: RunningServer, method: str, path: str, **query: Any) -> Any:
    answer = server.request(method, path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def saved(server: RunningServer, num: int) -> list[Any]:
    """The conversations, once so many are on disk."""
    seen: list[Any] = []

    def are_saved() -> bool:
        """Listed they are before their last turn is on disk."""
        seen[:] = listed(server)
        return len(seen) == num and all(one["own_bytes"] for one in seen)

    await until(are_saved, f"{num} conversations on disk")
    return seen


async def test_what_was_reused_is_counted_to_the_token_and_survives_a_restart(tmp_path: Path):
    with running(tmp_path / "home") as server:
        day = datetime.now(UTC).date()
        answers = [say(server, "first"), say(server, "second")]
        # On a busy machine a restore may take longer than what it saves; not every one does.
        while not server.get(BASE).json()["saved_total"]["saved_prefill_s"] and len(answers) < 20:
            answers.append(say(server, f"another {len(answers)}"))
        usage = [one["usage"] for one in answers]
        prompt = sum(one["prompt_tokens"] for one in usage)
        cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
        assert cached > 400
        now = server.get(BASE).json()
        is_today = datetime.now(UTC).date() == day
        for period in ("saved_today", "saved_total") if is_today else ("saved_total",):
            assert now[period]["prompt_tokens"] == prompt
            assert now[period]["saved_tokens"] == cached
            assert now[period]["hit_rate"] == cached / prompt
            assert now[period]["saved_prefill_s"] > 0
    with running(tmp_path / "home") as server:
        again = server.get(BASE).json()["saved_total"]
        assert again == pytest.approx(now["saved_total"])


async def test_conversations_are_found_pinned_and_deleted(hearth: RunningServer):
    for session in ("one", "two"):
        say(hearth, session)
    latest, other = await saved(hearth, 2)
    assert latest["model"] == "hearth-tiny"
    assert latest["tier"] == "hot"
    assert 0 < latest["expires_in_s"] <= DEFAULT_TTL_S
    assert [one["id"] for one in listed(hearth, other["id"][:10])] == [other["id"]]
    assert listed(hearth, "no such thing") == []

    act(hearth, "POST", PIN, conversation=other["id"])
    pins = {one["id"]: (one["is_pinned"], one["expires_in_s"]) for one in listed(hearth)}
    assert pins[other["id"]] == (True, None)
    assert pins[latest["id"]][0] is False
    act(hearth, "POST", PIN, conversation=other["id"], pinned=False)
    assert not any(one["is_pinned"] for one in listed(hearth))

    act(hearth, "POST", PIN, conversation=other["id"])
    gone = act(hearth, "DELETE", KEPT, conversation=other["id"])
    assert gone["num_slots"] > 0
    assert [one["id"] for one in listed(hearth)] == [latest["id"]]


async def test_a_conversation_is_brought_into_memory(hearth: RunningServer):
    known = {one["id"] for one in listed(hearth)}
    say(hearth, "warm")
    await until(lambda: {one["id"] for one in listed(hearth)} - known, "it is on disk")
    (name,) = {one["id"] for one in listed(hearth)} - known

    def is_brought_whole() -> bool:
        told = act(hearth, "POST", PREWARM, conversation=name)
        return told["num_tokens"] == listed(hearth, name)[0]["num_tokens"] > 0

    await until(is_brought_whole, "all of it is on disk and asked for")


async def test_a_shared_prefix_is_one_slot_that_several_continue(hearth: RunningServer):
    before = len(listed(hearth))
    for session in ("tree one", "tree two", "tree three"):
        say(hearth, session)
    await saved(hearth, before + 3)
    tree = hearth.request("GET", f"{BASE}/tree", params={"model": "hearth-tiny"}).json()
    slots = {one["id"]: one for one in tree["slots"]}
    assert tree["num_slots"] == len(slots)
    roots = [one for one in slots.values() if one["parent"] is None]
    assert len(roots) == 1, roots
    (trunk,) = roots
    children = [one for one in slots.values() if one["parent"] == trunk["id"]]
    assert len(children) >= 2
    assert all(one["parent"] in slots for one in slots.values() if one is not trunk)
    assert all(trunk["start"] < one["start"] <= trunk["end"] for one in children)
    empty = hearth.request("GET", f"{BASE}/tree", params={"model": "unknown"}).json()
    assert empty["slots"] == []


def test_the_first_event_is_how_everything_stands(hearth: RunningServer):
    with hearth.stream("GET", f"{BASE}/events") as response:
        lines = response.iter_lines()
        assert next(lines) == "event: snapshot"
        now = json.loads(next(lines).removeprefix("data: "))
    assert [one["id"] for one in now["models"]] == ["hearth-tiny"]
    assert now["memory"]["reserved_bytes"] == now["models"][0]["reserved_bytes"]
    assert [one["tier"] for one in now["tiers"]] == ["hot", "warm", "cold"]
    assert now["requests"] == []


def test_browsers_get_the_page_and_probes_what_they_always_got(hearth: RunningServer):
    page = hearth.request("GET", "/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    for accept in ("*/*", "application/json"):
        probe = hearth.request("GET", "/", headers={"accept": accept})
        assert probe.json() == {"status": "live"}
        assert probe.headers["vary"] == "accept"
    assert hearth.request("HEAD", "/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/dashboard/app.js", "/dashboard/uplot.min.js"])
def test_nothing_but_its_own_files_may_run_in_the_page(hearth: RunningServer, path: str):
    headers = hearth.request("GET", path, headers=HTML).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_has_no_inline_code_and_names_no_other_host(hearth: RunningServer):
    page = hearth.request("GET", "/", headers=HTML).text
    assert "://" not in page
    assert " style=" not in page
    assert " onclick=" not in page
    assert page.count("<script") == page.count("<script src=")


@pytest.mark.parametrize("name", ["no.js", "..%2Fpage.py", "index.html", "vendor"])
def test_no_other_file_is_served(hearth: RunningServer, name: str):
    assert hearth.get(f"/dashboard/{name}").status_code == 404


@pytest.mark.parametrize("path", ["", "/samples", "/events", "/conversations", "/tree?model=x"])
def test_figures_are_for_this_machine_only(hearth: RunningServer, path: str):
    answer = hearth.request("GET", f"{BASE}{path}", headers={"host": "rebound.example"})
    assert answer.status_code == 403


def test_an_unknown_conversation_is_a_clear_error(hearth: RunningServer):
    for method, path in (("POST", PIN), ("POST", PREWARM), ("DELETE", KEPT)):
        answer = hearth.request(method, path, params={"conversation": "nobody"})
        assert answer.status_code == 404
        assert "nobody" in answer.json()["error"]["message"]
