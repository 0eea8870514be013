"""Whose a home and a store are: two servers, permissions, networks, and a store's secret."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from runtime.config.home import Home
from runtime.errors import HomeTaken
from runtime.keys import digest_of, read_admin_token
from store.errors import StoreFailed
from store.keyed_names import keyed_hash
from store.ownership import Mount, take
from tests.running_server import CHAT, RunningServer, hearth, running
from tests.waiting import until

HOLDER = """
import sys
from pathlib import Path
from store.ownership import take
ownership = take(Path(sys.argv[1]))
print(ownership.is_owner, flush=True)
sys.stdin.read()
"""


def hold(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_a_second_server_may_only_read_until_the_first_is_killed(tmp_path: Path):
    root = tmp_path / "store"
    with hold(root) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        with take(root) as second:
            assert not second.is_owner
        first.send_signal(signal.SIGKILL)
        first.wait()
    with take(root) as third:
        assert third.is_owner
        with take(root) as fourth:
            assert not fourth.is_owner
            assert fourth.secret == third.secret


def test_of_many_that_start_at_once_one_owns_the_store(tmp_path: Path):
    holders = [hold(tmp_path / "store") for _ in range(6)]
    try:
        said = [holder.stdout.readline() for holder in holders if holder.stdout]
        assert said.count("True\n") == 1
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_modes_are_private_and_mended(tmp_path: Path):
    root = tmp_path / "store"
    take(root).close()
    root.chmod(0o755)
    (root / "secret").chmod(0o644)
    take(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_store_of_somebody_else_is_refused(tmp_path: Path):
    root = tmp_path / "store"
    take(root).close()
    os.chown(root, 12345, 12345)
    with pytest.raises(StoreFailed, match="belongs to user 12345"):
        take(root)


def test_a_store_on_a_network_is_refused(tmp_path: Path):
    def mounted() -> list[Mount]:
        return [Mount("/", "ext4"), Mount(str(tmp_path), "nfs4"), Mount(f"{tmp_path}x", "ext4")]

    with pytest.raises(StoreFailed, match="on a network"):
        take(tmp_path / "store", mounted)
    assert list(tmp_path.iterdir()) == []
    take(tmp_path / "store", lambda: [Mount("/", "nfs"), Mount(str(tmp_path), "ext4")]).close()


def test_a_place_where_nothing_can_be_made_is_an_error_of_the_store(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    for root in (tmp_path / "file", tmp_path / "file" / "store", Path("/proc/no/store")):
        with pytest.raises(StoreFailed):
            take(root)


def test_the_secret_is_made_once_and_its_hashes_depend_on_it(tmp_path: Path):
    with take(tmp_path / "one") as one:
        secret, first = one.secret, keyed_hash(one.secret, "conversation", b"hello")
        assert (len(secret), len(first)) == (32, 16)
        assert keyed_hash(one.secret, "pin", b"hello") != first
    with take(tmp_path / "one") as again:
        assert keyed_hash(again.secret, "conversation", b"hello") == first
    with take(tmp_path / "two") as two:
        assert keyed_hash(two.secret, "conversation", b"hello") != first


def test_a_secret_that_was_cut_off_is_replaced(tmp_path: Path):
    take(tmp_path / "store").close()
    (tmp_path / "store" / "secret").write_bytes(b"short")
    with take(tmp_path / "store") as ownership:
        assert len(ownership.secret) == 32
        (tmp_path / "store" / "secret").unlink()
        with pytest.raises(StoreFailed, match="only the owner"):
            take(tmp_path / "store")


KEYED = f"""
log_file = "hearth.log"
[api_keys]
alice = "{digest_of("alice-key")}"
"""
"""The command line needs the key that its server left for it."""


def snapshot(home: Path) -> dict[str, tuple[bytes, int, int]]:
    """Of everything in a home: bytes, when it was changed, and what it is and who may read it."""
    found: dict[str, tuple[bytes, int, int]] = {}
    for path in (home, *home.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(home))] = (content, status.st_mtime_ns, status.st_mode)
    return found


def stopped(process: psutil.Process) -> bool:
    """No thread of it runs any more: each one stops when it comes back from what it asked for."""
    if not Path("/proc/self/task").is_dir():
        return process.status() == psutil.STATUS_STOPPED
    threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(") ")[2].startswith("T") for thread in threads)


@asynccontextmanager
async def frozen(server: RunningServer) -> AsyncGenerator[None]:
    """The server does nothing meanwhile, so that every change to its home is somebody else's."""
    own = psutil.Process(server.process.pid)
    own.suspend()
    await until(lambda: stopped(own), "the server's stop")
    children = own.children(recursive=True)
    for child in children:
        child.suspend()
    await until(lambda: all(map(stopped, children)), "the stop of its processes")
    try:
        yield
    finally:
        for process in (own, *children):
            process.resume()


async def test_a_second_server_on_a_home_changes_nothing_in_it(tmp_path: Path):
    with running(tmp_path, config=KEYED) as first:
        place = {"HEARTH_HOME": str(tmp_path), "HEARTH_PORT": str(first.port)}
        body = {"model": "hearth-tiny", "messages": [{"role": "user", "content": "Hi"}]}
        answer = first.request("POST", CHAT, json=body, headers={"x-api-key": "alice-key"})
        assert answer.status_code == 200
        token = read_admin_token(tmp_path)
        async with frozen(first):
            before = snapshot(tmp_path)
            assert {"admin.token", "history.sqlite3", "hearth.log", "kv"} <= before.keys()
            second = hearth("serve", **place | {"HEARTH_PORT": "0"})
            after = snapshot(tmp_path)
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        assert changed == []
        assert second.returncode == 1
        assert "--home" in second.stderr
        assert str(tmp_path) in second.stderr
        assert read_admin_token(tmp_path) == token
        assert hearth("cache", "stats", **place).returncode == 0
    with running(tmp_path, config=KEYED):
        assert read_admin_token(tmp_path) not in (token, None)


def test_a_home_goes_to_the_next_server_when_its_own_is_gone(tmp_path: Path):
    first = Home.take(tmp_path)
    with pytest.raises(HomeTaken):
        Home.take(tmp_path)
    token = first.new_admin_token()
    assert read_admin_token(tmp_path) == token
    first.close()
    second = Home.take(tmp_path)
    assert second.new_admin_token() != token
    second.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open what it may not")
def test_a_home_whose_lock_cannot_be_opened_may_be_anothers(tmp_path: Path):
    Home.take(tmp_path).close()
    (tmp_path / "server.lock").chmod(0)
    with pytest.raises(HomeTaken, match="EACCES"):
        Home.take(tmp_path)


def test_a_lock_that_is_no_file_is_not_taken_for_nobodys(tmp_path: Path):
    (tmp_path / "server.lock").symlink_to("elsewhere")
    with pytest.raises(HomeTaken, match="ELOOP"):
        Home.take(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_where_nothing_can_be_written_nobody_owns_and_nothing_is_left(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    home = Home.take(tmp_path / "file" / "home")
    assert home.new_admin_token()
    assert read_admin_token(tmp_path / "file" / "home") is None
    home.close()


def test_who_may_only_read_a_store_changes_nothing_in_it(tmp_path: Path):
    root = tmp_path / "store"
    with take(root) as first:
        assert first.is_owner
        root.chmod(0o755)
        (root / "secret").chmod(0o644)
        before = snapshot(root)
        with take(root) as second:
            assert not second.is_owner
        assert snapshot(root) == before
