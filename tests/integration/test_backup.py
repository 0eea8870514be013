"""Backup and restore, step by step as docs/operations.md says, while the server runs."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from tests.conversation import Conversation, wait_until_saved
from tests.running_server import RunningServer, hearth, running

CONFIG = "prewarm_share = 0"
DATABASES = ("history.sqlite3", "kv/index.db")


def back_up(home: Path, copy: Path) -> None:
    """The databases by SQLite, which needs no stop; then the files, which never change."""
    copy.mkdir(mode=0o700)
    (copy / "kv").mkdir(mode=0o700)
    for name in DATABASES:
        paths = home / name, copy / name
        with closing(sqlite3.connect(paths[0])) as one, closing(sqlite3.connect(paths[1])) as two:
            one.backup(two)
        (copy / name).chmod(0o600)
    for name in ("kv/secret", "hearth.toml"):
        shutil.copy2(home / name, copy / name)
    for folder in ("heads", "slots"):
        if (home / "kv" / folder).exists():
            shutil.copytree(home / "kv" / folder, copy / "kv" / folder, copy_function=taken_along)


def taken_along(file: str, copy: str) -> None:
    """What was being written when it was listed has another name by now, and is no part of it."""
    with suppress(FileNotFoundError):
        shutil.copy2(file, copy)


def ask_agent(server: RunningServer) -> int:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return server.post("/v1/agents/helper/generate", body).json()["agent"]["turn"]


def history_of(server: RunningServer) -> tuple[float, ...]:
    assert 0 < server.figure("hearth_history_bytes") < server.figure("hearth_history_max_bytes")
    return tuple(server.figure(f"hearth_history_{name}") for name in ("up", "agents", "turns"))


def test_a_conversation_goes_on_warm_in_another_home_from_a_copy_of_a_running_server(
    tmp_path: Path,
):
    talk = Conversation(60)
    copy = tmp_path / "copy"
    with running(tmp_path / "home", config=CONFIG) as server:
        first = talk.ask(server, session_id="river")
        server.post("/v1/agents", {"id": "helper", "system": "Be brief."})
        assert ask_agent(server) == 1
        assert history_of(server) == (1, 1, 1)
        wait_until_saved(server, first.num_prompt_tokens)
        back_up(tmp_path / "home", copy)
        assert ask_agent(server) == 2
    shutil.rmtree(tmp_path / "home")
    with running(copy) as server:
        again = talk.ask(server, session_id="river")
        assert again.tier == "warm"
        assert again.num_cached_tokens >= first.num_prompt_tokens - 4
        assert history_of(server) == (1, 1, 1), "what was said after the copy is not in it"
        assert ask_agent(server) == 2, "the copy was made after the first turn"


def kept_bytes(home: Path) -> dict[str, bytes]:
    """What must not change: slots, heads and the databases, without what SQLite keeps beside."""
    files = [*home.glob("kv/slots/**/*.safetensors"), *home.glob("kv/heads/**/*.safetensors")]
    files += [home / name for name in DATABASES]
    return {str(file.relative_to(home)): file.read_bytes() for file in files if file.is_file()}


def test_what_a_newer_release_wrote_is_left_as_it_is_by_an_older_one(tmp_path: Path):
    talk, home = Conversation(60), tmp_path / "home"
    with running(home, config=CONFIG) as server:
        first = talk.ask(server, session_id="river")
        server.post("/v1/agents", {"id": "helper", "system": "Be brief."})
        wait_until_saved(server, first.num_prompt_tokens)
    for name in DATABASES:
        with closing(sqlite3.connect(home / name)) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            database.execute(f"PRAGMA user_version = {version + 1}")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = kept_bytes(home)
    assert len(before) > 3
    with running(home) as server:
        again = talk.ask(server, session_id="river")
        assert again.tier in ("none", "hot")
        health = server.get("/health/ready").json()
        assert (health["cache"], health["history"]) == ("degraded", "degraded")
        assert server.get("/v1/agents/helper").status_code == 503
        assert server.figure("hearth_history_up") == 0
        assert server.figure("hearth_history_degraded") == 1
        assert "\nhearth_kv_store_up 0.0\n" in server.get("/metrics").text
    for words in (("cache", "rm", "--all", "--yes"), ("cache", "gc"), ("db", "upgrade")):
        assert hearth(*words, HEARTH_HOME=str(home)).returncode == 1, words
    assert kept_bytes(home) == before
