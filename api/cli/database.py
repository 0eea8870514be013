"""`hearth db check|upgrade`."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from api.cli.block_cache import open_blocks_of
from api.cli.views import log_errors_only, show
from runtime.cache.history import FILE, OpenHistory
from runtime.cache.opened import INDEX
from runtime.config.settings import Settings
from runtime.errors import HearthError
from store import file_kinds
from store.database_file import check_whole
from store.errors import StoreError, StoreLocked
from store.file_kinds import HISTORY, FileKind


class DatabaseView(msgspec.Struct):
    """One file. `error` says why it cannot be used; then its schema may be unknown."""

    path: str
    schema_version: int | None = None
    known_version: int = 0
    error: str | None = None


class DatabasesView(msgspec.Struct):
    """What `hearth db --json` prints."""

    is_intact: bool
    databases: list[DatabaseView]


def database(settings: Settings, arguments: argparse.Namespace) -> int:
    """Look whether the databases are whole, and change nothing; if they are, bring them up to date.

    Raises:
        HearthError: there is none, or those that are to be changed cannot be opened.
    """
    log_errors_only()
    index, kind = index_of(settings)
    kinds = {index: kind, settings.home / FILE: HISTORY}
    there = {path: kind for path, kind in kinds.items() if path.exists()}
    if not there:
        home = settings.home
        raise HearthError(f"There is no database in {home}; it is made when the server first runs.")
    found = _look(there)
    if arguments.action == "upgrade" and found.is_intact:
        _upgrade(settings, there)
        found = _look(there)
    show(found, "\n".join(map(_line, found.databases)), as_json=arguments.as_json)
    return 0 if found.is_intact else 1


def index_of(settings: Settings) -> tuple[Path, FileKind]:
    """The database of the KV on disk."""
    return settings.kv_root / INDEX, file_kinds.INDEX


def _upgrade(settings: Settings, there: dict[Path, FileKind]) -> None:
    """As a start does it, with a copy of what is older."""
    try:
        if file_kinds.INDEX in there.values():
            open_blocks_of(settings).close()
        if HISTORY in there.values():
            OpenHistory(settings.home).close()
    except StoreLocked as error:
        message = "A server has the store open; it brought it up to date when it started."
        raise HearthError(message) from error
    except StoreError as error:
        raise HearthError(f"What is in {settings.home} cannot be upgraded: {error}") from error


def _look(there: dict[Path, FileKind]) -> DatabasesView:
    views = [_looked_at(path, kind) for path, kind in there.items()]
    return DatabasesView(all(view.error is None for view in views), views)


def _looked_at(path: Path, kind: FileKind) -> DatabaseView:
    try:
        return DatabaseView(str(path), check_whole(path, kind), kind.version)
    except StoreError as error:
        return DatabaseView(str(path), None, kind.version, str(error))


def _line(view: DatabaseView) -> str:
    if view.error is not None:
        return f"{view.path}: {view.error}"
    is_older = (view.schema_version or 0) < view.known_version
    older = f"; `hearth db upgrade`, or the next start, makes it {view.known_version}"
    return f"{view.path}: whole, schema {view.schema_version}{older if is_older else ''}"
