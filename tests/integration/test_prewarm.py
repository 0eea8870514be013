"""What is announced, named in the configuration or often asked for is warm before it is asked."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.agents import Agent
from tests.running_server import CHAT, RunningServer, hearth, running
from tests.waiting import until

SYSTEM = " ".join(f"Rule {number}: be kind to boat number {number}." for number in range(60))
OTHER = " ".join(f"Law {number}: never sell the lamp number {number}." for number in range(60))
TOOL = {"name": "row", "description": "Row a boat.", "input_schema": {"type": "object"}}
CONFIG = 'default_model = "tiny"\nprewarm_share = 0\nblock_size = 16\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Generator[RunningServer]:
    home = tmp_path_factory.mktemp("prewarm")
    with running(home, "--models-dir", str(models_dir), config=CONFIG) as server:
        yield server


def question(system: str, text: str = "Hello?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0} | fields


def asked(server: RunningServer, body: dict[str, Any]) -> tuple[int, str]:
    """How many tokens were cached, and where."""
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer["hearth"]["cache"]["tier"]


async def warmed(server: RunningServer, body: dict[str, Any], path: str = "/v1/prewarm") -> Any:
    response = server.post(path, body)
    assert response.status_code == 202, response.text
    view = response.json()

    def is_over() -> bool:
        state = server.get(f"/v1/prewarm/{view['id']}").json()
        view.update(state)
        return state["status"] in ("completed", "failed")

    await until(is_over, "it is warm")
    return view


async def test_an_announced_system_prompt_is_warm_for_its_first_request(server: RunningServer):
    system = "announced " + SYSTEM
    view = await warmed(server, {"messages": [{"role": "system", "content": system}]})
    assert (view["status"], view["tier"], view["cached_tokens"]) == ("completed", "none", 0)
    cached, tier = asked(server, question(system))
    assert tier == "hot"
    assert cached > view["prompt_tokens"] - 30


async def test_messages_are_warm_to_their_end(server: RunningServer):
    body = question("whole " + SYSTEM, "A long question about boats. " * 20)
    view = await warmed(server, body)
    cached, _ = asked(server, body)
    assert cached == view["prompt_tokens"] - 1


async def test_anthropics_shape_is_known(server: RunningServer):
    view = await warmed(server, {"system": "claude " + SYSTEM, "tools": [TOOL]})
    assert view["status"] == "completed"
    body = {
        "max_tokens": 2,
        "system": "claude " + SYSTEM,
        "tools": [TOOL],
        "messages": [{"role": "user", "content": "Hello?"}],
    }
    usage = server.post("/v1/messages", body).json()["usage"]
    assert usage["cache_read_input_tokens"] > view["prompt_tokens"] - 30


async def test_and_that_of_responses(server: RunningServer):
    body = {"instructions": "codex " + SYSTEM, "input": "Hello?"}
    view = await warmed(server, body)
    usage = server.post("/v1/responses", body | {"max_output_tokens": 2}).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == view["prompt_tokens"] - 1


def test_what_cannot_be_warmed_is_refused_by_its_field(server: RunningServer):
    response = server.post("/v1/prewarm", {})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    body = question(SYSTEM, pinned=True, ttl=60)
    assert server.post("/v1/prewarm", body).json()["error"]["param"] == "ttl"
    assert server.get("/v1/prewarm/unknown").status_code == 404


def test_only_so_many_prompts_can_be_announced(narrow_server: RunningServer):
    body = question("many " + SYSTEM, model=narrow_server.cold_model())
    views = [narrow_server.post("/v1/prewarm", body) for _ in range(5)]
    assert [one.status_code for one in views] == [202, 202, 202, 202, 429]
    assert "max_queue" in views[-1].json()["error"]["message"]
    cancel(narrow_server, views[:-1])
    again = narrow_server.post("/v1/prewarm", body)
    assert again.status_code == 202
    cancel(narrow_server, [again])


def cancel(server: RunningServer, views: Sequence[Any]) -> None:
    for one in views:
        path = f"/v1/prewarm/{one.json()['id']}"
        assert server.request("DELETE", path).status_code == 204


async def test_a_cold_model_is_not_woken_unless_that_is_asked(server: RunningServer):
    body = question(SYSTEM, model="twin")
    view = server.post("/v1/prewarm", body).json()
    assert view["status"] == "waiting"
    states = {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}
    assert states["twin"] == "cold"
    loaded = await warmed(server, body | {"load": True})
    assert loaded["status"] == "completed"
    await until(
        lambda: server.get(f"/v1/prewarm/{view['id']}").json()["status"] == "completed",
        "what waited is warm as well",
    )


def listed(server: RunningServer) -> list[dict[str, Any]]:
    return server.get("/admin/cache").json()["conversations"]


async def on_disk(server: RunningServer, num: int) -> list[dict[str, Any]]:
    await until(
        lambda: len(listed(server)) == num and all(one["is_durable"] for one in listed(server)),
        f"{num} conversations are on disk",
    )
    return listed(server)


async def brought(server: RunningServer) -> None:
    """Wait until something is in memory of a model that was loaded just now."""
    await until(lambda: server.figure("hearth_kv_hot_bytes") > 0, "it is brought")


async def test_what_conversations_begin_with_is_warm_after_a_restart_and_gone_when_deleted(
    tmp_path: Path, models_dir: Path
):
    flags = ("--models-dir", str(models_dir))
    with running(tmp_path, *flags, config=CONFIG) as server:
        for number in range(3):
            asked(server, question(OTHER, f"Question {number}?", session_id=f"lamps {number}"))
        asked(server, question(SYSTEM, "Alone?", session_id="boats"))
        await on_disk(server, 4)
    with running(tmp_path, *flags, config=CONFIG) as server:
        await brought(server)
        cached, tier = asked(server, question(OTHER, "Something new?"))
        assert (tier, cached > 500) == ("hot", True)
        assert asked(server, question(SYSTEM, "Something new?"))[1] == "warm"
        response = server.request("DELETE", "/admin/cache/models?model=tiny")
        assert response.status_code == 200, response.text
    with running(tmp_path, *flags, config=CONFIG) as server:
        assert asked(server, question(OTHER, "Something new?"))[0] == 0


@pytest.mark.parametrize("setting", ["prewarm = false", "prewarm_learned = 0"])
async def test_nothing_is_brought_that_is_not_wanted(
    tmp_path: Path, models_dir: Path, setting: str
):
    flags, config = ("--models-dir", str(models_dir)), f"{setting}\n{CONFIG}"
    with running(tmp_path, *flags, config=config) as server:
        for number in range(2):
            asked(server, question(OTHER, f"Question {number}?"))
        await on_disk(server, 2)
    with running(tmp_path, *flags, config=config) as server:
        cached, tier = asked(server, question(OTHER, "Something new?"))
        assert (tier, cached > 500) == ("warm", True)


LONG = " ".join(f"Clause {number}: mend net number {number}." for number in range(100))
"""So much that what a template writes around it is less than a fiftieth."""

CANARY = "canary"
SCHEMA = {"type": "object", "properties": {"far": {"type": "integer", "description": CANARY}}}
ROW = {"name": "row", "description": f"{CANARY} rows"}
TOOLS = {
    "chat": {"type": "function", "function": {**ROW, "parameters": SCHEMA}},
    "messages": {**ROW, "input_schema": SCHEMA},
    "responses": {"type": "function", **ROW, "parameters": SCHEMA},
}
"""The same tool as the protocols have it; Ollama has it as chat completions do."""

Form = tuple[str, object, str, list[Any]]


def configured(home: Path) -> list[Form]:
    """Each form that is documented: its system text, what the file says, protocol and tools."""
    forms: list[Form] = []

    def add(how: str, wanted: Any, protocol: str = "chat", *tools: Any) -> None:
        forms.append((system_of(how), wanted, protocol, list(tools)))

    def filed(name: str, content: str) -> str:
        (home / "prompts").mkdir(exist_ok=True)
        (home / "prompts" / name).write_text(content)
        return f"prompts/{name}"

    add("text", system_of("text"))
    add("lines", system_of("lines"))
    add("plain", filed("plain.md", system_of("plain")))
    add("named", filed("no suffix", system_of("named")))
    add("braces", filed("braces.txt", system_of("braces")))
    tool = TOOLS["chat"]
    told = [{"role": "system", "content": system_of("json chat")}]
    add("json chat", filed("c.json", json.dumps({"messages": told, "tools": [tool]})), "chat", tool)
    tool = TOOLS["messages"]
    body = {"system": system_of("json messages"), "tools": [tool]}
    add("json messages", filed("m.json", json.dumps(body)), "messages", tool)
    tool = TOOLS["responses"]
    body = {"instructions": system_of("json responses"), "tools": [tool]}
    add("json responses", filed("r.json", json.dumps(body)), "responses", tool)
    add("json table", filed("t.json", json.dumps({"system": system_of("json table")})), "ollama")
    add("table", {"system": system_of("table")}, "messages")
    for protocol in ("chat", "messages", "responses", "ollama"):
        tool = TOOLS["chat" if protocol == "ollama" else protocol]
        how = f"table {protocol}"
        add(how, {"system": system_of(how), "tools": [tool]}, protocol, tool)
    return forms


def system_of(how: str) -> str:
    starts = {"braces": "{ not JSON }", "lines": "Two\nlines."}
    return f"{starts.get(how, '')}{CANARY} {how}. {LONG}"


def toml(value: object) -> str:
    """A value as TOML has it within a line; JSON's texts and lists are written alike."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {toml(one)}' for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def ask_as_a_client(server: RunningServer, model: str, form: Form) -> tuple[int, int]:
    """The first request of a client: its prompt tokens, and those that were cached."""
    system, _, protocol, tools = form
    user = [{"role": "user", "content": "Hello?"}]
    chat = [{"role": "system", "content": system}, *user]
    own = {"tools": tools} if tools else {}
    path, body = {
        "chat": (CHAT, {"messages": chat, "max_tokens": 1}),
        "messages": ("/v1/messages", {"system": system, "messages": user, "max_tokens": 1}),
        "responses": (
            "/v1/responses",
            {"instructions": system, "input": "Hello?", "max_output_tokens": 1, "store": False},
        ),
        "ollama": ("/api/chat", {"messages": chat, "stream": False, "options": {"num_predict": 1}}),
    }[protocol]
    answer = server.post(path, {"model": model, **own, **body})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    num_cached = said["hearth"]["cache"]["cached_tokens"]
    match protocol:
        case "ollama":
            return said["prompt_eval_count"], num_cached
        case "chat":
            return said["usage"]["prompt_tokens"], num_cached
        case "responses":
            return said["usage"]["input_tokens"], num_cached
        case _:
            parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            return sum(said["usage"][name] for name in parts), num_cached


