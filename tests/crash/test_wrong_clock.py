"""Row 15: a clock that is set wrong and back expires nothing and keeps nothing for ever."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.server_store import store_at
from tests.running_server import RunningServer, hearth, started
from tests.store_samples import Said, say
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(
    shutil.which("faketime") is None, reason="faketime is not installed: the clock stays right"
)


def preloaded() -> str:
    """The library that `faketime` puts in front of a program, to be told of times by a file."""
    shown = ["faketime", "-f", "+0", "sh", "-c", 'printf %s "$LD_PRELOAD"']
    return subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def told_by(path: Path, offset: str) -> dict[str, str]:
    """The variables of a program whose wall clock a file sets, while it runs as well."""
    path.write_text(offset)
    return {
        "FAKETIME_TIMESTAMP_FILE": str(path),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "LD_PRELOAD": preloaded(),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with two conversations that live for a day, used a moment ago."""
    store = store_at(tmp_path / "kv")
    for number in (1, 2):
        say(store, Said(number, 300), ttl_s=86_400.0)
    store.close()
    return tmp_path / "kv"


def left(root: Path, offset: str, *, sleeps: bool = False, num_sweeps: int = 2) -> set[str]:
    """What is left after sweeps at another time; `sleeps` says that the time did pass."""
    return said(["tests.crash.clock_store", str(root), str(num_sweeps)], offset, sleeps=sleeps)


def said(words: list[str], offset: str, *, sleeps: bool = False) -> set[str]:
    """What a program of ours says at another time."""
    command = ["faketime", "-f", offset, sys.executable, "-m", *words]
    environment = os.environ | {"FAKETIME_DONT_FAKE_MONOTONIC": str(int(not sleeps))}
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("offset", ["+10y", pytest.param("-10y", marks=pytest.mark.soak), "+25h"])
def test_a_clock_that_is_set_wrong_and_right_again_expires_nothing(root: Path, offset: str):
    there = left(root, "+0")
    assert len(there) == 2
    assert left(root, offset) == there
    assert left(root, "+0") == there


@pytest.mark.parametrize("before", [pytest.param("+10y", marks=pytest.mark.soak), "-10y"])
def test_what_nobody_uses_for_its_time_goes_whatever_the_clock_said_before(root: Path, before: str):
    assert len(left(root, before)) == 2
    assert len(left(root, "+0")) == 2
    assert left(root, "+25h", sleeps=True) == set()


def test_jobs_keep_their_cadence_while_the_clock_is_set(tmp_path: Path):
    steps = ["+1y", "+0", "-1y", "+30d", "-30d"]
    environment = os.environ | told_by(tmp_path / "clock", "+0") | {"FAKETIME_NO_CACHE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.clock_jobs", *steps],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["steps_seen"] == len(steps)
    assert counts["daily"] == 1
    assert counts["short"] <= counts["allowed"]


def test_no_wrong_clock_takes_an_agent_and_time_that_passes_does(tmp_path: Path):
    def aged(new: str, offset: str, *, sleeps: bool = False) -> set[str]:
        words = ["tests.crash.clock_history", str(tmp_path), new]
        return said(words, offset, sleeps=sleeps)

    assert aged("a", "+0") == {"a"}
    assert aged("b", "+60d") == {"a", "b"}
    assert aged("c", "-10y") == {"a", "b", "c"}
    assert aged("d", "+31d", sleeps=True) == {"d", "expired-a", "expired-b", "expired-c"}


def is_open(server: RunningServer) -> bool:
    return server.get("/health/ready").json()["history"] == "ok"


@pytest.mark.soak
async def test_a_wrong_clock_takes_no_agent_and_what_expires_can_be_restored(tmp_path: Path):
    home, clock = tmp_path / "home", tmp_path / "clock"
    config = 'default_model = "hearth-tiny"\npreload = []\nkv_disk = false\n'
    variables = told_by(clock, "+0")
    with started(home, config=config, is_fresh=True, **variables) as server:
        server.wait_until_ready(300)
        await until(lambda: is_open(server), "the history is open", 180)
        for name, fields in (("kept", {}), ("short", {"ttl": 0.2})):
            made = server.post("/v1/agents", {"id": name, **fields})
            assert made.status_code in (200, 201), made.text
        server.stop()
    clock.write_text("+60d")
    with started(home, config=config, is_fresh=True, **variables) as server:
        server.wait_until_ready(300)
        await until(lambda: server.get("/v1/agents/short").status_code == 404, "it expired", 180)
        assert server.get("/v1/agents/kept").status_code == 200
        clock.write_text("-1y")
        assert server.get("/v1/agents/kept").status_code == 200
        own = {"HEARTH_HOME": str(home), "HEARTH_PORT": str(server.port)}
        shown = json.loads(hearth("history", "--json", **own).stdout)
        assert [one["id"] for one in shown["expired"]] == ["short"]
        assert shown["set_aside"] == []
        assert hearth("history", "restore", "nothing", **own).returncode == 1
        assert hearth("history", "restore", "short", **own).returncode == 0
        assert server.get("/v1/agents/short").status_code == 200
        server.stop()
