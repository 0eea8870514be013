"""What `hearth doctor` looks at on disk: room, speed, permissions, and the databases' health."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from api.cli.database import index_of
from api.cli.views import size
from runtime.cache.history import FILE as HISTORY_FILE
from runtime.cache.opened import cold_at
from runtime.config.settings import Settings
from store import ownership
from store.cold_owner import Claim
from store.database_file import check_whole, connect_reader
from store.errors import ColdForeign, IndexDamaged, StoreError, StoreTooNew
from store.file_kinds import HISTORY, FileKind
from store.ownership import secret_of

_LEAST_FREE_BYTES = 5_000_000_000
_LEAST_BYTES_PER_S = 50_000_000
_PROBE_BYTES = 32 << 20


class Finding(NamedTuple):
    """One thing that was looked at. Without a remedy it is as it should be."""

    subject: str
    fact: str
    remedy: str | None = None


def findings(settings: Settings) -> Iterator[Finding]:
    """In the order in which a server needs them."""
    home = _home(settings.home)
    yield home
    for subject, folder in (("Permissions", settings.home), ("KV permissions", settings.kv_root)):
        if folder.is_dir():
            yield _permissions(subject, folder)
    if home.remedy is None:
        yield _room(_existing(settings.kv_root))
        yield _speed(_existing(settings.kv_root))
    yield _place(settings.kv_root)
    if settings.cold_store is not None:
        yield _cold(settings.kv_root, settings.cold_store)
    yield _database("Store", *index_of(settings))
    history = _database("History", settings.home / HISTORY_FILE, HISTORY)
    yield history
    if history.remedy is None:
        yield from _set_aside(settings.home / HISTORY_FILE)


def _existing(path: Path) -> Path:
    """The path, or what of it is there."""
    return next(one for one in (path, *path.parents) if one.exists())


def _home(home: Path) -> Finding:
    return _writable("Home", home, "make it writable or choose another with --home")


def _cold(root: Path, where: str) -> Finding:
    is_bucket = "://" in where
    folder = Path(where)
    if not is_bucket and not folder.exists() and not folder.parent.is_dir():
        fact = f"{where} cannot be created: {folder.parent} does not exist"
        return Finding("Cold store", fact, "mount it, or name another directory in cold_store")
    try:
        cold = cold_at(where)
        seen = Claim(root, secret_of(root), where).look(cold)
        if is_bucket or seen.is_ours:
            cold.probe()
    except ColdForeign as error:
        remedy = (
            "each home needs a cold store of its own: use another prefix or directory in cold_store"
        )
        return Finding("Cold store", str(error), remedy)
    except StoreError as error:
        remedy = "correct cold_store, or the address and credentials that its AWS_… variables give"
        if not is_bucket:
            remedy = "mount it and make it writable, or name another directory in cold_store"
        return Finding("Cold store", f"{where} cannot be used: {error}", remedy)
    if not is_bucket and not seen.is_ours:
        remedy = "make it writable or name another directory in cold_store"
        return _writable("Cold store", folder, remedy)
    return Finding(
        "Cold store", f"{where} works" + (", and belongs to this home" if seen.is_ours else "")
    )


def _writable(subject: str, folder: Path, remedy: str) -> Finding:
    nearest = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Finding(subject, f"{nearest} cannot be written: {error.strerror}", remedy)
    return Finding(subject, f"{folder} can be written")


def _permissions(subject: str, folder: Path) -> Finding:
    status = folder.stat()
    if status.st_uid != os.geteuid():
        remedy = f"run Hearth as that user, or: chown -R {os.geteuid()} {folder}"
        return Finding(subject, f"{folder} belongs to user {status.st_uid}", remedy)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        fact = f"other users of this machine can read {folder} (mode {mode:o})"
        return Finding(subject, fact, f"chmod 700 {folder}")
    return Finding(subject, f"only you can read {folder}")


def _room(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    fact = f"{size(free_bytes)} free at {folder}"
    if free_bytes < _LEAST_FREE_BYTES:
        return Finding("Disk space", fact, "free some, or use another disk (kv_dir)")
    return Finding("Disk space", fact)


def _speed(folder: Path) -> Finding:
    """How fast bytes become durable there: that bounds how fast KV is written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            content = os.urandom(1 << 20) * (_PROBE_BYTES >> 20)
            started_s = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            rate = _PROBE_BYTES / (time.perf_counter() - started_s)
    except OSError as error:
        fact = f"writing to {folder} fails: {error.strerror}"
        return Finding("Disk speed", fact, "free some space, or use another disk (kv_dir)")
    fact = f"{size(rate)}/s written and synced at {folder}"
    if rate < _LEAST_BYTES_PER_S:
        return Finding("Disk speed", fact, "use a faster disk (kv_dir)")
    return Finding("Disk speed", fact)


def _place(root: Path) -> Finding:
    try:
        ownership.refuse_network(root)
    except StoreError as error:
        return Finding("KV directory", str(error), "use a directory on a local disk (kv_dir)")
    return Finding("KV directory", f"{root} is on a local disk")


def _set_aside(path: Path) -> Iterator[Finding]:
    """What of the history was damaged, until the operator says that he knows."""
    if not path.exists() or check_whole(path, HISTORY) < HISTORY.version:
        return
    with closing(connect_reader(path)) as connection:
        query = "SELECT name, num_agents, num_responses, is_whole FROM set_aside"
        rows = connection.execute(f"{query} WHERE NOT is_acknowledged").fetchall()
    for name, num_agents, num_responses, is_whole in rows:
        part = "all" if is_whole else "maybe not all"
        fact = (
            f"{name} was damaged and set aside; {num_agents} agents and {num_responses} stored "
            f"responses, {part} of what it held, were recovered"
        )
        yield Finding("History", fact, "hearth history acknowledge, when you have read this")


def _database(subject: str, path: Path, kind: FileKind) -> Finding:
    if not path.exists():
        return Finding(subject, f"{path} does not exist yet; the server creates it")
    try:
        version = check_whole(path, kind)
    except StoreTooNew as error:
        return Finding(subject, str(error), "install the newer release that wrote it")
    except IndexDamaged as error:
        remedy = "restart the server: it sets the damaged file aside and makes a new one"
        return Finding(subject, f"{path} is damaged: {error}", remedy)
    except StoreError as error:
        remedy = "make it readable for this user, or use another directory"
        return Finding(subject, f"{path} cannot be read: {error}", remedy)
    return Finding(subject, f"{path} is intact (schema {version})")