async def test_a_text_a_file_and_a_table_with_tools_are_warm_for_their_first_request(
    tmp_path: Path, models_dir: Path
):
    starts = tuple(map(system_of, ("text", "json chat", "table messages")))
    forms = [form for form in configured(tmp_path) if form[0] in starts]
    assert len(forms) == len(starts)
    config = f"{CONFIG}[models.tiny]\nprewarm = {toml([wanted for _, wanted, _, _ in forms])}\n"
    with running(tmp_path, "--models-dir", str(models_dir), config=config) as server:
        await until(lambda: num_warm(server) == len(forms), "all is warm", 120)
        check_warm(server, "tiny", forms)
        assert CANARY not in server.stderr


def check_warm(server: RunningServer, model: str, forms: Sequence[Form]) -> None:
    for form in forms:
        num_tokens, num_cached = ask_as_a_client(server, model, form)
        assert num_cached >= 0.98 * num_tokens, (model, form[0][:40], form[2])


async def test_every_form_of_the_configuration_is_warm_for_its_first_request(
    tmp_path: Path, models_dir: Path
):
    """On a model that is pinned and on one that is not, with no word of it in the log."""
    forms = configured(tmp_path)
    listed = toml([wanted for _, wanted, _, _ in forms])
    config = CONFIG + 'preload = ["tiny"]\nlog_level = "debug"\n'
    config += f"[models.tiny]\nprewarm = {listed}\n"
    config += f"[models.twin]\npinned = true\nprewarm = {listed}\n"
    flags = ("--models-dir", str(models_dir))
    (tmp_path / "hearth.toml").write_text(config)
    checked = hearth("config", "check", *flags, HEARTH_HOME=str(tmp_path))
    assert (checked.returncode, "not prewarmed" in checked.stdout) == (0, False), checked.stdout
    with running(tmp_path, *flags, config=config) as server:
        wanted = 2 * len(forms)

        def are_warm() -> bool:
            return num_warm(server) == wanted

        await until(are_warm, "all is warm", 120)
        assert server.figure("hearth_prewarm_total", outcome="failed") == 0
        for model in ("tiny", "twin"):
            check_warm(server, model, forms)

        def are_pinned() -> bool:
            return pins_of(server.home) == wanted

        await until(are_pinned, "every prompt is pinned")
        assert CANARY not in server.stderr
    config = CONFIG + f"[models.tiny]\nprewarm = {toml([LONG])}\n[models.twin]\npinned = true\n"
    config += f"prewarm = {listed}\n"
    with running(tmp_path, *flags, config=config) as server:
        wanted = 1 + len(forms)
        await until(are_pinned, "what is wanted no more is pinned no more, of that model alone")


