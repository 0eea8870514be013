"""`hearth doctor` finds what is really wrong, with one remedy each."""

from __future__ import annotations

import json
import os
import resource
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.opened import open_blocks
from runtime.cache.tending import terms_of
from runtime.config.settings import Settings
from runtime.config.tables import Location
from store.errors import ColdAway
from store.file_kinds import HISTORY
from tests.running_server import ROOT, environment, free_port, hearth


def examined(
    home: Path, *words: str, port: int | None = None, before: Callable[[], None] | None = None
) -> tuple[int, dict[str, Any]]:
    """Its exit code and findings by subject, in a process of its own that `before` prepares."""
    port = port or free_port()
    variables = {"HEARTH_HOME": str(home), "HEARTH_PORT": str(port), "HOME": str(home)}
    if before is None:
        done = hearth("doctor", "--json", *words, **variables)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "api", "doctor", "--json", *words],
            env=environment(variables),
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=before,
            timeout=300,
            check=False,
        )
    assert done.stdout, done.stderr
    return done.returncode, {one["subject"]: one for one in json.loads(done.stdout)}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """One with nothing wrong."""
    home = tmp_path / "home"
    (home / "kv").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    return home


def remedies(found: dict[str, Any]) -> set[str]:
    """BLAS and the disk are the machine's own."""
    wrong = {name for name, one in found.items() if one["remedy"] is not None}
    return wrong - {"BLAS", "Disk space", "Disk speed"}


def test_what_ranks_keep_is_told(home: Path):
    text = """[models.hearth-tiny]
ranks = 2
backend = "nccl"
hosts = ["10.0.0.1", "10.0.0.2"]
"""
    (home / "hearth.toml").write_text(text)
    _, found = examined(home)
    assert found["Ranks"]["fact"] == (
        "2 of hearth-tiny over nccl, which was never measured; its KV cache is kept "
        "on the disk of each machine, here alone with a cap"
    )


def test_a_good_setup_has_no_findings(home: Path):
    _, found = examined(home)
    assert remedies(found) == set()
    wanted = {"Python", "mlx", "BLAS", "SQLite", "Settings", "Home", "Permissions", "Disk space"}
    wanted |= {
        "Vision",
        "Disk speed",
        "Store",
        "History",
        "Memory",
        "Open files",
        "Port",
        "Service",
    }
    assert wanted <= found.keys()
    assert "synced" in found["Disk speed"]["fact"]


def test_everything_that_is_wrong_is_found_at_once(home: Path):
    home.chmod(0o755)
    (home / "kv" / "index.db").write_bytes(b"no database" * 999)
    with closing(sqlite3.connect(home / "history.sqlite3")) as newer:
        newer.execute("CREATE TABLE a (b)")
        newer.execute(f"PRAGMA application_id = {HISTORY.application_id}")
        newer.execute(f"PRAGMA user_version = {HISTORY.version + 1}")
    unit = home / ".config" / "systemd" / "user" / "hearth.service"
    if sys.platform == "linux":
        unit.parent.mkdir(parents=True)
        unit.write_text("[Service]\nTimeoutStopSec=1\n")

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (600, hard))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--memory-budget", str(1 << 47), "--default-model", "nobody")
        code, found = examined(home, *flags, port=port, before=lower)
    assert code == 1
    wanted = {"Permissions", "Store", "History", "Memory", "Limits", "Port", "Settings"}
    assert remedies(found) == wanted | ({"Service"} if sys.platform == "linux" else set())
    assert found["Permissions"]["remedy"] == f"chmod 700 {home}"
    assert "newer release" in found["History"]["remedy"]
    assert f"lsof -i :{port}" in found["Port"]["remedy"]
    assert "nobody" in found["Settings"]["fact"]
    assert "ulimit -t" in found["Limits"]["remedy"]


@pytest.mark.parametrize("where", ["in the way/cold", "s3://bucket/cold", "s4://bucket"])
def test_a_cold_store_that_cannot_be_used_is_a_finding(
    home: Path, where: str, monkeypatch: pytest.MonkeyPatch
):
    (home / "in the way").write_text("")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    named = where if "://" in where else str(home / where)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        code, found = examined(home, "--cold-store", named)
    assert (code, "cold_store" in found["Cold store"]["remedy"]) == (1, True)


def test_a_cold_store_that_can_be_used_is_none(home: Path):
    _, found = examined(home, "--cold-store", str(home / "cold"))
    assert found["Cold store"]["remedy"] is None


def test_a_cold_store_of_another_home_is_a_finding_until_it_is_taken(home: Path):
    cold = home / "cold"
    flags = ("--cold-store", str(cold))
    other = home.parent / "other"
    other.mkdir()
    for one in (other, home):
        chosen = Settings(home=one, cold_store=Location(cold))
        store = open_blocks(chosen.kv_root, terms_of(chosen))
        assert store.cold is not None
        with suppress(ColdAway):
            list(store.cold.slots())
        store.close()
    code, found = examined(home, *flags)
    assert (code, "another Hearth" in found["Cold store"]["fact"]) == (1, True)
    assert hearth("cold", "show", *flags, HEARTH_HOME=str(home)).returncode == 1
    taken = hearth("cold", "take", *flags, HEARTH_HOME=str(home))
    assert (taken.returncode, "this home's" in taken.stdout) == (0, True)
    assert hearth("cold", "show", *flags, HEARTH_HOME=str(home)).returncode == 0
    assert examined(home, *flags)[1]["Cold store"]["remedy"] is None
    assert hearth("cold", "show", *flags, HEARTH_HOME=str(other)).returncode == 1


def test_a_configuration_that_cannot_be_read_is_a_finding(home: Path):
    (home / "hearth.toml").write_text("port = [")
    code, found = examined(home)
    assert code == 1
    assert "not valid TOML" in found["Config"]["fact"]


def test_a_home_that_cannot_be_written_is_a_finding(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    code, found = examined(tmp_path / "file" / "home")
    assert (code, "Home" in remedies(found)) == (1, True)
    assert "--home" in found["Home"]["remedy"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_home_is_a_finding(home: Path):
    home.chmod(0o500)
    _, found = examined(home)
    assert "cannot be written" in found["Home"]["fact"]


def test_models_that_cannot_be_used_are_named(home: Path):
    broken = home / "models" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    (home / "hearth.toml").write_text('models_dir = "models"\n[models.gone]\npath = "/nowhere"\n')
    code, found = examined(home)
    assert code == 1
    assert remedies(found) == {"Model broken", "Model gone"}
    assert "config.json" in found["Model broken"]["fact"]
    done = hearth("config", "check", "--json", HEARTH_HOME=str(home))
    assert json.loads(done.stdout)["left_out"].keys() == {"broken", "gone"}
    assert json.loads(done.stdout)["misnamed"] == ["gone"]
    assert done.returncode == 1
    (home / "hearth.toml").write_text('models_dir = "elsewhere"\n')
    _, found = examined(home)
    assert remedies(found) == {"Settings"}
    assert f"models_dir is {home / 'elsewhere'}, which does not exist" in found["Settings"]["fact"]
