"""Keys are walls: what one tenant asked can neither be seen nor measured by another."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.keys import digest_of
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

ADMIN = "the-admin-key"
CONFIG = f"""
prewarm_share = 0
admin_key = "{digest_of(ADMIN)}"
[api_keys]
alice = "{digest_of("alice-key")}"
bob = "{digest_of("bob-key")}"
"""
PLACE = re.compile(r"(?<!\w)/\w")
NUM_CROWD = 32
NO_KEYS = "prewarm_share = 0"
RESPONSES, AGENTS = "/v1/responses", "/v1/agents"


class Tenant:
    """Somebody with a key."""

    def __init__(self, server: RunningServer, name: str) -> None:
        self._server = server
        self._key = ADMIN if name == "admin" else f"{name}-key"

    def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        headers = {"x-api-key": self._key}
        answer = self._server.request(method, path, json=body, headers=headers)
        assert answer.status_code == status, (path, answer.text)
        return answer.json() if answer.content else None

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        """What an answer to it says of the cache."""
        messages = [{"role": "user", "content": text}]
        return self.ask("POST", CHAT, body_of(messages=messages, **fields))["hearth"]["cache"]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "hearth-tiny", "max_tokens": 4, "temperature": 0, **fields}


def new_text(num_words: int) -> str:
    return " ".join(secrets.token_hex(3) for _ in range(num_words))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), config=CONFIG) as server:
        yield server


@pytest.fixture
def alice(server: RunningServer) -> Tenant:
    return Tenant(server, "alice")


@pytest.fixture
def bob(server: RunningServer) -> Tenant:
    return Tenant(server, "bob")


NOTHING = {"cached_tokens": 0, "tier": "none", "reason": "first_seen", "at": 0}


def is_fresh(cache: dict[str, Any]) -> bool:
    return {name: cache[name] for name in NOTHING} == NOTHING


def is_found(cache: dict[str, Any]) -> bool:
    """It is on disk, where so short a prompt may be read more slowly than it is computed."""
    return cache["reason"] in (None, "slower_than_prefill")


async def test_who_asks_for_little_waits_for_no_crowd_of_another(server: RunningServer):
    """Its prompt is longer than each of theirs, so nothing but its key has it come first."""
    num_answered, is_over = 0, asyncio.Event()

    async def ask(client: httpx.AsyncClient, name: str, num_words: int) -> None:
        messages = [{"role": "user", "content": new_text(num_words)}]
        body = body_of(messages=messages) | {"max_tokens": 1}
        answer = await client.post(CHAT, json=body, headers={"x-api-key": f"{name}-key"})
        assert answer.status_code == 200, answer.text

    async def crowd(client: httpx.AsyncClient) -> None:
        nonlocal num_answered
        while not is_over.is_set() and num_answered < 5 * NUM_CROWD:
            await ask(client, "alice", 4)
            num_answered += 1

    async with server.client() as client, asyncio.TaskGroup() as group:
        for _ in range(NUM_CROWD):
            group.create_task(crowd(client))
        await until(lambda: num_answered, "the crowd is being answered")
        num_before = num_answered
        await ask(client, "bob", 60)
        is_over.set()
        assert num_answered - num_before <= 2 * NUM_CROWD


@pytest.mark.parametrize("num_words", [1, 12, 300])
def test_a_prompt_of_one_is_new_when_another_sends_it(alice: Tenant, bob: Tenant, num_words: int):
    text = new_text(num_words)
    alice.chat(text)
    again = alice.chat(text)
    assert (again["tier"], again["reason"]) == ("hot", None)
    first = bob.chat(text)
    # What bob sent himself before begins in the same way, as the template wants it.
    assert first["cached_tokens"] < 16 or first["cached_tokens"] < again["cached_tokens"] / 8
    assert first["reason"] in ("first_seen", "diverged")
    assert bob.chat(text)["cached_tokens"] == again["cached_tokens"]


def test_nothing_is_shared_hot_or_after_a_restart(tmp_path: Path):
    long, short = new_text(300), "Hi"
    with running(tmp_path, config=CONFIG) as server:
        for text in (long, short):
            Tenant(server, "alice").chat(text)
        assert is_fresh(Tenant(server, "bob").chat(short))
        assert is_fresh(Tenant(server, "admin").chat(short))
    with running(tmp_path, config=CONFIG) as server:
        kept = Tenant(server, "alice").chat(long)
        assert (kept["tier"], kept["reason"]) == ("warm", None)
        for name in ("alice", "bob"):
            assert is_found(Tenant(server, name).chat(short)), name
    config = CONFIG + f'carol = "{digest_of("carol-key")}"\n'
    with running(tmp_path, config=config) as server:
        assert is_fresh(Tenant(server, "carol").chat(short))
    with running(tmp_path, config=NO_KEYS) as server:
        messages = [{"role": "user", "content": long}]
        cache = server.post(CHAT, body_of(messages=messages)).json()["hearth"]["cache"]
        assert cache["cached_tokens"] < 32, "only the admin's own Hi begins like that"


def test_what_was_kept_without_keys_is_still_there_without_them(tmp_path: Path):
    messages = [{"role": "user", "content": new_text(300)}]
    with running(tmp_path, config=NO_KEYS) as server:
        server.post(CHAT, body_of(messages=messages))
    with running(tmp_path, config=CONFIG) as server:
        assert is_fresh(Tenant(server, "alice").chat(messages[0]["content"]))
    with running(tmp_path, config=NO_KEYS) as server:
        cache = server.post(CHAT, body_of(messages=messages)).json()["hearth"]["cache"]
        assert (cache["tier"], cache["reason"]) == ("warm", None)


def test_a_session_of_the_same_name_is_another_conversation(
    server: RunningServer, alice: Tenant, bob: Tenant
):
    admin = Tenant(server, "admin")

    def is_kept(whose: str) -> bool:
        query, headers = {"conversation": f"@{whose}/shared-name"}, {"x-api-key": ADMIN}
        answer = server.request("GET", "/admin/cache/chain", params=query, headers=headers)
        return answer.status_code == 200

    for tenant in (alice, bob):
        tenant.chat(new_text(40), session_id="shared-name")
    asyncio.run(until(lambda: is_kept("alice") and is_kept("bob"), "both are kept"))
    admin.ask("DELETE", "/admin/cache/conversations?conversation=shared-name", status=404)
    admin.ask("DELETE", "/admin/cache/conversations?conversation=@alice/shared-name")
    assert (is_kept("alice"), is_kept("bob")) == (False, True)


def test_agents_are_their_tenants_alone(alice: Tenant, bob: Tenant):
    made = alice.ask("POST", AGENTS, body_of(id="helper", system="Be brief."), 201)
    assert made["id"] == "helper"
    path = f"{AGENTS}/helper"
    for method, end, body in (
        ("GET", "", None),
        ("GET", "/history", None),
        ("PATCH", "", {"name": "mine now"}),
        ("POST", "/reset", None),
        ("POST", "/fork", {}),
        ("POST", "/generate", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("DELETE", "", None),
    ):
        refused = bob.ask(method, path + end, body, 404)
        assert refused["error"]["code"] == "agent_not_found"
        assert "@" not in refused["error"]["message"]
    assert bob.ask("GET", AGENTS)["data"] == []
    bob.ask("POST", AGENTS, body_of(id="helper"), 201)
    hello = {"messages": [{"role": "user", "content": "Hi"}]}
    assert alice.ask("POST", f"{path}/generate", hello)["agent"] == {"id": "helper", "turn": 1}
    copy = alice.ask("POST", f"{path}/fork", {"id": "copy"}, 201)
    assert (copy["id"], copy["turns"]) == ("copy", 1)
    assert [one["id"] for one in alice.ask("GET", AGENTS)["data"]] == ["copy", "helper"]
    page = alice.ask("GET", f"{AGENTS}?after=copy")
    assert [one["id"] for one in page["data"]] == ["helper"]
    assert [(one["id"], one["turns"]) for one in bob.ask("GET", AGENTS)["data"]] == [("helper", 0)]
    assert alice.ask("DELETE", path)["id"] == "helper"
    assert bob.ask("GET", path)["turns"] == 0


def test_stored_responses_are_their_tenants_alone(
    server: RunningServer, alice: Tenant, bob: Tenant
):
    body = {"model": "hearth-tiny", "input": "Hi", "max_output_tokens": 16}
    made = alice.ask("POST", RESPONSES, body)
    path = f"{RESPONSES}/{made['id']}"
    for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        assert bob.ask(method, path + end, status=404)["error"]["code"] == "response_not_found"
    following = body | {"previous_response_id": made["id"]}
    refused = bob.ask("POST", RESPONSES, following, 400)
    assert refused["error"]["code"] == "previous_response_not_found"
    whole_name = body | {"previous_response_id": f"@alice/{made['id']}"}
    for other in (bob, Tenant(server, "admin")):
        code = other.ask("POST", RESPONSES, whole_name, 400)["error"]["code"]
        assert code == "previous_response_not_found"
    item = made["output"][0]["id"]
    reference = body | {"input": [{"type": "item_reference", "id": item}]}
    bob.ask("POST", RESPONSES, reference, 400)
    assert alice.ask("GET", path)["id"] == made["id"]
    second = alice.ask("POST", RESPONSES, following)
    assert second["previous_response_id"] == made["id"]
    assert alice.ask("GET", f"{RESPONSES}/{second['id']}")["id"] == second["id"]
    alice.ask("POST", RESPONSES, reference)


def test_an_announced_prompt_is_warm_for_who_announced_it(alice: Tenant, bob: Tenant):
    text = new_text(200)
    made = alice.ask(
        "POST", "/v1/prewarm", body_of(messages=[{"role": "user", "content": text}]), 202
    )
    assert "@" not in made["id"]
    path = f"/v1/prewarm/{made['id']}"
    bob.ask("GET", path, status=404)
    bob.ask("DELETE", path, status=404)
    asyncio.run(until(lambda: alice.ask("GET", path)["status"] == "completed", "it is warm"))
    assert bob.chat(text)["cached_tokens"] < 16
    assert alice.chat(text)["reason"] is None


def test_what_is_summed_over_all_is_for_the_admin(server: RunningServer, alice: Tenant):
    for path in ("/metrics", "/running", "/running/", "/admin/dashboard", "/admin/events"):
        refused = alice.ask("GET", path, status=403)
        assert refused["error"]["code"] == "admin_key_needed", path
    keyed = {"x-api-key": ADMIN}
    assert "hearth_requests_total" in server.request("GET", "/metrics", headers=keyed).text
    assert Tenant(server, "admin").ask("GET", "/running")["models"]


def test_nobody_is_told_how_busy_others_keep_a_model(
    server: RunningServer, alice: Tenant, bob: Tenant
):
    admin = Tenant(server, "admin")
    body = body_of(
        messages=[{"role": "user", "content": "Hi"}], max_tokens=4000, ignore_eos=True, stream=True
    )

    def states(tenant: Tenant) -> list[str]:
        card = tenant.ask("GET", "/v1/models/hearth-tiny")
        return [
            card["state"],
            tenant.ask("GET", "/v1/models")["data"][0]["state"],
            tenant.ask("GET", "/health/ready")["models"][0]["state"],
        ]

    with server.stream("POST", CHAT, json=body, headers={"x-api-key": "alice-key"}) as response:
        lines = response.iter_lines()
        assert next(lines)
        seen = {name: states(Tenant(server, name)) for name in ("alice", "bob", "admin")}
        running = admin.ask("GET", "/running")["models"][0]["num_running"]
    assert (running, seen["admin"]) == (1, ["busy"] * 3)
    assert seen["alice"] == seen["bob"] == ["ready"] * 3
    alice.chat("Hi")
    assert "expires_at" not in bob.ask("GET", "/api/ps")["models"][0]


async def test_health_shows_pools_to_who_runs_the_server_and_agents_to_their_tenant(
    server: RunningServer, alice: Tenant, bob: Tenant
):
    alice.chat(new_text(300))
    agent = alice.ask("POST", AGENTS, {"model": "hearth-tiny"}, 201)["id"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4000, "stream": True}
    body["ignore_eos"] = True

    def shown(name: str) -> dict[str, Any]:
        return Tenant(server, name).ask("GET", "/health/ready")

    path = f"{AGENTS}/{agent}/generate"
    with server.stream("POST", path, json=body, headers={"x-api-key": "alice-key"}) as response:
        lines = response.iter_lines()
        assert next(lines)
        seen = {name: shown(name) for name in ("alice", "bob", "admin")}
    assert [one["agents"]["active"] for one in seen.values()] == [1, 0, 1]
    assert {one["agents"]["waiting"] for one in seen.values()} == {0}
    assert "pools" not in seen["alice"] | seen["bob"]
    headers = {"x-api-key": ADMIN}
    assert server.request("GET", "/metrics", headers=headers).status_code == 200  # counts the disk

    def pools() -> dict[str, Any]:
        return {one["tier"]: one for one in shown("admin")["pools"]}

    await until(lambda: pools()["hot"]["used_bytes"] > 0, "a heartbeat told of the memory")
    full = pools()
    assert 0 < full["hot"]["used_bytes"] <= full["hot"]["cap_bytes"]
    assert 0 < full["hot"]["utilization"] <= 1
    assert (full["warm"]["cap_bytes"] or 0) > 0
    assert (full["cold"]["used_bytes"], full["cold"]["utilization"]) == (0, None)
    assert server.request("GET", "/health/ready").status_code == 401


def test_a_turn_of_one_is_not_put_back_for_another(alice: Tenant, bob: Tenant):
    question = [{"role": "user", "content": new_text(20)}]

    def asked(tenant: Tenant, messages: list[Any]) -> dict[str, Any]:
        return tenant.ask("POST", CHAT, body_of(messages=messages, max_tokens=16))

    said = asked(alice, question)["choices"][0]["message"]
    later = [*question, {"role": "assistant", "content": said["content"]}, *question]
    num_alone = asked(bob, later)["usage"]["prompt_tokens"]
    assert asked(bob, later)["usage"]["prompt_tokens"] == num_alone
    assert bob.chat(new_text(5))["cached_tokens"] < 16


def test_only_the_operator_is_told_where_a_model_that_cannot_be_used_lies(tmp_path: Path):
    home, away = tmp_path / "home", tmp_path / "some where" / "away"
    broken = home / "models" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    gone = f'[models.gone]\npath = "{away}"\n[models.far]\nrepo = "org/far"\n'
    with running(home, config=f"{CONFIG}{gone}") as server:
        alice, admin = Tenant(server, "alice"), Tenant(server, "admin")
        for name, what in (("broken", "config.json"), ("gone", "away"), ("far", "org/far")):
            told = [one.ask("GET", "/v1/models")["refused"] for one in (alice, admin)]
            hers, his = (next(one for one in some if one["id"] == name) for some in told)
            assert what in hers["reason"]
            assert PLACE.search(his["reason"])
            refused = [
                one.ask("POST", CHAT, body_of(model=name, messages=[]), status=404)
                for one in (alice, admin)
            ]
            her, him = (one["error"]["message"] for one in refused)
            assert what in her
            assert PLACE.search(him)
            for text in (hers["reason"], her):
                assert not PLACE.search(text)
                assert not [part for part in ("some where", tmp_path.name, "home/") if part in text]