def num_warm(server: RunningServer) -> float:
    """Prompts of the configuration that are warm; one that made way meanwhile is counted once."""
    outcomes = ("computed", "restored", "hot")
    name, source = "hearth_prewarm_total", "config"
    return sum(server.figure(name, source=source, outcome=one) for one in outcomes)


def pins_of(home: Path) -> int:
    with closing(sqlite3.connect(home / "kv" / "index.db")) as index:
        heads = index.execute("SELECT pins FROM heads").fetchall()
        return sum(len(msgspec.msgpack.decode(pins)) for (pins,) in heads)


def test_what_is_no_prompt_is_told_by_its_place_and_keeps_nothing_else_cold(
    tmp_path: Path, models_dir: Path
):
    (tmp_path / "broken.json").write_text(f'{{"system": "{CANARY}"')
    (tmp_path / "other.json").write_text(json.dumps({CANARY: CANARY}))
    (tmp_path / "latin.txt").write_bytes(f"{CANARY} caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "long.txt").write_text(CANARY * 2000)
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.json").mkdir()
    wrong_tool = {"system": CANARY, "tools": [{"type": CANARY}]}
    wrong = [
        "missing.json", f"./{CANARY}", "broken.json", "other.json", "latin.txt", "empty.txt",
        "long.txt", "pipe.txt", "folder.json", "", {"system": ""}, wrong_tool,
        {"system": CANARY, "tools": [TOOLS["chat"], TOOLS["messages"]]},
    ]  # fmt: skip
    config = CONFIG + 'max_body_bytes = 10000\nlog_level = "debug"\n[models.tiny]\n'
    config += f"prewarm = {toml([*wrong, SYSTEM])}\n"
    (tmp_path / "hearth.toml").write_text(config)
    flags = ("--models-dir", str(models_dir))
    checked = hearth("config", "check", "--json", *flags, HEARTH_HOME=str(tmp_path))
    assert checked.returncode == 1
    told = json.loads(checked.stdout)["not_prewarmed"]
    assert set(told) == {f"models.tiny.prewarm[{number}]" for number in range(len(wrong))}
    with running(tmp_path, *flags, config=config) as server:
        while num_warm(server) < 1:
            pass
        assert server.stderr.count("prewarm_unusable") == len(wrong)
        assert asked(server, question(SYSTEM))[1] == "hot"
        assert CANARY not in server.stderr


def test_a_list_that_is_none_is_refused_without_a_word_of_it(tmp_path: Path):
    for wrong in (f'"{CANARY}"', f"[[{toml(CANARY)}]]", f"[{{ systen = {toml(CANARY)} }}]"):
        (tmp_path / "hearth.toml").write_text(f"[models.hearth-tiny]\nprewarm = {wrong}\n")
        done = hearth("config", "check", HEARTH_HOME=str(tmp_path))
        assert done.returncode == 2
        assert "models.hearth-tiny.prewarm" in done.stderr
        assert CANARY not in done.stderr


def reload(server: RunningServer) -> None:
    """Only what is on disk is left; nothing but what is pinned comes back by itself."""
    for action in ("unload", "load"):
        assert server.post(f"/admin/models/tiny/{action}", {}).status_code == 200


async def test_what_an_agent_or_a_response_goes_on_from_is_warm_before_it_goes_on(
    server: RunningServer,
):
    agent = Agent.made(server, system="agent " + SYSTEM, max_tokens=2)
    said = agent.say("Hello?")
    body = {"instructions": "response " + SYSTEM, "input": "Hello?", "max_output_tokens": 2}
    first = server.post("/v1/responses", body).json()
    reload(server)
    views: list[Any] = []

    def is_announced() -> bool:
        views.append(server.post("/v1/prewarm", {"agent_id": agent.id}).json())
        return views[-1]["prompt_tokens"] >= said.num_prompt_tokens - 1

    await until(is_announced, "the whole turn is on disk")
    assert views[-1]["status"] == "queued", views
    await until(lambda: agent.view()["status"] == "hot", "it is in memory")
    goes_on = {"instructions": body["instructions"], "previous_response_id": first["id"]}
    warm = await warmed(server, goes_on)
    assert warm["status"] == "completed", warm
    assert warm["prompt_tokens"] >= first["usage"]["input_tokens"]
    second = server.post("/v1/responses", body | goes_on | {"input": "And now?"}).json()
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["input_tokens"] - 1
    assert second["hearth"]["cache"]["tier"] == "hot"
    before = server.figure("hearth_cache_requests_total", tier="hot")
    again = agent.say("And now?")
    assert again.num_cached_tokens >= said.num_prompt_tokens - 1
    assert server.figure("hearth_cache_requests_total", tier="hot") == before + 1
    missing = server.post("/v1/prewarm", {"agent_id": "nobody"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "agent_not_found")


async def test_what_is_pinned_comes_back_with_its_model_until_the_pin_is_deleted(
    server: RunningServer,
):
    systems = {name: f"{name} pin " + SYSTEM for name in ("kept", "dropped")}
    views = {
        name: await warmed(server, {"messages": question(text)["messages"][:1], "pinned": True})
        for name, text in systems.items()
    }
    assert all(view["pinned"] for view in views.values())
    path = f"/v1/prewarm/{views['dropped']['id']}"
    assert server.request("DELETE", path).status_code == 204
    reload(server)
    await until(lambda: server.figure("hearth_kv_hot_bytes") > 0, "what is pinned is hot")
    assert asked(server, question(systems["dropped"]))[1] == "warm"
    cached, tier = asked(server, question(systems["kept"]))
    assert tier == "hot"
    assert cached > views["kept"]["prompt_tokens"] - 30
    path = f"/v1/prewarm/{views['kept']['id']}"
    assert server.request("DELETE", path).status_code == 204
    assert server.request("DELETE", "/v1/prewarm/unknown").status_code == 404


async def test_what_is_warmed_at_this_moment_can_be_cancelled_and_is_not_pinned(
    server: RunningServer,
):
    body = question("long " + SYSTEM * 2)
    view = server.post("/v1/prewarm", {"messages": body["messages"], "pinned": True}).json()
    path = f"/v1/prewarm/{view['id']}"
    await until(lambda: server.get(path).json()["status"] != "queued", "it has begun")
    assert server.request("DELETE", path).status_code == 204
    assert server.get(path).json()["status"] in ("cancelled", "completed")
    asked(server, body)  # whatever the worker did of it, it has told by now
    listing = server.get("/admin/cache").json()["conversations"]
    assert not any(one["is_pinned"] for one in listing)


async def test_what_cannot_be_warmed_is_counted_and_harms_nobody(server: RunningServer):
    before = server.figure("hearth_prewarm_total", outcome="failed")
    view = await warmed(server, {"messages": question(SYSTEM * 20)["messages"][:1]})
    assert view["status"] == "failed"
    assert server.figure("hearth_prewarm_total", outcome="failed") == before + 1
    assert asked(server, question("Hi"))[0] >= 0


async def test_memory_only_kv_of_a_conversation_can_be_deleted(server: RunningServer):
    body = question("secret " + SYSTEM, session_id="memory-only", ttl=0)
    asked(server, body)
    assert asked(server, body)[1] == "hot"
    path = "/admin/cache/conversations?conversation=memory-only"
    assert server.request("DELETE", path).status_code == 200
    assert asked(server, body | {"cache_mode": "off"})[0] == 0
    again = server.post(CHAT, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again < 40


async def test_models_that_are_gone_or_too_large_keep_nothing_else_from_being_warmed(
    tmp_path: Path, models_dir: Path
):
    for name in ("tiny", "twin", "gone", "large"):
        shutil.copytree(models_dir / "tiny", tmp_path / "models" / name)
    config = CONFIG + "preload = []\nmax_queue = 2\n[models.large]\ncontext = 100_000_000_000\n"
    body = {"messages": [{"role": "system", "content": SYSTEM}]}
    with running(tmp_path, config=config) as server:
        for _ in range(3):  # none of them is remembered, or they would soon be too many
            refused = server.post("/v1/prewarm", body | {"model": "large", "load": True})
            assert refused.json()["error"]["code"] == "model_too_large"
        assert server.post("/v1/prewarm", body | {"model": "gone"}).status_code == 202
        shutil.rmtree(tmp_path / "models" / "gone")
        await until(lambda: "gone" not in names(server), "it is seen to be gone")
        await until_warm(server, server.post("/v1/prewarm", body | {"model": "twin"}).json())


def names(server: RunningServer) -> set[str]:
    """All models; the disk is looked at again for a name that nobody knows."""
    assert server.get("/v1/models/nobody").status_code == 404
    return {card["id"] for card in server.get("/v1/models").json()["data"]}


async def until_warm(server: RunningServer, view: dict[str, Any]) -> None:
    """Nobody loads its model for it; a request does."""
    assert view["status"] == "waiting"
    assert server.post(CHAT, question("", model=view["model"])).status_code == 200
    path = f"/v1/prewarm/{view['id']}"
    await until(lambda: server.get(path).json()["status"] == "completed", "it is warm")
