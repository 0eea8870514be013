"""`hearth cache`, `db`, `doctor` and `cold` on a store by blocks that no server has."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.contents import KvContents
from runtime.types import CacheParams, ChatPrompt, Message
from store.keyed_names import conversation_key
from store.ownership import secret_of
from tests.asking import ask
from tests.integration.test_kv_blocks_kept import NUM_TOKENS, kept, prompt, reused, serving
from tests.kept_turns import turns_below
from tests.running_server import hearth
from tests.tiny_models import TEXT, write_model
from tests.waiting import until

BLOCK = 256
NUM_BLOCKS = 5
"""Whole ones of each prompt."""


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    """Of three conversations, one of which has no session id."""
    write_model(tmp_path / "models" / "m")
    async with serving(tmp_path) as (supervisor, kv):
        for seed, session in enumerate(["one", "two", None]):
            await reused(supervisor, prompt(seed), session_id=session)
        await kept(kv, 3)
    return tmp_path


def command(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return hearth(*words, "--json", HEARTH_HOME=str(home), **variables)


def said(home: Path, *words: str, **variables: str) -> Any:
    outcome = command(home, *words, **variables)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


def cache(home: Path, *words: str, **variables: str) -> Any:
    return said(home, "cache", *words, **variables)


async def test_what_is_there_is_shown_pinned_and_deleted_without_a_server(home: Path):
    key = conversation_key(secret_of(home / "kv"), "one").hex()
    listed = cache(home, "ls", "--model", "m")
    (nameless,) = [one["id"] for one in listed if not one["is_named"]]
    assert key in {one["id"] for one in listed}
    shown = cache(home, "show", "one")
    assert len(shown["slots"]) == NUM_BLOCKS + 1
    assert cache(home, "pin", "one") == {"id": key, "is_pinned": True, "num_tokens": NUM_TOKENS + 2}
    assert cache(home, "show", key[:8])["is_kept"]
    assert not cache(home, "unpin", "one")["is_pinned"]
    assert command(home, "cache", "pin", "nobody").returncode == 1
    stats = cache(home, "stats")
    assert (stats["root"], stats["num_conversations"]) == (str(home / "kv"), 3)
    verified = cache(home, "verify")
    assert (verified["num_verified"], verified["num_damaged"]) == (3 * NUM_BLOCKS + 3, 0)
    assert cache(home, "gc")["num_dropped"] == 0
    removed = {
        "num_conversations": 1,
        "num_slots": NUM_BLOCKS + 1,
        "is_cut": True,
        "is_pending": False,
    }
    assert cache(home, "rm", "one") == removed
    assert cache(home, "rm", nameless) == removed
    assert cache(home, "rm", "--model", "m") == removed
    assert command(home, "cache", "rm", "two").returncode == 1
    assert cache(home, "rm", "--all", "--yes")["num_slots"] == 0
    assert [*(home / "kv" / "slots").rglob("*.safetensors")] == []
    assert [*(home / "kv" / "heads").rglob("*.safetensors")] == []


async def test_a_conversation_travels_to_another_home_without_a_server(home: Path, tmp_path: Path):
    file, other = tmp_path / "cache.safetensors", tmp_path / "other"
    (other / "models").mkdir(parents=True)
    (other / "models" / "m").symlink_to(home / "models" / "m")
    (other / "kv").mkdir()
    num_tokens = cache(home, "export", "two", str(file))["num_tokens"]
    assert num_tokens == NUM_TOKENS + 2
    imported = cache(other, "import", str(file), "--model", "m")
    assert (imported["num_tokens"], imported["num_new_slots"]) == (num_tokens, NUM_BLOCKS)
    async with serving(other) as (supervisor, _):
        use = await reused(supervisor, prompt(1))
        assert (use.tier, use.num_tokens) == ("warm", NUM_TOKENS - 1)
    slot = cache(home, "show", "two")["slots"][1]["id"]
    assert cache(home, "export", "--slot", slot, str(file))["num_tokens"] == 512
    refused = command(home, "cache", "export", "nobody", str(file))
    assert refused.returncode == 1
    assert "No conversation" in refused.stderr


async def test_its_database_is_checked_and_its_cold_store_is_marked(home: Path):
    index = str(home / "kv" / "index.db")
    for action in ("check", "upgrade"):
        found = said(home, "db", action)
        assert found["is_intact"]
        assert index in {one["path"] for one in found["databases"]}
    doctor = hearth("doctor", HEARTH_HOME=str(home))
    assert f"{index} is intact" in doctor.stdout
    cold = {"HEARTH_COLD_STORE": str(home / "cold")}
    assert said(home, "cold", "take", **cold)["is_ours"]
    assert said(home, "cold", "show", **cold)["is_ours"]
    assert len(cache(home, "ls", **cold)) == 3


async def test_no_turn_of_what_is_deleted_is_left(tmp_path: Path):
    """Whether no server has the store, or one has it whose model is not loaded."""
    write_model(tmp_path / "models" / "m")

    def turns() -> set[bytes]:
        return turns_below(tmp_path / "kv")

    sessions = ("one", None, "two", "three", None)
    async with serving(tmp_path) as (supervisor, kv):
        for number, session in enumerate(sessions):
            said = Message(role="user", text=f"{number} {TEXT}")
            wish = CacheParams(session_id=session)
            await ask(supervisor, ChatPrompt(messages=(said,)), max_tokens=4, cache=wish)
        await kept(kv, len(sessions))
        await until(lambda: len(turns()) == len(sessions), "all turns are there")
    nameless = [one["id"] for one in cache(tmp_path, "ls") if not one["is_named"]]
    for number, name in enumerate(["one", nameless[0]], 1):
        cache(tmp_path, "rm", name)
        assert len(turns()) == len(sessions) - number
    async with serving(tmp_path) as (_, kv):
        await kv.settled()
        contents = KvContents(kv, kv.settings)
        for number, name in enumerate(["two", nameless[1]], 3):
            await contents.remove(await contents.named(name))
            assert len(turns()) == len(sessions) - number
    cache(tmp_path, "rm", "--model", "m")
    assert turns() == set()
