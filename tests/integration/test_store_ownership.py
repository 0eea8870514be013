"""Whose a store is: two servers, permissions, networks, and its secret."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from store.errors import StoreFailed
from store.ownership import Mount, take

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
        secret, first = one.secret, one.keyed_hash("conversation", b"hello")
        assert (len(secret), len(first)) == (32, 16)
        assert one.keyed_hash("pin", b"hello") != first
    with take(tmp_path / "one") as again:
        assert again.keyed_hash("conversation", b"hello") == first
    with take(tmp_path / "two") as two:
        assert two.keyed_hash("conversation", b"hello") != first


def test_a_secret_that_was_cut_off_is_replaced(tmp_path: Path):
    take(tmp_path / "store").close()
    (tmp_path / "store" / "secret").write_bytes(b"short")
    with take(tmp_path / "store") as ownership:
        assert len(ownership.secret) == 32
        (tmp_path / "store" / "secret").unlink()
        with pytest.raises(StoreFailed, match="only the owner"):
            take(tmp_path / "store")
