"""Whose a store is: one server owns it, its directory is private, and it holds a secret.

The lock is the kernel's and goes with the process, also on `kill -9`; its file stays for ever.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil
import structlog

from store.disk import PRIVATE_DIRECTORY, PRIVATE_FILE, make_directory, new_file, sync_directories
from store.disk import reported as system_reported
from store.errors import StoreError, StoreFailed, StoreLocked

LOCK = "LOCK"
SECRET = "secret"  # noqa: S105
SECRET_BYTES = 32

_NETWORK = frozenset(
    "9p afpfs afs ceph cifs davfs fuse.sshfs glusterfs lustre nfs nfs4 smb3 smbfs webdav".split()
)

log = structlog.stdlib.get_logger("store.ownership")


class Mount(NamedTuple):
    """Where a filesystem is mounted, and of what kind it is."""

    path: str
    kind: str


def mounts() -> list[Mount]:
    """All mounted filesystems of this machine."""
    return [Mount(one.mountpoint, one.fstype) for one in psutil.disk_partitions(all=True)]


class Ownership:
    """The lock on a store, held until `close`. Without it the store may only be read."""

    def __init__(self, root: Path, lock: int, secret: bytes, *, is_owner: bool) -> None:
        self.root = root
        self.secret = secret
        self.is_owner = is_owner
        self._lock = lock

    @property
    def is_in_place(self) -> bool:
        """Whether the lock that is held is still the one that others find in the store."""
        try:
            found, held = (self.root / LOCK).stat(), os.fstat(self._lock)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        """Let another server own the store."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def take(
    root: Path,
    list_mounts: Callable[[], Iterable[Mount]] = mounts,
    secret: bytes | None = None,
) -> Ownership:
    """Make or open the store at `root`, and own it when nobody else does.

    The owner mends permissions that are too wide; without the lock nothing that is there is
    changed. `secret` is used where the store has none yet.

    Raises:
        StoreFailed: it belongs to another user, lies on a network, or the system refuses.
    """
    refuse_network(root, list_mounts)
    with system_reported(root):
        for path in (root, root / LOCK, root / SECRET):
            if path.exists():
                _refuse_strangers(path)
        if not root.exists():
            make_directory(root)
        lock = _open_lock(root / LOCK)
    try:
        with system_reported(root / LOCK):
            is_owner = _try_lock(lock)
        if is_owner:
            _close_to_others(root)
        else:
            log.warning("store_is_read_only", root=str(root), reason="another server owns it")
        secret = _read_secret(root, secret, may_make=is_owner)
    except StoreError:
        os.close(lock)
        raise
    return Ownership(root, lock, secret, is_owner=is_owner)


def _close_to_others(root: Path) -> None:
    """See to it that only we can look into what we own. Raises StoreFailed."""
    make_directory(root)
    with system_reported(root):
        for path in (root / LOCK, root / SECRET):
            if path.exists():
                path.chmod(PRIVATE_FILE)


def make_home(home: Path, list_mounts: Callable[[], Iterable[Mount]] = mounts) -> None:
    """Make the directory of a database if it is missing; one that exists keeps its permissions.

    Raises:
        StoreFailed: it lies on a network, or the system refuses.
    """
    refuse_network(home, list_mounts)
    if not home.is_dir():
        make_directory(home)


def hold(path: Path) -> int:
    """A descriptor that locks the file `path` until it is closed; the file stays for ever.

    Raises:
        StoreLocked: another process holds it.
        StoreFailed: the system refuses.
    """
    with system_reported(path):
        lock = _open_lock(path)
        if _try_lock(lock):
            return lock
        os.close(lock)
    raise StoreLocked(f"another server owns {path.parent}")


def refuse_network(path: Path, list_mounts: Callable[[], Iterable[Mount]] = mounts) -> None:
    """Raises StoreFailed when a path is, or would be, on a network."""
    with system_reported(path):
        kind = _filesystem_of(path.resolve(), list_mounts())
    if kind in _NETWORK:
        raise StoreFailed(f"{path} is on a network ({kind}), where SQLite's WAL is not safe")


def _refuse_strangers(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise StoreFailed(f"{path} belongs to user {status.st_uid}, not to us")
    if stat.S_IMODE(status.st_mode) & ~PRIVATE_DIRECTORY:
        log.warning("store_was_open_to_others", path=str(path))


def _filesystem_of(path: Path, mounted: Iterable[Mount]) -> str:
    """The kind of the filesystem that `path` is on, or would be."""
    holders = [mount for mount in mounted if path.is_relative_to(mount.path)]
    return max(holders, key=lambda mount: len(mount.path)).kind.lower() if holders else ""


def _open_lock(path: Path) -> int:
    """The file that is locked, made if it is missing. A disk that may only be read has owners too.

    Raises:
        OSError: the system refuses.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, flags | os.O_RDONLY)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def secret_of(root: Path) -> bytes:
    """That of the store at `root`; empty where there is none yet. Nothing is changed."""
    try:
        found = (root / SECRET).read_bytes()
    except OSError:
        return b""
    return found if len(found) == SECRET_BYTES else b""


def _read_secret(root: Path, wanted: bytes | None, *, may_make: bool) -> bytes:
    """The store's secret. A new one makes older slots unknown: nothing matches them any more."""
    path = root / SECRET
    with system_reported(path):
        found = path.read_bytes() if path.exists() else b""
    if len(found) == SECRET_BYTES:
        return found
    if not may_make:
        raise StoreFailed(f"{path} is not there; only the owner of the store makes it")
    if found:
        log.warning("secret_was_damaged", num_bytes=len(found))
    temporary = path.with_name(f"{SECRET}.new")
    secret = wanted or os.urandom(SECRET_BYTES)
    with new_file(temporary, SECRET_BYTES) as file:
        file.write(secret)
    with system_reported(path):
        temporary.rename(path)
    sync_directories([root])
    return secret
