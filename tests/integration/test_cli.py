"""The command line against a running server, and without one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Static

from api.cli.connection import ServerLink
from api.cli.top import Top
from runtime.settings import Settings
from tests.running_server import ROOT, RunningServer, environment, free_port, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server


def hearth(home: Path, port: int, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "api", *words],
        env=environment({"HEARTH_HOME": str(home), "HEARTH_PORT": str(port)}),
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def told(server: RunningServer, *words: str, stdin: str = "") -> str:
    done = hearth(server.home, server.port, *words, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_json(server: RunningServer, *words: str) -> Any:
    return json.loads(told(server, *words, "--json"))


def test_status_says_where_the_server_is_and_what_it_has_loaded(server: RunningServer):
    text = told(server, "status")
    assert f"{server.url} (ready)" in text
    assert "hearth-tiny" in text
    status = as_json(server, "status")
    assert status["health"]["status"] == "ready"
    assert [one["id"] for one in status["models"]] == ["hearth-tiny"]


def test_models_and_their_states_are_listed(server: RunningServer):
    assert "CONTEXT" in told(server, "models").splitlines()[0]
    assert as_json(server, "ps")[0]["state"] in ("ready", "busy")
    assert {"hearth-tiny"} <= {one["id"] for one in as_json(server, "models")}


def test_a_model_is_pinned_unloaded_and_loaded_by_name(server: RunningServer):
    assert as_json(server, "pin", "hearth-tiny")["pinned"] is True
    assert as_json(server, "unpin", "hearth-tiny")["pinned"] is False
    told(server, "unload", "hearth-tiny")
    assert as_json(server, "load", "hearth-tiny")["state"] in ("ready", "busy")
    assert told(server, "restart", "hearth-tiny").startswith("hearth-tiny is ")


def test_a_model_that_does_not_exist_is_the_servers_own_refusal(server: RunningServer):
    done = hearth(server.home, server.port, "load", "hearth-tini")
    assert done.returncode == 1
    assert "Did you mean hearth-tiny" in done.stderr


def test_a_conversation_shows_what_each_turn_reused(server: RunningServer):
    text = told(server, "chat", "--max-tokens", "40", stdin="Hello!\nAnd again?\n")
    first, second = [line for line in text.splitlines() if line.startswith("[")]
    assert "tokens reused" in first
    reused, total = (int(second.split()[i].strip("[")) for i in (0, 2))
    assert 0 < reused < total
    assert "(hot)" in second


def test_one_message_is_answered_and_can_be_had_as_json(server: RunningServer):
    turn = as_json(server, "chat", "--think", "--max-tokens", "200", "Hello!")
    assert turn["text"]
    assert turn["reasoning"]
    assert turn["output_tokens"] > 0


def test_the_settings_in_force_are_shown_without_their_secrets(server: RunningServer):
    shown = as_json(server, "config", "show", "--admin-key", "sha256:" + "0" * 64)
    assert shown["port"] == server.port
    assert shown["admin_key"] == "…"
    assert "can be used" in told(server, "config", "check")
    wrong = hearth(server.home, server.port, "config", "check", "--default-model", "nobody")
    assert wrong.returncode == 2
    assert "nobody" in wrong.stderr


def test_the_database_of_a_running_server_is_left_alone(server: RunningServer):
    done = hearth(server.home, server.port, "db", "check")
    assert done.returncode == 1
    assert "server has the store open" in done.stderr


def test_the_live_view_draws_what_runs(server: RunningServer):
    async def look() -> tuple[int, str, str]:
        view = Top(ServerLink(Settings(home=server.home, port=server.port)))
        async with view.run_test() as pilot:
            await pilot.pause()
            await view.refill()
            table = view.query_one("#models", DataTable)
            texts = [str(view.query_one(name, Static).render()) for name in ("#tiers", "#work")]
            return table.row_count, texts[0], texts[1]

    rows, tiers, work = asyncio.run(look())
    assert rows == 1
    assert tiers.startswith("hot ")
    assert "tokens/s" in work


@pytest.mark.parametrize("words", [("status",), ("ps",), ("top",), ("chat", "Hi"), ("load", "m")])
def test_without_a_server_every_command_says_so(tmp_path: Path, words: tuple[str, ...]):
    done = hearth(tmp_path, free_port(), *words)
    assert done.returncode == 3
    assert "No server answers at http://127.0.0.1" in done.stderr


def test_what_needs_no_server_works_without_one(tmp_path: Path):
    assert hearth(tmp_path, 1, "version").stdout.startswith("hearth ")
    assert "_shtab_hearth" in hearth(tmp_path, 1, "completion", "bash").stdout
    assert "sha256:" in hearth(tmp_path, 1, "key").stdout
    assert "ExecStart" in hearth(tmp_path, 1, "service", "show").stdout
    findings = json.loads(hearth(tmp_path, free_port(), "doctor", "--json").stdout)
    assert {"Python", "mlx", "Port"} <= {one["subject"] for one in findings}
    assert hearth(tmp_path, 1, "db", "check").returncode == 1
