"""`hearth db check|upgrade`."""

from __future__ import annotations

import argparse

import msgspec

from api.cli.quiet import log_errors_only
from api.cli.views import show
from runtime.errors import HearthError
from runtime.settings import Settings
from runtime.store_opening import open_store
from store.errors import StoreError, StoreLocked
from store.tables import SCHEMA_VERSION


class DatabaseView(msgspec.Struct):
    """What `hearth db --json` prints."""

    root: str
    schema_version: int
    is_intact: bool


def database(settings: Settings, arguments: argparse.Namespace) -> int:
    """Open the store's database, which brings it up to date, and look whether it is whole.

    Raises:
        HearthError: a server has it open, it is of a newer version, or it cannot be repaired.
    """
    log_errors_only()
    root = settings.kv_root
    if not root.is_dir():
        raise HearthError(f"There is no store at {root}; it is made when the server first runs.")
    try:
        store = open_store(root, settings.cold_store)
    except StoreLocked as error:
        message = "A server has the store open; it brought it up to date when it started."
        raise HearthError(message) from error
    except StoreError as error:
        raise HearthError(f"The store at {root} cannot be opened: {error}") from error
    try:
        found = DatabaseView(str(root), SCHEMA_VERSION, store.database.check())
    finally:
        store.close()
    state = "whole" if found.is_intact else "DAMAGED: it is made anew from the slots at next start"
    text = f"{found.root}: schema {found.schema_version}, {state}"
    show(found, text, as_json=arguments.as_json)
    return 0 if found.is_intact else 1
